"""Test what an image's packages have beside its training: console scripts, modules, entry points, extension modules.

:mod:`trainyard.image.installed_packages` tries them in one restricted container, while the smoke test trains. In the
image of a target, whatever fails ends the test. In the image of a repository, the packages are tried that its target
does not have, all of them if it has others in other versions; what fails there is a note, and ends the test only if
the repository lists the package. An import of a dependency that the repository excludes is a note, too, and so is one
of a module that the package was released without.

A remedy is named if uv resolves the packages of the image with it, and it was tried in the image, unless it is large.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from trainyard.common import settings, stages
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed
from trainyard.image import smoke_containers
from trainyard.image.smoke_containers import FOLDER, SmokeSandbox
from trainyard.recipe import Recipe
from trainyard.sandbox.containers import lines_of, wait
from trainyard.spec import markers, yaml_source
from trainyard.spec.catalog import bases, packages_with
from trainyard.workspace import import_names

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("installed_packages.py")
_LEFT_OUT = Path(__file__).with_name("smoke_packages.yaml")

#: Seconds that all of it may take; tf-cpu's packages take 13.5 CPU seconds (2026-11-28).
_LIMIT = 900

#: Errors that another machine does not mend. Others may be about a GPU, a display or a network that is not here.
_CERTAIN = re.compile(
    r"(?:ModuleNotFoundError|AttributeError|TypeError|SyntaxError)\b|\S*(?:DistributionNotFound|VersionConflict)\b"
    r"|ImportError: (?:cannot import name|\S+\.so\S*: )"
)
_ELSEWHERE = re.compile(r"(?i)\blibcuda\.|\blibnvidia|cuda|nvcc|gpu|\btpu|driver|display|network|connection")

#: What an error is about: a module that is missing, a shared library, a name that a module has no longer.
_MISSING = re.compile(r"No module named '([\w.]+)'")
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[.\d]*): cannot open shared object file")
_GONE = re.compile(r"module '([\w.]+)' has no attribute|cannot import name '\w+' from '([\w.]+)'")

#: A pin of a requirements file.
_PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)

#: Most findings whose remedies are looked for; most packages that one may change to be tried in the image, and most
#: bytes of their files.
_REMEDIES, _MOST, _MOST_BYTES = 3, 6, 100 << 20


@dataclass(frozen=True)
class Finding:
    """Tell what fails beside the training.

    Attributes:
        package: canonical name of the distribution, with its ``version``.
        kind: scripts, modules, entry_points or extension_modules.
        what: as in ``tensorboard`` or ``import cv2``, ``why``: the error.
        remedy: what to do about it, `` : ...``; empty if nothing is known that works.
        more: which others of the package are not shown; empty if there are none.
    """

    package: str
    version: str
    kind: str
    what: str
    why: str
    remedy: str = ""
    more: str = ""

    def __str__(self) -> str:
        what = f"{self.what}{' does not start' if self.kind == 'scripts' else ' fails'}{self.more}"
        return f"{self.package} {self.version}: {what}: {self.why}{self.remedy}"


def grouped(findings: Sequence[Finding], *, alike: bool = False) -> list[Finding]:
    """Return a finding of each package, and kind and error if they are to be ``alike``, with the number of the others.

    It is the first that something may be known to mend.
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.package, *((one.kind, one.why) if alike else ())), []).append(one)
    known = (_LIBRARY, _MISSING, _GONE)
    where = "" if alike else " of it, which '--json' lists"
    return [
        replace(
            min(some, key=lambda one: not any(pattern.search(one.why) for pattern in known)),
            more=f" (and {len(some) - 1} more{where})" if some[1:] else "",
        )
        for some in groups.values()
    ]


def described(numbers: Mapping[str, Any]) -> str:
    """Return in words what was tried, ``14 console scripts, 6 modules``; empty if nothing was."""
    words = {"scripts": "console script", "modules": "module", "entry_points": "entry point"}
    words["extension_modules"] = "extension module"
    return ", ".join(
        f"{numbers[kind]} {word}{'' if numbers[kind] == 1 else 's'}"
        for kind, word in words.items()
        if numbers.get(kind)
    )


def is_refused(recipe: Recipe, finding: Finding, excluded: Collection[str]) -> bool:
    """Return whether a finding ends the test: it is certain, and about what the image promises.

    Args:
        excluded: canonical names of distributions that packages of the image require and it does not have, as with
            uv's exclude-dependencies.
    """
    if not recipe.is_repository:
        return True
    certain = _CERTAIN.match(finding.why) and not _ELSEWHERE.search(finding.why)
    if missing := _MISSING.search(finding.why):
        # The package was released without this module, or the repository excludes the dependency that has it.
        top = missing[1].partition(".")[0]
        certain = certain and not {canonicalize_name(top), import_names.proposed(top)} & {finding.package, *excluded}
    # A package loads only some of its extension modules, and asks for an entry point if its user does.
    return bool(certain and finding.package in recipe.listed and finding.kind in ("scripts", "modules"))


def proposed(recipe: Recipe, why: str) -> Iterator[str]:
    """Yield requirements that may mend an error: for a missing module, and for a name that a module no longer has."""
    if missing := _MISSING.search(why):
        yield from filter(None, [import_names.proposed(missing[1])])
    elif gone := _GONE.search(why):
        names = import_names.providers(gone[1] or gone[2])
        version = recipe.versions.get(names[0]) if len(names) == 1 else None
        if version and names[0] not in recipe.framework.packages and Version(version).major:
            yield f"{names[0]}<{Version(version).major}"


@contextlib.contextmanager
def beside(recipe: Recipe, image: str, context: Context) -> Iterator[Beside]:
    """Start what is tried in a container, and remove it at the end.

    Args:
        image: reference or digest.
    """
    tested = Beside(recipe, context)
    if not recipe.tried or context.engine.emulated_environment(recipe.architecture.name):
        yield tested
        return
    files = {_PROGRAM.name: _PROGRAM.read_bytes()}
    with SmokeSandbox(context.engine, image, files, ("repair",)) as sandbox:
        tested.start(sandbox)
        yield tested


class Beside:
    """Hold what is tried beside a training. Under emulation, which takes many times as long, that is nothing."""

    def __init__(self, recipe: Recipe, context: Context) -> None:
        self._recipe, self._context = recipe, context
        self._sandbox: SmokeSandbox | None = None
        self._tries = 0

    def start(self, sandbox: SmokeSandbox) -> None:
        """Start the container."""
        self._sandbox = sandbox
        self._container = self._run(list(self._recipe.tried), list(self._recipe.listed))

    @property
    def _platform(self) -> str:
        """Return uv's name of the platform whose wheels the image can use."""
        return self._recipe.architecture.wheel_platform(bases()[self._recipe.base.name].glibc)

    def _run(self, packages: list[str], named: list[str], path: str = "") -> Container:
        """Start the program.

        Args:
            path: folder in /smoke with packages that come before those of the image; empty if there are none.
        """
        assert self._sandbox
        skip = [{key: row[key] for key in row if key != "reason"} for row in yaml_source.read(_LEFT_OUT)["left_out"]]
        request = json.dumps({"packages": packages, "named": named, "skip": skip})
        return self._sandbox.start(
            "python", f"{FOLDER}/{_PROGRAM.name}", request, read_only=True, tmpfs={"/tmp": "mode=1777"},
            environment={"HOME": "/tmp", **({"PYTHONPATH": self._sandbox.module_path(path)} if path else {})},
            **smoke_containers.restricted(self._sandbox),
        )  # fmt: skip

    def _printed(self, container: Container) -> dict[str, Any]:
        stages.now("console scripts, modules and entry points")
        status = wait(container, _LIMIT)
        lines = lines_of(container)
        for line in reversed(lines) if status == 0 else ():
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
        ended = f"ended with status {status}: {(lines or ['(none)'])[-1][:300]}"
        ended = f"was still running after {_LIMIT} s" if status is None else ended
        raise StepFailed(f"the test of what the packages have beside the training {ended}")

    def result(self) -> tuple[dict[str, Any], list[str]]:
        """Return the numbers of what was tried and the findings, for results, and a note on each package.

        Raises:
            StepFailed: something fails in an image of a target, or of a package that a repository lists.
        """
        if not self._sandbox:
            return {}, []
        try:
            printed = self._printed(self._container)
        except StepFailed as error:
            if not self._recipe.is_repository:
                raise
            return {}, [str(error)]  # it says nothing of a package
        self._requires = printed.pop("requires")
        findings = [Finding(**row) for row in printed.pop("findings")]
        excluded = {canonicalize_name(one.name) for one in self._required()} - self._recipe.versions.keys()
        refused = [one for one in findings if is_refused(self._recipe, one, excluded)]
        shown = grouped(refused, alike=True) or grouped(findings)
        described = [*map(str, map(self._with_remedy, shown[:_REMEDIES])), *map(str, shown[_REMEDIES:])]
        if refused:
            for line in described[1:]:
                logger.info(f"  | {line}")
            raise StepFailed(described[0])
        kept = [f"{one.package}: {one.what}: {one.why}" for one in findings]
        return {"beside": {**printed, "findings": kept}}, described

    def _with_remedy(self, finding: Finding) -> Finding:
        """Return a finding with what mends it, as far as that is known and works."""
        if library := _LIBRARY.search(finding.why):
            where = f": add {packages_with([library[1]], self._recipe.base.name)} to system in {self._recipe.source}"
            return replace(finding, remedy=where)
        for requirement in proposed(self._recipe, finding.why):
            changed = self._resolved(requirement)
            works = self._works(finding, changed) if changed else False
            if works is not False:
                shown = ", ".join(f"{name} {version}" for name, version in changed.items())
                tried = f"with {shown} it works" if works else f"{shown} resolves, and was not tried in the image"
                name = canonicalize_name(Requirement(requirement).name)
                listed = name in self._recipe.listed
                what = f"write '{requirement}' for {name} in" if listed else f"add '{requirement}' to"
                where = f": {what} the requirements of {self._recipe.source}: {tried}"
                return replace(finding, remedy=where)
        return finding

    def _resolved(self, requirement: str) -> dict[str, str]:
        """Return canonical name -> version of what changes if uv resolves a requirement with what the image has."""
        here = {name: Version(version).public for name, version in self._recipe.versions.items()}
        name = canonicalize_name(Requirement(requirement).name)
        others = (one.specifier for one in self._required() if canonicalize_name(one.name) == name)
        lines = [requirement, *(f"{name}{specifier}" for specifier in others)]
        pins = [f"{one}=={version}" for one, version in here.items() if one != name]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "pins.txt").write_text("\n".join(pins), encoding="utf-8")
            if not self._uv("compile", lines, folder, "--constraints=pins.txt", "--output-file=new.txt"):
                return {}
            pinned = _PIN.findall(Path(folder, "new.txt").read_text(encoding="utf-8"))
        found = {canonicalize_name(one): version for one, version in pinned}
        return {one: version for one, version in found.items() if here.get(one) != version}

    def _required(self) -> Iterator[Requirement]:
        """Yield what the packages of the image require."""
        environment = markers.environment(self._recipe.base.python, self._recipe.architecture.machine)
        for text in self._requires:
            with contextlib.suppress(InvalidRequirement):  # of a wheel from before PEP 508
                wanted = markers.requirement(text)
                if not wanted.marker or wanted.marker.evaluate(environment):
                    yield wanted

    def _uv(self, command: str, lines: Iterable[str], folder: str, *options: str) -> bool:
        """Return whether ``uv pip`` succeeds for requirements and the image's Python, in a folder. Nothing is built."""
        Path(folder, "lines.txt").write_text("\n".join(lines), encoding="utf-8")
        words = [*settings.UV, "pip", command, "--quiet", *options, "--only-binary", ":all:"]
        words += ["--python-version", self._recipe.base.python, "--python-platform", self._platform]
        words += ["--offline"] if self._context.offline else []
        words += ["--requirement", "lines.txt"] if command == "install" else ["lines.txt"]
        bundle = settings.ca_bundle()
        variables = settings.environment() | ({"SSL_CERT_FILE": str(bundle)} if bundle else {})
        return not subprocess.run(words, cwd=folder, env=variables, capture_output=True, check=False).returncode

    def _works(self, finding: Finding, changed: dict[str, str]) -> bool | None:
        """Return whether what failed works with other packages before those of the image; None if it was not tried."""
        assert self._sandbox
        if len(changed) > _MOST or self._recipe.framework.packages.keys() & changed.keys():
            return None
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file:
            lines = [f"{name}=={version}" for name, version in changed.items()]
            if not self._uv("install", lines, folder, "--no-deps", "--link-mode=copy", "--target=site"):
                return None
            site = Path(folder, "site")
            if sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) > _MOST_BYTES:
                return None
            self._tries += 1
            path = f"repair/{self._tries}"
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(site, arcname=str(self._tries))
            file.seek(0, io.SEEK_SET)
            self._sandbox.put(f"{FOLDER}/repair", file)
        named = [finding.package] if finding.kind == "modules" else []
        try:
            again = self._printed(self._run([finding.package], named, path))["findings"]
        except StepFailed:
            return None
        return not any(row["what"] == finding.what for row in again)
