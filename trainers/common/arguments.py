"""Read command lines: options that trainers share, in groups of argparse, and what all of them accept.

A name may have underscores, a file of YAML (``--config``) may give options, and defaults can come from variables of
the platform, such as AIP_CHECKPOINT_DIR. The command line wins over the file, and the file over the environment.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from trainers.common.files import USAGE


def number(least: float, most: float = 3.4e38, *, above: bool = False, kind: type = float) -> Callable[[str], Any]:
    """Return a type for argparse: a number from ``least`` (exclusive if ``above``) to ``most``."""
    what = f"{'an integer' if kind is int else 'a number'} {'above' if above else 'of at least'} {least:g}"

    def convert(text: str) -> Any:
        try:
            if least <= (value := kind(text)) <= most and not (above and value == least):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} and at most {most:.10g}")

    return convert


def integer(least: int = 0, most: int = 2**32 - 1) -> Callable[[str], Any]:
    """Return a type for argparse: an integer from ``least`` to ``most``."""
    return number(least, most, kind=int)


def add(group: Any, names: str, default: Any, about: str, **more: Any) -> None:
    """Add an option to a group: a switch (``--no-`` turns it off) if ``default`` is a bool."""
    more |= {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {}
    shown = "" if default in ("", None) or isinstance(default, bool) else f" (default: {default})"
    group.add_argument(*names.split(), default=default, help=about + shown, **more)


class Parser(argparse.ArgumentParser):
    """Parse the options of a trainer and its :class:`trainers.common.job.Job`; an error is one line.

    Options of the group ``learning`` decide the result of a run; ``data``, ``running`` and ``output`` are the others.
    """

    def __init__(self, prog: str, about: str) -> None:
        super().__init__(prog=prog, description=about, allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
            epilog="Exit status: 0 done, 2 wrong option, 21 target missed, 22 loss or weights not finite, 143 stopped"
            " by SIGTERM after saving (run it again to go on), 1 any other failure.")  # fmt: skip
        self.origin, group, env = "", self.add_argument_group, os.environ.get
        self.data, self.learning, self.running, self.output = map(group, ("data", "learning", "running", "output"))
        add(self, "--config", "", "read options from a mapping in this file of YAML")
        add(self.data, "--datadir", "", "folder (or gs:// address) with the data")
        add(self.data, "--fake-data", False, "train on random data: none needed")
        add(self.data, "--accept-other-data", False, "resume also with other data than the checkpoint's")
        add(self.learning, "--clip-norm", 0.0, "scale gradients down to this norm; 0: off", type=number(0))
        add(self.learning, "--seed", 0, "of initial weights, order and augmentation", type=integer())
        add(self.learning, "--precision", "auto", "auto: bf16 where the device has it; fp16, with scaled gradients, on"
            " older GPUs", choices=("auto", "fp32", "bf16", "fp16"))  # fmt: skip
        add(self.running, "--num-cores", 0, "processes that `launch` starts; 0: one per device", type=integer())
        add(self.running, "--deterministic", False, "use deterministic kernels even where they are slower")
        add(self.running, "--num-steps", 0, "stop and save after so many steps in all; 0: at the end", type=integer())
        add(self.running, "--eval-only", False, "test (and export) a checkpoint, without training")
        out = self.output
        add(out, "--job-dir", "", "default parent of checkpoints/, model/ and logs/")
        add(out, "--checkpoint-dir", env("AIP_CHECKPOINT_DIR", ""), "save here, resume from here [AIP_CHECKPOINT_DIR]")
        add(out, "--checkpoint-steps", 0, "save every so many steps; 0: with each test", type=integer())
        add(out, "--checkpoint-minutes", 0.0, "save after so many minutes, too; 0: off", type=number(0))
        add(out, "--keep-checkpoints", 3, "number of the newest checkpoints to keep", type=integer(1))
        add(out, "--keep-best", False, "keep the best checkpoint, too, and export that one")
        add(out, "--resume", True, "continue from the newest usable checkpoint; --no-resume moves earlier ones away")
        add(out, "--output-dir", "", "write report.json and metrics.jsonl here")
        add(out, "--export-dir", env("AIP_MODEL_DIR", ""), "write the trained model here [AIP_MODEL_DIR]")
        add(out, "--logdir --tensorboard-dir", env("AIP_TENSORBOARD_LOG_DIR", ""), "write TensorBoard's files here"
            " [AIP_TENSORBOARD_LOG_DIR]")  # fmt: skip
        add(out, "--metrics-file", "", "JSON lines; else metrics.jsonl in --output-dir or --logdir")
        add(out, "--log-steps", 20, "steps between lines of the log", type=integer(1))
        add(out, "--hypertune-tag", env("CLOUD_ML_HP_METRIC_TAG", ""), "report tests to hyperparameter tuning under"
            " this name [CLOUD_ML_HP_METRIC_TAG]")  # fmt: skip
        add(out, "--profile", 0, "trace so many steps into --output-dir or --logdir", type=integer())
        add(out, "--track", "", "wandb or mlflow: send the metrics there, too", choices=("", "wandb", "mlflow"))

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line on stderr, ``message``, as ``SystemExit``."""
        message = re.sub(r"^argument (--[\w-]+)[^:]*: ", r"\1: ", message)
        print(f"{self.prog}: {self.origin}{message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Return the options of ``argv``, with ``learning``, the names of those that decide the result.

        An option that is wrong or unknown ends the process: see :meth:`error`.
        """
        words = [re.sub(r"^--[^=]+", lambda name: name[0].replace("_", "-"), word)
                 for word in (sys.argv[1:] if argv is None else argv)]  # fmt: skip
        if path := self.parse_known_args(words)[0].config:
            self.origin = f"{path}: "
            self._strictly(given := self._given(path))
            self.origin, words = "", [*given, *words]
        args = self._strictly(words)
        args.learning = sorted(action.dest for action in self.learning._group_actions)
        for name, value in vars(args).items():
            if str(value).startswith("file://"):
                if not (path := value.removeprefix("file://")).startswith("/"):
                    self.error(f"--{name.replace('_', '-')}: {value} has no path after its host: write {path}, or"
                               " file:/// and the path from the root")  # fmt: skip
                setattr(args, name, path)
        for name, folder in (("checkpoint_dir", "checkpoints"), ("export_dir", "model"), ("logdir", "logs")):
            setattr(args, name, getattr(args, name) or (args.job_dir and f"{args.job_dir.rstrip('/')}/{folder}"))
        for name in ("eval_only", "keep_best"):
            if getattr(args, name) and not args.checkpoint_dir:
                self.error(f"--{name.replace('_', '-')}: needs --checkpoint-dir")
        if args.eval_only and not args.resume:
            self.error("--eval-only: tests a checkpoint, which --no-resume leaves out")
        return args

    def _strictly(self, words: list[str]) -> argparse.Namespace:
        args, rest = self.parse_known_args(words)
        for word in rest:
            near = difflib.get_close_matches(name := word.partition("=")[0], self._option_string_actions, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            self.error(f"unknown flag {name}{hint}" if word.startswith("--") else f"unexpected argument {word!r}")
        return args

    def _given(self, path: str) -> list[str]:
        """Return the mapping in the YAML file ``path`` as words of a command line."""
        import yaml

        try:
            with open(path, encoding="utf-8") as file:
                pairs = [(str(key).replace("_", "-"), value) for key, value in yaml.safe_load(file).items()]
        except (OSError, yaml.YAMLError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or "must be a mapping of YAML such as 'lr: 0.1'"
            self.error(f"cannot be read: {reason}")
        return [f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else
                f"--{name}={','.join(map(str, value if isinstance(value, list) else [value]))}"
                for name, value in pairs]  # fmt: skip


def classification(
    parser: Parser, argv: Sequence[str] | None, defaults: dict[str, Any] | None = None, **rates: float
) -> argparse.Namespace:
    """Return the options of a trainer that classifies images: what ``parser`` has and what all have.

    ``defaults`` replace the defaults, by the name of the option; ``rates`` are the defaults of --lr by --optimizer.
    """
    learn, run = parser.learning, parser.running
    add(learn, "--epochs --num-epochs", 5, "passes over the training data", type=integer(1))
    add(learn, "--optimizer", "sgd", "SGD with Nesterov momentum, or AdamW", choices=("sgd", "adamw"))
    add(learn, "--lr", None, f"peak of the learning rate (default: {rates})", type=number(0, above=True))
    add(learn, "--scale-lr", False, "multiply --lr by the number of devices: the batch of a step grows with them")
    add(learn, "--momentum", 0.9, "of SGD", type=number(0, 0.9999))
    add(learn, "--weight-decay", 0.0, "of kernels and matrices", type=number(0))
    add(run, "--batch-size", 64, "training images per device and step", type=integer(1))
    add(run, "--test-batch-size --test-set-batch-size", 512, "test images per device at a time", type=integer(1))
    add(run, "--target-accuracy", 0.0, "stop at so many percent; exit with 21 without them", type=number(0, 100))
    parser.set_defaults(**(defaults or {}))
    args = parser.parse(argv)
    args.lr = args.lr or rates[args.optimizer]
    return args
