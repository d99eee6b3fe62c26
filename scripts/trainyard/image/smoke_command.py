"""Run a user's own command in its image before the image gets a name: the smoke test of a workspace.

It runs in the closed world of :mod:`trainyard.image.smoke_containers`: as a user that the image does not know, with a
fake ``TPU_CONFIG`` and the variables that keep hubs and experiment trackers offline, without a network unless this host
allows one (``network_of`` in :mod:`trainyard.image.smoke_test`). /data holds the folder ``smoke.data``, read-only;
/output is an empty folder that it may write to. How far it is tested depends on trainyard.yaml:

started
    Without ``smoke`` settings, the command runs with ``--help`` and is stopped after 20 seconds, not counting imports.
ran
    It ends with status 0 within ``smoke.timeout``, or is alive after ``smoke.for`` seconds.
trained
    The same, and a line of its output matches ``smoke.expect``. With ``smoke.resume`` it is run again, gets SIGTERM
    when it has printed half as much as in the first run, and must end with status 143 within the grace period. It runs
    in a restricted container (:mod:`trainyard.image.smoke_containers`) if it does not fail there. Started once more,
    with the same working directory and output folder, it must end with status 0 and have read a file that the stopped
    run left there.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shlex
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker.models.containers import Container

from trainyard.common import stages
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import smoke_containers
from trainyard.image.command_words import DATA, OUTPUT, SHARED_MEMORY, container_words
from trainyard.image.smoke_containers import EMULATED, GRACE, SmokeSandbox
from trainyard.image.smoke_failure import Explanation, HostFiles, Run, asked_for, own_lines, tracebacks
from trainyard.recipe import Command, Recipe
from trainyard.sandbox import containers, curves
from trainyard.spec import architectures
from trainyard.spec.naming import FOLDER
from trainyard.spec.naming import SETTINGS as FILE
from trainyard.spec.repository_files import inside
from trainyard.spec.yaml_source import relative

logger = logging.getLogger(__name__)

#: Seconds, not counting imports, after which a command that ignores ``--help`` is stopped (three times as many if it
#: does not start Python), and the most seconds in all: importing a framework takes up to 10 on 2 cores,
#: over 20 on busy ones.
HELP_SECONDS, IMPORT_SECONDS = 20, 300

#: Seconds over which a run that goes on is measured.
_SAMPLE = 5

#: What a failure with ``--help`` says, unless something else is known to do.
_ADDED = (
    f": Trainyard added --help, as {FILE} has no smoke: write 'smoke: {{args: [...], expect: loss}}' there, "
    "with arguments for a short run"
)

#: The tests of a command without ``smoke``: it is only started; and of any command, which is run to its end.
STARTED = Command(args=None, data=False, expect=None, seconds=None, resume=False, timeout=600)
RUN = STARTED.model_copy(update={"args": ()})

#: What keeps libraries from asking their servers.
OFFLINE = {
    # https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables
    "HF_HUB_OFFLINE": "1",
    # https://huggingface.co/docs/transformers/v4.37.0/en/installation
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    # https://github.com/huggingface/evaluate/blob/main/src/evaluate/config.py
    "HF_EVALUATE_OFFLINE": "1",
    # https://docs.wandb.ai/models/support/run_wandb_offline
    "WANDB_MODE": "offline",
    # https://docs.neptune.ai/api/connection_modes/
    "NEPTUNE_MODE": "offline",
    # https://docs.swanlab.cn/en/api/cli-swanlab-offline.html
    "SWANLAB_MODE": "offline",
    # https://clear.ml/docs/latest/docs/configs/env_vars
    "CLEARML_OFFLINE_MODE": "1",
}

_OBSERVER, _PEAK_MEMORY = (Path(__file__).with_name(name) for name in ("network_observer.py", "peak_memory.py"))

#: Where the second of them is in the volume of a test.
_PEAK = "peak/peak_memory.py"

#: Words before a command whose peak memory is printed (scripts/trainyard/image/peak_memory.py).
MEASURED = ("python", f"{smoke_containers.FOLDER}/{_PEAK}")

#: What a program prints that has started, and does not accept ``--help``.
_USAGE = re.compile(r"(?i)^\s*usage\b|\b(try|pass)\b.* --help|(un\w+|no such) .*(option|argument|flag)s?\b.*help")

#: Prints how many half seconds the Python process that started last has run its own code for, and what it does
#: (scripts/trainyard/image/network_observer.py); nothing if no such process reports that.
_DOING = """
import os
folder = "/smoke/observer/started/"
lines = [open(folder + name).read().splitlines() for name in sorted(os.listdir(folder))[-1:]]
if lines and lines[0]:
    print(lines[0].count("running"), lines[0][-1])
"""

#: Prints the files of folders as JSON: path -> inode, modification and access time (ns).
_LIST = """
import json, os, sys
found = {}
for top in sys.argv[1:]:
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if name not in (".smoke", "__pycache__")]
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                status = os.stat(path)
                found[path] = [status.st_ino, status.st_mtime_ns, status.st_atime_ns]
print(json.dumps(found))
"""

#: Gives files a second name in a folder that only root may enter, so that a program that replaces one leaves it, and an
#: access time in 1970, so that the next read changes it even on file systems mounted with relatime
#: (https://man7.org/linux/man-pages/man8/mount.8.html). One more file is read here, to see whether that works.
_KEEP = """
import json, os, sys
kept = {}
for top, paths in json.loads(sys.argv[1]).items():
    folder = os.path.join(top, ".smoke")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    probe = os.path.join(folder, "probe")
    with open(probe, "w") as file:
        file.write("read")
    os.utime(probe, ns=(0, os.stat(probe).st_mtime_ns))
    with open(probe) as file:
        file.read()
    for number, path in enumerate(paths):
        kept[path] = os.path.join(folder, str(number))
        os.link(path, kept[path])
        os.utime(path, ns=(0, os.stat(path).st_mtime_ns))
    kept[probe] = probe
print(json.dumps(kept))
"""

#: Prints which of the files have been read since.
_READ = """
import json, os, sys
print(json.dumps([path for path, kept in json.loads(sys.argv[1]).items() if os.stat(kept).st_atime_ns > 0]))
"""

#: Prints the lines of the files that scripts/trainyard/image/network_observer.py has written.
_ASKED = """
import os
folder = "/smoke/observer/asked/"
for name in sorted(os.listdir(folder)):
    print(open(folder + name).read(), end="")
    os.remove(folder + name)
"""


class Failed(StepFailed):
    """Tell that a command failed.

    Attributes:
        status: its exit status.
    """

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Subject:
    """Name what is tested.

    Attributes:
        image: its digest or reference.
        command: what it starts, for messages.
        start: words of the container before the arguments; empty: the image's default command.
        test: how it is run; its ``args`` are None: it is only started.
        recipe: of the image, ``files``: the repository that it is from; None if they are not known.
        network: whether it may use one.
        log: whether the last lines of a run that failed are shown.
    """

    image: str
    command: tuple[str, ...]
    start: tuple[str, ...] = ()
    test: Command = STARTED
    recipe: Recipe | None = None
    files: HostFiles | None = None
    network: bool = False
    log: bool = True

    @property
    def level(self) -> str:
        """Return how far it is tested."""
        if self.test.args is None:
            return "started"
        return "trained" if self.test.expect or self.test.resume else "ran"

    def words(self, arguments: Sequence[str]) -> list[str]:
        """Return the words of a container that runs the command with ``arguments``."""
        return [*self.start, *arguments] if self.start else container_words(arguments)


def help_passes(lines: Iterable[str]) -> bool:
    """Return whether a command that failed with ``--help``, and no exception, says how it is used: it has started."""
    own = own_lines(lines)
    return any(_USAGE.search(line) for line in own) and not any(tracebacks(own))


def written_elsewhere(changes: Iterable[dict[str, Any]], places: Iterable[str]) -> list[str]:
    """Return the paths that a container changed outside of ``places``, without the folders that hold them.

    Args:
        changes: of the container's file system, as the engine's API lists them.
    """
    paths = sorted(str(change["Path"]) for change in changes)
    inside = tuple(f"{place}/" for place in places)
    outside = [path for path in paths if not f"{path}/".startswith(inside)]
    return [path for path in outside if not any(other.startswith(f"{path}/") for other in paths)]


@dataclass(frozen=True)
class Progress:
    """Measure half of a run: ``lines`` of its log, or, if it prints nothing meanwhile, a part of its ``seconds``."""

    lines: int
    seconds: float


@dataclass(frozen=True)
class Attempt:
    """Describe a run that is watched for a while.

    Attributes:
        alive: it was ended then. ``working``: at the end of that time it printed something, or used a
            hundredth of a CPU: more than what waits, and what a program gets on a machine that is overloaded.
        seconds: that it took. ``importing``: what it still imported.
    """

    run: Run
    alive: bool
    working: bool
    seconds: float
    importing: str


@dataclass(frozen=True)
class Stopped:
    """Describe a run that was ended with SIGTERM.

    Attributes:
        problem: why it cannot be continued; empty if it can.
        seconds: from SIGTERM to its end.
        left: files that it wrote.
    """

    run: Run
    problem: str
    seconds: float = 0.0
    left: list[str] = field(default_factory=list)


class Tester:
    """Run the command of one subject.

    Attributes:
        printed: what the last run printed, a line each.
        seconds: that it took.
    """

    def __init__(self, engine: Engine, subject: Subject) -> None:
        self._engine, self.subject = engine, subject
        self.notes: list[str] = []
        self.writes_output = False
        self.printed: list[str] = []
        self.seconds = 0.0
        config = engine.client.images.get(subject.image).attrs["Config"]
        self.folder = str(config.get("WorkingDir") or FOLDER)
        variables = dict(line.partition("=")[::2] for line in config.get("Env") or [])
        self._home = variables.get("HOME", "/home/trainer")
        self.explain = Explanation(subject.command, subject.recipe, subject.files, self.folder)
        self.explain.network = subject.network
        architecture = architectures.of_image(engine, subject.image)
        self._emulated = engine.emulated_environment(architecture.name)
        self._longer = EMULATED if self._emulated else 1
        if self._emulated:
            self.notes.append(f"ran under emulation of {architecture.platform}")
        if subject.network:
            self.notes.append("ran with a network, as --smoke-network allows on this host")

    @contextmanager
    def sandbox(self) -> Iterator[SmokeSandbox]:
        """Yield a sandbox with the data, an empty output folder, and the working directory as in the image."""
        image, network, folders = self.subject.image, self.subject.network, ("observer/asked", "observer/started")
        files = {"observer/sitecustomize.py": _OBSERVER.read_bytes(), _PEAK: _PEAK_MEMORY.read_bytes()}
        host = self.subject.files
        data = host.data if host else None
        volumes = dict.fromkeys(self._tops, "rw") | ({DATA: "ro"} if data else {})
        with SmokeSandbox(self._engine, image, files, folders, volumes, self._emulated, network=network) as sandbox:
            sandbox.run(f"import os; os.chmod({OUTPUT!r}, 0o1777)")
            if data and host:
                with tempfile.TemporaryFile() as file:
                    _pack(data, file, host)
                    sandbox.put(DATA, file)
            yield sandbox

    def start(self, sandbox: SmokeSandbox, arguments: Sequence[str], **options: Any) -> Container:
        """Start the command in a new container, with ``options`` of ``docker.containers.create``."""
        environment = {"PYTHONPATH": sandbox.module_path("observer")}
        environment |= {"SMOKE_FOLDER": self.folder if self.subject.test.args is None else ""}
        # Trackers, whose variables are called so, want an account.
        environment |= {key: OFFLINE[key] for key in OFFLINE if not self.subject.network or key.endswith("_MODE")}
        words = self.subject.words(arguments)
        options = {"user": smoke_containers.USER, "shm_size": SHARED_MEMORY, **options}
        return sandbox.start(*words, environment=environment, **options)

    def ended(self, sandbox: SmokeSandbox, container: Container, status: int) -> Run:
        """Return the facts of a container that has ended, with the hosts asked for since the last one ended."""
        hosts = [] if self.subject.network else list(dict.fromkeys(sandbox.run(_ASKED).split()))
        return Run(status, containers.lines_of(container), hosts, smoke_containers.out_of_memory(container))

    def fail(self, run: Run, reason: str) -> None:
        """End the test with :class:`Failed`."""
        for line in smoke_containers.last_lines(run.lines) if self.subject.log else ():
            logger.info(f"  | {line}")
        raise Failed(reason, run.status)

    def note(self, run: Run, container: Container) -> None:
        """Note what a run that passed did that it could not do everywhere."""
        if run.hosts:
            self.notes.append(f"{asked_for(run.hosts).split(':')[0]}, and went on without it")
        paths = written_elsewhere(
            container.diff() or [], (self.folder, OUTPUT, DATA, "/smoke", "/tmp", self._home, "/dev", "/etc/mtab")
        )
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            self.notes.append(
                f"wrote {paths[0]}{more}, outside of {self.folder}, /tmp and {self._home}: not every platform allows it"
            )

    def check_started(self) -> None:
        """Start the command with ``--help``, or raise :class:`StepFailed` if it cannot start."""
        with self.sandbox() as sandbox:
            self.explain.otherwise = _ADDED
            container = self.start(sandbox, ["--help"])
            status, importing, seconds = self._observe(sandbox, container, HELP_SECONDS)
            if status is None:
                run = self.ended(sandbox, container, containers.stop(container, 5)[0])
                if importing:
                    limit = IMPORT_SECONDS * self._longer
                    self.fail(run, f"{self.explain.key('run')}: still {importing} after {limit} s{_ADDED}")
                self.notes.append(f"it ignores --help and was ended after {seconds:.0f} s")
                return
            run = self.ended(sandbox, container, status)
            if status and (status > 128 or not help_passes(run.lines)):
                self.fail(run, self.explain.of(run))
            if status:
                self.notes.append(f"it has no --help (exit status {status})")
            self.note(run, container)

    def _observe(self, sandbox: SmokeSandbox, container: Container, own: int) -> tuple[int | None, str, float]:
        """Wait until a command ends, or has run its own code for ``own`` seconds, imports not counted.

        Returns:
            Its exit status, None if it runs; what it imports if it has imported for too long; and the seconds.
        """
        started = time.monotonic()
        while True:
            status, seconds = containers.wait(container, 1), time.monotonic() - started
            count, _, doing = sandbox.run(_DOING).strip().partition(" ")
            enough = int(count or 0) >= 2 * own
            if status is not None or enough or seconds > (IMPORT_SECONDS if doing else 3 * own) * self._longer:
                return status, "" if enough or not doing.startswith("importing") else doing, seconds

    def attempt(self, arguments: Sequence[str], own: int) -> Attempt:
        """Run the command until it ends, or has run its own code for ``own`` seconds, and return what was seen."""
        with self.sandbox() as sandbox:
            container = self.start(sandbox, arguments)
            status, importing, seconds = self._observe(sandbox, container, own)
            working = False
            if status is None:
                before, said = sandbox.statistics(container), len(container.logs())
                status = containers.wait(container, _SAMPLE)
                after = sandbox.statistics(container)
                used = [one.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0) for one in (before, after)]
                working = status is None and (used[1] - used[0] > 1e7 * _SAMPLE or len(container.logs()) > said)
                seconds += _SAMPLE
            alive = status is None
            run = self.ended(sandbox, container, containers.stop(container, 5)[0] if status is None else status)
            return Attempt(run, alive, working and not importing, seconds, importing)

    def check_run(self, smoke: Command) -> Progress:
        """Run the command to its end, and return when half of it was done.

        Raises:
            StepFailed: it failed, or took too long, or printed no line that is expected.
        """
        with self.sandbox() as sandbox:
            started = time.monotonic()
            container = self.start(sandbox, smoke.args or ())
            limit = self._limit(smoke)
            status = containers.watch(container, limit, "run")
            seconds = time.monotonic() - started
            alive = status is None
            if status is None:
                status, _ = containers.stop(container, 5)
            run = self.ended(sandbox, container, status)
            if alive and smoke.seconds is None:
                asked = f": it {asked_for(run.hosts)}" if run.hosts else ""
                where = self.explain.key("smoke", "timeout")
                self.fail(run, f"{where}: still running after {limit} s{asked or ': give args that take less time'}")
            if not alive and status:
                self.fail(run, self.explain.of(run))
            self.printed, self.seconds = own_lines(run.lines), seconds
            losses = curves.Curves()
            for line in self.printed:
                losses.add(line, 0)
            for line in losses.lines():
                logger.info(line)
            if smoke.expect and not any(re.search(smoke.expect, line) for line in self.printed):
                printed = next((line for line in reversed(self.printed) if line.strip()), "nothing")
                where = self.explain.key("smoke", "expect")
                self.fail(run, f"{where}: no line of the output matches {smoke.expect!r}; the last is: {printed[:200]}")
            self.note(run, container)
            self.writes_output = bool(self._files(sandbox, OUTPUT))
        launched = len(run.lines) - len(self.printed)
        return Progress(launched + len(self.printed) // 2, seconds)

    def check_resume(self, smoke: Command, half: Progress) -> dict[str, Any]:
        """Stop the command at ``half``, start it again, and return ``seconds_to_stop`` and ``continued_from``, a file.

        It is stopped in a restricted container. What fails there, and nowhere else, is a note: not every platform
        restricts containers, and jobs can ask for more shared memory.

        Raises:
            StepFailed: it did not stop as it must, or did not continue.
        """
        with self.sandbox() as sandbox:
            stopped = self._stop(sandbox, smoke, half, smoke_containers.restricted(sandbox))
            if not stopped.problem:
                return {"restricted": True, **self._continue(sandbox, smoke, stopped)}
        with self.sandbox() as sandbox:
            again = self._stop(sandbox, smoke, half)
            if again.problem:
                self.fail(again.run, again.problem)
            self.notes.append(f"failed in a container with {smoke_containers.RESTRICTED}: {stopped.problem}")
            return self._continue(sandbox, smoke, again)

    def _stop(
        self, sandbox: SmokeSandbox, smoke: Command, half: Progress, restrictions: Mapping[str, Any] | None = None
    ) -> Stopped:
        """Start the command and end it with SIGTERM."""
        where = self.explain.key("smoke", "resume")
        before = self._files(sandbox, *self._tops)
        container = self.start(sandbox, smoke.args or (), **(restrictions or {}))
        stages.now("stopped run: until half of it is done")
        if not _until(container, half):
            run = self.ended(sandbox, container, int(container.wait()["StatusCode"]))
            early = f"{where}: the run that was to be stopped had ended before: give args that take longer"
            return Stopped(run, self.explain.of(run) if run.status else early)
        grace = GRACE * self._longer
        status, seconds = containers.stop(container, grace)
        run = self.ended(sandbox, container, status)
        if seconds >= grace:
            return Stopped(run, f"{where}: still running {grace} s after SIGTERM, which is what platforms give")
        if status != 143:
            return Stopped(run, f"{where}: exit status {status} after SIGTERM where 143 was expected")
        after = self._files(sandbox, *self._tops)
        left = [path for path, facts in after.items() if before.get(path, [])[:2] != facts[:2]]
        if not left:
            missing = f"{where}: the stopped run left no file in {self.folder} or {OUTPUT} to continue from"
            return Stopped(run, missing)
        return Stopped(run, "", seconds, left)

    def _continue(self, sandbox: SmokeSandbox, smoke: Command, stopped: Stopped) -> dict[str, Any]:
        """Start the command again after it was stopped; see :meth:`check_resume`."""
        where, left = self.explain.key("smoke", "resume"), stopped.left
        kept = sandbox.run(
            _KEEP, json.dumps({top: [path for path in left if path.startswith(f"{top}/")] for top in self._tops})
        )
        container = self.start(sandbox, smoke.args or ())
        limit = self._limit(smoke)
        ended = containers.watch(container, limit, "continued run")
        alive = ended is None
        run = self.ended(sandbox, container, containers.stop(container, 5)[0] if ended is None else ended)
        if alive and smoke.seconds is None:
            self.fail(run, f"{where}: the second run was still running after {limit} s")
        if not alive and run.status:
            self.fail(run, f"{self.explain.of(run)} (when it was started again)")
        read = [str(path) for path in json.loads(sandbox.run(_READ, kept))]
        probes = [f"{top}/.smoke/probe" for top in self._tops]
        files = [path for path in read if path not in probes]
        if not files and all(probe in read for probe in probes):
            self.fail(run, f"{where}: started over: it read none of the files that the stopped run left ({left[0]}...)")
        if not files:
            self.notes.append("whether it continued is not known: the engine's file system keeps no access times")
        elif all(path.startswith(f"{self.folder}/") for path in files):
            self.notes.append(
                f"it continued from {files[0]}, which a job loses with its container: save to a mounted folder in jobs"
            )
        return {"seconds_to_stop": round(stopped.seconds, 2), "continued_from": files[0] if files else ""}

    @property
    def _tops(self) -> list[str]:
        """Return the folders in which a command leaves files."""
        return [self.folder, OUTPUT] if self.folder != "/" else [OUTPUT]

    def _limit(self, smoke: Command) -> int:
        """Return seconds that a run may take, or is observed for."""
        return (smoke.seconds or smoke.timeout) * self._longer

    @staticmethod
    def _files(sandbox: SmokeSandbox, *folders: str) -> dict[str, list[int]]:
        """Return path of a file in ``folders`` -> inode, modification and access time."""
        files: dict[str, list[int]] = json.loads(sandbox.run(_LIST, *folders))
        return files


def _pack(folder: Path, file: Any, host: HostFiles) -> None:
    """Write a folder to ``file`` as a tar that every user can read, or raise a :class:`UserError`.

    Links are what they refer to: no folder above them, whose copies would have no end, and, in a folder of the
    repository, nothing outside of that.
    """
    foreign = not host.given

    def readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
        return entry

    with tarfile.open(fileobj=file, mode="w", dereference=True) as tar:
        for name, folders, files in os.walk(folder, followlinks=True):
            for path in sorted(Path(name, entry) for entry in (*folders, *files)):
                if foreign and path.is_symlink():
                    inside(path, host.root, relative(host.file))
                if path.is_symlink() and path.resolve() in {above.resolve() for above in path.parents}:
                    raise UserError(f"{os.path.relpath(path)}: a symbolic link to a folder above it: remove it")
                tar.add(path, arcname=str(path.relative_to(folder)), filter=readable, recursive=False)
    file.seek(0, io.SEEK_SET)


def _until(container: Container, half: Progress) -> bool:
    """Wait until a run has come this far, and return whether it is running then."""
    lines = 0
    # A run that prints only at its end: three quarters of its time, since the second start is often quicker.
    for piece in containers.output(container, half.seconds * 0.75):
        lines += piece.count(b"\n") + piece.count(b"\r")
        if lines > half.lines:
            break
    container.reload()
    return bool(container.status == "running")


def check(engine: Engine, subject: Subject) -> dict[str, Any]:
    """Test the command of a subject; see :class:`trainyard.spec.state.SmokeResult`.

    Raises:
        StepFailed: it failed; the message gives the reason, with a file and a line where there is one.
    """
    started = time.monotonic()
    tester = Tester(engine, subject)
    facts: dict[str, Any] = {}
    test = subject.test
    stages.now(f"running {shlex.join([*subject.command, *(['--help'] if test.args is None else test.args)])}")
    if test.args is None:
        tester.check_started()
    else:
        half = tester.check_run(test)
        if test.resume:
            facts |= tester.check_resume(test, half)
    return {
        "passed": True,
        "level": subject.level,
        "command": list(subject.command),
        "notes": list(dict.fromkeys(tester.notes)),
        "writes_output": tester.writes_output,
        "seconds": round(time.monotonic() - started, 1),
    } | facts
