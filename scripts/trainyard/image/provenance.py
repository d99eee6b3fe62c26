"""Keep BuildKit's SLSA provenance of an image apart from it, so that the image's digest does not depend on it.

An attestation contains times: an image that is built with one gets a different digest in every build and could not be
compared, promoted or reproduced by digest. The image is therefore built without attestations. The same build then runs
again with ``--provenance=mode=max``: every step comes from the cache, the image is identical, and the attestation's
statement (about 50 KB) is kept, which ``make push`` attaches to the image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.common.errors import StepFailed
from trainyard.image.buildx import bake
from trainyard.oci import image_store
from trainyard.spec import state
from trainyard.spec.naming import NAME

#: Start of the predicate types of provenance; the version follows (https://slsa.dev/spec/v1.0/provenance).
SLSA = "https://slsa.dev/provenance/"

#: Keys of proxies: of a build's arguments, of a step (https://pkg.go.dev/github.com/moby/buildkit/solver/pb#ProxyEnv).
_PROXY = re.compile(r"proxy_env|(build-arg:)?(https?|ftp|all|no)_proxy", re.IGNORECASE)


def local(target: str) -> str:
    """Return the temporary name of the second build's image, as a name keeps the whole image on the disk."""
    return f"{NAME}:{target}-provenance"


def keep(
    context: Context, kept: Path, digest: str, target: str, arguments: list[str], variables: dict[str, str]
) -> None:
    """Store the provenance of the build that has just ended, unless it is known or ``PROVENANCE=0``.

    Args:
        kept: the folder of the image's target, ``Recipe.kept``.
        digest: of the image that was built.
        target: its name in the bake file, ``Recipe.bake_name``.
        arguments, variables: of :func:`trainyard.image.buildx.bake`, to build it as :func:`local` with provenance.
    Raises:
        StepFailed: the second build gave an image with another digest.
    """
    if statement(kept, digest) or not context.engine.stores_in_containerd:
        return
    if settings.variable("PROVENANCE") == "0":
        return
    try:
        bake(context, target, arguments, variables=variables)
        documents = image_store.documents(context.engine, local(kept.name))
    finally:
        context.engine.untag(local(kept.name))
    about = statement_about(digest, documents.values())
    if about is None:
        raise StepFailed(f"{kept.name}: building {digest[:19]} again for its provenance gave another digest")
    state.record(kept, "provenance", digest, {"passed": True, "statement": about})


def statement_about(digest: str, documents: Iterable[bytes]) -> dict[str, Any] | None:
    """Return the in-toto statement of an image's provenance among documents, without proxies; None if there is none.

    BuildKit writes them down with the arguments and each step, and their addresses may have passwords.
    """
    for text in documents:
        if SLSA.encode() not in text:
            continue
        document: dict[str, Any] = json.loads(text, object_hook=_without_proxies)
        subjects = [subject["digest"].get("sha256") for subject in document.get("subject", [])]
        if str(document.get("predicateType")).startswith(SLSA) and digest.removeprefix("sha256:") in subjects:
            return document
    return None


def _without_proxies(mapping: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if not _PROXY.fullmatch(name)}


def statement(kept: Path, digest: str) -> dict[str, Any] | None:
    """Return the in-toto statement of an image's provenance, as BuildKit wrote it; None if there is none."""
    facts = state.recall(kept, "provenance", digest)
    return facts.get("statement") if facts else None
