"""Train in TensorFlow, on CPU, GPU and TPU: one file a trainer, on Keras' ``model.fit``."""

import os
import sys

from trainers.common import arguments

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


class Parser(arguments.Parser):
    """Parse the options of all TensorFlow trainers."""

    def __init__(self, prog: str, about: str) -> None:
        super().__init__(prog, about)
        arguments.add(self.running, "--strategy", "auto", "of tf.distribute; auto: multiworker with a TF_CONFIG of"
                      " several workers, tpu with a TPU, mirrored with several GPUs, else one",
                      choices=("auto", "one", "mirrored", "multiworker", "tpu"))  # fmt: skip
        arguments.add(self.running, "--jit-compile", False, "compile steps with XLA; on one device only, always on for"
                      " TPUs")  # fmt: skip
