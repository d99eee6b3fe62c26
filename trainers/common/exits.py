"""How trainers end: what those that are not converted to :class:`trainers.common.job.Job` use of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from trainers.common import job
from trainers.common.files import FAILED as FAILED
from trainers.common.files import USAGE as USAGE
from trainers.common.files import UserError as UserError
from trainers.common.job import DIVERGED as DIVERGED
from trainers.common.job import SIGNALS as SIGNALS
from trainers.common.job import TARGET_MISSED as TARGET_MISSED
from trainers.common.job import Diverged as Diverged
from trainers.common.job import Lines as Lines
from trainers.common.job import Stop as Stop
from trainers.common.job import end_idle_replica as end_idle_replica

INTERRUPTED, PREEMPTED = 130, 143  # 128 + SIGINT, 128 + SIGTERM


class Damaged(UserError):
    """A sample of the data that cannot be decoded; a few of many are skipped."""


@contextlib.contextmanager
def dropping(line: bool = True) -> Iterator[None]:
    """Go on if the log cannot be written, as on a full disk or without a reader; :func:`guard` says how many lines."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a closed file
        Lines.lost.extend([getattr(error, "strerror", None) or str(error)] * line)


def again(resume: bool) -> str:
    """Return how to run a command again to resume, for messages: ``--no-resume`` would start over."""
    return "again" if resume else "again without --no-resume"


def leave(code: int) -> NoReturn:
    """Exit immediately with ``code``, without the shutdown of the frameworks.

    Their background threads (collectives, profilers, compilation pools) can hang or print when a process exits in
    the middle of a distributed run. All files are closed before this is called.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed before the start
        stream.flush()
    os._exit(code)


def follows() -> bool:
    """Return whether this host of a rehearsed TPU slice leaves logs and files to the first host.

    XLA's CPU backend has no collectives between hosts, so each host runs the same training independently. The
    launcher sets ``NODE_RANK``.
    """
    return os.environ.get("LAUNCHER_REHEARSE") == "1" and (os.environ.get("NODE_RANK") or "0") != "0"


def guard(main: Callable[[Any], int], args: Any, name: str) -> NoReturn:
    """Run ``main(args)`` as :func:`trainers.common.job.run` does."""
    job.run(main, args, name, leave)
