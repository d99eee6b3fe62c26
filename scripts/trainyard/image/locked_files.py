"""Add to a lock the sizes of the files that it pins, as the package indexes give them."""

from __future__ import annotations

import logging
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.pylock import Package, Pylock
from packaging.utils import canonicalize_name

from trainyard.spec.lock import Pin, parse

logger = logging.getLogger(__name__)

#: Options of ``uv pip compile`` that list the files of pinned packages for one platform, with sizes and hashes:
#: https://packaging.python.org/en/latest/specifications/pylock-toml/
OPTIONS = ("--no-deps", "--format", "pylock.toml", "--output-file", "pylock.toml")


def with_sizes(folder: Path, text: str, compile_pins: Callable[[list[str]], subprocess.CompletedProcess[str]]) -> str:
    """The text of a lock whose entries have the size of their file, and no hashes of files for other platforms.

    An entry stays as it is if it has a size already, or if no index has its files any more: then its wheel counts as
    small, and a warning says so.

    Args:
        folder: where ``compile_pins`` writes pylock.toml.
        text: entries of a lock, without a header.
        compile_pins: runs uv with :data:`OPTIONS` for these pins.
    """
    pins = parse(text)
    missing = [pin for pin in pins if not pin.size]
    if not missing:
        return text
    done = compile_pins([f"{pin.name}=={pin.version}" for pin in missing])
    if done.returncode:
        names = ", ".join(pin.name for pin in missing)
        logger.warning(
            f"no sizes of {names}, which share layers of small wheels: {' '.join(done.stderr.split())[:200]}"
        )
        return text
    packages = Pylock.from_dict(tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))).packages
    found = {str(canonicalize_name(one.name)): list(_files(one)) for one in packages}
    return "".join(_sized(pin, found.get(pin.name, [])).text() for pin in pins)


def _files(package: Package) -> Iterator[tuple[str, int]]:
    """SHA-256 and size of a package's wheels; of its source distribution if it has none."""
    for one in package.wheels or filter(None, [package.sdist]):
        yield one.hashes.get("sha256", ""), one.size or 0


def _sized(pin: Pin, files: list[tuple[str, int]]) -> Pin:
    accepted = {digest: size for digest, size in files if digest in pin.hashes}
    if pin.size or not accepted:
        return pin
    return Pin(pin.name, pin.version, tuple(sorted(accepted)), max(accepted.values()), pin.added)
