"""Compare ``trainyard check`` with ``lock`` and ``image``: it refuses what they refuse, in the same words."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.package_index import PackageIndex, wheel
from tests.workspaces import empty, lock, repository

from trainyard.common.errors import UserError
from trainyard.image import workspace_files
from trainyard.spec import model

Command = Callable[..., tuple[int, str, str]]
Write = Callable[[dict[str, str]], Path]

SHA = "0" * 64

PROJECT = '[project]\nname = "mine"\nversion = "1"\n'


def yaml(more: str = "", run: str = "run: python train.py\n") -> str:
    return f"extends: cpu\nname: mine\n{run}{more}"


#: What is wrong -> the files of a repository, besides train.py, and what check, lock and image say.
REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "no file of code": (
        {"trainyard.yaml": yaml("code: [src]\n"), "src/.gitignore": "*\n"},
        "trainyard.yaml:4: code: no files: there are none, or .gitignore and .dockerignore leave out all",
    ),
    "a notebook as the command": (
        {"trainyard.yaml": yaml(run="run: python nb/train.ipynb\n"), "nb/train.ipynb": "{}"},
        "trainyard.yaml:3: run: 'python nb/train.ipynb': a notebook, which no program runs: make one of it with "
        "'jupyter nbconvert --to script nb/train.ipynb'",
    ),
    "a submodule of a downloaded archive": (
        {".gitmodules": '[submodule "x"]\n\tpath = third_party/x\n\turl = https://host.test/x\n'},
        "third_party/x: a git submodule, which a downloaded archive does not have: clone the repository with 'git "
        "clone --recurse-submodules'",
    ),
    "a Python that no base has": (
        {"pyproject.toml": f'{PROJECT}requires-python = ">=3.99"\n'},
        "pyproject.toml:4: requires-python '>=3.99' excludes Python 3.13 of cpu: relax it, or allow the Python of a "
        "base: debian-12 (Python 3.11), debian-13 (Python 3.13), python-3.12 (Python 3.12), python-3.10 (Python 3.10), "
        "python-3.14 (Python 3.14), debian-14 (Python 3.14)",
    ),
    "a Python that the base does not have": (
        {"trainyard.yaml": yaml("base: debian-12\n"), "pyproject.toml": f'{PROJECT}requires-python = ">=3.13"\n'},
        "pyproject.toml:4: requires-python '>=3.13' excludes Python 3.11 of cpu: relax it, or give another base, as in "
        "'base: debian-13'",
    ),
    "a folder of this machine": (
        {"requirements.txt": "-e /opt/lib\n"},
        "requirements.txt:1: '../../../../../../opt/lib' is outside of the repository: copy it there",
    ),
    "a folder that is not there": (
        {"requirements.txt": "-e ./libs/x\n"},
        "requirements.txt:1: './libs/x': there is no {root}/libs/x",
    ),
    "a folder without a project": (
        {"requirements.txt": "einops\n./libs/x\n", "libs/x/x.py": ""},
        "requirements.txt:2: './libs/x': has neither a pyproject.toml nor a setup.py",
    ),
    "a folder whose project has a mistake": (
        {"requirements.txt": "./libs/x\n", "libs/x/pyproject.toml": '[build-system]\nrequires = ["a b"]\n'},
        "libs/x/pyproject.toml:2: build-system.requires: 'a b' is no requirement",
    ),
    "a wheel of another project": (
        {"requirements.txt": "x @ file:./y-1-py3-none-any.whl\n", "y-1-py3-none-any.whl": ""},
        "requirements.txt:1: x @ file:./y-1-py3-none-any.whl: it is the project 'y'",
    ),
    "a wheel with another name": (
        {"requirements.txt": "./y.whl\n", "y.whl": ""},
        "requirements.txt:1: './y.whl': y.whl is not a valid wheel filename.",
    ),
    "a wheel with another hash": (
        {"requirements.txt": f"./y-1-py3-none-any.whl --hash=sha256:{SHA}\n", "y-1-py3-none-any.whl": "y"},
        "requirements.txt:1: ./y-1-py3-none-any.whl: the file has the SHA-256 "
        "a1fce4363854ff888cff4b8e7875d600c2682390412a8cf79b37d0b11148b0fa: pin that if it is right",
    ),
    "an address that is none of git's": (
        {"requirements.txt": "x @ git+ftp://host.test/x\n"},
        "requirements.txt:1: 'x @ git+ftp://host.test/x': git's addresses begin with git+https:// or git+ssh://",
    ),
    "an option in the place of a revision": (
        {"requirements.txt": "x @ git+https://host.test/x@--upload-pack=y\n"},
        "requirements.txt:1: 'x @ git+https://host.test/x@--upload-pack=y': '--upload-pack=y' is no revision",
    ),
    "a package for macOS": (
        {"requirements.txt": "einops\ntensorflow-macos==2.9 ; python_version > '3'\n"},
        "requirements.txt:2: tensorflow-macos==2.9 ; python_version > '3' is for macOS alone: remove it, or add "
        "'; sys_platform == \"darwin\"'",
    ),
    "a package for AMD's GPUs": (
        {"requirements.txt": "einops\njax-rocm60-pjrt==0.5.0\n"},
        "requirements.txt:2: jax-rocm60-pjrt==0.5.0 is for AMD's GPUs alone: remove it",
    ),
    "pins of the framework that exclude each other": (
        {"requirements.txt": "torch==2.9.0\ntorch==2.9.1\n"},
        "requirements.txt:1: torch==2.9.0 and torch==2.9.1 of requirements.txt:2 exclude each other: relax one",
    ),
    "a framework that the requirements exclude": (
        {"trainyard.yaml": yaml("framework: torch==2.9.1\nrequirements: [torch<2.9]\n")},
        "trainyard.yaml:4: torch==2.9.1 and torch<2.9 of trainyard.yaml:5 exclude each other: relax one",
    ),
    "pins that exclude each other": (
        {"requirements.txt": "-c constraints.txt\neinops>=0.8\n", "constraints.txt": "einops<0.8\n"},
        "requirements.txt:2: einops>=0.8 and einops<0.8 of constraints.txt:1 exclude each other: relax one",
    ),
    "an extra that is not there": (
        {"trainyard.yaml": yaml("requirements: {file: pyproject.toml, extras: [gpu]}\n"), "pyproject.toml": PROJECT},
        "pyproject.toml:1: no extra 'gpu'; there are: none",
    ),
    "a group that is not there": (
        {
            "trainyard.yaml": yaml("requirements: {file: pyproject.toml, groups: [trian]}\n"),
            "pyproject.toml": f"{PROJECT}[dependency-groups]\ntrain = []\n",
        },
        "pyproject.toml:4: no group 'trian' (did you mean 'train'?); there are: train",
    ),
    "a list that is not there": (
        {"requirements.txt": "-r requirements/bsae.txt\n", "requirements/base.txt": ""},
        "requirements.txt:1: no file 'requirements/bsae.txt' (did you mean 'base.txt'?)",
    ),
    "an address to compile": (
        {"trainyard.yaml": yaml('build: {packages: [g++], sources: ["x @ https://host.test/x-1.tar.gz"]}\n')},
        "trainyard.yaml:4: 'x @ https://host.test/x-1.tar.gz': an address, which no lock holds: name a version of an "
        "index",
    ),
    "an index that is a folder": (
        {"uv.toml": 'index-url = "./wheels"\n'},
        "uv.toml:1: index 'index-url-1' is no http(s) address, so a build cannot reach it: list wheels of this machine "
        "by their path",
    ),
    "a variable that is not set": (
        {"requirements.txt": "--extra-index-url https://${MY_TOKEN}@host.test/simple\n"},
        "requirements.txt:1: the environment variable MY_TOKEN is not set",
    ),
    "two credentials for a host": (
        {
            "requirements.txt": "--extra-index-url https://${U}:${A}@host.test/a\n"
            "--extra-index-url https://${U}:${B}@host.test/b\n",
        },
        "requirements.txt:2: indexes 'requirements-1' and 'requirements-2' are on one host with different credentials, "
        "which a netrc file cannot hold: use credentials that are valid for both",
    ),
    "a framework without trainers": (
        {"trainyard.yaml": "extends: tf-cpu\nname: mine\nframework: tensorflow-cpu==2.15.0\n"},
        "trainyard.yaml: the trainers of 'tf-cpu' need tensorflow {oldest} or later, not 2.15.0: give the command of "
        "your own, as in 'run: python train.py', or ask for another version",
    ),
    "files of another machine": (
        {"requirements.txt": "a @ file:///home/conda/a\nb==1\nc @ file:///home/conda/c\nd @ file:///tmp/d.whl\n"},
        "requirements.txt:1: 'a @ file:///home/conda/a' names a file of the machine where 'pip freeze' ran, as 2 more "
        "lines do: write the list there with 'pip list --format=freeze > requirements.txt'",
    ),
}


@pytest.fixture
def index(resolves: None) -> Iterator[PackageIndex]:
    with PackageIndex() as found:
        found.add(*(wheel(name, one) for name, one in model.load("tf-cpu", "amd64").locked().versions.items()))
        found.add(wheel("einops", "0.8.0"), wheel("tool", "1"))
        yield found


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the files of a repository without git, whose requirements are those of requirements.txt if it has one."""
    root = tmp_path / "repository"
    empty(root, monkeypatch)
    (root / ".git").rmdir()

    def run(files: dict[str, str]) -> Path:
        listed = "requirements: requirements.txt\n" if "requirements.txt" in files else ""
        for path, text in {"train.py": "", "trainyard.yaml": yaml(listed), **files}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return root

    return run


@pytest.mark.parametrize("case", REFUSED)
def test_check_refuses_what_lock_and_image_refuse_in_the_same_words(
    case: str, write: Write, trainyard: Command, resolves: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, words = REFUSED[case]
    for name in ("U", "A", "B"):
        monkeypatch.setenv(name, name)
    root = write(files)
    oldest = model.matrix.matrix().frameworks["tensorflow"].trainers
    line = words.replace("{root}", str(root)).replace("{oldest}", str(oldest))
    if "outside of the repository" in line:
        line = f"requirements.txt:1: '{'../' * len(root.parts[1:])}opt/lib' is outside of the repository: copy it there"
    status, _, err = trainyard("check")
    assert (status, err.splitlines()[:-1]) == (1, [line])
    status, _, err = trainyard("lock")
    assert (status, err.splitlines()[-1]) == (2, f"lock: {line}")
    with pytest.raises(UserError) as error:
        workspace_files.prepare(repository())
    assert str(error.value) == line


def test_check_refuses_a_lock_that_image_refuses(write: Write, trainyard: Command) -> None:
    root = write({})
    lock(repository())  # with the contents of no Trainyard
    with pytest.raises(UserError) as error:
        workspace_files.prepare(repository())
    assert trainyard("check")[2].splitlines()[0] == str(error.value)
    (root / "pylock.trainyard.toml").write_text("no lock", encoding="utf-8")
    with pytest.raises(UserError) as error:
        workspace_files.prepare(repository())
    assert trainyard("check")[2].splitlines()[0] == str(error.value)


@pytest.mark.parametrize(
    "requirements",
    [
        "numpy<2 ; python_version < '3.13'\nnumpy>=2 ; python_version >= '3.13'\n",
        "torch==2.9.1+cpu\ntorch>=2.9\n",
        "tensorflow-macos ; sys_platform == 'darwin'\n",
        "einops==0.7.0\neinops==0.7\n",
        "x @ git+https://host.test/x@v1\n",
    ],
)
def test_check_refuses_nothing_that_may_work_and_promises_no_more_than_it_knows(
    requirements: str, write: Write, trainyard: Command, resolves: None
) -> None:
    write({"requirements.txt": requirements})
    status, _, err = trainyard("check")
    assert status == 0
    assert err.splitlines()[-1].endswith(
        ": no mistake in code, command and requirements; 'trainyard check --online' also asks the indexes"
    )


@pytest.fixture
def online(write: Write, trainyard: Command, index: PackageIndex) -> Callable[..., list[str]]:
    """Return what ``check --online`` says of requirements that the index of the test has."""

    def run(requirements: str, url: str = index.url) -> list[str]:
        text = "extends: tf-cpu\nname: mine\nrun: python train.py\nrequirements: requirements.txt\n"
        settings = f'[[index]]\nname = "own"\nurl = "{url}"\ndefault = true\n'
        write({"trainyard.yaml": text, "requirements.txt": requirements, "uv.toml": settings})
        return trainyard("check", "--online")[2].splitlines()

    return run


def test_online_nothing_prevents_an_image_if_everything_resolves(
    online: Callable[..., list[str]], index: PackageIndex, tmp_path: Path
) -> None:
    assert online("einops\n")[-1].endswith(": nothing prevents an image")
    assert not (tmp_path / "repository" / "pylock.trainyard.toml").exists()
    assert "/simple/einops/" in index.seen


def test_online_a_package_that_no_index_has_is_refused_in_the_words_of_lock(
    online: Callable[..., list[str]], trainyard: Command
) -> None:
    line = online("einops\nabsent\n")[0]
    assert line.startswith("requirements.txt:2: absent cannot be installed: because absent was not found in the ")
    assert trainyard("lock")[2].splitlines()[-1] == f"lock: {line}"


def test_online_a_package_without_a_wheel_for_a_platform_is_refused_in_the_words_of_lock(
    online: Callable[..., list[str]], index: PackageIndex, trainyard: Command
) -> None:
    index.add(wheel("narrow", "1", tag="py3-none-manylinux_2_17_aarch64"))
    line = online("narrow\n")[0]
    assert line.startswith("requirements.txt:1: narrow cannot be installed: ")
    assert trainyard("lock")[2].splitlines()[-1] == f"lock: {line}"


def test_online_an_index_that_asks_for_credentials_is_named_with_the_variables(
    online: Callable[..., list[str]], trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageIndex(("me", "secret")) as private:
        ask = "set UV_INDEX_OWN_USERNAME and UV_INDEX_OWN_PASSWORD, or name 127.0.0.1 in ~/.netrc"
        line = f"uv.toml:3: index 'own' asks for credentials (HTTP 401): {ask}"
        assert online("einops\n", private.url)[0] == line
        assert trainyard("lock")[2].splitlines()[-1] == f"lock: {line}"
        monkeypatch.setenv("UV_INDEX_OWN_USERNAME", "me")
        monkeypatch.setenv("UV_INDEX_OWN_PASSWORD", "other")
        line = f"uv.toml:3: index 'own' does not take the credentials that it is given (HTTP 401): {ask}"
        assert online("einops\n", private.url)[0] == line
        monkeypatch.setenv("UV_INDEX_OWN_PASSWORD", "secret")
        assert "HTTP 401" not in str(online("einops\n", private.url)) and private.seen


def test_online_an_index_that_does_not_answer_is_named(
    online: Callable[..., list[str]], trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line, last) = online("tensorflow-cpu==2.20.0\n", "http://127.0.0.1:1/simple")
    assert line.startswith("uv.toml:3: index 'own', http://127.0.0.1:1/simple, does not answer: ")
    assert last == "check: 1 of these must be corrected before 'trainyard image'"
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    said = trainyard("lock")[2].splitlines()[-1]
    assert "Failed to fetch" in said and "no wheel" not in said


def test_online_addresses_and_revisions_are_asked_and_nothing_is_built(
    online: Callable[..., list[str]], index: PackageIndex, tmp_path: Path
) -> None:
    there, gone = (f"http://{index.host}/files/{name}-1-py3-none-any.whl" for name in ("tool", "gone"))
    library = tmp_path / "library"
    library.mkdir()
    for words in ("init --quiet", "commit --quiet --allow-empty -m x", "tag v1.0.0"):
        who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
        subprocess.run(["git", *who, *words.split()], cwd=library, check=True)
    git = f"git+file://{library}"
    refused = online(f"tool @ {there}\ngone @ {gone}\nlib @ {git}@v1.0\nother @ {git}x\n")
    assert refused[0] == f"requirements.txt:2: gone @ {gone}: cannot be downloaded (Not Found)"
    assert refused[1] == f"requirements.txt:3: lib @ {git}@v1.0: the repository has no 'v1.0' (did you mean 'v1.0.0'?)"
    assert refused[2] == f"requirements.txt:4: other @ {git}x: '{library}x' does not appear to be a git repository"
    said = online(f"tool @ {there}\nlib @ {git}@v1.0.0\neinops\n")[-1]
    read = f"tool @ {there}, lib @ {git}@v1.0.0"
    assert said.endswith(f"nothing prevents an image, as far as is known before 'trainyard lock' reads {read}")
