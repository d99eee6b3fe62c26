"""Find the images that the steps of a cloudbuild.yaml run in, with replacements for images that cannot be pulled."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker.errors
from docker.types import Mount

from trainyard.common import settings
from trainyard.common.errors import UserError
from trainyard.image import base_image
from trainyard.oci import docker_engine
from trainyard.oci.reference import Reference
from trainyard.spec.naming import NAME

#: The Dockerfile of the replacements, with its context.
BUILDER = settings.PACKAGE / "builder"


@dataclass(frozen=True)
class Replacement:
    """What replaces one of Google's builder images.

    Attributes:
        stage: stage of the Dockerfile in :data:`BUILDER`.
        entrypoint: the program that the image runs.
        gcloud: whether it needs the Google Cloud CLI, which takes 2 GB and is mounted from this host.
    """

    stage: str
    entrypoint: str
    gcloud: bool = False


REPLACEMENTS = {
    "gcr.io/cloud-builders/docker": Replacement("docker", "docker"),
    "gcr.io/cloud-builders/git": Replacement("docker", "git"),
    "gcr.io/cloud-builders/make": Replacement("docker", "make"),
    "gcr.io/cloud-builders/gcloud": Replacement("python", "gcloud", gcloud=True),
    "gcr.io/cloud-builders/gsutil": Replacement("python", "gsutil", gcloud=True),
    "gcr.io/google.com/cloudsdktool/cloud-sdk": Replacement("python", "bash", gcloud=True),
    "gcr.io/google.com/cloudsdktool/google-cloud-cli": Replacement("python", "bash", gcloud=True),
}
#: Mount point of the Google Cloud CLI; its own images have it there too.
SDK = "/usr/lib/google-cloud-sdk"
#: The CA bundle of Debian's images and of Google's builder images.
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True)
class ContainerImage:
    """The image of a step's container, an entrypoint that replaces the image's, additional mounts and variables."""

    image: str
    entrypoint: list[str] | None = None
    mounts: tuple[Mount, ...] = ()
    environment: tuple[str, ...] = ()


_building = threading.Lock()


def _build_replacement(stage: str) -> str:
    """Build a stage of the Dockerfile in :data:`BUILDER`, from the build cache if possible; its reference."""
    reference = f"{NAME}-cloud-builder:{stage}"
    base = base_image.resolve("debian-13").reference
    with _building:
        bundle = settings.ca_bundle()
        docker_engine.buildx(
            "build", f"--builder={docker_engine.context()}", "--quiet", "--load", "--provenance=false",
            f"--target={stage}", f"--tag={reference}",
            f"--build-arg=BASE={base}", f"--label={docker_engine.OWNED}=cloudbuild",
            *([f"--secret=id=ca,src={bundle}"] if bundle else []),
            f"--file={BUILDER / 'Dockerfile'}", str(BUILDER),
        )  # fmt: skip
    return reference


def _host_sdk(name: str) -> Path:
    """Return the folder of this host's Google Cloud CLI.

    Raises:
        UserError: it is not installed.
    """
    command = ["gcloud", "info", "--format=value(installation.sdk_root)"]
    if shutil.which("gcloud"):
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if found and Path(found).is_dir():
            return Path(found)
    raise UserError(
        f"{name} cannot be pulled, and its replacement needs the Google Cloud CLI on this host: install it "
        "(https://cloud.google.com/sdk/docs/install), or use a local image with "
        f"'--images {name}=my/image'"
    )


def replacement(name: str) -> ContainerImage:
    """Build the replacement of a builder image that cannot be pulled.

    Raises:
        UserError: it has no replacement, or needs the Google Cloud CLI, which is not installed.
    """
    plain = Reference.parse(name).familiar_name
    if plain not in REPLACEMENTS:
        raise UserError(
            f"{name} does not exist locally and cannot be pulled: use a local image with '--images {plain}=my/image'"
        )
    builder = REPLACEMENTS[plain]
    if not builder.gcloud:
        return ContainerImage(_build_replacement(builder.stage), [builder.entrypoint])
    sdk = _host_sdk(plain)
    return ContainerImage(
        _build_replacement(builder.stage),
        [builder.entrypoint],
        (Mount(SDK, str(sdk), type="bind", read_only=True),),
        (
            f"PATH={SDK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE={CA_BUNDLE}",
            *_gcloud_settings(),
        ),
    )


def _gcloud_settings() -> list[str]:
    """gcloud's variables of this process, without paths of the host.

    The user's gcloud configuration is not mounted: a local build must not use the user's credentials unless they export
    CLOUDSDK_AUTH_ACCESS_TOKEN.
    """
    variables = {key: value for key, value in settings.environment().items() if key.startswith("CLOUDSDK_")}
    return [f"{key}={value}" for key, value in variables.items() if not value.startswith("/")]


def find_image(name: str, given: Mapping[str, str], say: Callable[[str], None]) -> ContainerImage:
    """The image for a step's ``name``: a local one, else pulled, else a replacement.

    Cloud Build also uses an image that an earlier step has built or pulled, and pulls others
    (https://cloud.google.com/build/docs/build-config-file-schema#name).

    Args:
        given: image name -> local image to use for it.
        say: called with a line if a replacement is used.
    Raises:
        UserError: the image does not exist locally, cannot be pulled and has no replacement.
    """
    name = given.get(name, name)
    with contextlib.suppress(docker.errors.ImageNotFound):
        docker_engine.client().images.get(name)
        return ContainerImage(name)
    try:
        named = Reference.parse(name)
        docker_engine.client().images.pull(name, tag=None if named.tag or named.digest else "latest")
        return ContainerImage(name)
    except docker.errors.APIError as error:
        words = str(error.explanation or error)
    found = replacement(name)
    say(f"{name} cannot be pulled ({words.rsplit(': ', 1)[-1]}): using {found.image} instead")
    return found
