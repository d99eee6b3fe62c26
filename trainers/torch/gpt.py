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

from trainers.common import exits, flags, text_data
from trainers.common.flags import Flag, integer, number, one_of

_SHARED = ("deterministic", "job-dir", "checkpoint-dir", "checkpoint-minutes", "keep-checkpoints",
           "resume", "accept-other-data", "output-dir", "export-dir", "logdir", "metrics-file",
           "log-steps")  # fmt: skip
FLAGS = (
    *text_data.FLAGS,
    Flag("model", one_of("auto", "tiny", "base", "124m", "350m", "1b"), "auto", "size; auto: tiny on a CPU, else base"),
    Flag("layers", integer(0), 0, "number of layers; 0: the model's"),
    Flag("width", integer(0), 0, "width of the residual stream; 0: the model's"),
    Flag("heads", integer(0), 0, "attention heads; 0: the model's"),
    Flag("kv-heads", integer(0), 0, "heads of keys and values, which divide --heads; 0: the model's, or --heads"),
    Flag("block-size", integer(0), 0, "tokens that the model sees at once; 0: the model's"),
    Flag("tie-embeddings", None, True, "use the embedding of tokens as the last layer, too"),
    Flag("batch-size", integer(0), 0, "windows per process that fit into memory at a time; 0: the model's"),
    Flag("accumulate", integer(1), 1, "such batches per step: the global batch is their windows of all processes"),
    Flag("max-steps", integer(1), 2000, "steps of the schedule"),
    Flag("num-steps", integer(0), 0, "stop and save after this many steps in total; 0: after --max-steps"),
    Flag("optimizer", one_of("adamw", "muon"), "adamw", "AdamW, or Muon for the matrices of the layers and AdamW for"
         " the rest (torch 2.9 or later)"),
    Flag("lr", number(0, above=True), 1e-3, "peak of the learning rate"),
    Flag("precision", one_of("auto", "fp32", "bf16"), "auto", "auto: bf16 where the hardware has it"),
    Flag("seed", integer(0), 0, "seed of initial weights and order of windows"),
    Flag("weight-decay", number(0), 0.1, "of matrices and embeddings"),
    Flag("clip-norm", number(0), 1.0, "scale gradients down to this norm; 0: off"),
    Flag("schedule", one_of("cosine", "wsd"), "cosine", "after the warm-up, a cosine to a tenth of --lr, or --lr and"
         " then a line to 0 in the last fifth (warm-up, stable, decay)"),
    Flag("warmup-steps", integer(0), 100, "steps of linear warm-up"),
    Flag("parallel", one_of("ddp", "fsdp"), "ddp", "of several processes: each has the model (DistributedDataParallel),"
         " or a part of it (FSDP2)"),
    Flag("compile", one_of("auto", "on", "off"), "auto", "use torch.compile; auto: on CUDA, and not where it fails"),
    Flag("device", one_of("auto", "cpu", "cuda"), "auto", "auto: a GPU if there is one, else the CPU"),
    Flag("num-cores", integer(0), 0, "processes to start, one per GPU; 0: all GPUs of this machine (CPU: 1)"),
    Flag("eval-steps", integer(1), 250, "steps between validations"),
    Flag("eval-tokens", integer(1), 1 << 20, "tokens of the validation set that are used, from its start"),
    Flag("eval-only", None, False, "validate (and export) the newest checkpoint in --checkpoint-dir, without training"),
    Flag("target-loss", number(0), 0.0, "stop once the validation loss is at most this; exit with"
         f" {exits.TARGET_MISSED} if it never is; 0: off"),
    Flag("prompt", str, "", "text that the sample at the end continues; default: the start of the validation set"),
    Flag("sample-tokens", integer(0), 200, "tokens to generate at the end; 0: none"),
    Flag("checkpoint-steps", integer(0), 0, "save every this many steps; 0: every --eval-steps", "output"),
    Flag("hypertune-tag", str, "", "report the validation loss to hyperparameter tuning under this name; the default in"
         " a tuning trial is training/hptuning/metric", "output", "CLOUD_ML_HP_METRIC_TAG"),
)  # fmt: skip


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line, or of ``words``."""
    common = [flag for flag in flags.COMMON if flag.name in _SHARED]
    return flags.parse("gpt", "A language model of Llama's architecture in PyTorch.", FLAGS, words, common=common)


if __name__ == "__main__":  # before torch is imported, so that --help and usage errors are immediate
    ARGS = parse()

import contextlib
import dataclasses
import datetime
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainers.common import order, paths
from trainers.common.token_log import TokenLog
from trainers.torch import _device
from trainers.torch._device import Device
from trainers.torch._distributed import Checkpoints

# --- the model ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """A model of Llama's architecture, in the words of transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden_size // self.num_attention_heads


# Layers, width, heads, heads of keys and values, block size, batch size. tiny and base have the sizes of nanoGPT's for
# characters (https://github.com/karpathy/nanoGPT#quick-start), 124m and 350m those of GPT-2, 1b that of Llama 3.2.
MODELS = {
    "tiny": (4, 128, 4, 4, 64, 12),
    "base": (6, 384, 6, 6, 256, 64),
    "124m": (12, 768, 12, 12, 1024, 16),
    "350m": (24, 1024, 16, 16, 1024, 8),
    "1b": (16, 2048, 32, 8, 2048, 4),
}


def configure(args: argparse.Namespace, kind: str, vocab_size: int) -> Config:
    """Return the model that the flags ask for, and set ``args.batch_size``; raises :class:`UserError`."""
    name = args.model if args.model != "auto" else "tiny" if kind == "cpu" else "base"
    layers, width, heads, kv_heads, block_size, batch_size = MODELS[name]
    kv_heads = args.kv_heads or (args.heads or kv_heads)
    layers, width, heads = args.layers or layers, args.width or width, args.heads or heads
    args.batch_size = args.batch_size or batch_size
    if width % heads or width // heads % 2:
        raise exits.UserError(f"--width {width} is not an even multiple of --heads {heads}", exits.USAGE)
    if heads % kv_heads:
        raise exits.UserError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}", exits.USAGE)
    # SwiGLU has three matrices where GPT has two of four widths: 8/3 of the width is as much work.
    intermediate = 64 * math.ceil(width * 8 / 3 / 64)
    # Multiples of 64 are what tensor cores take at once; no token has the numbers behind vocab_size.
    vocab_size = 64 * math.ceil(vocab_size / 64)
    return Config(vocab_size, width, intermediate, layers, heads, kv_heads, args.block_size or block_size,
                  args.tie_embeddings)  # fmt: skip


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


def flops_per_token(model: GPT, config: Config) -> float:
    """Return the operations of a training step per token: 6 per weight that multiplies, and those of attention.

    PaLM, appendix B: https://arxiv.org/abs/2204.02311
    """
    weights = sum(parameter.numel() for parameter in model.parameters())
    if not config.tie_word_embeddings:  # looking up a row of the embedding is no multiplication
        weights -= config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * config.max_position_embeddings
    return 6.0 * weights + attention


# Dense bf16 operations in TFLOP/s, by a word of the device's name, from NVIDIA's data sheets, which have some with
# sparsity only (twice as many): https://www.nvidia.com/en-us/data-center/h100/ and the pages of the others.
PEAKS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312,
         "L40S": 362, "L40": 181, "L4": 121, "A10": 125}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of ``device`` in operations per second with bf16, None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


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
    stop.restart()
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


def export(weights: dict[str, torch.Tensor], config: Config, tokenizer: text_data.Tokenizer, folder: str) -> list[str]:
    """Write what transformers' from_pretrained() reads into ``folder``; returns the names of the files."""
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **dataclasses.asdict(config),
             "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
             "bos_token_id": None, "eos_token_id": tokenizer.end, "torch_dtype": "float32"}  # fmt: skip
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token,
             "model_max_length": config.max_position_embeddings}  # fmt: skip
    contents = {"config.json": json.dumps(about, indent=1), "tokenizer.json": tokenizer.json,
                "tokenizer_config.json": json.dumps(words, indent=1)}  # fmt: skip
    with paths.complete_files(folder) as fresh:
        for name, content in contents.items():
            with open(os.path.join(fresh, name), "w", encoding="utf-8") as file:
                file.write(content + "\n")
        try:
            from safetensors.torch import save_file
        except ImportError:
            print("note: model.safetensors is not written: pip install safetensors", flush=True)
        else:
            save_file(weights, os.path.join(fresh, "model.safetensors"), {"format": "pt"})
        return sorted(os.listdir(fresh))


def train(args: argparse.Namespace, device: Device, log: TokenLog) -> int:  # noqa: C901 - to be read at once
    """Train, validate, save, export and print a sample as ``args`` say; returns the exit status."""
    text = text_data.load(args, log.say)
    order.check_alike(device, "text", str(text.fingerprints))
    config = configure(args, device.kind, text.tokenizer.vocab_size)
    batches = Batches(text, args, config.max_position_embeddings, device)
    cuda, bf16 = device.kind == "cuda", device.precision == "bf16"
    # On a CPU in bf16, flash attention is slow for short windows: 5.4 to 6.8 ms forward and backward for 12 windows of
    # 64 tokens and 4 heads of 32 (AMD EPYC, torch 2.15), plain attention 3.1; for 256 tokens it is faster.
    torch.backends.cuda.enable_flash_sdp(cuda or not bf16 or batches.block_size > 64)  # that of CPUs, too

    model = GPT(config).to(device.device)  # initialized on the CPU: the same weights on every device
    weights = sum(weight.numel() for weight in model.parameters())
    global_batch = args.batch_size * args.accumulate * device.processes
    log.tokens_per_step, log.flops_per_token = global_batch * batches.block_size, flops_per_token(model, config)
    log.peak = device.processes * peak if bf16 and (peak := peak_flops(device.device)) else None
    if args.compile == "on" or (args.compile == "auto" and cuda):
        window = torch.zeros(args.batch_size, batches.block_size, dtype=torch.int64, device=device.device)
        if reason := compile_layers(model, window, device):
            if args.compile == "on":
                raise exits.UserError(f"--compile on: {reason}")
            log.say(f"torch.compile does not work here, steps are eager: {reason}")
    ddp = parallelize(model, args, device)
    optimizers = make_optimizers(model, args)

    shape = " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    may_change = ("lr", "weight_decay", "clip_norm", "schedule", "warmup_steps", "max_steps")
    run = {"trainer": "torch.gpt", "model": shape, "optimizer": args.optimizer, "seed": args.seed,
           "global_batch": global_batch, "train_tokens": len(text.train), "data": text.fingerprints,
           "flags": {"precision": device.precision,
                     **{name.replace("_", "-"): getattr(args, name) for name in may_change}}}  # fmt: skip
    checkpoints = Checkpoints(args, device, model, optimizers, run)
    step, saved = 0, -1  # steps done, and those in the newest checkpoint
    if about := checkpoints.resume(log.say):
        step = saved = about["step"]
        log.load(about["log"], step)
    elif args.eval_only:
        raise exits.UserError(f"--eval-only: {args.checkpoint_dir} has no checkpoint", exits.USAGE)
    log.start(**run)
    log.say(f"{weights:,} weights, {len(text.train):,} tokens of text, {log.tokens_per_step:,} in a step, on"
            f" {device.processes} x {device.kind} in {device.precision}")  # fmt: skip
    stop = exits.Stop(device.maximum if device.processes > 1 else None, args.checkpoint_minutes)
    stop.install()

    status, code = "completed", 0
    last = min(args.num_steps or args.max_steps, args.max_steps)
    losses = torch.zeros((), device=device.device)  # since they were read last: the sum shows any that is not finite

    def save() -> None:
        nonlocal saved
        if args.checkpoint_dir and saved != step:
            with log.paused():
                log.check_finite(device.mean(losses))
                log.check_finite(0 if checkpoints.is_finite() else math.nan, "a weight")
                log.saved(step, checkpoints.save(step, log.state()))
                stop.saved()
            saved = step

    while True:
        done = step >= last or args.eval_only
        if step % args.eval_steps == 0 < step or step == args.max_steps or args.eval_only:
            with log.paused():
                val_loss = evaluate(model, batches, stop)
            if val_loss is None:
                code = stop.code
                save()
            else:
                log.validation(val_loss, batches.validation_windows * batches.block_size)
                if val_loss <= args.target_loss:
                    status, done = "reached", True
        if code or done:
            break
        loss, norm = train_step(ddp, optimizers, batches, step, args)
        losses += loss
        step += 1
        log.count(step)
        if step % args.log_steps == 0 or log.trained == 1:  # only then is the loss read from the device
            log.check_finite(device.mean(losses))
            losses.zero_()
            whole_norm = getattr(norm, "full_tensor", lambda norm=norm: norm)()  # of the parts that FSDP2 has
            log.train(device.mean(loss.double()), learning_rate(step - 1, args), whole_norm.item())
        code = stop.poll()  # of SIGTERM, agreed by all processes
        if code or stop.save_due or step == last or step % (args.checkpoint_steps or args.eval_steps) == 0:
            save()

    log.pause()
    if code:
        status = "preempted"
    elif status == "completed" and not args.eval_only:
        if step < args.max_steps:
            status = "stopped"
        elif args.target_loss:
            status, code = "missed", exits.TARGET_MISSED
    whole = whole_weights(model, config)
    if status not in ("stopped", "preempted"):
        if args.sample_tokens:
            beginning = text.val[: batches.block_size // 2]
            start = text.tokenizer.encode([args.prompt.encode()])[0] if args.prompt else beginning
            tokens = sample(model, [*map(int, start)], args.sample_tokens, text.tokenizer.vocab_size, batches)
            log.say(f"sample: {text.tokenizer.decode(tokens)!r}")
        if args.export_dir and device.chief:
            log.exported(args.export_dir, export(whole, config, text.tokenizer, args.export_dir))
    log.finish(status, code, _device.weights_sha256(whole), global_batch=global_batch)
    device.close(args)
    return code


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
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with TokenLog("torch.gpt", args, device) as log:
        return train(args, device, log)


if __name__ == "__main__":
    _device.main(main, ARGS, "gpt")
