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

#: What assigns a value to the name before it, in the languages of settings and in Python.
_IS = r"[\"'\]\s]*(?:[=:,]|value:)\s*[\"']?"

_AWS_SECRET = r"(?![\da-f]{40})[\w+/]{40}(?![\w+/=])"
_AZURE_SECRET = r"[\w.~-]{3}\dQ~[\w.~-]{31,34}"

#: Secrets without a prefix of their own: any of the words before them, what follows, and the kind.
_IN_CONTEXT = (
    ("WANDB_API_KEY", rf"{_IS}[0-9a-f]{{40}}", "a Weights & Biases key"),
    ("wandb.ai", r"\s+login\s+\S+\s+password\s+[0-9a-f]{40}", "a Weights & Biases key"),
    ("wandb.login(", r"[^()]{0,99}\b[0-9a-f]{40}", "a Weights & Biases key"),
    ("KAGGLE_KEY", rf"{_IS}[0-9a-f]{{32}}", "a Kaggle key"),
    # https://github.com/Kaggle/kaggle-api/blob/main/docs/README.md: kaggle.json
    ('"username"', r'\s*:\s*"[^"]*"\s*,\s*"key"\s*:\s*"[0-9a-f]{32}', "a Kaggle key"),
    # https://docs.npmjs.com/cli/configuring-npm/npmrc
    (":_", r"(?:authToken|auth|password)\s*=\s*[\"']?[\w+/=.-]{20,}", "an npm credential"),
    ("NGC_API_KEY", rf"{_IS}[A-Za-z0-9]{{80,90}}", "an NVIDIA NGC key"),
    ("token_secret MODAL_TOKEN_SECRET", rf"{_IS}as-[A-Za-z0-9]{{20,}}", "a Modal token"),
    # The key of the emulator is public: https://learn.microsoft.com/en-us/azure/storage/common/storage-use-azurite
    ("AccountKey AZURE_STORAGE_KEY", rf"{_IS}(?!Eby8vdM02xNO)[A-Za-z0-9+/]{{86}}==", "an Azure storage key"),
    ("client_secret AZURE_CLIENT_SECRET", rf"{_IS}{_AZURE_SECRET}", "an Azure client secret"),
    ("secret_access_key aws_secret_access_key AWS_SECRET_ACCESS_KEY", rf"{_IS}{_AWS_SECRET}", "an AWS key"),
    # https://kubernetes.io/docs/reference/config-api/kubeconfig.v1/
    ("client-key-data", rf"{_IS}[A-Za-z0-9+/=]{{64,}}", "Kubernetes credentials"),
    ("user:", r"\s+token:\s*[\"']?[\w.-]{40,}", "Kubernetes credentials"),
    # https://github.com/docker/cli/blob/v27.0.0/cli/config/configfile/file.go
    ('auths"', r'\s*:\s*\{[^{}]*\{[^{}]*"(?:auth|identitytoken)"\s*:\s*"[\w+/=.-]{8,}', "registry credentials"),
    (".dockerconfigjson", rf"{_IS}ey[\w+/=]{{40,}}", "registry credentials"),
)

#: What documentation and tests write in the place of a secret.
_PLACEHOLDER = re.compile(rb"(.)\1{5}|12345678|abcdefg|example|your|dummy|fake|placeholder|change", re.IGNORECASE)

#: Files of variables, except those that say how to write one.
_ENVIRONMENT_FILE = re.compile(r"(?:.*/)?\.env(?:rc|[._-](?!.*(?:example|sample|template|dist|default)).+)")
_ASSIGNMENT = re.compile(
    rb"(?m)^\s*(?:export\s+)?(\w+)\s*=\s*[\"']?(?=\S*\d)(?=\S*[A-Za-z])(?!\S*\.(?:json|pem|key|txt)\b)"
    rb"([\w+=.~!@%^&*-]{8,})[\"']?\s*$"
)

#: Of rclone (https://rclone.org/docs/#configure): whatever is called so.
_RCLONE = re.compile(rb"(?m)^\s*(?:pass|password2?|key|token|\w*secret\w*|\w+_key)\s*=\s*(?![$<*]|\{\{)\S{8,}")

#: Endings of files of settings.
_SETTINGS = (".conf", ".cfg", ".list", ".sources", "/uv.toml", ".condarc", ".gitconfig", ".npmrc", "etc/environment")

#: ``scheme://user:password@host``, with groups for the last two; ``//host:443/path@v1`` has a port.
_ADDRESS = re.compile(
    rb"://(?:\{[^{}\s]*\}|[^\s/:@'\"<>])*:(?!\d{1,5}[/?#])([^\s@'\"<>]{1,200})@([A-Za-z0-9\[][\w.-]*)"
)

#: What stands for a password, and what documentation and tests have in the place of it and of the host.
_REFERENCE = re.compile(rb"\$\{?\w+\}?|\$\(.*\)|\{.*\}|%\(?\w+\)?s?|[*x.]+")
_NO_PASSWORD = re.compile(rb"(?i)(?:my)?[-_]?(?:user(?:name)?|pass(?:word|wd)?|pwd|pw|token|secret|key)")
_NO_HOST = re.compile(rb"[^.]*|127\.[\d.]+|0\.0\.0\.0|(?:.*\.)?(?:example\.\w+|[^.]+\.(?:test|invalid|local|internal))")

#: Files whose addresses of these kinds uv, pip, conda and git use, and what precedes one in a command of pip or uv.
_INDEX = re.compile(rb"(?:https?|ftp|ssh|git|(?:git|hg|svn|bzr)\+\w+)\Z")
_INSTALLED_FROM = re.compile(
    r"(?:.*/)?(?:.*(?:requirements|constraints).*\.(?:txt|in)|requirements/.*\.(?:txt|in)|pip\.ini|Pipfile|\.gitmodules"
    r"|(?:pyproject|uv|poetry|pdm|pylock.*)\.toml|(?:uv|poetry|pdm|Pipfile)\.lock|environment.*\.ya?ml"
    r"|setup\.(?:cfg|py)|tox\.ini)"
)
_PIP_OPTION = re.compile(
    rb"(?:^|\s)(?:-[efi]|--editable|--find-links|--(?:extra-)?index-url|--(?:default-)?index)[\s=]"
    rb"|\bpip[\d.]* install\s"
)

#: A reference that pip does not expand (https://pip.pypa.io/en/stable/reference/requirements-file-format/).
_NOT_EXPANDED = re.compile(rb"\$[a-z]\w*")

#: Names of variables whose value is a secret, unless it is a file's path.
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID|PRIVATE_KEY|CREDENTIALS?)$",
    re.IGNORECASE,
)

#: A header with a credential, as curl is given one: https://www.rfc-editor.org/rfc/rfc9110#name-authorization
_HEADER = re.compile(r"(?i)\bauthorization:\s*(?:basic|bearer|token)\s+(?![$<{])[\w.~+/=-]{16,}")

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
    """Return text that all matches contain, a pattern and the kinds of its groups, for each beginning of a form.

    A pattern that begins with fixed text is found fast: 200 MB of sources take 2 s. ``in`` is faster still for text
    that begins with a frequent letter; for other text it is empty.
    """
    code = ast.parse(TOKENS.read_text(encoding="utf-8")).body
    tokens = ast.literal_eval(next(one.value for one in code if isinstance(one, ast.Assign)))
    forms = [(prefix, rest, kind) for prefixes, _, rest, kind in tokens for prefix in prefixes if rest]
    beginnings: dict[str, list[tuple[str, str, str]]] = {}
    for form in (*forms, *((word, rest, kind) for words, rest, kind in _IN_CONTEXT for word in words.split(" "))):
        beginnings.setdefault(form[0][:3], []).append(form)
    found = []
    for same in beginnings.values():
        start = os.path.commonprefix([prefix for prefix, _, _ in same])  # noqa: RUF071 - not paths
        # The group is at the end: alternatives that begin with fixed text are rejected fast.
        rests = (
            f"{re.escape(one[len(start) :])}(?<![\\w-]{re.escape(one)}){rest}(?![\\w-])()" for one, rest, _ in same
        )
        pattern = re.compile(f"{re.escape(start)}(?:{'|'.join(rests)})".encode(), re.DOTALL)
        needle = start if len(start) > 3 and start[0] in "acdeilnoprstu" else ""
        found.append((needle.encode(), pattern, [kind for _, _, kind in same]))
    return found


def in_text(data: bytes, path: str = "") -> list[str]:
    """Return kinds of credentials in ``data``; ``path`` distinguishes settings files from others."""
    found = ["a private key"] if b"PRIVATE KEY-----" in data and _PRIVATE_KEY.search(data) else []
    for needle, pattern, kinds in _patterns():
        if needle in data:
            for match in pattern.finditer(data):
                found += [kinds[(match.lastindex or 1) - 1]] * (not _PLACEHOLDER.search(match[0].rpartition(b'"')[2]))
    if _ENVIRONMENT_FILE.fullmatch(path) and any(
        _SECRET_NAME.search(name.decode()) and not _PLACEHOLDER.search(value)
        for name, value in _ASSIGNMENT.findall(data)
    ):
        found.append("an environment file with secrets")
    if path.endswith("rclone.conf") and _RCLONE.search(data):
        found.append("credentials of rclone")
    if path.startswith("workspace/") or path.endswith(_SETTINGS):
        found += ["an address with a password"] * address_with_password(data, path)[1]
    return list(dict.fromkeys(found))


def address_with_password(data: bytes, path: str) -> tuple[int, bool]:
    """Return the line of an address with a password, 0 without one, and whether installers read that line or file.

    Elsewhere, addresses of documentation and tests do not count.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # as PowerShell writes what a program prints, and pip reads it
        data = data.decode("utf-16", "replace").encode()
    noted, settled, binary = 0, path.endswith(_SETTINGS), b"\0" in data
    for match in _ADDRESS.finditer(data):
        if not settled and (_NO_PASSWORD.fullmatch(match[1]) or _PLACEHOLDER.search(match[1])):
            continue
        least = max(0, match.start() - 1000)  # one line, or all lines, may have 50 MB of addresses
        before = data[max(least, data.rfind(b"\n", least, match.start()) + 1) : match.start()]
        read = path.endswith("trainyard.yaml") or (_INSTALLED_FROM.fullmatch(path) and _INDEX.search(before))
        certain = settled or read or _PIP_OPTION.search(before)
        if _REFERENCE.fullmatch(match[1]) and not (read and _NOT_EXPANDED.fullmatch(match[1])):
            continue
        if certain or not (noted or binary or b"/" in match[1] or _NO_HOST.fullmatch(match[2])):
            noted = data.count(b"\n", 0, match.start()) + 1
        if certain:
            return noted, True
    return noted, False


def _in_line(text: str) -> list[str]:
    """Return kinds of credentials in text that is no file."""
    return in_text(text.encode(), ".conf")


def in_setting(name: str, value: str) -> list[str]:
    """Return kinds of credentials in an environment variable, a label or a build argument."""
    secret = value and not value.startswith("/") and _SECRET_NAME.search(name)
    return _in_line(value) + ([f"a secret by its name ({name})"] if secret else [])


def in_command(command: str) -> list[str]:
    """Return kinds of credentials in a line of the image's history: words of the form NAME=value are settings."""
    kinds = _in_line(command) + (["a credential in a header"] if _HEADER.search(command) else [])
    for name, value in re.findall(r"\b([A-Za-z_][A-Za-z0-9_]*)=([^\s\"';|&]+)", command):
        # A reference to another variable is not a secret.
        if not value.startswith(("$", "/")) and _SECRET_NAME.search(name):
            kinds.append(f"a secret by its name ({name})")
    return list(dict.fromkeys(kinds))


def certificates(data: bytes) -> frozenset[str]:
    """Return SHA-256 (hexadecimal) of every PEM certificate in ``data``, over its base64 text without white space."""
    bodies = _CERTIFICATE.findall(data) if b"CERTIFICATE-----" in data else []
    return frozenset(hashlib.sha256(b"".join(body.split())).hexdigest() for body in bodies)
