"""Train in JAX, on CPU, GPU and TPU: one file a trainer; ``_devices`` joins the processes and makes the mesh."""

import os

from trainers.common.flags import Flag, integer, one_of

# XLA reads it when jaxlib is imported, after this package. 2: no messages about CPU features and compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FLAGS = (
    Flag("device", one_of("auto", "cpu", "gpu", "tpu"), "auto", "auto: a TPU or GPU if JAX finds one, else the CPU"),
    Flag("num-cores", integer(0), 0, "devices of each host to use; 0: all (with --device cpu, a CPU is split into any"
         " number)"),
)  # fmt: skip
