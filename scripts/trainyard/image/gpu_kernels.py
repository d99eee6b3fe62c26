"""Compile what torch.compile generates for GPUs that this machine does not have, and Triton's module that loads it.

The smoke test copies this file into a container of the image, with the compute capabilities as arguments. Inductor
generates the Triton kernels of a training step, with a residual block and attention, as for a GPU; Triton compiles each
to machine code for every capability. Triton's module that loads kernels is compiled by the image's C compiler, and
links to the driver's libcuda.so.1, in whose place is a library that has the same functions and does nothing. It ends
with status 0 if all that succeeds. The last line is a JSON object. Python 3.8 to 3.14.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

#: The least compute capability that Triton has code for, as a number:
#: https://github.com/triton-lang/triton#compatibility
LEAST = 70


class Launched:
    """Stand for a kernel that is launched, which does nothing."""

    def __getattr__(self, name: str) -> Launched:
        """Return what a kernel has."""
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Launched:
        """Launch it, or ask it for something."""
        return self


class Target:
    """Stand for the driver, which Inductor asks for the GPU that it generates kernels for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        """Return the GPU."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> Any:
        """Return the device of the tensors."""
        import torch

        return torch.device("cpu")


def training_step() -> None:
    """Train one step of a network with a residual block and attention, compiled."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
            self.tokens, self.mixed, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            block = torch.relu(self.norms[0](self.first(images)))
            block = torch.relu(self.norms[1](self.second(block)) + images)
            query, key, value = self.mixed(self.tokens(block.flatten(2).transpose(1, 2))).chunk(3, dim=-1)
            weights = torch.softmax(query @ key.transpose(1, 2) / 4.0, dim=-1)
            return self.out(nn.functional.gelu(weights @ value).mean(1))

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = nn.functional.cross_entropy(torch.compile(net)(torch.randn(4, 16, 16, 16)), torch.arange(4))
    loss.backward()
    torch.compile(optimizer.step)()


def generate() -> dict[str, str]:
    """Return the names and sources of the kernels that Inductor generates for a training step.

    Its backend for GPUs generates them for tensors of the CPU (torch/_inductor/config.py, cpu_backend), with the same
    templates, heuristics and fusions.
    """
    import torch._inductor.async_compile as compiling
    from torch._inductor import config
    from triton.runtime.driver import driver

    sources: dict[str, str] = {}

    def record(self: Any, name: str, source: str, *arguments: Any, **options: Any) -> Launched:
        sources[name] = source
        return Launched()

    config.cpu_backend = "triton"
    config.fx_graph_cache = False
    compiling.AsyncCompile.triton = record
    driver.set_active(Target(90))
    training_step()
    return sources


def configured(source: str, path: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """Return a kernel of a source that is written to ``path``, what Inductor says of it, and its configurations."""
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    seen: list[tuple[Any, dict[str, Any], list[Any]]] = []

    def autotune(size_hints: Any, configs: list[Any], triton_meta: dict[str, Any], *rest: Any, **more: Any) -> Any:
        return lambda kernel: seen.append((kernel, triton_meta, configs))

    triton_heuristics.cached_autotune = autotune
    triton_helpers.set_driver_to_cpu = lambda: None
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return seen[0]


def compile_kernels(sources: dict[str, str], capability: int, folder: str) -> int:
    """Compile kernels for a compute capability, as a number: 90; the bytes of their machine code."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime.driver import driver

    driver.set_active(Target(capability))
    size = 0
    for name, source in sources.items():
        kernel, meta, configurations = configured(source, os.path.join(folder, f"{name}.py"))
        options = configurations[0]
        sizes = {name: size for name, size in options.kwargs.items() if name in kernel.arg_names}
        constants = {**meta.get("constants", {}), **sizes}
        attributes = (meta.get("configs") or [None])[0]
        built = triton.compile(
            ASTSource(kernel, meta["signature"], constants, attributes),
            target=driver.active.get_current_target(),
            options={"num_warps": options.num_warps, "num_stages": options.num_stages},
        )
        code = bytes(built.asm["cubin"])
        if code[:4] != b"\x7fELF" or f".target sm_{capability}" not in built.asm["ptx"]:
            raise SystemExit(f"Triton has no machine code of {name} for sm_{capability}")
        size += len(code)
    return size


def load_driver(folder: str) -> None:
    """Let Triton compile and load its module for the driver, with a library in the place of the driver's."""
    import triton.backends.nvidia.driver as nvidia

    with open(os.path.join(os.path.dirname(nvidia.__file__), "driver.c"), encoding="utf-8") as file:
        names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\s*\(", file.read())))
    stub, library = os.path.join(folder, "cuda.c"), os.path.join(folder, "libcuda.so.1")
    with open(stub, "w", encoding="utf-8") as file:
        file.writelines(f"int {name}(void) {{ return 0; }}\n" for name in names)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, stub], check=True)
    os.symlink("libcuda.so.1", os.path.join(folder, "libcuda.so"))  # the name that Triton 3.3 links to
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    nvidia.CudaUtils()


def main(arguments: list[str]) -> None:
    """Compile all kernels for all capabilities, and print what was compiled."""
    capabilities = [int(word.replace(".", "")) for word in arguments]
    supported = [capability for capability in capabilities if capability >= LEAST]
    # Code can be loaded from the folder that the launcher chose for it (R10.6).
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")
    os.makedirs(cache, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        sources = generate()
        folders = [os.path.join(folder, str(capability)) for capability in supported]
        for path in folders:
            os.mkdir(path)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            sizes = list(pool.map(compile_kernels, [sources] * len(supported), supported, folders))
        load_driver(folder)
    if not sources:
        raise SystemExit("torch.compile generated no kernel for a GPU")
    print(json.dumps({"capabilities": supported, "kernels": len(sources), "bytes": sum(sizes)}))


if __name__ == "__main__":
    main(sys.argv[1:])
