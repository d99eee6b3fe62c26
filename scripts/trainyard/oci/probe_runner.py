"""Run scripts/trainyard/oci/probe.py inside an image, without a network, on a read-only file system."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import docker.errors
from pydantic import TypeAdapter, ValidationError

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, one_line

#: Names of an image's Python; the first that exists is used.
PYTHONS = ("python3", "python")

#: What the image's Python can report beside the packages.
PARTS = ("bytecode", "texts", "device_code")


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
        executable: its path, ``site``: the site directory.
        sources: number of source files in the site directories.
        missing: those without byte code, ``stale``: those whose byte code is of another source.
        texts: name -> content of the files that rules read, as far as they exist.
        libraries: path -> a shared library with code for GPUs.
        ptxas: path of a ptxas -> the release of CUDA that it is of, as in ``12.9``.
        error: why there is nothing of all this; empty if there is.
    """

    python: str
    packages: tuple[Distribution, ...]
    sources: int = 0
    missing: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    libraries: dict[str, Library] = field(default_factory=dict)
    ptxas: dict[str, str] = field(default_factory=dict)
    error: str = ""
    executable: str = ""
    site: str = ""


_REPORT = TypeAdapter(ProbeResult)

#: What is known from inside an image that has no Python.
NOTHING = ProbeResult("", ())


class ProbeFailed(StepFailed):
    """Report that an image's Python starts, and cannot list what is installed."""


def probe(engine: Engine, reference: str, *parts: str) -> ProbeResult:
    """Return what the Python of a local image reports: the packages, and what belongs to ``parts`` of :data:`PARTS`.

    Raises:
        NoPython: it has none that starts.
        ProbeFailed: its Python failed, or printed something else; the message ends with its error line.
        StepFailed: its Python does not end.
    """
    words = ""
    for python in PYTHONS:
        try:
            return _run(engine, reference, python, parts)
        except docker.errors.APIError as error:  # no such program
            words = str(error.explanation or error)
    raise NoPython(f"{reference}: cannot run its Python: {words}")


def _run(engine: Engine, reference: str, python: str, parts: tuple[str, ...]) -> ProbeResult:
    text = Path(__file__).with_name("probe.py").read_text(encoding="utf-8")
    variables = engine.emulated_environment(engine.architecture_of(reference))
    status, out, err = engine.run(reference, python, ["-c", text, *parts], "verify", environment=variables)
    if status:
        words = err.decode(errors="replace").strip().splitlines() or ["(no output)"]
        raise ProbeFailed(f"{reference}: its Python cannot list what is installed: {one_line(words[-1])[:300]}")
    try:
        return _REPORT.validate_json(out)
    except ValidationError as error:  # it may print anything
        wrong = error.errors(include_url=False)[0]
        what = f"{one_line('.'.join(map(str, wrong['loc'])))} {wrong['msg']}"
        raise ProbeFailed(f"{reference}: its Python printed no list of what is installed: {what}") from None
