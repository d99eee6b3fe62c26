"""Which package index a build installs its framework from: that of its spec or, if it is unreachable, the default."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from functools import cache

from trainyard import settings
from trainyard.spec.model import Index, Spec

#: Seconds to wait for an index before it counts as unreachable; a reachable one answered in 0.1 s to 2 s (2026-11).
PROBE_TIMEOUT = 10.0


def url(name: str, index: Index) -> str:
    """The index's address: that of ``TRAINYARD_INDEX_<NAME>``, or of images/indexes.yaml."""
    return (settings.variable(f"INDEX_{name.upper().replace('-', '_')}") or index.url).rstrip("/")


@cache
def reachable(address: str) -> str | None:
    """None if the index at ``address`` answers, else the reason, in a few words."""
    request = urllib.request.Request(f"{address}/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT, context=ssl.create_default_context()):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def choose(spec: Spec) -> tuple[str, str | None]:
    """The index to build ``spec`` from, and why it is not that of the spec (None if it is)."""
    index = spec.index_spec()
    if index is None:
        return "default", None
    address = url(spec.framework.index, index)
    reason = reachable(address)
    return (spec.framework.index, None) if reason is None else ("default", f"{address} does not answer: {reason}")
