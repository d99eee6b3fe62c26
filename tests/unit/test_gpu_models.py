"""Statements about which GPUs an image runs on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainyard.common.errors import UserError
from trainyard.image import facts, recipes
from trainyard.spec import gpus, matrix, model
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
    labels, about = facts.labels(spec), recipes.make(spec).accelerator
    assert (about.cuda, about.driver, about.gpus) == tuple(
        labels[f"io.trainyard.{name}"] for name in ("cuda", "driver", "gpus")
    )
    assert not recipes.make(model.load("cpu", "amd64")).accelerator.cuda


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


@pytest.mark.parametrize(
    ("capability", "driver", "says"),
    [
        ("7.0", "580.65.06", "it has no code for compute capability 7.0, only for 7.5 9.0 12.0+PTX"),
        ("7.5", "", ""),
        ("7.5", "470.82.01", "driver 470.82.01 is older than 580.65.06, which CUDA 13 needs"),
        ("7.5", "580.65.05", "driver 580.65.05 is older than 580.65.06, which CUDA 13 needs"),
        ("7.5", "580.65.06", ""),
        ("7.5", "580", ""),  # a branch: it may be recent enough
        ("7.5", "620.11", ""),
        ("12.9", "595.45.03", "driver 595.45.03 is older than 595.45.04, which compiles PTX of CUDA 13.2"),
        ("12.9", "595.45.04", ""),
        ("15.0", "580.95.05", "driver 580.95.05 is older than 595.45.04, which compiles PTX of CUDA 13.2"),
    ],
)
def test_an_image_runs_with_a_driver_that_is_recent_enough(capability: str, driver: str, says: str) -> None:
    code = DeviceCode("13.2", "580.65.06", ("7.5", "9.0", "12.0"), ("12.0",))
    problem = code.problem(capability, driver)
    if capability == "12.9":  # machine code for 12.0 runs there without a compiler
        assert problem == ""
        code = DeviceCode("13.2", "580.65.06", ("7.5",), ("12.0",))
        problem = code.problem(capability, driver)
    assert problem == says


@pytest.mark.parametrize(
    ("gpu", "driver", "says"),
    [
        ("B200", "560.35.03", "driver 560.35.03 does not know GPUs of compute capability 10.0: 570 is the first"),
        ("GB300", "570.133.20", "driver 570.133.20 does not know GPUs of compute capability 10.3: 575 is the first"),
        ("V100", "595.71.05", "driver 595.71.05 no longer knows GPUs of compute capability 7.0: 580 is the last"),
        ("V100", "580.126.20", ""),
        ("T4", "620.10", ""),
    ],
)
def test_a_driver_knows_some_gpus(gpu: str, driver: str, says: str) -> None:
    code = DeviceCode.parse("12.8", "525.60.13", "7.0 7.5 10.0")
    assert code.problem(gpus.gpus()[gpu].capability, driver) == says


def test_number_formats_follow_from_the_compute_capability() -> None:
    has = {name: [what for what in ("fp16", "bf16", "fp8") if gpu.has(what)] for name, gpu in gpus.gpus().items()}
    assert has["P100"] == []
    assert has["V100"] == has["T4"] == ["fp16"]
    assert has["A100"] == has["A10"] == ["fp16", "bf16"]
    assert has["L4"] == has["H100"] == has["GB300"] == ["fp16", "bf16", "fp8"]
    assert not gpus.gpus()["P100"].has("triton")
    assert gpus.gpus()["V100"].has("triton")


def test_drivers_that_compile_ptx_are_known_for_each_cuda_of_the_matrix() -> None:
    known = matrix.matrix()
    used = {cuda for of in known.frameworks.values() for row in of.versions.values() for cuda in row.cuda}
    assert used <= set(known.cuda.ptx)
    assert list(known.cuda.ptx.values()) == sorted(known.cuda.ptx.values())


def test_an_image_needs_the_driver_of_its_cuda_its_gpu_and_its_ptx() -> None:
    models = gpus.gpus()
    code = DeviceCode.parse("12.9", "525.60.13", "7.0 9.0+PTX")
    assert code.drivers(models["V100"]) == ("525.60.13", "580")
    assert code.drivers(models["B200"]) == ("575.51.03", None)  # CUDA 12.9 compiles the PTX; 570 knows the GPU
    assert code.drivers(models["P100"]) is None
    newer = DeviceCode.parse("13.2", "595.45.04", "7.0")
    assert newer.drivers(models["V100"]) is None  # no driver is new enough and knows it


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("arm64: [GH200", "arm64: [GH100", "'arm64' names GH100, which 'gpus' does not have"),
        ('  T4: "7.5"', '  T4: "7.6"', "no row of 'capabilities' for 7.6"),
        ('  T4: "7.5"', '  T4: "75"', "gpus.yaml"),
    ],
)
def test_a_mistake_in_the_table_of_gpus_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = gpus.FILE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "gpus.yaml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(words)):
        gpus.read(tmp_path / "gpus.yaml")
