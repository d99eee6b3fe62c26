"""The reason of a failed compilation; the texts are what uv 0.13.8 and BuildKit printed, shortened."""

from __future__ import annotations

import textwrap

import pytest

from trainyard.image import buildx, compile_failure

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
fast.c:2:10: fatal error: cuda_runtime.h: No such file or directory
    2 | #include <cuda_runtime.h>
      |          ^~~~~~~~~~~~~~~~
compilation terminated.
error: command '/usr/bin/gcc' failed with exit code 1"""
NO_MODULE = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
ModuleNotFoundError: No module named 'ninja'"""
NO_PROGRAM = "FileNotFoundError: [Errno 2] No such file or directory: 'nvcc'"
NOT_C = """\
fast.c:2:9: error: 'y' undeclared here (not in a function)
error: command '/usr/bin/gcc' failed with exit code 1"""
EXCEPTION = """\
Traceback (most recent call last):
OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."""


def output(errors: str, hint: str = HINT) -> list[str]:
    return UV.format(errors=textwrap.indent(errors, " " * 9), hint=hint).splitlines()


@pytest.mark.parametrize(
    ("errors", "words"),
    [
        (NO_COMPILER, "there is no compiler 'x86_64-linux-gnu-gcc': add g++ to 'packages' under 'build:'"),
        (NO_HEADER,
         "there is no header 'cuda_runtime.h': add the Debian package that has it to 'packages' under 'build:'"),
        (NO_MODULE, "its build imports 'ninja' and does not declare it: add the package that has it to 'requires' "
         "under 'build:'"),
        (NO_PROGRAM, "there is no program 'nvcc': add the Debian package that has it to 'packages' under 'build:'"),
        ("/bin/sh: 1: cmake: not found",
         "there is no program 'cmake': add the Debian package that has it to 'packages' under 'build:'"),
        (NOT_C, "fast.c:2:9: error: 'y' undeclared here (not in a function)"),
        (EXCEPTION,
         "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root."),
    ],
)  # fmt: skip
def test_the_reason_is_what_to_add_or_the_error_of_the_compiler(errors: str, words: str) -> None:
    assert compile_failure.reason(output(errors)) == f"fast==2.0: {words}"


def test_another_failure_has_no_known_reason() -> None:
    assert compile_failure.reason(["error: Hash mismatch for `fast==2.0`"]) == ""


def log(said: list[str]) -> str:
    """What BuildKit prints about the failed step."""
    lines = [f"#48 1.2{number} {line}" for number, line in enumerate(said)]
    step = "[compiled 7/8] RUN <<COMPILED (...)"
    end = 'process "/bin/bash -c uv" did not complete successfully: exit code: 1'
    return "\n".join([f"#48 {step}", *lines, f"#48 ERROR: {end}", "------", f" > {step}:", "1.29 hint", "------",
                      f"ERROR: failed to solve: {end}"])  # fmt: skip


def test_a_build_that_cannot_compile_ends_with_that_reason() -> None:
    assert buildx.reason(log(output(NO_COMPILER))) == (
        "compiled: fast==2.0: there is no compiler 'x86_64-linux-gnu-gcc': add g++ to 'packages' under 'build:'"
    )


def test_a_missing_shared_library_is_the_reason_as_the_step_prints_it() -> None:
    said = "the image lacks libgomp.so.1, which fast.so needs: add libgomp1 to 'system:'"
    assert buildx.reason(log([f"error: {said}"])) == f"compiled: {said}"
