"""Compute Llama in plain JAX: functions of a tree of weights, each with a row for each layer; and optimizers."""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from trainers.common.files import USAGE, UserError
from trainers.common.language import Config
from trainers.jax._peers import Peers

# More layers than these are one loop of the program, whose compilation does not take longer the more there are. On a
# CPU, four layers take 60.0 ms unrolled and 72.2 ms in a loop (tiny, fp32, one thread): docs/history/trainers.md.
UNROLLED = 8
INNER_FIRST = ("self_attn.o_proj", "mlp.down_proj", "embed_tokens")  # matrices whose first dimension is the inner one


def initial(config: Config, key: jax.Array) -> dict[str, Any]:
    """Return random weights, with the names in transformers; in the layers, the first dimension is ``layers``."""
    layers, width, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    kv_width, residual = config.num_key_value_heads * config.head_dim, 0.02 / math.sqrt(2 * layers)
    keys = iter(jax.random.split(key, 9))

    def matrix(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape)

    weights = {
        "embed_tokens": matrix(config.vocab_size, width),
        "layers": {
            "input_layernorm": jnp.ones((layers, width)),
            "self_attn.q_proj": matrix(layers, width, width),
            "self_attn.k_proj": matrix(layers, width, kv_width),
            "self_attn.v_proj": matrix(layers, width, kv_width),
            "self_attn.o_proj": matrix(layers, width, width, std=residual),  # GPT-2: smaller, like down_proj, in what
            "post_attention_layernorm": jnp.ones((layers, width)),  # adds to the residual stream
            "mlp.gate_proj": matrix(layers, width, inner),
            "mlp.up_proj": matrix(layers, width, inner),
            "mlp.down_proj": matrix(layers, inner, width, std=residual),
        },
        "norm": jnp.ones(width),
    }
    return weights if config.tie_word_embeddings else {**weights, "lm_head": matrix(width, config.vocab_size)}


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Return ``x`` with a root mean square of 1, scaled; computed in float32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * scale).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + half) of ``x[batch, time, heads, head_dim]`` by angles that grow with time."""
    first, second = jnp.split(x, 2, axis=-1)
    return (x * cos + jnp.concatenate((-second, first), axis=-1) * sin).astype(x.dtype)


def logits(
    weights: dict[str, Any], idx: jax.Array, config: Config, dtype: Any, attention: str | None, recompute: bool
) -> jax.Array:
    """Return logits ``float32[batch, time, vocabulary]`` of what follows each of the tokens ``idx[batch, time]``.

    ``attention`` is an implementation of :func:`jax.nn.dot_product_attention`. With ``recompute``, the backward pass
    computes the activations of each layer again, in place of keeping them.
    """
    length, head = idx.shape[1], config.head_dim
    # Constants, by NumPy: XLA's CPU backend would compute cosines again in each layer, forward and backward, for every
    # head: 5 of 68 ms of a step of tiny.
    angles = np.outer(np.arange(length), config.rope_theta ** (-np.arange(0, head, 2) / head))
    cos, sin = (jnp.asarray(np.tile(f(angles), 2)[:, None], jnp.float32) for f in (np.cos, np.sin))

    def times(x: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
        """Multiply by matrices with the same input: one product is faster than two or three."""
        ends = np.cumsum([matrix.shape[1] for matrix in matrices[:-1]])
        return jnp.split(x @ jnp.concatenate(matrices, axis=1).astype(dtype), ends, axis=-1)

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = rms_norm(x, w["input_layernorm"], config.rms_norm_eps)
        q, k, v = (part.reshape(*x.shape[:2], -1, head) for part in times(
            y, w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"]))  # fmt: skip
        y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True,
                                         implementation=attention)  # type: ignore[arg-type]  # fmt: skip
        x = x + y.reshape(x.shape) @ w["self_attn.o_proj"].astype(dtype)
        gate, up = times(rms_norm(x, w["post_attention_layernorm"], config.rms_norm_eps), w["mlp.gate_proj"],
                         w["mlp.up_proj"])  # SwiGLU: https://arxiv.org/abs/2002.05202  # fmt: skip
        return x + (jax.nn.silu(gate) * up) @ w["mlp.down_proj"].astype(dtype), None

    layers = config.num_hidden_layers
    x, _ = jax.lax.scan(jax.checkpoint(layer) if recompute else layer, weights["embed_tokens"][idx].astype(dtype),
                        weights["layers"], unroll=layers if layers <= UNROLLED else 1)  # fmt: skip
    x = rms_norm(x, weights["norm"], config.rms_norm_eps)
    head_weights = weights["embed_tokens"].T if config.tie_word_embeddings else weights["lm_head"]
    return jnp.matmul(x, head_weights.astype(dtype), preferred_element_type=jnp.float32)


def make_optimizer(args: argparse.Namespace, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Return AdamW for all weights, or Muon for the matrices of the layers and AdamW for the others.

    Weight decay is for matrices and embeddings. Muon scales its updates to the size of AdamW's, so that both have the
    same learning rate: https://arxiv.org/abs/2502.16982
    """

    def decayed(weights: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: "norm" not in str(path[-1].key), weights)

    def label(path: tuple[Any, ...], weight: jax.Array) -> str:
        return "muon" if weight.ndim == 3 else "adamw"

    clip = optax.clip_by_global_norm(args.clip_norm) if args.clip_norm else optax.identity()
    adamw = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=args.weight_decay, mask=decayed)
    if args.optimizer == "adamw":
        return optax.chain(clip, adamw)
    each = optax.contrib.MuonDimensionNumbers(1, 2)  # the first dimension is the number of the layer
    muon = optax.contrib.muon(schedule, weight_decay=args.weight_decay, consistent_rms=0.2,
                              muon_weight_dimension_numbers=lambda some: jax.tree.map(lambda _: each, some)
                              )  # fmt: skip
    parts = optax.partition({"muon": muon, "adamw": adamw}, lambda some: jax.tree.map_with_path(label, some))
    return optax.chain(clip, parts)


def shardings(shapes: Any, peers: Peers, fsdp: bool) -> Any:
    """Return how weights, and their moments in the optimizer, are spread over the mesh, as a tree like ``shapes``.

    The heads and the inner width of a layer, and the vocabulary, are spread over the axis ``tensor``; with ``fsdp``,
    the other dimension of a matrix over ``data``. A dimension that does not divide is not spread.
    """

    def spread(path: tuple[Any, ...], array: Any) -> NamedSharding:
        name = str(getattr(path[-1], "key", ""))
        if "norm" in name or not name or array.ndim < 2:
            return peers.spread()
        axes = ["tensor", "data" if fsdp else None][:: 1 if name in INNER_FIRST else -1]
        found = [axis if axis and size % peers.mesh.shape[axis] == 0 else None
                 for axis, size in zip(axes, array.shape[-2:], strict=True)]  # fmt: skip
        return NamedSharding(peers.mesh, PartitionSpec(*[None] * (array.ndim - 2), *found))

    return jax.tree.map_with_path(spread, shapes)


def to_transformers(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return weights, by their names with slashes, as transformers has them: each layer's, with outputs first."""
    found = {}
    for name, array in weights.items():
        if name.startswith("layers/"):
            found |= {f"model.layers.{number}.{name[7:]}.weight": one.T for number, one in enumerate(array)}
        elif name == "lm_head":
            found["lm_head.weight"] = array.T
        else:
            found[f"model.{name}.weight"] = array
    return {name: np.ascontiguousarray(array) for name, array in sorted(found.items())}


def from_transformers(given: dict[str, np.ndarray], shapes: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return the weights of transformers as a tree like ``shapes``; raises :class:`UserError` if they do not fit."""

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in given:
            raise UserError(f"--init-from: its weights lack {name}", USAGE)
        array = np.asarray(given[name]).astype(np.float32)
        array = array.T if array.ndim == 2 and "embed" not in name else array
        if array.shape != shape:
            raise UserError(f"--init-from: its weight {name} has the shape {array.shape}, not {shape}", USAGE)
        return array

    layers = {name: np.stack([take(f"model.layers.{number}.{name}.weight", array.shape[1:])
                              for number in range(config.num_hidden_layers)])
              for name, array in shapes["layers"].items()}  # fmt: skip
    others = {name: take(f"{'' if name == 'lm_head' else 'model.'}{name}.weight", array.shape)
              for name, array in shapes.items() if name != "layers"}  # fmt: skip
    return {**others, "layers": layers}
