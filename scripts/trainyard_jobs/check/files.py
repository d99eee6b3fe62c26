"""Check job files, and those in folders."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.common import rule_engine
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.rule_engine import Finding
from trainyard.oci.reference import why_unusable
from trainyard.spec import yaml_source
from trainyard.spec.yaml_source import relative
from trainyard_jobs.check import placeholders
from trainyard_jobs.check.placeholders import TemplateError
from trainyard_jobs.model import image_metadata
from trainyard_jobs.model.image_metadata import Contents, ImageNotFoundError, ImageUnavailableError, Targets
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules import dry_run, fields, image, named_images
from trainyard_jobs.rules.evidence import Answer, Evidence, drop_invalid_fields, validate
from trainyard_jobs.schema import job_file
from trainyard_jobs.schema.job_file import JobFile

#: Reference of an image -> why it has no valid signature, in words; empty if it has one.
Unsigned = Callable[[str], str]

#: Checks the job in a file; returns what breaks a rule.
Check = Callable[[Path], tuple[JobFile, list[Finding]]]

#: Ends of the names of files that may be jobs.
SUFFIXES = (".yaml", ".yml", ".json")

#: Seconds for each of kubectl's requests: the API server leaves a webhook at most 30
#: (https://kubernetes.io/docs/reference/access-authn-authz/extensible-admission-controllers/#timeouts).
_PATIENCE = 60


def check_file(
    path: Path,
    *,
    region: str | None = None,
    offline: bool = False,
    unsigned: Unsigned | None = None,
    engine: Engine | None = None,
    server: bool = False,
    targets: Targets = tuple,
) -> tuple[JobFile, list[Finding]]:
    """A job file, and everything in it that breaks a rule of its platform.

    Args:
        region: where the job is to run.
        offline: do not look up the images that it names.
        unsigned: why an image has no valid signature; None if none is demanded.
        engine: that may have the images; None: they are looked up at their registries alone.
        server: ask the cluster of kubectl's context about Kubernetes objects.
        targets: what messages recommend.
    Raises:
        StepFailed: no cluster answers.
        TemplateError: something is to be filled in.
        UserError: the file cannot be read, or is not a job.
    """
    text = yaml_source.text(path)
    try:
        job = job_file.parse(text, path)
    except job_file.NotAJobError:
        raise
    except UserError as error:
        placeholders.refuse(placeholders.in_text(text, str(error)), relative(path))
        raise
    placeholders.refuse(placeholders.in_job(job), relative(path))
    images, missing = ({}, {}) if offline else _look_up(job, engine)
    found = None
    if unsigned:
        named = dict.fromkeys(reference for _, reference in named_images.look(job)[0])
        found = {one: why for one in named if (why := unsigned(one))}
    answers = ask_cluster(job) if server and job.kind == "gke" else ()
    return job, all_rules.check(Evidence(job, region, images, missing, found, answers, targets))


def ask_cluster(job: JobFile) -> list[Answer]:
    """Ask the API server of kubectl's context about the objects of a file, in a dry run, which creates nothing.

    Raises:
        StepFailed: no cluster answers.
    """
    # 'apply' takes objects that exist already, 'create' names that are to be generated.
    generated = any("generateName" in (document.get("metadata") or {}) for document in job.documents)
    command = ["kubectl", "create" if generated else "apply", "--dry-run=server", "--output=name"]
    done = subprocess.run(
        [*command, f"--request-timeout={_PATIENCE}s", f"--filename={job.path}"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    answers = dry_run.answers(done.stderr)
    if done.returncode and all(answer.warning for answer in answers):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        error = re.sub(r"^.*failed to download openapi: |; if you choose to ignore.*", "", (lines or ["no message"])[0])
        raise StepFailed(f"{relative(job.path)}: kubectl could not ask its cluster: {error.removeprefix('error: ')}")
    return answers


def _look_up(job: JobFile, engine: Engine | None) -> tuple[dict[str, Contents | None], dict[str, str]]:
    """Look up what is in the images that a job names.

    Returns:
        reference -> content, None if unknown; reference -> why it is unknown, or why there is no such image.
        A reference that is in the second alone does not exist.
    """
    images: dict[str, Contents | None] = {}
    why: dict[str, str] = {}
    for reference in dict.fromkeys(one.reference for one in image.named(drop_invalid_fields(Evidence(job)))):
        if why_unusable(reference):  # images_are_named says so
            continue
        try:
            images[reference] = image_metadata.read_contents(engine, reference)
        except ImageNotFoundError as error:
            why[reference] = str(error)
        except ImageUnavailableError as error:
            images[reference], why[reference] = None, str(error)
    return images, why


@dataclass(frozen=True)
class Checked:
    """The result of checking one file: its job and what breaks a rule, or why there is none.

    Attributes:
        error: why the file cannot be read.
        unchecked: what checks it instead, for a job of another scheduler; what a template leaves to fill in.
        template: whether it is a template.
    """

    path: Path
    job: JobFile | None = None
    findings: tuple[Finding, ...] = ()
    error: str = ""
    unchecked: str = ""
    template: bool = False

    def as_dict(self, *, strict: bool = False) -> dict[str, Any]:
        """The result as JSON has it.

        Args:
            strict: whether notes fail, too.
        """
        failed = [one for one in self.findings if strict or one.fails]
        return {
            "file": str(self.path),
            "kind": self.job.kind if self.job else None,
            "passed": not self.error and not failed,
            "findings": [rule_engine.as_dict(one) for one in failed],
            "notes": [rule_engine.as_dict(one) for one in self.findings if one not in failed],
            "error": self.error or None,
            "unchecked": self.unchecked or None,
        }


def check_files(paths: Sequence[Path], check: Check, *, signed: bool = False) -> tuple[list[Checked], list[Path]]:
    """Check job files, and those in folders. A file that cannot be read does not stop the others.

    Args:
        check: :func:`check_file` with its options.
        signed: whether signatures are demanded, also of the images of templates.
    Returns:
        A result for each job and each file that cannot be read; the files of folders that are not jobs.
    Raises:
        StepFailed: no cluster answers.
        UserError: a folder has no job.
    """
    results: list[Checked] = []
    skipped: list[Path] = []
    for path in paths:
        if not path.is_dir():
            results.append(_checked(path, check))
            continue
        before = len(results)
        for file in _files_in(path):
            try:
                if job_file.may_be_job(yaml_source.text(file, errors="replace")):
                    one = _checked(file, check, explicit=False)
                    results.append(Checked(file, error=one.unchecked) if one.template and signed else one)
                else:
                    skipped.append(file)
            except job_file.NotAJobError:
                skipped.append(file)
            except UserError as error:
                results.append(Checked(file, error=str(error)))
        if len(results) == before:
            raise UserError(f"{relative(path)}: no job in this folder; jobs are files named *{', *'.join(SUFFIXES)}")
    # Once each, although a folder and a file in it were given.
    return list({one.path.resolve(): one for one in results}.values()), skipped


def _checked(path: Path, check: Check, *, explicit: bool = True) -> Checked:
    try:
        job, findings = check(path)
    except UserError as error:
        if isinstance(error, job_file.NotAJobError) and not explicit:
            raise
        template = isinstance(error, TemplateError) and not explicit
        other = template or isinstance(error, job_file.OtherFormatError)
        return Checked(path, unchecked=str(error), template=template) if other else Checked(path, error=str(error))
    return Checked(path, job, tuple(findings))


def _files_in(folder: Path) -> Iterator[Path]:
    """The files below a folder that may be jobs, sorted; not those in hidden folders and of installed packages."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith(".") and one != "node_modules")
        yield from (Path(root, name) for name in sorted(names) if name.endswith(SUFFIXES))


@contextlib.contextmanager
def explain_invalid_fields(job: JobFile) -> Iterator[None]:
    """Turn an error that a field of the wrong type causes in the body into a line that names the field.

    For what reads a job without checking it first: a job can be rehearsed although a platform would refuse it.

    Raises:
        UserError: the job does not match its schema, or breaks a rule; the message gives the line of the field.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        for number, document in enumerate(job.documents):
            # Errors of a type first: an unknown field is ignored.
            for error in sorted(validate(job.kind, document), key=lambda error: error.empty is None):
                what = f"{'.'.join(map(str, error.location))}: {error.what}"
                check = f"'trainyard job check {job.path}' lists every mistake"
                raise job.error(error.location, f"{what}; {check}", number) from None
            for location, value in fields.walk(document):
                if value is None and isinstance(location[-1], int):  # which the API server reads as an empty one
                    raise job.error(location, f"{'.'.join(map(str, location))}: an empty entry", number) from None
        for finding in all_rules.check(Evidence(job)):
            if finding.fails and finding.rule != "images_can_be_pulled":  # such a job can be rehearsed
                raise UserError(f"{finding.where}: {finding.what}") from None
        raise
