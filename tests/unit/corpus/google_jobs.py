"""Job files of Vertex AI and AI Platform that gcloud and the APIs take or refuse, as in public examples and clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.corpus.case import Case, Document, dumped

SDK = "https://github.com/googleapis/python-aiplatform/blob/91cc8ce4f015771b5d8c43c8764ea9dc9abdb216"
OLD_SAMPLES = "https://github.com/GoogleCloudPlatform/cloudml-samples/blob/efddc4a9898127e55edc0946557aca4bfaf59705"
GPUS = "https://cloud.google.com/compute/docs/gpus"
CALIBAN = "https://github.com/google/caliban/blob/master/caliban/platform/cloud/types.py"
JOB_SPEC = "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec"
TUNING_SPEC = "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/StudySpec"
TRAINING_INPUT = "https://cloud.google.com/ai-platform/training/docs/reference/rest/v1/projects.jobs#TrainingInput"
GCLOUD_JOB = "https://cloud.google.com/sdk/gcloud/reference/ai/custom-jobs/create"
IMAGE = "us-docker.pkg.dev/p/r/image:tag"

Entry = tuple[str, str, Document, bool]


def pool(machine: str = "n1-standard-8", kind: str = "", count: int = 0, **fields: Any) -> Document:
    spec: Document = {"machineType": machine}
    spec |= {"acceleratorType": kind, "acceleratorCount": count} if kind else {}
    return {"machineSpec": spec, "replicaCount": 1, "containerSpec": {"imageUri": IMAGE}} | fields


def pools(*some: Document, **fields: Any) -> Document:
    return {"workerPoolSpecs": list(some or (pool(),)), **fields}


def _machines() -> Iterator[tuple[str, str, int]]:
    """Machines with GPUs that can be created, by the tables of :data:`GPUS`."""
    for count in (1, 2, 4, 8):
        yield f"a2-highgpu-{count}g", "NVIDIA_TESLA_A100", count
        yield f"a2-ultragpu-{count}g", "NVIDIA_A100_80GB", count
    yield "a2-megagpu-16g", "NVIDIA_TESLA_A100", 16
    for cores, count in ((4, 1), (8, 1), (12, 1), (16, 1), (24, 2), (32, 1), (48, 4), (96, 8)):
        yield f"g2-standard-{cores}", "NVIDIA_L4", count
    yield "a3-highgpu-8g", "NVIDIA_H100_80GB", 8
    yield "a3-megagpu-8g", "NVIDIA_H100_MEGA_80GB", 8
    yield "a3-ultragpu-8g", "NVIDIA_H200_141GB", 8
    yield "a4-highgpu-8g", "NVIDIA_B200", 8
    for machine, count in (("n1-standard-4", 1), ("n1-standard-16", 2), ("n1-highmem-32", 4), ("n1-standard-96", 4)):
        yield machine, "NVIDIA_TESLA_T4", count
    for machine, count in (("n1-standard-4", 1), ("n1-highmem-8", 1), ("n1-standard-16", 2), ("n1-standard-32", 4),
                           ("n1-standard-64", 8)):  # fmt: skip
        yield machine, "NVIDIA_TESLA_V100", count
    yield "n1-standard-16", "NVIDIA_TESLA_P100", 1
    yield "n1-standard-32", "NVIDIA_TESLA_P100", 2


def _vertex() -> Iterator[Entry]:
    for machine, kind, count in _machines():
        yield f"{machine} with {count} {kind}", GPUS, pools(pool(machine, kind, count)), True
    for machine, kind, count in (("g2-standard-4", "NVIDIA_L4", 2), ("a2-highgpu-1g", "NVIDIA_TESLA_A100", 2),
                                 ("a3-highgpu-8g", "NVIDIA_L4", 8), ("e2-standard-8", "NVIDIA_TESLA_T4", 1),
                                 ("n1-standard-4", "NVIDIA_TESLA_V100", 3), ("n1-standard-8", "NVIDIA_TESLA_T4", 3),
                                 ("n1-standard-8", "NVIDIA_L4", 1), ("a4-highgpu-8g", "NVIDIA_B200", 4),
                                 ("n1-standard-64", "NVIDIA_TESLA_P100", 1)):  # fmt: skip
        yield f"{machine} with {count} {kind}", GPUS, pools(pool(machine, kind, count)), False
    constants = f"{SDK}/tests/unit/aiplatform/constants.py"
    yield (
        "v5e",
        constants,
        pools(pool() | {"machineSpec": {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"}}),
        True,
    )
    yield "v3", constants, pools(pool("cloud-tpu", "TPU_V3", 32)), True
    worker = pool(replicaCount=3)
    reduction = pool("n1-highcpu-16", replicaCount=2)
    package = {"executorImageUri": IMAGE, "packageUris": ["gs://b/p.tar.gz"], "pythonModule": "trainer.task"}
    module = {key: value for key, value in pool().items() if key != "containerSpec"} | {"pythonPackageSpec": package}
    samples = f"{SDK}/samples/model-builder"
    yield "chief and workers", JOB_SPEC, pools(pool(), worker), True
    yield "reduction server", constants, pools(pool(), worker, reduction), True
    yield "python package", constants, pools(module), True
    yield (
        "empty lists",
        f"{samples}/create_custom_job_sample.py",
        pools(pool(containerSpec={"imageUri": IMAGE, "command": [], "args": []})),
        True,
    )
    yield (
        "private services",
        f"{samples}/create_custom_job_psci_sample.py",
        pools(
            pscInterfaceConfig={
                "networkAttachment": "projects/p/regions/us-central1/networkAttachments/a",
                "dnsPeeringConfigs": [{"domain": "a.internal.", "targetProject": "p", "targetNetwork": "net"}],
            }
        ),
        True,
    )
    yield (
        "persistent resource",
        f"{samples}/create_custom_job_on_persistent_resource_sample.py",
        pools(persistentResourceId="my-resource"),
        True,
    )
    yield (
        "experiment",
        f"{samples}/create_custom_job_with_experiment_sample.py",
        pools(
            serviceAccount="a@p.iam.gserviceaccount.com",
            experiment="projects/p/locations/l/metadataStores/d/contexts/e",
        ),
        True,
    )
    for strategy in ("SPOT", "STANDARD", "FLEX_START", "ON_DEMAND"):
        yield (
            f"strategy {strategy}",
            JOB_SPEC,
            pools(pool("a2-highgpu-1g", "NVIDIA_TESLA_A100", 1), scheduling={"strategy": strategy, "timeout": "3600s"}),
            True,
        )
    none = {"machineType": "n1-standard-4", "acceleratorType": "ACCELERATOR_TYPE_UNSPECIFIED", "acceleratorCount": 0}
    yield "no accelerator, by name", JOB_SPEC, pools(pool(machineSpec=none)), True
    reservation = {"reservationAffinityType": "SPECIFIC_RESERVATION", "key": "compute.googleapis.com/reservation-name",
                   "values": ["projects/p/zones/europe-west4-a/reservations/r"]}  # fmt: skip
    reserved = pool("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8, diskSpec={"bootDiskType": "hyperdisk-balanced"})
    reserved["machineSpec"]["reservationAffinity"] = reservation
    yield "a reservation", JOB_SPEC, pools(reserved), True
    yield "a mapping for the list", GCLOUD_JOB, {"workerPoolSpecs": pool()}, True
    yield "numbers in quotes", GCLOUD_JOB, pools(pool(replicaCount="1")), True
    for disk in ("pd-ssd", "pd-standard"):
        yield f"disk {disk}", JOB_SPEC, pools(pool(diskSpec={"bootDiskType": disk, "bootDiskSizeGb": 200})), True
    yield (
        "nfs",
        JOB_SPEC,
        pools(
            pool(nfsMounts=[{"server": "10.0.0.2", "path": "a", "mountPoint": "m"}]),
            network="projects/1/global/networks/n",
        ),
        True,
    )
    yield "a whole job", JOB_SPEC, {"displayName": "x", "labels": {"team": "a"}, "jobSpec": pools()}, True
    yield (
        "environment",
        JOB_SPEC,
        pools(pool(containerSpec={"imageUri": IMAGE, "env": [{"name": "A", "value": ""}]})),
        True,
    )
    yield (
        "2 replicas of the chief",
        f"{SDK}/google/cloud/aiplatform/utils/worker_spec_utils.py",
        pools(pool(replicaCount=2)),
        False,
    )
    yield "5 pools", JOB_SPEC, pools(pool(), worker, worker, worker, worker), False
    yield "no pool", JOB_SPEC, {"workerPoolSpecs": []}, False
    yield "both tasks", GCLOUD_JOB, pools(pool(pythonPackageSpec=package)), False
    yield "no task", GCLOUD_JOB, pools({"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": 1}), False
    yield (
        "a task in snake_case",
        GCLOUD_JOB,
        pools(
            {"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": 1, "container_spec": {"image_uri": IMAGE}}
        ),
        False,
    )


def study(*parameters: Document, **fields: Any) -> Document:
    given = list(parameters) or [{"parameterId": "lr", "doubleValueSpec": {"minValue": 0.001, "maxValue": 1}}]
    return {"metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}], "parameters": given, **fields}


def _tuning() -> Iterator[Entry]:
    def job(**fields: Any) -> Document:
        return {"studySpec": study(**fields), "trialJobSpec": pools()}

    def of(*parameters: Document) -> Document:
        return {"studySpec": study(*parameters), "trialJobSpec": pools()}

    yield "one parameter", TUNING_SPEC, job(), True
    for algorithm in ("ALGORITHM_UNSPECIFIED", "GRID_SEARCH", "RANDOM_SEARCH"):
        size = {"parameterId": "size", "integerValueSpec": {"minValue": 1, "maxValue": 8}}
        given = {"studySpec": study(size, algorithm=algorithm), "trialJobSpec": pools()}
        yield f"algorithm {algorithm}", TUNING_SPEC, given, True
    for scale in ("UNIT_LINEAR_SCALE", "UNIT_LOG_SCALE", "UNIT_REVERSE_LOG_SCALE"):
        rate: Document = {"parameterId": "lr", "doubleValueSpec": {"minValue": 0.01, "maxValue": 1}}
        yield f"scale {scale}", TUNING_SPEC, of(rate | {"scaleType": scale}), True
    yield "discrete values", TUNING_SPEC, of({"parameterId": "b", "discreteValueSpec": {"values": [16, 32.5]}}), True
    yield "categories", TUNING_SPEC, of({"parameterId": "o", "categoricalValueSpec": {"values": ["sgd", "adam"]}}), True
    yield "counts", TUNING_SPEC, job() | {"maxTrialCount": 8, "parallelTrialCount": 2, "displayName": "x"}, True
    invalid: list[tuple[str, Document]] = [
        ("no value", {"parameterId": "lr"}),
        ("two kinds of values", {"parameterId": "lr", "doubleValueSpec": {"minValue": 0, "maxValue": 1},
                                 "integerValueSpec": {"minValue": 0, "maxValue": 1}}),
        ("minimum above maximum", {"parameterId": "lr", "doubleValueSpec": {"minValue": 2, "maxValue": 1}}),
        ("log scale from 0", {"parameterId": "lr", "doubleValueSpec": {"minValue": 0, "maxValue": 1},
                              "scaleType": "UNIT_LOG_SCALE"}),
    ]  # fmt: skip
    for name, parameter in invalid:
        yield name, TUNING_SPEC, of(parameter), False
    yield "no metric", TUNING_SPEC, {"studySpec": study(metrics=[]), "trialJobSpec": pools()}, False
    yield "no trial", TUNING_SPEC, {"studySpec": study()}, False


def _parameter(name: str, kind: str = "DOUBLE", low: float = 0.1, high: float = 1, **fields: Any) -> Document:
    return {"parameterName": name, "type": kind, "minValue": low, "maxValue": high, **fields}


def _old() -> Iterator[Entry]:
    def given(**fields: Any) -> Document:
        return {"trainingInput": fields}

    def custom(master: str, **fields: Any) -> Document:
        return given(scaleTier="CUSTOM", masterType=master, **fields)

    template = f"{OLD_SAMPLES}/cloudml-template/template/config.yaml"
    for tier in ("BASIC", "BASIC_GPU", "STANDARD_1", "PREMIUM_1"):
        yield f"tier {tier}", template, given(scaleTier=tier), True
    yield (
        "versions",
        f"{OLD_SAMPLES}/sklearn/sklearn-template/template/config/config.yaml",
        given(scaleTier="STANDARD_1", runtimeVersion="1.13", pythonVersion="3.5"),
        True,
    )
    legacy = f"{OLD_SAMPLES}/tensorflow/standard/legacy"
    yield (
        "large",
        f"{legacy}/criteo_tft/config-large.yaml",
        custom(
            "large_model",
            workerType="complex_model_m",
            parameterServerType="large_model",
            workerCount=60,
            parameterServerCount=29,
        ),
        True,
    )
    yield "single", f"{legacy}/criteo_tft/config-single.yaml", custom("complex_model_m"), True
    for workers, servers, name in ((5, 2, "criteo_tft"), (10, 4, "reddit_tft")):
        yield (
            f"small {name}",
            f"{legacy}/{name}/config-small.yaml",
            custom(
                "complex_model_m",
                workerType="complex_model_m",
                parameterServerType="complex_model_m",
                workerCount=workers,
                parameterServerCount=servers,
            ),
            True,
        )
    yield (
        "GPU workers",
        f"{legacy}/movielens/config.yaml",
        custom(
            "standard_gpu",
            workerType="standard_gpu",
            parameterServerType="complex_model_s",
            workerCount=2,
            parameterServerCount=1,
        ),
        True,
    )
    tuned = {"goal": "MAXIMIZE", "hyperparameterMetricTag": "accuracy", "maxTrials": 4, "maxParallelTrials": 2}
    linear = {"scaleType": "UNIT_LINEAR_SCALE"}
    for name, source, parameters in (
        ("census", "census/hptuning_config.yaml", [_parameter("first-layer-size", "INTEGER", 50, 500, **linear)]),
        ("keras", "penguins/tf-keras/hptuning_config.yaml", [_parameter("lr", scaleType="UNIT_LOG_SCALE")]),
        ("scikit-learn", "notebooks/scikit-learn/hptuning_config.yaml", [
            _parameter("max_iter", "INTEGER", 1000, 5000, **linear),
            {"parameterName": "selection", "type": "CATEGORICAL", "categoricalValues": ["cyclic", "random"]}]),
        ("rl", "tensorflow/standard/reinforcement_learning/rl_on_gcp_demo/hptuning_config.yaml", [
            _parameter("critic_lr", low=0.0001, high=0.001), _parameter("gamma", low=0.9, high=0.99),
            {"parameterName": "batch_size", "type": "DISCRETE", "discreteValues": [100, 200]}]),
    ):  # fmt: skip
        yield f"tuning {name}", f"{OLD_SAMPLES}/{source}", given(hyperparameters=tuned | {"params": parameters}), True
    yield (
        "TPU",
        f"{OLD_SAMPLES}/tpu/hptuning/resnet-hptuning/config_resnet.yaml",
        custom(
            "standard",
            workerCount=1,
            workerType="cloud_tpu",
            hyperparameters=tuned
            | {"params": [_parameter("rate", low=0.02, high=0.5, scaleType="UNIT_REVERSE_LOG_SCALE")]},
        ),
        True,
    )
    for version, count in (("TPU_V2", 8), ("TPU_V3", 8)):
        accelerator = {"type": version, "count": count}
        yield (
            f"{version} x {count}",
            CALIBAN,
            custom(
                "n1-standard-8",
                workerType="cloud_tpu",
                workerCount=1,
                masterConfig={"imageUri": IMAGE},
                workerConfig={"imageUri": IMAGE, "tpuTfVersion": "2.11", "acceleratorConfig": accelerator},
            ),
            True,
        )
        yield (
            f"{version} x 7",
            CALIBAN,
            custom(
                "n1-standard-8",
                workerType="cloud_tpu",
                workerCount=1,
                masterConfig={"imageUri": IMAGE},
                workerConfig={
                    "imageUri": IMAGE,
                    "tpuTfVersion": "2.11",
                    "acceleratorConfig": accelerator | {"count": 7},
                },
            ),
            False,
        )
    for name, wrong in (
        ("evaluators without a type", {"evaluatorCount": 1}),
        ("an image and a runtime version", {"masterConfig": {"imageUri": IMAGE}, "runtimeVersion": "2.11"}),
        ("arguments twice", {"args": ["a"], "masterConfig": {"imageUri": IMAGE, "containerArgs": ["b"]}}),
        ("an unknown machine", {"masterType": "n1-standard-6", "masterConfig": {"imageUri": IMAGE}}),
        ("machines of both kinds", {"workerType": "complex_model_m", "workerCount": 1,
                                    "masterConfig": {"imageUri": IMAGE}}),
        ("priority over 1000", {"masterConfig": {"imageUri": IMAGE}, "scheduling": {"priority": 1001}}),
    ):  # fmt: skip
        fields: Document = {"masterType": "n1-standard-8"} | wrong
        yield name, TRAINING_INPUT, given(scaleTier="CUSTOM", **fields), False
    yield "null", TRAINING_INPUT, {"trainingInput": None, "labels": {"a": "b"}}, True
    yield "an empty list", TRAINING_INPUT, {"jobId": "a", "trainingInput": []}, True
    yield "a field in snake_case", "https://protobuf.dev/programming-guides/json", given(scale_tier="BASIC"), True


#: Files that are read as YAML 1.1: (name, text, whether it is valid).
_TEXTS = [
    ("a boolean as a word", f"workerPoolSpecs:\n- machineSpec: {{machineType: n1-standard-8}}\n  replicaCount: 1\n"
     f"  containerSpec: {{imageUri: '{IMAGE}'}}\nenableWebAccess: no\n", True),
    ("an argument as a word", f"workerPoolSpecs:\n- machineSpec: {{machineType: n1-standard-8}}\n  replicaCount: 1\n"
     f"  containerSpec: {{imageUri: '{IMAGE}', args: [on]}}\n", False),
    ("keys in snake_case", "worker_pool_specs:\n- machine_spec: {machine_type: n1-standard-8}\n  replica_count: 1\n"
     f"  container_spec: {{image_uri: '{IMAGE}'}}\n", True),
]  # fmt: skip


def corpus() -> Iterator[Case]:
    """All of them."""
    for kind, entries in (("Vertex AI", _vertex()), ("tuning", _tuning()), ("AI Platform", _old())):
        for name, source, document, valid in entries:
            yield Case(f"{kind}: {name}", source, dumped(document), valid)
    for name, text, valid in _TEXTS:
        yield Case(f"Vertex AI: {name}", GCLOUD_JOB, text, valid)
