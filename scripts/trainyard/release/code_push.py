"""Replace the code in an image of a workspace at a registry, without an engine.

The code is the topmost layer of the image. A new blob takes its place, and a new configuration and manifest name it:
everything below is neither read nor sent again. The manifest is stored last, so that an upload that was interrupted
leaves no tag. The result was never run: it is labelled so, tagged ``dev-<hash>``, and never promoted.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import gzip
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import zstandard

from trainyard.console import StepFailed, UserError, say
from trainyard.image import plan
from trainyard.oci import image_index
from trainyard.oci.registry import Manifest, Repository, check_address, sha256
from trainyard.spec.architectures import AMD64
from trainyard.spec.model import Spec
from trainyard.spec.naming import DEVELOPMENT, LABELS, NAME, UNTESTED
from trainyard.spec.workspace import FILE, LOCK, Workspace
from trainyard.workspace import code_layer, pushes
from trainyard.workspace.pushes import Push

_OCI = "org.opencontainers.image"

#: Level of zstd. BuildKit's own streams cannot be reproduced, whatever the level: it compresses in Go.
_ZSTD_LEVEL = 3

#: The annotation with the digest of the image whose manifest is stored under :func:`pushed_tag`.
_DIGEST = f"{LABELS}.digest"

#: Inline cache that BuildKit writes into configurations; it describes layers that a new one replaces.
_INLINE_CACHE = "moby.buildkit.cache.v0"

#: Bytes read at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Image:
    """The image whose code is replaced.

    Attributes:
        name: its tag or digest, for messages.
        digest: what ``docker pull`` gets it by.
        document: its manifest, ``media_type``: that of the manifest.
        config: its configuration.
    """

    name: str
    digest: str
    media_type: str
    document: dict[str, Any]
    config: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """Name -> value of the labels."""
        return dict((self.config.get("config") or {}).get("Labels") or {})

    @property
    def diff_ids(self) -> list[str]:
        """Digests of the uncompressed layers, bottom first."""
        return list((self.config.get("rootfs") or {}).get("diff_ids") or [])

    @property
    def tag(self) -> str:
        """Its immutable tag."""
        return self.labels.get(f"{_OCI}.version", self.name)

    def as_push(self, repository: Repository) -> Push:
        """The record of this image."""
        documents = json.dumps(self.document), json.dumps(self.config)
        return Push(repository.name, self.tag, self.digest, self.media_type, *documents)


def pushed_tag(target: str) -> str:
    """The tag of the image that was pushed last, from any host: ``<target>.pushed``.

    Its manifest has the configuration in itself (``data`` of the descriptor), which saves a request:
    https://github.com/opencontainers/image-spec/blob/main/descriptor.md
    """
    return f"{target}.pushed"


def address(spec: Spec, registry: str | None) -> str:
    """Where the code is pushed to: the given registry, else the one that the image was pushed to last.

    Raises:
        UserError: none was given, and the image was never pushed from this host; or it is no address.
    """
    known = None if registry else pushes.last(spec.target)
    return known.address if known else check_address(registry)


def remember(spec: Spec, repository: Repository, tag: str, digest: str) -> None:
    """Record an image that was pushed, here and at the registry, for :func:`push` on this host and on others.

    Args:
        tag: its immutable tag.
        digest: its digest there; the registry has it.
    Raises:
        StepFailed: the registry refuses.
    """
    stored = repository.manifest(digest)
    assert stored is not None  # it has just been pushed
    stored = _for_linux(repository, stored)
    document = json.loads(stored.body)
    config = _blob(repository, document["config"]["digest"])
    pushes.record(
        spec.target, Push(repository.name, tag, digest, stored.media_type, stored.body.decode(), config.decode())
    )
    if "oci" in stored.media_type:  # Docker's schema has no 'data'
        data = base64.b64encode(config).decode()
        document["config"] = {**document["config"], "data": data}
        document["annotations"] = {**document.get("annotations", {}), _DIGEST: digest}
        stored = Manifest.of(document, stored.media_type)
    # Where tags are immutable, other hosts find the image by its floating tag, or by --image.
    with suppress(UserError):
        repository.put(stored, pushed_tag(spec.target))


def _blob(repository: Repository, digest: str) -> bytes:
    """A small blob, checked against its digest."""
    data = repository.request("GET", f"blobs/{digest}").content
    if sha256(data) != digest:
        raise StepFailed(f"{repository.name}: the blob {digest[:19]} is damaged there")
    return data


def _for_linux(repository: Repository, manifest: Manifest) -> Manifest:
    """``manifest``, or that of an index for linux/amd64.

    Raises:
        UserError: the index has none.
    """
    document = json.loads(manifest.body)
    if not image_index.is_index(document):
        return manifest
    digest = image_index.digest_for(document, AMD64)
    if digest is None:
        raise UserError(f"{repository.name}@{manifest.digest[:19]} is an index without an image for {AMD64.platform}")
    return repository.existing(digest)


def _at_registry(repository: Repository, version: str) -> Image | None:
    """An image by its tag or digest; None if there is none."""
    stored = repository.manifest(version)
    if stored is None:
        return None
    found = _for_linux(repository, stored)
    document = json.loads(found.body)
    annotations = document.get("annotations") or {}
    digest = annotations.pop(_DIGEST, "")
    if not annotations:
        document.pop("annotations", None)
    try:
        config = base64.b64decode(document["config"].pop("data", ""), validate=True)
    except binascii.Error:
        config = b""
    if sha256(config) != document["config"]["digest"]:
        config = _blob(repository, document["config"]["digest"])
    return Image(version, digest or stored.digest, found.media_type, document, json.loads(config))


def _image(spec: Spec, repository: Repository, known: Push | None, version: str | None) -> Image:
    """The image whose code is replaced: ``version``, else the one that was pushed last.

    Raises:
        UserError: there is none, or it is not one of this workspace.
    """
    if version:
        found = _at_registry(repository, version)
        if found is None:
            raise UserError(f"{repository.name} has no {version}")
    elif known:
        document, config = json.loads(known.manifest), json.loads(known.config)
        found = Image(known.tag, known.digest, known.media_type, document, config)
    else:
        found = _at_registry(repository, pushed_tag(spec.target)) or _at_registry(repository, spec.target)
        if found is None:
            raise UserError(
                f"{repository.name} has no image of {spec.target}: run 'trainyard push --registry "
                f"{repository.name.rpartition('/')[0]}' first"
            )
    return found


def _check(spec: Spec, workspace: Workspace, image: Image, repository: Repository) -> None:
    """Check that an image differs from the one that the workspace would make in its code alone.

    Raises:
        UserError: it does not.
    """
    where = f"{repository.name}: {image.name}"
    target = image.labels.get(f"{LABELS}.target")
    if target != spec.target:
        raise UserError(f"{where} is an image of '{target}', not of '{spec.target}'")
    layers, code = image.document.get("layers") or [], image.labels.get(f"{LABELS}.code")
    if not code or not image.diff_ids or len(layers) != len(image.diff_ids) or image.diff_ids[-1] != code:
        raise UserError(f"{where}: its topmost layer is not the code: run 'trainyard image' and 'trainyard push'")
    if not workspace.lock.is_file():
        raise UserError(f"no {LOCK} beside {spec.where}: run 'trainyard image' and 'trainyard push'")
    compared = {
        LOCK: (image.labels.get(f"{LABELS}.lock"), plan.sha256_of(workspace.lock)),
        FILE: (image.labels.get(f"{LABELS}.config"), plan.config_hash(workspace)),
    }
    changed = [name for name, (there, here) in compared.items() if there != here]
    if changed:
        raise UserError(
            f"{' and '.join(changed)} changed since {image.tag} was pushed, so that replacing the code is not enough: "
            "run 'trainyard image' and 'trainyard push'"
        )


def _check_lock(spec: Spec) -> None:
    """Check that trainyard.lock was resolved from what the workspace requires now; takes about as long as the uploads.

    Raises:
        UserError: it was not, or the requirements have a mistake.
    """
    # Not with the others: it is imported while the registry answers.
    from trainyard.image import workspace_resolver

    if not workspace_resolver.is_current(spec):
        raise UserError(
            f"the requirements of {spec.where} changed since {LOCK} was written: run 'trainyard image' and "
            "'trainyard push'"
        )


class _Counted:
    """A file that is written to, with the digest and the number of the bytes so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.size += len(data)
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


@contextmanager
def _compressor(stream: IO[bytes], media_type: str, size: int) -> Iterator[Any]:
    """What compresses as the layers of ``media_type`` are.

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
    """Write a tar as a layer's blob; its descriptor: ``mediaType``, ``digest``, ``size`` in bytes.

    Raises:
        UserError: ``media_type`` is not that of a layer.
    """
    with source.open("rb") as tar, destination.open("wb") as stream:
        counted = _Counted(stream)
        with _compressor(counted, media_type, source.stat().st_size) as opened:  # type: ignore[arg-type]
            shutil.copyfileobj(tar, opened, _CHUNK)
    return {"mediaType": media_type, "digest": counted.digest, "size": counted.size}


def with_code(image: Image, layer: dict[str, Any], diff_id: str, about: dict[str, str]) -> tuple[Manifest, bytes]:
    """The manifest and the configuration of ``image`` with other code.

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
    document["config"] = {
        "mediaType": image.document["config"]["mediaType"],
        "digest": sha256(data),
        "size": len(data),
    }
    document["layers"] = [*image.document["layers"][:-1], layer]
    if annotations := document.get("annotations"):
        document["annotations"] = annotations | {name: text for name, text in labels.items() if name in annotations}
    return Manifest.of(document, image.media_type), data


def _commit(workspace: Workspace) -> dict[str, str]:
    """``created`` and ``revision`` of the new image: the commit's, as of a build.

    The same code therefore makes the same digest on every host.
    """
    created = datetime.datetime.fromtimestamp(plan.source_date_epoch(workspace), tz=datetime.UTC)
    return {"created": created.strftime("%Y-%m-%dT%H:%M:%SZ"), "revision": plan.revision(workspace)}


def _version(image: Image, diff_id: str, commit: dict[str, str]) -> str:
    """``dev-`` and twelve hexadecimal digits that stand for the image below the code, the code, and the commit."""
    text = json.dumps([image.digest, diff_id, commit], sort_keys=True)
    return f"{DEVELOPMENT}{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def push(spec: Spec, registry: str, *, image: str | None = None) -> dict[str, Any]:
    """Replace the code in the image of ``spec`` that was pushed last, and tag the result ``dev-<hash>``.

    With a known challenge and image that is six requests, four of them in turn: token, two uploads, manifest.

    Args:
        spec: of a workspace.
        registry: its ``host[:port]/path``.
        image: tag or digest there of another image of the workspace.
    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``base`` (the digest of the image whose
        code was replaced), ``code`` (diff id), ``files`` (number of files of the code), ``bytes_uploaded``, ``changed``
        (whether the image is a new one), ``tested`` (how far it was tested), ``seconds``.
    Raises:
        UserError: there is no such image, or it differs from the workspace in more than its code; or the code has a
            mistake.
        StepFailed: the registry cannot be reached or refuses.
    """
    started = time.monotonic()
    workspace = spec.workspace
    if workspace is None:
        raise UserError(f"{spec.target} is a target of the catalogue: --code-only is for a folder with a {FILE}")
    repository = Repository(f"{registry}/{NAME}")
    known = None if image else pushes.last(spec.target, repository.name)
    with ThreadPoolExecutor(3) as pool, tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        token, commit = pool.submit(repository.authorize), pool.submit(_commit, workspace)
        current = pool.submit(_check_lock, spec)
        found = _image(spec, repository, known, image)
        _check(spec, workspace, found, repository)
        tar, blob = Path(folder) / "code.tar", Path(folder) / "code"
        code = code_layer.write(workspace, tar, spec.site)
        version = _version(found, code.diff_id, commit.result())
        token.result()
        for note in code.notes:
            say(note)
        facts: dict[str, Any] = {"base": found.digest, "code": code.diff_id, "files": code.files}
        same = _same(repository, found, code.diff_id, version, known)
        if same is not None:
            facts |= {"changed": False, "bytes_uploaded": 0, "seconds": _since(started)}
            return _named(repository, **same) | facts
        layer = compress(tar, blob, str(found.document["layers"][-1]["mediaType"]))
        manifest, config = with_code(found, layer, code.diff_id, commit.result() | {"version": version})
        # The larger one is sent by this thread, which an interrupt reaches.
        sent = pool.submit(repository.upload, config, sha256(config))
        with blob.open("rb") as stream:
            repository.upload(stream, layer["digest"])
        sent.result()
        current.result()
        _put(spec, repository, manifest, version, found)
    if not image:
        known = known or found.as_push(repository)
        pushes.record(spec.target, replace(known, code_digest=manifest.digest, code_tag=version))
    size = layer["size"] + len(config) + len(manifest.body)
    facts |= {"changed": True, "bytes_uploaded": size, "seconds": _since(started)}
    return _named(repository, manifest.digest, version, UNTESTED) | facts


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def _named(repository: Repository, digest: str, tag: str, tested: str) -> dict[str, Any]:
    where = repository.name
    return {"reference": f"{where}@{digest}", "tag": f"{where}:{tag}", "digest": digest, "tested": tested}


def _same(
    repository: Repository, image: Image, diff_id: str, version: str, known: Push | None
) -> dict[str, str] | None:
    """``digest``, ``tag`` and ``tested`` of an image at the registry that has this code; None if none is known.

    Raises:
        UserError: it is the image itself, and the registry no longer has it.
    """
    if image.labels.get(f"{LABELS}.code") == diff_id:
        if not repository.has(image.digest):
            raise _gone(repository, image)
        return {"digest": image.digest, "tag": image.tag, "tested": image.labels.get(f"{LABELS}.tested", "")}
    if known and known.digest == image.digest and known.code_tag == version and repository.has(known.code_digest):
        return {"digest": known.code_digest, "tag": version, "tested": UNTESTED}
    return None


def _gone(repository: Repository, image: Image) -> UserError:
    return UserError(f"{repository.name} no longer has {image.name}: run 'trainyard push' again")


def _put(spec: Spec, repository: Repository, manifest: Manifest, tag: str, image: Image) -> None:
    """Store the manifest under its tag.

    Raises:
        UserError: the registry no longer has the layers below the code.
        StepFailed: it refuses for another reason.
    """
    try:
        repository.put(manifest, tag)
    except StepFailed as error:
        # https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
        if not re.search(r"blob[ _]unknown", str(error), re.IGNORECASE):
            raise
        pushes.forget(spec.target, repository.name)
        raise _gone(repository, image) from None
