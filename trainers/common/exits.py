"""How a trainer ends: its exit codes, the errors that carry them, and the guard around ``main``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

FAILED = 1
USAGE = 2
TARGET_MISSED = 21  # the code pytorch/xla's test trainers use for an accuracy below --target_accuracy
DIVERGED = 22
INTERRUPTED = 130  # 128 + SIGINT
PREEMPTED = 143  # 128 + SIGTERM: Vertex AI, GKE and Slurm run such a job again


class UserError(Exception):
    """Something the user can mend: one line saying what is wrong, where, and what to do; ends with ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class Diverged(UserError):
    """The loss stopped being a finite number."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DIVERGED)


def leave(code: int) -> NoReturn:
    """End the process now with ``code``, skipping the frameworks' own shutdown.

    Their background threads (collectives, profilers, compilation pools) can hang or print when the process
    ends in the middle of a distributed run; all our files are closed by then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guard(main: Callable[[Any], int], args: Any, name: str) -> NoReturn:
    """Run ``main(args)`` and end the process with the code it returns.

    A :class:`UserError` or a full disk becomes one line on stderr; any other exception keeps its traceback,
    since it is ours to mend.
    """
    try:
        code = main(args)
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = error.code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        print(f"{name}: {error.filename or 'writing'}: {error.strerror}", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    leave(code)
