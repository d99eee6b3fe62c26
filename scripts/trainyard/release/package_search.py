"""Find the images at a registry that have a package, by the SBOMs that ``trainyard push`` attached to them.

No image is pulled: tags, manifests and SBOMs are fetched, many at a time, and the configuration of each image that has
the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.table import Column, Table

from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import attached_sbom, image_index, referrers
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.documents import InvalidAnswer
from trainyard.oci.registry import Manifest, Repository
from trainyard.oci.transport import MAX_CONNECTIONS, Threads
from trainyard.spec.naming import is_immutable

#: Names of PyPI and of Debian (Debian Policy 5.6.7), which also contain ``+``.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")

#: What a Debian version consists of (Debian Policy 5.6.12).
_DEBIAN_VERSION = re.compile(r"==\s*([0-9][A-Za-z0-9.+~:-]*)")

#: Media types of the configurations of images.
_CONFIGURATIONS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")


@dataclass(frozen=True)
class Query:
    """Name a package, and the versions that are looked for.

    Attributes:
        name: of a Python or Debian package.
        versions: PEP 440 specifiers, such as ``<2.10``; ``==`` and a version also match a Debian package of exactly
            this version. Any version if empty.
    """

    name: str
    versions: str = ""

    @classmethod
    def parse(cls, text: str) -> Query:
        """Return the query that ``PACKAGE`` and version specifiers are, or raise a :class:`UserError`."""
        name = _NAME.match(text)
        query = cls(name[0], text[name.end() :].strip()) if name else None
        if query is None or (query.versions and query.specifiers is None and query.debian_version is None):
            example = "torch, 'torch<2.10', openssl or openssl==3.0.17-1~deb12u2"
            raise UserError(f"{text!r} is not a package, with or without versions (PEP 440): give one, as in {example}")
        return query

    @cached_property
    def specifiers(self) -> SpecifierSet | None:
        """Return the versions of a Python package; None for versions that only Debian packages have."""
        try:
            return SpecifierSet(self.versions, prereleases=True)
        except InvalidSpecifier:
            return None

    @property
    def debian_version(self) -> str | None:
        """Return the only version of a Debian package; None for any version, and for a range."""
        exact = _DEBIAN_VERSION.fullmatch(self.versions)
        return exact[1] if exact else None

    @property
    def is_range(self) -> bool:
        """Return whether it has versions that Debian packages cannot be compared with."""
        return bool(self.versions) and self.debian_version is None

    def takes_python(self, version: str) -> bool:
        """Return whether a Python package of the name has a version that is looked for."""
        try:
            return self.specifiers is not None and self.specifiers.contains(Version(version))
        except InvalidVersion:
            return self.versions in ("", f"==={version}")

    def takes_debian(self, version: str) -> bool:
        """Return whether a Debian package of the name has a version that is looked for."""
        return not self.is_range and self.debian_version in (None, version)

    def __str__(self) -> str:
        return f"{self.name}{self.versions}"


@dataclass
class StoredImage:
    """Describe an image at a registry, and how it can be referred to there.

    Attributes:
        immutable, floating: its tags, and those of the indexes that it is in.
        indexes: digests of the indexes that it is in.
        platform: as in ``linux/amd64``; empty if it was not fetched.
    """

    digest: str
    immutable: list[str] = field(default_factory=list)
    floating: list[str] = field(default_factory=list)
    indexes: list[str] = field(default_factory=list)
    platform: str = ""

    def add_tag(self, tag: str) -> None:
        """Add a tag, unless it is already listed."""
        tags = self.immutable if is_immutable(tag) else self.floating
        if tag not in tags:
            tags.append(tag)

    @property
    def shown(self) -> str:
        """Return its digest in short, and a tag if it has one."""
        tag = next(iter(self.immutable + self.floating), "no tag")
        return f"{self.digest[:19] or 'unknown'} ({tag})"


@dataclass(frozen=True)
class Layer:
    """Name the layer with a package: its blob and its name, which is empty if the SBOM does not list layers."""

    digest: str
    diff_id: str
    name: str


@dataclass(frozen=True)
class Match:
    """Hold a package of an image; ``kind`` is ``python`` or ``debian``, ``layer`` None if the SBOM does not name it."""

    image: StoredImage
    kind: str
    package: str
    version: str
    layer: Layer | None


@dataclass(frozen=True)
class Answer:
    """Hold the result of a search.

    Attributes:
        repository: ``host[:port]/path`` that was searched.
        images: how many images it has.
        matches: the packages that were looked for, by image.
        not_covered: images whose packages are not known, and why.
        not_compared: images with a Debian package of the name, if a range was looked for.
    """

    query: Query
    repository: str
    images: int
    matches: list[Match]
    not_covered: list[tuple[StoredImage, str]]
    not_compared: list[StoredImage]

    @property
    def digests(self) -> list[str]:
        """Return the digests of the images that have the package."""
        return list(dict.fromkeys(match.image.digest for match in self.matches))

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as JSON has it."""
        return {
            "query": str(self.query),
            "repository": self.repository,
            "images": self.images,
            "matches": [asdict(match) for match in self.matches],
            "not_covered": [asdict(image) | {"reason": reason} for image, reason in self.not_covered],
            "not_compared": [asdict(image) for image in self.not_compared],
        }


def _is_image(document: dict[str, Any]) -> bool:
    """Return whether a manifest is of an image, not of another artifact such as a Helm chart."""
    kind = str((document.get("config") or {}).get("mediaType"))
    return kind in _CONFIGURATIONS and not document.get("artifactType") and not document.get("subject")


@dataclass(frozen=True)
class _Result:
    """Hold what an image has: matches, or why it is not covered, or a Debian package that was not compared."""

    matches: tuple[Match, ...] = ()
    not_covered: str = ""
    not_compared: bool = False


class _Search:
    """Search a repository once, with :data:`MAX_CONNECTIONS` requests at a time."""

    def __init__(self, repository: Repository, query: Query, pool: Threads) -> None:
        self.repository, self.query, self._pool = repository, query, pool
        self._manifests: dict[str, Manifest] = {}
        self.images: dict[str, StoredImage] = {}
        self.invalid: dict[str, str] = {}

    def _manifest(self, version: str) -> Manifest | None:
        """Return the manifest of a tag or digest; None if there is none, or if the response is noted as invalid."""
        try:
            return self.repository.manifest(version)
        except InvalidAnswer as error:
            self.invalid[version] = str(error)
            return None

    def _fetch(self, versions: Iterable[str]) -> dict[str, Manifest]:
        """Return tag or digest -> manifest, without those that the registry no longer has."""
        wanted = list(versions)
        pairs = zip(wanted, self._pool.map(self._manifest, wanted), strict=True)
        manifests = {version: manifest for version, manifest in pairs if manifest is not None}
        self._manifests |= {manifest.digest: manifest for manifest in manifests.values()}
        return manifests

    def list_images(self) -> None:
        """Find the images of all tags and referrers, or raise a :class:`UserError` if there is none."""
        tags = self.repository.tags()
        for tag, manifest in self._fetch(tag for tag in tags if not referrers.subject_of(tag)).items():
            self._add(manifest, tag)
        # An image without a tag can still be pulled by its digest, and its referrers name it.
        subjects = {digest for digest in map(referrers.subject_of, tags) if digest}
        for manifest in self._fetch(sorted(subjects - self._manifests.keys())).values():
            self._add(manifest)
        self._resolve_indexes()
        if not self.images and not self.invalid:
            raise UserError(
                f"{self.repository.name} has no image: check '--registry', as it was given to 'trainyard push'"
            )

    def _add(self, manifest: Manifest, tag: str = "") -> None:
        document = manifest.document
        if not image_index.is_index(document) and not _is_image(document):
            return
        image = self.images.setdefault(manifest.digest, StoredImage(manifest.digest))
        if tag:
            image.add_tag(tag)

    def _resolve_indexes(self) -> None:
        """Replace each index by its images."""
        documents = {digest: self._manifests[digest].document for digest in self.images}
        indexes = {digest: one for digest, one in documents.items() if image_index.is_index(one)}
        members = {digest: image_index.images(document) for digest, document in indexes.items()}
        wanted = {member for some in members.values() for member in some.values()}
        self._fetch(sorted(wanted - self._manifests.keys()))
        for digest, some in members.items():
            index = self.images.pop(digest)
            for member in some.values():
                image = self.images.setdefault(member, StoredImage(member))
                image.indexes.append(digest)
                for tag in index.immutable + index.floating:
                    image.add_tag(tag)

    def results(self) -> list[tuple[StoredImage, _Result]]:
        """Return what each image has."""
        images = list(self.images.values())
        return list(zip(images, self._pool.map(self._result, images), strict=True))

    def _result(self, image: StoredImage) -> _Result:
        if image.digest not in self._manifests:
            lost = "it is in an index, but no longer at the registry"
            return _Result(not_covered=self.invalid.get(image.digest, lost))
        try:
            document = attached_sbom.document(self.repository, image.digest)
        except StepFailed as error:
            return _Result(not_covered=str(error))
        if document is None:
            return _Result(not_covered="it has no SBOM")
        python, debian = attached_sbom.packages(document)
        own, system = python.get(canonicalize_name(self.query.name)), debian.get(self.query.name)
        wanted = {}
        if own and self.query.takes_python(own.version):
            wanted["python"] = own
        if system and self.query.takes_debian(system.version):
            wanted["debian"] = system
        matches = self._located(image, wanted, attached_sbom.layer_names(document)) if wanted else ()
        return _Result(matches, not_compared=system is not None and self.query.is_range)

    def _located(
        self, image: StoredImage, wanted: dict[str, InstalledPackage], names: dict[str, str]
    ) -> tuple[Match, ...]:
        """Return the matches of an image with their layers, and note its platform."""
        manifest = self._manifests[image.digest]
        config = self.repository.config(manifest)
        image.platform = f"{config.get('os')}/{config.get('architecture')}"
        diff_ids = (config.get("rootfs") or {}).get("diff_ids") or []
        blobs = [str(layer["digest"]) for layer in manifest.document["layers"]]
        pairs = zip(diff_ids, blobs, strict=False)
        layers = {diff_id: Layer(blob, diff_id, names.get(diff_id, "")) for diff_id, blob in pairs}
        return tuple(
            Match(image, kind, package.name, package.version, layers.get(package.layer))
            for kind, package in wanted.items()
        )


def search(repository: Repository, query: Query) -> Answer:
    """Return the images of a repository that have a package.

    Raises:
        UserError: the repository has no image; or only Debian packages have the name, and a range was given.
    """
    with Threads(MAX_CONNECTIONS) as pool:
        running = _Search(repository, query, pool)
        running.list_images()
        results = running.results()
    matches = [match for _, result in results for match in result.matches]
    not_covered = [(image, result.not_covered) for image, result in results if result.not_covered]
    for version, reason in running.invalid.items():
        if version not in running.images:
            image = StoredImage(version if ":" in version else "")
            if ":" not in version:
                image.add_tag(version)
            not_covered.append((image, reason))
    not_compared = [image for image, result in results if result.not_compared]
    if not_compared and not matches:
        raise UserError(
            f"{query.name} is a Debian package in {len(not_compared)} images: version ranges are for Python packages, "
            f"so give '{query.name}' or '{query.name}==<version>'"
        )
    return Answer(query, repository.name, len(results), matches, not_covered, not_compared)


def table(answer: Answer) -> Table:
    """Return the matches for people."""
    shown = Table("digest", "platform", "package", "layer", Column("tags", overflow="fold"))
    for match in answer.matches:
        layer = match.layer
        shown.add_row(
            match.image.digest[:19],
            match.image.platform,
            f"{match.package} {match.version}",
            (layer.name or layer.digest[:19]) if layer else "-",
            "\n".join(match.image.immutable + match.image.floating) or "-",
        )
    return shown
