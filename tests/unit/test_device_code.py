"""Statements about the code for GPUs that an image's files have, and about what its label promises of it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests import locks
from tests.unit.test_verify import SITE, TORCH_CUDA, Change, good, with_label, with_library, with_package, with_ptxas
from tests.workspaces import lock, render

from trainyard.common.rule_engine import Finding
from trainyard.image import facts
from trainyard.lint.image import core as rules
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import probe
from trainyard.spec import gpus
from trainyard.spec.gpus import DeviceCode
from trainyard.spec.model import load

#: Flags of an entry's header: compressed, as NVIDIA's compilers have it, and the variants sm_90a and sm_100f.
PLAIN, SPECIFIC, FAMILY = 0x8011, 0x108011, 0x1208011


def entry(kind: int, number: int, flags: int = PLAIN, header: int = 64, payload: bytes = b"x" * 24) -> bytes:
    """Code for an architecture: ``kind`` is 1 for PTX, 2 for machine code; ``number`` is 90 for sm_90."""
    fields = struct.pack("<HHIQIIHHIIIQ", kind, 0x101, header, len(payload), len(payload), 0, 8, 1, number, 0, 0, flags)
    return fields.ljust(header, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*containers: bytes, section: str = ".nv_fatbin") -> bytes:
    """A 64-bit ELF file that has a section with containers, after 128 bytes of another."""
    names = b"\0.text\0" + section.encode() + b"\0.shstrtab\0"
    content, at = b"".join(containers), 64 + 128
    rows = [
        (0, 0, 0, 0),
        (1, 1, 64, 128),
        (7, 1, at, len(content)),
        (8 + len(section), 3, at + len(content), len(names)),
    ]
    table = b"".join(struct.pack("<IIQQQQ24x", name, kind, 0, 0, where, size) for name, kind, where, size in rows)
    position = at + len(content) + len(names)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, position, 0, 64, 0, 0, 64, 4, 3
    )
    return head + bytes(128) + content + names + table


def read(tmp_path: Path, data: bytes) -> dict[str, list[str]]:
    path = tmp_path / "lib.so"
    path.write_bytes(data)
    return probe.architectures(str(path))


def test_the_probe_reads_machine_code_and_ptx_of_every_container(tmp_path: Path) -> None:
    first = container(entry(2, 75), entry(2, 100, header=112, payload=b"y" * 8000), entry(1, 120, header=80))
    second = container(entry(2, 90, SPECIFIC), entry(2, 100, FAMILY, header=104), entry(2, 80, payload=b""))
    data = library(first, bytes(40), second)
    assert read(tmp_path, data) == {"code": ["10.0", "10.0f", "7.5", "8.0", "9.0a"], "ptx": ["12.0"]}
    assert read(tmp_path, library(first, section="__nv_relfatbin"))["ptx"] == ["12.0"]
    assert read(tmp_path, library(first, section=".rodata")) == {"code": [], "ptx": []}


def test_what_looks_like_a_container_inside_code_is_not_read(tmp_path: Path) -> None:
    hidden = container(entry(2, 50))
    assert read(tmp_path, library(container(entry(2, 90, payload=hidden))))["code"] == ["9.0"]


def test_a_file_that_is_cut_off_or_of_another_format_is_left_out(tmp_path: Path) -> None:
    whole = library(container(entry(2, 90), entry(1, 90)))
    for size in range(0, len(whole), 7):
        (tmp_path / f"lib{size}.so").write_bytes(whole[:size])
    (tmp_path / "odd.so.1").write_bytes(whole[:64] + b"\xff" * 400)
    (tmp_path / "text.so").write_text("INPUT(libc.so.6)")
    (tmp_path / "link.so").symlink_to("whole.so.2")
    (tmp_path / "gone.so").symlink_to("nowhere")
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "whole.so.2").write_bytes(whole)
    assert probe.device_code(["", str(tmp_path), "/nonexistent"])["libraries"] == {
        str(tmp_path / "whole.so.2"): {"code": ["9.0"], "ptx": ["9.0"]}
    }


@pytest.mark.parametrize("place", [4, 8])
def test_lengths_beyond_the_file_end_the_reading(tmp_path: Path, place: int) -> None:
    data = bytearray(library(container(entry(2, 90), entry(2, 80))))
    at = 64 + 128 + 16 + place
    data[at : at + 4] = b"\xff\xff\xff\x7f"
    assert read(tmp_path, bytes(data))["code"] == ["9.0"]
    data[64 + 128 + 16 + 4 : 64 + 128 + 16 + 8] = bytes(4)  # a header of no bytes: nothing after it is known
    assert read(tmp_path, bytes(data))["code"] == []


def test_the_probe_names_the_package_and_the_release_of_ptxas(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/lib.so").write_bytes(library(container(entry(2, 90))))
    (tmp_path / "lib.so").write_bytes(library(container(entry(2, 80))))
    (tmp_path / "bin/ptxas").write_bytes(
        b"\x7fELF" + bytes(99) + b"Cuda compilation tools, release %s, V%s\0" + b"12.9, x"
    )
    (tmp_path / "bin/ptxas-blackwell").write_bytes(b"\0Cuda compilation tools, release 13.4, V13.4.59\0")
    (tmp_path / "bin/ptxas.py").touch()
    information = tmp_path / "my_kernels-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Name: my-kernels\nVersion: 1\n")
    (information / "RECORD").write_text("bin/lib.so,sha256=x,10\n")
    code = probe.device_code([str(tmp_path)])
    assert code["libraries"][str(tmp_path / "bin/lib.so")]["package"] == "my-kernels"
    assert "package" not in code["libraries"][str(tmp_path / "lib.so")]
    assert code["ptxas"][str(tmp_path / "bin/ptxas-blackwell")] == "13.4"


def check(target: str, rule: str, *changes: Change) -> list[Finding]:
    return findings(good(target), rule, *changes)


def findings(image: Evidence, rule: str, *changes: Change) -> list[Finding]:
    for change in changes:
        image = change(image)
    return rules.check(image)[rule]


#: Library -> package, machine code and PTX, as read in wheels on 2026-11-25 (docs/gpus.md).
READ = {
    "gpu": [
        ("torch/lib/libtorch_cuda.so", "torch", "7.5 8.0 8.6 8.9 9.0 9.0a 10.0 10.0a 10.3f 12.0 12.0a 12.1a", ""),
        ("torch/lib/libtorch_cuda_linalg.so", "torch", "7.5 8.0 8.6 9.0 10.0 12.0", ""),
        ("torchvision/_C_stable.so", "torchvision", "7.5 8.0 8.6 9.0 10.0 12.0", "12.0"),
        ("nvidia/cudnn/lib/libcudnn_ops.so.9", "nvidia-cudnn-cu13", "7.5 8.0 9.0a 10.0f 12.0f 12.1", "12.1"),
        ("nvidia/nccl/lib/libnccl.so.2", "nvidia-nccl-cu13", "7.5 8.0 9.0 10.0 10.0f 11.0 12.0", "12.0"),
        ("nvidia/cu13/lib/libcufft.so.12", "nvidia-cufft", "7.5", ""),
    ],
    "gpu-2.7": [
        ("torch/lib/libtorch_cuda.so", "torch", "5.0 6.0 7.0 7.5 8.0 8.6 8.9 9.0 9.0a", ""),
        ("torch/lib/libtorch_cuda_linalg.so", "torch", "5.0 6.0 7.0 8.0 8.6 9.0", ""),
        ("nvidia/cudnn/lib/libcudnn_ops.so.9", "nvidia-cudnn-cu12", "5.0 6.0 6.1 7.0 7.5 8.0 8.6 9.0", "9.0"),
    ],
    "tf-gpu": [
        ("tensorflow/libtensorflow_cc.so.2", "tensorflow", "6.0 7.0 8.0 8.9 9.0", "9.0"),
        ("nvidia/cudnn/lib/libcudnn_ops.so.9", "nvidia-cudnn-cu12", "7.5 8.0 9.0a 10.0f 12.0f", ""),
    ],
}


@pytest.mark.parametrize("target", READ)
def test_the_wheels_of_the_catalogue_have_code_for_what_their_labels_promise(target: str) -> None:
    changes = [with_library(f"{SITE}/{path}", *about) for path, *about in READ[target]]
    image = good(target)
    for change in [*changes, with_ptxas("12.9")]:
        image = change(image)
    assert [str(finding) for some in rules.check(image).values() for finding in some] == []


def test_a_framework_needs_code_for_a_gpu_in_one_of_its_libraries() -> None:
    other = with_library(f"{SITE}/torch/lib/libtorch_nvshmem.so", "torch", "9.0")
    whole = with_library(TORCH_CUDA, "torch", "7.5 8.0 9.0 10.0 12.0")
    assert not check("gpu", "framework_has_code_for_its_gpus", whole, other)
    assert check("gpu", "framework_has_code_for_its_gpus", other)


def test_what_an_image_of_an_unknown_release_has_is_a_note() -> None:
    changes = (with_label("io.trainyard.gpus", ""), with_library(TORCH_CUDA, "torch", "9.0 10.0a", "12.0"))
    (finding,) = check("gpu", "framework_has_code_for_its_gpus", *changes)
    assert not finding.fails
    assert str(finding) == "package torch: has machine code for 9.0 10.0a, PTX for 12.0"


@pytest.mark.parametrize("rule", ["framework_has_code_for_its_gpus", "extensions_have_code_for_their_gpus"])
def test_images_for_no_gpu_may_have_any_device_code(rule: str) -> None:
    """From the default index, torch has CUDA."""
    changes = (
        with_library(TORCH_CUDA, "torch", "9.0"),
        with_library(f"{SITE}/mine.so", "mine", "9.0"),
        with_ptxas("99.0"),
    )
    assert not check("cpu", rule, *changes)
    assert not check("cpu", "wheels_are_of_one_cuda", with_package("nvidia-nccl-cu12", "2.26.2"))


def test_a_library_of_a_wheel_with_less_code_is_a_note() -> None:
    sparse = with_library(f"{SITE}/cusparselt/lib/libcusparseLt.so.0", "nvidia-cusparselt-cu12", "8.0 8.6 9.0a", "9.0")
    (finding,) = check("gpu-2.7", "extensions_have_code_for_their_gpus", sparse)
    assert not finding.fails
    assert str(finding).startswith(
        "cusparselt/lib/libcusparseLt.so.0: of nvidia-cusparselt-cu12 has no code for 5.0 6.0 7.0 7.5, which"
    )


def test_wheels_of_another_cuda_that_share_no_file_are_a_note() -> None:
    (finding,) = check("gpu", "wheels_are_of_one_cuda", with_package("nvidia-cuda-runtime-cu12", "12.9.79"))
    assert not finding.fails
    assert "12.9.79 is for CUDA 12" in str(finding)


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that compiles an extension."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / "train.py").touch()
    return folder


def written(folder: Path, environment: str) -> str:
    text = f"extends: gpu\nrun: python train.py\nbuild:\n  sources: [torchsort==0.1.9]\n  environment: {environment}\n"
    (folder / "trainyard.yaml").write_text(text, encoding="utf-8")
    lock(load(str(folder)), locks.pin("torchsort==0.1.9", "compiled"))
    render(load(str(folder)))
    return str(folder)


SORT = f"{SITE}/torchsort/isotonic_cuda.so"


def test_an_extension_with_too_few_architectures_names_the_variable_and_what_is_missing(extension: Path) -> None:
    image = good(written(extension, "{MAX_JOBS: '2'}"))
    compiled = with_library(SORT, "torchsort", "8.0", "8.0")
    assert not findings(image, "extensions_have_code_for_their_gpus", with_library(SORT, "torchsort", "7.5", "7.5"))
    (finding,) = findings(image, "extensions_have_code_for_their_gpus", compiled)
    assert finding.fails
    assert str(finding) == "torchsort/isotonic_cuda.so: of torchsort has no code for 7.5, which the image promises"
    assert "set TORCH_CUDA_ARCH_LIST to '7.5;8.0;8.6;9.0;10.0;12.0'" in finding.remediation


def test_an_image_promises_the_gpus_that_its_extensions_are_compiled_for(extension: Path) -> None:
    folder = written(extension, "{TORCH_CUDA_ARCH_LIST: '8.0;9.0'}")
    assert facts.labels(load(folder))["io.trainyard.gpus"] == "8.0 8.6 9.0"
    image = good(folder)
    assert not findings(image, "extensions_have_code_for_their_gpus", with_library(SORT, "torchsort", "8.0 9.0"))
    (finding,) = findings(image, "extensions_have_code_for_their_gpus", with_library(SORT, "torchsort", "9.0"))
    assert "has no code for 8.0 8.6" in str(finding)


@pytest.mark.parametrize(
    ("text", "capabilities"),
    [("8.0;9.0", "8.0 9.0"), ("8.0, 9.0+PTX", "8.0 9.0+PTX"), ("9.0a 10.0f", "9.0 10.0"), ("Ampere", ""), ("", "")],
)
def test_the_list_of_architectures_is_read_as_torch_reads_it(text: str, capabilities: str) -> None:
    code = gpus.for_arch_list(text)
    assert (code.text if code else "") == capabilities


@pytest.mark.parametrize(
    ("code", "ptx", "missing"),
    [
        ("7.5 8.0 9.0 12.0", "", "10.0"),
        ("8.0 9.0 12.0", "7.5", ""),
        ("7.5 8.0 9.0a 10.0f 12.0a", "", ""),  # each runs on the capability that it is for
        ("7.5 8.0 9.0a", "9.0a", "10.0 12.0"),  # PTX of a variant is for no other GPU
        ("", "", "7.5 9.0 10.0 12.0"),
    ],
)
def test_what_code_does_not_run_on_is_missing(code: str, ptx: str, missing: str) -> None:
    promised = DeviceCode("13.2", "580.65.06", ("7.5", "9.0", "10.0", "12.0"))
    assert promised.missing(code.split(), ptx.split()) == missing.split()


def test_cudnn_may_have_less_code_than_the_framework() -> None:
    older, newer = (
        gpus.device_code("tensorflow", "2.21.0", "amd64", "12.9", cudnn) for cudnn in ("9.10.2.21", "9.11.0")
    )
    assert older and newer
    assert (older.text, newer.text) == ("6.0 7.0 8.0 8.9 9.0+PTX", "7.5 8.0 8.9 9.0+PTX")
