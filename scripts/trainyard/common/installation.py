"""Check what this installation has: a checkout or only the installed package, and optional dependencies."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import sys
from pathlib import Path

from trainyard.common import settings
from trainyard.common.errors import UserError

#: Name of the distribution. 'trainyard' on the Python Package Index is another project's.
DISTRIBUTION = "trainyard-images"


def check_writable(path: Path) -> None:
    """Refuse to change a file of the installed package.

    Raises:
        UserError: ``path`` is one of the files that were installed with the package; a checkout's may be written.
    """
    if settings.CHECKOUT is None and path.resolve().is_relative_to(settings.ROOT):
        name = path.resolve().relative_to(settings.ROOT)
        raise UserError(f"{name} is part of the installed package: to change it, run this in a checkout of Trainyard")


def checkout(purpose: str) -> Path:
    """The folder of the checkout that this package runs from.

    Raises:
        UserError: it was installed from a wheel; the message says that ``purpose`` needs a checkout.
    """
    if settings.CHECKOUT is None:
        raise UserError(
            f"{purpose} needs a checkout of Trainyard, and this is an installed package: clone it, run 'make'"
        )
    return settings.CHECKOUT


def require_extra(module: str, extra: str, command: str = "") -> None:
    """Check that an optional dependency is installed; call it before the import.

    Args:
        module: what is imported, such as ``sigstore``.
        extra: the extra that installs it (pyproject.toml).
        command: the command that needs it; the extra's name if empty.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"'trainyard {command or extra}' needs {module}: run {again(extra)}")


def again(extra: str) -> str:
    """Return the command that installs this copy with an extra, from where it came: a checkout, a repository, a file.

    https://packaging.python.org/en/latest/specifications/direct-url/; of uv's tools, the folder has a receipt.
    """
    came = json.loads(importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}")
    url = came.get("url", "")
    if git := came.get("vcs_info"):
        url = f"{git['vcs']}+{url}@{git.get('requested_revision') or git['commit_id']}"
    where = f"#subdirectory={came['subdirectory']}" if "subdirectory" in came else ""
    wanted = shlex.quote(f"{DISTRIBUTION}[{extra}]" + (f" @ {url}{where}" if url else ""))
    if (Path(sys.prefix) / "uv-receipt.toml").is_file():
        return f"uv tool install --reinstall {wanted}"
    return f"uv pip install --python {shlex.quote(sys.executable)} {wanted}"
