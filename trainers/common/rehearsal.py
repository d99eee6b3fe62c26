"""Rehearsals of TPU slices on CPUs, where the hosts cannot train together."""

from __future__ import annotations

import os


def follows() -> bool:
    """Whether this host of a rehearsed slice leaves logs and files to the first one.

    XLA's CPU backend has no collectives between hosts: each host trains apart from the others, the same way, and
    does not know of them. ``NODE_RANK`` is the launcher's.
    """
    return os.environ.get("LAUNCHER_REHEARSE") == "1" and (os.environ.get("NODE_RANK") or "0") != "0"
