"""Until when images are supported: images/matrix.yaml and what comes from it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard import cli
from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Severity
from trainyard.image import dockerfile
from trainyard.lint import waivers
from trainyard.project import check
from trainyard.release import pipelines
from trainyard.spec import matrix, model
from trainyard.spec.matrix import End
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.rules import image as rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

Result = tuple[int, str, str]


def day(text: str) -> datetime.date:
    return datetime.date.fromisoformat(text)


@pytest.mark.parametrize(
    ("framework", "version", "nvidia", "expected"),
    [
        ("torch", "2.15.0", False,
         [("2027-10-28", "torch 2.15"), ("2029-10-31", "Python 3.13"), ("2030-06-30", "base debian-13")]),
        ("torch", "2.9.1", True,
         [("2026-10-15", "torch 2.9"), ("2029-09-30", "CUDA 12"), ("2029-10-31", "Python 3.13"),
          ("2030-06-30", "base debian-13")]),
        ("tensorflow", "2.23.0.dev20261026", False, [("2029-10-31", "Python 3.13"), ("2030-06-30", "base debian-13")]),
        ("torch", "unlocked", False, [("2029-10-31", "Python 3.13"), ("2030-06-30", "base debian-13")]),
        ("other", "1", False, [("2029-10-31", "Python 3.13"), ("2030-06-30", "base debian-13")]),
    ],
)  # fmt: skip
def test_an_image_ends_with_the_first_thing_that_does(
    framework: str, version: str, nvidia: bool, expected: list[tuple[str, str]]
) -> None:
    ends = matrix.ends(framework, version, base="debian-13", python="3.13", nvidia=nvidia)
    assert ends == [End(day(when), what) for when, what in expected]


def test_makers_decide_where_they_give_a_day() -> None:
    release = matrix.Release(first="2026-01-01", python=["3.13"])  # type: ignore[arg-type]
    assert release.last == day("2027-01-01")
    given = matrix.Release(first="2026-01-01", ends="2026-06-30", python=["3.13"])  # type: ignore[arg-type]
    assert given.last == day("2026-06-30")


def test_every_set_of_gpus_that_a_release_names_is_described() -> None:
    known = matrix.matrix()
    named = {gpus for row in known.frameworks.values() for one in row.versions.values() for gpus in one.cuda.values()}
    assert named == known.gpus.keys()
    majors = {
        cuda.partition(".")[0]
        for row in known.frameworks.values()
        for one in row.versions.values()
        for cuda in one.cuda
    }
    assert majors == known.cuda.versions.keys()


def test_a_mistake_in_the_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "matrix.yaml"
    file.write_text(
        matrix.FILE.read_text(encoding="utf-8").replace("first: 2026-10-28", "first: soon"), encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"matrix\.yaml:\d+: frameworks\.torch\.versions\.2\.15\.first: 'soon' is not"):
        matrix.read(file)


def test_the_label_the_workflow_and_the_command_have_the_first_day(trainyard: Callable[..., Result]) -> None:
    spec = model.load("gpu", "amd64")
    last = f"{spec.ends[0].day}"
    assert f'io.trainyard.supported-until="{last}"' in dockerfile.dockerfile(spec)
    rows = pipelines.variables(pipelines.PUSHED, [spec])["images"]
    assert rows[0]["until"] == last
    status, out, err = trainyard("list", "--ends", "--json")
    assert status == 0 and json.loads(out)["gpu"][0] == {"day": last, "of": spec.ends[0].what}
    assert last in err


def test_a_target_past_its_end_is_a_warning_a_failure_on_request_and_may_be_waived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    xla = model.load("xla", "amd64").ends[0]
    (waiver,) = (waiver for waiver in waivers.load() if waiver.where == "xla")
    assert xla.day < waiver.expires
    assert [line for line in check.past(waiver.expires) if "images/xla/" in line] == []
    late = waiver.expires + datetime.timedelta(days=1)
    line = next(line for line in check.past(late) if "images/xla/" in line)
    assert line == (
        f"images/xla/image.yaml: torch_xla 2.9 was supported until {xla.day}: update or remove the target, or add a "
        "waiver of 'supported_until' to images/waivers.yaml"
    )
    monkeypatch.setattr(waivers, "today", lambda: late)
    assert line in check.warnings(cli.trainyard)


def test_every_version_of_the_catalogue_is_in_the_matrix(write_spec: Callable[[str], str]) -> None:
    assert check._matrix(model.catalogue()) == []
    text = (model.IMAGES / "cpu" / "image.yaml").read_text(encoding="utf-8").replace("torch==2.15.0", "torch==2.99.0")
    assert check._matrix([model.load(write_spec(text))]) == ["images/matrix.yaml: no torch 2.99.0, which mine has"]


def test_a_release_has_wheels_for_the_python_and_the_cuda_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    known = matrix.matrix()
    rows = known.frameworks["torch"].versions
    other = rows | {"2.15": rows["2.15"].model_copy(update={"python": ["3.11"], "cuda": {"12.8": "volta-blackwell"}})}
    torch = known.frameworks["torch"].model_copy(update={"versions": other})
    changed = known.model_copy(update={"frameworks": known.frameworks | {"torch": torch}})
    monkeypatch.setattr(matrix, "matrix", lambda: changed)
    assert check._matrix([model.load("gpu", "amd64")]) == [
        "images/matrix.yaml: no torch 2.15.0 for Python 3.13, which gpu has",
        "images/matrix.yaml: no torch 2.15.0 with CUDA 13, which gpu has",
    ]


def test_images_for_nvidia_have_the_least_driver_and_the_gpus() -> None:
    codes = {spec.target: spec.device_code for spec in model.catalogue()}
    code = codes["gpu-2.7"]
    assert code and (code.cuda, code.driver, code.text) == ("12.6", "525.60.13", "5.0 6.0 7.0 7.5 8.0 8.6 9.0")
    assert codes["cpu"] is codes["tf-nightly"] is None


JOB = """\
workerPoolSpecs:
- machineSpec: {machineType: n1-standard-4}
  replicaCount: 1
  containerSpec: {imageUri: localhost:5000/b:c}
"""


@pytest.mark.parametrize(("days", "named"), [(61, False), (59, True), (-500, True), (None, False)])
def test_a_job_with_an_image_that_ends_within_60_days_has_a_note(days: int | None, named: bool) -> None:
    today = datetime.datetime.now(tz=datetime.UTC).date()
    until = "" if days is None else str(today + datetime.timedelta(days=days))
    contents = Contents("localhost:5000/b:c", source="its labels", supported_until=until)
    evidence = Evidence(job_file.parse(JOB, Path("job.yaml")), images={contents.reference: contents})
    findings = rules.images_are_supported(evidence)
    said = f"localhost:5000/b:c is supported until {until} (by its labels)"
    assert [(finding.what, finding.severity) for finding in findings] == ([(said, Severity.NOTE)] if named else [])
