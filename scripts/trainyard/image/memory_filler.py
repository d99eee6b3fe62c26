"""Fill the memory of a trainer while it saves: the smoke test copies this file to its volume as sitecustomize.py.

Python imports ``sitecustomize`` at its start, from PYTHONPATH too (https://docs.python.org/3/library/site.html), and
calls a hook before it renames a file (https://docs.python.org/3/library/audit_events.html). When the trainer is about
to give a new checkpoint its name in SMOKE_CHECKPOINTS, this program prints SAVING, waits for the file ``fill`` beside
it, and takes as many bytes of memory as that file says. Then it kills itself, if the engine has not: the checkpoint is
complete on disk and has no name yet. Standard library only, Python 3.8 to 3.14.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: The line that the smoke test waits for.
SAVING = "smoke: saving a checkpoint"

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_STEP = 1 << 20


def _fill() -> None:
    os.write(1, f"{SAVING}\n".encode())
    wanted = os.path.join(_FOLDER, "fill")
    while not os.path.exists(wanted):
        time.sleep(0.02)
    with open(wanted) as file:
        taken = [b"x" * _STEP for _ in range(int(file.read()) // _STEP)]
    del taken
    os.kill(os.getpid(), signal.SIGKILL)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.rename" and str(arguments[1]).startswith(os.environ["SMOKE_CHECKPOINTS"] + "/"):
        _fill()


if __name__ == "sitecustomize":
    sys.addaudithook(_hook)
