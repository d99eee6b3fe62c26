"""Train a language model of Llama's architecture in plain JAX: one jitted function with donated state, nothing else.

``Settings()`` is the usual loop: windows cut from a mapped file for each step, optax's AdamW. The other settings put
the text on the device, join the matrices that have the same input, and make the cosines and sines of positions
constants of the program: XLA's CPU backend computes them again in each layer, forward and backward, for every head.

    python -m benchmarks.peers.jax_llama FOLDER '{"joined": true}' 60 12 64 4 128 4 0.001
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

VOCABULARY = 320  # 256 bytes and an end token, padded to a multiple of 64


@dataclass(frozen=True)
class Settings:
    """Choose one point of the grid."""

    in_memory: bool = False  # the text, as one array on the device
    joined: bool = False  # queries, keys and values in one matrix, gate and up in one
    constants: bool = False  # cosines and sines of positions


def initial(key: jax.Array, layers: int, width: int) -> Any:
    """Return the weights; matrices that have the same input are one array, which ``joined`` multiplies at once."""
    inner = 64 * math.ceil(width * 8 / 3 / 64)
    residual = 0.02 / math.sqrt(2 * layers)

    def matrix(key: jax.Array, *shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(key, shape)

    blocks = []
    for one in jax.random.split(key, layers):
        a, b, c, d = jax.random.split(one, 4)
        blocks.append({"attn": matrix(a, width, 3 * width), "proj": matrix(b, width, width, std=residual),
                       "fc": matrix(c, width, 2 * inner), "out": matrix(d, inner, width, std=residual),
                       "ln1": jnp.ones(width), "ln2": jnp.ones(width)})  # fmt: skip
    return {"embed": matrix(key, VOCABULARY, width), "blocks": blocks, "ln": jnp.ones(width)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return ``x`` with a root mean square of 1, scaled."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn by rotary positions ``x[batch, time, heads, head width]``."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate((-second, first), axis=-1) * sin


def loss_of(weights: Any, windows: jax.Array, heads: int, settings: Settings) -> jax.Array:
    """Return the mean cross entropy of ``windows[batch, time + 1]``."""

    def times(x: jax.Array, matrix: jax.Array, parts: int) -> list[jax.Array]:
        if settings.joined:
            return jnp.split(x @ matrix, parts, axis=-1)
        return [x @ part for part in jnp.split(matrix, parts, axis=-1)]

    idx, targets = windows[:, :-1], windows[:, 1:]
    x = weights["embed"][idx]
    n, length, width = x.shape
    head = width // heads
    made: Any = np if settings.constants else jnp
    angles = made.outer(made.arange(length), 10000.0 ** (-made.arange(0, head, 2) / head))
    cos, sin = (made.tile(f(angles), 2)[:, None].astype(np.float32) for f in (made.cos, made.sin))
    for block in weights["blocks"]:
        q, k, v = (part.reshape(n, length, heads, head) for part in times(norm(x, block["ln1"]), block["attn"], 3))
        y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + y.reshape(n, length, width) @ block["proj"]
        gate, up = times(norm(x, block["ln2"]), block["fc"], 2)
        x = x + (jax.nn.silu(gate) * up) @ block["out"]
    logits = norm(x, weights["ln"]) @ weights["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def train(
    folder: Path, settings: Settings, steps: int, batch: int, block: int, layers: int, width: int, heads: int,
    rate: float, warm_up: int = 10,
) -> dict[str, float]:  # fmt: skip
    """Return the tokens per second after ``warm_up`` of ``steps``, and the last loss."""
    weights = initial(jax.random.key(0), layers, width)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, 100, 2000, rate / 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, 0.9, 0.95, weight_decay=0.1))
    state = (weights, optimizer.init(weights))
    text = np.memmap(folder / "train.bin", np.uint16, "r")
    generator = np.random.default_rng(0)
    on_device = jnp.asarray(text) if settings.in_memory else None

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, windows: jax.Array, text: Any) -> tuple[Any, jax.Array]:
        if text is not None:  # windows are where they begin
            windows = text[windows[:, None] + jnp.arange(block + 1)].astype(jnp.int32)
        loss, gradients = jax.value_and_grad(loss_of)(state[0], windows, heads, settings)
        updates, moments = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), loss

    began = 0.0
    for number in range(steps):
        if number == warm_up:
            jax.block_until_ready(state)
            began = time.perf_counter()
        starts = generator.integers(0, len(text) - block - 1, batch)
        windows = starts if on_device is not None else np.stack([text[at : at + block + 1] for at in starts])
        state, loss = step(state, windows.astype(np.int32), on_device)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    return {"tokens_per_second": (steps - warm_up) * batch * block / seconds, "loss": float(loss)}


if __name__ == "__main__":
    folder, given, *numbers, rate = sys.argv[1:]
    print(json.dumps(train(Path(folder), Settings(**json.loads(given)), *map(int, numbers), float(rate))))
