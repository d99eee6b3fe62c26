"""Read wheels into the table of what they contain, for ``trainyard dev wheels``."""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from trainyard.common.errors import UserError
from trainyard.oci.binaries import Binaries
from trainyard.oci.layers import needed_libraries
from trainyard.spec import pylock
from trainyard.spec.architectures import AMD64
from trainyard.spec.catalog import bases, libraries
from trainyard.workspace.wheel_contents import FILE, Contents, known, providers

#: The Python and C library that a wheel has to fit: those of most images.
_PYTHON, _GLIBC = "3.11", "2.36"

#: Bytes of a wheel up to which its libraries are read.
_LARGEST = 500_000_000

#: What some wheels install at the top by mistake: no code means the module of a package by such a name.
_JUNK = re.compile(
    r"_.*|.*__mypyc|(tests?|testing|docs?|examples?|benchmarks?|scripts?|tools?|setup|conftest|build|dist|src|utils?)(\..*)?"
)

#: What is before the path of a module: the folder of a scheme, or of cmeel, which a .pth file adds to the module path.
_SITE = re.compile(r"^([^/]+\.data/(purelib|platlib)/|cmeel\.prefix/.+?/site-packages/)")

#: A file that is a module (https://docs.python.org/3/library/importlib.html#importlib.machinery.all_suffixes).
_FILE = re.compile(r"(?:([^\W\d]\w*)\.py|((?!lib)[^\W\d]\w*)(?:\.cpython-\d+-x86_64-linux-gnu|\.abi3)?\.so)")


def _modules(paths: Iterable[str], depth: int = 2) -> Iterator[str]:
    """Yield the modules of files below a site directory: of namespace packages, those in them."""
    folders: dict[str, list[str]] = {}
    for path in paths:
        top, slash, rest = path.partition("/")
        if slash and top.isidentifier():
            folders.setdefault(top, []).append(rest)
        elif not slash and (module := _FILE.fullmatch(top)):
            yield module[1] or module[2]
    for folder, inside in folders.items():
        files = [path for path in inside if "/" not in path]
        regular = any(path.startswith("__init__.") for path in files)
        deeper = _modules((path for path in inside if "/" in path), depth - 1) if depth and not regular else ()
        nested = [f"{folder}.{module}" for module in deeper]
        is_module = regular or (not nested and any(_FILE.fullmatch(path) for path in files))
        yield from [folder] if is_module else nested


def _lacking(wheel: zipfile.ZipFile, paths: Iterable[str]) -> set[str]:
    """Return the libraries that everything with which a use of a wheel begins needs, and that it does not bring."""
    needed, searched = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for path in paths:
        with wheel.open(path) as stream, tempfile.NamedTemporaryFile() as file:
            if stream.read(4) == b"\x7fELF":
                file.write(b"\x7fELF" + stream.read())
                file.flush()
                needed[path], searched[path] = needed_libraries(Path(file.name), path)
    binaries = Binaries(needed, needed, searched)
    every = [binaries.lacking(path) for path in binaries.starts(needed)[0]]
    return set.intersection(*every) if every else set()


def read(path: Path) -> Contents:
    """Return the contents of a wheel.

    Raises:
        UserError: it is no zip archive.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [entry.filename for entry in wheel.infolist() if not entry.is_dir()]
            lacking = _lacking(wheel, names) if path.stat().st_size <= _LARGEST else set[str]()
    except zipfile.BadZipFile as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    found = set(_modules(_SITE.sub("", name) for name in names))
    modules = {module for module in found if not _JUNK.fullmatch(module)} or found
    named = {library for base in bases() for library in libraries(base)}
    return Contents(str(parse_wheel_filename(path.name)[1]), tuple(sorted(modules)), tuple(sorted(lacking & named)))


def newest(folders: Iterable[Path]) -> dict[str, Path]:
    """Return canonical name -> the newest wheel in folders that fits an image.

    Raises:
        UserError: the name of a file is not that of a wheel.
    """
    fitting = set(pylock.tags(_PYTHON, AMD64.name, _GLIBC))
    found: dict[str, tuple[Version, Path]] = {}
    for path in sorted(path for folder in folders for path in folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename as error:
            raise UserError(f"{path}: {error}") from None
        if tags & fitting and (name not in found or found[name][0] < version):
            found[name] = version, path
    return {name: path for name, (_, path) in found.items()}


def update(folders: Sequence[Path], day: str) -> int:
    """Read the wheels in folders into the table, and return their number; the other entries stay."""
    read_now: dict[str, Contents] = {name: read(path) for name, path in newest(folders).items()}
    entries = known() | read_now
    number = sum(bool(contents.version) for contents in entries.values())
    about = (
        f"Written by 'trainyard dev wheels', last on {day}, from {number} wheels for Linux on x86_64 and Python "
        f"{_PYTHON} or any: version, modules, and libraries of Debian that they load and no wheel has (of wheels of up "
        f"to {_LARGEST // 10**6} MB). Without a version no wheel was read: its modules were written by hand."
    )
    rows = {
        name: [one.version, " ".join(one.modules), *([" ".join(one.libraries)] if one.libraries else [])]
        for name, one in sorted(entries.items())
    }
    body = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    FILE.write_text(f'{{"about": {json.dumps(about)},\n"wheels": {{\n{body}\n}}}}\n', encoding="utf-8")
    known.cache_clear()
    providers.cache_clear()
    return len(read_now)
