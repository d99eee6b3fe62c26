"""Define what the language models of all frameworks share: flags, sizes, and files that transformers loads."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from trainers.common import exits, flags, paths, text_data
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
    Flag("batch-size", integer(0), 0, "windows per process (JAX: per device) at a time; 0: the model's"),
    Flag("accumulate", integer(1), 1, "such batches per step: the global batch is their windows of all processes"),
    Flag("max-steps", integer(1), 2000, "steps of the schedule"),
    Flag("num-steps", integer(0), 0, "stop and save after this many steps in total; 0: after --max-steps"),
    Flag("optimizer", one_of("adamw", "muon"), "adamw", "AdamW, or Muon for the matrices of the layers and AdamW for"
         " the rest (PyTorch: torch 2.9 or later)"),
    Flag("lr", number(0, above=True), 1e-3, "peak of the learning rate"),
    Flag("precision", one_of("auto", "fp32", "bf16"), "auto", "auto: bf16 where the hardware has it"),
    Flag("seed", integer(0), 0, "seed of initial weights and order of windows"),
    Flag("weight-decay", number(0), 0.1, "of matrices and embeddings"),
    Flag("clip-norm", number(0), 1.0, "scale gradients down to this norm; 0: off"),
    Flag("schedule", one_of("cosine", "wsd"), "cosine", "after the warm-up, a cosine to a tenth of --lr, or --lr and"
         " then a line to 0 in the last fifth (warm-up, stable, decay)"),
    Flag("warmup-steps", integer(0), 100, "steps of linear warm-up"),
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


def parse(framework: str, more: Iterable[Flag], words: list[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line, or of ``words``: :data:`FLAGS` and ``more``, those of the framework."""
    common = [flag for flag in flags.COMMON if flag.name in _SHARED]
    about = f"A language model of Llama's architecture in {framework}."
    return flags.parse("gpt", about, (*FLAGS, *more), words, common=common)


@dataclass(frozen=True)
class Config:
    """Describe a model of Llama's architecture in the words of transformers' LlamaConfig."""

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


# Flags that a resumed run may change; it says so.
_MAY_CHANGE = ("lr", "weight_decay", "clip_norm", "schedule", "warmup_steps", "max_steps")


def description(
    trainer: str, args: argparse.Namespace, config: Config, global_batch: int, text: text_data.Text, precision: str
) -> dict[str, Any]:
    """Return what decides the result of a run, which :func:`trainers.common.run.check_same_run` compares."""
    shape = " ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    return {"trainer": trainer, "model": shape, "optimizer": args.optimizer, "seed": args.seed,
            "global_batch": global_batch, "train_tokens": len(text.train), "data": text.fingerprints,
            "flags": {"precision": precision,
                      **{name.replace("_", "-"): getattr(args, name) for name in _MAY_CHANGE}}}  # fmt: skip


def flops_per_token(weights: int, config: Config) -> float:
    """Return the operations of a training step per token: 6 per weight that multiplies, and those of attention.

    PaLM, appendix B: https://arxiv.org/abs/2204.02311
    """
    if not config.tie_word_embeddings:  # looking up a row of the embedding is no multiplication
        weights -= config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * config.max_position_embeddings
    return 6.0 * weights + attention


# Dense bf16 operations in TFLOP/s, by a word of the device's name, from NVIDIA's data sheets, which have some with
# sparsity only (twice as many): https://www.nvidia.com/en-us/data-center/h100/ and the pages of the others; and of a
# TPU chip, by the name that JAX has for it: https://cloud.google.com/tpu/docs/v6e and the pages of the others.
PEAKS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312,
         "L40S": 362, "L40": 181, "L4": 121, "A10": 125,
         "TPU v4": 275, "TPU v5 lite": 197, "TPU v5p": 459, "TPU v5": 459, "TPU v6 lite": 918}  # fmt: skip


def peak_flops(name: str) -> float | None:
    """Return the peak of a device in operations per second with bf16, None if it is not known."""
    return next((1e12 * peak for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


def export(config: Config, tokenizer: text_data.Tokenizer, folder: str, save: Callable[[str], None]) -> list[str]:
    """Write what transformers' from_pretrained() reads into ``folder``; returns the names of the files.

    ``save(path)`` writes the weights as safetensors; without that package, a note says that they are not written.
    """
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
            save(os.path.join(fresh, "model.safetensors"))
        except ImportError:
            print("note: model.safetensors is not written: pip install safetensors", flush=True)
        return sorted(os.listdir(fresh))
