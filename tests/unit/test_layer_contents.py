"""What layers hold is kept outside of images, and every difference from it is found."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.fakes.engine import FakeEngine, Refusal
from tests.unit.test_verify import changed, good

from trainyard.common.docker_engine import Engine
from trainyard.common.settings import state_folder
from trainyard.lint.image import contents, core
from trainyard.lint.image.evidence import Evidence, Expected, expected
from trainyard.oci import layer_contents, layers
from trainyard.oci.layer_contents import Contents, Item
from trainyard.recipe import Recipe
from trainyard.spec import state

LOWER, UPPER, OTHER = (f"sha256:{digit * 64}" for digit in "abc")

FILE = Item("file", 0o644, 0, 0, "1" * 64)
LINK = Item("link", 0o777, 0, 0, "a")
FOLDER = Item("folder", 0o755, 0, 0)
WHITEOUT = Item("whiteout", 0, 0, 0)


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))


def test_everything_about_an_entry_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "layer"
    (folder / "opt").mkdir(parents=True, mode=0o755)
    (folder / "opt" / "a.py").write_text("x = 1\n", encoding="utf-8")
    (folder / "opt" / "a.py").chmod(0o4750)
    (folder / "opt" / "b").symlink_to("a.py")
    os.mkfifo(folder / "opt" / "pipe")
    found = layer_contents.read(folder)
    assert found["opt"].kind == "folder" and found["opt"].mode == 0o755
    assert found["opt/a.py"].kind == "file" and found["opt/a.py"].mode == 0o4750
    assert found["opt/a.py"].content == hashlib.sha256(b"x = 1\n").hexdigest()
    assert (found["opt/b"].kind, found["opt/b"].content) == ("link", "a.py")
    assert found["opt/pipe"].kind == "device"


def test_contents_are_kept_by_the_digest_of_their_layer() -> None:
    kept: Contents = {"opt": FOLDER, "opt/a": FILE, "opt/b": LINK}
    layer_contents.keep(state_folder(), LOWER, kept)
    assert layer_contents.recall(state_folder(), LOWER) == kept
    assert layer_contents.known(state_folder(), LOWER) and not layer_contents.known(state_folder(), UPPER)
    assert layer_contents.recall(state_folder(), UPPER) is None


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    layer_contents.keep(state_folder(), LOWER, {"a": FILE})
    (path,) = (tmp_path / "state" / "layers").glob("*.json.gz")
    path.write_bytes(path.read_bytes()[:-9])
    assert layer_contents.recall(state_folder(), LOWER) is None


def test_the_layers_used_longest_ago_are_dropped(tmp_path: Path) -> None:
    for number, digest in enumerate((LOWER, UPPER)):
        layer_contents.keep(state_folder(), digest, {"a": FILE})
        (path,) = (tmp_path / "state" / "layers").glob(f"{digest[7:]}*")
        os.utime(path, (number, number))
    assert layer_contents.recall(state_folder(), LOWER) is not None, "it is used again"
    layer_contents.keep(state_folder(), OTHER, {"a": FILE}, most=2)
    assert [layer_contents.known(state_folder(), one) for one in (LOWER, UPPER, OTHER)] == [True, False, True]


def test_layers_from_the_future_displace_none_that_was_just_kept(tmp_path: Path) -> None:
    """The clock was put back since they were used."""
    future = time.time() + 86_400
    for digest in (LOWER, UPPER):
        layer_contents.keep(state_folder(), digest, {"a": FILE})
        (path,) = (tmp_path / "state" / "layers").glob(f"{digest[7:]}*")
        os.utime(path, (future, future))
    assert layer_contents.recall(state_folder(), LOWER) is not None, "it is used again"
    layer_contents.keep(state_folder(), OTHER, {"a": FILE}, most=2)
    assert [layer_contents.known(state_folder(), one) for one in (LOWER, UPPER, OTHER)] == [True, False, True]


def test_the_files_of_a_layer_are_searched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder, state = tmp_path / "layer", tmp_path / "kept"
    (folder / "opt").mkdir(parents=True)
    (folder / "opt" / ".netrc").write_text("machine localhost password x\n")
    (folder / "opt" / "link").symlink_to(".netrc")
    first = layers.walk_once(folder, LOWER, state)
    assert [suspect.path for suspect in first.suspects] == ["opt/.netrc"] and "opt/link" in first.files
    (folder / "opt" / ".netrc").unlink()
    assert layers.walk_once(folder, LOWER, state) == first
    assert not layers.walk_once(folder, UPPER, state).suspects
    monkeypatch.setattr(layers, "_searched", lambda: "other rules")
    assert not layers.walk_once(folder, LOWER, state).suspects
    for path in (state / "layers").iterdir():
        path.write_bytes(gzip.compress(b'{"files": 1}'))
    assert "opt/link" in layers.walk_once(folder, LOWER, state).files, "a damaged record counts as none"


def image(built: Mapping[str, Contents], found: Mapping[str, Contents]) -> Evidence:
    """An image with the layers ``found`` whose build had the layers ``built``; only unknown layers were read."""
    stored = good("xla").stored
    made = [
        layers.Layer(
            "sha256:" + secrets.token_hex(32),
            diff_id,
            "",
            f"stage-{number}",
            "copied",
            1,
            layers.LayerFiles(),
            None if diff_id in built else entries,
        )
        for number, (diff_id, entries) in enumerate(found.items())
    ]
    return changed(good("xla"), stored=dataclasses.replace(stored, layers=made), expected=Expected(built))


def said(evidence: Evidence) -> list[str]:
    return [str(one) for one in core.check(evidence)["files_are_those_of_the_build"]]


BUILT: dict[str, Contents] = {
    LOWER: {"opt": FOLDER, "opt/a": FILE, "opt/link": LINK},
    UPPER: {"opt": FOLDER, "opt/b": FILE},
}


def test_an_image_of_the_builds_layers_is_not_read_again() -> None:
    evidence = image(BUILT, BUILT)
    assert said(evidence) == []
    assert contents.compared(evidence) == "files: 2 of 2 layers are those of the build, by their digests"


@pytest.mark.parametrize(
    ("entry", "item", "words"),
    [
        (
            "opt/b",
            dataclasses.replace(FILE, content="2" * 64),
            "/opt/b in layer stage-1: differs from the build: other c",
        ),
        ("opt/b", dataclasses.replace(FILE, mode=0o4755), "mode 4755 instead of 0644"),
        ("opt/b", dataclasses.replace(FILE, user=1000), "owner 1000:0 instead of 0:0"),
        ("opt/b", dataclasses.replace(FILE, capability="01"), "other capabilities"),
        ("opt/b", LINK, "is a link, not a file"),
        ("opt", dataclasses.replace(FOLDER, mode=0o777), "/opt in layer stage-1: differs from the build: mode 0777"),
        ("opt/new", FILE, "/opt/new in layer stage-1: is in no layer of the build (file, mode 0644)"),
        ("opt/link", dataclasses.replace(LINK, content="/etc/shadow"), "leads to /etc/shadow, not to a"),
    ],
)
def test_each_change_of_a_layer_is_found_and_named(entry: str, item: Item, words: str) -> None:
    found = said(image(BUILT, {LOWER: BUILT[LOWER], OTHER: {**BUILT[UPPER], entry: item}}))
    assert len(found) == 1 and words in found[0]


def test_a_file_that_was_left_out_or_deleted_is_missing() -> None:
    left_out = image(BUILT, {LOWER: BUILT[LOWER], OTHER: {"opt": FOLDER}})
    deleted = image(BUILT, {**BUILT, OTHER: {"opt/b": WHITEOUT}})
    assert said(left_out) == said(deleted) == ["/opt/b: is missing; the build has it"]


def test_a_deleted_folder_is_missing_with_all_that_is_in_it() -> None:
    found = said(image(BUILT, {**BUILT, OTHER: {"opt": WHITEOUT}}))
    assert [one.partition(":")[0] for one in found] == ["/opt", "/opt/a", "/opt/b", "/opt/link"]


@pytest.mark.parametrize("fault", [{}, {"opt/x.pth": FILE}, {"opt/b": dataclasses.replace(FILE, mode=0o666)}])
def test_a_fault_in_a_squashed_image_is_named_as_in_any_other(fault: dict[str, Item]) -> None:
    squashed = {path: item for entries in BUILT.values() for path, item in entries.items()} | fault
    found = said(image(BUILT, {OTHER: squashed}))
    assert len(found) == len(fault)
    assert all(f"/{path} in layer stage-0: " in found[0] for path in fault)


def test_what_engines_leave_behind_is_no_difference() -> None:
    assert said(image(BUILT, {**BUILT, OTHER: {".dockerenv": FILE, "etc/hosts": FILE, "dev": FOLDER}})) == []


def test_without_a_build_on_this_host_nothing_is_compared_and_that_is_said() -> None:
    evidence = changed(image(BUILT, {OTHER: {"opt/evil": FILE}}), expected=None)
    assert said(evidence) == []
    assert contents.compared(evidence).startswith("files: not compared, as this host has no build of the recipe")


def test_layers_that_cannot_be_read_are_not_compared_and_that_is_said() -> None:
    evidence = image(BUILT, {OTHER: {"opt/evil": FILE}})
    unread = [dataclasses.replace(layer, entries=None) for layer in evidence.stored.layers]
    evidence = changed(evidence, stored=dataclasses.replace(evidence.stored, layers=unread))
    assert said(evidence) == []
    assert contents.compared(evidence).startswith("files: not compared, as this process cannot read")


def test_the_layers_of_the_images_own_build_are_expected_else_those_of_the_same_recipe(
    tmp_path: Path,
) -> None:
    recipe = good("tf-cpu").required_recipe
    other = recipe.model_copy(update={"inputs": recipe.inputs | {"Dockerfile": "0" * 64}})

    def record(digest: str, recipe: Recipe, *diff_ids: str) -> None:
        facts = {"passed": True, "recipe": recipe.text(), "layers": list(diff_ids)}
        state.record(recipe.kept(tmp_path), "build", digest, facts)
        for diff_id in diff_ids:
            layer_contents.keep(tmp_path, diff_id, {"a": FILE})

    record(LOWER, recipe, LOWER)
    record(UPPER, other, UPPER)
    own, same_recipe = expected(recipe, UPPER, tmp_path), expected(recipe, OTHER, tmp_path)
    assert own is not None and list(own.layers) == [UPPER]
    assert same_recipe is not None and list(same_recipe.layers) == [LOWER]
    on_another_base = recipe.model_copy(
        update={"built": recipe.built and recipe.built.model_copy(update={"base_digest": UPPER})}
    )
    found = expected(on_another_base, OTHER, tmp_path)
    assert found is not None and list(found.layers) == [LOWER]
    changed_since = recipe.model_copy(update={"inputs": {}})
    assert expected(changed_since, OTHER, tmp_path) is None, "the spec has changed since"


def test_layers_are_not_readable_in_place_if_the_engine_creates_no_container(fake_engine: FakeEngine) -> None:
    """Docker 26 refuses images for another platform that it has never unpacked. The caller then reads the blobs."""
    fake_engine.instead("POST /containers/create", Refusal(500, "mismatched image rootfs and manifest layers"))
    with layer_contents.folders(Engine(), "mine:1", 2) as folders:
        assert folders == []
