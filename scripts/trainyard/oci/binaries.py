"""Find the libraries that programs and modules load, and those that are nowhere."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence

#: Libraries that an image need not have: those of NVIDIA's driver, which the host brings, and those of networks of
#: clusters, which plugins of NVSHMEM and cuFile load where there is one.
_OF_THE_HOST = re.compile(
    r"lib(?:cuda|nvidia-[\w-]+|nvcuvid)\.so.*"
    r"|lib(?:mpi|pmix|oshmem|mlx5|fabric|ucs|ucp|uct|ucm|rdmacm|ibverbs)\.so.*"
)

#: A module that Python imports, by its name (PEP 3149, PEP 384), unlike a program and a library.
_MODULE = re.compile(r"(?!lib)\w+\.so|\w+\.(?:cpython-\d[\w-]*|abi3)\.so")


#: The folders of Debian in which the loader looks last (ld.so(8), /etc/ld.so.conf.d).
_DEFAULT = re.compile(r"(?:usr/(?:local/)?)?lib(?:64)?(?:/\w+-linux-gnu)?")


class Binaries:
    """Hold the programs and libraries of an image or a wheel, by their paths.

    Args:
        files: all paths.
        needed: path -> the libraries that it loads, ``searched``: -> the folders in which it looks for them first.
    """

    def __init__(
        self, files: Iterable[str], needed: Mapping[str, Sequence[str]], searched: Mapping[str, Sequence[str]]
    ) -> None:
        self._files, self.needed, self._searched = frozenset(files), needed, searched
        self._loaded = {posixpath.basename(name) for names in needed.values() for name in names}
        self._named: dict[str, list[str]] = {}
        for path in self._files:
            self._named.setdefault(posixpath.basename(path), []).append(path)

    def starts(self, paths: Iterable[str]) -> tuple[list[str], bool]:
        """Return those of ``paths`` with which a use of a package begins, and whether Python or a person names them.

        Modules do; without them, programs; without these, the libraries that no other loads.
        """
        paths = list(paths)
        used = [path for path in paths if _MODULE.fullmatch(posixpath.basename(path))]
        used = used or [path for path in paths if ".so" not in posixpath.basename(path)]
        return used or [path for path in paths if posixpath.basename(path) not in self._loaded], bool(used)

    def lacking(self, path: str) -> set[str]:
        """Return the libraries that are nowhere, and that a file or what it loads needs."""
        lacking, seen, waiting = set[str](), {path}, [path]
        while waiting:
            at = waiting.pop()
            for name in map(posixpath.basename, self.needed.get(at, ())):
                own = [f"{folder}/{name}" for folder in self._searched.get(at, ())]
                named = self._named.get(name, [])
                default = [file for file in named if _DEFAULT.fullmatch(posixpath.dirname(file))]
                # Others may be loaded by then: a package may load its own libraries by their paths.
                files = [file for file in own if file in self._files][:1] or default[:1] or named
                waiting += {*files} - seen
                seen.update(files)
                lacking |= {name} if not files and not _OF_THE_HOST.fullmatch(name) else set()
        return lacking
