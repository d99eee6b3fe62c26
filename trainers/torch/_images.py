"""Classify images in plain PyTorch: networks, pretrained weights, crops on the device, averages, torch.compile."""

from __future__ import annotations

import argparse
import io
import pickle
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from trainers.common import storage
from trainers.common.files import USAGE, UserError
from trainers.torch._peers import Peers

PRETRAINED_SCALE = 0.1  # of the learning rate, for layers that start from --weights
# What becomes torchvision's name of a weight of a vision transformer: parts of timm's, and of torchvision's own in its
# older files. ResNets have the same names in both. https://github.com/huggingface/pytorch-image-models/blob/main/timm/models/vision_transformer.py
RENAMED = {
    r"^cls_token$": "class_token",
    r"^pos_embed$": "encoder.pos_embedding",
    r"^patch_embed\.proj\.": "conv_proj.",
    r"^blocks\.": "encoder.layers.encoder_layer_",
    r"\.norm1\.": ".ln_1.",
    r"\.attn\.qkv\.": ".self_attention.in_proj_",
    r"\.attn\.proj\.": ".self_attention.out_proj.",
    r"\.norm2\.": ".ln_2.",
    r"\.mlp\.(fc|linear_)1\.": ".mlp.0.",
    r"\.mlp\.(fc|linear_)2\.": ".mlp.3.",
    r"^norm\.": "encoder.ln.",
    r"^head\.": "heads.head.",
}


def unit(into: int, out: int, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution from ``into`` to ``out`` channels, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """Add the output of two units to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.units = nn.Sequential(unit(width, width), unit(width, width))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return ``features[n, width, y, x]`` plus the output of the units."""
        return features + self.units(features)


def small(classes: int) -> nn.Sequential:
    """Return a network for a few thousand images: each stage halves the size, doubles the width, adds a residual."""
    stages: list[nn.Module] = [unit(3, 32, 2)]
    for width in (64, 128, 256):
        stages += [unit(width // 2, width, 2), Residual(width)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, classes))


def vit(classes: int, side: int) -> nn.Module:
    """Return a vision transformer of 64 patches and six layers, for images of ``side`` pixels."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(  # type: ignore[no-any-return]
        image_size=side, patch_size=side // 8, num_layers=6, num_heads=4, hidden_dim=128, mlp_dim=256, dropout=0.1,
        num_classes=classes,
    )  # fmt: skip


def flowers_network(args: argparse.Namespace, classes: int) -> nn.Module:
    """Return the model of ``--model``, with the pretrained weights of ``--weights`` in all but the last layer.

    Raises :class:`UserError` if ``--weights`` or ``--image-size`` does not fit the model.
    """
    if args.weights and args.model in ("small", "vit"):
        raise UserError("--weights needs --model resnet18, resnet34, resnet50 or vit_b_16", USAGE)
    if args.image_size % (multiple := {"vit": 8, "vit_b_16": 16}.get(args.model, 1)):
        raise UserError(f"--model {args.model}: --image-size {args.image_size} is not a multiple of {multiple}", USAGE)
    if args.model == "small":
        return small(classes)
    try:
        from torchvision import models
    except ImportError as error:
        raise UserError(f"--model {args.model} needs torchvision of torch's own index: {error}") from None
    if args.model == "vit":
        return vit(classes, args.image_size)
    options = {"image_size": args.image_size} if args.model == "vit_b_16" else {}
    model: nn.Module = models.get_model(args.model, weights=None, num_classes=classes, **options)
    if args.weights:
        load_pretrained(model, args)
    return model


def renamed(name: str) -> str:
    """Return torchvision's name of the weight that timm calls ``name``."""
    for pattern, new in RENAMED.items():
        name = re.sub(pattern, new, name)
    return name


def head(name: str) -> str:
    """Return the prefix of the weights of the last layer of torchvision's model ``name``."""
    return "heads." if name.startswith("vit") else "fc."


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in ``path``, a file of safetensors or ``torch.save()``, which cannot execute code.

    Raises what its library does, and ``ValueError`` where that is not clear.
    """
    content = storage.read_file(path)
    if path.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            return load(content)
        except SafetensorError as error:
            raise ValueError(f"it is no safetensors file, or not a whole one ({error})") from None
    try:
        weights = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it is no file of torch.save(model.state_dict())") from None
    if not isinstance(weights, dict):
        raise ValueError(f"it is a {type(weights).__name__}, not a model.state_dict()")
    return weights


def load_pretrained(model: nn.Module, args: argparse.Namespace) -> None:
    """Load ``--weights``, with the names of torchvision or timm, into all but the last layer of ``model``.

    A vision transformer's embeddings of positions are resized to ``--image-size``.

    Raises :class:`UserError` with the first difference if they are of another model.
    """
    last, reason = head(args.model), ""
    try:
        read = read_weights(args.weights)
        given = {new: value for name, value in read.items() if not (new := renamed(name)).startswith(last)}
        if args.model == "vit_b_16" and "encoder.pos_embedding" in given:
            from torchvision.models.vision_transformer import interpolate_embeddings

            given = interpolate_embeddings(args.image_size, 16, given)
        reason = difference(given, model.state_dict(), last)
    except Exception as error:  # a missing file, a damaged archive, embeddings of no square: of many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    if reason:
        raise UserError(f"--weights {args.weights}: no weights of {args.model}: {reason}")
    model.load_state_dict(given, strict=False)


def difference(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], last: str) -> str:
    """Return how ``given`` differs from weights like ``expected`` without the layer ``last``; "" if it does not.

    Old files lack the numbers of batches that batch norm has seen.
    """
    for name, value in expected.items():
        if name in given and given[name].shape != value.shape:
            return f"{name} has the shape {list(given[name].shape)}, not {list(value.shape)}"
        if name not in given and not name.startswith(last) and not name.endswith("num_batches_tracked"):
            return f"{name} is missing"
    return next((f"{name} is not among them" for name in sorted(given) if name not in expected), "")


def resampling(start: torch.Tensor, end: torch.Tensor, source: int, target: int) -> torch.Tensor:
    """Return matrices ``[n, target, source]`` that resize the spans from ``start`` to ``end`` to ``target`` pixels.

    Spans are fractions of a side of ``source`` pixels; ``start`` > ``end`` mirrors. Bilinear, with antialiasing.
    """
    steps = (torch.arange(target, device=start.device) + 0.5) / target
    centres = (start[:, None] + (end - start)[:, None] * steps) * source - 0.5
    reach = ((end - start).abs() * source / target).clamp(min=1.0)[:, None, None]
    distance = (centres[:, :, None] - torch.arange(source, device=start.device)).abs()
    weights = (1 - distance / reach).clamp(min=0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def gather_crops(images: torch.Tensor, numbers: torch.Tensor, boxes: torch.Tensor, side: int) -> torch.Tensor:
    """Return ``float[n, side, side, 3]`` in 0 to 255: ``boxes`` (upper, lower, left, right) of ``images[numbers]``."""
    down = resampling(boxes[:, 0], boxes[:, 1], images.shape[1], side)
    across = resampling(boxes[:, 2], boxes[:, 3], images.shape[2], side)
    tall = torch.einsum("nyh,nhwc->nywc", down, images[numbers].float())
    return torch.einsum("nxw,nywc->nyxc", across, tall)


def imagenet_network(args: argparse.Namespace) -> nn.Module:
    """Return torchvision's model ``--model`` with random weights.

    Raises :class:`UserError` if torchvision has no such model, or if it does not take images of the sizes that
    ``--image-size`` and ``--progressive`` ask for.
    """
    try:
        from torchvision import models
    except ImportError as error:
        raise UserError(f"torchvision of torch's own index is needed: {error}") from None
    if args.model not in models.list_models(module=models):
        raise UserError(f"--model {args.model}: torchvision has {', '.join(models.list_models(module=models))}", USAGE)
    options: dict[str, object] = {}
    if args.model in ("googlenet", "inception_v3"):  # without the additional outputs that these models train with
        options = {"aux_logits": False, "init_weights": True}
    elif args.model.startswith("vit_"):  # with a position embedding for each patch
        options = {"image_size": args.image_size}
    elif args.model.startswith("maxvit"):
        options = {"input_size": (args.image_size, args.image_size)}
    side = args.image_size
    try:
        model: nn.Module = models.get_model(args.model, weights=None, num_classes=args.num_classes, **options)
        # Shapes only, without computing: on the device "meta".
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        for side in (args.image_size, *args.progressive):
            torch.func.functional_call(model, shapes, torch.empty(2, 3, side, side, device="meta"))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UserError(
            f"--model {args.model} does not take images of {side} pixels ({reason}): use another --image-size, or leave"
            " out --progressive",
            USAGE,
        ) from None
    return model


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels from 0 to 1


class Normalise(nn.Module):
    """Turn ``uint8[n, side, side, 3]`` into ``float[n, 3, side, side]`` with mean 0 and deviation 1 over ImageNet."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers are on the device from the start; tensors made from lists would be copied to it in each step.
        self.register_buffer("mean", 255 * torch.tensor(MEAN), persistent=False)
        self.register_buffer("deviation", 255 * torch.tensor(DEVIATION), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return ``pixels``, normalized."""
        return ((pixels.float() - self.mean) / self.deviation).permute(0, 3, 1, 2)


class Served(nn.Module):
    """Classify as the exported model does: images ``uint8[n, side, side, 3]``, including the preprocessing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.normalise = model, Normalise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the probabilities ``[n, classes]`` of ``images``."""
        return self.model(self.normalise(images)).softmax(dim=1)


class Average:
    """Average a model's weights and buffers exponentially (``--ema``), in ``model``.

    Its decay rises with the steps, or the random weights at the start would dominate for 1 / (1 - decay) steps:
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """

    def __init__(self, model: nn.Module, trained: nn.Module, decay: float) -> None:
        """Average the weights of ``trained`` in ``model``, a copy of it."""
        self.model, self.decay = model, decay
        slow, fast = (list(one.state_dict(keep_vars=True).values()) for one in (model, trained))
        pairs = list(zip(slow, fast, strict=True))
        self.floats = [pair for pair in pairs if pair[0].is_floating_point()]
        self.counts = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Include the weights after ``step``, counted from 0."""
        # Not the parameters themselves: torch_xla would compile the second step again, as another graph.
        slow, fast = map(list, zip(*((average, value.detach()) for average, value in self.floats), strict=True))
        torch._foreach_lerp_(slow, fast, 1 - min(self.decay, (1 + step) / (10 + step)))
        for average, value in self.counts:
            average.copy_(value)


def loss_of(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """Return the loss on images that are blended with the next image of the batch where ``mask`` is below 1."""
    loss = F.cross_entropy(logits, labels, label_smoothing=args.label_smoothing)
    if args.mixup or args.cutmix:
        keep = mask.mean()
        other = F.cross_entropy(logits, labels.roll(1), label_smoothing=args.label_smoothing)
        loss = keep * loss + (1 - keep) * other
    return loss


class EagerIfCompilingFails:
    """Run a step whose forward pass is compiled, and from the first failure on without torch.compile.

    Compiling fails where there is no C compiler, for example. The forward pass and its gradient are compiled when the
    first batch of each shape arrives, and a failure changes nothing but the averages of batch norm.
    """

    def __init__(self, step: Callable[..., torch.Tensor], model: nn.Module, say: Callable[[str], None]) -> None:
        """Take ``step(seed, *batch)``, which trains ``model`` with random numbers that ``seed()`` begins again."""
        self.step, self.buffers, self.say = step, list(model.buffers()), say
        self.shapes: set[torch.Size] = set()
        self.failed = False

    def __call__(self, seed: Callable[[], None], *batch: torch.Tensor) -> torch.Tensor:
        """Run the step on ``batch``; returns its loss."""
        if self.failed or batch[0].shape in self.shapes:
            return self.step(seed, *batch)
        before = [buffer.clone() for buffer in self.buffers]
        try:
            loss = self.step(seed, *batch)
            self.shapes.add(batch[0].shape)
            return loss
        except (UserError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of Dynamo, Inductor, Triton and compilers; an error of the step comes again below
            lines = str(error).strip().splitlines() or [""]
            self.say(f"torch.compile failed ({type(error).__name__}: {lines[0][:200]}): training without it")
        self.failed = True
        torch.compiler.set_stance("force_eager")
        with torch.no_grad():
            for buffer, value in zip(self.buffers, before, strict=True):
                buffer.copy_(value)
        return self.step(seed, *batch)


def compiled(model: nn.Module, when: str, peers: Peers) -> nn.Module:
    """Return ``model``, compiled as ``--compile`` (``when``) says; itself where Triton does not support the GPU."""
    if when == "off" or (when == "auto" and peers.device.type != "cuda"):
        return model
    if peers.device.type == "cuda" and torch.cuda.get_device_capability(peers.device) < (7, 0):
        if peers.rank == 0:
            print("Triton needs compute capability 7.0: training without torch.compile", flush=True)
        return model
    # A graph for each size of --progressive: one for all would be slower.
    return torch.compile(model, dynamic=False)  # type: ignore[no-any-return]
