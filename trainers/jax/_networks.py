"""Classify images in Flax NNX: the networks of MNIST, and of flowers with torchvision's ResNets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainers.common.files import USAGE, UserError

# --- MNIST: logits [n, 10] of images [n, 28, 28, 1] -------------------------------------------------------------------


class Encoder(nnx.Module):
    """Apply attention and MLP of a vision transformer, each with its normalization before it, and 10 % dropout."""

    def __init__(self, width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = (nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)), rngs=rngs)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm2(x)))), rngs=rngs)


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maxima of the 2x2 squares of ``x[n, height, width, channels]``.

    XLA's CPU backend computes the gradient of this in a sixth of the time that the one of ``nnx.max_pool`` takes.
    """
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class CNN(nnx.Module):
    """Classify with two 5x5 convolutions, pooled before the ReLU (a quarter of the work), and two linear layers.

    Its calls return logits ``[n, 10]`` of images ``[n, 28, 28, 1]``, as do calls of the other models.
    """

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, (5, 5), padding="VALID", dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (5, 5), padding="VALID", dtype=dtype, rngs=rngs)
        self.hidden = nnx.Linear(64 * 4 * 4, 128, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(128, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv in (self.conv1, self.conv2):
            x = nnx.relu(max_pool(conv(x)))
        return self.head(nnx.relu(self.hidden(x.reshape(x.shape[0], -1))))


class SmallDigits(nnx.Module):
    """Classify with two 5x5 convolutions, each pooled and batch-normalized before its ReLU, and a linear layer."""

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (5, 5), padding="VALID", use_bias=False, dtype=dtype, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, dtype=dtype, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (5, 5), padding="VALID", use_bias=False, dtype=dtype, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(32 * 4 * 4, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = nnx.relu(norm(max_pool(conv(x))))
        return self.head(x.reshape(x.shape[0], -1))


class ViTDigits(nnx.Module):
    """Classify with a vision transformer of 16 patches, four layers and 10 % dropout."""

    def __init__(self, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(1, 64, (7, 7), strides=(7, 7), padding="VALID", dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 16, 64)))
        self.blocks = nnx.List([Encoder(64, dtype, rngs) for _ in range(4)])
        self.norm = nnx.LayerNorm(64, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(64, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 16, 64) + self.positions
        for block in self.blocks:
            x = block(x, rngs)
        return self.head(self.norm(x).mean(axis=1))


# --- flowers: logits [n, classes] of images [n, side, side, 3] --------------------------------------------------------


def conv(into: int, out: int, size: int, dtype: jnp.dtype, rngs: nnx.Rngs, stride: int = 1) -> nnx.Conv:
    """Return a convolution without bias, padded by half of its ``size`` as in PyTorch."""
    start = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")  # He's, as in torchvision
    return nnx.Conv(into, out, (size, size), stride, padding=size // 2, use_bias=False, kernel_init=start, dtype=dtype,
                    rngs=rngs)  # fmt: skip


def norm(width: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Return a batch normalization with the averages of PyTorch's."""
    return nnx.BatchNorm(width, momentum=0.9, dtype=dtype, rngs=rngs)


class Unit(nnx.Module):
    """Apply a convolution, batch norm and ReLU."""

    def __init__(self, into: int, out: int, dtype: jnp.dtype, rngs: nnx.Rngs, stride: int = 1) -> None:
        self.conv, self.bn = conv(into, out, 3, dtype, rngs, stride), norm(out, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.bn(self.conv(x)))


class Small(nnx.Module):
    """Classify a few thousand images: each stage halves the picture, doubles the width and adds a residual."""

    def __init__(self, classes: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.stem = Unit(3, 32, dtype, rngs, 2)
        self.stages = nnx.List([
            nnx.List([Unit(width // 2, width, dtype, rngs, 2), *(Unit(width, width, dtype, rngs) for _ in range(2))])
            for width in (64, 128, 256)
        ])  # fmt: skip
        self.fc = nnx.Linear(256, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.stem(x)
        for down, first, second in self.stages:
            x = down(x)
            x = x + second(first(x))
        return self.fc(x.mean(axis=(1, 2)))


class ViT(nnx.Module):
    """Classify with a vision transformer of 64 patches and six layers, for images of ``side`` pixels."""

    def __init__(self, classes: int, side: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        if side % 8:
            raise UserError(f"--model vit: --image-size {side} is not a multiple of 8", USAGE)
        patch = (side // 8, side // 8)
        self.patches = nnx.Conv(3, 128, patch, strides=patch, padding="VALID", dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 64, 128)))
        self.encoders = nnx.List([Encoder(128, dtype, rngs) for _ in range(6)])
        self.norm = nnx.LayerNorm(128, dtype=dtype, rngs=rngs)
        self.fc = nnx.Linear(128, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = self.patches(x).reshape(x.shape[0], 64, 128) + self.positions
        for encoder in self.encoders:
            x = encoder(x, rngs)
        return self.fc(self.norm(x).mean(axis=1))


class Block(nnx.Module):
    """Apply a residual block of a ResNet: two 3x3 convolutions, or (``bottleneck``) 1x1, 3x3 and 1x1.

    Its parts, and the parts of :class:`ResNet`, have torchvision's names.
    """

    def __init__(self, into: int, width: int, stride: int, bottleneck: bool, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        out = width * 4 if bottleneck else width
        sizes = ((into, width, 1, 1), (width, width, 3, stride), (width, out, 1, 1))
        if not bottleneck:
            sizes = ((into, width, 3, stride), (width, out, 3, 1))
        for number, (before, after, size, step) in enumerate(sizes, 1):
            setattr(self, f"conv{number}", conv(before, after, size, dtype, rngs, step))
            setattr(self, f"bn{number}", norm(after, dtype, rngs))
        self.count = len(sizes)
        self.downsample = nnx.data(None)
        if stride > 1 or into != out:
            self.downsample = nnx.List([conv(into, out, 1, dtype, rngs, stride), norm(out, dtype, rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            y = nnx.relu(y) if number < self.count else y
        if self.downsample is not None:
            x = self.downsample[1](self.downsample[0](x))
        return nnx.relu(x + y)


BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}  # of each of four layers


class ResNet(nnx.Module):
    """Classify as torchvision's ResNets do: https://arxiv.org/abs/1512.03385, with the stride in conv2."""

    def __init__(self, name: str, classes: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.conv1, self.bn1 = conv(3, 64, 7, dtype, rngs, 2), norm(64, dtype, rngs)
        into, bottleneck = 64, name == "resnet50"
        for number, blocks in enumerate(BLOCKS[name]):
            layer = []
            for position in range(blocks):
                stride = 2 if number and not position else 1
                layer.append(Block(into, 64 << number, stride, bottleneck, dtype, rngs))
                into = (64 << number) * (4 if bottleneck else 1)
            setattr(self, f"layer{number + 1}", nnx.List(layer))
        self.fc = nnx.Linear(into, classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        x = nnx.relu(self.bn1(self.conv1(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                x = block(x)
        return self.fc(x.mean(axis=(1, 2)))


# A variable of Flax -> the tensor of PyTorch that has its values.
_TORCH = {"kernel": "weight", "scale": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var"}


def load_pretrained(model: ResNet, path: str) -> None:
    """Load all but the last layer from a safetensors file with torchvision's names, which are timm's, too.

    Raises:
        UserError: it is no such file, or of another model.
    """
    try:
        from safetensors.numpy import load_file

        tensors = load_file(path)
    except Exception as error:  # a missing file, a damaged header, a missing package: all raise different types
        reason = str(error).splitlines()[0]
        raise UserError(f"--weights {path}: cannot be read as safetensors: {reason}") from None
    state = nnx.state(model)
    wanted = {}
    for keys, variable in nnx.to_flat_state(state):
        if keys[0] != "fc":
            wanted[".".join(map(str, (*keys[:-1], _TORCH[keys[-1]])))] = variable
    known = {name for name in tensors if not name.startswith("fc.") and not name.endswith(".num_batches_tracked")}
    if differing := sorted(wanted.keys() ^ known):
        lacks = "lacks" if differing[0] in wanted else "has"
        raise UserError(f"--weights {path}: is of another model: it {lacks} {differing[0]}")
    for name, variable in wanted.items():
        value = tensors[name].astype(np.float32)
        value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value  # PyTorch: out, in, y, x
        if value.shape != variable.get_value().shape:
            raise UserError(f"--weights {path}: is of another model: {name} has shape {tensors[name].shape}")
        variable.set_value(jnp.asarray(value))
    nnx.update(model, state)
