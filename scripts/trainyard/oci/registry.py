"""Container registries.

Uploads and look-ups of tags go through the Docker engine (:func:`push`, :func:`digest_of`), so that its credentials,
certificates and insecure registries apply. Everything else uses the OCI distribution API
(https://github.com/opencontainers/distribution-spec) with the credentials of the Docker client (:class:`Repository`). A
tag is moved by fetching a manifest and storing the same bytes under the tag, so the digest does not change.

A registry answers the first request of a client with the challenge that says where its tokens are from. Challenges are
kept in the state folder, so that later commands begin with the token.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urljoin

import docker.auth
import docker.credentials.errors
import docker.errors
import requests
import urllib3

from trainyard import installation, settings
from trainyard.console import StepFailed, UserError
from trainyard.oci import docker_engine
from trainyard.oci.reference import REGISTRY, REPOSITORY, Reference

#: Seconds to wait for an answer; registries on the same host took under 0.1 s (2026-11).
TIMEOUT = 60

#: Media types of the manifests and indexes that are accepted.
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
)

#: Status codes of errors that are expected to pass: the reference registry answers 500 to one of two simultaneous
#: writes of a tag, and hosted registries answer 429 and 503 under load.
TRANSIENT_ERRORS = (429, 500, 502, 503, 504)

#: How often a request is sent if its errors are transient.
MAX_ATTEMPTS = 4

#: Most requests at a time: each thread of a command that sends many keeps one connection.
MAX_CONNECTIONS = 16

#: Transient errors are retried within 1.4 s. Connection errors are not: the address is most likely wrong. A POST begins
#: an upload or mounts a blob: one that is sent again leaves at most an empty upload, which the registry removes.
RETRY = urllib3.Retry(
    total=None, connect=0, read=0, other=0, status=MAX_ATTEMPTS - 1, backoff_factor=0.2, raise_on_status=False,
    status_forcelist=TRANSIENT_ERRORS, allowed_methods=["GET", "HEAD", "POST", "PUT"],
)  # fmt: skip

#: Error text of the engine or a registry -> what it means for the user. The first match wins; {} is the registry.
_MEANINGS = [
    (
        r"no space left|insufficient storage|\b507\b|disk quota",
        "{} has no space left: free some on the registry's disk, then push again (blobs that arrived are not resent)",
    ),
    (
        r"unauthorized|authentication required|no basic auth|incorrect username|\b401\b",
        "{} refuses the credentials: run 'docker login {}'",
    ),
    (r"denied|forbidden|\b403\b", "{} does not let this account push: ask for write permission"),
    (
        r"connection refused|no such host|failed to resolve|i/o timeout|timed? ?out|unreachable|no route"
        r"|connection reset|server misbehaving|dial tcp|deadline exceeded",
        "{} cannot be reached: check the address and the network",
    ),
    (
        r"HTTP response to HTTPS",
        "{} uses plain HTTP, which the engine accepts from localhost only, or by its setting 'insecure-registries'",
    ),
    (
        r"x509|certificate|tls:",
        "{} has no certificate that the engine trusts: install its certificate authority under /etc/docker/certs.d/{}",
    ),
    (r"name unknown|repository .*not found", "{} has no such repository: create it first"),
    (
        r"manifest[ _]invalid|unsupported media ?type|unsupported manifest|\b415\b",
        "{} does not accept this manifest: without support for zstd layers, build with "
        f"'{installation.command('image', COMPRESSION='gzip')}'",
    ),
    (
        r"\b50\d\b|internal server error|unknown: unknown error",
        "{} failed to handle the request: its disk may be full; see its log",
    ),
]


def check_address(registry: str | None, variable: str = "REGISTRY") -> str:
    """``host[:port]/path``, where images are pushed to, without a trailing slash.

    Args:
        variable: its name in messages.
    Raises:
        UserError: none was given, or it is not one; the line shows what one looks like.
    """
    example = " or ".join(
        installation.option(variable, one) for one in ("us-docker.pkg.dev/project/repository", "localhost:5000/team")
    )
    if not registry:
        raise UserError(f"no registry to push to: give one, as in {example}")
    address, given = registry.rstrip("/"), installation.option(variable, repr(registry))
    if "://" in address:
        raise UserError(f"{given}: leave out '{address.split('://')[0]}://', as in {example}")
    host, _, path = address.partition("/")
    named = REGISTRY.fullmatch(host) and re.search(r"[.:]|^localhost$", host) and host == host.lower()
    if not named or (path and not REPOSITORY.fullmatch(path)):
        raise UserError(f"{given} is not HOST[:PORT]/PATH in lowercase letters, as in {example}")
    return address


def host(address: str) -> str:
    """``host[:port]`` of an address or reference that starts with one."""
    return address.split("/", 1)[0]


def is_loopback(address: str) -> bool:
    """Whether an address is on the engine's own host, the only one from which the engine accepts plain HTTP."""
    return re.fullmatch(r"localhost(:\d+)?|127\.\d+\.\d+\.\d+(:\d+)?", host(address)) is not None


def meaning(error: str, address: str) -> str:
    """What an error of the engine or a registry means, in one line that ends with the error's own words."""
    error = re.sub(r"\?[^\s\":]*", "", " ".join(error.split()))  # upload URLs end in hundreds of characters of state
    where = host(address)
    quoted = error if len(error) < 200 else f"…{error[-200:]}"
    for pattern, text in _MEANINGS:
        if re.search(pattern, error, re.IGNORECASE):
            return f"{text.replace('{}', where)} ({quoted})"
    return f"{where} refused: {quoted}"


def _reason(error: requests.exceptions.RequestException) -> str:
    """What went wrong, without the objects and addresses that requests and urllib3 wrap around it."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", None) or error).rpartition("): ")[2] or str(error)


def digest_of(reference: str) -> str | None:
    """The digest that a reference has at its registry, or None if the registry has no such tag.

    Raises:
        StepFailed: the registry cannot be reached or refuses.
    """
    try:
        return str(docker_engine.client().images.get_registry_data(reference).id)
    except docker.errors.NotFound:
        return None
    except docker.errors.APIError as error:
        words = str(error.explanation or error)
        # Some registries report a repository without tags as unknown.
        if re.search(r"manifest unknown|name unknown|not found", words, re.IGNORECASE):
            return None
        raise StepFailed(meaning(words, reference)) from None
    except requests.exceptions.RequestException as error:
        raise StepFailed(meaning(_reason(error), reference)) from None


def push(reference: str) -> Iterator[tuple[str, str]]:
    """Push a local tag; yield (start of a blob's digest, ``uploaded`` or ``exists``) as each blob is done.

    The digest is the blob's SHA-256, or the uncompressed layer's where the engine does not keep blobs.

    Raises:
        StepFailed: the registry refused it; blobs that arrived before are kept there and are not resent.
    """
    destination = Reference.parse(reference)
    done: set[str] = set()
    try:
        events: Iterator[dict[str, Any]] = docker_engine.client().api.push(
            destination.name, destination.tag or "latest", stream=True, decode=True
        )
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
                yield blob, "exists"
    except docker.errors.APIError as error:
        raise StepFailed(meaning(str(error.explanation or error), reference)) from None
    except requests.exceptions.RequestException as error:
        raise StepFailed(meaning(_reason(error), reference)) from None


def sha256(data: bytes) -> str:
    """The digest of ``data``, ``sha256:…``."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _challenge_file(where: str) -> Path:
    """The file that keeps the challenge of a registry, by its ``host[:port]``."""
    return settings.STATE / "registries" / where.replace(":", "_")


def _known_challenge(where: str) -> str:
    """The last challenge of a registry; empty if it is not known."""
    try:
        return _challenge_file(where).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _keep_challenge(where: str, challenge: str) -> None:
    """Keep a challenge without its scope, which is that of one request."""
    words = re.sub(r',?\s*scope="[^"]*"', "", challenge)
    file = _challenge_file(where)
    with contextlib.suppress(OSError):  # it only saves a request
        if words != _known_challenge(where):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(words, encoding="utf-8")


@dataclass(frozen=True)
class Manifest:
    """A manifest as the registry stores it."""

    digest: str
    media_type: str
    body: bytes

    @classmethod
    def of(cls, document: Mapping[str, Any], media_type: str) -> Manifest:
        """The manifest that a document is stored as."""
        body = json.dumps(document, separators=(",", ":")).encode()
        return cls(sha256(body), media_type, body)


@dataclass
class Repository:
    """One repository of a registry, as ``host[:port]/path``. Several threads may use it."""

    name: str
    _headers: dict[str, str] = field(default_factory=dict)
    _session: requests.Session = field(default_factory=requests.Session)
    _authorizing: threading.Lock = field(default_factory=threading.Lock)
    _asked: bool = False

    def __post_init__(self) -> None:
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=MAX_CONNECTIONS, max_retries=RETRY))

    @property
    def host(self) -> str:
        """``host[:port]`` of the registry."""
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        """The repository's path at the registry."""
        return self.name.partition("/")[2]

    def _url(self, rest: str) -> str:
        scheme = "http" if is_loopback(self.name) else "https"
        return rest if "://" in rest else f"{scheme}://{self.host}/v2/{self.path}/{rest}"

    def _credentials(self) -> tuple[str, str] | None:
        """User and secret for this registry from `docker login` or a credential helper such as gcloud's.

        Raises:
            UserError: Docker's configuration cannot be read, or its credential helper failed.
        """
        try:
            stored = docker.auth.load_config().resolve_authconfig(self.host) or {}
        except (docker.errors.DockerException, docker.credentials.errors.StoreError) as error:
            words = " ".join(str(error).split())
            raise UserError(f"Docker's configuration gives no credentials for {self.host}: {words}") from None
        # Credential helpers and the configuration file spell the keys differently.
        found = {str(key).lower(): value for key, value in stored.items()}
        if found.get("identitytoken"):
            return "<token>", str(found["identitytoken"])
        return (str(found["username"]), str(found["password"])) if found.get("username") else None

    def _token(self, challenge: str) -> dict[str, str]:
        """The header that answers a 401: Basic, or Bearer with a token from the realm that it names."""
        credentials = self._credentials()
        if challenge.lower().startswith("basic"):
            if credentials is None:
                return {}
            pair = base64.b64encode(":".join(credentials).encode()).decode()
            return {"Authorization": f"Basic {pair}"}
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        if "realm" not in fields:
            return {}
        query = {"service": fields.get("service", ""), "scope": f"repository:{self.path}:pull,push"}
        answer = requests.get(fields["realm"], params=query, auth=credentials, timeout=TIMEOUT)
        if not answer.ok:
            return {}
        data = answer.json()
        return {"Authorization": f"Bearer {data.get('token') or data.get('access_token')}"}

    def authorize(self) -> None:
        """Get a token if the registry's challenge is known. :meth:`request` does so before the first request."""
        with self._authorizing:
            if self._asked or "Authorization" in self._headers:
                return
            self._asked = True
            if challenge := _known_challenge(self.host):
                # The registry may be another one by now: its own answer decides.
                with contextlib.suppress(requests.exceptions.RequestException, ValueError):
                    self._headers |= self._token(challenge)

    def _answer(self, challenge: str, refused: str | None) -> None:
        """Get a token, unless another thread has done so since the token ``refused`` was sent."""
        with self._authorizing:
            self._asked = True
            if self._headers.get("Authorization") == refused:
                found = self._token(challenge)
                self._headers |= found
                if found:
                    _keep_challenge(self.host, challenge)

    def request(self, method: str, rest: str, *, missing_ok: bool = False, **options: Any) -> requests.Response:
        """Send a request to the registry.

        Args:
            method: HTTP method.
            rest: what follows ``/v2/<path>/``, or a URL that the registry returned.
            missing_ok: return a response with status 404 instead of raising.
            options: of :meth:`requests.Session.request`.
        Raises:
            StepFailed: it cannot be reached or refuses; one line.
        """
        more: Mapping[str, str] = options.pop("headers", {})
        url = self._url(rest)
        self.authorize()
        sent = self._headers.get("Authorization")
        try:
            answer = self._session.request(method, url, headers={**self._headers, **more}, timeout=TIMEOUT, **options)
            if answer.status_code == 401:
                self._answer(answer.headers.get("WWW-Authenticate", ""), sent)
                if hasattr(options.get("data"), "seek"):
                    options["data"].seek(0)
                answer = self._session.request(
                    method, url, headers={**self._headers, **more}, timeout=TIMEOUT, **options
                )
        except requests.exceptions.RequestException as error:
            raise StepFailed(meaning(_reason(error), self.name)) from None
        if answer.ok or (missing_ok and answer.status_code == 404):
            return answer
        words = answer.text
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            first = answer.json()["errors"][0]
            words = f"{first['code']}: {first['message']}".lower()
        raise StepFailed(meaning(f"{words} ({answer.status_code})", self.name))

    def manifest(self, version: str) -> Manifest | None:
        """The manifest of a tag or digest, or None if there is none."""
        answer = self.request("GET", f"manifests/{version}", missing_ok=True, headers={"Accept": MANIFESTS})
        if answer.status_code == 404:
            return None
        return Manifest(sha256(answer.content), answer.headers["Content-Type"], answer.content)

    def existing(self, version: str) -> Manifest:
        """The manifest of a tag or digest.

        Raises:
            StepFailed: there is none, or the registry refuses.
        """
        found = self.manifest(version)
        if found is None:
            raise StepFailed(f"{self.name} has no {version}, which it must have: push it again")
        return found

    def has(self, version: str) -> bool:
        """Whether there is an image of this tag or digest."""
        return self.request("HEAD", f"manifests/{version}", missing_ok=True, headers={"Accept": MANIFESTS}).ok

    def upload(self, data: bytes | IO[bytes], digest: str) -> None:
        """Store a blob, in two requests ("POST then PUT"); a file is sent from its start.

        https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-a-blob-monolithically
        """
        begun = self.request("POST", "blobs/uploads/")
        where = urljoin(begun.url, begun.headers["Location"])
        where += ("&" if "?" in where else "?") + f"digest={digest}"
        self.request("PUT", where, data=data, headers={"Content-Type": "application/octet-stream"})

    def put(self, manifest: Manifest, tag: str) -> str:
        """Store a manifest under a tag, or under its digest alone. No layer is transferred.

        Returns:
            The digest of the image among whose referrers the registry lists the manifest; empty if it lists none.
        Raises:
            UserError: the repository's tags are immutable.
            StepFailed: the registry refuses for another reason.
        """
        try:
            answer = self.request(
                "PUT", f"manifests/{tag}", data=manifest.body, headers={"Content-Type": manifest.media_type}
            )
        except StepFailed as error:
            if "immutab" not in str(error):
                raise
            raise UserError(
                f"{self.name}: its tags are immutable, so '{tag}' cannot be moved: give another repository "
                f"with {installation.option('TO')}"
            ) from None
        return answer.headers.get("OCI-Subject", "")

    def config(self, manifest: Manifest) -> dict[str, Any]:
        """The image configuration that a manifest names."""
        answer = self.request("GET", f"blobs/{json.loads(manifest.body)['config']['digest']}")
        found: dict[str, Any] = answer.json()
        return found

    def tags(self) -> list[str]:
        """All tags, sorted; none if there is no such repository."""
        return sorted(name for page in self.pages("tags/list?n=1000") for name in page.get("tags") or [])

    def pages(self, rest: str) -> Iterator[dict[str, Any]]:
        """The pages of a list; none if the registry has no such list.

        Args:
            rest: see :meth:`request`.
        Raises:
            StepFailed: see :meth:`request`.
        """
        while rest:
            answer = self.request("GET", rest, missing_ok=True)
            if answer.status_code == 404:
                return
            yield answer.json()
            following = answer.links.get("next", {}).get("url", "")
            rest = following if "://" in following else following.rpartition("/v2/" + self.path + "/")[2]

    def mount(self, manifest: Manifest, source: Repository) -> None:
        """Mount the blobs of a manifest of another repository of the same registry, without transferring them.

        Raises:
            StepFailed: the registry does not support it ("mounting a blob from another repository" is optional).
        """
        data = json.loads(manifest.body)
        for entry in data.get("manifests", []):  # an index: its images first, without a tag
            image = source.existing(entry["digest"])
            self.mount(image, source)
            self.put(image, image.digest)
        for blob in [data["config"], *data["layers"]] if "config" in data else []:
            digest = blob["digest"]
            if self.request("HEAD", f"blobs/{digest}", missing_ok=True).ok:
                continue
            answer = self.request("POST", f"blobs/uploads/?mount={digest}&from={source.path}")
            if answer.status_code != 201:
                raise StepFailed(f"{self.host} cannot mount blobs between repositories: promote within {source.name}")
