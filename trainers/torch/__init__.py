"""PyTorch trainers: one file each. They run on CPU, CUDA, torch_xla and torch_tpu; ``_select`` chooses the device."""

import os

# OpenMP's threads spin before they sleep while they wait for each other, by default for milliseconds. On shared cores
# (a container with a CPU quota, a busy host) that made training 3 to 20 times slower; without any spinning, the short
# steps of MNIST took 1.6 times as long on idle cores. 3,000 rounds, about 50 microseconds, cost little in either case.
# libgomp reads it when torch is imported, after this package:
# https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
