"""The command line of torch_xla's xla_dist, as guides up to PyTorch/XLA 2.0 have it, in today's terms.

    python -m scripts.pod --tpu=NAME --docker-image=IMAGE --env XLA_USE_BF16=1 -- python train.py --epochs 3

Its flags were (torch_xla v1.13, distributed/xla_dist.py): --tpu, --vm, --docker-container, --docker-image,
--docker-run-flag, --conda-env, --env, --restart-tpuvm-pod-server, --tpuvm-server-port, and the program after ``--``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from scripts.cli import UserError, nearest
from scripts.pods import remote
from scripts.pods.training import Run

#: Variables that xla_dist set itself and refused from the user; today the launcher and PJRT find these things out.
DISTRIBUTED = (
    "XRT_TPU_CONFIG", "XRT_LOCAL_WORKER", "XRT_MESH_SERVICE_ADDRESS", "XRT_SHARD_WORLD_SIZE", "XRT_SHARD_ORDINAL",
    "TPU_NUM_DEVICES", "XLA_EMIT_STEPLOG",
)  # fmt: skip

#: Flag -> why it has no meaning today.
WITHOUT_MEANING = {
    "--vm": "the workers are the TPU's own VMs, no instances beside it",
    "--conda-env": "the program runs in a container, which has its own Python",
    "--restart-tpuvm-pod-server": "there is no XRT server to restart since torch_xla 2.1",
    "--tpuvm-server-port": "there is no XRT server since torch_xla 2.1",
}

#: Variable of --env -> why it has no effect today.
WITHOUT_EFFECT = {
    "XLA_USE_BF16": "torch_xla 2.9 does not read it: convert the model, or use torch.autocast",
    "XLA_DOWNCAST_BF16": "torch_xla 2.9 does not read it: convert the model, or use torch.autocast",
}


@dataclass(frozen=True)
class Old:
    """What such a command line asks for.

    Attributes:
        name: of a TPU that is there.
        notes: one line for each thing that means nothing today.
    """

    name: str
    run: Run
    notes: tuple[str, ...]


def spoken(arguments: list[str]) -> bool:
    """Whether these arguments are xla_dist's."""
    before = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(word == "--tpu" or word.startswith("--tpu=") for word in before)


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (xla_dist's flags; make pod has variables instead, see docs/jobs/pod.md)")


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
        UserError: one is no NAME=VALUE, or is one that the launcher must find out for itself.
    """
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"{pair!r} in the environment is not NAME=VALUE")
        if name in DISTRIBUTED:
            raise UserError(f"{name} is different on every worker and is found out there: leave it out")
        found[name] = value
    return found


def parse(arguments: list[str], default_image: Callable[[], str]) -> Old:
    """
    Args:
        default_image: gives the image where the command line has none.
    Raises:
        UserError: a flag is unknown or wrong; the nearest is named.
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
        raise UserError("no program: it follows after --, as in '-- python train.py'")
    if options.conda_env and (options.docker_image or options.docker_container or options.docker_run_flag):
        raise UserError("--conda-env and --docker-... exclude each other: leave --conda-env out")
    env = variables(options.env)
    given = [flag for flag in WITHOUT_MEANING if getattr(options, flag[2:].replace("-", "_"))]
    notes = [f"{flag} means nothing today: {WITHOUT_MEANING[flag]}" for flag in given]
    notes += [f"{name} has no effect: {WITHOUT_EFFECT[name]}" for name in env if name in WITHOUT_EFFECT]
    run = Run(
        image=options.docker_image or default_image(),
        command=tuple(command),
        env=env,
        flags=tuple(options.docker_run_flag),
        container=options.docker_container or remote.CONTAINER,
        program=True,
    )
    return Old(options.tpu, run, tuple(notes))
