#!/usr/bin/python3
"""Copy extension modules from one folder into another one, import each, and make them found beside the image's code.

They are in the site directory; a package that they belong to is in the code, or in a folder that is mounted over it.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import shutil
import sys

FINDER = """\
# Finds extension modules of packages that are elsewhere: those that were compiled with the image.
import os, sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, FileFinder


class Extensions:
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = os.path.join(os.path.dirname(__file__), *name.split(".")[:-1])
        spec = FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES)).find_spec(name) if path else None
        return spec if spec and spec.loader else None


sys.meta_path.append(Extensions)
"""

built, out = map(pathlib.Path, sys.argv[1:])
with contextlib.suppress(ImportError):
    importlib.import_module("torch")  # whose libraries an extension of it loads
found = sorted(path for path in built.rglob("*.so*") if path.is_file())
if not found:
    sys.exit("error: the project has no extension modules: remove '.' from 'sources' under 'build:'")
for path in found:
    name = ".".join([*path.relative_to(built).parent.parts, path.name.partition(".")[0]])
    if f"PyInit_{path.name.partition('.')[0]}".encode() in path.read_bytes():
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        try:
            importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
        except ImportError as error:
            sys.exit(f"error: {name}, which was compiled, cannot be imported: {error}")
    target = out / path.relative_to(built)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
(out / "_trainyard_extensions.py").write_text(FINDER)
(out / "_trainyard_extensions.pth").write_text("import _trainyard_extensions\n")
