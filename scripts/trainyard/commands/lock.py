"""``trainyard lock``."""

from __future__ import annotations

from pathlib import Path

import click

from trainyard.common import options
from trainyard.common.context import Context

GROUP = "build"


@options.command(
    "Resolve packages to hash-pinned locks.",
    "trainyard lock                             # pylock.trainyard.toml of the repository that you are in",
    "trainyard lock --upgrade-package einops    # the same, with the newest einops",
    "trainyard lock --upgrade                   # the framework and base of this Trainyard, the newest of the rest",
    "trainyard lock xla        # the lock of a target, for every package index that answers",
    "trainyard lock --export pylock.laptop.toml     # that lock, as 'uv pip sync' and 'pip install -r' read it",
    "trainyard lock scripts    # what Trainyard and its tests need (scripts/requirements.lock)",
    "trainyard lock uv         # the installer inside builds (images/uv.lock); the same for gsutil",
)
@options.target
@options.flag("--upgrade", "-U", help="Keep no version of the lock.")
@options.option("--upgrade-package", "-P", multiple=True, metavar="NAME", help="Take the newest version of a package.")
@options.flag("--check", help="Write nothing; fail if the lock would change.")
@options.option(
    "--export", type=click.Path(path_type=Path, dir_okay=False), metavar="pylock.NAME.toml",
    help="Lock nothing; write the lock with the addresses of your package index to this file.",
)  # fmt: skip
@options.no_build
@options.json_output
@click.pass_obj
def command(
    context: Context,
    target: str | None,
    upgrade: bool,
    upgrade_package: tuple[str, ...],
    check: bool,
    export: Path | None,
    as_json: bool,
) -> None:
    """Resolve TARGET's packages for its Python and platforms; write pylock.toml and Dockerfiles; commit them.

    Without TARGET, pylock.trainyard.toml is written beside the trainyard.yaml of the repository that you are in. The
    versions of a lock are kept until something needs another one.

    If TARGET's base holds the framework, its tag is resolved to a digest and its packages are recorded. The packages
    that a nightly names without a version are locked in their newest release, pre-releases included, with the day.
    """
    from trainyard.common import console, errors
    from trainyard.image import build_backends, exported_lock, repository_lock, resolver, target_lock, tool_locks
    from trainyard.spec import architectures, model, pylock
    from trainyard.spec.model import relative
    from trainyard.workspace import check as workspace_check
    from trainyard.workspace import loading

    architectures.use_all()
    spec = None if target in ("scripts", *tool_locks.TOOLS) else loading.load(target, context=context)
    written: list[Path] = []
    if export:
        if spec is None:
            raise errors.UserError("'--export' is for the lock of an image")
        exported_lock.export(spec, export)
        console.say(f"wrote {relative(export)}")
        return console.result({"written": [relative(export)]}, as_json=as_json)
    if isinstance(spec, model.RepositorySpec):
        spec = build_backends.asked(spec)
        workspace_check.require(spec)
        before = spec.lock
        spec = repository_lock.lock(spec, upgrade=upgrade, upgrade_packages=upgrade_package, check=check)
        written = [] if spec.lock == before else list(pylock.files(spec.lock_file).values())
    elif spec is not None:
        resolved = target_lock.resolve(spec, upgrade=upgrade, upgrade_packages=upgrade_package)
        if check and pylock.changed(spec.lock_file, resolved):
            raise errors.StepFailed(f"{relative(spec.lock_file)} is out of date: run '{spec.command('lock')}'")
        spec, written = target_lock.write(spec, resolved)
    elif upgrade_package or check or (upgrade and target != "scripts"):
        raise errors.UserError(
            "--upgrade-package and --check are for the locks of images, --upgrade also for 'scripts'"
        )
    else:
        scripts = target == "scripts"
        written = (
            tool_locks.lock_scripts(context, upgrade=upgrade) if scripts else tool_locks.lock_tool(str(target), context)
        )
        for path in written:
            console.say(f"{relative(path)}: {len(resolver.versions(path.read_text(encoding='utf-8')))} packages")
    if spec is not None:
        platforms = model.each_platform(spec)
        counts = [f"{len(one.locked().versions)} packages" for one in platforms]
        if len(platforms) > 1:
            counts = [f"{count} for {one.platform}" for count, one in zip(counts, platforms, strict=True)]
        console.say(f"{relative(spec.lock_file)}: {', '.join(counts)}{'' if written else ', up to date'}")
        for path in written:
            if path != spec.lock_file:
                console.say(f"wrote {relative(path)}")
    console.result({"written": [relative(path) for path in written]}, as_json=as_json)
