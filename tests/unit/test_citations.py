"""Everything that code and documentation cite can be opened: a file and heading of this repository, a rule, or a URL.

``ONLINE=1 make test SUITE=unit ARGS="-k citations"`` also fetches the URLs.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tokenize
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTRACT = sorted((ROOT / "docs").glob("launcher-contract*.md"))

#: Written by other people, generated, or data.
EXCLUDED = re.compile(
    r"LICENSE|.*\.(lock|svg|json|dot|npz|zip)|examples/[^/]+/data/.*\.txt|\.github/.*|tests/unit/test_citations\.py"
)

#: A path of this repository in running text, perhaps with a heading.
PATH = re.compile(
    r"(?<![\w./<>{}~$-])((?:docs|scripts|tests|templates|trainers|launcher|benchmarks|examples|\.ci|\.github)/[\w./-]*\w"
    r"\.(?:md|py|sh|yaml|yml|j2|json|lock|svg|toml|css))(#[\w.-]*\w)?(?![\w/*<{])"
)

#: Files that a page asks its reader to create.
CREATED_BY_READERS = {"trainers/torch/leaves.py", ".github/workflows/updates.yml"}
LINK = re.compile(r"\]\(([^()\s]+)\)")
RULE = re.compile(r"(?<![\w.-])(R\d{1,2}(?:\.\d{1,2})?)(?![\w-])")
URL = re.compile(r"https?://[^\s\"'`<>\\|)\]}]+")

#: Names that only authors of private notes can look up.
PRIVATE = {
    "a clause of a contract": r"\bcontract,? (?:[a-z]\.\d|finding|section|§)",
    "a numbered source": r"(?<![\w/.-])S(?!3\b)\d{1,2}(?![\w.-])",
    "a numbered case": r"(?<![\w/.-])T\d{2}(?![\w.-])",
    "a pitfall": r"\bpitfalls? \d",
    "facts of a design": r"\bdesign's (?:facts|rules)|\bfacts? [A-Z]\d",
    "an issue of a tracker that the repository does not name": r"\b(?:in|of|by) issue \d",
    "a folder outside the repository": r"\.\./shared/",
}


@cache
def files() -> list[Path]:
    """What git tracks or would track, as text."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    paths = [ROOT / name for name in dict.fromkeys(names) if name and not EXCLUDED.fullmatch(name)]
    return [path for path in paths if path.is_file()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def prose(path: Path) -> str:
    """The text of a page; comments and docstrings of a Python file; comments of other files."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return "\n".join(
            token.string
            for token in tokens
            if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string[:5])
        )
    return "\n".join(line for line in text.splitlines() if line.lstrip().startswith(("#", "{#", "//")))


@cache
def anchors(page: Path) -> set[str]:
    """What ``#...`` may name in a page: headings as GitHub spells them, and explicit ids."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text(encoding="utf-8"))
    found = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"(?m)^#+ +(.+?)\s*$", text):
        plain = re.sub(r"<[^>]+>|\]\([^)]*\)|[`\[*]", "", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def opens(target: Path, anchor: str) -> bool:
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in anchors(target))


def links() -> Iterator[tuple[Path, str]]:
    for path in files():
        if path.suffix == ".md":
            for link in LINK.findall(re.sub(r"(?ms)^ *```.*?^ *```", "", path.read_text(encoding="utf-8"))):
                if "://" not in link and not link.startswith("mailto:"):
                    yield path, link


def test_links_between_pages_open() -> None:
    found = list(links())
    assert len(found) > 20
    broken = []
    for path, link in found:
        place, _, anchor = urllib.parse.unquote(link).partition("#")
        if not opens((path.parent / place) if place else path, anchor):
            broken.append(f"{name_of(path)}: {link}")
    assert not broken, "\n".join(broken)


def test_files_named_in_pages_and_comments_exist() -> None:
    broken = [
        f"{name_of(path)}: {target}{anchor}"
        for path in files()
        for line in prose(path).splitlines()
        if "//github.com/" not in line  # a path of that repository
        for target, anchor in PATH.findall(line)
        if target not in CREATED_BY_READERS
        and not opens(ROOT / target, anchor[1:])
        and not (path.suffix == ".md" and (path.parent / target).exists())
    ]
    assert not broken, "\n".join(broken)


def rules() -> set[str]:
    """The ids that the launcher's contract defines."""
    return {anchor.upper() for page in CONTRACT for anchor in anchors(page) if re.fullmatch(r"r\d+(\.\d+)?", anchor)}


def test_rules_of_the_launcher_that_are_cited_are_in_its_contract() -> None:
    assert {f"R{number}" for number in range(10)} <= rules()
    cited = [path for path in files() if path.suffix in (".md", ".py") and path.parts[-2] != "decisions"]
    broken = [
        f"{name_of(path)}: {rule}"
        for path in cited
        for rule in RULE.findall(path.read_text("utf-8") if "launcher" in name_of(path) else prose(path))
        if rule not in rules()
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("what", PRIVATE)
def test_nothing_private_is_cited(what: str) -> None:
    found = [
        f"{name_of(path)}: {match.group()}" for path in files() for match in re.finditer(PRIVATE[what], prose(path))
    ]
    assert not found, "\n".join(found)


@cache
def urls() -> dict[str, str]:
    """URL in a page or comment -> a file that has it; without addresses of this host and of placeholders."""
    found: dict[str, str] = {}
    for path in files():
        for url in URL.findall(prose(path)):
            if not re.search(r"//(localhost|[\d.]+|[^/]*example[^/]*|host|HOST|\[)(:|/|$)|[{$*…]|\.\.\.", url):
                found.setdefault(url.rstrip(".,;:"), name_of(path))
    return found


def test_urls_are_well_formed() -> None:
    assert len(urls()) > 20
    broken = []
    for url, where in urls().items():
        parts = urllib.parse.urlsplit(url)
        if not re.fullmatch(r"([\w-]+\.)+[a-z]{2,}", parts.hostname or "") or url.count("(") != url.count(")"):
            broken.append(f"{where}: {url}")
    assert not broken, "\n".join(broken)


if os.environ.get("ONLINE"):

    @pytest.mark.parametrize("url", urls())
    def test_urls_can_be_fetched(url: str) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0 (trainyard tests)"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
