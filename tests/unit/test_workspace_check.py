"""Test ``trainyard check``: what is refused before anything is resolved or built, and what is noted."""

from __future__ import annotations

import cProfile
import json
import pstats
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.workspaces import added, lock

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import repository_lock, workspace_files
from trainyard.spec import model
from trainyard.spec.model import RepositorySpec
from trainyard.workspace import check

Command = Callable[..., tuple[int, str, str]]
Repository = Callable[..., RepositorySpec]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Make, as in ``repository("python train.py", {"train.py": "..."})``, a repository in the current folder."""

    def make(run: str, files: dict[str, str], more: str = "") -> RepositorySpec:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        document = f"extends: cpu\nname: mine\n{more}run: {json.dumps(run)}\n"
        (tmp_path / "trainyard.yaml").write_text(document, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        spec = model.load(None, "amd64")
        assert isinstance(spec, RepositorySpec)
        return spec

    return make


FILES = {
    "train.py": "",
    "pkg/__init__.py": "",
    "pkg/train.py": "",
    "pkg/tool/__init__.py": "",
    "app/__main__.py": "",
    "space/part.py": "",
    "train.sh": "python train.py",
    "src/inner/__init__.py": "",
    "src/inner/fit.py": "",
    "pyproject.toml": '[project]\nname = "inner"\nversion = "1"\n[project.scripts]\ntrain-it = "inner.fit:main"\n',
    ".gitignore": "local.py\n",
    "local.py": "",
}

NO_FILE = "no file 'trian.py' in the code (did you mean 'train.py'?)"

#: Commands that cannot work -> why.
REFUSED = {
    "python trian.py": NO_FILE,
    "python3 -u -W ignore -Xfrozen_modules=off trian.py --epochs 1": NO_FILE,
    "python /workspace/trian.py": NO_FILE,
    "python local.py": "'local.py' is left out by .gitignore, .dockerignore or 'code'",
    "./trian.sh": "no file 'trian.sh' in the code (did you mean 'train.sh'?)",
    "bash ./trian.sh": "no file 'trian.sh' in the code (did you mean 'train.sh'?)",
    "torchrun --nproc_per_node 2 trian.py --config x.yaml": NO_FILE,
    "accelerate launch --num_processes=2 trian.py": NO_FILE,
    "python -m torch.distributed.run trian.py": NO_FILE,
    "python -m pkg.trian": "no module 'pkg.trian' in the code (did you mean 'pkg.train'?)",
    "python -m inner.fitt": "no module 'inner.fitt' in the code (did you mean 'inner.fit'?)",
    "python -m pkg.tool": "the package 'pkg.tool' has no __main__.py",
}


@pytest.mark.parametrize("command", REFUSED)
def test_a_command_whose_file_is_not_in_the_code_is_refused(repository: Repository, command: str) -> None:
    found = check.check(repository(command, FILES))
    assert found.refused == [f"trainyard.yaml:3: run: '{shlex.join(shlex.split(command))}': {REFUSED[command]}"]


@pytest.mark.parametrize(
    "command",
    [
        "python train.py",
        "python pkg/train.py",
        "python app",
        "python .",
        "python -m pkg.train",
        "python -m inner.fit",
        "python -m app",
        "python -m timeit",
        "python -m einops.something",
        "python -m torch.utils.collect_env",
        "python -c 'import trian'",
        "python -",
        "python --version trian.py",
        "python $SCRIPT",
        "python /opt/other/trian.py",
        "python ../trian.py",
        "bash -c 'python trian.py'",
        "bash trian.sh",
        "python -m trian",
        "python -m space.trian",
        "train-it",
        "trian",
        "env X=1 python trian.py",
        "torchrun train.py",
        "torchrun -m pkg.trian",
        "torchrun --no-python ./trian.sh x.py",
        "accelerate launch --module pkg.trian x.py",
        "accelerate test",
    ],
)
def test_a_command_that_may_work_is_neither_refused_nor_noted(repository: Repository, command: str) -> None:
    found = check.check(repository(command, FILES, "requirements: [einops]\n"))
    assert (found.refused, found.notes) == ([], [])


def test_nothing_is_said_of_files_below_a_link_or_on_another_module_path(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to("pkg")
    for command in ("python link/trian.py", "python -m link.trian"):
        assert check.check(repository(command, FILES)).refused == []
    assert check.check(repository("python -m pkg.trian", FILES, "environment: {PYTHONPATH: /x}\n")).refused == []


def test_all_that_is_refused_is_listed(repository: Repository, trainyard: Command, tmp_path: Path) -> None:
    files = {"train.py": "", ".env": "A=b", "requirements.txt": "torch=1\n"}
    repository("python trian.py", files, "requirements: requirements.txt\n")
    status, out, err = trainyard("check", "--json")
    assert status == 1
    facts = json.loads(out)
    assert [line.partition(": ")[0] for line in facts["refused"]] == ["requirements.txt:1", "trainyard.yaml:4", ".env"]
    assert all(line in err for line in facts["refused"])
    assert not facts["passed"]
    assert err.splitlines()[-1] == "check: 3 of these must be corrected before 'trainyard image'"


def test_a_repository_without_mistakes_passes(repository: Repository, trainyard: Command, tmp_path: Path) -> None:
    repository("python train.py", {"train.py": "import torch\n"})
    status, out, err = trainyard("check", f"{tmp_path}/")
    assert (status, out) == (0, "")
    assert ": 1 files, 13 B: no mistake in code, command and requirements; " in err
    status, out, _ = trainyard("check", "--json")
    assert json.loads(out) == {"passed": True, "refused": [], "notes": [], "files": 1, "bytes": 13}


def test_a_target_of_the_catalogue_is_not_checked(trainyard: Command) -> None:
    status, _, err = trainyard("check", "cpu")
    assert (status, err) == (2, "check: cpu is a target of the catalogue: 'trainyard dev check' checks those\n")


def test_a_misspelt_folder_of_code_is_refused(repository: Repository) -> None:
    found = check.check(repository("python scr/train.py", {"src/train.py": ""}, "code: [scr]\n"))
    assert found.refused == ["trainyard.yaml:3: code: 'scr' does not exist (did you mean 'src'?)"]


def test_a_file_that_must_not_be_in_an_image_is_refused(repository: Repository, tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(60 * 10**6)
    found = check.check(repository("python train.py", {"train.py": ""}))
    assert found.refused[0].startswith("weights.bin: 60.0 MB, more than the 50.0 MB that a file of the code may have")
    assert found.files == []


def test_the_largest_folders_of_large_code_are_named(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LARGE", 10_000)
    files = {f"data/part{number}/a/x.txt": "x" * 1000 * (number + 1) for number in range(6)}
    found = check.check(repository("python train.py", {**files, "train.py": ""}))
    assert len(found.notes) == 1
    assert found.notes[0].startswith("the code has 21.0 KB, all of which is built and pushed: ")
    assert found.notes[0].endswith(
        "the largest folders: data/part5 6.0 KB, data/part4 5.0 KB, data/part3 4.0 KB, data/part2 3.0 KB, "
        "data/part1 2.0 KB"
    )
    assert found.refused == []


def notes_of(found: check.Checked) -> list[str]:
    return [note.partition(", which neither")[0] for note in found.notes]


def test_an_import_that_nothing_provides_is_noted(repository: Repository) -> None:
    train = "import json, torch, numpy, tqdm, sklearn, cv2, tensorflow, unknown\nimport helper\nfrom pkg import x\n"
    files = {
        "train.py": train + "try:\n  import wandb\nexcept ImportError: pass\n",
        "helper.py": "import einops\ndef f():\n  import pandas\n",
        "pkg/__init__.py": "x = 1\n",
        "other.py": "import polars\n",
        "requirements.txt": "tqdm\nopencv-contrib-python-headless\n",
    }
    found = check.check(repository("python train.py", files, "requirements: requirements.txt\n"))
    assert notes_of(found) == [
        "train.py:1 imports sklearn",
        "train.py:1 imports tensorflow",
        "helper.py:1 imports einops",
    ]
    assert found.notes[0].endswith("'cpu' has: add scikit-learn to 'requirements' unless one of them needs it")


@pytest.mark.parametrize("run", ["python -m inner.fit", "train-it", "torchrun src/inner/fit.py"])
def test_the_imports_of_modules_and_of_commands_of_the_project_are_followed(repository: Repository, run: str) -> None:
    found = check.check(repository(run, {**FILES, "src/inner/fit.py": "import einops, inner\n"}))
    assert notes_of(found) == ["src/inner/fit.py:1 imports einops"]


def test_what_the_lock_has_is_provided(repository: Repository) -> None:
    spec = repository("python train.py", {"train.py": "import einops\n"})
    assert notes_of(check.check(spec)) == ["train.py:1 imports einops"]
    spec = repository("python train.py", {}, "requirements: [needs-einops]\n")
    lock(spec, added("needs-einops"), added("einops"))
    assert check.check(repository("python train.py", {}, "requirements: [needs-einops]\n")).notes == []


def test_a_requirement_without_a_name_may_provide_anything(repository: Repository) -> None:
    files = {"train.py": "import einops\n", "requirements.txt": "git+https://host/x/y@v1\n"}
    assert check.check(repository("python train.py", files, "requirements: requirements.txt\n")).notes == []


@pytest.mark.parametrize(
    ("file", "text", "noted"),
    [
        ("setup.py", "from setuptools import setup\nsetup(name='x', ext_modules=extensions())\n", ":2: ext_modules"),
        ("setup.py", "import setuptools\nsetuptools.setup(\n    ext_modules=[CUDAExtension('a', ['b.cu'])],\n)\n",
         ":3: ext_modules"),
        ("setup.py", "from setuptools import setup\nsetup(name='mine', rust_extensions=[RustExtension('a')])\n",
         ":2: rust_extensions"),
        ("setup.py", "from setuptools import setup\nsetup(name='mine', ext_modules=[], cffi_modules=None)\n", ""),
        ("setup.py", "from setuptools import setup\nsetup(**settings())  # what they are is not known\n", ""),
        ("pyproject.toml", '[build-system]\nbuild-backend = "maturin"\n', ":2: maturin"),
        ("pyproject.toml", '[build-system]\nbuild-backend = "scikit_build_core.build"\n',
         ":2: scikit_build_core.build"),
        ("pyproject.toml", '[build-system]\nbuild-backend = "mesonpy"\n', ":2: mesonpy"),
        ("pyproject.toml", '[build-system]\nbuild-backend = "setuptools.build_meta"\n', ""),
    ],
)  # fmt: skip
def test_an_extension_of_the_repository_is_named_and_nothing_is_refused(
    repository: Repository, file: str, text: str, noted: str
) -> None:
    found = check.check(repository("python train.py", {"train.py": "", file: text}))
    said = ": extensions of the repository are not compiled for the image"
    notes = [note.partition(" image: ")[0] + " image" for note in found.notes if "trainyard lock" not in note]
    assert notes == ([f"{file}{noted}{said}"] if noted else [])
    assert not found.refused


def test_a_setup_py_that_the_build_backend_does_not_run_compiles_nothing(repository: Repository) -> None:
    files = {
        "train.py": "",
        "setup.py": "from setuptools import setup\nsetup(name='mine', ext_modules=extensions())\n",
        "pyproject.toml": '[project]\nname = "mine"\nversion = "1"\n[build-system]\nrequires = ["poetry-core"]\n'
        'build-backend = "poetry.core.masonry.api"\n',
    }
    assert not [note for note in check.check(repository("python train.py", files)).notes if "extensions" in note]


def test_an_extension_that_the_build_compiles_is_in_the_image(repository: Repository) -> None:
    files = {"train.py": "", "setup.py": "from setuptools import setup\nsetup(name='My.Ops', ext_modules=made())\n"}
    spec = repository("python train.py", files, "build: {packages: [g++], sources: [.]}\n")
    assert [note for note in check.check(spec).notes if "extensions" in note] == []


def test_an_extension_that_is_required_from_an_index_is_in_the_image(repository: Repository) -> None:
    files = {"train.py": "", "setup.py": "from setuptools import setup\nsetup(name='My.Ops', ext_modules=made())\n"}
    spec = repository("python train.py", files, "build: {sources: [my-ops==1.0]}\n")
    assert [note for note in check.check(spec).notes if "extensions" in note] == []


def test_what_is_compiled_without_a_compiler_is_noted(repository: Repository) -> None:
    for packages, noted in (
        ("[]", True),
        ("[ninja-build, libopenmpi-dev]", True),
        ("[g++]", False),
        ("[gcc-14]", False),
    ):
        spec = repository("python train.py", {"train.py": ""}, f"build: {{sources: [a==1], packages: {packages}}}\n")
        note = "trainyard.yaml:3: build: 'packages' has no compiler, such as g++"
        assert (check.check(spec).notes == [note]) == noted


def test_packages_alone_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainyard.yaml").write_text("extends: cpu\nname: mine\nrequirements: reqs.txt\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    spec = model.load(None, "amd64")
    assert isinstance(spec, RepositorySpec)
    assert check.check(spec).refused == ["trainyard.yaml:3: requirements: no file 'reqs.txt'"]


def test_a_refusal_ends_lock_and_build_before_anything_is_resolved(
    repository: Repository, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = repository("python trian.py", {"train.py": "", ".env": "A=b"})
    monkeypatch.setattr(repository_lock, "lock", lambda *_, **__: pytest.fail("resolved"))
    line = f"trainyard.yaml:3: run: 'python trian.py': {NO_FILE}"
    with pytest.raises(UserError) as error:
        workspace_files.prepare(spec)
    assert str(error.value) == line
    status, out, err = trainyard("lock")
    assert (status, out) == (2, "")
    other, last = err.splitlines()[-2:]
    assert other.startswith(".env: an environment file, which ")
    assert last == f"lock: {line}"


def test_the_check_looks_at_each_file_once(repository: Repository, tmp_path: Path) -> None:
    """Count calls of functions, about 200 a file: seconds depend on what else the machine does."""
    check.check(repository("python train.py", {"train.py": "import torch\nimport numpy\n"}))  # reads Trainyard's tables
    text = "import os\nimport numpy\n\n\ndef double(x):\n    return x + x\n" * 8
    for number in range(2_000):
        path = tmp_path / "pkg" / f"part{number // 100}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    spec = repository("python train.py", {"train.py": "import torch\nfrom pkg.part1 import m100\n"})
    with cProfile.Profile() as profile:
        found = check.check(spec)
    assert (len(found.files), found.refused, found.notes) == (2_001, [], [])
    assert pstats.Stats(profile).total_calls / 2_000 < 300


def test_pre_commit_runs_the_check() -> None:
    """The keys that https://pre-commit.com/#creating-new-hooks demands, and a command that exists."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert hook.keys() >= {"id", "name", "entry", "language"}
    assert (hook["entry"], hook["pass_filenames"]) == ("trainyard check", False)


@pytest.mark.parametrize(
    ("run", "more", "files", "refused"),
    [
        ("python train.py", "", {"train.py": 'import os\nprint("x"\n'}, "train.py:2: '(' was never closed"),
        ("python -m pkg.fit", "", {"pkg/__init__.py": "", "pkg/fit.py": "if 1:\nx = 1"}, "pkg/fit.py:2: expected"),
        ("train.py --epochs 1", "", {"train.py": ""}, "yaml:3: run: 'train.py --epochs 1': a file is no program "
         "without a path: write 'python train.py --epochs 1'"),
        ("./train.sh", "", {"train.sh": ""}, "run: './train.sh': the file is not executable: write 'bash train.sh'"),
        ("python a.py", "environment:\n  OPENAI_API_KEY: abc123\n", {"a.py": ""},
         "trainyard.yaml:4: environment: 'OPENAI_API_KEY': a secret by its name (OPENAI_API_KEY), which everybody"),
        ("python a.py", "base: debian-13\nsystem:\n- libgl1\n- libgl1-mesa-glx\n", {"a.py": ""},
         "trainyard.yaml:6: system: debian-13 has no package 'libgl1-mesa-glx': write 'libgl1'"),
    ],
)  # fmt: skip
def test_what_cannot_start_or_be_installed_is_refused_with_its_line(
    run: str, more: str, files: dict[str, str], refused: str, repository: Repository
) -> None:
    (line,) = check.check(repository(run, files, more)).refused
    assert refused in line


def test_a_package_that_the_base_still_has_a_program_in_path_and_a_value_are_taken(repository: Repository) -> None:
    more = "base: debian-12\nsystem: [libgl1-mesa-glx]\nenvironment: {PATH: /workspace, MODE: fast}\n"
    assert check.check(repository("train.py", {"train.py": ""}, more)).refused == []


def test_a_broken_import_and_pointers_of_git_lfs_are_noted(repository: Repository) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 3\n"
    files = {"train.py": "import helper", "helper.py": "def f(:\n", "model.bin": pointer, "data/part.bin": pointer}
    found = check.check(repository("python train.py", files, "smoke: {data: data}\n"))
    assert found.refused == []
    assert [found.notes[0][:30], found.notes[1]] == [
        "helper.py:1: invalid syntax (b",
        "data/part.bin: what Git LFS has in the place of the file, and 1 more files like this: fetch it with 'git lfs "
        "pull'",
    ]


def test_a_job_that_trainyard_wrote_is_no_code_whatever_its_name(repository: Repository) -> None:
    files = {
        "train.py": "",
        "job.yaml": "# mine\na: 1\n",
        "jobs/x": "#!/bin/bash\n# a\n# Written by `trainyard job`. b\n",
    }
    assert [one.path for one in check.check(repository("python train.py", files)).files] == ["job.yaml", "train.py"]
