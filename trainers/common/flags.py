"""Command-line flags of the trainers, checked before any framework is imported.

A flag can be written with dashes or with pytorch/xla's underscores, in ``--config file.yaml``, or (where
``env`` is set) come from a variable of the platform. The command line wins over the file, the file over the
environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trainers.common import exits

Kind = Callable[[str], Any]


def integer(least: int = 0, most: int | None = None) -> Kind:
    """Return a converter to an integer of at least ``least``, and at most ``most`` if that is given."""
    span = f"of at least {least}" + (f" and at most {most}" if most is not None else "")

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer {span}")
        return value

    return convert


_MOST = 3.4e38  # the largest float32, about


def number(least: float, most: float = _MOST, *, above: bool = False) -> Kind:
    """Return a converter to a number from ``least`` (exclusive if ``above``) to ``most``."""
    span = f"{'above' if above else 'of at least'} {least:g} and at most {most:g}"

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (least <= value <= most) or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {span}")
        return value

    return convert


def one_of(*names: str) -> Kind:
    """A converter that accepts one of ``names``."""

    def convert(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return convert


def sizes(text: str) -> list[int]:
    """Image sides in pixels, separated by commas: ``128,160,192``."""
    if not re.fullmatch(r"\d+(,\d+)*", text) or min(map(int, text.split(","))) < 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes of at least 8 such as 128,160")
    return [int(side) for side in text.split(",")]


@dataclass(frozen=True)
class Flag:
    """A flag. ``kind`` converts and checks its value; without it, the flag is boolean, with a ``--no-`` form.

    ``env`` names an environment variable that provides the default; ``group`` is its heading in ``--help``.
    """

    name: str
    kind: Kind | None
    default: Any
    help: str
    group: str = "training"
    env: str = ""
    aliases: tuple[str, ...] = ()


_SGD_LR = 0.03
COMMON = (
    Flag("datadir", str, "", "folder (or gs:// address) with the data", "data"),
    Flag("fake-data", None, False, "train on random images and labels: no data needed", "data"),
    Flag("drop-last", None, True, "always on in training; accepted for compatibility with pytorch/xla", "data"),
    Flag("epochs", integer(1), 5, "passes over the training data", aliases=("num-epochs",)),
    Flag("num-steps", integer(0), 0, "stop and save after this many steps in total; 0: after all epochs"),
    Flag("batch-size", integer(1), 64, "training images per device and step"),
    Flag("test-batch-size", integer(1), 512, "test images per device and step", aliases=("test-set-batch-size",)),
    Flag("optimizer", one_of("sgd", "adamw"), "sgd", "SGD with Nesterov momentum, or AdamW"),
    Flag("lr", number(0, above=True), _SGD_LR, "peak of the learning rate (linear warm-up, then cosine to 0)"),
    Flag("scale-lr", None, False, "multiply --lr by the number of devices: the batch of a step grows with them"),
    Flag("momentum", number(0, 0.9999), 0.9, "of SGD"),
    Flag("clip-norm", number(0), 0.0, "scale gradients down to this norm; 0: off"),
    Flag("seed", integer(0, 2**32 - 1), 0, "seed of initial weights, sample order and augmentation"),
    Flag("deterministic", None, False, "use deterministic kernels even where they are slower"),
    Flag("target-accuracy", number(0, 100), 0.0, "stop once the test accuracy reaches this many percent;"
         f" exit with {exits.TARGET_MISSED} if it never does"),
    Flag("precision", one_of("auto", "fp32", "bf16", "fp16"), "auto", "auto: bf16 where the hardware has it, else"
         " (PyTorch, GPUs from compute capability 7.0 on) fp16 with scaled gradients"),
    Flag("job-dir", str, "", "AI Platform's job folder: default parent of checkpoints/, model/ and logs/", "output"),
    Flag("checkpoint-dir", str, "", "save here, and resume from here", "output", "AIP_CHECKPOINT_DIR"),
    Flag("checkpoint-steps", integer(0), 0, "save every this many steps; 0: after each epoch", "output"),
    Flag("checkpoint-minutes", number(0), 0.0, "save when this many minutes have passed since the last checkpoint, too;"
         " 0: off", "output"),
    Flag("keep-checkpoints", integer(1), 3, "how many of the newest checkpoints to keep", "output"),
    Flag("keep-best", None, False, "keep the checkpoint with the best test accuracy, too, as best.ckpt, and export that"
         " one", "output"),
    Flag("eval-only", None, False, "test (and export) the newest checkpoint in --checkpoint-dir, with --keep-best the"
         " best one, without training"),
    Flag("resume", None, True, "continue from the newest checkpoint in --checkpoint-dir; --no-resume moves those there"
         " to its folder old-<time>", "output"),
    Flag("accept-other-data", None, False, "resume also if the checkpoint is of other data with the same number of"
         " training images", "output"),
    Flag("output-dir", str, "", "write report.json, report.png and metrics.jsonl here", "output"),
    Flag("export-dir", str, "", "write the trained model here, ready to serve", "output", "AIP_MODEL_DIR"),
    Flag("logdir", str, "", "write TensorBoard event files here", "output", "AIP_TENSORBOARD_LOG_DIR",
         ("tensorboard-dir",)),
    Flag("metrics-file", str, "", "JSON lines; default: metrics.jsonl in --output-dir, else in --logdir", "output"),
    Flag("log-steps", integer(1), 20, "steps between log lines", "output"),
    Flag("hypertune-tag", str, "", "report the accuracy to hyperparameter tuning under this name; the default in a"
         " tuning trial is training/hptuning/metric", "output", "CLOUD_ML_HP_METRIC_TAG"),
    Flag("profile", integer(0), 0, "trace this many steps into --output-dir or --logdir", "output"),
)  # fmt: skip

ADAMW_LR = 1e-3  # default of --lr with --optimizer adamw, as in torch.optim.AdamW and Keras
TF = (
    Flag("strategy", one_of("auto", "one", "mirrored", "multiworker", "tpu"), "auto", "tf.distribute strategy; auto:"
         " multiworker with a TF_CONFIG of several workers, tpu with a TPU, mirrored with several GPUs, else one"),
    Flag("num-cores", integer(0), 0, "devices of this machine to use; 0: all (a CPU can be split into any number)"),
    Flag("jit-compile", None, False, "compile steps with XLA; single device only, slower on a CPU, always on for TPUs"),
    Flag("steps-per-execution", integer(1), 32, "maximum number of training steps per call (MNIST and flowers); a call"
         " takes no longer than about a second"),
)  # fmt: skip


def add_to(parser: Any, flags: Iterable[Flag]) -> None:
    """Add flags to a :class:`trainers.common.arguments.Parser`, which has --weight-decay of its own."""
    from trainers.common.arguments import add

    indifferent = ("num-workers", "prefetch-factor", "fake-images")
    for flag in flags:
        group = parser.data if flag.name in indifferent else parser.learning
        if flag.name != "weight-decay":
            kind = {"type": flag.kind} if flag.kind else {}
            add(group, f"--{flag.name}", flag.default, flag.help.replace("%", "%%"), **kind)


def cpu_has_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware; without that, bf16 is slower than fp32."""
    try:
        features = pathlib.Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return False
    return "avx512_bf16" in features or "amx_bf16" in features


# Flags that do not decide what a run learns, or are compared otherwise, such as the data.
_INDIFFERENT = {"datadir", "download", "fake-data", "fake-images", "drop-last", "num-workers", "prefetch-factor",
                "num-steps", "batch-size", "test-batch-size", "target-accuracy", "eval-only", "device", "num-cores",
                "strategy", "compile", "jit-compile", "steps-per-execution", "config",
                *(flag.name for flag in (*COMMON, *TF) if flag.group == "output")}  # fmt: skip


def deciding(args: argparse.Namespace, precision: str) -> dict[str, Any]:
    """Return the flags that decide what a run learns, by name; ``precision`` is that of ``auto`` on these devices."""
    named = {name.replace("_", "-"): value for name, value in sorted(vars(args).items())}
    named["precision"] = precision
    return {name: value for name, value in named.items() if name not in _INDIFFERENT}


def words(name: str, value: Any) -> str:
    """Return the flag ``name`` with ``value`` as on a command line."""
    switch = f"--{'' if value else 'no-'}{name}"
    return switch if isinstance(value, bool) else f"--{name} {_show(value) or 'not given'}"


class _Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    origin = ""

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (--[\w-]+)\S*( [A-Z]+)?(/\S+)?( [A-Z]+)?: ", r"\1: ", message)
        print(f"{self.prog}: {self.origin}{message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(exits.USAGE)


def parse(
    prog: str,
    about: str,
    flags: Iterable[Flag],
    argv: Sequence[str] | None = None,
    *,
    common: Iterable[Flag] = COMMON,
    adamw_lr: float = ADAMW_LR,
    **defaults: Any,
) -> argparse.Namespace:
    """Parse the command line ``argv`` (default: that of the process) of trainer ``prog``.

    ``flags`` are added to ``common``; ``defaults`` override the defaults of both, by attribute name. ``adamw_lr``
    is the default of ``--lr`` with ``--optimizer adamw``. Exits with status 2 and one line on stderr if a flag or value
    is invalid, with 0 after ``--help``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(
        prog=prog,
        description=about,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
        epilog="Names may also be written with underscores, as in pytorch/xla. Exit status: 0 done, 2 wrong flag,"
        f" {exits.TARGET_MISSED} --target-accuracy missed, {exits.DIVERGED} loss or weights not finite,"
        f" {exits.PREEMPTED} stopped by SIGTERM after saving (run it again to go on), 1 any other failure.",
    )
    groups = {name: parser.add_argument_group(name) for name in ("data", "training", "output")}
    every = [*common, *flags]
    unknown_defaults = set(defaults) - {flag.name.replace("-", "_") for flag in every}
    if unknown_defaults:
        raise TypeError(f"no such flag: {', '.join(sorted(unknown_defaults))}")
    for flag in every:
        default = defaults.get(flag.name.replace("-", "_"), flag.default)
        if flag.env:
            default = os.environ.get(flag.env) or default
        names = [f"--{name}" for name in (flag.name, *flag.aliases)]
        shown = "" if default in ("", None) or flag.kind is None else f" (default: {_show(default)})"
        if flag.name == "lr" and default != adamw_lr:
            shown, default = f" (default: {default}; with --optimizer adamw: {adamw_lr})", None
        shown += f" [{flag.env}]" if flag.env else ""
        options: dict[str, Any] = {"dest": flag.name.replace("-", "_"), "default": default}
        options["help"] = (flag.help + shown).replace("%", "%%")
        if flag.kind is None:
            groups[flag.group].add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        else:
            metavar = flag.name.rsplit("-", 1)[-1].upper()
            groups[flag.group].add_argument(*names, type=flag.kind, metavar=metavar, **options)
    parser.add_argument("--config", metavar="FILE.yaml", default="", help="read flags from a YAML mapping")

    argv = [_dashes(word) for word in argv]
    known = {option: action for action in parser._actions for option in action.option_strings}
    path = _config_path(argv)
    from_file: list[str] = []
    if path:
        parser.origin = f"{path}: "
        from_file = _config_words(parser, path, known)
        _parse_strictly(parser, from_file, known)
        parser.origin = ""
    args = _parse_strictly(parser, [*from_file, *argv], known)
    _use_local_paths(parser, args)
    if args.job_dir:
        base = args.job_dir.rstrip("/")
        args.checkpoint_dir = args.checkpoint_dir or f"{base}/checkpoints"
        args.export_dir = args.export_dir or f"{base}/model"
        args.logdir = args.logdir or f"{base}/logs"
    if args.lr is None:
        args.lr = adamw_lr if args.optimizer == "adamw" else defaults.get("lr", _SGD_LR)
    for name in ("eval_only", "keep_best"):
        if getattr(args, name, False) and not args.checkpoint_dir:
            parser.error(f"--{name.replace('_', '-')}: needs --checkpoint-dir")
    if args.eval_only and not args.resume:
        parser.error("--eval-only: tests a checkpoint, which --no-resume leaves out")
    return args


def _use_local_paths(parser: _Parser, args: argparse.Namespace) -> None:
    """Replace ``file://`` URLs in ``args`` by their paths."""
    for name, value in vars(args).items():
        if isinstance(value, str) and value.startswith("file://"):
            path = value.removeprefix("file://")
            if not path.startswith("/"):
                parser.error(f"--{name.replace('_', '-')}: {value} has no path after its host: write {path}, or file:///"
                             " and the path from the root")  # fmt: skip
            setattr(args, name, path)


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _dashes(word: str) -> str:
    """``--batch_size=8`` as ``--batch-size=8``; a value keeps its underscores."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _config_path(argv: list[str]) -> str:
    path = ""
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            path = argv[index + 1]
        elif word.startswith("--config="):
            path = word.partition("=")[2]
    return path


def _config_words(parser: _Parser, path: str, known: dict[str, argparse.Action]) -> list[str]:
    """The YAML mapping in ``path`` as command-line arguments."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        parser.error(f"cannot be read: {error.strerror}")
    except yaml.YAMLError as error:
        parser.error(f"is not YAML: {' '.join(str(error).split())}")
    if not isinstance(content, dict):
        parser.error("must be a mapping of flag names to values, such as 'epochs: 3'")
    words = []
    for key, value in content.items():
        name = _dashes(f"--{key}")
        if isinstance(known.get(name), argparse.BooleanOptionalAction):
            if not isinstance(value, bool):
                parser.error(f"{key}: must be true or false, not {value!r}")
            words.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, (dict, bool)) or value is None:
            parser.error(f"{key}: must be one value, not {value!r}")
        else:
            words.append(f"{name}={_show(value)}")
    return words


def _parse_strictly(parser: _Parser, words: list[str], known: dict[str, argparse.Action]) -> argparse.Namespace:
    args, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("--"):
            name = word.partition("=")[0]
            near = difflib.get_close_matches(name, known, n=1)
            parser.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))
        parser.error(f"unexpected argument {word!r}")
    return args
