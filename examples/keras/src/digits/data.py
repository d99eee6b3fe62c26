"""The data set, which is part of the package."""

from importlib import resources

import numpy as np
from einops import rearrange

SIDE = 8  # pixels
CLASSES = 10
TEST_IMAGES = 360


def load():
    """Training and test set: (images, labels) twice, with images float32 (n, 8, 8, 1) from 0 to 1."""
    with resources.as_file(resources.files(__package__) / "data" / "digits.npz") as path, np.load(path) as file:
        pixels, labels = file["pixels"], file["labels"].astype("int32")
    images = rearrange(pixels.astype("float32") / 16, "n (height width) -> n height width 1", height=SIDE)
    return (images[:-TEST_IMAGES], labels[:-TEST_IMAGES]), (images[-TEST_IMAGES:], labels[-TEST_IMAGES:])
