"""Compilers in images, for torch.compile: which images have them, and what is said where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainyard.common.errors import UserError
from trainyard.image import dockerfile, workspace_files
from trainyard.spec import model
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import code_files

Repository = Callable[..., RepositorySpec]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return the spec of a repository with one file, locked as its target is."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, code: str, target: str = "cpu") -> RepositorySpec:
        (tmp_path / "train.py").write_text(code, encoding="utf-8")
        (tmp_path / "trainyard.yaml").write_text(
            f"extends: {target}\nname: mine\nrun: python train.py\n{text}", encoding="utf-8"
        )
        parent = model.load("cpu", "amd64").usable_lock
        assert parent is not None
        spec = model.load(str(tmp_path), "amd64")
        assert isinstance(spec, RepositorySpec)
        return spec.model_copy(update={"lock": parent})

    return write


def test_images_with_pytorch_have_one_layer_with_compilers() -> None:
    """The same instructions on the same stage: BuildKit makes one layer of them for all images on a base."""
    layers: dict[str, set[str]] = {}
    for spec in model.catalogue():
        text = dockerfile.dockerfile(spec)
        _, compiler, rest = text.partition("AS compiler\n")
        assert bool(compiler) == (spec.framework.compiles and not spec.framework_in_base), spec.target
        if compiler:
            layers.setdefault(spec.base, set()).add(rest.partition("\nFROM ")[0])
            assert text.count("FROM system") == 1
    assert {base: len(texts) for base, texts in layers.items()} == {"debian-12": 1, "debian-13": 1}


@pytest.mark.parametrize(
    ("text", "target", "has"),
    [
        ("", "cpu", True),
        ("compiler: false\n", "cpu", False),
        ("", "tf-cpu", False),
        ("compiler: true\n", "tf-cpu", True),
    ],
)
def test_a_repository_has_the_compilers_of_its_target_unless_it_says_otherwise(
    repository: Repository, text: str, target: str, has: bool
) -> None:
    spec = repository(text, "", target)
    assert spec.has_compiler is has
    assert ("AS compiler\n" in dockerfile.dockerfile(spec)) is has


def test_what_is_neither_true_nor_false_is_one_line(repository: Repository) -> None:
    with pytest.raises(UserError) as error:
        repository("compiler: flase\n", "")
    assert str(error.value) == "trainyard.yaml:4: compiler: 'flase' is neither true nor false"


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("compiler: false\n", "import torch\n\nnet = torch.compile(net)\n", "train.py:3"),
        ("compiler: false\n", "import torch\n\n@torch.compile\ndef f(x): return x\n", "train.py:3"),
        ("compiler: false\n", "import re\nre.compile('x')\nnet.compile()\n", ""),
        ("compiler: false\n", "not Python 3 (\n", ""),
        ("", "torch.compile(net)\n", ""),
    ],
)
def test_code_that_compiles_in_an_image_without_a_compiler_is_named(
    repository: Repository, text: str, code: str, place: str
) -> None:
    spec = repository(text, code)
    assert workspace_files.compiles_without_compiler(spec, code_files.collect(spec.workspace)) == place
