"""Waivers are about one thing, have an owner, a reason and an end, and are refused in one line where they are not."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from trainyard.common.errors import UserError
from trainyard.lint import waivers

ADVISORY = """\
waivers:
  - rule: GHSA-aaaa-bbbb-cccc
    package: Pillow
    version: 13.0.0
    owner: someone
    reason: images are trusted here
    expires: 2026-12-31
"""


def read(tmp_path: Path, text: str) -> tuple[waivers.Waiver, ...]:
    path = tmp_path / "waivers.yaml"
    path.write_text(text, encoding="utf-8")
    waivers.load.cache_clear()
    return waivers.load(path)


def test_the_projects_own_file_is_valid() -> None:
    waivers.load.cache_clear()
    waivers.load()


def test_an_advisory_is_waived_for_one_version_of_one_package(tmp_path: Path) -> None:
    (waiver,) = read(tmp_path, ADVISORY)
    assert waiver.covers_package("GHSA-aaaa-bbbb-cccc", "pillow", "13.0.0")
    assert waiver.covers_package("GHSA-aaaa-bbbb-cccc", "pillow", "13.0", target="xla")
    assert not waiver.covers_package("GHSA-aaaa-bbbb-cccc", "pillow", "13.0.1")
    assert not waiver.covers_package("GHSA-aaaa-bbbb-cccc", "numpy", "13.0.0")
    assert not waiver.covers_package("GHSA-other", "pillow", "13.0.0")
    assert not waiver.covers_finding("GHSA-aaaa-bbbb-cccc", "package pillow")


def test_the_last_day_still_counts(tmp_path: Path) -> None:
    found = read(tmp_path, ADVISORY)
    assert not any(one.expired(datetime.date(2026, 12, 31)) for one in found)
    assert all(one.expired(datetime.date(2027, 1, 1)) for one in found)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("    owner: someone\n", "", "waivers.yaml:2: 'waivers.0.owner' is missing"),
        ("expires: 2026-12-31", "expires: soon", "waivers.yaml:7: waivers.0.expires: 'soon' is not a date"),
        ("    version: 13.0.0\n", "", "'package' and 'version' belong together"),
        ("    package: Pillow\n    version: 13.0.0\n", "", "say either 'package' and 'version'"),
        ("    reason: images are trusted here\n", "    reason: why not\n", "waivers.0.reason"),
        ("    owner:", "    ower:", "unknown key 'waivers.0.ower' (did you mean 'owner'?)"),
    ],
)
def test_half_a_waiver_is_refused_in_a_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in ADVISORY
    with pytest.raises(UserError) as refused:
        read(tmp_path, ADVISORY.replace(old, new))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_no_file_is_no_waiver(tmp_path: Path) -> None:
    waivers.load.cache_clear()
    assert waivers.load(tmp_path / "none.yaml") == ()
