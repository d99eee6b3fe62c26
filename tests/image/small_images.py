"""A spec outside the project whose wheels have a few hundred bytes, for tests of builds without a real framework."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import ENGINE
from tests.fakes import package_index
from tests.workspaces import write_lock
from trainyard.image import dockerfile
from trainyard.spec import model


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    """Write a wheel with one module."""
    modules = {f"{name}/__init__.py": f"__version__ = {version!r}\n"}
    file, body = package_index.wheel(name, version, requires, modules=modules)
    (folder / file).write_bytes(body)


def from_cache(log: str, step: str) -> bool:
    """Whether BuildKit took ``step`` from a cache, by a build's plain progress; steps are numbered per build."""
    (number,) = {line.split()[0] for line in log.splitlines() if step in line}
    return f"{number} CACHED" in log.splitlines()


def bridge() -> str:
    """Return the address of this host on the engine's bridge, at which builds and containers reach servers of tests."""
    networks = ENGINE.client.networks.get("bridge").attrs["IPAM"]["Config"]
    return str(networks[0].get("Gateway") or networks[0]["Subnet"].rpartition(".")[0] + ".1")


@pytest.fixture
def own_index(tmp_path: Path) -> Iterator[str]:
    """Address of a package index on this host that has torch 2.9.1+cpu and torchvision 0.24.1+cpu, and nothing else.

    It listens on the engine's bridge, so that builds reach it as they reach any index.
    """
    for name, version in (("torch", "2.9.1+cpu"), ("torchvision", "0.24.1+cpu")):
        folder = tmp_path / "index" / name
        folder.mkdir(parents=True)
        wheel(folder, name, version)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path / "index"))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    address = bridge()
    with http.server.ThreadingHTTPServer((address, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{address}:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def write_small(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Write a spec whose framework is torch and torchvision alone, outside the project; its folder."""
    folder = tmp_path / "small"

    def write() -> str:
        folder.mkdir()
        (folder / "image.yaml").write_text(
            "summary: small\nbase: debian-12\n"
            "framework: {name: torch, packages: [torch==2.9.1, torchvision==0.24.1], index: pytorch-cpu}\n"
            "requirements: [einops==0.8.2]\n"
            "trainers: {package: torch, default: mnist}\nbudget: {size: 1 GB}\n"
            "smoke: {trainer: mnist, accuracy: 0.9}\n",
            encoding="utf-8",
        )
        write_lock(folder, framework="torch==2.9.1 torchvision==0.24.1", requirements="einops==0.8.2")
        dockerfile.write(dockerfile.rendered(model.load(str(folder))))
        return str(folder)

    _untag_small()  # left by a run that was killed
    yield write
    _untag_small()


def _untag_small() -> None:
    for image in ENGINE.images(label="io.trainyard.target=small"):
        for tag in image.tags:
            ENGINE.untag(tag)
