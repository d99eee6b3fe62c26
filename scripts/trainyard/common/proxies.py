"""Find the proxies that builds and containers with a network get. No image has them.

Docker's configuration has those of containers (https://docs.docker.com/engine/cli/proxy/), which buildx also gives to
builds. Those of the environment are given to builds as predefined build arguments, which are in no history of an image
(https://docs.docker.com/build/building/variables/#proxy-arguments).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from trainyard.common import settings
from trainyard.common.docker_engine import Engine

_NAME = re.compile(r"(https?|all|no)_proxy", re.IGNORECASE)


def configured(engine: Engine) -> dict[str, str]:
    """Return the variables of the proxies that Docker's configuration has for an engine, or for all."""
    from docker.utils.config import load_general_config

    given = load_general_config().get("proxies") or {}
    found = given.get(engine.address) or given.get("default") or {}
    names = {"httpProxy": "HTTP_PROXY", "httpsProxy": "HTTPS_PROXY", "allProxy": "ALL_PROXY", "noProxy": "NO_PROXY"}
    return {name: str(found[key]) for key, name in names.items() if found.get(key)}


def of_environment() -> dict[str, str]:
    """Return the variables of the environment's proxies, as they are spelled."""
    return {name: value for name, value in settings.environment().items() if value and _NAME.fullmatch(name)}


def of_builds(engine: Engine) -> list[str]:
    """Return the names of variables of the environment that builds get; those of Docker's configuration win."""
    usable = set(of_environment()) - set(only_here())
    own = configured(engine)
    return sorted(name for name in usable if name.upper() not in own) if any(map(_is_proxy, usable)) else []


def only_here() -> list[str]:
    """Return the names of variables whose proxy is on this machine alone: at that address, a container finds itself."""
    loopback = re.compile(r"localhost|127\..*|::1")
    proxies = {name: value for name, value in of_environment().items() if _is_proxy(name)}
    hosts = {name: urlsplit(value if "//" in value else f"//{value}").hostname for name, value in proxies.items()}
    return sorted(name for name, host in hosts.items() if host and loopback.fullmatch(host))


def of_containers(engine: Engine, *direct: str) -> dict[str, str]:
    """Return the variables of a container with a network, in which the hosts ``direct`` are asked without a proxy."""
    found = {name.upper(): settings.standard_variable(name) for name in of_builds(engine)} | configured(engine)
    if found:
        found["NO_PROXY"] = ",".join(filter(None, (found.get("NO_PROXY"), "localhost,127.0.0.1", *direct)))
    return found | {name.lower(): value for name, value in found.items()}


def _is_proxy(name: str) -> bool:
    return name.lower() != "no_proxy"
