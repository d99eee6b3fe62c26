"""What verbs ask of a container registry. Everything goes through the engine, so that its credentials (`docker login`),
its certificates and its idea of which registries speak plain HTTP hold for look-ups and uploads alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import docker.errors
import requests

from scripts import engine
from scripts.cli import StepFailed, UserError

#: What an image can be pushed to: host[:port]/path, lower case (the distribution specification's rule for names).
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+|[a-z0-9.-]+:\d+)(?::\d+)?(?:/{_COMPONENT})*")

#: How the engine words what goes wrong -> what that means for the user. First match wins; {} is the registry's host.
_MEANINGS = [
    (
        r"no space left|insufficient storage|\b507\b|disk quota",
        "{} has no space left: free some on the registry's disk, then push again (what arrived is not sent twice)",
    ),
    (
        r"unauthorized|authentication required|no basic auth|incorrect username|\b401\b",
        "{} refuses the credentials: run 'docker login {}'",
    ),
    (r"denied|forbidden|\b403\b", "{} does not let this account push there: ask for the right to write"),
    (
        r"connection refused|no such host|failed to resolve|i/o timeout|timed? ?out|unreachable|no route"
        r"|connection reset|server misbehaving|dial tcp|deadline exceeded",
        "{} is out of reach: check the address and the network",
    ),
    (
        r"HTTP response to HTTPS",
        "{} speaks plain HTTP, which the engine takes from localhost only, or by its setting 'insecure-registries'",
    ),
    (
        r"x509|certificate|tls:",
        "{} has no certificate that the engine trusts: install its authority under /etc/docker/certs.d/{}",
    ),
    (r"name unknown|repository .*not found", "{} has no such repository: create it first"),
    (
        r"manifest[ _]invalid|unsupported media ?type|unsupported manifest|\b415\b",
        "{} does not take this manifest: if it knows no zstd layers, build with 'COMPRESSION=gzip make image'",
    ),
    (
        r"\b50\d\b|internal server error|unknown: unknown error",
        "{} took the request and failed: its disk may be full, its log says more",
    ),
]


def check_address(registry: str | None) -> str:
    """``host[:port]/path`` without a trailing slash.

    Raises:
        UserError: none was given, or it is not one; the line shows what one looks like.
    """
    example = "REGISTRY=us-docker.pkg.dev/project/repository or REGISTRY=localhost:5000/team"
    if not registry:
        raise UserError(f"no registry to push to: give one, as in {example}")
    address = registry.rstrip("/")
    if "://" in address:
        raise UserError(f"REGISTRY={registry!r}: leave out '{address.split('://')[0]}://', as in {example}")
    if not _REPOSITORY.fullmatch(address):
        raise UserError(f"REGISTRY={registry!r} is not host[:port]/path in lower case, as in {example}")
    return address


def host(reference: str) -> str:
    """The registry of a reference that starts with one."""
    return reference.split("/", 1)[0]


def is_loopback(address: str) -> bool:
    """Whether an address is on the engine's own host, the one place from which it takes plain HTTP."""
    return re.fullmatch(r"localhost(:\d+)?|127\.\d+\.\d+\.\d+(:\d+)?", host(address)) is not None


def meaning(words: str, reference: str) -> str:
    """What an error of the engine or a registry means, in one line that ends with its own last words."""
    words = re.sub(r"\?[^\s\":]*", "", " ".join(words.split()))  # upload addresses end in hundreds of digits of state
    where = host(reference)
    said = words if len(words) < 200 else f"…{words[-200:]}"
    for pattern, text in _MEANINGS:
        if re.search(pattern, words, re.IGNORECASE):
            return f"{text.replace('{}', where)} ({said})"
    return f"{where} refused: {said}"


def digest_of(reference: str) -> str | None:
    """The digest a reference has at its registry, or None if the registry has no such tag.

    Raises:
        StepFailed: the registry is out of reach or refuses.
    """
    try:
        return str(engine.client().images.get_registry_data(reference).id)
    except docker.errors.NotFound:
        return None
    except docker.errors.APIError as error:
        words = str(error.explanation or error)
        # Some registries say of a repository without any tag that it is not there.
        if re.search(r"manifest unknown|name unknown|not found", words, re.IGNORECASE):
            return None
        raise StepFailed(meaning(words, reference)) from None
    except requests.exceptions.RequestException as error:
        raise StepFailed(meaning(str(error), reference)) from None


def push(reference: str) -> Iterator[tuple[str, str]]:
    """Push a local tag; yield (first digits of a blob's digest, ``uploaded`` or ``there``) as each blob is done.

    The digits are of the blob's SHA-256, or of the uncompressed layer's where the engine keeps no blobs.

    Raises:
        StepFailed: the registry did not take it; what arrived before stays there and is not sent again.
    """
    repository, _, tag = reference.rpartition(":")
    done: set[str] = set()
    try:
        events: Iterator[dict[str, Any]] = engine.client().api.push(repository, tag, stream=True, decode=True)
        for event in events:
            if "error" in event:
                raise StepFailed(meaning(str(event["error"]), reference))
            status, blob = str(event.get("status", "")), str(event.get("id", ""))
            if not blob or blob in done:
                continue
            if status == "Pushed":
                done.add(blob)
                yield blob, "uploaded"
            elif "lready exists" in status or status.startswith("Mounted from"):
                done.add(blob)
                yield blob, "there"
    except docker.errors.APIError as error:
        raise StepFailed(meaning(str(error.explanation or error), reference)) from None
    except requests.exceptions.RequestException as error:
        raise StepFailed(meaning(str(error), reference)) from None
