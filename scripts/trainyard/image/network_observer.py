"""Write down what a Python program does: the smoke test copies this file to its volume as sitecustomize.py.

Python imports ``sitecustomize`` at its start, from PYTHONPATH too (https://docs.python.org/3/library/site.html), and
calls a hook before it resolves a name or connects (https://docs.python.org/3/library/audit_events.html). Names go to
the folder ``asked`` beside this file, a line each. With ``SMOKE_FOLDER``, the folder of the code, a thread writes down
what the main one does, a line each half second, to ``started``. Standard library only, Python 3.8 to 3.14; it never
fails, and the ``sitecustomize`` that it hides is run at its end.
"""

from __future__ import annotations

import _thread
import os
import sys
import time
from types import FrameType

_FOLDER = os.path.dirname(os.path.abspath(__file__))

#: Names that every machine of Google Cloud resolves: client libraries ask for them to find out where they run.
_EVERYWHERE = ("localhost", "metadata", "metadata.google.internal", os.uname().nodename)

_seen: set[str] = set()


def _is_outside(host: str) -> bool:
    """Whether a name or an address is one of another network."""
    if not host or host in _EVERYWHERE or host.startswith("trainyard-smoke-"):
        return False
    if ":" in host or host.replace(".", "").isdigit():
        import ipaddress

        return ipaddress.ip_address(host.partition("%")[0]).is_global
    return True


def _write(value: object) -> None:
    host = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    if not isinstance(host, str) or host in _seen:
        return
    _seen.add(host)
    if _is_outside(host.rstrip(".").lower()):
        file = os.open(os.path.join(_FOLDER, "asked", str(os.getpid())), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, host.rstrip(".").lower().encode("utf-8", "replace") + b"\n")
        os.close(file)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if not event.startswith("socket."):
        return
    try:
        if event in ("socket.getaddrinfo", "socket.gethostbyname"):
            _write(arguments[0])
        elif event == "socket.connect" and isinstance(arguments[1], tuple):
            _write(arguments[1][0])
    except Exception:  # an exception of a hook would be one of the program
        return


def _doing(frame: FrameType | None, code: str) -> str:
    """Return ``importing at FILE:LINE``, of the code that imports a module; ``running`` if none is imported."""
    importing = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(code) and "/lib/python3" not in file:  # that is a package
            return f"importing at {file}:{frame.f_lineno}" if importing else "running"
        importing = importing or file.startswith("<frozen importlib._bootstrap")
        frame = frame.f_back
    return "importing" if importing else "running"


def _watch(main: int, code: str) -> None:
    """Write down what the main thread does, until the process ends."""
    try:
        with open(os.path.join(_FOLDER, "started", f"{time.time_ns()}-{os.getpid()}"), "ab", 0) as file:
            while True:
                file.write(f"{_doing(sys._current_frames().get(main), code)}\n".encode("utf-8", "replace"))
                time.sleep(0.5)
    except Exception:  # the program has closed the file, or ends
        return


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that comes after this folder on the module path, if there is one."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    hidden = PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        module = module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.addaudithook(_hook)
    if os.environ.get("SMOKE_FOLDER"):
        _thread.start_new_thread(_watch, (_thread.get_ident(), os.environ["SMOKE_FOLDER"].rstrip("/") + "/"))
    _run_hidden()
