"""Trained Keras models as files to serve: Keras' own format and SavedModel, preprocessing inside."""

from __future__ import annotations

import os

import keras
import tensorflow as tf

from trainers.common import paths


def write(model: keras.Model, folder: str) -> list[str]:
    """Write model.keras and saved_model/ into ``folder``; returns their names.

    ``model`` must have been built outside any strategy, in float32.
    """
    names = ["model.keras", "saved_model"]
    with paths.local_folder(folder) as local:
        model.save(os.path.join(local, names[0]))
        # Spelt out, since Keras would ask for float32 whatever the model's input is.
        signature = [tf.TensorSpec(image.shape, image.dtype, "images") for image in model.inputs]
        model.export(os.path.join(local, names[1]), format="tf_saved_model", verbose=False, input_signature=signature)
    return names
