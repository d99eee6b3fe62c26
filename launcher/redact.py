"""What may be printed: secrets out, one line each, nothing a terminal or a log parser would act on."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

HIDDEN = "[redacted]"
# A variable or an option whose name holds one of these is taken for a secret.
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
# Values that are secrets whatever their variable is called: OAuth tokens, API keys, JWTs, PEM blocks, GitHub tokens.
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
# Shorter values are words like "true" or "0", which stand everywhere.
SHORTEST_SECRET = 6
LONGEST_VALUE = 300


def is_secret(name: str) -> bool:
    """Whether a variable's or option's name looks like that of a secret."""
    upper = name.upper()
    return any(word in upper for word in SECRET_WORDS)


def secrets(env: Mapping[str, str]) -> list[str]:
    """The values of variables whose names look secret, longest first; also every line of those of several lines."""
    found: set[str] = set()
    for name, value in env.items():
        if is_secret(name):
            found.update(part for part in (value, value.strip(), *value.splitlines()) if len(part) >= SHORTEST_SECRET)
    return sorted(found, key=len, reverse=True)


def scrub(text: str, hidden: list[str]) -> str:
    """Text without any of these values."""
    for value in hidden:
        text = text.replace(value, HIDDEN)
    return text


def shown(name: str, value: str) -> str:
    """A variable's value for a person: hidden when its name or its look says secret, cut when it is long."""
    if is_secret(name) or any(prefix in value for prefix in SECRET_PREFIXES):
        return HIDDEN
    if "://" in value and "@" in value:
        return HIDDEN  # user:password@host
    return one_line(value if len(value) <= LONGEST_VALUE else value[:LONGEST_VALUE] + "...")


def one_line(text: str) -> str:
    """Text with everything unprintable written as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def shown_command(command: list[str]) -> str:
    """A command line for a person: `--token=x` and `--token x` without x."""
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
