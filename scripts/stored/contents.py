"""What an image holds, for `make diff` and `make sbom`: its settings, its layers, its Python and Debian packages.

Of a local image everything is read in one pass. Of an image at a registry the manifest and the configuration are
fetched, and its packages are taken from the SBOM beside it; layers are read only where there is none.
"""

from __future__ import annotations

import email.parser
import io
import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import docker.errors
from packaging.utils import canonicalize_name

from scripts import engine
from scripts.cli import UserError
from scripts.plan import LABELS
from scripts.published import registry
from scripts.published.tags import Repository
from scripts.spec import IMAGES
from scripts.stored import blobs, layers
from scripts.stored.settings import Configured

#: Files that are read from layers; no package's METADATA was over 0.3 MB, a dpkg status with 200 packages has 0.2 MB.
_LIMIT = 4 << 20

#: Names a layer's Debian packages are listed in, and the names of the distribution.
_STATUS = "var/lib/dpkg/status"
_RELEASE = ("etc/os-release", "usr/lib/os-release")


@dataclass(frozen=True)
class Package:
    """A Python distribution (its dist-info) or a Debian package. ``requires`` are PEP 508 lines, of Python's only."""

    name: str
    version: str
    license: str = ""
    architecture: str = ""
    requires: tuple[str, ...] = ()


@dataclass
class Held:
    """What one layer holds; ``debian`` and ``release`` are None where it does not store their lists."""

    size: int = 0
    python: dict[str, Package] = field(default_factory=dict)
    debian: tuple[Package, ...] | None = None
    release: dict[str, str] | None = None


@dataclass(frozen=True)
class Layer:
    """A layer; ``size`` in bytes of its files (None at a registry), ``stored`` of its packed blob."""

    name: str
    digest: str
    diff_id: str
    stored: int
    size: int | None


@dataclass(frozen=True)
class Image(Configured):
    """An image.

    Attributes:
        config: the OCI configuration.
        documents: digest -> bytes of the configuration and the manifest, as far as they have one.
        held: layer's diff id -> what it holds, of the layers that were read.
        repository: where it is, None on this host.
        listed: its packages by the SBOM at the registry, (Python, Debian); None if there is none.
    """

    reference: str
    digest: str
    config: dict[str, Any]
    documents: dict[str, int]
    layers: tuple[Layer, ...]
    held: dict[str, Held]
    repository: Repository | None = None
    listed: tuple[dict[str, Package], dict[str, Package]] | None = None

    def _configuration(self) -> dict[str, Any]:
        return self.config

    @property
    def stored(self) -> int:
        """Bytes that a pull of the whole image moves."""
        return sum(layer.stored for layer in self.layers) + sum(self.documents.values())

    def python(self, among: Iterable[str] | None = None) -> dict[str, Package]:
        """Canonical name -> package, of the layers ``among`` (diff ids), or of all."""
        found: dict[str, Package] = {}
        for held in self._chosen(among):
            found |= held.python
        return dict(sorted(found.items()))

    def debian(self, among: Iterable[str] | None = None) -> dict[str, Package]:
        """Name -> package, by the uppermost list: each list holds all packages below it too."""
        lists = [held.debian for held in self._chosen(among) if held.debian is not None]
        return {package.name: package for package in lists[-1]} if lists else {}

    def release(self) -> dict[str, str]:
        """The fields of os-release (``ID``, ``VERSION_ID``); empty where there is none."""
        found = [held.release for held in self._chosen(None) if held.release]
        return found[-1] if found else {}

    def _chosen(self, among: Iterable[str] | None) -> list[Held]:
        wanted = None if among is None else set(among)
        return [
            self.held[layer.diff_id]
            for layer in self.layers
            if layer.diff_id in self.held and (wanted is None or layer.diff_id in wanted)
        ]


def look(stream: io.BufferedReader) -> Held:
    """Read one layer's lists of packages.

    Raises:
        StepFailed: it is no layer, or it ends too early.
    """
    found = Held()
    for tar, member in blobs.members(stream):
        if not member.isreg():
            continue
        found.size += member.size
        path = posixpath.normpath(member.name).lstrip("/")
        folder, name = posixpath.split(path)
        metadata = name == "METADATA" and folder.endswith(".dist-info")
        if member.size > _LIMIT or not (metadata or path == _STATUS or path in _RELEASE):
            continue
        file = tar.extractfile(member)
        text = file.read().decode("utf-8", "replace") if file else ""
        if metadata:
            package = python_package(text)
            found.python[canonicalize_name(package.name)] = package
        elif path == _STATUS:
            found.debian = debian_packages(text)
        else:
            found.release = dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', text))
    return found


def python_package(metadata: str) -> Package:
    """A distribution by its METADATA (PyPA's "Core metadata specifications")."""
    fields = email.parser.HeaderParser().parsestr(metadata)
    return Package(
        name=str(fields.get("Name", "")),
        version=str(fields.get("Version", "")),
        license=str(fields.get("License-Expression", "")),
        requires=tuple(str(line) for line in fields.get_all("Requires-Dist") or ()),
    )


def debian_packages(status: str) -> tuple[Package, ...]:
    """The installed packages of a dpkg status file."""
    found = []
    for paragraph in status.split("\n\n"):
        fields = email.parser.HeaderParser().parsestr(paragraph)
        if str(fields.get("Status", "")).endswith(" installed"):
            found.append(
                Package(str(fields["Package"]), str(fields["Version"]), architecture=str(fields["Architecture"]))
            )
    return tuple(sorted(found, key=lambda package: package.name))


def _names(config: dict[str, Any], count: int) -> list[str]:
    """What to call an image's layers: the stages of its target's Dockerfile, else the instruction that made each."""
    instructions = layers.made_by(config, count)
    target = ((config.get("config") or {}).get("Labels") or {}).get(f"{LABELS}.target", "")
    dockerfile = IMAGES / str(target) / "Dockerfile"
    if target and dockerfile.is_file():
        return [stage for stage, _ in layers.name_layers(instructions, dockerfile.read_text(encoding="utf-8"))]
    shown = [re.sub(r"\s+", " ", instruction.removesuffix("# buildkit"))[:40].strip() for instruction in instructions]
    return [words or "base" for words in shown]


def local(reference: str) -> Image:
    """An image of this host, read in one pass.

    Raises:
        UserError: there is none. StepFailed: it cannot be read.
    """
    parts = blobs.read(reference, look)
    config = json.loads(parts.config)
    diff_ids = [str(diff_id) for diff_id in config["rootfs"]["diff_ids"]]
    names = _names(config, len(diff_ids))
    found = [
        Layer(name, layer.digest, diff_id, layer.stored, layer.found.size)
        for name, diff_id, layer in zip(names, diff_ids, parts.layers, strict=False)
    ]
    digest = engine.digest(reference)
    return Image(
        reference=reference,
        digest=digest,
        config=config,
        documents={parts.config_digest: len(parts.config), digest: len(parts.manifest)},
        layers=tuple(found),
        held={diff_id: layer.found for diff_id, layer in zip(diff_ids, parts.layers, strict=False)},
    )


def split(reference: str) -> tuple[str, str]:
    """Repository and tag or digest of a reference that starts with a registry's host.

    Raises:
        UserError: it does not.
    """
    match = re.fullmatch(r"([^@]+?)(?::([\w][\w.-]{0,127}))?(?:@(sha256:[0-9a-f]{64}))?", reference)
    if not match or "/" not in match[1] or not re.search(r"[.:]|^localhost$", match[1].split("/")[0]):
        raise UserError(
            f"{reference}: neither an image of this host nor <registry>/<path>:<tag>; 'docker pull {reference}' first, "
            "or run 'make image'"
        )
    return match[1], match[3] or match[2] or "latest"


def remote(reference: str) -> Image:
    """An image at a registry, by its manifest, its configuration and the SBOM beside it.

    Raises:
        UserError: it is not there. StepFailed: the registry is out of reach or refuses.
    """
    from scripts import sbom  # which reads images itself

    name, tag = split(reference)
    registry.check_address(name.rsplit("/", 1)[0])
    repository = Repository(name)
    manifest = repository.manifest(tag)
    if manifest is None:
        raise UserError(f"{name} has no {tag}")
    inner = blobs.manifest_of(json.loads(manifest.body))
    if inner:
        manifest = repository.manifest(inner)
        assert manifest is not None  # a registry refuses an index whose manifests it has not
    data = json.loads(manifest.body)
    config = repository.config(manifest)
    diff_ids = [str(diff_id) for diff_id in config["rootfs"]["diff_ids"]]
    names = _names(config, len(diff_ids))
    found = [
        Layer(name, str(entry["digest"]), diff_id, int(entry["size"]), None)
        for name, diff_id, entry in zip(names, diff_ids, data["layers"], strict=False)
    ]
    return Image(
        reference=reference,
        digest=manifest.digest,
        config=config,
        documents={str(data["config"]["digest"]): int(data["config"]["size"]), manifest.digest: len(manifest.body)},
        layers=tuple(found),
        held={},
        repository=repository,
        listed=sbom.listed(repository, manifest.digest),
    )


def find(reference: str) -> Image:
    """An image of this host by its name, or else one at a registry.

    Raises:
        UserError: there is neither. StepFailed: it cannot be read.
    """
    try:
        engine.client().images.get(reference)
    except docker.errors.ImageNotFound:
        return remote(reference)
    except docker.errors.APIError as error:
        raise UserError(f"{reference!r} is no reference of an image ({error.explanation})") from None
    return local(reference)


def fetch(image: Image, wanted: Iterable[Layer]) -> None:
    """Read layers of an image at a registry, as streams: nothing is stored, but the bytes do come over the network."""
    assert image.repository is not None
    for layer in wanted:
        if layer.diff_id not in image.held:
            answer = image.repository.request("GET", f"blobs/{layer.digest}", stream=True)
            answer.raw.auto_close = False  # or its end is an error to who reads once more, as gzip does
            with answer:
                image.held[layer.diff_id] = look(io.BufferedReader(answer.raw, blobs.CHUNK))
