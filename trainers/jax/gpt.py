"""Train a language model of Llama's architecture in JAX, on text from the first token on, or from given weights.

    python -m trainers.jax.gpt --datadir FOLDER                  # a small model of bytes, on a CPU or one accelerator
    launch gpt --datadir FOLDER --tokenizer tokenizer.json --model 124m                     # on each host of a slice
    launch gpt ... --model 1b --parallel fsdp --tensor 4 --activation-checkpointing
    python -m trainers.jax.gpt --datadir FOLDER --init-from SmolLM2-135M --lr 1e-4

FOLDER holds text files, .jsonl, Parquet, or train.bin and val.bin. The same command continues a run from its last
checkpoint, on any number of devices for which the global batch is the same. On SIGTERM a run completes its step, saves
and exits with 143. --export-dir receives what LlamaForCausalLM.from_pretrained() of the package transformers loads.

JAX takes seconds to import, and is imported in the functions that need it; the model is in _llama.py.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import files, language
from trainers.common.arguments import add, integer
from trainers.common.files import USAGE, UserError
from trainers.common.job import Job
from trainers.jax import parser

if TYPE_CHECKING:
    import jax
    import optax

    from trainers.jax._peers import Peers

State = dict[str, Any]  # "weights" and "optimizer": trees of arrays


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    options = parser("gpt", "A language model of Llama's architecture in JAX.")
    language.options(options)
    run = options.running
    add(run, "--parallel", "data", "on several devices: each has the model, or a part of its weights and of the"
        " optimizer's moments", choices=("data", "fsdp"))  # fmt: skip
    add(run, "--tensor", 1, "devices that share each matrix; the others share the batch", type=integer(1))
    add(run, "--activation-checkpointing", False, "compute activations again in the backward pass: less memory")
    args = options.parse(argv)
    if args.warmup_steps >= args.max_steps:
        options.error(f"--warmup-steps {args.warmup_steps}: must be less than --max-steps {args.max_steps}")
    return args


def schedule_of(args: argparse.Namespace) -> optax.Schedule:
    """Return the learning rate by the number of steps: a warm-up, then a cosine to a tenth, or a line at the end."""
    import optax

    peak, warmup, total = args.lr, float(args.warmup_steps), float(args.max_steps)  # more than int32 has, too
    if args.schedule == "wsd":
        last = max(1.0, (total - warmup) // 5)
        parts = [optax.linear_schedule(0.0, peak, max(1.0, warmup)), optax.constant_schedule(peak),
                 optax.linear_schedule(peak, 0.0, last)]  # fmt: skip
        schedule = optax.join_schedules(parts, [warmup, total - last])
    else:
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total, peak / 10)
    return lambda step: schedule(step + 0.5)  # in the middle of a step: none has the rate 0


class Batches:
    """Cut the text into windows, on the devices: ``int32[batch, block_size + 1]``, inputs and targets."""

    def __init__(self, text: language.Text, args: argparse.Namespace, block_size: int, peers: Peers) -> None:
        self.text, self.args, self.block_size, self.peers = text, args, block_size, peers
        self.size = args.batch_size * peers.replicas
        self.per_epoch = language.windows_of(text.train, block_size)
        self.validation_windows = min(len(text.val) - 1, args.eval_tokens) // block_size
        if self.validation_windows < 1:
            raise UserError(f"{len(text.val):,} tokens to validate on, or --eval-tokens {args.eval_tokens:,}, are less"
                            f" than a window of {block_size}")  # fmt: skip

    def _put(self, tokens: np.ndarray, starts: np.ndarray, *axes: str | None) -> jax.Array:
        """Return the windows that begin at ``starts``; each host reads what its devices have. Behind the text: -1."""
        import jax

        def part(index: tuple[slice, ...]) -> np.ndarray:
            some = starts[index[:-1]]
            windows = language.windows(tokens, np.maximum(some.ravel(), 0), self.block_size)
            windows[some.ravel() < 0] = -1
            return windows.astype(np.int32).reshape(*some.shape, -1)

        shape = (*starts.shape, self.block_size + 1)
        return jax.make_array_from_callback(shape, self.peers.spread(*axes), part)

    def train(self, step: int) -> jax.Array:
        """Return the windows ``int32[accumulate, batch, block_size + 1]`` of a step: they depend on seed and step."""
        count = self.args.accumulate * self.size
        starts = language.window_starts(step * count + np.arange(count), self.per_epoch, self.block_size,
                                        self.args.seed)  # fmt: skip
        return self._put(self.text.train, starts.reshape(-1, self.size), None, "data")

    def validation(self) -> Iterator[jax.Array]:
        """Yield the windows of the validation set, each once; those behind the last one fill the last batch with -1."""
        for first in range(0, self.validation_windows, self.size):
            numbers = first + np.arange(self.size)
            starts = np.where(numbers < self.validation_windows, numbers * self.block_size, -1)
            yield self._put(self.text.val, starts, "data")


def loss_sum(logits: Callable[..., jax.Array], weights: Any, windows: jax.Array) -> jax.Array:
    """Return the sum of the cross entropies of ``windows[batch, time + 1]``, without targets that are -1."""
    import jax.numpy as jnp
    import optax

    targets = windows[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(weights, jnp.maximum(windows[:, :-1], 0)),
                                                             jnp.maximum(targets, 0))  # fmt: skip
    return (losses * (targets >= 0)).sum()


def train_step(
    logits: Callable[..., jax.Array], optimizer: optax.GradientTransformation, state: State, windows: jax.Array
) -> tuple[State, jax.Array, jax.Array]:
    """Return the new state, the loss of ``windows[parts, batch, time + 1]``, and the norm of the gradients."""
    import jax
    import jax.numpy as jnp
    import optax

    def part_of_loss(weights: Any, part: jax.Array) -> jax.Array:
        return loss_sum(logits, weights, part) / windows[..., 1:].size

    def accumulate(sums: Any, part: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(part_of_loss)(state["weights"], part)), None

    found = jax.value_and_grad(part_of_loss)(state["weights"], windows[0])
    (loss, gradients), _ = jax.lax.scan(accumulate, found, windows[1:]) if len(windows) > 1 else (found, None)
    updates, moments = optimizer.update(gradients, state["optimizer"], state["weights"])
    weights = optax.apply_updates(state["weights"], updates)
    return {"weights": weights, "optimizer": moments}, loss, optax.global_norm(gradients)


def evaluate(
    loss: Callable[..., jax.Array], state: State, batches: Batches, bytes_per_token: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the mean loss of the validation set, every token once, and bits per byte; nothing if the run stops."""
    total = 0.0
    for windows in batches.validation():
        total += float(loss(state["weights"], windows))
        if stop():
            return {}
    mean = total / (batches.validation_windows * batches.block_size)
    return {"val_loss": mean, **({"bits_per_byte": mean / math.log(2) / bytes_per_token} if bytes_per_token else {})}


def sample(
    logits: Callable[..., jax.Array], weights: Any, tokens: list[int], count: int, vocab_size: int, block_size: int,
    temperature: float = 0.8, top_k: int = 200,
) -> list[int]:  # fmt: skip
    """Return ``count`` tokens that continue ``tokens``, the same in all processes.

    The window keeps its length, so that nothing is compiled again: what follows a token does not change its logits.
    """
    tokens, generator = list(tokens), np.random.Generator(np.random.Philox(0))
    for _ in range(count):
        window = tokens[-block_size:]
        idx = np.array([window + [0] * (block_size - len(window))], np.int32)
        found = np.asarray(logits(weights, idx)[0, len(window) - 1], np.float64)[:vocab_size] / temperature
        found[found < np.sort(found)[-min(top_k, vocab_size)]] = -np.inf
        chances = np.exp(found - found.max())
        tokens.append(int(generator.choice(vocab_size, p=chances / chances.sum())))
    return tokens[-count:]


def save(state: State, checkpointer: Any, pool: ThreadPoolExecutor, folder: str) -> Future[None]:
    """Copy this process's part of a checkpoint, which is written while the training goes on, also to gs://."""
    checkpointer.save(files.join(folder, "state"), state, force=True)  # also over a damaged one
    return pool.submit(checkpointer.wait_until_finished)


def load(state: State, checkpointer: Any, folder: str) -> None:
    """Load a checkpoint, which any number of devices has written."""
    state.update(checkpointer.restore(files.join(folder, "state"), state))


def load_pretrained(folder: str, shapes: dict[str, Any], config: language.Config) -> dict[str, Any]:
    """Return the weights of a folder in Hugging Face's format, as a tree like ``shapes``."""
    from trainers.jax._llama import from_transformers

    try:
        from safetensors.flax import load_file  # NumPy has no bf16
    except ImportError:
        raise UserError("--init-from needs its package: pip install safetensors") from None
    given: dict[str, Any] = {}
    try:
        for name in sorted(os.listdir(folder)):
            given |= load_file(os.path.join(folder, name)) if name.endswith(".safetensors") else {}
    except Exception as error:  # safetensors raises its own
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"--init-from {folder}: its weights cannot be used ({reason[:200]})", USAGE) from None
    return from_transformers(given, shapes, config)


def initial_state(
    args: argparse.Namespace, config: language.Config, optimizer: optax.GradientTransformation, peers: Peers
) -> State:
    """Return weights and optimizer, each array where it shall be: no device ever holds a whole model that is spread."""
    import jax

    from trainers.jax import _llama

    def start(key: jax.Array) -> State:
        weights = _llama.initial(config, key)
        return {"weights": weights, "optimizer": optimizer.init(weights)}

    key = jax.random.key(args.seed)
    spread = _llama.shardings(shapes := jax.eval_shape(start, key), peers, args.parallel == "fsdp")
    state: State = jax.jit(start, out_shardings=spread)(key)
    if args.init_from:
        given = load_pretrained(args.init_from, shapes["weights"], config)
        state["weights"] = jax.tree.map(jax.device_put, given, spread["weights"])
    return state


def main(args: argparse.Namespace) -> int:
    """Train, validate, save, export and print a sample as ``args`` say; returns the exit status."""
    import jax
    import orbax.checkpoint as ocp

    from trainers.jax import _llama
    from trainers.jax._peers import Peers, named, whole

    peers = Peers(args, args.tensor)  # joins the other processes
    text = language.load(args, partial(print, flush=True) if peers.rank == 0 else lambda line: None)
    config = language.configure(args, peers.kind, text.tokenizer.vocab_size)
    if config.num_key_value_heads % args.tensor:
        raise UserError(f"--tensor {args.tensor} does not divide {config.num_key_value_heads} heads of keys and values",
                        USAGE)  # fmt: skip
    batches, bytes_per_token = Batches(text, args, config.max_position_embeddings, peers), text.bytes_per_token()
    schedule = schedule_of(args)
    optimizer = _llama.make_optimizer(args, schedule)
    state = initial_state(args, config, optimizer, peers)
    attention = peers.attention(config.num_attention_heads, config.head_dim)
    logits = partial(_llama.logits, config=config, dtype=peers.dtype, attention=attention,
                     recompute=args.activation_checkpointing)  # fmt: skip
    spread, one = jax.tree.map(lambda array: array.sharding, state), peers.spread()
    step_of = jax.jit(partial(train_step, logits, optimizer), donate_argnums=0, out_shardings=(spread, one, one))
    loss_of = jax.jit(partial(loss_sum, logits), out_shardings=one)
    weights = sum(array.size for array in jax.tree.leaves(state["weights"]))
    global_batch, devices = batches.size * args.accumulate, peers.mesh.size
    peak = language.peak_flops(peers.device_name) if args.precision == "bf16" else None
    full = peak * devices / language.flops_per_token(weights, config) if peak else 0.0

    def export(folder: str) -> list[str]:  # all processes gather the weights, the first one writes them
        found = _llama.to_transformers({name: whole(array) for name, array in named(state)})

        def write(path: str) -> None:
            from safetensors.numpy import save_file

            save_file(found, path, {"format": "pt"})

        return language.export(config, text.tokenizer, folder, write) if folder else []

    about = {"model": str(config), "optimizer": args.optimizer, "global_batch": global_batch,
             "train_tokens": len(text.train), "data": text.fingerprints}  # fmt: skip
    with Job("jax.gpt", args, peers, about, state, total=args.max_steps, every=args.eval_steps, metric="val_loss",
             count=global_batch * batches.block_size, unit="tokens", full=full) as job:  # fmt: skip
        job.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {job.count:,} in a step, on {devices} x"
                f" {peers.kind} in {args.precision}")  # fmt: skip
        checkpointer = ocp.StandardCheckpointer()
        test = partial(evaluate, loss_of, state, batches, bytes_per_token, job.stop)
        saving = partial(save, state, checkpointer, ThreadPoolExecutor(1))
        step = job.resume(partial(load, state, checkpointer))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        windows = batches.train(step)
        while not job.stop(step):
            new, loss, norm = step_of(dict(state), windows)
            state.update(new)
            step += 1
            windows = batches.train(step)  # while the devices work
            if job.due("log", step):
                job.log(step, loss=loss, lr=schedule(step - 1), norm=norm)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, saving)
        if args.sample_tokens and not job.stop() and step >= args.max_steps:
            beginning = text.val[: batches.block_size // 2]
            start = text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else beginning
            tokens = sample(jax.jit(logits, out_shardings=one), state["weights"], [*map(int, start)],
                            args.sample_tokens, text.tokenizer.vocab_size, batches.block_size)  # fmt: skip
            job.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        return job.finish(step, saving, export)


if __name__ == "__main__":
    arguments = parse_args()
    from trainers.jax._peers import run

    run(main, arguments, "gpt")
