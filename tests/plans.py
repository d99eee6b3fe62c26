"""Plans of builds, for most of which no index and no registry was asked, and what the rules say of an image."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from trainyard.common.rule_engine import Finding
from trainyard.image import build, dockerfile, planning, recipes
from trainyard.image.plan import Plan, Sources
from trainyard.lint.image import verify
from trainyard.lint.image.evidence import Evidence
from trainyard.spec import model, pylock
from trainyard.spec.model import Spec


def sources(**given: Any) -> Sources:
    """Return sources of a build: the default index, a base without a digest, and what is ``given``."""
    usual = {"index": "default", "index_url": "", "base": "base", "base_digest": "", "build_base": "", "pythons": {}}
    return Sources(**(usual | {"notes": []} | given))


def plan(spec: Spec, **given: Any) -> Plan:
    """Return the plan of a build from :func:`sources`; its recipe is in the state folder of the spec."""
    return planning.make_plan(spec, sources(**given))


def built(spec: Spec, **how: Any) -> tuple[Plan, dict[str, Any]]:
    """Build the candidate of a spec in the engine, as a command does; return the plan, and the facts of the build."""
    with planning.planned(spec) as made:
        return made, build.build(made, **how)


def with_index(target: str, index: str, folder: Path) -> Path:
    """Copy a target into a folder, locked for a package index in the versions of the default one; return the copy's."""
    copy = folder / target
    shutil.copytree(model.load(target).folder, copy)
    shutil.copy(copy / pylock.FILE, pylock.file_of(copy / pylock.FILE, index))
    for spec in model.each_platform(model.load(str(copy))):
        dockerfile.write(dockerfile.rendered(spec))
    return copy


def examined(spec: Spec, reference: str) -> tuple[Evidence, dict[str, list[Finding]]]:
    """Examine an image as ``trainyard verify`` does, against the recipe that follows from the files of its spec."""
    recipe = recipes.for_image(spec, spec.context.engine.image(reference, made_by="docker pull").labels)
    return verify.examine(recipe, reference, spec.context)
