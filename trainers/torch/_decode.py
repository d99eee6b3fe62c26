"""Decode and crop JPEGs with torch: a faster decoder and a vectorized resize, both without the GIL."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from trainers.common import images
from trainers.common.images import Damaged


def _decoder() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return a function from encoded bytes to ``uint8[3, rows, columns]``, or None if no decoder is installed.

    torchvision 0.29 deprecates its decoders in favor of torchcodec 0.16, which needs torch 2.11 or later.
    """
    try:
        from torchcodec.decoders import decode_jpeg

        return lambda content: decode_jpeg(content, mode="RGB")  # type: ignore[no-any-return]
    except (ImportError, RuntimeError):
        pass
    try:
        import torchvision.io  # noqa: F401  (registers the operator)

        operator = torch.ops.image.decode_jpeg
    except (ImportError, AttributeError, RuntimeError):
        return None
    return lambda content: operator(content, 3, False)  # 3: ImageReadMode.RGB; like Pillow, no EXIF rotation


_decode = _decoder()


def decode(content: bytes, where: str, side: int, choose: Callable[[int, int], images.Box]) -> np.ndarray:
    """Decode as :func:`trainers.common.images.decode`, which does all but plain JPEGs, with boxes rounded to pixels."""
    if not _decode:
        return images.decode(content, where, side, choose)
    try:
        with Image.open(io.BytesIO(content)) as header:  # reads no pixels
            plain = header.format == "JPEG" and header.mode in ("L", "RGB")
            box = choose(*header.size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        plain = False
    if not plain:
        return images.decode(content, where, side, choose)
    left, right = round(min(box[0], box[2])), round(max(box[0], box[2]))
    upper, lower = round(box[1]), round(box[3])
    if min(right - left, lower - upper) >= 2 * side:  # Pillow then decodes at half the size, which is faster
        return images.decode(content, where, side, choose)
    try:
        # A bytearray, because torch warns about read-only buffers.
        image = _decode(torch.frombuffer(bytearray(content), dtype=torch.uint8)).permute(1, 2, 0)
    except RuntimeError as error:
        raise Damaged(f"{where}: is no readable image ({str(error).splitlines()[0]}); replace or remove it") from None
    # Copied by numpy: torch would start OpenMP threads for this small copy, in each of the decoding threads.
    part = np.ascontiguousarray(image.numpy()[upper : max(lower, upper + 1), left : max(right, left + 1)])
    # A channels_last batch of one image: the layout for which the uint8 kernel is fast.
    batch = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    scaled = F.interpolate(batch, size=(side, side), mode="bilinear", antialias=True)[0]
    return (scaled.flip(2) if box[0] > box[2] else scaled).permute(1, 2, 0).numpy()
