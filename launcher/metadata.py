"""Ask the metadata server of Google Cloud (R4.2, R11.2, R11.3). Imported only if a request is needed."""

from __future__ import annotations

from launcher import fetch
from launcher.errors import config_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    Fetch = Callable[[str, "dict[str, str]", float], "tuple[int, bytes]"]

METADATA_HOST = "metadata.google.internal"
# The same server without a DNS lookup, to which the time limit does not apply; for servers that may not exist.
METADATA_ADDRESS = "169.254.169.254"
METADATA_TIMEOUT = 3.0  # seconds, the default of google-auth's GCE_METADATA_TIMEOUT (R12.4)
PROBE_TIMEOUT = 1.0  # seconds; the server is on the same machine and responds in under 10 ms


class Metadata:
    """Ask the GCE metadata server.

    Args:
        host: GCE_METADATA_HOST, "host" or "host:port"; "" for the default.
        timeout: seconds for each request.
        get: `fetch.get`, or a fake.

    Raises:
        LaunchError: (2) if the host is not valid in a URL.
    """

    def __init__(self, host: str, timeout: float = METADATA_TIMEOUT, get: Fetch = fetch.get) -> None:
        self.root = f"http://{host or METADATA_HOST}/computeMetadata/v1/"
        self.timeout = timeout
        self._get = get
        try:
            fetch.split_url(self.root)
        except ValueError as error:
            raise config_error(f"GCE_METADATA_HOST is {host[:80]!r} ({error}): write HOST or HOST:PORT") from None

    def ask(self, path: str) -> tuple[int, str]:
        """Return HTTP status and text of one entry. Raises FetchError if the server cannot be reached."""
        status, body = self._get(self.root + path, {"Metadata-Flavor": "Google"}, self.timeout)
        return status, body.decode("utf-8", "replace").strip()

    def value(self, path: str) -> str:
        """Return the text of one entry. Raises FetchError if there is none."""
        status, text = self.ask(path)
        if status != 200 or not text:
            raise fetch.FetchError(f"the metadata server has no {path} (HTTP {status})")
        return text


def tpu_vm_attributes(metadata: Metadata) -> dict[str, str]:
    """Return the metadata attributes that describe a TPU VM's slice (R4.2), as far as they exist.

    Raises:
        FetchError: the server cannot be reached; the caller continues without attributes.
    """
    found = {}
    for name in ("tpu-env", "worker-network-endpoints", "accelerator-type", "agent-worker-number"):
        status, text = metadata.ask(f"instance/attributes/{name}")
        if status == 200:
            found[name] = text
    return found
