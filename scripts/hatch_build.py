"""Build hook of hatchling: puts the project's data and the commit it was built from into the distribution.

A wheel gets ``trainyard/_data/``, the files that commands read from a checkout otherwise, and ``trainyard/_build.json``
with the commit and its time, for the labels and tags of images. An sdist carries the latter too, so that a wheel built
from the sdist equals one built from the clone. An editable install gets neither: it reads the checkout.

https://hatch.pypa.io/latest/plugins/build-hook/custom/
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What a wheel carries below trainyard/_data/. ``scripts/trainyard/common/settings.py`` finds it there.
DATA = (
    "images",
    "templates",
    "launcher",
    "trainers",
    ".dockerignore",
    "docs/sizes.json",
    "scripts/install-engine.sh",
    "scripts/setup-emulation.sh",
)

#: What an image is made of: a commit with changes in these is called dirty, as ``trainyard.image.plan`` does.
SOURCES = ("images", "templates/steps", "trainers", "launcher")

#: Where an sdist carries the facts of :func:`build_facts`.
CARRIED = Path("scripts", "_build.json")


class DataHook(BuildHookInterface[Any]):
    """Adds the data files and ``_build.json``."""

    #: The temporary file with the facts of :func:`build_facts`; None where the sdist has them.
    _written: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build.

        Args:
            version: ``standard``, or ``editable`` for an editable install.
            build_data: what hatchling takes from the hook.
        """
        if version == "editable":
            return
        forced = build_data["force_include"]
        root = Path(self.root)
        facts = root / CARRIED
        if not facts.is_file():
            facts = self._written = Path(tempfile.mkdtemp()) / CARRIED.name
            facts.write_text(json.dumps(build_facts(root), sort_keys=True) + "\n", encoding="utf-8")
        forced[str(facts)] = str(CARRIED) if self.target_name == "sdist" else "trainyard/_build.json"
        if self.target_name == "wheel":
            for path in self._data_files(root):
                forced[str(root / path)] = f"trainyard/_data/{path.as_posix()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after each build: removes the temporary file."""
        if self._written:
            self._written.unlink(missing_ok=True)
            self._written.parent.rmdir()

    def _data_files(self, root: Path) -> Iterator[Path]:
        """Files of :data:`DATA` relative to ``root``, without what .gitignore excludes."""
        for name in DATA:
            top = root / name
            found = sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top]
            for path in found:
                relative = path.relative_to(root)
                if not self.build_config.path_is_excluded(str(relative)) and "__pycache__" not in relative.parts:
                    yield relative


def build_facts(root: Path) -> dict[str, Any]:
    """The commit of a clone and its time in seconds since 1970; without git, ``unknown`` and no time."""
    if Path(_git(root, "rev-parse", "--show-toplevel") or os.devnull).resolve() != root.resolve():
        return {"revision": "unknown", "time": None}  # no clone, or unpacked inside of another project's
    revision, time = _git(root, "rev-parse", "HEAD"), _git(root, "log", "-1", "--format=%ct")
    if not revision or not time:
        return {"revision": "unknown", "time": None}
    dirty = _git(root, "status", "--porcelain", "--", *SOURCES)
    return {"revision": f"{revision}-dirty" if dirty else revision, "time": int(time)}


def _git(root: Path, *arguments: str) -> str:
    """What git prints; empty if it fails or is not installed."""
    try:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""
