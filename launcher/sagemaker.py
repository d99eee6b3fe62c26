"""SageMaker's argument `train`: what it starts, and what the trainer gets (R15.7). Imported only where it is used."""

from __future__ import annotations

import json
import os

from launcher.errors import config_error
from launcher.host import regular
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

    from launcher.image import Image

ROOT = "/opt/ml"
CONFIG = ROOT + "/input/config"
PROGRAM = "sagemaker_program"
SUBMITTED = "sagemaker_submit_directory"
# Hyperparameters that SageMaker's SDK adds for its own toolkit, beside those that start with sagemaker_ (R15.7).
RESERVED = ("_tuning_objective_metric", "default_user_module_name")
MAX_FILE = 1 << 20


def is_job(env: Mapping[str, str], sysroot: str) -> bool:
    """Whether this is a container of a SageMaker training job."""
    return bool(text(env, "TRAINING_JOB_NAME")) or os.path.isdir(sysroot + CONFIG)


def command(word: str, image: Image, env: Mapping[str, str], sysroot: str) -> tuple[list[str], bool]:
    """The command for SageMaker's argument `train`, and whether it is a trainer of the image (R15.7).

    Args:
        word: "train" or "serve".
        image: its trainers are looked up.
        env: SAGEMAKER_PROGRAM.
        sysroot: prefix of /opt/ml.

    Raises:
        LaunchError: (2) if nothing says which trainer to start, or the hyperparameters cannot be read.
    """
    if word == "serve":
        raise config_error("SageMaker starts images that serve a model with `serve`, and this image only trains")
    given = read(sysroot, "hyperparameters.json")
    program = text(env, PROGRAM.upper()) or _value(given.get(PROGRAM, ""))
    flags = arguments(given)
    if not program and image.default:
        return [*image.trainers[image.default], *flags], True
    if program in image.trainers:
        return [*image.trainers[program], *flags], True
    script = f"{ROOT}/code/{program}"
    if program and os.path.isfile(sysroot + script):
        return [*([image.python()] if script.endswith(".py") else []), script, *flags], False
    known = f"a trainer of this image ({', '.join(sorted(image.trainers))}) or " if image.trainers else ""
    how = f"set the hyperparameter {PROGRAM}, or the variable {PROGRAM.upper()}, to {known}a file in {ROOT}/code"
    if not program:
        raise config_error(f"this image has no default trainer: {how}")
    if _value(given.get(SUBMITTED, "")):
        raise config_error(
            f"{program[:60]!r} is in {SUBMITTED}, and the launcher does not download code: build it into the image and "
            f"leave out entry_point and source_dir; then {how}"
        )
    raise config_error(f"{PROGRAM} is {program[:60]!r}, which is not in this image: {how}")


def arguments(given: Mapping[str, object]) -> list[str]:
    """Hyperparameters as flags, sorted by name, as in the script mode of SageMaker's toolkit (R15.7).

    An empty value leaves the flag alone: {"epochs": "2", "amp": ""} gives --amp --epochs 2.
    """
    found: list[str] = []
    for name in sorted(given):
        if not name or name.startswith("sagemaker_") or name in RESERVED:
            continue
        found.append(f"--{name}" if len(name) > 1 else f"-{name}")
        value = _value(given[name])
        if value:
            found.append(value)
    for word in found:
        if not _is_argument(word):
            raise config_error(f"{CONFIG}/hyperparameters.json: {word[:40]!r} cannot be an argument of a command")
    return found


def _is_argument(word: str) -> bool:
    """Whether a text of JSON can be an argument: it has no NUL character and no half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def variables(sysroot: str) -> dict[str, str]:
    """The variables of SageMaker's toolkit that scripts read for their folders (R15.7)."""
    found = {"SM_MODEL_DIR": ROOT + "/model", "SM_OUTPUT_DATA_DIR": ROOT + "/output/data"}
    for channel in read(sysroot, "inputdataconfig.json"):
        # The characters that SageMaker allows in the name of a channel.
        if channel.isascii() and channel.replace(".", "").replace("-", "").replace("_", "").isalnum():
            found[f"SM_CHANNEL_{channel.upper()}"] = f"{ROOT}/input/data/{channel}"
    return found


def read(sysroot: str, name: str, absent: type[OSError] = FileNotFoundError) -> dict[str, object]:
    """Return the object in a file of /opt/ml/input/config, {} without one. Raises LaunchError (2) if it is invalid."""
    path = f"{CONFIG}/{name}"
    try:
        with open(sysroot + path, "rb", opener=regular) as file:
            found = json.loads(file.read(MAX_FILE).decode("utf-8"))
    except absent:
        return {}
    except OSError as error:
        raise config_error(f"{path}: {error.strerror}; make it readable for this user") from None
    except (ValueError, RecursionError):
        raise config_error(f"{path} is not JSON of at most 1 MiB") from None
    if not isinstance(found, dict):
        raise config_error(f"{path} is not a JSON object")
    return found


def _value(value: object) -> str:
    """The text of a hyperparameter: SageMaker has strings only, and its SDK encodes other values in them as JSON."""
    word = value if isinstance(value, str) else json.dumps(value)
    try:
        decoded = json.loads(word)
    except (ValueError, RecursionError):
        return word
    if isinstance(decoded, dict):
        return ",".join(f"{key}={decoded[key]}" for key in sorted(decoded))
    if isinstance(decoded, (int, float)) and not isinstance(decoded, bool):
        return word.strip()  # as written: 1e-3 and not 0.001
    return "" if decoded is None else str(decoded)
