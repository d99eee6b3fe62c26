"""``trainyard verify`` of a mutant, and whether it found the fault."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.common import settings

#: Exit statuses of the command if the image is not what it should be, and if the files of a target contradict each
#: other, of which no recipe can be made.
FAILED, REFUSED = 1, 2

#: Prefix of the names of state folders.
_PREFIX = "mutants-"


@dataclass(frozen=True)
class Verdict:
    """What the command said.

    Attributes:
        status: its exit status.
        findings: the place and the sentence of each finding; if there are none, its last line.
    """

    status: int
    findings: tuple[str, ...] = ()

    def finds(self, places: Collection[str], without: Collection[str] = ()) -> bool:
        """Whether it failed, or refused the files of the target, with a finding that names one of ``places``.

        Args:
            without: findings about the same image without the fault. They do not count, nor do places that they name.
        """
        new = [one for one in self.findings if one not in without]
        own = [place for place in places if not any(names(one, place) for one in without)]
        return self.status in (FAILED, REFUSED) and any(names(one, place) for one in new for place in own)


def names(finding: str, place: str) -> bool:
    """Whether a finding has a word or path, in the singular or the plural, and not only as a part of another."""
    return re.search(rf"(?i)(?<![A-Za-z0-9_]){re.escape(place)}s?(?![A-Za-z0-9_])", finding) is not None


def verify(reference: str, target: str = "", command: Sequence[str] = (sys.executable, "-m", "trainyard")) -> Verdict:
    """Run the command on a local image, against a target by its name or folder, if any."""
    with _state() as folder:
        words = ["verify", *([target] if target else []), "--image", reference, "--json"]
        done = subprocess.run(
            [*command, *words],
            env=settings.environment(TRAINYARD_BUILD=str(folder)),
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        found = json.loads(done.stdout)["findings"]
        sentences = tuple(f"{one.get('where', '')}: {one.get('what', '')}" for one in found)
    except (ValueError, KeyError):
        sentences = ()
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return Verdict(done.returncode, sentences or ((last,) if done.returncode else ()))


@contextlib.contextmanager
def _state() -> Iterator[Path]:
    """A state folder as this checkout's: results about mutants neither are mixed with it nor displace its own."""
    state = settings.state_folder()
    state.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state, prefix=_PREFIX) as name:
        for entry in state.iterdir():
            copy = Path(name) / entry.name
            if (entry / "results").is_dir():
                shutil.copytree(entry / "results", copy / "results")
            elif entry.name == "layers":
                shutil.copytree(entry, copy, copy_function=os.link)
            elif not entry.name.startswith(_PREFIX):
                copy.symlink_to(entry)
        yield Path(name)
