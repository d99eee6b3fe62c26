"""Removal of secrets and control characters from output (R16.2)."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

HIDDEN = "[redacted]"
# The value of a variable or an option whose name contains one of these counts as a secret.
SECRET_WORDS = (
    "TOKEN",
    "SECRET",
    "PASS",
    "KEY",
    "CREDENTIAL",
    "AUTH",
    "COOKIE",
    "PRIVATE",
    "SIGNATURE",
    "CERT",
    "DSN",
)
# Values that count as secrets under any name: OAuth tokens, API keys, JWTs, PEM blocks, GitHub tokens.
SECRET_PREFIXES = (
    "ya29.",
    "AIza",
    "eyJ",
    "-----BEGIN",
    "ghp_",
    "gho_",
    "github_pat_",
    "hf_",
    "sk-",
    "Bearer ",
)
# Shorter values are words like "true" or "0", which also occur in other text.
SHORTEST_SECRET = 6
LONGEST_VALUE = 300


def is_secret(name: str) -> bool:
    """Whether the name of a variable or an option is that of a secret."""
    upper = name.upper()
    return any(word in upper for word in SECRET_WORDS)


def secrets(env: Mapping[str, str]) -> list[str]:
    """The values of variables with secret names, longest first; also each line of a value of several lines."""
    found: set[str] = set()
    for name, value in env.items():
        if is_secret(name):
            found.update(part for part in (value, value.strip(), *value.splitlines()) if len(part) >= SHORTEST_SECRET)
    return sorted(found, key=len, reverse=True)


def scrub(text: str, hidden: list[str]) -> str:
    """Replace these values in a text."""
    for value in hidden:
        text = text.replace(value, HIDDEN)
    return text


def shown(name: str, value: str) -> str:
    """A variable's value for display: hidden if its name or form is that of a secret, shortened if it is long."""
    if is_secret(name) or any(prefix in value for prefix in SECRET_PREFIXES):
        return HIDDEN
    if "://" in value and "@" in value:
        return HIDDEN  # user:password@host
    return one_line(value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "...")


def one_line(text: str) -> str:
    """Replace unprintable characters, line breaks included, by escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def shown_command(command: list[str]) -> str:
    """A command line for display: `--token=x` and `--token x` without x."""
    words = []
    hide_next = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("-"):
            words.append(HIDDEN)
            hide_next = False
        elif equals and is_secret(name):
            words.append(f"{name}={HIDDEN}")
        else:
            words.append(shown("", word))
            hide_next = word.startswith("-") and not equals and is_secret(word)
    return " ".join(words)
