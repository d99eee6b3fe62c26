"""What the user asked to go wrong: which replica, how, and when."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.cli import UserError, nearest
from scripts.rehearsal.model import Replica
from scripts.rehearsal.progress import Progress

_FORM = re.compile(r"(?P<name>[^@\s]+?)(?:@(?P<when>.+))?")
_WHEN = re.compile(r"(?:epoch(?P<epoch>\d+):?)?(?:step(?P<step>\d+))?|(?P<seconds>\d+(?:\.\d+)?)s|/(?P<text>.+)/")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        action: "preempt" (SIGTERM, the platform's grace, SIGKILL) or "kill" (SIGKILL, as when a machine dies).
        targets: names of the replicas it hits: all hosts of a TPU slice, which come and go together.
        when: in the user's words.
    """

    action: str
    targets: tuple[str, ...]
    when: str
    epoch: int = 0
    step: int = 0
    seconds: float = 0.0
    text: str = ""

    def due(self, progress: Progress, seconds: float) -> bool:
        """Whether it is time, ``seconds`` after the job's start."""
        if self.text:
            return self.text in progress.matched
        if self.seconds:
            return seconds >= self.seconds
        return progress.reached(self.epoch, self.step)

    def __str__(self) -> str:
        return f"{self.action} {', '.join(self.targets)}{f' at {self.when}' if self.when else ''}"


def parse(variable: str, text: str, replicas: Sequence[Replica]) -> list[Fault]:
    """The faults of ``PREEMPT=worker-1@step20,worker-0@40s`` or ``KILL=master``.

    A moment is ``stepN`` or ``epochN`` or ``epochN:stepN`` as the log counts them, ``Ns`` after the start, or
    ``/text/`` in the log (a regular expression); without one it is when training has begun.

    Raises:
        UserError: no such replica, or no such moment; the valid ones are named.
    """
    action = variable.lower()
    faults = []
    for word in filter(None, (word.strip() for word in re.split(r",(?![^/]*/(?:,|$))", text))):
        match = _FORM.fullmatch(word)
        assert match  # any text has the form of a name
        name, when = match["name"], match["when"] or ""
        moment = _WHEN.fullmatch(when)
        if moment is None:
            raise UserError(
                f"{variable}={word}: {when!r} is no moment: write step20, epoch2, epoch2:step5, 30s or /text/"
            )
        replica = _named(variable, word, name, replicas)
        together = [one.name for one in replicas if replica.slice and one.slice == replica.slice]
        faults.append(
            Fault(
                action,
                tuple(together) if together and action == "preempt" else (replica.name,),
                when,
                epoch=int(moment["epoch"] or 0),
                step=int(moment["step"] or 0),
                seconds=float(moment["seconds"] or 0),
                text=moment["text"] or "",
            )
        )
    return faults


def _named(variable: str, word: str, name: str, replicas: Sequence[Replica]) -> Replica:
    """The replica of a name: its own, its host's, or "master" and "chief" for the first."""
    for one in replicas:
        if name in (one.name, one.hostname, str(one.ordinal), *one.aliases):
            return one
    if name in ("master", "chief"):
        return replicas[0]
    known = [one.name for one in replicas]
    raise UserError(f"{variable}={word}: no replica '{name}'{nearest(name, known)}; there are: {', '.join(known)}")
