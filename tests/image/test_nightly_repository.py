"""A repository that extends xla-nightly: locked with the base of the day, built on it, tested, pushed, built offline.

The nightly at the registry is a substitute whose framework has a few hundred bytes: everything of a user's image but
the training is as with upstream's. What trains in such an image is tested in test_catalogue_nightly.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import docker.errors
import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.registry import running
from tests.image.small_images import wheel
from tests.workspaces import relock
from tests.workspaces import versions as pinned
from trainyard import cli
from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import base_image, recipes
from trainyard.lint.image import verify
from trainyard.spec import model
from trainyard.spec.naming import LABELS

NAME = "nightly-repository"

#: Debian with Python.
SYSTEM = "trainyard-test:nightly-system"

BASE = """
FROM {system}
RUN ln -s python3 /usr/bin/python
COPY packages /usr/local/lib/python3.11/dist-packages
CMD ["bash"]
"""

#: fsspec is one of the framework's requirements, tqdm is not.
INSTALLED = ("fsspec==2025.3.0", "tqdm==4.66.0")

DOCUMENT = f"""\
extends: xla-nightly
name: {NAME}
requirements: [einops, 'tqdm>=4.67', fsspec]
code: [train.py]
run: python train.py
smoke: {{expect: 'loss 0.5'}}
"""

TRAIN = """\
import einops, fsspec, torch, torch_xla, tqdm
print("loss 0.5", torch.__version__, torch_xla.__version__, fsspec.__version__, tqdm.__version__)
print("from", fsspec.__file__, tqdm.__file__)
"""


class Nightly:
    """A nightly at a registry.

    Attributes:
        reference: of its tag.
        stop: stops the registry.
    """

    def __init__(self, registry: str, stop: Callable[[], object], folder: Path) -> None:
        self.reference = f"{registry}/xla:nightly"
        self.registry = registry
        self.stop = stop
        self._folder = folder

    def publish(self, torch_xla: str) -> str:
        """Move the tag to a base with this version of torch_xla; the base's digest."""
        context = self._folder / torch_xla
        packages = context / "packages"
        packages.mkdir(parents=True)
        wheels = context / "wheels"
        wheels.mkdir()
        wheel(wheels, "torch", "2.10.0.dev20261121+cpu", ("fsspec",))
        wheel(wheels, "torchvision", "0.25.0.dev20261121+cpu", ("torch==2.10.0.dev20261121",))
        wheel(wheels, "torch_xla", torch_xla, ('libtpu==0.0.30.dev1; extra == "tpu"',))
        wheel(wheels, "libtpu", "0.0.30.dev1")
        command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--python-version=3.11"]
        command += [f"--target={packages}", *INSTALLED, *map(str, wheels.iterdir())]
        subprocess.run(command, check=True)
        (context / "Dockerfile").write_text(BASE.format(system=SYSTEM), encoding="utf-8")
        # Layers that the cache has with zstd need OCI media types, or the engine cannot pull them.
        output = f"--output=type=image,name={self.reference},oci-mediatypes=true"
        options = ("--quiet", output, "--provenance=false")
        ENGINE.buildx("build", *options, str(context))
        ENGINE.client.images.push(self.reference)
        return ENGINE.digest(self.reference)


@pytest.fixture
def nightly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nightly]:
    """The registry whose nightly is the base of xla-nightly."""
    debian = base_image.resolve(CONTEXT, "debian-12").reference
    options = ("--quiet", "--load", "--provenance=false", f"--tag={SYSTEM}", "--target=system")
    file = f"--file={ROOT / 'images' / 'xla' / 'Dockerfile'}"  # on Debian 12, too
    ENGINE.buildx("build", *options, file, f"--build-arg=BASE={debian}", str(ROOT))
    with running.container() as server:
        stop = server.get_wrapped_container().stop
        found = Nightly(running.address(server), lambda: stop(timeout=1), tmp_path / "nightly")
        wanted = model.bases()["xla-nightly"].model_copy(
            update={"image": found.reference, "python": "3.11", "glibc": "2.36"}
        )
        monkeypatch.setitem(model.bases(), "xla-nightly", wanted)
        yield found
    for image in ENGINE.images(f"{found.registry}/xla"):
        ENGINE.client.images.remove(image.id, force=True)
    ENGINE.untag(SYSTEM)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A repository, the current folder."""
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    (folder / "trainyard.yaml").write_text(DOCUMENT, encoding="utf-8")
    (folder / "train.py").write_text(TRAIN, encoding="utf-8")
    monkeypatch.chdir(folder)
    yield folder
    for image in ENGINE.images(label=f"{LABELS}.target={NAME}"):
        ENGINE.client.images.remove(image.id, force=True)


@pytest.fixture
def trainyard(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``trainyard("image", "--json")``: standard output of a command that must succeed, in this process."""

    def run(*words: str) -> str:
        capfd.readouterr()
        status = cli.run(list(words))
        found = capfd.readouterr()
        assert status == 0, f"{' '.join(words)}: {found.err[-4000:]}"
        return found.out

    return run


def run_it() -> str:
    """What ``trainyard run`` prints, which becomes the process of `docker run`."""
    return subprocess.run([sys.executable, "-m", "trainyard", "run"], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow("test_workspace_nightly.py, test_nightly_targets.py, test_offline.py")
def test_a_repository_on_a_nightly_from_lock_to_an_offline_build(
    nightly: Nightly,
    repository: Path,
    trainyard: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = nightly.publish("2.10.0+git1111111")
    made = json.loads(trainyard("image", "--json"))
    spec = model.load(None)
    assert spec.base_contents is not None and spec.base_contents.digest == first
    locked = pinned(spec)
    assert not {"torch", "torch-xla", "torchvision", "libtpu", "fsspec"} & locked.keys(), "the base has them"
    assert locked["gcsfs"] == "2025.3.0", "the release for the base's fsspec"

    image = ENGINE.image(made["digest"], made_by="")
    below = ENGINE.image(nightly.reference, made_by="").attrs["RootFS"]["Layers"]
    assert image.attrs["RootFS"]["Layers"][: len(below)] == below, "nothing of the base is stored again"
    assert image.labels["org.opencontainers.image.base.digest"] == first
    assert image.labels[f"{LABELS}.framework"] == "torch_xla==2.10.0+git1111111"
    assert (image.labels[f"{LABELS}.extends"], image.labels[f"{LABELS}.tested"]) == ("xla-nightly", "trained")
    assert verify.verify(recipes.for_image(spec, image.labels), str(made["image"]), CONTEXT)["passed"]
    printed = run_it()
    assert f"loss 0.5 2.10.0.dev20261121+cpu 2.10.0+git1111111 2025.3.0 {locked['tqdm']}\n" in printed
    assert "from /usr/local/lib/python3.11/dist-packages/fsspec/" in printed
    assert " /opt/requirements/tqdm/" in printed, "what is locked precedes the base's"

    pushed = json.loads(trainyard("push", f"--registry={nightly.registry}/team", "--json"))
    assert pushed["digest"] == made["digest"]
    (repository / "train.py").write_text(TRAIN.replace("loss 0.5", "loss 0.50"), encoding="utf-8")
    edited = json.loads(trainyard("push", "--code-only", "--json"))
    assert edited["base"] == pushed["digest"]
    (repository / "train.py").write_text(TRAIN, encoding="utf-8")

    second = nightly.publish("2.10.0+git2222222")
    assert second != first
    trainyard("lock", "--check")
    assert json.loads(trainyard("image", "--json"))["digest"] == made["digest"], "a newer nightly changes nothing"
    trainyard("fetch")
    lock = spec.lock_file.read_bytes()
    trainyard("lock", "--upgrade")
    upgraded = model.load(None)
    assert upgraded.base_contents is not None and upgraded.base_contents.digest == second
    assert upgraded.version == "2.10.0+git2222222"
    spec.lock_file.write_bytes(lock)

    nightly.stop()
    for reference in (nightly.reference, f"{nightly.reference}@{first}", f"{nightly.reference}@{second}"):
        ENGINE.untag(reference)
    monkeypatch.setenv("TRAINYARD_OFFLINE", "1")
    built = json.loads(trainyard("image", "--json"))
    assert ENGINE.image(built["digest"], made_by="").attrs["RootFS"] == image.attrs["RootFS"]


def test_a_requirement_that_contradicts_the_nightly_stops_before_anything_is_built(
    nightly: Nightly, repository: Path
) -> None:
    nightly.publish("2.10.0+git1111111")
    (repository / "trainyard.yaml").write_text(DOCUMENT.replace(", fsspec]", ", fsspec>2026]"), encoding="utf-8")
    with pytest.raises(
        UserError,
        match=r"^trainyard\.yaml:3: fsspec>2026 contradicts fsspec 2025\.3\.0, which the base image of xla-nightly "
        r"\(torch-xla 2\.10\.0\+git1111111\) has: ",
    ):
        relock(model.load(None))
    assert not (repository / "pylock.trainyard.toml").exists()
    with pytest.raises(docker.errors.ImageNotFound):
        ENGINE.client.images.get(f"trainyard:{NAME}-candidate")
