"""``trainyard check-job``: a valid job has no finding; each fault is found by its rule, at its line."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity
from trainyard.image import recipes
from trainyard.spec import model
from trainyard_jobs import platforms
from trainyard_jobs.check import files
from trainyard_jobs.model import image_metadata, machines, yaml_writer
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rehearsal import tuning
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file, kubernetes

Trainyard = Callable[..., tuple[int, str, str]]

IMAGE = "us-docker.pkg.dev/p/r/image:tag"
HOLDS = Contents(IMAGE, {"torch-xla": "2.9.0", "torch": "2.9.1"}, "its labels")

POOL: dict[str, Any] = {
    "machineSpec": {"machineType": "n1-standard-8"},
    "replicaCount": 1,
    "containerSpec": {"imageUri": IMAGE, "args": ["mnist", "--hypertune-tag=accuracy"]},
}
V5E = POOL | {"machineSpec": {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "4x4"}}
V2 = POOL | {"machineSpec": {"machineType": "cloud-tpu", "acceleratorType": "TPU_V2", "acceleratorCount": 8}}
T4 = {"machineType": "n1-standard-8", "acceleratorType": "NVIDIA_TESLA_T4", "acceleratorCount": 1}
CUSTOM: dict[str, Any] = {
    "workerPoolSpecs": [POOL, POOL | {"replicaCount": 2}],
    "serviceAccount": "a@p.iam.gserviceaccount.com",
    "baseOutputDirectory": {"outputUriPrefix": "gs://bucket/run"},
    "tensorboard": "projects/p/locations/us-central1/tensorboards/1",
    "scheduling": {"strategy": "SPOT", "timeout": "3600s"},
}
STUDY = {
    "metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}],
    "parameters": [
        {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.01, "maxValue": 1}, "scaleType": "UNIT_LOG_SCALE"},
        {"parameterId": "opt", "categoricalValueSpec": {"values": ["sgd", "adam"]}},
    ],
}
TUNING: dict[str, Any] = {
    "displayName": "x",
    "studySpec": STUDY,
    "maxTrialCount": 4,
    "parallelTrialCount": 2,
    "trialJobSpec": {"workerPoolSpecs": [POOL]},
}
OLD: dict[str, Any] = {
    "jobId": "x",
    "trainingInput": {
        "scaleTier": "CUSTOM",
        "masterType": "n1-standard-8",
        "masterConfig": {"imageUri": IMAGE},
        "workerType": "cloud_tpu",
        "workerCount": 1,
        "workerConfig": {
            "imageUri": IMAGE,
            "tpuTfVersion": "pytorch-2.9",
            "acceleratorConfig": {"type": "TPU_V2", "count": 8},
        },
        "region": "us-central1",
    },
}
POD: dict[str, Any] = {
    "restartPolicy": "Never",
    "subdomain": "x",
    "nodeSelector": {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    },
    "containers": [{"name": "t", "image": IMAGE, "resources": {"limits": {"google.com/tpu": 4}}}],
}
JOB: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "x"},
    "spec": {
        "backoffLimit": 0,
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "template": {"spec": POD},
    },
}
SERVICE = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"clusterIP": "None"}}
JOBSET: dict[str, Any] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "x"},
    "spec": {
        "failurePolicy": {"maxRestarts": 3},
        "replicatedJobs": [{"name": "slice", "replicas": 2, "template": {"spec": JOB["spec"]}}],
    },
}


def evidence(*documents: dict[str, Any], region: str | None = "us-central1", **more: Any) -> Evidence:
    written = "---\n".join(yaml_writer.dump(one) for one in documents)
    more = {"images": {IMAGE: HOLDS}, "targets": lambda: recipes.outlines(*model.recommended())} | more
    return Evidence(job_file.parse(written, Path("job.yaml")), region, **more)


def found(*documents: dict[str, Any], **more: Any) -> list[Finding]:
    return all_rules.check(evidence(*documents, **more))


@pytest.mark.parametrize(
    "documents",
    [[CUSTOM], [{"workerPoolSpecs": [V5E]}], [{"workerPoolSpecs": [V2]}], [TUNING], [OLD], [SERVICE, JOB], [JOBSET]],
    ids=["custom", "v5e", "v2", "tuning", "old", "job", "jobset"],
)
def test_a_faultless_job_has_no_finding(documents: list[dict[str, Any]]) -> None:
    assert [one for one in found(*documents) if one.fails] == []


def changed(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with the value at a dotted path replaced; None takes it away."""
    copied = json.loads(json.dumps(base))  # nothing shared, as deepcopy would keep it
    node: Any = copied
    *steps, last = path.split(".")
    for step in steps:
        node = node[int(step) if step.isdigit() else step]
    if value is None:
        del node[last]
    elif isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value
    return copied


P, T, R = "workerPoolSpecs", "trainingInput", "spec.template.spec"
ONE = {P: [POOL]}


def gpus(machine: str, kind: str, count: int) -> dict[str, Any]:
    return {P: [POOL | {"machineSpec": {"machineType": machine, "acceleratorType": kind, "acceleratorCount": count}}]}


#: base, path, value -> rule, and words of its finding.
FAULTS: list[tuple[dict[str, Any], str, Any, str, str]] = [
    # the schema
    (CUSTOM, f"{P}.0.replicacount", 1, "fields_match_api", "'replicacount' (did you mean 'replicaCount'?)"),
    (CUSTOM, f"{P}.0.containerSpec.args", {"a": 1}, "fields_match_api", "is not text"),
    (CUSTOM, f"{P}.0.containerSpec.args.0", 1, "fields_match_api", "1 is not text: put it in quotes"),
    (CUSTOM, "scheduling.strategy", "SPOTT", "fields_match_api", "did you mean 'SPOT'?"),
    (CUSTOM, "scheduling.timeout", "1h", "fields_match_api", "'1h' is not a duration"),
    (CUSTOM, "state", "x", "fields_match_api", "unknown field 'state'"),
    ({"jobSpec": ONE, "displayName": "x", "name": "n"}, "state", "JOB_STATE_FAILED", "fields_match_api",
     "by the service"),
    (OLD, f"{T}.wrokerCount", 1, "fields_match_api", "did you mean 'workerCount'?"),
    (OLD, f"{T}.scaleTier", "CUSTUM", "fields_match_api", "did you mean 'CUSTOM'?"),
    (OLD, f"{T}.masterConfig.tpuTopology", "x", "fields_match_api", "unknown field 'tpuTopology'"),
    (CUSTOM, f"{P}.0.disk_spec", {"boot_disk_size_gb": 100}, "keys_are_in_camel_case", "gcloud's is 'diskSpec'"),
    # Vertex AI
    (CUSTOM, P, [], "pools_are_in_order", "there is no worker pool"),
    (CUSTOM, f"{P}.0.replicaCount", 3, "pools_are_in_order", "3 replicas in the first pool; it has exactly 1"),
    (CUSTOM, f"{P}.1.replicaCount", None, "pools_are_in_order", "pool 1 (workers) has no replica"),
    (CUSTOM, P, [POOL] * 5, "pools_are_in_order", "5 pools; at most 4"),
    (CUSTOM, P, [{}, POOL], "pools_are_in_order", "the first pool is empty"),
    (CUSTOM, P, [POOL, {}], "pools_are_in_order", "the last pool is empty"),
    (CUSTOM, f"{P}.0.containerSpec", None, "pools_are_complete", "neither containerSpec nor pythonPackageSpec"),
    (CUSTOM, f"{P}.0.pythonPackageSpec", {"pythonModule": "a"}, "pools_are_complete", "both"),
    (CUSTOM, f"{P}.0.containerSpec.imageUri", None, "pools_are_complete", "has no imageUri"),
    (CUSTOM, f"{P}.0.machineSpec", {}, "pools_are_complete", "no machineSpec.machineType"),
    (CUSTOM, f"{P}.0.machineSpec.machineType", "n1-standard-6", "machine_types_exist", "n1-standard-6"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_K80", 1), "enableWebAccess", True, "gpus_match_machines", "is not available"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_T4", 3), "enableWebAccess", True, "gpus_match_machines",
     "valid numbers are 1, 2, 4"),
    (gpus("n1-standard-32", "NVIDIA_TESLA_T4", 1), "enableWebAccess", True, "gpus_match_machines",
     "at most 16 vCPUs"),
    (gpus("e2-standard-8", "NVIDIA_TESLA_T4", 1), "enableWebAccess", True, "gpus_match_machines",
     "it needs an n1 machine"),
    (gpus("n1-standard-8", "NVIDIA_L4", 1), "enableWebAccess", True, "gpus_match_machines",
     "part of other machine types"),
    (gpus("a2-highgpu-2g", "NVIDIA_TESLA_A100", 1), "enableWebAccess", True, "gpus_match_machines",
     "a2-highgpu-2g has 2"),
    (gpus("a2-highgpu-2g", "", 0), "enableWebAccess", True, "gpus_match_machines", "the job asks for none"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_T4", 0), "enableWebAccess", True, "gpus_match_machines",
     "without acceleratorCount"),
    ({P: [V2]}, f"{P}.0.machineSpec.acceleratorCount", 7, "tpu_counts_exist", "7 cores of TPU_V2"),
    ({P: [V2]}, f"{P}.0.machineSpec.machineType", "n1-standard-8", "tpu_counts_exist", "with acceleratorType 'TPU_V2'"),
    ({P: [V2]}, f"{P}.0.machineSpec.acceleratorType", "NVIDIA_TESLA_T4", "tpu_counts_exist",
     "use cloud-tpu with TPU_V2"),
    ({P: [V5E]}, f"{P}.0.machineSpec.tpuTopology", None, "tpu_topologies_match_machines", "without tpuTopology"),
    ({P: [V5E]}, f"{P}.0.machineSpec.tpuTopology", "3x3", "tpu_topologies_match_machines", "2x2, 2x4, 4x4"),
    ({P: [V5E]}, f"{P}.0.machineSpec.acceleratorType", "TPU_V5_LITEPOD", "tpu_topologies_match_machines",
     "the topology implies them"),
    ({P: [V5E]}, f"{P}.0.machineSpec.machineType", "ct5p-hightpu-4t", "tpu_topologies_match_machines",
     "not available for jobs"),
    (ONE, f"{P}.0.machineSpec.tpuTopology", "2x2", "tpu_topologies_match_machines",
     "tpuTopology with n1-standard-8"),
    ({P: [V5E]}, f"{P}.0.replicaCount", 4, "tpu_jobs_are_one_replica", "4 replicas in a job with a TPU"),
    ({P: [V5E, POOL]}, "enableWebAccess", True, "tpu_jobs_are_one_replica", "2 replicas"),
    ({P: [V5E]}, "scheduling", {"strategy": "SPOT"}, "spot_is_not_for_tpu_pods", "slice of several machines"),
    ({P: [V2]}, "workerPoolSpecs.0.machineSpec.machineType", "cloud-tpuu", "tpu_counts_exist", "cloud-tpuu"),
    (CUSTOM, "scheduling.strategy", "LOW_COST", "scheduling_is_current", "LOW_COST is deprecated"),
    (CUSTOM, "scheduling.strategy", "FLEX_START", "scheduling_is_current", "without maxWaitDuration"),
    (CUSTOM, f"{P}.0.diskSpec", {"bootDiskType": "pd-sdd"}, "boot_disks_are_valid", "did you mean 'pd-ssd'?"),
    (CUSTOM, f"{P}.0.diskSpec", {"bootDiskSizeGb": 50}, "boot_disks_are_valid", "50 GB; valid are 100 to 64000"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": "A"}] * 2, "environment_variables_are_valid", "A is there twice"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": "AIP_MODEL_DIR"}], "environment_variables_are_valid",
     "set by the service"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": f"A{n}"} for n in range(101)], "environment_variables_are_valid",
     "at most 100"),
    (CUSTOM, "network", "projects/p/global/networks/n", "resource_names_are_valid", "number, not name"),
    (CUSTOM, "serviceAccount", "me", "resource_names_are_valid", "'me'"),
    (CUSTOM, "baseOutputDirectory.outputUriPrefix", "/tmp", "resource_names_are_valid", "write gs://"),
    (CUSTOM, "serviceAccount", None, "tensorboard_can_be_written", "without serviceAccount"),
    (CUSTOM, "tensorboard", "projects/p/locations/us-east1/tensorboards/1", "tensorboard_can_be_written",
     "is in us-east1"),
    (TUNING, "parallelTrialCount", 9, "search_is_valid", "9 trials at a time of 4 in all"),
    (TUNING, "studySpec.metrics", None, "search_is_valid", "no metrics"),
    (TUNING, "studySpec.parameters.1.parameterId", "lr", "search_is_valid", "lr is there twice"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", 0, "search_is_valid", "a logarithmic scale from 0"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", 2, "search_is_valid", "2 is above maxValue 1"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", None, "search_is_valid",
     "without minValue, which counts as 0"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec", None, "search_is_valid", "0 kinds of values"),
    (TUNING, "studySpec.algorithm", "GRID_SEARCH", "search_is_valid", "GRID_SEARCH over doubles"),
    (TUNING, "studySpec.parameters.1", {"parameterId": "b", "discreteValueSpec": {"values": [2, 1]}},
     "search_is_valid",
     "out of order"),
    (TUNING, "studySpec.metrics.0.metricId", "loss", "trainer_reports_the_metric",
     "reports 'accuracy', the study reads loss"),
    # AI Platform
    (OLD, "labels", {}, "service_exists", "shut down on 31 January 2025"),
    (OLD[T], "serviceAccount", "a", "training_input_has_its_key", "not below trainingInput:"),
    (OLD, f"{T}.masterType", None, "machines_match_tier", "CUSTOM without masterType"),
    (OLD, f"{T}.scaleTier", "BASIC", "machines_match_tier", "masterType with scaleTier BASIC"),
    (OLD, f"{T}.workerCount", None, "machines_match_tier", "workerType without workerCount"),
    (OLD, f"{T}.parameterServerCount", 1, "machines_match_tier", "without parameterServerType"),
    (OLD, f"{T}.masterType", "standart", "machine_types_do_not_mix", "did you mean 'standard'?"),
    (OLD, f"{T}.evaluatorType", "standard", "machine_types_do_not_mix", "both families"),
    (OLD, f"{T}.masterType", "standard", "machine_types_do_not_mix", "acceleratorConfig with standard"),
    (OLD, f"{T}.runtimeVersion", "2.11", "job_has_container_or_package",
     "both masterConfig.imageUri and runtimeVersion"),
    (OLD, f"{T}.masterConfig", None, "job_has_container_or_package", "neither masterConfig.imageUri nor packageUris"),
    (OLD, f"{T}.masterConfig", {"containerArgs": ["a"]}, "commands_need_containers", "without an image"),
    (changed(OLD, f"{T}.args", ["b"]), f"{T}.masterConfig.containerArgs", ["a"], "commands_need_containers",
     "and args"),
    (OLD, f"{T}.masterConfig.acceleratorConfig", {"type": "NVIDIA_TESLA_T4", "count": 3},
     "ai_platform_gpus_match_machines",
     "valid numbers are 1, 2, 4"),
    (OLD, f"{T}.workerCount", 4, "ai_platform_tpu_is_one_worker", "4 TPU workers"),
    (OLD, f"{T}.workerConfig.acceleratorConfig.count", 7, "ai_platform_tpu_is_one_worker", "7 cores of TPU_V2"),
    (OLD, f"{T}.workerConfig.acceleratorConfig.type", "TPU_V4_POD", "ai_platform_tpu_is_one_worker",
     "there were TPU_V2"),
    (OLD, f"{T}.parameterServerCount", 2, "ai_platform_tpu_is_one_worker", "parameter servers with a TPU"),
    (OLD, f"{T}.masterType", "cloud_tpu", "ai_platform_tpu_is_one_worker", "a TPU as master"),
    (OLD, f"{T}.workerType", "n1-standard-8", "ai_platform_tpu_is_one_worker", "TPU_V2 on n1-standard-8"),
    (OLD, f"{T}.workerConfig.tpuTfVersion", None, "tpu_runtime_version_is_valid", "without tpuTfVersion"),
    (OLD, f"{T}.workerConfig.tpuTfVersion", "2.12", "tpu_runtime_version_is_valid", "tpuTfVersion 2.12"),
    (OLD, f"{T}.masterConfig.tpuTfVersion", "2.11", "tpu_runtime_version_is_valid", "masterConfig.tpuTfVersion"),
    (OLD, f"{T}.region", "us-east1", "ai_platform_region_existed", "no TPUs in 'us-east1'"),
    (OLD, f"{T}.region", "mars", "ai_platform_region_existed", "no TPUs in 'mars'"),
    (OLD, "jobId", "a-b", "ai_platform_names_are_valid", "jobId 'a-b'"),
    (OLD, f"{T}.network", "default", "ai_platform_names_are_valid", "network 'default'"),
    (OLD, f"{T}.scheduling", {"maxWaitTime": "60s"}, "ai_platform_names_are_valid", "maxWaitTime 60s"),
    (OLD, f"{T}.scheduling", {"priority": 2000}, "ai_platform_names_are_valid", "priority 2000"),
    (OLD, f"{T}.hyperparameters", {"maxTrials": 1, "maxParallelTrials": 2}, "ai_platform_search_is_valid",
     "at a time than in all"),
    (OLD, f"{T}.hyperparameters", {"params": [{"parameterName": "a", "type": "DOUBLE"}]}, "ai_platform_search_is_valid",
     "without minValue"),
    (OLD, f"{T}.hyperparameters", {"params": [{"parameterName": "a", "type": "DISCRETE", "discreteValues": [2, 1]}]},
     "ai_platform_search_is_valid", "in increasing order"),
    # GKE
    (JOB, "spec.complitions", 4, "manifests_match_schema", "did you mean 'completions'?"),
    (JOB, f"{R}.containers.0.args", [1], "manifests_match_schema", "1 is not of type"),
    (JOB, "kind", "Jobb", "", ""),
    (JOBSET, "spec.replicatedJobs.0.replica", 1, "manifests_match_schema", "did you mean 'replicas'?"),
    (JOBSET, "spec.failurePolicy.restartStrategy", "Again", "manifests_match_schema", "'Again' is not one of"),
    (JOBSET, "spec.replicatedJobs.0.template.spec.paralelism", 1, "manifests_match_schema",
     "did you mean 'parallelism'?"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "4x4"}, "tpu_nodes_exist", "without"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "4x4",
                                "cloud.google.com/gke-tpu-accelerator": "tpu-v5e"}, "tpu_nodes_exist",
                                 "no TPU 'tpu-v5e'"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "3x3",
                                "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}, "tpu_nodes_exist", "'3x3'"),
    (JOB, f"{R}.containers.0.resources.limits", {"google.com/tpu": 8}, "pods_match_slice", "4 pods of 4 chips"),
    (JOB, "spec.completions", 3, "pods_match_slice", "3 completions, 4 at a time"),
    (JOB, f"{R}.containers.0.resources", None, "pods_match_slice", "no container asks for google.com/tpu"),
    (JOB, f"{R}.nodeSelector", None, "pods_match_slice", "without a nodeSelector"),
    (JOB, f"{R}.containers.0.resources.requests", {"google.com/tpu": 2}, "accelerators_are_limited",
     "2 requested, limit 4"),
    (JOB, "spec.completionMode", None, "pod_groups_can_connect", "without completionMode: Indexed"),
    (JOB, "spec.backoffLimit", None, "pod_groups_can_connect", "backoffLimit is not 0"),
    (JOB, f"{R}.subdomain", None, "pod_groups_can_connect", "no subdomain"),
    (JOB, "spec.parallelism", 1, "pod_groups_can_connect", "1 of 4 pods at a time"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-spot": "true"}, "spot_grace_period_fits",
     "a grace period of 30 s"),
    (JOB, f"{R}.containers.0.image", "https://a.example/b", "images_are_named", "leave out 'https://'"),
    (JOB, f"{R}.containers.0.image", "us-docker.pkg.dev/p/i", "images_are_named", "is not PROJECT/REPOSITORY/IMAGE"),
    (CUSTOM, f"{P}.0.containerSpec.imageUri", "gcr.io/P/i", "images_are_named", "the repository 'P/i' must be"),
    (CUSTOM, f"{P}.0.machineSpec.acceleratorType", "NVIDIA_T4", "fields_match_api", "did you mean 'NVIDIA_TESLA_T4'?"),
    (CUSTOM, f"{P}.0.machineSpec.machineType", "N1-Standard-8", "machine_types_exist", "did you mean 'n1-standard-8'?"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-accelerator": "nvidia-L4"}, "gpus_fit_node", "write nvidia-l4"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "2x2x1",
                                "cloud.google.com/gke-tpu-accelerator": "tpu-v7x-slice"}, "tpu_nodes_exist",
                                 "write tpu7x"),
    (JOB, f"{R}.nodeSelector", {"node.kubernetes.io/instance-type": "G2_standard_8"}, "node_labels_agree",
     "did you mean 'g2-standard-8'?"),
]  # fmt: skip
FAULTS = [fault for fault in FAULTS if fault[3]]


@pytest.mark.parametrize(
    ("base", "path", "value", "rule", "said"), FAULTS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_fault_is_found_by_its_rule(base: dict[str, Any], path: str, value: Any, rule: str, said: str) -> None:
    some = [one for one in found(changed(base, path, value)) if one.rule == rule]
    assert said in " ".join(f"{one.what} {one.remediation}" for one in some)
    assert all(one.where.startswith("job.yaml:") and one.why and one.remediation for one in some)


def test_a_finding_names_the_line_it_is_about() -> None:
    spoilt = changed(CUSTOM, f"{P}.1.machineSpec.machineType", "n1-standard-6")
    (finding,) = [one for one in found(spoilt) if one.rule == "machine_types_exist"]
    lines = yaml_writer.dump(spoilt).splitlines()
    assert "n1-standard-6" in lines[int(finding.where.partition(":")[2]) - 1]


# --- regions, words, images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "said"),
    [("us-central9", "did you mean 'us-central1'?"), ("us-east1", "us-east1 has no v5litepod-16"), ("us-central1", "")],
)
def test_the_region_must_have_the_tpu(region: str, said: str) -> None:
    some = [one for one in found({P: [V5E]}, region=region) if one.rule == "region_has_accelerator"]
    assert said in " ".join(one.what for one in some)
    assert bool(some) == bool(said)


@pytest.mark.parametrize(("word", "odd"), [("yes", True), ("y", True), ("1:30", True), ('"yes"', False), ("x", False)])
def test_ambiguous_yaml_words_are_found(word: str, odd: bool) -> None:
    content = f"workerPoolSpecs:\n  - containerSpec:\n      args: [{word}]\n"
    evidence = Evidence(job_file.parse(content, Path("job.yaml")))
    some = [one for one in all_rules.check(evidence) if one.rule == "no_ambiguous_yaml_words"]
    assert bool(some) == odd
    assert all(one.where == "job.yaml:3" for one in some)


ARM, X86 = ("linux/arm64",), ("linux/amd64",)
INSTANCE_TYPE, SERIES = "node.kubernetes.io/instance-type", "cloud.google.com/machine-family"


@pytest.mark.parametrize(
    ("labels", "platforms", "said"),
    [
        (
            {"kubernetes.io/arch": "arm64"},
            X86,
            "nodes with kubernetes.io/arch: arm64 run linux/arm64; the image is for",
        ),
        ({"kubernetes.io/arch": "arm64"}, (*X86, *ARM), ""),
        ({"kubernetes.io/arch": "amd64"}, ARM, "run linux/amd64; the image is for linux/arm64"),
        (
            {INSTANCE_TYPE: "c4a-standard-8"},
            X86,
            "nodes with node.kubernetes.io/instance-type: c4a-standard-8 run linux/arm64",
        ),
        ({INSTANCE_TYPE: "c4a-standard-8"}, ARM, ""),
        ({INSTANCE_TYPE: "n2-custom-6-3072"}, ARM, "run linux/amd64"),
        ({INSTANCE_TYPE: "z9-standard-8"}, ARM, ""),
        ({SERIES: "t2a"}, X86, "run linux/arm64"),
        ({"cloud.google.com/gke-accelerator": "nvidia-gb200"}, X86, "run linux/arm64"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4"}, ARM, "run linux/amd64"),
        (
            POD["nodeSelector"],
            ARM,
            "nodes with cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice run linux/amd64",
        ),
        ({}, ARM, ""),
        ({"kubernetes.io/arch": "arm64"}, (), ""),
    ],
)
def test_images_on_gke_are_for_the_architecture_of_the_nodes(
    labels: dict[str, str], platforms: tuple[str, ...], said: str
) -> None:
    pod = POD | {"nodeSelector": labels}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {"spec": pod}}}
    assert_architecture(job, platforms, said)


@pytest.mark.parametrize(
    ("machine", "platforms", "said"),
    [
        ("a4x-highgpu-4g", X86, "machines of type a4x-highgpu-4g run linux/arm64; the image is for linux/amd64"),
        ("a4x-highgpu-4g", ARM, ""),
        ("n1-standard-8", ARM, "run linux/amd64"),
        ("n1-standard-8", (*X86, *ARM), ""),
        ("z9-standard-8", ARM, ""),
    ],
)
def test_images_on_vertex_are_for_the_architecture_of_the_machines(
    machine: str, platforms: tuple[str, ...], said: str
) -> None:
    assert_architecture({"workerPoolSpecs": [POOL | {"machineSpec": {"machineType": machine}}]}, platforms, said)


def assert_architecture(job: dict[str, Any], built_for: tuple[str, ...], said: str) -> None:
    """``said`` is in the only finding about the image's architecture; without it there is none."""
    parsed = job_file.parse(json.dumps(job), Path("job.yaml"))
    evidence = Evidence(parsed, images={IMAGE: Contents(IMAGE, platforms=built_for)})
    found = [one for one in all_rules.check(evidence) if one.rule == "images_have_the_architecture"]
    assert [said in one.what and one.severity is Severity.CANNOT_START for one in found] == ([True] if said else [])


def holding(**versions: str) -> dict[str, Any]:
    return {
        "images": {
            IMAGE: Contents(IMAGE, {name.replace("_", "-"): one for name, one in versions.items()}, "its labels")
        }
    }


@pytest.mark.parametrize(
    ("version", "held", "said"),
    [
        ("2.11", {"tensorflow": "2.21.0"}, "tpuTfVersion 2.11, but the image has tensorflow 2.21.0 (by its labels)"),
        ("2.11", {"tensorflow": "2.11.1"}, ""),
        ("2.11", {"torch_xla": "2.9.0"}, "but the image has torch_xla 2.9.0"),
        ("pytorch-2.9", {"torch_xla": "2.9.0"}, ""),
        ("pytorch-1.11", {"torch_xla": "2.9.0"}, "use an image with torch-xla 1.11, or write tpuTfVersion: 2.9"),
        ("2.11", {"torch": "2.15.0"}, "but the image has torch 2.15.0"),
    ],
)
def test_the_tpu_runtime_matches_the_image(version: str, held: dict[str, str], said: str) -> None:
    job = changed(OLD, f"{T}.workerConfig.tpuTfVersion", version)
    some = [one for one in found(job, **holding(**held)) if one.rule == "tpu_runtime_matches_image"]
    assert said in " ".join(f"{one.what}; {one.remediation}" for one in some)
    assert bool(some) == bool(said)


V6E = {P: [POOL | {"machineSpec": {"machineType": "ct6e-standard-4t", "tpuTopology": "2x2"}}]}


@pytest.mark.parametrize(
    ("job", "held", "rule", "said"),
    [
        ({P: [V5E]}, {"tensorflow_cpu": "2.21.0"}, "images_support_accelerator",
         "a TPU job with an image for CPUs"),
        ({P: [V5E]}, {"tensorflow_cpu": "2.21.0"}, "images_support_accelerator", "targets for TPUs: tf-tpu"),
        ({P: [V5E]}, {"torch": "2.15.0+cu128"}, "images_support_accelerator",
         "targets for TPUs: torch-tpu, xla, xla-nightly"),
        ({P: [POOL | {"machineSpec": T4}]}, {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}, "images_support_accelerator",
         "targets for GPUs: jax-gpu"),
        ({P: [POOL | {"machineSpec": T4}]}, {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax_cuda13_plugin": "0.12.0.1"},
         "images_support_accelerator", ""),
        ({P: [V5E]}, {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "jax_cuda13_plugin": "0.12.0.1"},
         "images_support_accelerator", "image for GPUs: jax 0.12.0.1"),
        ({P: [POOL | {"machineSpec": T4}]}, {"jax": "0.12.0.1"}, "images_support_accelerator", ""),
        ({P: [V5E]}, {"torch": "2.15.0+cu128"}, "images_support_accelerator", "image for GPUs: torch 2.15.0+cu128"),
        ({P: [POOL | {"machineSpec": T4}]}, {"torch": "2.15.0+cpu"}, "images_support_accelerator", "a GPU job"),
        ({P: [POOL | {"machineSpec": T4}]}, {"torch_xla": "2.9.0"}, "images_support_accelerator", "image for TPUs"),
        (JOB, {"tensorflow_cpu": "2.21.0"}, "images_support_accelerator", "a TPU job with an image for CPUs"),
        ({P: [V5E]}, {"torch_xla": "2.9.0"}, "images_support_accelerator", ""),
        (ONE, {"torch_xla": "2.9.0"}, "images_support_accelerator", ""),
        (V6E, {"tensorflow_tpu": "2.20.0"}, "frameworks_support_tpu", "tensorflow 2.20.0 on a TPU v6e; not supported"),
        ({P: [V5E]}, {"tensorflow_tpu": "2.14.0"}, "frameworks_support_tpu", "it needs 2.15 or later"),
        ({P: [V5E]}, {"tensorflow_tpu": "2.20.0"}, "frameworks_support_tpu", ""),
        (V6E, {"torch_xla": "2.9.0"}, "frameworks_support_tpu", ""),
    ],
)  # fmt: skip
def test_the_image_supports_the_accelerator(job: Any, held: dict[str, str], rule: str, said: str) -> None:
    some = [one for one in found(job, **holding(**held)) if one.rule == rule]
    assert said in " ".join(f"{one.what}; {one.remediation}" for one in some)
    assert bool(some) == bool(said)


@pytest.mark.parametrize(
    ("known", "missing", "said", "fails"),
    [
        ({}, {IMAGE: "us-docker.pkg.dev has no p/r/image:tag"}, "has no p/r/image:tag", True),
        ({IMAGE: None}, {IMAGE: "out of reach"}, "could not be looked up: out of reach", False),
        ({IMAGE: HOLDS}, {}, "", True),
    ],
)
def test_an_image_exists_or_not_or_is_unknown(known: Any, missing: dict[str, str], said: str, fails: bool) -> None:
    some = [one for one in found(ONE, images=known, missing=missing) if one.rule == "images_exist"]
    assert [(said in one.what, one.fails) for one in some] == ([(True, fails)] if said else [])


@pytest.mark.parametrize("document", [CUSTOM, TUNING, OLD, JOB, JOBSET])
@pytest.mark.parametrize(
    ("reference", "where"),
    [
        ("localhost:5000/r/image:tag", "at a registry on this machine"),
        ("127.0.0.1:5000/r/image:tag", "at a registry on this machine"),
        ("localhost/r/image:tag", "at a registry on this machine"),
        ("trainyard:c", "a local name of Trainyard's, which names no registry"),
        ("docker.io/library/trainyard:c-1.0", "a local name of Trainyard's, which names no registry"),
    ],
)
@pytest.mark.parametrize("offline", [False, True])
def test_an_image_that_only_this_machine_has_is_one_finding(
    document: dict[str, Any], reference: str, where: str, offline: bool
) -> None:
    here = json.loads(json.dumps(document).replace(IMAGE, reference))
    looked_up = {} if offline else {"images": {reference: None}, "missing": {reference: "out of reach"}}
    finding, *more = [one for one in found(here, **looked_up) if one.rule.startswith("images_")]
    assert finding.fails and finding.severity == Severity.CANNOT_START
    assert more == [] or (document in (JOB, JOBSET) and not more[0].fails and "could not be looked up" in more[0].what)
    assert finding.what == f"{reference} is {where}"


@pytest.mark.parametrize("reference", ["localhost:5000/r/image:tag", "trainyard:c"])
def test_a_cluster_that_is_not_gkes_may_have_an_image_of_this_machine(reference: str) -> None:
    plain = changed(changed(JOB, POD_AT + ".nodeSelector", None), POD_AT + ".containers.0.resources", None)
    here = json.loads(json.dumps(plain).replace(IMAGE, reference))
    found_there = found(here, images={reference: None}, missing={reference: "out of reach"})
    local, looked_up = [one for one in found_there if one.rule.startswith("images_")]
    assert local.rule == "images_can_be_pulled" and not local.fails and "a cluster that was given it" in local.why
    assert not looked_up.fails and "could not be looked up" in looked_up.what


POD_AT = "spec.template.spec"
NO_LIMITS = changed(JOB, f"{POD_AT}.containers.0.resources", None)
TRAIN_JOB: dict[str, Any] = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "x"},
    "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"image": IMAGE, "numNodes": 1}},
}


@pytest.mark.parametrize(
    ("job", "asks"),
    [
        (ONE, False),
        ({P: [POOL | {"machineSpec": T4}]}, True),
        ({P: [POOL | {"machineSpec": {"machineType": "a2-highgpu-1g"}}]}, True),
        ({P: [POOL, POOL | {"machineSpec": T4}]}, True),  # parameter servers and evaluators need none
        ({P: [POOL | {"machineSpec": {"machineType": "z9-highgpu-1g"}}]}, True),  # may have GPUs
        ({P: [POOL | {"machineSpec": {}}], "persistentResourceId": "x"}, True),
        ({P: [V5E]}, True),
        (JOB, True),
        (NO_LIMITS, False),
        (changed(NO_LIMITS, f"{POD_AT}.containers.0.resources", {"limits": {"cpu": "4", "memory": "8Gi"}}), False),
        (changed(NO_LIMITS, f"{POD_AT}.containers.0.resources", {"limits": {"nvidia.com/mig-1g.5gb": 1}}), True),
        (changed(NO_LIMITS, f"{POD_AT}.containers.0.resources", {"claims": [{"name": "gpus"}]}), True),
        (TRAIN_JOB, False),
        (changed(TRAIN_JOB, "spec.trainer.resourcesPerNode", {"limits": {"nvidia.com/gpu": 1}}), True),
        (changed(TRAIN_JOB, "spec.runtimeRef.name", "my-runtime"), True),  # which may have GPUs
    ],
)
@pytest.mark.parametrize("held", [{"torch": "2.15.0+cu128"}, {"torch_xla": "2.9.0"}, {"torch": "2.15.0+cpu"}])
def test_an_image_for_an_accelerator_in_a_job_that_asks_for_none_is_a_note(
    job: dict[str, Any], asks: bool, held: dict[str, str]
) -> None:
    some = [one for one in found(job, **holding(**held)) if one.rule == "images_get_their_accelerator"]
    assert bool(some) == (not asks and "+cpu" not in held.get("torch", ""))
    for one in some:
        assert not one.fails and " in a job that asks for no accelerator: torch" in one.what


def test_an_image_at_a_registry_whose_name_only_begins_like_this_machine_is_not_refused() -> None:
    for registry in ("localhost.example", "127.example:5000", "us-docker.pkg.dev/localhost"):
        here = json.loads(json.dumps(CUSTOM).replace(IMAGE, f"{registry}/r/image:tag"))
        assert "images_can_be_pulled" not in {one.rule for one in found(here)}


def test_an_image_without_a_valid_signature_is_refused_where_it_is_demanded() -> None:
    (finding,) = [one for one in found(ONE, unsigned={IMAGE: "it has no signature"}) if one.fails]
    assert finding.fails and finding.rule == "images_are_signed"
    assert finding.what == f"{IMAGE} is not signed as demanded: it has no signature"


POD_JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: j}
spec:
  template:
    metadata: {annotations: {gke-gcsfuse/volumes: "true"}}
    spec:
      restartPolicy: Never
      initContainers:
      - {name: i, image: r.example/init}
      - {name: s, image: r.example/sidecar, restartPolicy: Always}
      containers: [{name: t, image: r.example/train}]
      ephemeralContainers: [{name: e, image: r.example/debug}]
      volumes:
      - {name: v, image: {reference: r.example/volume}}
      - {name: w, emptyDir: {}}
---
"""
OF_JOB = ["r.example/init", "r.example/sidecar", "r.example/train", "r.example/debug", "r.example/volume"]


@pytest.mark.parametrize(
    ("text", "images", "notes"),
    [
        (
            "apiVersion: v1\nkind: List\nitems: [{kind: Pod, spec: {containers: [{image: r.example/a}]}}]",
            ["r.example/a"],
            [],
        ),
        (
            "apiVersion: apps/v1\nkind: Deployment\nspec: {template: {spec: {containers: [{image: r.example/train}]}}}",
            [],
            [],
        ),
        (
            "apiVersion: batch/v1\nkind: CronJob\n"
            "spec: {jobTemplate: {spec: {template: {spec: {initContainers: [{image: r.example/a*}]}}}}}",
            ["r.example/a*"],
            [],
        ),
        (
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: {template: "
            "{spec: {containers: [{name: pytorch, image: r.example/a}]}}}}}",
            ["r.example/a"],
            [],
        ),
        (
            "apiVersion: ray.io/v1\nkind: RayJob\nspec: {rayClusterSpec: {workerGroupSpecs: [{template: "
            "{spec: {containers: [{image: r.example/a}], volumes: [{image: {reference: r.example/b}}]}}}]}}",
            ["r.example/a", "r.example/b"],
            [],
        ),
        (
            "apiVersion: argoproj.io/v1\nkind: Workflow\nspec: {templates: [{script: {image: r.example/a}}, "
            "{container: {image: '{{inputs.parameters.image}}'}}, {steps: [[{templateRef: {name: elsewhere}}]]}]}",
            ["r.example/a"],
            [
                "{{inputs.parameters.image}} is an image only after something is filled in",
                "templateRef elsewhere is not in this file",
            ],
        ),
        (
            "apiVersion: tekton.dev/v1\nkind: Task\nmetadata: {name: t}\n"
            "spec: {stepTemplate: {image: r.example/a}, steps: [{image: r.example/b, script: ls}]}\n---\n"
            "apiVersion: tekton.dev/v1\nkind: TaskRun\nspec: {taskRef: {name: t}}",
            ["r.example/a", "r.example/b"],
            [],
        ),
        (
            "apiVersion: trainer.kubeflow.org/v1alpha1\nkind: TrainJob\nmetadata: {name: n}\n"
            "spec: {runtimeRef: {name: torch-distributed}, trainer: {image: r.example/a}}",
            ["r.example/a"],
            ["runtimeRef torch-distributed is not in this file"],
        ),
        (
            "apiVersion: ray.io/v1\nkind: RayJob\nspec: {clusterSelector: {ray.io/cluster: c}}",
            [],
            ["this RayJob names no image"],
        ),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {image: nothing, container: nothing}", [], []),
        ("apiVersion: v1\nkind: Pod\nmetadata: {name: {}}\nspec: {containers: [{image: ''}, {image: {}}]}", [], []),
        (
            "apiVersion: cloud.example.com/v1\nkind: Machine\nspec: {image: debian-13}",
            [],
            ["this Machine names no image"],
        ),
    ],
)
def test_signatures_are_demanded_of_every_image_of_every_document(
    text: str, images: list[str], notes: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(POD_JOB + text, encoding="utf-8")
    asked: list[str] = []

    def unsigned(reference: str) -> str:
        asked.append(reference)
        return "it has no signature"

    sidecar = "GKE adds the sidecar of Cloud Storage FUSE to the pod"
    seen = [
        one for one in files.check_file(path, offline=True, unsigned=unsigned)[1] if one.rule == "images_are_signed"
    ]
    assert asked == [*OF_JOB, *images], "each is asked once"
    refused = [one.what.partition(" is not signed")[0] for one in seen if one.fails]
    assert list(dict.fromkeys(refused)) == asked
    assert [one.what for one in seen if not one.fails] == [sidecar, *notes]
    assert seen[0].where == f"{path}:10"
    assert not [one for one in files.check_file(path, offline=True)[1] if one.rule == "images_are_signed"]


@pytest.mark.parametrize(
    ("text", "images", "notes"),
    [
        (
            "workerPoolSpecs:\n- machineSpec: {machineType: n1-standard-4}\n  containerSpec: {imageUri: r.example/a}\n"
            "- container_spec: {image_uri: r.example/b}\n- {}\n"
            "- pythonPackageSpec: {executorImageUri: r.example/c}",
            ["r.example/a", "r.example/b", "r.example/c"],
            [],
        ),
        (
            "trialJobSpec: {workerPoolSpecs: [{containerSpec: {imageUri: r.example/a}}]}\nstudySpec: {}",
            ["r.example/a"],
            [],
        ),
        (
            "trainingInput: {masterConfig: {imageUri: r.example/a}, evaluatorConfig: {imageUri: r.example/b}}",
            ["r.example/a", "r.example/b"],
            [],
        ),
        ("trainingInput: {runtimeVersion: '2.11'}", [], ["this job names no image"]),
    ],
)
def test_signatures_are_demanded_of_every_image_of_googles_jobs(
    text: str, images: list[str], notes: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    asked: list[str] = []
    seen = files.check_file(path, offline=True, unsigned=lambda one: asked.append(one) or "")[1]  # type: ignore[func-returns-value]
    assert asked == images
    assert [one.what for one in seen if one.rule == "images_are_signed"] == notes


def test_what_is_no_name_is_said_once_and_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an init container, whose image is looked up as that of the others is."""
    asked: list[str] = []
    monkeypatch.setattr(image_metadata, "read_contents", lambda _, name: asked.append(name))
    path = tmp_path / "job.yaml"
    first = {"name": "first", "image": "a.example/first:1"}
    job = changed(changed(JOB, f"{R}.initContainers", [first]), f"{R}.containers.0.image", "https://a.example/b")
    path.write_text(yaml_writer.dump(job))
    seen = [one for one in files.check_file(path)[1] if "image" in one.rule]
    assert asked == ["a.example/first:1"]
    assert [(one.rule, one.severity) for one in seen] == [("images_are_named", Severity.CANNOT_START)]


def test_an_image_without_a_registry_is_a_note() -> None:
    job = changed(ONE, f"{P}.0.containerSpec.imageUri", "mine:1")
    contents = Contents("mine:1", {"torch": "2.9.0+cpu"}, "x", local=True)
    (finding,) = [one for one in found(job, images={"mine:1": contents}) if one.rule == "images_exist"]
    assert not finding.fails


@pytest.mark.parametrize(
    ("image", "machine", "said"),
    [
        ("us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-11.py310:latest", POOL["machineSpec"], ""),
        ("us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-11.py310", POOL["machineSpec"], "without :latest"),
        ("us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-11.py310:latest", T4, "an image for cpu with a gpu"),
    ],
)
def test_prebuilt_images_match_their_machines(image: str, machine: dict[str, Any], said: str) -> None:
    package = {"executorImageUri": image, "packageUris": ["gs://b/p.tgz"], "pythonModule": "t"}
    job = {P: [{"machineSpec": machine, "replicaCount": 1, "pythonPackageSpec": package}]}
    some = [one for one in found(job) if one.rule == "prebuilt_images_match_accelerator"]
    assert said in " ".join(one.what for one in some)
    assert bool(some) == bool(said)


# --- values of any type -----------------------------------------------------------------------------------------------

TRAIN_API = "trainer.kubeflow.org/v1alpha1"
TRAIN_POD = {
    "containers": [{"name": "node", "image": "i", "env": [{"name": "A", "value": "1"}]}],
    "volumes": [{"name": "v"}],
}
TRAINING_RUNTIME: dict[str, Any] = {
    "apiVersion": TRAIN_API,
    "kind": "TrainingRuntime",
    "metadata": {"name": "r"},
    "spec": {
        "mlPolicy": {"numNodes": 1, "torch": {}},
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
                            "spec": {"template": {"spec": TRAIN_POD}},
                        },
                    }
                ]
            },
        },
    },
}
TRAIN_PATCH = {
    "containers": [{"name": "node", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
    "nodeSelector": {"a": "b"},
}
TRAIN_JOB: dict[str, Any] = {
    "apiVersion": TRAIN_API,
    "kind": "TrainJob",
    "metadata": {"name": "t"},
    "spec": {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "r"},
        "initializer": {"dataset": {"storageUri": "gs://a/b", "env": [{"name": "A", "value": "1"}]}},
        "trainer": {
            "image": "i",
            "command": ["tune", "run"],
            "args": ["a"],
            "env": [{"name": "A", "value": "1"}],
            "numNodes": 2,
            "numProcPerNode": 2,
            "resourcesPerNode": {"requests": {"cpu": "2"}, "limits": {"cpu": 2}},
        },
        "runtimePatches": [
            {
                "manager": "a.b/c",
                "trainingRuntimeSpec": {
                    "template": {
                        "metadata": {"labels": {"a": "b"}},
                        "spec": {
                            "replicatedJobs": [
                                {"name": "node", "template": {"spec": {"template": {"spec": TRAIN_PATCH}}}}
                            ]
                        },
                    }
                },
            }
        ],
    },
}

BASES: dict[str, list[dict[str, Any]]] = {
    "custom": [CUSTOM],
    "gpus": [{P: [POOL | {"machineSpec": T4}]}],
    "v5e": [{P: [V5E], "scheduling": {"strategy": "SPOT"}}],
    "v2": [{P: [V2]}],
    "tuning": [TUNING],
    "old": [OLD],
    "job": [SERVICE, JOB],
    "jobset": [JOBSET],
    "trainjob": [TRAINING_RUNTIME, TRAIN_JOB],
    "runtime": [TRAIN_JOB, TRAINING_RUNTIME],
}
ODD: list[Any] = [None, "x", 7, [], {}, [1], {"a": 1}, True, -1.5, [[]], [None], "", {"a": None}]


def places(node: Any, at: tuple[str, ...] = ()) -> Iterator[str]:
    """The dotted path of every value."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if "." in str(key):
            continue  # names of labels
        yield ".".join((*at, str(key)))
        yield from places(value, (*at, str(key)))


@pytest.mark.parametrize("name", BASES)
def test_values_of_any_type_are_findings_and_never_tracebacks(name: str) -> None:
    *first, last = BASES[name]
    for number, path in enumerate(places(last)):
        for odd in (ODD[number % len(ODD)], ODD[(number + 5) % len(ODD)]):
            spoilt = changed(last, path, odd) if odd is not None else changed(last, path, {}) | {"null": None}
            with contextlib.suppress(UserError):
                found(*first, spoilt)


@pytest.mark.parametrize("name", BASES)
def test_values_of_any_type_are_rehearsed_or_refused_and_never_tracebacks(name: str) -> None:
    *first, last = BASES[name]
    for number, path in enumerate(places(last)):
        spoilt = changed(last, path, ODD[number % len(ODD)] or {})
        with contextlib.suppress(UserError):
            job = evidence(*first, spoilt).job
            platform = platforms.of_job_file(job)
            with files.explain_invalid_fields(job):
                tuning.study_of(job)
                platform.rehearse(job)


def test_a_field_of_the_wrong_type_is_refused_with_its_line_before_a_rehearsal(
    tmp_path: Path, trainyard: Trainyard
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml_writer.dump(changed(ONE, f"{P}.0.containerSpec", [1])))
    status, out, err = trainyard("rehearse", str(path), "--dry-run")
    assert (status, out) == (2, "")
    assert "job.yaml:5: workerPoolSpecs.0.containerSpec: [1] is not a mapping of fields" in " ".join(err.split())


@pytest.mark.parametrize("image", [IMAGE, "trainyard:c"])
def test_an_error_that_no_field_explains_is_not_hidden(image: str) -> None:
    job = evidence(changed(ONE, f"{P}.0.containerSpec.imageUri", image)).job
    with pytest.raises(KeyError), files.explain_invalid_fields(job):
        raise KeyError("x")


# --- all rules -------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_fault_that_it_finds() -> None:
    elsewhere = {
        "no_ambiguous_yaml_words", "region_has_accelerator", "images_exist", "images_support_accelerator",
        "frameworks_support_tpu", "tpu_runtime_matches_image", "prebuilt_images_match_accelerator",
        "file_is_a_custom_job_spec", "images_have_the_architecture", "images_are_signed", "images_are_supported",
        "images_have_code_for_the_gpu", "images_can_be_pulled", "images_get_their_accelerator", "keys_are_unique",
    }  # fmt: skip
    faults = {fault[3] for fault in FAULTS} | elsewhere  # rules about Kubernetes alone: test_check_kubernetes.py
    assert {rule.id for rule in platforms.RULES if rule.subjects != ("gke",)} <= faults


def test_the_jobset_schema_has_every_field_of_the_api() -> None:
    """All fields of jobset_types.go (kubernetes-sigs/jobset, 2026) in one object."""
    whole = copy.deepcopy(JOBSET)
    whole["spec"] |= {
        "suspend": False, "ttlSecondsAfterFinished": 60, "managedBy": "jobset.sigs.k8s.io/jobset-controller",
        "network": {"enableDNSHostnames": True, "subdomain": "x", "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["slice"]},
        "failurePolicy": {"maxRestarts": 1, "restartStrategy": "Recreate", "rules": [
            {"name": "a", "action": "RestartJob", "onJobFailureReasons": ["PodFailurePolicy"],
             "onJobFailureMessagePatterns": [".*"], "targetReplicatedJobs": ["slice"]}]},
        "startupPolicy": {"startupPolicyOrder": "InOrder"},
        "coordinator": {"replicatedJob": "slice", "jobIndex": 0, "podIndex": 0},
        "volumeClaimPolicies": [{"templates": [], "retentionPolicy": {"whenDeleted": "Retain"}}],
    }  # fmt: skip
    whole["spec"]["replicatedJobs"][0] |= {"groupName": "g", "dependsOn": [{"name": "a", "status": "Ready"}]}
    assert list(kubernetes.validate(whole)) == []


def test_a_finding_is_printed_with_where_what_why_and_remediation(tmp_path: Path, trainyard: Trainyard) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml_writer.dump(changed(CUSTOM, f"{P}.0.replicaCount", 2)))
    status, out, err = trainyard("check-job", str(path), "--offline", "--json")
    (file,) = json.loads(out)["files"]
    (finding,) = file["findings"]
    assert status == 1
    assert finding["where"].endswith(":4")
    assert set(finding) == {"rule", "where", "what", "why", "remediation", "severity"}
    for words in (finding["what"], finding["why"], finding["remediation"]):
        assert words in " ".join(err.split())


def test_a_faultless_file_passes_and_no_file_is_an_error(tmp_path: Path, trainyard: Trainyard) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(ONE))
    assert trainyard("check-job", str(path), "--offline")[:2] == (0, "")
    assert trainyard("check-job")[0] == 2


def test_machine_types_of_the_table_are_valid() -> None:
    for name in machines.machine_types():
        job = {P: [POOL | {"machineSpec": {"machineType": name}}]}
        assert not [one for one in found(job) if one.rule == "machine_types_exist"]
