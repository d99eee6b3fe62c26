"""`make job` writes a valid job for each platform, prints the command that submits it, and refuses invalid requests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fakes import kubernetes as fake_kubernetes

from trainyard.common.errors import UserError
from trainyard.image import trainer_flags
from trainyard_jobs import platforms
from trainyard_jobs.model import options, request, tuning
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.platforms.ai_platform import migration as ai_platform_migration
from trainyard_jobs.platforms.base import Submission
from trainyard_jobs.platforms.gke import write as gke_platform
from trainyard_jobs.rehearsal import session
from trainyard_jobs.rules import image as image_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import google, job_file, kubernetes

REGISTRY = "us-central1-docker.pkg.dev/proj/ml"
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(trainyard: Command) -> Callable[..., tuple[str, list[str]]]:
    """Write a job: its text, and the words of the command that submits it."""

    def run(*arguments: str, registry: str = REGISTRY) -> tuple[str, list[str]]:
        status, out, err = trainyard("job", *arguments, "--json", *(["--registry", registry] if registry else []))
        assert status == 0, err
        found = json.loads(out)
        return found["config"], found["command"]

    return run


@pytest.fixture
def refused(trainyard: Command) -> Callable[..., str]:
    """The line that a job is refused with."""

    def run(*arguments: str) -> str:
        status, out, err = trainyard("job", *arguments, "--registry", REGISTRY)
        assert (status, out) == (2, "")
        return err

    return run


def vertex(*more: str) -> list[str]:
    return ["--platform", "vertex", *more]


Write = Callable[..., tuple[str, list[str]]]


# --- Vertex AI -------------------------------------------------------------------------------------------------------


def test_a_custom_job_is_one_pool_with_one_replica(write: Write) -> None:
    text, command = write(*vertex("tf-cpu", "--args", "--epochs 2 --lr '0.1'"))
    pool = yaml.safe_load(text)["workerPoolSpecs"]
    image = f"{REGISTRY}/trainyard:tf-cpu-2.21.0"
    container = {"imageUri": image, "args": ["mnist", "--epochs", "2", "--lr", "0.1"]}
    assert pool == [{"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": 1, "containerSpec": container}]
    assert shlex.join(command) == (
        "gcloud ai custom-jobs create --region=us-central1 --display-name=tf-cpu-mnist --config=job.yaml"
    )


def test_the_chief_is_the_first_pool(write: Write) -> None:
    spec = yaml.safe_load(write(*vertex("cpu", "--workers", "4", "--spot"))[0])
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1, 3]
    assert spec["scheduling"] == {"strategy": "SPOT", "restartJobOnWorkerRestart": True}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("8xH100", "NVIDIA_H100_80GB"),
        ("h200:8", "NVIDIA_H200_141GB"),
        ("8xA100", "NVIDIA_TESLA_A100"),
        ("8xA100-80GB", "NVIDIA_A100_80GB"),
    ],
)
def test_gpus_may_be_named_without_their_memory(name: str, gpu: str) -> None:
    assert request.accelerator(name) == (request.Gpus(gpu, 8), None)


@pytest.mark.parametrize(
    ("accelerator", "machine"),
    [
        ("v5litepod-16", {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "4x4"}),
        ("v6e-8", {"machineType": "ct6e-standard-8t", "tpuTopology": "2x4"}),
        ("v3-32", {"machineType": "cloud-tpu", "acceleratorType": "TPU_V3", "acceleratorCount": 32}),
        ("v2-8", {"machineType": "cloud-tpu", "acceleratorType": "TPU_V2", "acceleratorCount": 8}),
    ],
)
def test_tpus_are_requested_in_the_form_of_their_generation(write: Write, accelerator: str, machine: Any) -> None:
    spec = yaml.safe_load(write(*vertex("xla", "--accelerator", accelerator))[0])
    assert [pool["machineSpec"] for pool in spec["workerPoolSpecs"]] == [machine]


def test_the_region_of_a_tpu_job_has_the_tpu(write: Write) -> None:
    assert "--region=europe-west4" in write(*vertex("xla", "--accelerator", "v3-32"))[1]


@pytest.mark.parametrize(
    ("words", "type", "count", "machine"),
    [
        ("T4", "NVIDIA_TESLA_T4", 1, "n1-standard-8"),
        ("8xA100_80GB", "NVIDIA_A100_80GB", 8, "a2-ultragpu-8g"),
        ("nvidia-l4:4", "NVIDIA_L4", 4, "g2-standard-48"),
        ("8xv100", "NVIDIA_TESLA_V100", 8, "n1-standard-64"),
    ],
)
def test_gpus_have_short_names_and_fitting_machines(
    write: Write, words: str, type: str, count: int, machine: str
) -> None:
    spec = yaml.safe_load(write(*vertex("--image", "gcr.io/p/i", "--accelerator", words))[0])
    expected = {"machineType": machine, "acceleratorType": type, "acceleratorCount": count}
    assert spec["workerPoolSpecs"][0]["machineSpec"] == expected


def test_gpus_that_a_machine_type_includes_are_requested_too(write: Write) -> None:
    spec = yaml.safe_load(write(*vertex("--image", "gcr.io/p/i", "--machine", "a3-highgpu-8g"))[0])
    assert spec["workerPoolSpecs"][0]["machineSpec"]["acceleratorCount"] == 8


def test_accounts_outputs_tensorboards_and_limits_are_fields_of_the_api(write: Write) -> None:
    board = "projects/p/locations/us-central1/tensorboards/1"
    spec = yaml.safe_load(
        write(*vertex("cpu", "--service-account", "a@p.iam.gserviceaccount.com", "--output", "gs://bucket/run",
                      "--tensorboard", board, "--timeout", "12h"))[0]
    )  # fmt: skip
    assert spec["serviceAccount"] == "a@p.iam.gserviceaccount.com"
    assert spec["baseOutputDirectory"] == {"outputUriPrefix": "gs://bucket/run"}
    assert spec["tensorboard"] == board
    assert spec["scheduling"] == {"timeout": "43200s"}


def test_a_tuning_job_reads_what_the_trainer_reports(write: Write) -> None:
    text, command = write(*vertex("cpu", "--tune", "lr=1e-3:1e-1:log batch-size=64,32 epochs=2:8 precision=fp32,bf16",
                                  "--trials", "6", "--parallel", "3"))  # fmt: skip
    data = yaml.safe_load(text)
    assert data["studySpec"] == {
        "metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}],
        "parameters": [
            {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.001, "maxValue": 0.1},
             "scaleType": "UNIT_LOG_SCALE"},
            {"parameterId": "batch-size", "discreteValueSpec": {"values": [32, 64]}},
            {"parameterId": "epochs", "integerValueSpec": {"minValue": "2", "maxValue": "8"},
             "scaleType": "UNIT_LINEAR_SCALE"},
            {"parameterId": "precision", "categoricalValueSpec": {"values": ["fp32", "bf16"]}},
        ],
    }  # fmt: skip
    container = data["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    assert container["args"] == ["mnist", "--hypertune-tag=accuracy"]
    assert (data["maxTrialCount"], data["parallelTrialCount"]) == (6, 3)
    assert {"--max-trial-count=6", "--parallel-trial-count=3"} <= set(command)
    assert command[:4] == ["gcloud", "ai", "hp-tuning-jobs", "create"]


@pytest.mark.parametrize(("package", "trainer"), [("torch", "mnist"), ("tf", "flowers")])
def test_trainers_have_the_flags_that_jobs_give_them(package: str, trainer: str) -> None:
    assert {"hypertune-tag", "job-dir", "epochs"} <= trainer_flags.of_trainer(package, trainer)


@pytest.mark.parametrize("platform", ["vertex", "gke", "tpu-vm", "kubeflow", "slurm", "skypilot", "ai-platform"])
def test_the_preflight_is_an_option_before_the_trainer_on_every_platform(write: Write, platform: str) -> None:
    tpu = platform == "tpu-vm"
    more = ["xla", "--accelerator", "v5litepod-16"] if tpu else ["cpu"]
    text, _ = write("--platform", platform, *more, "--preflight", "--output", "gs://bucket/run")
    assert re.search(r"--preflight\W+mnist\b", text)
    assert "--preflight" not in write("--platform", platform, *more)[0]


@pytest.mark.parametrize("platform", ["vertex", "gke", "tpu-vm", "kubeflow", "slurm", "skypilot", "ai-platform"])
@pytest.mark.parametrize(("target", "others"), [("gpu", "cpu"), ("tf-tpu", "tf-cpu"), ("jax-tpu", "jax")])
def test_no_platform_gets_a_job_of_an_image_for_an_accelerator_that_asks_for_none(
    refused: Callable[..., str], write: Write, platform: str, target: str, others: str
) -> None:
    """Check that the accelerator the error advises is accepted."""
    line = refused("--platform", platform, target)
    assert "no '--accelerator', and an image for " in line and f"(by images/{target}/image.yaml)" in line
    if example := re.search(r"as in '--accelerator ([\w-]+)'", line):
        assert write("--platform", platform, target, "--accelerator", example[1])
    else:
        assert (platform, target[-3:]) in {
            ("tpu-vm", "gpu"),
            *((one, "tpu") for one in ("slurm", "ai-platform", "kubeflow")),
        }
        having = re.search(f"'--platform {platform}' has none for it; these have: ([a-z, -]+)", line)
        assert having and {"vertex", "gke", "skypilot"} <= set(having[1].split(", ")) - {platform}
    if platform == "tpu-vm":
        assert "CPUs" not in line
    else:  # an image that is given by its reference may be any
        assert f"; targets for CPUs: {others}" in line and line.endswith("; '--image' takes any\n")
        assert write("--platform", platform, "--image", "us-docker.pkg.dev/p/r/i:t")
        assert write("--platform", platform, others)


@pytest.mark.parametrize("platform", ["vertex", "gke", "tpu-vm", "kubeflow", "slurm", "skypilot", "ai-platform"])
def test_no_platform_gets_a_job_that_asks_for_another_accelerator_than_the_images(
    refused: Callable[..., str], platform: str
) -> None:
    line = refused("--platform", platform, "tf-cpu", "--accelerator", "T4")
    assert "a GPU job with an image for CPUs: tensorflow_cpu 2.21.0" in line and "targets for GPUs: tf-gpu" in line


def test_machines_of_a_job_that_have_gpus_of_their_own_count(write: Write) -> None:
    assert "NVIDIA_TESLA_A100" in write(*vertex("gpu", "--machine", "a2-highgpu-1g"))[0]
    assert "NVIDIA_L4" in write(*vertex("gpu", "--workers", "2", "--pool", "workers=g2-standard-8+1xL4"))[0]
    assert "standard_v100" in write("--platform", "ai-platform", "gpu-2.7", "--machine", "standard_v100")[0]


def test_a_command_instead_of_the_launcher_has_no_preflight(refused: Callable[..., str]) -> None:
    line = refused(*vertex("cpu", "--command", "python train.py", "--preflight"))
    assert "begin it with 'launch --preflight --'" in line


# --- AI Platform -----------------------------------------------------------------------------------------------------


def old(*more: str) -> list[str]:
    return ["--platform", "ai-platform", "tf-cpu", *more]


def test_an_ai_platform_job_has_a_warning_and_its_vertex_ai_equivalent(write: Write) -> None:
    text, command = write(*old("--workers", "3", "--output", "gs://bucket/run"))
    assert text.startswith("# NOT FOR USE: AI Platform Training was shut down on 31 January 2025.")
    data = yaml.safe_load(text)["trainingInput"]
    assert (data["scaleTier"], data["workerCount"], data["workerType"]) == ("CUSTOM", 2, "n1-standard-8")
    assert command[:6] == ["gcloud", "ai-platform", "jobs", "submit", "training", "tf_cpu_mnist"]
    below = text.partition("# The same job on Vertex AI:\n")[2]
    successor = yaml.safe_load("\n".join(line.removeprefix("#")[1:] for line in below.splitlines()))
    assert [pool["replicaCount"] for pool in successor["workerPoolSpecs"]] == [1, 2]


@pytest.mark.parametrize(
    ("accelerator", "machine", "expected"),
    [
        ("v2-8", None, {"masterType": "n1-standard-8", "workerType": "cloud_tpu", "workerCount": 1,
                        "workerConfig": {"tpuTfVersion": "2.11", "acceleratorConfig": {"type": "TPU_V2", "count": 8}}}),
        ("v3-32", "n1-highcpu-16",
         {"workerConfig": {"tpuTfVersion": "2.11", "acceleratorConfig": {"type": "TPU_V3_POD", "count": 32}}}),
        ("v2-8", "standard", {"masterType": "standard", "workerConfig": {"tpuTfVersion": "2.11"}}),
        ("v2-8", "BASIC_TPU", {"scaleTier": "BASIC_TPU", "workerConfig": {"tpuTfVersion": "2.11"}}),
    ],
)  # fmt: skip
def test_tpu_jobs_of_ai_platform(write: Write, accelerator: str, machine: str | None, expected: dict[str, Any]) -> None:
    text, _ = write(
        *old("--accelerator", accelerator, "--tpu-version", "2.11", *(["--machine", machine] if machine else []))
    )
    found = yaml.safe_load(text)["trainingInput"]
    image = found["workerConfig"].pop("imageUri")
    assert image == found["masterConfig"]["imageUri"]
    assert {key: found[key] for key in expected} == expected
    assert ("workerType" in found) == (machine != "BASIC_TPU")


def test_an_ai_platform_job_file_is_converted(tmp_path: Path, trainyard: Command) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("trainingInput: {scaleTier: CUSTOM, masterType: standard_p100, region: europe-west1, "
                    "masterConfig: {imageUri: gcr.io/p/i}, args: [a]}\nlabels: {team: x}\n")  # fmt: skip
    status, out, err = trainyard("job", "--platform", "vertex", "--from", str(path))
    assert status == 0
    machine = yaml.safe_load(out)["workerPoolSpecs"][0]["machineSpec"]
    assert machine == {"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_P100", "acceleratorCount": 1}
    assert "--region=europe-west1" in err
    assert "--labels=team=x" in err


def test_a_converted_job_is_submitted_with_its_labels_and_its_encryption_key(
    tmp_path: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = tmp_path / "old.yaml", tmp_path / "asked"
    path.write_text("trainingInput: {scaleTier: BASIC, region: us-central1, masterConfig: {imageUri: gcr.io/p/i}, "
                    "encryptionConfig: {kmsKeyName: projects/p/key}}\nlabels: {team: x}\n")  # fmt: skip

    (tmp_path / "gcloud").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{asked}\necho ERROR: refused >&2\nexit 1\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert trainyard("job", "--platform", "vertex", "--from", str(path), "--submit")[0] == 1
    assert {"--labels=team=x", "--kms-key=projects/p/key"} <= set(asked.read_text().splitlines())


OLD: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    ({"scaleTier": "BASIC_TPU", "workerConfig": {"tpuTfVersion": "2.11"}},
     [{"machineType": "cloud-tpu", "acceleratorType": "TPU_V2", "acceleratorCount": 8}], "no counterpart"),
    ({"scaleTier": "CUSTOM", "masterType": "n1-highcpu-16", "workerType": "cloud_tpu", "workerCount": "1",
      "workerConfig": {"acceleratorConfig": {"type": "TPU_V3_POD", "count": "32"}}},
     [{"machineType": "cloud-tpu", "acceleratorType": "TPU_V3", "acceleratorCount": 32}], "one now (a TPU VM)"),
    ({"scaleTier": "BASIC_GPU"},
     [{"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 1}],
     "no longer has NVIDIA_TESLA_K80"),
    ({"scaleTier": "STANDARD_1"},
     [{"machineType": "n1-highcpu-16"}, {"machineType": "n1-highcpu-16"}, {"machineType": "n1-standard-4"}], ""),
    ({"scaleTier": "CUSTOM", "masterType": "n1-standard-4", "parameterServerType": "n1-standard-4",
      "parameterServerCount": 2}, [{"machineType": "n1-standard-4"}, {}, {"machineType": "n1-standard-4"}], ""),
]  # fmt: skip


@pytest.mark.parametrize(("old", "machines", "note"), OLD)
def test_each_form_of_ai_platform_job_is_converted_to_equivalent_pools(
    old: dict[str, Any], machines: Any, note: str
) -> None:
    done = ai_platform_migration.migrate(
        {"trainingInput": old | {"masterConfig": {"imageUri": "gcr.io/p/i"}, "region": "us-central1"}}
    )
    pools = done.config["workerPoolSpecs"]
    assert [pool.get("machineSpec", {}) for pool in pools] == machines
    assert note in " ".join(done.notes)
    file = job_file.parse(json.dumps(done.config), Path("x.json"))
    assert [one for one in all_rules.check(Evidence(file, done.region)) if one.fails] == []


def test_an_ai_platform_search_is_converted_to_a_tuning_job() -> None:
    params = [
        {"parameterName": "lr", "type": "DOUBLE", "minValue": 0.01, "maxValue": 1, "scaleType": "UNIT_LOG_SCALE"},
        {"parameterName": "layers", "type": "INTEGER", "minValue": 1, "maxValue": 3},
        {"parameterName": "opt", "type": "CATEGORICAL", "categoricalValues": ["sgd", "adam"]},
        {"parameterName": "size", "type": "DISCRETE", "discreteValues": [32, 64]},
    ]
    search = {
        "goal": "MINIMIZE",
        "maxTrials": 5,
        "maxParallelTrials": 2,
        "hyperparameterMetricTag": "loss",
        "params": params,
    }
    done = ai_platform_migration.migrate({"trainingInput": {"masterConfig": {"imageUri": "i"}, "jobDir": "gs://bucket/x",
                                              "hyperparameters": search}})  # fmt: skip
    study = done.config["studySpec"]
    assert study["metrics"] == [{"metricId": "loss", "goal": "MINIMIZE"}]
    assert [set(one) - {"parameterId", "scaleType"} for one in study["parameters"]] == [
        {"doubleValueSpec"}, {"integerValueSpec"}, {"categoricalValueSpec"}, {"discreteValueSpec"}]  # fmt: skip
    container = done.config["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    assert "args" not in container, "trials would all write to one --job-dir"


def test_a_package_runs_on_the_prebuilt_image_of_its_runtime() -> None:
    source = {"scaleTier": "BASIC", "runtimeVersion": "2.11", "packageUris": ["gs://b/p.tgz"], "pythonModule": "t.task"}
    (pool,) = ai_platform_migration.migrate({"trainingInput": source}).config["workerPoolSpecs"]
    assert pool["pythonPackageSpec"]["executorImageUri"].endswith("/training/tf-cpu.2-11.py310:latest")


# --- GKE -------------------------------------------------------------------------------------------------------------


def gke(*more: str) -> list[str]:
    return ["--platform", "gke", *more]


def test_a_slice_of_one_machine_is_a_job(write: Write) -> None:
    (found,) = yaml.safe_load_all(write(*gke("xla", "--accelerator", "v5litepod-8", "--output", "gs://bucket/x"))[0])
    pod = found["spec"]["template"]["spec"]
    assert found["kind"] == "Job"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "2x4"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "8"}
    assert pod["containers"][0]["args"] == ["mnist", "--job-dir=gs://bucket/x"]


@pytest.mark.parametrize(
    ("name", "accelerator", "topology", "hosts"),
    [
        ("v4-16", "tpu-v4-podslice", "2x2x2", 2),
        ("v5litepod-16", "tpu-v5-lite-podslice", "4x4", 4),
        ("v6e-16", "tpu-v6e-slice", "4x4", 4),
    ],
)
def test_a_slice_of_several_machines_is_the_jobset_that_xpk_writes(
    write: Write, name: str, accelerator: str, topology: str, hosts: int
) -> None:
    """Compare version, kind, counts, selector, devices and retries with what xpk 1.16.0 writes for the same types."""
    (found,) = yaml.safe_load_all(write(*gke("xla", "--accelerator", name, "--slices", "2"))[0])
    (part,) = found["spec"]["replicatedJobs"]
    job, pod = part["template"]["spec"], part["template"]["spec"]["template"]["spec"]
    assert (found["apiVersion"], found["kind"], part["replicas"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", 2)
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (hosts, hosts, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": "4"}
    assert pod["restartPolicy"] == "Never"
    assert {"name": "NNODES", "value": str(2 * hosts)} in pod["containers"][0]["env"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["xla", "--accelerator", "v5litepod-8", "--spot", "--timeout", "1h", "--service-account", "trainer"],
        ["xla", "--accelerator", "v6e-16", "--slices", "2", "--spot"],
        ["gpu", "--accelerator", "8xA100", "--workers", "2"],
        ["cpu", "--machine", "e2-standard-8"],
    ],
)
def test_manifests_are_created_by_an_api_server(write: Write, arguments: list[str]) -> None:
    for found in yaml.safe_load_all(write(*gke(*arguments))[0]):
        fake_kubernetes.refuse_invalid(found | {"metadata": {"name": "n", **found["metadata"]}})


def test_gpu_machines_of_a_group_can_reach_each_other(write: Write) -> None:
    service, found = yaml.safe_load_all(write(*gke("--image", "gcr.io/p/i", "--accelerator", "8xA100", "--workers", "2",
                                                   "--name", "my.run"))[0])  # fmt: skip
    pod = found["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"] == "my-run"
    assert service["spec"]["clusterIP"] == "None"
    env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert env == {"NNODES": "2", "MASTER_ADDR": "my-run-0.my-run", "MASTER_PORT": "29500"}
    assert (found["spec"]["completionMode"], found["spec"]["completions"]) == ("Indexed", 2)


def test_a_group_on_spot_machines_is_restarted_as_a_whole(write: Write) -> None:
    (found,) = yaml.safe_load_all(write(*gke("--image", "i", "--accelerator", "T4", "--workers", "2", "--spot"))[0])
    (rule,) = found["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])


#: Stand-in for kubectl: prints configured states of a job and its pods, and records which logs were requested.
KUBECTL = """\
import json, pathlib, sys
told, (verb, what) = pathlib.Path(__file__).with_name("told"), sys.argv[1:3]
state, phases = json.loads(told.read_text())
if verb == "logs":
    with told.with_name("logs").open("a") as logs:
        print(json.dumps(sys.argv), file=logs)
elif what == "pods":
    told.write_text(json.dumps([state, phases[1:]]))
    pods = [{"metadata": {"name": f"run-{n}"}, "status": {"phase": phase}} for n, phase in enumerate(phases[0])]
    print(json.dumps({"items": pods}))
else:
    print(json.dumps({"status": {"conditions": [{"type": state, "status": "True"}] if len(phases) == 1 else []}}))
"""


@pytest.mark.parametrize(
    ("phases", "state", "shown"),
    [
        pytest.param([["Pending", "Pending"], ["Succeeded", "Succeeded"]], "Complete",
                     [["pod/run-0"], ["pod/run-1"]], id="between two queries"),
        pytest.param([["Failed", "Pending"]], "Failed", [["pod/run-0"]], id="before all pods have started"),
        pytest.param([["Running", "Running"], ["Succeeded", "Succeeded"]], "Complete",
                     [["--follow", "--selector=job-name=run"]], id="while it was followed"),
        pytest.param([["Running", "Running"], ["Failed", "Succeeded", "Succeeded"]], "Complete",
                     [["--follow", "--selector=job-name=run"], ["pod/run-2"]], id="after a pod was replaced"),
    ],
)  # fmt: skip
def test_the_log_of_every_pod_is_shown_once_whenever_the_job_ends(
    phases: list[list[str]], state: str, shown: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``phases``: those of the pods each time they are queried; the last time, the job has ended."""
    (tmp_path / "kubectl").write_text(f"#!{sys.executable} -SE\n{KUBECTL}")
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "told").write_text(json.dumps([state, phases]))
    (tmp_path / "logs").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gke_platform.follow_pods("job/run", "job-name=run", 2, 0) == state
    commands = [json.loads(line) for line in (tmp_path / "logs").read_text().splitlines()]
    selected = ("pod/", "--follow", "--selector")
    assert [[word for word in command if word.startswith(selected)] for command in commands] == shown


# --- TPU VM ----------------------------------------------------------------------------------------------------------


def test_a_tpu_vm_job_is_a_script_that_deletes_what_it_creates(write: Write) -> None:
    text, command = write(
        "--platform", "tpu-vm", "xla", "--accelerator", "v5litepod-16", "--spot", "--args", "--lr 0.1 --datadir 'a b'"
    )
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert command == ["bash", "job.sh"]
    assert lines[0] == "set -euo pipefail"
    create, trap, run, logs = (shlex.split(line) for line in lines[1:])
    assert create[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "xla-mnist"]
    assert {
        "--accelerator-type=v5litepod-16",
        "--version=v2-alpha-tpuv5-lite",
        "--zone=us-central1-a",
        "--spot",
    } <= set(create)
    assert trap[0] == "trap" and shlex.split(trap[1])[4:6] == ["delete", "xla-mnist"] and trap[2] == "EXIT"
    assert run[-1].endswith(f"{REGISTRY}/trainyard:xla-2.9.0 mnist --lr 0.1 --datadir 'a b'")
    assert "docker logs --follow" in logs[-1]


def test_a_tpu_vm_can_be_in_a_zone_that_is_newer_than_the_table(write: Write) -> None:
    text, _ = write("--platform", "tpu-vm", "xla", "--accelerator", "v6e-8", "--zone", "us-northwest1-ai2b")
    assert "us-northwest1-ai2b" in text


# --- options of some platforms ---------------------------------------------------------------------------------------


def test_vertex_ai_has_the_fields_of_its_api(write: Write) -> None:
    """https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec; labels and key are flags of gcloud."""
    key = "projects/p/locations/us-central1/keyRings/r/cryptoKeys/k"
    text, command = write(
        *vertex("--image", "gcr.io/p/i", "--accelerator", "8xH100_80GB", "--flex-start", "--max-wait", "2h",
                "--disk", "hyperdisk-balanced:500", "--labels", "team=vision,run=1", "--kms-key", key, "--network",
                "projects/1/global/networks/n", "--network-attachment", "a", "--persistent-resource", "kept")
    )  # fmt: skip
    spec = yaml.safe_load(text)
    assert spec["scheduling"] == {"strategy": "FLEX_START", "maxWaitDuration": "7200s"}
    assert spec["workerPoolSpecs"][0]["diskSpec"] == {"bootDiskType": "hyperdisk-balanced", "bootDiskSizeGb": 500}
    assert spec["network"] == "projects/1/global/networks/n"
    assert spec["pscInterfaceConfig"] == {"networkAttachment": "a"}
    assert spec["persistentResourceId"] == "kept"
    assert {"--labels=team=vision,run=1", f"--kms-key={key}"} <= set(command)
    assert google.validate("aiplatform.v1", "GoogleCloudAiplatformV1CustomJobSpec", spec) == []


@pytest.mark.parametrize(
    ("reservation", "affinity"),
    [
        ("any", {"reservationAffinityType": "ANY_RESERVATION"}),
        ("projects/p/zones/z/reservations/r",
         {"reservationAffinityType": "SPECIFIC_RESERVATION", "key": "compute.googleapis.com/reservation-name",
          "values": ["projects/p/zones/z/reservations/r"]}),
    ],
)  # fmt: skip
def test_vertex_ai_uses_a_reservation(write: Write, reservation: str, affinity: dict[str, Any]) -> None:
    """https://cloud.google.com/vertex-ai/docs/reference/rest/v1/ReservationAffinity"""
    spec = yaml.safe_load(
        write(*vertex("--image", "gcr.io/p/i", "--machine", "a3-ultragpu-8g", "--reservation", reservation))[0]
    )
    assert spec["workerPoolSpecs"][0]["machineSpec"]["reservationAffinity"] == affinity


@pytest.mark.parametrize(
    ("machine", "expected"),
    [("a4x-highgpu-4g", ("NVIDIA_GB200", 4)), ("g4-standard-96", ("NVIDIA_RTX_PRO_6000", 2))],
)
def test_a_machine_type_implies_its_gpus(write: Write, machine: str, expected: tuple[str, int]) -> None:
    spec = yaml.safe_load(write(*vertex("--image", "gcr.io/p/i", "--machine", machine))[0])
    found = spec["workerPoolSpecs"][0]["machineSpec"]
    assert (found["acceleratorType"], found["acceleratorCount"]) == expected
    (job,) = yaml.safe_load_all(write(*gke("--image", "gcr.io/p/i", "--machine", machine))[0])
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": str(expected[1])}
    assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == machine


EVERYTHING = ["--queue", "team", "--priority", "high", "--placement", "preferred:subblock", "--disk", "premium-rwo:200",
              "--mount", "gs://bucket/data/2026:/data:ro gs://other:/out", "--labels", "team=vision"]  # fmt: skip


@pytest.mark.parametrize("devices", [["--accelerator", "v5litepod-16"], ["--accelerator", "8xA100"]])
def test_gke_jobs_are_queued_placed_and_mounted(write: Write, devices: list[str]) -> None:
    """Kueue's labels: https://kueue.sigs.k8s.io/docs/tasks/run/jobsets/"""
    (found,) = yaml.safe_load_all(write(*gke("--image", "gcr.io/p/i", *devices, *EVERYTHING))[0])
    assert found["metadata"]["labels"] == {"team": "vision", "kueue.x-k8s.io/queue-name": "team"}
    (job,) = [one["template"] for one in kubernetes.replicated_jobs(found)] or [found]
    template = job["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "vision"
    assert template["metadata"]["annotations"] == {
        "gke-gcsfuse/volumes": "true",
        "kueue.x-k8s.io/podset-preferred-topology": "cloud.google.com/gce-topology-subblock",
    }
    pod = template["spec"]
    assert pod["priorityClassName"] == "high"
    mounts = {one["mountPath"]: one for one in pod["containers"][0]["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert set(mounts) == {"/dev/shm", "/mnt/disk", "/data", "/out"}
    data = volumes[mounts["/data"]["name"]]["csi"]
    assert (mounts["/data"]["readOnly"], data["readOnly"], data["driver"]) == (True, True, "gcsfuse.csi.storage.gke.io")
    assert data["volumeAttributes"] == {"bucketName": "bucket", "mountOptions": "implicit-dirs,only-dir=data/2026"}
    claim = volumes["disk"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]) == ("premium-rwo", {"requests": {"storage": "200Gi"}})
    validated = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "n"}, "spec": job["spec"]}
    fake_kubernetes.refuse_invalid(validated)


@pytest.mark.parametrize(
    ("option", "labels"),
    [
        (["--flex-start"], {"cloud.google.com/gke-flex-start": "true"}),
        (["--reservation", "mine"],
         {"cloud.google.com/reservation-affinity": "specific", "cloud.google.com/reservation-name": "mine"}),
        (["--reservation", "any"], {"cloud.google.com/reservation-affinity": "any"}),
    ],
)  # fmt: skip
def test_gke_jobs_select_the_nodes_of_a_kind_of_capacity(
    write: Write, option: list[str], labels: dict[str, str]
) -> None:
    (found,) = yaml.safe_load_all(write(*gke("--image", "gcr.io/p/i", "--accelerator", "L4", *option))[0])
    selector = found["spec"]["template"]["spec"]["nodeSelector"]
    assert selector == {"cloud.google.com/gke-accelerator": "nvidia-l4"} | labels


def test_groups_of_large_gpu_machines_are_told_about_their_network(trainyard: Command) -> None:
    job = ("job", *gke("--image", "gcr.io/p/i", "--accelerator", "8xH100_MEGA_80GB"))
    assert "GPUDirect-TCPXO only" in " ".join(trainyard(*job, "--workers", "2")[2].split())
    assert "GPUDirect" not in trainyard(*job)[2]
    smaller = ("job", *gke("--image", "gcr.io/p/i", "--accelerator", "2xH100_80GB"))
    assert "GPUDirect" not in trainyard(*smaller, "--workers", "2")[2]


def test_labels_of_kubernetes_may_have_capitals_and_a_prefix(write: Write) -> None:
    (found,) = yaml.safe_load_all(write(*gke("--image", "gcr.io/p/i", "--labels", "Team=Vision_1.0,x.io/y=A"))[0])
    assert found["metadata"]["labels"] == {"Team": "Vision_1.0", "x.io/y": "A"}


@pytest.mark.parametrize("output", ["gs://bucket", "gs://bucket/run/", "/mnt/disk/run", "s3://bucket/run"])
def test_the_output_may_be_a_bucket_another_storage_or_a_path_of_a_volume(write: Write, output: str) -> None:
    text = write(*gke("--image", "gcr.io/p/i", "--output", output))[0]
    assert f"--job-dir={output}" in text


@pytest.mark.parametrize("machine", ["z9-mega-8", "a9-highgpu-4g"])
def test_the_accelerator_says_what_an_unknown_machine_has(write: Write, machine: str) -> None:
    (found,) = yaml.safe_load_all(
        write(*gke("--image", "gcr.io/p/i", "--accelerator", "4xB200", "--machine", machine))[0]
    )
    (container,) = found["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_clusters_elsewhere_may_have_any_machine_type(write: Write) -> None:
    assert "p4d.24xlarge" in write("--platform", "kubeflow", "--image", "gcr.io/p/i", "--machine", "p4d.24xlarge")[0]


def test_an_unknown_machine_type_of_a_series_without_gpus_is_a_note_on_gke(trainyard: Command) -> None:
    status, out, err = trainyard("job", *gke("--image", "gcr.io/p/i", "--machine", "c4d-standard-8"))
    assert (status, "node.kubernetes.io/instance-type: c4d-standard-8" in out) == (0, True)
    assert "c4d-standard-8 is not in the table of 2026-" in " ".join(err.split())


@pytest.mark.parametrize("name", ["1run", "2026-11-22", "x" * 60, "9" * 60])
def test_names_are_valid_with_everything_that_is_put_behind_them(write: Write, name: str) -> None:
    """RFC 1035 names, and at most 63 characters with JobSet's indexes and the end that Kubernetes generates.

    https://github.com/kubernetes-sigs/jobset/blob/main/pkg/webhooks/jobset_webhook.go
    """
    text, _ = write(*gke("xla", "--accelerator", "tpu7x-16x24x24", "--slices", "999", "--name", name))
    (found,) = yaml.safe_load_all(text)
    given = found["metadata"]["name"]
    (part,) = found["spec"]["replicatedJobs"]
    hosts = part["template"]["spec"]["completions"]
    assert given[0].isalpha()
    assert len(f"{given}-{part['name']}-{part['replicas'] - 1}-{hosts - 1}-abcde") <= 63


def test_tpu_vms_have_labels_a_network_and_a_reservation(write: Write) -> None:
    text, _ = write("--platform", "tpu-vm", "xla", "--accelerator", "v6e-4", "--labels", "team=vision", "--network",
                    "ml", "--reservation", "any")  # fmt: skip
    create = next(line for line in text.splitlines() if " create " in line)
    assert {"--labels=team=vision", "--network=ml", "--reserved"} <= set(shlex.split(create))


# --- Kubeflow, Slurm, SkyPilot ---------------------------------------------------------------------------------------


def test_a_train_job_runs_the_image_on_the_torch_runtime(write: Write) -> None:
    """https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go"""
    text, command = write("--platform", "kubeflow", "gpu", "--accelerator", "8xA100", "--workers", "2",
                          "--timeout", "1h", "--queue", "team", "--mount", "gs://bucket:/data",
                          "--output", "gs://bucket/run")  # fmt: skip
    found = yaml.safe_load(text)
    assert command == ["kubectl", "create", "--filename=job.yaml"]
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert found["metadata"] == {"name": "gpu-mnist", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    spec = found["spec"]
    assert (spec["runtimeRef"], spec["activeDeadlineSeconds"]) == ({"name": "torch-distributed"}, 3600)
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["command"]) == (2, ["tini", "--", "launch"])
    assert trainer["args"] == ["mnist", "--job-dir=gs://bucket/run"]
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    (patch,) = spec["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert node["name"] == pod["containers"][0]["name"] == "node"
    mounted = {one["name"] for one in pod["containers"][0]["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trainer": {"numNode": 2}}, "unknown field 'numNode' (did you mean 'numNodes'?)"),
        ({"trainer": {"numNodes": "2"}}, "'2' is not of type 'integer'"),
        ({"runtimeRef": {}}, "'name' is a required property"),
        ({"activeDeadlineSeconds": 0}, "0 is less than the minimum of 1"),
        ({"managedBy": "me"}, "'me' is not one of"),
    ],
)
def test_invalid_train_jobs_do_not_match_the_schema(write: Write, change: dict[str, Any], said: str) -> None:
    found = yaml.safe_load(write("--platform", "kubeflow", "gpu", "--accelerator", "L4")[0])
    assert list(kubernetes.validate(found)) == []
    found["spec"] |= change
    (error,) = kubernetes.validate(found)
    assert said in error.what


def test_a_slurm_job_runs_one_task_on_each_node(write: Write) -> None:
    text, command = write("--platform", "slurm", "gpu", "--accelerator", "8xA100", "--workers", "4", "--queue", "ml",
                          "--priority", "high", "--timeout", "90m", "--args", "--lr 0.1 --datadir 'a b'")  # fmt: skip
    assert command == ["sbatch", "job.sbatch"]
    lines = text.splitlines()
    assert lines[0].startswith("#!")
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")}
    assert {"--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=ml", "--qos=high",
            "--time=90"} <= options  # fmt: skip
    step = shlex.split(lines[-1])
    # https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md: docker://[USER@][REGISTRY#]IMAGE[:TAG]
    assert "--container-image=us-central1-docker.pkg.dev#proj/ml/trainyard:gpu-2.15.0" in step
    assert step[-5:] == ["mnist", "--lr", "0.1", "--datadir", "a b"]


def test_a_slurm_job_with_apptainer_passes_gpus_and_variables(write: Write) -> None:
    text, _ = write("--platform", "slurm", "gpu", "--accelerator", "A100", "--container-runtime", "apptainer")
    step = shlex.split(text.splitlines()[-1])
    at = step.index("apptainer")
    assert step[at:] == ["apptainer", "run", "--nv", f"docker://{REGISTRY}/trainyard:gpu-2.15.0", "mnist"]


#: Fields and types of sky/utils/schemas.py (https://github.com/skypilot-org/skypilot), as far as jobs use them.
SKY_TASK: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "run": {"type": "string"},
        "file_mounts": {"type": "object"},
        "secrets": {"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "infra": {"type": "string", "pattern": "^gcp(/[^/]+(/[^/]+)?)?$"},
                "accelerators": {"type": "string"},
                "accelerator_args": {"type": "object"},
                "instance_type": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "disk_size": {"type": "integer"},
                "cpus": {"type": ["string", "number"]},
                "memory": {"type": ["string", "number"]},
                "labels": {"type": "object"},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("arguments", "resources", "command"),
    [
        (["--image", "docker.io/me/i", "--accelerator", "4xA100_80GB"], {"accelerators": "A100-80GB:4"}, "launch"),
        (["gpu", "--accelerator", "2xT4", "--spot", "--disk", "300"],
         {"infra": "gcp", "accelerators": "T4:2", "use_spot": True, "disk_size": 300}, "jobs"),
        (["xla", "--accelerator", "v6e-8", "--zone", "us-east5-b"],
         {"infra": "gcp/us-east5/us-east5-b", "accelerators": "tpu-v6e-8:1",
          "accelerator_args": {"runtime_version": "v2-alpha-tpuv6e"}}, "launch"),
    ],
)  # fmt: skip
def test_a_sky_pilot_task_has_the_fields_of_its_schema(
    write: Write, arguments: list[str], resources: dict[str, Any], command: str
) -> None:
    text, words = write("--platform", "skypilot", *arguments)
    found = yaml.safe_load(text)
    jsonschema.validate(found, SKY_TASK)
    assert found["resources"] == resources
    assert (words[0], words[1]) == ("sky", command)


def test_the_nodes_of_a_sky_pilot_task_form_a_group(write: Write, tmp_path: Path) -> None:
    """Run the script with SkyPilot's variables of a second node, and a docker that prints what it got."""
    text, _ = write("--platform", "skypilot", "--image", "docker.io/me/i", "--workers", "2", "--trainer", "mnist")
    (tmp_path / "sudo").write_text('#!/bin/sh\nshift; printf "%s\\n" "$@"\n')
    (tmp_path / "sudo").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
                   "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", yaml.safe_load(text)["run"]], env=environment, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    assert {"--env=NNODES=2", "--env=NODE_RANK=1", "--env=MASTER_ADDR=10.0.0.1"} <= set(words)
    assert words[-2:] == ["docker.io/me/i", "mnist"]


# --- rehearsals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "replicas"),
    [
        (vertex("cpu", "--workers", "3"), 3),
        (vertex("cpu", "--tune", "lr=0.01:0.1"), 1),
        (vertex("xla", "--accelerator", "v5litepod-16"), 4),
        (vertex("xla", "--accelerator", "v3-32"), 4),
        (gke("xla", "--accelerator", "v5litepod-16", "--slices", "2"), 8),
        (gke("gpu", "--accelerator", "8xA100", "--workers", "2"), 2),
        (gke("gpu", "--accelerator", "8xA100", "--workers", "2", "--spot"), 2),
        (["--platform", "kubeflow", "gpu", "--accelerator", "8xA100", "--workers", "2"], 2),
    ],
)
def test_what_is_written_can_be_rehearsed(write: Write, arguments: list[str], replicas: int) -> None:
    """A rehearsal has a container for each machine, with the image and arguments of the job."""
    text, _ = write(*arguments)
    job = job_file.parse(text, Path("job.yaml"))
    plan = session.plan(platforms.of_job_file(job).rehearse(job))
    assert len(plan["replicas"]) == replicas
    assert {one["image"].partition("/trainyard:")[0] for one in plan["replicas"]} == {REGISTRY}
    assert {one["args"][0] for one in plan["replicas"]} == {"mnist"}


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--platform", "vertx", "cpu"], "unknown platform 'vertx' (did you mean 'vertex'?)"),
        (["cpu"], "no '--platform' given; platforms: vertex, ai-platform, gke, tpu-vm, kubeflow"),
        (vertex("cpuu"), "unknown target 'cpuu' (did you mean 'cpu'?)"),
        (vertex("cpu", "--trainer", "mist"), "cpu has no trainer 'mist' (did you mean 'mnist'?)"),
        (vertex("cpu", "--accelerator", "T5"), "no accelerator 'T5'"),
        (vertex("cpu", "--accelerator", "1xT4:2"), "'--accelerator 1xT4:2' is neither GPUs"),
        (vertex("gpu", "--accelerator", "3xA100"), "no machine has 3 NVIDIA_TESLA_A100"),
        (vertex("xla", "--accelerator", "v5litepod-15"), "no TPU slice 'v5litepod-15'"),
        (vertex("xla", "--accelerator", "v4-8"), "Vertex AI has no v4-8 for jobs"),
        (vertex("xla", "--accelerator", "v2-8", "--workers", "2"), "one pool with one replica"),
        (vertex("xla", "--accelerator", "v5litepod-16", "--spot"), "SPOT with a TPU slice of several machines"),
        (vertex("xla", "--accelerator", "v5litepod-4", "--region", "us-east1"), "us-east1 has no v5litepod-4"),
        (vertex("cpu", "--region", "us-centrall"), "no training jobs in 'us-centrall' (did you mean 'us-central1'?)"),
        (vertex("cpu", "--accelerator", "T4"), "a GPU job with an image for CPUs: torch 2.15.0"),
        (vertex("tf-cpu", "--accelerator", "v6e-4"), "a TPU job with an image for CPUs"),
        (vertex("cpu", "--workers", "0"), "'--workers' (env var: 'TRAINYARD_WORKERS'): 0 is not in the range x>=1"),
        (vertex("cpu", "--timeout", "soon"), "'--timeout soon' is not a duration"),
        (vertex("cpu", "--args", "--lr '0.1"), "no closing quotation"),
        (vertex("cpu", "--output", "/tmp/x"), "write gs://bucket/folder"),
        (vertex("cpu", "--output", "gs://b/o"), "'--output gs://b/o': 'b' is no bucket's name, which has 3 to 222"),
        (gke("cpu", "--output", "bucket/o"), "neither a folder of Cloud Storage nor an absolute path: gs://bucket/o?"),
        (vertex("cpu", "--flex-start", "--timeout", "8d"), "'--timeout 8d': with '--flex-start' a job has its"),
        (vertex("cpu", "--tune", "lr=1:2", "--metric", "a b"), "'--metric a b': the ID of a metric contains no spaces"),
        (vertex("--image", "gcr.io/p/Img"), "'--image': 'gcr.io/p/Img' is not an image reference: the repository"),
        (gke("--image", "us-docker.pkg.dev/p/img"), "the path at us-docker.pkg.dev is not PROJECT/REPOSITORY/IMAGE"),
        (gke("cpu", "--name", "Run_1"), "'--name Run_1' is no name of a Kubernetes object: use a-z, 0-9, dashes and"
         " dots, with a letter or digit at both ends of each part, as in run-1"),
        (["--platform", "kubeflow", "cpu", "--name", "a/b"], "as in a-b"),
        (gke("cpu", "--labels", "Team=-x"), "'--labels': 'Team=-x' is not key=value of letters"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "v4-8", "--labels", "a=B"], "'--labels': 'a=B' is not key"),
        (gke("cpu", "--machine", "z9-mega-99"), "'--machine z9-mega-99' is not in the table of 2026-"),
        (vertex("cpu", "--machine", "a4x-maxgpu-8g"), "or say with '--accelerator' which GPUs it has"),
        (["--platform", "skypilot", "cpu", "--machine", "g9-standard-4"], "'--machine g9-standard-4' is not in the"),
        (vertex("xla", "--accelerator", "v7x-8"), "no TPU slice 'v7x-8' (did you mean 'tpu7x-8'?)"),
        (vertex("cpu", "--args", "--epoch 2"), "'--args': cpu's mnist has no flag --epoch (did you mean 'epochs'?)"),
        (vertex("cpu", "--tune", "leraning-rate=1:2"), "'--tune': cpu's mnist has no flag --leraning-rate"),
        (vertex("cpu", "--trials", "4"), "'--trials' requires '--tune'"),
        (vertex("cpu", "--tune", "lr=1:2", "--parallel", "9"), "'--parallel 9' is more than '--trials 8'"),
        (vertex("cpu", "--tensorboard", "projects/p/locations/l/tensorboards/1"),
         "a tensorboard without serviceAccount"),
        (vertex("cpu", "--machine", "n1-standard-7"), "unknown machine type 'n1-standard-7' (did you mean"),
        (old("--accelerator", "v2-8"), "tf-cpu contains tensorflow 2.21.0: use '--platform vertex'"),
        (old("--accelerator", "v5litepod-4"), "AI Platform had no v5litepod-4"),
        (old("--accelerator", "v3-8", "--machine", "standard", "--tpu-version", "2.11"), "the TPU is a v2-8"),
        (old("--spot"), "AI Platform has no '--spot'"),
        (gke("xla", "--accelerator", "v2-8"), "GKE has no v2-8"),
        (gke("cpu", "--tune", "lr=1:2"), "neither tuning jobs nor a managed TensorBoard"),
        (gke("cpu", "--slices", "2"), "'--slices' requires a TPU"),
        (gke("xla", "--accelerator", "v5litepod-16", "--workers", "2"), "leave out '--workers'"),
        (["--platform", "tpu-vm", "cpu"], "'--platform tpu-vm' needs a TPU"),
        (["--platform", "tpu-vm", "cpu", "--accelerator", "v5litepod-4"], "a TPU job with an image for CPUs: "
         "torch 2.15.0 (by images/cpu/image.yaml): targets for TPUs: torch-tpu, xla, xla-nightly"),
        (["--platform", "tpu-vm", "jax-gpu", "--accelerator", "v5litepod-4"], "targets for TPUs: jax-tpu"),
        (["--platform", "tpu-vm", "tf-cpu", "--accelerator", "v5litepod-4"], "targets for TPUs: tf-tpu"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "tpu7x-8"], "the Cloud TPU API has no tpu7x-8, which"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "v4-8", "--zone", "us-central1-a"], "it is in us-central2-b"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "v4-8", "--timeout", "1h"], "tpu-vm' has no '--timeout'"),
        (["--platform", "gke", "--from", "x.yaml"], "x.yaml: No such file"),
        (vertex("cpu", "--queue", "q"), "'--platform vertex' has no '--queue'; these have it: gke, kubeflow, slurm"),
        (vertex("cpu", "--spot", "--flex-start"), "'--spot' and '--flex-start': a job uses one kind of capacity"),
        (vertex("cpu", "--max-wait", "1h"), "'--max-wait' requires '--flex-start'"),
        (vertex("cpu", "--reservation", "mine"), "projects/PROJECT/zones/ZONE/reservations/NAME, or 'any'"),
        (vertex("cpu", "--labels", "Team=x"), "'--labels': 'Team=x' is not key=value of lowercase letters"),
        (vertex("cpu", "--kms-key", "k"), "'--kms-key k' is not projects/PROJECT/locations/REGION/keyRings/"),
        (vertex("cpu", "--persistent-resource", "A b"), "'--persistent-resource A b' is not its ID"),
        (vertex("cpu", "--disk", "big"), "'--disk big' is neither a size in GB"),
        (vertex("xla", "--machine", "ct6e-standard-4t"), "v6e machine: give the slice, as in '--accelerator v6e-4'"),
        (gke("cpu", "--mount", "bucket:/data"), "'--mount': 'bucket:/data' is not gs://BUCKET"),
        (gke("cpu", "--mount", "gs://bucket:/data gs://other:/data"), "'--mount': /data is given twice"),
        (gke("cpu", "--mount", "gs://bucket:/dev/shm"), "'--mount': /dev/shm is not for"),
        (gke("cpu", "--reservation", "a b"), "'--reservation a b' is not the name of a reservation"),
        (vertex("cpu", "--name", "x" * 129), "a display name has at most 128 characters"),
        (gke("cpu", "--placement", "block"), "'--placement' requires '--queue'"),
        (gke("cpu", "--queue", "q", "--placement", "row"), "'--placement row' is not one of block, subblock, host"),
        (["--platform", "slurm", "xla", "--accelerator", "v4-8"], "runs jobs with GPUs or CPUs"),
        (["--platform", "slurm", "cpu", "--reservation", "any"], "jobs of Slurm name their reservation"),
        (["--platform", "slurm", "cpu", "--queue", "a b"], "'--queue a b' is no name of Slurm"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "v6e-8", "--zone", "us-south9"], "has no v6e-8; it is in"),
        (["--platform", "slurm", "cpu", "--spot"], "'--platform slurm' has no '--spot'"),
        (["--platform", "kubeflow", "xla", "--accelerator", "v4-8"], "use '--platform gke' for TPUs"),
        (["--platform", "skypilot", "xla", "--accelerator", "tpu7x-8"], "request a slice that the API has"),
        (["--platform", "tpu-vm", "xla", "--accelerator", "v5p-8x16x44"], "by number: give '--accelerator v5p-11264'"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused_in_one_line(refused: Callable[..., str], arguments: list[str], said: str) -> None:
    line = " ".join(refused(*arguments).split())
    assert said in line
    assert line.startswith(("job: ", "WARNING: "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lr", "'lr' is not flag=values"),
        ("lr=1:2:lag", "did you mean 'log'?"),
        ("lr=2:1", "2 is not less than 1"),
        ("lr=0:1:log", "requires a range above 0"),
        ("lr=a:b", "'a' is not a number"),
        ("lr=1:2 lr=1:3", "'lr' is given twice"),
    ],
)
def test_an_invalid_search_is_quoted(words: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("?", r"\?")):
        tuning.parse(words)


LOCAL, LOOPBACK = "is a local name of Trainyard's, which names no registry", "is at a registry on this machine"


@pytest.mark.parametrize("platform", [one.name for one in platforms.PLATFORMS])
@pytest.mark.parametrize(("image", "where"), [("trainyard:c", LOCAL), ("localhost:5000/a/b:c", LOOPBACK)])
def test_a_job_of_an_image_that_only_this_machine_has_is_written_with_a_warning_and_not_submitted(
    trainyard: Command, monkeypatch: pytest.MonkeyPatch, platform: str, image: str, where: str
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(type(platforms.by_name(platform)), "submit", lambda *_, **__: sent.append(platform) or START)
    words = ["job", "--platform", platform, "--image", image]
    words += ["--accelerator", "v5litepod-4"] if platform == "tpu-vm" else []
    status, out, err = trainyard(*words)
    assert status == 0 and image.removeprefix("localhost:5000/") in out
    assert f"WARNING: {image} {where}: {image_rules.WHO_RUNS_IT}: {image_rules.PUSH_IT}, and give '--regis" in err
    own = platform in ("gke", "kubeflow", "slurm") and where == LOOPBACK  # a cluster may be on this machine, too
    status, out, err = trainyard(*words, "--submit")
    assert (status, out, sent) == (0 if own else 2, "", [platform] if own else [])
    assert own or (err.startswith(f"job: {image} {where}: ") and err.count("\n") == 1)


START = Submission("x", "SUCCEEDED")


def test_a_job_on_gke_of_an_image_at_a_registry_on_this_machine_is_not_submitted(trainyard: Command) -> None:
    words = ["job", "--platform", "gke", "--image", "localhost:5000/a/b:c", "--accelerator", "L4", "--submit"]
    assert trainyard(*words)[0] == 2


def test_a_converted_job_of_an_image_that_only_this_machine_has_is_not_submitted(
    tmp_path: Path, trainyard: Command
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("trainingInput: {scaleTier: BASIC, region: us-central1, masterConfig: {imageUri: 'trainyard:c'}}\n")
    status, _, err = trainyard("job", "--platform", "vertex", "--from", str(path), "--submit")
    assert status == 2 and f"trainyard:c {LOCAL}" in err


def test_reasons_of_waiting_pods_are_shown() -> None:
    pods = [
        {"status": {"conditions": [{"type": "PodScheduled", "reason": "Unschedulable"}]}},
        {"status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]}},
        {"status": {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}},
        {"status": {"containerStatuses": [{"state": {"running": {}}}]}},
    ]
    assert gke_platform.waiting_reasons(pods) == " (Unschedulable, ImagePullBackOff)"
    assert gke_platform.waiting_reasons(pods[2:]) == ""


def test_durations_have_units_and_are_in_seconds_without_one() -> None:
    assert [options.seconds(one) for one in ("90", "90s", "2m", "12h", "2d")] == [90, 90, 120, 43200, 172800]


@pytest.mark.parametrize("platform", ["vertex", "gke"])
def test_a_job_with_an_image_at_a_registry_on_this_machine_is_written_to_be_rehearsed(
    trainyard: Command, platform: str
) -> None:
    status, out, err = trainyard("job", "cpu", "--platform", platform, "--registry", "localhost:5000/ml")
    image = "localhost:5000/ml/trainyard:cpu-2.15.0"
    assert status == 0 and image in out
    assert f"WARNING: {image} is at a registry on this machine: 'trainyard job rehearse' can run it" in err


@pytest.mark.parametrize(("extends", "framework"), [("cpu", "['torch>=2.8']"), ("tf-nightly", "[tf-nightly]")])
def test_a_job_of_a_repository_whose_framework_is_not_locked_names_no_version(
    tmp_path: Path, write: Write, extends: str, framework: str
) -> None:
    (tmp_path / "mine").mkdir()
    text = f"extends: {extends}\nrun: [python, train.py]\nframework: {framework}\n"
    (tmp_path / "mine" / "trainyard.yaml").write_text(text, encoding="utf-8")
    found = write(*vertex(str(tmp_path / "mine")))[0]
    assert yaml.safe_load(found)["workerPoolSpecs"][0]["containerSpec"]["imageUri"] == f"{REGISTRY}/trainyard:mine"
    assert " unlocked\n" in found


def redirected(folder: Path, file: str, *words: str) -> str:
    """Return what `trainyard job WORDS >FILE`, run in a folder, writes."""
    (folder / file).parent.mkdir(exist_ok=True)
    with (folder / file).open("w") as stdout:
        command = [sys.executable, "-m", "trainyard", "job", *words]
        subprocess.run(command, cwd=folder, stdout=stdout, stderr=subprocess.DEVNULL, check=True)
    return (folder / file).read_text()


@pytest.mark.parametrize(
    ("arguments", "commands"),
    [
        (["vertex", "cpu"], ["trainyard job check 'my jobs/a.b'", "--config='my jobs/a.b'"]),
        (["gke", "cpu"], ["trainyard job check 'my jobs/a.b'", "kubectl create --filename='my jobs/a.b'"]),
        (["kubeflow", "gpu", "--accelerator", "L4"], ["check 'my jobs/a.b'", "--filename='my jobs/a.b'"]),
        (["ai-platform", "tf-cpu"], ["trainyard job --from 'my jobs/a.b'", "--config='my jobs/a.b'"]),
        (["slurm", "cpu"], ["sbatch 'my jobs/a.b'"]),
        (["skypilot", "cpu"], ["sky launch --yes --down 'my jobs/a.b'"]),
        (["tpu-vm", "xla", "--accelerator", "v5litepod-4"], ["Run it with: bash 'my jobs/a.b'"]),
    ],
)
def test_the_head_of_a_job_names_the_file_that_it_is_written_to(
    tmp_path: Path, arguments: list[str], commands: list[str]
) -> None:
    out = redirected(tmp_path, "my jobs/a.b", "--platform", *arguments, "--registry", REGISTRY)
    head = "\n".join(line for line in out.splitlines() if line.startswith("#"))
    for command in commands:
        assert command in head.replace("'--config=", "--config='").replace("'--filename=", "--filename='")
    assert "job.yaml" not in out


def test_a_converted_job_names_its_file(tmp_path: Path, write: Write) -> None:
    (tmp_path / "old.yaml").write_text(write("--platform", "ai-platform", "tf-cpu")[0])
    out = redirected(tmp_path, "new.yaml", "--platform", "vertex", "--from", "old.yaml")
    assert "--config=new.yaml" in out and "job.yaml" not in out
