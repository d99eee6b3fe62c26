"""Train a language model of Llama's architecture in PyTorch, on text from the first token on, or from given weights.

    python -m trainers.torch.gpt --datadir FOLDER                  # a small model of bytes, on a CPU or one GPU
    torchrun --nproc-per-node 8 -m trainers.torch.gpt --datadir FOLDER --tokenizer tokenizer.json --model 124m
    torchrun --nproc-per-node 8 -m trainers.torch.gpt ... --model 1b --parallel fsdp --activation-checkpointing
    python -m trainers.torch.gpt --datadir FOLDER --init-from SmolLM2-135M --lr 1e-4

FOLDER holds text files, .jsonl, Parquet, or train.bin and val.bin. The same command continues a run from its last
checkpoint, with any number of processes whose global batch is the same. On SIGTERM a run completes its step, saves and
exits with 143. --export-dir receives what LlamaForCausalLM.from_pretrained() of the package transformers loads.

PyTorch takes seconds to import, and is imported in the functions that need it; the model is in _llama.py.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainers.common import language
from trainers.common.arguments import Parser, add
from trainers.common.files import USAGE, UserError
from trainers.common.job import Job

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainers.torch._llama import GPT
    from trainers.torch._peers import Peers


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = Parser("gpt", "A language model of Llama's architecture in PyTorch.")
    language.options(parser)
    run = parser.running
    add(run, "--device", "auto", "auto: a GPU if there is one, else the CPU", choices=("auto", "cpu", "cuda"))
    add(run, "--parallel", "ddp", "of several processes: each has the model, or a part of it (FSDP2)",
        choices=("ddp", "fsdp"))  # fmt: skip
    add(run, "--compile", "auto", "use torch.compile; auto: on CUDA, and not where it fails",
        choices=("auto", "on", "off"))  # fmt: skip
    add(run, "--activation-checkpointing", False, "compute activations again in the backward pass: less memory")
    add(run, "--async-save", False, "go on training while a checkpoint is written from a copy in memory")
    add(parser.learning, "--mask-documents", False, "attention does not look into the document before")
    args = parser.parse(argv)
    if args.warmup_steps >= args.max_steps:
        parser.error(f"--warmup-steps {args.warmup_steps}: must be less than --max-steps {args.max_steps}")
    if args.precision == "fp16":
        parser.error("--precision: fp16 is not one of auto, fp32, bf16")
    return args


def schedule(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate of ``step``: a linear warm-up, then a cosine to a tenth, or stable and a line to 0."""
    from trainers.torch._peers import learning_rate

    if args.schedule == "wsd" and step >= args.warmup_steps:
        return float(args.lr * min(1.0, (args.max_steps - step) / max(1, args.max_steps - args.warmup_steps) / 0.2))
    return float(args.lr * learning_rate(step, args.max_steps, args.warmup_steps, least=0.1))


class Batches:
    """Cut the text into windows on the device: inputs and targets ``int64[batch, block_size]``."""

    def __init__(self, text: language.Text, args: argparse.Namespace, block_size: int, peers: Peers) -> None:
        self.text, self.args, self.block_size, self.peers = text, args, block_size, peers
        self.per_epoch = language.windows_of(text.train, block_size)
        self.validation_windows = min(len(text.val) - 1, args.eval_tokens) // block_size
        if self.validation_windows < 1:
            raise UserError(f"{len(text.val):,} tokens to validate on, or --eval-tokens {args.eval_tokens:,}, are less"
                            f" than a window of {block_size}")  # fmt: skip
        self._reader, self._next = ThreadPoolExecutor(1), (-1, [])  # type: ignore[var-annotated]

    def _read(self, step: int, part: int) -> np.ndarray:
        size, parts = self.args.batch_size, self.args.accumulate
        first = ((step * parts + part) * self.peers.size + self.peers.rank) * size
        starts = language.window_starts(np.arange(first, first + size), self.per_epoch, self.block_size, self.args.seed)
        return language.windows(self.text.train, starts, self.block_size)

    def train(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this process's windows in each part of a step: they depend on seed and place in the global batch.

        Those of the next step are read meanwhile.
        """
        parts = range(self.args.accumulate)
        known, waiting = self._next
        current = waiting if known == step else [self._reader.submit(self._read, step, part) for part in parts]
        self._next = (step + 1, [self._reader.submit(self._read, step + 1, part) for part in parts])
        for windows in current:
            tensor = self.peers.put(windows.result())
            yield tensor[:, :-1], tensor[:, 1:]

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this process's windows of the validation set, each once. All processes have as many batches: windows
        behind the last one have the target -1."""
        size = self.args.batch_size
        for first in range(0, self.validation_windows, size * self.peers.size):
            numbers = first + self.peers.rank * size + np.arange(size)
            exists = numbers < self.validation_windows
            starts = np.where(exists, numbers, 0) * self.block_size
            windows = language.windows(self.text.val, starts, self.block_size)
            windows[~exists] = -1
            tensor = self.peers.put(windows)
            yield tensor[:, :-1].clamp(min=0), tensor[:, 1:]


def parallelize(model: GPT, args: argparse.Namespace, peers: Peers) -> nn.Module:
    """Return what trains ``model`` in all processes: itself if there is one, or if FSDP2 has split it in place."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if peers.size == 1:
        return model
    if args.parallel == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    # In bf16, only bf16 weights travel. The angles of positions stay in fp32.
    low = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = low if args.precision == "bf16" and peers.device.type == "cuda" else MixedPrecisionPolicy()
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy)
    return model


@contextlib.contextmanager
def gradient_sync(ddp: nn.Module, on: bool) -> Iterator[None]:
    """Have backward average gradients over the processes meanwhile, or (``on`` false) only add them up."""
    if hasattr(ddp, "set_requires_gradient_sync"):  # of FSDP2
        ddp.set_requires_gradient_sync(on)
    with ddp.no_sync() if hasattr(ddp, "no_sync") and not on else contextlib.nullcontext():
        yield


def train_step(
    ddp: nn.Module, optimizers: list[torch.optim.Optimizer], batches: Batches, step: int, args: argparse.Namespace,
    peers: Peers,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Train one step; returns the loss of this process's part of the global batch, and the norm of the gradients."""
    import torch

    loss = torch.zeros((), device=peers.device)
    for part, (idx, targets) in enumerate(batches.train(step)):
        with gradient_sync(ddp, on=part == args.accumulate - 1):
            with peers.autocast:
                part_loss = ddp(idx, targets) / args.accumulate
            part_loss.backward()
        loss += part_loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), args.clip_norm or math.inf)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = schedule(step, args)
        optimizer.step()
        optimizer.zero_grad()
    return loss, getattr(norm, "full_tensor", lambda: norm)()  # of the parts that FSDP2 has


def evaluate(
    model: nn.Module, batches: Batches, peers: Peers, bytes_per_token: float, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the mean loss of the validation set, every token once, and bits per byte; nothing if the run stops."""
    import torch

    total = torch.zeros(1, dtype=torch.float64, device=peers.device)
    model.eval()
    for idx, targets in batches.validation():
        with torch.no_grad(), peers.autocast:
            total += model(idx, targets, "sum")
        if stop():
            return {}
    model.train()
    loss = peers.sum(total)[0] / (batches.validation_windows * batches.block_size)
    return {"val_loss": loss, **({"bits_per_byte": loss / math.log(2) / bytes_per_token} if bytes_per_token else {})}


def sample(model: nn.Module, tokens: list[int], count: int, vocab_size: int, block_size: int, peers: Peers,
           temperature: float = 0.8, top_k: int = 200) -> list[int]:  # fmt: skip
    """Return ``count`` tokens that continue ``tokens``, the same in all processes.

    The window keeps its length, so that nothing is compiled again: what follows a token does not change its logits.
    """
    import torch
    import torch.nn.functional as F

    tokens, generator = list(tokens), torch.Generator().manual_seed(0)
    for _ in range(count):
        window = tokens[-block_size:]
        idx, last = np.array([window + [0] * (block_size - len(window))]), np.array([len(window) - 1])
        with torch.no_grad(), peers.autocast:
            logits = model(peers.put(idx))[0, peers.put(last), :vocab_size][0].float().cpu() / temperature
        logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -math.inf
        tokens.append(peers.broadcast(int(torch.multinomial(F.softmax(logits, dim=0), 1, generator=generator))))
    return tokens[-count:]


def state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what a checkpoint has: DDP, FSDP2 and any number of processes read each other's."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizers)
    return {"model": weights, "optimizer": moments}


def save(model: nn.Module, optimizers: list[torch.optim.Optimizer], later: bool, group: Any, folder: str) -> Any:
    """Write this process's part of a checkpoint; ``later``, from a copy, in a separate ``group``, while it trains."""
    import torch.distributed.checkpoint as dcp

    if later:
        return dcp.async_save(state(model, optimizers), checkpoint_id=folder, process_group=group)
    dcp.save(state(model, optimizers), checkpoint_id=folder)
    return None


def load(model: nn.Module, optimizers: list[torch.optim.Optimizer], folder: str) -> None:
    """Load a checkpoint, which any number of processes has written."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    dcp.load(saved := state(model, optimizers), checkpoint_id=folder)
    set_state_dict(model, optimizers, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])


def load_pretrained(model: GPT, folder: str) -> None:
    """Load the weights of a folder in Hugging Face's format, with the names that ``model`` has."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UserError("--init-from needs its package: pip install safetensors") from None
    weights: dict[str, torch.Tensor] = {}
    try:
        for name in sorted(os.listdir(folder)):
            weights |= load_file(os.path.join(folder, name)) if name.endswith(".safetensors") else {}
        if model.lm_head.weight is model.model.embed_tokens.weight and "model.embed_tokens.weight" in weights:
            weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model.load_state_dict({name: value for name, value in weights.items() if not name.endswith(".inv_freq")})
    except Exception as error:  # safetensors raises its own, and torch RuntimeError for other names and shapes
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"--init-from {folder}: its weights cannot be used ({lines[-1][:200]})", USAGE) from None


def export(model: nn.Module, config: language.Config, text: language.Text, folder: str) -> list[str]:
    """Write what transformers loads, and return the names; all processes gather the weights, the first writes them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if not folder:
        return []
    weights = {name: weight.contiguous() for name, weight in sorted(whole.items())
               if not (config.tie_word_embeddings and name == "lm_head.weight")}  # fmt: skip

    def write(path: str) -> None:
        from safetensors.torch import save_file

        save_file(weights, path, {"format": "pt"})

    return language.export(config, text.tokenizer, folder, write)


def prepare(args: argparse.Namespace, peers: Peers, text: language.Text, config: language.Config) -> tuple[Any, ...]:
    """Return the model, with the weights that it starts from and compiled, what trains it, and its optimizers."""
    import torch

    from trainers.torch._llama import GPT, compile_layers, make_optimizers

    cuda, block_size = peers.device.type == "cuda", config.max_position_embeddings
    # On a CPU in bf16, flash attention is slow for short windows: 5.4 to 6.8 ms forward and backward for 12 windows of
    # 64 tokens and 4 heads of 32 (AMD EPYC, torch 2.15), plain attention 3.1; for 256 tokens it is faster.
    torch.backends.cuda.enable_flash_sdp(cuda or args.precision == "fp32" or block_size > 64)  # on CPUs, too
    end = text.tokenizer.end if args.mask_documents else None
    model = GPT(config, end, args.activation_checkpointing)  # initialized on the CPU: the same on every device
    if args.init_from:
        load_pretrained(model, args.init_from)
    model.to(peers.device)
    if args.compile == "on" or (args.compile == "auto" and cuda):
        window = torch.zeros(args.batch_size, block_size, dtype=torch.int64, device=peers.device)
        if reason := compile_layers(model, window, peers):
            if args.compile == "on":
                raise UserError(f"--compile on: {reason}")
            if peers.rank == 0:
                print(f"torch.compile does not work here, steps are eager: {reason}", flush=True)
    return model, parallelize(model, args, peers), make_optimizers(model, args)


def main(args: argparse.Namespace) -> int:
    """Train, validate, save, export and print a sample as ``args`` say; returns the exit status."""
    import torch
    import torch.distributed as dist

    from trainers.torch._peers import Peers

    if args.device == "auto" and os.environ.get("PJRT_DEVICE", "").startswith("TPU"):
        raise UserError(
            "--device auto: this trainer has no TPUs: see trainers.torch_xla.gpt, or give --device cpu", USAGE
        )
    # Joins the others. A host can pack its text for longer than another.
    peers = Peers(args, timeout=1800, scaled=False)
    text = language.load(args, partial(print, flush=True) if peers.rank == 0 else lambda line: None)
    config = language.configure(args, peers.device.type, text.tokenizer.vocab_size)
    batches, bytes_per_token = Batches(text, args, config.max_position_embeddings, peers), text.bytes_per_token()
    model, ddp, optimizers = prepare(args, peers, text, config)
    weights = sum(weight.numel() for weight in model.parameters())
    global_batch = args.batch_size * args.accumulate * peers.size
    peak = language.peak_flops(torch.cuda.get_device_name(peers.device)) if peers.device.type == "cuda" else None
    full = peak * peers.size / language.flops_per_token(weights, config) if peak and args.precision == "bf16" else 0.0

    about = {"model": str(config), "optimizer": args.optimizer, "global_batch": global_batch,
             "train_tokens": len(text.train), "data": text.fingerprints}  # fmt: skip
    with Job("torch.gpt", args, peers, about, model, total=args.max_steps, every=args.eval_steps, metric="val_loss",
             count=global_batch * batches.block_size, unit="tokens", full=full) as job:  # fmt: skip
        job.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {job.count:,} in a step, on {peers.size} x"
                f" {peers.device.type} in {args.precision}")  # fmt: skip
        test = partial(evaluate, model, batches, peers, bytes_per_token, job.stop)
        group = dist.new_group(backend="gloo") if args.async_save and peers.size > 1 else None
        saving = partial(save, model, optimizers, args.async_save, group)
        step = job.resume(partial(load, model, optimizers))
        if job.due("test", step):  # --eval-only, or a run that was stopped during its last test
            job.log(step, **test())
        while not job.stop(step):
            loss, norm = train_step(ddp, optimizers, batches, step, args, peers)
            step += 1
            if job.due("log", step):
                job.log(step, loss=peers.mean(loss), lr=schedule(step - 1, args), norm=norm)
            if job.due("test", step):
                job.log(step, **test())
            if job.due("save", step):
                job.save(step, saving)
        if args.sample_tokens and not job.stop() and step >= args.max_steps:
            start = (
                text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else text.val[: batches.block_size // 2]
            )
            tokens = sample(
                model, [*map(int, start)], args.sample_tokens, text.tokenizer.vocab_size, batches.block_size, peers
            )
            job.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        return job.finish(step, partial(save, model, optimizers, False, None), partial(export, model, config, text))


if __name__ == "__main__":
    options = parse_args()
    from trainers.torch._peers import run

    run(main, options, "gpt")
