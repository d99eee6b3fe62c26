"""Where Trainyard's files are, and every value that the environment may set.

Trainyard's variables are called ``TRAINYARD_<NAME>``. ``make COMMAND NAME=value`` sets the same variable: the Makefile
lists the names given on its command line in ``TRAINYARD_MAKE_VARIABLES``, and :func:`adopt_make_variables` takes them
over. Other variables of the environment (``NAME`` on WSL, a stray ``FROM``) therefore change nothing.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from pathlib import Path

PREFIX = "TRAINYARD_"

#: Variables that libraries read, so that every command takes them on make's command line; ``--json`` and TARGET too.
COMMON_VARIABLES = (
    "ARCH", "BASE", "BUILD", "BUILD_BASE", "DEBIAN_MIRROR", "IMAGE_NAME", "JSON", "OFFLINE", "PROVENANCE", "REVISION",
    "TARGET",
)  # fmt: skip

#: Variables that other programs define and that may be on make's command line too.
STANDARD_VARIABLES = re.compile(
    "SOURCE_DATE_EPOCH|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|(HTTPS?|NO|ALL)_PROXY|NO_COLOR|CI|ONLINE|SHELL|TMPDIR"
    "|(AWS|BUILDKIT|BUILDX|CLOUDSDK|COSIGN|DOCKER|GOOGLE|HYPOTHESIS|PIP|PYTEST|PYTHON|SIGSTORE|UV|XDG)_?[A-Z_]*",
    re.IGNORECASE,
)

#: The folder of the package ``trainyard``.
PACKAGE = Path(__file__).resolve().parent.parent

#: In a wheel, the folder with images/, templates/, launcher/ and trainers/; a checkout has none.
_PACKAGED = PACKAGE / "_data"

#: The checkout that this package runs from; None where it was installed from a wheel.
CHECKOUT: Path | None = None if _PACKAGED.is_dir() else PACKAGE.parent.parent

#: The folder that holds images/, templates/, launcher/ and trainers/. Never the current folder.
ROOT = CHECKOUT or _PACKAGED


#: The words that start uv; ``-P``: not a ``uv.py`` of the current folder.
UV = (sys.executable, "-P", "-m", "uv")


def variable(name: str) -> str:
    """The value of ``TRAINYARD_<name>``; empty if it is not set."""
    return os.environ.get(PREFIX + name, "")


def switch(name: str) -> bool:
    """Whether ``TRAINYARD_<name>`` is on: ``1``, ``true``, ``yes`` or ``on``."""
    return variable(name).lower() in ("1", "true", "yes", "on")


def standard_variable(name: str) -> str:
    """The value of a variable that other programs define, such as ``SOURCE_DATE_EPOCH``; empty if it is not set."""
    return os.environ.get(name, "")


def set_variable(name: str, value: str) -> None:
    """Set ``TRAINYARD_<name>`` for this process and its children."""
    os.environ[PREFIX + name] = value


def set_standard_variable(name: str, value: str) -> None:
    """Set a variable that other programs define, for this process and its children."""
    os.environ[name] = value


#: What git tells its hooks, which names another repository than a folder does (``git rev-parse --local-env-vars``).
_OF_GIT_HOOKS = re.compile(
    r"GIT_(\w*(OBJECT_DIRECTOR(Y|IES)|_TREE|_PATHSPECS)|(COMMON_)?DIR|(GRAFT|INDEX|SHALLOW)_FILE|PREFIX|NAMESPACE"
    r"|NO_REPLACE_OBJECTS|REPLACE_REF_BASE|QUARANTINE_PATH)"
)


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of this process without the variables git sets for hooks, and with ``changes``."""
    return {name: value for name, value in os.environ.items() if not _OF_GIT_HOOKS.fullmatch(name)} | changes


def adopt_make_variables() -> list[str]:
    """Set ``TRAINYARD_<NAME>`` for every variable given on make's command line; their names.

    make's own variables are removed: they would give a make that a child process calls the same variables again.
    """
    for name in ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL"):
        os.environ.pop(name, None)
    names = []
    for given in os.environ.pop(f"{PREFIX}MAKE_VARIABLES", "").split():
        if not STANDARD_VARIABLES.fullmatch(given):
            names.append(given.removeprefix(PREFIX))
            os.environ[PREFIX + names[-1]] = os.environ.get(given, "")
    return names


def make_goals() -> list[str]:
    """Return the goals of make's command line, as in ``make login push REGISTRY=...``."""
    return os.environ.pop(f"{PREFIX}MAKE_GOALS", "").split()


def program() -> str:
    """Return the command as the user can type it: by its path where it was called by one, as make does."""
    called = sys.argv[0]
    by_path = called.endswith("/trainyard") and not called.startswith("/")  # a shell makes a name of PATH absolute
    return called if by_path else "trainyard"


def state_folder() -> Path:
    """Return where results about images, file locks and logs are kept.

    ``TRAINYARD_BUILD``, else build/ of a checkout, else the user's state folder.
    """
    if folder := variable("BUILD"):
        return Path(folder)
    if CHECKOUT:
        return CHECKOUT / "build"
    # XDG base directory specification: https://specifications.freedesktop.org/basedir/latest/
    base = standard_variable("XDG_STATE_HOME")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state") / "trainyard"


def wrong_ca_bundle() -> str:
    """Return what is wrong with the CA bundle that requests reads, and its variable, in a line; empty if it is none."""
    import ssl

    name = next((name for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE") if os.environ.get(name)), "")
    try:
        if name and not os.path.isdir(os.environ[name]):
            ssl.create_default_context(cafile=os.environ[name])
    except OSError as error:
        return f"{name}={os.environ[name]} is no CA bundle ({error.strerror}): name a PEM file, or unset the variable"
    return ""


@cache
def ca_bundle() -> Path | None:
    """The host's CA bundle; None if none was found. Networks that inspect TLS need it, others accept it."""
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"):
        path = Path(os.environ.get(name) or "/nonexistent")
        if path.is_file():
            return path
    for known in ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"):
        if Path(known).is_file():
            return Path(known)
    return None
