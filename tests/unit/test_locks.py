"""Locks pin everything by hash, match their specs, and name no host."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common import settings
from trainyard.common.console import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image, locked_files, resolver
from trainyard.spec import lockfile, model
from trainyard.spec.lockfile import Pin

LOCKS = sorted([*ROOT.glob("images/**/*.lock"), *ROOT.glob("examples/*/*.lock"),
                *ROOT.glob("scripts/**/requirements.lock")])  # fmt: skip


@pytest.mark.parametrize("path", LOCKS, ids=model.relative)
def test_every_entry_is_hash_pinned_and_names_no_host(path: Path) -> None:
    assert lockfile.read(path)
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text and "--find-links" not in text


@pytest.mark.parametrize("path", [path for path in LOCKS if path.parent.parent.name == "images"], ids=model.relative)
def test_every_entry_of_a_targets_lock_has_the_size_of_its_file(path: Path) -> None:
    """The layers of an image are made up from them. Only the lock of an image that extends a target marks entries."""
    pins = lockfile.pinned(path)
    assert [pin.name for pin in pins if not pin.size] == []
    assert not any(pin.added for pin in pins)
    header = path.read_text(encoding="utf-8").splitlines(keepends=True)[0]
    assert path.read_text(encoding="utf-8") == header + "".join(pin.text() for pin in pins)


def test_the_lock_of_an_image_that_extends_a_target_marks_what_the_target_lacks() -> None:
    (path,) = ROOT.glob("examples/*/requirements.lock")
    spec = model.load(str(path.parent))
    shared = {(pin.name, pin.version, pin.hashes) for pin in lockfile.pinned(spec.framework_folder / path.name)}
    pins = lockfile.pinned(path)
    assert all(pin.size for pin in pins)
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
    assert lockfile.parse("# A comment.\n" + "\n".join(pin.text() for pin in pins)) == pins


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
    assert lockfile.parse(text) == [pin]
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
    path = tmp_path / "mine" / "framework.lock"
    path.parent.mkdir()
    path.write_text(f"# Locked.\nz==1 --hash=sha256:{C}  # 9 bytes\n{entry}\n", encoding="utf-8")
    for read in (lockfile.read, lockfile.pinned):
        with pytest.raises(UserError) as error:
            read(path)
        message = str(error.value)
        assert "framework.lock: not a hash-pinned requirement: " in message and "\n" not in message
        assert message.endswith("; run 'trainyard lock mine'")


def wheel_of(package: str, digest: str, size: int | None) -> str:
    """An entry of the wheels of a pylock.toml."""
    known = "" if size is None else f"size = {size}, "
    return f'{{ url = "https://host/{package}-1-py3-none-any.whl", {known}hashes = {{ sha256 = "{digest}" }} }}'


def pylock(packages: dict[str, list[tuple[str, int | None]]], key: str = "wheels") -> str:
    lines = ['lock-version = "1.0"', 'created-by = "uv"']
    for name, files in packages.items():
        found = ", ".join(wheel_of(name, digest, size) for digest, size in files)
        lines += ["[[packages]]", f'name = "{name}"', 'version = "1"']
        lines += [
            f"wheels = [{found}]" if key == "wheels" else f"sdist = {found.replace('-py3-none-any.whl', '.tar.gz')}"
        ]
    return "\n".join([*lines, ""])


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
def test_sizes_are_those_that_the_index_gives(tmp_path: Path, text: str, answer: str | None, expected: str) -> None:
    asked: list[list[str]] = []

    def compile_pins(pins: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(pins)
        if answer is not None:
            (tmp_path / "pylock.toml").write_text(answer, encoding="utf-8")
        return subprocess.CompletedProcess([], 0 if answer is not None else 1, "", "")

    assert locked_files.with_sizes(tmp_path, text, compile_pins) == expected
    assert asked == ([] if answer == "not asked" else [["a==1"]])


def test_only_entries_without_a_size_are_asked_for(tmp_path: Path) -> None:
    old = Pin("a", "1", (A,), 3, added=True)

    def compile_pins(pins: list[str]) -> subprocess.CompletedProcess[str]:
        assert pins == ["b==2"]
        (tmp_path / "pylock.toml").write_text(pylock({"b": [(B, 7)]}), encoding="utf-8")
        return subprocess.CompletedProcess([], 0, "", "")

    text = locked_files.with_sizes(tmp_path, old.text() + Pin("b", "2", (B,)).text(), compile_pins)
    assert lockfile.parse(text) == [old, Pin("b", "2", (B,), 7)]


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
        resolver.compile_lock(["a==1"], tmp_path / "a.lock", python="3.11", target="mine")
    assert seen["SSL_CERT_FILE"] == str(bundle) and "UV_INDEX_URL" not in seen


@pytest.mark.parametrize("target", ["tf-cpu", "xla-nightly"])
def test_locks_of_the_installed_package_are_refused_before_any_work(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("packages are resolved, or a base is looked up")

    monkeypatch.setattr(resolver, "compile_lock", started)
    monkeypatch.setattr(base_image, "resolve", started)
    monkeypatch.setattr(settings, "CHECKOUT", None)
    with pytest.raises(UserError, match=rf"images/{target}/requirements\.lock is part of the installed package"):
        resolver.lock_target(model.load(target), "default")


@pytest.mark.parametrize("target", [name for name in model.targets() if model.load(name).locked])
def test_every_pin_of_a_spec_is_in_its_locks(target: str) -> None:
    loaded = model.load(target)
    installed = lockfile.installed(loaded, "default")
    for text in [*loaded.framework.packages, *model.requirements_of(loaded)]:
        pin = Requirement(text)
        assert installed[canonicalize_name(pin.name)] == next(iter(pin.specifier)).version


@pytest.mark.parametrize("target", [name for name in model.targets() if model.load(name).locked])
def test_no_package_is_in_two_layers(target: str) -> None:
    loaded = model.load(target)
    framework = lockfile.read(lockfile.framework_lock(loaded, "default"))
    assert not set(framework) & set(lockfile.read(lockfile.requirements_lock(loaded, "default")))


def test_a_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"framework\.lock is missing: run 'trainyard lock mine'"):
        lockfile.read(tmp_path / "mine" / "framework.lock")


def test_a_pin_without_a_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "framework.lock"
    path.write_text("torch==2.9.1\n", encoding="utf-8")
    with pytest.raises(UserError, match="not a hash-pinned requirement"):
        lockfile.read(path)


def test_only_keeps_whole_entries() -> None:
    text = "a==1 \\\n    --hash=sha256:aa\nB_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    assert resolver._only(text, {"b-b"}) == "B_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"


@pytest.mark.parametrize("upgrade", [False, True])
def test_the_lock_of_trainyard_itself_keeps_its_versions(
    upgrade: bool, trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another dependency in pyproject.toml changes the locks by that alone; ``--upgrade`` takes the newest of all."""
    given: dict[Path, tuple[str, str]] = {}

    def compile_lock(
        _packages: list[str], output: Path, *, constraints: str = "", preferred: str = "", **_: str
    ) -> None:
        given[output] = (preferred, constraints)

    monkeypatch.setattr(resolver, "compile_lock", compile_lock)
    assert trainyard("lock", "scripts", *(["--upgrade"] if upgrade else []))[0] == 0
    everything, builder = given
    assert (everything.name, everything.parent.name) == ("requirements.lock", "scripts")
    assert given[everything][0] == ("" if upgrade else everything.read_text(encoding="utf-8"))
    assert "\nrequests==" in given[builder][1]  # the same versions


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

    def compile_lock(_packages: list[str], output: Path, **_: object) -> None:
        name, version = ("tensorflow-cpu", "2.21.0") if output.name == "framework.lock" else ("a", "3")
        output.write_text(Pin(name, version, ("0" * 64,), 9).text(), encoding="utf-8")

    monkeypatch.setattr(resolver, "compile_lock", compile_lock)
    status, out, err = trainyard("lock", str(folder), "--json")
    assert status == 0, err
    text = (folder / "Dockerfile").read_text(encoding="utf-8")
    assert "\na==3 \\\n" in text and "a==1" not in text
    assert [Path(one).name for one in json.loads(out)["written"]] == [
        "framework.lock",
        "requirements.lock",
        "Dockerfile",
    ]


@pytest.mark.parametrize(
    ("platforms", "names"),
    [
        ("", ["framework.lock", "requirements.lock", "Dockerfile"]),
        (
            "platforms: [linux/amd64, linux/arm64]\n",
            [
                *("framework.lock", "requirements.lock", "framework.arm64.lock", "requirements.arm64.lock"),
                *("Dockerfile", "Dockerfile.arm64"),
            ],
        ),
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

    def compile_lock(_packages: list[str], output: Path, **_: object) -> None:
        name, version = ("tensorflow-cpu", "2.21.0") if output.name.startswith("framework") else ("a", "3")
        output.write_text(Pin(name, version, ("0" * 64,), 9).text(), encoding="utf-8")

    monkeypatch.setattr(resolver, "compile_lock", compile_lock)
    status, out, err = trainyard("lock", str(folder), "--json", ARCH=arch)
    assert status == 0, err
    assert sorted(Path(one).name for one in json.loads(out)["written"]) == sorted(names)


def test_sizes_that_no_index_gives_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers are others without them."""
    text = Pin("a", "1", ("0" * 64,)).text()
    failed = subprocess.CompletedProcess([], 1, "", "error: no such\nhost")
    assert locked_files.with_sizes(tmp_path, text, lambda _: failed) == text
    assert "no sizes of a, which share layers of small wheels: error: no such host" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("words", [("tf-cpu", "--upgrade"), ("scripts", "--check"), ("scripts", "-P", "uv")])
def test_options_for_other_locks_are_refused(
    words: tuple[str, ...], trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = trainyard("lock", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert "for the lock of a trainyard.yaml" in err
