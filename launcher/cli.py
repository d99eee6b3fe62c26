"""The command line, and the order of the steps. Parsed by hand: argparse would double the start-up time."""

from __future__ import annotations

import os
import sys

from launcher import cluster as clusters
from launcher import explain, process, processes, redact, torchrun
from launcher import exports as exporting
from launcher.address import join
from launcher.errors import CONFIG, PERMANENT, RETRYABLE, LaunchError, config_error
from launcher.explain import Report
from launcher.host import Host
from launcher.image import RECIPE, read_image
from launcher.runtime import Facts, decide
from launcher.settings import VARIABLES, Settings, text
from launcher.tpu_vm import skips_metadata
from launcher.versions import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Mapping

    from launcher.coordinates import Cluster
    from launcher.image import Image
    from launcher.runtime import Decision
    from launcher.supervisor import Member

USAGE = """\
usage: launch [OPTIONS] [TRAINER [ARGS...]]   run a trainer of this image (default: the image's default trainer)
       launch [OPTIONS] -- COMMAND [ARGS...]  run any command
       launch [OPTIONS] COMMAND [ARGS...]     run a path, or a command on PATH that is not the name of a trainer

Detect the accelerator and the cluster, export the variables that the framework needs, then exec the command.
Arguments from the first one that is not a launcher option are passed to the trainer.

examples:
  launch mnist --epochs 1
  launch --explain
  launch -- python train.py

options:
  --print-env [--json]  print the variables that would be exported; start nothing
  --explain             print every signal, the one that decided, and the result; start nothing
  --runtime NAME        use cpu, gpu, tpu-local or tpu-node instead of detecting the runtime
  --preflight           test all nodes first, and start nothing if one is not fit
  --require-healthy     wait until the TPU node is HEALTHY, not only READY
  --force               replace derived variables that are already set
  --signal-group        send signals to the trainer's whole process group, and wait for all of it
  --version             print the version, and the content of this image
  --help                print this help
"""

# option -> setting
SWITCHES = {
    "--force": "force",
    "--preflight": "LAUNCHER_PREFLIGHT",
    "--require-healthy": "LAUNCHER_REQUIRE_HEALTHY",
    "--signal-group": "LAUNCHER_SIGNAL_GROUP",
}
MODES = ("--print-env", "--explain")


class Arguments:
    """The parsed command line.

    Attributes:
        flags: setting -> value.
        mode: "", "--print-env", "--explain", "--version" or "--help".
        json: `--json` was given.
        words: trainer or command, and its arguments.
        is_command: the words came after `--`.
        on_sagemaker: the word is SageMaker's `train`; set by `find_command`.
    """

    def __init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.mode = ""
        self.json = False
        self.words: list[str] = []
        self.is_command = False
        self.on_sagemaker = False


def parse(argv: list[str]) -> Arguments:
    """Parse the command line.

    Options that are not the launcher's belong to the default trainer (R15.1): platforms that set only arguments
    (`--job-dir ...`, Vertex AI's `args:`) start the image with nothing else.

    Raises:
        LaunchError: (2) if options contradict each other.
    """
    found = Arguments()
    rest = list(argv)
    while rest:
        word = rest[0]
        if word in MODES and found.mode in ("", word):
            found.mode = word
        elif word in MODES:
            raise config_error(f"{found.mode} and {word} cannot be used together")
        elif word in ("--help", "--version"):
            found.mode = word
        elif word == "--json":
            found.json = True
        elif word in SWITCHES:
            found.flags[SWITCHES[word]] = "1"
        elif word == "--runtime":
            if len(rest) < 2:
                raise config_error("--runtime needs a name: cpu, gpu, tpu-local or tpu-node")
            found.flags["LAUNCHER_RUNTIME"] = rest.pop(1)
        elif word.startswith("--runtime="):
            found.flags["LAUNCHER_RUNTIME"] = word.partition("=")[2]
        else:
            break
        rest.pop(0)
    if rest[:1] == ["--"]:
        found.is_command = True
        rest.pop(0)
        if not rest:
            raise config_error("a command must follow `--`: launch -- COMMAND [ARGS...]")
    found.words = rest
    if found.json and found.mode != "--print-env":
        raise config_error("--json requires --print-env")
    return found


def find_command(
    arguments: Arguments, image: Image, env: Mapping[str, str], sysroot: str = ""
) -> tuple[list[str], bool]:
    """The command to start, and whether it is a trainer of the image (R15.1).

    A trainer's name takes precedence over a command of the same name. A word with a slash, or one found on PATH, is a
    command. `train` on SageMaker is its way to start every image (R15.7).

    Args:
        arguments: the command line.
        image: its trainers are looked up.
        env: PATH, and the variables of SageMaker.
        sysroot: prefix of SageMaker's files.

    Raises:
        LaunchError: (2) for a word that is neither a trainer nor a command.
    """
    words = arguments.words
    if arguments.is_command:
        return words, False
    if not words or words[0].startswith("-"):
        if image.default:
            return [*image.trainers[image.default], *words], True
        if not words:
            return [], False
        raise config_error(f"{words[0][:60]!r} is not a launcher option, and this image has no default trainer")
    name = words[0]
    if name in image.trainers:
        return [*image.trainers[name], *words[1:]], True
    if "/" in name or _on_path(name, env.get("PATH", os.defpath)):
        return words, False
    if words in (["train"], ["serve"]):
        from launcher import sagemaker

        if sagemaker.is_job(env, sysroot):
            arguments.on_sagemaker = True
            return sagemaker.command(name, image, env, sysroot)
    if not image.trainers:
        raise config_error(f"{name[:60]!r} is not a command on PATH, and this image has no trainers ({RECIPE})")
    raise config_error(
        f"{name[:60]!r} is not a trainer of this image; trainers: {', '.join(sorted(image.trainers))}; "
        "put any other command after `--`"
    )


def _on_path(name: str, path: str) -> bool:
    return bool(name) and any(os.access(os.path.join(folder, name), os.X_OK) for folder in path.split(os.pathsep))


class Log:
    """Lines on stderr; stdout belongs to the trainer (R16.1).

    Args:
        env: its secrets are removed from every line (R16.2).
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.level = "normal"
        self._env = env
        self._hidden: list[str] | None = None

    def clean(self, line: str) -> str:
        """Remove secrets and control characters from a line meant for people."""
        return redact.one_line(self.scrub(line))

    def scrub(self, text: str) -> str:
        """Remove tokens, and the values of the environment's secrets, from free text."""
        if self._hidden is None:
            self._hidden = redact.secrets(self._env)
        return redact.without_tokens(redact.scrub(text, self._hidden))

    def info(self, line: str) -> None:
        """Log progress; not with LAUNCHER_LOG=quiet."""
        if self.level != "quiet":
            self.error(line)

    def error(self, line: str) -> None:
        """Log a line at every level."""
        if sys.stderr is None:  # closed when Python started; print would write to stdout
            return
        try:
            print(f"launch: {self.clean(line)}", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            # A full disk below the log is no reason to end the job. A new stream, without the text that Python would
            # fail to write at its end.
            sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def run(argv: list[str]) -> int:
    """Run the launcher, from arguments to exec. Returns an exit status (R15.4) if nothing was exec'ed."""
    env = dict(os.environ)
    log = Log(env)
    retryable = RETRYABLE
    try:
        arguments = parse(argv)
        if arguments.mode == "--help":
            print(USAGE + "\nvariables:")
            for name, (default, meaning) in VARIABLES.items():
                print(f"  {name:26} {meaning}" + (f" [{default}]" if default else ""))
            return _written()
        if arguments.mode == "--version":
            print(f"launch {VERSION}")
            print(log.clean(_described(read_image(Host(text(env, "LAUNCHER_SYSROOT").rstrip("/")), env))))
            return _written()
        settings = Settings(env, arguments.flags)
        retryable = settings.retryable_exit
        log.level = settings.log
        report = resolve(arguments, env, settings, log)
        if arguments.mode:
            _print(report, arguments, log)
            return _written()
        for line in _start_lines(report, settings):
            log.error(line)
        return _start(report, settings, log)
    except LaunchError as error:
        return _fail(error.message, error.status, env, log)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, env, log)
    except StdoutError as error:
        return _fail(f"cannot write to stdout: {error}", PERMANENT, env, log)
    except RecursionError:
        return _fail("a variable contains JSON that is nested too deeply", CONFIG, env, log)
    except MemoryError:
        return _fail("out of memory", retryable, env, log)
    except Exception as error:  # a job's log gets one line, never a traceback (R16.1)
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        return _fail(f"internal error at {where}: {type(error).__name__}: {error}", PERMANENT, env, log)


class StdoutError(Exception):
    """stdout cannot be written: a full disk, or a reader that has gone, such as `head`."""


def _written() -> int:
    """Flush stdout. Returns 0. Raises StdoutError with the reason; Python would print a traceback at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise StdoutError(error.strerror) from None
    return 0


def _described(image: Image) -> str:
    """The content of an image in one line."""
    if not image.framework:
        return f"image  no description ({RECIPE})"
    words = [f"image  {image.name or 'unnamed'}: {image.framework} {image.version}".rstrip()]
    if image.accelerator:
        words.append(f"accelerator {image.accelerator}")
    if image.trainers:
        words.append(f"trainers {', '.join(sorted(image.trainers))}")
    return "; ".join(words)


def resolve(arguments: Arguments, env: Mapping[str, str], settings: Settings, log: Log) -> Report:
    """Detect runtime and cluster, wait for a TPU node if there is one, and plan the exports.

    Raises:
        LaunchError: see R15.4 for the exit statuses.
    """
    host = Host(settings.sysroot)
    facts = Facts(env, host, read_image(host, env), settings)
    try:
        return _resolve(arguments, facts, log)
    except LaunchError:
        if arguments.mode == "--explain" or settings.log == "explain":
            for line in explain.signals(facts):
                log.error(line)
        raise


def _resolve(arguments: Arguments, facts: Facts, log: Log) -> Report:
    env, image, settings = facts.env, facts.image, facts.settings
    command, named = find_command(arguments, image, env, settings.sysroot)
    if not command and not arguments.mode:
        raise config_error(f"nothing to run: {RECIPE} has no default trainer; use `launch -- COMMAND`")
    decision = decide(facts)
    if decision.runtime == "tpu-node":
        from launcher.tpu_node import rules

        rules.refuse(facts, decision)
    if decision.runtime == "tpu-local":
        _complete_slice(facts, decision)
    cluster = clusters.resolve(env, settings, decision.slice, processes.starts_processes(command))
    if image.framework == "jax":
        from launcher import jax

        jax.refuse_loopback(facts, cluster)
    if decision.runtime == "gpu" and image.gpus and facts.host.has_gpu(env):
        _check_gpus(facts, decision, cluster, log)
    nproc = processes.count(facts, decision.runtime, named, cluster, command)
    wrapped = torchrun.wrap(command, facts, cluster, nproc)
    if settings.nproc > 1 and nproc == 1:
        decision.warnings.append(_without_effect(facts, cluster))
    node, accelerator_type, of_node = decision.node, "", None
    endpoints = node.endpoints if node else []
    if node and node.name:
        from launcher.tpu_node import wait

        name = node.name
        answer = wait.run(facts, decision, log.info, lambda *end: _fail(f"{end[0]} for TPU {name!r}", end[1], env, log))
        endpoints, accelerator_type = answer.endpoints, answer.accelerator_type
    if node and not decision.untouched:
        from launcher.tpu_node import rules

        of_node = rules.exporter(facts, node, cluster, endpoints, accelerator_type)
    gpus = facts.host.gpu_count(env) if decision.runtime == "gpu" else 1
    one_process = not wrapped and nproc == 1 and (gpus <= 1 or settings.nproc == 1)
    started = wrapped or nproc > 1 or cluster.given or cluster.task or facts.has("LOCAL_RANK")
    if gpus > 1 and facts.has("RANK") and not (started or one_process):
        # Lightning, for example, would take the platform's nodes for processes (R13.8).
        decision.warnings.append(
            f"RANK and WORLD_SIZE are set and count nodes, but the command sees {gpus} GPUs: "
            f"set LAUNCHER_NPROC={gpus} to start one process per GPU, or unset them if the command starts its own "
            "processes"
        )
    exports = exporting.plan(facts, decision, cluster, of_node, one_process, nproc)
    exporting.tf_config(exports, facts, decision, cluster)
    if arguments.on_sagemaker:
        from launcher import sagemaker

        exports.defaults(sagemaker.variables(settings.sysroot))
    exports.defaults(processes.threads(facts, nproc))
    return Report(facts, decision, cluster, endpoints, exports, wrapped or command, nproc, wrapped is not None)


def _without_effect(facts: Facts, cluster: Cluster) -> str:
    reason = "this command starts its own processes"
    if facts.has("LOCAL_RANK"):
        reason = "LOCAL_RANK is set, so another launcher has started this process"
    elif cluster.node_rank is None:
        reason = f"this node is outside the training world ({cluster.role})"
    elif cluster.given or cluster.task:
        reason = f"{cluster.source} has started this process as one of several"
    return f"LAUNCHER_NPROC={facts.settings.nproc} has no effect: {reason}"


def _complete_slice(facts: Facts, decision: Decision) -> None:
    """Read the slice from a TPU VM's metadata server if the environment does not describe it (R4.2)."""
    known = decision.slice is not None and bool(decision.slice.workers)
    reads = facts.image.may_be("torch_xla", "torch_tpu", "jax")
    if known or not facts.tpu_chips or skips_metadata(facts.env) or not reads:
        return
    from launcher.fetch import FetchError
    from launcher.metadata import METADATA_ADDRESS, PROBE_TIMEOUT, Metadata, tpu_vm_attributes
    from launcher.tpu_vm import slice_from_metadata

    metadata = Metadata(facts.settings.metadata_host or METADATA_ADDRESS, PROBE_TIMEOUT)
    try:
        attributes = tpu_vm_attributes(metadata)
    except FetchError as error:
        decision.warnings.append(
            f"cannot read this TPU VM's slice from the metadata server ({error}); assuming a single host: "
            "for several hosts, set TPU_SKIP_MDS_QUERY=1 and the TPU_* variables of docs/launcher.md"
        )
        return
    if attributes:
        decision.slice = slice_from_metadata(attributes)


def _check_gpus(facts: Facts, decision: Decision, cluster: Cluster, log: Log) -> None:
    """Refuse a driver or GPUs that the image cannot train on (R8.3 to R8.5)."""
    from launcher import gpus

    if gpus.hidden(facts.env, facts.host):
        return

    with process.ExitOnSignal(lambda *end: _fail(f"{end[0]} for the NVIDIA driver", end[1], facts.env, log)):
        facts.driver = gpus.ask(facts.host, facts.env, facts.image)
    # A rehearsal trains on the CPU, a process outside the training world does not train, and R1 and R2 are the user's
    # own configuration of the runtime.
    trains = not (facts.settings.rehearse or decision.untouched or cluster.node_rank is None)
    try:
        decision.warnings += gpus.judge(facts.driver, facts.image, facts.env, trains)
    except LaunchError as error:
        if not facts.settings.preflight:
            raise
        facts.problems.append(error.message)  # the other nodes learn of it, too (R17.2)


def _print(report: Report, arguments: Arguments, log: Log) -> None:
    if arguments.mode == "--explain":
        for line in explain.signals(report.facts, report.decision.rule) + explain.summary(report):
            print(log.clean(line))
        return
    # Values that programs read are hidden only in the variables that hold secrets: the value of another variable must
    # not change because it equals one (R16.2).
    if arguments.json:
        import json

        print(json.dumps(_redacted(explain.as_data(report), log), indent=2))
        return
    for line in explain.as_assignments(report):
        name, equals, value = line.partition("=")
        print(redact.one_line(f"{name}={_own(name, value)}" if equals else line))
    for message in report.exports.warnings:
        log.error(f"warning   {message}")


def _redacted(data: dict[str, object], log: Log) -> dict[str, object]:
    """The data of --print-env --json: free text is searched for secrets, variables are hidden by their names."""
    found = dict(data)
    for member, value in data.items():
        if member == "exports" and isinstance(value, dict):
            found[member] = {name: _own(name, text) for name, text in value.items()}
        elif member == "warnings" and isinstance(value, list):
            found[member] = [log.scrub(text) for text in value]
        elif member == "why" and isinstance(value, str):
            found[member] = log.scrub(value)
    return found


def _own(name: str, value: str) -> str:
    """The value of a variable for programs."""
    return redact.HIDDEN if redact.is_secret(name, value) else redact.without_tokens(value)


def _start_lines(report: Report, settings: Settings) -> list[str]:
    if settings.log == "quiet":
        return [f"warning   {message}" for message in report.exports.warnings]
    before = explain.signals(report.facts, report.decision.rule) if settings.log == "explain" else []
    return before + explain.summary(report)


def _wait_for_node_0(report: Report, settings: Settings, env: Mapping[str, str], log: Log) -> None:
    """Wait for JAX's coordinator (R12.6), else for the name of node 0 (R12.5).

    Args:
        report: the result.
        settings: time limits.
        env: the trainer's environment.
        log: for a signal that ends the wait.

    Raises:
        LaunchError: retryable, if node 0 was not there in time.
    """
    cluster, facts = report.cluster, report.facts
    bound = 0.0
    if facts.image.may_be("jax") and (cluster.task or cluster.nnodes > 1):
        from launcher import jax

        host, port = jax.coordinator_of(env)
        bound = jax.coordinator_timeout(facts, cluster, report.command) if port else 0.0
    waits = cluster.node_rank and cluster.nnodes > 1 and not cluster.given and facts.image.may_be("torch", "jax")
    if not (bound or waits):
        return
    import time

    what = f"JAX's coordinator at {join(host, port)}" if bound else f"the name of node 0, {cluster.master_addr!r}"
    with process.ExitOnSignal(lambda *end: _fail(f"{end[0]} for {what}", end[1], facts.env, log)):
        if bound:
            problem = process.wait_for_port(host, port, bound, time.sleep, time.monotonic)
        elif process.wait_for_name(cluster.master_addr, settings.dns_timeout, time.sleep, time.monotonic):
            problem = ""
        else:
            problem = "did not resolve"
    if problem and bound:
        raise LaunchError(
            f"{what} ({cluster.source}) did not accept a connection within {bound:g} s ({problem}): check that node 0 "
            "is running, or increase LAUNCHER_JAX_TIMEOUT",
            settings.retryable_exit,
        )
    if problem:
        raise LaunchError(
            f"{what} ({cluster.source}), {problem} within {settings.dns_timeout:g} s: check that node 0 is running, or "
            "increase LAUNCHER_DNS_TIMEOUT",
            settings.retryable_exit,
        )


def _start(report: Report, settings: Settings, log: Log) -> int:
    trainers_env = report.exports.apply()
    if settings.preflight:
        from launcher.preflight import nodes

        env = report.facts.env
        nodes.run(report, trainers_env, log.info, lambda reason, status: _fail(reason, status, env, log))
    _wait_for_node_0(report, settings, trainers_env, log)
    if os.getpid() == 1:
        log.error(
            "warning   this is PID 1 and tini is not on PATH: the command gets no signal that it does not handle, and "
            "orphans are not reaped; start the container with an init, as docker run --init does"
        )
    alone = report.nproc == 1 and not (report.torchrun or settings.signal_group)
    if alone and not settings.log_dir:
        process.replace(report.command, trainers_env)
    from launcher import supervisor

    members, reserved = _members(report, trainers_env)
    # A single process that no torchrun stands for reports a signal as it likes; see R15.6 for the others.
    translate = len(members) > 1 or report.torchrun
    try:
        return supervisor.supervise(members, settings, translate, lambda line: log.error(f"error: {line}"))
    finally:
        if reserved:
            reserved.close()


def _members(report: Report, env: dict[str, str]) -> tuple[list[Member], socket.socket | None]:
    """The processes to start, and the socket that keeps their port free."""
    from launcher.supervisor import Member

    facts, cluster, nproc = report.facts, report.cluster, report.nproc
    if report.torchrun or nproc == 1:
        return [Member("", report.command, env, "" if report.torchrun else text(env, "RANK") or "0")], None
    if facts.image.framework == "torch_tpu" and report.decision.runtime == "tpu-local" and not facts.settings.rehearse:
        env = {**processes.tpu_environment(facts, report.decision, cluster, nproc, env), **env}
    environments = processes.environments(env, cluster, nproc)
    if facts.image.may_be("jax"):
        from launcher import jax

        gpus = jax.gpus(facts, report.decision)
        environments = [{**member, **jax.process(member, gpus)} for member in environments]
    members = [Member(f"rank {one['RANK']}", report.command, one, one["RANK"]) for one in environments]
    address, port = environments[0]["MASTER_ADDR"], environments[0]["MASTER_PORT"]
    chosen = "MASTER_PORT" in report.exports.values and port.isdigit()
    if chosen and processes.is_local(cluster, address):
        return members, processes.reserve(address, int(port))
    return members, None


def _fail(message: str, status: int, env: Mapping[str, str], log: Log) -> int:
    reason = log.clean(message)
    log.error(f"error: {reason}")
    sysroot = text(env, "LAUNCHER_SYSROOT").rstrip("/")
    process.termination_log(text(env, "TERMINATION_LOG"), sysroot, status, reason)
    if text(env, "TRAINING_JOB_NAME"):
        process.failure_file(sysroot, reason)
    return status
