"""Measure the images of this host, layer by layer, into docs/sizes.json and its chart, docs/sizes.svg.

    make sizes                  every target that has an image here; of others the last measurement stays
    make sizes TARGET=tf-cpu    one

Both are committed, with docs/images.md, which shows them. An image whose framework came from the default index, because
the one of its spec was out of reach, is shown as it is and with an estimate: the same without the files that only CUDA
builds have. Of an image that is gone, those are looked up in the directories of its wheels.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import docker.errors
import requests
from rich.table import Table

from scripts import cli, engine, images_page, locks, measured, render, state, wheels
from scripts.cli import ROOT, StepFailed, UserError, log, say
from scripts.plan import LABELS, NAME
from scripts.spec import Spec, load, relative, targets
from scripts.stored import layers
from scripts.stored.layers import Stored
from scripts.units import in_units

CHART = ROOT / "docs" / "sizes.svg"

#: What a CUDA build of torch brings and a CPU build does not: NVIDIA's packages, triton, torch's own CUDA libraries.
#: What remains of torch 2.9.1 is 0.60 GB. The CPU wheel of 2.13.0 holds 0.70 GB, of which 0.05 are test programs, and
#: its libtorch_cpu.so is within 1 % of the CUDA build's: an estimate may be 0.1 GB too low.
CUDA_ONLY = re.compile(
    r"site-packages/(?:nvidia/|nvidia_[^/]*\.dist-info/|triton/|triton-[^/]*\.dist-info/|cuda/"
    r"|torch/lib/lib(?:torch_cuda|c10_cuda|torch_nvshmem|caffe2_nvrtc|cudnn|cublas|nv)[^/]*$)"
)

#: How layers are drawn, bottom first; several layers of a name are one bar.
COLOURS = {
    "base": "#4c566a",
    "system": "#7b88a1",
    "libraries": "#a3b1cc",
    "framework": "#2f6fb0",
    "requirements": "#e08e2b",
    "trainers and launcher": "#3f9b5f",
}

#: A stage whose layer changed -> why the image was rebuilt.
WHY = {
    "base": "base",
    "system": "system packages",
    "libraries": "system packages",
    "tools": "tools",
    "framework": "framework",
    "requirements": "requirements",
    "about": "description",
    "common": "trainers",
    "trainers": "trainers",
    "own": "its own trainers",
    "launcher": "launcher",
}


def measure(spec: Spec) -> dict[str, Any] | None:
    """What is to be known of a target's image, ``trainyard:<target>``; None if there is none here.

    Returns:
        ``tag``, ``digest``, ``day`` (of the commit), ``index``, ``size`` and ``packed`` in bytes, ``layers`` (``name``,
        ``diff_id``, ``size``, ``packed``); ``estimate`` in bytes where another index was meant.
    """
    reference = f"{NAME}:{spec.target}"
    try:
        image = engine.client().images.get(reference)
    except docker.errors.ImageNotFound:
        return None
    stored = layers.read(reference, (spec.folder / "Dockerfile").read_text(encoding="utf-8"))
    labels = image.labels
    parts: list[dict[str, Any]] = [
        {"name": layer.stage, "diff_id": layer.diff_id, "size": layer.contents.size, "packed": layer.stored}
        for layer in stored.layers
    ]
    found: dict[str, Any] = {
        "tag": labels.get("org.opencontainers.image.version", ""),
        "digest": str(image.id),
        "day": labels.get("org.opencontainers.image.created", "")[:10],
        "index": labels.get(f"{LABELS}.index", "default"),
        **_sums(parts),
    }
    if found["index"] != spec.framework.index:
        found["estimate"] = int(found["size"]) - cuda_only(stored)
    return found


def remembered(spec: Spec) -> dict[str, Any] | None:
    """The same of an image that passed here and was removed since, estimated by its wheels; None if none did."""
    verified = state.last(spec.target, "verify")
    built = state.recall(spec.target, "build", str(verified["digest"])) if verified else None
    if not verified or not built or not verified.get("passed"):
        return None
    parts = [
        {"name": layer["stage"], "diff_id": layer["diff_id"], "size": layer["size"], "packed": layer["compressed"]}
        for layer in verified["layers"]
    ]
    day = re.search(r"-(\d{4})(\d\d)(\d\d)-[0-9a-f]{8}$", str(built["tag"]))
    found: dict[str, Any] = {
        "tag": built["tag"],
        "digest": verified["digest"],
        "day": "-".join(day.groups()) if day else "",
        "index": built["index"],
        **_sums(parts),
    }
    only_cuda = None if built["index"] == spec.framework.index else by_wheels(spec, str(built["index"]))
    return found if only_cuda is None else found | {"estimate": int(found["size"]) - only_cuda}


def by_wheels(spec: Spec, index: str) -> int | None:
    """Bytes of the files that only CUDA builds have, by the wheels of the framework's lock; None without an answer."""
    try:
        found = wheels.addresses(locks.framework_lock(spec, index), spec.base_spec())
        with requests.Session() as session:
            return sum(
                size
                for url in found.values()
                for path, size in wheels.files(url, session).items()
                if CUDA_ONLY.search(f"site-packages/{path}")
            )
    except StepFailed as error:
        say(f"{spec.target}: no estimate: {error}")
        return None


def _sums(parts: list[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(int(part[key]) for part in parts) for key in ("size", "packed")}
    return {**sums, "layers": parts}


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A measurement with ``why`` the image is another one than at the last, ``before`` (empty if there is none).

    Labels alone make another digest: that is no reason to call an image rebuilt, so it keeps its day.
    """
    if before and [part["diff_id"] for part in before["layers"]] == [part["diff_id"] for part in now["layers"]]:
        return before | {key: now[key] for key in ("estimate", "index") if key in now}
    return now | {"why": why(before.get("layers", []), now["layers"])}


def cuda_only(stored: Stored) -> int:
    """Bytes of the files that only a CUDA build has."""
    return sum(
        file.size for layer in stored.layers for path, file in layer.contents.files.items() if CUDA_ONLY.search(path)
    )


def why(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Why an image is another one than at the last measurement: the parts of it that changed."""
    if not before:
        return "first measured"
    known = {part["diff_id"] for part in before}
    changed = [WHY.get(part["name"], part["name"]) for part in after if part["diff_id"] not in known]
    gone = [
        WHY.get(part["name"], part["name"]) for part in before if part["name"] not in {one["name"] for one in after}
    ]
    return ", ".join(dict.fromkeys([*changed, *gone])) or "order of layers"


def bars(measured: dict[str, Any]) -> dict[str, int]:
    """Bytes by what is drawn: the light layers on top are one."""
    found = dict.fromkeys(COLOURS, 0)
    for part in measured["layers"]:
        found[part["name"] if part["name"] in COLOURS else "trainers and launcher"] += int(part["size"])
    return found


def chart(found: dict[str, dict[str, Any]], budgets: dict[str, int]) -> str:
    """The text of an SVG: a bar a target, its layers side by side, its budget a line across; by the data alone."""
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
            left = [one + width for one, width in zip(left, widths, strict=True)]
        for row, name in enumerate(names):
            label = in_units(found[name]["size"])
            if "estimate" in found[name]:
                label += f" (about {in_units(found[name]['estimate'])} from its own index)"
            beside = max(left[row], budgets.get(name, 0) / 1e9)
            axes.annotate(label, (beside, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
            if name in budgets:
                axes.vlines(budgets[name] / 1e9, row - 0.38, row + 0.38, color="#b3261e", linewidth=2)
        axes.vlines([], 0, 0, color="#b3261e", linewidth=2, label="budget")
        axes.set_xlabel("GB unpacked")
        axes.set_xlim(0, max(left) * 1.35)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="lower right", frameon=False, fontsize=9)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": "make sizes"})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def table(found: dict[str, dict[str, Any]], specs: Iterable[Spec]) -> Table:
    """The measurements, for people."""
    shown = Table("target", "size", "packed", "budget", "estimate", "index", "rebuilt", "why")
    for spec in specs:
        one = found.get(spec.target)
        budget = in_units(spec.budget.size)
        if one is None:
            shown.add_row(spec.target, "-", "-", budget, "", "", "", "never measured", style="dim")
            continue
        estimate = in_units(one["estimate"]) if "estimate" in one else ""
        held = one.get("estimate", one["size"]) <= spec.budget.size
        cells = [in_units(one["size"]), in_units(one["packed"]), budget, estimate, one["index"], one["day"], one["why"]]
        shown.add_row(spec.target, *cells, style=None if held else "bold red")
    return shown


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    chosen = [load(options.target)] if options.target else [load(name) for name in targets()]
    everything = measured.load()
    done = []
    for spec in chosen:
        found = measure(spec) or remembered(spec)
        if found is None:
            say(f"{spec.target}: no image here: its last measurement stays")
            continue
        everything[spec.target] = since(everything.get(spec.target, {}), found)
        done.append(spec.target)
    if not done:
        raise UserError("no target has an image here: run 'make images' or 'make image TARGET=...'")
    specs = [load(name) for name in targets()]
    everything = {name: everything[name] for name in sorted(everything) if name in targets()}
    measured.save(everything)
    CHART.write_text(chart(everything, {spec.target: spec.budget.size for spec in specs}), encoding="utf-8")
    images_page.PAGE.write_text(render.rendered()[images_page.PAGE], encoding="utf-8")
    log.print(table(everything, specs))
    written = ", ".join(relative(path) for path in (measured.FILE, CHART, images_page.PAGE))
    say(f"wrote {written}: look at the difference and commit")
    cli.result({"measured": done, "targets": everything}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
