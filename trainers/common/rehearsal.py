"""Rehearsals of TPU slices on CPUs, where the hosts cannot train together."""

from __future__ import annotations

import os


def follows() -> bool:
    """Whether this host of a rehearsed slice leaves logs and files to the first host.

    XLA's CPU backend has no collectives between hosts, so each host runs the same training independently. The
    launcher sets ``NODE_RANK``.
    """
    return os.environ.get("LAUNCHER_REHEARSE") == "1" and (os.environ.get("NODE_RANK") or "0") != "0"
