"""Names of images, tags and labels."""

from __future__ import annotations

import re

from trainyard.common import settings
from trainyard.common.docker_engine import Engine

#: Name of the local image repository.
NAME = settings.variable("IMAGE_NAME") or "trainyard"

#: Name of the file that describes a user's image.
SETTINGS = "trainyard.yaml"

#: Folder beside one Python file or notebook of what Trainyard makes of it: NAME.yaml takes the place of trainyard.yaml.
GENERATED = ".trainyard"

#: How a line of the comment at the top of a file begins that ``trainyard job`` writes.
JOB_MARK = "Written by `trainyard job`"

#: Name of the user's command among the commands of a recipe.
COMMAND = "run"

#: Where the code is in the image; the working directory of its containers.
FOLDER = "/workspace"

#: Prefix of Trainyard's own labels.
LABELS = "io.trainyard"

#: The label of an image, and the annotation of an index, with its immutable tag.
TAG = "org.opencontainers.image.version"

#: Value of the label ``tested`` of an image that was never run: its code was replaced at the registry.
UNTESTED = "none"

#: What the tags of such images begin with.
DEVELOPMENT = "dev-"

#: Modification time of every file that a build adds to an image: 1980-01-01, the earliest time that zip archives can
#: hold, in seconds since 1970. With the commit's time every commit would have a new framework layer.
FILE_EPOCH = 315532800


def day_and_hash(tag: str) -> tuple[str, str]:
    """The day, as in ``20261121``, and the content hash of an immutable tag; both empty for any other tag."""
    found = re.search(r"-(\d{8})-([0-9a-f]{8})(?:-[a-z0-9]+)?$", tag)
    return (found[1], found[2]) if found else ("", "")


def is_immutable(tag: str) -> bool:
    """Whether a tag always has the digest that it was pushed with; the others are floating."""
    return day_and_hash(tag) != ("", "") or tag.startswith(DEVELOPMENT)


def candidate_tag(target: str) -> str:
    """The local reference of an image that was built but not yet verified and trained in."""
    return f"{NAME}:{target}-candidate"


def default_reference(engine: Engine, target: str) -> str:
    """Return the candidate of a target or, if it has none, the reference of the last image that passed everything."""
    candidate = candidate_tag(target)
    return candidate if engine.digest_of(candidate) else f"{NAME}:{target}"
