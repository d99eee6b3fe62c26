"""Faults in the files of an image: changed, added, removed, with another mode, owner or target."""

from __future__ import annotations

import copy
import json
import posixpath
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.mutations import chance, elf
from tests.mutations.chance import WORD, word
from tests.mutations.layout import Change, Entry, Member, SavedImage

#: Bytes of the largest file that is changed.
LARGEST = 64 << 20

#: CAP_NET_ADMIN and CAP_SYS_ADMIN, effective, as revision 2 of capabilities in extended attributes: ``struct
#: vfs_cap_data`` of https://github.com/torvalds/linux/blob/v6.1/include/uapi/linux/capability.h
_CAPABILITY = "\x01\x00\x00\x02\x00\x10\x20\x00" + "\x00" * 12

#: A program's name in an archive's entry for the attribute (https://pkg.go.dev/archive/tar#Header).
_CAPABILITY_HEADER = "SCHILY.xattr.security.capability"


@dataclass(frozen=True)
class FileFault:
    """A fault in the files of an image.

    Attributes:
        what: one line about it.
        places: words, of which a finding that concerns it has one.
        layer: index of the layer that it can be made in.
    """

    kind: str
    what: str
    places: tuple[str, ...]
    change: Change
    layer: int


FileOperator = Callable[[Random, SavedImage], FileFault]


def edited_byte(rng: Random, image: SavedImage) -> FileFault:
    """One byte of a file is another one."""
    entry = _file(rng, image)
    data, at = bytearray(image.content(entry)), rng.randrange(entry.info.size)
    data[at] ^= rng.randrange(1, 256)
    return _replaced("byte changed", f"byte {at} of /{entry.path} changed", entry, bytes(data))


def appended(rng: Random, image: SavedImage) -> FileFault:
    """A file has a line more."""
    entry = _file(rng, image)
    data = image.content(entry) + f"\n# {word(rng, 16)}\n".encode()
    return _replaced("file appended to", f"a line appended to /{entry.path}", entry, data)


def same_size(rng: Random, image: SavedImage) -> FileFault:
    """A file has another content of the same size, and the same time of modification."""
    entry = _file(rng, image)
    data = rng.randbytes(entry.info.size)
    return _replaced("file of the same size", f"/{entry.path} replaced by a file of the same size", entry, data)


def deleted(rng: Random, image: SavedImage) -> FileFault:
    """A file is missing."""
    entry = _file(rng, image)
    change = Change(removed=(entry.path,))
    return FileFault("file deleted", f"/{entry.path} deleted", (entry.path,), change, entry.layer)


def folder_deleted(rng: Random, image: SavedImage) -> FileFault:
    """A folder is missing; never one of the root, without which nothing works."""

    def wanted(entry: Entry) -> bool:
        below = [path for path in image.visible if path.startswith(f"{entry.path}/")]
        return entry.info.isdir() and "/" in entry.path and bool(below) and not image.linked.intersection(below)

    entry = chance.entry(image, rng, wanted, "folder with files")
    change = Change(removed=(entry.path,))
    return FileFault("folder deleted", f"/{entry.path}/ deleted", (entry.path,), change, entry.layer)


def other_mode(rng: Random, image: SavedImage) -> FileFault:
    """A program is setuid or setgid, a file or folder is world-writable, or a file has no permissions."""
    name, mode = rng.choice([("setuid", 0o4755), ("setgid", 0o2755), ("world-writable", 0), ("not readable", 0o000)])
    folder = name == "world-writable" and rng.random() < 0.5
    entry = chance.entry(
        image,
        rng,
        lambda one: one.info.isdir() and not one.info.mode & 0o1002 if folder else _changeable(image, one),
        "folder that others cannot write to" if folder else "file",
    )
    wanted = entry.info.mode | 0o002 if name == "world-writable" else mode
    if wanted == entry.info.mode:
        wanted ^= 0o001
    info = copy.copy(entry.info)
    info.mode = wanted
    what = f"/{entry.path}{'/' if folder else ''} {name}: mode {wanted:04o} instead of {entry.info.mode:04o}"
    return _with_header(f"mode: {name}", what, entry, image, info)


def other_owner(rng: Random, image: SavedImage) -> FileFault:
    """A file belongs to another user or group."""
    entry = _file(rng, image)
    info = copy.copy(entry.info)
    owners = [(0, 0), (1000, 1000), (1, 1), (33, 33), (0, 1000), (65534, 65534)]
    info.uid, info.gid = rng.choice([one for one in owners if one != (info.uid, info.gid)])
    info.uname = info.gname = ""
    what = f"/{entry.path} belongs to {info.uid}:{info.gid} instead of {entry.info.uid}:{entry.info.gid}"
    return _with_header("owner", what, entry, image, info)


def capability(rng: Random, image: SavedImage) -> FileFault:
    """A program has capabilities."""
    entry = chance.entry(image, rng, lambda one: _changeable(image, one) and bool(one.info.mode & 0o111), "program")
    info = copy.copy(entry.info)
    info.pax_headers = {**entry.info.pax_headers, _CAPABILITY_HEADER: _CAPABILITY}
    return _with_header("capabilities", f"/{entry.path} has CAP_NET_ADMIN and CAP_SYS_ADMIN", entry, image, info)


def replaced_by_link(rng: Random, image: SavedImage) -> FileFault:
    """A file is a symbolic link."""
    entry = _file(rng, image)
    return _link("file replaced by a link", entry, _target(rng, image, entry))


def other_target(rng: Random, image: SavedImage) -> FileFault:
    """A symbolic link leads elsewhere."""
    entry = chance.entry(image, rng, lambda one: one.info.issym() and one.path not in image.linked, "symbolic link")
    return _link("target of a link", entry, _target(rng, image, entry))


def other_machine(rng: Random, image: SavedImage) -> FileFault:
    """A program or library is for another processor."""
    entry = _elf(rng, image)
    data = elf.other_machine(image.content(entry))
    return _replaced("library of another architecture", f"/{entry.path} is for another processor", entry, data)


def missing_library(rng: Random, image: SavedImage) -> FileFault:
    """A library that a program or library needs is missing."""
    present: dict[str, list[Entry]] = {}
    for one in image.visible.values():
        if ".so" in one.path and not one.info.isdir() and one.path not in image.linked:
            present.setdefault(posixpath.basename(one.path), []).append(one)

    def wanted(one: Entry) -> bool:
        return _is_elf(image, one) and any(name in present for name in elf.needed(image.content(one)))

    user = chance.entry(image, rng, wanted, "program that needs a shared library")
    name = rng.choice([name for name in elf.needed(image.content(user)) if name in present])
    entry = rng.choice(present[name])
    what = f"/{entry.path} deleted, which /{user.path} needs"
    return FileFault("library missing", what, (entry.path, name), Change(removed=(entry.path,)), entry.layer)


def new_module(rng: Random, image: SavedImage) -> FileFault:
    """A Python module more."""
    return _added(rng, image, "module added", f"{word(rng)}.py", f"{word(rng, 5).upper()} = {rng.random()}\n".encode())


def new_path_file(rng: Random, image: SavedImage) -> FileFault:
    """A .pth file more."""
    return _added(rng, image, ".pth file added", f"{word(rng)}.pth", f"import {word(rng)}\n".encode())


def new_program(rng: Random, image: SavedImage) -> FileFault:
    """A program more: a script, or a copy of a program of the image."""
    data = f"#!/bin/sh\necho {word(rng)}\n".encode() if rng.random() < 0.5 else image.content(_elf(rng, image))
    return _added(rng, image, "program added", word(rng), data, mode=0o755)


def new_library(rng: Random, image: SavedImage) -> FileFault:
    """A shared library more."""
    return _added(rng, image, "library added", f"lib{word(rng)}.so.{rng.randrange(9)}", image.content(_elf(rng, image)))


def new_hidden_file(rng: Random, image: SavedImage) -> FileFault:
    """A file more whose name begins with a dot."""
    return _added(rng, image, "hidden file added", f".{word(rng)}", rng.randbytes(rng.randrange(1, 4000)))


def new_cache(rng: Random, image: SavedImage) -> FileFault:
    """A file that a program has cached."""
    name = rng.choice([
        f"__pycache__/{word(rng)}.cpython-313.pyc", f".cache/pip/http-v2/{word(rng, 2)}/{word(rng, 40)}",
        f".cache/uv/wheels-v5/{word(rng)}.msgpack", f".mypy_cache/3.13/{word(rng)}.data.json",
        f".cache/matplotlib/fontlist-v{rng.randrange(400)}.json", f".triton/cache/{word(rng, 32)}/kernel.cubin",
    ])  # fmt: skip
    return _added(rng, image, "cache added", name, rng.randbytes(rng.randrange(100, 5000)))


def new_history(rng: Random, image: SavedImage) -> FileFault:
    """What a shell or another program remembers of its user."""
    name = rng.choice([".bash_history", ".python_history", ".lesshst", ".viminfo", ".wget-hsts", ".zsh_history"])
    commands = f"cd /{word(rng)}\ncurl -u {word(rng)}:{word(rng, 12)} http://{word(rng)}.example\n"
    return _added(rng, image, "history added", name, commands.encode(), usual=("root", "home/trainer"))


def new_leftover(rng: Random, image: SavedImage) -> FileFault:
    """What a package manager leaves behind."""
    folder, name = rng.choice([
        ("var/lib/apt/lists", f"deb.example_debian_dists_trixie_{word(rng, 4)}_Packages"),
        ("var/cache/apt/archives", f"{word(rng)}_1.{rng.randrange(9)}-1_amd64.deb"), ("var/cache/apt", "pkgcache.bin"),
        ("var/log", "dpkg.log"), ("var/log", f"{word(rng)}.log"), ("var/lib/dpkg", "status-old"),
        ("var/cache/debconf", "templates.dat-old"), ("tmp", f"pip-build-env-{word(rng)}"), ("var/tmp", word(rng)),
        ("root", f"{word(rng)}-1.0-py3-none-any.whl"), ("etc", "passwd-"), ("var/cache/ldconfig", "aux-cache"),
    ])  # fmt: skip
    data = rng.randbytes(rng.randrange(100, 3000))
    return _added(rng, image, "package manager's leftover added", name, data, usual=(folder,))


def new_credential(rng: Random, image: SavedImage) -> FileFault:
    """A credential: known names and formats, and known formats under a random name."""
    name, text = rng.choice(_credentials(rng))
    if rng.random() < 0.3:
        name = f"{word(rng)}.txt"
    return _added(rng, image, "credential added", name, text.encode(), usual=("root", "home/trainer"), mode=0o600)


def _credentials(rng: Random) -> list[tuple[str, str]]:
    """Names and contents, as the programs that use them write them. The keys are random letters."""
    key = "\n".join(word(rng, 64, WORD + "+/") for _ in range(12))

    def pem(kind: str) -> str:
        # The words are joined here, so that this file is not one that looks like a key.
        return "\n".join((f"-----BEGIN {kind}", key, f"-----END {kind}")).replace(kind, f"{kind} KEY-----") + "\n"

    account = {"type": "service_account", "project_id": word(rng), "private_key_id": word(rng, 40, "0123456789abcdef"),
               "private_key": pem("PRIVATE"), "client_email": f"{word(rng)}@{word(rng)}.example"}  # fmt: skip
    user, secret = word(rng), word(rng, 40, WORD)
    aws = f"[default]\naws_access_key_id = AKIA{word(rng, 16, WORD.upper())}\naws_secret_access_key = {secret}\n"
    docker = json.dumps({"auths": {"registry.example": {"auth": word(rng, 40, WORD)}}})
    refresh = {"type": "authorized_user", "client_id": f"{word(rng, 12, '0123456789')}.apps.example",
               "client_secret": word(rng, 24, WORD), "refresh_token": f"1//0{word(rng, 60, WORD)}"}  # fmt: skip
    return [
        (".aws/credentials", aws), (".docker/config.json", docker), (".ssh/id_rsa", pem("RSA PRIVATE")),
        (".ssh/id_ed25519", pem("OPENSSH PRIVATE")), (f"{word(rng)}-key.json", json.dumps(account)),
        (".config/gcloud/application_default_credentials.json", json.dumps(refresh)),
        (".netrc", f"machine {user}.example login {user} password {secret}\n"),
        (".git-credentials", f"https://{user}:{secret}@git.example\n"),
        (".pypirc", f"[pypi]\nusername = __token__\npassword = pypi-{word(rng, 80, WORD)}\n"),
        (".kube/config", f"apiVersion: v1\nkind: Config\nusers:\n- name: {user}\n  user: {{token: {secret}}}\n"),
        (".env", f"DATABASE_PASSWORD={secret}\nGITHUB_TOKEN=ghp_{word(rng, 36, WORD)}\n"),
        (".cache/huggingface/token", f"hf_{word(rng, 34, WORD)}"), (".kaggle/kaggle.json",
         json.dumps({"username": user, "key": word(rng, 32, "0123456789abcdef")})),
    ]  # fmt: skip


OPERATORS: tuple[FileOperator, ...] = (
    edited_byte, appended, same_size, deleted, folder_deleted, other_mode, other_owner, capability, replaced_by_link,
    other_target, other_machine, missing_library, new_module, new_path_file, new_program, new_library,
    new_hidden_file, new_cache, new_history, new_leftover, new_credential,
)  # fmt: skip


def new_file(path: str, data: bytes, mode: int = 0o644) -> Member:
    """A file of root, made on the first day of 2026."""
    info = tarfile.TarInfo(path)
    info.mode, info.mtime = mode, 1767225600
    return Member(info, data)


def _changeable(image: SavedImage, entry: Entry) -> bool:
    return entry.info.isreg() and 0 < entry.info.size <= LARGEST and entry.path not in image.linked


def _file(rng: Random, image: SavedImage) -> Entry:
    return chance.entry(image, rng, lambda one: _changeable(image, one), "file")


def _is_elf(image: SavedImage, entry: Entry) -> bool:
    return _changeable(image, entry) and image.content(entry, len(elf.MAGIC)) == elf.MAGIC


def _elf(rng: Random, image: SavedImage) -> Entry:
    return chance.entry(image, rng, lambda one: _is_elf(image, one), "program or shared library")


def _target(rng: Random, image: SavedImage, link: Entry) -> str:
    """Where a link leads to: another file of the image, or a path that it does not have."""
    if rng.random() < 0.3:
        return f"/tmp/{word(rng)}"
    found = chance.entry(image, rng, lambda one: one.info.isreg() and one.path != link.path, "file")
    return f"/{found.path}"


def _link(kind: str, entry: Entry, target: str) -> FileFault:
    info = tarfile.TarInfo(entry.path)
    info.type, info.linkname, info.mode, info.mtime = tarfile.SYMTYPE, target, 0o777, entry.info.mtime
    info.uid, info.gid = entry.info.uid, entry.info.gid
    change = Change((Member(info),))
    return FileFault(kind, f"/{entry.path} is a link to {target}", (entry.path,), change, entry.layer)


def _replaced(kind: str, what: str, entry: Entry, data: bytes) -> FileFault:
    """Another content, with the header of the file."""
    return FileFault(kind, what, (entry.path,), Change((Member(entry.info, data),)), entry.layer)


def _with_header(kind: str, what: str, entry: Entry, image: SavedImage, info: tarfile.TarInfo) -> FileFault:
    """Another header, with the content of the file."""
    data = image.content(entry) if entry.info.isreg() else b""
    return FileFault(kind, what, (entry.path,), Change((Member(info, data),)), entry.layer)


def _added(
    rng: Random, image: SavedImage, kind: str, name: str, data: bytes, usual: tuple[str, ...] = (), mode: int = 0o644
) -> FileFault:
    """A file more, in a random folder, or in one that is usual for such files."""
    folder = chance.folder(image, rng)
    if usual and rng.random() < 0.5:
        folder = image.visible.get(rng.choice(usual), folder)
    path = f"{folder.path}/{name}"
    # opt/.cache of opt/.cache/pip/selfcheck: a finding may name the folder that is new.
    top = f"{folder.path}/{name.split('/')[0]}"
    change = Change((new_file(path, data, mode),))
    places = (path, top) if top != path else (path,)
    return FileFault(kind, f"/{path} added ({len(data)} bytes)", places, change, folder.layer)
