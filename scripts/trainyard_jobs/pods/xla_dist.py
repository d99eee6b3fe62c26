"""The command line of torch_xla's xla_dist, which guides up to PyTorch/XLA 2.0 use.

    trainyard pod --tpu=NAME --docker-image=IMAGE --env XLA_USE_BF16=1 -- python train.py --epochs 3

Its flags: --tpu, --vm, --docker-container, --docker-image, --docker-run-flag, --conda-env, --env,
--restart-tpuvm-pod-server, --tpuvm-server-port, and the program after ``--``
(https://github.com/pytorch/xla/blob/v1.13.0/torch_xla/distributed/xla_dist.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from trainyard.common.errors import UserError, nearest
from trainyard_jobs.model import options as job_options
from trainyard_jobs.pods import shell_commands
from trainyard_jobs.pods.run import Run

#: Variables that xla_dist set itself and rejected in --env; the launcher and PJRT set what is needed of them.
DISTRIBUTED = (
    "XRT_TPU_CONFIG", "XRT_LOCAL_WORKER", "XRT_MESH_SERVICE_ADDRESS", "XRT_SHARD_WORLD_SIZE", "XRT_SHARD_ORDINAL",
    "TPU_NUM_DEVICES", "XLA_EMIT_STEPLOG",
)  # fmt: skip

#: Flag -> why it is ignored.
IGNORED_FLAGS = {
    "--vm": "the workers are the TPU's VMs, not separate instances",
    "--conda-env": "the program runs in a container with its own Python",
    "--restart-tpuvm-pod-server": "there is no XRT server to restart since torch_xla 2.1",
    "--tpuvm-server-port": "there is no XRT server since torch_xla 2.1",
}

#: Variable of --env -> why it has no effect.
VARIABLES_WITHOUT_EFFECT = {
    "XLA_USE_BF16": "torch_xla 2.9 does not read it: convert the model, or use torch.autocast",
    "XLA_DOWNCAST_BF16": "torch_xla 2.9 does not read it: convert the model, or use torch.autocast",
}


@dataclass(frozen=True)
class XlaDistArgs:
    """A parsed command line of xla_dist.

    Attributes:
        name: of a TPU VM that exists.
        notes: one line for each flag or variable that has no effect.
    """

    name: str
    run: Run
    notes: tuple[str, ...]


def is_xla_dist(arguments: list[str]) -> bool:
    """Whether these arguments are those of xla_dist, whose only required flag was --tpu."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(word == "--tpu" or word.startswith("--tpu=") for word in before)


class _Parser(argparse.ArgumentParser):
    """Raises UserError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (flags of xla_dist; 'trainyard pod --help' lists those of 'trainyard pod')")


def _flags() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tpu", required=True)
    parser.add_argument("--vm", action="append")
    parser.add_argument("--docker-container", default="")
    parser.add_argument("--docker-image", default="")
    parser.add_argument("--docker-run-flag", action="append", default=[])
    parser.add_argument("--conda-env", default="")
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--restart-tpuvm-pod-server", action="store_true")
    parser.add_argument("--tpuvm-server-port")
    return parser


def variables(pairs: Sequence[str]) -> dict[str, str]:
    """``["A=1", ...]`` as a mapping.

    Raises:
        UserError: one is not NAME=VALUE, or is a variable that differs on every worker.
    """
    found = dict(job_options.pairs(pairs, "--env"))
    for name in DISTRIBUTED:
        if name in found:
            raise UserError(f"{name} differs on every worker, where the launcher sets it: remove it")
    return found


def parse(arguments: list[str], default_image: Callable[[], str]) -> XlaDistArgs:
    """Parse a command line of xla_dist.

    Args:
        default_image: returns the image to use if the command line has none.
    Raises:
        UserError: a flag is unknown or wrong.
    """
    parser = _flags()
    at = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = parser.parse_known_args(arguments[:at])
    unknown = next((word for word in rest if word.startswith("-")), None)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise UserError(f"xla_dist has no flag {unknown}{nearest(unknown.partition('=')[0], known)}")
    command = rest + arguments[at + 1 :]
    if not command:
        raise UserError("no program: give it after --, as in '-- python train.py'")
    if options.conda_env and (options.docker_image or options.docker_container or options.docker_run_flag):
        raise UserError("--conda-env cannot be used with --docker-...: remove --conda-env")
    env = variables(options.env)
    given = [flag for flag in IGNORED_FLAGS if getattr(options, flag[2:].replace("-", "_"))]
    notes = [f"{flag} is ignored: {IGNORED_FLAGS[flag]}" for flag in given]
    notes += [
        f"{name} has no effect: {VARIABLES_WITHOUT_EFFECT[name]}" for name in env if name in VARIABLES_WITHOUT_EFFECT
    ]
    run = Run(
        image=options.docker_image or default_image(),
        command=tuple(command),
        env=env,
        flags=tuple(options.docker_run_flag),
        container=options.docker_container or shell_commands.CONTAINER,
        program=True,
    )
    return XlaDistArgs(options.tpu, run, tuple(notes))
