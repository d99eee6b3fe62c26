"""``trainyard update`` in images: the groups security, base and framework, and what breaks a command alone.

The repositories extend a target with a framework of a few kilobytes (tests/miniature).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testcontainers.community.registry import DockerRegistryContainer

from tests import miniature as miniatures
from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from tests.image.small_images import bridge
from tests.miniature import Miniature, torch
from trainyard.image import base_image

pytestmark = [
    pytest.mark.concurrent,
    pytest.mark.slow("tests/unit/test_update.py, with the same groups over locks and without images"),
]

SPEC = """\
extends: mini
name: mini-updated
platforms: [linux/amd64]
requirements: requirements.txt
code: [train.py]
run: python train.py
smoke: {args: [], expect: 'trained with ([0-9]+[.][0-9]+)'}
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Miniature]:
    """A checkout whose catalogue the tests change."""
    with miniatures.checkout(tmp_path_factory.mktemp("update"), bridge()) as made:
        made.add("mini")
        made.index.uploaded = dict.fromkeys(made.index.files, "2026-01-01T00:00:00Z")
        yield made


def locked(checkout: Miniature, folder: Path, old: str = "", free: str = "") -> Path:
    """Make a repository that is locked with requirements, and then asks for less; return its lock."""
    (folder / "trainyard.yaml").write_text(SPEC, encoding="utf-8")
    (folder / "train.py").write_text("import torch\nprint('trained with', torch.__version__)\n", encoding="utf-8")
    for requirements in dict.fromkeys((old, free)):
        (folder / "requirements.txt").write_text("\n".join(requirements.split("; ")), encoding="utf-8")
        checkout.run("lock", str(folder))
    return folder / "pylock.trainyard.toml"


def updated(checkout: Miniature, folder: Path, *words: str) -> dict[str, Any]:
    """Run ``trainyard update`` for a repository, with its report in report.md; return its result."""
    bounds = ("--runs=1", "--slower=9", "--larger=2", f"--report={folder / 'report.md'}")
    return dict(checkout.json("update", str(folder), *words, *bounds))


def test_an_advisory_is_closed_by_the_nearest_release_that_has_none(checkout: Miniature, tmp_path: Path) -> None:
    lock = locked(checkout, tmp_path, "wheel==0.38.0", "wheel")
    result = updated(checkout, tmp_path, "--only=security")
    assert (result["taken"], result["closed"]) == (["security"], ["wheel PYSEC-2022-43017"])
    report = (tmp_path / "report.md").read_text("utf-8").splitlines()
    assert "- wheel 0.38.0 -> 0.38.4" in report and "- closes wheel PYSEC-2022-43017" in report
    assert 'version = "0.38.4"' in lock.read_text("utf-8")


def test_what_breaks_a_command_alone_is_left_out_and_the_rest_is_taken(checkout: Miniature, tmp_path: Path) -> None:
    """flask 2.2.2, which no requirement names, imports what werkzeug 3 no longer has."""
    (tmp_path / "constraints.txt").write_text("flask==2.2.2\nnumpy==2.4.6\n", encoding="utf-8")
    asked = "pytest-flask; werkzeug{}; tabulate{}; -c constraints.txt"
    lock = locked(checkout, tmp_path, asked.format("==2.3.8", "==0.9.0"), asked.format("", ""))
    result = updated(checkout, tmp_path, "--only=major", "--as-of=2026-11-27")
    (step,) = result["steps"]
    ((words, why),) = step["left_out"].items()
    assert words == "werkzeug 2.3.8 -> 3.1.9"
    assert why.startswith("fails beside the training: flask: flask: ImportError: cannot import name 'url_quote'")
    rows = {row["name"]: row for row in step["comparison"]["rows"]}
    assert "console script" in rows["beside the training"]["after"] and rows["smoke test"]["after"] == "passed"
    assert f"- left out: {words} ({why})" in (tmp_path / "report.md").read_text("utf-8").splitlines()
    assert 'version = "2.3.8"' in lock.read_text("utf-8") and 'version = "0.10.0"' in lock.read_text("utf-8")


def test_the_framework_of_a_newer_trainyard_is_taken(checkout: Miniature, tmp_path: Path) -> None:
    lock = locked(checkout, tmp_path)
    checkout.index.add(torch("2.10.0"))
    image = checkout.folder / "images" / "mini" / "image.yaml"
    image.write_text(image.read_text("utf-8").replace("torch==2.9.1", "torch==2.10.0"), encoding="utf-8")
    checkout.run("lock", "mini")
    checkout.run("render")
    assert updated(checkout, tmp_path, "--only=major")["taken"] == []
    result = updated(checkout, tmp_path, "--only=framework")
    assert result["taken"] == ["framework"]
    assert result["steps"][0]["changes"][0] == "torch 2.9.1 -> 2.10.0"
    rows = {row["name"]: row for row in result["steps"][0]["comparison"]["rows"]}
    assert (rows["accuracy or value"]["before"], rows["accuracy or value"]["after"]) == ("2.9", "2.1")
    assert 'version = "2.10.0"' in lock.read_text("utf-8")


def published(reference: str, text: str, folder: Path) -> str:
    """Push a base with a text in one of its files, and return its digest."""
    below = base_image.resolve(CONTEXT, "debian-13").reference
    (folder / "Dockerfile").write_text(f"FROM {below}\nRUN echo '{text}' > /etc/issue\n", encoding="utf-8")
    metadata = folder / "metadata.json"
    tag = ("--provenance=false", f"--tag={reference}", f"--metadata-file={metadata}")
    ENGINE.buildx("build", *tag, "--output=type=registry", str(folder))
    return str(json.loads(metadata.read_text("utf-8"))["containerimage.digest"])


def test_a_newer_base_of_the_registry_is_taken(
    checkout: Miniature, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server: DockerRegistryContainer
    with running.container() as server:
        base = f"{running.address(server)}/debian:13-slim"
        request.addfinalizer(lambda: [image.remove(force=True) for image in ENGINE.images(base.rpartition(":")[0])])
        bases = checkout.folder / "images" / "bases.yaml"
        text = bases.read_text("utf-8").replace("docker.io/library/debian:13-slim", base)
        bases.write_text(text, encoding="utf-8")
        checkout.run("render")
        first = published(base, "first", tmp_path)
        lock = locked(checkout, tmp_path)
        assert f"{base}@{first}" in lock.read_text("utf-8")
        second = published(base, "second", tmp_path)
        result = updated(checkout, tmp_path, "--only=base")
    assert (result["taken"], result["steps"][0]["changes"]) == (["base"], [f"base {base}@{first} -> {base}@{second}"])
    assert f"{base}@{second}" in lock.read_text("utf-8")
