"""Say what this machine and its engine have for building and running images, a line for each, with its remedy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.common import proxies, settings
from trainyard.common.context import Context
from trainyard.common.docker_engine import cannot_run
from trainyard.common.errors import StepFailed, UserError, one_line
from trainyard.image.local_run import NVIDIA_TOOLKIT
from trainyard.oci import builder
from trainyard.spec import model
from trainyard.spec.architectures import PLATFORMS
from trainyard.spec.units import in_units
from trainyard.workspace.init import NVIDIA_DRIVER

#: Free bytes that an image for GPUs may need: three times its size while it is built, as tf-cpu does (2026-11).
_DISK = 20 * 10**9

#: What is found, and what to do about it; empty if nothing is to be done.
Found = tuple[str, str]


def lines(context: Context) -> dict[str, Found]:
    """Return the name of each thing -> what is found; of what the engine has, nothing if none answers."""
    checks: dict[str, Callable[[Context], Found]] = {
        "engine": _engine, "context": _context, "buildx": _buildx, "platforms": _platforms, "disk": _disk,
        "registry": _registry, "index": _index, "proxy": _proxy, "driver": _driver, "toolkit": _toolkit,
    }  # fmt: skip
    with ThreadPoolExecutor(len(checks)) as threads:
        found = dict(zip(checks, threads.map(lambda check: _result(check, context), checks.values()), strict=True))
    return {name: ("?", "") if name != "engine" and one == found["engine"] else one for name, one in found.items()}


def _result(check: Callable[[Context], Found], context: Context) -> Found:
    try:
        return check(context)
    except (UserError, StepFailed) as error:
        return "", one_line(str(error))


def _engine(context: Context) -> Found:
    engine = context.engine
    version, stored = engine.client.version(), "containerd" if engine.stores_in_containerd else "its own store"
    remedy = "" if engine.stores_in_containerd else (
        "layers are gzip, and no provenance is kept: https://docs.docker.com/engine/storage/containerd/ says how"
    )  # fmt: skip
    return f"{version.get('Version')} on {version.get('Os')}/{version.get('Arch')}, images in {stored}", remedy


def _context(context: Context) -> Found:
    engine = context.engine
    security = engine.client.info().get("SecurityOptions") or []
    words = f"{engine.docker_context}, {engine.address}"
    words += ", without root" if any("rootless" in one for one in security) else ""
    return words + (", another machine: --mount, --data and --output are its folders" if engine.remote else ""), ""


def _buildx(context: Context) -> Found:
    used = builder.current(context)
    return f"{context.engine.buildx('version').split()[1]}, builder {used.name} ({used.driver})", ""


def _platforms(context: Context) -> Found:
    missing = [name for name in PLATFORMS if not context.engine.can_run(name)]
    return ", ".join(name for name in PLATFORMS if name not in missing), "".join(
        cannot_run(f"programs for {name}") for name in missing
    )


def _disk(context: Context) -> Found:
    folder = Path(str(context.engine.client.info().get("DockerRootDir")))
    if context.engine.remote or not folder.exists():
        return f"{folder} is on the engine's machine: 'docker system df' says what is used", ""
    free = shutil.disk_usage(folder).free
    remedy = "" if free > _DISK else f"an image for GPUs needs {in_units(_DISK)}: 'trainyard clean --cache' frees some"
    return f"{in_units(free)} free at {folder}", remedy


def _registry(context: Context) -> Found:
    reference = model.bases()["debian-13"].image
    digest, reason = context.engine.digest_at_registry(reference, context.builder)
    return (f"{reference} answers", "") if digest else (
        f"{reference}: {reason}", "bases are made of the Debian archive, or set TRAINYARD_BASE to one that is mirrored"
    )  # fmt: skip


def _index(_: Context) -> Found:
    """Ask the index that ``lock`` asks, as it does: uv knows mirrors, credentials and proxies."""
    words = [*settings.UV, "pip", "compile", "--quiet", "--no-deps", "--no-header", "--refresh", "-"]
    asked = subprocess.run(
        words, input="packaging", capture_output=True, text=True, env=settings.environment(), check=False
    )
    if not asked.returncode:
        return "answers uv, as 'lock' asks it", ""
    reason = one_line(" ".join(asked.stderr.split()))[-200:]
    return f"does not answer uv ({reason})", "set UV_DEFAULT_INDEX to the index of your network, or HTTPS_PROXY"


def _proxy(context: Context) -> Found:
    own, here = proxies.of_environment(), proxies.only_here()
    names = sorted({*proxies.configured(context.engine), *proxies.of_builds(context.engine)})
    words = f"builds get {', '.join(names)}" if names else "none of the environment or of Docker's configuration"
    remedy = f"{', '.join(here)}: give the proxy an address that containers reach" if here else ""
    return words if names or not own else "none that builds reach", remedy


def _driver(_: Context) -> Found:
    if not NVIDIA_DRIVER.exists():
        return "none of NVIDIA on this machine: images for GPUs are built, and run on the CPU", ""
    version = re.search(r"\s(\d+\.[\d.]+)\s", NVIDIA_DRIVER.read_text(encoding="utf-8"))
    return f"NVIDIA {version[1] if version else 'of an unknown version'}", ""


def _toolkit(context: Context) -> Found:
    if "nvidia" in (context.engine.client.info().get("Runtimes") or {}):
        return "the engine has NVIDIA's runtime", ""
    gpu = NVIDIA_DRIVER.exists() and not context.engine.remote
    return "none", f"this machine has a GPU: install the container toolkit ({NVIDIA_TOOLKIT})" if gpu else ""
