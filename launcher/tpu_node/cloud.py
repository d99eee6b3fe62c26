"""Access tokens and the Cloud TPU API (R11.3, R12.1). Imported only if a request is needed."""

from __future__ import annotations

import time

from launcher import fetch
from launcher.errors import config_error
from launcher.tpu_node.node import FORBIDDEN, WAIT, Answer, classify

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from launcher.image import Image
    from launcher.metadata import Fetch, Metadata
    from launcher.settings import Settings
    from launcher.tpu_node.node import Node

TOKEN_MARGIN = 60.0  # seconds before its expiry at which a token is replaced
SCOPE = "https://www.googleapis.com/auth/cloud-platform"

# google-auth is installed in the image's own environment, which this isolated interpreter does not see (R11.3).
GOOGLE_AUTH = f"""
import sys
try:
    import google.auth, google.auth.transport.requests
except ImportError:
    sys.exit(3)
credentials, _ = google.auth.default(scopes=[{SCOPE!r}])
credentials.refresh(google.auth.transport.requests.Request())
print(credentials.token)
"""


class Tokens:
    """Access tokens: from the metadata server, else from google-auth if it is installed (R11.3).

    Args:
        metadata: the metadata server.
        google_auth: the fallback; returns a token or "" (see `google_auth_token`).
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        metadata: Metadata,
        google_auth: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metadata = metadata
        self._google_auth = google_auth
        self._clock = clock
        self._token = ""
        self._until = 0.0

    def get(self, fresh: bool = False) -> str:
        """An access token.

        Args:
            fresh: request a new one, because the API returned 401 for the cached one.

        Raises:
            FetchError: no token is available now.
        """
        if self._token and not fresh and self._clock() < self._until:
            return self._token
        lifetime = 0.0
        try:
            self._token, lifetime = self._from_metadata()
        except fetch.FetchError as error:
            self._token = self._google_auth()
            if not self._token:
                raise fetch.FetchError(f"no access token: {error}") from None
        self._until = self._clock() + lifetime - TOKEN_MARGIN
        return self._token

    def _from_metadata(self) -> tuple[str, float]:
        import json

        text = self._metadata.value("instance/service-accounts/default/token")
        try:
            data = json.loads(text)
            token, lifetime = data["access_token"], float(data.get("expires_in", 0))
        except (ValueError, OverflowError, RecursionError, LookupError, TypeError, AttributeError):
            token, lifetime = "", 0.0
        if not (_is_token(token) and 0 <= lifetime < float("inf")):  # false for NaN
            raise fetch.FetchError("the metadata server's response contains no usable access token")
        return token, lifetime


def _is_token(token: object) -> bool:
    """Whether a token is valid in a header line."""
    return isinstance(token, str) and bool(token) and all(33 <= ord(character) < 127 for character in token)


def google_auth_token(image: Image, env: Mapping[str, str]) -> str:
    """A token from google-auth in the image's own Python (service-account keys, workload identity federation).

    Returns:
        a token; "" if google-auth is not installed or finds no credentials.
    """
    import subprocess

    try:
        # NO_GCE_CHECK skips the probe of the metadata server, which is known to be absent; it takes up to 9 s.
        result = subprocess.run(
            [image.python(), "-I", "-c", GOOGLE_AUTH],
            env={**env, "NO_GCE_CHECK": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=30,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return ""
    token = result.stdout.decode("ascii", "replace").strip()
    return token if result.returncode == 0 and _is_token(token) else ""


class NodeClient:
    """Requests one node from the Cloud TPU API (R12.1).

    Args:
        node: the node.
        settings: endpoint and time limit.
        metadata: for project and zone if the environment does not set them (R11.2).
        tokens: for the Authorization header.
        get: `fetch.get`, or a fake.

    Raises:
        LaunchError: (2) if TPU_API_ENDPOINT is not a URL, or a token sent there could be read on the network (R12.4).
    """

    def __init__(
        self, node: Node, settings: Settings, metadata: Metadata, tokens: Tokens, get: Fetch = fetch.get
    ) -> None:
        self.node = node
        self.warnings: list[str] = []
        self._api = settings.tpu_api.rstrip("/")
        self._timeout = settings.http_timeout
        self._metadata = metadata
        self._tokens = tokens
        self._get = get
        self._project = node.project
        self._zone = node.zone
        try:
            secure, host, _, _ = fetch.split_url(self._api)
        except ValueError as error:
            raise config_error(f"TPU_API_ENDPOINT is {self._api[:80]!r} ({error})") from None
        here = host.startswith(("127.", "169.254.")) and host.replace(".", "").isdigit()
        if not (secure or here or host in ("localhost", fetch.split_url(metadata.root)[1])):
            raise config_error(
                f"TPU_API_ENDPOINT is {self._api[:80]!r}: an access token would be sent without TLS; write https://"
            )

    @property
    def path(self) -> str:
        """The node's full resource name, with "?" for an unknown project or zone."""
        return self.node.path(self._project or "?", self._zone or "?")

    def ask(self, fresh_token: bool = False) -> Answer:
        """Send one request. Every failure is an Answer; nothing is raised."""
        try:
            self._project = self._project or self._lookup("project", "project/project-id", self.node.fallback_project)
            self._zone = self._zone or self._lookup("zone", "instance/zone", self.node.fallback_zone)
            token = self._tokens.get(fresh_token)
            url = f"{self._api}/v1/{self.path}"
            status, body = self._get(url, {"Authorization": f"Bearer {token}"}, self._timeout)
        except fetch.FetchError as error:
            return Answer(WAIT, str(error))
        answer = classify(self.node.name, status, body)
        # An error message may repeat the request's headers.
        answer.reason = answer.reason.replace(token, "[redacted]")
        if answer.action == FORBIDDEN and not self.node.project:
            answer.reason += f" (project {self._project!r} is from the metadata server; set LAUNCHER_TPU_PROJECT)"
        return answer

    def _lookup(self, what: str, path: str, fallback: str) -> str:
        """Project or zone from the metadata server: the last segment of "projects/1/zones/us-central1-b"."""
        try:
            word = self._metadata.value(path).rpartition("/")[2]
            if not all(character.isalnum() or character in "-_.:" for character in word) or not word.isascii():
                raise fetch.FetchError(f"the metadata server's {path} is not the name of a {what}")
            return word
        except fetch.FetchError as error:
            if not fallback:
                raise fetch.FetchError(f"no {what} for TPU {self.node.name!r}: {error}") from None
            self.warnings.append(f"{what} {fallback!r} taken from TPU_CONFIG: {error}")
            return fallback
