"""docs/launcher-contract*.md agree with the code; code, tests and docs/launcher.md cite rules that exist in them."""

from __future__ import annotations

import re

import pytest
from launcher import errors, readers
from launcher.runtime import RULES
from launcher.settings import VARIABLES
from launcher.sources import SOURCES
from launching import ROOT

#: Name -> text. The first page has the sources of all.
PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("launcher-contract.md", "launcher-contract-tpu-nodes.md", "launcher-contract-preflight.md")
}
CORE = PAGES["launcher-contract.md"]
CONTRACT = "\n".join([*reversed(PAGES.values())])
PAGE = (ROOT / "docs" / "launcher.md").read_text(encoding="utf-8")
RULE = re.compile(r"\bR\d+(?:\.\d+)?\b")
#: Headings of rules: "### <a id="r4.1"></a>R4.1 Detection".
HEADING = re.compile(r'^#{2,4} <a id="(r[\d.]+)"></a>(R[\d.]+) \S', re.MULTILINE)
CITING = [
    *sorted((ROOT / "launcher").rglob("*.py")),
    *sorted((ROOT / "tests" / "unit" / "launcher").rglob("*.py")),
    ROOT / "tests" / "image" / "test_launcher_process.py",
    ROOT / "tests" / "cloud" / "test_launcher_clients.py",
    ROOT / "docs" / "launcher.md",
    ROOT / "docs" / "preflight.md",
    *(ROOT / "docs" / name for name in PAGES),
]


def defined_rules() -> set[str]:
    return {name for _, name in HEADING.findall(CONTRACT)}


def sections() -> dict[str, str]:
    """The text of each rule, up to the next heading."""
    found = {}
    for part in re.split(r"^(?=#)", CONTRACT.partition("\n## Sources")[0], flags=re.MULTILINE):
        match = HEADING.match(part)
        if match:
            found[match[2]] = part
    return found


def source_ids() -> list[str]:
    return re.findall(r'^- <a id="([a-z0-9-]+)"></a>\1: ', CONTRACT.partition("\n## Sources")[2], re.MULTILINE)


def test_every_rule_has_one_heading_with_its_anchor() -> None:
    headings = HEADING.findall(CONTRACT)
    assert [anchor for anchor, _ in headings] == [name.lower() for _, name in headings]
    assert len(headings) == len(defined_rules())
    parents = {name.partition(".")[0] for name in defined_rules()}
    assert parents <= defined_rules()


@pytest.mark.parametrize("path", CITING, ids=lambda path: path.name)
def test_cited_rules_exist(path: object) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert set(RULE.findall(text)) <= defined_rules()


def test_the_runtime_rules_are_those_of_the_code_in_the_same_order() -> None:
    assert re.findall(r"^\| \[(R\d)\]\(", CORE, re.MULTILINE) == [rule.name for rule in RULES]


def test_the_contract_names_every_variable_that_a_runtime_rule_reads() -> None:
    texts = sections()
    for rule in RULES:
        for variable in rule.signals:
            assert f"`{variable}`" in texts[rule.name] or f"`{variable}=" in texts[rule.name], (rule.name, variable)


def test_the_table_of_coordinates_is_that_of_the_code() -> None:
    rows = [row.split(" | ") for row in sections()["R13"].splitlines() if row.startswith("| [R13")]
    table = [(re.findall(RULE, row[0])[0], *(tuple(re.findall(r"`(\w+)`", cell)) for cell in row[1:3])) for row in rows]
    assert table == [
        *((source.rule, tuple(source.signals), tuple(source.variables)) for source in SOURCES),
        ("R13.7", (), ()),
    ]


def test_each_row_names_functions_that_read_it() -> None:
    assert all(callable(getattr(readers, name)) for row in SOURCES for name in (row.read, row.head) if name)


def test_each_row_names_a_url_that_its_rule_cites() -> None:
    urls = dict(re.findall(r'^- <a id="([a-z0-9-]+)"></a>.*\]\((https://[^)\s]+)\)$', CONTRACT, re.MULTILINE))
    for row in SOURCES:
        cited = {urls[name] for name in re.findall(r"\]\(#([a-z0-9-]+)\)", sections()[row.rule]) if name in urls}
        assert row.url in cited or (not row.url and row.own), row.rule


def test_every_rule_names_its_source() -> None:
    for name, text in sections().items():
        is_group = text.startswith("## ")  # its parts have sources
        assert "\nSource: " in text or is_group, name


def test_links_to_the_contract_exist() -> None:
    anchors = {}
    for name, text in PAGES.items():
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors[name] = set(re.findall(r'<a id="([^"]+)"', text))
        anchors[name] |= {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        for target in re.findall(r"\]\(#([^)]+)\)", text):
            assert target in anchors[name]
    for page in (PAGE, *PAGES.values(), *(path.read_text(encoding="utf-8") for path in CITING)):
        for name, target in re.findall(r"(launcher-contract[a-z-]*\.md)#([\w.-]+\w)", page):
            assert target in anchors[name], (name, target)


def test_every_source_is_cited_and_has_a_url() -> None:
    rules = CONTRACT.partition("\n## Sources")[0]
    assert source_ids() == sorted(set(source_ids()))
    for name in source_ids():
        assert f"#{name})" in rules, name
    rows = [line for line in CONTRACT.splitlines() if line.startswith('- <a id="')]
    assert len(rows) == len(source_ids())
    assert all(re.search(r"\]\(https://[^)\s]+\)$", row) for row in rows)


def test_exit_statuses_of_the_contract_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", sections()["R15.4"], re.MULTILINE)
    listed = {int(status) for row in rows for status in row.split(", ")}
    expected = {0, errors.PERMANENT, errors.CONFIG, errors.RETRYABLE, errors.NOT_EXECUTABLE, errors.NOT_FOUND}
    expected.add(errors.UNFIT)
    assert listed == expected


def test_every_setting_is_documented() -> None:
    for name in VARIABLES:
        assert name in CONTRACT + PAGE, name
