"""Which target of the catalogue a repository extends: by the framework that its code uses, and the devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainyard.common.console import UserError
from trainyard.spec.model import load
from trainyard.workspace.python_source import Import, Source

#: Framework -> modules that need it.
_MODULES = {
    "torch": {
        "torch",
        "torchvision",
        "torchaudio",
        "torch_xla",
        "torch_tpu",
        "lightning",
        "pytorch_lightning",
        "timm",
        "fastai",
    },
    "tensorflow": {
        "tensorflow",
        "keras",
        "tf_keras",
        "tensorflow_datasets",
        "tensorflow_hub",
        "tensorflow_probability",
    },
    "jax": {"jax", "flax", "optax", "haiku", "equinox"},
}

#: Framework -> distributions that need it.
_DISTRIBUTIONS = {
    "torch": {
        "torch", "torchvision", "torchaudio", "torch-xla", "torch-tpu", "lightning", "pytorch-lightning", "timm",
        "fastai",
    },
    "tensorflow": {
        "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-tpu", "keras", "tf-keras", "tf-nightly",
    },
    "jax": {"jax", "flax"},
}  # fmt: skip

#: What an NVIDIA driver makes (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/#device-node-verification).
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Choice:
    """A target, what speaks for it, and what the user may want to know (``notes``)."""

    target: str
    why: str
    notes: tuple[str, ...] = ()


def _imports(sources: Iterable[Source], framework: str) -> list[tuple[Import, Source]]:
    """The imports that need a framework; those that always run come first."""
    found = [
        (one, source)
        for source in sources
        for one in source.imports
        if not one.level and one.module.partition(".")[0] in _MODULES[framework]
    ]
    return sorted(found, key=lambda pair: pair[0].optional)


def frameworks(sources: Iterable[Source]) -> dict[str, str]:
    """Framework -> where it is imported, as ``train.py:3``; the one that most files always import comes first."""
    sources = list(sources)
    found = {name: _imports(sources, name) for name in _MODULES}
    order = sorted(
        (name for name in found if found[name]),
        key=lambda name: -len({source.path for one, source in found[name] if not one.optional}),
    )
    return {name: f"{found[name][0][1].path}:{found[name][0][0].line}" for name in order}


def choose(closure: list[Source], everything: list[Source], wanted: dict[str, str]) -> Choice | None:
    """The target of a repository; None if nothing tells.

    Args:
        closure: the files that the command consists of, ``everything``: all that an image may run.
        wanted: distributions that its requirements name -> where.
    Raises:
        UserError: it uses a framework that no target has.
    """
    uses: dict[str, str] = {}
    for files in (closure, everything):
        uses = uses or frameworks(files)
    for name, distributions in _DISTRIBUTIONS.items():
        if not uses and (listed := sorted(distributions & wanted.keys())):
            uses = {name: f"{wanted[listed[0]]} lists {listed[0]}"}
    if not uses:
        return None
    first = next(iter(uses))
    if first == "jax" and len(uses) == 1:
        raise UserError(
            f"{uses['jax']}: uses JAX, which no target contains: give --target cpu, and jax under 'requirements'"
        )
    names = [name for name in uses if name != "jax"]
    notes = []
    if len(names) > 1:
        places = " and ".join(f"{name} ({uses[name]})" for name in names)
        notes.append(f"both {places} are used: --target chooses the other")
    files = closure or everything
    choice = _torch(files, wanted) if names[0] == "torch" else _tensorflow(files, wanted)
    return Choice(choice.target, f"{uses[names[0]]} uses {names[0]}{choice.why}", (*notes, *choice.notes))


def _first(sources: Iterable[Source], modules: set[str]) -> str:
    """Where one of the modules is always imported; empty if nowhere."""
    for source in sources:
        for one in source.imports:
            if one.module.partition(".")[0] in modules and not one.optional:
                return f"{source.path}:{one.line}"
    return ""


def _devices(sources: list[Source], cpu: str, gpu: str) -> Choice:
    """The target for CPUs or for GPUs."""
    cuda = next((f"{source.path}:{source.cuda}" for source in sources if source.cuda), "")
    if not cuda:
        return Choice(cpu, "")
    if not any(source.asks for source in sources):
        return Choice(gpu, f", and {cuda} needs a GPU")
    if _DRIVER.exists():
        return Choice(gpu, f", {cuda} uses GPUs, and this machine has one")
    return Choice(cpu, "", (f"{cuda} uses a GPU where there is one: --target {gpu} is the image for GPUs",))


def _torch(sources: list[Source], wanted: dict[str, str]) -> Choice:
    for target, module in (("xla", "torch_xla"), ("torch-tpu", "torch_tpu")):
        distribution = module.replace("_", "-")
        if where := _first(sources, {module}):
            return Choice(target, f", {where} {module}")
        if distribution in wanted:
            return Choice(target, f", {wanted[distribution]} {distribution}")
    return _devices(sources, "cpu", "gpu")


def _tensorflow(sources: list[Source], wanted: dict[str, str]) -> Choice:
    tpu = next((f"{source.path}:{source.tpu}" for source in sources if source.tpu), "")
    if tpu or "tensorflow-tpu" in wanted:
        return Choice("tf-tpu", f", and {tpu or wanted['tensorflow-tpu']} TPUs")
    if "tensorflow-gpu" in wanted:
        return Choice("tf-gpu", f", and {wanted['tensorflow-gpu']} lists tensorflow-gpu")
    if "tf-nightly" in wanted:
        return Choice("tf-nightly", f", and {wanted['tf-nightly']} lists tf-nightly")
    return _devices(sources, "tf-cpu", "tf-gpu")


def other_framework(target: str, closure: list[Source]) -> str:
    """A line about a framework that the command always imports and a target does not contain; empty if none."""
    name = load(target).framework.name
    has = "tensorflow" if name == "tensorflow" else "torch"
    for framework, modules in _MODULES.items():
        if framework != has and (where := _first(closure, modules - {"keras"})):
            return f"{where} imports {framework}, which {target} does not contain"
    return ""
