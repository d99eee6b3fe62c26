"""A job asks for GPUs that its image has code for, and `job` and `check-job` name an image that runs there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.fakes.engine import FakeEngine, Ran
from tests.fakes.registry import Registry
from tests.published_images import publish

from trainyard.common.docker_engine import Engine
from trainyard.common.rule_engine import Finding, Severity
from trainyard.image import facts, recipes
from trainyard.oci import image_index, referrers
from trainyard.oci.documents import hashed
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import PATH, Recipe
from trainyard.spec import gpus, model
from trainyard.spec.architectures import AMD64, ARM64
from trainyard_jobs.check import files
from trainyard_jobs.model import image_metadata, machines
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules import image as rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

IMAGE = "us-docker.pkg.dev/p/r/image:tag"
REGISTRY = "us-central1-docker.pkg.dev/proj/ml"
GPU_PLATFORMS = ["vertex", "gke", "kubeflow", "slurm", "skypilot"]
NO_CODE = "has no code for a"

Command = Callable[..., tuple[int, str, str]]


def held(target: str) -> Contents:
    return image_metadata.of_recipes(IMAGE, recipes.outlines(model.load(target)))


def recommended() -> list[Recipe]:
    return recipes.outlines(*model.recommended())


def vertex(gpu: str) -> dict[str, Any]:
    machine = {"machineType": machines.machine_for(gpu, machines.table().gpus[gpu].counts[0]), "acceleratorType": gpu,
               "acceleratorCount": machines.table().gpus[gpu].counts[0]}  # fmt: skip
    return {"workerPoolSpecs": [{"machineSpec": machine, "replicaCount": 1, "containerSpec": {"imageUri": IMAGE}}]}


def gke(gpu: str, *, requested: bool = True, **labels: str) -> dict[str, Any]:
    selector = {"cloud.google.com/gke-accelerator": machines.table().gpus[gpu].gke_accelerator}
    selector |= {f"cloud.google.com/{name.replace('_', '-')}": value for name, value in labels.items()}
    container: dict[str, Any] = {"name": "t", "image": IMAGE}
    if requested:
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    pod = {"restartPolicy": "Never", "nodeSelector": selector, "containers": [container]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": {"template": {"spec": pod}}}


def train_job(gpu: str) -> dict[str, Any]:
    selector = {"cloud.google.com/gke-accelerator": machines.table().gpus[gpu].gke_accelerator}
    node = {"name": "node", "template": {"spec": {"template": {"spec": {"nodeSelector": selector}}}}}
    patch = {"manager": "a.b/c", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}}}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"image": IMAGE}, "runtimePatches": [patch]}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "x"}, "spec": spec,
    }  # fmt: skip


def ai_platform(**fields: Any) -> dict[str, Any]:
    return {"trainingInput": {"scaleTier": "CUSTOM", "region": "us-central1", **fields}}


def findings(job: dict[str, Any], contents: Contents) -> list[Finding]:
    """Return the findings of the rules about GPUs, of all rules of a job."""
    parsed = job_file.parse(json.dumps(job), Path("job.yaml"))
    evidence = Evidence(parsed, images={IMAGE: contents}, targets=recommended)
    ids = {rules.images_have_code_for_the_gpu.id, rules.nodes_have_the_driver.id}
    return [finding for finding in all_rules.check(evidence) if finding.rule in ids]


def codes(job: dict[str, Any], contents: Contents) -> list[Finding]:
    rule = rules.images_have_code_for_the_gpu.id
    return [finding for finding in findings(job, contents) if finding.rule == rule]


# --- tables ----------------------------------------------------------------------------------------------------------


def test_every_accelerator_has_a_model_whose_capability_is_known() -> None:
    table = machines.table()
    rows = {**table.gpus, **table.gpus_gone}
    assert {name: row.model for name, row in rows.items() if row.model not in gpus.gpus()} == {}
    for name, row in rows.items():  # the names of the API contain those of the models
        assert row.model.replace(" ", "_") in name


def test_drivers_of_gke_are_branches_that_grow_with_its_version() -> None:
    rows = list(machines.table().gke_drivers.values())
    assert all(int(row.default) <= int(row.latest) for row in rows)
    for older, newer in itertools.pairwise(rows):
        assert int(older.default) <= int(newer.default) and int(older.latest) <= int(newer.latest)


# --- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [vertex, gke, train_job])
@pytest.mark.parametrize(
    ("target", "gpu", "instead"),
    [
        ("gpu", "NVIDIA_TESLA_V100", "gpu-2.7"),
        ("gpu", "NVIDIA_TESLA_P100", "gpu-2.7"),
        ("gpu", "NVIDIA_TESLA_P4", "gpu-2.7"),
        ("gpu-2.7", "NVIDIA_B200", "gpu"),
        ("gpu-2.7", "NVIDIA_RTX_PRO_6000", "gpu"),
    ],
)
def test_an_image_without_code_for_the_gpu_cannot_start_and_one_that_runs_there_is_named(
    write: Callable[[str], dict[str, Any]], target: str, gpu: str, instead: str
) -> None:
    (finding,) = codes(write(gpu), held(target))
    assert finding.severity is Severity.CANNOT_START
    row = machines.table().gpus[gpu]
    assert f"{NO_CODE} {row.model} (compute capability {gpus.gpus()[row.model].capability})" in finding.what
    assert finding.remediation.startswith(f"use the target {instead} (torch ")
    assert finding.where.startswith("job.yaml:")


@pytest.mark.parametrize("write", [vertex, gke, train_job])
@pytest.mark.parametrize(
    ("target", "gpu"),
    [
        *(("gpu", gpu) for gpu in machines.table().gpus if not gpu.startswith(("NVIDIA_TESLA_P", "NVIDIA_TESLA_V"))),
        ("gpu-2.7", "NVIDIA_TESLA_V100"),
        ("gpu-2.7", "NVIDIA_TESLA_P4"),
        ("gpu-2.7", "NVIDIA_H200_141GB"),
        ("tf-gpu", "NVIDIA_TESLA_T4"),
        ("tf-gpu", "NVIDIA_L4"),
    ],
)
def test_an_image_with_code_for_the_gpu_has_no_finding(
    write: Callable[[str], dict[str, Any]], target: str, gpu: str
) -> None:
    assert codes(write(gpu), held(target)) == []


@pytest.mark.parametrize("write", [vertex, gke, train_job])
def test_what_cudnn_has_no_code_for_cannot_start(write: Callable[[str], dict[str, Any]]) -> None:
    """TensorFlow 2.21 has code for a P100, and cuDNN, since 9.11, has none."""
    (finding,) = codes(write("NVIDIA_TESLA_P100"), held("tf-gpu"))
    assert finding.severity is Severity.CANNOT_START
    assert f"{NO_CODE} P100 (compute capability 6.0)" in finding.what
    assert finding.remediation == "use another GPU, or an image with tensorflow 2.21.0 and cuDNN before 9.11"


@pytest.mark.parametrize("write", [vertex, gke, train_job])
def test_an_image_that_runs_from_ptx_has_a_note(write: Callable[[str], dict[str, Any]]) -> None:
    (finding,) = codes(write("NVIDIA_B200"), held("tf-gpu"))
    assert finding.severity is Severity.NOTE
    assert "tensorflow 2.21.0 with CUDA 12.5 runs on a B200 (compute capability 10.0) from PTX" in finding.what
    assert "a driver for CUDA 12.5 or later" in finding.remediation


def test_machines_with_arm_cpus_get_the_image_for_arm64() -> None:
    """The wheel for arm64 has no code for a T4, that for amd64 has."""
    contents = held("gpu")
    assert codes(vertex("NVIDIA_GB200"), contents) == []
    only_x86 = Contents(IMAGE, contents.versions, device_codes={"arm64": contents.device_codes["amd64"]})
    assert codes(vertex("NVIDIA_GB200"), only_x86) == []  # 10.0 is in both
    old = Contents(IMAGE, {"torch": "2.7.1"}, "its labels", device_codes=held("gpu-2.7").device_codes)
    assert codes(vertex("NVIDIA_GB200"), old) == []  # not known of arm64: the architecture's rule has it
    arm = Contents(IMAGE, {"torch": "2.7.1"}, device_codes={"arm64": held("gpu-2.7").device_codes["amd64"]})
    (finding,) = codes(vertex("NVIDIA_GB200"), arm)
    assert "with CUDA 12.6 for arm64 has no code for a GB200" in finding.what


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert codes(vertex("NVIDIA_TESLA_V100"), Contents(IMAGE, {"torch": "2.15.0"}, "its labels")) == []
    assert codes(vertex("NVIDIA_TESLA_V100"), held("cpu")) == []
    job = vertex("NVIDIA_TESLA_V100")
    job["workerPoolSpecs"][0]["machineSpec"]["acceleratorType"] = "NVIDIA_NEW"
    assert codes(job, held("gpu")) == []


def test_an_image_without_a_known_framework_has_no_target_instead() -> None:
    contents = Contents(IMAGE, source="its labels", device_codes=held("gpu").device_codes)
    (finding,) = codes(vertex("NVIDIA_TESLA_V100"), contents)
    assert finding.what.startswith("the image with CUDA 13.2 has no code for a V100")
    assert finding.remediation == "use an image with code for a V100, or another GPU"


def test_a_container_that_gets_no_gpu_of_its_node_needs_no_code_for_it() -> None:
    assert codes(gke("NVIDIA_TESLA_V100", requested=False), held("gpu")) == []


@pytest.mark.parametrize(
    ("framework", "version", "gpu", "said"),
    [
        ("torch", "2.4.1", "NVIDIA_TESLA_K80", "use another GPU: no torch in images/matrix.yaml has code for a K80"),
        ("jax", "0.12.0", "NVIDIA_TESLA_P4", "use jax 0.12 for CUDA 12.9, or another GPU"),
        ("tensorflow", "2.21.0", "NVIDIA_TESLA_K80", "no tensorflow in images/matrix.yaml has code for a K80"),
    ],
)
def test_without_a_target_the_releases_with_code_for_the_gpu_are_named(
    framework: str, version: str, gpu: str, said: str
) -> None:
    cuda = "13.0" if framework == "jax" else ""
    code = gpus.device_code(framework, version, "amd64", cuda)
    assert code
    job = ai_platform(masterType="n1-standard-8", masterConfig={"imageUri": IMAGE, "acceleratorConfig": {"type": gpu}})
    (finding,) = codes(job, Contents(IMAGE, {framework: version}, "its labels", device_codes={"amd64": code}))
    assert said in finding.remediation


@pytest.mark.parametrize(
    "fields",
    [
        {
            "masterType": "n1-standard-8",
            "masterConfig": {"imageUri": IMAGE, "acceleratorConfig": {"type": "NVIDIA_TESLA_K80", "count": 1}},
        },
        {"masterType": "standard_gpu", "masterConfig": {"imageUri": IMAGE}},
        {"scaleTier": "BASIC_GPU", "masterConfig": {"imageUri": IMAGE}},
        {"masterType": "standard_v100", "masterConfig": {"imageUri": IMAGE}},
        {
            "masterType": "n1-standard-8",
            "masterConfig": {},
            "workerType": "complex_model_m_p100",
            "workerCount": 1,
            "workerConfig": {"imageUri": IMAGE},
        },
    ],
)
def test_gpus_of_ai_platform_are_those_of_the_config_the_machine_or_the_tier(fields: dict[str, Any]) -> None:
    (finding,) = codes(ai_platform(**fields), held("gpu"))
    assert finding.severity is Severity.CANNOT_START
    fields["masterType"] = fields["workerType"] = "n1-standard-8"
    for role in ("masterConfig", "workerConfig"):
        fields.get(role, {}).pop("acceleratorConfig", None)
    assert codes(ai_platform(**fields), held("gpu")) == []


# --- drivers of GKE --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [{}, {"gke_gpu_driver_version": "default"}])
def test_the_default_driver_of_gke_is_a_note_where_it_is_too_old(labels: dict[str, str]) -> None:
    (finding,) = findings(gke("NVIDIA_L4", **labels), held("gpu"))
    assert (finding.rule, finding.severity) == ("nodes_have_the_driver", Severity.NOTE)
    assert "torch 2.15.0 with CUDA 13.2 needs driver 580 or later" in finding.what
    assert "; the default driver of GKE 1.28 to 1.33 is 535" in finding.what
    assert "cloud.google.com/gke-gpu-driver-version: latest (GKE 1.31 or later)" in finding.remediation


@pytest.mark.parametrize(
    ("job", "target"),
    [
        (gke("NVIDIA_L4", gke_gpu_driver_version="latest"), "gpu"),
        (gke("NVIDIA_L4", gke_gpu_driver_version="disabled"), "gpu"),  # its user installs one
        (gke("NVIDIA_B200"), "gpu"),  # 535 does not know it: GKE installs another
        (gke("NVIDIA_L4"), "gpu-2.7"),
        (vertex("NVIDIA_L4"), "gpu"),  # Google does not document the driver of Vertex AI
    ],
)
def test_a_driver_that_is_new_enough_or_not_known_is_no_note(job: dict[str, Any], target: str) -> None:
    assert findings(job, held(target)) == []


def test_the_latest_driver_of_gke_is_a_note_too_where_it_is_too_old() -> None:
    code = gpus.DeviceCode.parse("14.0", "660", "9.0")
    contents = Contents(IMAGE, {"torch": "3.0.0"}, "its labels", device_codes={"amd64": code})
    (finding,) = findings(gke("NVIDIA_H100_80GB", gke_gpu_driver_version="latest"), contents)
    assert "; the latest driver of GKE 1.31 to 1.33 is 580" in finding.what
    assert finding.remediation == "use a node pool with driver 660 or later"


# --- `job` -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", [*GPU_PLATFORMS, "ai-platform"])
@pytest.mark.parametrize("gpu", ["NVIDIA_TESLA_V100", "P100", "P4"])
def test_job_refuses_a_gpu_that_the_image_has_no_code_for_in_one_line(
    trainyard: Command, platform: str, gpu: str
) -> None:
    status, out, err = trainyard("job", "gpu", "--platform", platform, "--accelerator", gpu, "--registry", REGISTRY)
    assert (status, out) == (2, "")
    short = gpu.removeprefix("NVIDIA_TESLA_")
    (finding,) = codes(vertex(f"NVIDIA_TESLA_{short}"), held("gpu"))
    said = f"job: invalid job: {finding.what}: use the target gpu-2.7 (torch 2.7.1), or another GPU"
    assert " ".join(err.split()) == said


@pytest.mark.parametrize("platform", GPU_PLATFORMS)
@pytest.mark.parametrize(
    ("target", "gpu"),
    [("gpu-2.7", "V100"), ("gpu", "T4"), ("gpu", "8xB200"), ("gpu", "RTX_PRO_6000"), ("tf-gpu", "8xB200")],
)
def test_job_writes_a_job_for_gpus_that_the_image_has_code_or_ptx_for(
    trainyard: Command, platform: str, target: str, gpu: str
) -> None:
    status, out, err = trainyard("job", target, "--platform", platform, "--accelerator", gpu, "--registry", REGISTRY)
    assert (status, bool(out)) == (0, True), err


# --- images that a job names -----------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A repository at a registry; no engine is running."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    with Registry() as fake:
        yield Repository(f"{fake.host}/ml/trainyard")


def labelled(repository: Repository, labels: dict[str, str], architecture: str, tag: str = "") -> Manifest:
    """Store an image with labels."""
    config = json.dumps({"os": "linux", "architecture": architecture, "config": {"Labels": labels}}).encode()
    referrers.put_blob(repository, config)
    about = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": hashed(config), "size": len(config)}
    manifest = Manifest.of(
        {"schemaVersion": 2, "config": about, "layers": []}, "application/vnd.oci.image.manifest.v1+json"
    )
    repository.put(manifest, tag or manifest.digest)
    return manifest


def checked(tmp_path: Path, reference: str, gpu: str) -> list[Finding]:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(vertex(gpu)).replace(IMAGE, reference))))
    return [
        finding
        for finding in files.check_file(path, engine=Engine(), targets=recommended)[1]
        if finding.rule == "images_have_code_for_the_gpu"
    ]


def test_labels_at_a_registry_say_what_an_image_has_code_for(repository: Repository, tmp_path: Path) -> None:
    spec = model.load("gpu", "amd64")
    labels = facts.labels(spec) | {"io.trainyard.framework": "torch==2.15.0"}
    labelled(repository, labels, "amd64", "mine")
    reference = f"{repository.name}:mine"
    (finding,) = checked(tmp_path, reference, "NVIDIA_TESLA_V100")
    assert finding.what.endswith("has code for 7.5 8.0 8.6 9.0 10.0 12.0 (by its labels at the registry)")
    assert "use the target gpu-2.7" in finding.remediation
    assert checked(tmp_path, reference, "NVIDIA_TESLA_T4") == []


def test_each_image_of_an_index_has_what_its_labels_say(repository: Repository) -> None:
    made = {}
    for architecture in (AMD64, ARM64):
        labels = facts.labels(model.load("gpu", architecture.name)) | {"io.trainyard.framework": "torch==2.15.0"}
        made[architecture] = labelled(repository, labels, architecture.name)
    repository.put(image_index.make(made, {}), "both")
    contents = image_metadata.read_contents(None, f"{repository.name}:both")
    assert contents.device_codes == held("gpu").device_codes
    assert set(contents.device_codes) == {"amd64", "arm64"}


@pytest.mark.parametrize(
    "labels",
    [
        {"gpus": "sm_90", "cuda": "13.2", "driver": "580"},
        {"gpus": "9.0", "cuda": "new", "driver": "580"},
        {"gpus": "9.0", "cuda": "13.2", "driver": "new"},
        {"gpus": "9.0"},
    ],
)
def test_labels_in_another_form_are_not_read(repository: Repository, labels: dict[str, str]) -> None:
    labelled(repository, {f"io.trainyard.{name}": value for name, value in labels.items()}, "amd64", "odd")
    assert image_metadata.read_contents(None, f"{repository.name}:odd").device_codes == {}


TORCH = {"torch": "2.15.0", "nvidia-cuda-runtime": "13.2.51"}


@pytest.mark.parametrize(
    ("packages", "capabilities"),
    [
        (TORCH, "7.5 8.0 8.6 9.0 10.0 12.0"),
        ({"torch": "2.7.1+cu126"}, "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
        ({"torch": "2.7.1", "nvidia-cuda-runtime-cu12": "12.6.77"}, "5.0 6.0 7.0 7.5 8.0 8.6 9.0"),
        # tf-gpu's wheel has the code, whatever version of the libraries it finds.
        ({"tensorflow": "2.21.0", "nvidia-cuda-runtime-cu12": "12.9.79"}, "6.0 7.0 8.0 8.9 9.0+PTX"),
        ({"jax": "0.12.0", "nvidia-cuda-runtime": "13.0.1"}, "7.5 8.0 9.0 10.0 11.0 12.0+PTX"),
        ({"torch": "2.7.1+cu128"}, ""),  # of PyTorch's index, for other GPUs
        ({"torch": "2.7.1+cu118"}, ""),
        ({"torch": "2.8.0a0+5228986c39.nv25.6", "nvidia-cuda-runtime-cu12": "12.8.90"}, ""),  # NVIDIA's build
        ({"torch": "2.7.1"}, ""),  # conda's, perhaps
        ({"torch": "2.7.1+cpu"}, ""),
        ({"torch": "1.13.1+cu117"}, ""),  # older than images/matrix.yaml
        ({"torch": "none", "nvidia-cuda-runtime": "13.2.51"}, ""),
        (TORCH | {"torch-xla": "2.9.0"}, ""),
        ({"numpy": "2.3.0"}, ""),
    ],
)
def test_packages_in_an_attached_sbom_say_what_a_foreign_image_has_code_for(
    repository: Repository, tmp_path: Path, packages: dict[str, str], capabilities: str
) -> None:
    publish(repository, "theirs", python=packages)
    contents = image_metadata.read_contents(None, f"{repository.name}:theirs")
    assert {arch: code.text for arch, code in contents.device_codes.items()} == (
        {"amd64": capabilities} if capabilities else {}
    )
    (*refused,) = checked(tmp_path, f"{repository.name}:theirs", "NVIDIA_TESLA_V100")
    assert bool(refused) == bool(capabilities and "7.0" not in capabilities)
    assert all("by its SBOM at the registry" in finding.what for finding in refused)


def test_a_foreign_image_without_an_sbom_is_not_judged(repository: Repository) -> None:
    publish(repository, "bare", python=TORCH, listed=False)
    contents = image_metadata.read_contents(None, f"{repository.name}:bare")
    assert (contents.versions, contents.device_codes) == ({}, {})


@pytest.mark.parametrize(
    ("recipe", "packages", "source"),
    [
        (recipes.make(model.load("gpu", "amd64")), {}, "recipe.json"),
        (None, TORCH, "its installed packages"),
    ],
)
def test_a_local_image_is_known_by_its_recipe_or_its_packages(
    tmp_path: Path, fake_engine: FakeEngine, recipe: Recipe | None, packages: dict[str, str], source: str
) -> None:
    about = {"folder": "/site", "requires": [], "bytes": 1}
    installed = [{"name": name, "version": version, **about} for name, version in packages.items()]
    report = json.dumps({"python": "3.12.9", "packages": installed}).encode()
    fake_engine.add(
        "us-docker.pkg.dev/p/r/local:1",
        files={PATH: recipe.text().encode()} if recipe else {},
        program=lambda *_: Ran(out=report),
    )
    (finding,) = checked(tmp_path, "us-docker.pkg.dev/p/r/local:1", "NVIDIA_TESLA_P100")
    assert "torch 2.15.0 with CUDA 13.2 has no code for a P100" in finding.what
    assert source in finding.what
