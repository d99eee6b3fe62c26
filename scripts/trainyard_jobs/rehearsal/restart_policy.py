"""What each platform does when a replica ends, by its documentation. Decides only; the runner acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainyard_jobs.rehearsal.model import End, Verdict

#: A worker that fails for another reason than a permanent error is restarted up to 5 times; then Vertex AI retries the
#: whole job up to 3 times: https://cloud.google.com/vertex-ai/docs/training/understanding-training-service
WORKER_RESTARTS = 5
JOB_RETRIES = 3

#: Default of a Job's backoffLimit: https://kubernetes.io/docs/concepts/workloads/controllers/job/
BACKOFF_LIMIT = 6


def _described(end: End) -> str:
    """The end of a replica, for messages."""
    what = {"preempted": "was preempted", "killed": "was killed"}.get(end.cause, "ended")
    return f"{end.replica.name} {what} (exit status {end.status})"


@dataclass(frozen=True)
class TrainingService:
    """Vertex AI.

    Attributes:
        primary: the replicas whose success is the job's: the chief, or all hosts of a TPU slice
            (https://cloud.google.com/vertex-ai/docs/training/training-with-tpu-vm).
        restart_together: whether all replicas are restarted if one is: the hosts of a TPU slice.
        restart_job: scheduling.restartJobOnWorkerRestart.
        job_retries: maximum number of retries of the whole job.
    """

    primary: tuple[str, ...]
    restart_together: bool = False
    restart_job: bool = False
    job_retries: int = JOB_RETRIES

    def after(self, end: End) -> Verdict:
        """Exit status 0 of the primary replica ends the job; 1 to 127 are permanent errors; others are retried."""
        if end.status == 0:
            if end.replica.name not in self.primary:
                return Verdict("wait")
            waiting = [name for name in self.primary if end.others.get(name, 0) != 0]
            return Verdict("wait") if waiting else Verdict("succeeded", "the primary replica ended with status 0")
        if end.cause == "exit" and end.status < 128:
            return Verdict(
                "failed",
                f"{_described(end)}: exit statuses 1 to 127 are permanent errors, the job is stopped",
                self._advice(end),
            )
        if self.restart_together:
            return self._restart_job(end, "the hosts of a TPU slice are restarted together")
        if self.restart_job:
            return self._restart_job(end, "restartJobOnWorkerRestart")
        if end.restarts < WORKER_RESTARTS:
            return Verdict("restart", f"{_described(end)}: restarted, {end.restarts + 1} of {WORKER_RESTARTS}")
        return self._restart_job(end, f"already restarted {WORKER_RESTARTS} times")

    def _restart_job(self, end: End, why: str) -> Verdict:
        limit = WORKER_RESTARTS if self.restart_job or self.restart_together else self.job_retries
        if end.job_restarts >= limit:
            return Verdict("failed", f"{_described(end)}: the job has already been started {limit + 1} times")
        return Verdict("restart-job", f"{_described(end)}; {why}: the whole job is restarted ({end.job_restarts + 1})")

    def _advice(self, end: End) -> str:
        if self.restart_job or self.restart_together or not end.others:
            return ""
        return (
            "if it failed because another replica was missing: with scheduling.restartJobOnWorkerRestart the whole job "
            "is restarted when one of its replicas is"
        )


@dataclass(frozen=True)
class PodFailurePolicy:
    """backoffLimit and podFailurePolicy of a Kubernetes Job, which decide what follows when a pod fails."""

    backoff_limit: int = BACKOFF_LIMIT
    rules: tuple[Mapping[str, Any], ...] = ()

    def action(self, end: End) -> str:
        """The action of the first rule that matches: "Count", "Ignore", "FailJob" or "FailIndex"."""
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
    # An evicted or preempted pod has the condition DisruptionTarget; a pod whose process was killed does not.
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
        """All pods must succeed; the policy of the Job, then that of the JobSet, decides what follows a failure."""
        group = end.replica.group
        self._members[end.replica.name] = group
        if end.status == 0:
            return self._success(end)
        policy = self.groups[group]
        action = policy.action(end)
        if action == "Ignore":
            return Verdict("restart", f"{_described(end)}: podFailurePolicy is Ignore, the pod is replaced")
        if action in ("FailJob", "FailIndex"):
            return self._job_failed(end, "PodFailurePolicy", f"podFailurePolicy is {action}")
        self._failures[group] = self._failures.get(group, 0) + 1
        if self._failures[group] > policy.backoff_limit:
            return self._job_failed(end, "BackoffLimitExceeded", f"backoffLimit {policy.backoff_limit} exceeded")
        return Verdict(
            "restart", f"{_described(end)}: failure {self._failures[group]}, backoffLimit is {policy.backoff_limit}"
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

    def _job_failed(self, end: End, reason: str, what: str) -> Verdict:
        why = f"{_described(end)}: {what}"
        if self.jobset is None:
            return Verdict(
                "failed",
                f"{why}, the Job failed",
                "a Job replaces pods up to its backoffLimit; a JobSet with failurePolicy.maxRestarts restarts all pods",
            )
        action = self._jobset_action(self.jobset, end, reason)
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
            "spec.failurePolicy.maxRestarts limits how often a JobSet is restarted",
        )

    def _jobset_action(self, jobset: Mapping[str, Any], end: End, reason: str) -> str:
        for rule in jobset.get("rules") or []:
            reasons = rule.get("onJobFailureReasons") or []
            targets = rule.get("targetReplicatedJobs") or []
            if (not reasons or reason in reasons) and (
                not targets or self.replicated.get(end.replica.group) in targets
            ):
                return str(rule.get("action"))
        return "RestartJobSet"
