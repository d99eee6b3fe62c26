"""Exporting trained PyTorch models for serving, as torch.export and ONNX files that include the preprocessing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings

import torch
from torch import nn

from trainers.common import paths


def write(model: nn.Module, example: torch.Tensor, folder: str) -> list[str]:
    """Write model.pt2 (torch.export) and model.onnx into ``folder``; returns their names.

    ``model`` is on the CPU and in evaluation mode. ``example`` is a batch of at least 2 images; the exported model
    accepts batches of any number of images. Without the onnxscript package, model.onnx is not written.
    """
    names = ["model.pt2"]
    batch = {0: torch.export.Dim("batch", min=1, max=65536)}
    with paths.local_folder(folder) as local, torch.no_grad():
        program = torch.export.export(model, (example,), dynamic_shapes=(batch,))
        torch.export.save(program, os.path.join(local, names[0]))
        try:
            import onnxscript  # noqa: F401  (the exporter's own requirement)
        except ImportError:
            return names
        # The exporter reports its progress on stdout and through logging and warnings.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            try:
                onnx = torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["probabilities"])
            finally:
                logging.disable(logging.NOTSET)
        onnx.save(os.path.join(local, "model.onnx"))
    return [*names, "model.onnx"]
