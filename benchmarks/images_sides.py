"""The two ways of making an image that benchmarks/images.py measures: ours, and the original recipe."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from testcontainers.community.registry import DockerRegistryContainer
from tests import target_locks
from tests.image.registry import running

from trainyard.common import settings
from trainyard.common.errors import StepFailed
from trainyard.common.settings import ROOT
from trainyard.image import package_index, resolver
from trainyard.oci import docker_engine, registry
from trainyard.spec import pylock
from trainyard.spec.lock import Lock, Pin, Section, parse
from trainyard.spec.model import Spec
from trainyard.spec.naming import FILE_EPOCH

#: What the original recipe installs, one RUN each; {versions} of the target's locks are filled in.
RECIPE = {
    "xla": ("torch=={torch} torchvision=={torchvision} torch_xla[tpu]=={torch-xla}", "tensorflow==2.21.0"),
    "tf-cpu": ("tensorflow=={tensorflow-cpu}",),
}

ORIGINAL = """\
FROM {base}
RUN apt-get -qq update \\
 && apt-get -qq install -y --no-install-recommends ca-certificates python3 python3-venv libpython{python} \\
 && rm -rf /var/lib/apt/lists/* \\
 && python3 -m venv /opt/venv
{installs}
COPY launcher /app/launcher
COPY trainers /app/trainers
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app
CMD ["python", "-m", "trainers.{package}.mnist"]
"""
INSTALL = (
    "RUN --mount=type=secret,id=ca,target=/run/secrets/ca.pem "
    "PIP_CERT=/run/secrets/ca.pem /opt/venv/bin/pip install --quiet --no-cache-dir {}"
)


class Tree:
    """A copy of what images are made of, to edit at will. In it nothing that was downloaded before is taken."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.folder, self.spec = folder, spec
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in ("images", "launcher", "trainers", "templates", "scripts", "examples", ".github", "docs"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=ignore)
        for name in (".dockerignore", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        template = folder / "templates" / "Dockerfile.j2"
        text = template.read_text(encoding="utf-8")
        text = re.sub(r" --mount=type=cache,id=pip,target=[^\s{]+", "", text)
        text = text.replace("UV_NO_CACHE=1", "UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1")
        template.write_text(text, encoding="utf-8")

    def edit_trainer(self) -> None:
        """A comment that no build has seen before."""
        trainer = self.folder / "trainers" / self.spec.trainers.package / f"{self.spec.trainers.default}.py"
        with trainer.open("a", encoding="utf-8") as file:
            file.write(f"# {uuid.uuid4()}\n")


class Storage:
    """A throw-away registry, and how many bytes it stores."""

    def __init__(self, started: DockerRegistryContainer) -> None:
        self._container = started

    def _bytes(self) -> int:
        found = self._container.exec("find /var/lib/registry -type f -name data -path '*/blobs/*' -printf %s+")
        assert isinstance(found.output, bytes)  # not streamed
        if found.exit_code and b"No such file" not in found.output:
            raise StepFailed(f"cannot measure the registry's storage: {found.output.decode(errors='replace').strip()}")
        return sum(int(size) for size in found.output.decode().split("+") if size.isdigit())

    def push(self, reference: str) -> int:
        """Push a local image; the bytes that the registry stores more than before."""
        destination = f"{running.address(self._container)}/bench"
        before = self._bytes()
        docker_engine.image(reference, made_by="make build").tag(destination, "latest")
        try:
            for _ in registry.push(f"{destination}:latest"):
                pass
        finally:
            docker_engine.client().api.remove_image(f"{destination}:latest", noprune=True)
        return self._bytes() - before


@dataclass
class Side:
    """One way of making an image. ``bases`` are its base images before and after an update."""

    tree: Tree
    name: str
    bases: tuple[str, str]
    updated: bool = False
    extra: list[str] = field(default_factory=list)
    patched: str = ""

    @property
    def base(self) -> str:
        return self.bases[self.updated]

    @property
    def reference(self) -> str:
        """The name of the image."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Make the copy ready for the first build."""
        raise NotImplementedError

    def build(self, *, cold: bool = False) -> float:
        """Build the image; seconds."""
        raise NotImplementedError

    def require(self, pin: str) -> tuple[str, int]:
        """Add a requirement; the name of the image that :meth:`build_required` makes, and bytes of the wheel."""
        raise NotImplementedError

    def build_required(self) -> float:
        """Build the image with the requirement; seconds."""
        raise NotImplementedError

    def patch(self, pin: str) -> int:
        """Take another version of a wheel; bytes of the wheel."""
        raise NotImplementedError


class Ours(Side):
    """Our image: `make lock`, `make render` and `make build` in the copy."""

    @property
    def reference(self) -> str:
        return f"{self.name}:{self.tree.spec.target}-candidate"

    def _trainyard(self, *words: str) -> str:
        """Run a command of the copy's own package; its standard output."""
        environment = settings.environment(
            PYTHONPATH=str(self.tree.folder / "scripts"),
            TRAINYARD_IMAGE_NAME=self.name,
            TRAINYARD_BASE=self.base,
            TRAINYARD_BUILD_BASE=self.bases[0],
            TRAINYARD_PROVENANCE="0",
            TRAINYARD_BUILD=str(self.tree.folder / "build"),
            SOURCE_DATE_EPOCH=str(FILE_EPOCH),
        )
        command = [sys.executable, "-m", "trainyard", *words]
        done = subprocess.run(
            command, cwd=self.tree.folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise StepFailed(f"'trainyard {' '.join(words)}' failed in the copy: {last}")
        return done.stdout

    def prepare(self) -> None:
        for target in ((), ("examples/patches",)):
            self._trainyard("render", *target)  # the image's name is part of what is rendered

    def require(self, pin: str) -> tuple[str, int]:
        folder = self.tree.folder / "examples" / "required"
        folder.mkdir()
        text = f"extends: {self.tree.spec.target}\nsummary: one more package\nrequirements: [{pin}]\n"
        (folder / "image.yaml").write_text(text, encoding="utf-8")
        self._trainyard("lock", "examples/required")
        return f"{self.name}:required-candidate", _pinned(pin, self.tree.spec).size

    def build_required(self) -> float:
        return self._build("examples/required")

    def patch(self, pin: str) -> int:
        one = _pinned(pin, self.tree.spec)
        self._change("framework", lambda pins: [one if old.name == one.name else old for old in pins])
        self._trainyard("render")
        return one.size

    def _change(self, kind: str, change: Callable[[list[Pin]], list[Pin]]) -> None:
        """Change the pins of a section of the target's lock in the tree."""
        folder = self.tree.folder / "images" / self.tree.spec.target
        content = pylock.read(folder, "")
        assert isinstance(content, Lock)
        section = Section(self.tree.spec.arch, kind)
        text = "".join(pin.text() for pin in change(parse(content.sections[section])))
        changed = replace(content, sections={**content.sections, section: text})
        target_locks.write(folder, changed, self.tree.spec.python_version)

    def build(self, *, cold: bool = False) -> float:
        return self._build(self.tree.spec.target, *(["--no-cache"] if cold else []))

    def _build(self, target: str, *flags: str) -> float:
        return float(json.loads(self._trainyard("build", target, "--json", *flags))["seconds"])


class OneLayer(Ours):
    """Our image with all wheels in one layer."""

    def prepare(self) -> None:
        path = self.tree.folder / "scripts" / "trainyard" / "image" / "wheel_layers.py"
        text = path.read_text(encoding="utf-8")
        changed = re.sub(r"(?m)^ALONE = .*", "ALONE = 10**12", re.sub(r"(?m)^SMALL = .*", "SMALL = 1", text))
        if changed.count("\nALONE = 10**12\n") != 1 or changed.count("\nSMALL = 1\n") != 1:
            raise StepFailed("benchmarks/images_sides.py does not know image/wheel_layers.py any more")
        path.write_text(changed, encoding="utf-8")
        super().prepare()

    def require(self, pin: str) -> tuple[str, int]:
        one = _pinned(pin, self.tree.spec)
        self._change("requirements", lambda pins: [*pins, one])
        self._trainyard("render")
        return self.reference, one.size

    def build_required(self) -> float:
        return self.build()


def _pinned(pin: str, spec: Spec) -> Pin:
    """The entry of a lock of ``spec`` for ``name==version``."""
    name, _, _ = pin.partition("==")
    project = resolver.Project(pin, [pin], spec.python_version, spec.context.offline, spec.wheel_platform)
    text = project.sized("".join(project.entries().values()))
    return next(one for one in parse(text) if one.name == name)


class Original(Side):
    """The recipe."""

    @property
    def reference(self) -> str:
        return f"{self.name}:original"

    def prepare(self) -> None:
        (self.tree.folder / "Original.dockerignore").write_text("*\n!launcher\n!trainers\n**/__pycache__\n")

    def require(self, pin: str) -> tuple[str, int]:
        self.extra.append(pin)
        return self.reference, _pinned(pin, self.tree.spec).size

    def build_required(self) -> float:
        return self.build()

    def patch(self, pin: str) -> int:
        self.patched = pin
        return _pinned(pin, self.tree.spec).size

    def build(self, *, cold: bool = False) -> float:
        spec = self.tree.spec
        pins = spec.locked(package_index.choose(spec)[0]).versions
        lines = [line.format_map(pins) for line in RECIPE[spec.target]]
        if self.patched:
            lines[-1] += f" {self.patched}"
        lines.append(" ".join([f"cloudml-hypertune=={pins['cloudml-hypertune']}", *self.extra]))
        text = ORIGINAL.format(
            base=self.base,
            installs="\n".join(INSTALL.format(line) for line in lines),
            package=spec.trainers.package,
            python=spec.python_version,
        )
        dockerfile = self.tree.folder / "Original"
        dockerfile.write_text(text, encoding="utf-8")
        command = ["build", "--quiet", "--provenance=false", f"--file={dockerfile}"]
        command.append(f"--output=type=image,name={self.reference},oci-mediatypes=true,compression=gzip")
        bundle = settings.ca_bundle()
        if bundle:
            command.append(f"--secret=id=ca,src={bundle}")
        started = time.monotonic()
        docker_engine.buildx(*command, *(["--no-cache"] if cold else []), str(self.tree.folder))
        return time.monotonic() - started
