"""What `job check` is given is named: kinds, templates, keys that are written twice, jobs that others check."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.unit.corpus import kinds as corpus
from tests.unit.corpus.case import Document, dumped
from tests.unit.test_corpus import VALID

from trainyard.common import console
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard_jobs import platforms
from trainyard_jobs.check import files, placeholders
from trainyard_jobs.check.placeholders import TemplateError
from trainyard_jobs.schema import job_file, kinds, kubernetes

Command = Callable[..., tuple[int, str, str]]

JOB = dumped(corpus.job())
TASK = "resources: {accelerators: 'A100:8'}\n"


def written(folder: Path, content: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


# --- templates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(corpus.TEMPLATES)))
def test_a_template_says_first_what_to_fill_in_and_where(tmp_path: Path, number: int) -> None:
    text, what = corpus.TEMPLATES[number]
    line = 1 + text[: text.index(what)].count("\n")
    path = written(tmp_path, text)
    with pytest.raises(TemplateError) as error:
        files.check_file(path, offline=True)
    said = re.sub(r"\s", "", str(error.value))
    assert said.startswith(re.sub(r"\s", "", f"{path}:{line}: a template: fill in {what} at line {line}"))


def test_no_valid_job_of_the_corpora_is_a_template() -> None:
    found = {one.name: list(placeholders.in_job(job_file.parse(one.text, Path("job.yaml")))) for one in VALID}
    assert {name: places for name, places in found.items() if places} == {}
    assert len(found) > 300


def test_a_template_names_three_of_its_places(tmp_path: Path) -> None:
    (text,) = (text for text, what in corpus.TEMPLATES if what == "${JOB_NAME}")
    text = text.replace("name: main", "name: ${A}").replace(corpus.IMAGE, "${B}/${JOB_NAME}").replace("data", "${C}")
    with pytest.raises(
        TemplateError, match=r"\$\{JOB_NAME\} at line 4, \$\{A\} at line 9, \$\{B\} at line 10 and 1 more"
    ):
        files.check_file(written(tmp_path, text), offline=True)


def test_a_mistake_of_yaml_beside_tags_of_a_program_is_no_template(tmp_path: Path) -> None:
    text = JOB.replace("name: main", "name: main\n        args: [--format, 'x{{.ID}}']\n        tty: [true")
    with pytest.raises(UserError, match="not valid YAML") as error:
        files.check_file(written(tmp_path, text), offline=True)
    assert not isinstance(error.value, TemplateError)


def test_templates_of_a_folder_are_counted_and_not_checked(tmp_path: Path, trainyard: Command) -> None:
    for number in range(7):
        written(tmp_path, corpus.TEMPLATES[number][0], f"{number}.yaml")
    status, _, err = trainyard("job", "check", str(tmp_path), "--offline")
    assert status == 0, err
    assert "templates, not checked: 7 (" in err
    assert "a template" not in err
    assert trainyard("job", "check", str(tmp_path / "0.yaml"), "--offline")[0] == 2


def test_a_template_of_a_folder_fails_where_signatures_are_demanded(tmp_path: Path) -> None:
    """Otherwise, a placeholder in a second document would hide the image of the first."""
    written(tmp_path, JOB + "---\napiVersion: v1\nkind: Service\nmetadata: {name: <X>}\n")
    check = functools.partial(files.check_file, offline=True, unsigned=lambda _: "it has no signature")
    (found,), _ = files.check_files([tmp_path], check, signed=True)
    assert "a template: fill in <X>" in found.error


# --- kinds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\n", "MPIJob of kubeflow.org/v2beta1: not checked; "),
        ("apiVersion: apps/v1\nkind: Deployment\n---\napiVersion: v1\nkind: Service\n",
         "Deployment of apps/v1, Service of v1: not checked"),
        ("apiVersion: batch.volcano.sh/v1alpha1\nkind: Job\n", "Job of batch.volcano.sh/v1alpha1: not checked"),
        ("apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Service}]\n", "Service of v1: not checked"),
        ("apiVersion: v1\nkind: List\nitems: []\n", "empty"),
        ("apiVersion: v1\nkind: List\nitems: [a]\n", "expected 'key: value' pairs"),
        (f"apiVersion: a/v1\nkind: {'K' * 300}\n", f"{'K' * 60} of a/v1: not checked"),
        ('apiVersion: a/v1\nkind: "a\\nb"\n', r"a\nb of a/v1: not checked"),
    ],
)  # fmt: skip
def test_a_kind_that_is_not_checked_is_named(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(job_file.NotAJobError) as error:
        job_file.load(written(tmp_path, content))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "not a job" not in str(error.value)


@pytest.mark.parametrize("kind", ["K" * 300, "../../etc/passwd", "a/b", "Job\n", "", "Jöb"])
def test_only_names_of_letters_and_digits_are_looked_up(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def asked(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(kubernetes, "_schema", asked)
    kubernetes._validator.cache_clear()
    assert kubernetes._validator(kind, "v1") is None


def test_an_object_of_a_long_kind_beside_a_job_is_a_note(tmp_path: Path) -> None:
    text = JOB + f"---\napiVersion: a.example/v1\nkind: {'K' * 300}\nmetadata: {{name: x}}\n"
    found = files.check_file(written(tmp_path, text), offline=True)[1]
    assert [(one.what, one.fails) for one in found] == [(f"{'K' * 60} of a.example/v1 is not checked", False)]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (corpus.group(corpus.pod()), "LeaderWorkerSet of leaderworkerset.x-k8s.io/v1: only its pods are checked"),
        (corpus.ray(corpus.pod()), "RayJob of ray.io/v1: only its pods are checked"),
        (corpus.pathways(corpus.pod()), "PathwaysJob of pathways-job.pathways.domain/v1: only its pods are checked"),
    ],
)
def test_of_a_custom_resource_it_is_said_that_only_pods_are_checked(
    tmp_path: Path, document: Document, said: str
) -> None:
    found = files.check_file(written(tmp_path, dumped(document)), offline=True)[1]
    assert [(one.what, one.fails) for one in found] == [(said, False)]


def test_a_finding_in_a_list_and_in_a_custom_resource_has_its_line(tmp_path: Path) -> None:
    wrong = {"containers": [{"name": "main", "image": "a", "comand": ["x"]}]}
    for document in (
        {"apiVersion": "v1", "kind": "List", "items": [corpus.job(), corpus.thing("Pod", "v1", wrong)]},
        corpus.ray(wrong),
    ):
        text = dumped(document)
        line = 1 + text[: text.index("comand")].count("\n")
        found = files.check_file(written(tmp_path, text), offline=True)[1]
        assert [one.where.rpartition(":")[2] for one in found if "comand" in one.what] == [str(line)]


@pytest.mark.parametrize("document", [corpus.cron(), corpus.thing("Pod", "v1", corpus.pod()), corpus.ray(corpus.pod())])
def test_what_cannot_be_rehearsed_is_refused_by_its_kind(tmp_path: Path, document: Document) -> None:
    job = job_file.load(written(tmp_path, dumped(document)))
    said = f"{document['kind']} of {document['apiVersion']} cannot be rehearsed, only a Job, JobSet, TrainJob"
    with pytest.raises(UserError, match=said):
        platforms.of_job_file(job).rehearse(job)


def test_the_page_says_of_every_kind_what_is_checked() -> None:
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    for name, kind in kinds.KINDS.items():
        assert f"| {name} | `{kind.group or 'v1'}` | {kind.checked} |" in page


# --- jobs that other programs check ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("task.yaml", "workdir: .\nsetup: pip install x\n" + TASK, "a SkyPilot task"),
        ("task.yaml", "experimental: {config_overrides: {}}\nrun: x\n" + TASK, "a SkyPilot task"),
        ("task.yaml", "service: {replicas: 2, readiness_probe: /}\nrun: x\n" + TASK, "a SkyPilot task"),
        ("task.yaml", f"name: pipeline\n---\n{TASK}---\n{TASK}", "a SkyPilot task"),
        ("group.yaml", f"name: g\nexecution: parallel\n---\nname: a\n{TASK}", "a SkyPilot task"),
        ("example.sub", "#!/bin/bash\n\n#SBATCH -N 2\nsrun x\n", "a Slurm script; 'sbatch --test-only example.sub'"),
        ("train", "#!/bin/sh\n#SBATCH\t-N 2\n", "a Slurm script"),
        ("job.sh", "#!/bin/sh\ngcloud compute tpus tpu-vm create x\n", "a script for Cloud TPU VMs; 'bash -n"),
    ],
)  # fmt: skip
def test_a_job_that_another_program_checks_is_named_and_passes(
    tmp_path: Path, trainyard: Command, name: str, content: str, said: str
) -> None:
    path = written(tmp_path, content, name)
    status, _, err = trainyard("job", "check", str(path))
    assert (status, said in err) == (0, True), err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.yaml", "name: x\nenvs: {A: b}\n", "not a job"),
        ("a.yaml", "setup: x\nsteps: []\n", "not a job"),
        ("a.sh", "#!/bin/sh\necho '#SBATCH'\n", "a shell script: job files are YAML or JSON"),
    ],
)
def test_what_only_resembles_such_a_job_is_refused(tmp_path: Path, name: str, content: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        job_file.load(written(tmp_path, content, name))
    assert not isinstance(error.value, job_file.OtherFormatError)


def test_a_job_whose_comments_are_those_of_a_slurm_script_is_checked(tmp_path: Path) -> None:
    """Otherwise, its images would need no signature."""
    path = written(tmp_path, "#!/bin/sh\n#SBATCH -N 2\n" + JOB)
    assert job_file.load(path).kind == "gke"


def test_the_script_that_job_writes_for_tpu_vms_passes(tmp_path: Path, trainyard: Command) -> None:
    status, out, err = trainyard(
        "job", "xla", "--platform", "tpu-vm", "--accelerator", "v5litepod-16", "--registry", "pkg.dev/p"
    )
    assert status == 0, err
    status, _, err = trainyard("job", "check", str(written(tmp_path, out, "job.sh")))
    assert (status, "not checked" in err) == (0, True)


# --- keys that are written twice -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (JOB.replace("restartPolicy: Never", "restartPolicy: Always\n      restartPolicy: Never"),
         [("keys_are_unique", "11", "'restartPolicy' is written twice", "kubectl reads that of line 12")]),
        ("workerPoolSpecs:\n- replicaCount: 1\n  replicaCount: [x]\n  machineSpec: {machineType: n1-standard-8}\n"
         f"  containerSpec: {{imageUri: {corpus.IMAGE}}}\n",
         [("keys_are_unique", "3", "'replicaCount' is written twice", "gcloud reads that of line 2")]),
    ],
)  # fmt: skip
def test_a_key_that_is_written_twice_is_a_note_about_the_one_that_is_not_read(
    tmp_path: Path, content: str, said: list[tuple[str, str, str, str]]
) -> None:
    found = files.check_file(written(tmp_path, content), offline=True)[1]
    assert [(one.rule, one.where.rpartition(":")[2], one.what, one.why.partition(",")[0]) for one in found] == said
    assert not any(one.fails for one in found)


def test_merge_keys_and_keys_of_two_mappings_are_not_written_twice(tmp_path: Path) -> None:
    text = "x: &x {a: 1}\ny: {<<: *x, a: 2}\n" + "workerPoolSpecs: []\n"
    assert job_file.load(written(tmp_path, text)).repeated == ()


# --- messages --------------------------------------------------------------------------------------------------------


def test_text_of_users_is_shown_as_it_is_on_a_terminal() -> None:
    """Line 100 of a file is no picture."""
    terminal = console.terminal.__wrapped__()
    shown = io.StringIO()
    terminal.file = shown
    text = "a.yaml:100: the job is named 'a:cat:b' [red]x[/red]"
    terminal.print(text)
    assert shown.getvalue() == f"{text}\n"


def test_consoles_that_show_text_of_users_have_no_emoji() -> None:
    """Every console of the packages: its constructor turns emoji off."""
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        for call in re.findall(r"\bConsole\((?=\w)[^\n]*\)", path.read_text(encoding="utf-8")):
            assert "emoji=False" in call, path
    shown = io.StringIO()
    Console(file=shown, emoji=False).print("job.yaml:100:")
    assert ":100:" in shown.getvalue()


def test_a_slice_is_not_told_to_use_a_second_pool(tmp_path: Path) -> None:
    pool = "{machineSpec: {machineType: MACHINE}, replicaCount: 4, containerSpec: {imageUri: " + corpus.IMAGE + "}}"
    for machine, second in (("ct5lp-hightpu-4t, tpuTopology: 4x4", False), ("n1-standard-8", True)):
        text = f"workerPoolSpecs: [{pool.replace('MACHINE', machine)}]\n"
        found = files.check_file(written(tmp_path, text), offline=True)[1]
        (fix,) = (one.remediation for one in found if "replicas in the first pool" in one.what)
        assert ("second pool" in fix) == second
