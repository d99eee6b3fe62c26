"""The workers of a TPU VM over ssh: run a command on one or all of them and keep their results apart.

``gcloud ... ssh --worker=all`` mixes the workers' output. So gcloud creates and distributes the keys and prints the ssh
command of every worker (``--dry-run``), and those commands run in parallel.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from trainyard.common.errors import StepFailed
from trainyard.common.gcloud import Finished
from trainyard_jobs.pods import api, gcloud_args, shell_commands
from trainyard_jobs.pods.api import Node, TpuApi
from trainyard_jobs.pods.gcloud_args import Pod

#: The exit status of ssh if the connection failed (https://man.openbsd.org/ssh#EXIT_STATUS).
SSH_FAILED = 255

#: Options before gcloud's: no prompts, errors only, and a lost worker is noticed within a minute.
OPTIONS = (
    "-oBatchMode=yes", "-oLogLevel=ERROR", "-oConnectTimeout=10", "-oServerAliveInterval=15", "-oServerAliveCountMax=4",
)  # fmt: skip


def ssh_commands(dry_run: str) -> list[list[str]]:
    """The ssh command of every worker, without the remote command, from the output of ``gcloud ... ssh --dry-run``.

    Raises:
        StepFailed: a line is not an ssh command.
    """
    found = []
    for line in dry_run.splitlines():
        words = line.split()
        if "--" not in words or "@" not in words[words.index("--") - 1]:
            raise StepFailed(f"gcloud printed no ssh command but: {line[:200]}")
        program, *rest = words[: words.index("--")]
        found.append([program, *OPTIONS, *rest])
    return found


def plural(count: int, noun: str) -> str:
    """``1 worker``, ``4 workers``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def workers_named(indexes: Sequence[int]) -> str:
    """``worker 2``, ``workers 0, 1 and 3``."""
    if len(indexes) == 1:
        return f"worker {indexes[0]}"
    return f"workers {', '.join(map(str, indexes[:-1]))} and {indexes[-1]}"


def run_parallel(commands: list[list[str]], timeout: float | None) -> list[Finished]:
    """Run commands in parallel; SSH_FAILED for one that exceeds ``timeout`` seconds. Ctrl-C kills them all."""

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
    """The workers of a TPU VM.

    Attributes:
        commands: ssh command of each worker, without the remote command.
        addresses: internal IP address of each worker.
        execute: runs commands, as :func:`run_parallel` does.
    """

    pod: Pod
    commands: list[list[str]]
    addresses: tuple[str, ...]
    execute: Callable[[list[list[str]], float | None], list[Finished]] = field(default=run_parallel, repr=False)

    def __len__(self) -> int:
        return len(self.addresses)

    def command(self, worker: int, script: str) -> list[str]:
        """The complete ssh command that runs a shell script on a worker."""
        return [*self.commands[worker], "--", script]

    def on(self, worker: int, script: str, *, timeout: float | None = None) -> Finished:
        """Run a shell script on a worker; SSH_FAILED if it exceeds ``timeout`` seconds."""
        return self.execute([self.command(worker, script)], timeout)[0]

    def on_all(self, script: str | Callable[[int], str], *, timeout: float | None = None) -> list[Finished]:
        """Run a shell script, or what a function returns for each worker's index, on all workers in parallel."""
        scripts = [script if isinstance(script, str) else script(worker) for worker in range(len(self))]
        return self.execute([self.command(worker, each) for worker, each in enumerate(scripts)], timeout)

    def require_all(
        self, what: str, script: str | Callable[[int], str], *, timeout: float | None = None
    ) -> list[Finished]:
        """:meth:`on_all`, which must succeed on every worker.

        Raises:
            StepFailed: it failed; one line with ``what`` and the error of each worker.
        """
        found = self.on_all(script, timeout=timeout)
        errors: dict[str, list[int]] = {}
        for worker, finished in enumerate(found):
            if finished.returncode:
                errors.setdefault(_error_of(finished), []).append(worker)
        if errors:
            each = "; ".join(f"{workers_named(which)}: {error}" for error, which in errors.items())
            raise StepFailed(f"{self.pod.name}: {what} failed on {each}")
        return found


def _error_of(finished: Finished) -> str:
    """The error of a command on a worker in one line."""
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit status {finished.returncode}"
    return f"no answer by ssh ({last})" if finished.returncode == SSH_FAILED else last


def connect(pod: Pod, node: Node, tpu: TpuApi) -> Workers:
    """Let gcloud create and distribute the ssh keys, and find the ssh command of every worker.

    gcloud retries ten times: a VM accepts ssh a little later than the API reports it READY.

    Raises:
        StepFailed: a worker does not answer.
    """
    first = tpu.call(gcloud_args.ssh(pod, 0, "true"))
    if first.returncode:
        raise StepFailed(f"{pod.name}: no ssh to worker 0: {api.error_message(first)}")
    printed = tpu.call(gcloud_args.ssh(pod, "all", "true", dry_run=True))
    if printed.returncode:
        raise StepFailed(f"{pod.name}: {api.error_message(printed)}")
    workers = Workers(pod, ssh_commands(printed.stdout), node.addresses)
    if len(workers.commands) != len(node.addresses):
        raise StepFailed(f"{pod.name}: {len(node.addresses)} workers, but gcloud connects to {len(workers.commands)}")
    workers.require_all("ssh", "true", timeout=60)
    return workers


def check_network(workers: Workers, *, seconds: float) -> None:
    """Check that every worker connects to every other one, within ``seconds``, on the port that PJRT uses.

    Raises:
        StepFailed: one does not, or the port is in use; the line says which worker, and what to do.
    """
    if len(workers) == 1:
        return
    found = workers.require_all(
        "the network check",
        lambda worker: shell_commands.probe_connectivity(worker, workers.addresses, seconds=seconds),
        timeout=seconds + 60,
    )
    answers = [json.loads(finished.stdout) for finished in found]
    busy = [worker for worker, answer in enumerate(answers) if answer.get("busy")]
    name, port = workers.pod.name, shell_commands.MESH_PORT
    if busy:
        raise StepFailed(
            f"{name}: port {port} is in use on {workers_named(busy)}: another training is running there; "
            f"'trainyard pod --action stop' stops one that 'trainyard pod' started"
        )
    unreached = {worker: answer["unreached"] for worker, answer in enumerate(answers) if answer["unreached"]}
    if unreached:
        each = "; ".join(
            f"worker {worker} does not reach {workers_named(which)}" for worker, which in unreached.items()
        )
        raise StepFailed(
            f"{name}: {each} on port {port}: allow traffic inside the network (the firewall rule "
            "default-allow-internal does)"
        )
