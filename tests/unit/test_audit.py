"""`make audit`: a known vulnerability of a locked version fails unless a waiver covers it that has not expired."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import recipes
from trainyard.lint import waivers
from trainyard.lint.waivers import Waiver
from trainyard.release import advisories, audit, sources, vulnerabilities
from trainyard.release.advisories import Advisory, Snapshot
from trainyard.release.vulnerabilities import Pins, Vulnerability
from trainyard.spec.model import load

TODAY = datetime.date(2026, 11, 21)
#: Planted: no such advisory exists.
PLANTED = Advisory(
    "PYSEC-0000-1", ("CVE-0000-1",), "pillow", "planted", "2026-11-01", ((("introduced", "12.0"), ("fixed", "13.0.1")),)
)
SNAPSHOT = Snapshot("a test", "2026-11-20", ("pillow",), (PLANTED,))


def waiver(**changes: Any) -> Waiver:
    fields = {
        "rule": "PYSEC-0000-1",
        "package": "Pillow",
        "version": "13.0.0",
        "owner": "the audio team",
        "reason": "the affected decoder is never called",
        "expires": "2026-12-31",
    }
    return Waiver(**fields | changes)


@pytest.mark.parametrize(
    ("version", "affected"),
    [("11.9", False), ("12.0", True), ("13.0.0", True), ("13.0.0+cpu", True), ("13.0.1rc1", True), ("13.0.1", False)],
)
def test_a_version_is_affected_from_its_introduction_to_its_fix(version: str, affected: bool) -> None:
    assert PLANTED.affects(version) is affected


def test_ranges_may_end_without_a_fix_or_begin_again() -> None:
    twice = Advisory("X", (), "p", "", "", ((("introduced", "0"), ("last_affected", "2"), ("introduced", "5")),))
    assert [twice.affects(version) for version in ("1", "2", "2.1", "5", "99")] == [True, True, False, True, True]
    named = Advisory("X", (), "p", "", "", (), ("1.0", "odd version"))
    assert named.affects("1") and named.affects("odd version") and not named.affects("2")


def evaluated(known: list[Waiver], pins: dict[str, Pins] | None = None) -> list[Vulnerability]:
    pins = pins or {"cpu": {"pillow": {"13.0.0"}}, "xla": {"pillow": {"13.0.0"}}, "tf-cpu": {"pillow": {"13.0.1"}}}
    return vulnerabilities.evaluate(
        audit.by_snapshot(vulnerabilities.union(pins.values()), SNAPSHOT), pins, known, TODAY
    )


def test_a_vulnerability_without_a_waiver_fails_and_names_images_and_fix() -> None:
    (found,) = evaluated([])
    assert found.fails and str(found) == "pillow 13.0.0: PYSEC-0000-1 (fixed in 13.0.1), in cpu, xla"


@pytest.mark.parametrize("rule", ["PYSEC-0000-1", "CVE-0000-1"])
def test_a_waiver_may_use_any_id_of_the_advisory(rule: str) -> None:
    (found,) = evaluated([waiver(rule=rule)])
    assert not found.fails and "waived until 2026-12-31 by the audio team" in found.waiver


@pytest.mark.parametrize(
    "changes", [{"version": "13.0.1"}, {"package": "numpy"}, {"rule": "PYSEC-0000-2"}, {"expires": "2026-11-20"}]
)
def test_a_waiver_of_something_else_or_an_expired_one_does_not_apply(changes: dict[str, str]) -> None:
    (found,) = evaluated([waiver(**changes)])
    assert found.fails
    assert ("expired" in found.waiver) is ("expires" in changes)


def test_a_waiver_applies_until_its_last_day_and_only_to_its_target() -> None:
    found = evaluated([waiver(expires="2026-11-21", target="cpu")])
    assert [(one.targets, one.fails) for one in found] == [(("cpu",), False), (("xla",), True)]


def test_expired_and_unused_waivers_are_reported() -> None:
    pins: Pins = {"pillow": {"13.0.1"}}
    (unused,) = audit.stale([waiver()], pins, TODAY)
    assert not unused.expired and str(unused).endswith("matches no package: remove it")
    assert len(audit.stale([waiver()], {}, TODAY)) == 1
    (expired,) = audit.stale([waiver(expires="2026-11-20")], pins, TODAY)
    assert expired.expired and "expired on 2026-11-20: the audio team must" in str(expired)
    assert audit.stale([waiver(version="13.0.1")], pins, TODAY) == []


def test_local_versions_count_as_their_release() -> None:
    assert vulnerabilities.public_version("2.9.1+cpu") == "2.9.1"


# --- the command, with a snapshot and waivers of the test ----------------------------------------------------

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Store a snapshot and waivers in place of the project's; no service answers."""
    monkeypatch.setattr(audit, "live", lambda pins: None)
    monkeypatch.setattr(waivers, "today", lambda: TODAY)
    stored = advisories.load

    def store(snapshot: Snapshot, *known: Waiver) -> None:
        advisories.save(snapshot, tmp_path / "advisories.json")
        monkeypatch.setattr(advisories, "load", lambda: stored(tmp_path / "advisories.json"))
        monkeypatch.setattr(waivers, "load", lambda: known)

    return store


def planted(version: str) -> Snapshot:
    """An advisory about the very version of numpy that tf-cpu's lock pins."""
    advisory = Advisory("PYSEC-0000-9", (), "numpy", "planted", "2026-11-01", ((("introduced", version),),))
    return Snapshot("a test", "2026-11-20", ("numpy",), (advisory,))


def test_an_advisory_fails_the_command_and_a_waiver_passes_it(trainyard: Command, stored: Callable[..., None]) -> None:
    (version,) = sources.pins(load("tf-cpu"))["numpy"]
    stored(planted(version))
    status, out, err = trainyard("audit", "tf-cpu", "--json")
    assert status == 1 and f"numpy {version}: PYSEC-0000-9 (no fix is known), in tf-cpu" in err
    report = json.loads(out)
    assert report["findings"][0]["fails"] is True
    assert (report["snapshot"]["covered"], report["snapshot"]["packages"]) == (1, report["packages"])
    assert "covers 1 of" in err, "packages that the snapshot does not cover are reported"
    stored(planted(version), waiver(rule="PYSEC-0000-9", package="numpy", version=version))
    assert trainyard("audit", "tf-cpu")[0] == 0
    stored(planted(version), waiver(rule="PYSEC-0000-9", package="numpy", version=version, expires="2026-01-01"))
    status, _, err = trainyard("audit", "tf-cpu")
    assert status == 1 and "expired" in err


def test_an_expired_waiver_fails_although_its_vulnerability_is_gone(
    trainyard: Command, stored: Callable[..., None]
) -> None:
    stored(Snapshot("a test", "2026-11-20", (), ()), waiver(expires="2026-01-01"))
    status, _, err = trainyard("audit")
    assert status == 1 and "expired on 2026-01-01" in err


def test_an_old_snapshot_says_so(trainyard: Command, stored: Callable[..., None]) -> None:
    stored(Snapshot("a test", "2026-01-01", (), ()))
    status, _, err = trainyard("audit", "tf-cpu")
    said = " ".join(err.split())
    assert status == 0 and "324 days old and covers 0 of" in said and "run 'trainyard dev audit --update'" in said


def test_a_push_says_in_one_line_how_little_an_old_snapshot_can_say(stored: Callable[..., None]) -> None:
    """`audit.require` is what push calls first; it prints the line after everything is pushed."""
    stored(Snapshot("a test", "2026-01-01", ("numpy",), ()))
    recipe = recipes.make(load("tf-cpu"))
    coverage = audit.require(recipe)
    assert (coverage.taken, coverage.age, coverage.covered) == ("2026-01-01", 324, 1)
    assert coverage.caution() == (
        f"no known vulnerability, by a snapshot that is 324 days old and covers 1 of {coverage.packages} Python "
        f"packages: run 'trainyard dev audit --update' where {advisories.OSV} answers"
    )
    stored(Snapshot("a test", "2026-11-20", tuple(recipe.versions), ()))
    assert audit.require(recipe).caution() == ""


def test_the_locks_of_the_project_pass(trainyard: Command) -> None:
    """With the stored snapshot and waivers, as in `make check`."""
    assert trainyard("audit", OFFLINE="1")[0] == 0


@pytest.mark.parametrize("text", ["", "[]", '{"source": 1}', '{"source": "", "taken": "soon", "covers": []}'])
def test_a_broken_snapshot_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "advisories.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="not a snapshot of advisories") as refused:
        advisories.load(tmp_path / "advisories.json")
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="is missing: run 'trainyard dev audit --update'"):
        advisories.load(tmp_path / "nowhere.json")


# --- where the answers come from -----------------------------------------------------------------------------------


def test_a_service_is_used_only_if_it_knows_a_known_vulnerability(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that answers every query with "not found" would report no vulnerability of any package."""
    found = Vulnerability("pillow", "13.0.0", ("X",), "", ())
    asked: list[tuple[str, str]] = []

    def query(service: str, pins: Pins) -> tuple[list[Vulnerability], set[str]] | None:
        asked.append((service, next(iter(pins))))
        if service == "pypi":
            return [], set(pins)
        return ([found], {"unknown"})

    monkeypatch.setattr(audit, "query", query)
    assert audit.live({"pillow": {"13.0.0"}}) == ("osv", [found], {"unknown"})
    assert asked == [("pypi", "pip"), ("osv", "pip"), ("osv", "pillow")]
    monkeypatch.setattr(audit, "query", lambda service, pins: None)
    assert audit.live({"pillow": {"13.0.0"}}) is None


def test_the_report_of_pip_audit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []

    def report(_service: str, lines: list[str]) -> list[dict[str, Any]]:
        batches.append(lines)
        vulnerability = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"], "description": "a\nb"}
        return [
            {"name": "Pillow", "version": "2", "vulns": [vulnerability]},
            {"name": "torch", "skip_reason": "Dependency not found"},
        ]

    monkeypatch.setattr(audit, "_pip_audit", report)
    found, unknown = audit.query("osv", {"pillow": {"1", "2"}, "torch": {"2"}}) or ([], set())
    assert batches == [["pillow==1", "torch==2"], ["pillow==2"]], "no package twice in one run"
    assert found[0] == Vulnerability("pillow", "2", ("PYSEC-1", "CVE-1"), "a b", ("3",)) and unknown == {"torch"}


@pytest.fixture
def osv() -> Iterator[str]:
    """A service with OSV's API that knows one package, in two pages, and an advisory that was withdrawn."""
    document = {
        "id": "GHSA-1",
        "aliases": ["CVE-1"],
        "details": "first line\nsecond",
        "modified": "2026-11-02T00:00:00Z",
        "affected": [
            {
                "package": {"name": "Pillow", "ecosystem": "PyPI"},
                "ranges": [
                    {"type": "GIT", "events": [{"introduced": "0"}]},
                    {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "9"}]},
                ],
            }
        ],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: dict[str, Any] = {}
            if query["package"] == {"name": "pillow", "ecosystem": "PyPI"}:
                answer = {"vulns": [document]} if "page_token" in query else {
                    "vulns": [document | {"id": "GHSA-2", "withdrawn": "2026-01-01"}], "next_page_token": "more",
                }  # fmt: skip
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        yield address
        server.shutdown()


def test_a_snapshot_is_fetched_with_all_pages_and_stored(osv: str, tmp_path: Path) -> None:
    snapshot = advisories.fetch(["pillow", "numpy"], TODAY, osv)
    assert (snapshot.source, snapshot.taken, snapshot.covers) == (osv, "2026-11-21", ("numpy", "pillow"))
    (advisory,) = snapshot.advisories
    assert (advisory.names, advisory.summary, advisory.fixed) == (("GHSA-1", "CVE-1"), "first line", ("9",))
    advisories.save(snapshot, tmp_path / "kept.json")
    assert advisories.load(tmp_path / "kept.json") == snapshot


def test_without_an_answer_the_stored_snapshot_is_unchanged() -> None:
    with pytest.raises(StepFailed, match="the stored snapshot is unchanged"):
        advisories.fetch(["pillow"], TODAY, "http://127.0.0.1:9")
