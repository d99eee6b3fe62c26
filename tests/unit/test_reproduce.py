"""`make reproduce` reports every file that differs and how, and calls builds the same only if they are."""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import replace
from typing import Any

import pytest
from tests import plans
from tests.fakes.engine import FakeEngine

from trainyard.common.errors import UserError
from trainyard.release import reproduce
from trainyard.release.reproduce import Build, Difference, Listing
from trainyard.spec.model import load

Member = tuple[str, bytes, dict[str, Any]]

FILES: list[Member] = [("opt/a.py", b"print()", {}), ("opt/b.pyc", b"1234", {}), ("opt/c", b"same", {})]


def listing(members: list[Member], stage: str = "wheel-torch") -> Listing:
    """A layer with these members, read as a real one is."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data, changes in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, 315532800
            for key, value in changes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    read = reproduce.entries(io.BufferedReader(io.BytesIO(written.getvalue())))
    return Listing(stage, f"sha256:{hash(written.getvalue())}", read)


def build(layer: Listing, **config: Any) -> Build:
    """A build whose digest depends on its content."""
    return Build(f"sha256:{layer.diff_id}{config}", config, [layer], 1.0)


def changed(number: int, data: bytes | None = None, **changes: Any) -> list[Member]:
    """The files with one of them changed."""
    members = list(FILES)
    name, before, _ = members[number]
    members[number] = (name, before if data is None else data, changes)
    return members


@pytest.mark.parametrize(
    ("members", "path", "reason"),
    [
        (changed(0, b"exit()"), "opt/a.py", "content: 7 bytes, then 6"),
        (changed(0, b"PRINT()"), "opt/a.py", "content: 7 bytes both times"),
        (changed(0, mode=0o755), "opt/a.py", "mode: 0644, then 0755"),
        (changed(0, mtime=315532801), "opt/a.py", "mtime: 315532800, then 315532801"),
        (changed(0, uid=1000), "opt/a.py", "owner: 0:0, then 1000:0"),
        (changed(0, type=tarfile.SYMTYPE, linkname="c", data=b""), "opt/a.py", "kind: file, then link"),
        (changed(0, pax_headers={"SCHILY.xattr.user.x": "y"}), "opt/a.py", "extended attributes"),
        (FILES[1:], "opt/a.py", "only in the first build"),
        ([*FILES, ("opt/d", b"", {})], "opt/d", "only in the second build"),
    ],
)
def test_every_way_to_differ_is_named(members: list[Member], path: str, reason: str) -> None:
    found = reproduce.compare(build(listing(FILES)), build(listing(members)))
    assert [(one.layer, one.path) for one in found] == [("wheel-torch", path)]
    assert len(found[0].reasons) == 1 and found[0].reasons[0].startswith(reason)


def test_the_same_files_in_another_order_differ_by_their_order() -> None:
    found = reproduce.compare(build(listing(FILES)), build(listing(FILES[::-1])))
    assert found == [Difference("wheel-torch", "opt/a.py", ("order: the other build has opt/c here",))]


def test_all_differences_of_a_file_are_reported_together() -> None:
    found = reproduce.compare(build(listing(FILES)), build(listing(changed(1, b"4321", mode=0o600, mtime=5))))
    assert [reason.split(":")[0] for reason in found[0].reasons] == ["content", "mode", "mtime"]
    assert found[0].cause.startswith("byte code")


@pytest.mark.parametrize(
    ("path", "words"),
    [("opt/x.pyc", "byte code"), ("opt/x-1.dist-info/INSTALLER", "installer"), ("var/lib/dpkg/status", "list"),
     ("var/lib/apt/lists/x", "caches"), ("etc/ld.so.cache", "linker"), ("opt/mine.txt", "")],
)  # fmt: skip
def test_a_usual_cause_is_named_if_one_is_known(path: str, words: str) -> None:
    assert words in reproduce.cause(path, ("content: 1 bytes, then 2",))
    assert reproduce.cause(path, ("mtime: 1, then 2",)) == ""


def test_the_same_layers_with_other_labels_differ_in_the_configuration() -> None:
    one = build(listing(FILES), config={"Labels": {"a": "1"}}, created="x")
    other = build(listing(FILES), config={"Labels": {"a": "2"}}, created="x")
    found = reproduce.compare(one, other)
    assert [(one.layer, one.path) for one in found] == [("configuration", "config")]
    assert 'Labels: {"a": "1"}, then {"a": "2"}' in found[0].reasons[0]


def test_nothing_differs_if_and_only_if_the_digests_agree() -> None:
    one = build(listing(FILES))
    assert reproduce.compare(one, one) == []
    assert reproduce.compare(one, replace(one, digest="sha256:other"))[0].path == "compression"


def test_too_little_space_is_reported_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    fake_engine: FakeEngine,
) -> None:
    from collections import namedtuple

    fake_engine.info["DockerRootDir"] = str(tmp_path)
    usage = namedtuple("usage", "free")
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(4_000_000_000))
    plan = plans.plan(load("tf-cpu", "amd64"))
    with pytest.raises(UserError, match=r"has 4\.00 GB free, and a build of tf-cpu \(1\.90 GB\).*needs 4\.75 GB"):
        reproduce.require_space(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(5_000_000_000))
    reproduce.require_space(plan)
