"""Lock a target for all its platforms and package indexes, and bring its Dockerfiles up to date."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

from trainyard.common.console import warn
from trainyard.image import dockerfile, package_index, resolver
from trainyard.spec import lockfile, nightly
from trainyard.spec.model import (
    Spec,
    as_written,
    each_platform,
    load,
    nightly_versions_file,
    requirements_of,
    with_nightly_versions,
)
from trainyard.spec.nightly import NightlyVersions


def lock(spec: Spec) -> tuple[list[Path], list[Path]]:
    """Write the locks of a target for the default index, and for the index of its spec if that answers.

    Packages that a nightly names without a version are locked in their newest release, pre-releases included.

    Returns:
        The paths of the locks and of what is recorded beside them; and of the Dockerfiles that changed with them.
    Raises:
        UserError: its versions conflict by images/conflicts.yaml, or its base cannot be inspected.
        StepFailed: uv found no solution.
    """
    index, reason = package_index.choose(spec)
    platforms = each_platform(spec)
    versions = _newest(platforms)
    if versions:
        platforms = [with_nightly_versions(as_written(one), versions) for one in platforms]
    written = []
    for one, name in ((one, name) for one in platforms for name in dict.fromkeys(("default", index))):
        written += resolver.lock_target(one, name)
    if versions:
        path = nightly_versions_file(spec)
        temporary = path.with_suffix(".json.new")
        temporary.write_text(versions.text(), encoding="utf-8")
        temporary.replace(path)
        written.append(path)
    if index == "default" and reason:
        warn(f"no lock for index '{spec.framework.index}': {reason}")
    return written, dockerfile.write(dockerfile.rendered(load(str(spec.folder), spec.arch)))


def _newest(platforms: list[Spec]) -> NightlyVersions | None:
    """The newest versions of the packages that the file of a nightly names without one; None if there are none.

    What several platforms have in common has the version of the first; if one of them lacks that, no file is written. A
    target that takes over the framework of the
    one that it extends has the versions of that one.
    """
    found: dict[str, str] = {}
    for spec in platforms if platforms[0].framework_folder == platforms[0].folder else []:
        packages = as_written(spec).framework.packages
        names = nightly.unpinned(packages)
        if not names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "newest.lock"
            resolver.compile_lock(
                packages + requirements_of(spec),
                output,
                python=spec.base_spec().python,
                platform=spec.wheel_platform,
                target=spec.target,
                constraints="".join(f"{name}=={version}\n" for name, version in found.items()),
                prereleases=names,
            )
            locked = lockfile.read(output)
        found |= {name: locked[name] for name in names}
    day = datetime.datetime.now(tz=datetime.UTC)
    return NightlyVersions(day=f"{day:%Y%m%d}", packages=found) if found else None
