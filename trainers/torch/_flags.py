"""Flags of all PyTorch trainers, apart from the code they steer so that torch need not be imported first."""

from __future__ import annotations

from trainers.common.flags import Flag, one_of, whole

FLAGS = (
    Flag("device", one_of("auto", "cpu", "cuda", "tpu", "xla"), "auto", "auto: torch_xla if installed, else an"
         " accelerator, else the CPU; tpu: torch_tpu"),
    Flag("num-cores", whole(0), 0, "devices to use; 0: all of this machine's (CPU: 1), a process each; torch_xla: one"
         " process for all"),
    Flag("metrics-debug", None, False, "torch_xla: print its metrics report at the end", "output"),
)  # fmt: skip
