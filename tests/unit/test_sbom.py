"""`make sbom`: a CycloneDX 1.6 document that holds to its schema, and is the same for the same image."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from scripts import locks, sbom
from scripts.spec import load
from scripts.stored import contents
from scripts.stored.contents import Held, Image, Layer, Package

DIGEST = f"sha256:{'ab' * 32}"


@pytest.fixture
def image() -> Image:
    python = {
        "torch": Package("torch", "2.9.1", "BSD-3-Clause", requires=("numpy; extra == 'opt'", "filelock", "bro ken")),
        "filelock": Package("filelock", "4.2.11", "Unlicense"),
        "numpy": Package("numpy", "2.4.6", "BSD-3-Clause AND 0BSD"),
    }
    debian = (Package("libc6", "2.36-9+deb12u13", architecture="amd64"),)
    held = Held(1000, python, debian, {"ID": "debian", "VERSION_ID": "12"})
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
        layers=(Layer("framework", "sha256:l", "sha256:d", 100, 1000),),
        held={"sha256:d": held},
    )


def test_it_holds_to_the_schema_and_is_the_same_twice(image: Image) -> None:
    text = sbom.bill(image, {("torch", "2.9.1"): ["c" * 64]})
    assert sbom.problems(text) is None
    assert sbom.bill(image, {("torch", "2.9.1"): ["c" * 64]}) == text
    other = sbom.bill(replace(image, digest=f"sha256:{'cd' * 32}"), {})
    assert json.loads(other)["serialNumber"] != json.loads(text)["serialNumber"]


def test_what_breaks_the_schema_is_told(image: Image) -> None:
    text = sbom.bill(image, {}).replace('"type": "library"', '"type": "nonsense"', 1)
    assert "nonsense" in (sbom.problems(text) or "")


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
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
    }
    below = {entry["ref"]: entry.get("dependsOn", []) for entry in data["dependencies"]}
    assert set(below[root["bom-ref"]]) == purls
    assert below["pkg:pypi/torch@2.9.1"] == ["pkg:pypi/filelock@4.2.11"], "extras and broken lines are no dependency"
    assert data["metadata"]["timestamp"].startswith("2026-11-20T10:00:00")


def test_hashes_are_those_of_the_locks(image: Image) -> None:
    """One file in the lock: that one was installed. Several: one of them was."""
    hashes = {("torch", "2.9.1"): ["c" * 64], ("numpy", "2.4.6"): ["d" * 64, "e" * 64], ("filelock", "0"): ["f" * 64]}
    components = {one["name"]: one for one in json.loads(sbom.bill(image, hashes))["components"]}
    assert components["torch"]["hashes"] == [{"alg": "SHA-256", "content": "c" * 64}]
    assert "hashes" not in components["numpy"]
    assert [one["content"] for one in components["numpy"]["externalReferences"][0]["hashes"]] == ["d" * 64, "e" * 64]
    assert "externalReferences" not in components["filelock"], "the lock's version is another one"


def test_every_locked_package_has_hashes() -> None:
    spec = load("xla")
    hashes = sbom.locked_hashes(spec, "default")
    assert {name for name, _ in hashes} == set(locks.installed(spec, "default"))
    assert all(len(one) == 64 for some in hashes.values() for one in some) and all(hashes.values())


def test_packages_come_back_from_a_document(image: Image) -> None:
    python, debian = sbom._packages(json.loads(sbom.bill(image, {}))["components"])
    assert {name: one.version for name, one in python.items()} == {
        "torch": "2.9.1",
        "filelock": "4.2.11",
        "numpy": "2.4.6",
    }
    assert {name: one.version for name, one in debian.items()} == {"libc6": "2.36-9+deb12u13"}


def test_licenses_that_are_no_spdx_expression_stay_names() -> None:
    package = contents.python_package(
        "Metadata-Version: 2.4\nName: x\nVersion: 1\nLicense-Expression: my own words\n\n"
    )
    assert sbom._python(package, []).licenses
