"""Locks pin everything by hash, agree with their specs, and name no host."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock, locks, spec
from scripts.cli import UserError

LOCKS = sorted([*spec.ROOT.glob("images/**/*.lock"), *spec.ROOT.glob("examples/*/*.lock"),
                *spec.ROOT.glob("scripts/**/requirements.lock")])  # fmt: skip


@pytest.mark.parametrize("path", LOCKS, ids=spec.relative)
def test_every_entry_is_hash_pinned_and_names_no_host(path: Path) -> None:
    assert locks.read(path)
    text = path.read_text(encoding="utf-8")
    assert "://" not in text
    assert "--index" not in text and "--find-links" not in text


@pytest.mark.parametrize("target", [name for name in spec.targets() if spec.load(name).locked])
def test_every_pin_of_a_spec_is_in_its_locks(target: str) -> None:
    loaded = spec.load(target)
    installed = locks.installed(loaded, "default")
    for text in [*loaded.framework.packages, *lock.requirements_of(loaded)]:
        pin = Requirement(text)
        assert installed[canonicalize_name(pin.name)] == next(iter(pin.specifier)).version


@pytest.mark.parametrize("target", [name for name in spec.targets() if spec.load(name).locked])
def test_no_package_is_in_two_layers(target: str) -> None:
    loaded = spec.load(target)
    framework = locks.read(locks.framework_lock(loaded, "default"))
    assert not set(framework) & set(locks.read(locks.requirements_lock(loaded, "default")))


def test_a_missing_lock_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"framework\.lock is missing: run 'make lock TARGET=mine'"):
        locks.read(tmp_path / "mine" / "framework.lock")


def test_a_pin_without_a_hash_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "framework.lock"
    path.write_text("torch==2.9.1\n", encoding="utf-8")
    with pytest.raises(UserError, match="not a hash-pinned requirement"):
        locks.read(path)


def test_only_keeps_whole_entries() -> None:
    text = "a==1 \\\n    --hash=sha256:aa\nB_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
    assert lock._only(text, {"b-b"}) == "B_b[x]==2 \\\n    --hash=sha256:bb \\\n    --hash=sha256:cc\n"
