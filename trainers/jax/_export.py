"""Export trained JAX models: the weights, and a StableHLO program for serving that includes the preprocessing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from flax import nnx

import trainers
from trainers.common import paths
from trainers.common.exits import UserError

PLATFORMS = ("cpu", "cuda", "tpu")  # that the program runs on


def write(
    network: nnx.Module, preprocess: Callable[[jax.Array], jax.Array], example: jax.ShapeDtypeStruct, folder: str,
    **about: object,
) -> list[str]:  # fmt: skip
    """Write model.safetensors and model.stablehlo (jax.export) into ``folder``; returns their names.

    The program takes images ``[n, *example.shape]`` of ``example.dtype``, for any n, and returns the probabilities that
    ``network`` has for ``preprocess(images)``; its weights are constants in it. ``jax.export.deserialize`` reads it.
    model.safetensors has the weights under the network's own names; ``about`` describes them: values that are no
    strings are stored as JSON.

    The files appear when all of them are complete. Without the package safetensors, its file is not written and a note
    says so. Raises :class:`UserError` if the folder cannot be written or the disk is full.
    """
    network.eval()
    graphdef, state = nnx.split(network)
    state = jax.tree.map(np.asarray, state)  # off the mesh

    def serve(images: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(preprocess(images))
        return jax.nn.softmax(logits.astype(jnp.float32), axis=1)

    (count,) = jax.export.symbolic_shape("n")
    images = jax.ShapeDtypeStruct((count, *example.shape), example.dtype)
    program = jax.export.export(jax.jit(serve), platforms=PLATFORMS)(images).serialize()
    names = ["model.stablehlo"]
    try:
        with paths.complete_files(folder) as local:
            if _write_weights(state, os.path.join(local, "model.safetensors"), about):
                names.insert(0, "model.safetensors")
            with open(os.path.join(local, "model.stablehlo"), "wb") as file:
                file.write(program)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{folder}: the model cannot be exported ({reason}); make room and run again: with --checkpoint-dir that"
            " takes the last test and the export only"
        ) from None
    network.train()
    return names


def _write_weights(state: nnx.State, path: str, about: dict[str, object]) -> bool:
    """Write the arrays of ``state`` by their paths with dots; returns False without the package safetensors."""
    try:
        from safetensors.numpy import save_file
    except ImportError:
        print("note: model.safetensors is not written: pip install safetensors", file=sys.stderr)
        return False
    weights = {".".join(map(str, path)): np.ascontiguousarray(variable.get_value())
               for path, variable in nnx.to_flat_state(state)}  # fmt: skip
    described = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    save_file(weights, path, {"format": "flax", **described, "trainyard": trainers.__version__,
                              "jax": jax.__version__})  # fmt: skip
    return True
