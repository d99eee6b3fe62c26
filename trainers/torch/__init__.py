"""Train in PyTorch, on CPU, CUDA and torch_tpu: one file a trainer; ``_peers`` joins the processes."""

import contextlib
import ctypes
import os

# OpenMP's threads spin before they sleep while they wait for each other, by default for milliseconds. On shared cores
# (a container with a CPU quota, a busy host) that made training 3 to 20 times slower; without any spinning, the short
# steps of MNIST took 1.6 times as long on idle cores. 3,000 rounds, about 50 microseconds, cost little in either case.
# libgomp reads it when torch is imported, after this package:
# https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# glibc returns memory that is free at the top of the heap, and each large block, to the kernel. So each step of
# a network with large activations would fault its memory in again, page by page and cleared. 32 MB is the largest
# threshold that glibc accepts: https://man7.org/linux/man-pages/man3/mallopt.3.html
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
if not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"} & os.environ.keys():
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 << 20)
