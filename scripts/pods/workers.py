"""The workers of a pod over ssh: the same command on all of them, each answer kept apart.

``gcloud ... ssh --worker=all`` mixes what the workers say. So gcloud makes the keys and spreads them, is asked for the
plain ssh command of every worker (``--dry-run``), and those are run side by side.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from scripts.cli import StepFailed
from scripts.pods import calls, gcloud, remote
from scripts.pods.calls import Finished, Node, call
from scripts.pods.gcloud import Pod

#: ssh's own exit status when the connection failed (ssh(1)).
SSH_FAILED = 255

#: In front of gcloud's: never ask, say what is wrong only, and notice within a minute that a worker is gone.
OPTIONS = (
    "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10", "-oServerAliveInterval=15", "-oServerAliveCountMax=4",
)  # fmt: skip


def plain_ssh(dry_run: str) -> list[list[str]]:
    """The ssh command of every worker, without what it is to run, out of what ``gcloud ... ssh --dry-run`` prints.

    Raises:
        StepFailed: these are no such lines.
    """
    found = []
    for line in dry_run.splitlines():
        words = line.split()
        if "--" not in words or "@" not in words[words.index("--") - 1]:
            raise StepFailed(f"gcloud printed no ssh command but: {line[:200]}")
        program, *rest = words[: words.index("--")]
        found.append([program, *OPTIONS, *rest])
    return found


def numbers(indexes: Sequence[int]) -> str:
    """``worker 2``, ``workers 0, 1 and 3``."""
    if len(indexes) == 1:
        return f"worker {indexes[0]}"
    return f"workers {', '.join(map(str, indexes[:-1]))} and {indexes[-1]}"


def together(commands: list[list[str]], timeout: float | None) -> list[Finished]:
    """Run commands side by side; SSH_FAILED for one that takes longer than ``timeout`` s. Ctrl-C ends them all."""

    def wait(process: subprocess.Popen[str]) -> Finished:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return Finished(process.args, SSH_FAILED, "", f"no answer within {timeout:.0f} s")
        return Finished(process.args, process.returncode, out, err)

    started: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(max_workers=len(commands)) as pool:
        try:
            for command in commands:
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        errors="replace",
                        start_new_session=True,
                    )
                )
            return list(pool.map(wait, started))
        except BaseException:
            for process in started:
                process.kill()
            raise


@dataclass(frozen=True)
class Workers:
    """How to reach every worker of a pod.

    Attributes:
        commands: ssh command of each, without what it is to run.
        addresses: internal address of each.
    """

    pod: Pod
    commands: list[list[str]]
    addresses: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.addresses)

    def words(self, worker: int, script: str) -> list[str]:
        """The whole ssh command for a shell script on a worker."""
        return [*self.commands[worker], "--", script]

    def on(self, worker: int, script: str, *, timeout: float | None = None) -> Finished:
        """What a shell script on a worker says and how it ends; SSH_FAILED if it takes longer than ``timeout`` s."""
        return together([self.words(worker, script)], timeout)[0]

    def on_all(self, script: str | Callable[[int], str], *, timeout: float | None = None) -> list[Finished]:
        """The same on all of them at once."""
        scripts = [script if isinstance(script, str) else script(worker) for worker in range(len(self))]
        return together([self.words(worker, each) for worker, each in enumerate(scripts)], timeout)

    def all_do(self, what: str, script: str | Callable[[int], str], *, timeout: float | None = None) -> list[Finished]:
        """The same, if all of them can.

        Raises:
            StepFailed: some cannot; one line with what each of them says, after ``what``.
        """
        found = self.on_all(script, timeout=timeout)
        causes: dict[str, list[int]] = {}
        for worker, done in enumerate(found):
            if done.returncode:
                causes.setdefault(_words(done), []).append(worker)
        if causes:
            each = "; ".join(f"{numbers(which)}: {cause}" for cause, which in causes.items())
            raise StepFailed(f"{self.pod.name}: {what} failed on {each}")
        return found


def _words(done: Finished) -> str:
    """The line that says what went wrong on a worker."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {done.returncode}"
    return f"no answer by ssh ({last})" if done.returncode == SSH_FAILED else last


def connect(pod: Pod, node: Node) -> Workers:
    """Make and spread the ssh keys as gcloud does, and learn how to reach every worker.

    gcloud tries ten times, for a VM takes ssh a little later than the API calls it READY.

    Raises:
        StepFailed: a worker does not answer; one line.
    """
    first = call(gcloud.ssh(pod, 0, "true"))
    if first.returncode:
        raise StepFailed(f"{pod.name}: no ssh to worker 0: {calls.words(first)}")
    told = call(gcloud.ssh(pod, "all", "true", dry_run=True))
    if told.returncode:
        raise StepFailed(f"{pod.name}: {calls.words(told)}")
    workers = Workers(pod, plain_ssh(told.stdout), node.addresses)
    if len(workers.commands) != len(node.addresses):
        raise StepFailed(f"{pod.name}: {len(node.addresses)} workers, but gcloud reaches {len(workers.commands)}")
    workers.all_do("ssh", "true", timeout=60)
    return workers


def check(workers: Workers, *, seconds: float) -> None:
    """See that every worker reaches every other one, within ``seconds``, where their processes will meet.

    Raises:
        StepFailed: one does not, or the port is taken; one line that says which, and what to do.
    """
    if len(workers) == 1:
        return
    found = workers.all_do(
        "the check of the network",
        lambda worker: remote.meet(worker, workers.addresses, seconds=seconds),
        timeout=seconds + 60,
    )
    answers = [json.loads(done.stdout) for done in found]
    busy = [worker for worker, answer in enumerate(answers) if answer.get("busy")]
    if busy:
        raise StepFailed(
            f"{workers.pod.name}: port {remote.MESH_PORT} is taken on {numbers(busy)}: a training still runs there; "
            "'make pod ACTION=stop' ends one of ours"
        )
    apart = {worker: answer["unreached"] for worker, answer in enumerate(answers) if answer["unreached"]}
    if apart:
        each = "; ".join(f"{numbers([worker])} does not reach {numbers(which)}" for worker, which in apart.items())
        raise StepFailed(
            f"{workers.pod.name}: {each} at port {remote.MESH_PORT}: allow traffic inside the network "
            "(the rule default-allow-internal does)"
        )
