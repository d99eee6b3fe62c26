"""Flowers in Keras: the image tutorial that the Vertex AI guide uses, with its augmentation, and a tuned version of it.

The tutorial: pictures of 180x180 pixels in batches of 32, cached, shuffled and prefetched by tf.data; flips, rotations
and zooms; three 3x3 convolutions of 16, 32 and 64 filters, each pooled; dropout; a layer of 128; Adam. Written from
its description: https://www.tensorflow.org/tutorials/images/classification

The tuned version keeps the three convolutions and the data, and adds batch normalization, global pooling and a cosine
decay; the size of the pictures and the rate are the grid.

    python -m benchmarks.peers.flowers_keras FOLDER SEED ACCURACY MOST_SECONDS [SETTINGS]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import layers


@dataclass(frozen=True)
class Settings:
    """How to train. The defaults are the tutorial's; ``decay_epochs`` 0 is a constant rate."""

    side: int = 180
    rate: float = 0.001
    decay_epochs: int = 0
    normalized: bool = False


GRID = tuple(
    Settings(side, rate, decay_epochs=15, normalized=True) for side, rate in itertools.product((48, 64), (0.003, 0.01))
)


def data(folder: str, split: str, seed: int, side: int) -> tf.data.Dataset:
    """The class folders of ``split``, decoded once and kept in memory."""
    found = keras.utils.image_dataset_from_directory(f"{folder}/{split}", image_size=(side, side), batch_size=32,
                                                     seed=seed, shuffle=split == "train", verbose=False)  # fmt: skip
    cached = found.cache()
    return (cached.shuffle(1000, seed) if split == "train" else cached).prefetch(tf.data.AUTOTUNE)


def network(classes: int, settings: Settings, steps: int) -> keras.Model:
    """The model of ``settings``, compiled; ``steps`` per epoch."""
    model = keras.Sequential(
        [keras.Input((settings.side, settings.side, 3)), layers.RandomFlip("horizontal"),
         layers.RandomRotation(0.1), layers.RandomZoom(0.1), layers.Rescaling(1 / 255)]
    )  # fmt: skip
    for filters in (16, 32, 64):
        model.add(layers.Conv2D(filters, 3, padding="same", activation=None if settings.normalized else "relu"))
        if settings.normalized:
            model.add(layers.BatchNormalization(momentum=0.9))
            model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    if settings.normalized:
        model.add(layers.GlobalAveragePooling2D())
    else:
        for layer in (layers.Dropout(0.2), layers.Flatten(), layers.Dense(128, activation="relu")):
            model.add(layer)
    model.add(layers.Dense(classes))
    rate = settings.rate
    if settings.decay_epochs:
        rate = keras.optimizers.schedules.CosineDecay(rate, settings.decay_epochs * steps, alpha=0.02)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
    return model


class Until(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends the training after an epoch whose test accuracy is the target, or at a time of the monotonic clock."""

    def __init__(self, accuracy: float, end: float) -> None:
        super().__init__()
        self.accuracy, self.end = accuracy, end

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Look at the accuracy and the clock."""
        reached = 100 * (logs or {})["val_accuracy"] >= self.accuracy
        self.model.stop_training = reached or time.monotonic() >= self.end


def train(folder: str, seed: int, accuracy: float, most_seconds: float, settings: Settings) -> dict[str, float]:
    """Accuracy in percent on the test split, tested after each epoch until ``accuracy`` or for ``most_seconds``."""
    end = time.monotonic() + most_seconds
    keras.utils.set_random_seed(seed)
    pictures, tests = (data(folder, split, seed, settings.side) for split in ("train", "test"))
    model = network(len(tf.io.gfile.listdir(f"{folder}/train")), settings, int(pictures.cardinality()))
    history = model.fit(pictures, validation_data=tests, epochs=10_000, shuffle=False, verbose=0,
                        callbacks=[Until(accuracy, end)]).history  # fmt: skip
    return {"accuracy": 100 * history["val_accuracy"][-1], "epochs": len(history["loss"]),
            "train_accuracy": 100 * history["accuracy"][-1]}  # fmt: skip


if __name__ == "__main__":
    given = Settings(**json.loads(sys.argv[5])) if sys.argv[5:] else Settings()
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), given)))
