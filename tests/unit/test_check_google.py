"""``trainyard check-job`` over files and folders, its SARIF, and what of Google's files is refused or only noted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit import sarif_schema

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity
from trainyard_jobs import platforms
from trainyard_jobs.check import pages
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

Trainyard = Callable[..., tuple[int, str, str]]

IMAGE = "us-docker.pkg.dev/p/r/image:tag"
POOL: dict[str, Any] = {
    "machineSpec": {"machineType": "n1-standard-8"},
    "replicaCount": 1,
    "containerSpec": {"imageUri": IMAGE},
}
GOOD = {"workerPoolSpecs": [POOL]}
REFUSED = {"workerPoolSpecs": [POOL | {"replicaCount": 2}]}
CANNOT_START = {"workerPoolSpecs": [POOL | {"machineSpec": {}}]}
NOTED = GOOD | {"scheduling": {"strategy": "LOW_COST"}}


def found(document: dict[str, Any], *, region: str | None = None) -> list[Finding]:
    job = job_file.parse(yaml.safe_dump(document, sort_keys=False), Path("job.yaml"))
    return all_rules.check(Evidence(job, region, {IMAGE: None}))


def severities(document: dict[str, Any], rule: str, *, region: str | None = None) -> list[str]:
    return [str(one.severity) for one in found(document, region=region) if one.rule == rule]


# --- files and folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two jobs, a broken one, and files that are no jobs; the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs" / "deep").mkdir(parents=True)
    (tmp_path / "jobs" / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (tmp_path / "jobs" / "deep" / "refused one.json").write_text(json.dumps(REFUSED, indent=1))
    (tmp_path / "jobs" / "broken.yml").write_text("workerPoolSpecs: [\n")
    (tmp_path / "jobs" / "values.yaml").write_text("image: a\n")
    (tmp_path / "jobs" / "chart.yaml").write_text("{{ a helm template }}\n")
    (tmp_path / "jobs" / "service.yaml").write_text("{apiVersion: v1, kind: Service, metadata: {name: a}}\n")
    (tmp_path / "jobs" / "notes.txt").write_text("workerPoolSpecs")
    (tmp_path / "jobs" / ".git").mkdir()
    (tmp_path / "jobs" / ".git" / "job.yaml").write_text(yaml.safe_dump(REFUSED))
    return tmp_path


def test_a_folder_is_searched_and_one_broken_file_does_not_stop_the_others(folder: Path, trainyard: Trainyard) -> None:
    status, out, err = trainyard("check-job", "jobs", "--offline", "--json")
    result = json.loads(out)
    assert status == 1 and not result["passed"]
    assert {Path(one["file"]).name: one["passed"] for one in result["files"]} == {
        "good.yaml": True,
        "refused one.json": False,
        "broken.yml": False,
    }
    assert [Path(one).name for one in result["skipped"]] == ["chart.yaml", "service.yaml", "values.yaml"]
    (broken,) = [one for one in result["files"] if one["error"]]
    assert broken["kind"] is None and "jobs/broken.yml:2: not valid YAML" in broken["error"]
    assert "not jobs, and not checked: 3 (jobs/chart.yaml" in " ".join(err.split())


def test_a_file_given_twice_is_checked_once(folder: Path, trainyard: Trainyard) -> None:
    _, out, _ = trainyard("check-job", "jobs/good.yaml", "jobs", "jobs/good.yaml", "--offline", "--json")
    assert len(json.loads(out)["files"]) == 3


@pytest.mark.parametrize(
    ("documents", "options", "status"),
    [
        ([GOOD], (), 0),
        ([GOOD, GOOD], (), 0),
        ([GOOD, REFUSED], (), 1),
        ([GOOD, CANNOT_START], (), 1),
        ([GOOD, NOTED], (), 0),
        ([GOOD, NOTED], ("--strict",), 1),
        ([GOOD], ("--strict",), 0),
        ([GOOD, "a: ["], (), 2),
        ([REFUSED, "a: ["], (), 1),
        ([GOOD, "a: 1"], (), 2),
    ],
)
def test_the_exit_status_is_that_of_the_worst_file(
    documents: list[Any], options: tuple[str, ...], status: int, tmp_path: Path, trainyard: Trainyard
) -> None:
    for number, one in enumerate(documents):
        (tmp_path / f"{number}.yaml").write_text(one if isinstance(one, str) else yaml.safe_dump(one))
    paths = [str(tmp_path / f"{number}.yaml") for number in range(len(documents))]
    assert trainyard("check-job", *paths, "--offline", *options)[0] == status


def test_the_variable_has_one_path_with_spaces_or_several(folder: Path, trainyard: Trainyard) -> None:
    for value, number in (("jobs/deep/refused one.json", 1), ("jobs/good.yaml 'jobs/deep/refused one.json'", 2)):
        _, out, _ = trainyard("check-job", "--offline", "--json", FILE=value)
        assert len(json.loads(out)["files"]) == number


def test_a_folder_without_a_job_is_an_error_in_one_line(tmp_path: Path, trainyard: Trainyard) -> None:
    status, _, err = trainyard("check-job", str(tmp_path), "--offline")
    assert status == 2 and "no job in this folder" in err and len(err.splitlines()) == 1


# --- SARIF -----------------------------------------------------------------------------------------------------------


def test_sarif_is_valid_and_has_every_finding_with_its_place(folder: Path, trainyard: Trainyard) -> None:
    (folder / "jobs" / "noted.yaml").write_text(yaml.safe_dump(NOTED))
    status, out, _ = trainyard("check-job", "jobs", "--offline", "--sarif")
    log = json.loads(out)
    jsonschema.Draft7Validator(sarif_schema.schema()).validate(log)
    (run,) = log["runs"]
    places = {
        (one["ruleId"], one["level"]): one["locations"][0]["physicalLocation"] for one in run["results"]
    }  # fmt: skip
    assert status == 1
    assert set(places) == {("pools_are_in_order", "error"), ("scheduling_is_current", "note")}
    place = places["pools_are_in_order", "error"]
    assert place["artifactLocation"] == {"uri": "jobs/deep/refused%20one.json", "uriBaseId": "%SRCROOT%"}
    line = (folder / "jobs" / "deep" / "refused one.json").read_text().splitlines()[place["region"]["startLine"] - 1]
    assert "replicaCount" in line
    rules = [one["id"] for one in run["tool"]["driver"]["rules"]]
    assert all(rules[one["ruleIndex"]] == one["ruleId"] for one in run["results"])
    (notification,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "not valid YAML" in notification["message"]["text"] and not run["invocations"][0]["executionSuccessful"]


def test_a_finding_keeps_its_fingerprint_when_lines_are_added_above(tmp_path: Path, trainyard: Trainyard) -> None:
    path = tmp_path / "job.yaml"
    prints = []
    for comment in ("", "# a comment\n# of two lines\n"):
        path.write_text(comment + yaml.safe_dump(REFUSED))
        (result,) = json.loads(trainyard("check-job", str(path), "--offline", "--sarif")[1])["runs"][0]["results"]
        prints.append(result["partialFingerprints"])
    assert prints[0] == prints[1]


def test_only_one_format_is_printed(tmp_path: Path, trainyard: Trainyard) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    status, out, err = trainyard("check-job", str(path), "--sarif", "--json")
    assert (status, out) == (2, "") and "give one of them" in err


# --- Vertex AI: what the API and gcloud take -------------------------------------------------------------------------


def gpu(kind: str, count: int, machine: str) -> dict[str, Any]:
    spec = {"machineType": machine, "acceleratorType": kind, "acceleratorCount": count}
    return {"workerPoolSpecs": [POOL | {"machineSpec": spec}]}


#: Regions: https://docs.cloud.google.com/compute/docs/gpus/gpu-regions-zones.
@pytest.mark.parametrize(
    ("kind", "region", "severity"),
    [
        ("NVIDIA_TESLA_V100", "us-west2", ["cannot start"]),
        ("NVIDIA_TESLA_V100", "us-west1", []),
        ("NVIDIA_TESLA_V100", "mars", ["refuse"]),
        ("NVIDIA_TESLA_P4", "us-west2", []),
        ("NVIDIA_TESLA_T4", "europe-north1", ["cannot start"]),
        ("NVIDIA_TESLA_T4", None, []),
    ],
)
def test_a_region_without_the_gpu_cannot_start_the_job(kind: str, region: str | None, severity: list[str]) -> None:
    assert severities(gpu(kind, 1, "n1-standard-8"), "region_has_accelerator", region=region) == severity


#: https://github.com/google/caliban, COMPATIBILITY_TABLE in caliban/platform/cloud/types.py.
@pytest.mark.parametrize(
    ("machine", "severity"),
    [
        ("n1-standard-32", []),
        ("n1-highmem-32", []),
        ("n1-highcpu-64", []),
        ("n1-standard-64", ["cannot start"]),
        ("n1-highmem-64", ["cannot start"]),
    ],
)
def test_four_p100_need_a_machine_with_at_most_208_gb(machine: str, severity: list[str]) -> None:
    assert severities(gpu("NVIDIA_TESLA_P100", 4, machine), "gpus_match_machines") == severity


@pytest.mark.parametrize(
    ("document", "rule", "severity"),
    [
        # "can be skipped by providing an empty value": discovery document aiplatform v1, CustomJobSpec.workerPoolSpecs.
        ({"workerPoolSpecs": [POOL, {}, POOL]}, "pools_are_in_order", ["note"]),
        ({"workerPoolSpecs": [POOL, {}]}, "pools_are_in_order", ["note"]),
        ({"workerPoolSpecs": [{}, POOL]}, "pools_are_in_order", ["refuse"]),
        # "Optional. The number of worker replicas": WorkerPoolSpec.replicaCount.
        ({"workerPoolSpecs": [{key: POOL[key] for key in ("machineSpec", "containerSpec")}]}, "pools_are_in_order",
         ["note"]),
        ({"workerPoolSpecs": [POOL | {"machineSpec": {}}]}, "pools_are_complete", ["cannot start"]),
        ({"workerPoolSpecs": [POOL | {"machineSpec": {}}], "persistentResourceId": "a"}, "pools_are_complete", []),
        # "Must be a valid C identifier": EnvVar.name.
        ({"workerPoolSpecs": [POOL | {"containerSpec": {"imageUri": IMAGE, "env": [{"name": "a-b", "value": ""}]}}]},
         "environment_variables_are_valid", ["refuse"]),
        ({"workerPoolSpecs": [POOL | {"containerSpec": {"imageUri": IMAGE, "env": [{"name": "A"}] * 2}}]},
         "environment_variables_are_valid", ["note"]),
        # Output only: https://google.aip.dev/203.
        ({"jobSpec": GOOD, "displayName": "x", "state": "JOB_STATE_FAILED"}, "fields_match_api", ["note"]),
    ],
)  # fmt: skip
def test_what_the_api_takes_is_not_refused(document: dict[str, Any], rule: str, severity: list[str]) -> None:
    assert severities(document, rule) == severity


def spec_of(machine: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"workerPoolSpecs": [POOL | {"machineSpec": machine}], **more}


#: In gcloud's, GKE's and Compute Engine's documentation, but not in the tables; or of no generation that there is yet.
@pytest.mark.parametrize(
    ("document", "region"),
    [
        *((spec_of({"machineType": name}), None) for name in (
            "a3-edgegpu-8g", "a4x-maxgpu-8g-metal", "c4-standard-96-lssd", "c3-standard-192-metal", "n4d-standard-8",
            "n1-custom-4-8192", "g2-custom-8-32768", "n2-standard-96", "x9-standard-4", "c5a-standard-8")),
        (gpu("NVIDIA_GB300", 4, "a4x-maxgpu-4g-metal"), None),
        (gpu("NVIDIA_B200", 8, "a4-highgpu-8g-metal"), None),
        (gpu("NVIDIA_TESLA_T4", 1, "n1-custom-8-32768"), None),
        (gpu("AMD_MI999", 8, "a9-highgpu-8g"), None),
        (spec_of({"machineType": "tpu8x-standard-4t", "tpuTopology": "4x4x4"}), None),
        (spec_of({"machineType": "ct8-hightpu-4t", "tpuTopology": "16x16"}, scheduling={"strategy": "SPOT"}), None),
        (spec_of({"machineType": "cloud-tpu", "acceleratorType": "TPU_V9", "acceleratorCount": 8}), None),
        (GOOD, "europe-north2"),
        (GOOD, "northamerica-south1"),
        (gpu("NVIDIA_L4", 1, "g2-standard-8"), "europe-north2"),
        (spec_of({"machineType": "ct6e-standard-4t", "tpuTopology": "2x2"}), "us-northwest1"),
        (spec_of({"machineType": "ct6e-standard-4t", "tpuTopology": "2x2"}), "us-west4"),
    ],
    ids=lambda value: json.dumps(value.get("workerPoolSpecs", [{}])[0].get("machineSpec"))
    if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_a_name_that_is_newer_than_the_tables_is_a_note(document: dict[str, Any], region: str | None) -> None:
    some = found(document, region=region)
    assert [str(one) for one in some if one.severity == Severity.REFUSE] == []
    assert any(one.severity == Severity.NOTE for one in some)


@pytest.mark.parametrize("machine", ["n1-standard-9", "n1-standrad-8", "c2-standard-64"])
def test_an_unknown_machine_type_of_a_series_that_gets_no_more_is_refused(machine: str) -> None:
    assert severities(spec_of({"machineType": machine}), "machine_types_exist") == ["refuse"]


@pytest.mark.parametrize("kind", ["NVIDIA_TESLA_T44", "nvidia-l4", "L4", "TPU"])
def test_an_accelerator_is_refused_only_if_it_cannot_be_a_newer_one(kind: str) -> None:
    """Others are misspelt: the API's names of accelerators start with the maker, in capitals."""
    (severity,) = severities(spec_of({"machineType": "x9-a", "acceleratorType": kind}), "fields_match_api")
    assert severity == ("note" if kind.startswith("NVIDIA") else "refuse")


def gke_job(selector: dict[str, str], resource: str) -> dict[str, Any]:
    container = {"name": "a", "image": IMAGE, "resources": {"limits": {resource: 4}}}
    pod = {"containers": [container], "restartPolicy": "Never", "nodeSelector": selector}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"template": {"spec": pod}}}


@pytest.mark.parametrize(
    ("selector", "resource"),
    [
        ({"cloud.google.com/gke-accelerator": "nvidia-gb300"}, "nvidia.com/gpu"),
        ({"cloud.google.com/gke-tpu-accelerator": "tpu9x", "cloud.google.com/gke-tpu-topology": "4x4x4"},
         "google.com/tpu"),
        ({"cloud.google.com/gke-accelerator": "nvidia-gb300",
          "node.kubernetes.io/instance-type": "a4x-maxgpu-4g-metal"}, "nvidia.com/gpu"),
        ({"cloud.google.com/gke-accelerator": "nvidia-l4", "topology.kubernetes.io/zone": "us-north9-ai7z"},
         "nvidia.com/gpu"),
    ],
)  # fmt: skip
def test_a_newer_name_in_a_node_selector_is_no_failure(selector: dict[str, str], resource: str) -> None:
    assert [str(one) for one in found(gke_job(selector, resource)) if one.fails] == []


def test_a_newer_machine_type_of_an_ai_platform_job_is_a_note() -> None:
    spec = {"scaleTier": "CUSTOM", "masterType": "n9-standard-8", "region": "us-central1",
            "masterConfig": {"imageUri": IMAGE}}  # fmt: skip
    assert severities({"trainingInput": spec}, "machine_types_do_not_mix") == ["note"]


#: tests/cloud/test_gcloud_job_files.py compares thousands of such values with gcloud's and protobuf's own readers.
@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("timeout", "3600s", False), ("timeout", "1.5s", False), ("timeout", "315576000000s", False),
        ("timeout", "315576000001s", True), ("timeout", "1h", True), ("timeout", 60, True), ("timeout", None, False),
        ("timeout", True, True), ("strategy", None, False), ("strategy", 4, False), ("strategy", 40, True),
        ("strategy", False, True), ("disableRetries", None, False), ("disableRetries", "true", True),
        ("disableRetries", 1, True),
    ],
)  # fmt: skip
def test_values_of_scheduling_are_read_as_gcloud_and_the_api_read_them(field: str, value: Any, refused: bool) -> None:
    assert severities(GOOD | {"scheduling": {field: value}}, "fields_match_api") == ["refuse"] * refused


@pytest.mark.parametrize(
    ("count", "refused"),
    [("1", False), ("+1", False), ("1_0", False), (1.0, True), (True, True), (2**31, True), (None, False), ("x", True)],
)
def test_numbers_are_read_as_gcloud_and_the_api_read_them(count: Any, refused: bool) -> None:
    pool = POOL | {"diskSpec": {"bootDiskSizeGb": count}}
    assert severities({"workerPoolSpecs": [pool]}, "fields_match_api") == ["refuse"] * refused


# --- AI Platform: what flags of gcloud add ---------------------------------------------------------------------------

CONTAINER = {"masterConfig": {"imageUri": IMAGE}}


#: BuildTrainingJob in googlecloudsdk/api_lib/ml_engine/jobs.py merges these flags over the file.
@pytest.mark.parametrize(
    ("spec", "flag"),
    [
        ({"scaleTier": "BASIC"}, "--module-name"),
        ({"scaleTier": "BASIC", "packageUris": ["gs://b/p"], "runtimeVersion": "2.1"}, "--module-name"),
        ({"packageUris": ["gs://b/p"], "pythonModule": "a"}, "--runtime-version"),
        ({"masterType": "n1-standard-8", **CONTAINER}, "--scale-tier"),
        ({"scaleTier": "CUSTOM", **CONTAINER}, "--master-machine-type"),
        ({"scaleTier": "CUSTOM", "masterType": "n1-standard-8", "workerCount": 2, **CONTAINER},
         "--worker-machine-type"),
        ({"scaleTier": "CUSTOM", "masterType": "n1-standard-8", "workerType": "cloud_tpu",
          "masterConfig": {"imageUri": IMAGE}, "workerConfig": {"tpuTfVersion": "2.11"}}, "--worker-count"),
        ({"scaleTier": "BASIC_TPU", **CONTAINER}, "--tpu-tf-version"),
        ({"scaleTier": "BASIC", "masterConfig": {"containerArgs": ["a"]}}, "--master-image-uri"),
    ],
)  # fmt: skip
def test_what_a_flag_can_add_is_a_note_that_names_the_flag(spec: dict[str, Any], flag: str) -> None:
    some = found({"trainingInput": spec | {"region": "us-central1"}})
    assert [one for one in some if one.fails] == []
    assert flag in " ".join(one.remediation for one in some)


def test_evaluators_have_no_flags() -> None:
    spec = {"scaleTier": "CUSTOM", "masterType": "n1-standard-8", "evaluatorCount": 1, **CONTAINER}
    assert severities({"trainingInput": spec}, "machines_match_tier") == ["refuse"]


def test_fields_that_only_gcloud_knows_are_accepted_and_their_values_checked() -> None:
    spec = CONTAINER | {"scaleTier": "BASIC", "scheduling": {"strategy": "LOW_COST", "resilientToWorkerRestart": True}}
    spec |= {"nasJobSpec": {"searchSpaceSpec": "a", "multiTrialAlgorithmSpec": {"multiTrialAlgorithm": "GRID_SEARCH"}}}
    assert severities({"trainingInput": spec}, "fields_match_api") == []
    for wrong in ({"scheduling": {"strategy": "CHEAP"}}, {"nasJobSpec": {"searchSpace": "a"}}):
        assert severities({"trainingInput": spec | wrong}, "fields_match_api") == ["refuse"]


@pytest.mark.parametrize(
    "spec",
    [
        {"scaleTier": "BASIC"},
        {"scaleTier": "CUSTOM", "masterType": "n1-standard-8", "runtimeVersion": "2.11"},
        {"masterType": "n1-standard-8", "region": "us-central1"},
    ],
)
def test_a_job_that_leaves_its_package_to_flags_is_converted_with_placeholders(
    spec: dict[str, Any], tmp_path: Path, trainyard: Trainyard
) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(yaml.safe_dump({"trainingInput": spec}))
    status, out, err = trainyard("job", "--platform", "vertex", "--from", str(path))
    assert status == 0, err
    package = yaml.safe_load(out)["workerPoolSpecs"][0]["pythonPackageSpec"]
    assert (package["packageUris"], package["pythonModule"]) == (["gs://BUCKET/PACKAGE.tar.gz"], "PACKAGE.MODULE")
    assert "replace gs://BUCKET/PACKAGE.tar.gz and PACKAGE.MODULE" in " ".join(err.split())


# --- any YAML --------------------------------------------------------------------------------------------------------

KEYS = [
    "workerPoolSpecs", "jobSpec", "studySpec", "trialJobSpec", "trainingInput", "machineSpec", "containerSpec", "env",
    "pythonPackageSpec", "diskSpec", "scheduling", "labels", "parameters", "metrics", "masterConfig", "workerConfig",
    "acceleratorConfig", "hyperparameters", "params", "apiVersion", "kind", "spec", "template", "metadata",
    "replicatedJobs", "containers", "resources", "limits", "nodeSelector", "replicaCount", "machineType", "args",
    "machine_spec", "scaleTier", "masterType", "discreteValues", "discreteValueSpec", "values", "doubleValueSpec",
]  # fmt: skip
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 10**20), st.floats(), st.text(max_size=8), st.dates(),
    st.sampled_from(["yes", "1:30", "Job", "JobSet", "batch/v1", "jobset.x-k8s.io/v1alpha2", "CUSTOM", "cloud_tpu",
                     "n1-standard-8", "n1-standard-²", "cloud-tpu", "TPU_V2", "ct5lp-hightpu-4t", "DISCRETE", "60s"]),
)  # fmt: skip
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from(KEYS), scalars.filter(lambda key: key is not None)), inner, max_size=4
        ),
    ),
    max_leaves=25,
)


@settings(max_examples=examples(400), suppress_health_check=list(HealthCheck))
@given(tree=st.dictionaries(st.sampled_from(KEYS), trees, min_size=1, max_size=5), region=st.sampled_from([None, "x"]))
def test_any_yaml_is_judged_or_refused_in_one_line(tree: dict[str, Any], region: str | None) -> None:
    text = yaml.safe_dump(tree, allow_unicode=True)
    try:
        job = job_file.parse(text, Path("job.yaml"))
    except UserError as error:
        assert "\n" not in str(error)
        return
    for one in all_rules.check(Evidence(job, region)):
        assert one.where.startswith("job.yaml") and one.what and isinstance(one.severity, Severity)


@settings(max_examples=examples(100), suppress_health_check=list(HealthCheck))
@given(text=st.text(alphabet="ab:-{}[]&*!|>'\"#%@`?, \n\tworkerPoolSpecs0123.\x00\x85", max_size=60))
def test_any_text_is_a_job_or_an_error_in_one_line(text: str) -> None:
    try:
        job_file.parse(text, Path("job.yaml"))
    except UserError as error:
        assert "\n" not in str(error)


# --- the page of rules -----------------------------------------------------------------------------------------------


def test_the_page_lists_every_rule_once_with_severity_title_and_source() -> None:
    rows = [line.split(" | ") for line in pages.RULES.read_text(encoding="utf-8").splitlines() if "<a id=" in line]
    ids = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    assert sorted(ids) == sorted(one.id for one in platforms.RULES)
    by_id = {one.id: one for one in platforms.RULES}
    for name, row in zip(ids, rows, strict=True):
        assert row[1] == by_id[name].severity
        assert row[2].replace("\\|", "|") == by_id[name].title
        assert row[3].replace("<https", "https").replace(">", "")[:40] in by_id[name].source.replace(">", "") + " |"


def test_a_key_of_another_api_is_unknown_and_the_rest_is_judged() -> None:
    """A CustomJobSpec in one file with a TrainingInput."""
    job = job_file.parse("scheduling: true\ntrainingInput: []\nworkerPoolSpecs:\n", Path("job.yaml"))
    found = [f"{one.where}: {one.what}" for one in all_rules.check(Evidence(job))]
    assert found == [
        "job.yaml:1: scheduling: true is not a mapping of fields",
        "job.yaml:2: trainingInput: unknown field 'trainingInput'",
        "job.yaml:3: there is no worker pool",
    ]
