"""Refuse images that cannot use a TPU node (R11.4), and export what others need (R11.5 to R11.7)."""

from __future__ import annotations

from launcher import versions
from launcher.errors import LaunchError, config_error
from launcher.settings import text
from launcher.tpu_node import xrt
from launcher.tpu_node.node import WITHOUT_NODES, parse_endpoints

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from launcher.coordinates import Cluster
    from launcher.exports import Exports
    from launcher.runtime import Decision, Facts
    from launcher.tpu_node.node import Endpoint, Node


def refuse(facts: Facts, decision: Decision) -> None:
    """Fail before the wait if this image cannot use a TPU node (R11.4).

    TPU nodes need XRT, which was removed in torch_xla 2.1 and is not part of torch_tpu and torch. In a rehearsal this
    is a warning. For plain torch and JAX only a requested TPU node arrives here; `decide` passes over a detected one.

    Raises:
        LaunchError: (2) with the alternatives.
    """
    image = facts.image
    if decision.untouched:
        return
    if image.framework in WITHOUT_NODES:
        message = f"{decision.why} {WITHOUT_NODES[image.framework]}"
    elif image.framework == "torch_tpu" or (image.framework == "torch_xla" and not versions.has_xrt(image.version)):
        message = (
            f"{decision.why} names a TPU node, which needs XRT, but {image.framework} {image.version} has no XRT "
            "(removed in torch_xla 2.1): use a TPU VM, or an image with torch_xla <= 2.0"
        )
    else:
        return
    if not facts.settings.rehearse:
        raise config_error(message)
    decision.warnings.append(message)


def exporter(
    facts: Facts, node: Node, cluster: Cluster, endpoints: list[Endpoint], accelerator_type: str
) -> Callable[[Exports], None]:
    """Return what exports the variables of a TPU node (R11.5 to R11.7).

    Args:
        facts: environment, machine, image and settings.
        node: the node.
        cluster: the coordinates.
        endpoints: addresses of the TPU workers.
        accelerator_type: that of the node; "" if unknown.
    """
    return lambda exports: _export(exports, facts, node, cluster, endpoints, accelerator_type)


def _export(
    exports: Exports, facts: Facts, node: Node, cluster: Cluster, endpoints: list[Endpoint], accelerator_type: str
) -> None:
    image = facts.image
    first = endpoints[0]
    if image.may_be("torch", "torch_xla", "torch_tpu"):
        if len(endpoints) == 1:
            exports.default("XRT_TPU_CONFIG", xrt.single(first.host, first.port))
        else:
            _xrt_pod(exports, facts, cluster, endpoints, accelerator_type)
    exports.default("TPU_IP_ADDRESS", first.host)
    if node.name:
        exports.default("TPU_NODE_NAME", node.name)
    address = f"grpc://{first}"
    if not image.may_be("tensorflow"):
        exports.default("TPU_NAME", node.name or address)
        return
    every = ",".join(f"grpc://{endpoint}" for endpoint in endpoints)
    kube = "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS"
    if node.source == kube and not node.had_scheme:
        # TensorFlow reads this variable first and would look its value up as the name of a node (R11.7).
        exports.unset(kube)
        exports.replace("TPU_NAME", every)
        return
    if not _names_addresses(text(facts.env, "TPU_NAME")) and (node.source != kube or not text(facts.env, "TPU_NAME")):
        exports.replace("TPU_NAME", address)
    if len(endpoints) > 1:
        exports.default(kube, every)
    elif not facts.has(kube):
        exports.unset(kube)


def _xrt_pod(
    exports: Exports, facts: Facts, cluster: Cluster, endpoints: list[Endpoint], accelerator_type: str
) -> None:
    if cluster.node_rank is None:
        return
    try:
        variables = xrt.pod(
            [(endpoint.host, endpoint.port) for endpoint in endpoints],
            cluster.nnodes,
            cluster.master_addr,
            cluster.node_rank,
            xrt.cores_per_host(accelerator_type),
            on_vm=False,
        )
    except LaunchError as error:
        if facts.image.framework == "torch_xla" and not facts.settings.rehearse:
            raise
        exports.warn(error.message)
        return
    exports.defaults(variables)


def _names_addresses(value: str) -> bool:
    """Return whether a value consists of addresses, which TensorFlow uses without a request to the API (R11.7)."""
    try:
        return value.startswith("grpc://") and bool(parse_endpoints(value))
    except LaunchError:
        return False
