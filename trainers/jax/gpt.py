# ruff: noqa: E402
"""Train a language model of Llama's architecture in JAX and Flax NNX, on text, from the first token on.

    python -m trainers.jax.gpt --datadir FOLDER                  # a small model of bytes, on a CPU or one accelerator
    launch gpt --datadir FOLDER --tokenizer tokenizer.json --model 124m                     # on each host of a slice
    launch gpt ... --model 1b --parallel fsdp --tensor 4

FOLDER holds text files or .jsonl. The same command continues a run from its last checkpoint, on any number of devices
for which the global batch is the same. On SIGTERM a run completes its step, saves and exits with 143. --export-dir
receives what LlamaForCausalLM.from_pretrained() of the package transformers loads.
"""

from __future__ import annotations

import argparse

from trainers.common import exits, gpt, text_data
from trainers.common.flags import Flag, integer, one_of
from trainers.common.gpt import Config
from trainers.jax import FLAGS as DEVICE_FLAGS

FLAGS = (
    Flag("parallel", one_of("data", "fsdp"), "data", "on several devices: each has the model, or a part of its weights"
         " and of the optimizer's moments (fully sharded data parallel)"),
    Flag("tensor", integer(1), 1, "devices that share each matrix (tensor parallel); the others share the batch"),
    *DEVICE_FLAGS,
)  # fmt: skip

if __name__ == "__main__":  # before jax is imported, so that --help and usage errors are immediate
    ARGS = gpt.parse("JAX", FLAGS)

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from trainers.common import order
from trainers.common.token_log import TokenLog, TokenRun
from trainers.jax import _devices
from trainers.jax._checkpoints import Checkpoints
from trainers.jax._devices import Devices

# --- the model ----------------------------------------------------------------------------------------------------


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn the pairs (i, i + half) of ``x[batch, time, heads, head_dim]`` by angles that grow with
    time: rotary positions."""
    first, second = jnp.split(x, 2, axis=-1)
    return (x * cos + jnp.concatenate((-second, first), axis=-1) * sin).astype(x.dtype)


class Attention(nnx.Module):
    """Attend to earlier tokens; heads of queries share those of keys and values if there are fewer of them."""

    def __init__(self, config: Config, linear: Any, residual: Any) -> None:
        self.head_dim, self.kv_heads = config.head_dim, config.num_key_value_heads
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj, self.k_proj = linear(width, width), linear(width, kv_width)
        self.v_proj, self.o_proj = linear(width, kv_width), residual(width, width)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        B, T, C = x.shape  # noqa: N806 - batch, time, channels
        # One product is faster than three. Joined by head of keys, the matrices stay spread as tensor parallelism does.
        kernels = [proj.kernel[...].reshape(C, self.kv_heads, -1) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        qkv = jnp.einsum("btc,chd->bthd", x, jnp.concatenate(kernels, axis=-1).astype(x.dtype))
        q, k, v = (part.reshape(B, T, -1, self.head_dim)
                   for part in jnp.split(qkv, [-2 * self.head_dim, -self.head_dim], axis=-1))  # fmt: skip
        y = jax.nn.dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.reshape(B, T, C))


class MLP(nnx.Module):
    """Apply SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config, linear: Any, residual: Any) -> None:
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = residual(config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernels = jnp.stack([self.gate_proj.kernel[...], self.up_proj.kernel[...]], axis=1)
        both = jnp.einsum("btc,cni->btni", x, kernels.astype(x.dtype))  # one product is faster than two
        return self.down_proj(nnx.silu(both[:, :, 0]) * both[:, :, 1])


class Layer(nnx.Module):
    """Add attention and MLP, each with its normalization before it, to the residual stream."""

    def __init__(self, config: Config, norm: Any, linear: Any, residual: Any) -> None:
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = Attention(config, linear, residual)
        self.mlp = MLP(config, linear, residual)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nnx.Module):
    """Predict tokens as Llama does: its parts have the names of transformers' LlamaForCausalLM."""

    def __init__(self, config: Config, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        def matrix(std: float) -> Any:
            start = nnx.initializers.normal(std)
            return lambda into, out: nnx.Linear(into, out, use_bias=False, kernel_init=start, dtype=dtype, rngs=rngs)

        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=dtype, rngs=rngs)

        # GPT-2: smaller in the two layers of a block that add to the residual stream.
        linear, residual = matrix(0.02), matrix(0.02 / math.sqrt(2 * config.num_hidden_layers))
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=dtype,
                                      embedding_init=nnx.initializers.normal(0.02), rngs=rngs)  # fmt: skip
        self.layers = nnx.List([Layer(config, norm, linear, residual) for _ in range(config.num_hidden_layers)])
        self.norm = norm()
        self.tied = config.tie_word_embeddings
        if not self.tied:
            self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.head_dim, self.theta = config.head_dim, config.rope_theta

    def __call__(self, idx: jax.Array) -> jax.Array:
        """Return logits ``float32[batch, time, vocabulary]`` of what follows each of ``idx[batch, time]``."""
        frequencies = self.theta ** (-jnp.arange(0, self.head_dim, 2) / self.head_dim)
        angles = jnp.tile(jnp.outer(jnp.arange(idx.shape[1]), frequencies), 2)[:, None]
        x = self.embed_tokens(idx)
        for layer in self.layers:
            x = layer(x, jnp.cos(angles), jnp.sin(angles))
        x = self.norm(x)
        return (self.embed_tokens.attend(x) if self.tied else self.lm_head(x)).astype(jnp.float32)


def loss_sum(model: GPT, windows: jax.Array) -> jax.Array:
    """Return the sum of the cross entropies of ``windows[batch, time + 1]``, without targets that are -1."""
    targets = windows[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(model(jnp.maximum(windows[:, :-1], 0)),
                                                             jnp.maximum(targets, 0))  # fmt: skip
    return (losses * (targets >= 0)).sum()


# --- optimizer and schedule ---------------------------------------------------------------------------------------


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """Return AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the others.

    Weight decay is for matrices and embeddings. Muon scales its updates to the size of AdamW's, so that both have the
    same learning rate: https://arxiv.org/abs/2502.16982
    """
    rates = np.array([learning_rate(step, args) for step in range(args.max_steps)], np.float32)

    def rate(step: jax.Array) -> jax.Array:
        return jnp.asarray(rates)[step]

    def decayed(params: Any) -> Any:
        return jax.tree.map(lambda weight: weight.ndim == 2, params)

    def label(path: tuple[Any, ...], weight: jax.Array) -> str:
        return "muon" if weight.ndim == 2 and names(path)[0] == "layers" else "adamw"

    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=args.weight_decay, mask=decayed)
    clip = optax.clip_by_global_norm(args.clip_norm) if args.clip_norm else optax.identity()
    if args.optimizer == "adamw":
        return optax.chain(clip, adamw)
    muon = optax.contrib.muon(rate, weight_decay=args.weight_decay, consistent_rms=0.2)
    parts = optax.partition({"muon": muon, "adamw": adamw}, lambda params: jax.tree.map_with_path(label, params))
    return optax.chain(clip, parts)


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of ``step``, from 0: linear warm-up, then a cosine to a tenth, or stable and a line to 0."""
    if step < args.warmup_steps:
        return float(args.lr * (step + 1) / args.warmup_steps)
    progress = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    if args.schedule == "cosine":
        return float(args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))))
    return float(args.lr * min(1.0, (1 - progress) / 0.2))


# --- several devices ----------------------------------------------------------------------------------------------


def names(path: tuple[Any, ...]) -> list[str]:
    """Return the keys of a path in a tree as text."""
    return [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]


def partition(path: tuple[Any, ...], shape: tuple[int, ...], device: Devices, fsdp: bool) -> PartitionSpec:
    """Return how a weight, or its moment in the optimizer, is spread over the mesh.

    The heads and the inner width of a layer, and the vocabulary, are spread over the axis ``tensor``; with ``fsdp``,
    the other dimension of a matrix over ``data``. A dimension that does not divide is not spread.
    """
    found = set(names(path))
    if len(shape) != 2 or not found & {"kernel", "embedding"}:
        return PartitionSpec()
    rows = bool(found & {"o_proj", "down_proj", "embed_tokens"})  # whose first dimension is the inner one
    axes = ["tensor", "data" if fsdp else None][:: 1 if rows else -1]
    return PartitionSpec(*(axis if axis and size % device.mesh.shape[axis] == 0 else None
                           for axis, size in zip(axes, shape, strict=True)))  # fmt: skip


def initial_state(config: Config, args: argparse.Namespace, device: Devices) -> tuple[Any, Any]:
    """Return the definition and the state of model and optimizer, each array where :func:`partition` wants it.

    No device ever holds the whole model if it is spread.
    """

    def init() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(config, device.dtype, nnx.Rngs(args.seed))
        return model, nnx.Optimizer(model, make_optimizer(args), wrt=nnx.Param)

    def spread(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(device.mesh, partition(path, array.shape, device, args.parallel == "fsdp"))

    definition, shapes = nnx.split(nnx.eval_shape(init))
    shardings = jax.tree.map_with_path(spread, shapes)
    return definition, jax.jit(lambda: nnx.split(init())[1], out_shardings=shardings)()


class Batches:
    """Cut windows of the text, on the devices: ``int32[batch, block_size + 1]``, inputs and targets."""

    def __init__(self, text: text_data.Text, args: argparse.Namespace, block_size: int, device: Devices) -> None:
        self.text, self.args, self.block_size, self.device = text, args, block_size, device
        self.size = args.batch_size * device.replicas
        self.per_epoch = text_data.windows_of(text.train, block_size)
        self.validation_windows = min(len(text.val) - 1, args.eval_tokens) // block_size
        if self.validation_windows < 1:
            raise exits.UserError(f"{len(text.val):,} tokens to validate on, or --eval-tokens {args.eval_tokens:,}, are"
                                  f" less than a window of {block_size}")  # fmt: skip

    def train(self, step: int) -> jax.Array:
        """Return the windows ``int32[accumulate, batch, block_size + 1]`` of a step: they depend on seed and step."""
        count = self.args.accumulate * self.size
        numbers = step * count + np.arange(count)
        starts = text_data.window_starts(numbers, self.per_epoch, self.block_size, self.args.seed)
        starts = starts.reshape(self.args.accumulate, self.size)
        return self.device.from_callback(
            (*starts.shape, self.block_size + 1), PartitionSpec(None, "data"),
            lambda part, rows, _: np.stack([text_data.windows(self.text.train, some, self.block_size)
                                         for some in starts[part, rows]]))  # fmt: skip

    def validation(self) -> Iterator[jax.Array]:
        """Yield the windows of the validation set, each once; those behind the last one have targets of -1."""
        for first in range(0, self.validation_windows, self.size):
            numbers = first + np.arange(self.size)
            exists = numbers < self.validation_windows
            windows = text_data.windows(self.text.val, np.where(exists, numbers, 0) * self.block_size, self.block_size)
            windows[~exists] = -1
            yield self.device.from_callback(windows.shape, PartitionSpec("data"), lambda *index: windows[index])  # noqa: B023


# --- training -----------------------------------------------------------------------------------------------------


class Trainer:
    """Hold the compiled functions of a run: a step, a validation, and the logits of a sample."""

    def __init__(self, definition: Any, state: Any, device: Devices) -> None:
        self.definition = definition
        shardings = jax.tree.map(lambda array: array.sharding, state)
        out = (shardings, device.replicated, device.replicated)
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=out)
        self.loss = jax.jit(lambda state, windows: loss_sum(self._model(state), windows),
                            out_shardings=device.replicated)  # fmt: skip
        self.logits = jax.jit(lambda state, idx, place: self._model(state)(idx)[0, place],
                              out_shardings=device.replicated)  # fmt: skip
        self.finite = jax.jit(self._finite, out_shardings=device.replicated)

    def _model(self, state: Any) -> GPT:
        model: GPT = nnx.merge(self.definition, state)[0]
        return model

    def _finite(self, state: Any) -> jax.Array:
        """Return whether all weights are."""
        return jnp.stack([jnp.isfinite(weight).all() for weight in jax.tree.leaves(state[0])]).all()

    def _step(self, state: Any, windows: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Train one step; returns the new state, the loss of the global batch, and the norm of its gradients."""
        model, optimizer = nnx.merge(self.definition, state)
        structure, params = nnx.split(model)

        def part_of_loss(params: Any, part: jax.Array) -> jax.Array:
            return loss_sum(nnx.merge(structure, params), part) / (windows[..., 1:].size)

        loss, gradients = jax.value_and_grad(part_of_loss)(params, windows[0])
        if len(windows) > 1:

            def accumulate(sums: Any, part: jax.Array) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, sums, jax.value_and_grad(part_of_loss)(params, part)), None

            (loss, gradients), _ = jax.lax.scan(accumulate, (loss, gradients), windows[1:])
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss, optax.global_norm(gradients)


def sample(
    trainer: Trainer, state: Any, tokens: list[int], count: int, vocab_size: int, block_size: int,
    temperature: float = 0.8, top_k: int = 200,
) -> list[int]:  # fmt: skip
    """Return ``count`` tokens that continue ``tokens``, the same in all processes.

    The window keeps its length, so that nothing is compiled again: what follows a token does not change its logits.
    """
    tokens, generator = list(tokens), np.random.Generator(np.random.Philox(0))
    for _ in range(count):
        window = tokens[-block_size:]
        idx = np.array([window + [0] * (block_size - len(window))], np.int32)
        logits = np.asarray(trainer.logits(state, idx, len(window) - 1), np.float64)[:vocab_size] / temperature
        logits[logits < np.sort(logits)[-min(top_k, vocab_size)]] = -np.inf
        chances = np.exp(logits - logits.max())
        tokens.append(int(generator.choice(vocab_size, p=chances / chances.sum())))
    return tokens[-count:]


def whole_weights(state: Any) -> dict[str, np.ndarray]:
    """Return the weights on the host by their names in transformers, sorted, gathered from all processes."""
    weights = {}
    for path, variable in nnx.to_flat_state(state[0]):
        array = variable.get_value()
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        *parts, kind = map(str, path)
        name = ".".join([*([] if parts[0] == "lm_head" else ["model"]), *parts, "weight"])
        weights[name] = np.ascontiguousarray(np.asarray(array).T if kind == "kernel" else np.asarray(array))
    return dict(sorted(weights.items()))


def save_safetensors(weights: dict[str, np.ndarray], path: str) -> None:
    """Write the weights into a file that transformers reads; raises ImportError without the package safetensors."""
    from safetensors.numpy import save_file

    save_file(weights, path, {"format": "pt"})


def train(args: argparse.Namespace, device: Devices, log: TokenLog) -> int:
    """Train, validate, save, export and print a sample as ``args`` say; returns the exit status."""
    text = text_data.load(args, log.say)
    order.check_alike(device, "text", str(text.fingerprints))
    config = gpt.configure(args, device.kind, text.tokenizer.vocab_size)
    if config.num_key_value_heads % args.tensor:
        raise exits.UserError(f"--tensor {args.tensor} does not divide {config.num_key_value_heads} heads of keys and"
                              " values", exits.USAGE)  # fmt: skip
    batches = Batches(text, args, config.max_position_embeddings, device)
    definition, state = initial_state(config, args, device)
    trainer = Trainer(definition, state, device)

    weights = sum(weight.size for weight in jax.tree.leaves(state[0]))
    global_batch = batches.size * args.accumulate
    log.tokens_per_step, log.flops_per_token = global_batch * batches.block_size, gpt.flops_per_token(weights, config)
    peak = gpt.peak_flops(device.name) if device.precision == "bf16" else None
    log.peak = peak and peak * device.mesh.size
    about = gpt.description("jax.gpt", args, config, global_batch, text, device.precision)
    checkpoints = Checkpoints(args, device, about, trainer.finite)
    resumed, state = checkpoints.resume(state, log.say)
    run = TokenRun(log, args, device, resumed, about)
    log.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {log.tokens_per_step:,} in a step, on"
            f" {device.mesh.size} x {device.kind} in {device.precision}")  # fmt: skip

    def validate() -> float | None:
        total = 0.0
        for windows in batches.validation():
            total += float(trainer.loss(state, windows))
            if run.stop.poll():
                return None
        return total / (batches.validation_windows * batches.block_size)

    def save(step: int, log_state: str) -> str:
        return checkpoints.save(step, state, log_state)

    for step in run.steps(validate, batches.validation_windows * batches.block_size, save):
        state, loss, norm = trainer.step(state, batches.train(step))
        run.end_step(loss, learning_rate(step, args), lambda norm=norm: float(norm))

    whole = whole_weights(state)
    if run.complete:
        if args.sample_tokens:
            beginning = text.val[: batches.block_size // 2]
            start = text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else beginning
            tokens = sample(trainer, state, [*map(int, start)], args.sample_tokens, text.tokenizer.vocab_size,
                            batches.block_size)  # fmt: skip
            log.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        if args.export_dir and device.chief:
            files = gpt.export(config, text.tokenizer, args.export_dir, lambda path: save_safetensors(whole, path))
            log.exported(args.export_dir, files)
    log.finish(run.status, run.code, _devices.sha256(whole), global_batch=global_batch)
    device.close()
    return run.code


def main(args: argparse.Namespace) -> int:
    """Join the other processes and train; returns the exit status."""
    device = Devices(args, args.tensor)
    with TokenLog("jax.gpt", args, device) as log:
        return train(args, device, log)


if __name__ == "__main__":
    _devices.main(main, ARGS, "gpt")
