"""Every command of the pages about jobs is run as written: real gcloud and kubectl, against the fakes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.engine import CONTEXT, ENGINE
from tests.fakes.kubernetes import Kubernetes
from tests.fakes.tpu_vms import TpuVms
from tests.fakes.vertex import Vertex

from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT
from trainyard.image import base_image

pytestmark = pytest.mark.concurrent

PAGES = ["jobs", "jobs/vertex", "jobs/ai-platform", "jobs/gke", "jobs/other-schedulers", "jobs/slurm", "jobs/tpu-vm"]
#: Those that take half a minute.
LONG = ["jobs/vertex", "jobs/tpu-vm"]
#: The image that tpu-vm.md runs on the workers.
IMAGE = "us-central1-docker.pkg.dev/my-project/ml/trainyard:xla-2.9.0"


def blocks(page: str) -> list[str]:
    """The shell blocks of a page, in order."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An image with a program named as a trainer, which prints its arguments."""
    script = b'#!/bin/sh\necho mnist trains with "$@"\n'
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("usr/local/bin/mnist")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
    container = ENGINE.client.containers.create(
        base_image.resolve(CONTEXT, "debian-12").reference, labels=resource_labels("docs")
    )
    try:
        container.put_archive("/", stream.getvalue())
        made = container.commit("trainyard-docs-test", "mnist")
    finally:
        container.remove(force=True)
    yield "trainyard-docs-test:mnist"
    ENGINE.client.images.remove(str(made.id), force=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the files of the checkout, for the files that the commands write."""
    made = tmp_path / "project"
    made.mkdir()
    for path in ROOT.iterdir():
        (made / path.name).symlink_to(path)
    return made


def schedulers(folder: Path, path: str) -> dict[str, str]:
    """Programs in place of sbatch and sky, which accept any file; other tests run the real ones."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("sbatch", "sky"):
        (programs / name).write_text('#!/bin/sh\nfor last; do :; done\ntest -s "$last"\n')
        (programs / name).chmod(0o755)
    return {"PATH": f"{programs}:{path}"}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow("test_jobs.py, on the same fakes")] if page in LONG else [])
        for page in PAGES
    ],
)
@pytest.mark.needs("gcloud", "kubectl")
def test_every_command_of_the_page_runs(page: str, folder: Path, request: pytest.FixtureRequest) -> None:
    found = blocks(page)
    assert found, f"docs/{page}.md has no shell block"
    with ExitStack() as stack:
        fakes = [stack.enter_context(Vertex(log=["epoch 1"])), stack.enter_context(Kubernetes(log=["epoch 1"]))]
        environment = os.environ | {"TRAINYARD_POLL": "1"}
        for fake in fakes:
            environment |= fake.environment(folder.parent)  # type: ignore[attr-defined]
        if any("tpu-vm" in block for block in found):
            workers = stack.enter_context(TpuVms(images={IMAGE: request.getfixturevalue("image")}))
            environment |= workers.environment(folder.parent)
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        if page in ("jobs/other-schedulers", "jobs/slurm"):
            environment |= schedulers(folder.parent, environment["PATH"])
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", "\n".join(found)], cwd=folder, env=environment,
                              capture_output=True, text=True, timeout=400, check=False)  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        if page == "jobs/tpu-vm":
            assert "mnist trains with --epochs 2 --job-dir=gs://my-bucket/run1" in done.stdout
            assert not workers.nodes
        if page == "jobs/gke":
            assert not fakes[1].pools  # type: ignore[attr-defined]
    for path in folder.glob("*.yaml"):
        assert path.is_symlink() or path.stat().st_size, f"{path.name} is empty"


def test_every_command_of_a_page_is_in_a_shell_block() -> None:
    """The test would not run a command in an indented block."""
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(r"^ {4,}(?:make|gcloud|kubectl|export) .*", outside, re.MULTILINE), page
