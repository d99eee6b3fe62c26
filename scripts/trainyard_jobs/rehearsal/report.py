"""report.json and report.png of a rehearsal: attempts and restarts of each replica, and training curves."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard.common.errors import UserError
from trainyard.common.installation import require_extra
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.rehearsal.runner import Attempt, Member, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

#: End of an attempt -> colour of its bar in the time line.
_BARS = {
    "exit": "#2a9d8f",
    "stopped": "#8ab0ab",
    "preempted": "#f4a261",
    "killed": "#e76f51",
    "memory": "#c1121f",
    "timeout": "#c1121f",
    "failed": "#c1121f",
}

#: Height of the label of a fault, in rows of replicas.
_FAULT_ROW = 0.6


def of_run(rehearsal: Rehearsal, outcome: Outcome) -> dict[str, Any]:
    """The report of one job, or of one trial.

    Times are in seconds since the start, accuracies in percent, rates in images per second of all devices.
    """
    progress = outcome.progress
    return {
        "platform": rehearsal.platform,
        "name": rehearsal.name,
        "status": "succeeded" if outcome.succeeded else "failed",
        "why": outcome.why,
        "advice": outcome.advice,
        "seconds": round(outcome.seconds, 1),
        "accuracy": progress.accuracy,
        "images_per_second": progress.rate,
        "resumed_from": progress.resumed_from,
        "restarts": outcome.job_restarts,
        "faults": [
            {"action": fault.action, "targets": list(fault.targets), "when": fault.when, "at": round(at, 1)}
            for fault, at in outcome.injected
        ],
        "replicas": [_member(one) for one in outcome.members],
        "curves": {"loss": progress.losses, "rate": progress.rates, "accuracy": progress.accuracies},
        "summary": progress.summary,
        "notes": list(rehearsal.notes),
    }


def _member(member: Member) -> dict[str, Any]:
    replica = member.replica
    return {
        "name": replica.name,
        "role": replica.role,
        "hostname": replica.hostname,
        "image": replica.image,
        "status": member.status,
        "restarts": len(member.attempts) - 1,
        "attempts": [asdict(one) for one in member.attempts],
        "last_line": member.last_line,
    }


def of_tuning(
    runs: Sequence[tuple[Trial, dict[str, Any], float | None]], metric: str, maximize: bool, seconds: float
) -> dict[str, Any]:
    """The report of a tuning job: each trial's report with its parameters and measurement, and the best trial."""
    trials = [
        {"trial": trial.number, "parameters": dict(trial.parameters), "metric": value, **report}
        for trial, report, value in runs
    ]
    measured = [(value, trial.number) for trial, _, value in runs if value is not None]
    best = (max if maximize else min)(measured, default=None)
    return {
        "metric": metric,
        "goal": "MAXIMIZE" if maximize else "MINIMIZE",
        "best": {"trial": best[1], "metric": best[0]} if best else None,
        "seconds": round(seconds, 1),
        "trials": trials,
    }


def write(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Write report.json and, if matplotlib is installed, report.png into ``folder``, and return their names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    try:
        require_extra("matplotlib", "plots", "rehearse")
    except UserError as error:
        logger.warning(f"no report.png: {error}")
        (folder / "report.png").unlink(missing_ok=True)  # of an earlier rehearsal
        return ["report.json"]
    chart(report).savefig(folder / "report.png", dpi=110)
    return ["report.json", "report.png"]


def chart(report: Mapping[str, Any]) -> Figure:
    """The report as a chart: replicas and training curves of a job, or the trials of a tuning job.

    Requires matplotlib.
    """
    from matplotlib.figure import Figure

    if "trials" in report:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        _draw_trials(figure.subplots(), report)
        return figure
    rows = len(report["replicas"]) + _FAULT_ROW * len(report["faults"])
    figure = Figure(figsize=(9, 4 + 0.32 * rows), layout="constrained")
    lanes, curves = figure.subplots(2, 1, height_ratios=[0.6 + 0.32 * rows, 3], sharex=True)
    _draw_lanes(lanes, report)
    _draw_curves(curves, report)
    figure.legend(*lanes.get_legend_handles_labels(), loc="outside lower left", fontsize=7, ncols=7, frameon=False)
    return figure


def _draw_lanes(axes: Any, report: Mapping[str, Any]) -> None:
    """A bar for each attempt of each replica, and a line with a label for each injected fault.

    Each label has a separate row above the replicas, so that none covers another.
    """
    seen: dict[str, None] = {}
    for row, replica in enumerate(report["replicas"]):
        for number, one in enumerate(replica["attempts"]):
            attempt = Attempt(**one)
            ended = report["seconds"] if attempt.ended is None else attempt.ended
            kind = attempt.cause or "exit"
            if kind == "exit" and attempt.status:  # such as 143: stopped by a signal from its group
                kind = "stopped" if attempt.status >= 128 else "failed"
            axes.barh(
                row, max(0.05, ended - attempt.started), left=attempt.started, height=0.6, color=_BARS[kind],
                edgecolor="white", label=None if kind in seen else kind,
            )  # fmt: skip
            seen[kind] = None
            axes.text(attempt.started, row, f" {number + 1}", va="center", fontsize=7, color="white")
    for row, fault in enumerate(reversed(report["faults"])):
        axes.axvline(fault["at"], color="black", linestyle=":", linewidth=1)
        label = f" {fault['action']} {', '.join(fault['targets'])} "
        left = fault["at"] < report["seconds"] / 2
        y = -0.5 - _FAULT_ROW * (row + 0.5)
        axes.text(fault["at"], y, label, fontsize=7, ha="left" if left else "right", va="center")
    axes.set_yticks(range(len(report["replicas"])), [one["name"] for one in report["replicas"]], fontsize=8)
    axes.set_ylim(len(report["replicas"]) - 0.5, -0.5 - _FAULT_ROW * len(report["faults"]))
    axes.set_title(f"{report['platform']} {report['name']}: {report['status']}", fontsize=10, loc="left", wrap=True)


def _draw_curves(axes: Any, report: Mapping[str, Any]) -> None:
    curves = report["curves"]
    axes.set_xlabel("seconds")
    axes.set_ylabel("training loss", color="tab:blue")
    axes.plot([x for x, _ in curves["loss"]], [y for _, y in curves["loss"]], "o-", color="tab:blue", markersize=3)
    other = axes.twinx()
    other.set_ylabel("test accuracy, %", color="tab:red")
    other.plot([x for x, *_ in curves["accuracy"]], [y[-1] for y in curves["accuracy"]], "s-", color="tab:red")
    if not any(curves.values()):
        axes.text(0.5, 0.5, "no training lines in the logs", transform=axes.transAxes, ha="center", color="grey")


def _draw_trials(axes: Any, report: Mapping[str, Any]) -> None:
    points = [(one["trial"], one["metric"]) for one in report["trials"] if one["metric"] is not None]
    best = report["best"]["trial"] if report["best"] else None
    axes.bar(
        [x for x, _ in points], [y for _, y in points], color=["#f4a261" if x == best else "#2a9d8f" for x, _ in points]
    )
    for one in report["trials"]:
        words = "\n".join(f"{name}={value[:8]}" for name, value in one["parameters"].items())
        axes.text(one["trial"], 0, words + "\n", ha="center", va="bottom", fontsize=7)
    axes.set_xticks([one["trial"] for one in report["trials"]])
    axes.set_xlabel("trial")
    axes.set_ylabel(report["metric"])
    axes.set_title(f"{report['goal'].lower()} {report['metric']}: best is trial {best}", fontsize=10, loc="left")
