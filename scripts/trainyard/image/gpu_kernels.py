"""Compile Triton kernels for GPUs that this machine does not have, and Triton's module that loads them.

The smoke test copies this file into a container of the image, with the compute capabilities as arguments. It ends with
status 0 if every kernel has machine code for every capability that Triton supports, and if the module loads. That
module is compiled by the image's C compiler, and links to the driver's libcuda.so.1, in whose place is a library that
has the same functions and does nothing. The last line is a JSON object. Python 3.8 to 3.14.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: The least compute capability that Triton has code for, as a number:
#: https://github.com/triton-lang/triton#compatibility
LEAST = 70


@triton.jit
def activate(source, target, count, block: tl.constexpr):
    """Compute GELU and its gradient: arithmetic, and a function of CUDA's libdevice."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(source + at, mask=at < count).to(tl.float32)
    half = 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    tl.store(target + at, (x * half).to(tl.float16), mask=at < count)
    tl.store(target + count + at, half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327, mask=at < count)


@triton.jit
def normalize(source, target, columns, block: tl.constexpr):
    """Normalize the rows of a matrix: reductions."""
    at = tl.arange(0, block)
    x = tl.load(source + tl.program_id(0) * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    centered = tl.where(at < columns, x - tl.sum(x, axis=0) / columns, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=0) / columns + 1e-5)
    tl.store(target + tl.program_id(0) * columns + at, (centered * scale).to(tl.float16), mask=at < columns)


@triton.jit
def attend(query, key, value, target, length, block: tl.constexpr, size: tl.constexpr):
    """Compute attention over blocks of keys: products of matrices in a loop, on tensor cores."""
    rows, width = tl.program_id(0) * block + tl.arange(0, block), tl.arange(0, size)
    q = tl.load(query + rows[:, None] * size + width[None, :])
    most = tl.full([block], -1e9, tl.float32)
    total = tl.zeros([block], tl.float32)
    result = tl.zeros([block, size], tl.float32)
    for start in range(0, length, block):
        columns = start + tl.arange(0, block)
        scores = tl.dot(q, tl.load(key + width[:, None] + columns[None, :] * size))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        change = tl.exp(most - higher)
        total = total * change + tl.sum(weights, 1)
        values = tl.load(value + columns[:, None] * size + width[None, :])
        result = result * change[:, None] + tl.dot(weights.to(tl.float16), values)
        most = higher
    tl.store(target + rows[:, None] * size + width[None, :], (result / total[:, None]).to(tl.float16))


#: Kernel -> the types of its arguments, and its constants.
KERNELS = {
    activate: ({"source": "*fp16", "target": "*fp16", "count": "i32"}, {"block": 1024}),
    normalize: ({"source": "*fp16", "target": "*fp16", "columns": "i32"}, {"block": 1024}),
    attend: (
        {"query": "*fp16", "key": "*fp16", "value": "*fp16", "target": "*fp16", "length": "i32"},
        {"block": 64, "size": 64},
    ),
}


def machine_code(kernel: Any, capability: int) -> bytes:
    """Return the machine code of a kernel for a compute capability, as a number: 90."""
    types, constants = KERNELS[kernel]
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    if f".target sm_{capability}" not in compiled.asm["ptx"]:
        raise SystemExit(f"Triton compiled {kernel.__name__} for another GPU than sm_{capability}")
    return bytes(compiled.asm["cubin"])


def load_driver(folder: str) -> None:
    """Let Triton compile and load its module for the driver, with a library in the place of the driver's."""
    import triton.backends.nvidia.driver as nvidia

    with open(os.path.join(os.path.dirname(nvidia.__file__), "driver.c"), encoding="utf-8") as file:
        names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", file.read())))
    stub, library = os.path.join(folder, "cuda.c"), os.path.join(folder, "libcuda.so.1")
    with open(stub, "w", encoding="utf-8") as file:
        file.writelines(f"int {name}(void) {{ return 0; }}\n" for name in names)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, stub], check=True)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    nvidia.CudaUtils()


def main(arguments: list[str]) -> None:
    """Compile all kernels for all capabilities, and print what was compiled."""
    capabilities = [int(word.replace(".", "")) for word in arguments]
    supported = [capability for capability in capabilities if capability >= LEAST]
    size = 0
    for capability in supported:
        for kernel in KERNELS:
            code = machine_code(kernel, capability)
            if code[:4] != b"\x7fELF":
                raise SystemExit(f"{kernel.__name__}: no machine code for sm_{capability}")
            size += len(code)
    # Code can be loaded from the folder that the launcher chose for it (R10.6).
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        load_driver(folder)
    print(json.dumps({"capabilities": supported, "kernels": len(KERNELS), "bytes": size}))


if __name__ == "__main__":
    main(sys.argv[1:])
