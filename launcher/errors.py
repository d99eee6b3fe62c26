"""The error that ends the launcher, and the exit statuses (R15.4)."""

from __future__ import annotations

PERMANENT = 1  # the TPU node cannot be used; a retry does not help
CONFIG = 2  # a setting is wrong; a person must correct it
NOT_EXECUTABLE = 126
NOT_FOUND = 127
UNFIT = 75  # EX_TEMPFAIL: a node of the job is not fit (R17.6)
RETRYABLE = 138  # 128 + SIGUSR1, which Kubeflow's ExitCode restart policy retries (R15.4)


class LaunchError(Exception):
    """Ends the launcher with one line on stderr and an exit status.

    Attributes:
        status: the exit status (R15.4).
        message: what is wrong, where, and what to change; always one line.
    """

    def __init__(self, message: str, status: int) -> None:
        self.message = " ".join(message.split())  # values may contain line breaks
        super().__init__(self.message)
        self.status = status


def config_error(message: str) -> LaunchError:
    """An error in the configuration: exit status 2."""
    return LaunchError(message, CONFIG)
