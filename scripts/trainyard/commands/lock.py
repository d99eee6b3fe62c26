"""``trainyard lock``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options

GROUP = "build"


@click.command(
    short_help="Resolve packages to hash-pinned locks.",
    epilog="""\b
    Examples:
      trainyard lock                             # trainyard.lock of the repository that you are in
      trainyard lock --upgrade-package einops    # the same, with the newest einops
      trainyard lock --upgrade                   # the framework and base of this Trainyard, the newest of the rest
      trainyard lock xla        # the locks of a target, for every package index that answers
      trainyard lock scripts    # what Trainyard and its tests need (scripts/requirements.lock)
      trainyard lock uv         # the installer inside builds (images/uv.lock); the same for gsutil
    """,
)
@options.target
@options.flag("--upgrade", "-U", help="Keep no version of trainyard.lock, or of the lock of scripts.")
@options.option("--upgrade-package", "-P", multiple=True, metavar="NAME", help="Take the newest version of a package.")
@options.flag("--check", help="Write nothing; fail if trainyard.lock would change.")
@options.json_output
def command(target: str | None, upgrade: bool, upgrade_package: tuple[str, ...], check: bool, as_json: bool) -> None:
    """Resolve TARGET's packages for its Python and platforms; write the hash-pinned locks and Dockerfiles; commit them.

    Without TARGET, trainyard.lock is written beside the trainyard.yaml of the repository that you are in. Its versions
    are kept where the requirements allow it.

    If TARGET's base holds the framework, its tag is resolved to a digest and its packages are recorded in base.json.
    The packages that a nightly names without a version are locked in their newest release, pre-releases included, which
    is recorded with the day in nightly.json.
    """
    from trainyard.common import console
    from trainyard.image import resolver, target_lock, workspace_resolver
    from trainyard.spec import architectures, lockfile, model
    from trainyard.spec.model import relative

    architectures.use_all()
    spec = None if target in ("scripts", *resolver.TOOLS) else model.load(target)
    if spec is not None and spec.workspace:
        written = workspace_resolver.lock(spec, upgrade=upgrade, upgrade_packages=upgrade_package, check=check)
        platforms = model.each_platform(spec)
        counts = [f"{len(lockfile.installed(one, 'default'))} packages" for one in platforms]
        if len(platforms) > 1:
            counts = [f"{count} for {one.platform}" for count, one in zip(counts, platforms, strict=True)]
        console.say(f"{relative(spec.workspace.lock)}: {', '.join(counts)}{'' if written else ', up to date'}")
    elif upgrade_package or check or (upgrade and target != "scripts"):
        raise console.UserError(
            "--upgrade, --upgrade-package and --check are for the lock of a trainyard.yaml, and --upgrade for 'scripts'"
        )
    else:
        rendered: list[Path] = []
        if spec is not None:
            written, rendered = target_lock.lock(spec)
        else:
            written = resolver.lock_scripts(upgrade=upgrade) if target == "scripts" else resolver.lock_tool(str(target))
        for path in written:
            console.say(f"{relative(path)}: {len(lockfile.read(path))} packages")
        for path in rendered:
            console.say(f"wrote {relative(path)}")
        written += rendered
    console.result({"written": [relative(path) for path in written]}, as_json=as_json)
