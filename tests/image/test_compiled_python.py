"""A repository on a base whose Python was compiled to /usr/local, as in the official images of Python.

The base at the registry is a substitute: Debian's source package of Python 3.13 on Debian 13, without optimizations,
with the files and the variables of https://github.com/docker-library/python/blob/master/Dockerfile-linux.template.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from trainyard import cli
from trainyard.image import base_image
from trainyard.spec import model
from trainyard.spec.naming import LABELS

NAME = "compiled-python"

#: Stays on the host, so that Python is compiled once (6 minutes on 2 busy cores, 2026-11).
KEPT = "trainyard-base:test-compiled-python"

BASE = r"""
ARG BASE
FROM ${BASE} AS source
SHELL ["/bin/bash", "-Eeuo", "pipefail", "-c"]
RUN sed 's/^deb /deb-src /' /etc/apt/sources.list >/etc/apt/sources.list.d/source.list && apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends dpkg-dev gcc libc6-dev make xz-utils \
      libbz2-dev libffi-dev liblzma-dev libsqlite3-dev libssl-dev zlib1g-dev \
 && cd /tmp && apt-get -qq source --download-only python3.13 && mkdir python \
 && tar -xf python3.13_*.orig.tar.xz -C python --strip-components 1
RUN cd /tmp/python && ./configure --quiet --prefix=/usr/local --enable-shared --with-ensurepip \
 && make -s -j2 LDFLAGS=-Wl,--strip-all && make -s install \
 && find /usr/local -depth \( -type d \( -name test -o -name tests -o -name idle_test \) \
      -o -type f \( -name '*.pyc' -o -name 'libpython*.a' \) \) -exec rm -rf {} +

FROM ${BASE} AS whole
RUN apt-get -qq update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends ca-certificates netbase tzdata \
      libbz2-1.0 libffi8 liblzma5 libsqlite3-0 libssl3t64 zlib1g \
 && rm -rf /var/lib/apt/lists/*
COPY --from=source /usr/local /usr/local
RUN ldconfig && ln -sT python3 /usr/local/bin/python && ln -sT pip3 /usr/local/bin/pip

FROM scratch
COPY --from=whole / /
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    GPG_KEY=7169605F62C751356D054A26A821E680E5FA6305 PYTHON_VERSION=3.13.5 \
    PYTHON_SHA256=93e583f243454e6e9e4588ca2c2662206ad961659863277afcdb96801647d640
CMD ["python3"]
"""

DOCUMENT = f"""\
extends: tf-cpu
name: {NAME}
base: python-3.13
requirements: []
code: [train.py]
run: ./train.py
smoke: {{expect: 'loss 0.5'}}
compiler: true
build:
  packages: [g++]
  sources: [pyahocorasick==2.1.0]
"""

TRAIN = """\
#!/usr/bin/env python3
import json, os, sys, sysconfig
import ahocorasick, tensorflow
print("loss 0.5")
print(json.dumps({
    "prefix": sys.base_prefix,
    "executable": os.path.realpath(sys.executable),
    "extension": ahocorasick.__file__,
    "headers": os.path.isfile(sysconfig.get_path("include") + "/Python.h"),
    "others": sorted(name for name in ("/usr/bin/python3", "/usr/local/bin/pip3.13") if os.path.exists(name)),
    "user": os.getuid(),
}))
"""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reference of the base ``python-3.13`` at a registry."""
    if not ENGINE.find(KEPT):
        (tmp_path / "Dockerfile").write_text(BASE, encoding="utf-8")
        debian = base_image.resolve(CONTEXT, "debian-13").reference
        options = ("--quiet", "--load", "--provenance=false", f"--tag={KEPT}", f"--build-arg=BASE={debian}")
        ENGINE.buildx("build", *options, str(tmp_path))
    with running.container() as server:
        reference = f"{running.address(server)}/library/python:3.13-slim-trixie"
        ENGINE.client.images.get(KEPT).tag(reference)
        ENGINE.client.images.push(reference)
        base = model.bases()["python-3.12"].model_copy(update={"image": reference, "python": "3.13"})
        monkeypatch.setitem(model.bases(), "python-3.13", base)
        yield reference
    ENGINE.untag(reference)


@pytest.fixture
def trainyard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """``trainyard("image")``: standard output of a command that must succeed, in a repository that is the folder."""
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "trainyard.yaml").write_text(DOCUMENT, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    (folder / "train.py").chmod(0o755)
    monkeypatch.chdir(folder)

    def run(*words: str) -> str:
        capfd.readouterr()
        status = cli.run(list(words))
        found = capfd.readouterr()
        assert status == 0, f"{' '.join(words)}: {found.err[-4000:]}"
        return found.out

    yield run
    for image in ENGINE.images(label=f"{LABELS}.target={NAME}"):
        ENGINE.client.images.remove(image.id, force=True)


@pytest.mark.big("tf-cpu")
def test_a_repository_is_built_verified_run_and_listed_on_a_compiled_python(
    python: str, trainyard: Callable[..., str]
) -> None:
    made = json.loads(trainyard("image", "--json"))
    image = ENGINE.image(made["digest"], made_by="")
    assert image.labels[f"{LABELS}.tested"] == "trained"
    assert image.labels["org.opencontainers.image.base.name"].startswith(python.rpartition(":")[0])
    findings = json.loads(trainyard("verify", "--json"))
    assert findings["passed"] and "ENV " not in json.dumps(findings["findings"]), (
        "those of the official image are known"
    )
    words = ["docker", "run", "--rm", "--read-only", "--tmpfs=/tmp", "--user=4242:0", f"trainyard:{NAME}"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    found = json.loads(next(line for line in lines if line.startswith("{")))
    assert found.pop("extension").startswith("/opt/venv/lib/python3.13/site-packages/ahocorasick.cpython-313-")
    assert found == {
        "prefix": "/usr/local",
        "executable": "/usr/local/bin/python3.13",
        "headers": True,
        "others": [],
        "user": 4242,
    }
    components = json.loads(trainyard("sbom", "--json"))["components"]
    python_ = next(one for one in components if one["name"] == "python")
    assert (python_["type"], python_["purl"]) == ("application", "pkg:generic/python@3.13.5")
    assert not {"pip", "python3", "libpython3.13-stdlib"} & {one["name"] for one in components}
