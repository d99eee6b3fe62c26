"""What each platform does when a replica ends, as its documentation says; decisions only, nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.rehearsal.model import End, Verdict

#: A worker that fails for another reason than a common error is restarted up to 5 times; after that Vertex AI tries
#: the whole job again up to 3 times ("Understand the training service", S12).
WORKER_RESTARTS = 5
JOB_RETRIES = 3

#: Kubernetes' default of a Job's backoffLimit.
BACKOFF_LIMIT = 6


def _how(end: End) -> str:
    """An end in words."""
    what = {"preempted": "was preempted", "killed": "was killed"}.get(end.cause, "ended")
    return f"{end.replica.name} {what} (exit status {end.status})"


@dataclass(frozen=True)
class TrainingService:
    """Vertex AI and, with ``job_retries=0``, AI Platform.

    Attributes:
        primary: the replicas whose success is the job's: the chief, or all hosts of a TPU slice (S10).
        together: the replicas cannot run without each other's machine: a TPU slice of several hosts.
        restart_job: scheduling.restartJobOnWorkerRestart.
        job_retries: how often the whole job is tried again.
    """

    primary: tuple[str, ...]
    together: bool = False
    restart_job: bool = False
    job_retries: int = JOB_RETRIES

    def after(self, end: End) -> Verdict:
        """The first exit status 0 of the primary replica ends the job; 1 to 127 is permanent; the rest is retried."""
        if end.status == 0:
            if end.replica.name not in self.primary:
                return Verdict("wait")
            waiting = [name for name in self.primary if end.others.get(name, 0) != 0]
            return Verdict("wait") if waiting else Verdict("succeeded", "the primary replica ended with 0")
        if end.cause == "exit" and end.status < 128:
            return Verdict(
                "failed",
                f"{_how(end)}: exit statuses from 1 to 127 are permanent errors, the whole job is shut down",
                self._advice(end),
            )
        if self.together:
            return self._again(end, "the hosts of a TPU slice are restarted together")
        if self.restart_job:
            return self._again(end, "restartJobOnWorkerRestart")
        if end.restarts < WORKER_RESTARTS:
            return Verdict("restart", f"{_how(end)}: restarted on its own, {end.restarts + 1} of {WORKER_RESTARTS}")
        return self._again(end, f"restarted {WORKER_RESTARTS} times already")

    def _again(self, end: End, why: str) -> Verdict:
        limit = WORKER_RESTARTS if self.restart_job or self.together else self.job_retries
        if end.job_restarts >= limit:
            return Verdict("failed", f"{_how(end)}: the job was started {limit + 1} times already")
        return Verdict("restart-job", f"{_how(end)}; {why}: the whole job starts again ({end.job_restarts + 1})")

    def _advice(self, end: End) -> str:
        if self.restart_job or self.together or not end.others:
            return ""
        return (
            "if it failed because another replica was gone: with scheduling.restartJobOnWorkerRestart the whole job "
            "starts again when one of them is restarted"
        )


@dataclass(frozen=True)
class PodFailurePolicy:
    """The part of a Kubernetes Job that decides what a failed pod means."""

    backoff_limit: int = BACKOFF_LIMIT
    rules: tuple[Mapping[str, Any], ...] = ()

    def action(self, end: End) -> str:
        """ "Count", "Ignore", "FailJob" or "FailIndex" of the first rule that matches."""
        for rule in self.rules:
            if _matches(rule, end):
                return str(rule.get("action", "Count"))
        return "Count"


def _matches(rule: Mapping[str, Any], end: End) -> bool:
    codes = rule.get("onExitCodes")
    if codes:
        inside = end.status in [int(code) for code in codes.get("values", [])]
        return inside is (codes.get("operator", "In") == "In")
    conditions = [str(one.get("type")) for one in rule.get("onPodConditions") or []]
    # An evicted or preempted pod has the condition DisruptionTarget; one whose process was killed has not.
    return end.cause == "preempted" and "DisruptionTarget" in conditions


@dataclass
class Kubernetes:
    """A Job, or the Jobs of a JobSet.

    Attributes:
        groups: name of each Job -> its pod failure policy.
        jobset: the JobSet's failurePolicy; None for a plain Job.
        replicated: name of each Job -> the replicated job it comes from.
        success: the JobSet's successPolicy.
    """

    groups: Mapping[str, PodFailurePolicy]
    jobset: Mapping[str, Any] | None = None
    replicated: Mapping[str, str] = field(default_factory=dict)
    success: Mapping[str, Any] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _counted_restarts: int = 0
    _members: dict[str, str] = field(default_factory=dict)

    def after(self, end: End) -> Verdict:
        """All pods must succeed; what a failure means is the Job's and then the JobSet's to say."""
        group = end.replica.group
        self._members[end.replica.name] = group
        if end.status == 0:
            return self._success(end)
        policy = self.groups[group]
        action = policy.action(end)
        if action == "Ignore":
            return Verdict("restart", f"{_how(end)}: podFailurePolicy says Ignore, the pod is created again")
        if action in ("FailJob", "FailIndex"):
            return self._job_failed(end, "PodFailurePolicy", f"podFailurePolicy says {action}")
        self._failures[group] = self._failures.get(group, 0) + 1
        if self._failures[group] > policy.backoff_limit:
            return self._job_failed(end, "BackoffLimitExceeded", f"backoffLimit {policy.backoff_limit} exceeded")
        return Verdict(
            "restart", f"{_how(end)}: failure {self._failures[group]}, backoffLimit is {policy.backoff_limit}"
        )

    def _success(self, end: End) -> Verdict:
        targets = [str(name) for name in self.success.get("targetReplicatedJobs") or []]
        if self.success.get("operator") == "Any" and (not targets or self.replicated.get(end.replica.group) in targets):
            others = [name for name, group in self._members.items() if group == end.replica.group]
            if all(end.others.get(name, 0) == 0 for name in others):
                return Verdict("succeeded", f"successPolicy Any: {end.replica.group} completed")
        if any(status != 0 for status in end.others.values()):
            return Verdict("wait")
        return Verdict("succeeded", "all pods completed")

    def _job_failed(self, end: End, reason: str, words: str) -> Verdict:
        why = f"{_how(end)}: {words}"
        if self.jobset is None:
            return Verdict(
                "failed",
                f"{why}, the Job failed",
                "a Job starts pods again up to its backoffLimit; a JobSet with failurePolicy.maxRestarts all of them",
            )
        action = self._jobset_action(end, reason)
        limit = int(self.jobset.get("maxRestarts") or 0)
        if action == "RestartJobSetAndIgnoreMaxRestarts" or (
            action == "RestartJobSet" and self._counted_restarts < limit
        ):
            self._failures.clear()
            if action == "RestartJobSet":
                self._counted_restarts += 1
            return Verdict("restart-job", f"{why}; failurePolicy: the JobSet is restarted ({end.job_restarts + 1})")
        return Verdict(
            "failed",
            f"{why}; the JobSet failed ({'FailJobSet' if action == 'FailJobSet' else f'maxRestarts is {limit}'})",
            "spec.failurePolicy.maxRestarts says how often a JobSet starts again",
        )

    def _jobset_action(self, end: End, reason: str) -> str:
        assert self.jobset is not None
        for rule in self.jobset.get("rules") or []:
            reasons = rule.get("onJobFailureReasons") or []
            targets = rule.get("targetReplicatedJobs") or []
            if (not reasons or reason in reasons) and (
                not targets or self.replicated.get(end.replica.group) in targets
            ):
                return str(rule.get("action"))
        return "RestartJobSet"
