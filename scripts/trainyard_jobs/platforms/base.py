"""The interface of a platform that runs jobs.

To add a platform, write a folder with a subclass of :class:`Platform` in ``write.py`` and add an instance of it to
``PLATFORMS`` in ``platforms/__init__.py``. `trainyard job`, `trainyard job rehearse` and their messages then know it.
Modules with rules about its job files are listed in ``platforms/all_rules.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from trainyard.common.errors import UserError
from trainyard_jobs.model.request import Request
from trainyard_jobs.rehearsal.model import Rehearsal, Trial
from trainyard_jobs.schema.job_file import JobFile, Kind


@dataclass(frozen=True)
class RenderedJob:
    """A job as text, and how it is submitted.

    Attributes:
        text: contents of the job file, or of a script.
        command: words of the command that submits it.
        request: what it was rendered from.
        warnings, notes: lines for the user.
        flags: words of the command beyond those that follow from the request.
    """

    text: str
    command: list[str]
    request: Request
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Submission:
    """A submitted job that has succeeded: its name on the platform, and its last state."""

    name: str
    state: str


@dataclass(frozen=True)
class Conversion:
    """How the job of another platform is converted: the options that apply, None where not given."""

    image: str | None = None
    name: str | None = None
    region: str | None = None
    project: str | None = None


class Platform(ABC):
    """A platform. Methods that it does not override raise a :class:`UserError`: the platform cannot do that.

    Attributes:
        name: value of ``PLATFORM=``.
        kinds: kinds of job files that it runs.
        file_name: name of a job's file in messages and comments.
        in_kubernetes: whether its jobs are objects of Kubernetes.
        tpu_machine: whether ``MACHINE=`` selects the machines of a TPU slice.
        options: names of the options that it has of those that only some platforms have.
        mounts: kinds of ``--mount`` that it has: gs, nfs, pvc, and ``folder``, of its machines.
        dry_run: words of the command by which it checks a file without running it; empty if it has none.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]] = ()
    file_name: ClassVar[str] = "job.yaml"
    in_kubernetes: ClassVar[bool] = False
    tpu_machine: ClassVar[bool] = False
    options: ClassVar[frozenset[str]] = frozenset()
    mounts: ClassVar[tuple[str, ...]] = ("gs", "nfs")
    dry_run: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        """Render a job.

        Args:
            file: path of the file that the text is written to, for the command; :attr:`file_name` if unknown.
        Raises:
            UserError: the platform does not support what is requested, or the job breaks a rule.
        """

    def convert(self, job: JobFile, conversion: Conversion, file: str | None = None) -> RenderedJob:
        """Render the job of another platform's job file.

        Raises:
            UserError: there is no conversion from that kind of file, or the file is invalid.
        """
        raise self._unsupported("jobs cannot be converted to it; '--from' converts to '--platform vertex'")

    def submit(self, job: RenderedJob, *, interval: int) -> Submission:
        """Submit a job and follow its log until it ends.

        Args:
            interval: seconds between two queries of its state.
        Raises:
            UserError: the platform's command line is not installed.
            StepFailed: the job was refused, or it failed.
        """
        raise self._unsupported("jobs cannot be submitted to it")

    def rehearse(self, job: JobFile, trial: Trial | None = None) -> Rehearsal:
        """The containers that a job consists of, and the rules by which the platform restarts them.

        Args:
            trial: the trial to rehearse, for a tuning job.
        Raises:
            UserError: part of the job cannot be rehearsed; the message gives the line.
        """
        raise self._unsupported("its jobs cannot be rehearsed")

    def _unsupported(self, what: str) -> UserError:
        return UserError(f"'--platform {self.name}': {what}")
