"""`make diff`: what changes from one image to another, and what it costs to load."""

from __future__ import annotations

import io
import tarfile
from types import ModuleType

import pytest

from scripts import diff
from scripts.cli import UserError
from scripts.stored import contents
from scripts.stored.contents import Held, Image, Layer, Package

METADATA = "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n\nText: of a README\n"
STATUS = """\
Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1
Description: a tiny init
 that reaps

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def layer_of(files: dict[str, str]) -> Held:
    """What is read of a layer with these files."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return contents.look(io.BufferedReader(io.BytesIO(written.getvalue())))  # type: ignore[arg-type]


def image(name: str, layers: dict[str, Held], *, labels: dict[str, str] | None = None) -> Image:
    """An image whose layers are called by their digest; a layer's blob is a tenth of its size."""
    settings = {"Labels": labels or {}, "Env": ["PATH=/bin"], "Entrypoint": ["tini"]}
    return Image(
        reference=name,
        digest=f"sha256:{name}",
        config={"config": settings},
        documents={f"sha256:{name}": 100, f"config-{name}": 200},
        layers=tuple(Layer(key[0], key, f"diff-{key}", held.size // 10, held.size) for key, held in layers.items()),
        held={f"diff-{key}": held for key, held in layers.items()},
    )


def held(size: int, **packages: str) -> Held:
    return Held(size, {name: Package(name, version) for name, version in packages.items()})


def test_packages_are_read_from_what_pip_and_dpkg_leave() -> None:
    found = layer_of(
        {
            "opt/venv/lib/python3.11/site-packages/My_Package-1.0.dist-info/METADATA": METADATA.format(
                name="My_Package", version="1.0"
            ),
            "opt/x/notes-METADATA": "no metadata",
            "var/lib/dpkg/status": STATUS,
            "usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n',
        }
    )
    assert found.python == {"my-package": Package("My_Package", "1.0", "MIT")}
    assert found.debian == (Package("tini", "0.19.0-1", architecture="amd64"),)
    assert found.release == {"ID": "debian", "VERSION_ID": "12"}


def test_packages_added_removed_and_changed_are_told_apart() -> None:
    a = image("a", {"base": held(10), "one": held(10, torch="2.9.0", numpy="1", gone="1")})
    b = image("b", {"base": held(10), "two": held(10, torch="2.9.1", numpy="1", new="3")})
    assert diff.diff(a, b)["python"] == {
        "added": {"new": "3"},
        "removed": {"gone": "1"},
        "changed": {"torch": ["2.9.0", "2.9.1"]},
    }


def test_only_what_the_other_has_not_is_loaded() -> None:
    shared, ours, theirs = held(1000), held(500), held(700)
    a, b = image("a", {"s": shared, "o": ours}), image("b", {"s": shared, "t": theirs})
    assert diff.diff(a, b)["download"] == 70 + 300, "the layer, the configuration and the manifest"
    assert diff.diff(b, a)["download"] == 50 + 300
    assert diff.diff(a, a)["download"] == 0


def test_labels_environment_and_settings_are_compared() -> None:
    a = image("a", {"l": held(1)}, labels={"version": "1", "old": "x"})
    b = image("b", {"l": held(1)}, labels={"version": "2"})
    b.config["config"]["Env"] = ["PATH=/bin", "NEW=1"]
    b.config["config"]["Entrypoint"] = ["tini", "--"]
    found = diff.diff(a, b)
    assert found["labels"] == {"added": {}, "removed": {"old": "x"}, "changed": {"version": ["1", "2"]}}
    assert found["environment"]["added"] == {"NEW": "1"}
    assert found["settings"]["changed"] == {"Entrypoint": ["['tini']", "['tini', '--']"]}


def test_layers_stand_side_by_side_by_what_made_them() -> None:
    a = image("a", {"base": held(10), "framework": held(20), "extra": held(30)})
    b = image("b", {"base": held(10), "f-new": held(25), "launcher": held(5)})
    rows = [(row["name"], row["a"] and row["a"]["size"], row["b"] and row["b"]["size"], row["same"])
            for row in diff.diff(a, b)["layers"]]  # fmt: skip
    assert rows == [("b", 10, 10, True), ("f", 20, 25, False), ("l", None, 5, False), ("e", 30, None, False)]


def test_packages_of_common_layers_need_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images at a registry without an SBOM, only layers are read that one of the two has alone."""
    a = image("a", {"common": held(10, torch="1"), "one": held(10, einops="1")})
    b = image("b", {"common": held(10, torch="1"), "two": held(10, einops="2")})
    asked: list[str] = []
    remote = []
    for one in (a, b):
        known = dict(one.held)
        one.held.clear()

        def fetch(some: Image, wanted: list[Layer], known: dict[str, Held] = known) -> None:
            asked.extend(layer.digest for layer in wanted)
            for layer in wanted:
                some.held[layer.diff_id] = everything[layer.diff_id]

        remote.append((one, known))
        monkeypatch.setattr(contents, "fetch", fetch)
    everything = {key: value for _, known in remote for key, value in known.items()}
    far = [contents.Image(**{**vars(one), "repository": object()}) for one in (a, b)]
    python, _ = diff.packages(*far)
    assert python["changed"] == {"einops": ["1", "2"]} and sorted(asked) == ["one", "two"]


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("localhost:5000/ml/trainyard:xla", ("localhost:5000/ml/trainyard", "xla")),
        ("gcr.io/p/x", ("gcr.io/p/x", "latest")),
        (f"gcr.io/p/x:t@sha256:{'0' * 64}", ("gcr.io/p/x", f"sha256:{'0' * 64}")),
    ],
)
def test_references_are_taken_apart(reference: str, parts: tuple[str, str]) -> None:
    assert contents.split(reference) == parts


@pytest.mark.parametrize("reference", ["trainyard:xla", "library/debian", "a b", ""])
def test_what_names_no_registry_is_one_line(reference: str) -> None:
    with pytest.raises(UserError, match="neither an image of this host nor"):
        contents.split(reference)


def test_two_images_are_needed(verb: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A", raising=False)
    monkeypatch.delenv("B", raising=False)
    status, _, err = verb(diff, "trainyard:xla")  # type: ignore[operator]
    assert status == 2 and "make diff A=<reference> B=<reference>" in err
