"""Look into an image from inside: run scripts/stored/probe.py there, without a network, on a read-only file system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import docker.errors

from scripts import engine
from scripts.cli import StepFailed

#: What may be an image's Python, the first that is there: some images have one of the two names only.
PYTHONS = ("python3", "python")


class NoPython(StepFailed):
    """The image has no Python to ask."""


def look(reference: str, *parts: str) -> dict[str, Any]:
    """What the Python of a local image says, as scripts/stored/probe.py prints it.

    Args:
        parts: ``packages``, ``bytecode``, ``texts``; all of them if none is given.
    Raises:
        NoPython: it has none that starts.
        StepFailed: its Python failed; the message ends with its last word.
    """
    words = ""
    for python in PYTHONS:
        try:
            return _run(reference, python, parts)
        except docker.errors.APIError as error:  # no such program
            words = str(error.explanation or error)
    raise NoPython(f"{reference}: cannot run its Python: {words}")


def _run(reference: str, python: str, parts: tuple[str, ...]) -> dict[str, Any]:
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    container = engine.client().containers.create(
        reference,
        ["-c", text, *parts],
        entrypoint=[python],
        network_mode="none",
        read_only=True,
        labels=engine.owned("verify"),
    )
    try:
        container.start()
        status = int(container.wait()["StatusCode"])
        if status:
            words = container.logs(stdout=False).decode(errors="replace").strip().splitlines() or ["(nothing)"]
            raise StepFailed(f"{reference}: its Python could not say what is installed: {words[-1]}")
        found: dict[str, Any] = json.loads(container.logs(stderr=False))
        return found
    finally:
        container.remove(force=True)
