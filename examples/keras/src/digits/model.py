"""The network."""

import keras
from keras import layers

from digits.data import CLASSES, SIDE


def build_model(dropout):
    """Logits (n, 10) of images (n, 8, 8, 1)."""
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
