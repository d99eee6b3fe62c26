"""`make diff`: what changes from one image to another, and what has to be downloaded."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.registry import Registry
from tests.published_images import publish

from trainyard.oci import attached_sbom, inventory, statements
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.inventory import Image, LayerPackages, LayerSummary
from trainyard.oci.registry import Repository
from trainyard.release import diff

METADATA = "Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: MIT\n\nText: of a README\n"
STATUS = """\
Package: tini
Status: install ok installed
Architecture: amd64
Version: 0.19.0-1
Description: a tiny init
 that reaps

Package: libgcc-s1
Status: install ok installed
Architecture: amd64
Source: gcc-14 (14.2.0-19)
Version: 14.2.0-18

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""


def layer_of(files: dict[str, str]) -> LayerPackages:
    """What is read of a layer with these files."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for path, text in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return inventory.read_layer(io.BufferedReader(io.BytesIO(written.getvalue())))


def image(name: str, layers: dict[str, LayerPackages], *, labels: dict[str, str] | None = None) -> Image:
    """An image whose layers are called by their digest; a layer's blob is a tenth of its size."""
    settings = {"Labels": labels or {}, "Env": ["PATH=/bin"], "Entrypoint": ["tini"]}
    return Image(
        reference=name,
        digest=f"sha256:{name}",
        config={"config": settings},
        documents={f"sha256:{name}": 100, f"config-{name}": 200},
        layers=tuple(
            LayerSummary(key[0], key, f"diff-{key}", held.size // 10, held.size) for key, held in layers.items()
        ),
        layer_contents={f"diff-{key}": held for key, held in layers.items()},
    )


def layer_contents(size: int, **packages: str) -> LayerPackages:
    return LayerPackages(size, {name: InstalledPackage(name, version) for name, version in packages.items()})


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
    assert found.python == {"my-package": InstalledPackage("My_Package", "1.0", "MIT")}
    assert found.debian == (
        InstalledPackage("libgcc-s1", "14.2.0-18", architecture="amd64", source="gcc-14", source_version="14.2.0-19"),
        InstalledPackage("tini", "0.19.0-1", architecture="amd64"),
    )
    assert found.release == {"ID": "debian", "VERSION_ID": "12"}


def test_packages_added_removed_and_changed_are_listed_separately() -> None:
    a = image("a", {"base": layer_contents(10), "one": layer_contents(10, torch="2.9.0", numpy="1", gone="1")})
    b = image("b", {"base": layer_contents(10), "two": layer_contents(10, torch="2.9.1", numpy="1", new="3")})
    assert diff.diff(a, b)["python"] == {
        "added": {"new": "3"},
        "removed": {"gone": "1"},
        "changed": {"torch": ["2.9.0", "2.9.1"]},
    }


def test_only_layers_that_the_other_image_lacks_are_downloaded() -> None:
    shared, ours, theirs = layer_contents(1000), layer_contents(500), layer_contents(700)
    a, b = image("a", {"s": shared, "o": ours}), image("b", {"s": shared, "t": theirs})
    assert diff.diff(a, b)["download"] == 70 + 300, "the layer, the configuration and the manifest"
    assert diff.diff(b, a)["download"] == 50 + 300
    assert diff.diff(a, a)["download"] == 0


def test_labels_environment_and_settings_are_compared() -> None:
    a = image("a", {"l": layer_contents(1)}, labels={"version": "1", "old": "x"})
    b = image("b", {"l": layer_contents(1)}, labels={"version": "2"})
    b.config["config"]["Env"] = ["PATH=/bin", "NEW=1"]
    b.config["config"]["Entrypoint"] = ["tini", "--"]
    found = diff.diff(a, b)
    assert found["labels"] == {"added": {}, "removed": {"old": "x"}, "changed": {"version": ["1", "2"]}}
    assert found["environment"]["added"] == {"NEW": "1"}
    assert found["settings"]["changed"] == {"Entrypoint": ["['tini']", "['tini', '--']"]}


def test_layers_are_paired_by_what_made_them() -> None:
    a = image("a", {"base": layer_contents(10), "framework": layer_contents(20), "extra": layer_contents(30)})
    b = image("b", {"base": layer_contents(10), "f-new": layer_contents(25), "launcher": layer_contents(5)})
    rows = [(row["name"], row["a"] and row["a"]["size"], row["b"] and row["b"]["size"], row["same"])
            for row in diff.diff(a, b)["layers"]]  # fmt: skip
    assert rows == [("b", 10, 10, True), ("f", 20, 25, False), ("l", None, 5, False), ("e", 30, None, False)]


def test_packages_of_common_layers_need_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images at a registry without an SBOM, only layers are read that one of the two has alone."""
    a = image("a", {"common": layer_contents(10, torch="1"), "one": layer_contents(10, einops="1")})
    b = image("b", {"common": layer_contents(10, torch="1"), "two": layer_contents(10, einops="2")})
    asked: list[str] = []
    remote = []
    for one in (a, b):
        known = dict(one.layer_contents)
        one.layer_contents.clear()

        def fetch(some: Image, _: object, wanted: list[LayerSummary]) -> None:
            asked.extend(layer.digest for layer in wanted)
            for layer in wanted:
                some.layer_contents[layer.diff_id] = everything[layer.diff_id]

        remote.append((one, known))
        monkeypatch.setattr(inventory, "fetch", fetch)
    everything = {key: value for _, known in remote for key, value in known.items()}
    far = [inventory.Image(**{**vars(one), "repository": object()}) for one in (a, b)]
    python, _ = diff.packages(*far)
    assert python["changed"] == {"einops": ["1", "2"]} and sorted(asked) == ["one", "two"]


def test_packages_of_an_sbom_have_the_names_that_layers_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """SBOMs that other tools attach may have package URLs that are not normalized."""
    purls = [
        "pkg:pypi/Typing_Extensions@4.15.0",
        "pkg:deb/debian/libstdc%2B%2B6@12.2?arch=amd64",
        "pkg:oci/image@1",
        "",
    ]
    document = {"components": [{"name": "x", "version": "1", "purl": purl} for purl in purls]}
    monkeypatch.setattr(statements, "predicate", lambda *_: document)
    found = attached_sbom.listed(Repository("registry:5000/ml/trainyard"), "sha256:1")
    assert found is not None
    assert [list(packages) for packages in found] == [["typing-extensions"], ["libstdc++6"]]


def test_two_images_are_needed(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = trainyard("diff", "trainyard:xla")
    assert status == 2 and "trainyard dev diff <reference> <reference>" in err


def test_a_package_is_in_the_layer_that_brought_its_version() -> None:
    def packages(**versions: str) -> LayerPackages:
        return LayerPackages(debian=tuple(InstalledPackage(name, version) for name, version in versions.items()))

    layers = {
        "base": packages(libc6="1", tini="1"),
        "update": packages(libc6="2", tini="1"),
        "wheel": layer_contents(1, a="1"),
    }
    found = image("a", layers)
    assert found.debian_layers() == {"libc6": "diff-update", "tini": "diff-base"}
    assert found.python_layers() == {"a": "diff-wheel"}


def test_images_at_a_registry_are_compared_without_an_engine(
    trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    with Registry() as registry:
        repository = Repository(f"{registry.host}/ml/trainyard")
        publish(repository, "a", python={"torch": "2.9.0"})
        publish(repository, "b", python={"torch": "2.9.1"})
        status, out, err = trainyard("diff", f"{repository.name}:a", f"{repository.name}:b", "--json")
        assert status == 0, err
        assert json.loads(out)["python"]["changed"] == {"torch": ["2.9.0", "2.9.1"]}
        status, _, err = trainyard("diff", f"{repository.name}:a", "trainyard:b")
    assert status == 2 and err.startswith("diff: no engine answers at DOCKER_HOST=tcp://127.0.0.1:1")
