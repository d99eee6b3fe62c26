"""``trainyard lock`` in a user's repository: uv resolves against an index on loopback."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.pylock import Package
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests import locks, workspaces
from tests.fakes.package_index import PackageIndex, source_distribution, wheel
from tests.workspaces import empty, fresh, is_current, relock, repository
from tests.workspaces import versions as pinned

import trainyard as package
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import dockerfile, lock_origin, recipes, resolver
from trainyard.spec import model, pylock
from trainyard.spec.lock import DEFAULT, File, Lock, Locked, Made, Origin, Pin, Role, Unreadable
from trainyard.spec.model import RepositorySpec, Spec
from trainyard.workspace import indexes

TARGET = model.load("tf-cpu", "amd64")

Write = Callable[..., RepositorySpec]


def fill(index: PackageIndex) -> None:
    """Add the packages of tf-cpu, and some that users ask for."""
    index.add(*(wheel(name, version) for name, version in TARGET.locked().versions.items()))
    index.add(
        wheel("einops", "0.7.0"), wheel("einops", "0.8.0"), wheel("tqdm", "4.0"), wheel("pillow", "12.0"),
        wheel("tensorflow", "2.21.0"), wheel("old", "1", ("numpy<2",)), wheel("keras-things", "1", ("tensorflow>=2",)),
    )  # fmt: skip


@pytest.fixture
def index(resolves: None) -> Iterator[PackageIndex]:
    with PackageIndex() as found:
        fill(found)
        yield found


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex) -> Write:
    """Write the files of a repository that uses ``index`` alone; its spec."""
    root = tmp_path / "repository"
    empty(root, monkeypatch)
    (root / "uv.toml").write_text(f'[[index]]\nname = "fake"\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")

    def run(requirements: str = "einops\n", more: str = "", extends: str = "tf-cpu") -> RepositorySpec:
        text = f"extends: {extends}\nrun: python train.py\nrequirements: requirements.txt\n{more}"
        (root / "trainyard.yaml").write_text(text, encoding="utf-8")
        (root / "requirements.txt").write_text(requirements, encoding="utf-8")
        return repository()

    return run


def locked(spec: Spec) -> Locked:
    """Return what the lock that is there now has for amd64."""
    return fresh(spec).locked()


def file_of(index: PackageIndex, name: str) -> File:
    """Return a file of an index as a lock has it."""
    body = index.files[name]
    return File(name, hashlib.sha256(body).hexdigest(), len(body))


def versions(spec: Spec) -> dict[str, str]:
    return locked(spec).versions


def content_hash(spec: Spec) -> str:
    """Return the hash of an image of a repository, whose Dockerfile is rendered; its code's layer is empty."""
    (spec.build_folder / "code.tar").touch()
    return recipes.make(fresh(spec)).content_hash("debian")


def origin(spec: Spec) -> Origin:
    content = fresh(spec).usable_lock
    assert content and content.origin
    return content.origin


def test_a_lock_holds_the_targets_framework_the_requirements_and_no_address(write: Write, index: PackageIndex) -> None:
    spec = write("einops>=0.5\n")
    assert relock(spec)
    text = spec.lock_file.read_text(encoding="utf-8")
    assert text.startswith("# Written by 'trainyard lock'. Do not edit.\n# checksum: ")
    assert "://" not in text and "127.0.0.1" not in text and "url =" not in text
    assert locked(spec).framework == TARGET.locked().framework
    requirements = pinned(fresh(spec))
    own = {canonicalize_name(Requirement(one).name) for one in model.requirements_of(spec)} - set(
        pinned(TARGET, "framework")
    )
    assert requirements.items() <= (pinned(TARGET) | {"einops": "0.8.0"}).items()
    assert own | {"einops"} == set(requirements)
    einops = file_of(index, "einops-0.8.0-py3-none-any.whl")
    assert Pin("einops", "0.8.0", (einops,), "added") in locked(spec).pins
    assert f'{{ path = "{einops.name}", size = {einops.size}, hashes = {{ sha256 = "{einops.sha256}" }} }}' in text
    assert is_current(spec)
    assert not relock(spec)


Catalogue = Callable[..., None]


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: PackageIndex) -> Catalogue:
    """Lock a target's requirements, and other versions and packages, with the files of ``index``."""
    known: dict[Path, Lock] = {}
    real = pylock.read

    def read(lock_file: Path, command: str) -> Lock | Unreadable:
        return known[lock_file] if lock_file in known else real(lock_file, command)

    def lock(target: str = "tf-cpu", **other: str) -> None:
        spec = model.load(target, "amd64")
        content, pins = spec.usable_lock, [*spec.locked().framework]
        assert content
        for name, version in (pinned(spec) | other).items():
            served = wheel(name, version)
            index.add(served)
            pins.append(Pin(name, version, (file_of(index, served[0]),)))
        default = {**content.indexes[DEFAULT], "amd64": locks.locked(*pins)}
        known[spec.lock_file] = replace(content, indexes={DEFAULT: default})

    monkeypatch.setattr(pylock, "read", read)
    lock()
    return lock


def marked(spec: Spec) -> set[str]:
    """Names of the packages that are marked as added to those of the target."""
    return {pin.name for pin in locked(spec).pins if pin.added}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("\n", set()),
        ("einops\n", {"einops"}),
        ("pillow\neinops\ntqdm\n", {"einops", "tqdm"}),
        ("Pillow>=12\nGCSFS\n", set()),
        ("pillow<13\n", {"pillow"}),
        ("numpy\n", set()),
    ],
)
def test_what_the_target_lacks_is_marked(
    write: Write, index: PackageIndex, catalogue: Catalogue, lines: str, expected: set[str]
) -> None:
    """A package of the target in another version is another wheel; one of its framework is in the image once."""
    spec = write(lines)
    relock(spec)
    assert marked(spec) == expected
    pins = locked(spec).requirements
    assert {pin.files for pin in pins} == {(file_of(index, pin.files[0].name),) for pin in pins}
    assert len({pin.name for pin in locked(spec).pins}) == len(locked(spec).pins)


def test_what_a_repository_adds_changes_no_other_entry(write: Write, catalogue: Catalogue) -> None:
    spec = write("\n")
    relock(spec)
    before = locked(spec).pins
    relock(write("einops\n"))
    assert tuple(pin for pin in locked(spec).pins if not pin.added) == before
    assert marked(spec) == {"einops"}


@pytest.mark.parametrize("sizes", [True, False])
def test_relocking_without_changes_leaves_the_file_alone(write: Write, catalogue: Catalogue, sizes: bool) -> None:
    """Also with an index that gives no sizes, as those do that answer in HTML."""
    with PackageIndex(sizes=sizes) as own:
        own.add(wheel("inhouse", "1.0"))
        spec = write("einops\npillow\ninhouse\n")
        with Path("uv.toml").open("a", encoding="utf-8") as file:
            file.write(f'[[index]]\nname = "own"\nurl = "{own.url}"\n')
        relock(spec)
        path = spec.lock_file
        before = (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino)
        (inhouse,) = (pin for pin in locked(spec).requirements if pin.name == "inhouse")
        assert (inhouse.size > 0, inhouse.added) == (sizes, True)
        assert not relock(spec)
        assert not relock(spec, check=True)
        assert (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) == before
        assert marked(spec) == {"einops", "inhouse"}


def test_a_later_lock_of_the_target_moves_no_package_to_another_layer(write: Write, catalogue: Catalogue) -> None:
    """What has been the target's stays so until it is upgraded, since its layer is the same."""
    spec = write("einops\npillow\n")
    relock(spec)
    catalogue(pillow="99.0")
    assert not relock(spec)
    relock(write("einops\npillow\ntqdm\n"))
    assert versions(spec)["pillow"] == "13.0.0"
    assert "pillow" not in marked(spec) and "tqdm" in marked(spec)
    relock(spec, upgrade=True)
    assert versions(spec)["pillow"] == "99.0"
    assert marked(spec) == {"einops", "tqdm"}


def test_what_another_target_lacks_is_marked_when_that_is_extended(
    write: Write, index: PackageIndex, catalogue: Catalogue
) -> None:
    """The layers of the small wheels would be other ones than the new target's."""
    catalogue(einops="0.8.0")
    catalogue("tf-tpu")
    index.add(*(wheel(name, version) for name, version in pinned(model.load("tf-tpu"), "framework").items()))
    spec = write("einops\n")
    relock(spec)
    assert marked(spec) == set()
    relock(write("einops\n", extends="tf-tpu"))
    assert marked(spec) == {"einops"}


def test_versions_are_kept_until_they_are_upgraded(write: Write, index: PackageIndex) -> None:
    spec = write("einops\ntqdm\n")
    relock(spec)
    index.add(wheel("einops", "0.9.0"), wheel("tqdm", "5.0"))
    spec = write("einops\ntqdm\nkeras-things\n")
    assert not is_current(spec)
    with pytest.raises(StepFailed, match=r"pylock\.trainyard\.toml needs to be updated, but '--check' was provided"):
        relock(spec, check=True)
    relock(spec)
    assert (versions(spec)["einops"], versions(spec)["tqdm"]) == ("0.8.0", "4.0")
    relock(spec, upgrade_packages=["Einops"])
    assert (versions(spec)["einops"], versions(spec)["tqdm"]) == ("0.9.0", "4.0")
    relock(spec, upgrade=True)
    assert (versions(spec)["einops"], versions(spec)["tqdm"]) == ("0.9.0", "5.0")


def test_only_packages_outside_the_framework_are_upgraded_by_name(write: Write) -> None:
    spec = write()
    relock(spec)
    with pytest.raises(UserError, match=r"'keras' is part of the framework of tf-cpu"):
        relock(spec, upgrade_packages=["keras"])
    with pytest.raises(UserError, match=r"pylock\.trainyard\.toml: no package 'einop' \(did you mean 'einops'\?\)"):
        relock(spec, upgrade_packages=["einop"])


def test_a_users_range_takes_the_place_of_the_targets_version(write: Write) -> None:
    spec = write("pillow<13\n")
    relock(spec)
    assert versions(spec)["pillow"] == "12.0"


@pytest.fixture
def jax(write: Write, index: PackageIndex) -> Write:
    """``write`` a repository that extends ``jax``, whose framework has no setuptools; 84.2.1 is the newest."""
    index.add(*(wheel(name, version) for name, version in model.load("jax", "amd64").locked().versions.items()))
    index.add(wheel("setuptools", "84.2.1"), wheel("tensorboard", "2.21.0"), wheel("late", "1", ("setuptools>=83",)))
    return lambda requirements: write(requirements, extends="jax")


@pytest.mark.parametrize(
    ("requirements", "version"),
    [("setuptools>=60", "81.0.0"), ("setuptools\ntensorboard==2.21.0", "84.2.1")],
)
def test_a_version_that_breaks_another_package_is_not_taken(
    jax: Write, requirements: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of tensorboard 2.20 imports what setuptools 82 removed, and asks for any setuptools."""
    spec = jax(requirements)
    relock(spec)
    relock(spec, upgrade_packages=["setuptools"])
    assert versions(spec)["setuptools"] == version
    assert "WARNING" not in capsys.readouterr().err


@pytest.mark.parametrize("requirements", ["setuptools==84.2.1", "late"])
def test_a_version_that_is_asked_for_is_taken_with_a_warning(
    jax: Write, requirements: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = jax(requirements)
    relock(spec)
    assert versions(spec)["setuptools"] == "84.2.1"
    assert capsys.readouterr().err.splitlines() == [
        "WARNING: trainyard.yaml: the requirements exclude 'setuptools<82': the command 'tensorboard' imports "
        "pkg_resources, which setuptools 82 no longer has"
    ]


@pytest.mark.parametrize(("requirements", "warns"), [("jax-cuda12-plugin", False), ("jax-cuda12-plugin>=99", True)])
def test_a_plugin_has_the_version_of_its_jaxlib_if_the_requirements_allow_it(
    jax: Write, index: PackageIndex, requirements: str, *, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    jaxlib = model.load("jax", "amd64").locked().versions["jaxlib"]
    index.add(wheel("jax-cuda12-plugin", jaxlib), wheel("jax-cuda12-plugin", "99.0"))
    spec = jax(requirements)
    relock(spec)
    assert versions(spec)["jax-cuda12-plugin"] == ("99.0" if warns else jaxlib)
    assert (f"exclude 'jax-cuda12-plugin=={jaxlib}': jaxlib does not use" in capsys.readouterr().err) == warns


def test_two_builds_of_cudnn_that_overwrite_each_other_are_refused(jax: Write, index: PackageIndex) -> None:
    index.add(wheel("nvidia-cudnn-cu12", "9.1"), wheel("nvidia-cudnn-cu13", "9.2"))
    with pytest.raises(UserError, match=r"nvidia-cudnn-cu12 9\.1 and nvidia-cudnn-cu13 9\.2 cannot share an image"):
        relock(jax("nvidia-cudnn-cu12\nnvidia-cudnn-cu13"))


def test_the_framework_has_the_cudnn_of_a_requirement_rather_than_two(
    write: Write, index: PackageIndex, caplog: pytest.LogCaptureFixture
) -> None:
    """Take an older version of the requirement that fits the framework's cuDNN; the newest asks for another CUDA."""
    locked = model.load("jax-gpu", "amd64").locked().versions
    index.add(*(wheel(name, version) for name, version in locked.items() if name != "jax"))
    index.add(wheel("jax", locked["jax"], ("nvidia-cudnn-cu13>=9",)))
    index.add(wheel("nvidia-cudnn-cu12", "9.1"), wheel("nvidia-cudnn-cu13", "9.2"))
    index.add(wheel("late", "1", ("nvidia-cudnn-cu12==9.1",)), wheel("late", "2", ("nvidia-cudnn-cu13==9.2",)))
    spec = write("late\n", extends="jax-gpu")
    relock(spec)
    have = versions(spec)
    assert (have["late"], have["jax"], have["nvidia-cudnn-cu13"]) == ("2", locked["jax"], "9.2")
    assert "nvidia-cudnn-cu12" not in have
    assert "what the framework needs is nvidia-cudnn-cu13 9.2, as the requirements ask for" in caplog.text


def test_a_version_that_was_withdrawn_is_said_to_be(jax: Write, index: PackageIndex) -> None:
    index.add(old := wheel("gone", "2.5.0"), wheel("gone", "2.6.0"))
    index.yanked[old[0]] = "for security"
    with pytest.raises(UserError) as error:
        relock(jax("gone==2.5.*"))
    assert str(error.value) == (
        "requirements.txt:1: gone==2.5.* cannot be installed: gone 2.5.0 was withdrawn (yanked, 'for security'): "
        "require another version"
    )


def test_a_pinned_version_that_was_withdrawn_is_locked_with_one_warning(
    jax: Write, index: PackageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    """uv takes a version that is pinned exactly, as PEP 592 asks for."""
    index.add(old := wheel("gone", "2.5.0"), wheel("gone", "2.6.0"))
    index.yanked[old[0]] = "for security"
    spec = jax("gone==2.5.0")
    relock(spec)
    assert versions(spec)["gone"] == "2.5.0"
    warning = f"WARNING: {spec.target}: gone 2.5.0 is yanked (for security): pin another\n"
    assert capsys.readouterr().err == warning


def test_the_framework_is_present_under_each_of_tensorflows_names(write: Write) -> None:
    """keras-things asks for 'tensorflow', which would overwrite the files of the image's tensorflow-cpu."""
    spec = write("tensorflow>=2.10\nkeras-things\n")
    relock(spec)
    assert "tensorflow" not in versions(spec)
    assert versions(spec)["keras-things"] == "1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "numpy<2",
            "requirements.txt:2: numpy<2 contradicts numpy 2.4.6, which the framework of tf-cpu "
            "(tensorflow-cpu 2.21.0) is locked with: relax it, no other target has it",
        ),
        (
            "tensorflow==2.20.*",
            "requirements.txt:2: tensorflow-cpu==2.20.* has no wheel for linux/amd64 and Python 3.10, 3.11, 3.12, "
            "3.13 or 3.14: the nearest that has one is 2.21.0 (Python 3.13)",
        ),
    ],
)
def test_a_pin_that_contradicts_the_framework_is_one_line_with_both_sides(
    write: Write, line: str, message: str
) -> None:
    with pytest.raises(UserError) as error:
        relock(write(f"einops\n{line}\n"))
    assert str(error.value) == message


def test_a_line_for_another_platform_contradicts_nothing(write: Write) -> None:
    spec = write("numpy<2; sys_platform == 'darwin'\n")
    relock(spec)
    assert versions(spec)["numpy"] == "2.4.6"


def test_a_contradiction_through_another_package_names_the_users_line_and_uvs_reason(write: Write) -> None:
    with pytest.raises(UserError) as error:
        relock(write("einops\nold\n"))
    assert str(error.value).startswith("requirements.txt:2: old cannot be installed: because ")
    assert "old" in str(error.value) and "numpy<2" in str(error.value) and "numpy==2.4.6" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_package_that_no_index_has_is_named_with_its_line(write: Write) -> None:
    with pytest.raises(
        UserError, match=r"^requirements\.txt:1: einopps cannot be installed: because einopps was not found"
    ):
        relock(write("einopps\n"))


@pytest.mark.parametrize(
    ("allowed", "base", "remedy"),
    [
        (
            ">=3.99",
            "",
            "relax it, or allow the Python of a base: debian-12 (Python 3.11), debian-13 (Python 3.13), python-3.12 "
            "(Python 3.12), python-3.10 (Python 3.10), python-3.14 (Python 3.14), debian-14 (Python 3.14)",
        ),
        ("<3.13", "base: debian-13\n", "relax it, or give another base, as in 'base: debian-12'"),
    ],
)  # fmt: skip
def test_a_project_for_another_python_is_refused(write: Write, allowed: str, base: str, remedy: str) -> None:
    spec = write(more=base)
    Path("pyproject.toml").write_text(f'[project]\nname = "mine"\nversion = "1"\nrequires-python = "{allowed}"\n')
    with pytest.raises(UserError) as error:
        relock(spec)
    assert str(error.value) == (
        f"pyproject.toml:4: requires-python '{allowed}' excludes Python 3.13 of tf-cpu: {remedy}"
    )


@pytest.fixture
def other_bases(write: Write, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Python that the framework was resolved for; ``index`` is that of the machine, as a target has no other."""
    Path("uv.toml").rename(os.environ["UV_CONFIG_FILE"])
    found: list[str] = []
    resolved = resolver.Project.packages

    def packages(project: resolver.Project, *, alone: bool = False) -> list[Package]:
        if project.lines == TARGET.packages:
            found.append(project.python)
        return resolved(project, alone=alone)

    monkeypatch.setattr(resolver.Project, "packages", packages)
    return found


def test_another_base_has_the_framework_of_the_target_for_its_python(
    write: Write, index: PackageIndex, other_bases: list[str]
) -> None:
    """And for its C library, which is older than that of the target's base."""
    stem = "tensorflow_cpu-2.21.0"
    for tag in ("cp311-cp311-manylinux_2_36_x86_64", "cp311-cp311-manylinux_2_37_x86_64"):
        index.add(wheel("tensorflow-cpu", "2.21.0", tag=tag))
    index.add(wheel("tensorflow-cpu", "2.21.0", tag="cp313-cp313-manylinux_2_36_x86_64"))
    del index.files[f"{stem}-py3-none-any.whl"]
    spec = write(more="base: debian-12\n")
    assert (spec.base, spec.python_version) == ("debian-12", "3.11")
    relock(spec)
    assert other_bases == ["3.11"]
    (framework,) = (pin for pin in locked(spec).framework if pin.name == "tensorflow-cpu")
    assert framework.files == (file_of(index, f"{stem}-cp311-cp311-manylinux_2_36_x86_64.whl"),)
    assert origin(spec).base.startswith("docker.io/library/debian:12-slim@")
    assert is_current(spec)
    assert not relock(spec) and len(other_bases) == 1, "it is kept"
    lock_origin.check_tool(fresh(spec))


def test_a_lock_of_another_base_is_resolved_anew_if_the_repository_asks_for_it(
    write: Write, other_bases: list[str]
) -> None:
    relock(write())
    spec = write(more="base: debian-12\n")
    assert not is_current(spec)
    relock(spec)
    assert other_bases == ["3.11"]
    spec = write()  # as if the target had moved to another base
    words = "was locked on docker.io/library/debian:12-slim, and tf-cpu is on base debian-13 now: run 'trainyard lock "
    with pytest.raises(UserError, match=re.escape(words)):
        relock(spec)
    relock(spec, upgrade=True)
    assert is_current(spec)


@pytest.mark.parametrize(
    ("extends", "base", "words"),
    [
        (
            "tf-cpu",
            "debain-12",
            "unknown base 'debain-12' (did you mean 'debian-12'?); valid: debian-12, debian-13",
        ),
        ("tf-cpu", "xla-nightly", "xla-nightly holds a framework: only the target that is made for it can use it"),
        ("xla-nightly", "debian-13", "xla-nightly holds a framework: only the target that is made for it can use it"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(write: Write, extends: str, base: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        write(more=f"base: {base}\n", extends=extends)
    assert str(error.value).startswith("trainyard.yaml:4: base: ")
    assert words in str(error.value)


def test_a_framework_without_wheels_for_the_python_of_a_base_is_one_line(write: Write) -> None:
    words = (
        "trainyard.yaml: libtpu 0.0.21 and Python 3.13 cannot share an image: libtpu 0.0.21 has wheels for Python 3.10"
    )
    with pytest.raises(UserError, match=re.escape(words)):
        relock(write(more="base: debian-13\n", extends="xla"))


def test_what_the_code_provides_is_not_installed(write: Write) -> None:
    spec = write("-e .[plots]\n")
    Path("pyproject.toml").write_text(
        '[project]\nname = "einops"\nversion = "1"\ndependencies = ["tqdm"]\n'
        'optional-dependencies = {plots = ["old"]}\n'
        '[tool.uv]\noverride-dependencies = ["numpy>=2"]\n'
    )
    Path("uv.toml").rename("kept.toml")
    with Path("pyproject.toml").open("a") as file:
        file.write(Path("kept.toml").read_text().replace("[[index]]", "[[tool.uv.index]]"))
    relock(spec)
    assert versions(spec)["tqdm"] == "4.0"
    assert versions(spec)["old"] == "1"
    assert "einops" not in versions(spec)


def test_a_lock_of_another_trainyard_is_refused_and_kept_by_lock(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write()
    relock(spec)
    lock_origin.check_tool(fresh(spec))
    before = origin(spec)
    monkeypatch.setattr(package, "__version__", "9.9.9")
    monkeypatch.setattr(lock_origin, "contents", lambda _: "5e6f7a8b")
    written, here = rf"{before.version} \({before.contents}\)", r"9\.9\.9 \(5e6f7a8b\)"
    with pytest.raises(UserError, match=rf"^pylock\.trainyard\.toml: written by Trainyard {written}, this is {here}"):
        lock_origin.check_tool(fresh(spec))
    relock(write("tqdm\n"))
    assert origin(spec).contents == before.contents
    relock(write("tqdm\n"), upgrade=True)
    assert origin(spec).contents == "5e6f7a8b"


def test_trainers_of_a_targets_folder_are_contents_wherever_the_checkout_is(
    write_locked_spec: Callable[[str], str], spec_text: str, tmp_path: Path
) -> None:
    first = Path(write_locked_spec(spec_text))
    (first / "training").mkdir()
    (first / "training" / "words.py").touch()
    text = spec_text.replace("default: mnist", "default: mnist, folder: training")
    (first / "image.yaml").write_text(text, encoding="utf-8")
    second = shutil.copytree(first, tmp_path / "other" / "mine")
    one, other = (model.load(str(folder)) for folder in (first, second))
    assert first / "training" / "words.py" in set(lock_origin._contributed(one))
    assert lock_origin._settings(one) == lock_origin._settings(other)


def test_the_hash_of_contents_changes_with_what_reaches_an_image(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec = write()
    first = lock_origin.contents(spec)
    assert first != lock_origin.contents(write(extends="cpu"))
    for name in ("templates/Dockerfile.j2", "launcher/launch", "images/uv.lock", "trainers/common/__init__.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes() + b"\n")
        changed = [path if one == ROOT / name else one for one in lock_origin._contributed(model.load("tf-cpu"))]
        assert path in changed, name
        monkeypatch.setattr(lock_origin, "ROOT", Path("/"))
        monkeypatch.setattr(lock_origin, "_contributed", lambda _, found=changed: iter(found))
        assert lock_origin.contents(write()) != first, name
        monkeypatch.undo()
        monkeypatch.chdir(spec.folder)


def with_checksum(text: str) -> str:
    """Return a lock whose tables were changed with the checksum of what they are now."""
    return pylock.with_checksum(text.partition("\n\n")[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('version = "0.8.0"', 'version = "0.7.0"'), "changed since 'trainyard lock' wrote"),
        (lambda text: text.replace("lock-version", "<<<<<<< HEAD\nlock-version"), "4: conflicts of a merge: take one"),
        (lambda text: text.partition("\n\n")[2], "no '# checksum:' line, so not a lock"),
        (lambda _: "", "no '# checksum:' line, so not a lock"),
        (lambda text: with_checksum(text.replace('"1.0"', '"2.0"', 1)), "written by another version of Trainyard"),
        (lambda text: with_checksum(text.replace("[tool.trainyard.origin]", "[tool.trainyard.origin]\nshape = 1")),
         "written by another version of Trainyard"),
        (lambda text: with_checksum(text.replace("added = true", "shiny = true")), "written by another version of"),
        (lambda text: with_checksum(text.replace('requires-python = "==', 'requires-python = ">=')),
         "written by another version of Trainyard"),
    ],
)  # fmt: skip
def test_a_lock_that_was_not_written_by_the_tool_is_one_line(
    write: Write, change: Callable[[str], str], message: str
) -> None:
    spec = write()
    relock(spec)
    written = spec.lock_file.read_text(encoding="utf-8")
    spec.lock_file.write_text(change(written), encoding="utf-8")
    with pytest.raises(UserError) as error:
        fresh(spec).locked()
    assert message in str(error.value) and "run 'trainyard lock'" in str(error.value)
    assert "\n" not in str(error.value)
    relock(spec)
    assert spec.lock_file.read_text(encoding="utf-8") == written


def test_a_missing_lock_says_what_to_run(write: Write) -> None:
    spec = write()
    assert not is_current(spec)
    with pytest.raises(UserError, match=r"^pylock\.trainyard\.toml is missing: run 'trainyard lock'$"):
        spec.locked()


def test_everything_survives_writing_and_reading(write: Write) -> None:
    """With another index, whose lock is a second file, which is removed when that is not locked any more."""
    spec = write()
    relock(spec)
    content = fresh(spec).usable_lock
    assert content
    roles: list[Role] = ["compiled", "build", "added"]
    more = [locks.pin(f"a-{number}==1.{number}", role, 7, ["ab" * 32]) for number, role in enumerate(roles)]
    more += [replace(locks.pin("made==1", "added"), made=Made("0" * 12, "c" * 40))]
    of_index = {name: {"amd64": locks.locked(*locked(spec).pins, *more)} for name in (DEFAULT, "pytorch-cpu")}
    changed = replace(content, indexes=of_index)
    names = ["pylock.trainyard.toml", "pylock.trainyard-pytorch-cpu.toml"]
    assert [path.name for path in pylock.write(spec.lock_file, changed)] == names
    assert fresh(spec).lock == changed
    assert changed.names("amd64") == [DEFAULT, "pytorch-cpu"]
    pylock.write(spec.lock_file, content)
    assert [path.name for path in spec.folder.glob("pylock*")] == names[:1]
    assert fresh(spec).lock == content


@pytest.mark.parametrize("kind", ["variables", "address", "netrc"])
def test_a_private_index_gets_its_credentials_and_nothing_that_is_written_has_them(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """uv resolves with them, and installs with the configuration and netrc that a build is given."""
    with PackageIndex(("ci", "s3cret-token")) as private:
        private.add(wheel("inhouse", "1.0", ("einops",)))
        spec = write("inhouse\n")
        url = private.url
        if kind == "variables":
            monkeypatch.setenv("UV_INDEX_HOUSE_USERNAME", "ci")
            monkeypatch.setenv("UV_INDEX_HOUSE_PASSWORD", "s3cret-token")
        elif kind == "address":
            url = private.url_with_credentials
        else:
            (tmp_path / "netrc").write_text("machine 127.0.0.1 login ci password s3cret-token\n")
            monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        with Path("uv.toml").open("a") as file:
            file.write(f'[[index]]\nname = "house"\nurl = "{url}"\n')
        relock(spec)
        assert versions(spec)["inhouse"] == "1.0"
        configuration, netrc = indexes.build_configuration(spec)
        secret = base64.b64encode(b"s3cret-token").decode()
        for path in [spec.lock_file, *spec.build_folder.rglob("*")]:
            if path.is_file():
                assert b"s3cret-token" not in path.read_bytes() and secret.encode() not in path.read_bytes()
        assert "s3cret-token" not in configuration
        assert netrc == "machine 127.0.0.1 login ci password s3cret-token\n"
        given = {"UV_CONFIG_FILE": str(tmp_path / "build.toml"), "NETRC": str(tmp_path / "build-netrc")}
        (tmp_path / "build.toml").write_text(configuration)
        (tmp_path / "build-netrc").write_text(netrc)
        (tmp_path / "one.lock").write_text(
            next(pin.requirement() for pin in locked(spec).pins if pin.name == "inhouse")
        )
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--target"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UV_INDEX")}
        done = subprocess.run(
            [*command, str(tmp_path / "site"), "-r", str(tmp_path / "one.lock")],
            env={**environment, **given, "UV_CACHE_DIR": str(tmp_path / "other-cache")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "site" / "inhouse-1.0.dist-info").is_dir()


def test_a_private_index_without_credentials_is_one_line(write: Write) -> None:
    with PackageIndex(("ci", "s3cret-token")) as private:
        private.add(wheel("inhouse", "1.0"))
        spec = write("inhouse\n")
        with Path("uv.toml").open("a") as file:
            file.write(f'[[index]]\nname = "house"\nurl = "{private.url}"\n')
        with pytest.raises((UserError, StepFailed)) as error:
            relock(spec)
        assert "401" in str(error.value) or "credentials" in str(error.value)
        assert "\n" not in str(error.value)


BACKEND = """\
    import os, zipfile
    def build_wheel(folder, *_):
        with zipfile.ZipFile(os.path.join(folder, "tool-1-py3-none-any.whl"), "w") as archive:
            archive.writestr("tool.py", open("tool.py").read())
            archive.writestr(
                "tool-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tool\\nVersion: 1\\nRequires-Dist: tqdm\\n"
            )
            archive.writestr("tool-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
            archive.writestr("tool-1.dist-info/RECORD", "")
        return "tool-1-py3-none-any.whl"
"""


def project(folder: Path, backend: str = textwrap.dedent(BACKEND)) -> Path:
    """Write a project, whose name is that of its folder, with a build backend; return the folder."""
    folder.mkdir()
    text = backend.replace("tool-1", f"{folder.name}-1").replace("Name: tool", f"Name: {folder.name}")
    (folder / "backend.py").write_text(text)
    (folder / "tool.py").write_text("")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    return folder


def committed(folder: Path) -> list[str]:
    """Commit a folder, and return the words of a command of git there."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    return git


def test_a_folder_becomes_a_wheel_that_a_later_build_compares_with_the_lock(write: Write) -> None:
    tool = Path("libs/tool")
    tool.mkdir(parents=True)
    (tool / "backend.py").write_text(textwrap.dedent(BACKEND))
    (tool / "tool.py").write_text("x = 1\n")
    (tool / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tool"\nversion = "1"\ndependencies = ["tqdm"]\n'
    )
    spec = write("./libs/tool\n")
    relock(spec)
    folder = spec.build_folder / "wheels"
    (made,) = folder.glob("*.whl")
    (pin,) = (pin for pin in locked(spec).requirements if pin.name == "tool")
    assert pin.files == (File(made.name, hashlib.sha256(made.read_bytes()).hexdigest(), made.stat().st_size),)
    assert (pin.version, pin.role) == ("1", "added") and pin.made and not pin.made.commit
    assert versions(spec)["tqdm"] == "4.0"
    made.unlink()
    (folder / "stale-1-py3-none-any.whl").touch()
    workspaces.ensure_wheels(fresh(spec), folder)
    assert [path.name for path in folder.iterdir()] == [made.name]
    assert is_current(spec)
    (tool / "tool.py").write_text("x = 2\n")
    assert not is_current(spec)
    made.unlink()
    with pytest.raises(UserError, match=r"^requirements\.txt:1: \./libs/tool: not what pylock\.trainyard\.toml pins"):
        workspaces.ensure_wheels(fresh(spec), folder)


@pytest.mark.needs("git")
def test_what_a_folder_needs_from_a_git_repository_becomes_a_wheel_too(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    """And is made again, for another host, after the wheel that needs it. A lock that is exported cannot name it."""
    monkeypatch.setenv("PATH", os.defpath, prepend=os.pathsep)  # git's scripts use other programs
    inner = f"inner @ git+file://{tmp_path}/inner"
    backend = textwrap.dedent(BACKEND).replace("Requires-Dist: tqdm", "Requires-Dist: tqdm\\nRequires-Dist: " + inner)
    project(Path("tool"), backend)
    git = committed(project(tmp_path / "inner"))
    spec = write("./tool\n")
    relock(spec)
    assert versions(spec)["tool"] == versions(spec)["inner"] == "1" and versions(spec)["tqdm"] == "4.0"
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert [pin.made.commit for pin in locked(spec).pins if pin.made] == [commit, ""]
    assert is_current(spec)
    folder = spec.build_folder / "wheels"
    for made in folder.iterdir():
        made.unlink()
    workspaces.ensure_wheels(fresh(spec), folder)
    assert sorted(one.name for one in folder.iterdir()) == ["inner-1-py3-none-any.whl", "tool-1-py3-none-any.whl"]
    status, _, err = trainyard("lock", "--export", "pylock.a.toml")
    refusal = "inner is made of an address that another package names: name it in the requirements, too"
    assert (status, err) == (2, f"lock: '--export pylock.a.toml': {refusal}\n") and not Path("pylock.a.toml").exists()


@pytest.mark.needs("git")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="debian-12 has Python 3.11")
def test_uv_installs_a_lock_that_is_exported_with_what_is_made_of_folders_and_git_repositories(
    write: Write, index: PackageIndex, tmp_path: Path, trainyard: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of which the lock has wheels, that are made on each host, and the exported one the sources."""
    project(Path("tool"))
    committed(project(tmp_path / "inner"))
    monkeypatch.setenv("PATH", os.defpath, prepend=os.pathsep)  # git's scripts use other programs
    index.add(wheel("tensorflow-cpu", "2.20.0"))  # another than the target's, whose files the index has not
    asked = "base: debian-12\nframework: [tensorflow-cpu==2.20.0]\n"
    spec = write(f"./tool\ninner @ git+file://{tmp_path}/inner\neinops\n", asked)
    relock(spec)
    assert trainyard("lock", "--export", "pylock.laptop.toml")[0] == 0
    exported = Path("pylock.laptop.toml").read_text(encoding="utf-8")
    assert index.url.rsplit("/", 2)[0] in exported and "tool.trainyard" not in exported
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(tmp_path / "site")]
    command += ["--no-build-isolation", "-r", "pylock.laptop.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions(path=[str(tmp_path / "site")])}
    assert {canonicalize_name(name): version for name, version in installed.items()} == versions(spec)
    Path("requirements.txt").write_text("einops\n", encoding="utf-8")
    assert (
        "is not of what the repository requires now: run 'trainyard lock'"
        in trainyard("lock", "--export", "pylock.laptop.toml")[2]
    )
    assert trainyard("lock", "--export", "pylock.trainyard.toml")[::2] == (
        2, "lock: '--export pylock.trainyard.toml': it is a name of the lock itself: give another\n",
    )  # fmt: skip


def pkg_info(version: str, *lines: str) -> dict[str, str]:
    text = "\n".join([f"Metadata-Version: {version}", "Name: fast", "Version: 2.0", *lines, ""])
    return {"PKG-INFO": text, "setup.py": "raise SystemExit('built on this machine')\n"}


@pytest.mark.parametrize(
    ("metadata", "requires", "warned"),
    [
        (pkg_info("2.2", "Requires-Dist: tqdm"), True, False),
        (pkg_info("2.4", "Dynamic: Requires-Dist"), False, True),
        (pkg_info("1.1"), False, True),
        (pkg_info("2.2"), False, False),
    ],
)
def test_what_is_compiled_is_locked_by_the_hash_of_its_source_distribution_and_never_built_here(
    write: Write,
    index: PackageIndex,
    capsys: pytest.CaptureFixture[str],
    metadata: dict[str, str],
    requires: bool,
    warned: bool,
) -> None:
    name, body = source_distribution("fast", "2.0", metadata)
    index.add((name, body), wheel("fast", "2.0", ("einops",), tag="cp311-cp311-manylinux_2_17_x86_64"))
    index.add(wheel("setuptools", "80.9.0"))
    spec = write("fast>=1\n", "build: {packages: [g++], sources: ['fast>=1']}\n")
    relock(spec)
    assert locked(spec).compiled == [Pin("fast", "2.0", (file_of(index, name),), "compiled")]
    requirements = pinned(fresh(spec))
    assert "fast" not in requirements
    assert ("tqdm" in requirements) == requires
    assert ("trainyard.yaml:4: fast 2.0 does not say what it needs" in capsys.readouterr().err) == warned
    assert versions(spec)["fast"] == "2.0"
    assert pinned(fresh(spec), "compiled") == {"fast": "2.0"}


#: A setup.py that says on the host that it ran, and with what.
RAN = "import os, pathlib\npathlib.Path({path!r}).write_text(str(dict(os.environ)))\nraise SystemExit(1)\n"


def only_source(index: PackageIndex, ran: Path, version: str, metadata: str, **files: str) -> bytes:
    """Add a source distribution of slow, whose build would write ``ran``; its bytes."""
    about = "".join(f"{line}\n" for line in [f"Metadata-Version: {metadata}", "Name: slow", f"Version: {version}"])
    build = "[build-system]\nrequires = []\nbuild-backend = 'setup'\nbackend-path = ['.']\n"
    backend = RAN.format(path=str(ran))
    known = {"PKG-INFO": about} if metadata else {}
    made = source_distribution("slow", version, known | {"setup.py": backend, "pyproject.toml": build} | files)
    index.add(made)
    return made[1]


@pytest.mark.parametrize(
    ("metadata", "files", "requires", "warned"),
    [
        ("2.1", {"slow.egg-info/requires.txt": 'tqdm\n\n[:python_version < "3"]\neinops\n'}, {"tqdm"}, False),
        ("1.1", {"src/slow.egg-info/SOURCES.txt": ""}, set(), False),
        ("2.1", {"tests/data/of/slow.egg-info/requires.txt": "einops\n"}, set(), True),
        ("", {}, set(), True),  # older than PKG-INFO
    ],
)
def test_no_build_backend_of_an_index_runs_and_its_source_distribution_says_what_it_needs(
    write: Write,
    index: PackageIndex,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    metadata: str,
    files: dict[str, str],
    requires: set[str],
    warned: bool,
) -> None:
    """Not even where an older version has a wheel, which is not taken instead."""
    body = only_source(index, tmp_path / "ran", "2.0", metadata, **files)
    index.add(wheel("slow", "1.0"), wheel("uses-slow", "1.0", ("slow",)))
    spec = write("uses-slow\n")
    relock(spec)
    assert not (tmp_path / "ran").exists()
    assert versions(spec)["slow"] == "2.0"
    slow = next(pin for pin in locked(spec).requirements if pin.name == "slow")
    assert slow.hashes == (hashlib.sha256(body).hexdigest(),)
    assert {"tqdm", "einops"} & set(versions(spec)) == requires
    assert ("slow 2.0 does not say what it needs: list that in the requirements" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("metadata", ["2.1", "2.2"])
@pytest.mark.parametrize("more", ["", "build: {sources: [slow]}\n"])
def test_a_source_distribution_with_other_bytes_than_its_index_lists_is_not_locked(
    write: Write, index: PackageIndex, tmp_path: Path, metadata: str, more: str
) -> None:
    body = only_source(index, tmp_path / "ran", "2.0", metadata)
    index.claimed["slow-2.0.tar.gz"] = "ab" * 32
    with pytest.raises(StepFailed) as error:
        relock(write("slow\n", more))
    text = str(error.value)
    assert "slow" in text and hashlib.sha256(body).hexdigest() in text and "ab" * 32 in text and "\n" not in text
    assert not (tmp_path / "ran").exists()


def sha256_of(index: PackageIndex, file: str) -> str:
    return hashlib.sha256(index.files[file]).hexdigest()


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("kind", ["requirements", "constraints", "uv.lock"])
def test_a_file_that_none_of_the_pinned_hashes_allows_is_not_locked(
    write: Write, index: PackageIndex, kind: str, right: bool
) -> None:
    served = sha256_of(index, "einops-0.8.0-py3-none-any.whl")
    pinned_here = ["cd" * 32, served if right else "ef" * 32]
    options = " ".join(f"--hash=sha256:{one}" for one in pinned_here)
    name, line = "requirements.txt", 2
    if kind == "requirements":
        spec = write(f"# from pip-compile\neinops==0.8.0 {options}\n")
    elif kind == "constraints":
        name, line = "constraints.txt", 1
        spec = write("einops\n-c constraints.txt\n")
        Path(name).write_text(f"einops==0.8.0 {options}\n")
    else:
        name, line = "uv.lock", 4
        files = ", ".join(f'{{ url = "https://host/x.whl", hash = "sha256:{one}" }}' for one in pinned_here)
        source = '{ registry = "https://host/simple" }'
        package = f'[[package]]\nname = "einops"\nversion = "0.8.0"\nsource = {source}\nwheels = [{files}]\n'
        write("")
        Path(name).write_text(f"version = 1\n{package}")
        Path("pyproject.toml").write_text('[project]\nname = "mine"\nversion = "1"\ndependencies = ["einops"]\n')
        text = Path("trainyard.yaml").read_text().replace("requirements.txt", "uv.lock")
        Path("trainyard.yaml").write_text(text)
        spec = repository()
    if right:
        relock(spec)
        assert versions(spec)["einops"] == "0.8.0"
        return
    with pytest.raises(UserError) as error:
        relock(spec)
    assert str(error.value) == (
        f"{name}:{line}: no file of einops 0.8.0 for this image has a hash that is pinned here: the index has "
        f"sha256:{served}: pin that if it is the right one"
    )


def test_a_hash_that_is_pinned_later_is_compared_too(write: Write, index: PackageIndex) -> None:
    relock(write("einops==0.8.0\n"))
    assert is_current(write("einops==0.8.0\n"))
    spec = write(f"einops==0.8.0 --hash=sha256:{'cd' * 32}\n")
    assert not is_current(spec)
    with pytest.raises(UserError, match=r"^requirements\.txt:1: no file of einops 0\.8\.0 "):
        relock(spec)


def test_hashes_of_the_framework_are_compared_with_those_of_the_target(write: Write, index: PackageIndex) -> None:
    numpy = next(pin for pin in TARGET.locked().framework if pin.name == "numpy")
    line = f"numpy=={numpy.version} --hash=sha256:"
    relock(write(f"{line}{'cd' * 32} --hash=sha256:{numpy.hashes[0]}\n"))
    relock(write(f"numpy=={numpy.version} ; sys_platform == 'darwin' --hash=sha256:{'cd' * 32}\n"))
    with pytest.raises(UserError, match=rf"^requirements\.txt:1: no file of numpy {re.escape(numpy.version)} "):
        relock(write(f"{line}{'cd' * 32}\n"))


def test_a_hash_that_no_index_has_is_named(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    spec = write(f"tqdm\neinops==0.8.0 --hash=sha512:{'cd' * 64}\n")
    relock(spec)
    assert versions(spec)["einops"] == "0.8.0"
    said = "requirements.txt:2: only SHA-256 is compared: other hashes of einops are not"
    assert said in caplog.messages


def test_a_source_distribution_that_is_compiled_is_one_that_the_requirements_allow(
    write: Write, index: PackageIndex, tmp_path: Path
) -> None:
    body = only_source(index, tmp_path / "ran", "2.0", "2.2")
    index.add(wheel("setuptools", "80.9.0"))
    more = "build: {sources: [slow]}\n"
    relock(write(f"slow==2.0 --hash=sha256:{hashlib.sha256(body).hexdigest()}\n", more))
    with pytest.raises(UserError, match=r"^requirements\.txt:1: no file of slow 2\.0 "):
        relock(write(f"slow==2.0 --hash=sha256:{'cd' * 32}\n", more))


@pytest.mark.parametrize(
    "line",
    [
        "{url}#sha256={sha}",
        "einops @ {url}#sha256={sha}",
        "{url} --hash=sha256:{sha}",
        "./{file} --hash sha256:{sha}",
        "./{file} --hash=sha512:{sha}",
        "{url}#sha384={sha}",
    ],
)
def test_an_address_and_a_file_have_the_hash_that_is_written_beside_them(
    write: Write, index: PackageIndex, line: str
) -> None:
    file = "einops-0.8.0-py3-none-any.whl"
    index.add(wheel("einops", "0.8.0", ("tqdm",)))
    url, made = index.url.replace("/simple", f"/files/{file}"), sha256_of(index, file)
    spec = write("")
    Path(file).write_bytes(index.files[file])
    kind = re.search(r"sha\d+", line)
    right = hashlib.new(kind[0] if kind else "", index.files[file]).hexdigest()
    spec = write(line.format(url=url, file=file, sha=right) + "\n")
    relock(spec)
    assert versions(spec)["tqdm"] == "4.0"
    with pytest.raises(UserError, match=rf"^requirements\.txt:1: .*: the file has the SHA-256 {made}: pin that if"):
        relock(write(line.format(url=url, file=file, sha="c" * len(right)) + "\n"))


def tools(index: PackageIndex) -> None:
    """Add build tools; setuptools 81.0.0 and wheel are those of the framework of tf-cpu."""
    index.add(
        wheel("setuptools", "80.9.0"), wheel("cython", "3.0", ("numpy<2", "wheel>=0.1")), wheel("cython", "3.2"),
        wheel("ninja", "1.11"), wheel("ninja", "1.12"), wheel("cmake", "4.0"), wheel("scikit-build-core", "1.0"),
    )  # fmt: skip


def compile_fast(index: PackageIndex, *requires: str, backend: str = "setuptools.build_meta") -> None:
    """Add the source distribution of fast 2.0, which is built with ``requires``."""
    text = f"[build-system]\nrequires = {list(requires)}\nbuild-backend = '{backend}'\n"
    index.add(source_distribution("fast", "2.0", pkg_info("2.2") | {"pyproject.toml": text}))


FAST = "build: {packages: [g++], sources: [fast]}\n"


def tools_of_build(spec: Spec) -> dict[str, str]:
    """Return canonical name -> version of what a source distribution is compiled with, besides the image."""
    return pinned(fresh(spec), "build")


@pytest.mark.parametrize(
    ("requires", "tools_locked"),
    [
        (("setuptools", "cython<3.1"), {"cython": "3.0", "setuptools": "80.9.0", "wheel": "0.48.0"}),
        (("setuptools>=81", "numpy>=2"), {"setuptools": "81.0.0"}),
        (("tensorflow-cpu", "wheel; python_version < '3.9'"), {}),
        (("scikit-build-core",), {"scikit-build-core": "1.0", "cmake": "4.0", "ninja": "1.12"}),
    ],
)
def test_what_a_source_distribution_is_built_with_is_locked_apart_from_the_image(
    write: Write, index: PackageIndex, requires: tuple[str, ...], tools_locked: dict[str, str]
) -> None:
    """setuptools is that of images/uv.lock unless another one is asked for; what the image has is not locked again."""
    tools(index)
    compile_fast(index, *requires)
    spec = write("tqdm\n", FAST)
    relock(spec)
    assert is_current(spec) and not relock(spec, check=True)
    assert tools_of_build(spec) == tools_locked
    assert all(pin.files for pin in locked(spec).build_requires)
    assert not {"cython", "cmake", "ninja", "scikit-build-core"} & set(versions(spec))
    assert versions(spec)["setuptools"] == "81.0.0"
    text = "".join(f"{pin.requirement()}\n" for pin in locked(spec).build_requires)
    assert f"\n[build-requires]\n{text}[compiled]\n" in dockerfile.dockerfile(fresh(spec))


def test_a_source_distribution_without_a_build_system_is_built_with_setuptools_and_wheel(
    write: Write, index: PackageIndex
) -> None:
    tools(index)
    index.add(source_distribution("fast", "2.0", pkg_info("2.2")))
    spec = write("tqdm\n", FAST)
    relock(spec)
    assert tools_of_build(spec) == {"setuptools": "80.9.0", "wheel": "0.48.0"}


def test_what_setup_py_needs_and_does_not_declare_is_locked_and_kept(write: Write, index: PackageIndex) -> None:
    tools(index)
    compile_fast(index, "setuptools")
    spec = write("tqdm\n", FAST)
    relock(spec)
    spec = write("tqdm\n", "build: {sources: [fast], requires: [ninja<1.12]}\n")
    assert not is_current(spec)
    relock(spec)
    assert tools_of_build(spec)["ninja"] == "1.11"
    spec = write("tqdm\n", "build: {sources: [fast], requires: [ninja]}\n")
    relock(spec)
    assert tools_of_build(spec)["ninja"] == "1.11"
    dockerfile.write(dockerfile.rendered(fresh(spec)))
    before = content_hash(spec)
    relock(spec, upgrade_packages=["ninja"])
    dockerfile.write(dockerfile.rendered(fresh(spec)))
    assert content_hash(spec) != before
    assert tools_of_build(spec)["ninja"] == "1.12"


def test_an_extension_is_built_with_the_images_numpy_whatever_it_asks_for(
    write: Write, index: PackageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    tools(index)
    compile_fast(index, "setuptools", "numpy==1.26.*")
    spec = write("tqdm\n", FAST)
    relock(spec)
    assert "numpy" not in tools_of_build(spec)
    said = "trainyard.yaml:4: fast 2.0 asks for numpy==1.26.* to be built, and is built with 2.4.6 of the image"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ("cython>=99", "trainyard.yaml:4: cython>=99 cannot be installed: because only cython<=3.2 is available"),
        ("tool @ https://host/tool.whl",
         "trainyard.yaml:4: fast 2.0 is built with tool @ https://host/tool.whl, an address, which a lock does not"),
    ],
)  # fmt: skip
def test_a_build_requirement_that_cannot_be_locked_is_one_line_with_the_users_line(
    write: Write, index: PackageIndex, requires: str, message: str
) -> None:
    tools(index)
    compile_fast(index, requires)
    with pytest.raises(UserError) as error:
        relock(write("tqdm\n", FAST))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[build-system", "[build-system]\nrequires = ['a b']\n"])
def test_a_source_distribution_with_an_invalid_pyproject_toml_is_named(
    write: Write, index: PackageIndex, text: str
) -> None:
    index.add(source_distribution("fast", "2.0", pkg_info("2.2") | {"pyproject.toml": text}))
    with pytest.raises(StepFailed, match=r"^fast-2\.0\.tar\.gz: its pyproject\.toml cannot be read \(") as error:
        relock(write("tqdm\n", FAST))
    assert "\n" not in str(error.value)


def test_source_distributions_are_not_read_offline(
    write: Write, index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools(index)
    compile_fast(index, "setuptools")
    spec = write("tqdm\n", FAST)
    relock(spec)
    index.seen.clear()
    monkeypatch.setenv("TRAINYARD_OFFLINE", "1")
    with pytest.raises(StepFailed, match=r"^fast-2\.0\.tar\.gz is downloaded to read its requirements"):
        relock(spec)
    assert index.seen == []


def test_what_has_no_source_distribution_is_not_compiled(write: Write) -> None:
    with pytest.raises(UserError, match=r"^trainyard\.yaml:4: einops"):
        relock(write("tqdm\n", "build: {sources: [einops]}\n"))


def test_the_command_writes_and_reports_the_lock(write: Write, trainyard: Callable[..., tuple[int, str, str]]) -> None:
    write("einops\n")
    subprocess.run(["git", "init", "--quiet"], check=True)
    Path("train.py").touch()
    status, out, err = trainyard("lock", "--json")
    assert (status, out) == (0, '{\n  "written": [\n    "pylock.trainyard.toml"\n  ]\n}\n')
    assert "pylock.trainyard.toml: " in err
    assert trainyard("lock", "--check")[0] == 0
    write("einops\ntqdm\n")
    status, out, err = trainyard("lock", "--check")
    assert (status, out) == (1, "") and "needs to be updated" in err
    status, _, err = trainyard("lock", "scripts", "--check")
    assert status == 2 and "are for the locks of images" in err
