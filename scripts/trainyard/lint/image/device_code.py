"""Check that an image for NVIDIA GPUs has code for the GPUs that its label promises, and one version of CUDA.

The promise follows from images/matrix.yaml; the probe reads what the files have
(docs/decisions/0013-gpus-are-promised-by-data.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.utils import canonicalize_name

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence
from trainyard.oci.probe_runner import Library
from trainyard.spec import gpus
from trainyard.spec.gpus import DeviceCode
from trainyard.spec.naming import LABELS

#: Distributions that hold the device code of a framework. JAX's are plugins, named after the version of CUDA.
_FRAMEWORKS = re.compile(r"torch|tensorflow|jaxlib|jax-cuda\d+-(plugin|pjrt)")

#: Libraries whose code for GPUs is not, or not all, in the sections that the probe reads.
_UNREAD = re.compile(r"libcufft")

#: NVIDIA's wheels for a version of CUDA: those with it in their names, and those whose version is CUDA's.
_NAMED = re.compile(r"(nvidia-[a-z0-9-]+)-cu(\d\d)")
_VERSIONED = re.compile(r"nvidia-(cuda-(runtime|nvrtc|nvcc|cupti|crt|cccl)|nvjitlink|nvvm|nvtx)|cuda-toolkit")


def _promised(image: Evidence) -> DeviceCode | None:
    """Return what the labels promise; None of an image that is for no NVIDIA GPU, or has other labels."""
    about = [image.labels.get(f"{LABELS}.{name}", "") for name in ("cuda", "driver", "gpus")]
    try:
        return DeviceCode.parse(*about) if all(about) else None
    except UserError:
        return None


def _for_nvidia(image: Evidence) -> bool:
    return image.labels.get(f"{LABELS}.accelerator") == "nvidia"


def _named(path: str) -> str:
    """Return a path from the site directory on."""
    return path.rpartition("-packages/")[2].lstrip("/")


def _of_framework(image: Evidence) -> dict[str, list[Library]]:
    """Return distribution of the framework -> its libraries with code for GPUs."""
    libraries: dict[str, list[Library]] = {}
    for library in image.inside.libraries.values():
        if _FRAMEWORKS.fullmatch(canonicalize_name(library.package)):
            libraries.setdefault(library.package, []).append(library)
    return libraries


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#labels (io.trainyard.gpus); docs/gpus.md")
def framework_has_code_for_its_gpus(image: Evidence) -> Iterator[Finding]:
    """The framework has code for every GPU that the image's label promises."""
    libraries = [library for some in _of_framework(image).values() for library in some]
    if not libraries or not _for_nvidia(image):
        return
    code = sorted({name for library in libraries for name in library.code}, key=_order)
    ptx = sorted({name for library in libraries for name in library.ptx}, key=_order)
    has = f"machine code for {' '.join(code)}" + (f", PTX for {' '.join(ptx)}" if ptx else "")
    where = f"package {' and '.join(sorted(_of_framework(image)))}"
    promised = _promised(image)
    if promised is None:
        why = "which GPUs it runs on is not known before it is started: images/matrix.yaml does not have this release"
        remediation = "add the release to images/matrix.yaml, or look at what the files have before you choose a GPU"
        yield Finding(where, f"has {has}", why, remediation, Severity.NOTE)
        return
    later = [name for name in ptx if name[-1].isdigit()]  # PTX of a variant is for no later GPU
    missing = promised.missing(code, ptx)
    missing += [f"{name}+PTX" for name in promised.ptx if not any(_order(had) <= _order(name) for had in later)]
    if missing:
        what = f"has no code for {' '.join(missing)}, which label {LABELS}.gpus promises; it has {has}"
        why = "a job on such a GPU is scheduled, and ends at its first kernel: no kernel image is available"
        remediation = f"correct the release's set of GPUs in images/matrix.yaml, or {image.package_remediation}"
        yield Finding(where, what, why, remediation)


@rule("image", severity=Severity.CANNOT_START, source="docs/gpus.md; docs/own-repository.md#cuda")
def extensions_have_code_for_their_gpus(image: Evidence) -> Iterator[Finding]:
    """Compiled extensions have code for every GPU that the image's label promises."""
    promised = _promised(image) if _for_nvidia(image) else None
    if promised is None:
        return
    compiled = _compiled(image)
    for path, library in sorted(image.inside.libraries.items()):
        package = canonicalize_name(library.package)
        missing = promised.missing(library.code, library.ptx)
        if not missing or _FRAMEWORKS.fullmatch(package) or _UNREAD.match(path.rpartition("/")[2]):
            continue
        what = f"of {library.package or 'no package'} has no code for {' '.join(missing)}, which the image promises"
        why = "its functions fail on such a GPU: no kernel image is available"
        # No package brings what the repository's own setup.py compiled into the site directory.
        if package in compiled or (not package and path.startswith(f"{image.inside.site}/")):
            wanted = ";".join(promised.text.split())
            fix = f"set TORCH_CUDA_ARCH_LIST to '{wanted}' under 'build: environment:', or to the GPUs you train on, "
            yield Finding(_named(path), what, why, f"{fix}which the image promises then")
        else:
            fix = "train on other GPUs, or use another release of it, if your code calls these functions"
            yield Finding(_named(path), what, why, fix, Severity.NOTE)


@rule("image", severity=Severity.CANNOT_START, source="docs/gpus.md; METADATA and RECORD of NVIDIA's wheels")
def wheels_are_of_one_cuda(image: Evidence) -> Iterator[Finding]:
    """NVIDIA's wheels are for the major version of CUDA that the framework is built for."""
    promised = _promised(image)
    if promised is None:
        return
    wanted = promised.cuda.partition(".")[0]
    for name, version in sorted(image.versions.items()):
        suffix = _NAMED.fullmatch(name)
        major = suffix[2] if suffix else version.partition(".")[0] if _VERSIONED.fullmatch(name) else wanted
        if major == wanted:
            continue
        what = f"{version} is for CUDA {major}; the framework is built for CUDA {wanted}"
        twin = f"{suffix[1]}-cu{wanted}" if suffix else ""
        if twin in image.versions:  # wheels without the version in their names have it in their folders: nvidia/cu13
            why = f"it has the same files as {twin}: the framework loads those that were installed last"
            yield Finding(f"package {name}", what, why, image.package_remediation)
        else:
            why = "two versions of CUDA take room, and one process that loads both may fail"
            yield Finding(f"package {name}", what, why, image.package_remediation, Severity.NOTE)


@rule(
    "image", severity=Severity.CANNOT_START, source="docs/gpus.md; https://docs.nvidia.com/deploy/cuda-compatibility/"
)
def compilers_match_the_driver(image: Evidence) -> Iterator[Finding]:
    """The driver that the label names loads the code that ptxas compiles: both are of one major version of CUDA."""
    promised = _promised(image)
    if promised is None:
        return
    wanted = int(promised.cuda.partition(".")[0])
    for path, release in sorted(image.inside.ptxas.items()):
        if int(release.partition(".")[0]) > wanted:
            what = f"is of CUDA {release}; the image is for CUDA {promised.cuda}, and driver {promised.driver}"
            why = "the driver that the image promises to run with does not load what it compiles"
            yield Finding(_named(path), what, why, image.package_remediation)
    if "tensorflow" in image.versions and not any(name.startswith("nvidia-cuda-nvcc") for name in image.versions):
        what = "is not installed: XLA finds neither ptxas nor libdevice"
        why = "Keras compiles models with XLA on a GPU, and so does jit_compile=True: libdevice not found"
        yield Finding(f"package nvidia-cuda-nvcc-cu{wanted}", what, why, image.package_remediation)


def _compiled(image: Evidence) -> set[str]:
    """Return names of the packages that the user's repository compiles."""
    return {pin.name for pin in image.recipe.compiled} if image.recipe else set()


def _order(name: str) -> tuple[int, int, str]:
    return (*gpus.capability(name.rstrip("af")), name)
