"""List the contents of an image, for `make diff` and `make sbom`: settings, layers, Python and Debian packages.

A local image is read in one pass. Of an image at a registry, the manifest, the configuration and the attached SBOM,
which lists its packages, are fetched; layers are read only if there is no SBOM.
"""

from __future__ import annotations

import contextlib
import email.parser
import functools
import io
import json
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import docker.errors
from packaging.utils import canonicalize_name

from trainyard import recipe as recipes
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.oci import attached_sbom, image_index, image_store, layers, wheel_libraries
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.documents import Configured
from trainyard.oci.reference import Reference
from trainyard.oci.registry import Repository
from trainyard.oci.wheel_libraries import Library
from trainyard.recipe import Recipe

#: Most bytes of a file that is read from a layer: METADATA files have up to 0.3 MB, a dpkg status of 200 packages 0.2.
_LIMIT = 4 << 20

#: The file that lists a layer's Debian packages, and the files that name the distribution.
_STATUS = "var/lib/dpkg/status"
_RELEASE = ("etc/os-release", "usr/lib/os-release")
_RECIPE = recipes.PATH.lstrip("/")

#: The header with the version of a Python that was compiled, as in the official images of Python; Debian's is in /usr.
_PYTHON = re.compile(r"usr/local/include/python3\.\d+/patchlevel\.h")


@dataclass
class LayerPackages:
    """Describe a layer; ``size`` in bytes, ``debian`` and ``release`` are None if it does not store their files.

    Attributes:
        folders: canonical name -> .dist-info folder of each of ``python``.
        removed: paths that the layer hides (whiteouts).
        recipe: of the image; None in the layers that do not have it.
        interpreter: version of a Python that no Debian package brought; empty if there is none.
        libraries: canonical name -> libraries of others in each of ``python``, if they were asked for.
    """

    size: int = 0
    python: dict[str, InstalledPackage] = field(default_factory=dict)
    debian: tuple[InstalledPackage, ...] | None = None
    release: dict[str, str] | None = None
    folders: dict[str, str] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    recipe: Recipe | None = None
    interpreter: str = ""
    libraries: dict[str, tuple[Library, ...]] = field(default_factory=dict)

    def hides(self, path: str) -> bool:
        """Return whether the layer removes a path of the layers below it, or a folder above that."""
        return any(f"{path}/".startswith(f"{removed}/") for removed in self.removed)


@dataclass(frozen=True)
class LayerSummary:
    """Describe a layer; in bytes, ``stored`` is the size of its blob, ``size`` of its files (None at a registry)."""

    name: str
    digest: str
    diff_id: str
    stored: int
    size: int | None


@dataclass(frozen=True)
class Image(Configured):
    """Describe an image.

    Attributes:
        config: the OCI configuration.
        documents: digest -> size in bytes of the configuration and of the manifest.
        layer_contents: layer's diff id -> contents, of the layers that were read.
        repository: where it is; None for a local image.
        listed: its packages by the SBOM at the registry, (Python, Debian); None if there is none.
    """

    reference: str
    digest: str
    config: dict[str, Any]
    documents: dict[str, int]
    layers: tuple[LayerSummary, ...]
    layer_contents: dict[str, LayerPackages]
    repository: Repository | None = None
    listed: tuple[dict[str, InstalledPackage], dict[str, InstalledPackage]] | None = None

    def _configuration(self) -> dict[str, Any]:
        return self.config

    @property
    def recipe(self) -> Recipe | None:
        """Return the recipe in the image, by the layers that were read; None if they have none."""
        return next((contents.recipe for _, contents in reversed(self._read()) if contents.recipe), None)

    @property
    def stored(self) -> int:
        """Return bytes that a pull of the whole image transfers."""
        return sum(layer.stored for layer in self.layers) + sum(self.documents.values())

    def python(self, among: Iterable[str] | None = None) -> dict[str, InstalledPackage]:
        """Return canonical name -> package, of the layers ``among`` (diff ids), or of all."""
        packages: dict[str, InstalledPackage] = {}
        folders: dict[str, str] = {}
        for _, contents in self._read(among):
            hidden = [name for name, folder in folders.items() if contents.hides(folder)]
            packages = {name: package for name, package in packages.items() if name not in hidden} | contents.python
            folders = {name: folder for name, folder in folders.items() if name not in hidden} | contents.folders
        return dict(sorted(packages.items()))

    def debian(self, among: Iterable[str] | None = None) -> dict[str, InstalledPackage]:
        """Return name -> package, by the uppermost list, which includes the packages of the layers below."""
        lists = [contents.debian for _, contents in self._read(among) if contents.debian is not None]
        return {package.name: package for package in lists[-1]} if lists else {}

    def python_layers(self) -> dict[str, str]:
        """Return canonical name -> diff id of the layer that the Python package is in."""
        return {name: layer.diff_id for layer, contents in self._read() for name in contents.python}

    def libraries(self) -> dict[str, tuple[Library, ...]]:
        """Return canonical name of a Python package -> the libraries of others in it."""
        return {name: contents.libraries.get(name, ()) for _, contents in self._read() for name in contents.python}

    def debian_layers(self) -> dict[str, str]:
        """Return name -> diff id of the layer that brought the Debian package in its version."""
        brought: dict[tuple[str, str], str] = {}
        for layer, contents in self._read():
            if contents.debian is not None:
                keys = [(package.name, package.version) for package in contents.debian]
                brought = {key: brought.get(key, layer.diff_id) for key in keys}
        return {name: diff_id for (name, _), diff_id in brought.items()}

    def release(self) -> dict[str, str]:
        """Return the fields of os-release (``ID``, ``VERSION_ID``); empty if there is none."""
        return next((contents.release for _, contents in reversed(self._read()) if contents.release), {})

    def interpreter(self) -> tuple[str, str]:
        """Return the version of a Python that no Debian package brought, and the diff id of its layer; or ``""``."""
        found = ((contents.interpreter, layer.diff_id) for layer, contents in reversed(self._read()))
        return next((one for one in found if one[0]), ("", ""))

    def _read(self, among: Iterable[str] | None = None) -> list[tuple[LayerSummary, LayerPackages]]:
        """Return the layers that were read, of those ``among`` (diff ids) or of all, the lowest first."""
        wanted = self.layer_contents.keys() & among if among is not None else self.layer_contents
        return [(layer, self.layer_contents[layer.diff_id]) for layer in self.layers if layer.diff_id in wanted]


def read_layer(
    stream: io.BufferedReader, expected: image_store.Expected | None = None, *, libraries: bool = False
) -> LayerPackages:
    """Read one layer's packages, and the libraries in wheels if asked to; see :func:`image_store.members`."""
    found = LayerPackages()
    wheels = wheel_libraries.Wheels() if libraries else None
    for tar, member in image_store.members(stream, expected):
        path = posixpath.normpath(member.name).lstrip("/")
        folder, name = posixpath.split(path)
        if name.startswith(".wh."):  # https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts
            found.removed.add(folder if name == ".wh..wh..opq" else posixpath.join(folder, name.removeprefix(".wh.")))
        metadata = name == "METADATA" and folder.endswith(".dist-info")
        if metadata and member.islnk():  # the file was passed: the folder has the name and the version
            project, _, version = posixpath.basename(folder).removesuffix(".dist-info").partition("-")
            found.python[canonicalize_name(project)] = InstalledPackage(project, version)
            found.folders[canonicalize_name(project)] = folder
        if not member.isreg():
            continue
        found.size += member.size
        if wheels and wheels.read(path, tar, member):
            continue
        python = _PYTHON.fullmatch(path)
        if member.size > _LIMIT or not (metadata or python or path in (_STATUS, _RECIPE, *_RELEASE)):
            continue
        file = tar.extractfile(member)
        text = file.read().decode("utf-8", "replace") if file else ""
        if metadata:
            package = python_package(text)
            found.python[canonicalize_name(package.name)] = package
            found.folders[canonicalize_name(package.name)] = folder
        elif python:
            found.interpreter = "".join(re.findall(r'(?m)^#define\s+PY_VERSION\s+"([^"]+)"', text)[:1])
        elif path == _STATUS:
            found.debian = debian_packages(text)
        elif path == _RECIPE:
            with contextlib.suppress(ValueError):
                found.recipe = recipes.parse(text)
        else:
            found.release = os_release(text)
    if wheels:
        packages = found.python.items()
        found.libraries = {name: wheels.of(name, one.version, found.folders[name]) for name, one in packages}
    return found


def os_release(text: str) -> dict[str, str]:
    """Return the fields of an os-release file (https://www.freedesktop.org/software/systemd/man/latest/os-release.html)."""
    return dict(re.findall(r'(?m)^([A-Z_]+)="?([^"\n]*)"?$', text))


def python_package(metadata: str) -> InstalledPackage:
    """Return a distribution by its METADATA (PyPA's "Core metadata specifications")."""
    fields = email.parser.HeaderParser().parsestr(metadata)
    return InstalledPackage(
        name=str(fields.get("Name", "")),
        version=str(fields.get("Version", "")),
        license=str(fields.get("License-Expression", "")),
        requires=tuple(str(line) for line in fields.get_all("Requires-Dist") or ()),
    )


def debian_packages(status: str) -> tuple[InstalledPackage, ...]:
    """Return the installed packages of a dpkg status file."""
    packages = []
    for paragraph in status.split("\n\n"):
        fields = email.parser.HeaderParser().parsestr(paragraph)
        if str(fields.get("Status", "")).endswith(" installed"):
            # "Source: gcc-14 (14.2.0-19)", where name or version are not those of the package (Debian Policy 5.6.1)
            source, _, version = str(fields.get("Source", "")).partition(" ")
            packages.append(
                InstalledPackage(
                    str(fields["Package"]),
                    str(fields["Version"]),
                    architecture=str(fields["Architecture"]),
                    source=source,
                    source_version=version.strip("()"),
                )
            )
    return tuple(sorted(packages, key=lambda package: package.name))


def _names(config: dict[str, Any], count: int, recipe: Recipe | None = None) -> list[str]:
    """Return names of layers: the stages of the recipe, else the instruction that created each."""
    instructions = layers.made_by(config, count)
    if recipe:
        return [stage for stage, _ in layers.name_layers(instructions, recipe.layers)]
    shown = [re.sub(r"\s+", " ", instruction.removesuffix("# buildkit"))[:40].strip() for instruction in instructions]
    return [words or "base" for words in shown]


def local(engine: Engine, reference: str, *, libraries: bool = False) -> Image:
    """Return a local image, read in one pass; see :func:`trainyard.oci.image_store.read` and :func:`read_layer`."""
    parts = image_store.read(engine, reference, functools.partial(read_layer, libraries=libraries))
    config = json.loads(parts.config)
    diff_ids = [str(diff_id) for diff_id in config["rootfs"]["diff_ids"]]
    recipe = next((layer.found.recipe for layer in reversed(parts.layers) if layer.found.recipe), None)
    names = _names(config, len(diff_ids), recipe)
    summaries = [
        LayerSummary(name, layer.digest, diff_id, layer.stored, layer.found.size)
        for name, diff_id, layer in zip(names, diff_ids, parts.layers, strict=False)
    ]
    digest = engine.digest(reference)
    return Image(
        reference=reference,
        digest=digest,
        config=config,
        documents={parts.config_digest: len(parts.config), digest: len(parts.manifest)},
        layers=tuple(summaries),
        layer_contents={diff_id: layer.found for diff_id, layer in zip(diff_ids, parts.layers, strict=False)},
    )


def at_registry(reference: str) -> tuple[Repository, str]:
    """Return the repository of a reference that names its registry, and the tag or digest in it.

    Raises:
        UserError: it names none, or is not a reference.
    """
    try:
        named = Reference.parse(reference)
    except UserError as error:
        raise UserError(f"neither an image of this host nor at a registry: {error}") from None
    if named.names_docker_hub:
        raise UserError(
            f"{reference}: neither an image of this host nor HOST[:PORT]/PATH[:TAG]: 'docker pull {reference}' first, "
            "or run 'trainyard image'"
        )
    return Repository(named.name), named.version


def remote(reference: str) -> Image:
    """Return an image at a registry, by its manifest, its configuration and its SBOM.

    Raises:
        UserError: there is no such image.
    """
    repository, version = at_registry(reference)
    manifest = repository.manifest(version)
    if manifest is None:
        raise UserError(f"{repository.name} has no {version}")
    inner = image_index.chosen(manifest.document)
    if inner:
        manifest = repository.existing(inner)
    data = manifest.document
    config = repository.config(manifest)
    diff_ids = [str(diff_id) for diff_id in (config.get("rootfs") or {}).get("diff_ids") or []]
    names = _names(config, len(diff_ids))
    summaries = [
        LayerSummary(name, str(entry["digest"]), diff_id, int(entry["size"]), None)
        for name, diff_id, entry in zip(names, diff_ids, data["layers"], strict=False)
    ]
    return Image(
        reference=reference,
        digest=manifest.digest,
        config=config,
        documents={str(data["config"]["digest"]): int(data["config"]["size"]), manifest.digest: len(manifest.body)},
        layers=tuple(summaries),
        layer_contents={},
        repository=repository,
        listed=attached_sbom.listed(repository, manifest.digest),
    )


def find(engine: Engine, reference: str, *, libraries: bool = False) -> Image:
    """Find a local image, or else one at a registry, for which no engine is needed; see :func:`read_layer`.

    Raises:
        UserError: there is neither, or there is no engine, and the reference names no registry.
        StepFailed: it cannot be read.
    """
    client = engine.existing_client()
    if client is None and Reference.parse(reference).names_docker_hub:
        client = engine.client  # says that there is no engine
    if client is None:
        return remote(reference)
    try:
        client.images.get(reference)
    except docker.errors.ImageNotFound:
        return remote(reference)
    except docker.errors.APIError as error:
        if error.is_server_error():
            raise
        raise UserError(f"{reference!r} is not an image reference ({error.explanation})") from None
    return local(engine, reference, libraries=libraries)


def fetch(image: Image, repository: Repository, wanted: Iterable[LayerSummary], *, libraries: bool = False) -> None:
    """Read layers of an image in its repository: their blobs are downloaded as streams and not stored."""
    for layer in wanted:
        if layer.diff_id not in image.layer_contents:
            with repository.stream(layer.digest, layer.stored) as stream:
                expected = image_store.Expected(layer.diff_id, layer.stored)
                image.layer_contents[layer.diff_id] = read_layer(stream, expected, libraries=libraries)
