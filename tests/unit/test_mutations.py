"""The mutation test of ``trainyard verify``: a mutant differs from the original in what it says, and nowhere else."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import docker.errors
import pytest
import zstandard
from tests import locks as pins
from tests.mutations import __main__ as program
from tests.mutations import configuration, elf, files, foreign, instructions, judge, locks, plan, report
from tests.mutations.judge import Verdict
from tests.mutations.layout import Change, Draft, SavedImage
from tests.mutations.plan import Source
from tests.mutations.report import Foreign, Results, Row

from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT
from trainyard.spec import pylock
from trainyard.spec.lock import DEFAULT
from trainyard.spec.model import load

#: What a container sees of an entry: type, mode, owner, target or content, extended attributes.
View = dict[str, tuple[object, ...]]

ENVIRONMENT = ["PATH=/usr/bin", "HOME=/home/trainer"]

CONFIG: dict[str, Any] = {
    "architecture": "amd64",
    "os": "linux",
    "created": "2026-01-01T00:00:00Z",
    "config": {"Env": ENVIRONMENT, "Labels": {"a.label": "1"}, "Entrypoint": ["launch"], "User": "1000"},
    "history": [{"created_by": "ENV A", "empty_layer": True}, {"created_by": "COPY site"}, {"created_by": "COPY app"}],
}


def shared_library(*needed: str) -> bytes:
    """An x86-64 ELF file with one loaded segment, at address 4096, and a dynamic one that needs libraries."""
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in needed)
    at = 64 + 2 * 56
    offsets = [strings.index(f"\0{name}\0".encode()) + 1 for name in needed]
    dynamic = b"".join(struct.pack("<QQ", 1, offset) for offset in offsets)
    dynamic += struct.pack("<QQQQ", 5, 4096 + at, 0, 0)
    size = at + len(strings) + len(dynamic)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 4096, 4096, size, size, 4096)
    start = at + len(strings)
    table = struct.pack("<IIQQQQQQ", 2, 4, start, 4096 + start, 4096 + start, len(dynamic), len(dynamic), 8)
    return header + load + table + strings + dynamic


def layer(*entries: tuple[str, bytes | str | None]) -> bytes:
    """A tar: of files (bytes), folders (None), symbolic links (str) and hard links ("=path")."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o755 if content is None or name.startswith("usr/bin") else 0o644
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type = tarfile.LNKTYPE if content.startswith("=") else tarfile.SYMTYPE
                info.linkname = content.removeprefix("=")
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return output.getvalue()


LONG = "opt/venv/lib/python3.13/site-packages/" + "/".join(["a_long_name_of_a_package"] * 4) + "/module.py"

LAYERS = (
    layer(
        ("./", None), ("etc", None), ("etc/setting", b"a = 1\n"), ("etc/old", b"gone\n"), ("etc/cache", None),
        ("etc/cache/old", b"gone\n"), ("usr", None), ("usr/bin", None), ("usr/lib", None),
        ("usr/bin/tool", shared_library("libmade.so.1")), ("usr/lib/libmade.so.1", shared_library()),
        ("usr/bin/linked", shared_library("libmade.so.1")),
        ("usr/bin/same", "=usr/bin/linked"), ("tmp", None), ("root", None),
    ),
    layer(
        ("opt", None), ("opt/venv", None), ("opt/venv/lib", None), ("opt/venv/lib/python3.13", None),
        ("opt/venv/lib/python3.13/site-packages", None), (LONG, b"x = 1\n" * 200),
        ("opt/venv/python", "/usr/bin/tool"), ("etc", None), ("etc/.wh.old", b""), ("etc/cache", None),
        ("etc/cache/.wh..wh..opq", b""), ("etc/cache/new", b"new\n"),
    ),
    layer(("srv", None), ("srv/app", None), ("srv/app/main.py", b"print(1)\n"), ("etc/setting", b"a = 2\n")),
)  # fmt: skip


def write_layout(folder: Path) -> Path:
    """The image as ``docker image save`` writes it: an index of an index, layers compressed in three ways."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    packed = [zstandard.compress(LAYERS[0]), gzip.compress(LAYERS[1]), LAYERS[2]]
    diff_ids = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in LAYERS]
    config = blob(json.dumps(CONFIG | {"rootfs": {"type": "layers", "diff_ids": diff_ids}}).encode())
    manifest = blob(json.dumps({"config": config, "layers": [blob(data) for data in packed]}).encode())
    index = blob(json.dumps({"manifests": [manifest]}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [index]}), encoding="utf-8")
    return folder


@pytest.fixture
def image(tmp_path: Path) -> SavedImage:
    return SavedImage(write_layout(tmp_path / "layout"))


@pytest.fixture
def source(image: SavedImage, tmp_path: Path) -> Source:
    folder = tmp_path / "mine"
    folder.mkdir()
    lock = pins.lock(*(pins.pin(f"{name}==1.2.3", "framework", 5) for name in ("keras", "numpy")))
    return Source(image, folder, lock, locks.Part("amd64", DEFAULT, own=False))


def blobs_of(draft: Draft) -> dict[str, bytes]:
    """Digest -> content of what a mutant brings."""
    return {blob.digest: b"".join(blob.chunks()) for blob in draft.blobs}


def seen(image: SavedImage, draft: Draft) -> View:
    """What a container sees of a mutant, unpacked layer by layer without the code under test."""
    new, found = blobs_of(draft), View()
    own = {str(one.descriptor["digest"]): one.file.read_bytes() for one in image.layers}
    for descriptor in draft.layers:
        with tarfile.open(fileobj=io.BytesIO((own | new)[descriptor["digest"]])) as tar:
            unpack(tar, found)
    return found


def unpack(tar: tarfile.TarFile, found: View) -> None:
    members = [(one.name.strip("/").removeprefix("./"), one) for one in tar]
    for path, _ in members:
        folder, _, name = path.rpartition("/")
        if name == ".wh..wh..opq":
            remove(found, f"{folder}/")
        elif name.startswith(".wh."):
            remove(found, f"{folder}/{name[4:]}".strip("/"))
    for path, info in members:
        if ".wh." in path:
            continue
        if not info.isdir():
            remove(found, path)
        content = tar.extractfile(info).read() if info.isreg() else info.linkname  # type: ignore[union-attr]
        attributes = {key: value for key, value in info.pax_headers.items() if "xattr" in key}
        found[path] = (info.type, info.mode, info.uid, info.gid, content, attributes)


def remove(found: View, path: str) -> None:
    for one in [one for one in found if one == path or one.startswith(path if path.endswith("/") else f"{path}/")]:
        del found[one]


def files_in(archive: bytes) -> dict[str, bytes]:
    """Name -> content of the entries of a tar in their order; empty for what is no file. None is there twice."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = [(info.name, tar.extractfile(info).read() if info.isreg() else b"") for info in tar]  # type: ignore[union-attr]
    assert len(found) == len(dict(found))
    return dict(found)


def changed(one: View, other: View) -> set[str]:
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def test_a_saved_image_is_seen_as_a_container_sees_it(image: SavedImage) -> None:
    assert image.visible.keys() - {"."} == seen(image, image.original()).keys() - {".", ""}
    assert image.content(image.visible["etc/setting"]) == b"a = 2\n"
    assert {"etc/old", "etc/cache/old"}.isdisjoint(image.visible) and "etc/cache/new" in image.visible
    assert image.linked == {"usr/bin/same", "usr/bin/linked"}


def test_a_squashed_image_has_one_layer_and_the_same_files(image: SavedImage) -> None:
    draft = image.squashed()
    assert len(draft.layers) == len(draft.config["rootfs"]["diff_ids"]) == len(draft.config["history"]) == 1
    assert not changed(seen(image, draft), seen(image, image.original()))
    names = list(files_in(*blobs_of(draft).values()))
    assert names.index("usr/bin/linked") < names.index("usr/bin/same"), "a hard link comes after its file"


def test_a_rewritten_layer_is_the_only_one_that_differs(image: SavedImage) -> None:
    draft = image.rewritten(2, Change((files.new_file("srv/app/more.py", b"2"),)))
    digests = [one["digest"] for one in draft.layers]
    assert digests[:2] == [one.descriptor["digest"] for one in image.layers[:2]]
    (new,) = blobs_of(draft)
    assert digests[2] == draft.config["rootfs"]["diff_ids"][2] == new
    assert changed(seen(image, draft), seen(image, image.original())) == {"srv/app/more.py"}
    assert draft.config["history"] == image.config["history"]


@pytest.mark.parametrize(("position", "at"), [(1, 0), (2, 2), (3, 3)])
def test_an_inserted_layer_has_its_place_in_the_history(image: SavedImage, position: int, at: int) -> None:
    draft = image.inserted(position, Change((files.new_file("srv/app/more.py", b"2"),)), "RUN it")
    assert [entry["created_by"] for entry in draft.config["history"]].index("RUN it") == at
    assert draft.layers[position]["digest"] == draft.config["rootfs"]["diff_ids"][position] == draft.blobs[0].digest
    assert list(files_in(*blobs_of(draft).values())) == ["srv", "srv/app", "srv/app/more.py"]


def test_what_is_loaded_is_an_oci_layout_with_only_what_is_new(image: SavedImage) -> None:
    draft = image.rewritten(2, Change(removed=("srv/app/main.py",)))
    content = files_in(b"".join(draft.archive("mutant:1")))
    (named,) = json.loads(content["index.json"])["manifests"]
    assert named["annotations"] == {"io.containerd.image.name": "docker.io/library/mutant:1"}
    assert named["digest"] == draft.digest
    stored = {name.rpartition("/")[2]: data for name, data in content.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(data).hexdigest() == name for name, data in stored.items())
    manifest = json.loads(stored[draft.digest.removeprefix("sha256:")])
    assert json.loads(stored[manifest["config"]["digest"].removeprefix("sha256:")]) == draft.config
    assert len(stored) == 3, "manifest, configuration and the new layer"


def ways(image: SavedImage, fault: files.FileFault) -> list[Draft]:
    drafts = [image.inserted(3, fault.change, "COPY"), image.squashed(fault.change)]
    return drafts if fault.places[0] == "etc/setting" else [*drafts, image.rewritten(fault.layer, fault.change)]


@pytest.mark.parametrize("operator", files.OPERATORS, ids=lambda one: one.__name__)
def test_a_fault_in_files_changes_the_path_that_it_names(operator: files.FileOperator, image: SavedImage) -> None:
    before = seen(image, image.original())
    for number in range(15):
        fault = operator(Random(number), image)
        assert f"/{fault.places[0]}" in fault.what and image.differs(fault.change)
        for draft in ways(image, fault):
            paths = changed(seen(image, draft), before)
            assert paths, fault.what
            assert all(path.startswith(fault.places[0]) for path in paths), fault.what


@pytest.mark.parametrize(
    ("operator", "check"),
    [
        (files.edited_byte, lambda old, new: sum(a != b for a, b in zip(old[4], new[4], strict=True)) == 1),
        (files.appended, lambda old, new: new[4].startswith(old[4]) and len(new[4]) > len(old[4])),
        (files.same_size, lambda old, new: len(new[4]) == len(old[4]) and new[4] != old[4]),
        (files.deleted, lambda old, new: new is None),
        (files.missing_library, lambda old, new: old[4] == shared_library() and new is None),
        (files.other_owner, lambda old, new: old[2:4] != new[2:4] and (old[:2], old[4:]) == (new[:2], new[4:])),
        (files.capability, lambda old, new: list(new[5]) == ["SCHILY.xattr.security.capability"]),
        (files.replaced_by_link, lambda old, new: (old[0], new[0]) == (tarfile.REGTYPE, tarfile.SYMTYPE)),
        (files.other_target, lambda old, new: old[0] == new[0] == tarfile.SYMTYPE and old[4] != new[4]),
        (files.other_machine, lambda old, new: new[4][18:20] == struct.pack("<H", 183) and len(old[4]) == len(new[4])),
        (files.new_program, lambda old, new: old is None and new[1] == 0o755),
        (files.new_credential, lambda old, new: old is None and new[1] == 0o600),
    ],
)
def test_a_fault_is_what_its_name_says(
    operator: files.FileOperator, check: Callable[[Any, Any], bool], image: SavedImage
) -> None:
    fault = operator(Random(1), image)
    before, after = seen(image, image.original()), seen(image, image.squashed(fault.change))
    assert check(before.get(fault.places[0]), after.get(fault.places[0])), fault.what


def test_modes_become_setuid_setgid_writable_and_unreadable(image: SavedImage) -> None:
    kinds = {fault.kind: fault for fault in (files.other_mode(Random(number), image) for number in range(60))}
    assert kinds.keys() == {"mode: setuid", "mode: setgid", "mode: world-writable", "mode: not readable"}
    modes = {kind: fault.change.members[0].info.mode for kind, fault in kinds.items()}
    assert modes["mode: setuid"] & 0o4000 and modes["mode: setgid"] & 0o2000 and modes["mode: world-writable"] & 0o002
    assert modes["mode: not readable"] == 0


def test_no_fault_breaks_a_hard_link(image: SavedImage) -> None:
    for operator in files.OPERATORS:
        for number in range(30):
            assert not any(map(operator(Random(number), image).change.drops, image.linked))


@pytest.mark.parametrize("operator", configuration.OPERATORS, ids=lambda one: one.__name__)
def test_a_fault_in_the_configuration_changes_one_property_and_names_it(operator: configuration.ConfigOperator) -> None:
    for number in range(15):
        fault = operator(Random(number), CONFIG)
        flat = [
            {**one, **{f"config.{key}": value for key, value in one["config"].items()}}
            for one in (CONFIG, fault.config)
        ]
        keys = {key for key in flat[0].keys() | flat[1].keys() if flat[0].get(key) != flat[1].get(key)} - {"config"}
        assert len(keys) == 1, fault.what
        assert any(judge.names(fault.what.replace("WorkingDir", "working directory"), one) or one in fault.what.lower()
                   for one in fault.places), fault.what  # fmt: skip
    assert CONFIG["config"]["Env"] == ENVIRONMENT, "the original is not changed"


@pytest.mark.parametrize("operator", instructions.OPERATORS, ids=lambda one: one.__name__)
def test_an_instruction_changes_what_it_names(operator: instructions.InstructionOperator, image: SavedImage) -> None:
    before = seen(image, image.original())
    for number in range(15):
        found = operator(Random(number), image)
        if found.change is None:
            assert found.config is not None
            assert found.created_by in [entry["created_by"] for entry in found.config["history"]]
            assert found.config["config"] != image.config["config"]
            continue
        for position in range(found.above + 1, 4):
            paths = changed(seen(image, image.inserted(position, found.change, found.created_by)), before)
            assert paths and all(any(place in path for place in found.places) for path in paths), found.created_by


def test_a_fault_in_a_lock_changes_one_entry_of_it(source: Source, tmp_path: Path) -> None:
    for kind in locks.OPERATORS:
        for number in range(10):
            fault = locks.lock_fault(Random(number), source.lock, source.part, kind)
            assert fault.what.startswith("amd64, default: ") and fault.places[0] in fault.what
            old, new = (set(content.known("amd64", DEFAULT).pins) for content in (source.lock, fault.content))
            assert {pin.name for pin in old ^ new} == {*fault.places} and len(old - new) == 1
    folder = locks.copied(source.folder, tmp_path / "copy", fault)
    assert folder.name == "mine" and pylock.read(folder / pylock.FILE, "") == fault.content != source.lock


def test_only_the_locks_of_the_index_of_an_image_are_changed() -> None:
    config = {"config": {"Labels": {"io.trainyard.index": "default"}}}
    assert locks.of_image(load("tf-cpu", "arm64"), config) == locks.Part("arm64", "default", own=False)
    config["config"]["Labels"]["io.trainyard.index"] = "pytorch-cpu"
    part = locks.of_image(load("cpu", "amd64"), config)
    assert part == locks.Part("amd64", "pytorch-cpu", own=False)
    lock = load("cpu", "amd64").usable_lock
    assert lock
    both = replace(lock, indexes={**lock.indexes, "pytorch-cpu": lock.indexes[DEFAULT]})
    for kind in locks.OPERATORS:
        fault = locks.lock_fault(Random(1), both, part, kind)
        assert fault.content.of("amd64", "pytorch-cpu") != both.of("amd64", "pytorch-cpu")
        others = [(arch, index) for arch in ("amd64", "arm64") for index in both.names(arch)]
        others.remove(("amd64", "pytorch-cpu"))
        assert all(fault.content.of(*other) == both.of(*other) for other in others)


def test_the_framework_of_another_target_stays_as_it_is() -> None:
    lock = pins.lock(*pins.pins(framework="torch==2.9.1", requirements="einops==0.8.2"))
    part = locks.of_image(load(str(ROOT / "examples/patches"), "amd64"), {})
    assert part == locks.Part("amd64", DEFAULT, own=True)
    assert {
        locks.lock_fault(Random(number), lock, part, kind).places for number in range(9) for kind in locks.OPERATORS
    } == {("einops",)}


def test_a_seed_and_a_number_give_the_same_mutant(source: Source) -> None:
    def made(seed: int) -> list[tuple[object, ...]]:
        mutants = [plan.make(source, seed, number) for number in range(1, 61)]
        return [(one.what, one.kind, one.places, one.draft and one.draft.digest, one.lock) for one in mutants]

    assert made(1) == made(1)
    assert sum(one != other for one, other in zip(made(1), made(2), strict=True)) > 50


def test_every_mutant_differs_from_the_original(source: Source) -> None:
    original = {source.image.original().digest, source.image.squashed().digest}
    for number in range(1, 101):
        mutant = plan.make(source, 3, number)
        assert (mutant.draft is None) != (mutant.lock is None)
        assert mutant.draft is None or mutant.draft.digest not in original, mutant.what
        assert "\n" not in mutant.what and mutant.family == plan.family(number)


def test_a_squashed_mutant_has_the_fault_of_a_layer_mutant(source: Source) -> None:
    layers = {plan.make(source, 1, number).places for number in range(1, 21) if plan.family(number) == "layer"}
    for number in range(1, 21):
        if plan.family(number) == "squashed":
            mutant = plan.make(source, 1, number)
            assert mutant.places in layers and mutant.draft and len(mutant.draft.layers) == 1


def test_two_hundred_mutants_use_every_operator() -> None:
    families = [plan.family(number) for number in range(1, 201)]
    counts = {family: families.count(family) for family in report.FAMILIES}
    assert counts == {"configuration": 50, "layer": 80, "squashed": 40, "instruction": 20, "lock": 10}
    assert counts["squashed"] * 2 == counts["layer"]
    assert counts["layer"] >= 3 * len(files.OPERATORS) and counts["configuration"] >= 2 * len(configuration.OPERATORS)


def test_an_operator_without_anything_to_change_is_followed_by_the_next(source: Source) -> None:
    source.image.config["config"] = {"User": "1000"}  # neither variables nor labels to change or remove
    assert all(plan.make(source, 1, number) for number in range(1, 60) if plan.family(number) == "configuration")


def test_elf_files_name_the_libraries_that_they_need() -> None:
    assert elf.needed(shared_library("liba.so.1", "libb.so")) == ["liba.so.1", "libb.so"]
    assert elf.needed(shared_library()) == elf.needed(b"#!/bin/sh\n") == elf.needed(elf.MAGIC + bytes(60)) == []


@pytest.mark.parametrize(
    ("finding", "place", "named"),
    [
        ("/opt/x/y.py: other content", "opt/x/y.py", True),
        ("/opt/x: missing: opt/x/y.py, opt/x/z.py", "opt/x", True),
        ("/opt/x/y.py: other content", "opt/x/y", True),
        ("/opt/xy: other content", "opt/x", False),
        ("variable PYTHONPATH: is set", "PATH", False),
        ("ExposedPorts: 80/tcp", "exposedports", True),
        ("configuration: exposes ports", "port", True),
        ("most of it", "os", False),
    ],
)
def test_a_finding_names_a_place_as_a_whole_word(finding: str, place: str, named: bool) -> None:
    assert judge.names(finding, place) is named


def test_a_fault_is_found_only_by_a_finding_that_the_original_does_not_have() -> None:
    named, count = "/opt/x: other content", "16 layers instead of 15"
    assert Verdict(1, (count, named)).finds(["opt/x"])
    assert not Verdict(1, (count,)).finds(["opt/x"]), "it only says that something differs"
    assert not Verdict(1, (named,)).finds(["opt/x"], without=[named])
    assert not Verdict(1, ("/opt/x and 3 more",)).finds(["opt/x"], without=["/opt/x and 2 more"])
    assert not Verdict(0, (named,)).finds(["opt/x"]) and not Verdict(3, (named,)).finds(["opt/x"])


#: Stand-in for the command: writes a result to its state folder, and prints the configured output.
STAND_IN = """
import json, os, pathlib, sys
told, state = json.loads(sys.argv[1]), pathlib.Path(os.environ["TRAINYARD_BUILD"])
(state / "mine" / "results" / "of-a-mutant").mkdir(parents=True)
assert (state / "layers" / "known.json.gz").read_text() == "known" and (state / "bases" / "one").is_file()
pathlib.Path(told["seen"]).write_text(json.dumps([str(state), *sys.argv[2:]]))
print(told["stdout"], end="")
print(told["stderr"], end="", file=sys.stderr)
sys.exit(told["status"])
"""


@pytest.mark.parametrize(
    ("stdout", "stderr", "status", "findings"),
    [
        ('{"findings": [{"rule": "r", "where": "/a", "what": "other content"}]}', "x", 1, ("/a: other content",)),
        ('{"findings": []}', "passed", 0, ()),
        ("", "verify: warning\nverify: cannot run its Python\n", 1, ("verify: cannot run its Python",)),
    ],
)
def test_a_mutant_is_verified_in_a_copy_of_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str, status: int, findings: tuple[str, ...]
) -> None:
    for file, text in (("layers/known.json.gz", "known"), ("mine/results/one/build.json", "{}"), ("bases/one", "")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    told = {"seen": str(tmp_path / "seen"), "stdout": stdout, "stderr": stderr, "status": status}
    command = [sys.executable, "-c", STAND_IN, json.dumps(told)]
    assert judge.verify("any:1", "mine", command) == Verdict(status, findings)
    state, *words = json.loads((tmp_path / "seen").read_text())
    assert words == ["verify", "mine", "--image", "any:1", "--json"]
    assert not Path(state).exists() and not (tmp_path / "mine" / "results" / "of-a-mutant").exists()


class Engine:
    """Instead of an engine and the command: what they say of each image, by what it was loaded as."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, finding: str = "", refuses: bool = False) -> None:
        self.finding, self.refuses, self.loaded, self.removed = finding, refuses, list[str](), list[str]()
        self.original = ""
        monkeypatch.setattr(Draft, "load", self.load)
        monkeypatch.setattr(program.ENGINE, "untag", self.removed.append)
        monkeypatch.setattr(program.judge, "verify", self.verify)

    def load(self, reference: str) -> None:
        self.loaded.append(reference)
        if self.refuses:
            raise docker.errors.ImageLoadError("no such platform")

    def verify(self, reference: str, target: str = "") -> Verdict:
        mutated = reference != self.original or "/" in target
        return Verdict(1, (self.finding,)) if self.finding and mutated else Verdict(0)


def trial(source: Source, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> program.Trial:
    monkeypatch.setattr(program.Trial, "_measure_without_fault", lambda self, *, squashed: Verdict(0))
    return program.Trial("mine", "original:1", source)


@pytest.mark.parametrize("number", [1, 2, 4, 9, 20], ids=plan.family)
def test_a_mutant_is_found_missed_or_not_loaded(source: Source, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    mutant = plan.make(source, 1, number)
    engine = Engine(monkeypatch, finding=f"here: {mutant.places[0]} differs")
    assert trial(source, engine, monkeypatch).row(mutant).outcome == "found"
    engine.finding = "16 layers instead of 15"
    row = trial(source, engine, monkeypatch).row(mutant)
    assert (row.outcome, row.said, row.what) == ("missed", ("16 layers instead of 15",), mutant.what)
    engine.refuses = True
    outcome = trial(source, engine, monkeypatch).row(mutant).outcome
    assert outcome == ("missed" if mutant.draft is None else "not loaded")
    assert engine.removed == engine.loaded, "every image is removed"


def test_an_image_that_does_not_pass_without_a_fault_is_refused(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = trial(source, Engine(monkeypatch, finding="the lock differs"), monkeypatch)
    with pytest.raises(StepFailed, match=r"original:1 does not pass without a fault \(the lock differs\)"):
        tested.require_passed()


ROWS = {
    1: Row(1, "configuration", "port", "a port", "found"),
    2: Row(2, "layer", "owner", "/a|b belongs to 1:1", "missed", ("16 layers",)),
    3: Row(3, "layer", "owner", "/c belongs to 1:1", "found"),
    5: Row(5, "configuration", "os", "os windows", "not loaded", ("no such platform",)),
}


def results() -> Results:
    images = {"Debian": Foreign("Debian", "passed"), "other": Foreign("other", "not built", ("no buildah",))}
    return Results("mine", "sha256:" + "1" * 64, 7, "2026-11-23", dict(ROWS), images)


def test_the_table_counts_by_kind_and_lists_what_was_missed() -> None:
    text = report.markdown(results())
    assert "Found: 2 of 3, 66.7%; target: 95%: missed. False alarms: 0 of 1 images" in text
    assert "| **layers** | 2 | 1 |\n| owner | 2 | 1 |" in text and "| port | 1 | 1 |" in text
    assert "| 2 | owner | /a\\|b belongs to 1:1 | 16 layers |" in text
    assert "## Refused by the engine, and not counted" in text and "| other | not built | no buildah |" in text
    without = results()
    without.foreign.clear()
    assert "False alarms: not measured." in report.markdown(without)


def test_results_are_kept_and_go_on_with_the_same_image_and_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "kept"))
    assert program.kept() is None
    program.keep(results())
    assert program.started("mine", results().image, 7) == results()
    other = program.started("mine", results().image, 8)
    assert not other.rows and other.foreign == results().foreign


def test_a_foreign_image_passes_alarms_or_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impossible() -> str:
        raise UserError("buildah is not installed: run 'apt-get install buildah'")

    removed: list[str] = []
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    monkeypatch.setattr(foreign.ENGINE, "untag", removed.append)
    images = {"good": lambda: "base:1", "bad": lambda: f"{foreign.NAME}:bad", "none": impossible}
    measured = Results("mine", "sha256:1", 1, "2026-11-23")
    program.measure_foreign(measured, images, lambda name: Verdict(1, ("x",)) if "bad" in name else Verdict(0))
    assert {name: one.outcome for name, one in measured.foreign.items()} == {
        "good": "passed", "bad": "false alarm", "none": "not built",
    }  # fmt: skip
    assert "apt-get install buildah" in measured.foreign["none"].said[0]
    assert removed == [f"{foreign.NAME}:bad"], "only what was built is removed"


def test_eight_foreign_images_are_built() -> None:
    assert len(foreign.IMAGES) == 8
