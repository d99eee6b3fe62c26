"""Job files of all platforms are read with line numbers and recognized by their keys; slices equal those of xpk."""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from trainyard.common.errors import UserError
from trainyard_jobs.check import files
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.model import machines, yaml_writer
from trainyard_jobs.schema import google, job_file

CUSTOM_JOB = """\
workerPoolSpecs:
  - machineSpec: {machineType: n1-standard-8}
    replicaCount: 1
    containerSpec:
      imageUri: gcr.io/p/i
      args: [mnist]
"""
TRAINING_INPUT = "trainingInput:\n  scaleTier: BASIC\n  region: us-central1\n"


def written(folder: Path, content: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (CUSTOM_JOB, "custom-job"),
        ("displayName: x\njobSpec:\n  workerPoolSpecs: []\n", "custom-job"),
        ("worker_pool_specs:\n  - replica_count: 1\n", "custom-job"),
        ("studySpec: {}\ntrialJobSpec: {}\n", "hyperparameter-tuning-job"),
        (TRAINING_INPUT, "ai-platform"),
        ("scaleTier: CUSTOM\nmasterType: standard\n", "ai-platform"),
        ("jobId: x\ntrainingInput: {}\n", "ai-platform"),
        ("apiVersion: batch/v1\nkind: Job\n", "gke"),
        ("apiVersion: v1\nkind: Service\n---\napiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n", "gke"),
        ('{"workerPoolSpecs": []}', "custom-job"),
    ],
)
def test_a_kind_of_job_is_recognized_by_its_keys(tmp_path: Path, content: str, kind: str) -> None:
    assert job_file.load(written(tmp_path, content)).kind == kind


def test_json_with_tabs_is_read_too(tmp_path: Path) -> None:
    file = job_file.load(written(tmp_path, '{\n\t"workerPoolSpecs": []\n}\n', "job.json"))
    assert file.documents == [{"workerPoolSpecs": []}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "job.yaml: empty"),
        ("a: [1\n", "job.yaml:2: not valid YAML"),
        ("[" * 700, "job.yaml: its values are nested too deeply"),
        ("- 1\n", "expected 'key: value' pairs"),
        ("steps: []\n", "job.yaml:1: not a job: its keys are steps"),
        ("apiVersion: v1\nkind: Service\n", "job.yaml:1: Service of v1: not checked; checked are Job, JobSet"),
        (CUSTOM_JOB + "---\n" + CUSTOM_JOB, "2 documents"),
        ("trainingInput: 1\n", "job.yaml:1: trainingInput: expected 'key: value' pairs"),
    ],
)
def test_what_is_not_a_job_is_refused_with_its_line(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        job_file.load(written(tmp_path, content))


@pytest.mark.parametrize(
    "content",
    [
        # https://cloud.google.com/dataproc/docs/concepts/configuring-clusters/autoscaling
        "workerConfig: {minInstances: 2, maxInstances: 2}\nbasicAlgorithm: {cooldownPeriod: 2m}\n",
        # https://github.com/volcano-sh/volcano/blob/master/example/job.yaml
        "apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\nmetadata: {name: a}\nspec: {tasks: []}\n",
    ],
)
def test_files_of_other_services_with_the_same_words_are_no_jobs(tmp_path: Path, content: str) -> None:
    with pytest.raises(job_file.NotAJobError):
        job_file.load(written(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: No such file"):
        job_file.load(tmp_path / "none.yaml")


def test_lines_are_found_in_either_spelling(tmp_path: Path) -> None:
    content = "job_spec:\n  worker_pool_specs:\n    replica_count: 1\n    machine_spec:\n      machine_type: x\n"
    file = job_file.load(written(tmp_path, content))
    assert file.spec["workerPoolSpecs"] == [{"replicaCount": 1, "machineSpec": {"machineType": "x"}}]
    assert file.line(("jobSpec", "workerPoolSpecs", 0, "machineSpec", "machineType")) == 5
    assert file.line(("jobSpec", "workerPoolSpecs", 0, "machineSpec", "acceleratorType")) == 4


def test_labels_keep_their_spelling(tmp_path: Path) -> None:
    file = job_file.load(written(tmp_path, "trainingInput: {scaleTier: BASIC}\nlabels: {my_team: a}\n"))
    assert file.documents[0]["labels"] == {"my_team": "a"}


# --- YAML -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12), max_size=4))
def test_yaml_means_the_same_to_readers_of_yaml_1_1_and_1_2(words: list[str]) -> None:
    dumped = yaml_writer.dump({"args": words})
    assert yaml.safe_load(dumped) == {"args": words}
    assert YAML(typ="safe", pure=True).load(dumped) == {"args": words}


@pytest.mark.parametrize("word", ["yes", "off", "y", "N", "1e5", "1e-3", "0o17", "017", "1:30", "null", "~", "2", ".5"])
def test_text_that_looks_like_another_type_is_quoted(word: str) -> None:
    assert f"- {word}\n" not in yaml_writer.dump([word])
    assert (
        YAML(typ="safe", pure=True).load(yaml_writer.dump([word])) == yaml.safe_load(yaml_writer.dump([word])) == [word]
    )


# --- machines --------------------------------------------------------------------------------------------------------

#: What xpk 1.16.0 writes for these types (`xpk workload create --dry-run --output-manifest-file`), all with one
#: google.com/tpu limit of 4: accelerator label, topology, parallelism = completions.
XPK = {
    "v4-16": ("tpu-v4-podslice", "2x2x2", 2),
    "v5litepod-16": ("tpu-v5-lite-podslice", "4x4", 4),
    "v6e-16": ("tpu-v6e-slice", "4x4", 4),
}
#: The table it takes them from (core/system_characteristics.py), for the machines of four chips.
XPK_TOPOLOGIES = {
    "v4-8": "2x2x1", "v4-32": "2x2x4", "v4-64": "2x4x4", "v4-128": "4x4x4", "v4-256": "4x4x8", "v4-512": "4x8x8",
    "v4-1024": "8x8x8", "v4-1536": "8x8x12", "v4-2048": "8x8x16", "v4-4096": "8x16x16",
    "v5litepod-32": "4x8", "v5litepod-64": "8x8", "v5litepod-128": "8x16", "v5litepod-256": "16x16",
    "v5p-8": "2x2x1", "v5p-16": "2x2x2", "v5p-32": "2x2x4", "v5p-64": "2x4x4", "v5p-128": "4x4x4", "v5p-256": "4x4x8",
    "v5p-384": "4x4x12", "v5p-512": "4x8x8", "v5p-640": "4x4x20", "v5p-768": "4x8x12", "v5p-896": "4x4x28",
    "v5p-1024": "8x8x8", "v5p-1152": "4x12x12", "v5p-1280": "4x8x20", "v5p-1536": "8x8x12", "v5p-1920": "4x12x20",
    "v5p-2048": "8x8x16", "v5p-2304": "8x12x12", "v5p-2560": "8x8x20", "v5p-3072": "8x12x16", "v5p-3456": "12x12x12",
    "v5p-4096": "8x16x16", "v5p-4608": "12x12x16", "v5p-6144": "12x16x16", "v5p-8192": "16x16x16",
    "v5p-12288": "16x16x24",
    "v6e-1": "1x1", "v6e-4": "2x2", "v6e-32": "4x8", "v6e-64": "8x8", "v6e-128": "8x16", "v6e-256": "16x16",
    "tpu7x-2": "1x1x1", "tpu7x-8": "2x2x1", "tpu7x-16": "2x2x2", "tpu7x-32": "2x2x4", "tpu7x-64": "2x4x4",
    "tpu7x-128": "4x4x4", "tpu7x-256": "4x4x8", "tpu7x-512": "4x8x8", "tpu7x-1024": "8x8x8",
}  # fmt: skip


def test_slices_equal_those_of_xpk() -> None:
    for name, (accelerator, topology, hosts) in XPK.items():
        found = machines.slice_of(name)
        assert (found.gke_accelerator, found.topology, found.hosts, found.chips_per_host) == (
            accelerator,
            topology,
            hosts,
            4,
        )
    assert {name: machines.slice_of(name).topology for name in XPK_TOPOLOGIES} == XPK_TOPOLOGIES


def test_a_slice_of_eight_chips_can_have_two_machines_of_four() -> None:
    """xpk makes v5litepod-8 and v6e-8 of two machines; the Cloud TPU API makes them of one."""
    one, two = machines.slice_of("v5litepod-8"), machines.slice_of("v5litepod-8", "ct5lp-hightpu-4t")
    assert (one.hosts, one.chips_per_host, one.machine_type) == (1, 8, "ct5lp-hightpu-8t")
    assert (two.hosts, two.chips_per_host, two.topology) == (2, 4, one.topology)


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "cores"),
    [("v2-8", 4, 1, 8), ("v2-32", 16, 4, 32), ("v3-2048", 1024, 256, 2048), ("v5e-1", 1, 1, 2)],
)
def test_a_name_counts_cores_or_chips(name: str, chips: int, hosts: int, cores: int) -> None:
    found = machines.slice_of(name)
    assert (found.chips, found.hosts, found.cores) == (chips, hosts, cores)


@pytest.mark.parametrize(
    ("name", "machine", "said"),
    [
        ("v5litepod-12", None, "no TPU slice 'v5litepod-12'"),
        ("v9-8", None, "did you mean 'v"),
        ("v6e-16", "ct6e-standard-8t", "cannot be made of ct6e-standard-8t"),
        ("v6e-8", "ct5lp-hightpu-4t", "cannot be made of ct5lp-hightpu-4t; it takes ct6e-standard-8t"),
    ],
)
def test_an_unknown_slice_is_refused_with_the_nearest(name: str, machine: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        machines.slice_of(name, machine)


@pytest.mark.parametrize(
    ("name", "topology", "hosts", "accelerator_type"),
    [
        # https://github.com/AI-Hypercomputer/xpk/blob/main/src/xpk/core/system_characteristics.py: both forms of names
        ("v5p-4x4x12", "4x4x12", 48, "v5p-384"),
        ("v5p-8x16x44", "8x16x44", 1408, "v5p-11264"),
        ("tpu7x-4x20x76", "4x20x76", 1520, "tpu7x-12160"),
        ("tpu7x-8x16x16", "8x16x16", 512, "tpu7x-4096"),
        ("tpu7x-4096", "8x16x16", 512, "tpu7x-4096"),
        ("v6e-4x8", "4x8", 8, "v6e-32"),
        ("v5e-2x4", "2x4", 1, "v5litepod-8"),
    ],
)
def test_slices_are_named_by_number_or_by_topology(name: str, topology: str, hosts: int, accelerator_type: str) -> None:
    found = machines.slice_of(name)
    assert (found.topology, found.hosts, found.accelerator_type) == (topology, hosts, accelerator_type)
    assert machines.slice_on(found.machine_type, topology) == found


@pytest.mark.parametrize("name", ["v4-3x3x3", "v5p-12x8x4", "v5p-4x4x10", "v6e-8x32", "v4-4x4", "v5e-4x4x4", "v4-x"])
def test_topologies_that_do_not_exist_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="no TPU slice"):
        machines.slice_of(name)


@pytest.mark.parametrize(
    ("generation", "zones"),
    [
        # https://docs.cloud.google.com/tpu/docs/regions-zones
        ("v6e", {"us-south1-ai1b", "asia-northeast1-b"}),
        ("tpu7x", {"us-central1-c", "us-central1-ai1a"}),
    ],
)
def test_ai_zones_are_known(generation: str, zones: set[str]) -> None:
    assert zones <= set(machines.table().tpus[generation].zones)


@pytest.mark.parametrize(
    ("machine", "gpus"),
    [
        # xpk (as above), and https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines
        ("a4x-highgpu-4g", ("NVIDIA_GB200", 4)),
        ("a4-highgpu-8g", ("NVIDIA_B200", 8)),
        ("a3-ultragpu-8g", ("NVIDIA_H200_141GB", 8)),
        ("g4-standard-192", ("NVIDIA_RTX_PRO_6000", 4)),
    ],
)
def test_machine_types_include_gpus(machine: str, gpus: tuple[str, int]) -> None:
    assert machines.gpu_of_machine(machine) == gpus


def test_gpus_have_the_names_of_the_api() -> None:
    names = google.schemas("aiplatform.v1")["GoogleCloudAiplatformV1MachineSpec"]["properties"]["acceleratorType"]
    api = {name for name in names["enum"] if name.startswith("NVIDIA")}
    known = machines.table()
    assert {name for name, gpu in known.gpus.items() if gpu.vertex} | set(known.gpus_gone) == api


def test_every_table_names_its_source() -> None:
    known = machines.table()
    assert set(known.sources) == set(type(known).model_fields) - {"sources"}
    assert all(source.url.startswith("https://") for source in known.sources.values())


def test_tables_that_were_compared_long_ago_are_reported() -> None:
    compared = max(source.checked for source in machines.table().sources.values() if source.checked)
    assert machines.outdated(compared) == []
    late = machines.outdated(compared + datetime.timedelta(days=machines.MAX_AGE + 1))
    assert {line.split()[1] for line in late} == {"tpus", "gpus", "gke_drivers", "cpus", "cpu_series", "vertex_regions"}


def test_every_slice_has_zones_and_full_machines() -> None:
    for one in machines.slices().values():
        assert one.zones
        assert one.hosts * one.chips_per_host == one.chips
        assert machines.slice_on(one.machine_type, one.topology)
        assert set(one.regions) <= {*machines.table().vertex_regions, "us-central2"}


def test_every_machine_of_a_gpu_is_known() -> None:
    for name, gpu in machines.table().gpus.items():
        for count in gpu.counts:
            machine = machines.machine_for(name, count)
            assert machine in machines.machine_types()
            assert machines.gpu_of_machine(machine) in ((name, count), None)


def test_names_of_objects_are_labels() -> None:
    assert gke_objects.object_name("My job_1!") == "my-job-1"
    with pytest.raises(UserError, match="no letter"):
        gke_objects.object_name("!!")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("task.yaml", "name: t\nnum_nodes: 2\nresources: {accelerators: 'A100:8'}\nrun: |\n  true\n",
         "task.yaml: a SkyPilot task; 'sky launch --dryrun task.yaml' checks it"),
        ("train.sbatch", "#!/bin/bash\n#SBATCH --nodes=2\nsrun true\n",
         "train.sbatch: a Slurm script; 'sbatch --test-only train.sbatch' checks it"),
        ("train.sh", "#!/bin/bash\n#SBATCH --nodes=2\nsrun true\n", "a Slurm script"),
    ],
)  # fmt: skip
def test_the_job_of_another_scheduler_is_not_judged(tmp_path: Path, name: str, content: str, said: str) -> None:
    path = written(tmp_path, content, name)
    with pytest.raises(job_file.OtherFormatError, match=said):
        job_file.load(path)
    (found,), skipped = files.check_files([path], functools.partial(files.check_file, offline=True))
    assert (found.as_dict()["passed"], said in found.as_dict()["unchecked"], skipped) == (True, True, [])


def test_a_file_with_fields_that_sky_pilot_has_not_is_no_task(tmp_path: Path) -> None:
    with pytest.raises(job_file.NotAJobError, match="not a job: its keys are run, on"):
        job_file.load(written(tmp_path, "run: x\non: y\n"))


#: What patterns could search the rest of a value for from each of its places on.
REPEATED = ["{{", "{%", "${", "$(", "__", "A_", "<a", "[a", "%a", "@a", ":", ":/", "9", "a.", "a-", "{{ a }} "]


@pytest.mark.parametrize("place", ["apiVersion", "name", "image", "gpus"])
def test_a_value_of_any_length_takes_no_time(tmp_path: Path, place: str) -> None:
    began = time.process_time()
    for part in REPEATED:
        values = dict.fromkeys(("apiVersion", "name", "image", "gpus"), "1")
        values[place] = part * (100_000 // len(part)) + "!"
        container = {"name": "c", "image": values["image"], "resources": {"limits": {"nvidia.com/gpu": values["gpus"]}}}
        job = {
            "apiVersion": f"batch/{values['apiVersion']}",
            "kind": "Job",
            "metadata": {"name": values["name"]},
            "spec": {"template": {"spec": {"containers": [container]}}},
        }
        path = tmp_path / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        with contextlib.suppress(UserError):
            files.check_file(path, offline=True)
    # 16 files took 0.7 s; one pattern in quadratic time takes 10 s for one file.
    assert time.process_time() - began < 8


def test_a_file_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # takes no space on the disk
    with pytest.raises(UserError, match=r"job\.yaml: more than 10\.0 MB, too much for a file of text"):
        files.check_file(path, offline=True)
