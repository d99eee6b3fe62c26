"""Replace the code in an image of a workspace, or in all images of an index, at a registry and without an engine.

The code is the topmost layer of the image. A new blob takes its place, and a new configuration and manifest name it:
everything below is neither read nor sent again. The manifest is stored last, so that an upload that was interrupted
leaves no tag. The result was never run: it is labelled so, tagged ``dev-<hash>``, and never promoted.
"""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

import zstandard

from trainyard import recipe as recipes
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import image_index
from trainyard.oci.documents import descriptor, hashed
from trainyard.oci.registry import Manifest, Repository, check_address
from trainyard.oci.statements import rfc_3339
from trainyard.oci.transport import Threads
from trainyard.recipe import Named
from trainyard.release import pushed_code, pushes
from trainyard.release.pushed_code import Image
from trainyard.release.pushes import Push
from trainyard.spec.architectures import Architecture
from trainyard.spec.naming import DEVELOPMENT, LABELS, NAME, TAG, UNTESTED

logger = logging.getLogger(__name__)

_OCI = "org.opencontainers.image"

#: Level of zstd. BuildKit's own streams cannot be reproduced, whatever the level: it compresses in Go.
_ZSTD_LEVEL = 3

#: Inline cache that BuildKit writes into configurations; it describes layers that a new one replaces.
_INLINE_CACHE = "moby.buildkit.cache.v0"

#: Bytes read at a time.
_CHUNK = 1 << 20


class Code(Protocol):
    """Provide the code of a repository, and what its image is compared with.

    Attributes:
        folder: of the repository, ``kept``: of what is kept about its image, whatever the platform.
        lock: SHA-256 of the lock, ``config``: that of what trainyard.yaml says; as the image's labels have them.
        configured: the file that ``config`` is of, and what else.
    """

    @property
    def named(self) -> Named: ...

    @property
    def architecture(self) -> Architecture: ...

    @property
    def folder(self) -> Path: ...

    @property
    def kept(self) -> Path: ...

    @property
    def lock(self) -> str: ...

    @property
    def config(self) -> str: ...

    @property
    def configured(self) -> str: ...

    def write(self, path: Path) -> Layer:
        """Write the layer of the code as an uncompressed tar."""

    def check_lock(self) -> None:
        """Raise a :class:`UserError` if the lock was not resolved from what the repository requires now."""

    def commit(self) -> Commit:
        """Return the commit of the code."""


class Layer(Protocol):
    """Describe a layer that was written: its diff id, the number of its files, and lines about what it lacks."""

    @property
    def diff_id(self) -> str: ...

    @property
    def files(self) -> int: ...

    @property
    def notes(self) -> Sequence[str]: ...


@dataclass(frozen=True)
class Commit:
    """Name the commit of the code; ``seconds`` since 1970."""

    revision: str
    seconds: int


def address(code: Code, registry: str | None) -> str:
    """Return the registry that the code is pushed to: the given one, else the last push's, or raise a UserError."""
    known = None if registry else pushes.last(code.kept, folder=code.folder)
    return known.address if known else check_address(registry)


def _pushed(code: Code, repository: Repository, version: str | None) -> Push:
    """Return the image or index whose code is replaced: ``version``, else the last one pushed, or raise a UserError."""
    versions = [version] if version else [pushed_code.pushed_tag(code.named.name), code.named.name]
    for name in versions:
        if pushed := pushed_code.at_registry(code.named, code.architecture, repository, name):
            return pushed
    if version:
        raise UserError(f"{repository.name} has no {version}")
    raise UserError(
        f"{repository.name} has no image of {code.named.name}: run 'trainyard push --registry "
        f"{repository.name.rpartition('/')[0]}' first"
    )


def _check(code: Code, pushed: Push, image: Image) -> None:
    """Raise a :class:`UserError` if an image of ``pushed`` and the repository's differ in more than their code."""
    where = f"{pushed.repository}: {pushed.tag}"
    target = image.labels.get(f"{LABELS}.target")
    if target != code.named.name:
        raise UserError(f"{where} is an image of '{target}', not of '{code.named.name}'")
    layers, labelled = image.document.get("layers") or [], image.labels.get(f"{LABELS}.code")
    if not labelled or not image.diff_ids or len(layers) != len(image.diff_ids) or image.diff_ids[-1] != labelled:
        raise UserError(f"{where}: its topmost layer is not the code: run 'trainyard image' and 'trainyard push'")
    if not image.labels.get(recipes.DIGEST):
        raise UserError(f"{where} was built before images had recipes: run 'trainyard image' and 'trainyard push'")
    compared = {
        "pylock.trainyard.toml": (image.labels.get(f"{LABELS}.lock"), code.lock),
        code.configured: (image.labels.get(f"{LABELS}.config"), code.config),
    }
    changed = [name for name, (there, here) in compared.items() if there != here]
    if changed:
        raise UserError(
            f"{' and '.join(changed)} changed since {pushed.tag} was pushed, so that replacing the code is not enough: "
            "run 'trainyard image' and 'trainyard push'"
        )


@contextmanager
def _compressor(stream: IO[bytes], media_type: str, size: int) -> Iterator[Any]:
    """Yield what compresses as the layers of ``media_type`` are; a :class:`UserError` if that is not one of a layer.

    https://github.com/opencontainers/image-spec/blob/main/media-types.md
    """
    if media_type.endswith("zstd"):
        with zstandard.ZstdCompressor(level=_ZSTD_LEVEL).stream_writer(stream, size=size, closefd=False) as opened:
            yield opened
    elif media_type.endswith("gzip"):
        with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as opened:
            yield opened
    elif media_type.endswith(".tar"):
        yield stream
    else:
        raise UserError(f"the topmost layer has the media type {media_type}, which is neither zstd nor gzip")


def compress(source: Path, destination: Path, media_type: str) -> dict[str, Any]:
    """Write a tar as a layer's blob, and return its descriptor: ``mediaType``, ``digest``, ``size`` in bytes."""
    with source.open("rb") as tar, destination.open("w+b") as stream:
        with _compressor(stream, media_type, source.stat().st_size) as opened:
            shutil.copyfileobj(tar, opened, _CHUNK)
        size = stream.tell()
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": size}


def with_code(image: Image, layer: dict[str, Any], diff_id: str, about: dict[str, str]) -> tuple[Manifest, bytes]:
    """Return the manifest and the configuration of ``image`` with other code.

    Args:
        layer: descriptor of the blob with the code.
        diff_id: of the code, uncompressed.
        about: ``created``, ``revision`` and ``version`` of the new image.
    """
    labels = {f"{_OCI}.{name}": text for name, text in about.items()}
    settings = dict(image.config.get("config") or {})
    settings["Labels"] = image.labels | labels | {f"{LABELS}.code": diff_id, f"{LABELS}.tested": UNTESTED}
    rootfs = {**image.config["rootfs"], "diff_ids": [*image.diff_ids[:-1], diff_id]}
    config = {key: value for key, value in image.config.items() if key != _INLINE_CACHE}
    config |= {"created": about["created"], "config": settings, "rootfs": rootfs}
    data = json.dumps(config, separators=(",", ":")).encode()
    document = dict(image.document)
    document["config"] = descriptor(image.document["config"]["mediaType"], data)
    document["layers"] = [*image.document["layers"][:-1], layer]
    if annotations := document.get("annotations"):
        document["annotations"] = annotations | {name: text for name, text in labels.items() if name in annotations}
    return Manifest.of(document, image.push.media_type), data


def _about(commit: Commit) -> dict[str, str]:
    """Return ``created`` and ``revision`` of the new image: the commit's, as of a build.

    The same code therefore makes the same digest on every host.
    """
    created = datetime.datetime.fromtimestamp(commit.seconds, tz=datetime.UTC)
    return {"created": rfc_3339(created), "revision": commit.revision}


def _version(pushed: Push, diff_id: str, commit: dict[str, str]) -> str:
    """Return ``dev-`` and twelve hexadecimal digits that stand for the image below the code, the code, the commit."""
    text = json.dumps([pushed.digest, diff_id, commit], sort_keys=True)
    return f"{DEVELOPMENT}{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def push(code: Code, registry: str, state: Path, *, image: str | None = None) -> dict[str, Any]:
    """Replace the code in the image or index of a repository that was pushed last; tag the result ``dev-<hash>``.

    With a known challenge and image that is six requests, four of them in turn: token, two uploads, manifest. An index
    of two images takes four more: the configuration and the manifest of the other image, and the index.

    Args:
        registry: its ``host[:port]/path``.
        state: the state folder.
        image: tag or digest there of another image or image index of the workspace.
    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``base`` (the digest of the image or
        index whose code was replaced), ``code`` (diff id), ``files`` (number of files of the code), ``bytes_uploaded``,
        ``changed`` (whether the image is a new member), ``tested`` (how far it was tested), ``seconds``.
    Raises:
        UserError: there is no such image, or it differs from the workspace in more than its code; or the code has a
            mistake.
    """
    started = time.monotonic()
    repository = Repository(f"{registry}/{NAME}", state)
    known = None if image else pushes.last(code.kept, repository.name, code.folder)
    with Threads(3) as pool, tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        token, commit = pool.submit(repository.authorize), pool.submit(code.commit)
        current = pool.submit(code.check_lock)
        pushed = known or replace(_pushed(code, repository, image), folder=str(code.folder))
        images = pushed_code.images_of(pushed)
        for member in images:
            _check(code, pushed, member)
        tar = Path(folder) / "code.tar"
        layer = code.write(tar)
        about = _about(commit.result())
        version = _version(pushed, layer.diff_id, about)
        token.result()
        for note in layer.notes:
            logger.info(note)
        facts: dict[str, Any] = {"base": pushed.digest, "code": layer.diff_id, "files": layer.files}
        same = _same(repository, pushed, images, layer.diff_id, version)
        if same is not None:
            if known:
                # If the code is the image's own again, that is what was pushed last.
                again = replace(known, code_digest="", code_tag="") if same["digest"] == known.digest else known
                pushes.record(code.kept, again)
            facts |= {"changed": False, "bytes_uploaded": 0, "seconds": round(time.monotonic() - started, 2)}
            return same | facts
        # One blob for each media type; images of one index usually have the same.
        types = sorted({member.code_type for member in images})
        files = {name: tar.with_name(f"code-{number}") for number, name in enumerate(types)}
        layers = {name: compress(tar, file, name) for name, file in files.items()}
        about |= {"version": version}
        made = [with_code(member, layers[member.code_type], layer.diff_id, about) for member in images]
        configurations = [config for _, config in made]
        sent = [pool.submit(repository.upload, config, hashed(config)) for config in configurations]
        for name, file in files.items():  # the layers, which are larger, in this thread, which an interrupt reaches
            with file.open("rb") as stream:
                repository.upload(stream, layers[name]["digest"])
        for upload in (*sent, current):
            upload.result()
        manifests = [manifest for manifest, _ in made]
        if pushed.images:
            members = {member.architecture: manifest for member, manifest in zip(images, manifests, strict=True)}
            manifests.append(image_index.make(members, {TAG: version, f"{LABELS}.target": code.named.name}))
        _put(code, repository, manifests, version, pushed)
    if not image:
        pushes.record(code.kept, replace(pushed, code_digest=manifests[-1].digest, code_tag=version))
    size = sum(layer["size"] for layer in layers.values()) + sum(map(len, configurations))
    size += sum(len(manifest.body) for manifest in manifests)
    facts |= {
        "changed": True,
        "bytes_uploaded": size,
        "seconds": round(time.monotonic() - started, 2),
        "tested": UNTESTED,
    }
    return repository.named(manifests[-1].digest, version) | facts


def _same(
    repository: Repository, pushed: Push, images: Sequence[Image], diff_id: str, version: str
) -> dict[str, Any] | None:
    """Return the references and ``tested`` of an image at the registry that has this code; None if none is known.

    Raises:
        UserError: it is the image itself, and the registry no longer has it.
    """
    if all(member.labels.get(f"{LABELS}.code") == diff_id for member in images):
        if not repository.has(pushed.digest):
            raise _gone(pushed)
        tested = images[0].labels.get(f"{LABELS}.tested", "")
        return repository.named(pushed.digest, pushed.tag) | {"tested": tested}
    if pushed.code_tag == version and repository.has(pushed.code_digest):
        return repository.named(pushed.code_digest, version) | {"tested": UNTESTED}
    return None


def _gone(pushed: Push) -> UserError:
    return UserError(f"{pushed.repository} no longer has {pushed.tag}: run 'trainyard push' again")


def _put(code: Code, repository: Repository, manifests: Sequence[Manifest], tag: str, pushed: Push) -> None:
    """Store manifests, the last one under a tag and those before, which it names, by their digests.

    Raises:
        UserError: the registry no longer has the layers below the code.
    """
    *members, last = manifests
    try:
        for member in members:
            repository.put(member, member.digest)
        repository.tag(last, tag)
    except StepFailed as error:
        # https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
        if not re.search(r"blob[ _]unknown", str(error), re.IGNORECASE):
            raise
        pushes.forget(code.kept, repository.name)
        raise _gone(pushed) from None
