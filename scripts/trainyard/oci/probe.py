"""Report what an image's Python finds in the image, as JSON on stdout, without importing a framework.

Runs INSIDE the image: scripts/trainyard/oci/probe_runner.py passes it as ``python -c <this text>``, with the parts to
report beside the packages as arguments. It uses the standard library only and supports Python 3.8 and newer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

#: Files that describe how a package was built, relative to the folders on ``sys.path``.
ABOUT_BUILDS = (
    "torch/version.py",
    "torchvision/version.py",
    "tensorflow/python/platform/build_info.py",
)

#: Sections of an ELF file with containers of device code: linked, and to be linked again.
SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")
#: A container's and an entry's first bytes, bytes that are searched for the next container, and entries that are read.
CONTAINER, ENTRY, GAP, MOST = 16, 64, 4096, 100_000
MAGIC = (0xBA55ED50).to_bytes(4, "little")
#: Kinds of entries, and bits of their flags that name a variant of the architecture.
PTX, CUBIN = 1, 2
SPECIFIC, FAMILY = 1 << 20, 1 << 21


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


def bytecode(path: Sequence[str] = sys.path) -> dict[str, Any]:
    """The number of sources, those without valid byte code, and those whose byte code is of another source.

    The header of a .pyc (https://peps.python.org/pep-0552/): magic number, flags (bit 0: by hash, bit 1: checked), then
    the hash, or the source's time and size.
    """
    missing: list[str] = []
    stale: list[str] = []
    count = 0
    folders = [os.path.realpath(folder) for folder in path if folder and os.path.isdir(folder)]
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


def texts() -> dict[str, dict[str, str]]:
    """``texts``: the text of the files that describe how packages were built, and of the recipe."""
    found = {}
    for name in ABOUT_BUILDS:
        for folder in sys.path:
            path = os.path.join(folder, name)
            if folder and os.path.isfile(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    found[name] = file.read()
                break
    try:
        with open("/opt/trainyard/recipe.json", encoding="utf-8", errors="replace") as file:
            found["recipe.json"] = file.read()
    except OSError:
        pass
    return {"texts": found}


def device_code(path: Sequence[str] = sys.path) -> dict[str, Any]:
    """Return what GPUs the libraries of the site directories have code for, and the versions of ptxas.

    ``libraries``: path -> ``code`` and ``ptx`` (compute capabilities with machine code and PTX, with ``a`` or ``f`` at
    the end for variants of an architecture) and ``package``, the distribution that it belongs to. ``ptxas``: path ->
    release of CUDA.
    """
    libraries: dict[str, dict[str, Any]] = {}
    compilers: dict[str, str] = {}
    for folder in sorted({os.path.realpath(folder) for folder in path if folder and os.path.isdir(folder)}):
        for here, below, names in os.walk(folder):
            below[:] = [name for name in below if name != "__pycache__"]
            for name in names:
                file, compiler = os.path.join(here, name), name.startswith("ptxas")
                if (not compiler and ".so" not in name) or os.path.islink(file) or not os.path.isfile(file):
                    continue
                try:
                    if compiler:
                        compilers[file] = release_of(file)
                    else:
                        libraries[file] = architectures(file)
                except (OSError, ValueError, IndexError, OverflowError, struct.error):
                    continue  # it is cut off, or of another format
    readable = {file: code for file, code in libraries.items() if code["code"] or code["ptx"]}
    for distribution in importlib.metadata.distributions(path=list(path)) if readable else ():
        record = "\n" + (distribution.read_text("RECORD") or "")
        root = os.path.realpath(str(distribution.locate_file("")))
        for file, code in readable.items():
            if "package" not in code and f"\n{os.path.relpath(file, root)}," in record:
                code["package"] = distribution.metadata["Name"]
    return {"libraries": readable, "ptxas": {file: version for file, version in compilers.items() if version}}


def architectures(path: str) -> dict[str, list[str]]:
    """Return the compute capabilities of a 64-bit ELF file's device code, which is not read itself.

    A section holds containers, and a container entries: a header, then the code, compressed or not. The format is
    NVIDIA's and not published. Its layout is that of https://docs.rs/fatbinary and
    https://github.com/vosen/ZLUDA/blob/master/dark_api/src/fatbin.rs (2026-11-25); docs/gpus.md compares what is read
    with NVIDIA's cuobjdump:

    - container: magic number, version, bytes of this header (16 bit), bytes that follow it (64 bit);
    - entry: kind (16 bit), version (16 bit), bytes of this header (32 bit), bytes that follow it (64 bit); at 28 the
      architecture (90 of sm_90); at 40 flags: bit 20 of sm_90a, bit 21 of sm_100f.
    """
    numbers: dict[int, set[str]] = {CUBIN: set(), PTX: set()}
    with open(path, "rb") as file:
        for start, size in sections(file):
            at, end, left = start, start + size, MOST
            while at + CONTAINER <= end and left:
                file.seek(at)
                gap = file.read(min(GAP, end - at)).find(MAGIC)  # zeros may come between containers
                if gap < 0:
                    break
                file.seek(at + gap)
                header, length = struct.unpack("<6xHQ", file.read(CONTAINER))
                at, stop = at + gap + max(header, CONTAINER), min(end, at + gap + header + length)
                while at + ENTRY <= stop and left:
                    file.seek(at)
                    kind, header, length, number, flags = struct.unpack("<H2xIQ12xI8xQ16x", file.read(ENTRY))
                    if header < ENTRY:
                        break
                    if kind in numbers and 30 <= number < 1000:
                        variant = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
                        numbers[kind].add(f"{number // 10}.{number % 10}{variant}")
                    at, left = at + header + length, left - 1
                at, left = max(at, stop), max(left - 1, 0)
    return {"code": sorted(numbers[CUBIN]), "ptx": sorted(numbers[PTX])}


def sections(file: Any) -> Iterator[Any]:
    """Yield position and bytes of each section of an ELF file that holds device code (elf(5))."""
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":  # 64 bits, least byte first
        return
    (table,) = struct.unpack_from("<Q", head, 40)
    size, count, names = struct.unpack_from("<HHH", head, 58)
    if size != 64:
        return
    file.seek(table)
    rows = list(struct.iter_unpack("<IIQQQQ24x", file.read(size * count)))
    file.seek(rows[names][4])
    text = file.read(min(rows[names][5], 1 << 20))
    for row in rows:
        if text[row[0] : text.index(b"\0", row[0])] in SECTIONS and row[1] != 8:  # 8: it takes no place in the file
            yield row[4], row[5]


def release_of(path: str) -> str:
    """Return the release of CUDA that a ptxas is of, as in ``12.9``, by the text that it prints; empty if unknown."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(b"Cuda compilation tools, release ")
        match = re.match(rb"\D*(\d+\.\d+)", data[at : at + 60]) if at >= 0 else None
        return match[1].decode() if match else ""


if __name__ == "__main__":
    PARTS = {"bytecode": bytecode, "texts": texts, "device_code": device_code}
    about = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "site": sysconfig.get_paths()["purelib"],
        "packages": packages(),
    }
    json.dump({**about, **{name: value for part in sys.argv[1:] for name, value in PARTS[part]().items()}}, sys.stdout)
