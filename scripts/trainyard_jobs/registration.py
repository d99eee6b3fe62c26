"""Bring rules and more to the builder's commands; see :mod:`trainyard.common.registration`."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainyard.common.registration import Neighbour, Pages
from trainyard.common.rule_engine import Rule


def _rules() -> Sequence[Rule[Any]]:
    from trainyard_jobs import platforms

    return platforms.RULES


def _pages() -> Pages:
    from trainyard_jobs.check import pages

    return pages.rendered()


def _outdated(day: datetime.date) -> list[str]:
    from trainyard_jobs.model import machines

    return machines.outdated(day)


def _platforms() -> list[str]:
    """Return the names of the platforms, which are those of their folders, with dashes."""
    folder = Path(__file__).parent / "platforms"
    return sorted(path.parent.name.replace("_", "-") for path in folder.glob("*/write.py"))


def _accelerators() -> list[str]:
    """Return TPU slices and GPUs of machines.yaml, without its model, which takes half a second to import."""
    import yaml

    text = (Path(__file__).parent / "model" / "machines.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    slices = [
        f"{tpu['prefix']}-{math.prod(map(int, topology.split('x'))) * (2 if tpu['counts'] == 'cores' else 1)}"
        for tpu in table["tpus"].values()
        for topology in tpu["slices"]
    ]
    return [*dict.fromkeys(slices), *(name.removeprefix("NVIDIA_").removeprefix("TESLA_") for name in table["gpus"])]


NEIGHBOUR = Neighbour(
    rules=_rules,
    pages=_pages,
    outdated=_outdated,
    values={"platform": _platforms, "accelerator": _accelerators},
)
