"""All generated files: what images are built from, the pipelines of Cloud Build and GitHub, and pages of docs/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.common.registration import neighbours
from trainyard.common.settings import ROOT
from trainyard.image import catalog_page, dockerfile
from trainyard.project import reference
from trainyard.release import pipelines
from trainyard.spec.architectures import AMD64
from trainyard.spec.model import Spec, catalogue, load, relative


def examples() -> list[Spec]:
    """The specs of users' images in examples/, whose Dockerfiles are committed."""
    return [load(relative(path.parent), AMD64.name) for path in sorted(ROOT.glob("examples/*/image.yaml"))]


def rendered(commands: Any, only: Spec | None = None) -> dict[Path, str]:
    """Return the path -> text of every generated file; with ``only``, of those that this image is built from.

    Args:
        commands: the group of all commands, which :mod:`trainyard.project.reference` describes.
    """
    found = dockerfile.rendered(only)
    if only is not None:
        return found
    specs = catalogue()
    pages = {**pipelines.rendered(specs), **catalog_page.rendered(specs), **reference.rendered(commands)}
    for neighbour in neighbours():
        pages |= neighbour.pages()
    for spec in examples():
        found |= dockerfile.rendered(spec)
    templates = dockerfile.template_environment()
    return found | {path: templates.get_template(template).render(values) for path, (template, values) in pages.items()}


def drift(commands: Any, only: Spec | None = None) -> list[Path]:
    """Return the files of :func:`rendered` that are missing or out of date."""
    return dockerfile.differing(rendered(commands, only))


def write(commands: Any, only: Spec | None = None) -> list[Path]:
    """Bring the files of :func:`rendered` up to date, and return those that were written.

    Raises:
        UserError: one of them is part of the installed package.
    """
    return dockerfile.write(rendered(commands, only))
