"""Check the build of the framework: its index, its accelerator, and the exact libraries that it needs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence
from trainyard.spec.catalog import conflict

#: The file of TensorFlow's wheels that describes their build.
_BUILD_INFO = "tensorflow/python/platform/build_info.py"


def torch_build(text: str) -> tuple[str | None, str | None]:
    """Return ``__version__`` and ``cuda`` in the text of a torch or torchvision version.py; None where not assigned."""
    version = re.search(r"(?m)^__version__(?:: *\w+)? *= *['\"]([^'\"]+)['\"]", text)
    cuda = re.search(r"(?m)^cuda(?:: *[\w\[\]]+)? *= *['\"]([^'\"]+)['\"]", text)
    return version[1] if version else None, cuda[1] if cuda else None


def _variant(local: str | None) -> str | None:
    """Return what torch and torchvision must have in common of their local versions: ``cu13`` of ``cu130``.

    torchvision refuses another major version of CUDA alone: ``_check_cuda_version`` in its extension.py.
    """
    return re.sub(r"^(cu\d+)\d$", r"\1", local) if local else local


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#labels; images/indexes.yaml; torchvision/extension.py")
def torch_is_the_build_of_its_index(image: Evidence) -> Iterator[Finding]:
    """torch and torchvision are builds of the index that the label names."""
    fix = image.package_remediation
    text = image.inside.texts.get("torch/version.py")
    if text is None:
        return
    where = "torch/version.py"
    version, cuda = torch_build(text)
    installed = image.version("torch") or ""
    if version is None or Version(version).public != Version(installed).public:
        what = f"says {version}, the package's metadata {installed}"
        yield Finding(where, what, "torch is not the version in its metadata and in the tag", fix)
        return
    # PyTorch's indexes are called after the local version of their wheels: …/whl/cpu has +cpu, …/whl/cu128 has +cu128.
    variant = image.index.removeprefix("pytorch-") if image.index.startswith("pytorch-") else None
    local = Version(version).local
    if variant is not None and local != variant:
        what = f"is {version}; index {image.index} has +{variant}"
        yield Finding(where, what, "the image is another variant than its labels say", fix)
    named_cuda = re.fullmatch(r"cu(\d+)(\d)", local or "")
    expected_cuda = f"{named_cuda[1]}.{named_cuda[2]}" if named_cuda else None
    if local is not None and cuda != expected_cuda:
        what = f"torch.version.cuda is {cuda}, {version} means {expected_cuda}"
        yield Finding(where, what, "torch was built for another accelerator than its version says", fix)
    vision = torch_build(image.inside.texts.get("torchvision/version.py", ""))[0]
    if vision is not None and _variant(Version(vision).local) != _variant(local):
        why = "their operators do not load together: torch and torchvision must be built for one CUDA, or for CPUs"
        yield Finding("torchvision/version.py", f"is {vision}; torch is {version}", why, fix)


@rule(
    "image",
    severity=Severity.CANNOT_START,
    source="Requires-Dist of the torch_xla wheel; https://github.com/pytorch/xla#installation",
)
def torch_xla_has_its_libtpu(image: Evidence) -> Iterator[Finding]:
    """libtpu and torch are the versions that torch_xla was built for."""
    fix = image.package_remediation
    for package in image.installed.get("torch-xla", []):
        installed = image.version("libtpu")
        for requirement in map(Requirement, package.requires):
            wants_tpu = requirement.marker is not None and 'extra == "tpu"' in str(requirement.marker)
            if requirement.name != "libtpu" or not wants_tpu:
                continue
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                needs = f"torch_xla {package.version} needs libtpu{requirement.specifier}"
                what = f"is {installed or 'not installed'}; {needs}"
                why = "torch_xla depends on libtpu's exact interface: another version crashes on the TPU"
                yield Finding("package libtpu", what, why, fix)
        torch = Version(image.version("torch") or "0")
        if torch.release[:2] != Version(package.version).release[:2]:
            what = f"is {torch}; torch_xla is {package.version}"
            why = "torch_xla links to the C++ interface of the torch release with the same number"
            yield Finding("package torch", what, why, fix)


def tensorflow_build(text: str) -> dict[str, Any]:
    """Return ``build_info`` of the text of TensorFlow's build_info.py, which is not run; empty if it has none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "build_info":
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            return dict(ast.literal_eval(value))
    return {}


@rule(
    "image",
    severity=Severity.CANNOT_START,
    source="https://www.tensorflow.org/install/source#gpu; build_info.py of the TensorFlow wheel",
)
def tensorflow_has_its_cudnn(image: Evidence) -> Iterator[Finding]:
    """TensorFlow's build matches the variant and the installed cuDNN."""
    fix = image.package_remediation
    text = image.inside.texts.get(where := _BUILD_INFO)
    if text is None:
        return
    build = tensorflow_build(text)
    if not build:
        yield Finding(where, "has no build_info", "it is unknown what TensorFlow was built for", fix)
        return
    cuda = bool(build.get("is_cuda_build"))
    if cuda and "tensorflow-cpu" in image.installed:
        what = "is a CUDA build under the name tensorflow-cpu"
        yield Finding(where, what, "the image is another, larger variant than its name says", fix)
    if not cuda or not any(package.startswith("nvidia-") for package in image.installed):
        return  # a CUDA build without CUDA packages runs on the CPU, as tensorflow from the default index does
    wanted = str(build.get("cudnn_version", "")).split(".")[0]
    found = next((one for package, one in image.installed.items() if package.startswith("nvidia-cudnn-")), None)
    if wanted and (found is None or str(Version(found[0].version).major) != wanted):
        what = f"{found[0].version if found else 'none'} is installed; TensorFlow was built with cuDNN {wanted}"
        why = "TensorFlow looks for the cuDNN of its build, and finding none, trains without the GPU"
        yield Finding("package nvidia-cudnn", what, why, fix)


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#labels (io.trainyard.accelerator)")
def framework_is_built_for_the_accelerator(image: Evidence) -> Iterator[Finding]:
    """An image for NVIDIA GPUs has a framework built for CUDA, and CUDA's libraries."""
    if image.required_recipe.accelerator.kind != "nvidia":
        return
    why = "it trains on the CPU of machines with a GPU"
    torch = image.inside.texts.get("torch/version.py")
    if torch is not None and torch_build(torch)[1] is None:
        version = torch_build(torch)[0]
        yield Finding("torch/version.py", f"torch {version} is built without CUDA", why, image.package_remediation)
    tensorflow = image.inside.texts.get(_BUILD_INFO)
    if tensorflow is not None and not tensorflow_build(tensorflow).get("is_cuda_build"):
        yield Finding(_BUILD_INFO, "TensorFlow is built without CUDA", why, image.package_remediation)
    if not any(package.startswith("nvidia-") for package in image.installed):
        yield Finding("packages nvidia-*", "none is installed: CUDA comes from wheels", why, image.package_remediation)


@rule("image", severity=Severity.CANNOT_START, source="images/conflicts.yaml")
def nothing_known_to_conflict(image: Evidence) -> Iterator[Finding]:
    """No packages are installed that are known not to work together."""
    reason = conflict(image.versions, image.inside.python)
    if reason:
        why = "it crashes or hangs where it is used, not where it is built"
        yield Finding("packages", reason, why, image.package_remediation)
