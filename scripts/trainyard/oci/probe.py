"""Report what an image's Python finds in the image, as JSON on stdout, without importing a framework.

Runs INSIDE the image: scripts/trainyard/oci/probe_runner.py passes it as ``python -c <this text>``, with the parts to
report as arguments, by default all. It uses the standard library only and supports Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

#: Files that describe how a package was built, relative to the folders on ``sys.path``.
ABOUT_BUILDS = (
    "torch/version.py",
    "torchvision/version.py",
    "tensorflow/python/platform/build_info.py",
)


def packages() -> list[dict[str, Any]]:
    """Every installed distribution: name, version, folder, requirements, tags, bytes of its files and byte code."""
    found = []
    for distribution in importlib.metadata.distributions():
        total = 0
        for file in distribution.files or ():
            path = str(distribution.locate_file(file))
            for stored in (path, importlib.util.cache_from_source(path) if path.endswith(".py") else ""):
                with contextlib.suppress(OSError):  # RECORD may name what the build removed
                    total += os.stat(stored).st_size if stored else 0
        found.append(
            {
                "name": distribution.metadata["Name"],
                "version": distribution.version,
                "folder": str(distribution.locate_file("")),
                "requires": list(distribution.requires or ()),
                "tags": [
                    line[5:] for line in (distribution.read_text("WHEEL") or "").splitlines() if line[:5] == "Tag: "
                ],
                "bytes": total,
            }
        )
    return found


def sources(folder: str, nested: list[str]) -> Iterator[str]:
    """Paths of the Python sources below ``folder`` that an import may reach; not those below the folders ``nested``."""
    for here, below, names in os.walk(folder):
        below[:] = sorted(
            name for name in below if name not in ("__pycache__", "bin") and os.path.join(here, name) not in nested
        )
        for name in sorted(names):
            path = os.path.join(here, name)
            if name.endswith(".py") and os.path.isfile(path):  # links may lead nowhere
                yield path


def compiles(path: str) -> bool:
    """Whether a source is valid for this version of Python: templates and test data are not, and are never imported."""
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
        return True
    except (SyntaxError, ValueError, RecursionError):
        return False


def bytecode() -> dict[str, Any]:
    """The number of sources, those without valid byte code, and those whose byte code is of another source.

    The header of a .pyc (https://peps.python.org/pep-0552/): magic number, flags (bit 0: by hash, bit 1: checked), then
    the hash, or the source's time and size.
    """
    missing: list[str] = []
    stale: list[str] = []
    count = 0
    folders = [os.path.realpath(path) for path in sys.path if path and os.path.isdir(path)]
    for folder in folders:
        nested = [other for other in folders if other != folder and other.startswith(folder + os.sep)]
        for path in sources(folder, nested):
            count += 1
            try:
                with open(importlib.util.cache_from_source(path), "rb") as file:
                    header = file.read(16)
            except OSError:
                header = b""
            if header[:4] != importlib.util.MAGIC_NUMBER:
                if compiles(path):
                    missing.append(path)
                continue
            by_hash = header[4] & 1
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                recorded = importlib.util.source_hash(file.read()) if by_hash else times(status)
            if recorded != header[8:16]:
                (stale if header[4] == 1 else missing).append(path)
    return {"sources": count, "missing": missing, "stale": stale}


def times(status: os.stat_result) -> bytes:
    """The time and size of a source as its .pyc records them."""
    return b"".join((int(value) & 0xFFFFFFFF).to_bytes(4, "little") for value in (status.st_mtime, status.st_size))


def texts() -> dict[str, str]:
    """Text of the files that describe how packages were built, and of image.json."""
    found = {}
    for name in ABOUT_BUILDS:
        for folder in sys.path:
            path = os.path.join(folder, name)
            if folder and os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    found[name] = file.read()
                break
    try:
        with open("/opt/trainyard/image.json", encoding="utf-8", errors="replace") as file:
            found["image.json"] = file.read()
    except OSError:
        pass
    return found


if __name__ == "__main__":
    PARTS = {"packages": packages, "bytecode": bytecode, "texts": texts}
    about = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "site": sysconfig.get_paths()["purelib"],
    }
    json.dump({**about, **{part: PARTS[part]() for part in sys.argv[1:] or PARTS}}, sys.stdout)
