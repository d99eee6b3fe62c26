"""Measure the images of this host, layer by layer: docs/sizes.json and its chart, docs/sizes.svg.

If the framework of an image came from the default index, because the index of its spec was unreachable, the image is
also given an estimate: its size without the files that only CUDA builds have. If the image was removed since, their
sizes are read from the directories of its wheels.
"""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import requests
from rich.table import Table

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import wheel_layers, wheels
from trainyard.oci import layers
from trainyard.oci.layers import Stored
from trainyard.spec import state
from trainyard.spec.model import Spec, catalogue, relative
from trainyard.spec.naming import LABELS, NAME, TAG, day_and_hash
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: The last measured sizes of the catalogue's images, and a chart of them.
FILE, CHART = ROOT / "docs" / "sizes.json", ROOT / "docs" / "sizes.svg"

#: Files that only CUDA builds of torch have: NVIDIA's packages, triton, torch's own CUDA libraries. Without them torch
#: 2.9.1 has 0.60 GB. The CPU wheel of 2.13.0 has 0.70 GB, 0.05 GB of it test programs, and its libtorch_cpu.so is
#: within 1 % of that of the CUDA build: an estimate may be 0.1 GB too low.
CUDA_ONLY = re.compile(
    r"site-packages/(?:nvidia/|nvidia_[^/]*\.dist-info/|triton/|triton-[^/]*\.dist-info/|cuda/"
    r"|torch/lib/lib(?:torch_cuda|c10_cuda|torch_nvshmem|caffe2_nvrtc|cudnn|cublas|nv)[^/]*$)"
)

#: Colours of the layers in the chart, lowest first; layers of the same name are one bar.
COLOURS = {
    "base": "#4c566a",
    "system": "#7b88a1",
    "compiler": "#8f7fb3",
    "libraries": "#a3b1cc",
    "large wheels": "#2f6fb0",
    "small wheels": "#e08e2b",
    "trainers and launcher": "#3f9b5f",
}

#: Stage whose layer changed -> reason why the image was rebuilt.
WHY = {
    "base": "base",
    "system": "system packages",
    "compiler": "compilers",
    "libraries": "system packages",
    "tools": "tools",
    "site": "environment",
    "requirements": "requirements",
    "about": "description",
    "common": "trainers",
    "trainers": "trainers",
    "own": "its own trainers",
    "launcher": "launcher",
}


def load(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Return target -> its last measurement, or raise a UserError if `make sizes` did not write the file."""
    try:
        measured: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["targets"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError) as error:
        command = "trainyard dev sizes"
        raise UserError(
            f"{relative(path)}: not what '{command}' writes ({error!r}): remove it and run '{command}'"
        ) from None
    return measured


def save(measured: dict[str, dict[str, Any]], path: Path = FILE) -> None:
    """Write the measurements."""
    path.write_text(json.dumps({"targets": measured}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def measure(spec: Spec) -> dict[str, Any] | None:
    """Return the measurement of a target's image, ``trainyard:<target>``; None if there is none on this host.

    Returns:
        ``tag``, ``digest``, ``day`` (of the commit), ``index``, ``size`` and ``packed`` in bytes, ``layers`` (``name``,
        ``diff_id``, ``size``, ``packed``); ``estimate`` in bytes if the spec names another index.
    """
    reference = f"{NAME}:{spec.local_name}"
    image = spec.context.engine.find(reference)
    if image is None:
        return None
    index = image.labels.get(f"{LABELS}.index", "default")
    day = image.labels.get("org.opencontainers.image.created", "")[:10]
    stored = layers.read(spec.context.engine, reference, spec.dockerfile(index).read_text(encoding="utf-8"))
    parts = [(layer.stage, layer.diff_id, layer.contents.size, layer.stored) for layer in stored.layers]
    only_cuda = None if index == spec.framework.index else cuda_only(stored)
    return _measurement(image.labels.get(TAG, ""), str(image.id), day, index, parts, only_cuda)


def recorded(spec: Spec) -> dict[str, Any] | None:
    """Return the measurement of an image that was removed after it had passed here, by its results; None without."""
    verified = state.last(spec.kept, "verify")
    built = state.recall(spec.kept, "build", str(verified["digest"])) if verified else None
    if not verified or not built or not verified.get("passed"):
        return None
    parts = [tuple(layer[key] for key in ("stage", "diff_id", "size", "compressed")) for layer in verified["layers"]]
    day, _ = day_and_hash(built["tag"])
    day = f"{day[:4]}-{day[4:6]}-{day[6:]}" if day else ""
    only_cuda = None if built["index"] == spec.framework.index else by_wheels(spec, built["index"])
    return _measurement(built["tag"], verified["digest"], day, built["index"], parts, only_cuda)


def _measurement(
    tag: str, digest: str, day: str, index: str, parts: Sequence[tuple[Any, ...]], only_cuda: int | None
) -> dict[str, Any]:
    """Return what :func:`measure` does.

    Args:
        parts: name, diff id, size and compressed size in bytes of each layer.
        only_cuda: bytes that only CUDA builds have, for an estimate.
    """
    sizes = {"size": sum(part[2] for part in parts), "packed": sum(part[3] for part in parts)}
    layers = [dict(zip(("name", "diff_id", "size", "packed"), part, strict=True)) for part in parts]
    measured = {"tag": tag, "digest": digest, "day": day, "index": index, **sizes, "layers": layers}
    return measured if only_cuda is None else measured | {"estimate": sizes["size"] - only_cuda}


def by_wheels(spec: Spec, index: str) -> int | None:
    """Return bytes of the files that only CUDA builds have, by the wheels of the framework's lock; None if unknown."""
    try:
        addresses = wheels.addresses(spec, index)
        with requests.Session() as session:
            return sum(
                size
                for url in addresses.values()
                for path, size in wheels.files(url, session).items()
                if CUDA_ONLY.search(f"site-packages/{path}")
            )
    except StepFailed as error:
        logger.info(f"{spec.target}: no estimate: {error}")
        return None


def compared(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return a measurement with the reason, ``why``, for which the image differs from that of the last measurement.

    If only labels differ, the image does not count as rebuilt and keeps its day.

    Args:
        before: the last measurement; empty if there is none.
    """
    if before and [part["diff_id"] for part in before["layers"]] == [part["diff_id"] for part in now["layers"]]:
        return before | {key: now[key] for key in ("estimate", "index") if key in now}
    return now | {"why": why(before.get("layers", []), now["layers"])}


def cuda_only(stored: Stored) -> int:
    """Return bytes of the files that only a CUDA build has."""
    return sum(
        file.size for layer in stored.layers for path, file in layer.contents.files.items() if CUDA_ONLY.search(path)
    )


def why(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Return the parts of an image that changed since the last measurement."""
    if not before:
        return "first measured"
    known = {part["diff_id"] for part in before}
    changed = [_reason(part["name"]) for part in after if part["diff_id"] not in known]
    gone = [_reason(part["name"]) for part in before if part["name"] not in {other["name"] for other in after}]
    return ", ".join(dict.fromkeys([*changed, *gone])) or "order of layers"


def _reason(layer: str) -> str:
    if layer.startswith(wheel_layers.SEVERAL):
        return "small wheels"
    return WHY.get(layer, layer.removeprefix(wheel_layers.ONE))


def bars(measured: dict[str, Any]) -> dict[str, int]:
    """Return bytes of each part of a bar; the small layers on top are one part."""
    sums = dict.fromkeys(COLOURS, 0)
    for part in measured["layers"]:
        sums[_part_of_bar(str(part["name"]))] += int(part["size"])
    return sums


def _part_of_bar(layer: str) -> str:
    if layer.startswith(wheel_layers.ONE):
        return "large wheels"
    if layer.startswith(wheel_layers.SEVERAL) or layer == "requirements":
        return "small wheels"
    return layer if layer in COLOURS else "trainers and launcher"


def chart(found: dict[str, dict[str, Any]], budgets: dict[str, int]) -> str:
    """Return the text of an SVG with one bar per target: its layers side by side, and a line at its budget.

    The same data give the same text.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    names = sorted(found, key=lambda name: found[name]["size"])
    with pyplot.rc_context({"svg.hashsalt": "trainyard", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(figsize=(9, 0.55 * len(names) + 1.4), layout="constrained")
        left = [0.0] * len(names)
        for part, colour in COLOURS.items():
            widths = [bars(found[name])[part] / 1e9 for name in names]
            axes.barh(names, widths, left=left, color=colour, label=part, height=0.62)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for row, name in enumerate(names):
            label = in_units(found[name]["size"])
            if "estimate" in found[name]:
                label += f" (about {in_units(found[name]['estimate'])} from the index of its spec)"
            end = max(left[row], budgets.get(name, 0) / 1e9)
            axes.annotate(label, (end, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
            if name in budgets:
                axes.vlines(budgets[name] / 1e9, row - 0.38, row + 0.38, color="#b3261e", linewidth=2)
        axes.vlines([], 0, 0, color="#b3261e", linewidth=2, label="budget")
        axes.set_xlabel("GB, uncompressed")
        axes.set_xlim(0, max(left) * 1.35)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": "make sizes"})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def table(found: dict[str, dict[str, Any]], specs: Iterable[Spec]) -> Table:
    """Return the measurements for people."""
    shown = Table("target", "size", "compressed", "budget", "estimate", "index", "rebuilt", "why")
    for spec in specs:
        one = found.get(spec.target)
        budget = in_units(spec.budget.size)
        if one is None:
            shown.add_row(spec.target, "-", "-", budget, "", "", "", "never measured", style="dim")
            continue
        estimate = in_units(one["estimate"]) if "estimate" in one else ""
        within = one.get("estimate", one["size"]) <= spec.budget.size
        cells = [in_units(one["size"]), in_units(one["packed"]), budget, estimate, one["index"], one["day"], one["why"]]
        shown.add_row(spec.target, *cells, style=None if within else "bold red")
    return shown


def update(chosen: list[Spec]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Measure the images of ``chosen`` and write docs/sizes.json and its chart.

    Returns:
        The targets that were measured, and all measurements by target: those without an image here keep theirs.
    Raises:
        UserError: none of them has an image on this host.
    """
    everything = load()
    done = []
    for spec in chosen:
        if measured := measure(spec) or recorded(spec):
            everything[spec.target] = compared(everything.get(spec.target, {}), measured)
            done.append(spec.target)
        else:
            logger.info(f"{spec.target}: no image on this host: its last measurement stays")
    if not done:
        raise UserError("no target has an image on this host: run 'trainyard dev images' or 'trainyard image ...'")
    budgets = {spec.target: spec.budget.size for spec in catalogue()}
    everything = {name: everything[name] for name in sorted(everything) if name in budgets}
    text = chart(everything, budgets)
    save(everything)
    CHART.write_text(text, encoding="utf-8")
    return done, everything
