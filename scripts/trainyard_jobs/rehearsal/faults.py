"""Failures that the user requests: which replica, how, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainyard.common.errors import UserError, nearest
from trainyard_jobs.rehearsal.model import Replica
from trainyard_jobs.rehearsal.progress import Progress

_SYNTAX = re.compile(r"(?P<name>[^@\s]+?)(?:@(?P<when>.+))?")
_WHEN = re.compile(r"(?:epoch(?P<epoch>\d+):?)?(?:step(?P<step>\d+))?|(?P<seconds>\d+(?:\.\d+)?)s|/(?P<text>.+)/")

#: SIGTERM, the platform's grace period, SIGKILL; or SIGKILL alone, as in a machine failure.
Action = Literal["preempt", "kill"]


@dataclass(frozen=True)
class Fault:
    """A failure that is injected once.

    Attributes:
        targets: names of the replicas; all hosts of a TPU slice, which is preempted as a whole.
        when: the moment as the user wrote it.
    """

    action: Action
    targets: tuple[str, ...]
    when: str
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    text: str = ""

    def due(self, progress: Progress, seconds: float) -> bool:
        """Whether to inject it now, ``seconds`` after the job's start."""
        if self.text:
            return self.text in progress.matched
        if self.seconds:
            return seconds >= self.seconds
        return progress.reached(self.epoch, self.step)

    def __str__(self) -> str:
        return f"{self.action} {', '.join(self.targets)}{f' at {self.when}' if self.when else ''}"


def parse(action: Action, text: str, replicas: Sequence[Replica]) -> list[Fault]:
    """Return the faults of ``--preempt worker-1@step20,worker-0@40s`` or ``--kill master``.

    A moment is ``stepN``, ``epochN`` or ``epochN:stepN`` as the log counts them, ``Ns`` after the start, or ``/text/``
    in the log (a regular expression); the first step if left out.

    Raises:
        UserError: the replica or the moment is invalid; the message lists the valid ones.
    """
    faults = []
    for word in filter(None, (word.strip() for word in re.split(r",(?![^/]*/(?:,|$))", text))):
        match = _SYNTAX.fullmatch(word)
        if match is None:
            raise UserError(f"'--{action} {word}': write REPLICA or REPLICA@WHEN, separated by commas")
        name, when = match["name"], match["when"] or ""
        moment = _WHEN.fullmatch(when)
        if moment is None:
            raise UserError(
                f"'--{action} {word}': {when!r} is not a moment: write step20, epoch2, epoch2:step5, 30s or /text/"
            )
        replica = _named(action, word, name, replicas)
        hosts_of_slice = [one.name for one in replicas if replica.slice and one.slice == replica.slice]
        faults.append(
            Fault(
                action,
                tuple(hosts_of_slice) if hosts_of_slice and action == "preempt" else (replica.name,),
                when,
                epoch=int(moment["epoch"] or 0),
                step=int(moment["step"] or 0),
                seconds=float(moment["seconds"] or 0),
                text=moment["text"] or "",
            )
        )
    return faults


def _named(action: Action, word: str, name: str, replicas: Sequence[Replica]) -> Replica:
    """The replica of a name, host name or ordinal; "master" and "chief" are the first."""
    for one in replicas:
        if name in (one.name, one.hostname, str(one.ordinal), *one.aliases):
            return one
    if name in ("master", "chief"):
        return replicas[0]
    known = [one.name for one in replicas]
    raise UserError(f"'--{action} {word}': no replica '{name}'{nearest(name, known)}; replicas: {', '.join(known)}")
