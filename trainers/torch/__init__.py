"""PyTorch trainers: one file each, on CPU, CUDA, XLA and torch_tpu through ``_device``."""

import os

# Read when torch is imported, which is after this package. OpenMP's threads spin while they wait for each other: on
# cores shared with anything else (a container with a CPU quota, a busy host) training then ran 3 to 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
