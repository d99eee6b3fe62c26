"""`make audit` of Debian packages: what the image's suite has fixed and the image has not fails; the rest are notes.

The tracker's document is tests/unit/corpus/debian_tracker.json, written by hand in the tracker's format.
"""

from __future__ import annotations

import datetime
import itertools
import json
import subprocess
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests import published_images
from tests.fakes.registry import Registry
from tests.fakes.server import Listener
from tests.published_images import publish

from trainyard.common.errors import StepFailed, UserError
from trainyard.lint import waivers
from trainyard.lint.waivers import Waiver
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.registry import Repository
from trainyard.release import advisories, audit, debian_advisories, image_packages
from trainyard.release.advisories import Snapshot
from trainyard.release.debian_advisories import DebianSnapshot
from trainyard.release.image_packages import ImagePackages

TODAY = datetime.date(2026, 11, 21)
TRACKER: dict[str, Any] = json.loads((Path(__file__).parent / "corpus" / "debian_tracker.json").read_text("utf-8"))
#: As dpkg lists them: the libraries are built from glibc and openssl.
LIBC = InstalledPackage("libc6", "2.36-9+deb12u10", architecture="amd64", source="glibc")
LIBSSL = InstalledPackage("libssl3", "3.0.17-1~deb12u2", architecture="amd64", source="openssl")
TINI = InstalledPackage("tini", "0.19.0-1+b1", architecture="amd64", source="tini", source_version="0.19.0-1")

Command = Callable[..., tuple[int, str, str]]


def image(*packages: InstalledPackage, version: str = "12", **changes: Any) -> ImagePackages:
    fields: dict[str, Any] = {
        "reference": "trainyard:xla",
        "digest": f"sha256:{'ab' * 32}",
        "target": "xla",
        "debian": {package.name: package for package in packages or (LIBC, LIBSSL, TINI)},
        "release": {"ID": "debian", "VERSION_ID": version},
        "listed": {},
    }
    return ImagePackages(**fields | changes)


def snapshot(*covers: str, suites: tuple[str, ...] = ("bookworm", "trixie")) -> DebianSnapshot:
    names = covers or ("glibc", "openssl", "tini")
    return DebianSnapshot(
        "a test", "2026-11-20", names, suites, tuple(debian_advisories.from_tracker(TRACKER, names, suites))
    )


# --- the tracker's document -----------------------------------------------------------------------------------------


def test_the_snapshot_has_the_suites_and_source_packages_that_were_asked_for() -> None:
    found = {(one.package, one.id, one.suite, one.status, one.fixed, one.urgency) for one in snapshot().advisories}
    assert found == {
        ("glibc", "CVE-0000-0001", "bookworm", "resolved", "2.36-9+deb12u11", "not yet assigned"),
        ("glibc", "CVE-0000-0002", "bookworm", "open", "", "unimportant"),
        ("glibc", "CVE-0000-0002", "trixie", "resolved", "2.41-12", "unimportant"),
        ("openssl", "CVE-0000-0003", "bookworm", "open", "", "low"),
        ("openssl", "CVE-0000-0003", "trixie", "undetermined", "", "not yet assigned"),
        ("openssl", "TEMP-0000004-ABCDEF", "bookworm", "resolved", "3.0.17-1~deb12u1", "medium"),
    }, "without sid, without packages that were not asked for, and without suites that were never affected"
    assert snapshot("glibc").advisories[0].summary == "A planted flaw in the handling of locales."


class _Tracker(Listener):
    """Answers every request with a body."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def handler(self) -> type[BaseHTTPRequestHandler]:
        body = self.body

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def test_a_snapshot_is_fetched_and_stored(tmp_path: Path) -> None:
    with _Tracker(json.dumps(TRACKER).encode()) as tracker:
        found = debian_advisories.fetch(["tini", "openssl"], ["bookworm"], TODAY, f"http://{tracker.host}/")
    assert (found.taken, found.suites, found.covers) == ("2026-11-21", ("bookworm",), ("openssl", "tini"))
    assert [one.id for one in found.advisories] == ["CVE-0000-0003", "TEMP-0000004-ABCDEF"]
    debian_advisories.save(found, tmp_path / "kept.json")
    assert debian_advisories.load(tmp_path / "kept.json") == found
    assert debian_advisories.load(tmp_path / "none.json") is None


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tini": 1}', b'{"tini": {"CVE-1": {}}}'])
def test_a_tracker_that_does_not_answer_in_its_format_changes_nothing(body: bytes) -> None:
    with _Tracker(body) as tracker, pytest.raises(StepFailed, match="the stored snapshot is unchanged") as failed:
        debian_advisories.fetch(["tini"], ["bookworm"], TODAY, f"http://{tracker.host}/")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize("text", ["", "[]", '{"source": 1}'])
def test_a_broken_snapshot_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="not a snapshot of Debian's security tracker") as refused:
        debian_advisories.load(tmp_path / "kept.json")
    assert "\n" not in str(refused.value)


# --- versions -------------------------------------------------------------------------------------------------------

#: Versions in Debian's order (Debian Policy 5.6.12): a tilde is less than the end, a letter than other characters.
ORDERED = [
    "0~~a", "0~", "0", "1.0~rc1-1", "1.0-1~deb12u1", "1.0-1", "1.0-1+b1", "1.0-1+deb12u1", "1.0-1+deb12u2",
    "1.0-1+deb12u10", "1.0a-1", "1.0+git1-1", "1.2-1", "1.10-1", "2:0.9-1", "10:0-1",
]  # fmt: skip


def test_debian_versions_are_in_debians_order() -> None:
    for one, other in itertools.combinations(ORDERED, 2):
        assert debian_advisories.is_older(one, other) and not debian_advisories.is_older(other, one), (one, other)
    assert not debian_advisories.is_older("1.0-1", "1.0-1") and not debian_advisories.is_older("1.0-0", "1.0")
    assert debian_advisories.is_older("1.0-1", "no version"), "reported rather than passed over"


@pytest.mark.needs("dpkg")
def test_the_order_is_that_of_dpkg() -> None:
    for one, other in itertools.pairwise(ORDERED):
        assert subprocess.run(["dpkg", "--compare-versions", one, "lt", other], check=False).returncode == 0


# --- what fails -----------------------------------------------------------------------------------------------------


def test_what_the_suite_has_fixed_fails_and_the_rest_are_notes() -> None:
    found = {one.names[0]: one for one in debian_advisories.vulnerabilities(image(), snapshot())}
    assert set(found) == {"CVE-0000-0001", "CVE-0000-0002", "CVE-0000-0003"}, "the installed openssl has the other fix"
    assert {name: one.note for name, one in found.items()} == {
        "CVE-0000-0001": "",
        "CVE-0000-0002": "Debian: unimportant",
        "CVE-0000-0003": "not fixed in bookworm: Minor issue",
    }
    first = found["CVE-0000-0001"]
    assert (first.kind, first.package, first.version) == ("debian", "glibc", "2.36-9+deb12u10")
    assert first.fixed == ("2.36-9+deb12u11",)
    newer = image(InstalledPackage("libc6", "2.36-9+deb12u11", source="glibc"))
    assert [one.names[0] for one in debian_advisories.vulnerabilities(newer, snapshot())] == ["CVE-0000-0002"]


def test_each_image_is_compared_with_its_suite() -> None:
    found = debian_advisories.vulnerabilities(
        image(
            InstalledPackage("libc6", "2.41-11", source="glibc"),
            InstalledPackage("libssl3t64", "3.5.4-1~deb13u1", source="openssl"),
            version="13",
        ),
        snapshot(),
    )
    assert [(one.names[0], one.note) for one in found] == [
        ("CVE-0000-0002", "Debian: unimportant"),
        ("CVE-0000-0003", "not fixed in trixie: not known whether affected"),
    ]


def test_the_version_of_the_source_package_counts() -> None:
    """A binary package may have another version than its source: a rebuild, or another epoch."""
    rebuilt = InstalledPackage("libc6", "9:1", source="glibc", source_version="2.36-9+deb12u10")
    found = debian_advisories.vulnerabilities(image(rebuilt), snapshot())
    assert "CVE-0000-0001" in {one.names[0] for one in found}


@pytest.mark.parametrize(
    ("images", "lines"),
    [
        ([image()], []),
        ([image(debian={})], ["trainyard:xla: no list of Debian packages, so none is audited"]),
        (
            [image(release={"ID": "ubuntu", "VERSION_ID": "24.04"}), image()],
            ["trainyard:xla: the snapshot does not cover ubuntu 24.04, so no Debian package is audited"],
        ),
        (
            [image(version="11")],
            ["trainyard:xla: the snapshot does not cover debian 11, so no Debian package is audited"],
        ),
        (
            [image(LIBC, InstalledPackage("bash", "5"))],
            ["the snapshot covers 1 of 2 source packages of Debian; not bash"],
        ),
    ],
)
def test_what_is_not_covered_is_said(images: list[ImagePackages], lines: list[str]) -> None:
    assert debian_advisories.uncovered(images, snapshot()) == lines


def test_without_a_snapshot_no_package_is_covered() -> None:
    assert debian_advisories.uncovered([image()], None) == [
        "the snapshot covers 0 of 3 source packages of Debian; not glibc, openssl, tini"
    ]


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Snapshots, waivers and the images of this host, in place of the project's."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    monkeypatch.setattr(audit, "live", lambda pins: None)
    monkeypatch.setattr(waivers, "today", lambda: TODAY)
    monkeypatch.setattr(advisories, "load", lambda: Snapshot("a test", "2026-11-20", (), ()))

    def store(found: DebianSnapshot | None, *known: Waiver, images: list[ImagePackages] | None = None) -> None:
        monkeypatch.setattr(debian_advisories, "load", lambda: found)
        monkeypatch.setattr(waivers, "load", lambda: known)
        here = {one.reference: one for one in ([image()] if images is None else images)}
        monkeypatch.setattr(image_packages, "of_host", here.get)

    return store


def waiver(**changes: Any) -> Waiver:
    fields = {
        "rule": "CVE-0000-0001",
        "package": "glibc",
        "version": "2.36-9+deb12u10",
        "owner": "the base team",
        "reason": "locales of strangers are never read",
        "expires": "2026-12-31",
    }
    return Waiver(**fields | changes)


def test_a_fix_that_the_image_lacks_fails_and_a_waiver_passes_it(
    trainyard: Command, stored: Callable[..., None]
) -> None:
    stored(snapshot())
    status, out, err = trainyard("audit", "xla", "--json")
    assert status == 1 and "glibc 2.36-9+deb12u10: CVE-0000-0001 (fixed in 2.36-9+deb12u11), in xla" in err
    report = json.loads(out)
    fails = {one["names"][0]: one["fails"] for one in report["findings"]}
    assert fails == {"CVE-0000-0001": True, "CVE-0000-0002": False, "CVE-0000-0003": False}
    assert report["images"] == ["trainyard:xla"]
    stored(snapshot(), waiver())
    status, _, err = trainyard("audit", "xla")
    assert status == 0 and "3 Debian packages of 1 images, Debian's security tracker of 2026-11-20" in err
    stored(snapshot(), waiver(expires="2026-11-20"))
    assert trainyard("audit", "xla")[0] == 1
    stored(snapshot(), waiver(target="cpu"))
    assert trainyard("audit", "xla")[0] == 1


def test_a_waiver_of_a_debian_package_matches_its_source_package(
    trainyard: Command, stored: Callable[..., None]
) -> None:
    stored(snapshot(), waiver())
    _, _, err = trainyard("audit")
    assert "matches no package" not in err
    stored(snapshot(), waiver(version="2.36-9"))
    _, _, err = trainyard("audit")
    assert "waiver of CVE-0000-0001 for glibc 2.36-9 matches no package" in " ".join(err.split())


def test_targets_without_an_image_on_this_host_are_named(trainyard: Command, stored: Callable[..., None]) -> None:
    stored(snapshot(), images=[])
    status, _, err = trainyard("audit", "xla")
    assert status == 0 and "not on this host, so their Debian packages are not audited: xla" in err
    status, _, err = trainyard("audit", "tf-cpu")
    assert status == 0 and "not audited: tf-cpu, tf-cpu-arm64" in err, "each platform has an image"


def test_an_image_at_a_registry_is_audited_by_its_sbom(
    trainyard: Command, stored: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_images, "RELEASE", {"ID": "debian", "VERSION_ID": "12"})
    with Registry() as registry:
        publish(Repository(f"{registry.host}/ml/trainyard"), "xla", debian={"libc6": LIBC}, python={"torch": "2.9.1"})
        stored(snapshot())
        reference = f"{registry.host}/ml/trainyard:xla"
        status, out, err = trainyard("audit", "--image", reference, "--json")
    assert status == 1 and "glibc 2.36-9+deb12u10: CVE-0000-0001" in err
    assert (json.loads(out)["packages"], json.loads(out)["images"]) == (1, [reference])


def test_an_image_at_a_registry_without_an_sbom_is_refused(trainyard: Command, stored: Callable[..., None]) -> None:
    stored(snapshot())
    with Registry() as registry:
        publish(Repository(f"{registry.host}/ml/trainyard"), "xla", listed=False)
        status, _, err = trainyard("audit", "--image", f"{registry.host}/ml/trainyard:xla")
    assert status == 2 and "has no SBOM, which lists its packages" in err


def test_an_update_is_about_the_source_packages_of_the_images_and_of_the_snapshot(
    stored: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[DebianSnapshot] = []
    monkeypatch.setattr(debian_advisories, "save", saved.append)
    stored(snapshot("zlib"))
    with _Tracker(json.dumps(TRACKER).encode()) as tracker:
        audit.update_debian(f"http://{tracker.host}/")
        assert saved[0].covers == ("glibc", "openssl", "tini", "zlib")
        stored(None, images=[])
        assert audit.update_debian(f"http://{tracker.host}/") is None


def test_a_target_and_an_image_are_two_questions(trainyard: Command) -> None:
    status, _, err = trainyard("audit", "xla", "--image", "localhost:1/a:b")
    assert status == 2 and "give a target or an image, not both" in err
