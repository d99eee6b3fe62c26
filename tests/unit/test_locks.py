"""Locks pin everything by hash, match their specs, and name no host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard import settings
from trainyard.console import StepFailed, UserError
from trainyard.image import base_image, resolver
from trainyard.settings import ROOT
from trainyard.spec import lockfile, model

LOCKS = sorted([*ROOT.glob("images/**/*.lock"), *ROOT.glob("examples/*/*.lock"),
                *ROOT.glob("scripts/**/requirements.lock")])  # fmt: skip


@pytest.mark.parametrize("path", LOCKS, ids=model.relative)
def test_every_entry_is_hash_pinned_and_names_no_host(path: Path) -> None:
    assert lockfile.read(path)
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text and "--find-links" not in text


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
    with pytest.raises(UserError, match=r"framework\.lock is missing: run 'make lock TARGET=mine'"):
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


@pytest.mark.parametrize("words", [("tf-cpu", "--upgrade"), ("scripts", "--check"), ("scripts", "-P", "uv")])
def test_options_for_other_locks_are_refused(
    words: tuple[str, ...], trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    status, _, err = trainyard("lock", *words)
    assert status == 2
    assert err.count("\n") == 1
    assert "for the lock of a trainyard.yaml" in err
