"""The wheel is the same wherever it is built, and works outside the checkout."""

from __future__ import annotations

import hashlib
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests import wheels
from tests.wheels import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wheel")


@pytest.fixture(scope="module")
def wheel(folder: Path) -> Path:
    """The wheel of a clone."""
    return wheels.build(wheels.clone(folder / "clone"), "wheel", folder / "dist")


@pytest.fixture(scope="module")
def trainyard(wheel: Path, folder: Path) -> Path:
    """The command, installed in an environment outside the checkout."""
    return wheels.install(wheel, folder / "environment")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_wheel_is_the_same_from_a_clone_and_from_the_sdist(wheel: Path, folder: Path) -> None:
    sdist = wheels.build(folder / "clone", "sdist", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (project,) = (folder / "unpacked").iterdir()
    assert digest(wheels.build(project, "wheel", folder / "from-sdist")) == digest(wheel)


def test_the_wheel_is_the_same_under_another_umask(wheel: Path, folder: Path) -> None:
    clone = wheels.clone(folder / "private", umask=0o077)
    assert (clone / "README.md").stat().st_mode & 0o777 == 0o600
    assert digest(wheels.build(clone, "wheel", folder / "private-dist", umask=0o077)) == digest(wheel)


def test_the_wheel_knows_its_commit(wheel: Path, folder: Path) -> None:
    commit = wheels.run("git", "rev-parse", "HEAD", cwd=folder / "clone").strip()
    with zipfile.ZipFile(wheel) as archive:
        facts = json.loads(archive.read("trainyard/_build.json"))
    assert facts == {"revision": commit, "time": 1795176000}


def test_changes_that_are_not_committed_are_named_in_the_wheel(folder: Path) -> None:
    clone = wheels.clone(folder / "dirty")
    (clone / "launcher" / "more.py").touch()
    with zipfile.ZipFile(wheels.build(clone, "wheel", folder / "dirty-dist")) as archive:
        assert json.loads(archive.read("trainyard/_build.json"))["revision"].endswith("-dirty")
        assert "trainyard/_data/launcher/more.py" in archive.namelist()


def test_the_installed_command_reads_its_own_data_and_not_the_current_folder(trainyard: Path, folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    (elsewhere / "images" / "mine").mkdir(parents=True)
    (elsewhere / "images" / "mine" / "image.yaml").write_text("not a spec", encoding="utf-8")
    listed = json.loads(wheels.run(trainyard, "list", "--json", cwd=elsewhere))
    versions = {f"{path.parts[-3]}-{path.parts[-2]}" for path in ROOT.glob("images/*/*/version.yaml")}
    assert set(listed) == {path.parent.name for path in ROOT.glob("images/*/image.yaml")} | versions
    rendered = wheels.run(trainyard, "render", "--stdout", "tf-cpu", cwd=elsewhere)
    assert rendered == (ROOT / "images" / "tf-cpu" / "Dockerfile").read_text(encoding="utf-8")


def test_the_installed_command_writes_a_job(trainyard: Path, folder: Path) -> None:
    words = ("--platform", "vertex", "--trainer", "mnist", "--registry", "us-docker.pkg.dev/p/ml")
    job = wheels.run(trainyard, "job", *words, "tf-cpu", cwd=folder)
    assert "imageUri: us-docker.pkg.dev/p/ml/trainyard:tf-cpu" in job


def test_the_installed_command_has_the_schemas_and_digits_of_other_projects(trainyard: Path, folder: Path) -> None:
    wheels.run(trainyard, "dataset", "digits", "digits", cwd=folder)
    assert (folder / "digits" / "t10k-images-idx3-ubyte").stat().st_size == 16 + 360 * 28 * 28
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "n"}, "spec": {"paralelism": 1}}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    assert "unknown field 'paralelism'" in wheels.call(trainyard, "check-job", "job.json", cwd=folder).stderr


def test_the_installed_package_keeps_its_state_in_the_users_folder(trainyard: Path, folder: Path) -> None:
    python = trainyard.parent / "python"
    script = "from trainyard.common import settings; print(settings.state_folder())"
    given = str(folder / "state")
    assert wheels.run(python, "-c", script, cwd=folder, XDG_STATE_HOME=given) == f"{given}/trainyard\n"
    assert wheels.run(python, "-c", script, cwd=folder, XDG_STATE_HOME="", HOME="/home/me") == (
        "/home/me/.local/state/trainyard\n"
    )


def test_the_installed_package_labels_images_with_its_commit(trainyard: Path, folder: Path) -> None:
    script = "from trainyard.image import facts; print(facts.revision(), facts.source_date_epoch())"
    commit = wheels.run("git", "rev-parse", "HEAD", cwd=folder / "clone").strip()
    assert wheels.run(trainyard.parent / "python", "-c", script, cwd=folder) == f"{commit} 1795176000\n"


def test_the_installed_package_knows_the_forms_of_tokens(trainyard: Path, folder: Path) -> None:
    script = "from trainyard.oci import secret_scan; print(secret_scan.in_text(b'KG' + b'AT_' + b'0a1f' * 8))"
    assert wheels.run(trainyard.parent / "python", "-c", script, cwd=folder) == "['a Kaggle token']\n"


@pytest.mark.parametrize("command", [("dev", "check"), ("test",), ("render",), ("lock", "scripts"), ("sizes",)])
def test_a_command_that_needs_a_checkout_says_so(command: tuple[str, ...], trainyard: Path, folder: Path) -> None:
    found = wheels.call(trainyard, *command, cwd=folder, DOCKER_HOST="tcp://127.0.0.1:1")
    assert (found.returncode, found.stdout) == (2, "")
    (line,) = found.stderr.splitlines()
    assert "checkout of Trainyard" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("diff",), "as in 'trainyard dev diff <reference> <reference>'"),
        (("rehearse",), "as in 'trainyard job rehearse job.yaml'"),
        (("job", "cpu", "--platform", "gke", "--pin"), "'--pin': trainyard:cpu names no registry: give '--registry'"),
        (("pod", "--zone", "z"), "set '--name', as in 'trainyard pod --name run1 --accelerator v5litepod-16 xla'"),
    ],
)
def test_messages_of_the_installed_command_name_it_and_not_make(
    words: tuple[str, ...], said: str, trainyard: Path, folder: Path
) -> None:
    found = wheels.call(trainyard, *words, cwd=folder)
    assert found.returncode == 2
    assert said in found.stderr and "make " not in found.stderr
