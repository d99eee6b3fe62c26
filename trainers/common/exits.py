"""Exit codes of the trainers, the exceptions that carry them, and the wrapper around ``main``."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

FAILED = 1
USAGE = 2
TARGET_MISSED = 21  # as pytorch/xla's test trainers exit if the accuracy is below --target_accuracy
DIVERGED = 22
INTERRUPTED = 130  # 128 + SIGINT
PREEMPTED = 143  # 128 + SIGTERM: Vertex AI, GKE and Slurm can restart such a job


class UserError(Exception):
    """An error that the user can fix: one line with what is wrong, where, and what to do. Exits with ``code``."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


class Diverged(UserError):
    """The loss stopped being a finite number."""

    def __init__(self, message: str) -> None:
        super().__init__(message, DIVERGED)


def leave(code: int) -> NoReturn:
    """Exit immediately with ``code``, without the shutdown of the frameworks.

    Their background threads (collectives, profilers, compilation pools) can hang or print when a process exits in
    the middle of a distributed run. All files are closed before this is called.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def guard(main: Callable[[Any], int], args: Any, name: str) -> NoReturn:
    """Run ``main(args)`` and end the process with the code it returns.

    A :class:`UserError`, or an ``OSError`` about a full or read-only disk or missing permissions, is printed as one
    line on stderr. Any other exception is a bug and keeps its traceback.
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
