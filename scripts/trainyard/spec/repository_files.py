"""Write files into a user's repository, and tell which paths lead out of it: it may be somebody else's, with any links.

What is inside is the git repository, or the folder where there is none, and what a user names on the command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from pathlib import Path, PurePosixPath

from trainyard.common.errors import UserError
from trainyard.spec.yaml_source import relative

#: What the name of a file ends with until it is complete; a process that was killed leaves it.
PARTIAL = ".trainyard-partial"

#: Files of a folder that are read because of their names.
_READ = re.compile(
    r"trainyard\.yaml|pyproject\.toml|(uv|poetry|pdm)\.(lock|toml)|Pipfile(\.lock)?|pylock.*\.toml|setup\.(cfg|py)"
    r"|PKG-INFO|\.(git|docker)ignore|.*env.*\.ya?ml|.*requirements.*\.(txt|in)|pixi\.toml|cog\.yaml|apt\.txt"
    r"|Dockerfile.*|.+\.dockerfile|\.python-version|runtime\.txt"
)


def git_root(folder: Path) -> Path:
    """Return the top of the git repository that ``folder`` is in; ``folder`` itself if it is in none."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), folder)


def leads_out(path: Path, top: Path) -> bool:
    """Return whether a path leads out of the repository with the folder ``top``, as written or by symbolic links."""
    return not path.resolve().is_relative_to(top.resolve())


def inside(path: Path, folder: Path, where: str) -> Path:
    """Return a path, resolved, that is in the git repository of a folder; else raise a UserError with ``where``."""
    if leads_out(path, git_root(folder)):
        raise UserError(f"{where}: '{os.path.relpath(path, folder)}' is outside of the repository: copy it there")
    return path.resolve()


def check_links(folder: Path) -> None:
    """Raise a UserError if a file of a folder that is read because of its name is a link out of the repository."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _READ.fullmatch(path.name) and path.is_symlink() and path.is_file() and leads_out(path, git_root(folder)):
            raise UserError(f"{os.path.relpath(path)}: a symbolic link out of the repository: replace it by a file")


def write(folder: Path, name: str, text: str) -> Path:
    """Write the file ``name`` below a folder of a repository, as a whole or not at all, and return its path.

    A symbolic link in its place is replaced. Folders above it are made.

    Raises:
        UserError: a folder above it is a symbolic link, or it cannot be written.
    """
    path = folder / name
    for above in PurePosixPath(name).parents:
        if above.name and (folder / above).is_symlink():
            raise UserError(f"{os.path.relpath(folder / above)}: a symbolic link: replace it by a folder")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{relative(path)}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):  # of a disk that cannot be written, it is another one than of a missing file
            temporary.unlink()
    return path
