"""A study is searched within its space, and a trial's measurement is what the trainer reported."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from trainyard.common.errors import StepFailed, UserError
from trainyard_jobs.rehearsal import tuning
from trainyard_jobs.rehearsal.tuning import Search, Study
from trainyard_jobs.schema import job_file

PARAMETERS = """
      - {parameterId: lr, scaleType: UNIT_LOG_SCALE, doubleValueSpec: {minValue: 0.001, maxValue: 0.1}}
      - {parameterId: units, integerValueSpec: {minValue: "8", maxValue: "64"}}
      - {parameterId: batch, discreteValueSpec: {values: [16, 32.0]}}
      - parameterId: optimizer
        categoricalValueSpec: {values: [sgd, adam]}
        conditionalParameterSpecs:
        - parentCategoricalValues: {values: [sgd]}
          parameterSpec: {parameterId: momentum, scaleType: UNIT_REVERSE_LOG_SCALE, doubleValueSpec: {minValue: 0.5, maxValue: 0.9}}
    """  # noqa: E501


def study_of(path: Path) -> Study | None:
    return tuning.study_of(job_file.load(path))


def study(folder: Path, algorithm: str = "", parameters: str = PARAMETERS, more: str = "") -> Study:
    path = folder / "tune.yaml"
    text = f"""
    maxTrialCount: "6"
    studySpec:
      algorithm: {algorithm or "ALGORITHM_UNSPECIFIED"}
      metrics: [{{metricId: accuracy, goal: MAXIMIZE}}]
      {more}
      parameters:{parameters}
    trialJobSpec: {{workerPoolSpecs: [{{replicaCount: 1, containerSpec: {{imageUri: i}}}}]}}
    """
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    found = study_of(path)
    assert found
    return found


@pytest.mark.parametrize("algorithm", ["ALGORITHM_UNSPECIFIED", "RANDOM_SEARCH"])
def test_every_value_is_within_its_parameter(tmp_path: Path, algorithm: str) -> None:
    search = Search(study(tmp_path, algorithm))
    seen = []
    for number in range(1, 13):
        trial = search.ask()
        seen.append(trial.parameters)
        assert trial.number == number
        assert 0.001 <= float(trial.parameters["lr"]) <= 0.1
        assert 8 <= int(trial.parameters["units"]) <= 64
        assert trial.parameters["batch"] in ("16", "32")
        assert ("momentum" in trial.parameters) == (trial.parameters["optimizer"] == "sgd")
        if "momentum" in trial.parameters:
            assert 0.5 <= float(trial.parameters["momentum"]) <= 0.9
        search.tell(trial, None if number == 3 else float(trial.parameters["lr"]))
    assert len({one["lr"] for one in seen}) == 12


def test_the_same_study_is_searched_alike_each_time(tmp_path: Path) -> None:
    first, second = (Search(study(tmp_path)) for _ in range(2))
    assert [first.ask().parameters for _ in range(3)] == [second.ask().parameters for _ in range(3)]


def test_the_search_learns_from_measurements(tmp_path: Path) -> None:
    """With the goal to maximize lr itself, later trials are nearer to its upper bound than the first ones."""
    parameters = "\n      - {parameterId: lr, doubleValueSpec: {minValue: 0, maxValue: 1}}\n    "
    search = Search(study(tmp_path, parameters=parameters))
    values = []
    for _ in range(40):
        trial = search.ask()
        values.append(float(trial.parameters["lr"]))
        search.tell(trial, values[-1])
    assert sum(values[-10:]) / 10 > 0.8 > sum(values[:3]) / 3


def test_grid_search_tries_each_point_once(tmp_path: Path) -> None:
    parameters = (
        "\n      - {parameterId: a, categoricalValueSpec: {values: [u, v]}}"
        "\n      - {parameterId: b, integerValueSpec: {minValue: 1, maxValue: 3}}\n    "
    )
    search = Search(study(tmp_path, "GRID_SEARCH", parameters))
    points = []
    for _ in range(6):
        trial = search.ask()
        points.append((trial.parameters["a"], trial.parameters["b"]))
        search.tell(trial, 0.5)
    assert sorted(points) == [(a, n) for a in "uv" for n in "123"]


@pytest.mark.parametrize(("selection", "expected"), [("LAST_MEASUREMENT", 0.8), ("BEST_MEASUREMENT", 0.9), ("", 0.8)])
def test_a_trials_value_is_its_last_measurement_or_its_best(tmp_path: Path, selection: str, expected: float) -> None:
    found = study(tmp_path, more=f"measurementSelectionType: {selection or 'MEASUREMENT_SELECTION_TYPE_UNSPECIFIED'}")
    assert tuning.final(found, [(1, 0.5), (2, 0.9), (3, 0.8)]) == expected


def test_measurements_of_the_trainers_are_read() -> None:
    """Write the format of cloudml-hypertune 0.1.0.dev6: https://github.com/GoogleCloudPlatform/cloudml-hypertune."""
    reported = [("0.5", "10"), ("nan", "15"), ("0.75", "20")]
    content = "".join(
        json.dumps({"timestamp": 1.5, "trial": "3", "accuracy": value, "global_step": step, "checkpoint_path": ""})
        + "\n"
        for value, step in reported
    )
    assert tuning.measurements(content, "accuracy") == [(10, 0.5), (20, 0.75)]
    with pytest.raises(StepFailed, match=r"metric 'acuracy'; it reported accuracy \(did you mean"):
        tuning.measurements(content, "acuracy")
    with pytest.raises(StepFailed, match="did not report"):
        tuning.measurements("", "accuracy")


def test_jobs_without_a_study_have_none(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("workerPoolSpecs: []")
    assert study_of(path) is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (" []", "the study has no parameters"),
        ("\n      - {parameterId: lr}\n    ", "tune.yaml:8: parameter 'lr' has none of doubleValueSpec"),
        ("\n      - {parameterId: n, integerValueSpec: {minValue: 5, maxValue: 1}}\n    ", "minValue 5.0 is above"),
        (
            "\n      - {parameterId: lr, scaleType: UNIT_LOG_SCALE, doubleValueSpec: {minValue: 0, maxValue: 1}}\n    ",
            "UNIT_LOG_SCALE requires a minValue above 0",
        ),
    ],
)
def test_invalid_studies_are_refused_with_their_line(tmp_path: Path, parameters: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        study(tmp_path, parameters=parameters)
