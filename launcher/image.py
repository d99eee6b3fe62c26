"""Framework and trainers of the image, from /opt/trainyard/recipe.json; no framework is imported (R10.3)."""

from __future__ import annotations

from launcher.errors import config_error
from launcher.host import regular
from launcher.settings import text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from launcher.host import Host

ACCELERATORS = ("none", "nvidia", "tpu")
FRAMEWORKS = ("torch", "torch_xla", "torch_tpu", "tensorflow", "jax")
RECIPE = "/opt/trainyard/recipe.json"


class Image:
    """The content of an image.

    Attributes:
        name: as in its recipe; "" if unknown.
        accelerator: accelerator that the image is made for, one of ACCELERATORS; "" if unknown.
        framework: one of FRAMEWORKS; "" if unknown (then the variables of every framework are exported).
        version: version of the framework; "" if unknown.
        trainers: trainer name -> command line.
        default: name of the default trainer; "" if there is none.
        cuda: CUDA of an image for NVIDIA GPUs, such as 13.2; "" if unknown, and then `driver` and `gpus` are, too.
        driver: least version of the NVIDIA driver on Linux, such as 580 or 525.60.13.
        gpus: compute capabilities with machine code, and `+PTX` after those with PTX, such as `8.0 9.0+PTX`.
    """

    __slots__ = ("accelerator", "cuda", "default", "driver", "framework", "gpus", "name", "trainers", "version")

    def __init__(
        self,
        name: str = "",
        framework: str = "",
        version: str = "",
        trainers: Mapping[str, list[str]] | None = None,
        default: str = "",
        accelerator: str = "",
        cuda: str = "",
        driver: str = "",
        gpus: str = "",
    ) -> None:
        self.name = name
        self.framework = framework
        self.version = version
        self.trainers = dict(trainers or {})
        self.default = default
        self.accelerator = accelerator
        self.cuda = cuda
        self.driver = driver
        self.gpus = gpus

    def may_be(self, *frameworks: str) -> bool:
        """Whether the image contains one of these frameworks, or its framework is unknown."""
        return not self.framework or self.framework in frameworks

    def python(self) -> str:
        """The Python that has the image's packages: that of the default trainer."""
        command = self.trainers.get(self.default) or ["python3"]
        return command[0] if command[0].rpartition("/")[2].startswith("python") else "python3"


def read_image(host: Host, env: Mapping[str, str]) -> Image:
    """Read the recipe; LAUNCHER_FRAMEWORK replaces its framework and version (R10.3).

    Raises:
        LaunchError: (2) if the recipe is invalid, or LAUNCHER_FRAMEWORK is not one name==version.
    """
    image = _read_recipe(host)
    word = text(env, "LAUNCHER_FRAMEWORK")
    if word:
        name, _, version = word.partition("==")
        name, version = name.strip().replace("-", "_").lower(), version.strip()
        # A second name==version, as of torch_xla beside torch, would otherwise be part of an unknown version.
        if name not in FRAMEWORKS or not all(one.isalnum() or one in ".+-_!" for one in version):
            raise config_error(
                f"LAUNCHER_FRAMEWORK is {word[:60]!r}: it must be one name==version; names: {', '.join(FRAMEWORKS)}"
            )
        if (name, version) != (image.framework, image.version):
            image.cuda = image.driver = image.gpus = ""  # those of the framework that is replaced
        image.framework, image.version = name, version
    return image


def _read_recipe(host: Host) -> Image:
    path = host.sysroot + RECIPE
    try:
        with open(path, "rb", opener=regular) as file:
            content = file.read()
    except FileNotFoundError:
        return Image()
    except OSError as error:
        raise config_error(f"{path}: {error.strerror}; make it readable for this user") from None
    try:
        recipe = _loads(content)
        framework, accelerator = recipe["framework"], recipe["accelerator"]
        image = Image(
            name=recipe["name"],
            framework=framework["name"],
            version=framework["version"],
            trainers={**recipe["commands"]},
            default=recipe["default"],
            accelerator=accelerator["kind"],
            cuda=accelerator["cuda"],
            driver=accelerator["driver"],
            gpus=accelerator["gpus"],
        )
        problem = _find_problem(image)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if problem:
        raise config_error(f"{path} is not a valid recipe ({problem[:200]}); rebuild the image")
    return image


class _Context:
    """Hold the attributes that the scanner of json's decoder reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = parse_constant = float
    parse_int = int


def _loads(content: bytes) -> Any:
    """Parse JSON without `json`, which imports `re` and takes as long as the rest of the start.

    What the scanner in C does not take, of the file or in another version of Python, is left to `json`.
    """
    try:
        from _json import make_scanner

        scanner: Any = make_scanner
        words = content.decode("utf-8").strip(" \t\r\n")
        value, end = scanner(_Context)(words, 0)
        if end == len(words):
            return value
    except (ImportError, AttributeError, TypeError, ValueError, StopIteration):
        pass
    import json

    return json.loads(content)


def _find_problem(image: Image) -> str:
    """What is invalid in an image's recipe; "" if nothing is."""
    if image.framework not in FRAMEWORKS:
        return f"framework.name is {image.framework!r}, not one of {', '.join(FRAMEWORKS)}"
    if not all(isinstance(word, str) for word in (image.name, image.version, image.default)):
        return "name, framework.version and default must be strings"
    if image.accelerator not in ACCELERATORS:
        return f"accelerator.kind is {image.accelerator!r}, not one of {', '.join(ACCELERATORS)}"
    if (image.cuda, image.driver, image.gpus) != ("", "", ""):
        capabilities = [word[:-4] if word.endswith("+PTX") else word for word in str(image.gpus).split()] or [""]
        if not all(is_version(word, 2) for word in (image.cuda, *capabilities)) or not is_version(image.driver):
            return (
                f"cuda, driver and gpus are {image.cuda!r}, {image.driver!r} and {image.gpus!r}, not versions such as "
                "'13.2', '580' and '8.0 9.0+PTX'"
            )
    for name, command in image.trainers.items():
        if not (isinstance(command, list) and command and all(isinstance(word, str) for word in command)):
            return f"the command of trainer {name!r} is not a list of strings"
    if image.default and image.default not in image.trainers:
        return f"the default trainer {image.default!r} is not among the trainers"
    return ""


def is_version(word: object, parts: int = 0) -> bool:
    """Return whether a value is digits with dots between them; `parts` of them, or any number for 0."""
    numbers = word.split(".") if isinstance(word, str) else []
    if not numbers or (parts and len(numbers) != parts):
        return False
    return all(number.isascii() and number.isdigit() and len(number) < 7 for number in numbers)
