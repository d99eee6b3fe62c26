"""Push an image that passed verify and smoke to a registry, under its immutable tag.

    make push TARGET=tf-cpu REGISTRY=localhost:5000/team

What is pushed is the digest that passed, as <registry>/trainyard:<target>-<version>-<day>-<hash>. Such a tag never
moves: if the registry has it with another digest, the push is refused. Moving tags are set by `make promote`.
Beside it go BuildKit's provenance, the SBOM, and with COSIGN_KEY=<private key> a signature (docs/supply-chain.md).
Layers are packed with zstd; `COMPRESSION=gzip make image` packs them for registries and engines that know no zstd.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import docker.errors
from rich.table import Table

from scripts import audit, cli, engine, sbom, sign, state
from scripts.cli import StepFailed, UserError, log, say
from scripts.plan import NAME
from scripts.published import artifacts, provenance, registry, tags
from scripts.published.tags import Repository
from scripts.spec import Spec, load
from scripts.stored import contents
from scripts.units import in_units

#: The label that holds an image's immutable tag (scripts/plan.py writes it).
_TAG = "org.opencontainers.image.version"


@dataclass(frozen=True)
class Blob:
    """A part of an image as the registry stores it: a layer by its stage, or the configuration; ``size`` in bytes."""

    name: str
    digest: str
    diff_id: str
    size: int


def blobs(verified: dict[str, Any]) -> list[Blob]:
    """The blobs of an image, from what verify recorded about it."""
    found = [
        Blob(str(layer["stage"]), str(layer["digest"]), str(layer["diff_id"]), int(layer["compressed"]))
        for layer in verified["layers"]
    ]
    config = verified["config"]
    return [*found, Blob("configuration", str(config["digest"]), "", int(config["size"]))]


def account(parts: list[Blob], fates: dict[str, str]) -> list[dict[str, Any]]:
    """What a push did with each blob: ``name``, ``digest``, ``size`` in bytes, ``uploaded`` (whether it was sent).

    Args:
        fates: first digits of a blob's digest -> ``uploaded`` or ``there``. A blob the engine does not speak of counts
            as sent: it tells of every layer the registry has, but sends configurations in silence (Docker 26).
    """

    def there(blob: Blob) -> bool:
        digests = [digest.removeprefix("sha256:") for digest in (blob.digest, blob.diff_id) if digest]
        return any(
            fate == "there" and digest.startswith(digits) for digits, fate in fates.items() for digest in digests
        )

    return [
        {"name": blob.name, "digest": blob.digest, "size": blob.size, "uploaded": not there(blob)} for blob in parts
    ]


def image_to_push(spec: Spec) -> Any:
    """The image that passed (``trainyard:<target>``), or the candidate where none has yet.

    Raises:
        UserError: there is neither.
    """
    try:
        return engine.client().images.get(f"{NAME}:{spec.target}")
    except docker.errors.ImageNotFound:
        return engine.image(f"{NAME}:{spec.target}-candidate", made_by=f"make image TARGET={spec.target}")


def push(spec: Spec, address: str, *, reference: str | None = None) -> dict[str, Any]:
    """Push the image of ``spec`` to ``address`` (host[:port]/path).

    Args:
        reference: a local image to push in place of the target's.
    Returns:
        ``reference`` (by digest), ``tag`` (the reference by tag), ``digest``, ``blobs`` (:func:`account`),
        ``bytes_uploaded`` (with the manifest), ``already_there`` (whether the tag was), ``seconds``.
    Raises:
        UserError: the digest never passed verify and smoke, there is no such image, or the tag is taken by another.
        StepFailed: a locked package has a known vulnerability that nobody waived, or the registry refuses.
    """
    started = time.monotonic()
    audit.require(spec)
    image = engine.image(reference, made_by="docker pull") if reference else image_to_push(spec)
    digest = str(image.id)
    passed = state.require(spec.target, digest, "verify", "smoke")
    tag = str(image.labels.get(_TAG) or "")
    if not tag:
        raise UserError(f"{digest[:19]} has no label {_TAG}: run 'make image TARGET={spec.target}'")
    repository = f"{address}/{NAME}"
    destination = f"{repository}:{tag}"
    parts = blobs(passed["verify"])
    before = registry.digest_of(destination)
    same = before is not None and before in known_as(image, repository)
    if before is not None and not same:
        raise UserError(
            f"{destination} is {before[:19]} at the registry, and such a tag never moves; this image is {digest[:19]}: "
            f"commit what changed and run 'make image TARGET={spec.target}', which gives it a tag of its own"
        )
    if same:
        digest = str(before)
        fates = {"": "there"}  # what every digest starts with
    else:
        say(f"pushing {digest[:19]} to {destination}")
        fates = _send(image, destination, parts)
        after = registry.digest_of(destination)
        if after is None or (after != digest and engine.stores_in_containerd()):
            raise StepFailed(f"{destination} is {after or 'not there'} after the push; {digest} was sent")
        digest = after
    told = account(parts, fates)
    manifest = 0 if same else int(passed["verify"]["manifest"]["size"])
    return {
        "reference": f"{repository}@{digest}",
        "tag": destination,
        "digest": digest,
        "blobs": told,
        "bytes_uploaded": sum(blob["size"] for blob in told if blob["uploaded"]) + manifest,
        "already_there": same,
        "seconds": round(time.monotonic() - started, 1),
    }


def known_as(image: Any, repository: str) -> set[str]:
    """Digests an image has at ``repository``: its own, where the engine keeps what registries know it by, and any that
    earlier pushes and pulls found out."""
    names = [str(name).rpartition("@") for name in image.attrs.get("RepoDigests") or []]
    return {str(image.id)} | {digest for name, _, digest in names if name == repository}


def _send(image: Any, destination: str, parts: list[Blob]) -> dict[str, str]:
    """Push under a tag that the engine has only as long as that takes; what became of each blob, as for `account`."""
    repository, _, tag = destination.rpartition(":")
    fates: dict[str, str] = {}
    image.tag(repository, tag)
    try:
        for digits, fate in registry.push(destination):
            fates[digits] = fate
            for blob in parts:
                if fate == "uploaded" and digits in (blob.digest[7:19], blob.diff_id[7:19]):
                    say(f"  {blob.name}: {in_units(blob.size)} uploaded")
    finally:
        engine.client().api.remove_image(destination, noprune=True)
    return fates


def accompany(
    spec: Spec, address: str, digest: str, key: sign.PrivateKey | None, *, reference: str | None = None
) -> dict[str, str]:
    """Lay beside an image at the registry what tells more about it: its SBOM, and a signature if there is a key.

    Args:
        reference: the local image that was pushed; the target's if None.
    Returns:
        What lies beside it -> its tag: ``provenance``, ``sbom``, ``signature``.
    Raises:
        StepFailed: the registry does not take it.
    """
    repository = Repository(f"{address}/{NAME}")
    subject = repository.manifest(digest)
    assert subject is not None  # it has just been pushed
    found = {}
    if provenance.attach(spec.target, repository, digest):
        found["provenance"] = provenance.tag(digest)
    if not artifacts.get(repository, digest, "sbom"):
        local = contents.local(reference or str(image_to_push(spec).id))
        sbom.attach(repository, subject, sbom.make(local, spec))
    found["sbom"] = artifacts.tag(digest, "sbom")
    if key is not None:
        sign.sign(repository, subject, key)
        found["signature"] = artifacts.tag(digest, "sig")
    return found


def table(pushed: dict[str, Any]) -> Table:
    """What was uploaded and what was already there, for people."""
    found = Table(title=pushed["tag"], title_justify="left")
    found.add_column("part")
    found.add_column("size", justify="right")
    found.add_column("")
    for blob in pushed["blobs"]:
        fate = "uploaded" if blob["uploaded"] else "already there"
        found.add_row(blob["name"], in_units(blob["size"]), fate, style=None if blob["uploaded"] else "dim")
    return found


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="host[:port]/path; or REGISTRY")
    options = parser.parse_args(arguments)
    spec = load(options.target)
    address = registry.check_address(options.registry)
    key = sign.key_given()  # one that cannot be read is told before anything is sent
    pushed = push(spec, address)
    # So that `make promote` on another host knows that it passed.
    tags.attest(f"{address}/{NAME}", pushed["digest"])
    beside = accompany(spec, address, pushed["digest"], key)
    if pushed["already_there"]:
        say(f"{pushed['tag']} is there already, with this digest: nothing to do")
    else:
        log.print(table(pushed))
        say(f"{in_units(pushed['bytes_uploaded'])} uploaded in {pushed['seconds']} s")
    say(f"beside it: {', '.join(beside)}")
    say(pushed["reference"])
    cli.result(pushed | {"beside": beside}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
