"""TensorFlow trainers: one file each. They run on CPU, GPU and TPU; ``_strategy`` chooses the strategy."""

import os
import sys

# TensorFlow reads these when it is imported, which happens after this package. 2: no messages about oneDNN and CPU
# features.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

_NOISE = (b"WARNING: All log messages before absl::InitializeLog()", b"port.cc")


def import_tensorflow() -> None:
    """Import TensorFlow without the messages about oneDNN, which only disabling oneDNN would suppress.

    oneDNN is needed: without it, bfloat16 training is 30 times slower on the CPU. All other output of the import is
    passed on, and nothing is filtered if ``TF_CPP_MIN_LOG_LEVEL`` is 0 or 1. Remove this when TensorFlow logs the
    message after it has initialized its log:
    https://github.com/openxla/xla/blob/main/xla/tsl/util/port.cc
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
                if not any(known in line for known in _NOISE):
                    os.write(2, line)
