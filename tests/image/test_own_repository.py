"""Repositories become images and jobs, from init to rehearse, through the installed wheel alone."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from testcontainers.community.registry import DockerRegistryContainer

from tests import own_repositories, wheels
from tests.engine import ENGINE
from tests.image.registry import running
from tests.miniature import Miniature
from tests.own_repositories import Repository
from trainyard.spec.naming import LABELS

pytestmark = pytest.mark.concurrent


@dataclass
class User:
    """A user with a folder that holds a repository, and the installed wheel.

    Attributes:
        command: ``trainyard``.
        folder: the repository; ``home``: where everything else is kept.
        registry: address to push to.
    """

    command: Path
    folder: Path
    home: Path
    registry: str

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``trainyard``."""
        state = str(self.home / "state")
        return wheels.call(self.command, *words, cwd=self.folder, HOME=str(self.home), XDG_STATE_HOME=state)

    def run(self, *words: str) -> str:
        """Run ``trainyard``, which must succeed; its standard output."""
        done = self.call(*words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-4000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def command(miniature: Miniature, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``trainyard``, installed from the wheel of a checkout that has the target ``mini`` too."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = wheels.build(miniature.folder, "wheel", folder / "dist")
    return wheels.install(wheel, folder / "environment")


@pytest.fixture(scope="module")
def server() -> Iterator[DockerRegistryContainer]:
    with running.container() as started:
        yield started


@pytest.fixture
def user(command: Path, server: DockerRegistryContainer, tmp_path: Path) -> Iterator[Callable[[Repository], User]]:
    """``user(repository)``: a user who has unpacked it. Images of it are removed after the test."""
    made: list[str] = []

    def start(repository: Repository) -> User:
        made.append(repository.name)
        (tmp_path / "home").mkdir()
        return User(command, repository.download(tmp_path), tmp_path / "home", f"{running.address(server)}/team")

    yield start
    for name in (name for one in made for name in (one, f"{one}-notebook")):
        for image in ENGINE.images(label=f"{LABELS}.target={name}"):
            ENGINE.client.images.remove(image.id, force=True)


def described(user: User, repository: Repository) -> None:
    """Write trainyard.yaml: ``init``, and what its user adds by hand."""
    user.run("init", "--yes", f"--target={repository.target}", *repository.options)
    repository.write_by_hand(user.folder / "trainyard.yaml")


@pytest.mark.parametrize(
    "repository",
    [
        own_repositories.SMALL,
        *(pytest.param(one, marks=pytest.mark.big(one.target)) for one in own_repositories.LONG),
    ],
    ids=lambda one: one.name,
)
def test_a_repository_is_run_pushed_edited_and_rehearsed(
    repository: Repository, user: Callable[[Repository], User], tmp_path: Path
) -> None:
    mine = user(repository)
    described(mine, repository)

    built = json.loads(mine.run("image", "--json"))
    labels = ENGINE.image(built["digest"], made_by="").labels
    assert (labels[f"{LABELS}.extends"], labels[f"{LABELS}.tested"]) == (repository.target, "trained")
    if repository is own_repositories.SMALL:
        assert labels["org.opencontainers.image.licenses"] == "MIT"
    assert repository.trained in mine.run("run", "--", *repository.arguments)
    if repository is own_repositories.SMALL:
        mine.run("run", "--detach", "--", "--steps=1000000000")
        mine.run("logs")
        stopped = mine.call("stop")
        assert stopped.returncode == 0 and "status 143 after " in stopped.stderr, stopped.stderr
        assert "no container of smallnet" in mine.call("logs").stderr

    kept = mine.home / "state/trainyard" / repository.name
    assert (kept.stat().st_mode & 0o777, (kept / "build/code.tar").stat().st_mode & 0o777) == (0o700, 0o600)

    pushed = json.loads(mine.run("push", f"--registry={mine.registry}", "--json"))
    assert pushed["digest"] == built["digest"]

    other = replace(mine, folder=tmp_path / "other" / mine.folder.name)
    shutil.copytree(mine.folder, other.folder)
    repository.change_a_line(other.folder)
    for words in (["run"], ["push", f"--registry={mine.registry}"]):
        done = other.call(*words)
        assert done.returncode == 2 and f"is the image of {mine.folder}, which has the same name" in done.stderr

    repository.change_a_line(mine.folder)
    edited = json.loads(mine.run("push", "--code-only", "--json"))
    assert edited["base"] == pushed["digest"]

    arguments = [f"--args={' '.join(repository.arguments)}"] if repository.arguments else []
    job = mine.run("job", "--code", ".", "--platform=vertex", *repository.machine, *arguments)
    assert edited["reference"] in job
    (tmp_path / "job.yaml").write_text(job, encoding="utf-8")
    report = json.loads(
        mine.run("rehearse", str(tmp_path / "job.yaml"), f"--output={tmp_path / 'rehearsed'}", "--json")
    )
    assert report["status"] == "succeeded"
    log = "".join(one.read_text(encoding="utf-8") for one in (tmp_path / "rehearsed" / "logs").glob("*.log"))
    assert repository.edited in log and repository.trained in log


def test_notebooks_get_an_environment_which_says_that_nothing_of_them_ran(user: Callable[[Repository], User]) -> None:
    files = {"part1.ipynb": "{}", "requirements.txt": "torch\n", "LICENSE": "All rights reserved.\n"}
    repository = dataclasses.replace(own_repositories.SMALL, name="notes", options=(), by_hand={}, files=files)
    mine = user(repository)
    described(mine, repository)
    built = json.loads(mine.run("image", "--json"))
    assert built["smoke"]["level"] == "environment"
    labels = ENGINE.image(built["digest"], made_by="").labels
    assert labels[f"{LABELS}.tested"] == "environment" and "org.opencontainers.image.licenses" not in labels
    done = mine.call("push", f"--registry={mine.registry}")
    assert done.returncode == 0 and "tested: environment" in done.stderr.splitlines(), done.stderr


def test_one_file_becomes_an_image_a_job_and_a_repository_with_the_same_image(
    user: Callable[[Repository], User],
) -> None:
    header = '# /// script\n# dependencies = {}\n# [tool.trainyard]\n# extends = "mini"\n# smoke = {{}}\n# ///\n'
    program = "import einops, torch\nprint('trained with einops', einops.__version__)\n"
    sources = [header.format("[]"), "%pip install einops==0.8.1\n!echo a shell", program]
    cells = [
        {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": one} for one in sources
    ]
    notebook = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 4})
    files = {"digits.py": header.format('["einops==0.8.1"]') + program, "digits.ipynb": notebook}
    mine = user(dataclasses.replace(own_repositories.SMALL, name="digits", files=files))

    made = json.loads(mine.run("image", "digits.py", "--json"))
    assert "trained with einops 0.8.1" in mine.run("run", "digits.py")
    pushed = json.loads(mine.run("push", "digits.py", f"--registry={mine.registry}", "--json"))
    assert pushed["digest"] == made["digest"]
    job = mine.run("job", "digits.py", "--platform=gke", "--machine=n1-standard-8")
    (mine.home / "job.yaml").write_text(job, encoding="utf-8")
    assert pushed["digest"] in job and mine.call("job", "check", str(mine.home / "job.yaml")).returncode == 0

    mine.run("init", "digits.py")
    assert json.loads(mine.run("image", "--json"))["digest"] == made["digest"]

    shown = mine.run("image", "digits.ipynb", "--json")
    assert json.loads(shown)["smoke"]["level"] == "ran"
    lines = mine.run("run", "digits.ipynb").splitlines()
    assert [line for line in lines if "shell" in line or "trained" in line] == ["a shell", "trained with einops 0.8.1"]


def test_a_repository_that_cannot_start_is_refused_with_the_line_of_its_own_file(
    user: Callable[[Repository], User],
) -> None:
    """An import was added, and no requirement for it."""
    repository = own_repositories.SMALL
    mine = user(repository)
    described(mine, repository)
    script = mine.folder / "src" / "smallnet" / "train.py"
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace("import torch\n", "import torch\nimport tqdm\n"), encoding="utf-8")
    line = script.read_text(encoding="utf-8").splitlines().index("import tqdm") + 1
    done = mine.call("image")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"image: src/smallnet/train.py:{line}: ModuleNotFoundError: No module named 'tqdm': add it to "
        "requirements in trainyard.yaml"
    )
    assert not ENGINE.images(f"trainyard:{repository.name}")
