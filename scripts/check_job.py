"""Check a job's file: fields, values, the platform's rules, and what is in the image; ours or not.

    make check-job FILE=job.yaml
    make check-job FILE=job.yaml REGION=us-central1     whether the region has what it asks for
    make check-job FILE=job.yaml OFFLINE=1              without asking any registry

CustomJobs and tuning jobs of Vertex AI, AI Platform jobs, and Kubernetes manifests with a Job or JobSet, in YAML or
JSON. Each finding says where, what, why, and how to mend it; the status is 1 if there is one. The rules are the
functions of scripts/jobs/rules*.py.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from scripts import cli, findings
from scripts.cli import StepFailed, UserError, log, say
from scripts.documents import relative
from scripts.jobs import contents, files, rules, rules_image
from scripts.jobs.contents import Contents, NotThereError, UnknownError
from scripts.jobs.files import JobFile
from scripts.jobs.rules import Evidence


def look_up(job: JobFile) -> tuple[dict[str, Contents | None], dict[str, str]]:
    """What is in the images that a job names.

    Returns:
        reference -> contents, None where that could not be found out; reference -> why not, or why there is none.
        A reference that is in the second alone does not exist.
    """
    images: dict[str, Contents | None] = {}
    why: dict[str, str] = {}
    for reference in dict.fromkeys(one for one, _, _ in rules_image.references(rules.shaped(Evidence(job)))):
        try:
            images[reference] = contents.look(reference)
        except NotThereError as error:
            why[reference] = str(error)
        except UnknownError as error:
            images[reference], why[reference] = None, str(error)
    return images, why


def examine(path: Path, *, region: str | None = None, offline: bool = False) -> tuple[JobFile, list[findings.Finding]]:
    """A job's file and everything that is wrong with it.

    Raises:
        UserError: the file cannot be read, or is no job.
    """
    job = files.load(path)
    images, missing = ({}, {}) if offline else look_up(job)
    return job, rules.check(Evidence(job, region, images, missing))


def _table(job: JobFile, found: list[findings.Finding]) -> Table:
    table = Table(title=f"{relative(job.path)}: {job.kind}", title_justify="left")
    table.add_column("rule")
    table.add_column("")
    for function in rules.rules_of(job.kind):
        own = [one for one in found if one.rule == function.__name__]
        failed = sum(not one.note for one in own)
        table.add_row(
            rules.title(function), f"[red]{failed} found" if failed else "[yellow]see below" if own else "[green]holds"
        )
    return table


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("file", nargs="?", default=os.environ.get("FILE") or None, help="or FILE")
    parser.add_argument("--region", default=os.environ.get("REGION") or None, help="where it is to run; or REGION")
    parser.add_argument("--offline", action="store_true", default=bool(os.environ.get("OFFLINE")))
    options = parser.parse_args(arguments)
    if not options.file:
        raise UserError("no file given, as in 'make check-job FILE=job.yaml'")
    job, found = examine(Path(options.file), region=options.region, offline=options.offline)
    log.print(_table(job, found))
    for one in found:
        findings.show(one)
    failed = [one for one in found if not one.note]
    cli.result(
        {
            "file": str(job.path),
            "kind": job.kind,
            "passed": not failed,
            "findings": [asdict(one) for one in failed],
            "notes": [asdict(one) for one in found if one.note],
        },
        as_json=options.json,
    )
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise StepFailed(f"{failed[0]}{more}")
    say(f"{relative(job.path)}: nothing is wrong with it" + (", but see the notes" if found else ""))
    return 0


if __name__ == "__main__":
    cli.run(main)
