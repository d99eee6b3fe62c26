"""Run git in a user's repository, whose configuration is not trusted: it may have been unpacked from an archive."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainyard.common import settings
from trainyard.common.errors import UserError

#: Settings of a repository that name programs which commands that only read would run: a monitor of the files, hooks
#: (`git status` has one for a changed index), and the program that checks signatures for `git log`
#: (https://git-scm.com/docs/git-config, https://git-scm.com/docs/githooks#_post_index_change).
_WITHOUT_PROGRAMS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false")

#: Settings of filters, and of programs that the filter of Git LFS runs:
#: https://git-scm.com/docs/gitattributes#_filter, https://github.com/git-lfs/git-lfs/blob/main/docs/extensions.md
_FILTERS = r"^(filter|lfs\.extension)\."


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, and return its exit status and output, in English.

    Programs that the repository's configuration names are not run, and nothing is fetched. Filters are those of the
    user's and the system's configuration, as after `git lfs install`: without them, `git status` would report files of
    Git LFS as changed. It does not look into submodules, which have configurations of their own.

    Raises:
        FileNotFoundError: git is not installed.
        UserError: the repository names a filter that cannot be switched off.
    """
    name, *rest = arguments
    if name == "status":  # an option, as the setting of a submodule would precede one of the repository
        rest.insert(0, "--ignore-submodules=dirty")
    filters = _without_filters(folder) if name in ("commit", "status", "switch") else []
    return _run(folder, [*_WITHOUT_PROGRAMS, *filters], name, *rest)


def _without_filters(folder: Path) -> list[str]:
    """Return settings that replace the filters of a repository's own configuration by those from outside of it."""
    listed = _run(folder, _WITHOUT_PROGRAMS, "config", "--null", "--show-scope", "--get-regexp", _FILTERS)
    words = iter(listed.stdout.decode(errors="surrogateescape").split("\0"))
    outside, own = dict[str, str](), dict[str, str]()
    for scope, entry in zip(words, words, strict=False):
        name, _, value = entry.partition("\n")
        if scope in ("local", "worktree"):
            own[name] = "false" if name.endswith(".required") else ""
        else:
            outside[name] = value
        if "=" in name:
            raise UserError(f"{folder}: its git configuration has the filter {name!r}: remove it")
    return [f"{name}={outside.get(name, value)}" for name, value in own.items()]


def _run(folder: Path, settled: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    options = [word for setting in settled for word in ("-c", setting)]
    # What a partial clone lacks would be fetched by the programs that it names; git before 2.45 knows the second alone:
    # https://git-scm.com/docs/git#Documentation/git.txt-GITNOLAZYFETCH
    environment = settings.environment(LC_ALL="C", GIT_NO_LAZY_FETCH="1", GIT_ALLOW_PROTOCOL="none")
    command = ["git", *options, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=False, env=environment)
