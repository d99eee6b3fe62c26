"""Cluster coordinates (R13), and the variables that the trainer gets from them."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from launcher.cluster import resolve
from launcher.errors import LaunchError
from launcher.settings import Settings
from launcher.tpu_vm import slice_from_env
from launching import Launch, Machine, cluster_spec

GPUS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")
TORCH = {"LAUNCHER_FRAMEWORK": "torch==2.9.1"}


def tf_config(cluster: dict[str, int], task: str, index: int, **more: object) -> str:
    hosts = {kind: [f"{kind}-{number}:2222" for number in range(count)] for kind, count in cluster.items()}
    return json.dumps({"cluster": hosts, "task": {"type": task, "index": index, "trial": "1"}, **more})


def _coordinates(env: dict[str, str]) -> tuple[object, ...]:
    found = resolve(env, Settings(env), slice_from_env(env) if "TPU_WORKER_HOSTNAMES" in env else None)
    return found.source, found.role, found.node_rank, found.nnodes, found.master_addr, found.master_port


VERTEX = "cmle-training-workerpool0-ab-0"
TWO = {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}
KUBEFLOW = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "4"}
HOSTS = {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3"}
MEGASCALE = {"MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080", "MEGASCALE_NUM_SLICES": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="no-variables"),
        pytest.param({"CLUSTER_SPEC": ""}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="empty"),
        pytest.param({"CLUSTER_SPEC": "{}"}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="no-cluster"),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 2, 2], "workerpool1", 1)},
            ("CLUSTER_SPEC", "worker", 2, 3, VERTEX, 2222),
            id="worker-of-a-cluster-with-servers",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool0", 0)},
            ("CLUSTER_SPEC", "master", 0, 2, VERTEX, 2222),
            id="chief-of-two-nodes",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 2, 2, 1], "workerpool0", 0, "TRIAL_ID")},
            ("CLUSTER_SPEC", "master", 0, 3, VERTEX, 2222),
            id="chief-of-four-pools",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 2, 2, 1], "workerpool2", 1)},
            ("CLUSTER_SPEC", "server", None, 3, VERTEX, 2222),
            id="parameter-server",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 2, 2, 1], "workerpool3", 0)},
            ("CLUSTER_SPEC", "evaluator", None, 3, VERTEX, 2222),
            id="evaluator-pool",
        ),
        pytest.param(
            {"CLUSTER_SPEC": json.dumps({"task": {"type": "workerpool1", "index": "0"}, "job": 3,
                                         "cluster": {"workerpool1": ["w1:2222"], "workerpool0": ["w0:2222"]}})},
            ("CLUSTER_SPEC", "worker", 1, 2, "w0", 2222),
            id="key-order-and-index-as-text",
        ),
        pytest.param(
            {"TF_CONFIG": tf_config({"chief": 1, "ps": 1, "worker": 2}, "worker", 0, environment="cloud")},
            ("TF_CONFIG", "worker", 1, 3, "chief-0", 2222),
            id="worker-after-a-chief",
        ),
        pytest.param(
            {"TF_CONFIG": tf_config({"worker": 2}, "worker", 0)},
            ("TF_CONFIG", "master", 0, 2, "worker-0", 2222),
            id="no-chief",
        ),
        pytest.param(
            {"TF_CONFIG": tf_config({"master": 1, "worker": 1}, "master", 0)},
            ("TF_CONFIG", "master", 0, 2, "master-0", 2222),
            id="master",
        ),
        pytest.param(
            {"TF_CONFIG": tf_config({"chief": 1, "worker": 1}, "evaluator", 0)},
            ("TF_CONFIG", "evaluator", None, 2, "chief-0", 2222),
            id="evaluator",
        ),
        pytest.param(
            {"TF_CONFIG": tf_config({"chief": 1, "ps": 2}, "ps", 1)},
            ("TF_CONFIG", "server", None, 1, "chief-0", 2222),
            id="ps",
        ),
        pytest.param(
            {"TF_CONFIG": '{"environment": "cloud", "task": {"type": "master", "index": 0}}'},
            ("single node", "master", 0, 1, "127.0.0.1", 0),
            id="ai-platform-single",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0), "TF_CONFIG": "not read"},
            ("CLUSTER_SPEC", "worker", 1, 2, VERTEX, 2222),
            id="CLUSTER_SPEC-over-TF_CONFIG",
        ),
        pytest.param(
            {"MASTER_ADDR": "m", "RANK": "1", "WORLD_SIZE": "2", "CLUSTER_SPEC": "not read"},
            ("MASTER_ADDR", "worker", 1, 2, "m", 29500),
            id="explicit",
        ),
        pytest.param(
            {**KUBEFLOW, "RANK": "2", "WORLD_SIZE": "12", "PET_NODE_RANK": "2"},
            ("MASTER_ADDR", "worker", 2, 3, "job-master-0", 23456),
            id="kubeflow-v1",
        ),
        pytest.param(
            {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "6105"},
            ("NODE_RANK", "worker", 1, 2, "10.0.0.4", 6105),
            id="nodes",
        ),
        pytest.param(
            {"NODE_RANK": "1", "NNODES": "2", "LAUNCHER_MASTER_ADDR": "10.0.0.4"},
            ("NODE_RANK", "worker", 1, 2, "10.0.0.4", 29500),
            id="nodes-with-an-address-for-the-launcher",
        ),
        pytest.param(
            {"NODE_RANK": "0", "NNODES": "1"}, ("NODE_RANK", "master", 0, 1, "127.0.0.1", 0), id="one-node"
        ),
        pytest.param(
            {"NNODES": "4"}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="size-without-a-rank"
        ),
        pytest.param(
            {"WORLD_SIZE": "16", "MASTER_ADDR": "m", "SLURM_JOB_ID": "7"},
            ("single node", "master", 0, 1, "m", 0),
            id="WORLD_SIZE-of-a-batch-script",
        ),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0)},
            ("CLUSTER_SPEC", "master", 0, 1, "127.0.0.1", 0),
            id="one-replica",
        ),
        pytest.param(
            {"MASTER_ADDR": "m", "RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1234"},
            ("MASTER_ADDR", "master", 0, 1, "m", 1234),
            id="one-rank",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "1", "MASTER_ADDR": "m"},
            ("PET_*", "worker", 1, 2, "m", 29500),
            id="PET-with-MASTER_ADDR",
        ),
        pytest.param(
            {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29400"},
            ("PET_*", "worker", 1, 3, "m", 29400),
            id="kubeflow-v2",
        ),
        pytest.param(
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "m:29401"}, ("PET_*", "master", 0, 4, "m", 29401), id="elastic"
        ),
        pytest.param({"PET_NPROC_PER_NODE": "2"}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="nproc"),
        pytest.param(
            {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "m",
             "MASTER_PORT": "1", "RANK": "9", "WORLD_SIZE": "16", "CLUSTER_SPEC": "not read"},
            ("torchelastic", "worker", 1, 2, "m", 1),
            id="torchelastic",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "2", "NNODES": "4", "JOBSET_NAME": "js", "REPLICATED_JOB_NAME": "w"},
            ("JOB_COMPLETION_INDEX", "worker", 2, 4, "js-w-0-0.js", 29500),
            id="jobset",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "pod-0.svc", "MASTER_PORT": "1234"},
            ("JOB_COMPLETION_INDEX", "worker", 1, 2, "pod-0.svc", 1234),
            id="indexed-job",
        ),
        pytest.param(
            {"JOB_COMPLETION_INDEX": "3"}, ("single node", "master", 0, 1, "127.0.0.1", 0), id="independent-pods"
        ),
        pytest.param(
            {**HOSTS, "TPU_WORKER_ID": "1"}, ("TPU_WORKER_HOSTNAMES", "worker", 1, 4, "h0", 8482), id="tpu-slice"
        ),
        pytest.param(
            {**HOSTS, **MEGASCALE, "TPU_WORKER_ID": "1", "MEGASCALE_SLICE_ID": "1"},
            ("TPU_WORKER_HOSTNAMES", "worker", 5, 8, "job-slice-0-0.job", 8482),
            id="multislice",
        ),
        pytest.param(
            {"LAUNCHER_MASTER_PORT": "12345", "LAUNCHER_MASTER_ADDR": "me",
             "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool0", 0)},
            ("CLUSTER_SPEC", "master", 0, 2, "me", 12345),
            id="override",
        ),
    ],
)  # fmt: skip
def test_coordinates(env: dict[str, str], expected: tuple[object, ...]) -> None:
    assert _coordinates(env) == expected


def test_the_trial_of_a_tuning_job_is_known() -> None:
    for env in (
        {"CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0, "7")},
        {"TF_CONFIG": json.dumps({"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0, "trial": "7"}})},
    ):
        assert resolve(env, Settings(env)).trial == "7"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        pytest.param(
            {"CLUSTER_SPEC": '{"cluster": {"worker": ["a:1"]}}'}, "Invalid task type: worker.", id="unknown-pool"
        ),
        pytest.param({"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC is not JSON", id="json"),
        pytest.param({"CLUSTER_SPEC": '{"task": {"type": "workerpool0"}}'}, "has no cluster", id="no-cluster"),
        pytest.param({"CLUSTER_SPEC": '{"cluster": {}}'}, "has no cluster", id="empty-cluster"),
        pytest.param({"CLUSTER_SPEC": "[]"}, "CLUSTER_SPEC is not a JSON object", id="list"),
        pytest.param({"CLUSTER_SPEC": '{"cluster": []}'}, "must be an object of lists", id="cluster"),
        pytest.param({"CLUSTER_SPEC": '{"cluster": {"workerpool0": "a"}}'}, "must be a list of host:port", id="pool"),
        pytest.param({"CLUSTER_SPEC": '{"cluster": {"workerpool1": ["a:1"]}}'}, "has no workerpool0", id="no-pool-0"),
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 5)}, "lists 1 of them", id="index"),
        pytest.param(
            {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool9", 0)}, "Invalid task type: workerpool9", id="type"
        ),
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool0", -1)}, "whole number from 0", id="negative"),
        pytest.param(
            {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}'}, "no task", id="no-task"
        ),
        pytest.param(
            {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a b"]}, "task": {"type": "workerpool0", "index": 0}}'},
            "is not host:port",
            id="host",
        ),
        pytest.param({"TF_CONFIG": "x"}, "TF_CONFIG is not JSON", id="tf-json"),
        pytest.param(
            {"TF_CONFIG": '{"cluster": {"ps": ["a:1"]}}'}, "has no chief, no master and no worker", id="tf-no-world"
        ),
        pytest.param({"TF_CONFIG": '{"cluster": {"boss": ["a:1"]}}'}, "Invalid task type: boss", id="tf-type"),
        pytest.param({"MASTER_ADDR": "m", "RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'", id="rank"),
        pytest.param(
            {"MASTER_ADDR": "m", "RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but WORLD_SIZE is 2", id="world"
        ),
        pytest.param({"MASTER_ADDR": "m m", "RANK": "0", "WORLD_SIZE": "1"}, "is not host:port", id="master"),
        pytest.param({"PET_NNODES": "2", "PET_NODE_RANK": "2"}, "PET_NODE_RANK is 2, but PET_NNODES is 2", id="pet"),
        pytest.param({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "address of node 0 is unknown", id="pet-no-address"),
        pytest.param({"PET_NNODES": "2", "PET_MASTER_ADDR": "m"}, "rank of this node is unknown", id="pet-no-rank"),
        pytest.param({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1 and WORLD_SIZE=2 are set", id="rank-no-address"),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "JOB_COMPLETION_INDEX": "1"},
            "RANK=1 and WORLD_SIZE=2 are set",
            id="rank-no-address-in-an-indexed-job",
        ),
        pytest.param({"NODE_RANK": "1", "NNODES": "2"}, "NODE_RANK=1 and NNODES=2 are set", id="node-no-address"),
        pytest.param(
            {"NODE_RANK": "2", "NNODES": "2", "MASTER_ADDR": "m"}, "NODE_RANK is 2, but NNODES is 2", id="node-rank"
        ),
        pytest.param({"JOB_COMPLETION_INDEX": "4", "NNODES": "4", "MASTER_ADDR": "m"}, "there are 4 hosts", id="job"),
        pytest.param({"JOB_COMPLETION_INDEX": "1", "NNODES": "4"}, "the address of pod 0 is unknown", id="job-no-head"),
        pytest.param({"MEGASCALE_NUM_SLICES": "x"}, "MEGASCALE_NUM_SLICES is 'x'", id="slices"),
    ],
)
def test_invalid_clusters_are_one_line_and_status_2(launch: Launch, env: dict[str, str], message: str) -> None:
    launched = launch(env)
    assert launched.status == 2
    assert message in launched.err
    assert launched.err.count("\n") == 1


def _exports(launch: Launch, env: dict[str, str]) -> dict[str, str]:
    names = (
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "NNODES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    )
    return {name: value for name, value in launch(env).exports.items() if name in names}


def test_exports_for_the_first_of_two_nodes(launch: Launch) -> None:
    assert _exports(launch, {**TORCH, "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool0", 0)}) == {
        "MASTER_ADDR": VERTEX,
        "MASTER_PORT": "2222",
        "NODE_RANK": "0",
        "NNODES": "2",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }


@pytest.mark.parametrize(
    ("env", "exported"),
    [
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 1, 1], "workerpool2", 0)}, set(), id="outside-the-world"),
        pytest.param({"TORCHELASTIC_RUN_ID": "x"}, set(), id="torchelastic"),
        pytest.param(
            {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m"},
            {"MASTER_PORT"},
            id="process-started-by-a-launcher",
        ),
    ],
)
def test_coordinates_that_are_not_changed(launch: Launch, env: dict[str, str], exported: set[str]) -> None:
    assert set(_exports(launch, {**TORCH, **env})) == exported


def test_several_gpus_without_torchrun_get_no_rank(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*GPUS)
    env = {**TORCH, "NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "m"}
    launched = launch(env, "--print-env", "--json", "--", "bash", "train.sh")
    assert set(launched.exports) == {"MASTER_PORT"}


def test_a_rank_that_counts_nodes_warns_with_several_gpus(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*GPUS)
    env = {**TORCH, "MASTER_ADDR": "m", "RANK": "0", "WORLD_SIZE": "1"}
    assert "count nodes, but the command sees 2 GPUs" in launch(env).data["warnings"][0]
    for more in ({"LAUNCHER_NPROC": "1"}, {"LOCAL_RANK": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}):
        assert launch({**env, **more}).data["warnings"] == []


def test_one_process_on_request_gets_a_rank(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*GPUS)
    assert _exports(launch, {**TORCH, "LAUNCHER_NPROC": "1"})["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("framework", "task", "expected"),
    [
        ("tensorflow==2.20", ("workerpool1", 1), {"index": 1, "type": "worker"}),
        ("tensorflow==2.20", ("workerpool0", 0), {"index": 0, "type": "chief"}),
        ("tensorflow==2.20", ("workerpool2", 0), {"index": 0, "type": "ps"}),
        ("tensorflow==2.20", ("workerpool3", 0), {"index": 0, "type": "evaluator"}),
        ("torch==2.9.1", ("workerpool1", 1), None),
    ],
)
def test_tf_config_is_built_from_cluster_spec(
    launch: Launch, framework: str, task: tuple[str, int], expected: dict[str, Any] | None
) -> None:
    env = {"LAUNCHER_FRAMEWORK": framework, "CLUSTER_SPEC": cluster_spec([1, 2, 1, 1], *task)}
    found = launch(env).exports.get("TF_CONFIG")
    if expected is None:
        assert found is None
        return
    config = json.loads(found or "")
    assert config["task"] == expected
    assert {kind: len(hosts) for kind, hosts in config["cluster"].items()} == {"chief": 1, "worker": 2, "ps": 1}


def test_tf_config_is_not_changed(launch: Launch) -> None:
    env = {"LAUNCHER_FRAMEWORK": "tensorflow==2.20", "CLUSTER_SPEC": cluster_spec([1, 2], "workerpool0", 0)}
    assert "TF_CONFIG" not in launch({**env, "TF_CONFIG": tf_config({"chief": 1}, "chief", 0)}).exports


OUTSIDE_AND_RANKED = {"MASTER_ADDR": VERTEX, "MASTER_PORT": "2222"}


@pytest.mark.parametrize(
    ("env", "role"),
    [
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 1, 1], "workerpool2", 0)}, "server", id="server"),
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 1, 0, 1], "workerpool3", 0)}, "evaluator", id="evaluator-pool"),
        pytest.param({"TF_CONFIG": tf_config({"chief": 1, "ps": 1}, "ps", 0)}, "server", id="ps"),
        pytest.param({"TF_CONFIG": tf_config({"chief": 1}, "evaluator", 0)}, "evaluator", id="evaluator"),
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="alone"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "3", **OUTSIDE_AND_RANKED}, id="with-RANK"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1", **OUTSIDE_AND_RANKED}, id="with-rank-0"),
        pytest.param({"NODE_RANK": "0", "NNODES": "2", **OUTSIDE_AND_RANKED}, id="with-NODE_RANK"),
        pytest.param({"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "m"}, id="with-PET"),
    ],
)
def test_a_replica_outside_the_training_world_gets_its_role_and_no_rank(
    launch: Launch, env: dict[str, str], role: str, more: dict[str, str]
) -> None:
    data = launch({**TORCH, **env, **more}).data
    assert (data["cluster"]["role"], data["cluster"]["node_rank"]) == (role, None)
    assert data["exports"] == {"LAUNCHER_ROLE": role}


def test_a_replica_of_the_training_world_gets_no_role(launch: Launch) -> None:
    assert "LAUNCHER_ROLE" not in launch({**TORCH, **TWO}).exports


def test_ranks_that_count_servers_are_replaced_by_those_of_the_training_world(launch: Launch) -> None:
    env = {**TORCH, "CLUSTER_SPEC": cluster_spec([1, 1, 1, 1], "workerpool1", 0), "MASTER_ADDR": VERTEX}
    data = launch({**env, "RANK": "1", "WORLD_SIZE": "4"}).data
    assert data["exports"]["WORLD_SIZE"] == "2"
    assert "RANK=1 and WORLD_SIZE=4 count replicas outside the training world" in data["warnings"][0]
    # Without such replicas, or with ranks that count processes, they are kept.
    two = {**env, "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}
    for world in ("2", "16"):
        data = launch({**two, "RANK": "1", "WORLD_SIZE": world}).data
        assert "WORLD_SIZE" not in data["exports"]
        assert data["warnings"] == []


def test_one_process_on_one_node_gets_no_distributed_variables(launch: Launch, machine: Machine) -> None:
    for env in ({}, {"CLUSTER_SPEC": cluster_spec([1], "workerpool0", 0)}, {"JOB_COMPLETION_INDEX": "3"}):
        assert _exports(launch, {**TORCH, **env}) == {}
    machine.add_devices("/dev/nvidiactl", "/dev/nvidia0")
    assert _exports(launch, TORCH) == {}


def test_one_process_on_request_gets_a_free_port(launch: Launch) -> None:
    with socket.create_server(("", 29500), reuse_port=True) if _is_free(29500) else contextlib.nullcontext():
        exports = _exports(launch, {**TORCH, "LAUNCHER_NPROC": "1"})
    port = int(exports.pop("MASTER_PORT"))
    assert port != 29500 and _is_free(port)
    assert exports == {
        "MASTER_ADDR": "127.0.0.1",
        "NODE_RANK": "0",
        "NNODES": "1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert _exports(launch, {**TORCH, "LAUNCHER_NPROC": "1", "MASTER_PORT": "1234"}).get("MASTER_PORT") is None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


@pytest.mark.parametrize("given", ["{}", '{"task": {"type": "chief", "index": 0}}'])
def test_a_tf_config_without_a_cluster_is_replaced(launch: Launch, given: str) -> None:
    env = {"LAUNCHER_FRAMEWORK": "tensorflow==2.20", "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}
    data = launch({**env, "TF_CONFIG": given}).data
    config = json.loads(data["exports"]["TF_CONFIG"])
    assert (config["task"], len(config["cluster"]["chief"])) == ({"index": 0, "type": "worker"}, 1)
    assert data["warnings"] == ["TF_CONFIG has no cluster: replaced by the one of CLUSTER_SPEC"]


def test_tf_config_is_built_beside_ranks(launch: Launch) -> None:
    env = {"LAUNCHER_FRAMEWORK": "tensorflow==2.20", "CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}
    found = launch({**env, "MASTER_ADDR": VERTEX, "RANK": "1", "WORLD_SIZE": "2"}).exports["TF_CONFIG"]
    assert json.loads(found)["task"] == {"index": 0, "type": "worker"}


def test_an_error_has_an_exit_status() -> None:
    with pytest.raises(LaunchError) as caught:
        resolve({"CLUSTER_SPEC": "{"}, Settings({}))
    assert caught.value.status == 2
