"""JPEGs to crops with torch: a faster decoder and a vectorised resize, both outside the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from trainers.common import images, jpeg
from trainers.common.exits import UserError


def _decoder() -> Callable[[torch.Tensor], torch.Tensor] | None:
    """From encoded bytes to ``uint8[3, rows, columns]``; None where neither package decodes.

    torchvision 0.29 announces that its decoders go; torchcodec 0.16 (for torch 2.11 and later) has their successors.
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
    return lambda content: operator(content, 3, False)  # 3: ImageReadMode.RGB; no turning by EXIF, as Pillow


_decode = _decoder()


def decode(content: bytes, where: str, side: int, choose: Callable[[int, int], images.Box]) -> np.ndarray:
    """As :func:`trainers.common.images.decode`, but with boxes of whole pixels; what is no plain JPEG goes there."""
    found = jpeg.frame(content) if _decode else None
    if found is None or found.components not in (1, 3):
        return images.decode(content, where, side, choose)
    box = choose(found.width, found.height)
    left, right = round(min(box[0], box[2])), round(max(box[0], box[2]))
    upper, lower = round(box[1]), round(box[3])
    if min(right - left, lower - upper) >= 2 * side:  # Pillow decodes at half the size then, which is cheaper
        return images.decode(content, where, side, lambda width, height: box)
    try:
        # A bytearray, because torch warns of memory that it must not write to.
        whole = _decode(torch.frombuffer(bytearray(content), dtype=torch.uint8)).permute(1, 2, 0)  # type: ignore[misc]
    except RuntimeError as error:
        raise UserError(f"{where}: is no readable image ({str(error).splitlines()[0]}); replace or remove it") from None
    # Copied by numpy: torch would share out so small a copy among OpenMP threads, in each of our threads.
    part = np.ascontiguousarray(whole.numpy()[upper : max(lower, upper + 1), left : max(right, left + 1)])
    # Seen as channels_last batches of one: the layout that the kernel for bytes is fast in.
    shaped = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    scaled = F.interpolate(shaped, size=(side, side), mode="bilinear", antialias=True)
    pixels: np.ndarray = scaled[0].permute(1, 2, 0).numpy()
    return images.mirrored(pixels) if box[0] > box[2] else pixels
