"""Locks pin everything by hash, match their specs, and name no host."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, is_valid_pylock_path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tests import locks
from tests.unit.conftest import BASE_CONTENTS

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image, resolver, target_lock, tool_locks
from trainyard.project import check
from trainyard.spec import markers, model, pylock
from trainyard.spec.architectures import ARCHITECTURES
from trainyard.spec.catalog import indexes
from trainyard.spec.framework import BaseContents
from trainyard.spec.lock import DEFAULT, File, Lock, Made, Origin, Pin, Role, Unreadable
from trainyard.spec.model import Spec

LOCKED = [spec for spec in [*model.catalogue(), model.load(str(ROOT / "examples/patches"))] if spec.version_known]
ALL = pytest.mark.parametrize("spec", LOCKED, ids=lambda spec: spec.target)
TOOLS = [*ROOT.glob("images/*.lock"), *ROOT.glob("scripts/**/requirements.lock")]


@pytest.mark.parametrize("path", TOOLS, ids=model.relative)
def test_every_entry_is_hash_pinned_and_names_no_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    entries = dict(resolver.entries(text))
    assert entries and sum(entry.count("\n") for entry in entries.values()) == text.count("\n") - 1
    pinned = r"\S+==\S+( ;[^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert [name for name, entry in entries.items() if not re.fullmatch(pinned, entry)] == []
    assert "://" not in text
    assert "--index" not in text and "--find-links" not in text


@ALL
def test_packaging_selects_what_each_platform_installs(spec: Spec) -> None:
    """The lock is a file of PEP 751, which says nothing of addresses: packaging alone reads it."""
    text = spec.lock_file.read_text(encoding="utf-8")
    lock = Pylock.from_dict(tomllib.loads(text))
    assert is_valid_pylock_path(spec.lock_file) and "://" not in text
    for one in model.each_platform(spec):
        environment = {**markers.environment(one.python_version, one.architecture.machine)}
        chosen = lock.select(environment=environment, tags=pylock.tags(one.python_version, one.arch))
        files = {(package.name, str(package.version)): file for package, file in chosen}
        pins = {(pin.name, pin.version): pin for pin in one.locked().pins}
        assert files.keys() == pins.keys()
        for name, file in files.items():
            assert isinstance(file, PackageWheel | PackageSdist)
            assert file.hashes["sha256"] in pins[name].hashes and 0 < (file.size or 0) <= pins[name].size
            assert file.path == file.filename and file.url is None


@ALL
def test_every_file_of_a_lock_is_one_that_some_platform_can_use(spec: Spec) -> None:
    lock = Pylock.from_dict(tomllib.loads(spec.lock_file.read_text(encoding="utf-8")))
    files = {file.hashes["sha256"] for one in lock.packages for file in [*(one.wheels or ()), one.sdist] if file}
    pins = [pin for one in model.each_platform(spec) for pin in one.locked().pins]
    assert files == {sha for pin in pins for sha in pin.hashes}


@ALL
def test_every_platform_is_locked_and_every_entry_has_the_size_of_its_file(spec: Spec) -> None:
    """The layers of an image are made up from them. Only the lock of an image that extends a target marks entries."""
    for one in model.each_platform(spec):
        locked = one.locked()
        assert [pin.name for pin in locked.pins if not pin.size] == []
        assert any(pin.added for pin in locked.pins) == (spec.framework_of is not None)
        assert len(locked.pins) == len(locked.framework) + len(locked.requirements)


@ALL
def test_a_lock_is_read_as_it_is_written(spec: Spec) -> None:
    text = spec.lock_file.read_text(encoding="utf-8")
    assert pylock.text(pylock.loads(text, "trainyard lock")) == text


def test_the_lock_of_an_image_that_extends_a_target_marks_what_the_target_lacks() -> None:
    spec = model.load(str(ROOT / "examples/patches"))
    parent = model.load(str(spec.framework_of)).locked()
    assert spec.locked().framework == parent.framework
    shared = {pin.identity for pin in parent.requirements}
    pins = spec.locked().requirements
    assert any(pin.added for pin in pins) and any(not pin.added for pin in pins)
    assert all(pin.added is (pin.identity not in shared) for pin in pins)


BOTH = tuple(ARCHITECTURES)
HASHES = st.lists(st.text("0123456789abcdef", min_size=64, max_size=64), min_size=1, max_size=4, unique=True)
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True)
VERSIONS = st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,2}){0,3}(rc1|\.dev6|\+cpu|\+git0123abc)?", fullmatch=True).map(
    lambda text: str(Version(text))
)
MADE = st.builds(Made, st.text("0123456789abcdef", min_size=12, max_size=12), st.sampled_from(["", "c" * 40]))


@st.composite
def pins(draw: st.DrawFn, *roles: Role) -> dict[str, list[Pin]]:
    """Make the pins of each platform; of some packages, they are in another version, or on one of them alone."""
    found: dict[str, list[Pin]] = {arch: [] for arch in BOTH}
    for name in draw(st.lists(NAMES, max_size=5, unique=True)):
        role, size, made = draw(st.sampled_from(roles)), draw(st.integers(0, 10**10)), draw(st.none() | MADE)
        versions = {arch: draw(VERSIONS) for arch in draw(st.sampled_from([BOTH, BOTH[:1], BOTH[1:]]))}
        if role == "compiled" or draw(st.booleans()):  # the same file for all
            version = next(iter(versions.values()))
            one = Pin(name, version, (File(f"{name.replace('-', '_')}-{version}.tar.gz", draw(HASHES)[0], size),), role)
            of = dict.fromkeys(versions, one)
        else:
            of = {arch: locks.pin(f"{name}=={versions[arch]}", role, size, draw(HASHES), arch) for arch in versions}
        for arch, one in of.items():
            found[arch].append(replace(one, made=made))
    return found


@given(
    pins("", "framework", "added", "compiled"),
    pins("build"),
    st.sampled_from(["", "20261121"]),
    st.none() | st.just(BaseContents.model_validate(BASE_CONTENTS)),
)
def test_entries_are_read_as_they_are_written(
    of: dict[str, list[Pin]], build: dict[str, list[Pin]], day: str, base: BaseContents | None
) -> None:
    own = {arch: [] if base else [locks.pin("the-framework==1", "framework", arch=arch)] for arch in BOTH}
    image = {arch: [*own[arch], *(pin for pin in of[arch] if not base or pin.role != "framework")] for arch in BOTH}
    locked = {arch: locks.locked(*image[arch], *build[arch], base=base) for arch in BOTH}
    origin = Origin("0.1", "0" * 8, "tf-cpu", "debian:13@sha256:0", "0" * 64, 'tensorflow<2 "old"')
    lock = Lock("3.11", {DEFAULT: locked}, day, origin)
    assert pylock.loads(pylock.text(lock), "trainyard lock") == lock


A, B, C = "a" * 64, "b" * 64, "c" * 64
SDIST = File("a-1.tar.gz", A, 5)


@pytest.mark.parametrize(
    ("pin", "lines"),
    [
        (
            locks.pin("a==1", size=5, hashes=[A]),
            [f'wheels = [{{ path = "{{}}", size = 5, hashes = {{ sha256 = "{A}" }} }}]'],
        ),
        (locks.pin("a==1", hashes=[A]), [f'wheels = [{{ path = "{{}}", hashes = {{ sha256 = "{A}" }} }}]']),
        (Pin("a", "1", (SDIST,)), [f'sdist = {{ path = "{{}}", size = 5, hashes = {{ sha256 = "{A}" }} }}']),
        (
            Pin("a", "1", (SDIST,), "added"),
            [
                f'sdist = {{ path = "{{}}", size = 5, hashes = {{ sha256 = "{A}" }} }}',
                "tool = { trainyard = { added = true } }",
            ],
        ),
        (
            Pin("a", "1", (SDIST,), "", Made("0" * 12, "c" * 40)),
            [
                f'sdist = {{ path = "{{}}", size = 5, hashes = {{ sha256 = "{A}" }} }}',
                f'tool = {{ trainyard = {{ made = "{"0" * 12}", commit = "{"c" * 40}" }} }}',
            ],
        ),
        (
            Pin("a", "1", (SDIST,), "build"),
            [
                "marker = \"'build' in dependency_groups\"",
                f'sdist = {{ path = "{{}}", size = 5, hashes = {{ sha256 = "{A}" }} }}',
                "tool = { trainyard = { build = true } }",
            ],
        ),
    ],
)
def test_an_entry_has_its_file_and_size_and_what_no_installer_reads(pin: Pin, lines: list[str]) -> None:
    entry = pylock.text(locks.lock(pin)).partition("[[packages]]\n")[2].splitlines()
    assert entry == ['name = "a"', 'version = "1"', *(line.replace("{}", pin.files[0].name) for line in lines)]


def test_a_pin_is_given_to_an_installer_with_its_hashes_alone() -> None:
    pin = locks.pin("a==1", "added", 5, [B, A])
    assert pin.requirement() == f"a==1 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("\nname = ", "\n<<<<<<< HEAD\nname = ", ":10: conflicts of a merge: take one side, then "),
        ("# checksum: ", "# sum: ", ": no '# checksum:' line, so not a lock: "),
        ('name = "a"', 'name = "b"', ": changed since 'trainyard lock' wrote it: restore it, or "),
        ("sha256 = ", "md5 = ", ": written by another version of Trainyard ("),
        ("a-1-1-py3", "a-1-1", ": written by another version of Trainyard ("),
        ('version = "1"', 'version = "one"', ": written by another version of Trainyard ("),
        ("framework = true", "library = true", ": written by another version of Trainyard ('library' of a): "),
        ("framework = true", "added = true", ": written by another version of Trainyard (no framework for amd64"),
        ("target = ", "targets = ", ": written by another version of Trainyard ("),
        ('inputs = "', '# inputs = "', ": written by another version of Trainyard ("),
        ('requires-python = "==3.11.*"', 'requires-python = ">=3.11"', ": written by another version of Trainyard ("),
    ],
)
def test_a_damaged_entry_is_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "mine" / pylock.REPOSITORY_FILE
    path.parent.mkdir()
    origin = Origin("0.1", "0" * 8, "tf-cpu", "debian:13", "0" * 64)
    pylock.write(path, locks.lock(locks.pin("a==1", "framework", 9, [A]), origin=origin))
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    text = text.replace(old, new)
    if "another version" in says:
        text = pylock.with_checksum(text.partition("\n\n")[2])
    path.write_text(text, encoding="utf-8")
    damaged = pylock.read(path, "trainyard lock mine")
    assert isinstance(damaged, Unreadable) and not damaged.missing and "\n" not in damaged.reason
    assert f"mine/pylock.trainyard.toml{says}" in damaged.reason and "run 'trainyard lock mine'" in damaged.reason


@pytest.mark.parametrize("name", [pylock.FILE, pylock.REPOSITORY_FILE])
def test_each_package_index_has_a_lock_that_is_named_after_it_and_read_with_the_others(
    tmp_path: Path, name: str
) -> None:
    names = [DEFAULT, *indexes()]
    paths = [pylock.file_of(tmp_path / name, index) for index in names]
    assert len(set(paths)) == len(paths) and all(map(is_valid_pylock_path, paths))
    assert [pylock.index_of(path.name) for path in paths] == names
    pins = {index: locks.pin(f"torch==2.9.{number}", "framework") for number, index in enumerate(names)}
    lock = Lock("3.11", {index: {"amd64": locks.locked(pin)} for index, pin in pins.items()})
    assert pylock.write(tmp_path / name, lock) == paths and pylock.read(tmp_path / name, "trainyard lock") == lock
    assert pylock.write(tmp_path / name, lock) == []
    before = pylock.digest(tmp_path / name)
    with paths[-1].open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    damaged = pylock.read(tmp_path / name, "trainyard lock")
    assert isinstance(damaged, Unreadable) and f"/{paths[-1].name}: changed since " in damaged.reason
    assert pylock.digest(tmp_path / name) != before


WHEEL, OLDER, OTHER = (
    f"a-1-cp311-cp311-{tag}_x86_64.whl" for tag in ("manylinux_2_28", "manylinux2014", "musllinux_1_2")
)


def package(name: str, version: str, *files: tuple[str, str, int | None]) -> Package:
    """Return a package as uv's pylock.toml has it, from the names, hashes and sizes of its files."""
    wheels, sdists = [], []
    for file, sha, size in files:
        if file.endswith(".whl"):
            wheels.append(PackageWheel(url=f"https://host/{file}", size=size, hashes={"sha256": sha}))
        else:
            sdists.append(PackageSdist(url=f"https://host/{file}", size=size, hashes={"sha256": sha}))
    sdist = sdists[0] if sdists else None
    return Package(name=canonicalize_name(name), version=Version(version), wheels=wheels, sdist=sdist)


@pytest.mark.parametrize(
    ("files", "expected", "size"),
    [
        pytest.param([(OTHER, A, 3), (WHEEL, B, 7), (SDIST.name, C, 9)], [(WHEEL, B)], 7, id="platform"),
        pytest.param([(WHEEL, B, 7), (OLDER, A, 9)], [(OLDER, A), (WHEEL, B)], 9, id="largest"),
        pytest.param([(SDIST.name, A, 7)], [(SDIST.name, A)], 7, id="no wheel"),
        pytest.param([(OTHER, A, 7), (SDIST.name, B, 5)], [(SDIST.name, B)], 5, id="other wheels"),
        pytest.param([(WHEEL, A, None)], [(WHEEL, A)], 0, id="no size"),
        pytest.param([(OTHER, C, 7)], [], 0, id="no files"),
    ],
)
def test_sizes_are_those_that_the_index_gives(
    files: list[tuple[str, str, int | None]], expected: list[tuple[str, str]], size: int
) -> None:
    found = pylock.usable_files(package("a", "1", *files), "3.11", "amd64")
    assert [(file.name, file.sha256) for file in found] == expected and Pin("a", "1", found).size == size


def test_locks_are_resolved_with_the_hosts_ca_bundle_and_without_a_users_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uv has its own CA certificates, without those of networks that inspect TLS; a user's UV_* change no lock."""
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setattr(settings, "ca_bundle", lambda: bundle)
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9")
    seen: dict[str, str] = {}

    def run(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        seen.update(env)
        return subprocess.CompletedProcess([], 2, "", "no answer")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(StepFailed, match="cannot lock mine: no answer"):
        resolver.Project("mine", ["a==1"], "3.11", offline=False).entries()
    assert seen["SSL_CERT_FILE"] == str(bundle) and "UV_INDEX_URL" not in seen


@pytest.mark.parametrize("target", ["tf-cpu", "xla-nightly"])
def test_locks_of_the_installed_package_are_refused_before_any_work(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("packages are resolved, or a base is looked up")

    monkeypatch.setattr(resolver.Project, "_compiled", started)
    monkeypatch.setattr(base_image, "resolve", started)
    monkeypatch.setattr(settings, "CHECKOUT", None)
    with pytest.raises(UserError, match=rf"images/{target}/pylock\.toml is part of the installed package"):
        target_lock.lock(model.load(target))


@ALL
def test_every_pin_of_a_spec_is_in_its_lock(spec: Spec) -> None:
    installed = spec.locked().versions
    for text in [*spec.packages, *model.requirements_of(spec)]:
        pin = Requirement(text)
        assert installed[canonicalize_name(pin.name)] == next(iter(pin.specifier)).version


@ALL
def test_no_package_is_in_two_layers(spec: Spec) -> None:
    locked = spec.locked()
    assert not {pin.name for pin in locked.framework} & {pin.name for pin in locked.requirements}


def test_a_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    missing = pylock.read(tmp_path / "mine" / pylock.REPOSITORY_FILE, "trainyard lock mine")
    assert isinstance(missing, Unreadable) and missing.missing
    assert missing.reason.endswith("pylock.trainyard.toml is missing: run 'trainyard lock mine'")


def test_an_index_that_is_not_locked_says_what_to_run() -> None:
    with pytest.raises(UserError) as error:
        model.load("cpu").locked("other")
    assert str(error.value) == (
        "images/cpu/pylock.toml: nothing for linux/amd64 and index other: run 'trainyard lock cpu'"
    )


def test_what_is_compiled_is_in_the_image_for_every_index(tmp_path: Path) -> None:
    pins = locks.pins(framework="torch==2.9.1", compiled="fast==1")
    locked = {"amd64": locks.locked(*pins, locks.pin("ninja==1", "build"))}
    path = tmp_path / pylock.REPOSITORY_FILE
    pylock.write(path, Lock("3.11", {DEFAULT: locked, "pytorch-cpu": locked}))
    assert sorted(os.listdir(tmp_path)) == ["pylock.trainyard-pytorch-cpu.toml", "pylock.trainyard.toml"]
    for index in (DEFAULT, "pytorch-cpu"):
        read = pylock.read(path, "trainyard lock")
        assert isinstance(read, Lock) and read.known("amd64", index).versions == {"torch": "2.9.1", "fast": "1"}


def test_entries_are_whole() -> None:
    text = "# of a\na==1 \\\n    --hash=sha256:aa\nB_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    assert dict(resolver.entries(text)) == {
        "a": "a==1 \\\n    --hash=sha256:aa\n",
        "b-b": "B_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n",
    }


@pytest.mark.parametrize("upgrade", [False, True])
def test_the_lock_of_trainyard_itself_keeps_its_versions(
    upgrade: bool, trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dependency in pyproject.toml changes the locks by that alone; ``--upgrade`` takes the newest of all."""
    given: list[resolver.Project] = []

    def resolved(project: resolver.Project) -> dict[str, str]:
        given.append(project)
        return {"requests": f"requests==1 --hash=sha256:{A}\n"}

    written: list[Path] = []
    monkeypatch.setattr(resolver.Project, "entries", resolved)
    monkeypatch.setattr(tool_locks, "_written", lambda path, _: written.append(path) or path)
    assert trainyard("lock", "scripts", *(["--upgrade"] if upgrade else []))[0] == 0
    everything, builder = written
    assert (everything.name, everything.parent.name) == ("requirements.lock", "scripts")
    assert (builder.name, builder.parent.name) == ("requirements.lock", "builder")
    assert given[0].preferred == ("" if upgrade else everything.read_text(encoding="utf-8"))
    assert given[1].options == {"constraint-dependencies": ["requests==1"]}, "the same versions"


def resolved(project: resolver.Project, *, alone: bool = False) -> list[Package]:
    """Resolve as uv would, if it had these two packages alone."""
    found = [package("tensorflow-cpu", "2.21.0", ("tensorflow_cpu-2.21.0-py3-none-any.whl", A, 9))]
    return found + ([package("a", "1", ("a-1-py3-none-any.whl", B, 9))] if "a==1" in project.lines else [])


SMALL = (
    "summary: small\nbase: debian-12\nframework: {name: tensorflow, packages: [tensorflow-cpu==2.21.0]}\n"
    "requirements: [a==1]\ntrainers: {package: tf, default: mnist}\nbudget: {size: 1 GB}\n"
    "smoke: {trainer: mnist, accuracy: 0.9}\n"
)


def test_a_lock_is_written_with_the_dockerfile_that_has_it(
    write_locked_spec: Callable[[str], str],
    trainyard: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(write_locked_spec(SMALL))

    monkeypatch.setattr(resolver.Project, "packages", resolved)
    status, out, err = trainyard("lock", str(folder), "--json")
    assert status == 0, err
    text = (folder / "Dockerfile").read_text(encoding="utf-8")
    assert f"\na==1 \\\n    --hash=sha256:{B}\n" in text and "0" * 64 not in text
    assert [Path(one).name for one in json.loads(out)["written"]] == ["pylock.toml", "Dockerfile"]


@pytest.mark.parametrize(
    ("platforms", "names"),
    [
        ("", ["pylock.toml", "Dockerfile"]),
        ("platforms: [linux/amd64, linux/arm64]\n", ["pylock.toml", "Dockerfile", "Dockerfile.arm64"]),
    ],
)
@pytest.mark.parametrize("arch", ["arm64", "amd64"])
def test_all_platforms_are_locked_whatever_arch_is(
    write_locked_spec: Callable[[str], str],
    trainyard: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    platforms: str,
    names: list[str],
    arch: str,
) -> None:
    folder = Path(write_locked_spec(SMALL + platforms))

    monkeypatch.setattr(resolver.Project, "packages", resolved)
    status, out, err = trainyard("lock", str(folder), "--json", ARCH=arch)
    assert status == 0, err
    assert sorted(Path(one).name for one in json.loads(out)["written"]) == sorted(names)


@pytest.mark.parametrize("words", [("uv", "--upgrade"), ("scripts", "--check"), ("scripts", "-P", "uv")])
def test_options_for_other_locks_are_refused(
    words: tuple[str, ...], trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = trainyard("lock", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert "for the locks of images" in err


def test_a_lock_that_cannot_be_written_leaves_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"pylock\.trainyard\.toml: cannot be written \(No space left on device\)$"):
        pylock.write(tmp_path / pylock.REPOSITORY_FILE, locks.lock(locks.pin("a==1")))
    assert os.listdir(tmp_path) == []


def test_a_framework_that_its_target_no_longer_has_is_reported(write_spec: Callable[[str], str]) -> None:
    spec = model.load(write_spec("extends: tf-cpu\n"), "amd64")
    parent = model.load("tf-cpu", "amd64").locked()
    assert check._locks([spec.with_lock(locks.lock(*parent.pins, python=spec.python_version))]) == []
    other = locks.lock(locks.pin("tensorflow-cpu==2.21.0", "framework"), python=spec.python_version)
    (line,) = check._locks([spec.with_lock(other)])
    assert "mine/pylock.toml: not the framework of images/tf-cpu: run '" in line and "trainyard lock mine'" in line
