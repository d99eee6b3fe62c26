"""Reading a JPEG's frame header without decoding the image.

Markers and headers: ITU-T T.81, annex B, https://www.w3.org/Graphics/JPEG/itu-t81.pdf
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FRAMES = (0xC0, 0xC1, 0xC2)  # start of a Huffman-coded frame: baseline, extended, progressive
_OTHER_FRAMES = {*range(0xC3, 0xD0)} - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic; the rest are tables
_ALONE = (0x01, *range(0xD0, 0xD9))  # markers without a segment: TEM, RST0 to RST7, SOI
_IMAGE_OR_END = (0xDA, 0xD9)


@dataclass(frozen=True)
class Frame:
    """The frame header of a JPEG: the image's size in pixels and its components: 1 grey, 3 colour, 4 CMYK."""

    width: int
    height: int
    components: int


def frame(content: bytes) -> Frame | None:
    """The frame header in ``content``; None if it is no 8-bit Huffman-coded JPEG with its height in the header."""
    at = 2
    if content[:2] != b"\xff\xd8":
        return None
    while at + 10 <= len(content) and content[at] == 0xFF:
        marker = content[at + 1]
        if marker in _FRAMES:
            precision, height, width, components = struct.unpack_from(">BHHB", content, at + 4)
            return Frame(width, height, components) if precision == 8 and height and width else None
        if marker in _OTHER_FRAMES or marker in _IMAGE_OR_END:
            return None
        if marker == 0xFF:  # padding
            at += 1
        else:
            at += 2 if marker in _ALONE else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return None
