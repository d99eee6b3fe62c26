"""Read from and write to container registries.

Uploads and look-ups of tags go through the Docker engine (:func:`push`, :func:`digest_of`), so that its credentials,
certificates and insecure registries apply. Everything else uses the OCI distribution API
(https://github.com/opencontainers/distribution-spec) with the credentials of the Docker client (:class:`Repository`). A
tag is moved by fetching a manifest and storing the same bytes under the tag, so the digest does not change.

A registry answers the first request of a client with the challenge that says where its tokens are from. Challenges are
kept in the state folder, so that later commands begin with the token.

Whatever asks a registry raises :class:`StepFailed`, with a message of one line, if it cannot be reached or refuses, and
:class:`InvalidAnswer`, which is one, if its answer is too large, too slow, malformed or another one than was asked for.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import docker.auth
import docker.credentials.errors
import docker.errors
import requests
import urllib3

from trainyard.common import settings
from trainyard.common.docker_engine import Engine
from trainyard.common.engine_client import Lost, NoAnswer
from trainyard.common.errors import StepFailed, UserError, one_line
from trainyard.oci.documents import (
    CONFIGURATION,
    DOCUMENT_LIMIT,
    IMAGE_TYPES,
    INDEX_TYPES,
    MANIFEST_LIMIT,
    TAGS,
    InvalidAnswer,
    check_manifest,
    hashed,
    parse,
)
from trainyard.oci.reference import REGISTRY, REPOSITORY, Reference
from trainyard.oci.transport import (
    TIMEOUT,
    TRANSIENT_ERRORS,
    Checked,
    Session,
    is_loopback,
    is_private,
    joined,
    origin,
    read,
)
from trainyard.spec.state import own

#: Media types of the manifests and indexes that are accepted.
_MANIFESTS = ", ".join(IMAGE_TYPES + INDEX_TYPES)

#: What requests raises, and urllib3 while a body is read.
_CONNECTION_ERRORS = (requests.exceptions.RequestException, urllib3.exceptions.HTTPError)

#: Most bytes of an error that a registry explains.
_ERROR_LIMIT = 1 << 20

#: Most pages of a list: a million tags, in pages of 1,000.
_MOST_PAGES = 1000

#: Seconds between reading a tag again and again that is not what was written: a cache may answer once.
_READ_AGAIN = (0.0, 0.3, 1.0)

#: Errors of Docker 26 that pass if the push is repeated. 400: of two pushes of an image to one repository, the second
#: skips blobs that the first is uploading, and sends its manifest before they are complete. The others are
#: :data:`~trainyard.oci.transport.TRANSIENT_ERRORS` about a manifest: the reference registry answers 500 to who reads a
#: tag while another push writes it.
_PASSES = re.compile(
    r"unexpected status from (?:PUT request to \S+/manifests/\S+: 400"
    rf"|[A-Z]+ request to \S+/manifests/\S+: (?:{'|'.join(map(str, TRANSIENT_ERRORS))})) "
)

#: Seconds before a push that failed with one of those errors is repeated. Blobs that arrived are not resent.
_PUSH_AGAIN = (2, 10)

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
        "'trainyard image --compression gzip'",
    ),
    (
        r"\b50\d\b|internal server error|unknown: unknown error",
        "{} failed to handle the request: its disk may be full; see its log",
    ),
]


def check_address(registry: str | None, option: str = "--registry") -> str:
    """Return ``host[:port]/path``, where images are pushed to, without a trailing slash.

    Raises:
        UserError: none was given with ``option``, or it is not one; the line shows what one looks like.
    """
    example = f"'{option} us-docker.pkg.dev/project/repository' or '{option} localhost:5000/team'"
    if not registry:
        raise UserError(f"no registry to push to: give one, as in {example}")
    address, given = registry.rstrip("/"), f"'{option} {registry}'"
    if "://" in address:
        raise UserError(f"{given}: leave out '{address.split('://')[0]}://', as in {example}")
    host, _, path = address.partition("/")
    named = REGISTRY.fullmatch(host) and re.search(r"[.:]|^localhost$", host) and host == host.lower()
    if not named or (path and not REPOSITORY.fullmatch(path)):
        raise UserError(f"{given} is not HOST[:PORT]/PATH in lowercase letters, as in {example}")
    return address


def host(address: str) -> str:
    """Return ``host[:port]`` of an address or reference that starts with one."""
    return address.split("/", 1)[0]


def meaning(error: str, address: str) -> str:
    """Return what an error of the engine or a registry means, in one line that ends with the error's own words."""
    error = re.sub(r"\?[^\s\":]*", "", " ".join(error.split()))  # upload URLs end in hundreds of characters of state
    error = re.sub(r"(?i)\b(bearer|basic) [\w.~+/=-]{16,}", r"\1 …", one_line(error))
    where = host(address)
    quoted = error if len(error) < 200 else f"…{error[-200:]}"
    for pattern, text in _MEANINGS:
        if re.search(pattern, error, re.IGNORECASE):
            return f"{text.replace('{}', where)} ({quoted})"
    return f"{where} refused: {quoted}"


def _reason(error: requests.exceptions.RequestException | urllib3.exceptions.HTTPError) -> str:
    """Return what went wrong, without the objects and addresses that requests and urllib3 wrap around it."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", None) or error).rpartition("): ")[2] or str(error)


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    """Raise what goes wrong with the engine or a connection as :class:`StepFailed`."""
    try:
        yield
    except (Lost, NoAnswer):  # of the engine, which they name
        raise
    except docker.errors.APIError as error:
        raise StepFailed(meaning(str(error.explanation or error), address)) from None
    except _CONNECTION_ERRORS as error:
        raise StepFailed(settings.wrong_ca_bundle() or meaning(_reason(error), address)) from None


def digest_of(engine: Engine, reference: str) -> str | None:
    """Return the digest that a reference has at its registry; None if the registry has no such tag."""
    with _explained(reference):
        try:
            return str(engine.client.images.get_registry_data(reference).id)
        except docker.errors.NotFound:
            return None
        except docker.errors.APIError as error:
            # Some registries report a repository without tags as unknown.
            words = str(error.explanation or error)
            if re.search(r"manifest unknown|name unknown|not found", words, re.IGNORECASE):
                return None
            raise


def push(engine: Engine, reference: str) -> Iterator[tuple[str, str]]:
    """Push a local tag; yield (start of a blob's digest, ``uploaded`` or ``exists``) as each blob is done.

    The digest is the blob's SHA-256, or the uncompressed layer's where the engine does not keep blobs. If the registry
    refuses, blobs that arrived before are kept there and are not resent.
    """
    destination = Reference.parse(reference)
    done: set[str] = set()
    for pause in (*_PUSH_AGAIN, None):
        failed = yield from _push(engine, destination, reference, done)
        if not failed:
            return
        if pause is None or not _PASSES.search(failed):
            raise StepFailed(meaning(failed, reference))
        time.sleep(pause)


def _push(
    engine: Engine, destination: Reference, reference: str, done: set[str]
) -> Generator[tuple[str, str], None, str]:
    """Push once as :func:`push` does, and return the engine's error; empty if there is none.

    Args:
        done: starts of the digests of blobs that were yielded, which are not yielded again; new ones are added.
    """
    with _explained(reference):
        events: Iterator[dict[str, Any]] = engine.client.api.push(
            destination.name, destination.tag or "latest", stream=True, decode=True
        )
        for event in events:
            if "error" in event:
                return str(event["error"])
            status, blob = str(event.get("status", "")), str(event.get("id", ""))
            if not blob or blob in done:
                continue
            if status == "Pushed":
                done.add(blob)
                yield blob, "uploaded"
            elif "lready exists" in status or status.startswith("Mounted from"):
                done.add(blob)
                yield blob, "exists"
    return ""


@dataclass(frozen=True)
class Manifest:
    """A manifest or index as the registry stores it."""

    digest: str
    media_type: str
    body: bytes

    @classmethod
    def of(cls, document: Mapping[str, Any], media_type: str) -> Manifest:
        """Return the manifest that a document is stored as."""
        return cls.stored(json.dumps(document, separators=(",", ":")).encode(), media_type)

    @classmethod
    def stored(cls, body: bytes, media_type: str) -> Manifest:
        """Return the manifest whose text is ``body``."""
        return cls(hashed(body), media_type, body)

    @property
    def descriptor(self) -> dict[str, Any]:
        """Return what an index names it by."""
        return {"mediaType": self.media_type, "digest": self.digest, "size": len(self.body)}

    @property
    def document(self) -> dict[str, Any]:
        """Return a copy of its document. Documents from a registry were checked by :meth:`Repository.manifest`."""
        document: dict[str, Any] = json.loads(self.body)
        return document | {name: document[name] or [] for name in ("manifests", "layers") if name in document}


@dataclass(frozen=True)
class Answer:
    """Hold a response: its URL after redirects, status, headers and body."""

    url: str
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def ok(self) -> bool:
        """Return whether the request succeeded."""
        return 200 <= self.status < 300


@dataclass
class Repository:
    """Represent a repository of a registry, ``host[:port]/path``. Several threads may use it.

    Attributes:
        state: the state folder, for locks and what is known of the registry; that of the environment if not given.
        lists_referrers: whether it may have the referrers API of OCI 1.1: False once it has answered that it has not.
    """

    name: str
    state: Path = field(default_factory=settings.state_folder)
    lists_referrers: bool = True
    _headers: dict[str, str] = field(default_factory=dict)
    _session: Session = field(default_factory=Session)
    _authorizing: threading.Lock = field(default_factory=threading.Lock)
    _asked: bool = False

    @property
    def host(self) -> str:
        """Return ``host[:port]`` of the registry."""
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        """Return the repository's path at the registry."""
        return self.name.partition("/")[2]

    def named(self, digest: str, tag: str) -> dict[str, Any]:
        """Return ``reference`` (by digest), ``tag`` (the reference by tag) and ``digest`` of an image, for results."""
        return {"reference": f"{self.name}@{digest}", "tag": f"{self.name}:{tag}", "digest": digest}

    @property
    def _address(self) -> str:
        return f"{'http' if is_loopback(self.name) else 'https'}://{self.host}"

    def _url(self, rest: str) -> str:
        return rest if "://" in rest else f"{self._address}/v2/{self.path}/{rest}"

    def _is_own(self, url: str) -> bool:
        """Return whether a URL is at the registry itself: its token is sent nowhere else."""
        return origin(url) == origin(self._address)

    def _credentials(self) -> tuple[str, str] | None:
        """Return user and secret for this registry from `docker login` or a credential helper such as gcloud's.

        Raises:
            UserError: Docker's configuration cannot be read, or its credential helper failed.
        """
        try:
            stored = docker.auth.load_config().resolve_authconfig(self.host) or {}
            # Credential helpers and the configuration file spell the keys differently.
            login = {str(key).lower(): value for key, value in stored.items()}
        except (docker.errors.DockerException, docker.credentials.errors.StoreError) as error:
            words = one_line(" ".join(str(error).split()))
            raise UserError(f"Docker's configuration gives no credentials for {self.host}: {words}") from None
        except (AttributeError, TypeError, ValueError):  # docker-py expects objects where Docker writes them
            raise UserError(f"Docker's configuration is malformed: run 'docker login {self.host}'") from None
        if login.get("identitytoken"):
            return "<token>", str(login["identitytoken"])
        return (str(login["username"]), str(login["password"])) if login.get("username") else None

    def _token(self, challenge: str) -> dict[str, str]:
        """Return the header that answers a 401: Basic, or Bearer with a token from the realm that the 401 names.

        Raises:
            InvalidAnswer: the realm has no TLS, or its response has no token.
        """
        credentials = self._credentials()
        if challenge.lower().startswith("basic"):
            if credentials is None:
                return {}
            pair = base64.b64encode(":".join(credentials).encode()).decode()
            return {"Authorization": f"Basic {pair}"}
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        realm = fields.get("realm", "")
        if not realm:
            return {}
        if not is_private(realm) or (is_loopback(origin(realm)[1]) and not is_loopback(self.host)):
            raise InvalidAnswer(
                f"{self.host} sends passwords to {one_line(realm)[:100]!r}, which is not an https address: "
                "none was sent; ask who runs the registry"
            )
        query = {"service": fields.get("service", ""), "scope": f"repository:{self.path}:pull,push"}
        answer = self._session.get(realm, params=query, auth=credentials, timeout=TIMEOUT, stream=True)
        what = f"the token of {origin(realm)[1]}"
        body = read(answer, _ERROR_LIMIT, what)
        if not answer.ok:
            return {}
        data = parse(body, dict[str, Any], what)
        token = data.get("token") or data.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise InvalidAnswer(f"{what} is none")
        return {"Authorization": f"Bearer {token}"}

    @property
    def _challenge_file(self) -> Path:
        """Return the file that keeps the challenge of the registry."""
        return self.state / "registries" / self.host.replace(":", "_")

    def _known_challenge(self) -> str:
        """Return the last challenge of the registry; empty if it is not known."""
        try:
            return self._challenge_file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    def authorize(self) -> None:
        """Get a token if the registry's challenge is known. The first request does so, too.

        A password goes to a realm on another host only after the registry has named it again.
        """
        with self._authorizing:
            if self._asked or "Authorization" in self._headers:
                return
            self._asked = True
            challenge = self._known_challenge()
            realm = re.search(r'realm="([^"]*)"', challenge)
            if challenge and (realm is None or self._is_own(realm[1])):
                # The registry may be another one by now: its own answer decides.
                with contextlib.suppress(*_CONNECTION_ERRORS, StepFailed):
                    self._headers |= self._token(challenge)

    def _answer(self, challenge: str, refused: str | None) -> None:
        """Get a token, unless another thread has done so since the token ``refused`` was sent."""
        with self._authorizing:
            self._asked = True
            if self._headers.get("Authorization") == refused and (header := self._token(challenge)):
                self._headers |= header
                words = re.sub(r',?\s*scope="[^"]*"', "", challenge)  # that of one request
                with contextlib.suppress(OSError):  # it only saves a request
                    if words != self._known_challenge():
                        own(self._challenge_file.parent)
                        self._challenge_file.write_text(words, encoding="utf-8")

    def _send(self, method: str, url: str, headers: Mapping[str, str], data: bytes | IO[bytes]) -> requests.Response:
        """Send a request, with the registry's token if it goes there; only reading requests follow redirects."""
        own = self._headers if self._is_own(url) else {}
        follow = method in ("GET", "HEAD")
        return self._session.request(
            method, url, headers={**own, **headers}, data=data, timeout=TIMEOUT, stream=True, allow_redirects=follow
        )

    def _open(
        self, method: str, rest: str, *, missing_ok: bool, headers: Mapping[str, str], data: bytes | IO[bytes]
    ) -> requests.Response:
        """Send a request, with a token if the registry asks for one; the body of the answer is not read yet."""
        url = self._url(rest)
        self.authorize()
        sent = self._headers.get("Authorization")
        answer = self._send(method, url, headers, data)
        if answer.status_code == 401 and self._is_own(answer.url):
            read(answer, _ERROR_LIMIT, f"the answer of {self.host}")
            self._answer(answer.headers.get("WWW-Authenticate", ""), sent)
            if not isinstance(data, bytes):
                data.seek(0)
            answer = self._send(method, url, headers, data)
        if 200 <= answer.status_code < 300 or (missing_ok and answer.status_code == 404):
            return answer
        body = read(answer, _ERROR_LIMIT, f"the answer of {self.host}")
        words = body.decode("utf-8", "replace")
        if 300 <= answer.status_code < 400:
            words = f"it redirects what is written to {origin(answer.headers.get('Location', ''))[1]!r}"
        with contextlib.suppress(StepFailed, KeyError, IndexError, TypeError):
            first = parse(body, dict[str, Any], "")["errors"][0]
            words = f"{first['code']}: {first['message']}".lower()
        token = self._headers.get("Authorization", "").rpartition(" ")[2]
        words = re.sub(re.escape(token), "…", words, flags=re.IGNORECASE) if token else words  # some repeat it
        raise StepFailed(meaning(f"{words} ({answer.status_code})", self.name))

    def _request(
        self,
        method: str,
        rest: str,
        *,
        missing_ok: bool = False,
        headers: Mapping[str, str] | None = None,
        data: bytes | IO[bytes] = b"",
        limit: int = _ERROR_LIMIT,
    ) -> Answer:
        """Send a request to the registry.

        Args:
            method: HTTP method.
            rest: what follows ``/v2/<path>/``, or a URL that the registry returned.
            missing_ok: return an answer with status 404 instead of raising.
            data: the body.
            limit: most bytes of the answer's body.
        """
        with _explained(self.name):
            answer = self._open(method, rest, missing_ok=missing_ok, headers=headers or {}, data=data)
            body = read(answer, limit, f"the answer of {self.host} to {one_line(rest.partition('?')[0])[:100]}")
        return Answer(answer.url, answer.status_code, answer.headers, body)

    def manifest(self, version: str) -> Manifest | None:
        """Return the manifest or index of a tag or digest, or None if there is none."""
        answer = self._request(
            "GET", f"manifests/{version}", missing_ok=True, headers={"Accept": _MANIFESTS}, limit=MANIFEST_LIMIT
        )
        if answer.status == 404:
            return None
        what = f"{self.name}{'@' if ':' in version else ':'}{version}"
        self._check_digest(answer.body, version if ":" in version else "", answer.headers, what)
        media_type = check_manifest(answer.body, answer.headers.get("Content-Type", ""), what)
        return Manifest(version if ":" in version else hashed(answer.body), media_type, answer.body)

    def _check_digest(self, data: bytes, wanted: str, headers: Mapping[str, str], what: str) -> None:
        """Compare data with the digest that was asked for, else with the one that the registry names."""
        digest = wanted or headers.get("Docker-Content-Digest", "")
        own = hashed(data, digest)
        if digest != own and (wanted or own):
            raise InvalidAnswer(
                f"{what}: the registry answered with other content, {hashed(data)[:19]}, and nothing of it is used: "
                "ask who runs the registry or the proxy before it"
            )

    def existing(self, version: str) -> Manifest:
        """Return the manifest or index of a tag or digest, or raise :class:`StepFailed` if there is none."""
        manifest = self.manifest(version)
        if manifest is None:
            raise StepFailed(f"{self.name} has no {version}, which it must have: push it again")
        return manifest

    def has(self, version: str) -> bool:
        """Return whether there is an image of this tag or digest."""
        return self._request("HEAD", f"manifests/{version}", missing_ok=True, headers={"Accept": _MANIFESTS}).ok

    def has_blob(self, digest: str) -> bool:
        """Return whether the repository has a blob."""
        return self._request("HEAD", f"blobs/{digest}", missing_ok=True).ok

    def blob(self, digest: str) -> bytes:
        """Return a blob that is a document, not a layer."""
        answer = self._request("GET", f"blobs/{digest}", limit=DOCUMENT_LIMIT)
        self._check_digest(answer.body, digest, {}, f"{self.name}: the blob {digest}")
        return answer.body

    @contextlib.contextmanager
    def stream(self, digest: str, size: int) -> Iterator[io.BufferedReader]:
        """Open a blob of ``size`` bytes as a stream, which is compared with its digest where it ends."""
        with _explained(self.name):
            asked = {"Accept-Encoding": "identity"}
            with self._open("GET", f"blobs/{digest}", missing_ok=False, headers=asked, data=b"") as answer:
                blob = Checked(cast(IO[bytes], answer.raw), digest, size, f"{self.name}: the blob {digest}")
                yield io.BufferedReader(blob, 1 << 20)

    def upload(self, data: bytes | IO[bytes], digest: str) -> None:
        """Store a blob, in two requests ("POST then PUT"); a file is sent from its start.

        https://github.com/opencontainers/distribution-spec/blob/main/spec.md#pushing-a-blob-monolithically
        """
        begun = self._request("POST", "blobs/uploads/")
        where = joined(begun.url, begun.headers.get("Location", ""))
        if not is_private(where) or "Location" not in begun.headers:
            raise InvalidAnswer(f"{self.host} names no address with TLS to upload to")
        address = where + ("&" if "?" in where else "?") + f"digest={digest}"
        self._request("PUT", address, data=data, headers={"Content-Type": "application/octet-stream"})
        if not self._is_own(where) and not self.has_blob(digest):
            raise InvalidAnswer(f"{self.host} sent the blob {digest[:19]} to {origin(where)[1]}, and does not have it")

    def put(self, manifest: Manifest, version: str) -> str:
        """Store a manifest under a tag, or under its digest alone. No layer is transferred.

        Returns:
            The digest of the image among whose referrers the registry lists the manifest; empty if it lists none.
        Raises:
            UserError: the repository's tags are immutable.
        """
        try:
            answer = self._request(
                "PUT", f"manifests/{version}", data=manifest.body, headers={"Content-Type": manifest.media_type}
            )
        except StepFailed as error:
            if "immutab" not in str(error):
                raise
            raise UserError(
                f"{self.name}: its tags are immutable, so '{version}' cannot be moved: give another repository "
                f"with '--to'"
            ) from None
        self._check_digest(manifest.body, "", answer.headers, f"{self.name}: {version} was not stored")
        return answer.headers.get("OCI-Subject", "")

    def tag(self, manifest: Manifest, tag: str) -> None:
        """Store a manifest under a tag as :meth:`put` does, and check that the tag has it then."""
        self.put(manifest, tag)
        for seconds in _READ_AGAIN:
            time.sleep(seconds)
            stored = self.manifest(tag)
            if stored and stored.digest == manifest.digest:
                return
        raise StepFailed(
            f"{self.name}:{tag} is {stored.digest[:19] if stored else 'missing'} after it was set to "
            f"{manifest.digest[:19]}: another process moves it at the same time, or the registry lost it; try again"
        )

    def config(self, manifest: Manifest) -> dict[str, Any]:
        """Return the image configuration that a manifest names; the manifest of an index is refused."""
        document = manifest.document
        if "config" not in document:
            raise StepFailed(f"{self.name}@{manifest.digest} is an image index, where one image is expected")
        digest = str(document["config"]["digest"])
        return parse(self.blob(digest), CONFIGURATION, f"{self.name}: the configuration {digest}")

    def tags(self) -> list[str]:
        """Return all tags, sorted; none if there is no such repository."""
        return sorted(name for page in self.pages("tags/list?n=1000", TAGS) for name in page.get("tags") or [])

    def pages(self, rest: str, kind: Any) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list; none if the registry has no such list.

        Args:
            rest: what follows ``/v2/<path>/``.
            kind: of each page, from :mod:`trainyard.oci.documents`.
        """
        what, url, seen = f"the list {rest.partition('?')[0]} of {self.name}", self._url(rest), set[str]()
        while url:
            seen.add(url)
            answer = self._request("GET", url, missing_ok=True, limit=DOCUMENT_LIMIT)
            if answer.status == 404:
                return
            yield parse(answer.body, kind, what)
            links = requests.utils.parse_header_links(answer.headers.get("Link", ""))
            following = next((link["url"] for link in links if link.get("rel") == "next"), "")
            url = joined(url, following) if following else ""
            if url and not self._is_own(url):
                raise InvalidAnswer(f"{what} goes on at {origin(url)[1]!r}, another host: ask who runs the registry")
            if url in seen or len(seen) == _MOST_PAGES:
                raise InvalidAnswer(f"{what} has no end: ask who runs the registry")

    def mount(self, manifest: Manifest, source: Repository) -> None:
        """Mount the blobs of a manifest of another repository of the same registry, without transferring them.

        Registries need not support it ("mounting a blob from another repository" is optional).
        """
        data = manifest.document
        for entry in data.get("manifests", []):  # an index: its images first, without a tag
            image = source.existing(entry["digest"])
            self.mount(image, source)
            self.put(image, image.digest)
        for blob in [data["config"], *data["layers"]] if "config" in data else []:
            digest = blob["digest"]
            if self.has_blob(digest):
                continue
            answer = self._request("POST", f"blobs/uploads/?mount={digest}&from={source.path}")
            if answer.status != 201:
                raise StepFailed(f"{self.host} cannot mount blobs between repositories: promote within {source.name}")
