"""Choosing the device that a PyTorch trainer runs on.

The only module that knows all implementations of :class:`trainers.torch._device.Device`; trainers get theirs here.
"""

from __future__ import annotations

import argparse
import importlib.util

import torch

from trainers.common.exits import USAGE, UserError
from trainers.torch._accelerator import Accelerator
from trainers.torch._device import Device
from trainers.torch._xla import Xla


def kind_of(args: argparse.Namespace) -> str:
    """The kind of device that ``--device`` selects: "cpu", "xla", or the type of the accelerator ("cuda", "tpu").

    ``--device auto`` prefers torch_xla if it is installed, then an accelerator, then the CPU. Raises
    :class:`UserError` if the requested device is not available.
    """
    has_xla = importlib.util.find_spec("torch_xla") is not None
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = {"cpu", *(["xla"] if has_xla else []), *([accelerator.type] if accelerator else [])}
    kind = args.device
    if kind == "auto":
        kind = "xla" if has_xla else accelerator.type if accelerator else "cpu"
    if kind not in present:
        raise UserError(f"--device {kind}: not available here; available: {', '.join(sorted(present))}", USAGE)
    return kind  # type: ignore[no-any-return]


def find(args: argparse.Namespace) -> Device:
    """The device that ``--device`` selects, initialized; raises :class:`UserError` if it is not available."""
    kind = kind_of(args)
    if kind == "xla":
        return Xla(args)
    return Device(args) if kind == "cpu" else Accelerator(args, kind)
