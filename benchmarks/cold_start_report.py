"""From what benchmarks/cold_start.py observes to phases, figures, targets and tables."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainyard.spec.units import in_units

#: The target: how many times longer the original recipe's image takes than ours.
TIMES = 1.8

#: Side -> what it is, in the order of the tables.
SIDES = {"ours": "ours", "single": "ours, one layer of wheels", "original": "original recipe"}

#: The phases of a round, one after the other: together they are the whole time.
PHASES = {
    "download": "download: until the last layer is complete",
    "unpack": "unpack: until the image is, after the download",
    "start": "start: until the container runs",
    "launch": "launch: until the first import of the framework",
    "import": "import of the framework",
    "step": "first step: all else until it is logged",
}

#: Bytes between two readings from which a link is in use: requests and acknowledgements are less.
_IN_USE = 10_000

#: Bytes of a layer, packed, from which the tables show it.
_SHOWN = 5_000_000

#: A line of containerd's log at level debug, and the parts of a duration as Go prints it:
#: https://github.com/containerd/containerd/blob/v1.7.24/diff/apply/apply.go
_APPLIED = re.compile(r'time="[^"]+" level=debug msg="diff applied" d="?([^ "]+)"? digest="(sha256:[0-9a-f]{64})"')
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|µs|ms|s|m|h)")
_UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

#: Lines that benchmarks/import_times.py prints.
_IMPORT = re.compile(r"cold-start import (\S+) ([\d.]+) ([\d.]+)")

Reading = tuple[float, int, int, int]


@dataclass
class Observed:
    """What was seen of a round; times are in seconds since 1970.

    Attributes:
        begun: when `docker run` was started.
        pulled: when it reported that the image was pulled.
        started: when the container's first process started, as the engine reports it.
        imports: name, begin and end of each import of a package of the framework.
        logged: when the line of the first step arrived.
        ready: digest of a layer's blob -> when it was complete.
        unpacked: digest of a layer's blob -> seconds that unpacking it took.
        readings: see ``benchmarks.cold_start_engine.Meter``.
        others: the part of the processors, from 0 to 1, that other processes used just before.
    """

    begun: float
    pulled: float = 0.0
    started: float = 0.0
    imports: list[tuple[str, float, float]] = field(default_factory=list)
    logged: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    unpacked: dict[str, float] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    others: float = 0.0


def seconds(duration: str) -> float:
    """Seconds of a duration as Go prints it: ``1m2.5s``, ``589.983117ms``, ``470.892µs``.

    Raises:
        ValueError: it is none.
    """
    parts = _PART.findall(duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is not a duration")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def unpacked(log: str) -> dict[str, float]:
    """Digest of a layer's blob -> seconds that unpacking it took, from the engine's log."""
    return {digest: seconds(duration) for duration, digest in _APPLIED.findall(log)}


def read_import(line: str) -> tuple[str, float, float] | None:
    """Package, begin and end, in seconds since 1970, of a line of benchmarks/import_times.py; None for other lines."""
    found = _IMPORT.search(line)
    return (found[1], float(found[2]), float(found[3])) if found else None


def import_seconds(imports: Iterable[tuple[str, float, float]]) -> float:
    """Seconds in which a package was being imported, counted once where one imports the other."""
    total, covered = 0.0, 0.0
    for _, begin, end in sorted(imports, key=lambda one: one[1]):
        total += max(0.0, end - max(begin, covered))
        covered = max(covered, end)
    return total


def phases(seen: Observed) -> dict[str, float]:
    """Seconds of each of :data:`PHASES`."""
    downloaded = min(max(seen.ready.values()), seen.pulled)
    importing, first = import_seconds(seen.imports), min(begin for _, begin, _ in seen.imports)
    return {
        "download": downloaded - seen.begun,
        "unpack": seen.pulled - downloaded,
        "start": seen.started - seen.pulled,
        "launch": first - seen.started,
        "import": importing,
        "step": seen.logged - first - importing,
    }


def network(readings: Sequence[Reading], until: float) -> dict[str, float]:
    """``bytes`` that the link carried until then, and ``seconds`` from the first to the last of them."""
    before = [one for one in readings if one[0] <= until]
    used = [(earlier[0], later[0]) for earlier, later in itertools.pairwise(before) if later[1] - earlier[1] > _IN_USE]
    length = used[-1][1] - used[0][0] if used else 0.0
    return {"bytes": before[-1][1] - before[0][1], "seconds": length}


def busy(readings: Sequence[Reading], begin: float, end: float) -> float:
    """The part of the processors' time, from 0 to 1, that was not idle: of all processes, with waiting for a disk."""
    within = [one for one in readings if begin <= one[0] <= end]
    if len(within) < 2 or within[-1][3] == within[0][3]:
        return 0.0
    return 1 - (within[-1][2] - within[0][2]) / (within[-1][3] - within[0][3])


def round_of(seen: Observed) -> dict[str, Any]:
    """The figures of a round, for JSON; seconds and bytes."""
    return {
        "seconds": round(seen.logged - seen.begun, 3),
        "phases": {name: round(value, 3) for name, value in phases(seen).items()},
        "network": {name: round(value, 3) for name, value in network(seen.readings, seen.pulled).items()},
        "layers": {
            digest: {"ready": round(ready - seen.begun, 3), "unpack": round(seen.unpacked[digest], 3)}
            for digest, ready in seen.ready.items()
        },
        "busy": {
            "pull": round(busy(seen.readings, seen.begun, seen.pulled), 2),
            "run": round(busy(seen.readings, seen.pulled, seen.logged), 2),
        },
        "others": round(seen.others, 2),
    }


def in_parallel(one: dict[str, Any]) -> float:
    """An estimate: seconds of a round if each layer were unpacked when it is complete, on a separate processor."""
    pulled = one["phases"]["download"] + one["phases"]["unpack"]
    last = max(layer["ready"] + layer["unpack"] for layer in one["layers"].values())
    return float(one["seconds"] - max(0.0, pulled - last))


def median(rounds: Sequence[dict[str, Any]], *keys: str) -> float:
    """The median over rounds of a figure, found by its keys."""
    values = []
    for one in rounds:
        value: Any = one
        for key in keys:
            value = value[key]
        values.append(float(value))
    return statistics.median(values)


def verdicts(found: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """The targets, as far as they were measured: what, how much, whether it was met."""
    rows = []
    for target, one in found["targets"].items():
        sides = one["sides"]
        if "ours" in sides and "original" in sides:
            ratio = median(sides["original"]["rounds"], "seconds") / median(sides["ours"]["rounds"], "seconds")
            words = f"{target}: at least {TIMES:g} times faster than the original recipe"
            rows.append((words, f"{ratio:.2f}", ratio >= TIMES))
    return rows


def rows(one: dict[str, Any]) -> list[list[str]]:
    """The table of a target: a figure, and its value for each side."""
    sides = {name: one["sides"][name] for name in SIDES if name in one["sides"]}
    rounds = {name: side["rounds"] for name, side in sides.items()}

    def row(words: str, values: Iterable[str]) -> list[str]:
        return [words, *values]

    def medians(*keys: str) -> list[str]:
        return [f"{median(found, *keys):.2f} s" for found in rounds.values()]

    def sums(key: str) -> list[str]:
        return [in_units(sum(layer[key] for layer in side["layers"].values())) for side in sides.values()]

    def unpacking(combine: Any) -> list[str]:
        each = [[combine(layer["unpack"] for layer in one["layers"].values()) for one in found]
                for found in rounds.values()]  # fmt: skip
        return [f"{statistics.median(values):.2f} s" for values in each]

    totals = [median(found, "seconds") for found in rounds.values()]
    ours = median(rounds["ours"], "seconds") if "ours" in rounds else None
    return [
        row("**to the first step that is logged**", (f"**{total:.2f} s**" for total in totals)),
        row("all rounds", (", ".join(f"{one['seconds']:.2f}" for one in found) for found in rounds.values())),
        row("times as long as ours", (f"{total / ours:.2f}" if ours else "-" for total in totals)),
        *(row(words, medians("phases", phase)) for phase, words in PHASES.items()),
        row("layers", (str(len(side["layers"])) for side in sides.values())),
        row("bytes packed", sums("packed")),
        row("bytes unpacked", sums("unpacked")),
        row("bytes over the link", (in_units(median(found, "network", "bytes")) for found in rounds.values())),
        row("seconds on the link", medians("network", "seconds")),
        row("unpacking, sum of all layers", unpacking(sum)),
        row("unpacking, longest layer", unpacking(max)),
        row(
            "used by others before",
            (", ".join(f"{100 * one['others']:.0f} %" for one in found) for found in rounds.values()),
        ),
        row("processors at work, pull", (f"{100 * median(found, 'busy', 'pull'):.0f} %" for found in rounds.values())),
        row("processors at work, run", (f"{100 * median(found, 'busy', 'run'):.0f} %" for found in rounds.values())),
        row(
            "*estimate: layers unpacked in parallel*",
            (f"*{statistics.median(map(in_parallel, found)):.2f} s*" for found in rounds.values()),
        ),
    ]


def layer_rows(side: dict[str, Any]) -> list[list[str]]:
    """The table of a side's layers, lowest first: what, packed, unpacked, when complete, seconds of unpacking."""
    shown: list[list[str]] = []
    others: list[tuple[int, int, float]] = []
    for digest, layer in side["layers"].items():
        ready = median([one["layers"][digest] for one in side["rounds"]], "ready")
        spent = median([one["layers"][digest] for one in side["rounds"]], "unpack")
        if layer["packed"] < _SHOWN:
            others.append((layer["packed"], layer["unpacked"], spent))
            continue
        sizes = in_units(layer["packed"]), in_units(layer["unpacked"])
        shown.append([layer["name"], *sizes, f"{ready:.2f} s", f"{spent:.2f} s"])
    if others:
        packed, size, spent = (sum(values) for values in zip(*others, strict=True))
        words = f"{len(others)} smaller layer{'s' if len(others) > 1 else ''}"
        shown.append([words, in_units(packed), in_units(size), "", f"{spent:.2f} s"])
    return shown


def longest(side: dict[str, Any]) -> str:
    """What a side spends its time on, in words."""
    total = median(side["rounds"], "seconds")
    parts = sorted(((median(side["rounds"], "phases", name), name) for name in PHASES), reverse=True)
    link = median(side["rounds"], "network", "seconds")
    words = ", ".join(f"{name} {100 * value / total:.0f} %" for value, name in parts[:3])
    return f"{words}; the link was in use for {100 * link / total:.0f} % of the time"


def document(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "<!-- Written by `python -m benchmarks.cold_start --save`. Do not edit. -->",
        "# From an empty store to the first training step",
        "",
        "Seconds from `docker run` on an engine with an empty store to the first step of `mnist --fake-data` in its",
        "output. The registry is on the same machine, behind a link that is limited to 1 Gbit/s. Figures are medians",
        "of alternating rounds; `benchmarks/cold_start.py` says what the sides and the phases are.",
        "",
        "| target | measured | |",
        "|---|---|---|",
        *(f"| {words} | {value} | {'met' if met else 'MISSED'} |" for words, value, met in verdicts(found)),
        "",
    ]
    for target, one in found["targets"].items():
        sides = [name for name in SIDES if name in one["sides"]]
        on = ", ".join(f"{key} {value}" for key, value in one["machine"].items())
        lines += [
            f"## {target}",
            "",
            f"Measured with `{one['command']}` on {on}. The link carried {one['link'] / 1e9:.2f} Gbit/s.",
            "",
            f"| {target} | " + " | ".join(SIDES[name] for name in sides) + " |",
            "|---" * (len(sides) + 1) + "|",
            *("| " + " | ".join(row) + " |" for row in rows(one)),
            "",
            "Medians of phases need not add up to the median of all. The last row is no result: containerd 1.7",
            "unpacks one layer after the other, containerd 2.2 several at a time. It assumes that each layer is",
            "unpacked as soon as it is complete, as fast as it was here, alone: the longest layer then, not the sum.",
            "",
            *(f"- {SIDES[name]}: {longest(one['sides'][name])}." for name in sides),
            "",
        ]
        for name in sides:
            lines += [
                f"| layers, {SIDES[name]} | packed | unpacked | complete after | unpacking |",
                "|---|---|---|---|---|",
                *("| " + " | ".join(row) + " |" for row in layer_rows(one["sides"][name])),
                "",
            ]
    return "\n".join(lines)
