"""Statements about which GPUs an image runs on."""

from __future__ import annotations

import json

import pytest

from trainyard.common.errors import UserError
from trainyard.image import dockerfile, plan
from trainyard.spec import gpus, model
from trainyard.spec.gpus import DeviceCode


@pytest.mark.parametrize(
    ("capabilities", "capability", "verdict"),
    [
        ("7.5 8.0 8.6 9.0 10.0 12.0", "7.0", "no"),
        ("7.5 8.0 8.6 9.0 10.0 12.0", "7.5", "runs"),
        ("7.5 8.0 8.6 9.0 10.0 12.0", "8.9", "runs"),  # code for 8.6 runs on later GPUs of the same major
        ("7.5 8.0 8.6 9.0 10.0 12.0", "10.3", "runs"),
        ("7.5 8.0 8.6 9.0 10.0 12.0", "11.0", "no"),
        ("8.6 9.0", "8.0", "no"),  # not on earlier ones
        ("8.0 9.0+PTX", "10.0", "ptx"),
        ("8.0 9.0+PTX", "7.5", "no"),
        ("8.0+PTX 9.0", "8.9", "runs"),
    ],
)
def test_an_image_runs_on_gpus_that_its_machine_code_or_its_ptx_is_for(
    capabilities: str, capability: str, verdict: str
) -> None:
    code = DeviceCode.parse("13.2", "580", capabilities)
    assert code.verdict(capability) == verdict
    assert code.text == capabilities


@pytest.mark.parametrize("text", ["9", "9.0 sm_90", "9.0 +PTX"])
def test_what_is_no_capability_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a compute capability"):
        DeviceCode.parse("13.2", "580", text)


def test_an_image_for_gpus_has_the_same_facts_in_its_labels_and_for_the_launcher() -> None:
    spec = model.load("gpu", "amd64")
    labels, about = plan.labels(spec), json.loads(dockerfile.image_json(spec))
    for name in ("cuda", "driver", "gpus"):
        assert labels[f"io.trainyard.{name}"] == about[name]
    assert "cuda" not in json.loads(dockerfile.image_json(model.load("cpu", "amd64")))


def test_each_architecture_has_its_wheels_gpus() -> None:
    amd64, arm64 = (model.load("gpu", arch).device_code for arch in ("amd64", "arm64"))
    assert amd64 and arm64
    assert amd64.verdict(gpus.gpus()["T4"].capability) == "runs"
    assert arm64.verdict(gpus.gpus()["T4"].capability) == "no"


def test_of_a_release_for_several_versions_of_cuda_the_installed_one_counts() -> None:
    twelve, thirteen = (gpus.device_code("jax", "0.12.0", "amd64", cuda) for cuda in ("12.9.79", "13.0.1"))
    assert twelve and thirteen
    assert (twelve.cuda, thirteen.cuda) == ("12.9", "13.0")
    assert gpus.device_code("jax", "0.12.0", "amd64", "11.8.1") is gpus.device_code("torch", "9.9", "amd64") is None
