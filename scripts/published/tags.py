"""Tags at a registry, moved by digest without pulling anything: what `make promote` and `make rollback` stand on.

It speaks the OCI distribution API (opencontainers/distribution-spec) with the credentials of the Docker client: a
manifest is fetched once and stored again under another tag, byte for byte, so that its digest stays.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import docker.auth
import requests
import urllib3

from scripts import engine
from scripts.cli import StepFailed, UserError
from scripts.published import registry

#: Seconds to wait for an answer; registries on this host took under 0.1 s (2026-11).
TIMEOUT = 60
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
)
#: What a registry that stumbles is asked again, within 1.4 s: the reference registry answers 500 when two write one tag
#: at the same moment, and hosted ones 429 and 503 under load. What does not answer at all is not asked again.
RETRY = urllib3.Retry(
    total=None, connect=0, read=0, other=0, status=3, backoff_factor=0.2, raise_on_status=False,
    status_forcelist=[429, 500, 502, 503, 504], allowed_methods=["GET", "HEAD", "PUT"],
)  # fmt: skip
#: Label of a record's configuration: the digest that passed verify and smoke.
PASSED = "io.trainyard.passed"


@dataclass(frozen=True)
class Manifest:
    """A manifest as the registry stores it."""

    digest: str
    media_type: str
    body: bytes


@dataclass
class Repository:
    """One repository of a registry, as ``host[:port]/path``."""

    name: str
    _headers: dict[str, str] = field(default_factory=dict)
    _session: requests.Session = field(default_factory=requests.Session)

    def __post_init__(self) -> None:
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=RETRY))

    @property
    def host(self) -> str:
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        return self.name.partition("/")[2]

    def _url(self, rest: str) -> str:
        scheme = "http" if registry.is_loopback(self.name) else "https"
        return rest if "://" in rest else f"{scheme}://{self.host}/v2/{self.path}/{rest}"

    def _credentials(self) -> tuple[str, str] | None:
        """User and secret that `docker login`, or a credential helper such as gcloud's, has for this registry."""
        stored = docker.auth.load_config().resolve_authconfig(self.host) or {}
        # Credential helpers and the file spell their keys differently.
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

    def request(self, method: str, rest: str, *, missing_ok: bool = False, **options: Any) -> requests.Response:
        """Ask the registry.

        Args:
            rest: what follows ``/v2/<path>/``, or an address that the registry gave.
            missing_ok: whether 404 is an answer.
        Raises:
            StepFailed: it is out of reach or refuses; one line.
        """
        more: Mapping[str, str] = options.pop("headers", {})
        url = self._url(rest)
        try:
            answer = self._session.request(method, url, headers={**self._headers, **more}, timeout=TIMEOUT, **options)
            if answer.status_code == 401:
                self._headers |= self._token(answer.headers.get("WWW-Authenticate", ""))
                answer = self._session.request(
                    method, url, headers={**self._headers, **more}, timeout=TIMEOUT, **options
                )
        except requests.exceptions.RequestException as error:
            raise StepFailed(registry.meaning(str(error), self.name)) from None
        if answer.ok or (missing_ok and answer.status_code == 404):
            return answer
        words = answer.text
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            first = answer.json()["errors"][0]
            words = f"{first['code']}: {first['message']}".lower()
        raise StepFailed(registry.meaning(f"{words} ({answer.status_code})", self.name))

    def manifest(self, reference: str) -> Manifest | None:
        """The manifest of a tag or digest, or None if there is none."""
        answer = self.request("GET", f"manifests/{reference}", missing_ok=True, headers={"Accept": MANIFESTS})
        if answer.status_code == 404:
            return None
        digest = f"sha256:{hashlib.sha256(answer.content).hexdigest()}"
        return Manifest(digest, answer.headers["Content-Type"], answer.content)

    def put(self, manifest: Manifest, tag: str) -> None:
        """Store a manifest under a tag: the tag moves, no layer does.

        Raises:
            UserError: the repository's tags are immutable. StepFailed: anything else it refuses.
        """
        try:
            self.request("PUT", f"manifests/{tag}", data=manifest.body, headers={"Content-Type": manifest.media_type})
        except StepFailed as error:
            if "immutab" not in str(error):
                raise
            raise UserError(
                f"{self.name}: its tags are immutable, so '{tag}' cannot move: give another repository for it with TO="
            ) from None

    def config(self, manifest: Manifest) -> dict[str, Any]:
        """The image configuration that a manifest names."""
        answer = self.request("GET", f"blobs/{json.loads(manifest.body)['config']['digest']}")
        found: dict[str, Any] = answer.json()
        return found

    def tags(self) -> list[str]:
        """All tags, sorted."""
        names: list[str] = []
        rest = "tags/list?n=1000"
        while rest:
            answer = self.request("GET", rest, missing_ok=True)
            if answer.status_code == 404:
                return []
            names += answer.json().get("tags") or []
            following = answer.links.get("next", {}).get("url", "")
            rest = following if "://" in following else following.rpartition("/v2/" + self.path + "/")[2]
        return sorted(names)

    def mount(self, manifest: Manifest, source: Repository) -> None:
        """Have here what a manifest of another repository of the same registry names, without moving a byte.

        Raises:
            StepFailed: the registry cannot (distribution-spec, "mounting a blob from another repository", is optional).
        """
        data = json.loads(manifest.body)
        for blob in [data["config"], *data["layers"]]:
            digest = blob["digest"]
            if self.request("HEAD", f"blobs/{digest}", missing_ok=True).ok:
                continue
            answer = self.request("POST", f"blobs/uploads/?mount={digest}&from={source.path}")
            if answer.status_code != 201:
                raise StepFailed(f"{self.host} does not copy blobs between repositories: promote within {source.name}")


def record_tag(digest: str) -> str:
    """The tag of the record that a digest has passed: the referrers tag schema's shape, with a word of ours."""
    return f"{digest.replace(':', '-')}.passed"


def attest(repository: str, digest: str) -> None:
    """Leave a record beside an image that its digest has passed verify and smoke.

    It is an image of a few bytes whose label says so, pushed by the engine, which reaches what it pushes images to.
    Whoever may write to the repository may write such records: they guard against mistakes, not against its owners.

    Raises:
        StepFailed: the registry does not take it.
    """
    tag = record_tag(digest)
    empty = io.BytesIO()
    with tarfile.open(fileobj=empty, mode="w"):
        pass
    api = engine.client().api
    api.import_image_from_data(empty.getvalue(), repository, tag, [f"LABEL {PASSED}={digest}"])
    try:
        for _ in registry.push(f"{repository}:{tag}"):
            pass
    finally:
        api.remove_image(f"{repository}:{tag}", noprune=True)


def attested(repository: Repository, digest: str) -> bool:
    """Whether such a record names this very digest."""
    found = repository.manifest(record_tag(digest))
    if found is None:
        return False
    labels = repository.config(found).get("config", {}).get("Labels") or {}
    return bool(labels.get(PASSED) == digest)
