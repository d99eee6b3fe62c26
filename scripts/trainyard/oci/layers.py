"""Read the files that an image stores, layer by layer.

Layers are read where the engine has unpacked them (:mod:`trainyard.oci.layer_contents`), else as streams of their blobs
(:mod:`trainyard.oci.image_store`): nothing is written to disk, and at most one small file is held in memory.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import posixpath
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, cast

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from pydantic import TypeAdapter, ValidationError

from trainyard import recipe
from trainyard.common.docker_engine import Engine
from trainyard.oci import image_store, layer_contents, secret_scan
from trainyard.oci.layer_contents import Contents

Kind = Literal["base", "below", "copied", "added"]

#: Most bytes of a file that is searched for credentials and certificates; CA bundles have up to 0.3 MB.
TEXT_LIMIT = 2 << 20

#: Suffixes of compiled code and data, which are not searched.
_BINARY = (".pyc", ".so", ".a", ".png", ".jpg", ".gz", ".zip", ".npy", ".pb", ".whl")

#: Bytes of an ELF header up to its machine.
_ELF_HEADER = 20

#: Digest of an archive without entries: two blocks of zeros, or a whole record of GNU tar's
#: (https://www.gnu.org/software/tar/manual/html_node/Standard.html).
EMPTY = frozenset(f"sha256:{hashlib.sha256(bytes(size)).hexdigest()}" for size in (1024, 10240))

#: Where packages are installed, whose files are compared with what their RECORD lists.
SITES = "opt/"

#: How the instruction begins that copies a stage of ours, whose name is in it.
_COPY = re.compile(r"COPY /(\S+)/\.\./out /")

#: Prefix of a whiteout's file name (https://github.com/opencontainers/image-spec/blob/main/layer.md#whiteouts).
_WHITEOUT = ".wh."


@dataclass(frozen=True)
class File:
    """A stored file, symbolic or hard link: bytes of content (0 for links) and permission bits."""

    size: int
    mode: int


@dataclass(frozen=True)
class Suspect:
    """A file that looks like a credential: its path, the kind, and the SHA-256 that RECORD files write."""

    path: str
    kind: str
    hash: str


@dataclass(frozen=True)
class Bundle:
    """A PEM file: fingerprints of its certificates (:func:`secret_scan.certificates`), and its own SHA-256."""

    path: str
    certificates: frozenset[str]
    hash: str


@dataclass
class LayerFiles:
    """The files of a layer; paths have no leading slash, directories are left out.

    Attributes:
        files: path -> file.
        removed: paths that the layer hides (whiteouts).
        suspects: files that look like credentials.
        bundles: files with certificates.
        records: path -> SHA-256 that installed packages list in their RECORD, one for each package that lists the file.
        hashes: path -> SHA-256, in the same form, of the files below :data:`SITES`, without byte code.
        machines: path -> ``e_machine`` of the programs and shared libraries.
        needed: path -> the libraries that a program or library loads; of layers that are read as streams, nothing.
            ``searched``: the folders where the loader looks for them first.
    """

    files: dict[str, File] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    records: dict[str, list[str]] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    machines: dict[str, int] = field(default_factory=dict)
    needed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    searched: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Return bytes of all files."""
        return sum(file.size for file in self.files.values())


_LAYER_FILES = TypeAdapter(LayerFiles)


@dataclass(frozen=True)
class Layer:
    """Describe a layer of an image.

    Attributes:
        digest: of the compressed blob; empty if the engine does not keep blobs.
        diff_id: digest of the uncompressed tar.
        created_by: the instruction that created it.
        stage: the build stage that it comes from; ``base``; or ``added``.
        kind: ``base`` image; ``below``: system packages on it; ``copied`` from a stage; ``added`` later.
        stored: bytes of the blob, compressed.
        entries: everything that it holds, with hashes; None if it was not read so far.
    """

    digest: str
    diff_id: str
    created_by: str
    stage: str
    kind: Kind
    stored: int
    contents: LayerFiles
    entries: Contents | None = None

    @property
    def ours(self) -> bool:
        """Return whether the layer is not one of the base image."""
        return self.kind != "base"


@dataclass(frozen=True)
class Stored:
    """A stored image: its OCI configuration, its layers, and the sizes of manifest and configuration in bytes."""

    config: dict[str, Any]
    layers: list[Layer]
    config_digest: str
    config_size: int
    manifest_size: int


def stages(dockerfile: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the layers of a rendered Dockerfile's final stage.

    Returns:
        The instructions of the stages below it that may create a layer, as (stage, keyword), bottom first; and the
        stages that it copies from.
    """
    blocks = {}
    for block in re.split(r"(?m)^FROM ", dockerfile)[1:]:
        name = re.match(r"(?:--platform=\S+ )?\S+ AS (\S+)", block)
        blocks[name[1] if name else ""] = block
    final = list(blocks.values())[-1] if blocks else ""
    below: list[tuple[str, str]] = []
    stage = final.split(maxsplit=1)[0] if final else ""
    while stage in blocks:
        made = re.findall(r"(?m)^(RUN|COPY|ADD|WORKDIR)\b", blocks[stage])
        below = [*((stage, keyword) for keyword in made), *below]
        stage = blocks[stage].split(maxsplit=1)[0]
    return below, re.findall(r"(?m)^COPY --link --from=(\S+)", final)


def copied_stage(command: str) -> str:
    """Return the stage of ours that an instruction copies; empty of another instruction."""
    copied = _COPY.match(command)
    return copied[1] if copied else ""


def distributions(files: LayerFiles) -> list[str]:
    """Return ``numpy 2.3.5`` of each distribution whose metadata a layer has, sorted."""
    found = (re.search(r"/([^/]+)-([^/-]+)\.dist-info/METADATA$", path) for path in files.files)
    return sorted({f"{one[1].replace('_', '-')} {one[2]}" for one in found if one}, key=str.lower)


def name_layers(made_by: list[str], known: Sequence[recipe.Layer]) -> list[tuple[str, Kind]]:
    """Return the stage and the kind of each layer, bottom first.

    Args:
        made_by: the instruction that created each.
        known: the layers of the image's recipe; empty without one.
    """
    below = [(layer.stage, layer.instruction) for layer in known if not layer.copied]
    copies = [layer.stage for layer in known if layer.copied]
    # The uppermost copies: the base image may be built from a Dockerfile of Trainyard, too.
    ours = [number for number, command in enumerate(made_by) if _COPY.match(command)][-len(copies) :]
    first = ours[0] if ours and copies else len(made_by)
    names: list[tuple[str, Kind]] = [("base", "base")] * first
    for number in range(first - 1, -1, -1):
        if not below or made_by[number].split(" ", 1)[0] != below[-1][1]:
            break
        names[number] = (below.pop()[0], "below")
    for command in made_by[first:]:
        names.append((copies.pop(0), "copied") if copies and _COPY.match(command) else ("added", "added"))
    return names


def scan(stream: io.BufferedReader) -> LayerFiles:
    """Read one layer; see :func:`trainyard.oci.image_store.members`."""
    found = LayerFiles()
    for tar, member in image_store.members(stream):
        _look_at(found, tar, member)
    return found


def _look_at(found: LayerFiles, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    path = posixpath.normpath(member.name).lstrip("/")
    folder, name = posixpath.split(path)
    if name.startswith(_WHITEOUT):
        found.removed.append(
            folder if name.startswith(_WHITEOUT * 2) else posixpath.join(folder, name.removeprefix(_WHITEOUT))
        )
        return
    if member.isdir():
        return

    if not member.isreg():
        found.hashes[path] = (
            found.hashes.get(posixpath.normpath(member.linkname), "a link") if member.islnk() else "a link"
        )
    _note(
        found,
        path,
        File(member.size if member.isreg() else 0, member.mode),
        lambda: cast(IO[bytes], tar.extractfile(member)),
    )


def walk(folder: Path) -> LayerFiles:
    """Return the files of a layer that the engine has unpacked into ``folder``."""
    found, seen = LayerFiles(), set[int]()
    for path, entry in layer_contents.entries(folder):
        status = entry.stat(follow_symlinks=False)
        is_folder = stat.S_ISDIR(status.st_mode)
        if layer_contents.is_whiteout(status) or (is_folder and layer_contents.is_opaque(entry.path)):
            found.removed.append(path)
        elif not is_folder:
            stored = stat.S_ISREG(status.st_mode) and status.st_ino not in seen  # not a link, symbolic or hard
            if status.st_nlink > 1:
                seen.add(status.st_ino)
            file = File(status.st_size if stored else 0, stat.S_IMODE(status.st_mode))
            if not stat.S_ISREG(status.st_mode):
                found.hashes[path] = "a link"
            _note(found, path, file, cast("Callable[[], IO[bytes]]", functools.partial(open, entry.path, "rb")))
            if path in found.machines:
                found.needed[path], found.searched[path] = needed_libraries(Path(entry.path), path)
    return found


def _machine(head: bytes) -> int | None:
    """Return ``e_machine`` of an ELF file for a little-endian processor; None of any other file.

    https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html
    """
    return int.from_bytes(head[18:20], "little") if head[:4] == b"\x7fELF" and head[5:6] == b"\x01" else None


def _note(found: LayerFiles, path: str, file: File, opened: Callable[[], IO[bytes]]) -> None:
    """Add a file, its hash, and any credentials and certificates in it; ``opened`` opens it."""
    found.files[path] = file
    folder, name = posixpath.split(path)
    named = secret_scan.in_name(path)
    searched = named is not None or not (file.size > TEXT_LIMIT or name.endswith(_BINARY) or ".so." in name)
    program = file.mode & 0o111 or ".so" in name
    hashed = path.startswith(SITES) and path not in found.hashes and "/__pycache__/" not in path
    if not hashed and not (file.size and (searched or program)):
        return
    with opened() as stream:  # read once: the layer may be a stream
        head = stream.read(TEXT_LIMIT if searched else _ELF_HEADER)
        digest = hashlib.sha256(head)
        while hashed and (part := stream.read(1 << 20)):
            digest.update(part)
    sha = _in_record(digest.digest())
    if hashed:
        found.hashes[path] = sha
    if not file.size:
        return
    data = head if file.size <= TEXT_LIMIT else b""
    if program and (machine := _machine(head)) is not None:
        found.machines[path] = machine
    if not searched:
        return
    for kind in [named] if named else secret_scan.in_text(data, path):
        found.suspects.append(Suspect(path, kind, sha))
    if certificates := secret_scan.certificates(data):
        found.bundles.append(Bundle(path, certificates, sha))
    site = posixpath.dirname(folder)
    # Only installed packages: setuptools, for one, vendors packages with their own .dist-info folders.
    if name == "RECORD" and folder.endswith(".dist-info") and site.endswith(("-packages", "opt/requirements")):
        for listed, sha in _record(data, site):
            found.records.setdefault(listed, []).append(sha)


def _in_record(digest: bytes) -> str:
    """Return a SHA-256 as in RECORD files: urlsafe base64 without padding.

    https://packaging.python.org/en/latest/specifications/recording-installed-packages/
    """
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _record(data: bytes, site: str) -> Iterator[tuple[str, str]]:
    """Yield path and SHA-256 of the files that a RECORD in the site directory ``site`` lists."""
    for row in csv.reader(io.StringIO(data.decode("utf-8", "replace"))):
        if len(row) >= 2 and row[1].startswith("sha256="):
            yield posixpath.normpath(posixpath.join(site, row[0])), row[1].removeprefix("sha256=")


def without_base(stored: Stored) -> Stored:
    """Return an image that Trainyard did not build: its lowest layer is its base, all above were added."""
    added = [dataclasses.replace(layer, stage="added", kind="added") for layer in stored.layers[1:]]
    return dataclasses.replace(stored, layers=[*stored.layers[:1], *added])


@functools.cache
def _searched() -> str:
    """Return a digest of what files are searched for: with another one, what an earlier search found is not used."""
    sources = (Path(__file__), Path(secret_scan.__file__), secret_scan.TOKENS)
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def walk_once(folder: Path, diff_id: str, state: Path) -> LayerFiles:
    """Return :func:`walk` of a layer, from an earlier image with that layer if there was one."""
    name = f"{diff_id}.{_searched()}"
    if document := layer_contents.recall_document(state, name):
        with contextlib.suppress(ValidationError):
            return _LAYER_FILES.validate_json(document)
    found = walk(folder)
    layer_contents.keep_document(state, name, _LAYER_FILES.dump_json(found))
    return found


def read(
    engine: Engine,
    reference: str,
    known: Sequence[recipe.Layer] = (),
    *,
    hashed: Callable[[str], bool] = lambda _: False,
    state: Path | None = None,
) -> Stored:
    """Return the layers of a local image.

    Args:
        known: the layers of the image's recipe, which name those of the image.
        state: the state folder, where the files of a layer are kept by its digest, so that the layers that an image
            shares with an earlier one are not read again; None to read all.
        hashed: whether the entries of a layer are wanted, by its diff id; they are read only where the engine has
            unpacked the layer.
    Raises:
        UserError: there is no such image.
        StepFailed: its layers cannot be read.
    """
    image = engine.image(reference, made_by="trainyard image")
    diff_ids = [str(diff_id) for diff_id in image.attrs["RootFS"]["Layers"]]
    with layer_contents.folders(engine, reference, len(diff_ids)) as folders:
        if not folders:
            return assemble(image_store.read(engine, reference, scan), known)
        contents = [
            walk_once(folder, diff_id, state) if state else walk(folder)
            for folder, diff_id in zip(folders, diff_ids, strict=True)
        ]
        parts = image_store.read(engine, reference, lambda stream: None)
        entries = {name: layer_contents.read(at) for name, at in zip(diff_ids, folders, strict=True) if hashed(name)}
    stored = assemble(parts.holding(contents), known)
    layers = [dataclasses.replace(layer, entries=entries.get(layer.diff_id)) for layer in stored.layers]
    return dataclasses.replace(stored, layers=layers)


def made_by(config: dict[str, Any], count: int) -> list[str]:
    """Return the instructions that created the ``count`` layers of an image, bottom first; empty if unknown."""
    made = [str(entry.get("created_by", "")) for entry in config.get("history", []) if not entry.get("empty_layer")]
    made += [""] * (count - len(made))
    # BuildKit records the instruction, the classic builder a shell command.
    return [re.sub(r"^/bin/sh -c #\(nop\) +", "", command) for command in made]


def assemble(parts: image_store.Parts[LayerFiles], known: Sequence[recipe.Layer]) -> Stored:
    """Return an image from its parts, with layers named by ``known``, the layers of its recipe."""
    document = json.loads(parts.config)
    instructions = made_by(document, len(parts.layers))
    names = name_layers(instructions, known)
    diff_ids = [str(diff_id) for diff_id in document["rootfs"]["diff_ids"]]
    layers = [
        Layer(layer.digest, diff_id, command, stage, kind, layer.stored, layer.found)
        for layer, diff_id, command, (stage, kind) in zip(parts.layers, diff_ids, instructions, names, strict=False)
    ]
    return Stored(document, layers, parts.config_digest, len(parts.config), len(parts.manifest))


def needed_libraries(path: Path, inside: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return DT_NEEDED of a program or library, and the folders of DT_RPATH or DT_RUNPATH; nothing of another file.

    https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html; ``inside`` is its path in the image.
    """
    try:
        with path.open("rb") as stream:
            dynamic = next((part for part in ELFFile(stream).iter_segments("PT_DYNAMIC")), None)
            if not isinstance(dynamic, DynamicSegment):
                return (), ()
            # pyelftools adds an attribute when it reads a tag of such a kind.
            tags = [(tag.entry.d_tag, tag) for tag in dynamic.iter_tags()]
            needed = tuple(str(tag.needed) for kind, tag in tags if kind == "DT_NEEDED")  # type: ignore[attr-defined]
            paths = ":".join(getattr(tag, kind[3:].lower()) for kind, tag in tags if kind in ("DT_RPATH", "DT_RUNPATH"))
            folders = re.sub(r"\$(ORIGIN|{ORIGIN})", posixpath.dirname(f"/{inside}"), paths).split(":")
            return needed, tuple(posixpath.normpath(folder).lstrip("/") for folder in folders if folder)
    except (ELFError, ConstructError, OSError, ValueError, IndexError, UnicodeDecodeError):
        return (), ()  # damaged, or data of a test: the loader refuses it whatever it needs
