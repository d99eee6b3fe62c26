"""docs/images.md: what every target holds and weighs, how to run it, when it was rebuilt; rendered by `make render`.

It is made from the specs, from docs/sizes.json (what `make sizes` measured) and from images/limits.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts import documents, locks, measured
from scripts.cli import ROOT, UserError, nearest
from scripts.spec import IMAGES, Spec, relative
from scripts.units import in_units

PAGE = ROOT / "docs" / "images.md"
LIMITS = IMAGES / "limits.yaml"

#: Accelerator of a spec -> how it is called.
ACCELERATORS = {"none": "none", "nvidia": "NVIDIA GPU", "tpu": "Cloud TPU"}

#: Accelerator of a spec -> what `docker run` needs on a host that has it (docs/launcher.md tells what is found there).
FLAGS = {"none": "", "nvidia": "--gpus all ", "tpu": "--privileged --net=host "}

#: Accelerator of a spec -> what to ask a platform for, in the examples.
ASKED = {"none": "", "nvidia": " ACCELERATOR=nvidia-l4", "tpu": " ACCELERATOR=v5litepod-4"}


def limits(names: list[str]) -> dict[str, list[str]]:
    """Target -> its known limits.

    Raises:
        UserError: the file names a target that does not exist.
    """
    found: dict[str, list[str]] = {}
    for name, lines in documents.plain(documents.read(LIMITS)).items():
        if name not in names:
            raise UserError(f"{relative(LIMITS)}: no target '{name}'{nearest(name, names)}")
        found[name] = [str(line) for line in lines]
    return found


def _versions(spec: Spec) -> dict[str, str]:
    """The framework's packages and their locked versions; what the base brings is in its lock alone."""
    path = locks.framework_lock(spec, "default")
    locked = locks.read(path) if path.is_file() else {}
    shown = (
        "torch",
        "torchvision",
        "torch-xla",
        "torch-tpu",
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-tpu",
        "keras",
    )
    return {name: locked[name] for name in (*shown, "libtpu", "numpy") if name in locked}


def _measured(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """A measurement in words; None if there is none."""
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
    """Everything templates/images.md.j2 may use."""
    sizes, known = measured.load(), limits([spec.target for spec in specs])
    return {
        "targets": [
            {
                "name": spec.target,
                "summary": spec.summary,
                "accelerator": ACCELERATORS[spec.accelerator],
                "flags": FLAGS[spec.accelerator],
                "asked": ASKED[spec.accelerator],
                "tpu": spec.accelerator == "tpu",
                "legacy": spec.trainers.package == "tf" and spec.accelerator != "tpu",
                "versions": _versions(spec),
                "base": spec.base,
                "python": spec.base_spec().python,
                "index": spec.framework.index,
                "trainers": list(spec.trainer_commands()),
                "default": spec.trainers.default,
                "budget": in_units(spec.budget.size),
                "measured": _measured(sizes.get(spec.target)),
                "limits": known.get(spec.target, []),
            }
            for spec in specs
        ]
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Path of every generated file -> its template's name and variables."""
    return {PAGE: ("images.md.j2", variables(specs))}
