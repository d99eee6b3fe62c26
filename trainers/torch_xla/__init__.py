"""PyTorch/XLA's trainers: one process a host, with the devices of all hosts in one SPMD mesh. Models and data are those
of :mod:`trainers.torch`."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA logs deprecation warnings at every compilation
