"""The accelerator runtime of the job: RULES are the rules R0 to R9 in order; the first match decides.

R3 and R4 come before R5 to R7 because Vertex AI sets TPU_CONFIG in jobs on TPU VMs too, where the TPU is attached. The
order of R5, R6 and R7 is TensorFlow's. See docs/launcher-contract.md#runtime for the sources.
"""

from __future__ import annotations

from launcher import versions
from launcher.errors import LaunchError, config_error
from launcher.settings import text
from launcher.tpu_vm import Slice, skips_metadata, slice_from_env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from launcher.gpus import Driver
    from launcher.host import Host
    from launcher.image import Image
    from launcher.settings import Settings
    from launcher.tpu_node.node import Node

NODE_VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME", "TPU_CONFIG")
SLICE_VARIABLES = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH")
XRT_VARIABLES = ("XRT_TPU_CONFIG", "XRT_DEVICE_MAP", "XRT_WORKERS", "GPU_NUM_DEVICES", "CPU_NUM_DEVICES")


class Facts:
    """Everything that a decision depends on: the environment, the machine, the image and the settings.

    `driver` is the answer of the NVIDIA driver; None if it was not asked (R8.3). `problems` are refusals that a
    preflight reports to all nodes (R17.2).
    """

    __slots__ = ("driver", "env", "host", "image", "problems", "settings", "tpu_chips")

    def __init__(self, env: Mapping[str, str], host: Host, image: Image, settings: Settings) -> None:
        self.env = env
        self.host = host
        self.image = image
        self.settings = settings
        self.driver: Driver | None = None
        self.problems: list[str] = []
        # An image for NVIDIA GPUs does not use a TPU (R4).
        self.tpu_chips = [] if image.accelerator == "nvidia" else host.tpu_chips(env)

    def has(self, name: str) -> str:
        """The value of a variable; "" if unset or blank (R10.1)."""
        return text(self.env, name)


class Decision:
    """The runtime, and the rule that decided.

    Attributes:
        runtime: "tpu-node", "tpu-local", "gpu" or "cpu".
        why: the signal that decided, as text.
        rule: "R0" to "R9", set by `decide`.
        untouched: the user configured the runtime (R1, R2): nothing is exported for it.
        node: the TPU node; for "tpu-node" only.
        slice: the hosts of the slice, as far as the environment describes them; for "tpu-local" only.
        warnings: one line each.
    """

    __slots__ = ("node", "rule", "runtime", "slice", "untouched", "warnings", "why")

    def __init__(
        self,
        runtime: str,
        why: str,
        untouched: bool = False,
        node: Node | None = None,
        slice: Slice | None = None,
    ) -> None:
        self.runtime = runtime
        self.why = why
        self.rule = ""
        self.untouched = untouched
        self.node = node
        self.slice = slice
        self.warnings: list[str] = list(node.warnings) if node else []


class Rule:
    """A rule that selects the runtime.

    Attributes:
        name: "R0" to "R9", its id in docs/launcher-contract.md.
        signals: the variables that it reads.
        devices: the devices that it looks for.
        decide: returns the decision, or None if the rule does not match.
    """

    __slots__ = ("decide", "devices", "name", "signals")

    def __init__(
        self,
        name: str,
        decide: Callable[[Facts], Decision | None],
        signals: tuple[str, ...] = (),
        devices: str = "",
    ) -> None:
        self.name = name
        self.decide = decide
        self.signals = signals
        self.devices = devices


def _forced(facts: Facts) -> Decision | None:
    runtime = facts.settings.runtime
    if not runtime:
        return None
    why = f"LAUNCHER_RUNTIME={runtime}"
    if runtime == "tpu-local":
        return _attached(facts, why)
    if runtime != "tpu-node":
        return Decision(runtime, why)
    for name in NODE_VARIABLES:
        if facts.has(name):
            return _node(facts, name, why)
    raise config_error(
        f"Please provide a TPU Name to connect to: {why}, but none of {', '.join(NODE_VARIABLES)} is set"
    )


# PJRT_DEVICE -> runtime (R1). TPU_LEGACY exists in torch_xla 2.0 only.
PJRT_RUNTIMES = {
    "TPU": "tpu-local",
    "TPU_LEGACY": "tpu-local",
    "CPU": "cpu",
    "GPU": "gpu",
    "CUDA": "gpu",
    "ROCM": "gpu",
}


def _pjrt(facts: Facts) -> Decision | None:
    device = facts.has("PJRT_DEVICE")
    if not device:
        return None
    # Nothing is exported for devices of other plugins (NEURON, XPU, ...).
    decision = Decision(PJRT_RUNTIMES.get(device.upper(), "cpu"), f"PJRT_DEVICE={device}", untouched=True)
    if device != device.upper():
        decision.warnings.append(f"PJRT_DEVICE={device}: torch_xla expects {device.upper()}")
    xrt = sorted(name for name in facts.env if name.startswith("XRT_") and facts.has(name))
    if xrt:
        # torch_xla tests PJRT_DEVICE first (R1).
        decision.warnings.append(f"PJRT_DEVICE takes precedence over {', '.join(xrt)[:200]}; unset one of the two")
    if decision.runtime == "tpu-local":
        # Only to detect a multi-host slice: the user has configured the runtime, so errors are warnings.
        try:
            decision.slice = slice_from_env(facts.env)
        except LaunchError as error:
            decision.warnings.append(error.message)
    return decision


def _xrt(facts: Facts) -> Decision | None:
    if not any(facts.has(name) for name in XRT_VARIABLES):
        return None
    from launcher.tpu_node.node import from_xrt

    runtime, why, node = from_xrt(facts.env)
    if not runtime:
        return None
    decision, image = Decision(runtime, why, untouched=True, node=node), facts.image
    if image.framework == "torch_xla" and not versions.has_xrt(image.version):
        message = (
            f"XRT was removed in torch_xla 2.1, and this image has {image.version or 'a later version'}: "
            f"unset {decision.why} and set PJRT_DEVICE, or use torch_xla <= 2.0"
        )
        if not facts.settings.rehearse:
            raise config_error(message)
        decision.warnings.append(message)
    return decision


def _gke(facts: Facts) -> Decision | None:
    signals = [name for name in SLICE_VARIABLES if facts.has(name)]
    if skips_metadata(facts.env) and facts.has("TPU_ACCELERATOR_TYPE"):
        signals.append("TPU_SKIP_MDS_QUERY with TPU_ACCELERATOR_TYPE")
    if not signals:
        return None
    decision = Decision("tpu-local", signals[0])
    try:
        decision.slice = slice_from_env(facts.env)
    except LaunchError as error:
        if not facts.settings.rehearse:
            raise
        decision.warnings.append(error.message)
    return decision


def _attached(facts: Facts, why: str = "") -> Decision | None:
    chips = facts.tpu_chips
    if not chips and not why:
        return None
    decision = Decision("tpu-local", why or f"TPU attached: {', '.join(chips[:4])}" + (" ..." if chips[4:] else ""))
    if not chips:
        decision.warnings.append(f"{why}, but no TPU device is in /dev or on the PCI bus")
    if facts.has("TPU_CONFIG"):
        decision.warnings.append("TPU_CONFIG ignored: TPU is attached to this VM")
    return decision


def _node(facts: Facts, source: str, why: str = "") -> Decision | None:
    value = facts.has(source)
    if not value:
        return None
    if source == "TPU_NAME" and value == "local":
        return _attached(facts, "TPU_NAME=local")
    from launcher.tpu_node.node import node_from_env

    node = node_from_env(facts.env, facts.settings, source)
    return Decision("tpu-node", f"{why}, {source}" if why else source, node=node)


def _kube_endpoints(facts: Facts) -> Decision | None:
    return _node(facts, "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")


def _tpu_name(facts: Facts) -> Decision | None:
    return _node(facts, "TPU_NAME")


def _tpu_config(facts: Facts) -> Decision | None:
    return _node(facts, "TPU_CONFIG")


def _gpu(facts: Facts) -> Decision | None:
    return Decision("gpu", "an NVIDIA driver is present") if facts.host.has_gpu(facts.env) else None


def _cpu(facts: Facts) -> Decision:
    return Decision("cpu", "no accelerator detected")


RULES = (
    Rule("R0", _forced, ("LAUNCHER_RUNTIME",)),
    Rule("R1", _pjrt, ("PJRT_DEVICE",)),
    Rule("R2", _xrt, XRT_VARIABLES),
    Rule("R3", _gke, (*SLICE_VARIABLES, "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE")),
    Rule("R4", _attached, devices="/dev/accel*, /dev/vfio/*, PCI"),
    Rule("R5", _kube_endpoints, ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS",)),
    Rule("R6", _tpu_name, ("TPU_NAME",)),
    Rule("R7", _tpu_config, ("TPU_CONFIG",)),
    Rule("R8", _gpu, ("NVIDIA_VISIBLE_DEVICES",), devices="/dev/nvidiactl, /proc/driver/nvidia"),
    Rule("R9", _cpu),
)


def decide(facts: Facts) -> Decision:
    """The decision of the first rule that matches.

    Raises:
        LaunchError: (2) if the signal that decides is invalid.
    """
    unused = ""
    for rule in RULES:
        decision = rule.decide(facts)
        if decision and decision.runtime == "tpu-node" and _cannot_use_node(facts, rule):
            from launcher.tpu_node.node import WITHOUT_NODES

            # The later rules find what the image can use, and nothing waits for the node (R11.4).
            unused = unused or f"{decision.why} {WITHOUT_NODES[facts.image.framework]}: training runs without the TPU"
        elif decision:
            decision.rule = rule.name
            if unused:
                decision.warnings.insert(0, unused)
            return decision
    raise AssertionError("R9 always matches")


def _cannot_use_node(facts: Facts, rule: Rule) -> bool:
    """Whether a detected TPU node is of no use for this image. A rehearsal waits for it all the same (R10.4)."""
    return facts.image.framework in ("torch", "jax") and not facts.settings.rehearse and rule.name in ("R5", "R6", "R7")
