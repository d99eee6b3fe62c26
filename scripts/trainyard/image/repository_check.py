"""Check of a repository what its lock decides, and with a network all that ``trainyard lock`` asks but builds."""

from __future__ import annotations

from dataclasses import replace

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import build_backends, foreseen, lock_origin, package_index, repository_lock
from trainyard.spec.lock import Unreadable
from trainyard.spec.model import RepositorySpec, relative
from trainyard.workspace import indexes, python_projects, requirements, wheels
from trainyard.workspace.check import Checked


def complete(spec: RepositorySpec, found: Checked, *, online: bool) -> str:
    """Add to ``found`` what ``lock`` and ``image`` would refuse, and return the verdict if that is nothing.

    Nothing is built or written. What build backends have told before is known.
    """
    spec = spec.model_copy(update={"context": replace(spec.context, no_build=True)})
    try:
        spec = build_backends.asked(spec)
        current = not found.refused and lock_origin.is_current(spec)
    except (UserError, StepFailed):
        current = False
    known = [*found.refused]
    if not isinstance(spec.lock, Unreadable):
        with found.refusing():
            repository_lock.check_base(spec, spec.lock)
    if spec.lock_file.is_file() and found.refused == known:
        with found.refusing():
            lock_origin.check_tool(spec)
    for error in foreseen.refusals(spec):
        with found.refusing():
            raise error
    lock = f"; {relative(spec.lock_file)} is up to date" if current else ""
    if not online:
        return f"no mistake in code, command and requirements{lock}; 'trainyard check --online' also asks the indexes"
    left = _online(spec, found, current=current) if not found.refused else []
    unknown = f", as far as is known before 'trainyard lock' reads {', '.join(left)}" if left else ""
    return f"nothing prevents an image{unknown}{lock}"


def _online(spec: RepositorySpec, found: Checked, *, current: bool) -> list[str]:
    """Ask indexes and addresses; return what only ``lock`` reads, with an engine."""
    wanted = requirements.of_image(spec)
    named = [*indexes.of_machine(), *indexes.of_project(spec.workspace, wanted.addresses)]
    page = next((line.name for line in wanted.lines), "pip")
    used = {one["index"] for one in wanted.index_of.values() if isinstance(one, dict)}
    for index in named if "allow-insecure-host" not in wanted.options else ():
        reason = package_index.reachable(index.page(page).rstrip("/")) or ""
        with found.refusing():
            if reason == "HTTP 401":
                raise index.unauthorized
            if reason and not reason.startswith("HTTP ") and (index.kind != "explicit" or index.name in used):
                raise UserError(f"{index.where}: index '{index.name}', {index.url}, does not answer: {reason}")
    for source in wanted.sources:
        try:
            wheels.ask(source)
        except (UserError, StepFailed) as error:
            found.refused.append(str(error))
    if current:
        return []
    left = [relative(one.file) for one in python_projects.pending(spec.workspace)]
    left += [one.line.shown for one in wanted.sources if not (one.is_path and one.location.endswith(".whl"))]
    if spec.framework_in_base and not lock_origin.has_base(spec):
        return [*left, f"base {spec.base}"]
    if not found.refused:
        try:
            repository_lock.answered(spec)
        except (UserError, StepFailed) as error:
            if all(one.name for one in wanted.sources):
                found.refused.append(str(error))
            else:
                found.note(f"{error}, unless what has no name in the requirements provides it")
    return left
