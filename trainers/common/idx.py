"""MNIST's IDX files, gzipped or not, as uint8 arrays.

Format: two zero bytes, a type code (8: unsigned byte), the number of dimensions, each dimension as a
big-endian 32-bit integer, then the bytes: https://yann.lecun.org/exdb/mnist/
"""

from __future__ import annotations

import gzip
import struct
import zlib

import numpy as np

from trainers.common import paths
from trainers.common.exits import UserError

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read(path: str) -> np.ndarray:
    """The array in the IDX file ``path``; raises :class:`UserError` if it is damaged or not an IDX file of bytes."""
    with paths.open_file(path) as file:
        content = file.read()
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path}: damaged gzip file ({error}); download it again") from None
    if len(content) < 4 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4:
        raise UserError(f"{path}: is not an IDX file of unsigned bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise UserError(f"{path}: ends within the header; download it again")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    size = int(np.prod(shape, dtype=np.int64))
    if len(content) - start != size:
        raise UserError(f"{path}: {size} bytes expected, {len(content) - start} found; download it again")
    return np.frombuffer(content, np.uint8, size, start).reshape(shape)


def write(path: str, array: np.ndarray) -> None:
    """Write the uint8 ``array`` as IDX, gzipped (without a time stamp) if ``path`` ends in ``.gz``."""
    content = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    with paths.atomic_file(path) as file:
        file.write(gzip.compress(content, mtime=0) if path.endswith(".gz") else content)


def load_mnist(folder: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images ``uint8[n, rows, columns]`` and labels ``uint8[n]`` of ``split`` ("train" or "test") in ``folder``.

    Looks for MNIST's four file names, with or without ``.gz``, in ``folder`` and in its ``MNIST/raw``, where
    torchvision puts them. Raises :class:`UserError` if files are missing, damaged or inconsistent.
    """
    if not paths.is_folder(folder):
        raise UserError(f"{folder}: no such folder; --datadir must hold MNIST's four IDX files")
    arrays = []
    for name in FILES[split]:
        path = _find(folder, name)
        if not path:
            raise UserError(f"{folder}: no {name}[.gz] in it; --datadir must hold MNIST's four IDX files")
        arrays.append(read(path))
    images, labels = arrays
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not len(images):
        raise UserError(f"{folder}: {split} images {images.shape} and labels {labels.shape} do not match")
    return images, labels


def _find(folder: str, name: str) -> str:
    for place in (folder, paths.join(folder, "MNIST", "raw")):
        present = paths.names(place)
        # Some mirrors have a dot instead of the dash before idx: train-images.idx3-ubyte.
        for candidate in (name, f"{name}.gz", name.replace("-idx", ".idx")):
            if candidate in present:
                return paths.join(place, candidate)
    return ""
