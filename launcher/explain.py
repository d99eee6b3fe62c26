"""The result as JSON (`--print-env --json`) and as text (`--explain`, the first lines of a log).

The form of the JSON is documented in docs/launcher.md and tested by tests/unit/launcher/test_report.py.
"""

from __future__ import annotations

from launcher.address import join
from launcher.redact import HIDDEN, shown, shown_command
from launcher.runtime import RULES
from launcher.sources import SIGNALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from launcher.coordinates import Cluster
    from launcher.exports import Exports
    from launcher.runtime import Decision, Facts
    from launcher.tpu_node.node import Endpoint

LINE = 110  # maximum characters of a line with several exports
# The members of JSON objects that the launcher reads. Others may hold secrets, such as the arguments of a job (R16.2).
CLUSTER = ("cluster", "task")
MEMBERS = {"TPU_CONFIG": ("project", "zone", "tpu_node_name"), "CLUSTER_SPEC": CLUSTER, "TF_CONFIG": CLUSTER}


class Report:
    """The result of a run of the launcher.

    Attributes:
        facts: environment, machine, image and settings.
        decision: the runtime.
        cluster: the coordinates.
        endpoints: addresses of the TPU workers; [] without a TPU node.
        exports: changes to the environment.
        command: the command to start; [] if the image has no default trainer and none was given.
        nproc: number of processes that the launcher starts (R14.1).
        torchrun: the command is torchrun's, which starts the processes (R14.6).
    """

    __slots__ = ("cluster", "command", "decision", "endpoints", "exports", "facts", "nproc", "torchrun")

    def __init__(
        self,
        facts: Facts,
        decision: Decision,
        cluster: Cluster,
        endpoints: list[Endpoint],
        exports: Exports,
        command: list[str],
        nproc: int = 1,
        torchrun: bool = False,
    ) -> None:
        self.facts = facts
        self.decision = decision
        self.cluster = cluster
        self.endpoints = endpoints
        self.exports = exports
        self.command = command
        self.nproc = nproc
        self.torchrun = torchrun


def as_data(report: Report) -> dict[str, object]:
    """The JSON form: always the same seven members.

    `node_rank` is null for nodes outside the training world (parameter servers, evaluators).
    """
    cluster = report.cluster
    return {
        "runtime": report.decision.runtime,
        "why": f"{report.decision.why} ({report.decision.rule})",
        "endpoints": [str(endpoint) for endpoint in report.endpoints],
        "cluster": {
            "source": cluster.source,
            "role": cluster.role,
            "node_rank": cluster.node_rank,
            "nnodes": cluster.nnodes,
            "master_addr": cluster.master_addr,
            "master_port": cluster.master_port,
        },
        "exports": dict(report.exports.values),
        "unsets": list(report.exports.unsets),
        "warnings": list(report.exports.warnings),
    }


def as_assignments(report: Report) -> list[str]:
    """`--print-env` without `--json`: one `NAME=value` or `unset NAME` per line."""
    exports = report.exports
    assigned = [f"{name}={value}" for name, value in exports.values.items()]
    return assigned + [f"unset {name}" for name in exports.unsets]


def summary(report: Report) -> list[str]:
    """The first lines of a job's log."""
    decision, cluster, exports = report.decision, report.cluster, report.exports
    image = report.facts.image
    lines = [f"runtime   {decision.runtime}: {shown('', decision.why)} (rule {decision.rule})"]
    if image.framework:
        lines[0] += f"; image contains {image.framework} {image.version}".rstrip()
    if report.endpoints:
        lines.append("endpoints " + ", ".join(str(endpoint) for endpoint in report.endpoints))
    rank = "outside the training world" if cluster.node_rank is None else f"node {cluster.node_rank}"
    task = cluster.task
    where = cluster.role
    if not task or task.nodes_known:
        where += f", {rank} of {cluster.nnodes}"
    if task:
        where += f", process {task.rank} of {task.world_size}"
    if cluster.master_port:
        where += f", node 0 at {join(cluster.master_addr, cluster.master_port)}"
    trial = f", trial {shown('', cluster.trial)}" if cluster.trial else ""
    lines.append(f"cluster   {cluster.source}: {where}{trial}")
    lines.extend(_packed("export    ", [f"{name}={shown(name, value)}" for name, value in exports.values.items()]))
    lines.extend(_packed("unset     ", exports.unsets))
    lines.extend(f"warning   {message}" for message in exports.warnings)
    if report.command:
        several = f"{report.nproc} processes: " if report.nproc > 1 and not report.torchrun else ""
        lines.append(f"start     {several}{shown_command(report.command)}")
    return lines


def _packed(head: str, words: list[str]) -> list[str]:
    """Several words per line, so that the result fits on the first screen of a log."""
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < LINE:
            lines[-1] += " " + word
        else:
            lines.append(head + word)
    return lines


def _signal(facts: Facts, name: str) -> str:
    """Return NAME=value for display, with only those MEMBERS of a JSON object that the launcher reads."""
    value = facts.has(name)
    if name in MEMBERS:
        import json

        try:
            items = json.loads(value).items()
            value = json.dumps({key: item for key, item in items if key in MEMBERS[name]}, ensure_ascii=False)
        except (ValueError, RecursionError, AttributeError):
            value = HIDDEN
    return f"{name}={shown(name, value)}"


def signals(facts: Facts, decided: str = "") -> list[str]:
    """One line per rule R0 to R9: the signals it found, and the rule that decided; then the cluster's variables.

    If the NVIDIA driver was asked, also its version, that which the image needs, and the GPUs (R8.3).

    Args:
        facts: environment, machine, image and settings.
        decided: name of the rule that decided; "" if none did because of an error.
    """
    lines = []
    passed = False
    for rule in RULES:
        values = [_signal(facts, name) for name in rule.signals if facts.has(name)]
        if rule.name == "R0" and facts.settings.runtime:
            values = [f"LAUNCHER_RUNTIME={facts.settings.runtime}"]  # or --runtime
        elif rule.name == "R4":
            values = facts.tpu_chips[:4]
        elif rule.name == "R8" and facts.host.has_gpu(facts.env):
            values.append(f"{facts.host.gpu_count(facts.env)} GPU")
        searched = rule.devices or ", ".join(rule.signals[:3]) or "nothing else"
        found = "; ".join(values) or f"none of {searched}" if rule.signals or rule.devices else "no other rule applies"
        if rule.name == decided:
            mark = "<- decided"
        elif values and passed:
            mark = "(outranked)"
        else:
            mark = ""
        passed = passed or rule.name == decided
        lines.append(f"{rule.name}        {found} {mark}".rstrip())
    present = [_signal(facts, name) for name in SIGNALS if facts.has(name)]
    lines.append("cluster   " + ("; ".join(present) or "no cluster variable is set"))
    if facts.driver:
        from launcher import gpus

        lines += gpus.lines(facts.driver, facts.image)
    return lines
