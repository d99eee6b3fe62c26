"""Build without a network, from what `trainyard dev fetch` has downloaded.

Fetching builds the image once, so that BuildKit's cache has every step that downloads, and keeps the base images as OCI
layouts, so that a build need not ask a registry for them. It records which index and base the build had.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import ValidationError

from trainyard.common.errors import UserError
from trainyard.image import working_directory
from trainyard.image.plan import Plan, Sources
from trainyard.spec.architectures import Architecture
from trainyard.spec.state import own

#: Build arguments that keep installers from the network: an address that refuses connections. Proxies are not part of
#: the cache's keys: https://docs.docker.com/build/building/variables/#proxy-arguments
NO_NETWORK = {f"{scheme}_PROXY": "http://127.0.0.1:9" for scheme in ("HTTP", "HTTPS", "ALL")} | {"NO_PROXY": ""}


def _record(kept: Path) -> Path:
    return kept / "fetched.json"


def _layout(state: Path, reference: str, architecture: Architecture) -> Path:
    """The OCI layout of a base image that was fetched."""
    name = reference.replace("/", "_").replace(":", "_").replace("@", "_")
    folder = state / "bases" / f"{name}-{architecture.name}"
    if not folder.exists() and (earlier := Path(f"{folder}.old")).exists():  # keep() was killed
        earlier.rename(folder)
    return folder


def keep(plan: Plan) -> None:
    """Keep the base images of a build that has just succeeded, and record its sources.

    Raises:
        UserError: a base image cannot be pulled.
        StepFailed: the engine cannot save it.
    """
    for reference, architecture in plan.images().items():
        folder = _layout(plan.context.state, reference, architecture)
        own(folder.parent)
        plan.context.engine.pull(reference, architecture.platform)
        partial, earlier = Path(f"{folder}.new"), Path(f"{folder}.old")
        shutil.rmtree(partial, ignore_errors=True)
        working_directory.write(plan.context.engine, reference, partial, architecture)
        shutil.rmtree(earlier, ignore_errors=True)
        if folder.exists():
            folder.rename(earlier)
        partial.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    path = _record(plan.kept)
    own(path.parent)
    path.write_text(plan.sources.model_dump_json(indent=2) + "\n", encoding="utf-8")


def recall(kept: Path, fetch: str) -> Sources:
    """Return the sources of the last build that was fetched for an image.

    Args:
        kept: folder of what this host keeps about the image.
        fetch: the command that fetches it, for messages.
    Raises:
        UserError: none was fetched.
    """
    try:
        return Sources.model_validate_json(_record(kept).read_bytes())
    except (FileNotFoundError, ValidationError):
        raise _nothing_fetched(kept, fetch) from None


def _nothing_fetched(kept: Path, fetch: str) -> UserError:
    return UserError(f"nothing was downloaded for {kept.name}: run '{fetch}' where there is a network")


def contexts(plan: Plan) -> dict[str, str]:
    """Named build contexts that replace the base images of a plan by their OCI layouts: reference -> layout.

    Raises:
        UserError: a layout was not fetched, or was removed.
    """
    found = {}
    for reference, architecture in plan.images().items():
        folder = _layout(plan.context.state, reference, architecture)
        try:
            found[reference] = working_directory.address(folder)
        except FileNotFoundError:
            raise _nothing_fetched(plan.kept, plan.recipe.command("dev fetch")) from None
    return found
