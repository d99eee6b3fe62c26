"""Train in PyTorch/XLA: one process a host, and one SPMD mesh of all devices; :mod:`trainers.torch` has the models."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA logs deprecation warnings at every compilation
