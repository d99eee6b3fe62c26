"""Lock a target for all its platforms and package indexes, and bring its Dockerfiles up to date.

uv resolves all platforms at once, so that they agree. Versions of the lock that is there are kept until something needs
another one.
"""

from __future__ import annotations

import datetime
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.pylock import Package, is_valid_pylock_path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.errors import StepFailed, UserError, nearest
from trainyard.common.installation import check_writable
from trainyard.image import base_contents, dockerfile, package_index
from trainyard.image import framework_contradictions as contradictions
from trainyard.image.resolver import Failed, Project, check_conflicts, default_index
from trainyard.spec import catalog, framework, markers, pylock, repository_files
from trainyard.spec import lock as locks
from trainyard.spec.lock import DEFAULT, Lock, Section
from trainyard.spec.model import BaseContents, Spec, each_platform, load, relative, requirements_of
from trainyard.spec.pylock import Content, Entry, File
from trainyard.workspace.lines import without_userinfo

logger = logging.getLogger(__name__)


def lock(spec: Spec) -> tuple[Spec, list[Path]]:
    """Lock a target, and write its locks; see :func:`resolve` and :func:`write`."""
    return write(spec, resolve(spec))


def resolve(spec: Spec, *, upgrade: bool = False, upgrade_packages: Sequence[str] = ()) -> dict[str, Content]:
    """Resolve a target for the default index, and for the index of its spec if that answers.

    Packages that a nightly names without a version are locked in their newest release, pre-releases included, and so is
    everything that it needs.

    Args:
        upgrade: keep no version, ``upgrade_packages``: names whose versions are not kept.
    Returns:
        Name of an index -> the content of its lock.
    Raises:
        UserError: its versions conflict by images/conflicts.yaml, its base cannot be inspected, or it is part of the
            installed package.
        StepFailed: uv found no solution.
    """
    check_writable(spec.lock_file)  # before packages are resolved or a base is pulled, which take minutes
    known = spec.usable_lock or Lock()
    upgraded = set(map(canonicalize_name, upgrade_packages))
    if upgraded and (unknown := sorted(upgraded - {name for name, _ in _known(known, DEFAULT)})):
        names = [name for name, _ in _known(known, DEFAULT)]
        raise UserError(f"{relative(spec.lock_file)}: no package '{unknown[0]}'{nearest(unknown[0], names)}")
    if spec.base_spec().framework:
        return {DEFAULT: _beside_base(spec, base_contents.inspect(spec))}
    index, reason = package_index.choose(spec)
    if index == DEFAULT and reason:
        logger.warning(f"no lock for index '{spec.framework.index}': {reason}")
    every = upgrade or (spec.nightly and not spec.framework_of)
    contents: dict[str, Content] = {}
    for name in dict.fromkeys((DEFAULT, index)):
        kept = [] if every else [pair for pair in _known(known, name) if pair[0] not in upgraded]
        constraints = _chosen(spec, contents.get(DEFAULT))
        contents[name] = _resolved(spec, name, kept, constraints)
    return contents


def lock_index(spec: Spec, index: str) -> tuple[Spec, list[Path]]:
    """Lock a target, which is locked for the default index, for another one too, and write that.

    Returns, Raises:
        See :func:`resolve` and :func:`write`.
    """
    check_writable(spec.lock_file)
    contents = read(spec)
    content = _resolved(spec, index, _known(spec.usable_lock or Lock(), DEFAULT), _chosen(spec, contents.get(DEFAULT)))
    return write(spec, {**contents, index: content})


def lock_versions(spec: Spec, wanted: Lock) -> tuple[Spec, list[Path]]:
    """Lock a target in the versions of another lock, for the platforms and indexes that this has, and write it.

    Returns, Raises:
        See :func:`resolve` and :func:`write`.
    """
    contents = {}
    for index in {section.index for section in wanted.sections}:
        exact = [
            f"{name}=={version} ; {pylock.marker(platform.arch)}"
            for platform in each_platform(spec)
            if (locked := wanted.of(platform.arch, index))
            for name, version in locked.versions.items()
        ]
        contents[index] = replace(_resolved(spec, index, [], exact), day=wanted.day)
    return write(spec, contents)


def read(spec: Spec) -> dict[str, Content]:
    """Return name of an index -> the content of its lock, for the locks of a target.

    Raises:
        UserError: one cannot be used.
    """
    contents = {}
    for index, path in pylock.files(spec.folder).items():
        try:
            contents[index] = pylock.loads(path.read_text(encoding="utf-8"), spec.command("lock"))
        except ValueError as error:
            raise UserError(f"{relative(path)}{error}") from None
    return contents


def write(spec: Spec, contents: Mapping[str, Content]) -> tuple[Spec, list[Path]]:
    """Write the locks of a target and the Dockerfiles that have them, and remove those of other indexes.

    Returns:
        The spec with its new lock, and the paths of what changed.
    Raises:
        UserError: it is part of the installed package, or its folder cannot be written.
    """
    written = changed(spec, contents)
    for path, text in written.items():
        check_writable(path)
        if text:
            repository_files.write(path.parent, path.name, text)
        else:
            path.unlink()
    spec = spec.with_lock(pylock.of_contents(contents))
    return spec, [*written, *dockerfile.write(dockerfile.rendered(spec))]


def changed(spec: Spec, contents: Mapping[str, Content]) -> dict[Path, str]:
    """Return path -> text of the locks of a target that change; empty for those of indexes that it lacks now."""
    texts = {spec.folder / pylock.file_name(index): content.text() for index, content in contents.items()}
    gone = {path: "" for path in pylock.files(spec.folder).values() if path not in texts}
    return {path: texts[path] for path in dockerfile.differing(texts)} | gone


def export(spec: Spec, path: Path) -> None:
    """Write the lock of a target with the addresses of its files at the package index that this machine uses.

    It is the lock of the index that an image would be built from.

    Raises:
        UserError: no tool reads a file of that name; the framework is in the base image; the index lacks a file; the
            lock cannot be used; or it is of a user's repository.
        StepFailed: the index does not answer, or lacks a package.
    """
    if not is_valid_pylock_path(path):
        raise UserError(f"'--export {path}': uv and pip read files that are named pylock.NAME.toml")
    if spec.lock_file.name != pylock.FILE:
        raise UserError(f"{relative(spec.lock_file)}: '--export' is for a target of the catalogue")
    contents = read(spec)
    index = package_index.choose(spec)[0]
    index = index if index in contents else DEFAULT
    spec.locked(index)  # reports a lock that is missing
    content = contents[index]
    if content.base:
        raise UserError(f"{relative(spec.lock_file)}: the framework is in the base image, and on no package index")
    image = _Image(spec, index, each_platform(spec))
    found = image.packages(_exactly(content.entries))
    addresses = {file.sha256: without_userinfo(file.url) for file in _files(found)}
    if lacking := next((file for file in _files(content.entries) if file.sha256 not in addresses), None):
        raise UserError(
            f"{relative(spec.lock_file)}: no package index has {lacking.name} with SHA-256 {lacking.sha256}"
        )
    entries = {
        arch: [
            replace(entry, files=tuple(replace(file, url=addresses[file.sha256]) for file in entry.files))
            for entry in every
        ]
        for arch, every in content.entries.items()
    }
    path.write_text(replace(content, entries=entries).text(addresses=True), encoding="utf-8")


def _files(entries: Mapping[str, Sequence[Entry]]) -> Iterator[File]:
    return (file for every in entries.values() for entry in every for file in entry.files)


def _known(known: Lock, index: str) -> list[tuple[str, str]]:
    """Return the names and versions that a lock has for an index on any platform, or for the default index."""
    index = index if any(section.index == index for section in known.sections) else DEFAULT
    kinds = ("framework", "requirements")
    texts = [text for section, text in known.sections.items() if section.index == index and section.kind in kinds]
    return sorted({(pin.name, pin.version) for text in texts for pin in locks.parse(text)})


def _chosen(spec: Spec, content: Content | None) -> list[str]:
    """Return pins of the packages that a nightly names without a version, as the lock of another index has them."""
    names = framework.unpinned(spec.framework.packages)
    entries = itertools.chain.from_iterable(content.entries.values() if content else ())
    return sorted({f"{entry.name}=={entry.version}" for entry in entries if entry.name in names})


@dataclass(frozen=True)
class _Image:
    """Hold what is resolved for a target: all its platforms, and a package index.

    Attributes:
        kept: names and versions that are kept if the requirements allow it.
        constraints: that everything has to fulfil, such as ``numpy<2.4``.
        options: uv's settings besides.
    """

    spec: Spec
    index: str
    platforms: Sequence[Spec]
    kept: Iterable[tuple[str, str]] = ()
    constraints: Sequence[str] = ()
    options: Mapping[str, object] = field(default_factory=dict)

    def packages(self, lines: Sequence[str], constraints: Sequence[str] = ()) -> dict[str, list[Entry]]:
        """Return name of an architecture -> everything that requirements need.

        A version without a file for one of the platforms is left out.

        Raises:
            StepFailed: uv found no solution.
        """
        unfit: dict[str, str] = {}
        while True:
            project = self._project(lines, [*self.constraints, *constraints, *unfit])
            try:
                locked = project.locked()
            except Failed:
                if unfit:
                    raise StepFailed(f"cannot lock {self.spec.target}: {[*unfit.values()][-1]}") from None
                raise
            every = {platform.arch: dict(_usable(locked, platform)) for platform in self.platforms}
            lacking = {
                f"{entry.name}!={entry.version}": f"{entry.name} {entry.version} has no file for linux/{arch} and "
                f"Python {self.spec.python_version} of {self.spec.base}"
                for arch, entries in every.items()
                for entry in entries.values()
                if not entry.files
            }
            if not lacking:
                return {arch: [entry for _, entry in sorted(entries.items())] for arch, entries in every.items()}
            unfit |= lacking

    def _project(self, lines: Sequence[str], constraints: Sequence[str]) -> Project:
        spec, options = self.spec, dict(self.options)
        # https://docs.astral.sh/uv/reference/settings/#exclude-newer
        options |= {"exclude-newer": spec.context.as_of} if spec.context.as_of else {}
        options["constraint-dependencies"] = constraints
        if extra := package_index.extra(spec, self.index):
            name, address, packages = extra
            options["index"] = [{"name": name, "url": address, "explicit": True}]
            options["sources"] = {package: {"index": name} for package in packages}
        kept = [f'[[packages]]\nname = "{name}"\nversion = "{version}"\n' for name, version in self.kept]
        return Project(
            spec.target,
            lines,
            spec.python_version,
            spec.context.offline,
            options=options,
            indexes=default_index(),
            preferred="".join(['lock-version = "1.0"\ncreated-by = "trainyard"\n', *kept]) if kept else "",
            # One environment: uv resolves each that is listed by itself.
            environments=[" or ".join(pylock.marker(one.arch, spec.python_version) for one in self.platforms)],
        )


def _usable(packages: Iterable[Package], platform: Spec) -> Iterator[tuple[str, Entry]]:
    """Yield the packages of a resolution that a platform has, with the files that it can use."""
    python, architecture = platform.python_version, platform.architecture
    environment: dict[str, str | Set[str]] = {**markers.environment(python, architecture.machine)}
    environment |= {"extras": frozenset(), "dependency_groups": frozenset()}
    glibc = platform.wheel_platform.rpartition("manylinux_")[2].replace("_", ".")
    for package in packages:
        if package.marker is None or package.marker.evaluate(environment, context="lock_file"):
            try:
                files = pylock.usable_files(package, python, architecture.name, glibc)
            except ValueError as error:
                raise StepFailed(f"cannot lock {platform.target}: {error}") from None
            yield package.name, Entry(package.name, str(package.version), files)


def _resolved(spec: Spec, index: str, kept: Iterable[tuple[str, str]], constraints: Sequence[str]) -> Content:
    """Resolve framework and requirements together, so that they are compatible, and mark what the framework needs."""
    platforms = each_platform(spec)
    names = {canonicalize_name(Requirement(text).name) for text in spec.framework.packages}
    variants = contradictions.variants(dict.fromkeys(names, "0")).keys() - names
    newest = framework.unpinned(spec.framework.packages)
    options: dict[str, object] = {"exclude-dependencies": sorted(variants)}
    options |= {"prerelease-package": dict.fromkeys(newest, "allow")} if newest else {}
    image = _Image(spec, index, platforms, kept, constraints, options)
    if spec.framework_of:
        return _on_target(image, load(str(spec.framework_of), spec.arch, spec.context))
    lines = [*spec.framework.packages, *requirements_of(spec)]
    together = _without_conflicts(image, lines)
    alone = image.packages(spec.framework.packages, _exactly(together))
    of_framework = {arch: {entry.name for entry in entries} for arch, entries in alone.items()}
    entries = {
        arch: [replace(entry, framework=entry.name in of_framework[arch]) for entry in every]
        for arch, every in together.items()
    }
    day = f"{datetime.datetime.now(tz=datetime.UTC):%Y%m%d}" if newest else ""
    return Content(spec.python_version, entries, day)


def _without_conflicts(image: _Image, lines: Sequence[str]) -> dict[str, list[Entry]]:
    """Resolve with the constraints of images/conflicts.yaml, unless the requirements exclude them."""
    spec, together = image.spec, image.packages(lines)
    installed = [{entry.name: entry.version for entry in entries} for entries in together.values()]
    held = [
        one
        for one in catalog.conflicts().values()
        if one.constraint and any(one.holds(versions, spec.python_version) for versions in installed)
    ]
    if held:
        try:
            together = image.packages(lines, [one.constraint for one in held])
        except StepFailed:
            for one in held:
                logger.warning(f"{spec.where}: the requirements exclude '{one.constraint}': {one.reason}")
    for entries in together.values():
        check_conflicts(spec, {entry.name: entry.version for entry in entries})
    return together


def _exactly(entries: Mapping[str, Sequence[Entry]]) -> list[str]:
    """Return constraints that allow each platform its packages alone."""
    return [
        f"{entry.name}=={entry.version} ; {pylock.marker(arch)}" for arch, every in entries.items() for entry in every
    ]


def _on_target(image: _Image, parent: Spec) -> Content:
    """Resolve the requirements of an image that has the framework of a target.

    What it has in common with the target has the same versions, and so the same layers.
    """
    parent.locked(image.index)  # reports a lock that cannot be used
    content = read(parent)[image.index]
    of_parent = {platform.arch: content.entries[platform.arch] for platform in image.platforms}
    fixed = {arch: [entry for entry in entries if entry.framework] for arch, entries in of_parent.items()}
    versions = {entry.name: entry.version for entries in of_parent.values() for entry in entries}
    kept = {**dict(image.kept), **versions}
    image = replace(image, kept=kept.items(), constraints=[*image.constraints, *_exactly(fixed)])
    together = _without_conflicts(image, [*image.spec.framework.packages, *requirements_of(image.spec)])
    entries: dict[str, list[Entry]] = {}
    for arch, every in together.items():
        shared = {_identity(entry) for entry in of_parent[arch]}
        others = [entry for entry in every if entry.name not in {one.name for one in fixed[arch]}]
        others = [replace(entry, added=_identity(entry) not in shared) for entry in others]
        entries[arch] = sorted([*fixed[arch], *others], key=lambda entry: entry.name)
    return Content(image.spec.python_version, entries, content.day)


def _identity(entry: Entry) -> tuple[str, str, frozenset[str]]:
    return entry.name, entry.version, frozenset(file.sha256 for file in entry.files)


def _beside_base(spec: Spec, contents: BaseContents) -> Content:
    """Record the packages of a base that holds the framework, and lock the requirements that it lacks.

    Requirements that the base satisfies are used from it; the others are locked, and precede the base's packages on the
    module path.
    """
    taken = set(map(canonicalize_name, spec.base_spec().framework))
    needs = [
        str(requirement)
        for text in itertools.chain.from_iterable(contents.requires.get(name, []) for name in sorted(taken))
        if (requirement := Requirement(text)).marker is None and canonicalize_name(requirement.name) not in taken
    ]
    sections = {Section(spec.arch, "base"): contents.text(), Section(spec.arch, "requirements"): ""}
    inspected = spec.with_lock(Lock(sections))
    known = [(name, version) for name, version in contents.packages.items() if base_contents.is_version(version)]
    image = _Image(inspected, DEFAULT, [inspected], kept=known, constraints=needs)
    resolved = _without_conflicts(image, requirements_of(inspected))[spec.arch]
    check_conflicts(spec, contents.packages | {entry.name: entry.version for entry in resolved})
    rest = [
        entry for entry in resolved if entry.name not in taken and contents.packages.get(entry.name) != entry.version
    ]
    return Content(inspected.python_version, {spec.arch: rest}, base={spec.arch: contents})
