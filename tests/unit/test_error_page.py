"""Test that docs/troubleshooting.md has the error messages of the sources."""

from __future__ import annotations

import ast
import re

import pytest

from trainyard.common.settings import ROOT
from trainyard.project import error_page

PAGE = error_page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        ("f'{path}: no file'", None),  # too few words to search for
        ("f'{relative(path)}:{line}: it cannot be read ({error.reason})'", "PATH:LINE: it cannot be read (REASON)"),
        ('f"no such target {name}{nearest(name, known)}: run \'trainyard list\'"',
         "no such target NAME: run 'trainyard list'"),
        ("first + second", None),
    ],
)  # fmt: skip
def test_a_line_has_words_in_capitals_for_its_values(raised: str, line: str | None) -> None:
    assert error_page._line(ast.parse(raised, mode="eval").body) == line


def test_the_page_has_errors_of_each_kind_of_source() -> None:
    for heading in error_page._PLACES:
        assert re.search(rf"## {re.escape(heading)}\n\n- `", PAGE)
    assert not re.search(r"^- `[^`]*`.+", PAGE, re.MULTILINE), "a backtick in a line ends it"


def test_every_folder_of_sources_has_its_place() -> None:
    rooms = {one.relative_to(ROOT).as_posix() for one in ROOT.glob("scripts/trainyard*/*") if one.name[0] != "_"}
    places = {place for places in error_page._PLACES.values() for place in places}
    without = {room for room in rooms - places if list(_raising(room))}
    assert not without


def _raising(room: str) -> list[str]:
    path = ROOT / room
    files = [path] if path.is_file() else path.rglob("*.py")
    return [line for file in files for line in error_page._errors(file)]
