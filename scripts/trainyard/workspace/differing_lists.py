"""Compare the list of requirements that ``init`` takes with the others that a repository has beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trainyard.workspace.requirement_choice import Choice

#: A package, and the only version that a requirement allows, whatever its variant; or a series, as ``1.26.*``.
_PIN = re.compile(r"([\w.-]+)\s*(?:\[[^]]*])?\s*==\s*(\d[\w.!]*(?:\.\*)?)(?:\+[\w.]+)?\s*")


def notes(wanted: Choice, others: Mapping[str, Choice]) -> Iterator[str]:
    """Yield a line for each list that pins other versions than the one that is taken.

    Args:
        others: name of a file -> what it lists, of those that are not taken.
    """
    places = [wanted.file.replace("uv.lock", "pyproject.toml"), *wanted.names.values()]
    taken, own = next(filter(None, places), "").partition(":")[0], _pins(wanted)
    for name, listed in others.items():
        other = _pins(listed)
        differing = [
            f"{one}=={other[one]} ({taken}: {one}=={own[one]})"
            for one in sorted(own.keys() & other.keys())
            if not _agree(own[one], other[one]) and not _agree(other[one], own[one])
        ]
        if differing:
            more = f" and {len(differing) - 3} more" if differing[3:] else ""
            yield f"{taken} is taken; {name} pins {', '.join(differing[:3])}{more}"


def _pins(choice: Choice) -> dict[str, str]:
    texts = [text for text, _ in (*choice.lines, *choice.conda.values())]
    return {canonicalize_name(match[1]): match[2] for text in texts if (match := _PIN.fullmatch(text))}


def _agree(one: str, other: str) -> bool:
    """Return whether a version is another one, or of its series."""
    return SpecifierSet(f"=={other}").contains(one.removesuffix(".*"), prereleases=True)
