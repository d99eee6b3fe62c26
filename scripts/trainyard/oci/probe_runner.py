"""Run scripts/trainyard/oci/probe.py inside an image, without a network, on a read-only file system."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker.errors

from trainyard.common.errors import StepFailed
from trainyard.oci import docker_engine

#: Names of an image's Python; the first that exists is used.
PYTHONS = ("python3", "python")


class NoPython(StepFailed):
    """Report that the image has no Python."""


@dataclass(frozen=True)
class Distribution:
    """Describe a distribution that the image's Python finds.

    Attributes:
        folder: the site directory that it is in.
        requires: its ``Requires-Dist``, ``tags``: those of its wheel, as in ``cp313-cp313-manylinux_2_28_x86_64``.
        bytes: on disk, with its byte code.
    """

    name: str
    version: str
    folder: str
    requires: tuple[str, ...]
    bytes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """Describe a shared library with code for NVIDIA GPUs.

    Attributes:
        code: compute capabilities with machine code, ``ptx``: with PTX; what ends with ``a`` runs on that one alone,
            what ends with ``f`` on later ones of the family.
        package: name of the distribution that it belongs to; empty if no RECORD names it.
    """

    code: tuple[str, ...]
    ptx: tuple[str, ...]
    package: str = ""


@dataclass(frozen=True)
class ProbeResult:
    """Hold what the image's Python reports.

    Attributes:
        sources: number of source files in the site directories.
        missing: those without byte code, ``stale``: those whose byte code is of another source.
        texts: name -> content of the files that rules read, as far as they exist.
        libraries: path -> a shared library with code for GPUs.
        ptxas: path of a ptxas -> the release of CUDA that it is of, as in ``12.9``.
        error: why there is nothing of all this; empty if there is.
    """

    python: str
    packages: tuple[Distribution, ...]
    sources: int
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    texts: dict[str, str]
    libraries: dict[str, Library] = field(default_factory=dict)
    ptxas: dict[str, str] = field(default_factory=dict)
    error: str = ""


#: What is known from inside an image that has no Python.
NOTHING = ProbeResult("", (), 0, (), (), {})


class ProbeFailed(StepFailed):
    """Report that an image's Python starts, and cannot list what is installed."""


def probe(reference: str) -> ProbeResult:
    """Return all that the Python of a local image reports; see :func:`run`."""
    report = run(reference)
    packages = [entry | {name: tuple(entry[name]) for name in ("requires", "tags")} for entry in report["packages"]]
    bytecode, code = report["bytecode"], report["device_code"]
    return ProbeResult(
        python=report["python"],
        packages=tuple(Distribution(**entry) for entry in packages),
        sources=bytecode["sources"],
        missing=tuple(bytecode["missing"]),
        stale=tuple(bytecode["stale"]),
        texts=report["texts"],
        libraries={
            path: Library(tuple(about["code"]), tuple(about["ptx"]), about.get("package", ""))
            for path, about in code["libraries"].items()
        },
        ptxas=code["ptxas"],
    )


def run(reference: str, *parts: str) -> dict[str, Any]:
    """Return what the Python of a local image reports, as scripts/trainyard/oci/probe.py prints it.

    Args:
        parts: ``packages``, ``bytecode``, ``texts``, ``device_code``; all of them if none is given.
    Raises:
        NoPython: it has none that starts.
        ProbeFailed: its Python failed; the message ends with its error line.
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
    container = docker_engine.client().containers.create(
        reference,
        ["-c", text, *parts],
        entrypoint=[python],
        network_mode="none",
        read_only=True,
        environment=docker_engine.emulated_environment(docker_engine.architecture_of(reference)),
        labels=docker_engine.resource_labels("verify"),
    )
    try:
        container.start()
        status = int(container.wait()["StatusCode"])
        if status:
            words = container.logs(stdout=False).decode(errors="replace").strip().splitlines() or ["(no output)"]
            raise ProbeFailed(f"{reference}: its Python cannot list what is installed: {words[-1]}")
        report: dict[str, Any] = json.loads(container.logs(stderr=False))
        return report
    finally:
        container.remove(force=True)
