"""The images that steps of a cloudbuild.yaml run in here, and what stands in for those that cannot be pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker.errors
from docker.types import Mount

from scripts import base, engine
from scripts.cli import UserError
from scripts.plan import NAME


@dataclass(frozen=True)
class StandIn:
    """What runs in place of a builder image of Google's.

    Attributes:
        stage: of scripts/builder/Dockerfile.
        entrypoint: the program that the image is known for.
        google: whether it needs the Google Cloud CLI, which is mounted from this host: it is 2 GB.
    """

    stage: str
    entrypoint: str
    google: bool = False


STAND_INS = {
    "gcr.io/cloud-builders/docker": StandIn("docker", "docker"),
    "gcr.io/cloud-builders/git": StandIn("docker", "git"),
    "gcr.io/cloud-builders/make": StandIn("docker", "make"),
    "gcr.io/cloud-builders/gcloud": StandIn("python", "gcloud", google=True),
    "gcr.io/cloud-builders/gsutil": StandIn("python", "gsutil", google=True),
    "gcr.io/google.com/cloudsdktool/cloud-sdk": StandIn("python", "bash", google=True),
    "gcr.io/google.com/cloudsdktool/google-cloud-cli": StandIn("python", "bash", google=True),
}
#: Where the host's Google Cloud CLI is mounted: where its own images have it.
SDK = "/usr/lib/google-cloud-sdk"
#: Where Debian's and Google's builder images keep the authorities they trust.
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class Runs:
    """How a step's container is made: image, entrypoint in place of the image's own, what is mounted, variables."""

    image: str
    entrypoint: list[str] | None = None
    mounts: tuple[Mount, ...] = ()
    environment: tuple[str, ...] = ()


_building = threading.Lock()


def _stand_in_image(stage: str) -> str:
    """The local image of a stage of scripts/builder/Dockerfile, built if need be."""
    reference = f"{NAME}-cloud-builder:{stage}"
    with _building:
        bundle = engine.ca_bundle()
        engine.buildx(
            "build", "--quiet", "--load", "--provenance=false", f"--target={stage}", f"--tag={reference}",
            f"--build-arg=BASE={base.resolve('debian-12').reference}", f"--label={engine.OWNED}=cloudbuild",
            *([f"--secret=id=ca,src={bundle}"] if bundle else []),
            "--file=scripts/builder/Dockerfile", "scripts", quiet=True,
        )  # fmt: skip
    return reference


def _host_sdk(name: str) -> Path:
    """The folder of this host's Google Cloud CLI.

    Raises:
        UserError: there is none.
    """
    command = ["gcloud", "info", "--format=value(installation.sdk_root)"]
    if shutil.which("gcloud"):
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if found and Path(found).is_dir():
            return Path(found)
    raise UserError(
        f"{name} cannot be pulled, and its stand-in needs the Google Cloud CLI of this host, which has none: "
        f"install it, or give a local image, as in IMAGES={name}=my/image"
    )


def stand_in(name: str) -> Runs:
    """What stands for a builder image which cannot be pulled.

    Raises:
        UserError: there is none; the line says how to give one.
    """
    plain = name.split("@")[0]
    plain = plain.rsplit(":", 1)[0] if ":" in plain.rpartition("/")[2] else plain
    if plain not in STAND_INS:
        raise UserError(
            f"{name} is neither here nor can it be pulled: give a local image, as in IMAGES={plain}=my/image"
        )
    found = STAND_INS[plain]
    if not found.google:
        return Runs(_stand_in_image(found.stage), [found.entrypoint])
    return Runs(
        _stand_in_image(found.stage),
        [found.entrypoint],
        (Mount(SDK, str(_host_sdk(plain)), type="bind", read_only=True),),
        (
            f"PATH={SDK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE={CA_BUNDLE}",
            *_gcloud_settings(),
        ),
    )


def _gcloud_settings() -> list[str]:
    """gcloud's settings in this process' environment, but for files and folders of the host.

    The user's configuration folder stays out: a build that somebody tries here must not act in their name unasked.
    Who wants it to, exports CLOUDSDK_AUTH_ACCESS_TOKEN.
    """
    mine = {key: value for key, value in os.environ.items() if key.startswith("CLOUDSDK_")}
    return [f"{key}={value}" for key, value in mine.items() if not value.startswith("/")]


def find_image(name: str, given: Mapping[str, str], say: Callable[[str], None]) -> Runs:
    """The image to run for a step's name.

    Cloud Build too takes an image that the engine has already, and pulls any other (build-config-file-schema: name).

    Args:
        given: image names -> the local images that stand for them.
        say: called with a line when something stands in.
    Raises:
        UserError: it is neither here nor to be had.
    """
    name = given.get(name, name)
    with contextlib.suppress(docker.errors.ImageNotFound):
        engine.client().images.get(name)
        return Runs(name)
    try:
        engine.client().images.pull(name, tag=None if ":" in name.rpartition("/")[2] or "@" in name else "latest")
        return Runs(name)
    except docker.errors.APIError as error:
        words = str(error.explanation or error)
    found = stand_in(name)
    say(f"{name} cannot be pulled ({words.rsplit(': ', 1)[-1]}): {found.image} stands in")
    return found
