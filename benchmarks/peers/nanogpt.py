"""Train a language model as nanoGPT does: its loop, around a model of Llama's architecture, and what speeds it up.

``Settings()`` is the loop of https://github.com/karpathy/nanoGPT/blob/master/train.py on a CPU: windows of a file that
is mapped anew for each batch, AdamW that is not fused, gradients clipped to 1, a cosine. The other settings are what
PyTorch's tuning guide adds: https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html

    python -m benchmarks.peers.nanogpt FOLDER cpu '{"fused": true}' 60 12 64 4 128 4 1 0.001
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 320  # 256 bytes and an end token, padded to a multiple of 64


@dataclass(frozen=True)
class Settings:
    """One point of the grid."""

    fused: bool = False  # AdamW
    in_memory: bool = False  # the text, as one tensor
    compiled: bool = False


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of ``x[batch, heads, time, head width]``."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Block(nn.Module):
    """Compute a layer of Llama, with one matrix for queries, keys and values as in nanoGPT, and one for SwiGLU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, 64 * math.ceil(width * 8 / 3 / 64)
        self.ln_1, self.ln_2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_out = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the output for ``x[batch, time, width]``."""
        n, time_, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(n, time_, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(n, time_, width))
        gate, up = self.c_fc(self.ln_2(x)).chunk(2, dim=2)
        return x + self.c_out(F.silu(gate) * up)


class Model(nn.Module):
    """Llama's architecture with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, block_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.RMSNorm(width, 1e-5)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("c_proj.weight", "c_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)
        self.lm_head.weight = self.wte.weight
        frequencies = 10000.0 ** (-torch.arange(0, width // heads, 2).float() / (width // heads))
        angles = torch.outer(torch.arange(block_size).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of ``targets[batch, time]``."""
        x = self.wte(idx)
        for block in self.h:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).view(-1, VOCABULARY).float(), targets.reshape(-1))


def learning_rate(step: int, steps: int, peak: float, warm_up: int = 100) -> float:
    """nanoGPT's: linear warm-up, then a cosine to a tenth."""
    if step < warm_up:
        return peak * (step + 1) / (warm_up + 1)
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def run(
    folder: Path, device: str, settings: Settings, steps: int, batch: int, block_size: int, layers: int, width: int,
    heads: int, bf16: bool, peak: float, warm_up: int = 10,
) -> dict[str, Any]:  # fmt: skip
    """Train on ``folder``/train.bin (uint16); returns tokens per second after ``warm_up`` steps."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model: Any = Model(layers, width, heads, block_size).to(device)
    forward = torch.compile(model, dynamic=False) if settings.compiled else model
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), **({"fused": True} if settings.fused else {}))
    text = np.fromfile(folder / "train.bin", np.uint16)
    whole = torch.from_numpy(text.astype(np.int64)) if settings.in_memory else None

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        ix = torch.randint(len(text) - block_size - 1, (batch,))
        if whole is not None:
            windows = whole[ix[:, None] + torch.arange(block_size + 1)]
            return move(windows[:, :-1]), move(windows[:, 1:])
        data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")
        x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
        return move(x), move(y)

    began = 0.0
    for step in range(steps):
        if step == warm_up:
            _wait(device)
            began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        x, y = get_batch()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = forward(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
    _wait(device)
    return {"tokens_per_second": (steps - warm_up) * batch * block_size / (time.perf_counter() - began)}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    FOLDER, DEVICE, SETTINGS, *NUMBERS, BF16, PEAK = sys.argv[1:]
    print(json.dumps(
        run(Path(FOLDER), DEVICE, Settings(**json.loads(SETTINGS)), *map(int, NUMBERS), BF16 == "1", float(PEAK))
    ))  # fmt: skip
