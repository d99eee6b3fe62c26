"""The package indexes of a user's repository, as uv finds them, and the credentials that a build needs for them.

Where uv looks: https://docs.astral.sh/uv/concepts/indexes/ and https://docs.astral.sh/uv/concepts/authentication/http/.
No address with a user name or password leaves this module except in the environment of a uv process and in the text
of a netrc file, which is a BuildKit secret.
"""

from __future__ import annotations

import functools
import json
import netrc
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from trainyard.common import settings
from trainyard.common.errors import UserError
from trainyard.spec.model import RepositorySpec
from trainyard.spec.workspace import Workspace
from trainyard.workspace import requirements
from trainyard.workspace.dependency_tables import Toml, table, toml, workspace_root
from trainyard.workspace.lines import Kind, Line, expanded, is_script, userinfo, without_userinfo

#: Settings that ``index`` has replaced, and the kind of index that each names.
_FORMER_KEYS: tuple[tuple[str, Kind], ...] = (
    ("index-url", "default"), ("extra-index-url", "extra"), ("find-links", "flat"),
)  # fmt: skip

#: Seconds that a keyring may take to answer; those that ask the user unlock it within that.
_KEYRING_TIMEOUT = 60


@dataclass(frozen=True)
class Index:
    """A package index.

    Attributes:
        name: as ``[[tool.uv.index]]`` gives it, or a generated one.
        url: its address without credentials.
        kind: what uv uses it for.
        where: the file and line, or the variable, that names it.
    """

    name: str
    url: str
    kind: Kind
    where: str
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @property
    def variable(self) -> str:
        """Prefix of the variables in which uv looks for its credentials."""
        return "UV_INDEX_" + re.sub(r"[^A-Z0-9]", "_", self.name.upper())

    def page(self, name: str) -> str:
        """Return the address, with the credentials that uv finds, of what the index has of a package."""
        user, password = map(functools.partial(quote, safe=""), _credentials(self) or ("", ""))
        return f"{self.url}/{name}/".replace("://", f"://{user}:{password}@" if user or password else "://", 1)

    @property
    def unauthorized(self) -> UserError:
        """The error about an answer 401."""
        host = urlsplit(self.url).hostname
        given = "does not take the credentials that it is given" if _credentials(self) else "asks for credentials"
        return UserError(
            f"{self.where}: index '{self.name}' {given} (HTTP 401): set {self.variable}_USERNAME and "
            f"{self.variable}_PASSWORD, or name {host} in ~/.netrc"
        )


def of_project(ws: Workspace, addresses: Sequence[tuple[Kind, Line]] = ()) -> list[Index]:
    """The indexes that the repository's files name: ``addresses`` of its requirements file, then uv's settings.

    uv.toml takes the place of pyproject.toml's ``[tool.uv]``:
    https://docs.astral.sh/uv/concepts/configuration-files/

    Raises:
        UserError: an index is a folder of this machine, or a variable of its address is not set.
    """
    found = [
        _index(f"requirements-{number}", line.text, kind, line.where)
        for number, (kind, line) in enumerate(addresses, 1)
    ]
    name = ws.document.requirements.file or ""
    if is_script(name) and (ws.root / name).is_file():  # uv takes no settings of a project for a script
        source = toml(ws.root / name)
        return [*found, *_configured(source, table(source.data, "tool", "uv"))]
    owner = workspace_root(ws.root)
    folder = owner.path.parent if owner else ws.root
    for name, keys in (("uv.toml", ()), ("pyproject.toml", ("tool", "uv"))):
        if (folder / name).is_file():
            source = toml(folder / name)
            found += _configured(source, table(source.data, *keys) if keys else source.data)
            break
    return found


def of_machine() -> list[Index]:
    """The indexes of uv's variables and of the user's and the system's uv.toml, which uv itself adds when it resolves.

    Raises:
        UserError: a uv.toml is not valid.
    """
    found: list[Index] = []
    named: tuple[tuple[str, Kind], ...] = (
        ("UV_INDEX", "extra"),
        ("UV_DEFAULT_INDEX", "default"),
        ("UV_EXTRA_INDEX_URL", "extra"),
        ("UV_INDEX_URL", "default"),
    )
    for variable, kind in named:
        for number, word in enumerate(settings.standard_variable(variable).split(), 1):
            name, _, url = word.rpartition("=") if re.match(r"[\w.-]+=", word) else ("", "", word)
            found.append(_index(name or f"{variable.lower()}-{number}", url, kind, variable))
    for path in _user_files():
        if path.is_file():
            source = toml(path)
            found += _configured(source, source.data)
    return found


def _user_files() -> list[Path]:
    """https://docs.astral.sh/uv/concepts/configuration-files/."""
    if given := settings.standard_variable("UV_CONFIG_FILE"):
        return [Path(given)]
    home = settings.standard_variable("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return [Path(home) / "uv" / "uv.toml", Path("/etc/uv/uv.toml")]


def _configured(source: Toml, data: Mapping[str, Any]) -> Iterator[Index]:
    """The indexes of a ``[tool.uv]`` table or a uv.toml."""
    for number, entry in enumerate(data.get("index", []), 1):
        url = str(entry.get("url", ""))
        kind: Kind = "default" if entry.get("default") else "explicit" if entry.get("explicit") else "extra"
        if entry.get("format") == "flat":
            kind = "flat"
        yield _index(str(entry.get("name") or f"index-{number}"), url, kind, source.where(url, after="[["))
    for level in (data, table(data, "pip")):
        for key, kind in _FORMER_KEYS:
            values = level.get(key, [])
            for number, url in enumerate([values] if isinstance(values, str) else values, 1):
                yield _index(f"{key}-{number}", str(url), kind, source.where(key))


def _index(name: str, address: str, kind: Kind, where: str) -> Index:
    address = expanded(address, where)
    if urlsplit(address).scheme not in ("http", "https"):
        raise UserError(
            f"{where}: index '{name}' is no http(s) address, so a build cannot reach it: "
            "list wheels of this machine by their path"
        )
    return Index(name, without_userinfo(address), kind, where, *userinfo(address))


def default(spec: RepositorySpec) -> list[Index]:
    """Return what a repository or this machine uses in place of the default package index; none if nothing does.

    Raises:
        UserError: see :func:`of_project`.
    """
    named = [*of_machine(), *of_project(spec.workspace, requirements.index_options(spec).addresses)]
    return [index for index in named if index.kind == "default"]


def environment(indexes: Sequence[Index]) -> dict[str, str]:
    """The variables that give uv the credentials which the addresses of ``indexes`` contain."""
    found: dict[str, str] = {}
    for index in indexes:
        if index.username or index.password:
            found |= {f"{index.variable}_USERNAME": index.username, f"{index.variable}_PASSWORD": index.password}
    return found


def build_configuration(spec: RepositorySpec) -> tuple[str, str]:
    """The texts of a uv.toml and of a netrc file with which a build installs the packages of the lock.

    Both are empty if the repository uses the Python Package Index alone. The uv.toml has addresses without credentials.
    The order of the indexes decides nothing, since the lock has the hash of every file.

    Raises:
        UserError: see :func:`of_project`; or two indexes on one host have different credentials.
    """
    named = requirements.index_options(spec)
    found = [*of_machine(), *of_project(spec.workspace, named.addresses)]
    lines = []
    if hosts := named.options.get("allow-insecure-host"):
        lines.append(f"allow-insecure-host = {json.dumps(hosts)}")
    if found:
        lines.append('index-strategy = "unsafe-best-match"')
    seen: set[str] = set()
    for index in found:
        if index.url in seen or (index.kind == "default" and "default = true" in lines):
            continue
        seen.add(index.url)
        lines += ["", "[[index]]", f"url = {json.dumps(index.url)}"]
        lines += {"default": ["default = true"], "flat": ['format = "flat"']}.get(index.kind, [])
    return "\n".join([*lines, ""]) if lines else "", _netrc(found)


def _netrc(indexes: Sequence[Index]) -> str:
    """A netrc file with the credentials of the hosts of ``indexes``, and no others."""
    machines: dict[str, tuple[str, str, str]] = {}
    for index in indexes:
        credentials = _credentials(index)
        if credentials is None:
            continue
        user, password = credentials
        if re.search(r"\s", user + password):
            raise UserError(f"{index.where}: the credentials of index '{index.name}' contain a space: use a token")
        host = urlsplit(index.url).hostname or ""
        known = machines.setdefault(host, (user, password, index.name))
        if known[:2] != (user, password):
            raise UserError(
                f"{index.where}: indexes '{known[2]}' and '{index.name}' are on one host with different credentials, "
                "which a netrc file cannot hold: use credentials that are valid for both"
            )
    return "".join(f"machine {host} login {one[0]} password {one[1]}\n" for host, one in sorted(machines.items()))


def _credentials(index: Index) -> tuple[str, str] | None:
    """User name and password in uv's order: address, variables, netrc, keyring; None if there are none.

    https://docs.astral.sh/uv/concepts/authentication/http/
    """
    if index.password:
        return index.username, index.password
    user = index.username or settings.standard_variable(f"{index.variable}_USERNAME")
    password = settings.standard_variable(f"{index.variable}_PASSWORD")
    if password:
        return user, password
    host = urlsplit(index.url).hostname or ""
    if (known := _netrc_of_user(host)) and (not user or user == known[0]):
        return known
    if found := _stored(index.url, user) or _keyring(index.url, host, user):
        return found
    return (user, "") if user else None  # a token as user name


def credentials_for(url: str, indexes: Sequence[Index]) -> tuple[str, str] | None:
    """The credentials for a file of an index: those of the index on its host; None if there are none."""
    host = urlsplit(url).hostname
    fitting = [one for one in [*indexes, *of_machine()] if urlsplit(one.url).hostname == host]
    return next((found for one in fitting if (found := _credentials(one))), None)


def _netrc_of_user(host: str) -> tuple[str, str] | None:
    path = Path(settings.standard_variable("NETRC") or Path.home() / ".netrc")
    try:
        found = netrc.netrc(str(path)).authenticators(host)
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError) as error:
        line = getattr(error, "lineno", None)
        raise UserError(f"{path}{f':{line}' if line else ''}: not a netrc file that can be read") from None
    return (found[0], found[2] or "") if found else None


def _answer(command: list[str]) -> str:
    """Return a program's output, or nothing if it fails; it runs in ``/``, away from the repository's files."""
    options: dict[str, Any] = {"timeout": _KEYRING_TIMEOUT, "stdin": subprocess.DEVNULL, "cwd": "/"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip("\n") if done.returncode == 0 else ""


def _stored(url: str, user: str) -> tuple[str, str] | None:
    """Credentials of ``uv auth login``: https://docs.astral.sh/uv/concepts/authentication/cli/."""
    if not user:
        return None
    token = _answer([*settings.UV, "auth", "token", "--quiet", "--username", user, url])
    return (user, token) if token else None


def _keyring(url: str, host: str, user: str) -> tuple[str, str] | None:
    """Credentials of the keyring program, asked as uv does, if ``UV_KEYRING_PROVIDER`` is ``subprocess``.

    https://docs.astral.sh/uv/concepts/authentication/third-party/#keyring
    """
    program = shutil.which("keyring")
    if settings.standard_variable("UV_KEYRING_PROVIDER") != "subprocess" or not program:
        return None
    for service in (url, host):
        if user:
            if password := _answer([program, "get", service, user]):
                return user, password
        elif "\n" in (both := _answer([program, "--mode", "creds", "get", service])):
            name, _, password = both.partition("\n")
            return name, password
    return None
