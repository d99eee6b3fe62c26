"""What benchmarks/images.py measured, for people and for the repository; and whether the targets were met."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from trainyard.spec.model import load
from trainyard.spec.units import in_units

#: The targets: times faster, bytes after an edit, part of the first image's bytes.
COLD, EDIT_BYTES, SECOND = 2.0, 200_000, 0.10


def ratio(found: dict[str, Any], target: str, step: str, key: str) -> float | None:
    """How many times as much the original recipe takes; None if one of the two was not measured."""
    try:
        ours, other = (found[f"{target}/{who}"]["steps"][step][key] for who in ("ours", "original"))
    except KeyError:
        return None
    return float(other) / max(float(ours), 0.01 if key == "seconds" else 1)


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The issue's targets, as far as they were measured: what, how much, whether it was met."""
    rows = []
    for target in ("xla", "tf-cpu"):
        cold = ratio(found, target, "cold", "seconds")
        if cold is not None:
            rows.append((f"{target}: cold build at least {COLD:g} times faster", f"{cold:.2f}", cold >= COLD))
        steps = found.get(f"{target}/ours", {}).get("steps", {})
        if "trainer edited" in steps:
            pushed = steps["trainer edited"]["pushed"]
            words = f"{target}: a trainer edit pushes under {in_units(EDIT_BYTES)}"
            rows.append((words, in_units(pushed), pushed < EDIT_BYTES))
        if "base updated" in steps:
            # What was installed again would take longer than to link: the cold build installs, and takes minutes.
            seconds, whole = steps["base updated"]["seconds"], steps["cold"]["seconds"]
            words = f"{target}: a base update reinstalls no wheel (seconds, of those of a cold build)"
            rows.append((words, f"{seconds:.0f} of {whole:.0f}", seconds < whole / 2))
        if "second target" in steps:
            share = steps["second target"]["pushed"] / steps["cold"]["pushed"]
            words = f"a second target on the same framework pushes under {100 * SECOND:g} % of the first"
            rows.append((words, f"{100 * share:.2f} %", share < SECOND))
    return rows


def shared(found: dict[str, Any]) -> dict[str, float]:
    """Side -> the part of tf-cpu's blobs, by bytes, that xla has too."""
    parts: dict[str, float] = {}
    for who in ("ours", "original"):
        try:
            one, other = (found[f"{target}/{who}"]["size"]["blobs"] for target in ("xla", "tf-cpu"))
        except KeyError:
            continue
        parts[who] = sum(size for digest, size in other.items() if digest in one)
    return parts


def tables(found: dict[str, Any]) -> list[Table]:
    """The figures, for people."""
    shown = []
    for target in ("xla", "tf-cpu"):
        sides = {who: found.get(f"{target}/{who}") for who in ("ours", "original")}
        if not any(sides.values()):
            continue
        table = Table("", "ours", "pushed", "original recipe", "pushed", title=target, title_justify="left")
        for step in ("cold", "no change", "trainer edited", "requirement added", "base updated", "second target"):
            cells = []
            for side in sides.values():
                one = (side or {}).get("steps", {}).get(step)
                cells += [f"{one['seconds']} s", in_units(one["pushed"])] if one else ["-", "-"]
            table.add_row(step, *cells)
        packed = [
            f"{in_units(side['size']['unpacked'])} ({in_units(side['size']['packed'])} packed)" if side else "-"
            for side in sides.values()
        ]
        table.add_row("size", packed[0], "", packed[1], "")
        shown.append(table)
    return shown


def markdown(found: dict[str, Any]) -> str:
    """benchmarks/results/images.md: ratios, which hold on other machines too, and what they were measured on."""
    lines = [
        "<!-- Written by `python -m benchmarks.images`. Do not edit. -->",
        "# Images against the original recipe",
        "",
        f"Measured {found['day']} on {found['machine']}. Figures are the recipe's divided by ours:",
        "above 1, ours is faster or smaller. The recipe, the steps and what is the same for both are in",
        "`benchmarks/images.py`.",
        "",
        "| step | " + " | ".join(f"{target}, time | {target}, bytes pushed" for target in ("xla", "tf-cpu")) + " |",
        "|---|" + "---|" * 4,
    ]
    for step in ("cold", "no change", "trainer edited", "requirement added", "base updated"):
        cells = [ratio(found, target, step, key) for target in ("xla", "tf-cpu") for key in ("seconds", "pushed")]
        lines.append(f"| {step} | " + " | ".join("-" if cell is None else _times(cell) for cell in cells) + " |")
    sizes = []
    for target in ("xla", "tf-cpu"):
        sides = [found.get(f"{target}/{who}", {}).get("size") for who in ("ours", "original")]
        for key in ("unpacked", "packed"):
            sizes.append(_times(sides[1][key] / sides[0][key]) if all(sides) else "-")
    lines += [
        f"| size unpacked, packed | {' | '.join(sizes)} |",
        "",
        "| target of the issue | measured | |",
        "|---|---|---|",
        *(f"| {words} | {value} | {'met' if met else 'missed'} |" for words, value, met in verdicts(found)),
        "",
    ]
    bytes_shared = shared(found)
    if bytes_shared:
        words = "; ".join(f"{who}: {in_units(size)}" for who, size in bytes_shared.items())
        lines += [f"Bytes of tf-cpu's layers that xla has too, and that are stored and pulled once: {words}.", ""]
    if "imports" in found:
        lines += ["| import in a fresh container | with byte code | without |", "|---|---|---|"]
        for target, times in found["imports"].items():
            slower = times["without"] / times["with"]
            lines.append(f"| `{load(target).framework.name}` ({target}) | 1 | {slower:.1f} times as long |")
        lines.append("")
    return "\n".join(lines)


def _times(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"
