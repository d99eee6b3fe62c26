"""`make sbom`: a valid CycloneDX 1.6 document that is the same for the same image."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.registry import Registry, sha256

from trainyard.image import recipes
from trainyard.oci import attached_sbom, inventory, referrers
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.inventory import Image, LayerPackages, LayerSummary
from trainyard.oci.registry import Manifest, Repository
from trainyard.recipe import Pin
from trainyard.release import sbom
from trainyard.spec.model import load

DIGEST = f"sha256:{'ab' * 32}"


@pytest.fixture
def image() -> Image:
    python = {
        "torch": InstalledPackage(
            "torch", "2.9.1", "BSD-3-Clause", requires=("numpy; extra == 'opt'", "filelock", "bro ken")
        ),
        "filelock": InstalledPackage("filelock", "4.2.11", "Unlicense"),
        "numpy": InstalledPackage("numpy", "2.4.6", "BSD-3-Clause AND 0BSD"),
    }
    debian = (
        InstalledPackage("libc6", "2.36-9+deb12u13", architecture="amd64", source="glibc"),
        InstalledPackage("libgcc-s1", "12.2-14", architecture="amd64", source="gcc-12", source_version="12.2-14+1"),
        InstalledPackage("tini", "0.19.0-1", architecture="amd64"),
    )
    contents = LayerPackages(1000, python, debian, {"ID": "debian", "VERSION_ID": "12"})
    labels = {
        "io.trainyard.target": "xla",
        "org.opencontainers.image.title": "trainyard/xla",
        "org.opencontainers.image.version": "xla-2.9.0-20261121-0123abcd",
    }
    return Image(
        reference="trainyard:xla",
        digest=DIGEST,
        config={"config": {"Labels": labels}, "created": "2026-11-20T10:00:00Z"},
        documents={},
        layers=(LayerSummary("wheel-torch", "sha256:l", "sha256:d", 100, 1000),),
        layer_contents={"sha256:d": contents},
    )


def test_an_sbom_is_valid_and_the_same_for_the_same_image(image: Image) -> None:
    text = sbom.bill(image, {("torch", "2.9.1"): ["c" * 64]})
    assert sbom.violation(text) is None
    assert sbom.bill(image, {("torch", "2.9.1"): ["c" * 64]}) == text
    other = sbom.bill(replace(image, digest=f"sha256:{'cd' * 32}"), {})
    assert json.loads(other)["serialNumber"] != json.loads(text)["serialNumber"]


def test_a_violation_of_the_schema_is_reported(image: Image) -> None:
    text = sbom.bill(image, {}).replace('"type": "library"', '"type": "nonsense"', 1)
    assert "nonsense" in (sbom.violation(text) or "")


def test_the_image_is_the_root_and_all_packages_are_below_it(image: Image) -> None:
    data = json.loads(sbom.bill(image, {}))
    root = data["metadata"]["component"]
    assert (root["type"], root["name"], root["version"]) == (
        "container",
        "trainyard/xla",
        "xla-2.9.0-20261121-0123abcd",
    )
    assert root["purl"] == f"pkg:oci/xla@{DIGEST.replace(':', '%3A')}" or DIGEST in root["purl"]
    purls = {component["purl"] for component in data["components"]}
    assert purls == {
        "pkg:pypi/torch@2.9.1",
        "pkg:pypi/filelock@4.2.11",
        "pkg:pypi/numpy@2.4.6",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12&upstream=glibc",
        "pkg:deb/debian/libgcc-s1@12.2-14?arch=amd64&distro=debian-12&upstream=gcc-12%4012.2-14%2B1",
        "pkg:deb/debian/tini@0.19.0-1?arch=amd64&distro=debian-12",
    }
    below = {entry["ref"]: entry.get("dependsOn", []) for entry in data["dependencies"]}
    assert set(below[root["bom-ref"]]) == purls
    assert below["pkg:pypi/torch@2.9.1"] == ["pkg:pypi/filelock@4.2.11"], "extras and broken lines are no dependency"
    assert data["metadata"]["timestamp"].startswith("2026-11-20T10:00:00")


def test_hashes_come_from_the_locks(image: Image) -> None:
    """A single file in the lock is the one that was installed; of several files it is unknown which."""
    hashes = {("torch", "2.9.1"): ["c" * 64], ("numpy", "2.4.6"): ["d" * 64, "e" * 64], ("filelock", "0"): ["f" * 64]}
    components = {one["name"]: one for one in json.loads(sbom.bill(image, hashes))["components"]}
    assert components["torch"]["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert "hashes" not in components["numpy"]
    assert [one["content"] for one in components["numpy"]["externalReferences"][0]["hashes"]] == ["d" * 64, "e" * 64]
    assert "externalReferences" not in components["filelock"], "the lock has another version"


def test_every_locked_package_has_hashes() -> None:
    spec = load("xla")
    hashes = sbom.locked_hashes(recipes.make(spec))
    assert dict(hashes.keys()) == spec.locked().versions
    assert all(len(one) == 64 for some in hashes.values() for one in some) and all(hashes.values())


def test_hashes_are_those_of_the_recipe_in_the_image(image: Image) -> None:
    recipe = recipes.make(load("xla"))
    pin = Pin(name="torch", version="2.9.1", sha256=("c" * 64,), size=1)
    recipe = recipe.model_copy(update={"layers": (recipe.layers[0].model_copy(update={"pins": (pin,)}),)})
    text = sbom.make(
        replace(image, layer_contents={"sha256:d": replace(image.layer_contents["sha256:d"], recipe=recipe)})
    )
    components = {one["name"]: one for one in json.loads(text)["components"]}
    assert components["torch"]["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert sbom.make(image) == sbom.bill(image, {}), "an image without a recipe"


def test_packages_are_read_back_from_an_sbom(image: Image) -> None:
    python, debian = attached_sbom.packages(json.loads(sbom.bill(image, {})))
    assert {name: one.version for name, one in python.items()} == {
        "torch": "2.9.1",
        "filelock": "4.2.11",
        "numpy": "2.4.6",
    }
    assert {name: one.version for name, one in debian.items()} == {
        "libc6": "2.36-9+deb12u13",
        "libgcc-s1": "12.2-14",
        "tini": "0.19.0-1",
    }
    assert {name: one.source_package for name, one in debian.items()} == {
        "libc6": ("glibc", "2.36-9+deb12u13"),
        "libgcc-s1": ("gcc-12", "12.2-14+1"),
        "tini": ("tini", "0.19.0-1"),
    }
    assert (debian["tini"].architecture, debian["tini"].distribution) == ("amd64", "debian-12")
    assert {one.layer for one in (*python.values(), *debian.values())} == {"sha256:d"}
    assert attached_sbom.layer_names(json.loads(sbom.bill(image, {}))) == {"sha256:d": "wheel-torch"}


def test_licenses_that_are_no_spdx_expression_stay_names() -> None:
    package = inventory.python_package(
        "Metadata-Version: 2.4\nName: x\nVersion: 1\nLicense-Expression: my own words\n\n"
    )
    assert sbom._python(package, [], "sha256:0").licenses


def test_the_sbom_of_any_image_needs_a_file_to_write(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = trainyard("sbom", IMAGE="localhost:1/a:b")
    assert (status, out) == (2, "") and "'--output' gives the file" in err


@pytest.mark.parametrize(
    ("purl", "kind", "name"),
    [
        ("pkg:pypi/torch@2.9.1", "pypi", "torch"),
        ("pkg:PyPI/torch", "pypi", "torch"),
        ("pkg:deb/debian/libstdc%2B%2B6@12?arch=amd64&distro=debian-12", "deb", "libstdc++6"),
        ("pkg:deb/libc6@2.36-9%2Bdeb12u13?vcs=a/b", "deb", "libc6"),
        ("pkg:oci/trainyard@sha256%3A00", None, ""),
        ("", None, ""),
    ],
)
def test_packages_are_recognized_by_their_package_url(purl: str, kind: str | None, name: str) -> None:
    python, debian = attached_sbom.packages({"components": [{"name": "n", "version": "1", "purl": purl}]})
    assert list(python) == ([name] if kind == "pypi" else []) and list(debian) == ([name] if kind == "deb" else [])


def test_the_sbom_of_an_image_at_a_registry_needs_no_engine(
    trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        text = b"Metadata-Version: 2.4\nName: torch\nVersion: 2.9.1\n"
        member = tarfile.TarInfo("site-packages/torch-2.9.1.dist-info/METADATA")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text))
    blob = layer.getvalue()
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": [sha256(blob)]}}).encode()
    document = {
        "schemaVersion": 2,
        "config": {"mediaType": "application/json", "digest": sha256(config), "size": len(config)},
        "layers": [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": sha256(blob), "size": len(blob)}],
    }
    with Registry() as registry:
        repository = Repository(f"{registry.host}/ml/trainyard")
        for one in (blob, config):
            referrers.put_blob(repository, one)
        repository.put(Manifest.of(document, "application/vnd.oci.image.manifest.v1+json"), "a")
        status, out, err = trainyard("sbom", "--image", f"{repository.name}:a", "--json")
    assert status == 0, err
    assert [one["purl"] for one in json.loads(out)["components"]] == ["pkg:pypi/torch@2.9.1"]


def test_a_python_that_no_debian_package_brought_is_an_application_that_scanners_know(image: Image) -> None:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder, version in (("usr/local/include/python3.12", "3.12.12"), ("usr/include/python3.13", "3.13.5")):
            text = f'#define PY_MAJOR_VERSION 3\n#define PY_VERSION      "{version}"\n'.encode()
            member = tarfile.TarInfo(f"{folder}/patchlevel.h")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    layer.seek(0)
    base = LayerSummary("base", "sha256:b", "sha256:e", 100, 1000)
    contents = image.layer_contents | {"sha256:e": inventory.read_layer(io.BufferedReader(layer))}  # type: ignore[arg-type]
    text = sbom.bill(replace(image, layers=(base, *image.layers), layer_contents=contents), {})
    assert sbom.violation(text) is None
    (python,) = (one for one in json.loads(text)["components"] if one["name"] == "python")
    assert (python["type"], python["purl"]) == ("application", "pkg:generic/python@3.12.12")
    assert python["cpe"] == "cpe:2.3:a:python:python:3.12.12:*:*:*:*:*:*:*"
    assert python["properties"] == [{"name": "io.trainyard.layer", "value": "sha256:e"}]
