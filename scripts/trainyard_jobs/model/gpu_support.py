"""Tell how an image runs on a type of GPU, by its device code, and which image of the catalogue runs there."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from trainyard.spec import gpus, matrix
from trainyard.spec.gpus import DeviceCode
from trainyard_jobs.model import image_metadata, machines
from trainyard_jobs.model.image_metadata import Contents, Targets
from trainyard_jobs.model.machines import GpuModel


@dataclass(frozen=True)
class Misfit:
    """Say what an image lacks on a GPU, as a finding does.

    Attributes:
        fatal: whether nothing runs; if not, the driver compiles the image's PTX.
    """

    what: str
    why: str
    remediation: str
    fatal: bool = True


def code_for(contents: Contents | None, accelerator: str) -> tuple[GpuModel, DeviceCode] | None:
    """Return the model of a type of GPU, and what an image needs of it; None if one of both is not known.

    Args:
        accelerator: type of GPU as the API names it, as in ``NVIDIA_TESLA_V100``.
    """
    row = machines.gpu_model(accelerator)
    code = contents.device_codes.get(row.architecture) if contents and row else None
    return (row, code) if row and code else None


def misfit(contents: Contents | None, accelerator: str, targets: Targets) -> Misfit | None:
    """Return what an image lacks on GPUs of a type; None if it has machine code for them, or too little is known.

    Args:
        accelerator: see :func:`code_for`.
        targets: what may be used instead.
    """
    known = code_for(contents, accelerator)
    if contents is None or known is None:
        return None
    row, code = known
    capability = gpus.gpus()[row.model].capability
    verdict = code.verdict(capability)
    if verdict == "runs":
        return None
    name = f"{row.model} (compute capability {capability})"
    image = f"{contents.framework or 'the image'} with CUDA {code.cuda}{' for arm64' if row.arm else ''}"
    if verdict == "ptx":
        return Misfit(
            f"{image} runs on a {name} from PTX: it has machine code for {' '.join(code.capabilities)} "
            f"(by {contents.source})",
            "the driver compiles the kernels when they are first used, which may take minutes",
            f"use nodes with a driver for CUDA {code.cuda} or later; a folder in CUDA_CACHE_PATH that outlives the "
            "container keeps the compiled kernels",
            fatal=False,
        )
    return Misfit(
        f"{image} has no code for a {name}: it has code for {code.text} (by {contents.source})",
        "the job starts and is billed, and its first kernel fails: no kernel image is available for execution",
        _instead(contents, row, capability, code.cuda, targets),
    )


def _instead(contents: Contents, row: GpuModel, capability: str, cuda: str, targets: Targets) -> str:
    """Return what to use: the newest target with the framework of an image and code for a GPU, or releases of that.

    Args:
        cuda: version of CUDA of the image.
    """
    framework, arch = contents.framework.partition(" ")[0], row.architecture
    if not framework:
        return f"use an image with code for a {row.model}, or another GPU"
    fitting = [
        (Version(recipe.version), recipe.name)
        for recipe in targets()
        if recipe.framework.name == framework
        and (code := image_metadata.of_recipes("", [recipe]).device_codes.get(arch))
        and code.verdict(capability) == "runs"
    ]
    if fitting:
        version, target = max(fitting)
        return f"use the target {target} ({framework} {version}), or another GPU"
    with_other_cudnn = gpus.device_code(framework, contents.framework.partition(" ")[2], arch, cuda)
    if with_other_cudnn and with_other_cudnn.verdict(capability) == "runs":
        return (
            f"use another GPU, or an image with {contents.framework} and cuDNN before {min(matrix.matrix().cuda.cudnn)}"
        )
    releases = _releases(framework, capability, arch)
    own = ".".join(contents.framework.partition(" ")[2].split(".")[:2])
    if other := releases.get(own):
        return f"use {framework} {own} for CUDA {other}, or another GPU"
    if releases:
        first, last = min(releases, key=Version), max(releases, key=Version)
        return f"use {framework} {' to '.join(dict.fromkeys((first, last)))}, or another GPU"
    return f"use another GPU: no {framework} in images/matrix.yaml has code for a {row.model}"


def _releases(framework: str, capability: str, arch: str) -> dict[str, str]:
    """Return minor release of a framework -> the newest CUDA for which it has machine code for a GPU."""
    known = matrix.matrix().frameworks.get(framework)
    fitting: dict[str, str] = {}
    for minor, release in known.versions.items() if known else ():
        for cuda in sorted(release.cuda, key=Version):
            code = gpus.device_code(framework, f"{minor}.0", arch, cuda)
            if code and code.verdict(capability) == "runs":
                fitting[minor] = cuda
    return fitting
