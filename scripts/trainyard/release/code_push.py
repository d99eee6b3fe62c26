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
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import zstandard

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import plan
from trainyard.oci import image_index
from trainyard.oci.registry import Manifest, Repository, check_address, sha256
from trainyard.release import pushed_code
from trainyard.release.pushed_code import Image, Pushed
from trainyard.spec import lock, model
from trainyard.spec.model import Spec
from trainyard.spec.naming import DEVELOPMENT, LABELS, NAME, TAG, UNTESTED
from trainyard.spec.workspace import FILE, Workspace
from trainyard.workspace import code_layer, pushes
from trainyard.workspace.pushes import Push

logger = logging.getLogger(__name__)

_OCI = "org.opencontainers.image"

#: Level of zstd. BuildKit's own streams cannot be reproduced, whatever the level: it compresses in Go.
_ZSTD_LEVEL = 3

#: Inline cache that BuildKit writes into configurations; it describes layers that a new one replaces.
_INLINE_CACHE = "moby.buildkit.cache.v0"

#: Bytes read at a time.
_CHUNK = 1 << 20


def pushed_tag(target: str) -> str:
    """The tag of the image or image index that was pushed last, from any host: ``<target>.pushed``."""
    return f"{target}.pushed"


def address(spec: Spec, registry: str | None) -> str:
    """Where the code is pushed to: the given registry, else the one that the image was pushed to last.

    Raises:
        UserError: none was given, and the image was never pushed from this host; or it is no address.
    """
    known = None if registry else pushes.last(_kept(spec))
    return known.address if known else check_address(registry)


def _kept(spec: Spec) -> Path:
    """Return the folder of what is kept about the image of a repository, whatever its platform."""
    return spec.context.state / spec.target


def remember(spec: Spec, repository: Repository, tag: str, digest: str) -> None:
    """Record an image or an image index that was pushed, here and at the registry, for :func:`push` on any host.

    Args:
        tag: its immutable tag.
        digest: its digest there; the registry has it.
    Raises:
        StepFailed: the registry refuses.
    """
    found = pushed_code.at_registry(spec, repository, digest)
    assert found is not None  # it has just been pushed
    pushes.record(_kept(spec), found.as_push(repository, tag))
    indexed = found.index is not None
    stored = repository.existing(digest) if indexed else pushed_code.with_configuration(found.images[0])
    # Where tags are immutable, other hosts find the image by its floating tag, or by --image.
    with suppress(UserError):
        repository.tag(stored, pushed_tag(spec.target))


def _pushed(spec: Spec, repository: Repository, known: Push | None, version: str | None) -> Pushed:
    """The image or index whose code is replaced: ``version``, else the one that was pushed last.

    Raises:
        UserError: there is none, or it is not one of this workspace.
    """
    if not version and known:
        return pushed_code.recorded(known)
    versions = [version] if version else [pushed_tag(spec.target), spec.target]
    found = next(filter(None, (pushed_code.at_registry(spec, repository, one) for one in versions)), None)
    if found is None and version:
        raise UserError(f"{repository.name} has no {version}")
    if found is None:
        raise UserError(
            f"{repository.name} has no image of {spec.target}: run 'trainyard push --registry "
            f"{repository.name.rpartition('/')[0]}' first"
        )
    return found


def _check(spec: model.RepositorySpec, pushed: Pushed, image: Image, repository: Repository) -> None:
    """Check that an image differs from the one that the workspace would make in its code alone.

    Args:
        pushed: what ``image`` belongs to.

    Raises:
        UserError: it does not.
    """
    where = f"{repository.name}: {pushed.name}"
    target = image.labels.get(f"{LABELS}.target")
    if target != spec.target:
        raise UserError(f"{where} is an image of '{target}', not of '{spec.target}'")
    layers, code = image.document.get("layers") or [], image.labels.get(f"{LABELS}.code")
    if not code or not image.diff_ids or len(layers) != len(image.diff_ids) or image.diff_ids[-1] != code:
        raise UserError(f"{where}: its topmost layer is not the code: run 'trainyard image' and 'trainyard push'")
    if not spec.lock_file.is_file():
        raise UserError(f"no {lock.FILE} beside {spec.where}: run 'trainyard image' and 'trainyard push'")
    compared = {
        lock.FILE: (image.labels.get(f"{LABELS}.lock"), plan.sha256_of(spec.lock_file)),
        FILE: (image.labels.get(f"{LABELS}.config"), plan.config_hash(spec.workspace)),
    }
    changed = [name for name, (there, here) in compared.items() if there != here]
    if changed:
        raise UserError(
            f"{' and '.join(changed)} changed since {pushed.tag} was pushed, so that replacing the code is not enough: "
            "run 'trainyard image' and 'trainyard push'"
        )


def _check_lock(spec: model.RepositorySpec) -> None:
    """Check that trainyard.lock was resolved from what the workspace requires now; takes about as long as the uploads.

    Raises:
        UserError: it was not, or the requirements have a mistake.
    """
    # Not with the others: it is imported while the registry answers.
    from trainyard.image import repository_lock

    if not repository_lock.is_current(spec):
        raise UserError(
            f"the requirements of {spec.where} changed since {lock.FILE} was written: run 'trainyard image' and "
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


def _version(pushed: Pushed, diff_id: str, commit: dict[str, str]) -> str:
    """``dev-`` and twelve hexadecimal digits that stand for the image below the code, the code, and the commit."""
    text = json.dumps([pushed.digest, diff_id, commit], sort_keys=True)
    return f"{DEVELOPMENT}{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def push(spec: Spec, registry: str, *, image: str | None = None) -> dict[str, Any]:
    """Replace the code in the image or image index of ``spec`` that was pushed last, and tag the result ``dev-<hash>``.

    With a known challenge and image that is six requests, four of them in turn: token, two uploads, manifest. An index
    of two images takes four more: the configuration and the manifest of the other image, and the index.

    Args:
        spec: of a workspace.
        registry: its ``host[:port]/path``.
        image: tag or digest there of another image or image index of the workspace.
    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``base`` (the digest of the image or
        index whose code was replaced), ``code`` (diff id), ``files`` (number of files of the code), ``bytes_uploaded``,
        ``changed`` (whether the image is a new one), ``tested`` (how far it was tested), ``seconds``.
    Raises:
        UserError: there is no such image, or it differs from the workspace in more than its code; or the code has a
            mistake.
        StepFailed: the registry cannot be reached or refuses.
    """
    started = time.monotonic()
    if not isinstance(spec, model.RepositorySpec):
        raise UserError(f"{spec.target} is a target of the catalogue: --code-only is for a folder with a {FILE}")
    repository = Repository(f"{registry}/{NAME}", spec.context.state)
    known = None if image else pushes.last(_kept(spec), repository.name)
    with ThreadPoolExecutor(3) as pool, tempfile.TemporaryDirectory(prefix="trainyard-") as folder:
        token, commit = pool.submit(repository.authorize), pool.submit(_commit, workspace := spec.workspace)
        current = pool.submit(_check_lock, spec)
        found = _pushed(spec, repository, known, image)
        for one in found.images:
            _check(spec, found, one, repository)
        tar = Path(folder) / "code.tar"
        code = code_layer.write(workspace, tar, spec.site)
        version = _version(found, code.diff_id, commit.result())
        token.result()
        for note in code.notes:
            logger.info(note)
        facts: dict[str, Any] = {"base": found.digest, "code": code.diff_id, "files": code.files}
        same = _same(repository, found, code.diff_id, version, known)
        if same is not None:
            if known:
                # If the code is the image's own again, that is what was pushed last.
                again = replace(known, code_digest="", code_tag="") if same["digest"] == known.digest else known
                pushes.record(_kept(spec), again)
            facts |= {"changed": False, "bytes_uploaded": 0, "seconds": _since(started)}
            return _named(repository, **same) | facts
        blobs = _compressed(tar, {one.code_type for one in found.images})
        about = commit.result() | {"version": version}
        made = [with_code(one, blobs[one.code_type].layer, code.diff_id, about) for one in found.images]
        _upload(repository, pool, blobs.values(), [config for _, config in made])
        current.result()
        manifests = [manifest for manifest, _ in made]
        if found.index is not None:
            manifests.append(_index(spec, found, manifests, version))
        _put(spec, repository, manifests, version, found)
    if not image:
        known = known or found.as_push(repository)
        pushes.record(_kept(spec), replace(known, code_digest=manifests[-1].digest, code_tag=version))
    size = sum(blob.layer["size"] for blob in blobs.values()) + sum(len(config) for _, config in made)
    size += sum(len(manifest.body) for manifest in manifests)
    facts |= {"changed": True, "bytes_uploaded": size, "seconds": _since(started)}
    return _named(repository, manifests[-1].digest, version, UNTESTED) | facts


@dataclass(frozen=True)
class _Blob:
    """A compressed layer: its file, and its descriptor."""

    file: Path
    layer: dict[str, Any]


def _compressed(tar: Path, media_types: Collection[str]) -> dict[str, _Blob]:
    """The blob of a layer for each media type; images of one index usually have the same."""
    files = {name: tar.with_name(f"code-{number}") for number, name in enumerate(sorted(media_types))}
    return {name: _Blob(file, compress(tar, file, name)) for name, file in files.items()}


def _upload(repository: Repository, pool: Executor, blobs: Iterable[_Blob], configurations: Iterable[bytes]) -> None:
    """Store layers and configurations; the layers, which are larger, in this thread, which an interrupt reaches."""
    sent = [pool.submit(repository.upload, one, sha256(one)) for one in configurations]
    for blob in blobs:
        with blob.file.open("rb") as stream:
            repository.upload(stream, blob.layer["digest"])
    for one in sent:
        one.result()


def _index(spec: Spec, pushed: Pushed, manifests: Sequence[Manifest], version: str) -> Manifest:
    """The index of the images with other code."""
    members = {one.architecture: manifest for one, manifest in zip(pushed.images, manifests, strict=True)}
    return image_index.make(members, {TAG: version, f"{LABELS}.target": spec.target})


def _since(started: float) -> float:
    return round(time.monotonic() - started, 2)


def _named(repository: Repository, digest: str, tag: str, tested: str) -> dict[str, Any]:
    where = repository.name
    return {"reference": f"{where}@{digest}", "tag": f"{where}:{tag}", "digest": digest, "tested": tested}


def _same(
    repository: Repository, pushed: Pushed, diff_id: str, version: str, known: Push | None
) -> dict[str, str] | None:
    """``digest``, ``tag`` and ``tested`` of an image at the registry that has this code; None if none is known.

    Raises:
        UserError: it is the image itself, and the registry no longer has it.
    """
    if all(one.labels.get(f"{LABELS}.code") == diff_id for one in pushed.images):
        if not repository.has(pushed.digest):
            raise _gone(repository, pushed)
        return {"digest": pushed.digest, "tag": pushed.tag, "tested": pushed.labels.get(f"{LABELS}.tested", "")}
    if known and known.digest == pushed.digest and known.code_tag == version and repository.has(known.code_digest):
        return {"digest": known.code_digest, "tag": version, "tested": UNTESTED}
    return None


def _gone(repository: Repository, pushed: Pushed) -> UserError:
    return UserError(f"{repository.name} no longer has {pushed.name}: run 'trainyard push' again")


def _put(spec: Spec, repository: Repository, manifests: Sequence[Manifest], tag: str, pushed: Pushed) -> None:
    """Store manifests, the last one under a tag and those before, which it names, by their digests.

    Raises:
        UserError: the registry no longer has the layers below the code.
        StepFailed: it refuses for another reason.
    """
    *members, last = manifests
    try:
        for one in members:
            repository.put(one, one.digest)
        repository.tag(last, tag)
    except StepFailed as error:
        # https://github.com/opencontainers/distribution-spec/blob/main/spec.md#error-codes
        if not re.search(r"blob[ _]unknown", str(error), re.IGNORECASE):
            raise
        pushes.forget(_kept(spec), repository.name)
        raise _gone(repository, pushed) from None
