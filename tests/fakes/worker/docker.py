#!/usr/bin/env python3
"""The `docker` of a fake TPU VM: it runs Docker's client with the host's engine, which all workers share.

It hides what differs from an engine on the VM: names of containers are prefixed with the worker's name, the host
network is that of the worker's container, and local images replace those of registries that are not reachable.
/etc/trainyard-worker.json contains {"worker": name, "labels": {...}, "images": {name: local image}, "token": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CLIENT = "/usr/bin/docker"
LOGINS = "/run/docker-logins"
#: Commands whose arguments are names of containers; of `exec` only the first one.
BY_NAME = ("logs", "wait", "stop", "kill", "rm", "start", "restart", "inspect", "exec", "port", "top")
#: Flags of those commands whose value is the next argument.
WITH_VALUE = ("--format", "-f", "--time", "-t", "--signal", "-s", "--since", "--until", "--tail", "-n", "-e", "--env",
              "-u", "--user", "-w", "--workdir")  # fmt: skip
#: Flags of `docker run` whose value is the next argument, as far as tests use them.
RUN_WITH_VALUE = ("--name", "--net", "--network", "-v", "--volume", "-e", "--env", "--shm-size", "--label", "--mount")


def host_of(image: str) -> str:
    """The registry in an image's name; "" if it has none."""
    first = image.partition("/")[0]
    return first if "/" in image and ("." in first or ":" in first) else ""


def logins() -> list[str]:
    """The registries that :func:`login` logged in to."""
    try:
        with open(LOGINS) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def local(image: str, worker: dict[str, Any]) -> str:
    """The local image that replaces an image of a registry; exits as Docker does if the registry needs a login."""
    if image not in worker["images"]:
        return image
    if host_of(image).endswith(("pkg.dev", "gcr.io")) and host_of(image) not in logins():
        sys.exit(f"Error response from daemon: pull access denied for {image}: Unauthenticated request.")
    return str(worker["images"][image])


def login(words: list[str], worker: dict[str, Any]) -> None:
    """Log in to a host of Artifact Registry, which accepts the token that the metadata server issued."""
    if sys.stdin.read().strip() != worker["token"] or "oauth2accesstoken" not in words:
        sys.exit("Error response from daemon: unauthorized: authentication failed")
    with open(LOGINS, "a") as file:
        file.write(words[-1].replace("https://", "") + "\n")
    print("Login Succeeded")


def run(words: list[str], worker: dict[str, Any]) -> list[str]:
    """The arguments of `docker run` with other flags and another image; those after the image are unchanged."""
    made = [f"--label={name}={value}" for name, value in worker["labels"].items()]
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in RUN_WITH_VALUE:
            word = f"{word}={words.pop(0)}"
        flag, _, value = word.partition("=")
        if flag == "--name":
            word = f"--name={worker['worker']}.{value}"
        elif flag in ("--net", "--network") and value == "host":
            word = "--network=container:" + worker["worker"]
        elif flag == "--privileged":
            continue  # for a TPU's devices, which a fake does not have
        elif flag in ("-v", "--volume"):
            if value.startswith("/"):
                sys.exit(f"docker: this fake TPU VM mounts volumes only, not {value}")
            word = "--volume=" + value
        elif flag in ("-e", "--env"):
            word = "--env=" + value
        made.append(word)
    return ["run", *made, local(words[0], worker), *words[1:]]


def by_name(command: str, words: list[str], worker: dict[str, Any]) -> list[str]:
    """The arguments of a command about containers, with their names prefixed."""
    made = [command]
    # `-f` is --force for rm, --follow for logs, and --format, which has a value, for the others.
    valued = [flag for flag in WITH_VALUE if flag != "-f" or command not in ("rm", "logs")]
    names = 0
    while words:
        word = words.pop(0)
        made.append(word)
        if word in valued:
            made.append(words.pop(0))
        elif not word.startswith("-") and (command != "exec" or not names):
            made[-1] = f"{worker['worker']}.{word}"
            names += 1
            if command == "exec":
                return made + words
    return made


def main() -> None:
    with open("/etc/trainyard-worker.json") as file:
        worker = json.load(file)
    command, words = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command == "login":
        login(words, worker)
        return
    if command == "pull":
        image = local(words[-1], worker)
        if image != words[-1]:
            return
        made = [command, *words]
    elif command == "run":
        made = run(words, worker)
    elif command == "image" and words[:1] == ["inspect"]:
        made = [command, *words[:-1], local(words[-1], worker)]
    elif command in BY_NAME:
        made = by_name(command, words, worker)
    else:
        made = [command, *words]
    os.execv(CLIENT, [CLIENT, *made])


if __name__ == "__main__":
    main()
