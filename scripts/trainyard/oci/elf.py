"""Programs and shared libraries: what they are for, and which libraries they load."""

from __future__ import annotations

from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile


def needed(path: Path) -> tuple[str, ...]:
    """The libraries that the loader loads with a program or library (DT_NEEDED); none of a file that is neither.

    https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html
    """
    try:
        with path.open("rb") as stream:
            dynamic = next((one for one in ELFFile(stream).iter_segments("PT_DYNAMIC")), None)
            if not isinstance(dynamic, DynamicSegment):
                return ()
            # pyelftools adds the attribute when it reads a tag of this kind.
            return tuple(str(tag.needed) for tag in dynamic.iter_tags("DT_NEEDED"))  # type: ignore[attr-defined]
    except (ELFError, ConstructError, OSError, ValueError, IndexError, UnicodeDecodeError):
        return ()  # damaged, or data of a test: the loader refuses it whatever it needs
