"""Rules about what the framework was built for: its index, its accelerator, and the libraries that it needs exactly."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from scripts.findings import Finding
from scripts.rules.book import rule, spec_rule
from scripts.rules.evidence import Evidence
from scripts.spec import Spec
from scripts.tables import conflict


def torch_build(text: str) -> tuple[str | None, str | None]:
    """``__version__`` and ``cuda`` in the text of a torch or torchvision version.py; None where not assigned."""
    version = re.search(r"(?m)^__version__(?:: *\w+)? *= *['\"]([^'\"]+)['\"]", text)
    cuda = re.search(r"(?m)^cuda(?:: *[\w\[\]]+)? *= *['\"]([^'\"]+)['\"]", text)
    return version[1] if version else None, cuda[1] if cuda else None


@rule
def torch_is_the_build_of_its_index(image: Evidence) -> Iterator[Finding]:
    """torch and torchvision are the builds of the index that the label names."""
    name, fix = "torch_is_the_build_of_its_index", image.mend
    text = image.inside.texts.get("torch/version.py")
    if text is None:
        return
    where = "torch/version.py"
    version, cuda = torch_build(text)
    installed = image.version("torch") or ""
    if version is None or Version(version).public != Version(installed).public:
        what = f"says {version}, the package's metadata {installed}"
        yield Finding(name, where, what, "torch itself is not the version that pip and the tag say", fix)
        return
    # PyTorch's indexes are called after the local version of their wheels: …/whl/cpu has +cpu, …/whl/cu128 has +cu128.
    variant = image.index.removeprefix("pytorch-") if image.index.startswith("pytorch-") else None
    local = Version(version).local
    if variant is not None and local != variant:
        what = f"is {version}; index {image.index} has +{variant}"
        yield Finding(name, where, what, "the image is another variant than it says", fix)
    named_cuda = re.fullmatch(r"cu(\d+)(\d)", local or "")
    expected_cuda = f"{named_cuda[1]}.{named_cuda[2]}" if named_cuda else None
    if local is not None and cuda != expected_cuda:
        what = f"torch.version.cuda is {cuda}, {version} means {expected_cuda}"
        yield Finding(name, where, what, "torch was built for another accelerator than its version says", fix)
    vision = torch_build(image.inside.texts.get("torchvision/version.py", ""))[0]
    if vision is not None and Version(vision).local != local:
        why = "their operators do not load together: torch and torchvision must come from one index"
        yield Finding(name, "torchvision/version.py", f"is {vision} beside torch {version}", why, fix)


@rule
def torch_xla_has_its_libtpu(image: Evidence) -> Iterator[Finding]:
    """libtpu is the one that torch_xla asks for, and torch the one it was built for."""
    name, fix = "torch_xla_has_its_libtpu", image.mend
    for package in image.installed.get("torch-xla", []):
        installed = image.version("libtpu")
        for requirement in map(Requirement, package.requires):
            wants_tpu = requirement.marker is not None and 'extra == "tpu"' in str(requirement.marker)
            if requirement.name != "libtpu" or not wants_tpu:
                continue
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                needs = f"torch_xla {package.version} needs libtpu{requirement.specifier}"
                what = f"is {installed or 'not installed'}; {needs}"
                why = "torch_xla loads libtpu by its exact interface: another one ends in a crash on the TPU"
                yield Finding(name, "package libtpu", what, why, fix)
        torch = Version(image.version("torch") or "0")
        if torch.release[:2] != Version(package.version).release[:2]:
            what = f"is {torch} beside torch_xla {package.version}"
            why = "torch_xla links to the C++ interface of the torch release of its own number"
            yield Finding(name, "package torch", what, why, fix)


def tensorflow_build(text: str) -> dict[str, Any]:
    """``build_info`` of the text of TensorFlow's build_info.py, read without running it; empty if it has none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "build_info":
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            return dict(ast.literal_eval(value))
    return {}


@rule
def tensorflow_has_its_cudnn(image: Evidence) -> Iterator[Finding]:
    """TensorFlow's build matches the variant asked for and the cuDNN present."""
    name, fix = "tensorflow_has_its_cudnn", image.mend
    where = "tensorflow/python/platform/build_info.py"
    text = image.inside.texts.get(where)
    if text is None:
        return
    build = tensorflow_build(text)
    if not build:
        yield Finding(name, where, "has no build_info", "what TensorFlow was built for cannot be told", fix)
        return
    cuda = bool(build.get("is_cuda_build"))
    if cuda and "tensorflow-cpu" in image.installed:
        what = "is a CUDA build under the name tensorflow-cpu"
        yield Finding(name, where, what, "the image is larger and another one than it says", fix)
    if not cuda or not any(package.startswith("nvidia-") for package in image.installed):
        return  # a CUDA build without CUDA packages runs on the CPU, as tensorflow from the default index does
    wanted = str(build.get("cudnn_version", "")).split(".")[0]
    found = next((one for package, one in image.installed.items() if package.startswith("nvidia-cudnn-")), None)
    if wanted and (found is None or str(Version(found[0].version).major) != wanted):
        what = f"{found[0].version if found else 'none'} is installed; TensorFlow was built with cuDNN {wanted}"
        why = "TensorFlow looks for the cuDNN of its build, and finding none, trains without the GPU"
        yield Finding(name, "package nvidia-cudnn", what, why, fix)


@spec_rule
def framework_is_built_for_the_accelerator(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """An image for NVIDIA GPUs has a framework built for CUDA, and the CUDA libraries that it needs."""
    if spec.accelerator != "nvidia":
        return
    name = "framework_is_built_for_the_accelerator"
    why = "it trains on the CPU, on machines whose GPU is paid for"
    torch = image.inside.texts.get("torch/version.py")
    if torch is not None and torch_build(torch)[1] is None:
        version = torch_build(torch)[0]
        yield Finding(name, "torch/version.py", f"torch {version} is built without CUDA", why, image.mend)
    where = "tensorflow/python/platform/build_info.py"
    tensorflow = image.inside.texts.get(where)
    if tensorflow is not None and not tensorflow_build(tensorflow).get("is_cuda_build"):
        yield Finding(name, where, "TensorFlow is built without CUDA", why, image.mend)
    if not any(package.startswith("nvidia-") for package in image.installed):
        yield Finding(name, "packages nvidia-*", "none is installed: CUDA comes from wheels", why, image.mend)


@rule
def nothing_known_to_conflict(image: Evidence) -> Iterator[Finding]:
    """No packages that are known not to work together (images/conflicts.yaml)."""
    reason = conflict(image.versions)
    if reason:
        why = "it crashes or hangs where it is used, not where it is built"
        yield Finding("nothing_known_to_conflict", "packages", reason, why, image.mend)
