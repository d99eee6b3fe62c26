"""Record which files of a project its build backend opens, and which programs it starts: the container's sitecustomize.

With the names of all files they are what an answer of the backend depends on, so that it is asked again if one of them
changes. Standard library only.
"""

import os
import site
import sys

_OUT = os.environ["TRAINYARD_RECORD"]
_PROJECT = os.environ["TRAINYARD_PROJECT"] + os.sep
_file = os.open(_OUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
_known: set[bytes] = set()


def _record(event: str, arguments: tuple[object, ...]) -> None:
    subject = arguments[0] if arguments else None
    if event not in ("open", "subprocess.Popen", "os.posix_spawn", "os.exec", "os.system"):
        return
    if not isinstance(subject, str | bytes | os.PathLike):
        return
    path = os.fsdecode(subject)
    if event == "open":
        path = os.path.abspath(path)
        line = f"read {path[len(_PROJECT) :]}" if path.startswith(_PROJECT) else ""
    else:
        line = f"run {os.path.basename(path.split()[0] if path.split() else '')}"
    data = line.replace("\n", "?").encode("utf-8", "surrogateescape") + b"\n"
    if line and data not in _known:
        _known.add(data)
        os.write(_file, data)


site.addsitedir(os.environ["TRAINYARD_SITE"])
sys.addaudithook(_record)
