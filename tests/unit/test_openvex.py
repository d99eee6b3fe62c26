"""OpenVEX documents say of images what waivers say of advisories, and conform to OpenVEX's schema."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

from trainyard.image import plan
from trainyard.lint import waivers
from trainyard.lint.waivers import Waiver
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.release import audit, debian_advisories, image_packages, openvex
from trainyard.release.image_packages import ImagePackages
from trainyard.release.vulnerabilities import Vulnerability
from trainyard.spec import model

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "openvex-0.2.0.json").read_text(encoding="utf-8"))
ISSUED = datetime.datetime(2026, 11, 20, 10, tzinfo=datetime.UTC)
TODAY = datetime.date(2026, 11, 21)
PILLOW = Vulnerability("pillow", "13.0.0", ("GHSA-1", "CVE-0000-1", "PYSEC-1"), "planted", ("13.0.1",))

Command = Callable[..., tuple[int, str, str]]


def image(target: str = "cpu", digit: str = "a", **python: str) -> ImagePackages:
    libraries = [
        InstalledPackage(name, "2.36-9", architecture="amd64", source="glibc") for name in ("libc6", "libc-bin")
    ]
    return ImagePackages(
        f"trainyard:{target}",
        f"sha256:{digit * 64}",
        target,
        {one.name: one for one in libraries},
        {"ID": "debian", "VERSION_ID": "12"},
        python or {"pillow": "13.0.0"},
    )


def waiver(**changes: Any) -> Waiver:
    fields = {
        "rule": "GHSA-1",
        "package": "Pillow",
        "version": "13.0.0",
        "owner": "the audio team",
        "reason": "images of strangers are not read until 13.0.1 is locked",
        "expires": "2026-12-31",
    }
    return Waiver(**fields | changes)


def document(
    *known: Waiver, found: tuple[Vulnerability, ...] = (PILLOW,), images: tuple[ImagePackages, ...] = (image(),)
) -> dict[str, Any] | None:
    """A document, which conforms to the schema."""
    text = openvex.document(found, images, known, issued=ISSUED, today=TODAY)
    if text is None:
        return None
    made: dict[str, Any] = json.loads(text)
    jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker()).validate(made)
    return made


def statements(*known: Waiver, **about: Any) -> list[dict[str, Any]]:
    made = document(*known, **about)
    return list(made["statements"]) if made else []


def test_a_waived_image_is_affected_and_the_reason_is_the_action() -> None:
    made = document(waiver())
    assert made is not None
    assert made["@context"] == "https://openvex.dev/ns/v0.2.0"
    assert (made["author"], made["timestamp"], made["version"]) == ("the audio team", "2026-11-20T10:00:00Z", 1)
    (statement,) = made["statements"]
    assert statement["vulnerability"] == {"name": "CVE-0000-1", "aliases": ["GHSA-1", "PYSEC-1"]}
    assert statement["status"] == "affected"
    assert statement["action_statement"] == "images of strangers are not read until 13.0.1 is locked"
    assert statement["status_notes"] == "waived until 2026-12-31 by the audio team"
    (product,) = statement["products"]
    assert unquote(product["@id"]) == f"pkg:oci/trainyard@sha256:{'a' * 64}"
    assert product["hashes"] == {"sha-256": "a" * 64}
    assert [one["@id"] for one in product["subcomponents"]] == ["pkg:pypi/pillow@13.0.0"]


def test_with_a_justification_it_is_not_affected() -> None:
    (statement,) = statements(waiver(justification="vulnerable_code_not_in_execute_path"))
    assert statement["status"] == "not_affected" and "action_statement" not in statement
    assert statement["justification"] == "vulnerable_code_not_in_execute_path"
    assert statement["impact_statement"].startswith("images of strangers")


def test_each_image_that_has_the_version_has_a_statement_per_advisory() -> None:
    other = Vulnerability("pillow", "13.0.0", ("CVE-0000-2",), "", ())
    found = statements(
        waiver(),
        waiver(rule="CVE-0000-2", owner="another"),
        found=(PILLOW, other),
        images=(image(), image("xla", "b"), image("gpu", "c", pillow="13.0.1"), image("tpu", "d", numpy="2")),
    )
    assert {(one["vulnerability"]["name"], one["products"][0]["hashes"]["sha-256"][0]) for one in found} == {
        ("CVE-0000-1", "a"), ("CVE-0000-1", "b"), ("CVE-0000-2", "a"), ("CVE-0000-2", "b"),
    }  # fmt: skip


def test_a_local_version_counts_as_its_release_and_is_named_as_it_is_installed() -> None:
    (statement,) = statements(waiver(), images=(image(pillow="13.0.0+cpu"),))
    assert statement["products"][0]["subcomponents"][0]["@id"] == "pkg:pypi/pillow@13.0.0%2Bcpu"


def test_the_binary_packages_of_a_debian_source_package_are_named() -> None:
    found = Vulnerability("glibc", "2.36-9", ("CVE-0000-3",), "", (), kind="debian", note="not fixed", fails=False)
    (statement,) = statements(waiver(rule="CVE-0000-3", package="glibc", version="2.36-9"), found=(found,))
    assert [one["@id"] for one in statement["products"][0]["subcomponents"]] == [
        "pkg:deb/debian/libc6@2.36-9?arch=amd64",
        "pkg:deb/debian/libc-bin@2.36-9?arch=amd64",
    ]


@pytest.mark.parametrize(
    "changes", [{"expires": "2026-11-20"}, {"target": "xla"}, {"rule": "CVE-0000-9"}, {"version": "12"}]
)
def test_a_waiver_that_does_not_apply_says_nothing(changes: dict[str, str]) -> None:
    assert document(waiver(**changes)) is None


def test_the_same_waivers_give_the_same_bytes_in_any_order() -> None:
    known = (waiver(), waiver(rule="CVE-0000-2"))
    other = Vulnerability("pillow", "13.0.0", ("CVE-0000-2",), "", ())
    images = (image(), image("xla", "b"))
    one = openvex.document((PILLOW, other), images, known, issued=ISSUED, today=TODAY)
    two = openvex.document((other, PILLOW), images[::-1], known[::-1], issued=ISSUED, today=TODAY)
    assert one == two
    third = openvex.document((PILLOW,), images, known, issued=ISSUED, today=TODAY)
    assert json.loads(third or "")["@id"] != json.loads(one or "")["@id"], "another content is another document"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This host's images, and the waivers; the only advisory is about pillow."""
    monkeypatch.setattr(audit, "_look_up", lambda pins, only_snapshot: ("a test", None, [PILLOW]))
    monkeypatch.setattr(audit, "pinned", lambda spec: {"pillow": {"13.0.0"}})
    monkeypatch.setattr(debian_advisories, "load", lambda: None)
    monkeypatch.setattr(waivers, "today", lambda: TODAY)
    monkeypatch.setattr(plan, "source_date_epoch", lambda: int(ISSUED.timestamp()))

    def store(*known: Waiver, images: tuple[ImagePackages, ...] = (image("tf-tpu"),)) -> None:
        monkeypatch.setattr(waivers, "load", lambda: known)
        monkeypatch.setattr(image_packages, "of_host", {one.reference: one for one in images}.get)

    return store


def test_the_command_writes_the_document(trainyard: Command, audited: Callable[..., None], tmp_path: Path) -> None:
    audited(waiver())
    path = tmp_path / "new" / "tf-tpu.openvex.json"
    assert trainyard("audit", "tf-tpu", "--vex", str(path))[0] == 0
    written = path.read_bytes()
    assert json.loads(written)["statements"][0]["products"][0]["hashes"] == {"sha-256": "a" * 64}
    assert trainyard("audit", "tf-tpu", "--vex", str(path))[0] == 0 and path.read_bytes() == written
    audited()
    status, _, err = trainyard("audit", "tf-tpu", "--vex", str(path))
    assert status == 1 and not path.exists(), "no waiver is left that an older document may speak of"
    assert "no advisory about these images is waived" in err


def test_what_is_pushed_is_named_by_its_digest_at_the_registry(
    audited: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    audited(waiver())
    monkeypatch.setattr(audit, "by_snapshot", lambda pins, snapshot: [PILLOW])
    made = audit.vex_of(model.load("tf-tpu"), "trainyard:tf-tpu", f"sha256:{'b' * 64}")
    assert made and json.loads(made)["statements"][0]["products"][0]["hashes"] == {"sha-256": "b" * 64}
    audited(waiver(expires="2026-11-01"))
    assert audit.vex_of(model.load("tf-tpu"), "trainyard:tf-tpu", f"sha256:{'b' * 64}") is None


def test_a_document_needs_an_image(trainyard: Command, audited: Callable[..., None], tmp_path: Path) -> None:
    audited(waiver(), images=())
    status, _, err = trainyard("audit", "tf-tpu", "--vex", str(tmp_path / "x.json"))
    assert status == 2 and "no image to make statements about: run 'trainyard image', or give '--image'" in err
