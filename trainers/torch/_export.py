"""Exporting trained PyTorch models: the weights, and programs for serving that include the preprocessing."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import warnings

import torch
from torch import nn

import trainers
from trainers.common import paths
from trainers.common.exits import UserError


def write(served: nn.Module, example: torch.Tensor, folder: str, **about: object) -> list[str]:
    """Write model.safetensors, model.pt2 (torch.export) and model.onnx into ``folder``; returns their names.

    ``served`` is moved to the CPU; its weights are those of its network ``served.model``, which model.safetensors has
    under the network's own names. ``about`` describes them: values that are no strings are stored
    as JSON. ``example`` is a batch of at least 2 images; the exported programs accept batches of any number of images.

    The files appear when all of them are complete. Without the package safetensors or onnxscript, its file is not
    written and a note says so. Raises :class:`UserError` if the folder cannot be written or the disk is full.
    """
    served = served.to("cpu", memory_format=torch.contiguous_format).eval()
    batch = {0: torch.export.Dim("batch", min=1, max=65536)}
    with torch.no_grad():
        program = torch.export.export(served, (example,), dynamic_shapes=(batch,))
    onnx = _onnx(program)
    # In memory first: PyTorch's writer aborts the process if the disk is full.
    saved = io.BytesIO()
    torch.export.save(program, saved)
    names = ["model.pt2"]
    try:
        with paths.complete_files(folder) as local:
            if _write_weights(served, os.path.join(local, "model.safetensors"), about):
                names.insert(0, "model.safetensors")
            with open(os.path.join(local, "model.pt2"), "wb") as file:
                file.write(saved.getbuffer())
            if onnx is not None:
                onnx.save(os.path.join(local, "model.onnx"))
                names.append("model.onnx")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{folder}: the model cannot be exported ({reason}); make room and run again: with --checkpoint-dir that"
            " takes the last test and the export only"
        ) from None
    return names


def _write_weights(served: nn.Module, path: str, about: dict[str, object]) -> bool:
    """Write the weights of ``served.model``; returns False without the package safetensors."""
    try:
        from safetensors.torch import save  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        print("note: model.safetensors is not written: pip install safetensors", file=sys.stderr)
        return False
    # Copies, because the format has no tensors that share memory, such as tied weights.
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in served.model.state_dict().items()}  # type: ignore[union-attr, operator, unused-ignore]
    described = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    # "format" is what Transformers and others require: https://huggingface.co/docs/safetensors/index
    metadata = {"format": "pt", **described, "trainyard": trainers.__version__, "torch": torch.__version__}
    with open(path, "wb") as file:
        file.write(save(weights, metadata))
    return True


def _onnx(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram | None:
    """``program`` for ONNX; None without the packages that this needs."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401  (the exporter's own requirement)
    except ImportError as error:
        print(f"note: model.onnx is not written: pip install {error.name}", file=sys.stderr)
        return None
    # The exporter reports its progress on stdout and through logging and warnings.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return torch.onnx.export(program, dynamo=True, input_names=["images"], output_names=["probabilities"])
        finally:
            logging.disable(logging.NOTSET)
