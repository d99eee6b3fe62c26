"""Find what must not be in a published image: credentials and private certificate authorities, by name and content.

The names of files follow the check of AWS's deep learning containers (https://github.com/aws/deep-learning-containers,
``check_credentials.sh``); the forms of tokens are those that the launcher hides (launcher/tokens.py). Messages name the
kind of secret and its place, never the secret.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from fnmatch import fnmatchcase, translate
from functools import cache

from trainyard.common import settings

#: The forms of tokens, as a literal.
TOKENS = settings.ROOT / "launcher" / "tokens.py"

#: Files that are credentials whatever their content; paths without a leading slash, ``*`` also matches slashes.
CREDENTIAL_FILES = {
    "*.aws/credentials": "AWS credentials",
    "*.boto": "boto credentials",
    "*.config/gcloud/*credentials*": "gcloud credentials",
    "*.config/gcloud/access_tokens.db": "gcloud tokens",
    "*.config/git/credentials": "git credentials",
    "*.docker/config.json": "registry credentials",
    "*.dockercfg": "registry credentials",
    "*.git-credentials": "git credentials",
    "*.git/config": "a git checkout with its history",
    "*.huggingface/token": "a Hugging Face token",
    "*.cache/huggingface/token": "a Hugging Face token",
    "*.kube/config": "Kubernetes credentials",
    "*.netrc": "netrc credentials",
    "*.pypirc": "package index credentials",
    "*.ssh/id_*": "an SSH key",
    "*.env": "an environment file",
    "*.env.local": "an environment file",
    "etc/ssl/private/*": "a private key",
    "run/secrets/*": "a build secret",
}

_ANY_CREDENTIAL_FILE = re.compile("|".join(translate(pattern) for pattern in CREDENTIAL_FILES))

# Google's service account keys contain one too, with line ends written as \\n.
_PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:\s|\\[nr])+[A-Za-z0-9+/=\\\s]{64,}")

#: Secrets without a prefix of their own, by the words before them: those, what follows, and the kind.
_IN_CONTEXT = (
    ("WANDB_API_KEY", r"[\"'\]\s]*(?:[=:,]|value:)\s*[\"']?[0-9a-f]{40}", "a Weights & Biases key"),
    ("wandb.ai", r"\s+login\s+\S+\s+password\s+[0-9a-f]{40}", "a Weights & Biases key"),
    ("wandb.login(", r"[^()]{0,99}\b[0-9a-f]{40}", "a Weights & Biases key"),
    ("KAGGLE_KEY", r"[\"'\]\s]*(?:[=:,]|value:)\s*[\"']?[0-9a-f]{32}", "a Kaggle key"),
    # https://github.com/Kaggle/kaggle-api/blob/main/docs/README.md: kaggle.json
    ('"username"', r'\s*:\s*"[^"]*"\s*,\s*"key"\s*:\s*"[0-9a-f]{32}', "a Kaggle key"),
    # https://docs.npmjs.com/cli/configuring-npm/npmrc
    (":_", r"(?:authToken|auth|password)\s*=\s*[\"']?[\w+/=.-]{20,}", "an npm credential"),
)

#: What documentation and tests write in the place of a secret.
_PLACEHOLDER = re.compile(rb"(.)\1{5}|12345678|abcdefg|example|your|dummy|fake|placeholder|change", re.IGNORECASE)

#: Files of variables, except those that say how to write one.
_ENVIRONMENT_FILE = re.compile(r"(?:.*/)?\.env(?:rc|[._-](?!.*(?:example|sample|template|dist|default)).+)")
_ASSIGNMENT = re.compile(
    rb"(?m)^\s*(?:export\s+)?(\w+)\s*=\s*[\"']?(?=\S*\d)(?=\S*[A-Za-z])(?!\S*\.(?:json|pem|key|txt)\b)"
    rb"([\w+=.~!@%^&*-]{8,})[\"']?\s*$"
)

#: ``scheme://user:password@host``. Sources and manuals contain examples, so only settings are searched.
_PASSWORD_URL = re.compile(rb"\b[a-z][a-z0-9+.-]*://[^\s/:@'\"<>{}$]+:[^\s/:@'\"<>{}$*]+@[A-Za-z0-9]")
_SETTINGS = (".conf", ".cfg", ".list", ".sources", "/uv.toml", ".condarc", ".gitconfig", ".npmrc", "etc/environment")

#: Names of variables whose value is a secret, unless it is a file's path.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|PRIVATE_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)

#: Variables that point tools to a CA bundle of the build host's network.
CA_VARIABLES = frozenset(
    {
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "PIP_CERT",
        "NODE_EXTRA_CA_CERTS",
        "GIT_SSL_CAINFO",
        "AWS_CA_BUNDLE",
        "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
        "NIX_SSL_CERT_FILE",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
    }
)

_CERTIFICATE = re.compile(
    rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----\s+([A-Za-z0-9+/=\s]+?)-----END (?:TRUSTED )?CERTIFICATE-----"
)


def in_name(path: str) -> str | None:
    """Return the kind of credential that a file of this name is, or None. ``path`` has no leading slash."""
    if path.endswith(".pub") or not _ANY_CREDENTIAL_FILE.match(path):
        return None
    return next(kind for pattern, kind in CREDENTIAL_FILES.items() if fnmatchcase(path, pattern))


@cache
def _patterns() -> list[tuple[bytes, re.Pattern[bytes], list[str]]]:
    """Return text that all matches contain, a pattern and the kinds of its groups, for each first letter of a form.

    A pattern that begins with fixed text is found fast: 200 MB of sources take 2 s. ``in`` is faster still for text
    that begins with a frequent letter; for other text it is empty.
    """
    code = ast.parse(TOKENS.read_text(encoding="utf-8")).body
    tokens = ast.literal_eval(next(one.value for one in code if isinstance(one, ast.Assign)))
    forms = [(prefix, rest, kind) for prefixes, _, rest, kind in tokens for prefix in prefixes if rest]
    letters: dict[str, list[tuple[str, str, str]]] = {}
    for form in (*forms, *_IN_CONTEXT):
        letters.setdefault(form[0][0], []).append(form)
    found = []
    for letter, same in letters.items():
        start = os.path.commonprefix([prefix for prefix, _, _ in same])  # noqa: RUF071 - not paths
        # The group is at the end: alternatives that begin with fixed text are rejected fast.
        rests = (
            f"{re.escape(one[len(start) :])}(?<![\\w-]{re.escape(one)}){rest}(?![\\w-])()" for one, rest, _ in same
        )
        pattern = re.compile(f"{re.escape(start)}(?:{'|'.join(rests)})".encode(), re.DOTALL)
        needle = start if len(start) > 3 and letter in "acdeilnoprstu" else ""
        found.append((needle.encode(), pattern, [kind for _, _, kind in same]))
    return found


def in_text(data: bytes, path: str = "") -> list[str]:
    """Return kinds of credentials in ``data``; ``path`` distinguishes settings files from others."""
    found = ["a private key"] if b"PRIVATE KEY-----" in data and _PRIVATE_KEY.search(data) else []
    for needle, pattern, kinds in _patterns():
        if needle in data:
            matches = [match for match in pattern.finditer(data) if not _PLACEHOLDER.search(match[0])]
            found += [kinds[(match.lastindex or 1) - 1] for match in matches]
    if _ENVIRONMENT_FILE.fullmatch(path) and any(
        _SECRET_NAME.search(name.decode()) and not _PLACEHOLDER.search(value)
        for name, value in _ASSIGNMENT.findall(data)
    ):
        found.append("an environment file with secrets")
    if path.endswith(_SETTINGS) and _PASSWORD_URL.search(data):
        found.append("an address with a password")
    return list(dict.fromkeys(found))


def _in_line(text: str) -> list[str]:
    """Return kinds of credentials in text that is no file."""
    password = ["an address with a password"] if _PASSWORD_URL.search(text.encode()) else []
    return in_text(text.encode()) + password


def in_setting(name: str, value: str) -> list[str]:
    """Return kinds of credentials in an environment variable, a label or a build argument."""
    secret = value and not value.startswith("/") and _SECRET_NAME.search(name)
    return _in_line(value) + ([f"a secret by its name ({name})"] if secret else [])


def in_command(command: str) -> list[str]:
    """Return kinds of credentials in a line of the image's history: words of the form NAME=value are settings."""
    kinds = _in_line(command)
    for name, value in re.findall(r"\b([A-Za-z_][A-Za-z0-9_]*)=([^\s\"';|&]+)", command):
        # A reference to another variable is not a secret.
        if not value.startswith(("$", "/")) and _SECRET_NAME.search(name):
            kinds.append(f"a secret by its name ({name})")
    return list(dict.fromkeys(kinds))


def certificates(data: bytes) -> frozenset[str]:
    """Return SHA-256 (hexadecimal) of every PEM certificate in ``data``, over its base64 text without white space."""
    bodies = _CERTIFICATE.findall(data) if b"CERTIFICATE-----" in data else []
    return frozenset(hashlib.sha256(b"".join(body.split())).hexdigest() for body in bodies)
