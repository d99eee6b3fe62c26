"""Why a source distribution could not be compiled, from what uv, its build backend and the compiler printed."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PACKAGES = "to 'packages' under 'build:'"
_ENVIRONMENT = "in 'environment' under 'build:'"

#: The compiler is three wheels, whose metadata does not say that they need the same version
#: (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/); the headers that it includes are those of the image.
_CUDA = (
    "it compiles CUDA code: extend a target with CUDA, and add nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm, of "
    "the same version as nvidia-cuda-runtime in trainyard.lock, to 'requires' under 'build:'"
)

#: What a line says, and what to do about it; the first that matches a line is the reason. The words are those of
#: setuptools, of GCC, of NVCC, of torch.utils.cpp_extension, of Python and of the shell.
_KNOWN = (
    (r"Killed signal terminated program|died due to signal 9",
     "its compiler ran out of memory: set MAX_JOBS, such as '1', {environment}, or give the engine more memory"),
    (r"CUDA_HOME environment variable is not set|\bnvcc: (?:command )?not found|nvcc not found at"
     r"|No such file or directory: '(?:[^']*/)?nvcc'|fatal error: cu(?:da|blas|dnn|fft|solver|sparse)\w*\.h: No such",
     _CUDA),
    (r"arch_list\[-1\] \+= '\+PTX'",
     "a build has no GPU to compile for: set TORCH_CUDA_ARCH_LIST, such as '8.0;9.0', {environment}"),
    (r"Unsupported gpu architecture '(\w+)'", "nvcc cannot compile for {}: change TORCH_CUDA_ARCH_LIST {environment}"),
    (r"^ptxas .*Unsupported \.version",
     "its CUDA compiler is of several versions: pin nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm to one in "
     "'requires' under 'build:'"),
    (r"command '(?:[^']*/)?([^'/]+)' failed: No such file", "there is no compiler '{}': add g++ {packages}"),
    (r"([\w-]+\+\+|g?cc): (?:command )?not found$", "there is no compiler '{}': add g++ {packages}"),
    (r"fatal error: (\S+): No such file", "there is no header '{}': add the Debian package that has it {packages}"),
    (r"^ModuleNotFoundError: No module named '([\w.]+)'",
     "its build imports '{}' and does not declare it: add the package that has it to 'requires' under 'build:'"),
    (r"FileNotFoundError: \[Errno 2\] No such file or directory: '([\w.+-]+)'",
     "there is no program '{}': add the Debian package that has it {packages}"),
    (r"([\w.+-]+): (?:command )?not found$", "there is no program '{}': add the Debian package that has it {packages}"),
)  # fmt: skip

#: Lines with the cause if none of those is there: an error of a compiler with its place, then an exception.
_CAUSES = (r"^\S+(?::\d+(?::\d+)?|\(\d+\)): error: .+", r"^nvcc fatal +: .+", r"^\w+(?:Error|Exception): .+")

#: The folder in which uv compiles a source distribution, which has a random name.
_FOLDER = re.compile(r"/\S*/sdists-v\d+/\S*?/src/")


def reason(said: Sequence[str]) -> str:
    """What failed, in one line, from the output of the step that compiles; empty if it is none of what is known."""
    lines = [line.strip() for line in said]
    text = "\n".join(lines)
    found = re.search(r"Failed to (?:build|download and build) `([^`]+)`", text)
    package = f"{found[1]}: " if found else ""
    for pattern, words in _KNOWN:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + words.format(*match.groups(), packages=_PACKAGES, environment=_ENVIRONMENT)
    for pattern in _CAUSES:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + _FOLDER.sub("", match[0])
    return ""
