"""The reason of a failed compilation; the texts are what uv 0.13.8 and BuildKit printed, shortened."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from trainyard.common.settings import ROOT
from trainyard.image import buildx

UV = """
error: Failed to build `fast==2.0`
  cause: The build backend returned an error
  cause: Call to `setuptools.build_meta:__legacy__.build_wheel` failed (exit status: 1)

         [stdout]
         running build_ext
         gcc -Wall -fPIC -c fast.c -o build/temp.linux-x86_64-cpython-311/fast.o

         [stderr]
{errors}

hint: {hint}
"""
HINT = "Build failures usually indicate a problem with the package or the build environment"

NO_COMPILER = "error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory"
NO_HEADER = """\
fast.c:2:10: fatal error: jpeglib.h: No such file or directory
    2 | #include <jpeglib.h>
      |          ^~~~~~~~~~~
compilation terminated.
error: command '/usr/bin/gcc' failed with exit code 1"""
NO_MODULE = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
ModuleNotFoundError: No module named 'ninja'"""
SETUP_REQUIRES = (
    "cause: Because numpy was not found in the provided package locations and you require numpy, we can conclude that "
    "your requirements are unsatisfiable."
)
NO_PROGRAM = "FileNotFoundError: [Errno 2] No such file or directory: 'cmake'"
NOT_C = """\
fast.c:2:9: error: 'y' undeclared here (not in a function)
error: command '/usr/bin/gcc' failed with exit code 1"""
EXCEPTION = """\
Traceback (most recent call last):
ValueError: Unknown CUDA arch (3.0) or GPU not supported"""

#: What torch.utils.cpp_extension of torch 2.15.0, ninja and nvcc 13.2 print.
NO_COMPILER_FOR_NINJA = """\
/bin/sh: 1: c++: not found
ninja: build stopped: subcommand failed.
subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.
RuntimeError: Error compiling objects for extension"""
NO_CUDA_HOME = """\
Traceback (most recent call last):
OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."""
NO_NVCC = "error: nvcc not found at '/usr/local/cuda/bin/nvcc'. Ensure CUDA path '/usr/local/cuda' is correct."
NO_NVCC_PROGRAM = "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'"
NO_CUDA_HEADER = "fast.cpp:2:10: fatal error: cuda_runtime.h: No such file or directory"
NO_GPU = """\
  File "/opt/venv/lib/python3.11/site-packages/torch/utils/cpp_extension.py", line 2517, in _get_cuda_arch_flags
    arch_list[-1] += '+PTX'
    ~~~~~~~~~^^^^
IndexError: list index out of range"""
OLD_GPU = """\
nvcc fatal   : Unsupported gpu architecture 'compute_70'
ninja: build stopped: subcommand failed.
RuntimeError: Error compiling objects for extension"""
MIXED_VERSIONS = """\
ptxas /tmp/tmpxft_0000003c_00000000-6_kernel.ptx, line 9; fatal   : Unsupported .version 9.5; current version is '9.2'
ptxas fatal   : Ptx assembly aborted due to errors
RuntimeError: Error compiling objects for extension"""
NOT_CUDA = """\
FAILED: /tmp/.tmpBNdHjn/sdists-v10/index/96418f91/fast/2.0/GB15KvWS/src/build/temp/fast/kernel.o
/tmp/.tmpBNdHjn/sdists-v10/index/96418f91/fast/2.0/GB15KvWS/src/fast/kernel.cu(5): error: identifier "y" is undefined
1 error detected in the compilation of "/tmp/.tmpBNdHjn/sdists-v10/index/96418f91/fast/2.0/GB15KvWS/src/fast/kernel.cu".
RuntimeError: Error compiling objects for extension"""
OUT_OF_MEMORY = """\
c++: fatal error: Killed signal terminated program cc1plus
compilation terminated.
RuntimeError: Error compiling objects for extension"""
OUT_OF_MEMORY_OF_NVCC = "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"

CUDA = (
    "it compiles CUDA code: extend a target with CUDA, and add nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm, of "
    "the same version as nvidia-cuda-runtime in pylock.trainyard.toml, to 'requires' under 'build:'"
)
MEMORY = (
    "its compiler ran out of memory: set MAX_JOBS, such as '1', in 'environment' under 'build:', or give the engine "
    "more memory"
)


def output(errors: str, hint: str = HINT) -> list[str]:
    return UV.format(errors=textwrap.indent(errors, " " * 9), hint=hint).splitlines()


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (NO_COMPILER, "there is no compiler 'x86_64-linux-gnu-gcc': add g++ to 'packages' under 'build:'"),
        (NO_HEADER,
         "there is no header 'jpeglib.h': add the Debian package that has it to 'packages' under 'build:'"),
        (NO_MODULE, "its build imports 'ninja' and does not declare it: add the package that has it to 'requires' "
         "under 'build:'"),
        (NO_PROGRAM, "there is no program 'cmake': add the Debian package that has it to 'packages' under 'build:'"),
        ("/bin/sh: 1: cmake: not found",
         "there is no program 'cmake': add the Debian package that has it to 'packages' under 'build:'"),
        (NOT_C, "fast.c:2:9: error: 'y' undeclared here (not in a function)"),
        (EXCEPTION, "ValueError: Unknown CUDA arch (3.0) or GPU not supported"),
        (NO_COMPILER_FOR_NINJA, "there is no compiler 'c++': add g++ to 'packages' under 'build:'"),
        (NO_CUDA_HOME, CUDA),
        (NO_NVCC, CUDA),
        (NO_NVCC_PROGRAM, CUDA),
        ("/bin/sh: 1: nvcc: not found", CUDA),
        (NO_CUDA_HEADER, CUDA),
        (NO_GPU, "a build has no GPU to compile for: set TORCH_CUDA_ARCH_LIST, such as '8.0;9.0', in 'environment' "
         "under 'build:'"),
        (OLD_GPU, "nvcc cannot compile for compute_70: change TORCH_CUDA_ARCH_LIST in 'environment' under 'build:'"),
        (MIXED_VERSIONS, "its CUDA compiler is of several versions: pin nvidia-cuda-nvcc, nvidia-cuda-crt and "
         "nvidia-nvvm to one in 'requires' under 'build:'"),
        (NOT_CUDA, 'fast/kernel.cu(5): error: identifier "y" is undefined'),
        (OUT_OF_MEMORY, MEMORY),
        (OUT_OF_MEMORY_OF_NVCC, MEMORY),
    ],
)  # fmt: skip
def test_the_reason_is_what_to_add_or_the_error_of_the_compiler(errors: str, words: str) -> None:
    assert buildx.compile_failure(output(errors)) == f"fast==2.0: {words}"


def test_another_failure_has_no_known_reason() -> None:
    assert buildx.compile_failure(["error: Hash mismatch for `fast==2.0`"]) == ""


def log(said: list[str], stage: str = "compiled") -> str:
    """What BuildKit prints about the failed step."""
    lines = [f"#48 1.2{number} {line}" for number, line in enumerate(said)]
    step = f"[{stage} 7/8] RUN <<COMPILED (...)"
    end = 'process "/bin/bash -c uv" did not complete successfully: exit code: 1'
    return "\n".join([f"#48 {step}", *lines, f"#48 ERROR: {end}", "------", f" > {step}:", "1.29 hint", "------",
                      f"ERROR: failed to solve: {end}"])  # fmt: skip


def test_a_build_that_cannot_compile_ends_with_that_reason() -> None:
    assert buildx.reason(log(output(NO_COMPILER))) == (
        "compiled: fast==2.0: there is no compiler 'x86_64-linux-gnu-gcc': add g++ to 'packages' under 'build:'"
    )


@pytest.mark.parametrize("stage", ["built", "built-added", "gsutil-built"])
@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (NO_COMPILER, "there is no compiler 'x86_64-linux-gnu-gcc': add g++ to 'packages' under 'build:'"),
        (SETUP_REQUIRES, "its setup.py asks for 'numpy' while it is built: add that to 'requires' under 'build:'"),
    ],
)
def test_a_requirement_without_a_wheel_that_is_not_pure_python_belongs_under_build(
    stage: str, errors: str, words: str
) -> None:
    said = [line.replace("fast==2.0", "/sources/wheels-added/fast-2.0.tar.gz") for line in output(errors)]
    assert buildx.reason(log(said, stage)) == (
        f"{stage}: fast-2.0 has no wheel and has to be compiled: add it to 'sources' under 'build:' ({words})"
    )


@pytest.mark.parametrize(
    ("stage", "package", "shown"),
    [("compiled", "fast==2.0", "fast==2.0"), ("built", "/sources/wheels-1/fast-2.0.tar.gz", "fast-2.0.tar.gz")],
)
def test_a_build_that_uses_a_network_gets_none(stage: str, package: str, shown: str) -> None:
    error = "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>"
    said = [line.replace("fast==2.0", package) for line in output(error)]
    assert buildx.reason(log(said, stage)) == (
        f"{stage}: {shown}: its build uses a network, and gets none: require a release that has a wheel, or a wheel "
        "that you built"
    )


def test_a_missing_shared_library_is_the_reason_as_the_step_prints_it() -> None:
    said = "the image lacks libgomp.so.1, which fast.so needs: add libgomp1 to 'system:'"
    assert buildx.reason(log([f"error: {said}"])) == f"compiled: {said}"


def test_a_log_is_named_so_that_it_is_found_from_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT / "images")
    assert buildx.place(ROOT / "build" / "mine" / "build.log") == "log: build/mine/build.log", "as other files of it"
    monkeypatch.chdir(tmp_path)
    assert buildx.place(ROOT / "build" / "mine" / "build.log") == f"log: {ROOT}/build/mine/build.log"
