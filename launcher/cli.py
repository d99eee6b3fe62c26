"""Arguments, and the order in which everything runs. Parsed by hand: argparse would double the start-up time."""

from __future__ import annotations

import os
import sys

from launcher import cluster as clusters
from launcher import explain, process, redact, torchrun
from launcher import exports as exporting
from launcher.errors import CONFIG, PERMANENT, RETRYABLE, LaunchError, config_error
from launcher.explain import Report
from launcher.host import Host
from launcher.image import MANIFEST, read_image
from launcher.runtime import Facts, decide
from launcher.settings import VARIABLES, Settings, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.image import Image
    from launcher.runtime import Decision
    from launcher.tpu_node import Answer

USAGE = """\
usage: launch [OPTIONS] [TRAINER [ARGS...]]   run a trainer of this image (none named: the default one)
       launch [OPTIONS] -- COMMAND [ARGS...]  run any command
       launch [OPTIONS] ./script | COMMAND    the same, when the word is a path or on PATH and no trainer's name

Find the accelerator and the cluster, export what the framework needs, then exec the command.
Words from the first one that is no option of the launcher go to the trainer.

options:
  --print-env [--json]  print what would be exported, start nothing
  --explain             print every signal, which one won and what follows; start nothing
  --runtime NAME        cpu, gpu, tpu-local or tpu-node, instead of finding out
  --require-healthy     wait until the TPU node is HEALTHY, not only READY
  --force               replace derived variables that are already set
  --signal-group        as PID 1: signal the trainer's process group, not only the trainer
  --help                this text
"""

# option -> the setting it stands for
SWITCHES = {
    "--force": "force",
    "--require-healthy": "LAUNCHER_REQUIRE_HEALTHY",
    "--signal-group": "LAUNCHER_SIGNAL_GROUP",
}
MODES = ("--print-env", "--explain")


class Arguments:
    """The command line, taken apart.

    Attributes:
        flags: setting -> value.
        mode: "", "--print-env", "--explain" or "--help".
        json: `--json` was given.
        words: trainer or command, and its arguments.
        is_command: the words stood after `--`.
    """

    def __init__(self) -> None:
        self.flags: dict[str, str] = {}
        self.mode = ""
        self.json = False
        self.words: list[str] = []
        self.is_command = False


def parse(argv: list[str]) -> Arguments:
    """Take the command line apart.

    An option that is not the launcher's is the default trainer's: platforms that give only arguments
    (`--job-dir ...`, Vertex AI's `args:`) start the image with nothing else.

    Raises:
        LaunchError: (2) for options that do not fit together.
    """
    found = Arguments()
    rest = list(argv)
    while rest:
        word = rest[0]
        if word in MODES and found.mode in ("", word):
            found.mode = word
        elif word in MODES:
            raise config_error(f"{found.mode} and {word} exclude each other")
        elif word == "--help":
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
        raise config_error("--json goes with --print-env")
    return found


def find_command(arguments: Arguments, image: Image, path: str) -> tuple[list[str], bool]:
    """What to start, and whether it is a trainer of the image.

    A trainer's name wins over a command of the same name; a word with a slash, or one found on PATH, is a command.

    Args:
        arguments: the command line.
        image: its trainers.
        path: the PATH variable.

    Raises:
        LaunchError: (2) for a word that is neither.
    """
    words = arguments.words
    if arguments.is_command:
        return words, False
    if not words or words[0].startswith("-"):
        if image.default:
            return [*image.trainers[image.default], *words], True
        if not words:
            return [], False
        raise config_error(f"{words[0][:60]!r} is no option of the launcher, and this image has no default trainer")
    name = words[0]
    if name in image.trainers:
        return [*image.trainers[name], *words[1:]], True
    if "/" in name or _on_path(name, path):
        return words, False
    if not image.trainers:
        raise config_error(f"{name[:60]!r} is no command on PATH, and this image has no trainers ({MANIFEST})")
    raise config_error(
        f"{name[:60]!r} is no trainer of this image; trainers: {', '.join(sorted(image.trainers))}; "
        "any other command goes after `--`"
    )


def _on_path(name: str, path: str) -> bool:
    return bool(name) and any(os.access(os.path.join(folder, name), os.X_OK) for folder in path.split(os.pathsep))


class Log:
    """Lines on stderr; stdout belongs to the trainer.

    Args:
        env: whose secrets are taken out of every line.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.level = "normal"
        self._env = env
        self._hidden: list[str] | None = None

    def clean(self, line: str) -> str:
        """A line without secrets and control characters."""
        if self._hidden is None:
            self._hidden = redact.secrets(self._env)
        return redact.one_line(redact.scrub(line, self._hidden))

    def info(self, line: str) -> None:
        """What happens; not with LAUNCHER_LOG=quiet."""
        if self.level != "quiet":
            self.error(line)

    def error(self, line: str) -> None:
        """What must be seen."""
        print(f"launch: {self.clean(line)}", file=sys.stderr, flush=True)


def run(argv: list[str]) -> int:
    """The launcher, from arguments to exec. Returns the exit status when nothing was exec'ed."""
    if os.getpid() == 1:
        process.hold_signals()
    env = dict(os.environ)
    log = Log(env)
    retryable = RETRYABLE
    try:
        arguments = parse(argv)
        if arguments.mode == "--help":
            print(USAGE + "\nvariables:")
            for name, (default, meaning) in VARIABLES.items():
                print(f"  {name:26} {meaning}" + (f" [{default}]" if default else ""))
            return 0
        settings = Settings(env, arguments.flags)
        retryable = settings.retryable_exit
        log.level = settings.log
        report = resolve(arguments, env, settings, log)
        if arguments.mode:
            _print(report, arguments, log)
            return 0
        for line in _start_lines(report, settings):
            log.error(line)
        return _start(report, settings, log)
    except LaunchError as error:
        return _fail(error.message, error.status, env, log)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, env, log)
    except RecursionError:
        return _fail("a variable holds JSON that is nested too deeply", CONFIG, env, log)
    except MemoryError:
        return _fail("out of memory", retryable, env, log)
    except Exception as error:  # the last line of defence: a job's log gets a line, never a traceback
        import traceback

        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno}"
        return _fail(f"internal error at {where}: {type(error).__name__}: {error}", PERMANENT, env, log)


def resolve(arguments: Arguments, env: Mapping[str, str], settings: Settings, log: Log) -> Report:
    """Find everything out, in the contract's order, waiting for a TPU node if there is one.

    Raises:
        LaunchError: see the exit statuses in `errors`.
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
    command, named = find_command(arguments, image, env.get("PATH", os.defpath))
    if not command and not arguments.mode:
        raise config_error(f"nothing to run: {MANIFEST} names no default trainer; use `launch -- COMMAND`")
    decision = decide(facts)
    exporting.refuse_tpu_node(facts, decision)
    if decision.runtime == "tpu-local":
        _complete_slice(facts, decision)
    cluster = clusters.resolve(env, settings, decision.slice)
    nproc = torchrun.processes(facts, decision.runtime, named, cluster)
    wrapped = torchrun.wrap(command, facts, cluster, nproc) if command else None
    if nproc > 1 and command and not wrapped and settings.nproc:
        decision.warnings.append(f"LAUNCHER_NPROC={nproc} has no effect: the command is started as it is")
    endpoints = decision.node.endpoints if decision.node else []
    accelerator_type = ""
    if decision.node and decision.node.name:
        answer = _wait(facts, decision, log)
        endpoints, accelerator_type = answer.endpoints, answer.accelerator_type
    gpus = facts.host.gpu_count(env) if decision.runtime == "gpu" else 1
    one_process = not wrapped and (gpus <= 1 or settings.nproc == 1)
    if gpus > 1 and facts.has("RANK") and not (wrapped or one_process or cluster.given or facts.has("LOCAL_RANK")):
        # Lightning, for one, would take the platform's nodes for processes (pitfall 15, S19).
        decision.warnings.append(
            f"RANK and WORLD_SIZE are set and count nodes, but the command sees {gpus} GPUs: "
            f"LAUNCHER_NPROC={gpus} starts torchrun; unset them if the command places its own processes"
        )
    exports = exporting.plan(facts, decision, cluster, endpoints, accelerator_type, one_process)
    exporting.tf_config(exports, facts, decision, cluster)
    return Report(facts, decision, cluster, endpoints, exports, wrapped or command)


def _complete_slice(facts: Facts, decision: Decision) -> None:
    """Ask a TPU VM's metadata server about the slice where the environment does not tell and torch_xla would ask."""
    known = decision.slice is not None and bool(decision.slice.workers)
    if (
        known
        or not facts.tpu_chips
        or facts.has("TPU_SKIP_MDS_QUERY")
        or not facts.image.may_be("torch_xla", "torch_tpu")
    ):
        return
    from launcher.cloud import METADATA_ADDRESS, PROBE_TIMEOUT, Metadata, tpu_vm_attributes
    from launcher.fetch import FetchError
    from launcher.tpu_vm import slice_from_metadata

    metadata = Metadata(facts.settings.metadata_host or METADATA_ADDRESS, PROBE_TIMEOUT)
    try:
        attributes = tpu_vm_attributes(metadata)
    except FetchError as error:
        decision.warnings.append(
            f"the metadata server did not say whether this TPU VM is part of a slice ({error}); taken as a single "
            "host: for several, set TPU_SKIP_MDS_QUERY=1 and the TPU_* variables of docs/launcher.md"
        )
        return
    if attributes:
        decision.slice = slice_from_metadata(attributes)


def _wait(facts: Facts, decision: Decision, log: Log) -> Answer:
    """Wait for the decision's TPU node."""
    import time

    from launcher.cloud import Metadata, NodeClient, Tokens, google_auth_token
    from launcher.wait import wait_for_node

    settings, env = facts.settings, facts.env
    node = decision.node
    assert node is not None
    metadata = Metadata(settings.metadata_host)
    tokens = Tokens(metadata, lambda: google_auth_token(facts.image, env))
    client = NodeClient(node, settings, metadata, tokens)

    def last_words(reason: str, status: int) -> None:
        _fail(f"{reason} for TPU {node.name!r}", status, env, log)

    with process.ExitOnSignal(last_words):
        answer = wait_for_node(client, settings, time.sleep, time.monotonic, _chance, log.info)
    decision.warnings.extend(client.warnings)
    if answer.health not in ("", "HEALTHY", "HEALTH_UNSPECIFIED"):
        decision.warnings.append(f"TPU {node.name!r} is READY, but its health is {answer.health}")
    return answer


def _chance() -> float:
    """Uniform in [0, 1), without the 5 ms that importing `random` costs."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


def _print(report: Report, arguments: Arguments, log: Log) -> None:
    if arguments.mode == "--explain":
        lines = explain.signals(report.facts, report.decision.rule) + explain.summary(report)
    elif arguments.json:
        import json

        # Scrubbed as text first: a secret must not hide behind JSON's escapes.
        data = _scrubbed(explain.as_data(report), log)
        lines = [json.dumps(data, indent=2)]
        print(lines[0])
        return
    else:
        lines = explain.as_assignments(report)
        for message in report.exports.warnings:
            log.error(f"warning   {message}")
    for line in lines:
        print(log.clean(line))


def _scrubbed(data: object, log: Log) -> object:
    if isinstance(data, dict):
        return {key: _scrubbed(value, log) for key, value in data.items()}
    if isinstance(data, list):
        return [_scrubbed(value, log) for value in data]
    return log.clean(data) if isinstance(data, str) else data


def _start_lines(report: Report, settings: Settings) -> list[str]:
    if settings.log == "quiet":
        return [f"warning   {message}" for message in report.exports.warnings]
    before = explain.signals(report.facts, report.decision.rule) if settings.log == "explain" else []
    return before + explain.summary(report)


def _start(report: Report, settings: Settings, log: Log) -> int:
    cluster, env = report.cluster, report.facts.env
    if cluster.node_rank and cluster.nnodes > 1 and not cluster.given and report.facts.image.may_be("torch"):
        import time

        def last_words(reason: str, status: int) -> None:
            _fail(f"{reason} for the name of node 0, {cluster.master_addr!r}", status, env, log)

        with process.ExitOnSignal(last_words):
            found = process.wait_for_name(cluster.master_addr, settings.dns_timeout, time.sleep, time.monotonic)
        if not found:
            raise LaunchError(
                f"the name of node 0, {cluster.master_addr!r} ({cluster.source}), did not resolve within "
                f"{settings.dns_timeout:g} s: is node 0 running? LAUNCHER_DNS_TIMEOUT waits longer",
                settings.retryable_exit,
            )
    trainers_env = report.exports.apply()
    if os.getpid() == 1:
        return process.supervise(report.command, trainers_env, settings)
    process.replace(report.command, trainers_env)


def _fail(message: str, status: int, env: Mapping[str, str], log: Log) -> int:
    reason = log.clean(message)
    log.error(f"error: {reason}")
    process.termination_log(text(env, "TERMINATION_LOG"), text(env, "LAUNCHER_SYSROOT").rstrip("/"), status, reason)
    return status
