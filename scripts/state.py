"""What the verbs found out about images, kept by digest under build/: nothing is published that did not pass here.

``build/<target>/<step>.json`` holds the last result of a step (build, verify, smoke) and the digest it is about.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.cli import STATE, UserError, say

#: The turns that this process has.
_turns: set[str] = set()


@contextlib.contextmanager
def turn(name: str, waiting: str = "") -> Iterator[None]:
    """Do something that only one process of this host may do at a time; within it, the same turn is had already.

    Args:
        name: of the thing, a file's name.
        waiting: what to say if another process is at it.
    """
    if name in _turns:
        yield
        return
    folder = STATE / "turns"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting:
                say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        _turns.add(name)
        try:
            yield
        finally:
            _turns.discard(name)
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that has inherited the file would keep it locked


def candidate_of(target: str) -> contextlib.AbstractContextManager[None]:
    """The turn to make a target's candidate, and to do with it what only its maker may."""
    return turn(f"candidate-{target}", f"another process makes {target}: waiting for it")


def _path(target: str, step: str) -> Path:
    return STATE / target / f"{step}.json"


def record(target: str, step: str, digest: str, facts: dict[str, Any]) -> None:
    """Keep a step's result, written atomically."""
    path = _path(target, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False, encoding="utf-8") as file:
        json.dump({"digest": digest} | facts, file, indent=2)
    os.replace(file.name, path)


def last(target: str, step: str) -> dict[str, Any] | None:
    """The last result of a step, whatever digest it is about, or None."""
    try:
        facts = json.loads(_path(target, step).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return facts if isinstance(facts, dict) else None


def forget_old(target: str, steps: str, kept: int) -> None:
    """Remove all but the newest ``kept`` records of the steps that match the pattern ``steps``."""
    records = sorted(_path(target, "x").parent.glob(f"{steps}.json"), key=lambda path: path.stat().st_mtime)
    for path in records[:-kept]:
        path.unlink(missing_ok=True)


def recall(target: str, step: str, digest: str) -> dict[str, Any] | None:
    """The result of a step for this very digest, or None."""
    facts = last(target, step)
    return facts if facts and facts.get("digest") == digest else None


def require(target: str, digest: str, *steps: str) -> dict[str, dict[str, Any]]:
    """Results of ``steps`` for ``digest``.

    Raises:
        UserError: one of them was never passed by this digest.
    """
    found = {}
    for step in steps:
        facts = recall(target, step, digest)
        if not facts or not facts.get("passed"):
            raise UserError(f"{target} ({digest[:19]}) never passed '{step}': run 'make image TARGET={target}'")
        found[step] = facts
    return found
