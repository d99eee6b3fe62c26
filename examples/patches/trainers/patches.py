"""MNIST with a patch mixer: the reference trainer with another network.

docker run --rm trainyard:patches patches --fake-data --epochs 1
"""

from __future__ import annotations

from trainers.common import flags, mnist_data

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = flags.parse(
        "patches", "MNIST with a patch mixer.", (*flags.TORCH, *mnist_data.FLAGS), lr=0.02, batch_size=64
    )

import argparse

from einops.layers.torch import Rearrange
from torch import nn
from trainers.torch import _device, mnist

PATCH, WIDTH = 4, 48


def network() -> nn.Sequential:
    """Logits ``[n, 10]`` of images ``[n, 1, 28, 28]``: 49 patches, mixed over positions, then classified."""
    patches = (mnist_data.SIDE // PATCH) ** 2
    return nn.Sequential(
        Rearrange("n 1 (h a) (w b) -> n (h w) (a b)", a=PATCH, b=PATCH),
        nn.Linear(PATCH * PATCH, WIDTH),
        nn.ReLU(),
        Rearrange("n p c -> n c p"),
        nn.Linear(patches, patches),
        nn.ReLU(),
        Rearrange("n c p -> n (c p)"),
        nn.LayerNorm(WIDTH * patches),
        nn.Linear(WIDTH * patches, mnist_data.CLASSES),
    )


def main(args: argparse.Namespace) -> int:
    """The reference trainer with the patch mixer."""
    return mnist.main(args, lambda args: network(), "patches")


if __name__ == "__main__":
    _device.main(main, ARGS, "patches")
