"""The one error the launcher ends with, and the exit statuses (contract, "Interface"; a.7)."""

from __future__ import annotations

PERMANENT = 1  # the TPU can never be had
CONFIG = 2  # something that was set is wrong; only a person can mend it
NOT_EXECUTABLE = 126
NOT_FOUND = 127
RETRYABLE = 138  # 128 + SIGUSR1, "user-declared retryable" of Kubeflow's ExitCode policy (S18)
TERMINATED = 143  # 128 + SIGTERM


class LaunchError(Exception):
    """Ends the launcher: one line for a person, and an exit status.

    Attributes:
        status: the exit status.
        message: what is wrong, where, and what to change; printed on one line.
    """

    def __init__(self, message: str, status: int) -> None:
        self.message = " ".join(message.split())  # values may hold line breaks
        super().__init__(self.message)
        self.status = status


def config_error(message: str) -> LaunchError:
    """A mistake in the configuration: exit status 2."""
    return LaunchError(message, CONFIG)
