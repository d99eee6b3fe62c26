"""MNIST with a patch mixer: the reference trainer with another network.

docker run --rm trainyard:patches patches --fake-data --epochs 1
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from trainers.common.mnist import CLASSES, SIDE
from trainers.torch_xla import mnist

if TYPE_CHECKING:
    from torch import nn

PATCH, WIDTH = 4, 48


def network(args: argparse.Namespace) -> nn.Sequential:
    """Logits ``[n, 10]`` of images ``[n, 1, 28, 28]``: 49 patches, mixed over positions, then classified."""
    from einops.layers.torch import Rearrange
    from torch import nn

    patches = (SIDE // PATCH) ** 2
    return nn.Sequential(
        Rearrange("n 1 (h a) (w b) -> n (h w) (a b)", a=PATCH, b=PATCH),
        nn.Linear(PATCH * PATCH, WIDTH),
        nn.ReLU(),
        Rearrange("n p c -> n c p"),
        nn.Linear(patches, patches),
        nn.ReLU(),
        Rearrange("n c p -> n (c p)"),
        nn.LayerNorm(WIDTH * patches),
        nn.Linear(WIDTH * patches, CLASSES),
    )


def main(args: argparse.Namespace) -> int:
    """The reference trainer with the patch mixer."""
    return mnist.main(args, network, "patches")


if __name__ == "__main__":
    options = mnist.parse_args(prog="patches")
    from trainers.torch._peers import run

    run(main, options, "patches")
