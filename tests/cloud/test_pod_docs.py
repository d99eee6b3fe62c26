"""Every command of docs/jobs/pod.md runs as it is printed: with gcloud and ssh, against fakes."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine import CONTEXT, ENGINE
from tests.fakes.project_iam import ProjectIam
from tests.fakes.tpu_vms import TpuVms

from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT
from trainyard.image import base_image

pytestmark = [pytest.mark.concurrent, pytest.mark.needs("gcloud")]

PAGE = ROOT / "docs/jobs/pod.md"
IMAGE = "us-central1-docker.pkg.dev/my-project/ml/trainyard:xla-2.9.0"
#: Prints its arguments; like the launcher, it runs a program after `--`.
ENTRYPOINT = b'#!/bin/sh\n[ "$1" = -- ] && { shift; exec "$@"; }\necho "trains: $*"\n'


@pytest.fixture
def image() -> Iterator[str]:
    """A small image with the label of Trainyard's images; its programs print their arguments."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, text in {"launch": ENTRYPOINT, "python": b'#!/bin/sh\necho "python runs: $2"\n'}.items():
            entry = tarfile.TarInfo(f"usr/local/bin/{name}")
            entry.size, entry.mode = len(text), 0o755
            archive.addfile(entry, io.BytesIO(text))
    container = ENGINE.client.containers.create(
        base_image.resolve(CONTEXT, "debian-12").reference, labels=resource_labels("docs")
    )
    try:
        container.put_archive("/", stream.getvalue())
        changes = ['ENTRYPOINT ["launch"]', "LABEL io.trainyard.target=xla"]
        made = container.commit("trainyard-pod-docs", "xla", changes=changes)
    finally:
        container.remove(force=True)
    yield "trainyard-pod-docs:xla"
    ENGINE.client.images.remove(str(made.id), force=True)


@pytest.mark.slow("test_pod.py, on the same fake of the TPU API")
def test_every_command_of_the_page_runs(image: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert "trainyard pod" in blocks[-1], "the page ends with a command that deletes what the others created"
    with ProjectIam() as iam, TpuVms(images={IMAGE: image}) as cloud:
        environment = os.environ | iam.environment(tmp_path) | cloud.environment(tmp_path) | {"TRAINYARD_POLL": "3s"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        script = "\n".join(blocks)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env=environment,
                              capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        assert not cloud.nodes and not cloud.queue
        assert len(iam.bindings["roles/artifactregistry.reader"]) == 1
    lines = re.findall(r"^\S+ \S+ \S+ \[(\d)\] (.*)$", done.stdout, re.MULTILINE)
    assert lines.count(("1", "trains: mnist --epochs 2 --job-dir=gs://my-bucket/run1")) == 1
    assert lines.count(("0", "trains: mnist --epochs 2")) == 3, "run2, run3, and run3's log"
    assert ("1", 'python runs: print("step 1")') in lines
    assert "XLA_USE_BF16 has no effect" in done.stderr


def test_the_options_of_the_page_exist_and_its_links_resolve() -> None:
    """Leave the description of every option to the page of all commands."""
    from trainyard_jobs.commands import pod
    from trainyard_jobs.commands.pod import authorize_tpu

    text = PAGE.read_text(encoding="utf-8")
    commands = (pod.command, authorize_tpu.command)
    options = {name for command in commands for one in command.params for name in one.opts}
    ours = text.partition("Command lines of xla_dist")[0]
    assert set(re.findall(r"`(--[a-z-]+)", ours)) - options == set()
    assert "(../commands.md#trainyard-pod)" in text
    for target in re.findall(r"\]\(([^)#]+\.md)", text):
        assert (PAGE.parent / target).is_file(), target
