"""scikit-learn's 1,797 handwritten digits as MNIST's IDX files: real data to learn from without a network."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainyard.common import third_party

SMALL, SIDE = 8, 28
_INNER = 20  # MNIST fits its digits into 20x20 and leaves a border of 4
_TEST = 360  # of the 1,797 images; the rest trains

Bytes = npt.NDArray[np.uint8]


def load() -> tuple[npt.NDArray[np.float64], Bytes]:
    """Return the images as ``float64[1797, 8, 8]`` with values from 0 to 16, and their labels."""
    lines = gzip.decompress(third_party.archive("scikit-learn").read("digits.csv.gz")).splitlines()
    digits = np.loadtxt(lines, delimiter=",")
    return digits[:, :-1].reshape(-1, SMALL, SMALL), digits[:, -1].astype(np.uint8)


def write_idx(folder: str | Path, *, gz: bool = False, seed: int = 0) -> Path:
    """Write MNIST's four files with 1,437 training and 360 test images of 28x28 into ``folder``.

    Args:
        gz: compress them with gzip, without time stamps.
        seed: selects the test images.
    Returns:
        ``folder``.
    """
    small, labels = load()
    images = _enlarged(small / 16)
    places = np.random.default_rng(seed).permutation(len(labels))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, chosen in (("train", places[_TEST:]), ("t10k", places[:_TEST])):
        write_array(folder / f"{prefix}-images-idx3-ubyte", images[chosen], gz)
        write_array(folder / f"{prefix}-labels-idx1-ubyte", labels[chosen], gz)
    return folder


def _enlarged(images: npt.NDArray[np.float64]) -> Bytes:
    """``[n, 8, 8]`` of 0 to 1 as ``uint8[n, 28, 28]``: bilinear to 20x20, within a black border."""
    size = images.shape[1]
    position = np.clip((np.arange(_INNER) + 0.5) * size / _INNER - 0.5, 0, size - 1)
    left = np.minimum(position.astype(int), size - 2)
    weight = np.zeros((_INNER, size))
    weight[np.arange(_INNER), left] = 1 - (position - left)
    weight[np.arange(_INNER), left + 1] = position - left
    enlarged = weight @ images @ weight.T
    border = (SIDE - _INNER) // 2
    result: Bytes = np.pad((enlarged * 255).round().astype(np.uint8), ((0, 0), (border, border), (border, border)))
    return result


def write_array(path: str | Path, array: Bytes, gz: bool = False) -> None:
    """Write ``array`` as the IDX file ``path``, or with ``gz`` gzipped, without a time stamp, as ``path``.gz."""
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()
    Path(f"{path}.gz" if gz else path).write_bytes(gzip.compress(content, mtime=0) if gz else content)
