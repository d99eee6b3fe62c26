"""TensorFlow without the chatter of its import."""

from __future__ import annotations

import os
import sys

_CHATTER = (b"WARNING: All log messages before absl::InitializeLog()", b"port.cc")


def import_tensorflow() -> None:
    """Import TensorFlow, dropping the lines about oneDNN that no setting but switching oneDNN off silences.

    oneDNN stays on: without it bfloat16 trains 30 times slower on the CPU. Anything else the import writes to
    stderr is passed on, and nothing is touched if ``TF_CPP_MIN_LOG_LEVEL`` was set to 0 or 1. Goes when
    TensorFlow logs that line (tsl/util/port.cc) after initialising its log.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") in ("0", "1"):
        return
    sys.stderr.flush()
    stderr = os.dup(2)
    held = os.memfd_create("stderr")
    os.dup2(held, 2)
    try:
        import tensorflow  # noqa: F401
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with os.fdopen(held, "rb") as file:
            file.seek(0)
            for line in file:
                if not any(known in line for known in _CHATTER):
                    os.write(2, line)
