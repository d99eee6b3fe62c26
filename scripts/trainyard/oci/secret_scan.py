"""Find what must not be in a published image: credentials and private certificate authorities, by name and content.

The lists follow the check of AWS's deep learning containers (https://github.com/aws/deep-learning-containers,
``check_credentials.sh``) and the token formats that their issuers document. Messages name the kind of secret and its
place, never the secret.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase, translate

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

#: Credentials by their format: kind -> (fixed strings of which every match contains one, the pattern).
_TOKENS = {
    # Google's service account keys contain one too, with line ends written as \\n.
    "a private key": (
        (b"PRIVATE KEY-----",),
        rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----(?:\s|\\[nr])+[A-Za-z0-9+/=\\\s]{64,}",
    ),
    "a Google API key": ((b"AIza",), rb"\bAIza[0-9A-Za-z_-]{35}\b"),
    "a Google access token": ((b"ya29.",), rb"\bya29\.[0-9A-Za-z_-]{30,}"),
    "an AWS access key": ((b"AKIA", b"ASIA"), rb"\bA[KS]IA[0-9A-Z]{16}\b"),
    "a GitHub token": (
        (b"ghp_", b"gho_", b"ghs_", b"github_pat_"),
        rb"\b(?:gh[pos]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    ),
    "a GitLab token": ((b"glpat-",), rb"\bglpat-[A-Za-z0-9_-]{20}"),
    "a Hugging Face token": ((b"hf_",), rb"\bhf_[A-Za-z0-9]{34}\b"),
    "a Slack token": ((b"xox",), rb"\bxox[abprs]-[0-9A-Za-z-]{20,}"),
    "an npm token": ((b"npm_",), rb"\bnpm_[A-Za-z0-9]{36}\b"),
    "a PyPI token": ((b"pypi-AgE",), rb"\bpypi-AgE[A-Za-z0-9_-]{50,}"),
}
_PATTERNS = {kind: (needles, re.compile(pattern)) for kind, (needles, pattern) in _TOKENS.items()}

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
    """The kind of credential that a file of this name is, or None. ``path`` has no leading slash."""
    if path.endswith(".pub"):
        return None
    if not _ANY_CREDENTIAL_FILE.match(path):
        return None
    return next(kind for pattern, kind in CREDENTIAL_FILES.items() if fnmatchcase(path, pattern))


def in_text(data: bytes, path: str = "") -> list[str]:
    """Kinds of credentials in ``data``; ``path`` distinguishes settings files from others."""
    # Fixed strings first: 120 MB of Python sources take 1.6 s, with the patterns alone many times that.
    found = [
        kind
        for kind, (needles, pattern) in _PATTERNS.items()
        if any(needle in data for needle in needles) and pattern.search(data)
    ]
    if path.endswith(_SETTINGS) and _PASSWORD_URL.search(data):
        found.append("an address with a password")
    return found


def in_setting(name: str, value: str) -> list[str]:
    """Kinds of credentials in an environment variable, a label or a build argument."""
    found = in_text(value.encode())
    if _PASSWORD_URL.search(value.encode()):
        found.append("an address with a password")
    if value and not value.startswith("/") and _SECRET_NAME.search(name):
        found.append(f"a secret by its name ({name})")
    return found


def in_command(command: str) -> list[str]:
    """Kinds of credentials in a line of the image's history: words of the form NAME=value are settings."""
    found = in_text(command.encode())
    if _PASSWORD_URL.search(command.encode()):
        found.append("an address with a password")
    for name, value in re.findall(r"\b([A-Za-z_][A-Za-z0-9_]*)=([^\s\"';|&]+)", command):
        # A reference to another variable is not a secret.
        if not value.startswith(("$", "/")) and _SECRET_NAME.search(name):
            found.append(f"a secret by its name ({name})")
    return list(dict.fromkeys(found))


def certificates(data: bytes) -> frozenset[str]:
    """SHA-256 (hexadecimal) of every PEM certificate in ``data``, over its base64 text without white space."""
    return frozenset(_fingerprints(_CERTIFICATE.findall(data))) if b"CERTIFICATE-----" in data else frozenset()


def _fingerprints(bodies: Iterable[bytes]) -> Iterator[str]:
    for body in bodies:
        yield hashlib.sha256(b"".join(body.split())).hexdigest()
