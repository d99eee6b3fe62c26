"""``trainyard init`` chooses a target by packages that do not name a framework; the table that it reads is complete."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import ValidationError

from trainyard.common.errors import UserError
from trainyard.spec import model
from trainyard.workspace import import_names, init
from trainyard.workspace.framework_table import Needs, Several, table

ROWS = [(name, package, why) for name, packages in table().needs.items() for package, why in packages.items()]

#: A distribution and its version, or a file of a repository at a commit.
SOURCE = re.compile(r"[\w.-]+ \d+(\.\w+)+|[\w.-]+/[\w.-]+@[0-9a-f]{8}:[\w./-]+\.(py|toml|cfg|ini|txt)")

Folder = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """``folder({"train.py": "..."})``: a folder with these files, which becomes the current folder."""
    monkeypatch.chdir(tmp_path)

    def make(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return tmp_path

    return make


def program(*imports: str) -> str:
    """Return a file that imports packages and trains."""
    return "\n".join(imports) + "\n\ndef main():\n    fit()\n\nif __name__ == '__main__':\n    main()\n"


def proposed(path: Path, target: str | None = None) -> init.Proposal:
    return init.Repository(path).propose(target)


def why(proposal: init.Proposal) -> str:
    return proposal.reasons[f"extends: {proposal.target}"]


# The table


def test_the_table_has_many_packages_of_each_framework() -> None:
    assert len(ROWS) >= 60
    assert {name: len(packages) >= 10 for name, packages in table().needs.items()} == dict.fromkeys(
        ("torch", "tensorflow", "jax"), True
    )


@pytest.mark.parametrize(("name", "package", "row"), ROWS, ids=[package for _, package, _ in ROWS])
def test_a_package_of_the_table_needs_its_framework(name: str, package: str, row: Needs) -> None:
    assert package == canonicalize_name(package)
    assert SOURCE.fullmatch(row.source), row.source
    if row.requires:
        needed = canonicalize_name(Requirement(row.requires).name)
        assert needed != package and table().needed(needed) == name
    else:
        spoken = {"torch": "pytorch", "tensorflow": "tensorflow", "jax": "jax"}[name]
        assert spoken in row.says.lower()


@pytest.mark.parametrize(("package", "row"), table().several.items(), ids=list(table().several))
def test_a_package_for_several_frameworks_is_in_no_other_list(package: str, row: Several) -> None:
    assert package == canonicalize_name(package)
    assert SOURCE.fullmatch(row.source), row.source
    assert table().needed(package) is None
    assert row.default or not (row.since or row.parts), "parts and versions are exceptions from a default"


def test_each_package_is_in_one_place_and_sorted() -> None:
    packages = [*(package for _, package, _ in ROWS), *table().several]
    assert len(packages) == len(set(packages))
    lists = [*map(list, table().needs.values()), list(table().several)]
    assert lists == [sorted(some) for some in lists]


def test_the_targets_of_the_table_have_the_framework() -> None:
    for name, framework in table().frameworks.items():
        for target in (*framework.targets.values(), *framework.deciding.values()):
            assert table().of_target(model.load(target).framework.name) == name
        assert not framework.targets or "cpu" in framework.targets


def test_every_target_has_a_framework_of_the_table() -> None:
    for target in model.targets():
        assert table().of_target(model.load(target).framework.name) in table().frameworks


@pytest.mark.parametrize("row", [{"source": "x 1.0"}, {"source": "x 1.0", "requires": "torch", "says": "torch"}])
def test_a_package_has_one_reason(row: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="give 'requires' or 'says'"):
        Needs.model_validate(row)


@pytest.mark.parametrize(
    ("module", "package"),
    [("haiku", "dm-haiku"), ("stable_baselines3", "stable-baselines3"), ("pyro", "pyro-ppl"), ("e3nn_jax", "e3nn-jax"),
     ("whisper", "openai-whisper"), ("orbax.checkpoint", "orbax-checkpoint"), ("nothing_like_it", ""),
     ("google.protobuf.any_pb2", "protobuf"), ("google.cloud.storage", "google-cloud-storage"),
     ("google.auth", "google-auth"), ("google.cloud.nothing", ""), ("cv2", "opencv-python-headless"), ("cupy", "")],
)  # fmt: skip
def test_modules_are_those_of_the_packages(module: str, package: str) -> None:
    assert import_names.proposed(module) == package


# Packages that need one framework


@pytest.mark.parametrize(
    ("statement", "target", "reason"),
    [
        ("from accelerate import Accelerator", "cpu", "train.py:1 imports accelerate, which needs torch"),
        ("import lightning as L", "cpu", "train.py:1 imports lightning, which needs torch"),
        ("import pytorch_lightning", "cpu", "train.py:1 imports pytorch-lightning, which needs torch"),
        ("from peft import LoraConfig", "cpu", "train.py:1 imports peft, which needs torch"),
        ("from trl import SFTTrainer", "cpu", "train.py:1 imports trl, which needs torch"),
        ("import timm", "cpu", "train.py:1 imports timm, which needs torch"),
        ("import sentence_transformers", "cpu", "train.py:1 imports sentence-transformers, which needs torch"),
        ("from stable_baselines3 import PPO", "cpu", "train.py:1 imports stable-baselines3, which needs torch"),
        ("import gpflow", "tf-cpu", "train.py:1 imports gpflow, which needs tensorflow"),
        ("import tensorflow_hub as hub", "tf-cpu", "train.py:1 imports tensorflow-hub, which needs tensorflow"),
    ],
)  # fmt: skip
def test_an_import_tells_the_framework(folder: Folder, statement: str, target: str, reason: str) -> None:
    found = proposed(folder({"train.py": program(statement)}))
    assert (found.target, why(found)) == (target, reason)


def test_a_requirement_tells_the_framework(folder: Folder) -> None:
    found = proposed(folder({"train.py": program("import mine"), "requirements.txt": "datasets\naccelerate\n"}))
    assert (found.target, why(found)) == ("cpu", "requirements.txt:2 lists accelerate, which needs torch")


def test_an_import_comes_before_a_requirement(folder: Folder) -> None:
    found = proposed(folder({"train.py": program("import gpflow"), "requirements.txt": "torch\n"}))
    assert found.target == "tf-cpu"


def test_the_framework_itself_is_named_rather_than_a_package_for_it(folder: Folder) -> None:
    found = proposed(folder({"train.py": program("import timm", "import torch")}))
    assert why(found) == "train.py:2 uses torch"


def test_a_module_of_the_repository_is_no_package(folder: Folder) -> None:
    files = {"train.py": program("import flair", "import brax", "import keras"), "flair.py": "", "brax/net.py": ""}
    assert proposed(folder(files)).target == "tf-cpu"


def test_an_optional_import_counts_if_there_is_no_other(folder: Folder) -> None:
    optional = "try:\n    import tensorflow\nexcept ImportError:\n    pass"
    found = proposed(folder({"train.py": program("import timm", optional)}))
    assert (found.target, found.notes) == ("cpu", [])
    found = proposed(folder({"train.py": program(optional)}))
    assert found.target == "tf-cpu"


@pytest.mark.parametrize(
    ("requirement", "target"),
    [("tensorflow[and-cuda]>=2.19", "tf-gpu"), ("tensorflow-gpu", "tf-gpu"), ("torch-xla", "xla"), ("torch", "cpu")],
)
def test_a_requirement_decides_the_target(folder: Folder, requirement: str, target: str) -> None:
    found = proposed(folder({"train.py": program("import mine"), "requirements.txt": f"{requirement}\n"}))
    assert found.target == target


# Packages for several frameworks


@pytest.mark.parametrize(
    ("statements", "target"),
    [
        (("from transformers import Trainer",), "cpu"),
        (("from transformers import AutoTokenizer", "import tensorflow as tf"), "tf-cpu"),
        (("from transformers import AutoTokenizer, TFAutoModel",), "tf-cpu"),
        (("from diffusers import UNet2DModel",), "cpu"),
        (("import tensorflow_probability as tfp",), "tf-cpu"),
        (("import einops", "import timm"), "cpu"),
        (("import keras", "import torch"), "cpu"),
    ],
)
def test_what_is_used_beside_a_package_tells_the_framework(
    folder: Folder, statements: tuple[str, ...], target: str
) -> None:
    assert proposed(folder({"train.py": program(*statements)})).target == target


@pytest.mark.parametrize("package", ["einops", "datasets", "safetensors"])
@pytest.mark.parametrize("listed", [False, True])
def test_a_package_for_several_frameworks_alone_is_a_question(folder: Folder, package: str, listed: bool) -> None:
    files = {"requirements.txt": f"{package}\n"} if listed else {"train.py": program(f"import {package}")}
    with pytest.raises(UserError) as error:
        proposed(folder(files))
    place = f"requirements.txt:1 lists {package}" if listed else f"train.py:1 imports {package}"
    assert str(error.value).startswith(
        f"{place}, which goes with several frameworks: choose a target, as in 'trainyard init --target cpu'; targets: "
    )


@pytest.mark.parametrize(
    ("requirements", "target"),
    [("transformers", "cpu"), ("transformers>=4.40", "cpu"), ("transformers==5.17.0", "cpu"), ("transformers<5", ""),
     ("transformers==4.57.*", ""), ("transformers~=4.30", ""), ("transformers<5\ntensorflow", "tf-cpu")],
)  # fmt: skip
def test_transformers_needs_torch_since_version_5(folder: Folder, requirements: str, target: str) -> None:
    path = folder({"requirements.txt": f"{requirements}\n"})
    if target:
        assert proposed(path).target == target
    else:
        with pytest.raises(UserError, match=r"lists transformers, which goes with several frameworks: choose a target"):
            proposed(path)


@pytest.mark.parametrize(
    ("specifier", "old"), [("<6", False), ("<=5", False), (">=4,<5.0", True), ("===4.1", False), ("!=4", False)]
)
def test_a_requirement_excludes_the_versions_since_one(specifier: str, old: bool) -> None:
    assert Several(default="torch", since="5", source="x 1.0").excludes_since(SpecifierSet(specifier)) is old


# Keras


BACKENDS = {
    "train.py": program("import os", "os.environ['KERAS_BACKEND'] = 'torch'  # not 'jax'", "import keras"),
    "set.py": program("import os", "os.environ.setdefault(\"KERAS_BACKEND\", \"torch\")", "import keras"),
    "config.py": program("import keras", "keras.config.set_backend('torch')"),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
def test_keras_has_the_backend_that_the_code_sets(folder: Folder, name: str) -> None:
    found = proposed(folder({"train.py": BACKENDS[name]}))
    assert (found.target, why(found)) == ("cpu", "train.py:2 sets Keras's backend torch")
    assert found.environment == {}, "the code sets it"


@pytest.mark.parametrize(
    ("path", "text", "place"),
    [
        ("Dockerfile", "FROM x\nENV KERAS_BACKEND=torch\n", "Dockerfile:2"),
        ("train.sh", "export KERAS_BACKEND=torch\n", "train.sh:1"),
        ("environment.yml", "variables:\n  KERAS_BACKEND: torch\n", "environment.yml:2"),
        ("keras.json", '{"backend": "torch"}', "keras.json"),
        (".keras/keras.json", '{"backend": "torch", "epsilon": 1e-7}', ".keras/keras.json"),
    ],
)
def test_what_sets_kerass_backend_outside_of_the_code_is_set_in_the_image(
    folder: Folder, path: str, text: str, place: str
) -> None:
    target = folder({"train.py": program("import keras"), path: text})
    found = proposed(target)
    assert (found.target, found.environment) == ("cpu", {"KERAS_BACKEND": "torch"})
    assert why(found) == found.reasons["environment: KERAS_BACKEND=torch"] == f"{place} sets Keras's backend torch"
    init.write(target, init.text(found))
    document = yaml.safe_load((target / "trainyard.yaml").read_text(encoding="utf-8"))
    assert document["environment"] == {"KERAS_BACKEND": "torch"}


@pytest.mark.parametrize(
    ("path", "text"),
    [("keras.json", "{"), ("keras.json", "[]"), ("keras.json", '{"backend": "openvino"}'),
     ("train.sh", "# KERAS_BACKEND=torch\n")],
)  # fmt: skip
def test_without_a_backend_keras_uses_tensorflow(folder: Folder, path: str, text: str) -> None:
    found = proposed(folder({"train.py": program("import keras"), path: text}))
    assert (found.target, why(found)) == ("tf-cpu", "train.py:1 imports keras, which uses tensorflow")
    assert found.environment == {}


def test_keras_beside_torch_gets_torch_as_its_backend(folder: Folder) -> None:
    found = proposed(folder({"train.py": program("import keras"), "requirements.txt": "keras\ntorch\n"}))
    assert (found.target, found.environment) == ("cpu", {"KERAS_BACKEND": "torch"})
    assert found.reasons["environment: KERAS_BACKEND=torch"] == "Keras uses tensorflow otherwise"


def test_a_target_without_kerass_backend_is_named(folder: Folder) -> None:
    path = folder({"train.py": BACKENDS["train.py"]})
    notes = proposed(path, target="tf-cpu").notes
    assert "train.py:2 sets Keras's backend torch, and tf-cpu does not contain torch" in notes


# JAX


JAX = {
    "import jax": "train.py:1 uses jax",
    "import flax.linen as nn": "train.py:1 imports flax, which needs jax",
    "import equinox as eqx": "train.py:1 imports equinox, which needs jax",
    "import haiku as hk": "train.py:1 imports dm-haiku, which needs jax",
    "import optax": "train.py:1 imports optax, which needs jax",
    "from transformers import FlaxAutoModel": "train.py:1 imports transformers.FlaxAutoModel, which needs jax",
    "from tensorflow_probability.substrates import jax as tfp":
        "train.py:1 imports tensorflow_probability.substrates.jax, which needs jax",
}  # fmt: skip


@pytest.mark.parametrize(("statement", "reason"), JAX.items(), ids=list(JAX))
def test_code_that_needs_jax_gets_its_image_for_cpus(folder: Folder, statement: str, reason: str) -> None:
    found = proposed(folder({"train.py": program(statement)}))
    assert (found.target, found.reasons["extends: jax"]) == ("jax", reason)


def test_jax_beside_another_framework_is_a_note(folder: Folder) -> None:
    path = folder({"train.py": program("import net", "import flax"), "net.py": "import jax\nimport torch\n"})
    found = proposed(path)
    assert found.target == "jax"
    assert "net.py:1 uses jax, and net.py:2 uses torch: --target chooses the other" in found.notes


@pytest.mark.parametrize(
    ("statement", "requirement", "target"),
    [("import flax", "flax", "jax"), ("import optax\ndevice = 'cuda'", "jax", "jax-gpu"),
     ("import jax", "jax[tpu]", "jax-tpu"), ("import jax", "libtpu", "jax-tpu"),
     ("import jax", "jax[cuda12]", "jax-gpu")],
)  # fmt: skip
def test_a_requirement_or_a_device_in_the_code_decides_the_target(
    folder: Folder, statement: str, requirement: str, target: str
) -> None:
    found = proposed(folder({"train.py": program(statement), "requirements.txt": f"{requirement}\n"}))
    assert found.target == target
