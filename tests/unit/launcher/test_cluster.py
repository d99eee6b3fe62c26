"""Cluster coordinates (R13) and the command that is started for them (R14)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launcher import torchrun
from launcher.cluster import resolve
from launcher.errors import LaunchError
from launcher.host import Host
from launcher.image import Image
from launcher.runtime import Facts
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
KUBEFLOW = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "4"}
HOSTS = {"TPU_WORKER_HOSTNAMES": "h0,h1,h2,h3"}
MEGASCALE = {"MEGASCALE_COORDINATOR_ADDRESS": "job-slice-0-0.job:8080", "MEGASCALE_NUM_SLICES": "2"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, ("single node", "master", 0, 1, "127.0.0.1", 29500), id="no-variables"),
        pytest.param({"CLUSTER_SPEC": ""}, ("single node", "master", 0, 1, "127.0.0.1", 29500), id="empty"),
        pytest.param({"CLUSTER_SPEC": "{}"}, ("single node", "master", 0, 1, "127.0.0.1", 29500), id="no-cluster"),
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
            ("single node", "master", 0, 1, "127.0.0.1", 29500),
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
            {"PET_NNODES": "3", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "29400"},
            ("PET_*", "worker", 1, 3, "m", 29400),
            id="kubeflow-v2",
        ),
        pytest.param(
            {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "m:29401"}, ("PET_*", "master", 0, 4, "m", 29401), id="elastic"
        ),
        pytest.param({"PET_NPROC_PER_NODE": "2"}, ("single node", "master", 0, 1, "127.0.0.1", 29500), id="nproc"),
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
            {"JOB_COMPLETION_INDEX": "3"}, ("single node", "master", 0, 1, "127.0.0.1", 29500), id="independent-pods"
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
            {"MASTER_PORT", "NODE_RANK", "NNODES"},
            id="process-started-by-a-launcher",
        ),
    ],
)
def test_coordinates_that_are_not_changed(launch: Launch, env: dict[str, str], exported: set[str]) -> None:
    assert set(_exports(launch, {**TORCH, **env})) == exported


def test_several_gpus_without_torchrun_get_no_rank(launch: Launch, machine: Machine) -> None:
    machine.add_devices(*GPUS)
    assert set(_exports(launch, TORCH)) == {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "NNODES"}


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


def _started(machine: Machine, env: dict[str, str], command: list[str], named: bool = False) -> list[str]:
    """The command that would be started on this machine."""
    image = Image(framework=env.get("framework", "torch"))
    facts = Facts(env, Host(str(machine.root)), image, Settings(env))
    cluster = resolve(env, facts.settings)
    runtime = "gpu" if facts.host.has_gpu(env) else "cpu"
    nproc = torchrun.processes(facts, runtime, named, cluster)
    return torchrun.wrap(command, facts, cluster, nproc) or command


TRAIN = ["python", "train.py", "--lr", "1"]
TWO = {"CLUSTER_SPEC": cluster_spec([1, 1], "workerpool1", 0)}


@pytest.mark.parametrize(
    ("env", "command", "arguments"),
    [
        pytest.param(
            TWO,
            TRAIN,
            ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", f"--master-addr={VERTEX}", "--master-port=2222"],
            id="vertex",
        ),
        pytest.param(
            {**TWO, "LAUNCHER_NPROC": "4", "LAUNCHER_MASTER_PORT": "29400"},
            ["python3", "-u", "-m", "my.module", "-x"],
            ["--nnodes=2", "--nproc-per-node=4", "--node-rank=1", f"--master-addr={VERTEX}", "--master-port=29400"],
            id="LAUNCHER_NPROC",
        ),
        pytest.param(
            {**TWO, "LAUNCHER_RDZV_BACKEND": "c10d"},
            TRAIN,
            ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--rdzv-backend=c10d",
             f"--rdzv-endpoint={VERTEX}:2222", "--rdzv-id=trainyard", "--rdzv-conf=is_host=false"],
            id="c10d",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1",
             "PET_NPROC_PER_NODE": "2"},
            TRAIN,
            [],
            id="every-option-set-by-PET",
        ),
        pytest.param(
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "1",
             "PET_NPROC_PER_NODE": "2", "LAUNCHER_NPROC": "8"},
            TRAIN,
            ["--nproc-per-node=8"],
            id="LAUNCHER_NPROC-over-PET",
        ),
        pytest.param(
            {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "m:1"},
            TRAIN,
            ["--nproc-per-node=2", "--rdzv-id=trainyard"],
            id="elastic",
        ),
        pytest.param(
            {"LAUNCHER_NPROC": "2"},
            TRAIN,
            ["--nnodes=1", "--nproc-per-node=2", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=29500"],
            id="single-node-on-request",
        ),
    ],
)  # fmt: skip
def test_arguments_of_torchrun(machine: Machine, env: dict[str, str], command: list[str], arguments: list[str]) -> None:
    machine.add_devices(*GPUS)
    script = [word for word in command[1:] if word != "-u"]
    assert _started(machine, env, command) == [command[0], "-m", "torch.distributed.run", *arguments, *script]


@pytest.mark.parametrize(
    ("env", "command"),
    [
        pytest.param({}, TRAIN, id="single-node"),
        pytest.param({**TWO, "LAUNCHER_NPROC": "1"}, TRAIN, id="one-process"),
        pytest.param(TWO, ["bash", "train.sh"], id="not-python"),
        pytest.param(TWO, ["python", "-c", "pass"], id="python-c"),
        pytest.param(TWO, ["python", "-m", "torch.distributed.run", "train.py"], id="torchrun-in-the-command"),
        pytest.param({**TWO, "TORCHELASTIC_RUN_ID": "1"}, TRAIN, id="under-torchrun"),
        pytest.param({**TWO, "LOCAL_RANK": "0"}, TRAIN, id="process-started-by-a-launcher"),
        pytest.param({**TWO, "framework": "tensorflow"}, TRAIN, id="tensorflow"),
        pytest.param({**TWO, "LAUNCHER_REHEARSE": "1"}, TRAIN, id="rehearsal"),
        pytest.param({**TWO, "CUDA_VISIBLE_DEVICES": "0"}, TRAIN, id="one-visible-gpu"),
        pytest.param({"CLUSTER_SPEC": cluster_spec([1, 0, 1], "workerpool2", 0)}, TRAIN, id="reduction-server"),
    ],
)
def test_commands_that_are_not_started_by_torchrun(machine: Machine, env: dict[str, str], command: list[str]) -> None:
    machine.add_devices(*GPUS)
    assert _started(machine, env, command) == command


def test_a_trainer_of_the_image_uses_every_gpu(machine: Machine) -> None:
    machine.add_devices(*GPUS)
    assert "--nproc-per-node=2" in _started(machine, {}, TRAIN, named=True)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0,1,2", 2), ("1", 1), ("", 0), ("-1", 0), ("0,-1,1", 1), ("GPU-1,GPU-2", 2)]
)
def test_number_of_visible_gpus(machine: Machine, visible: str | None, count: int) -> None:
    machine.add_devices(*GPUS)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert Host(str(machine.root)).gpu_count(env) == count


def test_an_error_has_an_exit_status() -> None:
    with pytest.raises(LaunchError) as caught:
        resolve({"CLUSTER_SPEC": "{"}, Settings({}))
    assert caught.value.status == 2
