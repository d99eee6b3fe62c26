"""Describe docs/images.md: contents and size of every target, how to run it, and when it was rebuilt.

Rendered by `make render` from the specs, docs/sizes.json (written by `make sizes`) and images/limits.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import RootModel

from trainyard.common.errors import UserError, nearest
from trainyard.common.settings import ROOT
from trainyard.image import sizes
from trainyard.spec import yaml_source
from trainyard.spec.catalog import Line
from trainyard.spec.framework import KINDS
from trainyard.spec.model import IMAGES, Spec, relative
from trainyard.spec.units import in_units
from trainyard.spec.yaml_source import validated

PAGE = ROOT / "docs" / "images.md"
#: Repositories that were built with other versions of a framework in November 2026.
TRIED = ROOT / "docs" / "versions.json"
LIMITS = IMAGES / "limits.yaml"

#: Accelerator of a spec -> its name in the page.
ACCELERATORS = {"none": "none", "nvidia": "NVIDIA GPU", "tpu": "Cloud TPU"}

#: Accelerator of a spec -> what `docker run` needs on a host that has it (docs/launcher.md).
FLAGS = {"none": "", "nvidia": "--gpus all ", "tpu": "--privileged --net=host "}

#: Accelerator of a spec -> the variable of `make job` that requests one, in the examples.
JOB_VARIABLES = {"none": "", "nvidia": " ACCELERATOR=nvidia-l4", "tpu": " ACCELERATOR=v5litepod-4"}


class _Limits(RootModel[dict[str, list[Line]]]):
    """Map targets to their limits, each one line."""


def limits(names: list[str], file: Path = LIMITS) -> dict[str, list[str]]:
    """Return target -> its known limits, from a file such as images/limits.yaml.

    Raises:
        UserError: the file names a target that does not exist, or a limit is not text.
    """
    data = yaml_source.read(file)
    known = validated(file, _Limits, data, yaml_source.plain(data)).root
    for name in known:
        if name not in names:
            raise UserError(f"{relative(file)}: no target '{name}'{nearest(name, names)}")
    return known


def _versions(spec: Spec) -> dict[str, str]:
    """Return the framework's main packages and their locked versions."""
    content = spec.usable_lock.of(spec.arch) if spec.usable_lock else None
    locked = content.versions if content else {}
    shown = (*KINDS[spec.framework.name].packages, "numpy")
    return {name: locked[name] for name in shown if name in locked}


def _measured(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a measurement with sizes in units; None if there is none."""
    if found is None:
        return None
    return found | {
        "size": in_units(found["size"]),
        "packed": in_units(found["packed"]),
        "estimate": in_units(found["estimate"]) if "estimate" in found else "",
        "layers": [
            {"name": part["name"], "size": in_units(part["size"]), "packed": in_units(part["packed"])}
            for part in found["layers"]
        ],
    }


def variables(specs: list[Spec]) -> dict[str, Any]:
    """Return the variables of templates/images.md.j2."""
    measured, known = sizes.load(), limits([spec.target for spec in specs])
    return {
        "targets": [
            {
                "name": spec.target,
                "summary": spec.summary,
                "accelerator": ACCELERATORS[spec.accelerator],
                "flags": FLAGS[spec.accelerator],
                "job_variables": JOB_VARIABLES[spec.accelerator],
                "tpu": spec.accelerator == "tpu",
                "legacy": spec.trainers.package == "tf" and spec.accelerator != "tpu",
                "versions": _versions(spec),
                "platforms": spec.platforms,
                "base": spec.base,
                "python": spec.base_spec().python,
                "index": spec.framework.index,
                "trainers": list(spec.trainer_commands()),
                "default": spec.trainers.default,
                "budget": in_units(spec.budget.size),
                "measured": _measured(measured.get(spec.target)),
                "limits": known.get(spec.target, []),
                "until": f"{spec.ends[0].day}" if spec.ends else "",
                "because": spec.ends[0].what if spec.ends else "",
            }
            for spec in specs
        ],
        "tried": [row | {"size": in_units(row["size"])} for row in json.loads(TRIED.read_text(encoding="utf-8"))],
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return the path of every generated file -> the name of its template and its variables."""
    return {PAGE: ("images.md.j2", variables(specs))}
