"""Export trained Keras models for serving, in Keras' format and as SavedModel, including the preprocessing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from trainers.common.files import UserError, complete_files

_1980 = 315532800  # seconds since 1970; model.keras is a zip file, which cannot hold an earlier time
Decode = Callable[[tf.Tensor], tf.Tensor]


def write(model: keras.Model, folder: str, decode: Decode | None = None) -> list[str]:
    """Write model.keras and saved_model/ into ``folder``, each when it is complete; returns their names.

    ``model`` must be built outside any strategy, in float32. ``decode`` converts a decoded image of any size to the
    model's input. With it, the SavedModel also has the signature ``serve_files``, from ``image_bytes`` to
    probabilities; TensorFlow Serving and Vertex AI decode JSON inputs from base64 if their name ends in ``_bytes``.
    Raises :class:`UserError` if the disk is full, or if the clock is before 1980.
    """
    names = ["model.keras", "saved_model"]
    again = "run again: with --checkpoint-dir that takes the last test and the export only"
    if time.time() < _1980:
        raise UserError(f"{folder}: the model cannot be exported with a clock before 1980: set the clock and {again}")
    try:
        with complete_files(folder) as local:
            model.save(os.path.join(local, names[0]))
            _archive(model, decode).write_out(os.path.join(local, names[1]), verbose=False)
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rpartition("}} ")[2]
        raise UserError(f"{folder}: the model cannot be exported ({reason}); make room and {again}") from None
    return names


def _archive(model: keras.Model, decode: Decode | None) -> keras.export.ExportArchive:
    archive = keras.export.ExportArchive()
    archive.track(model)
    # Explicit, because Keras would declare float32 for every input.
    (image,) = model.inputs
    images = tf.TensorSpec(image.shape, image.dtype, "images")
    archive.add_endpoint("serve", lambda images: model(images, training=False), [images])
    if decode:
        files = tf.TensorSpec([None], tf.string, "image_bytes")
        archive.add_endpoint("serve_files", _of_files(model, decode), [files])
    return archive


def _of_files(model: keras.Model, decode: Decode) -> Callable[[tf.Tensor], Any]:
    (image,) = model.inputs
    pixels = tf.TensorSpec(image.shape[1:], tf.uint8)

    def answer(image_bytes: tf.Tensor) -> Any:
        decoded = tf.map_fn(lambda one: _bytes(decode(_image(one))), image_bytes, fn_output_signature=pixels)
        return model(decoded, training=False)

    return answer


def _image(content: tf.Tensor) -> tf.Tensor:
    """Return ``uint8[height, width, 3]`` of a JPEG, PNG, GIF or BMP file."""
    return tf.ensure_shape(tf.io.decode_image(content, channels=3, expand_animations=False), [None, None, 3])


def _bytes(pixels: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.round(pixels), tf.uint8)
