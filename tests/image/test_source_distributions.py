"""A source distribution that alters all it can reach while it is built alters no other package, here or elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import ENGINE
from tests.fakes import package_index
from tests.fakes.package_index import PackageIndex
from tests.image.small_images import bridge
from trainyard import recipe as recipes
from trainyard.common import settings
from trainyard.common.context import Context
from trainyard.lint.image import verify

pytestmark = pytest.mark.concurrent

#: Looks for secrets, a network and other packages, and puts its own wheel of one of those in their place.
SETUP = """
import base64, json, os, pathlib, shutil, socket, sys, zipfile
from setuptools import setup

found = {"secrets": [], "network": [], "victims": [], "mounts": [], "variables": sorted(os.environ.values())}
if os.path.isdir("/run/secrets"):
    found["secrets"] = os.listdir("/run/secrets")
for address in (("{host}", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 2).close()
        found["network"].append(address[0])
    except OSError:
        pass
for line in open("/proc/mounts"):
    place, kind = line.split()[1:3]
    if kind not in ("proc", "sysfs", "tmpfs", "devpts", "cgroup", "cgroup2", "mqueue", "devtmpfs") and place != "/":
        found["mounts"].append(place)
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys")):
        continue
    for name in names:
        if name.startswith("victim"):
            found["victims"].append(os.path.join(folder, name))
            open(found["victims"][-1], "a").write("VALUE = 'altered'\\n")
for folder in map(pathlib.Path, ("/built/wheel-evil", "/built/wheel-victim")):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "victim-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("victim.py", "VALUE = 'altered'")
        wheel.writestr("victim-1.0.dist-info/METADATA", "Metadata-Version: 2.2\\nName: victim\\nVersion: 1.0\\n")
        about = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("victim-1.0.dist-info/WHEEL", about)
        wheel.writestr("victim-1.0.dist-info/RECORD", "victim.py,,\\nvictim-1.0.dist-info/RECORD,,\\n")
pathlib.Path("{name}.py").write_text("FOUND = " + repr(found))
setup(name="{name}", version="1.0", py_modules=["{name}"])
"""

DOCUMENT = """\
extends: tf-cpu
name: {name}
run: python train.py
requirements: [{requirements}]
"""

TRAIN = """
import importlib, json, victim
found = [importlib.import_module(name).FOUND for name in {names}]
print(json.dumps({{"value": victim.VALUE, "found": found}}))
"""

PASSWORD = "correct-horse-battery"


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    """An index with a password, on the engine's bridge, where builds reach it."""
    own = PackageIndex(("me", PASSWORD))
    own.address = bridge()
    with own as served:
        host, _, port = served.host.partition(":")
        for name in ("evil", "evilc"):
            text = SETUP.replace("{host}", host).replace("{port}", port).replace("{name}", name)
            pkg_info = f"Metadata-Version: 2.2\nName: {name}\nVersion: 1.0\n"
            served.add(package_index.source_distribution(name, "1.0", {"PKG-INFO": pkg_info, "setup.py": text}))
        served.add(package_index.wheel("victim", "1.0", modules={"victim.py": "VALUE = 'whole'\n"}))
        yield served


@pytest.fixture
def trainyard(index: PackageIndex, tmp_path: Path) -> Iterator[Callable[[str, str, str, list[str]], dict[str, Any]]]:
    """``trainyard(name, requirements, more, modules)``: build the image of a new repository; what it prints."""
    credentials = {"UV_INDEX_OWN_USERNAME": "me", "UV_INDEX_OWN_PASSWORD": PASSWORD}
    environment = settings.environment(TRAINYARD_BUILD=str(tmp_path / "state"), **credentials)

    def run(name: str, requirements: str, more: str, modules: list[str]) -> dict[str, Any]:
        folder = tmp_path / name
        subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
        (folder / "uv.toml").write_text(f'[[index]]\nname = "own"\nurl = "{index.url}"\n', encoding="utf-8")
        (folder / "trainyard.yaml").write_text(
            DOCUMENT.format(name=name, requirements=requirements) + more, encoding="utf-8"
        )
        (folder / "train.py").write_text(TRAIN.format(names=modules), encoding="utf-8")
        built = subprocess.run(
            [sys.executable, "-m", "trainyard", "build"], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert built.returncode == 0, built.stderr[-3000:]
        ran = subprocess.run(["docker", "run", "--rm", f"trainyard:{name}-candidate"], capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr[-3000:]
        printed: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return printed

    yield run
    for name in ("attacked", "bystander"):
        for image in ENGINE.images(label=f"io.trainyard.target={name}"):
            for tag in image.tags:
                ENGINE.untag(tag)


def test_a_source_distribution_reaches_nothing_and_alters_nothing(
    trainyard: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """One of the requirements, and one of ``build:``, which needs the packages of the image to be there."""
    attacked = trainyard("attacked", "evil, victim", "build: {packages: [g++], sources: [evilc]}\n", ["evil", "evilc"])
    assert attacked["value"] == "whole"
    for found in attacked["found"]:
        assert (found["secrets"], found["network"]) == ([], [])
        assert not any(PASSWORD in value for value in found["variables"])
        assert not any("cache" in place or "secrets" in place for place in found["mounts"]), found["mounts"]
    # What its first hook has put there, and its second one finds.
    assert all(path.startswith("/built/") for path in attacked["found"][0]["victims"])

    bystander = trainyard("bystander", "victim", "", [])
    assert bystander["value"] == "whole"

    for name in ("attacked", "bystander"):
        recipe = recipes.read(tmp_path / "state" / name / "recipe" / recipes.FILE)
        context = Context(state=tmp_path / "state", engine=ENGINE)
        _, by_rule = verify.examine(recipe, f"trainyard:{name}-candidate", context)
        assert by_rule["files_are_those_of_their_wheels"] == []
