"""The files that a user's image is built from, in the state folder: Dockerfile, locks, wheels and the code's layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trainyard.common.errors import UserError
from trainyard.image import build_backends, dockerfile, lock_origin, repository_lock
from trainyard.image.smoke_failure import HostFiles
from trainyard.spec.model import RepositorySpec, Spec, relative
from trainyard.spec.naming import LABELS
from trainyard.spec.state import own
from trainyard.workspace import check, code_layer, indexes, python_survey, requirements, wheels
from trainyard.workspace.code_files import CodeFile

logger = logging.getLogger(__name__)


def prepare(spec: Spec) -> tuple[Spec, str]:
    """Write everything that the image of a repository is built from into ``spec.build_folder``.

    A lock that is missing, or that the requirements have changed since, is resolved first. The files of a target of the
    catalogue are only checked.

    Returns:
        The spec with the lock that the files have, and the diff id of the code's layer; empty if there is none.
    Raises:
        UserError: the code, the requirements or the lock have a mistake, or a target's files are out of date.
        StepFailed: the requirements could not be resolved.
    """
    if not isinstance(spec, RepositorySpec):
        if drifted := dockerfile.drift(spec):
            names, again = ", ".join(relative(path) for path in drifted), spec.command("dev render")
            raise UserError(f"{names}: out of date with the spec; run '{again}' and review the difference")
        return spec, ""
    spec = build_backends.asked(spec)
    code = check.require(spec)
    exists = spec.lock_file.is_file()
    if exists:
        lock_origin.check_tool(spec)
    if not lock_origin.is_current(spec):
        logger.info(f"{'updating' if exists else 'writing'} {relative(spec.lock_file)}: commit it")
        spec = repository_lock.lock(spec)
    own(spec.kept)
    folder = spec.build_folder
    built = folder / "wheels"
    built.mkdir(parents=True, exist_ok=True)
    wanted = requirements.of_platform(spec)
    wheels.ensure(wanted.sources, spec.locked().requirements, spec.lock_file, built, build_backends.of_spec(spec).wheel)
    (folder / "code.tar").unlink(missing_ok=True)
    if spec.workspace.compiles_own:
        code_layer.write_sources(spec.workspace, folder / "extensions.tar")
        labels = spec.own_labels | {f"{LABELS}.config": code_layer.configuration(spec.workspace)}
        spec = spec.model_copy(update={"own_labels": labels})
    diff_id = ""
    if spec.has_code:
        layer = code_layer.write(spec.workspace, folder / "code.tar", spec.site)
        diff_id = layer.diff_id
        for note in layer.notes:
            logger.warning(note)
        if place := compiles_without_compiler(spec, code):
            logger.warning(
                f"{place}: torch.compile needs a compiler, which this image does not have: "
                + ("remove 'compiler: false'" if spec.workspace.document.compiler is False else "add 'compiler: true'")
                + f" in {spec.where}"
            )
    dockerfile.write(dockerfile.rendered(spec))
    return spec, diff_id


def compiles_without_compiler(spec: RepositorySpec, code: Sequence[CodeFile]) -> str:
    """Return the first line of ``code`` that calls torch.compile if the image has no compiler for it; else empty."""
    if spec.has_compiler or spec.framework_in_base or "torch" not in spec.locked().versions:
        return ""
    for file in code:
        source = python_survey.read(file.source, file.source.name) if file.path.endswith(".py") else None
        if source and source.run and "compiles" in source.marks:
            return f"{relative(file.source)}:{source.marks['compiles'][0]}"
    return ""


def secrets(spec: Spec) -> dict[str, str]:
    """Return id of a secret of the Dockerfile -> its text: the private indexes and their credentials.

    Texts are empty where there is nothing to keep.
    """
    if not isinstance(spec, RepositorySpec):
        return {}
    return dict(zip(spec.secrets, indexes.build_configuration(spec), strict=True))


def on_host(spec: Spec) -> HostFiles | None:
    """Return where the repository of an image with a user's command is on this host; None of other images."""
    if not spec.run:
        return None
    return HostFiles(spec.workspace.file, spec.workspace.data, bool(spec.workspace.given_data))
