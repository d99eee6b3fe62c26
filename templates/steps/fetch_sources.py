#!/usr/bin/python3
"""Download the source distributions of locks, and the wheels that they are built with, to /sources.

Nothing of a package is run: uv takes no metadata from builds, archives are read and not unpacked. The SHA-256 of a file
is that of the lock, or for what builds another one that of the index.

An argument NAME.lock is a file with a lock; without one, locks come on standard input, each after a line ``[NAME]``.
/sources/NAME gets the files, ``pins`` (what has no wheel), ``wheels.lock`` (the others) and ``all.lock``. All of
build-requires is downloaded, and then nothing else is resolved. The other arguments are options of ``uv pip compile``.
Python 3.11 and newer.
"""

import base64
import hashlib
import http.client
import netrc
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

PIN = re.compile(r"(?m)^([\w.-]+)(?:\[[^]]*\])?==([^ ;\\]+).*?(?=^\S|\Z)", re.DOTALL)
PYPROJECT = re.compile(r"[^/]+/pyproject\.toml")
FILES = [Path(word) for word in sys.argv[1:] if word.endswith(".lock")]
OPTIONS = [word for word in sys.argv[1:] if not word.endswith(".lock")]


def resolve(lines, *options, pinned=()):
    """Return the packages of a pylock.toml; those that are ``pinned`` need no metadata."""
    with tempfile.TemporaryDirectory() as folder:
        lock, settings, wanted = (Path(folder, name) for name in ("pylock.toml", "uv.toml", "in.txt"))
        given = Path(os.environ.get("UV_CONFIG_FILE", os.devnull)).read_text()
        settings.write_text(given + "".join(f'\n[[dependency-metadata]]\nname = "{name}"\n' for name in pinned))
        wanted.write_text("\n".join(lines))
        command = ["uv", "pip", "compile", "--quiet", "--format", "pylock.toml"]
        command += ["--config-file", settings, "--output-file", lock, *OPTIONS, *options, wanted]
        if subprocess.run(command).returncode:
            sys.exit(1)
        return tomllib.loads(lock.read_text()).get("packages", [])


def download(file, folder, accepted):
    """Download a file of a pylock.toml whose SHA-256 is one of those that are accepted, if there are any."""
    address, request = urllib.parse.urlsplit(file["url"]), urllib.request.Request(file["url"])
    path = folder / Path(urllib.parse.unquote(address.path)).name
    if "NETRC" in os.environ and (known := netrc.netrc(os.environ["NETRC"]).authenticators(address.hostname)):
        pair = base64.b64encode(f"{known[0]}:{known[2]}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {pair}")
    for left in (2, 1, 0):
        try:
            path.write_bytes(urllib.request.urlopen(request, timeout=60).read())
            break
        except (OSError, http.client.HTTPException) as error:
            if not left:
                sys.exit(f"error: {path.name} cannot be downloaded: {error}")
    if accepted and hashlib.sha256(path.read_bytes()).hexdigest() not in accepted:
        sys.exit(f"error: {path.name} is not the file that was locked: its SHA-256 differs")
    return path


def build_requires(path):
    """Return what builds a source distribution: https://packaging.python.org/en/latest/specifications/pyproject-toml/."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            found = [archive.read(name) for name in archive.namelist() if PYPROJECT.fullmatch(name)]
    else:
        with tarfile.open(path) as archive:
            found = [
                archive.extractfile(one).read() for one in archive if one.isfile() and PYPROJECT.fullmatch(one.name)
            ]
    system = tomllib.loads(b"".join(found[:1]).decode()).get("build-system", {})
    return system.get("requires", ["setuptools", "wheel"])


def given():
    """Return the name of each layer -> its lock."""
    if FILES:
        return {path.stem: path.read_text() for path in FILES}
    _, *parts = re.split(r"(?m)^\[([\w.-]+)\]\n", sys.stdin.read())
    return dict(zip(parts[::2], parts[1::2], strict=True))


locks = given()
for layer, lock in locks.items():
    folder = Path("/sources", layer)
    folder.mkdir(parents=True)
    (folder / "all.lock").write_text(lock)
    pins = {re.sub(r"[-_.]+", "-", one[1]).lower(): one for one in PIN.finditer(lock)}
    own = ["--find-links", "/wheels"] if os.path.isdir("/wheels") else []
    lines = [f"{name}=={pin[2]}" for name, pin in pins.items()]
    for package in resolve(lines, "--no-deps", *own, pinned=pins) if lines else []:
        name, files = package["name"], [*package.get("wheels", []), *filter(None, [package.get("sdist")])]
        accepted = set(re.findall(r"sha256:([0-9a-f]{64})", pins[name][0]))
        # Some indexes have no hashes.
        fits = [file for file in files if file.get("hashes", {}).get("sha256") in {*accepted, None}]
        if layer == "build-requires":
            download(fits[0], folder, accepted)
        elif fits and fits[0] is package.get("sdist"):
            archive = download(fits[0], folder, accepted)
            with (folder / "pins").open("a") as file:
                file.write(f"{name}=={pins.pop(name)[2]}\n")
            if "build-requires" in locks:
                continue
            for tool in resolve(build_requires(archive), "--no-build", "--constraints", "/locks/uv.lock"):
                download(tool["wheels"][0], folder, {*tool["wheels"][0].get("hashes", {}).values()})
    (folder / "wheels.lock").write_text("".join(pin[0] for pin in pins.values()))
