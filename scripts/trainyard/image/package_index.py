"""Which package index a build installs its framework from: that of its spec or, if it is unreachable, the default."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from functools import cache
from urllib.parse import urlsplit

from trainyard.common import settings
from trainyard.spec.lock import DEFAULT
from trainyard.spec.model import Index, Spec
from trainyard.workspace.lines import userinfo, without_userinfo

#: Seconds to wait for an index before it counts as unreachable; a reachable one answered in 0.1 s to 2 s (2026-11).
PROBE_TIMEOUT = 10.0


def _variable(name: str) -> str:
    return f"INDEX_{name.upper().replace('-', '_')}"


def url(name: str, index: Index) -> str:
    """Return the index's address, by ``TRAINYARD_INDEX_<NAME>``, with its credentials, or by images/indexes.yaml."""
    return (settings.variable(_variable(name)) or index.url).rstrip("/")


def secrets(name: str) -> list[str]:
    """Return BuildKit's secret with the address of an index, if that has credentials, which ``INDEX_URL`` lacks."""
    variable = _variable(name)
    return [f"id=index,env={settings.PREFIX}{variable}"] if any(userinfo(settings.variable(variable))) else []


@cache
def reachable(address: str) -> str | None:
    """None if the index at ``address`` answers, else the reason, in a few words."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=ssl.create_default_context())]
    shown, credentials = without_userinfo(address), userinfo(address)
    try:
        if any(credentials):
            passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
            passwords.add_password(None, urlsplit(shown).netloc, *credentials, is_authenticated=True)
            handlers.append(urllib.request.HTTPBasicAuthHandler(passwords))
        request = urllib.request.Request(f"{shown}/", method="HEAD")
        with urllib.request.build_opener(*handlers).open(request, timeout=PROBE_TIMEOUT):
            return None
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (http.client.HTTPException, OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def choose(spec: Spec) -> tuple[str, str | None]:
    """The index to build ``spec`` from, and why it is not that of the spec (None if it is)."""
    index = spec.index_spec()
    if index is None:
        return "default", None
    address = url(spec.framework.index, index)
    reason, shown = reachable(address), without_userinfo(address)
    return (spec.framework.index, None) if reason is None else ("default", f"{shown} does not answer: {reason}")


def extra(spec: Spec, name: str) -> tuple[str, str, list[str]] | None:
    """Return name, address and packages of an index in addition to the default one; None for the default one."""
    index = spec.index_spec()
    return None if name == DEFAULT or index is None else (name, url(name, index), index.packages)
