"""The layer of a user's code is written without an engine exactly as a build makes it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import awkward_code
from tests.engine import CONTEXT, ENGINE
from trainyard.image import base_image
from trainyard.spec.workspace import Site, Workspace, WorkspaceDocument
from trainyard.workspace import code_layer

pytestmark = pytest.mark.concurrent

IMAGE = "trainyard-test:code-layer"

DOCKERFILE = """\
ARG BASE
FROM ${BASE} AS code
COPY code.tar /code.tar
RUN mkdir -p /out && tar -xpf /code.tar -C /out
FROM ${BASE}
COPY --link --from=code /code/../out /
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[code_layer.CodeLayer]:
    """The layer, which is that of the image IMAGE, too."""
    folder = tmp_path_factory.mktemp("code")
    awkward_code.write(folder)
    context = tmp_path_factory.mktemp("context")
    (context / "Dockerfile").write_text(DOCKERFILE, encoding="utf-8")
    workspace = Workspace(folder / "trainyard.yaml", WorkspaceDocument(extends="cpu"))
    layer = code_layer.write(
        workspace, context / "code.tar", Site("opt/requirements", "opt/requirements/bin", "/usr/bin/env python3")
    )
    base = base_image.resolve(CONTEXT, "debian-12").reference
    ENGINE.buildx("build", "--quiet", f"--build-arg=BASE={base}", f"--tag={IMAGE}", str(context))
    yield layer
    ENGINE.untag(IMAGE)


def in_container(*command: str) -> str:
    ended = subprocess.run(["docker", "run", "--rm", IMAGE, *command], capture_output=True, text=True, check=True)
    return ended.stdout


def test_its_diff_id_is_the_one_of_the_build(written: code_layer.CodeLayer) -> None:
    inspected = subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, text=True, check=True)
    assert written.diff_id == json.loads(inspected.stdout)[0]["RootFS"]["Layers"][-1] == awkward_code.DIFF_ID


def test_every_uid_of_group_0_can_write_the_code(written: code_layer.CodeLayer) -> None:
    shown = in_container("sh", "-c", "cd /workspace && stat -c '%n %A %u:%g %Y' . a a/x train.sh to-file")
    assert shown.splitlines() == [
        ". drwxrwxr-x 1000:0 315532800",
        "a drwxrwxr-x 1000:0 315532800",
        "a/x -rw-rw-r-- 1000:0 315532800",
        "train.sh -rwxrwxr-x 1000:0 315532800",
        "to-file lrwxrwxrwx 1000:0 315532800",
    ]


def test_every_name_arrives(written: code_layer.CodeLayer, tmp_path: Path) -> None:
    awkward_code.write(tmp_path)
    (tmp_path / "trainyard.yaml").unlink()
    expected = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    shown = in_container("sh", "-c", "cd /workspace && find . -mindepth 1 -print0")
    assert sorted(name.removeprefix("./") for name in shown.split("\0") if name) == expected
