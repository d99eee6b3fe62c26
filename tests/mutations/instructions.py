"""Faults of a Dockerfile: what one more RUN, COPY, ADD, USER or ENV does to an image.

An instruction makes a layer on a random one, or changes the configuration, and is in the history.
"""

from __future__ import annotations

import copy
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.mutations import chance, configuration, files
from tests.mutations.chance import word
from tests.mutations.files import new_file
from tests.mutations.layout import Change, Entry, Member, SavedImage


@dataclass(frozen=True)
class Instruction:
    """One more instruction.

    Attributes:
        created_by: how the history shows it.
        places: words, of which a finding that concerns it has one.
        change: the files of its layer; None if it makes none.
        above: index of the layer that its layer is above, or any of the layers on it.
        config: the configuration, if it is another one.
    """

    kind: str
    created_by: str
    places: tuple[str, ...]
    change: Change | None = None
    above: int = 0
    config: dict[str, Any] | None = None


InstructionOperator = Callable[[Random, SavedImage], Instruction]


def run_that_leaves_a_file(rng: Random, image: SavedImage) -> Instruction:
    """A command leaves a file in a folder for temporary or variable files."""
    path = f"{rng.choice(['tmp', 'var/tmp', 'var/log', 'root', 'srv'])}/{word(rng)}"
    change = Change((new_file(path, rng.randbytes(rng.randrange(1, 3000))),))
    return Instruction("RUN that leaves a file", f"RUN /bin/sh -c {word(rng)} >/{path} # buildkit", (path,), change)


def run_that_edits_settings(rng: Random, image: SavedImage) -> Instruction:
    """A command appends a line to a file in /etc."""

    def wanted(entry: Entry) -> bool:
        return entry.path.startswith("etc/") and entry.info.isreg() and entry.path not in image.linked

    entry = chance.entry(image, rng, wanted, "file in /etc")
    line = word(rng, 20)
    change = Change((Member(entry.info, image.content(entry) + f"{line}\n".encode()),))
    command = f"RUN /bin/sh -c echo {line} >>/{entry.path} # buildkit"
    return Instruction("RUN that edits a setting", command, (entry.path,), change, entry.layer)


def run_that_changes_a_mode(rng: Random, image: SavedImage) -> Instruction:
    """A command changes the mode of a file or folder."""
    fault = files.other_mode(rng, image)
    (member,) = fault.change.members
    command = f"RUN /bin/sh -c chmod {member.info.mode:o} /{member.path} # buildkit"
    return Instruction("RUN that changes a mode", command, fault.places, fault.change, fault.layer)


def run_that_installs_from_debian(rng: Random, image: SavedImage) -> Instruction:
    """apt-get installs a program, and dpkg lists it."""
    name = f"{word(rng)}{rng.randrange(9)}"
    program, listed = f"usr/bin/{name}", f"var/lib/dpkg/info/{name}.list"
    change = Change((new_file(program, rng.randbytes(2000), 0o755), new_file(listed, f"/.\n/{program}\n".encode())))
    command = f"RUN /bin/sh -c apt-get install -y {name} # buildkit"
    return Instruction("RUN apt-get install", command, (program, listed, name), change)


def run_that_installs_from_pypi(rng: Random, image: SavedImage) -> Instruction:
    """Pip installs a distribution with one module, and its RECORD agrees with it."""
    name, version = word(rng), f"{rng.randrange(9)}.{rng.randrange(9)}"
    site = chance.entry(
        image, rng, lambda one: one.info.isdir() and one.path.endswith("-packages"), "folder of Python packages"
    )
    info = f"{site.path}/{name}-{version}.dist-info"
    change = Change((
        new_file(f"{site.path}/{name}.py", f"print({word(rng)!r})\n".encode()),
        new_file(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()),
        new_file(f"{info}/RECORD", f"{name}.py,,\n{name}-{version}.dist-info/RECORD,,\n".encode()),
        new_file(f"{info}/INSTALLER", b"pip\n"),
    ))  # fmt: skip
    command = f"RUN /bin/sh -c pip install {name}=={version} # buildkit"
    return Instruction("RUN pip install", command, (name,), change, site.layer)


def run_that_removes(rng: Random, image: SavedImage) -> Instruction:
    """A command removes a file or folder."""
    fault = rng.choice([files.deleted, files.folder_deleted])(rng, image)
    (path,) = fault.change.removed
    return Instruction("RUN rm", f"RUN /bin/sh -c rm -rf /{path} # buildkit", (path,), fault.change, fault.layer)


def copy_of_a_file(rng: Random, image: SavedImage) -> Instruction:
    """A file is copied into a random folder."""
    folder, name = chance.folder(image, rng), word(rng)
    path = f"{folder.path}/{name}"
    change = Change((new_file(path, rng.randbytes(rng.randrange(1, 3000))),))
    return Instruction("COPY", f"COPY {name} /{folder.path}/ # buildkit", (path,), change, folder.layer)


def add_of_an_archive(rng: Random, image: SavedImage) -> Instruction:
    """An archive with a folder and files is unpacked into a random folder."""
    folder, name = chance.folder(image, rng), word(rng)
    top = tarfile.TarInfo(f"{folder.path}/{name}")
    top.type, top.mode = tarfile.DIRTYPE, 0o755
    members = [new_file(f"{top.name}/{word(rng)}", rng.randbytes(100)) for _ in range(rng.randrange(1, 5))]
    created_by = f"ADD {name}.tar.gz /{folder.path}/ # buildkit"
    return Instruction("ADD", created_by, (top.name,), Change((Member(top), *members)), folder.layer)


def other_user(rng: Random, image: SavedImage) -> Instruction:
    """Containers run as another user."""
    return _setting(rng, image, "USER", configuration.user(rng, image.config))


def environment(rng: Random, image: SavedImage) -> Instruction:
    """A variable is added or changed."""
    operator = rng.choice([configuration.new_variable, configuration.other_variable])
    return _setting(rng, image, "ENV", operator(rng, image.config))


def _setting(rng: Random, image: SavedImage, kind: str, fault: configuration.ConfigFault) -> Instruction:
    config = copy.deepcopy(fault.config)
    created_by = f"{kind} {fault.what.split(' instead of ')[0]}"
    history = config.setdefault("history", [])
    history.insert(rng.randrange(len(history) + 1), {"created_by": created_by, "empty_layer": True})
    return Instruction(kind, created_by, fault.places, config=config)


OPERATORS: tuple[InstructionOperator, ...] = (
    run_that_leaves_a_file, run_that_edits_settings, run_that_changes_a_mode, run_that_installs_from_debian,
    run_that_installs_from_pypi, run_that_removes, copy_of_a_file, add_of_an_archive, other_user, environment,
)  # fmt: skip
