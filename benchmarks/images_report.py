"""What benchmarks/images.py measured, for people and for the repository; and whether the targets were met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from trainyard.image import sizes
from trainyard.spec.model import load
from trainyard.spec.units import in_units

#: Times faster that a cold build is than the recipe's.
COLD = {"xla": 2.5, "tf-cpu": 2.2}

#: Bytes that an edit of a trainer pushes; bytes of a requirement's layer, as a multiple of its wheel's; seconds of an
#: import, as a multiple of those with one layer.
EDIT_BYTES, REQUIREMENT, IMPORT = 80_000, 1.1, 1.05

#: Bytes of the second target after the first, and of the whole catalogue at a registry.
SECOND, CATALOGUE = 400_000_000, 12_000_000_000

TARGETS = ("xla", "tf-cpu")
SIDES = {"ours": "ours", "one-layer": "all wheels in one layer", "original": "original recipe"}
STEPS = ("cold", "no change", "trainer edited", "wheel patched", "requirement added", "base updated")


def ratio(found: dict[str, Any], target: str, step: str, key: str) -> float | None:
    """How many times as much the original recipe takes; None if one of the two was not measured."""
    try:
        ours, other = (found[f"{target}/{who}"]["steps"][step][key] for who in ("ours", "original"))
    except KeyError:
        return None
    return float(other) / max(float(ours), 0.01 if key == "seconds" else 1)


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The targets, as far as they were measured: what, how much, whether it was met."""
    rows = list(catalogue(sizes.load()))
    for target in TARGETS:
        cold = ratio(found, target, "cold", "seconds")
        if cold is not None:
            least = COLD[target]
            rows.append((f"{target}: cold build at least {least:g} times faster", f"{cold:.2f}", cold >= least))
        edited = ratio(found, target, "trainer edited", "seconds")
        if edited is not None:
            rows.append((f"{target}: a trainer edit is built no slower", f"{edited:.2f} times as fast", edited >= 1))
        ours, one_layer = (found.get(f"{target}/{who}", {}) for who in ("ours", "one-layer"))
        steps = ours.get("steps", {})
        if "trainer edited" in steps:
            pushed = steps["trainer edited"]["pushed"]
            words = f"{target}: a trainer edit pushes at most {in_units(EDIT_BYTES)}"
            rows.append((words, in_units(pushed), pushed <= EDIT_BYTES))
        if "wheel patched" in steps:
            pushed, wheel = steps["wheel patched"]["pushed"], ours["wheel"]
            words = f"{target}: another version of a wheel of {in_units(wheel)} pushes at most the wheel"
            rows.append((words, in_units(pushed), pushed <= wheel))
        if "requirement added" in steps:
            pushed, wheel = steps["requirement added"]["pushed"], ours["requirement"]
            words = f"{target}: a requirement of {in_units(wheel)} pushes at most {REQUIREMENT:g} times the wheel"
            rows.append((words, in_units(pushed), pushed <= REQUIREMENT * wheel))
        if "base updated" in steps:
            # What was installed again would take longer than to link: the cold build installs, and takes minutes.
            seconds, whole = steps["base updated"]["seconds"], steps["cold"]["seconds"]
            words = f"{target}: a base update reinstalls no wheel (seconds, of those of a cold build)"
            rows.append((words, f"{seconds:.0f} of {whole:.0f}", seconds < whole / 2))
        if "import" in ours and "import" in one_layer:
            share = ours["import"] / one_layer["import"]
            words = f"{target}: the import takes at most {IMPORT:g} times as long as with one layer"
            rows.append((words, f"{ours['import']} s, {one_layer['import']} s: {share:.2f}", share <= IMPORT))
    return rows


def catalogue(measured: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, bool]]:
    """The targets about several images, from their last measurements: docs/sizes.json, which `make sizes` writes."""
    blobs = {
        name: {part["diff_id"]: int(part["packed"]) for part in one["layers"]}
        for name, one in measured.items()
        if any(part["name"].startswith("wheel-") for part in one["layers"])
    }
    if {"gpu", "torch-tpu"} <= blobs.keys() and measured["gpu"]["index"] == measured["torch-tpu"]["index"]:
        whole, new = sum(blobs["torch-tpu"].values()), lacking(blobs["gpu"], blobs["torch-tpu"])
        words = f"torch-tpu after gpu moves at most {in_units(SECOND)} of its {in_units(whole)}"
        yield words, in_units(new), new <= SECOND
    if {name for name in measured if name != "xla-nightly"} <= blobs.keys():
        union = {digest: size for one in blobs.values() for digest, size in one.items()}
        single = sum(sum(one.values()) for one in blobs.values())
        total = sum(union.values())
        words = f"all images at a registry ({', '.join(sorted(blobs))}; {in_units(single)} one by one) have at most "
        yield words + in_units(CATALOGUE), in_units(total), total <= CATALOGUE


def lacking(have: dict[str, int], wanted: dict[str, int]) -> int:
    """Bytes of the blobs in ``wanted`` (digest -> bytes) that are not in ``have``."""
    return sum(size for digest, size in wanted.items() if digest not in have)


def shared(found: dict[str, Any]) -> dict[str, int]:
    """Side -> the part of tf-cpu's blobs, by bytes, that xla has too."""
    parts: dict[str, int] = {}
    for who in SIDES:
        try:
            one, other = (found[f"{target}/{who}"]["size"]["blobs"] for target in TARGETS)
        except KeyError:
            continue
        parts[who] = sum(other.values()) - lacking(one, other)
    return parts


def _rows(found: dict[str, Any], target: str) -> Iterator[list[str]]:
    """One row per step: its name, then seconds and bytes pushed of each side."""
    sides = [found.get(f"{target}/{who}") or {} for who in SIDES]
    for step in STEPS:
        cells = []
        for side in sides:
            one = side.get("steps", {}).get(step)
            cells += [f"{one['seconds']} s", in_units(one["pushed"])] if one else ["-", "-"]
        yield [step, *cells]
    sizes = [side.get("size") for side in sides]
    packed = [[in_units(size["unpacked"]), in_units(size["packed"])] if size else ["-", "-"] for size in sizes]
    yield ["size unpacked, packed", *(cell for pair in packed for cell in pair)]
    yield ["import", *(cell for side in sides for cell in (f"{side['import']} s" if "import" in side else "-", ""))]


def tables(found: dict[str, Any]) -> list[Table]:
    """The figures, for people."""
    shown = []
    for target in TARGETS:
        if any(f"{target}/{who}" in found for who in SIDES):
            columns = (word for words in SIDES.values() for word in (words, "pushed"))
            table = Table("", *columns, title=target, title_justify="left")
            for row in _rows(found, target):
                table.add_row(*row)
            shown.append(table)
    return shown


def markdown(found: dict[str, Any]) -> str:
    """benchmarks/results/images.md."""
    lines = [
        "<!-- Written by `python -m benchmarks.images`. Do not edit. -->",
        "# Images against the original recipe",
        "",
        f"Measured {found['day']} on {found['machine']}. The recipe, the steps and what is the same for all sides are",
        "in `benchmarks/images.py`. Bytes are what a registry stores in addition, after the step before.",
    ]
    for target in TARGETS:
        if not any(f"{target}/{who}" in found for who in SIDES):
            continue
        heads = [word for words in SIDES.values() for word in (words, "pushed")]
        lines += ["", f"## {target}", "", f"| step | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in _rows(found, target)]
    lines += [
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(f"| {words} | {value} | {'met' if met else 'missed'} |" for words, value, met in verdicts(found)),
        "",
    ]
    bytes_shared = shared(found)
    if bytes_shared:
        words = "; ".join(f"{SIDES[who]}: {in_units(size)}" for who, size in bytes_shared.items())
        lines += [f"Bytes of tf-cpu's layers that xla has too, and that are stored and pulled once: {words}.", ""]
    if "imports" in found:
        lines += ["| import in a fresh container | with byte code | without |", "|---|---|---|"]
        for target, times in found["imports"].items():
            slower = times["without"] / times["with"]
            lines.append(f"| `{load(target).framework.name}` ({target}) | 1 | {slower:.1f} times as long |")
        lines.append("")
    return "\n".join(lines)
