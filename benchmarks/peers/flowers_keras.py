"""Flowers as the Vertex AI guide for TensorFlow trains them, written from its description: Keras' image tutorial.

Pictures of 180x180 pixels in batches of 32, cached, shuffled and prefetched by tf.data; three 3x3 convolutions of 16,
32 and 64 filters, each pooled; a layer of 128; Adam; no augmentation.

    python -m benchmarks.peers.flowers_keras FOLDER SECONDS SEED
"""

from __future__ import annotations

import json
import sys
import time

import keras
import tensorflow as tf
from keras import layers

_SIDE = 180


def data(folder: str, split: str, seed: int) -> tf.data.Dataset:
    """The class folders of ``split``, decoded once and kept in memory."""
    found = keras.utils.image_dataset_from_directory(f"{folder}/{split}", image_size=(_SIDE, _SIDE), batch_size=32,
                                                     seed=seed, shuffle=split == "train", verbose=False)  # fmt: skip
    cached = found.cache()
    return (cached.shuffle(1000, seed) if split == "train" else cached).prefetch(tf.data.AUTOTUNE)


def network(classes: int) -> keras.Model:
    """The tutorial's model, compiled."""
    model = keras.Sequential([keras.Input((_SIDE, _SIDE, 3)), layers.Rescaling(1 / 255)])
    for filters in (16, 32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(classes)):
        model.add(layer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    return model


class Until(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training at a time of the monotonic clock, within an epoch if need be."""

    def __init__(self, end: float) -> None:
        super().__init__()
        self.end = end

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Look at the clock."""
        self.model.stop_training = time.monotonic() >= self.end


def train(folder: str, seconds: float, seed: int) -> dict[str, float]:
    """Accuracy in percent on the test split after ``seconds``, decoding and tracing included, the test not."""
    end = time.monotonic() + seconds
    keras.utils.set_random_seed(seed)
    pictures = data(folder, "train", seed)
    classes = len(tf.io.gfile.listdir(f"{folder}/train"))
    model = network(classes)
    history = model.fit(pictures, epochs=10_000, shuffle=False, verbose=0, callbacks=[Until(end)])
    spent = time.monotonic() - end + seconds
    _, accuracy = model.evaluate(data(folder, "test", seed), verbose=0)
    epochs = len(history.history["loss"])
    return {"accuracy": 100 * accuracy, "seconds": spent, "epochs": epochs,
            "train_accuracy": 100 * history.history["accuracy"][-1]}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))))
