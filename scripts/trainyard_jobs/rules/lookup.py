"""Look up the images that a job file names, for the rules about their content."""

from __future__ import annotations

from trainyard_jobs.model import image_metadata
from trainyard_jobs.model.image_metadata import Contents, ImageNotFoundError, ImageUnavailableError
from trainyard_jobs.rules import image
from trainyard_jobs.rules.evidence import Evidence, drop_invalid_fields
from trainyard_jobs.schema.job_file import JobFile


def references(job: JobFile) -> list[str]:
    """The images that a job names, once each."""
    return list(dict.fromkeys(one for one, _, _ in image.references(drop_invalid_fields(Evidence(job)))))


def look_up(job: JobFile) -> tuple[dict[str, Contents | None], dict[str, str]]:
    """What is in the images that a job names.

    Returns:
        reference -> content, None if unknown; reference -> why it is unknown, or why there is no such image.
        A reference that is in the second alone does not exist.
    """
    images: dict[str, Contents | None] = {}
    why: dict[str, str] = {}
    for reference in references(job):
        try:
            images[reference] = image_metadata.read_contents(reference)
        except ImageNotFoundError as error:
            why[reference] = str(error)
        except ImageUnavailableError as error:
            images[reference], why[reference] = None, str(error)
    return images, why
