"""Flags of all PyTorch trainers, in a module that does not import torch, so that ``--help`` is fast."""

from __future__ import annotations

from trainers.common.flags import Flag, integer, one_of

FLAGS = (
    Flag("device", one_of("auto", "cpu", "cuda", "tpu", "xla"), "auto", "auto: torch_xla if installed, else an"
         " accelerator, else the CPU; tpu: torch_tpu"),
    Flag("num-cores", integer(0), 0, "devices to use, one process each; 0: all of this machine (CPU: 1); torch_xla: one"
         " process for all devices"),
    Flag("metrics-debug", None, False, "torch_xla: print its metrics report at the end", "output"),
)  # fmt: skip
