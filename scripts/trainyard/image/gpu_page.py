"""Describe docs/gpus.md: which NVIDIA GPUs each image runs on, with which drivers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.common.settings import ROOT
from trainyard.spec import gpus, matrix
from trainyard.spec.gpus import DeviceCode, Gpu
from trainyard.spec.model import Spec, each_platform

PAGE = ROOT / "docs" / "gpus.md"


def _cell(code: DeviceCode, arch: str, gpu: Gpu) -> str:
    """Return how an image runs on a GPU, with the drivers that it needs; a dash if it does not run."""
    drivers = code.drivers(gpu)
    if drivers is None or not gpu.fits(arch):
        return "-"
    least, last = drivers
    return f"{'PTX, ' if code.verdict(gpu.capability) == 'ptx' else ''}{least}{f' to {last}' if last else ''}"


def variables(specs: list[Spec]) -> dict[str, Any]:
    """Return the variables of templates/gpus.md.j2."""
    images = {}
    for spec in (each for target in specs for each in each_platform(target)):
        if code := spec.device_code:
            images[f"`{spec.target}`" + (f" {spec.arch}" if len(spec.platforms) > 1 else "")] = (code, spec.arch)
    return {
        "images": {name: code for name, (code, _) in images.items()},
        "gpus": [
            {
                "name": name,
                "capability": gpu.capability,
                "cells": [_cell(code, arch, gpu) for code, arch in images.values()],
                "has": ["yes" if gpu.has(what) else "-" for what in ("fp16", "bf16", "fp8", "triton")],
            }
            for name, gpu in gpus.gpus().items()
        ],
        "ptx": matrix.matrix().cuda.ptx,
    }


def rendered(specs: list[Spec]) -> dict[Path, tuple[str, dict[str, Any]]]:
    """Return path of the page -> its template's name and variables."""
    return {PAGE: ("gpus.md.j2", variables(specs))}
