"""Removal of secrets and control characters from output (R16.2).

A variable that holds a secret is hidden in its place, by its name. Tokens with a known form are hidden everywhere. The
values of secrets are also searched for in lines meant for people, which may quote other variables and answers of
servers; not in machine-readable output, where a value that equals a secret by chance must stay what it is.
"""

from __future__ import annotations

from launcher.tokens import TOKENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

HIDDEN = "[redacted]"
# The value of a variable or an option counts as a secret if one of these is a word of its name (MY_API_KEY, --auth) ...
SECRET_WORDS = (
    "APIKEY",
    "AUTH",
    "AUTHORIZATION",
    "CERT",
    "COOKIE",
    "DSN",
    "KEY",
    "KEYS",
    "PASS",
    "PAT",
    "PRIVATE",
    "PWD",
    "SIGNATURE",
)
# ... or if its name contains one of these (DBPASSWORD, accessToken). A tokenizer is none, nor is a number of tokens.
SECRET_PARTS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "APIKEY", "ACCESSKEY")
NOT_SECRET = ("PWD", "OLDPWD")  # the shell's current and last folder
KEY_BLOCK = "-----BEGIN"  # of a PEM file; hidden up to the end of the text
TOKEN_CHARACTERS = "-_.~+/="
# Shorter values are words like "true" or "0", which also occur in other text.
SHORTEST_SECRET = 6
LONGEST_VALUE = 300


def is_secret(name: str, value: str) -> bool:
    """Return whether the value of a variable or an option is a secret, by its name."""
    upper = name.upper().replace("TOKENIZER", "")
    if upper in NOT_SECRET or (upper.endswith("TOKENS") and value.isdigit()):
        return False
    words = "".join(character if character.isalnum() else " " for character in upper).split()
    return any(word in SECRET_WORDS for word in words) or any(part in upper for part in SECRET_PARTS)


def secrets(env: Mapping[str, str]) -> list[str]:
    """The values of variables with secret names, longest first; also each line of a value of several lines.

    Addresses are left out: AUTH_TYPE=127.0.0.1 must not hide the address of node 0.
    """
    found: set[str] = set()
    for name, value in env.items():
        if is_secret(name, value):
            parts = (value, value.strip(), *value.splitlines())
            found.update(part for part in parts if len(part) >= SHORTEST_SECRET and not _is_address(part))
    return sorted(found, key=len, reverse=True)


def _is_address(value: str) -> bool:
    parts = value.split(".")
    return len(parts) == 4 and all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts)


def scrub(text: str, hidden: list[str]) -> str:
    """Replace these values in a text."""
    for value in hidden:
        text = text.replace(value, HIDDEN)
    return text


def without_tokens(text: str) -> str:
    """Replace tokens of known forms, key blocks, and the user and password of URLs."""
    if KEY_BLOCK in text:
        text = text[: text.index(KEY_BLOCK)] + HIDDEN
    for prefixes, least, _, _ in TOKENS:
        for prefix in prefixes:
            if prefix in text:
                text = _without_token(text, prefix, least)
    return _without_userinfo(text) if "://" in text and "@" in text else text


def _without_token(text: str, prefix: str, least: int) -> str:
    start = text.find(prefix)
    while start >= 0:
        end = first = start + len(prefix)
        while end < len(text) and (text[end].isalnum() or text[end] in TOKEN_CHARACTERS):
            end += 1
        # "task-sk-learn" and "deyJ..." do not start a token.
        inside = start > 0 and (text[start - 1].isalnum() or text[start - 1] in "-_")
        if not inside and end - first >= least:
            text = text[:start] + HIDDEN + text[end:]
            end = start + len(HIDDEN)
        start = text.find(prefix, end)
    return text


def _without_userinfo(text: str) -> str:
    """The text with "user:password@" of each "scheme://user:password@host" replaced."""
    parts = text.split("://")
    for number, part in enumerate(parts[1:], 1):
        length = next((i for i, character in enumerate(part) if character in "/?# \t\n,\"'"), len(part))
        user, at, host = part[:length].rpartition("@")
        if at and user:
            parts[number] = HIDDEN + at + host + part[length:]
    return "://".join(parts)


def shown(name: str, value: str) -> str:
    """A variable's value for display: hidden if its name is a secret's, without tokens, shortened if it is long."""
    if is_secret(name, value):
        return HIDDEN
    value = without_tokens(value)
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
    option = ""
    for word in command:
        name, equals, value = word.partition("=")
        if option and not word.startswith("-") and is_secret(option, word):
            words.append(HIDDEN)
            option = ""
        elif equals and is_secret(name, value):
            words.append(f"{name}={HIDDEN}")
            option = ""
        else:
            words.append(shown("", word))
            option = word if word.startswith("-") and not equals else ""
    return " ".join(words)
