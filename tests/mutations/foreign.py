"""Images that are not ours, in which ``trainyard verify`` must find nothing."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.engine import CONTEXT, ENGINE
from tests.mutations.layout import SavedImage
from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import base_image
from trainyard.oci import image_store

#: The name of the images; the tag says which.
NAME = "trainyard-foreign"

_PIP = (
    "RUN --mount=type=secret,id=ca,target=/run/secrets/ca.pem "
    "PIP_CERT=/run/secrets/ca.pem /opt/venv/bin/pip install --quiet --no-cache-dir"
)
_INSTALL = "apt-get -qq install -y --no-install-recommends"
_PYTHON = f"RUN apt-get -qq update && {_INSTALL} python3 python3-venv ca-certificates"
_CLEAN = " && rm -rf /var/lib/apt/lists/*"
_VENV = f"{_PYTHON}{_CLEAN} && python3 -m venv /opt/venv\n{_PIP} humanize\n"

#: Tag -> Dockerfile.
_DOCKERFILES = {
    "plain-recipe": f"FROM {{base}}\n{_VENV}ENV PATH=/opt/venv/bin:$PATH\nCMD [\"python\"]\n",
    "without-shell": (
        f"FROM {{base}} AS build\n{_PYTHON}{_CLEAN}\n"
        "RUN mkdir -p /out/usr/bin /out/usr/lib && cp -aL /usr/bin/python3 /out/usr/bin/python \\\n"
        " && cp -a /usr/lib/python3* /usr/lib/*-linux-gnu /out/usr/lib/ && cp -a /usr/lib64 /out/usr/ \\\n"
        " && for name in lib lib64; do ln -s usr/$name /out/$name; done && mkdir -m 1777 /out/tmp\n"
        'FROM scratch\nCOPY --from=build /out /\nENTRYPOINT ["/usr/bin/python"]\n'
    ),
    "without-documentation": (
        f"FROM {{base}} AS build\n{_PYTHON}{_CLEAN} /usr/share/doc /usr/share/man /usr/share/locale /usr/share/info\n"
        'FROM scratch\nCOPY --from=build / /\nCMD ["python3"]\n'
    ),
    "code-in-home": (
        f"FROM {{base}}\n{_PYTHON}{_CLEAN} && useradd --create-home app\n"
        "RUN mkdir -p /home/app/code && echo 'print(1)' >/home/app/code/main.py && chown -R app /home/app/code\n"
        'USER app\nWORKDIR /home/app/code\nCMD ["python3", "main.py"]\n'
    ),
    "stages-with-venv": (
        f"FROM {{base}} AS build\n{_VENV}FROM {{base}}\n{_PYTHON}{_CLEAN}\n"
        "COPY --from=build /opt/venv /opt/venv\nENV PATH=/opt/venv/bin:$PATH\nCMD [\"python\"]\n"
    ),
}  # fmt: skip


def _base() -> str:
    return base_image.resolve(CONTEXT, "debian-13").reference


def _dockerfile(tag: str) -> str:
    """Build one of the Dockerfiles."""
    reference = f"{NAME}:{tag}"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(_DOCKERFILES[tag].replace("{base}", _base()), encoding="utf-8")
        bundle = settings.ca_bundle()
        secret = [f"--secret=id=ca,src={bundle}"] if bundle else []
        ENGINE.buildx("build", "--load", "--provenance=false", f"--tag={reference}", *secret, folder)
    return reference


def _squashed() -> str:
    """The plain recipe in one layer."""
    reference = f"{NAME}:squashed"
    with built(lambda: _dockerfile("plain-recipe")) as plain, tempfile.TemporaryDirectory() as folder:
        image_store.save(ENGINE, plain, Path(folder))
        SavedImage(Path(folder)).squashed().load(reference)
    return reference


def _buildah() -> str:
    """An image on Debian that buildah has built, with its own storage.

    Raises:
        UserError: there is no buildah.
        StepFailed: it fails.
    """
    if not shutil.which("buildah"):
        raise UserError("buildah is not installed: run 'apt-get install buildah'")
    reference = f"{NAME}:buildah"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base, archive = folder / "base.tar", folder / "built.tar"
        with base.open("wb") as file:
            for chunk in ENGINE.image(_base(), made_by="make base").save(named=True):
                file.write(chunk)
        text = f'FROM docker-archive:{base}\nRUN echo \'print(1)\' >/srv/main.py\nCMD ["cat", "/srv/main.py"]\n'
        (folder / "Containerfile").write_text(text, encoding="utf-8")
        storage = [f"--root={folder}/storage", f"--runroot={folder}/run", "--storage-driver=vfs"]
        name = f"docker.io/library/{reference}"
        _run("buildah", *storage, "build", "--isolation=chroot", "--network=host", f"--tag={name}", str(folder))
        _run("buildah", *storage, "push", name, f"docker-archive:{archive}:{name}")
        with archive.open("rb") as file:
            ENGINE.client.images.load(file)
    return reference


@contextlib.contextmanager
def built(build: Callable[[], str]) -> Iterator[str]:
    """One of IMAGES, while the context lasts; its reference."""
    reference = build()
    try:
        yield reference
    finally:
        if reference.startswith(f"{NAME}:"):
            ENGINE.untag(reference)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StepFailed(f"'{command[0]}' failed: {last}")


#: Name of an image -> what makes it, and returns its reference.
#:
#: Each raises StepFailed if it cannot be built, and UserError if a program for it is missing.
IMAGES: dict[str, Callable[[], str]] = {
    "Debian": _base,
    "plain recipe: Debian, python3, pip": lambda: _dockerfile("plain-recipe"),
    "built with buildah": _buildah,
    "plain recipe, squashed": _squashed,
    "Python without a shell": lambda: _dockerfile("without-shell"),
    "documentation stripped": lambda: _dockerfile("without-documentation"),
    "user's code in a home directory": lambda: _dockerfile("code-in-home"),
    "virtual environment of another stage": lambda: _dockerfile("stages-with-venv"),
}
