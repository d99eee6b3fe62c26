"""The preflight in containers with real frameworks: each fault of benchmarks.preflight is named, and no healthy node.

Faults are planted in the containers' network namespaces, from outside: images have neither tc nor iptables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from benchmarks import preflight

pytestmark = [
    pytest.mark.big("cpu", "jax", "tf-cpu"),
    pytest.mark.slow(
        "tests/unit/launcher/preflight/test_preflight.py, with launchers on one host and fakes of the framework"
    ),
    pytest.mark.needs("nsenter", "tc", "iptables"),
]
TARGETS = {"torch": "cpu", "jax": "jax", "tf": "tf-cpu"}


@pytest.fixture(scope="module")
def nodes(built_image: Callable[[str], str]) -> Iterator[preflight.Cluster]:
    for framework, target in TARGETS.items():
        preflight.IMAGES[framework] = built_image(target)
    with preflight.cluster(preflight.NODES) as made:
        yield made


@pytest.mark.parametrize("fault", preflight.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_on_every_node(nodes: preflight.Cluster, fault: preflight.Fault) -> None:
    run = nodes.run(fault.framework, preflight.NODES, fault)
    assert not preflight.problem(fault, run)


@pytest.mark.parametrize("framework", TARGETS)
def test_nodes_that_are_fit_start_their_command(nodes: preflight.Cluster, framework: str) -> None:
    run = nodes.run(framework, preflight.NODES)
    assert set(run.statuses.values()) == {0}, run.logs
    assert all("started" in log.splitlines() for log in run.logs.values())  # stdout; the launcher's lines are stderr
    assert preflight.TIMES.search(run.logs[0])
