"""The vulnerability gate: what is known of a locked version fails, unless somebody answers for it until a date."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from scripts import advisories, audit, waivers
from scripts.advisories import Advisory, Snapshot
from scripts.audit import Finding
from scripts.cli import StepFailed, UserError
from scripts.waivers import Waiver

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
        "owner": "somebody",
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


def judged(known: list[Waiver], pins: dict[str, audit.Pins] | None = None) -> list[Finding]:
    pins = pins or {"cpu": {"pillow": {"13.0.0"}}, "xla": {"pillow": {"13.0.0"}}, "tf-cpu": {"pillow": {"13.0.1"}}}
    return audit.judge(audit.by_snapshot(audit.union(pins.values()), SNAPSHOT), pins, known, TODAY)


def test_what_nobody_waived_fails_and_names_the_images_and_the_fix() -> None:
    (found,) = judged([])
    assert found.fails and str(found) == "pillow 13.0.0: PYSEC-0000-1 (fixed in 13.0.1), in cpu, xla"


@pytest.mark.parametrize("rule", ["PYSEC-0000-1", "CVE-0000-1"])
def test_a_waiver_by_any_of_its_names_holds_and_is_told(rule: str) -> None:
    (found,) = judged([waiver(rule=rule)])
    assert not found.fails and "waived until 2026-12-31 by somebody" in found.waiver


@pytest.mark.parametrize(
    "changes", [{"version": "13.0.1"}, {"package": "numpy"}, {"rule": "PYSEC-0000-2"}, {"expires": "2026-11-20"}]
)
def test_a_waiver_of_something_else_or_of_the_past_does_not_hold(changes: dict[str, str]) -> None:
    (found,) = judged([waiver(**changes)])
    assert found.fails
    assert ("expired" in found.waiver) is ("expires" in changes)


def test_a_waiver_holds_on_its_last_day_and_for_its_target_alone() -> None:
    found = judged([waiver(expires="2026-11-21", target="cpu")])
    assert [(one.targets, one.fails) for one in found] == [(("cpu",), False), (("xla",), True)]


def test_waivers_that_are_over_or_about_nothing_are_told() -> None:
    pins: audit.Pins = {"pillow": {"13.0.1"}}
    assert audit.stale([waiver()], pins, TODAY)[0].endswith("is about what no lock pins: remove it")
    assert "ended on 2026-11-20: somebody has to" in audit.stale([waiver(expires="2026-11-20")], pins, TODAY)[0]
    assert audit.stale([waiver(version="13.0.1")], pins, TODAY) == []


def test_local_versions_count_as_the_release_they_are_of() -> None:
    assert audit._public("2.9.1+cpu") == "2.9.1"


# --- the verb, against a snapshot and waivers of the test's own ----------------------------------------------------

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Store a snapshot and waivers in place of the project's; no service answers."""
    monkeypatch.setattr(audit, "live", lambda pins: None)
    monkeypatch.setattr(waivers, "today", lambda: TODAY)
    load = advisories.load

    def store(snapshot: Snapshot, *known: Waiver) -> None:
        advisories.save(snapshot, tmp_path / "advisories.json")
        monkeypatch.setattr(advisories, "load", lambda: load(tmp_path / "advisories.json"))
        monkeypatch.setattr(waivers, "load", lambda: known)

    return store


def planted(version: str) -> Snapshot:
    """An advisory about the very version of numpy that tf-cpu's lock pins."""
    advisory = Advisory("PYSEC-0000-9", (), "numpy", "planted", "2026-11-01", ((("introduced", version),),))
    return Snapshot("a test", "2026-11-20", ("numpy",), (advisory,))


def test_a_planted_advisory_fails_the_verb_and_a_waiver_mends_it(verb: Verb, stored: Callable[..., None]) -> None:
    (version,) = audit.pinned(audit.load("tf-cpu"))["numpy"]
    stored(planted(version))
    status, out, err = verb(audit, "tf-cpu", "--json")
    assert status == 1 and f"numpy {version}: PYSEC-0000-9 (no fix is known), in tf-cpu" in err
    assert json.loads(out)["findings"][0]["fails"] is True
    assert "the snapshot covers 1 of" in err, "what the snapshot knows nothing about is said"
    stored(planted(version), waiver(rule="PYSEC-0000-9", package="numpy", version=version))
    assert verb(audit, "tf-cpu")[0] == 0
    stored(planted(version), waiver(rule="PYSEC-0000-9", package="numpy", version=version, expires="2026-01-01"))
    status, _, err = verb(audit, "tf-cpu")
    assert status == 1 and "expired" in err


def test_an_expired_waiver_fails_although_what_it_waived_is_gone(verb: Verb, stored: Callable[..., None]) -> None:
    stored(Snapshot("a test", "2026-11-20", (), ()), waiver(expires="2026-01-01"))
    status, _, err = verb(audit)
    assert status == 1 and "ended on 2026-01-01" in err


def test_an_old_snapshot_says_so(verb: Verb, stored: Callable[..., None]) -> None:
    stored(Snapshot("a test", "2026-01-01", (), ()))
    status, _, err = verb(audit, "tf-cpu")
    assert status == 0 and "324 days old: run 'make audit UPDATE=1'" in " ".join(err.split())


def test_the_projects_own_locks_pass(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make check` asks: the stored snapshot and waivers, whatever they are today."""
    monkeypatch.setenv("OFFLINE", "1")
    assert verb(audit)[0] == 0


@pytest.mark.parametrize("text", ["", "[]", '{"source": 1}', '{"source": "", "taken": "soon", "covers": []}'])
def test_a_broken_snapshot_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "advisories.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="no snapshot of advisories") as refused:
        advisories.load(tmp_path / "advisories.json")
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="is missing: run 'make audit UPDATE=1'"):
        advisories.load(tmp_path / "nowhere.json")


# --- where the answers come from -----------------------------------------------------------------------------------


def test_a_service_counts_only_if_it_knows_what_everybody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror that answers everything with "not found" would find nothing wrong with anything."""
    found = Finding("pillow", "13.0.0", ("X",), "", ())
    asked: list[tuple[str, str]] = []

    def ask(service: str, pins: audit.Pins) -> tuple[list[Finding], set[str]] | None:
        asked.append((service, next(iter(pins))))
        if service == "pypi":
            return [], set(pins)
        return ([found], {"unknown"})

    monkeypatch.setattr(audit, "ask", ask)
    assert audit.live({"pillow": {"13.0.0"}}) == ("osv", [found], {"unknown"})
    assert asked == [("pypi", "pip"), ("osv", "pip"), ("osv", "pillow")]
    monkeypatch.setattr(audit, "ask", lambda service, pins: None)
    assert audit.live({"pillow": {"13.0.0"}}) is None


def test_what_pip_audit_reports_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[str]] = []

    def report(_service: str, lines: list[str]) -> list[dict[str, Any]]:
        batches.append(lines)
        vulnerability = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"], "description": "a\nb"}
        return [
            {"name": "Pillow", "version": "2", "vulns": [vulnerability]},
            {"name": "torch", "skip_reason": "Dependency not found"},
        ]

    monkeypatch.setattr(audit, "_pip_audit", report)
    found, unknown = audit.ask("osv", {"pillow": {"1", "2"}, "torch": {"2"}}) or ([], set())
    assert batches == [["pillow==1", "torch==2"], ["pillow==2"]], "no package twice in one question"
    assert found[0] == Finding("pillow", "2", ("PYSEC-1", "CVE-1"), "a b", ("3",)) and unknown == {"torch"}


@pytest.fixture
def osv(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A service with OSV's API that knows one package, in two pages, and one advisory that was withdrawn."""
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
        monkeypatch.setenv("TRAINYARD_OSV", address)
        yield address
        server.shutdown()


def test_a_new_snapshot_is_fetched_whole_and_comes_back_from_disk(osv: str, tmp_path: Path) -> None:
    snapshot = advisories.fetch(["pillow", "numpy"], TODAY)
    assert (snapshot.source, snapshot.taken, snapshot.covers) == (osv, "2026-11-21", ("numpy", "pillow"))
    (advisory,) = snapshot.advisories
    assert (advisory.names, advisory.summary, advisory.fixed) == (("GHSA-1", "CVE-1"), "first line", ("9",))
    advisories.save(snapshot, tmp_path / "kept.json")
    assert advisories.load(tmp_path / "kept.json") == snapshot


def test_without_an_answer_the_snapshot_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_OSV", "http://127.0.0.1:9")
    with pytest.raises(StepFailed, match="the snapshot stays as it is"):
        advisories.fetch(["pillow"], TODAY)
