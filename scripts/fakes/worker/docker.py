#!/usr/bin/env python3
"""The `docker` of a stand-in for a TPU VM: Docker's own client, in a corner of the host's engine that is this worker's.

What differs from a VM's engine is put right here and nowhere else: containers get this worker's name in front of their
own, the VM's network is that of this container, and images of registries that nobody reaches come from local ones.
/etc/trainyard-worker.json says {"worker": name, "labels": {...}, "images": {name: local image}, "token": "..."}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

CLIENT = "/usr/bin/docker"
LOGINS = "/run/docker-logins"
#: Commands whose words after the flags are names of containers; of `exec` only the first is.
BY_NAME = ("logs", "wait", "stop", "kill", "rm", "start", "restart", "inspect", "exec", "port", "top")
#: Flags of those commands that take their value as the next word.
WITH_VALUE = ("--format", "-f", "--time", "-t", "--signal", "-s", "--since", "--until", "--tail", "-n", "-e", "--env",
              "-u", "--user", "-w", "--workdir")  # fmt: skip


def host_of(image: str) -> str:
    """The registry of an image's name, "" if the name says none."""
    first = image.partition("/")[0]
    return first if "/" in image and ("." in first or ":" in first) else ""


def logins() -> list[str]:
    try:
        with open(LOGINS) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def local(image: str, worker: dict[str, Any]) -> str:
    """The local image that stands for one of a registry; ends the program as the registry would, without a login."""
    if image not in worker["images"]:
        return image
    if host_of(image).endswith(("pkg.dev", "gcr.io")) and host_of(image) not in logins():
        sys.exit(f"Error response from daemon: pull access denied for {image}: Unauthenticated request.")
    return str(worker["images"][image])


def login(words: list[str], worker: dict[str, Any]) -> None:
    """What an Artifact Registry host makes of a token: it takes the one that the metadata server gave out."""
    if sys.stdin.read().strip() != worker["token"] or "oauth2accesstoken" not in words:
        sys.exit("Error response from daemon: unauthorized: authentication failed")
    with open(LOGINS, "a") as file:
        file.write(words[-1].replace("https://", "") + "\n")
    print("Login Succeeded")


def run(words: list[str], worker: dict[str, Any]) -> list[str]:
    """`docker run`, its flags and image changed; the command after the image stays as it is."""
    made = [f"--label={name}={value}" for name, value in worker["labels"].items()]
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in (
            "--name",
            "--net",
            "--network",
            "-v",
            "--volume",
            "-e",
            "--env",
            "--shm-size",
            "--label",
            "--mount",
        ):
            word = f"{word}={words.pop(0)}"
        flag, _, value = word.partition("=")
        if flag == "--name":
            word = f"--name={worker['worker']}.{value}"
        elif flag in ("--net", "--network") and value == "host":
            word = "--network=container:" + worker["worker"]
        elif flag == "--privileged":
            continue  # a TPU's devices need it; here are none
        elif flag in ("-v", "--volume"):
            if value.startswith("/"):
                sys.exit(f"docker: this stand-in for a TPU VM mounts volumes only, not {value}")
            word = "--volume=" + value
        elif flag in ("-e", "--env"):
            word = "--env=" + value
        made.append(word)
    return ["run", *made, local(words[0], worker), *words[1:]]


def by_name(command: str, words: list[str], worker: dict[str, Any]) -> list[str]:
    """A command about containers: their names, with this worker's in front."""
    made = [command]
    # `-f` is --force to rm and --follow to logs; to the others it is --format, with a value.
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
