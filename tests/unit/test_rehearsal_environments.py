"""Each platform's environment is the documented one, and the launcher resolves it without knowing of rehearsals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsing import rehearsal_of, resolved

from trainyard.common.errors import UserError
from trainyard.sandbox.fakes.google_cloud import GoogleCloud
from trainyard_jobs.model.options import Mount
from trainyard_jobs.rehearsal.model import Trial
from trainyard_jobs.rehearsal.sandbox import Limits, of_replica

# The example of https://cloud.google.com/vertex-ai/docs/training/distributed-training: 1 + 2 + 2 + 3 replicas.
POOLS = """
    workerPoolSpecs:
    - {replicaCount: 1, machineSpec: {machineType: n1-standard-4}, containerSpec: {imageUri: i, args: [a]}}
    - {replicaCount: 2, machineSpec: {machineType: n1-standard-4}, containerSpec: {imageUri: i}}
    - {replicaCount: 2, machineSpec: {machineType: n1-standard-4}, containerSpec: {imageUri: i}}
    - {replicaCount: 3, machineSpec: {machineType: n1-standard-4}, containerSpec: {imageUri: i}}
    """


def single(machine: str, more: str = "") -> str:
    return f"""
    workerPoolSpecs:
    - replicaCount: 1
      machineSpec: {machine}
      containerSpec: {{imageUri: i, env: [{{name: MINE, value: "1"}}]}}
    {more}
    """


def tpu_pods(kind: str, accelerator: str, topology: str, chips: int, pods: int, replicas: int = 1) -> str:
    job = f"""
          parallelism: {pods}
          completions: {pods}
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              subdomain: headless
              nodeSelector:
                cloud.google.com/gke-tpu-accelerator: {accelerator}
                cloud.google.com/gke-tpu-topology: {topology}
              containers:
              - {{name: c, image: i, resources: {{limits: {{google.com/tpu: {chips}}}}}}}
    """
    if kind == "Job":
        return f"apiVersion: batch/v1\nkind: Job\nmetadata: {{name: train}}\nspec:\n{job}"
    job = job.replace("subdomain: headless", "")
    return (
        "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata: {name: train}\nspec:\n  replicatedJobs:\n"
        f"  - name: slice\n    replicas: {replicas}\n    template:\n      spec:\n{job}"
    )


# --- machines ----------------------------------------------------------------------------------------------------


def test_each_replica_of_vertex_is_for_the_machines_of_its_pool(tmp_path: Path) -> None:
    pools = POOLS.replace(
        "2, machineSpec: {machineType: n1-standard-4}", "2, machineSpec: {machineType: c4a-standard-4}"
    )
    found = [one.hosts for one in rehearsal_of(tmp_path, pools).replicas]
    assert [one.architecture for one in found] == ["amd64", *["arm64"] * 4, *["amd64"] * 3]
    assert found[1].words == "machines of type c4a-standard-4"


@pytest.mark.parametrize("selector", ["kubernetes.io/arch: arm64", "cloud.google.com/gke-accelerator: nvidia-gb200"])
@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_the_pods_of_gke_are_for_the_nodes_that_they_select(tmp_path: Path, kind: str, selector: str) -> None:
    tpus = tpu_pods(kind, "tpu-v5-lite-podslice", "2x4", 4, 2)
    assert {one.hosts.architecture for one in rehearsal_of(tmp_path, tpus).replicas} == {"amd64"}
    lines = [line for line in tpus.splitlines() if "gke-tpu-topology" not in line]
    text = "\n".join(lines).replace("cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice", selector)
    text = text.replace("google.com/tpu: 4", "cpu: 4")
    found = {one.hosts for one in rehearsal_of(tmp_path, text).replicas}
    assert {(one.words, one.architecture) for one in found} == {(f"nodes with {selector}", "arm64")}


# --- Vertex AI -------------------------------------------------------------------------------------------------


def test_cluster_spec_is_the_documented_one(tmp_path: Path) -> None:
    replicas = rehearsal_of(tmp_path, POOLS).replicas
    spec = json.loads(replicas[2].environment["CLUSTER_SPEC"])
    run = spec["cluster"]["workerpool0"][0].split("-")[3]
    assert spec["cluster"] == {
        f"workerpool{pool}": [f"cmle-training-workerpool{pool}-{run}-{index}:2222" for index in range(count)]
        for pool, count in enumerate((1, 2, 2, 3))
    }
    assert (spec["environment"], spec["task"]) == ("cloud", {"type": "workerpool1", "index": 1})
    # On the platform, the value of `job` is a string of JSON.
    assert json.loads(json.loads(replicas[0].environment["CLUSTER_SPEC"])["job"])["job_args"] == ["a"]


def test_tf_config_is_the_documented_one(tmp_path: Path) -> None:
    config = json.loads(rehearsal_of(tmp_path, POOLS).replicas[1].environment["TF_CONFIG"])
    assert {task: len(hosts) for task, hosts in config["cluster"].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 2,
        "evaluator": 3,
    }
    assert (config["environment"], config["task"]["type"], config["task"]["index"]) == ("cloud", "worker", 0)


def test_the_launcher_ranks_chief_and_workers_and_leaves_servers_and_evaluators_out(tmp_path: Path) -> None:
    found = rehearsal_of(tmp_path, POOLS)
    clusters = {one.name: resolved(one, tmp_path)["cluster"] for one in found.replicas}
    assert {name: (one["node_rank"], one["nnodes"], one["role"]) for name, one in clusters.items()} == {
        "chief": (0, 3, "master"),
        "worker-0": (1, 3, "worker"),
        "worker-1": (2, 3, "worker"),
        "ps-0": (None, 3, "server"),
        "ps-1": (None, 3, "server"),
        **{f"evaluator-{index}": (None, 3, "evaluator") for index in range(3)},
    }
    assert {(one["master_addr"], one["master_port"]) for one in clusters.values()} == {
        (found.replicas[0].hostname, 2222)
    }


def test_a_single_replica_has_a_cluster_spec_and_no_tf_config(tmp_path: Path) -> None:
    (one,) = rehearsal_of(tmp_path, single("{machineType: n1-standard-4}")).replicas
    assert "TF_CONFIG" not in one.environment
    assert one.environment["MINE"] == "1"
    assert resolved(one, tmp_path)["cluster"]["nnodes"] == 1


@pytest.mark.parametrize(("trial", "base"), [(None, "gs://b/out"), (Trial(3, {}, "accuracy"), "gs://b/out/3")])
def test_folders_are_below_the_base_output_directory_and_the_trial(
    tmp_path: Path, trial: Trial | None, base: str
) -> None:
    more = "baseOutputDirectory: {outputUriPrefix: gs://b/out/}"
    (one,) = rehearsal_of(tmp_path, single("{machineType: n1-standard-4}", more), trial).replicas
    folders = {"MODEL": "model", "CHECKPOINT": "checkpoints", "TENSORBOARD_LOG": "logs"}
    for variable, folder in folders.items():
        assert one.environment[f"AIP_{variable}_DIR"] == f"{base}/{folder}/"


def test_without_a_base_output_directory_there_are_no_folders(tmp_path: Path) -> None:
    (one,) = rehearsal_of(tmp_path, single("{machineType: n1-standard-4}")).replicas
    assert not [name for name in one.environment if name.endswith("_DIR")]


def test_a_trial_gets_its_number_its_metric_and_its_parameters(tmp_path: Path) -> None:
    trial = Trial(2, {"lr": "0.1", "units": "64"}, "accuracy")
    found = rehearsal_of(tmp_path, POOLS, trial)
    chief = found.replicas[0]
    assert chief.arguments == ("a", "--lr=0.1", "--units=64")
    assert chief.environment["CLOUD_ML_TRIAL_ID"] == "2"
    assert chief.environment["CLOUD_ML_HP_METRIC_TAG"] == "accuracy"
    assert chief.environment["CLOUD_ML_HP_METRIC_FILE"] == found.metric_file
    assert json.loads(chief.environment["CLUSTER_SPEC"])["task"]["trial"] == "2"
    assert found.replicas[1].arguments == ("--lr=0.1", "--units=64")


def test_command_and_arguments_replace_entrypoint_and_cmd_only_where_they_are_given(tmp_path: Path) -> None:
    chief, worker, *_ = rehearsal_of(tmp_path, POOLS.replace("args: [a]", "command: [sh, -c]")).replicas
    assert (chief.command, chief.arguments) == (("sh", "-c"), None)
    assert (worker.command, worker.arguments) == (None, None)


@pytest.mark.parametrize(
    ("machine", "accelerator", "hosts", "device"),
    [
        ("{machineType: cloud-tpu, acceleratorType: TPU_V3, acceleratorCount: 8}", "v3-8", 1, "/dev/accel0"),
        ("{machineType: cloud-tpu, acceleratorType: TPU_V2, acceleratorCount: 32}", "v2-32", 4, "/dev/accel3"),
        ("{machineType: ct5lp-hightpu-4t, tpuTopology: 4x4}", "v5litepod-16", 4, "/dev/vfio/3"),
        ("{machineType: ct6e-standard-8t, tpuTopology: 2x4}", "v6e-8", 1, "/dev/vfio/7"),
    ],
)
def test_tpu_hosts_are_tpu_vms_to_the_launcher(
    tmp_path: Path, machine: str, accelerator: str, hosts: int, device: str
) -> None:
    """TPU_CONFIG is set too; the attached devices take precedence, and the Cloud TPU API is not called."""
    found = rehearsal_of(tmp_path, single(machine))
    assert len(found.replicas) == hosts
    for index, one in enumerate(found.replicas):
        assert {"TPU_CONFIG", "TPU_NODE_NAME"} <= set(one.environment)
        assert device in one.devices
        with GoogleCloud(attributes=found.attributes[one.hostname], node="") as cloud:
            data = resolved(
                one, tmp_path, "torch_xla==2.9.0", GCE_METADATA_HOST=cloud.address, TPU_API_ENDPOINT=cloud.url
            )
            assert "node" not in cloud.counts()
        assert data["runtime"] == "tpu-local"
        assert (data["cluster"]["node_rank"], data["cluster"]["nnodes"]) == (index, hosts)
        assert data["exports"].get("PJRT_DEVICE") == "TPU"
        assert found.attributes[one.hostname]["accelerator-type"] == accelerator
    assert bool([note for note in found.notes if "independently" in note]) == (hosts > 1)


def test_notes_say_that_gpus_are_replaced(tmp_path: Path) -> None:
    machine = "{machineType: n1-standard-8, acceleratorType: NVIDIA_TESLA_T4, acceleratorCount: 2}"
    assert rehearsal_of(tmp_path, single(machine)).notes == (
        "workerpool0: 2 NVIDIA_TESLA_T4 a replica: replaced by one process on the CPU",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workerPoolSpecs:\n- {replicaCount: 1, pythonPackageSpec: {}}", "job.yaml:2: .* no containerSpec"),
        (
            "workerPoolSpecs:\n- {replicaCount: 2, containerSpec: {imageUri: i}}",
            "job.yaml:2: .* one replica, the primary",
        ),
        ("workerPoolSpecs:\n- {}\n- {replicaCount: 2, containerSpec: {imageUri: i}}", "pool 0, .* is missing"),
        (single("{machineType: ct5lp-hightpu-4t, tpuTopology: 3x5}"), "job.yaml:4: .*3x5 is not a TPU slice"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rehearsal_of(tmp_path, text)


# --- GKE -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "topology", "chips", "pods", "expected"),
    [  # from TestInitEnvs of https://github.com/ai-on-gke/tpu-device-plugin, pkg/tpu/util/util_test.go
        ("tpu-v4-podslice", "2x2x2", 4, 2, ("v4-16", "1,1,2", "2,2,1", "false,false,false")),
        ("tpu-v4-podslice", "4x4x4", 4, 16, ("v4-128", "2,2,4", "2,2,1", "true,true,true")),
        ("tpu-v5-lite-podslice", "1x1", 1, 1, ("v5litepod-1", "1,1,1", "1,1,1", "false,false,false")),
        ("tpu-v5-lite-podslice", "16x16", 4, 64, ("v5litepod-256", "8,8,1", "2,2,1", "true,true,false")),
        ("tpu-v6e-slice", "2x4", 8, 1, ("v6e-8", "1,1,1", "2,4,1", "false,false,false")),
        ("tpu-v6e-slice", "2x4", 4, 2, ("v6e-8", "1,2,1", "2,2,1", "false,false,false")),
    ],
)
def test_a_slice_has_the_device_plugins_variables(
    tmp_path: Path, accelerator: str, topology: str, chips: int, pods: int, expected: tuple[str, str, str, str]
) -> None:
    replicas = rehearsal_of(tmp_path, tpu_pods("Job", accelerator, topology, chips, pods)).replicas
    assert len(replicas) == pods
    for index, one in enumerate(replicas):
        env = one.environment
        assert (
            env["TPU_ACCELERATOR_TYPE"],
            env["TPU_HOST_BOUNDS"],
            env["TPU_CHIPS_PER_HOST_BOUNDS"],
            env["TPU_TOPOLOGY_WRAP"],
        ) == expected
        assert env["TPU_WORKER_ID"] == str(index) == env["JOB_COMPLETION_INDEX"]
        assert env["TPU_RUNTIME_METRICS_PORTS"].split(",")[-1] == str(8430 + chips)
        assert len(one.devices) == chips
    assert replicas[0].environment["TPU_WORKER_HOSTNAMES"] == (
        ",".join(f"train-{index}.headless" for index in range(pods)) if pods > 1 else "localhost"
    )


def test_the_hosts_of_a_slice_find_each_other_by_their_names(tmp_path: Path) -> None:
    replicas = rehearsal_of(tmp_path, tpu_pods("JobSet", "tpu-v5-lite-podslice", "4x4", 4, 4)).replicas
    names = {name for one in replicas for name in (one.hostname, *one.aliases)}
    assert set(replicas[0].environment["TPU_WORKER_HOSTNAMES"].split(",")) <= names
    for index, one in enumerate(replicas):
        data = resolved(one, tmp_path, "torch_xla==2.9.0")
        assert (data["runtime"], data["cluster"]["node_rank"], data["cluster"]["nnodes"]) == ("tpu-local", index, 4)
        assert "MASTER_ADDR" not in data["exports"]  # torch_xla determines it from the TPU variables


def test_multislice_numbers_the_nodes_slice_by_slice(tmp_path: Path) -> None:
    """process = worker + slice * workers of a slice, as in JAX.

    https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py
    """
    replicas = rehearsal_of(tmp_path, tpu_pods("JobSet", "tpu-v5-lite-podslice", "4x4", 4, 4, replicas=2)).replicas
    assert len(replicas) == 8
    for index, one in enumerate(replicas):
        assert one.environment["MEGASCALE_NUM_SLICES"] == "2"
        assert one.environment["MEGASCALE_SLICE_ID"] == str(index // 4)
        assert one.environment["MEGASCALE_COORDINATOR_ADDRESS"] == "train-slice-0-0.train:8080"
        cluster = resolved(one, tmp_path, "torch_xla==2.9.0")["cluster"]
        assert (cluster["node_rank"], cluster["nnodes"], cluster["master_addr"]) == (
            index,
            8,
            "train-slice-0-0.train",
        )
    assert {one.slice for one in replicas} == {"train-slice-0", "train-slice-1"}


JOBSET = """
    apiVersion: jobset.x-k8s.io/v1alpha2
    kind: JobSet
    metadata: {name: train}
    spec:
      replicatedJobs:
      - name: node
        replicas: 1
        template:
          spec:
            parallelism: 3
            completions: 3
            template:
              spec:
                containers:
                - name: c
                  image: i
                  args: ["--rank=$(JOB_COMPLETION_INDEX)", "--at=$(WHERE)", "$$(HOME)", "$(UNKNOWN)"]
                  env:
                  - {name: NNODES, value: "3"}
                  - {name: JOBSET_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}}
                  - {name: REPLICATED_JOB_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-name']"}}}
                  - {name: ATTEMPT, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}}
                  - {name: WHERE, value: "gs://b/$(JOBSET_NAME)"}
                  - {name: KEY, valueFrom: {secretKeyRef: {name: s, key: k}}}
                  volumeMounts: [{name: data, mountPath: /data}, {name: shm, mountPath: /dev/shm}, {name: disk, mountPath: /disk}]
                volumes:
                - {name: data, csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: {bucketName: my-data}}}
                - {name: shm, emptyDir: {medium: Memory}}
                - {name: disk, persistentVolumeClaim: {claimName: d}}
    """  # noqa: E501


def test_torch_nodes_of_a_jobset_have_ranks_and_a_first_node(tmp_path: Path) -> None:
    found = rehearsal_of(tmp_path, JOBSET)
    for index, one in enumerate(found.replicas):
        cluster = resolved(one, tmp_path)["cluster"]
        assert (cluster["source"], cluster["node_rank"], cluster["nnodes"]) == ("JOB_COMPLETION_INDEX", index, 3)
        assert cluster["master_addr"] in (found.replicas[0].hostname, *found.replicas[0].aliases)


def test_pods_get_the_downward_api_references_and_volumes(tmp_path: Path) -> None:
    found = rehearsal_of(tmp_path, JOBSET)
    one = found.replicas[2]
    assert one.arguments == ("--rank=2", "--at=gs://b/train", "$(HOME)", "$(UNKNOWN)")
    assert one.attempt_variables == ("ATTEMPT",)
    assert {mount.path: mount.bucket for mount in one.mounts} == {"/data": "my-data", "/dev/shm": ""}
    assert "KEY" not in one.environment
    assert [note for note in found.notes if "KEY" in note and "--env" in note]
    assert "volume disk at /disk is not mounted" in found.notes


def test_the_folder_of_a_bucket_and_read_only_volumes_are_as_the_job_says(tmp_path: Path) -> None:
    """https://cloud.google.com/kubernetes-engine/docs/how-to/cloud-storage-fuse-csi-driver-ephemeral"""
    volume = "{name: data, csi: {driver: gcsfuse.csi.storage.gke.io, volumeAttributes: {bucketName: my-data}}}"
    mount = "{name: data, mountPath: /data}, {name: shm, mountPath: /dev/shm}"

    def first(options: str = "", csi: str = "", of_mount: str = "") -> Mount:
        attributes = f"bucketName: my-data, mountOptions: '{options}'" if options else "bucketName: my-data"
        given = volume.replace("bucketName: my-data}", attributes + "}" + csi)
        text = JOBSET.replace(volume, given).replace(mount, mount.replace("/data}", "/data" + of_mount + "}"))
        return rehearsal_of(tmp_path, text).replicas[2].mounts[0]

    assert first() == Mount("/data", "my-data")
    assert first("implicit-dirs, only-dir=a/b/") == Mount("/data", "my-data", "a/b")
    assert first("only-dir:a", of_mount=", subPath: c") == Mount("/data", "my-data", "a/c")
    assert first(of_mount=", subPathExpr: run-$(JOB_COMPLETION_INDEX)") == Mount("/data", "my-data", "run-2")
    read_only = Mount("/data", "my-data", read_only=True)
    assert first("implicit-dirs,ro") == read_only
    assert first(csi=", readOnly: true") == read_only
    assert first(of_mount=", readOnly: true") == read_only
    text = JOBSET.replace("mountPath: /dev/shm", "mountPath: /dev/shm, readOnly: true")
    assert rehearsal_of(tmp_path, text).replicas[2].mounts[1] == Mount("/dev/shm", read_only=True)


@pytest.mark.parametrize(
    ("limits", "share", "expected"),
    [
        ("{memory: 600Mi, cpu: 1500m}", Limits(4, 8 << 30), Limits(1.5, 600 << 20)),
        ("{memory: 64Gi, cpu: 32}", Limits(4, 8 << 30), Limits(4, 8 << 30)),
        ("{}", Limits(4, 8 << 30), Limits(4, 8 << 30)),
    ],
)
def test_the_limits_of_a_job_apply_below_the_share_of_a_replica(
    tmp_path: Path, limits: str, share: Limits, expected: Limits
) -> None:
    text = f"""
        apiVersion: batch/v1
        kind: Job
        metadata: {{name: train}}
        spec:
          activeDeadlineSeconds: 90
          template:
            spec: {{restartPolicy: Never, containers: [{{name: c, image: i, resources: {{limits: {limits}}}}}]}}
    """
    found = rehearsal_of(tmp_path, text)
    assert (of_replica(share, found.replicas[0]), found.deadline) == (expected, 90)


def test_a_note_says_that_the_order_of_pods_is_ignored(tmp_path: Path) -> None:
    assert not [note for note in rehearsal_of(tmp_path, JOBSET).notes if "at once" in note]
    found = rehearsal_of(tmp_path, JOBSET.replace("parallelism: 3", "parallelism: 1"))
    assert [note for note in found.notes if note.startswith("all pods start at once")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (tpu_pods("Job", "tpu-v5-lite-podslice", "4x4", 4, 3), "job.yaml:.*has 4 hosts, but the Job has 3 pods"),
        (tpu_pods("Job", "tpu-v5-lite-podslice", "5x5", 4, 3), "job.yaml:.*'5x5' is not a TPU slice"),
        (JOBSET.replace("metadata.labels['jobset.sigs.k8s.io/jobset-name']", "spec.nothing"), "fieldPath spec.nothing"),
    ],
)
def test_pods_that_cannot_be_rehearsed_are_refused_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rehearsal_of(tmp_path, text)


# --- what `make job` writes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "framework", "runtime", "nodes"),
    [
        (["vertex", "tf-cpu", "--trainer=flowers", "--workers=2"], "tensorflow==2.21.0", "cpu", 2),
        (["vertex", "xla", "--accelerator=v5litepod-16"], "torch_xla==2.9.0", "tpu-local", 4),
        (["gke", "gpu", "--accelerator=nvidia-l4", "--workers=3"], "torch==2.9.1", "cpu", 3),
        (["gke", "xla", "--accelerator=v5litepod-16"], "torch_xla==2.9.0", "tpu-local", 4),
        (["gke", "xla", "--accelerator=v5litepod-16", "--slices=2"], "torch_xla==2.9.0", "tpu-local", 8),
    ],
)
def test_what_make_job_writes_can_be_rehearsed_and_its_nodes_find_their_ranks(
    trainyard: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    arguments: list[str],
    framework: str,
    runtime: str,
    nodes: int,
) -> None:
    status, text, err = trainyard(
        "job", f"--platform={arguments[0]}", "--registry=us-docker.pkg.dev/p/r", *arguments[1:]
    )
    assert status == 0, err
    found = rehearsal_of(tmp_path, text)
    for index, one in enumerate(found.replicas):
        with GoogleCloud(attributes=found.attributes.get(one.hostname), node="") as cloud:
            data = resolved(one, tmp_path, framework, GCE_METADATA_HOST=cloud.address)
        assert (data["runtime"], data["cluster"]["node_rank"], data["cluster"]["nnodes"]) == (runtime, index, nodes)
    assert len(found.replicas) == nodes
