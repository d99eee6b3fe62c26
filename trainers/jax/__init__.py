"""Train in JAX, on CPU, GPU and TPU: one file a trainer; ``_peers`` joins the processes and makes the mesh."""

import os

from trainers.common.arguments import Parser, add

# XLA reads it when jaxlib is imported, after this package. 2: no messages about CPU features and compilation.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parser(prog: str, about: str) -> Parser:
    """Return a parser with the options of all trainers in JAX."""
    made = Parser(prog, about)
    add(made.running, "--device", "auto", "auto: a TPU or GPU if JAX finds one, else the CPU",
        choices=("auto", "cpu", "gpu", "tpu"))  # fmt: skip
    made._option_string_actions["--num-cores"].help = (
        "devices of each host to use; 0: all (with --device cpu, a CPU is split into any number)")  # fmt: skip
    return made
