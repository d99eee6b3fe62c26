"""Locks pin everything by hash, match their specs, and name no host."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, is_valid_pylock_path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image, resolver, target_lock, tool_locks
from trainyard.project import check
from trainyard.spec import lock as locks
from trainyard.spec import markers, model
from trainyard.spec import pylock as pylocks
from trainyard.spec.lock import Lock, Origin, Pin, Section, parse
from trainyard.spec.model import Spec

LOCKED = [spec for spec in [*model.catalogue(), model.load(str(ROOT / "examples/patches"))] if spec.version_known]
ALL = pytest.mark.parametrize("spec", LOCKED, ids=lambda spec: spec.target)
TOOLS = [*ROOT.glob("images/*.lock"), *ROOT.glob("scripts/**/requirements.lock")]


@pytest.mark.parametrize("path", TOOLS, ids=model.relative)
def test_every_entry_is_hash_pinned_and_names_no_host(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert parse(text)
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
        chosen = lock.select(environment=environment, tags=pylocks.tags(one.python_version, one.arch))
        files = {(package.name, str(package.version)): file for package, file in chosen}
        pins = {(pin.name, pin.version): pin for pin in [*one.locked().framework, *one.locked().requirements]}
        assert files.keys() == pins.keys()
        for name, file in files.items():
            assert isinstance(file, PackageWheel | PackageSdist)
            assert file.hashes["sha256"] in pins[name].hashes and 0 < (file.size or 0) <= pins[name].size
            assert file.path == file.filename and file.url is None


@ALL
def test_every_file_of_a_lock_is_one_that_some_platform_can_use(spec: Spec) -> None:
    lock = Pylock.from_dict(tomllib.loads(spec.lock_file.read_text(encoding="utf-8")))
    files = {file.hashes["sha256"] for one in lock.packages for file in [*(one.wheels or ()), one.sdist] if file}
    pins = [pin for one in model.each_platform(spec) for pin in [*one.locked().framework, *one.locked().requirements]]
    assert files == {sha for pin in pins for sha in pin.hashes}


@ALL
def test_every_platform_is_locked_and_every_entry_has_the_size_of_its_file(spec: Spec) -> None:
    """The layers of an image are made up from them. Only the lock of an image that extends a target marks entries."""
    for one in model.each_platform(spec):
        locked = one.locked()
        pins = [*locked.framework, *locked.requirements]
        assert [pin.name for pin in pins if not pin.size] == []
        assert any(pin.added for pin in pins) == (spec.framework_of is not None)
        assert locked.text("framework") == "".join(pin.text() for pin in locked.framework)


@ALL
def test_a_lock_is_read_as_it_is_written(spec: Spec) -> None:
    text = spec.lock_file.read_text(encoding="utf-8")
    assert pylocks.loads(text, "trainyard lock").text() == text


def test_the_lock_of_an_image_that_extends_a_target_marks_what_the_target_lacks() -> None:
    spec = model.load(str(ROOT / "examples/patches"))
    parent = model.load(str(spec.framework_of)).locked()
    assert spec.locked().text("framework") == parent.text("framework")
    shared = {(pin.name, pin.version, pin.hashes) for pin in parent.requirements}
    pins = spec.locked().requirements
    assert any(pin.added for pin in pins) and any(not pin.added for pin in pins)
    assert all(pin.added is ((pin.name, pin.version, pin.hashes) not in shared) for pin in pins)


HASH = st.text("0123456789abcdef", min_size=64, max_size=64)


@given(
    st.lists(
        st.builds(
            Pin,
            st.from_regex(r"[a-z][a-z0-9]{0,8}(-[a-z0-9]{1,4})?", fullmatch=True),
            st.from_regex(r"[0-9]{1,4}(\.[0-9]{1,2}){0,3}(rc1|\.dev6|\+cpu|\+git0123abc)?", fullmatch=True),
            st.lists(HASH, min_size=1, max_size=4).map(tuple),
            st.integers(0, 10**10),
            st.booleans(),
        ),
        max_size=5,
    )
)
def test_entries_are_read_as_they_are_written(pins: list[Pin]) -> None:
    assert parse("# A comment.\n" + "\n".join(pin.text() for pin in pins)) == pins


A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        (Pin("a", "1", (A,), 5), f"a==1 \\\n    --hash=sha256:{A}  # 5 bytes\n"),
        (Pin("a", "1", (A, B), 5), f"a==1 \\\n    --hash=sha256:{A} \\\n    --hash=sha256:{B}  # 5 bytes\n"),
        (Pin("a", "1", (A,), 5, added=True), f"a==1 \\\n    --hash=sha256:{A}  # 5 bytes, added\n"),
        (Pin("a", "1", (A,), added=True), f"a==1 \\\n    --hash=sha256:{A}  # 0 bytes, added\n"),
        (Pin("a", "1", (A,)), f"a==1 \\\n    --hash=sha256:{A}\n"),
    ],
)
def test_an_entry_ends_with_the_size_of_its_file_which_no_installer_reads(pin: Pin, text: str) -> None:
    assert pin.text() == text
    assert parse(text) == [pin]
    assert pin.requirement() == text.partition("  #")[0].rstrip("\n")


@pytest.mark.parametrize(
    "entry",
    [
        f"a==1  # 5 bytes\nb==1 --hash=sha256:{B}",
        "a==1 \\\n    --hash=sha256:",
        "a==1 \\\n    --hash=md5:0123  # 5 bytes",
        f"a>=1 --hash=sha256:{A}",
        f"a @ file:///a.whl --hash=sha256:{A}",
        f"--hash=sha256:{A}",
        "<<<<<<< HEAD",
    ],
)
def test_a_damaged_entry_is_one_line(tmp_path: Path, entry: str) -> None:
    pin = Pin("z", "1", (C,), 9).text()
    path = tmp_path / "mine" / locks.FILE
    path.parent.mkdir()
    sections = {Section("amd64", "framework"): pin, Section("amd64", "requirements"): f"{entry}\n"}
    locks.write(path, Lock(sections, origin=Origin("0.1", "0" * 8, "tf-cpu", "debian:13", "0" * 64)))
    damaged = locks.read(path, "trainyard lock mine")
    assert isinstance(damaged, locks.Unreadable) and "\n" not in damaged.reason
    words = "conflicts of a merge" if entry.startswith("<<<") else "not a hash-pinned requirement: "
    assert f"{locks.FILE}:" in damaged.reason and words in damaged.reason
    assert "run 'trainyard lock mine'" in damaged.reason


def wheel_of(package: str, digest: str, size: int | None) -> str:
    """An entry of the wheels of a pylock.toml."""
    known, stem = "" if size is None else f"size = {size}, ", package.replace("-", "_")
    return f'{{ url = "https://host/{stem}-1-py3-none-any.whl", {known}hashes = {{ sha256 = "{digest}" }} }}'


def pylock(packages: dict[str, list[tuple[str, int | None]]], key: str = "wheels") -> str:
    lines = ['lock-version = "1.0"', 'created-by = "uv"']
    for name, files in packages.items():
        found = ", ".join(wheel_of(name, digest, size) for digest, size in files)
        lines += ["[[packages]]", f'name = "{name}"', 'version = "1"']
        lines += [
            f"wheels = [{found}]" if key == "wheels" else f"sdist = {found.replace('-py3-none-any.whl', '.tar.gz')}"
        ]
    return "\n".join([*lines, ""])


def packages(text: str) -> list[Package]:
    return list(Pylock.from_dict(tomllib.loads(text)).packages)


def entry(*digests: str, about: str = "") -> str:
    return "a==1 \\\n" + " \\\n".join(f"    --hash=sha256:{one}" for one in digests) + f"{about}\n"


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        pytest.param(entry(A, B, C), pylock({"a": [(B, 7)]}), entry(B, about="  # 7 bytes"), id="platform"),
        pytest.param(entry(B, A), pylock({"a": [(A, 7), (B, 9)]}), entry(A, B, about="  # 9 bytes"), id="largest"),
        pytest.param(entry(A), pylock({"a": [(A, 7)]}, "sdist"), entry(A, about="  # 7 bytes"), id="no wheel"),
        pytest.param(entry(A), pylock({"a": [(A, None)]}), entry(A), id="no size"),
        pytest.param(entry(A, B), pylock({"a": [(B, None)]}), entry(B), id="no size, platform"),
        pytest.param(entry(A, B), pylock({"a": [(C, 7)]}), entry(A, B), id="other files"),
        pytest.param(entry(A, B), pylock({"b": [(A, 7)]}), entry(A, B), id="no files"),
        pytest.param(entry(A, B), None, entry(A, B), id="uv fails"),
        pytest.param(entry(A, B, about="  # 3 bytes"), "not asked", entry(A, B, about="  # 3 bytes"), id="has a size"),
    ],
)
def test_sizes_are_those_that_the_index_gives(text: str, answer: str | None, expected: str) -> None:
    asked: list[list[str]] = []

    def files(pins: list[str]) -> list[Package]:
        asked.append(pins)
        if answer is None:
            raise resolver.Failed("mine", "no such index")
        return packages(answer)

    assert resolver.with_sizes(text, files) == expected
    assert asked == ([] if answer == "not asked" else [["a==1"]])


def test_only_entries_without_a_size_are_asked_for() -> None:
    old = Pin("a", "1", (A,), 3, added=True)

    def files(pins: list[str]) -> list[Package]:
        assert pins == ["b==2"]
        return packages(pylock({"b": [(B, 7)]}))

    text = resolver.with_sizes(old.text() + Pin("b", "2", (B,)).text(), files)
    assert parse(text) == [old, Pin("b", "2", (B,), 7)]


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
    missing = locks.read(tmp_path / "mine" / locks.FILE, "trainyard lock mine")
    assert isinstance(missing, locks.Unreadable) and missing.missing
    assert missing.reason.endswith("trainyard.lock is missing: run 'trainyard lock mine'")


def test_an_index_that_is_not_locked_says_what_to_run() -> None:
    with pytest.raises(UserError) as error:
        model.load("cpu").locked("other")
    assert str(error.value) == (
        "images/cpu/pylock.toml: nothing for linux/amd64 and index other: run 'trainyard lock cpu'"
    )


def test_what_is_compiled_is_in_the_image_for_every_index() -> None:
    compiled = {Section("amd64", kind): Pin(kind, "1", (A,)).text() for kind in ("compiled", "build-requires")}
    pairs = {
        Section("amd64", kind, index): "" for kind in ("framework", "requirements") for index in ("default", "cpu")
    }
    for index in ("default", "cpu"):
        locked = Lock(pairs | compiled).of("amd64", index)
        assert locked and locked.versions == {"compiled": "1"}


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


def resolved(project: resolver.Project) -> list[Package]:
    """Resolve as uv would, if it had these two packages alone."""
    return packages(pylock({"tensorflow-cpu": [(A, 9)], **({"a": [(B, 9)]} if "a==1" in project.lines else {})}))


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

    monkeypatch.setattr(resolver.Project, "locked", resolved)
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

    monkeypatch.setattr(resolver.Project, "locked", resolved)
    status, out, err = trainyard("lock", str(folder), "--json", ARCH=arch)
    assert status == 0, err
    assert sorted(Path(one).name for one in json.loads(out)["written"]) == sorted(names)


def test_sizes_that_no_index_gives_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The layers are others without them."""
    text = Pin("a", "1", ("0" * 64,)).text()

    def files(_: list[str]) -> list[Package]:
        raise resolver.Failed("mine", "error: no such\nhost")

    assert resolver.with_sizes(text, files) == text
    assert "no sizes of a, which share layers of small wheels: error: no such host" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("words", [("uv", "--upgrade"), ("scripts", "--check"), ("scripts", "-P", "uv")])
def test_options_for_other_locks_are_refused(
    words: tuple[str, ...], trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = trainyard("lock", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert "for the locks of images" in err


def test_a_lock_that_cannot_be_written_leaves_no_other_file(tmp_path: Path) -> None:
    (tmp_path / locks.FILE / "folder").mkdir(parents=True)
    with pytest.raises(UserError, match=r"trainyard\.lock: cannot be written \(Is a directory\)$"):
        locks.write(tmp_path / locks.FILE, Lock())
    assert [path.name for path in tmp_path.iterdir()] == [locks.FILE]


def test_a_framework_that_its_target_no_longer_has_is_reported(write_spec: Callable[[str], str]) -> None:
    spec = model.load(write_spec("extends: tf-cpu\n"), "amd64")
    parent = model.load("tf-cpu", "amd64").locked()
    same = {Section("amd64", kind): parent.text(kind) for kind in ("framework", "requirements")}
    assert check._locks([spec.with_lock(Lock(same))]) == []
    other = same | {Section("amd64", "framework"): Pin("tensorflow-cpu", "2.21.0", (A,), 9).text()}
    (line,) = check._locks([spec.with_lock(Lock(other))])
    assert "mine/pylock.toml: not the framework of images/tf-cpu: run '" in line and "trainyard lock mine'" in line
