"""`make check-job`: a faultless job has no finding; each fault is found by the rule that is about it, at its line."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import check_job
from scripts.cli import UserError
from scripts.findings import Finding
from scripts.jobs import contents, files, kubernetes, machines, rules, text
from scripts.jobs.contents import Contents

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


def evidence(*documents: dict[str, Any], region: str | None = "us-central1", **more: Any) -> rules.Evidence:
    written = "---\n".join(text.dump(one) for one in documents)
    more.setdefault("images", {IMAGE: HOLDS})
    return rules.Evidence(files.parse(written, Path("job.yaml")), region, **more)


def found(*documents: dict[str, Any], **more: Any) -> list[Finding]:
    return rules.check(evidence(*documents, **more))


@pytest.mark.parametrize(
    "documents",
    [[CUSTOM], [{"workerPoolSpecs": [V5E]}], [{"workerPoolSpecs": [V2]}], [TUNING], [OLD], [SERVICE, JOB], [JOBSET]],
    ids=["custom", "v5e", "v2", "tuning", "old", "job", "jobset"],
)
def test_a_faultless_job_has_no_finding(documents: list[dict[str, Any]]) -> None:
    assert [one for one in found(*documents) if not one.note] == []


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
    (CUSTOM, f"{P}.0.replicacount", 1, "fields_are_the_apis", "'replicacount' (did you mean 'replicaCount'?)"),
    (CUSTOM, f"{P}.0.containerSpec.args", "all", "fields_are_the_apis", "'all' is not a list"),
    (CUSTOM, f"{P}.0.containerSpec.args.0", 1, "fields_are_the_apis", "1 is not text: put it in quotes"),
    (CUSTOM, "scheduling.strategy", "SPOTT", "fields_are_the_apis", "did you mean 'SPOT'?"),
    (CUSTOM, "scheduling.timeout", "1h", "fields_are_the_apis", "'1h' is not a duration"),
    (CUSTOM, "state", "x", "fields_are_the_apis", "unknown field 'state'"),
    ({"jobSpec": ONE, "displayName": "x", "name": "n"}, "state", "JOB_STATE_FAILED", "fields_are_the_apis",
     "by the service"),
    (OLD, f"{T}.wrokerCount", 1, "fields_are_the_apis", "did you mean 'workerCount'?"),
    (OLD, f"{T}.scaleTier", "CUSTUM", "fields_are_the_apis", "did you mean 'CUSTOM'?"),
    (OLD, f"{T}.masterConfig.tpuTopology", "x", "fields_are_the_apis", "unknown field 'tpuTopology'"),
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
    (CUSTOM, f"{P}.0.machineSpec.machineType", "n1-standard-6", "machines_are_known", "n1-standard-6"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_K80", 1), "enableWebAccess", True, "gpus_fit_their_machines", "is gone"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_T4", 3), "enableWebAccess", True, "gpus_fit_their_machines",
     "there can be 1, 2, 4"),
    (gpus("n1-standard-32", "NVIDIA_TESLA_T4", 1), "enableWebAccess", True, "gpus_fit_their_machines",
     "at most 16 vCPUs"),
    (gpus("e2-standard-8", "NVIDIA_TESLA_T4", 1), "enableWebAccess", True, "gpus_fit_their_machines", "goes with n1"),
    (gpus("n1-standard-8", "NVIDIA_L4", 1), "enableWebAccess", True, "gpus_fit_their_machines", "machines of its own"),
    (gpus("a2-highgpu-2g", "NVIDIA_TESLA_A100", 1), "enableWebAccess", True, "gpus_fit_their_machines",
     "a2-highgpu-2g has 2"),
    (gpus("a2-highgpu-2g", "", 0), "enableWebAccess", True, "gpus_fit_their_machines", "the job asks for none"),
    (gpus("n1-standard-8", "NVIDIA_TESLA_T4", 0), "enableWebAccess", True, "gpus_fit_their_machines",
     "without acceleratorCount"),
    ({P: [V2]}, f"{P}.0.machineSpec.acceleratorCount", 7, "tpu_counts_exist", "7 cores of TPU_V2"),
    ({P: [V2]}, f"{P}.0.machineSpec.machineType", "n1-standard-8", "tpu_counts_exist", "with acceleratorType 'TPU_V2'"),
    ({P: [V2]}, f"{P}.0.machineSpec.acceleratorType", "NVIDIA_TESLA_T4", "tpu_counts_exist",
     "cloud-tpu goes with TPU_V2"),
    ({P: [V5E]}, f"{P}.0.machineSpec.tpuTopology", None, "tpu_topologies_fit_their_machines", "without tpuTopology"),
    ({P: [V5E]}, f"{P}.0.machineSpec.tpuTopology", "3x3", "tpu_topologies_fit_their_machines", "2x2, 2x4, 4x4"),
    ({P: [V5E]}, f"{P}.0.machineSpec.acceleratorType", "TPU_V5_LITEPOD", "tpu_topologies_fit_their_machines",
     "says it all"),
    ({P: [V5E]}, f"{P}.0.machineSpec.machineType", "ct5p-hightpu-4t", "tpu_topologies_fit_their_machines",
     "not offered"),
    (ONE, f"{P}.0.machineSpec.tpuTopology", "2x2", "tpu_topologies_fit_their_machines",
     "tpuTopology with n1-standard-8"),
    ({P: [V5E]}, f"{P}.0.replicaCount", 4, "tpu_jobs_are_one_replica", "4 replicas in a job with a TPU"),
    ({P: [V5E, POOL]}, "enableWebAccess", True, "tpu_jobs_are_one_replica", "2 replicas"),
    ({P: [V5E]}, "scheduling", {"strategy": "SPOT"}, "spot_is_not_for_tpu_pods", "slice of several machines"),
    ({P: [V2]}, "workerPoolSpecs.0.machineSpec.machineType", "cloud-tpuu", "tpu_counts_exist", "cloud-tpuu"),
    (CUSTOM, "scheduling.strategy", "LOW_COST", "scheduling_is_current", "LOW_COST is deprecated"),
    (CUSTOM, "scheduling.strategy", "FLEX_START", "scheduling_is_current", "without maxWaitDuration"),
    (CUSTOM, f"{P}.0.diskSpec", {"bootDiskType": "pd-sdd"}, "disks_are_possible", "did you mean 'pd-ssd'?"),
    (CUSTOM, f"{P}.0.diskSpec", {"bootDiskSizeGb": 50}, "disks_are_possible", "50 GB; 100 to 64000"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": "A"}] * 2, "variables_are_yours", "A is there twice"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": "AIP_MODEL_DIR"}], "variables_are_yours", "set by the service"),
    (CUSTOM, f"{P}.0.containerSpec.env", [{"name": f"A{n}"} for n in range(101)], "variables_are_yours", "at most 100"),
    (CUSTOM, "network", "projects/p/global/networks/n", "names_have_their_form", "number, not name"),
    (CUSTOM, "serviceAccount", "me", "names_have_their_form", "'me'"),
    (CUSTOM, "baseOutputDirectory.outputUriPrefix", "/tmp", "names_have_their_form", "write gs://"),
    (CUSTOM, "serviceAccount", None, "tensorboard_can_be_written", "without serviceAccount"),
    (CUSTOM, "tensorboard", "projects/p/locations/us-east1/tensorboards/1", "tensorboard_can_be_written",
     "is in us-east1"),
    (TUNING, "parallelTrialCount", 9, "search_can_be_run", "9 trials at a time of 4 in all"),
    (TUNING, "studySpec.metrics", None, "search_can_be_run", "no metrics"),
    (TUNING, "studySpec.parameters.1.parameterId", "lr", "search_can_be_run", "lr is there twice"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", 0, "search_can_be_run", "a logarithmic scale from 0"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", 2, "search_can_be_run", "2 is above maxValue 1"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec.minValue", None, "search_can_be_run",
     "without minValue and maxValue"),
    (TUNING, "studySpec.parameters.0.doubleValueSpec", None, "search_can_be_run", "0 kinds of values"),
    (TUNING, "studySpec.algorithm", "GRID_SEARCH", "search_can_be_run", "GRID_SEARCH over doubles"),
    (TUNING, "studySpec.parameters.1", {"parameterId": "b", "discreteValueSpec": {"values": [2, 1]}},
     "search_can_be_run",
     "out of order"),
    (TUNING, "studySpec.metrics.0.metricId", "loss", "trainer_reports_the_metric",
     "reports 'accuracy', the study reads loss"),
    # AI Platform
    (OLD, "labels", {}, "the_service_is_there", "shut down on 31 January 2025"),
    (OLD[T], "serviceAccount", "a", "training_input_is_below_its_key", "not below trainingInput:"),
    (OLD, f"{T}.masterType", None, "machines_go_with_the_tier", "CUSTOM without masterType"),
    (OLD, f"{T}.scaleTier", "BASIC", "machines_go_with_the_tier", "masterType with scaleTier BASIC"),
    (OLD, f"{T}.workerCount", None, "machines_go_with_the_tier", "workerType without workerCount"),
    (OLD, f"{T}.parameterServerCount", 1, "machines_go_with_the_tier", "without parameterServerType"),
    (OLD, f"{T}.masterType", "standart", "machine_types_do_not_mix", "did you mean 'standard'?"),
    (OLD, f"{T}.evaluatorType", "standard", "machine_types_do_not_mix", "both families"),
    (OLD, f"{T}.masterType", "standard", "machine_types_do_not_mix", "acceleratorConfig with standard"),
    (OLD, f"{T}.runtimeVersion", "2.11", "there_is_something_to_run", "both masterConfig.imageUri and runtimeVersion"),
    (OLD, f"{T}.masterConfig", None, "there_is_something_to_run", "neither masterConfig.imageUri nor packageUris"),
    (OLD, f"{T}.masterConfig", {"containerArgs": ["a"]}, "commands_go_with_containers", "without an image"),
    (changed(OLD, f"{T}.args", ["b"]), f"{T}.masterConfig.containerArgs", ["a"], "commands_go_with_containers",
     "and args"),
    (OLD, f"{T}.masterConfig.acceleratorConfig", {"type": "NVIDIA_TESLA_T4", "count": 3},
     "gpus_fit_ai_platforms_machines",
     "there can be 1, 2, 4"),
    (OLD, f"{T}.workerCount", 4, "tpu_workers_are_alone", "4 TPU workers"),
    (OLD, f"{T}.workerConfig.acceleratorConfig.count", 7, "tpu_workers_are_alone", "7 cores of TPU_V2"),
    (OLD, f"{T}.workerConfig.acceleratorConfig.type", "TPU_V4_POD", "tpu_workers_are_alone", "there were TPU_V2"),
    (OLD, f"{T}.parameterServerCount", 2, "tpu_workers_are_alone", "parameter servers beside a TPU"),
    (OLD, f"{T}.masterType", "cloud_tpu", "tpu_workers_are_alone", "a TPU as master"),
    (OLD, f"{T}.workerType", "n1-standard-8", "tpu_workers_are_alone", "TPU_V2 on n1-standard-8"),
    (OLD, f"{T}.workerConfig.tpuTfVersion", None, "tpu_runtimes_are_said_where_needed", "without tpuTfVersion"),
    (OLD, f"{T}.workerConfig.tpuTfVersion", "2.12", "tpu_runtimes_are_said_where_needed", "tpuTfVersion 2.12"),
    (OLD, f"{T}.masterConfig.tpuTfVersion", "2.11", "tpu_runtimes_are_said_where_needed", "masterConfig.tpuTfVersion"),
    (OLD, f"{T}.region", "us-east1", "region_had_it", "no TPUs in 'us-east1'"),
    (OLD, f"{T}.region", "mars", "region_had_it", "no TPUs in 'mars'"),
    (OLD, "jobId", "a-b", "names_had_their_form", "jobId 'a-b'"),
    (OLD, f"{T}.network", "default", "names_had_their_form", "network 'default'"),
    (OLD, f"{T}.scheduling", {"maxWaitTime": "60s"}, "names_had_their_form", "maxWaitTime 60s"),
    (OLD, f"{T}.scheduling", {"priority": 2000}, "names_had_their_form", "priority 2000"),
    (OLD, f"{T}.hyperparameters", {"maxTrials": 1, "maxParallelTrials": 2}, "search_could_be_run",
     "at a time than in all"),
    (OLD, f"{T}.hyperparameters", {"params": [{"parameterName": "a", "type": "DOUBLE"}]}, "search_could_be_run",
     "without minValue"),
    (OLD, f"{T}.hyperparameters", {"params": [{"parameterName": "a", "type": "DISCRETE", "discreteValues": [2, 1]}]},
     "search_could_be_run", "from small to big"),
    # GKE
    (JOB, "spec.complitions", 4, "manifests_have_the_schema", "did you mean 'completions'?"),
    (JOB, f"{R}.containers.0.args", [1], "manifests_have_the_schema", "1 is not of type"),
    (JOB, "kind", "Jobb", "", ""),
    (JOBSET, "spec.replicatedJobs.0.replica", 1, "manifests_have_the_schema", "did you mean 'replicas'?"),
    (JOBSET, "spec.failurePolicy.restartStrategy", "Again", "manifests_have_the_schema", "'Again' is not one of"),
    (JOBSET, "spec.replicatedJobs.0.template.spec.paralelism", 1, "manifests_have_the_schema",
     "did you mean 'parallelism'?"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "4x4"}, "tpu_nodes_exist", "without"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "4x4",
                                "cloud.google.com/gke-tpu-accelerator": "tpu-v5e"}, "tpu_nodes_exist",
                                 "no TPU 'tpu-v5e'"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-tpu-topology": "3x3",
                                "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice"}, "tpu_nodes_exist", "'3x3'"),
    (JOB, f"{R}.containers.0.resources.limits", {"google.com/tpu": 8}, "pods_fill_their_slice", "4 pods of 4 chips"),
    (JOB, "spec.completions", 3, "pods_fill_their_slice", "3 completions, 4 at a time"),
    (JOB, f"{R}.containers.0.resources", None, "pods_fill_their_slice", "no container asks for google.com/tpu"),
    (JOB, f"{R}.nodeSelector", None, "pods_fill_their_slice", "without a nodeSelector"),
    (JOB, f"{R}.containers.0.resources.requests", {"google.com/tpu": 2}, "requests_are_the_limits",
     "2 requested, limit 4"),
    (JOB, "spec.completionMode", None, "groups_know_one_another", "without completionMode: Indexed"),
    (JOB, "spec.backoffLimit", None, "groups_know_one_another", "backoffLimit is not 0"),
    (JOB, f"{R}.subdomain", None, "groups_know_one_another", "no subdomain"),
    (JOB, "spec.parallelism", 1, "groups_know_one_another", "1 of 4 pods at a time"),
    (JOB, f"{R}.restartPolicy", None, "retries_are_possible", "restartPolicy is Always"),
    (JOB, f"{R}.nodeSelector", {"cloud.google.com/gke-spot": "true"}, "spot_pods_are_let_in", "30 s to end"),
    (JOBSET, "metadata.name", "a" * 58, "names_are_short_enough", "at most 63"),
    (JOB, "metadata.name", "A_b", "names_are_short_enough", "name 'A_b'"),
]  # fmt: skip
FAULTS = [fault for fault in FAULTS if fault[3]]


@pytest.mark.parametrize(
    ("base", "path", "value", "rule", "said"), FAULTS, ids=lambda one: one if isinstance(one, str) else ""
)
def test_a_fault_is_found_by_its_rule(base: dict[str, Any], path: str, value: Any, rule: str, said: str) -> None:
    some = [one for one in found(changed(base, path, value)) if one.rule == rule]
    assert said in " ".join(f"{one.what} {one.fix}" for one in some)
    assert all(one.where.startswith("job.yaml:") and one.why and one.fix for one in some)


def test_a_finding_names_the_line_it_is_about() -> None:
    spoilt = changed(CUSTOM, f"{P}.1.machineSpec.machineType", "n1-standard-6")
    (finding,) = [one for one in found(spoilt) if one.rule == "machines_are_known"]
    lines = text.dump(spoilt).splitlines()
    assert "n1-standard-6" in lines[int(finding.where.partition(":")[2]) - 1]


# --- regions, words, images ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("region", "said"),
    [("us-central9", "did you mean 'us-central1'?"), ("us-east1", "us-east1 has no v5litepod-16"), ("us-central1", "")],
)
def test_the_region_must_have_the_tpu(region: str, said: str) -> None:
    some = [one for one in found({P: [V5E]}, region=region) if one.rule == "regions_have_it"]
    assert said in " ".join(one.what for one in some)
    assert bool(some) == bool(said)


@pytest.mark.parametrize(("word", "odd"), [("yes", True), ("y", True), ("1:30", True), ('"yes"', False), ("x", False)])
def test_words_that_readers_of_yaml_take_differently_are_found(word: str, odd: bool) -> None:
    content = f"workerPoolSpecs:\n  - containerSpec:\n      args: [{word}]\n"
    evidence = rules.Evidence(files.parse(content, Path("job.yaml")))
    some = [one for one in rules.check(evidence) if one.rule == "words_mean_the_same_to_every_reader"]
    assert bool(some) == odd
    assert all(one.where == "job.yaml:3" for one in some)


def holding(**versions: str) -> dict[str, Any]:
    return {
        "images": {
            IMAGE: Contents(IMAGE, {name.replace("_", "-"): one for name, one in versions.items()}, "its labels")
        }
    }


@pytest.mark.parametrize(
    ("version", "held", "said"),
    [
        ("2.11", {"tensorflow": "2.21.0"}, "tpuTfVersion 2.11, but the image holds tensorflow 2.21.0 (by its labels)"),
        ("2.11", {"tensorflow": "2.11.1"}, ""),
        ("2.11", {"torch_xla": "2.9.0"}, "but the image holds torch_xla 2.9.0"),
        ("pytorch-2.9", {"torch_xla": "2.9.0"}, ""),
        ("pytorch-1.11", {"torch_xla": "2.9.0"}, "take an image with torch-xla 1.11, or write tpuTfVersion: 2.9"),
        ("2.11", {"torch": "2.15.0"}, "but the image holds torch 2.15.0"),
    ],
)
def test_the_tpus_runtime_is_what_the_image_holds(version: str, held: dict[str, str], said: str) -> None:
    job = changed(OLD, f"{T}.workerConfig.tpuTfVersion", version)
    some = [one for one in found(job, **holding(**held)) if one.rule == "tpu_runtime_is_what_the_image_holds"]
    assert said in " ".join(f"{one.what}; {one.fix}" for one in some)
    assert bool(some) == bool(said)


V6E = {P: [POOL | {"machineSpec": {"machineType": "ct6e-standard-4t", "tpuTopology": "2x2"}}]}


@pytest.mark.parametrize(
    ("job", "held", "rule", "said"),
    [
        ({P: [V5E]}, {"tensorflow_cpu": "2.21.0"}, "images_can_use_the_accelerator",
         "a TPU job with an image for CPUs"),
        ({P: [V5E]}, {"torch": "2.15.0+cu128"}, "images_can_use_the_accelerator", "image for GPUs: torch 2.15.0+cu128"),
        ({P: [POOL | {"machineSpec": T4}]}, {"torch": "2.15.0+cpu"}, "images_can_use_the_accelerator", "a GPU job"),
        ({P: [POOL | {"machineSpec": T4}]}, {"torch_xla": "2.9.0"}, "images_can_use_the_accelerator", "image for TPUs"),
        (JOB, {"tensorflow_cpu": "2.21.0"}, "images_can_use_the_accelerator", "a TPU job with an image for CPUs"),
        ({P: [V5E]}, {"torch_xla": "2.9.0"}, "images_can_use_the_accelerator", ""),
        (ONE, {"torch_xla": "2.9.0"}, "images_can_use_the_accelerator", ""),
        (V6E, {"tensorflow_tpu": "2.20.0"}, "frameworks_know_the_tpu", "tensorflow 2.20.0 on a TPU v6e; not supported"),
        ({P: [V5E]}, {"tensorflow_tpu": "2.14.0"}, "frameworks_know_the_tpu", "it takes 2.15 or newer"),
        ({P: [V5E]}, {"tensorflow_tpu": "2.20.0"}, "frameworks_know_the_tpu", ""),
        (V6E, {"torch_xla": "2.9.0"}, "frameworks_know_the_tpu", ""),
    ],
)  # fmt: skip
def test_what_is_in_the_image_can_use_the_machine(job: Any, held: dict[str, str], rule: str, said: str) -> None:
    some = [one for one in found(job, **holding(**held)) if one.rule == rule]
    assert said in " ".join(one.what for one in some)
    assert bool(some) == bool(said)


@pytest.mark.parametrize(
    ("known", "missing", "said", "note"),
    [
        ({}, {IMAGE: "us-docker.pkg.dev has no p/r/image:tag"}, "has no p/r/image:tag", False),
        ({IMAGE: None}, {IMAGE: "out of reach"}, "could not be looked up: out of reach", True),
        ({IMAGE: HOLDS}, {}, "", False),
    ],
)
def test_an_image_is_there_or_not_or_unknown(known: Any, missing: dict[str, str], said: str, note: bool) -> None:
    some = [one for one in found(ONE, images=known, missing=missing) if one.rule == "images_are_there"]
    assert [(said in one.what, one.note) for one in some] == ([(True, note)] if said else [])


def test_an_image_of_this_host_alone_is_a_note() -> None:
    job = changed(ONE, f"{P}.0.containerSpec.imageUri", "trainyard:xla")
    (finding,) = [
        one
        for one in found(
            job, images={"trainyard:xla": Contents("trainyard:xla", {"torch-xla": "2.9.0"}, "x", local=True)}
        )
        if one.rule == "images_are_there"
    ]
    assert finding.note


@pytest.mark.parametrize(
    ("image", "machine", "said"),
    [
        ("us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-11.py310:latest", POOL["machineSpec"], ""),
        ("us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-11.py310", POOL["machineSpec"], "without :latest"),
        ("us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-11.py310:latest", T4, "an image for cpu with a gpu"),
    ],
)
def test_prebuilt_images_fit_their_machines(image: str, machine: dict[str, Any], said: str) -> None:
    package = {"executorImageUri": image, "packageUris": ["gs://b/p.tgz"], "pythonModule": "t"}
    job = {P: [{"machineSpec": machine, "replicaCount": 1, "pythonPackageSpec": package}]}
    some = [one for one in found(job) if one.rule == "runtime_is_what_the_package_runs_on"]
    assert said in " ".join(one.what for one in some)
    assert bool(some) == bool(said)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("trainyard:xla", ("", "trainyard", "xla")),
        ("python", ("", "python", "latest")),
        ("team/image", ("", "team/image", "latest")),
        ("localhost:5000/a/b:c", ("localhost:5000", "a/b", "c")),
        ("gcr.io/p/i@sha256:00", ("gcr.io", "p/i", "sha256:00")),
        ("us-docker.pkg.dev/p/r/i:t@sha256:00", ("us-docker.pkg.dev", "p/r/i", "sha256:00")),
    ],
)
def test_a_reference_has_a_registry_a_path_and_a_tag(reference: str, expected: tuple[str, str, str]) -> None:
    assert contents.parts(reference) == expected


# --- what people write -----------------------------------------------------------------------------------------------

BASES: dict[str, list[dict[str, Any]]] = {
    "custom": [CUSTOM],
    "gpus": [{P: [POOL | {"machineSpec": T4}]}],
    "v5e": [{P: [V5E], "scheduling": {"strategy": "SPOT"}}],
    "v2": [{P: [V2]}],
    "tuning": [TUNING],
    "old": [OLD],
    "job": [SERVICE, JOB],
    "jobset": [JOBSET],
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
def test_no_value_is_too_odd_to_be_told_of(name: str) -> None:
    """Whatever stands wherever: findings, never a traceback."""
    *first, last = BASES[name]
    for number, path in enumerate(places(last)):
        for odd in (ODD[number % len(ODD)], ODD[(number + 5) % len(ODD)]):
            spoilt = changed(last, path, odd) if odd is not None else changed(last, path, {}) | {"null": None}
            with contextlib.suppress(UserError):
                found(*first, spoilt)


# --- the whole -------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_fault_and_a_source() -> None:
    elsewhere = {
        "words_mean_the_same_to_every_reader", "regions_have_it", "images_are_there", "images_can_use_the_accelerator",
        "frameworks_know_the_tpu", "tpu_runtime_is_what_the_image_holds", "runtime_is_what_the_package_runs_on",
        "config_is_the_spec_alone",
    }  # fmt: skip
    every = {function for kind in ("custom-job", "hyperparameter-tuning-job", "ai-platform", "gke")
             for function in rules.rules_of(kind)}  # type: ignore[arg-type]  # fmt: skip
    assert {function.__name__ for function in every} == {fault[3] for fault in FAULTS} | elsewhere
    for function in every:
        assert function.__doc__ and len(function.__doc__.strip().splitlines()) > 2, f"{function.__name__}: no source"


def test_our_jobset_schema_takes_every_field_of_the_api() -> None:
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
    assert list(kubernetes.complaints(whole)) == []


def test_the_verb_says_where_what_why_and_how(tmp_path: Path, verb: Callable[..., tuple[int, str, str]]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text.dump(changed(CUSTOM, f"{P}.0.replicaCount", 2)))
    status, out, err = verb(check_job, str(path), "--offline", "--json")
    (finding,) = json.loads(out)["findings"]
    assert status == 1
    assert finding["where"].endswith(":4")
    assert set(finding) == {"rule", "where", "what", "why", "fix", "note"}
    for words in (finding["what"], finding["why"], finding["fix"]):
        assert words in " ".join(err.split())


def test_the_verb_passes_what_is_faultless(tmp_path: Path, verb: Callable[..., tuple[int, str, str]]) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(ONE))
    assert verb(check_job, str(path), "--offline")[:2] == (0, "")
    assert verb(check_job)[0] == 2


def test_machines_of_the_table_are_taken() -> None:
    for name in machines.machine_types():
        job = {P: [POOL | {"machineSpec": {"machineType": name}}]}
        assert not [one for one in found(job) if one.rule == "machines_are_known"]
