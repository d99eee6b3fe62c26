"""Train a character-level GPT on the text in data/, on a CPU, on GPUs or on a TPU.

    python train.py                            # on the device that there is; on a CPU, a smaller model
    torchrun --nproc-per-node=8 train.py       # one process per GPU
    python train.py --device xla               # torch_xla, one process per TPU host

The same command continues a run from its last checkpoint. On SIGTERM a run completes its step, saves a checkpoint and
exits with 143 (128 + SIGTERM), as schedulers expect of a job that is to be started again.
"""

import argparse
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

# nanoGPT's models for characters, for a GPU and for a CPU: https://github.com/karpathy/nanoGPT#quick-start
# A model sees block_size characters at once; batch_size is that of each process.
MODELS = {
    "base": SimpleNamespace(block_size=256, n_layer=6, n_head=6, n_embd=384, dropout=0.2, batch_size=64),
    "small": SimpleNamespace(block_size=64, n_layer=4, n_head=4, n_embd=128, dropout=0.0, batch_size=12),
}


class CausalSelfAttention(nn.Module):
    """Attention of every character to itself and to those before it."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.shape  # noqa: N806 - batch, time, channels
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return F.dropout(self.proj(y.transpose(1, 2).reshape(B, T, C)), self.dropout, self.training)


class Block(nn.Module):
    """One layer, with its normalizations before attention and MLP."""

    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        width, dropout = config.n_embd, nn.Dropout(config.dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, config, vocab_size):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:  # GPT-2: smaller in the two layers of a block that add to the residual stream
                residual = name.endswith(("attn.proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)

    def forward(self, idx, targets=None):
        """Logits (batch, time, vocabulary) of what follows each character; with ``targets``, their cross entropy."""
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def get_batch(data, block_size, batch_size, seed):
    """Random windows of ``data`` that depend on ``seed`` only, and what follows each character, both (batch, time)."""
    starts = torch.randint(len(data) - block_size, (batch_size,), generator=torch.Generator().manual_seed(seed))
    windows = data.unfold(0, block_size + 1, 1)[starts]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def learning_rate(step, args, warmup_steps=100):
    """Linear warm-up to ``--lr``, then a cosine down to a tenth of it."""
    if step < warmup_steps:
        return args.lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / (args.max_steps - warmup_steps)
    return args.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model):
    """AdamW, with weight decay for matrices and embeddings but not for biases and normalizations."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99))


def checkpoints(folder):
    """The complete checkpoints in ``folder``, oldest first: torch.distributed.checkpoint writes .metadata last."""
    return sorted(metadata.parent for metadata in folder.glob("step-*/.metadata"))


def state_of(model, optimizer, step):
    """What a checkpoint holds, on the CPU. Names in it are those of the parameters, whatever their order."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def save(folder, model, optimizer, step):
    """Save a checkpoint, and remove others than the newest two. All processes call it."""
    dcp.save(state_of(model, optimizer, step), checkpoint_id=folder / f"step-{step:08}")
    if dist.get_rank() == 0:
        for old in set(folder.glob("step-*")) - set(checkpoints(folder)[-2:]):
            shutil.rmtree(old)


def load(folder, model, optimizer):
    """Load the newest checkpoint if there is one; returns its step, else 0. All processes call it."""
    newest = [checkpoints(folder)[-1:]]
    dist.broadcast_object_list(newest)  # what the first process finds
    if not newest[0]:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=newest[0][0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]


def any_process(flag):
    """Whether ``flag`` is true in one of the processes, so that all of them stop after the same step."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


@torch.no_grad()
def evaluate(model, data, args, to_device, autocast):
    """Mean loss on 20 batches of ``data``: the same ones every time and in every process."""
    model.eval()
    with autocast:
        batches = (get_batch(data, args.config.block_size, args.batch_size, seed) for seed in range(20))
        losses = [model(*to_device(*batch)).item() for batch in batches]
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model, device, window, count):
    """``count`` characters that continue ``window`` (time), whose length is kept: XLA compiles once per shape."""
    model.eval()
    generator = torch.Generator().manual_seed(0)
    characters = []
    for _ in range(count):
        probabilities = F.softmax(model(window[None].to(device))[0, -1].float().cpu(), dim=0)
        characters.append(torch.multinomial(probabilities, 1, generator=generator))
        window = torch.cat((window[1:], characters[-1]))
    return torch.cat(characters)


def join(backend, rank, world_size, init_method="env://"):
    """Join the process group, which is needed for checkpoints even if there is one process."""
    where = {"store": dist.HashStore()} if world_size == 1 else {"init_method": init_method}
    dist.init_process_group(backend, rank=rank, world_size=world_size, **where)


def setup_torch(kind):
    """One process per device, started by torchrun if there are several."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    join("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo", rank, world_size)  # gloo for tensors on the CPU
    return device, rank, world_size, lambda *batch: [tensor.to(device) for tensor in batch]


def setup_xla():
    """One process per TPU host, whose batch XLA splits over the host's devices (SPMD)."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.distributed.xla_backend  # xla://
    import torch_xla.runtime as xr

    xr.use_spmd()
    device, count = torch_xla.device(), xr.global_runtime_device_count()
    rows = xs.ShardingSpec(xs.Mesh(list(range(count)), (count,), ("data",)), ("data", None), minibatch=True)
    rank, world_size = xr.process_index(), xr.process_count()
    join("gloo", rank, world_size, init_method="xla://")
    return device, rank, world_size, lambda *batch: xm.send_cpu_data_to_device(list(batch), device, rows)


def parse_args():
    """The options, with the defaults of the device."""
    there = "xla" if "PJRT_DEVICE" in os.environ else "cuda" if torch.cuda.is_available() else "cpu"
    text = Path(__file__).parent / "data/python-reference.txt"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=text, help="a text file")
    parser.add_argument("--checkpoint-dir", type=Path, default="checkpoints", help="a folder that all processes share")
    parser.add_argument("--device", choices=["cpu", "cuda", "xla"], default=there, help=f"default here: {there}")
    parser.add_argument("--model", choices=MODELS, help="default: small on a CPU, else base")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--dropout", type=float, help="default: the model's")
    parser.add_argument("--batch-size", type=int, help="windows per step and process; default: the model's")
    parser.add_argument("--max-steps", type=int, default=5000, help="default: 5000")
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate; default: 0.001")
    parser.add_argument("--eval-interval", type=int, default=250, help="and of checkpoints, in steps; default: 250")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout; default: 0")
    args = parser.parse_args()
    if not args.data.is_file():
        parser.error(f"argument --data: {args.data} is not a file")
    args.config = MODELS[args.model or ("small" if args.device == "cpu" else "base")]
    args.config.dropout = args.config.dropout if args.dropout is None else args.dropout
    args.batch_size = args.batch_size or args.config.batch_size
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    return args


def main():
    """Train, evaluate, save, and print a sample."""
    args = parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stop.set())
    xla = args.device == "xla"
    device, rank, world_size, to_device = setup_xla() if xla else setup_torch(args.device)
    log = print if rank == 0 else lambda line: None
    if xla:
        import torch_xla

    text = args.data.read_text()
    vocabulary = sorted(set(text))
    index = {character: i for i, character in enumerate(vocabulary)}
    data = torch.tensor([index[character] for character in text])
    train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    torch.manual_seed(args.seed)
    model = GPT(args.config, len(vocabulary)).to(device)
    optimizer = make_optimizer(model)
    step = load(args.checkpoint_dir, model, optimizer)
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world_size} x {device}, from step {step}")
    # Averages the gradients of the processes; XLA does so by itself.
    ddp = DistributedDataParallel(model) if world_size > 1 and not xla else model
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bfloat16")

    stopping, started = False, time.perf_counter()
    while step < args.max_steps and not stopping:
        # Batch and dropout depend on seed, step and rank only, so that a resumed run draws what it would have drawn.
        seed = (args.seed * 10**9 + step) * world_size + rank
        torch_xla.manual_seed(seed - rank) if xla else torch.manual_seed(seed)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with autocast:
            loss = ddp(*to_device(*get_batch(train_data, args.config.block_size, args.batch_size, seed)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if xla:
            torch_xla.sync()
        step += 1

        stopping = any_process(stop.is_set())
        due = step % args.eval_interval == 0 or step == args.max_steps
        if due and not stopping:
            val_loss = evaluate(model, val_data, args, to_device, autocast)
            seconds = time.perf_counter() - started
            log(f"step {step}: loss {loss.item():.3f}, val loss {val_loss:.3f}, {seconds:.0f} s")
        if due or stopping:
            save(args.checkpoint_dir, model, optimizer, step)

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything is saved
    if stopping:
        log(f"SIGTERM: saved step {step}; the same command continues")
    else:
        characters = sample(model, device, val_data[: args.config.block_size], 200)
        log(f"sample: {''.join(vocabulary[i] for i in characters)!r}")
    del ddp  # first: as the group's last user, it would wait for gloo's thread, and that thread for the GIL
    dist.destroy_process_group()
    sys.exit(143 if stopping else 0)


if __name__ == "__main__":
    main()
