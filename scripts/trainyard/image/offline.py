"""Build without a network, from what `trainyard dev fetch` has downloaded.

Fetching builds the image once, so that BuildKit's cache has every step that downloads, and keeps the base images as OCI
layouts, so that a build need not ask a registry for them. It records which index and base the build had.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from trainyard.common.errors import UserError
from trainyard.image import working_directory
from trainyard.image.plan import Plan
from trainyard.oci import builder
from trainyard.spec.architectures import Architecture
from trainyard.spec.model import Spec
from trainyard.spec.state import own

#: Build arguments that keep installers from the network: an address that refuses connections. Proxies are not part of
#: the cache's keys: https://docs.docker.com/build/building/variables/#proxy-arguments
NO_NETWORK = {f"{scheme}_PROXY": "http://127.0.0.1:9" for scheme in ("HTTP", "HTTPS", "ALL")} | {"NO_PROXY": ""}


class Sources(BaseModel):
    """What a build is made from besides the files of its spec.

    Attributes:
        index: name of the package index, ``index_url``: its address; empty for the default index.
        base: reference of the base image, ``base_digest``: its digest where a registry gave one.
        build_base: reference of the image in which wheels are installed.
        pythons: see :class:`trainyard.image.plan.Plan`.
        notes: every fallback that was taken, a sentence each.
    """

    index: str
    index_url: str
    base: str
    base_digest: str
    build_base: str
    pythons: dict[str, str]
    notes: list[str]


def _images(base: str, build_base: str, pythons: Mapping[str, str], spec: Spec) -> dict[str, Architecture]:
    """Reference of every image that a build starts from -> its architecture: the building machine's, and the base's."""
    architecture = spec.architecture
    machine = builder.current(spec.context).machine(architecture)
    return dict.fromkeys({build_base or base, *pythons.values()} - {"tools"}, machine) | {base: architecture}


def images(plan: Plan) -> dict[str, Architecture]:
    """Reference of every image that the build of a plan starts from -> its architecture."""
    return _images(plan.base, plan.build_base, plan.pythons, plan.spec)


def _record(spec: Spec) -> Path:
    return spec.kept / "fetched.json"


def _layout(state: Path, reference: str, architecture: Architecture) -> Path:
    """The OCI layout of a base image that was fetched."""
    name = reference.replace("/", "_").replace(":", "_").replace("@", "_")
    folder = state / "bases" / f"{name}-{architecture.name}"
    if not folder.exists() and (earlier := Path(f"{folder}.old")).exists():  # keep() was killed
        earlier.rename(folder)
    return folder


def keep(spec: Spec, sources: Sources) -> None:
    """Keep the base images of a build of ``spec`` that has just succeeded, and record its sources.

    Raises:
        UserError: a base image cannot be pulled.
        StepFailed: the engine cannot save it.
    """
    kept = _images(sources.base, sources.build_base, sources.pythons, spec)
    for reference, architecture in kept.items():
        folder = _layout(spec.context.state, reference, architecture)
        own(folder.parent)
        spec.context.engine.pull(reference, architecture.platform)
        partial, earlier = Path(f"{folder}.new"), Path(f"{folder}.old")
        shutil.rmtree(partial, ignore_errors=True)
        working_directory.write(spec.context.engine, reference, partial, architecture)
        shutil.rmtree(earlier, ignore_errors=True)
        if folder.exists():
            folder.rename(earlier)
        partial.rename(folder)
        shutil.rmtree(earlier, ignore_errors=True)
    path = _record(spec)
    own(path.parent)
    path.write_text(sources.model_dump_json(indent=2) + "\n", encoding="utf-8")


def recall(spec: Spec) -> Sources:
    """The sources of the last build that was fetched for a target.

    Raises:
        UserError: none was fetched.
    """
    try:
        return Sources.model_validate_json(_record(spec).read_bytes())
    except (FileNotFoundError, ValidationError):
        raise _nothing_fetched(spec) from None


def _nothing_fetched(spec: Spec) -> UserError:
    return UserError(
        f"nothing was downloaded for {spec.target}: run '{spec.command('dev fetch')}' where there is a network"
    )


def contexts(plan: Plan) -> dict[str, str]:
    """Named build contexts that replace the base images of a plan by their OCI layouts: reference -> layout.

    Raises:
        UserError: a layout was not fetched, or was removed.
    """
    found = {}
    for reference, architecture in images(plan).items():
        folder = _layout(plan.spec.context.state, reference, architecture)
        try:
            found[reference] = working_directory.address(folder)
        except FileNotFoundError:
            raise _nothing_fetched(plan.spec) from None
    return found
