"""Replay real outages of 2026: is an image with one stopped before it has a name, and by which line?

    python -m benchmarks.outages                all of outages.yaml, their healthy twins, and three peers
    python -m benchmarks.outages --only NAME    those whose names contain a word
    python -m benchmarks.outages --save         also writes docs/outages.md

An outage is a small repository whose requirements are resolved as the package index was at a stated date
(`exclude-newer`). Only the packages are replayed, not the program that the issue is about. In a temporary folder
`trainyard init`, `check`, `lock` and `image` run in turn, until one refuses:

    stopped    a step refused
    avoided    the image has a name, and what failed in the thread works in it
    named      the image has a name, and what failed in the thread fails in it

The healthy twin is the same repository with the repair: its image must get a name, and work. Three peers get the same
requirements of the same date:

    pip    RUN pip install -r requirements.txt
    uv     RUN uv sync --frozen, after `uv lock`
    cog    RUN uv pip install -r requirements.txt, and what cog does when it has built: pip freeze
           (https://github.com/replicate/cog/blob/main/pkg/dockerfile/standard_generator.go)

No registry was in reach: their RUN lines run in a container of the base of Trainyard's own images, Debian 13 with
Python 3.13, which a build leaves, instead of python:3.13-slim. If all succeed, a Dockerfile's image has its name. An
outage with `locked` ends at the lock, with Trainyard and peers, as where an image would have PyTorch with CUDA:
`locked` is what a lock that works has.

Results are kept in build/outages, and an outage that has one is not run again: remove it to run it. The base, and the
volume of downloads `trainyard-outages`, are left.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import http.server
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from benchmarks.registry import ROOT, TRAINYARD

CHOSEN = ROOT / "benchmarks" / "outages.yaml"
KEPT = ROOT / "build" / "outages"
PAGE = ROOT / "docs" / "outages.md"

BASE, CACHE = "trainyard-base:debian-13-python", "trainyard-outages"

#: Seconds for a step. Images took 60 to 210 s.
LIMIT = 900

#: Bytes that are free on the disk before anything is built.
FREE = 5e9

#: What a Dockerfile's RUN lines are for each peer, and what tells instead what they would install.
PEERS = {
    "pip": "uv venv -q --seed /v && /v/bin/pip install -q --uploaded-prior-to {date} -r requirements.txt",
    "uv": "cd uv && uv lock -q && uv sync -q --frozen",
    "cog": "uv venv -q --seed /v && uv pip install -q --python /v/bin/python --exclude-newer {date} "
    "-r requirements.txt && /v/bin/pip freeze -q >frozen.txt",
}
RESOLVED = {
    "pip": "uv venv -q --seed /v && /v/bin/pip install --uploaded-prior-to {date} --dry-run {python} "
    r"-r requirements.txt >said && tail -1 said | tr ' ' '\n' | sed -E 's/-([0-9])/==\1/' >resolved.txt",
    "uv": "cd uv && uv lock -q && uv export -q --no-hashes >../resolved.txt",
    "cog": "uv pip compile -q --exclude-newer {date} {python} requirements.txt >resolved.txt",
}

PAGE_TEXT = """\
<!-- Written by `python -m benchmarks.outages --save`. Do not edit. -->

# Outages of 2026, replayed

What broke training images in 2026, rebuilt from the package index as it was on a day on which it did: is the image
stopped before it has a name? Repositories, threads and repairs are in
[outages.yaml](../benchmarks/outages.yaml); [outages.py](../benchmarks/outages.py) says how they are replayed.

{date}, {machine}.

| measure | found | target |
|---|---|---|
{measures}

## Each outage

Stopped, with the step that refused; avoided, if the image has its name and works; or named, if it has its name and what
failed in the thread fails in it. *Right*: it was avoided, or the lines of the step that refused name the package and
the repair that the thread found.

| outage | index of | Trainyard | right | twin | pip | uv | cog |
|---|---|---|---|---|---|---|---|
{rows}

## What was said

The line that tells it, of Trainyard and of a peer: the last of the step that stopped, or what failed in the image.

{lines}

Peers ran in a container of Debian 13 with Python 3.13, since no registry was in reach. {locked} outages end at the
lock, with everybody: no image with PyTorch was built. Those of the plugin, of torchaudio and of cuDNN got their lock
without a word before this replay, which put them into [conflicts.yaml](../images/conflicts.yaml): others of their kind
are not known. The advice about a name that a package lacks, and about numpy 1, is of this replay, too.
"""


def run(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run a command; returns its status and what it said, without paths of this machine."""
    try:
        ended = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, check=False
        )
        status, said = ended.returncode, ended.stdout + ended.stderr
    except subprocess.TimeoutExpired:
        status, said = 124, f"no end after {LIMIT} s"
    return status, said.replace(f"{folder}/", "").replace(str(folder), ".")


def written(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files, commit them, and return their folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    git = ["git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=The repository of an outage"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def project(name: str, one: Mapping[str, Any]) -> str:
    """Return the pyproject.toml of an outage."""
    python = one.get("python", "3.13")
    head = {"name": f"outage-{name}", "version": "1", "requires-python": f"=={python}.*"}
    rows = [f"{key} = {json.dumps(value)}" for key, value in {**head, "dependencies": one["requirements"]}.items()]
    day = [f'exclude-newer = "{date(one)}"'] if "date" in one else []
    return "\n".join(["[project]", *rows, "[tool.uv]", *day, one.get("tool", "")])


def date(one: Mapping[str, Any]) -> str:
    """Return the time as of which the index is."""
    return f"{one.get('date', datetime.date.today() + datetime.timedelta(1))}T00:00:00Z"


def last(said: str) -> str:
    """Return the line that says why a command ended."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    refused = [line for line in lines if not line.startswith(("WARNING", "note", "hint", "[notice]", "launch:"))]
    refused = [line for line in refused if "must be corrected" not in line]
    return (refused or lines or ["nothing was said"])[-1]


def ours(name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """Run Trainyard's steps; returns how it ended, at which step, the last line, and all that was said."""
    found: dict[str, Any] = {"step": "", "said": ""}
    with tempfile.TemporaryDirectory() as temporary:
        files = one.get("files") or {"pyproject.toml": project(name, one)}
        folder = written(Path(temporary) / f"outage-{name}", {"train.py": one["train"], **files})
        for step in ("init", "check", "lock", *(["image"] if "locked" not in one else [])):
            words = ["--yes", *one.get("init", [])] if step == "init" else []
            status, said = run([*TRAINYARD, step, *words], folder)
            found |= {"step": step, "line": last(said), "said": found["said"] + said}
            if status:
                return found | {"ended": "stopped"}
            if step == "init":
                settings = folder / "trainyard.yaml"
                text = {**yaml.safe_load(settings.read_text(encoding="utf-8")), **one.get("settings", {})}
                settings.write_text(yaml.safe_dump(text, sort_keys=False), encoding="utf-8")
        if "locked" in one:
            lock = re.sub(r'"\nversion = "', "==", (folder / "pylock.trainyard.toml").read_text(encoding="utf-8"))
            fine = re.search(one["locked"], lock)
            return found | ({"ended": "avoided", "line": f"locked: {fine[0]}"} if fine else {"ended": "named"})
        image = f"trainyard:outage-{name}"
        try:
            status, said = run(["docker", "run", "--rm", image, "--", "sh", "-c", one["proof"]], folder)
        finally:
            listed = subprocess.check_output(["docker", "images", "--format={{.Repository}}:{{.Tag}}"], text=True)
            names = [line for line in listed.split() if line == image or line.startswith(f"{image}-")]
            subprocess.run(["docker", "rmi", "--force", *names], check=False, capture_output=True)
        return found | {"ended": "named" if status else "avoided", "line": last(said)}


def peer(name: str, peer: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """Run the RUN lines of a peer and, if they succeed, what failed in the thread; returns how it ended."""
    with tempfile.TemporaryDirectory() as temporary:
        listed = "".join(f"{line}\n" for line in [*one.get("options", []), *one["requirements"]])
        files = {"requirements.txt": listed, "train.py": one["train"], "uv/pyproject.toml": project(name, one)}
        folder = written(Path(temporary), files)
        python = one.get("python")
        other = f"--python-version {python} --only-binary :all:" + " --target /t" * (peer == "pip") if python else ""
        lines = (RESOLVED if "locked" in one else PEERS)[peer].format(date=date(one), python=other)
        lines = one.get("peers", {}).get(peer, lines)
        proof = one.get("proof", "")
        if "locked" in one:
            names = "|".join(re.split(r"[^\w-]", line)[0] for line in one["requirements"])
            proof = f"grep -E '^({names})==' resolved.txt | paste -sd' '; grep -qE '{one['locked']}' resolved.txt"
        script = f"set -e\n({lines})\necho NAMED\nPATH=/v/bin:$PATH\n{proof}\n"
        uv = shutil.which("uv", path=str(Path(sys.executable).parent))
        certificates = os.environ.get("PIP_CERT", "/etc/ssl/certs/ca-certificates.crt")
        words = ["docker", "run", "--rm", "--network=host", "--workdir=/r", f"--volume={folder}:/r"]
        words += [f"--volume={uv}:/uv/uv:ro", "--env=PATH=/uv:/usr/bin:/bin", "--env=UV_PROJECT_ENVIRONMENT=/v"]
        words += [f"--volume={certificates}:/ca.pem:ro", "--env=SSL_CERT_FILE=/ca.pem", "--env=PIP_CERT=/ca.pem"]
        words += [f"--volume={CACHE}:/cache", "--env=UV_CACHE_DIR=/cache/uv", "--env=PIP_CACHE_DIR=/cache/pip"]
        words += ["--env=UV_LINK_MODE=copy", "--env=PIP_ROOT_USER_ACTION=ignore", BASE, "sh", "-c", script]
        status, said = run(words, folder)
        before, named, after = said.partition("NAMED\n")
        if not named:
            return {"ended": "stopped", "line": last(before)}
        return {"ended": "named" if status else "avoided", "line": last(after)}


@contextlib.contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve package indexes, of which cu134 has an old torch alone, as PyTorch's has; yields their address."""
    page = '<a href="torch-2.0.1-cp311-cp311-linux_x86_64.whl">torch-2.0.1-cp311-cp311-linux_x86_64.whl</a>'
    (folder / "whl" / "cu134" / "torch").mkdir(parents=True)
    (folder / "whl" / "cu134" / "torch" / "index.html").write_text(page, encoding="utf-8")

    class Handler(http.server.SimpleHTTPRequestHandler):
        """Answer without a log."""

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def measured(name: str, one: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found of an outage: from its file in build/outages, or by running it."""
    file = KEPT / f"{name}.json"
    if not file.exists():
        if shutil.disk_usage(KEPT).free < FREE:
            sys.exit(f"{name}: less than {FREE / 1e9:.0f} GB are free")
        made = {"ours": ours(name, one), "twin": ours(name, {**one, **one["repair"]})}
        made |= {each: peer(name, each, one) for each in PEERS}
        file.write_text(json.dumps(made, indent=1), encoding="utf-8")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    ended, said = found["ours"]["ended"], found["ours"]["said"] + found["ours"]["line"]
    found["right"] = ended == "avoided" or (ended == "stopped" and bool(re.search(one["expected"], said)))
    for key in ("ours", "twin", *PEERS):
        print(f"{name:18} {key:5} {found[key]['ended']:8} {found[key]['line']}", flush=True)
    return found


def page(chosen: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Return docs/outages.md."""
    total = len(chosen)
    kept = {each: sum(found[each]["ended"] != "named" for found in results.values()) for each in ("ours", *PEERS)}
    right = sum(found["right"] for found in results.values())
    refused = sum(found["twin"]["ended"] != "avoided" for found in results.values())
    measures = [
        ("stopped or avoided", f"{kept['ours']} of {total}", f"at least {total - 1}"),
        ("avoided, or stopped with the right remedy", f"{right} of {total}", f"at least {total - 1}"),
        ("healthy twins refused", f"{refused} of {total}", "0"),
        *((f"stopped or avoided by {each}", f"{kept[each]} of {total}", "") for each in PEERS),
    ]
    rows, lines = [], []
    for name, one in chosen.items():
        found = results[name]
        step = f" by `{found['ours']['step']}`" if found["ours"]["ended"] == "stopped" else ""
        rows.append((
            f"[{one['title']}]({one['thread']})", str(one.get("date", "today")), found["ours"]["ended"] + step,
            "yes" if found["right"] else "no",
            "works" if found["twin"]["ended"] == "avoided" else found["twin"]["ended"],
            *(found[each]["ended"] for each in PEERS),
        ))  # fmt: skip
        said = {each: found[each]["line"] for each in PEERS if found[each]["ended"] != "avoided"}
        fixes = re.findall(r"^ +(fix: .*)", found["ours"]["said"], re.MULTILINE)[: found["ours"]["ended"] == "stopped"]
        text = [
            shown(found["ours"]["line"]),
            *fixes,
            *(f"{each}: {shown(line)}" for each, line in list(said.items())[:1]),
        ]
        lines.append("\n    ".join([f"{one['title']}\n", *text]) + "\n")
    return PAGE_TEXT.format(
        date=datetime.date.today(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        measures=table(measures),
        rows=table(rows),
        lines="\n".join(lines),
        locked=sum("locked" in one for one in chosen.values()),
    )


def shown(line: str) -> str:
    """Return a line without addresses, shortened."""
    return re.sub(r"\w+://\S+", "(an address)", line)[:400]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of a table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay outages; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the names of outages")
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    KEPT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, index(Path(temporary)) as address:
        text = CHOSEN.read_text(encoding="utf-8").replace("INDEXES", address)
        chosen = {name: one for name, one in yaml.safe_load(text).items() if given.only in name}
        results = {name: measured(name, one) for name, one in chosen.items()}
    text = page(chosen, results)
    if given.save:
        PAGE.write_text(text, encoding="utf-8")
    print(text.partition("## Each outage")[0])
    bad = [name for name, found in results.items() if found["ours"]["ended"] == "named" or not found["right"]]
    return int(len(bad) > 1 or any(found["twin"]["ended"] != "avoided" for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
