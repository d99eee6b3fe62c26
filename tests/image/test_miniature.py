"""From a spec to a published image with a framework of a few kilobytes, which trains: see tests/miniature.

What a real framework adds is tested with tf-cpu, and with the other targets by `make test ALL=1`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from testcontainers.community.registry import DockerRegistryContainer

from tests.engine import ENGINE
from tests.fakes import package_index
from tests.image.conftest import Finished
from tests.image.registry import running
from tests.miniature import Miniature, torch, torch_xla
from trainyard.image.smoke_containers import ENDPOINT, SmokeSandbox
from trainyard.oci.registry import Repository
from trainyard.sandbox.containers import lines_of, wait

pytestmark = pytest.mark.concurrent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """host:port of a registry."""
    started: DockerRegistryContainer
    with running.container() as started:
        yield running.address(started)


@pytest.fixture(scope="module")
def made(miniature: Miniature) -> dict[str, Any]:
    """What ``trainyard image mini`` reports."""
    return dict(miniature.json("image", "mini"))


def digest_of(address: str, tag: str) -> str | None:
    found = Repository(f"{address}/trainyard").manifest(tag)
    return found.digest if found else None


# --- a target whose framework comes from a package index --------------------------------------------------------------


def test_a_target_is_built_verified_and_trained_before_it_is_tagged(made: dict[str, Any]) -> None:
    assert made["build"]["index"] == "miniature"
    assert made["verify"]["passed"] and made["verify"]["findings"] == []
    trained = made["smoke"]
    assert trained["passed"] and trained["accuracy"] >= 90
    assert trained["tpu_states"][:2] == ["CREATING", "CREATING"], "the launcher waited for the TPU"
    assert trained["resumed_from"] > 0 and trained["restricted"] and trained["killed_while_saving"]
    assert (trained["processes"], trained["worker_processes"], trained["notes"]) == (2, 2, [])
    tags = ENGINE.client.images.get("trainyard:mini").tags
    assert any(tag.startswith("trainyard:mini-2.9.1-") for tag in tags)
    assert ENGINE.digest("trainyard:mini") == made["digest"]


def test_a_second_image_of_the_same_inputs_has_the_same_digest(made: dict[str, Any], miniature: Miniature) -> None:
    assert miniature.json("build", "mini")["digest"] == made["digest"]


@pytest.mark.slow("test_reproduce.py")
def test_two_builds_without_cache_are_equal(made: dict[str, Any], miniature: Miniature) -> None:
    found = miniature.json("reproduce", "mini")
    assert found["same"] and len(set(found["digests"])) == 1


def test_an_image_that_learns_too_little_is_not_tagged(made: dict[str, Any], miniature: Miniature) -> None:
    miniature.add("mini-strict")
    done = miniature.call("image", "mini-strict")
    assert done.returncode == 1
    assert "is below the floor of 99.9 %" in done.stderr.splitlines()[-1]
    assert not ENGINE.images("trainyard:mini-strict")


def test_what_passed_is_pushed_and_promoted(made: dict[str, Any], miniature: Miniature, server: str) -> None:
    address = f"{server}/promoted"
    pushed = miniature.json("push", "mini", f"--registry={address}")
    assert pushed["images"]["linux/amd64"]["digest"] == made["digest"]
    assert digest_of(address, "mini") is None, "a push moves no floating tag"
    miniature.run("promote", "mini", f"--registry={address}", f"--image={pushed['digest']}")
    assert digest_of(address, "mini") == digest_of(address, "mini-2.9.1") == pushed["digest"]


def test_a_trainer_of_the_image_starts_by_its_name(made: dict[str, Any], docker_run: Callable[..., Finished]) -> None:
    found = docker_run(str(made["image"]), "digit")
    assert found.returncode == 2 and "digits" in found.stderr


def test_a_repository_gets_the_version_of_the_framework_that_it_pins(
    made: dict[str, Any], miniature: Miniature, tmp_path: Path, docker_run: Callable[..., Finished]
) -> None:
    """On the base whose Python it supports; the target has another version on another base."""
    miniature.index.add(torch("2.4.1"))
    (tmp_path / "trainyard.yaml").write_text(
        "extends: mini\nname: mini-older\nrequirements: [torch<2.5]\nrun: python train.py\n"
        "smoke: {expect: framework 2.4.1}\n",
        encoding="utf-8",
    )
    (tmp_path / "train.py").write_text("import torch\nprint('framework', torch.__version__)\n", encoding="utf-8")
    older = miniature.json("image", str(tmp_path))
    assert older["verify"]["passed"] and older["smoke"]["level"] == "trained"
    found = docker_run(str(older["image"]))
    assert found.returncode == 0 and "framework 2.4.1" in found.stdout
    inside = docker_run(str(older["image"]), "--", "ls", "/opt/trainyard", "/usr/bin/python3.11")
    assert inside.returncode == 0 and "trainers" not in inside.stdout, "the trainers need 2.6"
    again = docker_run(str(older["image"]), "digits")
    assert again.returncode == 2 and "trainer" in again.stderr


#: Compiles a module with Python's headers, OpenMP and the standard library of C++, as torch.compile does, and loads it.
EXTENSION = r"""
import ctypes, os, subprocess, sysconfig
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
os.makedirs(folder)
open(folder + "/sum.cpp", "w").write('''
#include <Python.h>
#include <vector>
extern "C" double sum(long count) {
  std::vector<double> ones(count, 1.0);
  double total = 0;
  #pragma omp parallel for reduction(+:total)
  for (long i = 0; i < count; i++) total += ones[i];
  return total;
}
''')
include = sysconfig.get_paths()["include"]
command = ["g++", "-O3", "-march=native", "-std=c++20", "-fopenmp", "-lpthread", "-shared", "-fPIC", "-I" + include]
subprocess.run([*command, folder + "/sum.cpp", "-o", folder + "/sum.so"], check=True)
library = ctypes.CDLL(folder + "/sum.so")
library.sum.restype = ctypes.c_double
print("sum", library.sum(ctypes.c_long(1000)))
"""


def test_a_compiler_works_for_any_user_on_a_read_only_root_where_tmp_is_not_executable(
    made: dict[str, Any], miniature: Miniature, tmp_path: Path, docker_run: Callable[..., Finished]
) -> None:
    (tmp_path / "trainyard.yaml").write_text(
        "extends: mini\nname: mini-compiler\ncompiler: true\nrun: python train.py\n", encoding="utf-8"
    )
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    image = str(miniature.json("image", str(tmp_path))["image"])
    assert docker_run(str(made["image"]), "--", "bash", "-c", "command -v g++").returncode == 1, "mini has none"
    closed = ("--read-only", "--network=none", "--cap-drop=ALL", "--user=54321:0", "--tmpfs=/tmp:noexec,mode=1777")
    cache = "--tmpfs=/home/trainer/.cache:exec,mode=1777"
    compiled = docker_run(*closed, cache, image, "--", "python", "-c", EXTENSION)
    assert (compiled.returncode, compiled.stdout) == (0, "sum 1000.0\n"), compiled.stderr
    nowhere = docker_run(*closed, image, "--", "true")
    assert "torch.compile will fail: /tmp, " in nowhere.stderr and "--tmpfs /tmp:exec" in nowhere.stderr


def test_a_version_of_a_target_is_built_under_its_name_with_its_provenance(
    made: dict[str, Any], miniature: Miniature
) -> None:
    miniature.index.add(torch("2.8.0"))
    folder = miniature.folder / "images" / "mini" / "2.8"
    folder.mkdir()
    (folder / "version.yaml").write_text("packages: [torch==2.8.0]\nplatforms: [linux/amd64]\n", encoding="utf-8")
    miniature.run("lock", "mini-2.8")
    miniature.run("render")
    built = miniature.json("build", "mini-2.8")
    labels = ENGINE.image(built["digest"], made_by="").labels
    assert labels["io.trainyard.framework"] == "torch==2.8.0" and labels["io.trainyard.target"] == "mini-2.8"


# --- a base that holds the framework, of another version each day -----------------------------------------------------

#: Python and numpy are those of the image below.
BASE = """
FROM {python}
USER 0
RUN rm -rf /opt/trainyard /usr/local/bin/launch
WORKDIR {site}
RUN rm -rf _trainyard.pth torch* libtpu*
COPY packages .
LABEL io.trainyard.target=stand-in
ENTRYPOINT []
CMD ["bash"]
"""

XRT, PJRT = "2.0.0", "2.9.0"


@pytest.fixture(scope="module")
def base(miniature: Miniature, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """``base("2.0.0")``: the reference of a base with that version of torch_xla."""
    python = miniature.built("mini-xla")
    made: dict[str, str] = {}

    def build(version: str) -> str:
        if version in made:
            return made[version]
        folder = tmp_path_factory.mktemp("base")
        (folder / "wheels").mkdir()
        release = version.rpartition(".")[0]
        for name, body in (
            torch(f"{release}.1"),
            torch_xla(version),
            package_index.wheel("torchvision", "0.24.1", ("torch",)),
            package_index.wheel("libtpu", "0.0.21"),
        ):
            (folder / "wheels" / name).write_bytes(body)
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python-version=3.11"]
        command += [f"--target={folder / 'packages'}", *map(str, (folder / "wheels").iterdir())]
        subprocess.run(command, check=True)
        site = "/opt/venv/lib/python3.11/site-packages"
        (folder / "Dockerfile").write_text(BASE.format(python=python, site=site), encoding="utf-8")
        made[version] = f"trainyard-test:mini-base-{version}"
        ENGINE.buildx("build", "--quiet", "--load", "--provenance=false", f"--tag={made[version]}", str(folder))
        return made[version]

    yield build
    for reference in made.values():
        ENGINE.untag(reference)


@pytest.fixture(scope="module")
def days(base: Callable[[str], str], miniature: Miniature, server: str) -> dict[str, dict[str, Any]]:
    """Version of torch_xla -> what ``trainyard image`` reports of its day's image, which is pushed and promoted."""
    found: dict[str, dict[str, Any]] = {}
    for version in (XRT, PJRT):
        variables = {"TRAINYARD_BASE": base(version)}
        if not found:
            miniature.add("mini-nightly", **variables)
        else:
            miniature.run("lock", "mini-nightly", **variables)
        found[version] = miniature.json("image", "mini-nightly", **variables)
        words = ("mini-nightly", f"--registry={server}/nightly")
        pushed = miniature.json("push", *words, **variables)
        assert pushed["digest"] == found[version]["digest"]
        miniature.run("promote", *words, f"--image={pushed['digest']}", **variables)
    return found


def test_each_day_is_locked_trained_and_tagged_with_its_framework(days: dict[str, dict[str, Any]]) -> None:
    for version, made in days.items():
        labels = ENGINE.image(made["digest"], made_by="").labels
        assert labels["io.trainyard.framework"] == f"torch_xla=={version}"
        assert made["smoke"]["accuracy"] >= 90 and made["smoke"]["tpu_states"][-1] == "READY"


def test_nothing_of_the_base_is_stored_again(days: dict[str, dict[str, Any]], base: Callable[[str], str]) -> None:
    below = ENGINE.image(base(XRT), made_by="").attrs["RootFS"]["Layers"]
    assert ENGINE.image(days[XRT]["digest"], made_by="").attrs["RootFS"]["Layers"][: len(below)] == below


def test_a_nightly_is_rolled_back_to_the_day_before(
    days: dict[str, dict[str, Any]], miniature: Miniature, server: str
) -> None:
    address = f"{server}/nightly"
    assert digest_of(address, "mini-nightly") == days[PJRT]["digest"]
    miniature.run("rollback", "mini-nightly", f"--registry={address}")
    assert digest_of(address, "mini-nightly") == days[XRT]["digest"]


def test_a_base_without_the_framework_is_refused_before_anything_is_built(
    days: dict[str, dict[str, Any]], miniature: Miniature, made: dict[str, Any]
) -> None:
    done = miniature.call("lock", "mini-nightly", TRAINYARD_BASE=str(made["image"]))
    assert done.returncode == 2
    assert "has no torchvision, torch-xla, libtpu: it cannot be base xla-nightly" in done.stderr


# --- TPU_CONFIG in a container ----------------------------------------------------------------------------------------


def devices(digest: str, *, rehearse: bool) -> tuple[int | None, list[str]]:
    """Exit status and lines of a trainer that is started with TPU_CONFIG, beside a fake of the TPU API."""
    script = "from trainers.torch import digits; print('device', digits.device())"
    with SmokeSandbox(ENGINE, digest, {}) as sandbox:
        environment = {} if rehearse else {"LAUNCHER_REHEARSE": ""}
        container = sandbox.start("--", "python3", "-c", script, environment=environment)
        return wait(container, 120), lines_of(container)


def test_tpu_config_becomes_the_address_of_the_node_for_xrt(days: dict[str, dict[str, Any]]) -> None:
    """torch_xla 2.0 reads XRT_TPU_CONFIG, whose first worker it names."""
    status, lines = devices(days[XRT]["digest"], rehearse=False)
    assert status == 0 and f"device tpu_worker:0 at {ENDPOINT}" in lines, lines


def test_tpu_config_is_refused_where_there_is_no_xrt(days: dict[str, dict[str, Any]]) -> None:
    status, lines = devices(days[PJRT]["digest"], rehearse=False)
    assert status == 2
    assert "names a TPU node, which needs XRT, but torch_xla 2.9.0 has no XRT" in lines[-1], lines
    status, lines = devices(days[PJRT]["digest"], rehearse=True)
    assert status == 0 and "device xla:0 (CPU)" in lines, lines
