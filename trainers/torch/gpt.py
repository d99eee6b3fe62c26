# ruff: noqa: E402
"""A language model in PyTorch: Llama's architecture, trained on text from the first token on.

    python -m trainers.torch.gpt --datadir FOLDER                  # a small model of bytes, on a CPU or one GPU
    torchrun --nproc-per-node 8 -m trainers.torch.gpt --datadir FOLDER --tokenizer tokenizer.json --model 124m
    torchrun --nproc-per-node 8 -m trainers.torch.gpt ... --model 1b --parallel fsdp

FOLDER holds text files or .jsonl. The same command continues a run from its last checkpoint, with any number of
processes whose global batch is the same. On SIGTERM a run completes its step, saves and exits with 143. --export-dir
receives what LlamaForCausalLM.from_pretrained() of the package transformers loads.
"""

from __future__ import annotations

import argparse

from trainers.common import exits, gpt, text_data
from trainers.common.flags import Flag, integer, one_of
from trainers.common.gpt import Config

FLAGS = (
    Flag("parallel", one_of("ddp", "fsdp"), "ddp", "of several processes: each has the model (DistributedDataParallel),"
         " or a part of it (FSDP2)"),
    Flag("compile", one_of("auto", "on", "off"), "auto", "use torch.compile; auto: on CUDA, and not where it fails"),
    Flag("device", one_of("auto", "cpu", "cuda"), "auto", "auto: a GPU if there is one, else the CPU"),
    Flag("num-cores", integer(0), 0, "processes to start, one per GPU; 0: all GPUs of this machine (CPU: 1)"),
)  # fmt: skip

if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = gpt.parse("PyTorch", FLAGS)

import contextlib
import datetime
import math
import os
import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainers.common import order
from trainers.common.token_log import TokenLog, TokenRun
from trainers.torch import _device
from trainers.torch._device import Device
from trainers.torch._distributed import Checkpoints

# --- the model ----------------------------------------------------------------------------------------------------


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn the pairs (i, i + half) of ``x[batch, heads, time, head_dim]`` by angles that grow with
    time."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention; heads of queries share those of keys and values if there are fewer of them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.shared = config.head_dim, config.num_key_value_heads < config.num_attention_heads
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape  # noqa: N806 - batch, time, channels
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shared)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with its normalization before it, added to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """Llama: its weights have the names of transformers' LlamaForCausalLM."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers)),
            "norm": nn.RMSNorm(config.hidden_size, config.rms_norm_eps),
        })  # fmt: skip
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2: smaller in the two layers of a block that add to the residual stream
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers) if residual else 0.02)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, reduction: str = "mean") -> torch.Tensor:
        """Return logits ``[batch, time, vocabulary]`` of what follows each of the tokens ``idx[batch, time]``; with
        ``targets``, their cross entropy, without those that are -1."""
        x = self.model.embed_tokens(idx)
        T = idx.size(1)  # noqa: N806 - time
        for layer in self.model.layers:
            x = layer(x, self.cos[:T], self.sin[:T])
        return self.head(x) if targets is None else self.loss(x, targets, reduction)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output ``x``."""
        return self.lm_head(self.model.norm(x))

    def loss(self, x: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the cross entropy; its own method because torch.compile fuses it."""
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1,
                               reduction=reduction)  # fmt: skip


# --- optimizer and schedule ---------------------------------------------------------------------------------------


def make_optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the matrices of the layers and AdamW for the others.

    Weight decay is for matrices and embeddings. Muon scales its updates to the size of AdamW's, so that both have the
    same learning rate: https://arxiv.org/abs/2502.16982
    """
    matrices, decayed, others = [], [], []
    for name, parameter in model.named_parameters():
        if args.optimizer == "muon" and ".layers." in name and parameter.dim() == 2:
            matrices.append(parameter)
        else:
            (decayed if parameter.dim() == 2 else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)]
    if args.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise exits.UserError(f"--optimizer muon needs torch 2.9 or later, this is {torch.__version__}: use adamw",
                                  exits.USAGE)  # fmt: skip
        muon = {"weight_decay": args.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(matrices, lr=args.lr, **muon))
    return optimizers


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the rate of ``step``, from 0: linear warm-up, then a cosine to a tenth, or stable and a line to 0."""
    if step < args.warmup_steps:
        return float(args.lr * (step + 1) / args.warmup_steps)
    progress = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    if args.schedule == "cosine":
        return float(args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))))
    return float(args.lr * min(1.0, (1 - progress) / 0.2))


# --- several processes, torch.compile -----------------------------------------------------------------------------


def compile_layers(model: GPT, window: torch.Tensor, device: Device) -> str:
    """Compile the layers and the loss, and try them on one ``window``; returns why that fails, "" if it does not.

    Each layer by itself: all of them share one compiled program, and the gradients of a layer are averaged while those
    of the next are computed. After a failure in one of the processes, all have eager layers.
    """
    reason = ""
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]
    try:
        with device.autocast():
            loss = model(window, window)
        loss.backward()
    except Exception as error:  # of many types, such as a missing compiler or one of Triton
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[0].split())[:200]
    model.zero_grad()
    if device.maximum([bool(reason)])[0]:
        for module in (*model.model.layers, model):  # back to the methods of the class
            module.__dict__.pop("forward", None)
            module.__dict__.pop("loss", None)
        return reason or "it fails in another process"
    return ""


def parallelize(model: GPT, args: argparse.Namespace, device: Device) -> nn.Module:
    """Return what trains ``model`` in all processes: itself if there is one, or if FSDP2 has split it in place."""
    if device.processes == 1 or args.parallel == "ddp":
        return device.parallel(model)
    # In bf16, only bf16 weights travel. The angles of positions stay in fp32.
    low = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    policy = low if device.precision == "bf16" and device.kind == "cuda" else MixedPrecisionPolicy()
    for module in (*model.model.layers, model):
        fully_shard(module, mp_policy=policy)
    return model


@contextlib.contextmanager
def gradient_sync(ddp: nn.Module, on: bool) -> Iterator[None]:
    """A context in which backward averages gradients over the processes, or (``on`` false) only adds them up."""
    if isinstance(ddp, DistributedDataParallel):
        with contextlib.nullcontext() if on else ddp.no_sync():
            yield
        return
    if hasattr(ddp, "set_requires_gradient_sync"):  # of FSDP2
        ddp.set_requires_gradient_sync(on)
    yield


# --- training -----------------------------------------------------------------------------------------------------


class Batches:
    """Windows of the text on the device: inputs and targets ``int64[batch, block_size]``."""

    def __init__(self, text: text_data.Text, args: argparse.Namespace, block_size: int, device: Device) -> None:
        self.text, self.args, self.block_size, self.device = text, args, block_size, device
        self.per_epoch = text_data.windows_of(text.train, block_size)
        self.validation_windows = min(len(text.val) - 1, args.eval_tokens) // block_size
        if self.validation_windows < 1:
            raise exits.UserError(f"{len(text.val):,} tokens to validate on, or --eval-tokens {args.eval_tokens:,}, are"
                                  f" less than a window of {block_size}")  # fmt: skip

    def _to_device(self, windows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = self.device.to_device(windows)
        return tensor[:, :-1], tensor[:, 1:]

    def train(self, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this process's windows in a ``part`` of a step: they depend on seed and place in the global batch."""
        size, seed = self.args.batch_size, self.args.seed
        first = ((step * self.args.accumulate + part) * self.device.processes + self.device.rank) * size
        starts = text_data.window_starts(np.arange(first, first + size), self.per_epoch, self.block_size, seed)
        return self._to_device(text_data.windows(self.text.train, starts, self.block_size))

    def validation(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this process's windows of the validation set, each once. All processes have as many batches: windows
        behind the last one have the target -1."""
        size = self.args.batch_size
        for first in range(0, self.validation_windows, size * self.device.processes):
            numbers = first + self.device.rank * size + np.arange(size)
            exists = numbers < self.validation_windows
            windows = text_data.windows(self.text.val, np.where(exists, numbers, 0) * self.block_size, self.block_size)
            windows[~exists] = -1
            idx, targets = self._to_device(windows)
            yield idx.clamp(min=0), targets


def train_step(
    ddp: nn.Module, optimizers: list[torch.optim.Optimizer], batches: Batches, step: int, args: argparse.Namespace
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train one step; returns the loss of this process's part of the global batch, and the norm of the gradients."""
    loss = torch.zeros((), device=batches.device.device)
    for part in range(args.accumulate):
        with gradient_sync(ddp, on=part == args.accumulate - 1):
            with batches.device.autocast():
                part_loss = ddp(*batches.train(step, part)) / args.accumulate
            part_loss.backward()
        loss += part_loss.detach()
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), args.clip_norm or math.inf)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


@torch.no_grad()
def evaluate(model: nn.Module, batches: Batches, stop: exits.Stop) -> float | None:
    """Return the mean loss of the validation set, every token once; None if the run has to stop."""
    total = torch.zeros(1, dtype=torch.float64, device=batches.device.device)
    for idx, targets in batches.validation():
        with batches.device.autocast():
            total += model(idx, targets, "sum")
        if stop.poll():
            return None
    return batches.device.sum(total)[0] / (batches.validation_windows * batches.block_size)


@torch.no_grad()
def sample(
    model: nn.Module, tokens: list[int], count: int, vocab_size: int, batches: Batches, temperature: float = 0.8,
    top_k: int = 200,
) -> list[int]:  # fmt: skip
    """Return ``count`` tokens that continue ``tokens``, the same in all processes.

    The window keeps its length, so that nothing is compiled again: what follows a token does not change its logits.
    """
    tokens, generator = list(tokens), torch.Generator().manual_seed(0)
    for _ in range(count):
        window = tokens[-batches.block_size :]
        idx = torch.tensor([window + [0] * (batches.block_size - len(window))], device=batches.device.device)
        with batches.device.autocast():
            logits = model(idx)[0, len(window) - 1, :vocab_size].float().cpu() / temperature
        logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -math.inf
        drawn = int(torch.multinomial(F.softmax(logits, dim=0), 1, generator=generator))
        tokens.append(batches.device.broadcast(drawn))
    return tokens[-count:]


def whole_weights(model: nn.Module, config: Config) -> dict[str, torch.Tensor]:
    """Return the weights on the CPU by name, sorted, gathered from all processes; tied ones once."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: weight.contiguous() for name, weight in sorted(state.items())
            if not (config.tie_word_embeddings and name == "lm_head.weight")}  # fmt: skip


def save_safetensors(weights: dict[str, torch.Tensor], path: str) -> None:
    """Write the weights into a file that transformers reads; raises ImportError without the package safetensors."""
    from safetensors.torch import save_file

    save_file(weights, path, {"format": "pt"})


def train(args: argparse.Namespace, device: Device, log: TokenLog) -> int:
    """Train, validate, save, export and print a sample as ``args`` say; returns the exit status."""
    text = text_data.load(args, log.say)
    order.check_alike(device, "text", str(text.fingerprints))
    config = gpt.configure(args, device.kind, text.tokenizer.vocab_size)
    batches = Batches(text, args, config.max_position_embeddings, device)
    cuda, bf16 = device.kind == "cuda", device.precision == "bf16"
    # On a CPU in bf16, flash attention is slow for short windows: 5.4 to 6.8 ms forward and backward for 12 windows of
    # 64 tokens and 4 heads of 32 (AMD EPYC, torch 2.15), plain attention 3.1; for 256 tokens it is faster.
    torch.backends.cuda.enable_flash_sdp(cuda or not bf16 or batches.block_size > 64)  # that of CPUs, too

    model = GPT(config).to(device.device)  # initialized on the CPU: the same weights on every device
    weights = sum(weight.numel() for weight in model.parameters())
    global_batch = args.batch_size * args.accumulate * device.processes
    log.tokens_per_step, log.flops_per_token = global_batch * batches.block_size, gpt.flops_per_token(weights, config)
    peak = gpt.peak_flops(torch.cuda.get_device_name(device.device)) if cuda and bf16 else None
    log.peak = peak and peak * device.processes
    if args.compile == "on" or (args.compile == "auto" and cuda):
        window = torch.zeros(args.batch_size, batches.block_size, dtype=torch.int64, device=device.device)
        if reason := compile_layers(model, window, device):
            if args.compile == "on":
                raise exits.UserError(f"--compile on: {reason}")
            log.say(f"torch.compile does not work here, steps are eager: {reason}")
    ddp = parallelize(model, args, device)
    optimizers = make_optimizers(model, args)

    about = gpt.description("torch.gpt", args, config, global_batch, text, device.precision)
    checkpoints = Checkpoints(args, device, model, optimizers, about)
    run = TokenRun(log, args, device, checkpoints.resume(log.say), about)
    log.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {log.tokens_per_step:,} in a step, on"
            f" {device.processes} x {device.kind} in {device.precision}")  # fmt: skip

    def validate() -> float | None:
        return evaluate(model, batches, run.stop)

    for step in run.steps(validate, batches.validation_windows * batches.block_size, checkpoints.save):
        loss, norm = train_step(ddp, optimizers, batches, step, args)
        # FSDP2 has parts of the norm.
        whole_norm = getattr(norm, "full_tensor", lambda norm=norm: norm)  # of the parts that FSDP2 has
        run.end_step(loss.double(), learning_rate(step, args), lambda whole=whole_norm: whole().item())

    whole = whole_weights(model, config)
    if run.complete:
        if args.sample_tokens:
            beginning = text.val[: batches.block_size // 2]
            start = text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else beginning
            tokens = sample(model, [*map(int, start)], args.sample_tokens, text.tokenizer.vocab_size, batches)
            log.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        if args.export_dir and device.chief:
            files = gpt.export(config, text.tokenizer, args.export_dir, lambda path: save_safetensors(whole, path))
            log.exported(args.export_dir, files)
    log.finish(run.status, run.code, _device.weights_sha256(whole), global_batch=global_batch)
    device.close(args)
    return run.code


def main(args: argparse.Namespace) -> int:
    """Join the other processes and train; returns the exit status."""
    if args.device == "auto" and os.environ.get("PJRT_DEVICE", "").startswith("TPU"):
        raise exits.UserError("--device auto: this trainer has no TPUs: give --device cpu, or see examples/gpt",
                              exits.USAGE)  # fmt: skip
    Device.timeout = datetime.timedelta(minutes=30)  # a host can pack its text for longer than another
    device = Device(args, "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.precision == "fp16":  # which needs scaled gradients
        device.precision = "fp32"
    if device.processes == 1:  # checkpoints need a process group even of one
        if sys.platform == "linux":  # otherwise gloo looks up the name of this host, and warns where there is none
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with TokenLog("torch.gpt", args, device) as log:
        return train(args, device, log)


if __name__ == "__main__":
    _device.main(main, ARGS, "gpt")
