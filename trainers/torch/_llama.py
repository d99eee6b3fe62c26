"""Compute Llama in plain PyTorch, with its optimizers and what compiles it."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from trainers.common.files import USAGE, UserError
from trainers.common.language import Config
from trainers.torch._peers import Peers


def document_mask(idx: torch.Tensor, end: int) -> Any:
    """Return what lets each of the tokens ``idx[batch, time]`` see those before it in its document, which ``end`` ends.

    A mask ``[batch, 1, time, time]``, or on CUDA one of flex attention, which takes less memory.
    """
    B, T = idx.shape  # noqa: N806 - batch, time
    document = (idx == end).cumsum(dim=1) - (idx == end).long()
    if idx.device.type == "cuda":

        def visible(b: Any, h: Any, query: Any, key: Any) -> Any:
            return (query >= key) & (document[b, query] == document[b, key])

        return create_block_mask(visible, B, None, T, T, device=idx.device)
    causal = torch.ones(T, T, dtype=torch.bool, device=idx.device).tril()
    return causal & (document[:, None, :, None] == document[:, None, None, :])


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + half) of ``x[batch, heads, time, head_dim]`` by angles that grow with time."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Attend to the tokens before; several heads of queries share one of keys and values if there are fewer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim, self.shared = config.head_dim, config.num_key_value_heads < config.num_attention_heads
        width, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Return ``[batch, time, width]``, as ``x`` has; ``mask`` is of :func:`document_mask`."""
        B, T, C = x.shape  # noqa: N806 - batch, time, channels
        q, k, v = (proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if mask is None or isinstance(mask, torch.Tensor):
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=self.shared)
        else:
            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=self.shared)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Compute SwiGLU: https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[batch, time, width]``, as ``x`` has."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Add attention and MLP, each with its normalization before it, to the residual stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Return ``[batch, time, width]``, as ``x`` has; ``mask`` is of :func:`document_mask`."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class GPT(nn.Module):
    """Compute Llama; its weights have the names of transformers' LlamaForCausalLM.

    ``end`` is the token at the end of each document, if attention shall not look into the one before. ``recompute``
    has the backward pass compute the activations of each layer again, in place of keeping them.
    """

    def __init__(self, config: Config, end: int | None = None, recompute: bool = False) -> None:
        super().__init__()
        self.end, self.recompute = end, recompute
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
        mask = None if self.end is None else document_mask(idx, self.end)
        for layer in self.model.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, self.cos[:T], self.sin[:T], mask, use_reentrant=False)
            else:
                x = layer(x, self.cos[:T], self.sin[:T], mask)
        return self.head(x) if targets is None else self.loss(x, targets, reduction)

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last layer's output ``x``."""
        return self.lm_head(self.model.norm(x))

    def loss(self, x: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the cross entropy; its own method because torch.compile fuses it."""
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten(), ignore_index=-1,
                               reduction=reduction)  # fmt: skip


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
    device = next(model.parameters()).device.type
    kind = {"fused": True} if device in ("cpu", "cuda") else {"capturable": True}
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), **kind)]
    if args.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"--optimizer muon needs torch 2.9 or later, this is {torch.__version__}: use adamw",
                                  USAGE)  # fmt: skip
        muon = {"weight_decay": args.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(matrices, lr=args.lr, **muon))
    return optimizers


def compile_layers(model: GPT, window: torch.Tensor, peers: Peers) -> str:
    """Compile the layers and the loss, and try them on one ``window``; returns why that fails, "" if it does not.

    Each layer by itself: all of them share one compiled program, and the gradients of a layer are averaged while those
    of the next are computed. After a failure in one of the processes, all have eager layers.
    """
    reason = ""
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=False)
    model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]
    try:
        with peers.autocast:
            loss = model(window, window)
        loss.backward()
    except Exception as error:  # of many types, such as a missing compiler or one of Triton
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        reason = " ".join(lines[0].split())[:200]
    model.zero_grad()
    if peers.maximum([bool(reason)])[0]:
        for module in (*model.model.layers, model):  # back to the methods of the class
            module.__dict__.pop("forward", None)
            module.__dict__.pop("loss", None)
        return reason or "it fails in another process"
    return ""
