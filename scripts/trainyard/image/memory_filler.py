"""Fill the memory of a trainer while it saves: the smoke test copies this file to its volume as sitecustomize.py.

Python imports ``sitecustomize`` at its start, from PYTHONPATH too (https://docs.python.org/3/library/site.html), and
calls a hook before it renames a file (https://docs.python.org/3/library/audit_events.html). The file ``folder`` beside
this one has the path of the checkpoints. When the trainer is about to give a new checkpoint its name there, this
program prints SAVING, waits for the file ``fill``, and takes as many bytes of memory as that file says. Then it kills
itself, if the engine has not: the checkpoint is complete on disk and has no name yet. Standard library only, Python 3.8
to 3.14.
"""

from __future__ import annotations

import os
import signal
import sys
import time

#: The line that the smoke test waits for.
SAVING = "smoke: saving a checkpoint"

_HERE = os.path.dirname(os.path.abspath(__file__))
_STEP = 1 << 20


def _read(name: str) -> str:
    with open(os.path.join(_HERE, name)) as file:
        return file.read()


def _fill() -> None:
    os.write(1, f"{SAVING}\n".encode())
    while not os.path.exists(os.path.join(_HERE, "fill")):
        time.sleep(0.02)
    taken = [b"x" * _STEP for _ in range(int(_read("fill")) // _STEP)]
    del taken
    os.kill(os.getpid(), signal.SIGKILL)


def _watch(folder: str) -> None:
    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and str(arguments[1]).startswith(folder + "/"):
            _fill()

    sys.addaudithook(hook)


if __name__ == "sitecustomize":
    _watch(_read("folder"))
