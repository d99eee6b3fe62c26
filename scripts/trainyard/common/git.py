"""Run git in a user's repository, whose configuration is not trusted: it may have been unpacked from an archive."""

from __future__ import annotations

import subprocess
from pathlib import Path

from trainyard.common import settings

#: Settings of a repository that name programs which commands that only read would run: a monitor of the files, hooks
#: (`git status` has one for a changed index), and the program that checks signatures for `git log`
#: (https://git-scm.com/docs/git-config, https://git-scm.com/docs/githooks#_post_index_change).
_WITHOUT_PROGRAMS = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, and return its exit status and output, in English.

    Programs that the repository's configuration names are not run, and nothing is fetched, except that `git status`
    runs the filters of .gitattributes: without them, it would report files of Git LFS as changed.

    Raises:
        FileNotFoundError: git is not installed.
    """
    options = [word for setting in _WITHOUT_PROGRAMS for word in ("-c", setting)]
    # What a partial clone lacks would be fetched by the programs that it names; git before 2.45 knows the second alone:
    # https://git-scm.com/docs/git#Documentation/git.txt-GITNOLAZYFETCH
    environment = settings.environment(LC_ALL="C", GIT_NO_LAZY_FETCH="1", GIT_ALLOW_PROTOCOL="none")
    command = ["git", *options, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=False, env=environment)
