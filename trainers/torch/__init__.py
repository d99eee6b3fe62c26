"""PyTorch trainers: one file each. They run on CPU, CUDA, torch_xla and torch_tpu; ``_select`` chooses the device."""

import os

# OpenMP reads this when torch is imported, which happens after this package. By default its threads spin while they
# wait for each other: on shared cores (a container with a CPU quota, a busy host) training was 3 to 10 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
