"""Run `trainyard init`, `check` and `lock` on a hundred public repositories, and count their mistakes independently.

    python -m benchmarks.repositories FOLDER              all of repositories.yaml, two at a time
    python -m benchmarks.repositories FOLDER --only NAME  those whose names contain a word
    python -m benchmarks.repositories FOLDER --save       also writes docs/repositories.md

FOLDER has a git checkout of each repository, OWNER+NAME, at its commit; benchmarks/repositories.yaml tells how they
were chosen. Each is copied, and the commands run in the copy, without a terminal. If `init` ends with a question that
names an answer ("…, as in 'trainyard init --run …'"), it is run once more with that answer.

The second count (benchmarks/second_count.py) counts:

    false      a line about an import whose module is in the repository, or whose package is listed or locked
    lost       a requirement with a version that neither the list that trainyard.yaml takes nor the lock has, while no
               warning names its file, part or package
    unsaid     a file that wishes CUDA (a version of it, a package for it), that no line about CUDA, GPUs or CPUs
               names, while the target is for CPUs

Each result is kept in FOLDER/.results, and a repository that has one is not run again: remove it to run it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from benchmarks import second_count

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = ROOT / "benchmarks" / "repositories.yaml"
PAGE = ROOT / "docs" / "repositories.md"

#: Seconds for a command. Locks took 10 to 60 s.
LIMITS = {"init": 60, "check": 60, "lock": 180}

#: An answer that `init` names; and an address that could not be reached.
ANSWER = re.compile(r", as in 'trainyard init (--run .+?|--target \S+)'")
UNREACHED = re.compile(r"dns error|no such host|Could not resolve host|\(ConnectionError\)")

#: What the second count counts.
COUNTS = {"false": "statements that are false", "lost": "pins lost in silence", "unsaid": "wishes of CUDA unsaid"}

#: How those were drawn that were built.
DRAW = 'random.Random("20261128 ten").sample(sorted(locked), 10)'

#: How the ten were drawn that were taken through the README.
DRAW_TEN = "random.Random(53).sample(names, 10)"

#: The least number of repositories that lock at the first try.
TARGET = 85

PAGE_TEXT = """\
<!-- Written by `python -m benchmarks.repositories FOLDER --save`. Do not edit. -->

# A hundred public repositories

Results of `trainyard init`, `check` and `lock` on public repositories, unmodified. How they were chosen, and their
commits: [repositories.yaml](../benchmarks/repositories.yaml). If `init` asks which program trains,
and names an answer, it is given that one.

{date}, {machine}. The machine reaches a package index and nothing else: where a list of a repository names another
address (PyTorch's index, a mirror, GitHub), `lock` ends with that, and the row says "network".

| measure | found | target |
|---|---|---|
{measures}

## What was false, lost or unsaid

A second count that shares no code with Trainyard (`benchmarks/second_count.py`) reads the same files. A statement about
an import is false if the module is in the repository, or a package of its name is listed or locked. The statements of
other kinds were read one by one on 2026-11-28; those that were false are in repositories.yaml, and count while they
are said.

| repository | kind | line |
|---|---|---|
{lines}

## Each repository

| repository | kind | target | requirements | locks | answered | reason of a miss |
|---|---|---|---|---|---|---|
{rows}

## Ten to an image

Ten of those that locked on 2026-11-28, drawn by `{draw}`, in the order of their size: copied,
`trainyard init --yes`, `trainyard image`. Seconds are those of `image`, each time that it was run, on two cores that
other builds used, too. An image that trained was tagged.

| repository | done by hand | result | seconds |
|---|---|---|---|
{images}

## Nineteen and ten, as a newcomer takes them

Nineteen well-known repositories, and ten of the hundred, drawn by `{ten}` from those that are not above. Only `init`,
with the answer that it names, and `image` were run, with a folder for `--data` where the third column says so.
*Trained* and *ran*: the repository's program did, in the image, with a smoke test that `image` found. *Named*: no
image, and the last line says rightly why. By 2026-11-29 six of the nineteen had trained or run, and a seventh had run
a demonstration; of the ten one had trained. The goals were 13 and 7.

| repository | its own documents start | by hand | result | seconds of `image` |
|---|---|---|---|---|
{taken}

## Which torch is meant

Each form of words chooses a target, is said with its file and line, and reaches the lock
(`pytest tests/unit/test_torch_variant.py`, against an index that the test serves). The forms of lists are numbered in
[own-repository.md](own-repository.md#trainyardyaml).

| form | target | said |
|---|---|---|
{forms}

## Packages and their modules

No import of these is called missing, and no package is added beside one (`pytest tests/unit/test_import_names.py`):
{pairs}.
"""


def run(words: Sequence[str], folder: Path, limit: int) -> tuple[int, float, str]:
    """Run a command; returns its status, seconds, and what it said, without paths of this machine."""
    started = time.monotonic()
    try:
        ended = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL
        )
        status, said = ended.returncode, ended.stderr
    except subprocess.TimeoutExpired as error:
        status, said = 124, f"{(error.stderr or b'').decode()}\nno end after {limit} s"
    return status, round(time.monotonic() - started, 1), said.replace(f"{folder}/", "").replace(str(folder), ".")


def chosen() -> list[dict[str, Any]]:
    """Return the repositories of repositories.yaml, each with its kind and the project's folder."""
    lists = yaml.safe_load(CHOSEN.read_text(encoding="utf-8"))["lists"]
    return [
        {"repository": name, "kind": row["kind"], "folder": row.get("folder", ""), **one}
        for row in lists
        for name, one in row["repositories"].items()
    ]


def taken() -> list[dict[str, Any]]:
    """Return what became of the repositories that were taken through the README."""
    found: list[dict[str, Any]] = yaml.safe_load(CHOSEN.read_text(encoding="utf-8"))["taken"]
    return found


def measure(row: Mapping[str, Any], folder: Path, trainyard: str) -> dict[str, Any]:
    """Run the commands in a copy of a repository; returns what they said and wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / row["repository"].rpartition("/")[2]
        shutil.copytree(folder / row["repository"].replace("/", "+"), copy, symlinks=True)
        here = copy / row["folder"]
        found: dict[str, Any] = {"answered": "", "versions": {}, "failed": "", "reason": "", "config": {}, "said": {}}
        for name in LIMITS:
            words = ["--yes"] if name == "init" else []
            status, found["seconds"], said = run([trainyard, name, *words], here, LIMITS[name])
            if name == "init" and status and (answer := ANSWER.search(said)):
                found["answered"] = answer[1]
                status, found["seconds"], said = run(
                    [trainyard, name, *words, *shlex.split(answer[1])], here, LIMITS[name]
                )
            found["said"][name] = said
            if status and not found["failed"]:
                reason = last(said)
                found |= {"failed": "network" if UNREACHED.search(reason) else name, "reason": reason}
            if name == "init":
                if status:
                    break
                found["config"] = yaml.safe_load((here / "trainyard.yaml").read_text(encoding="utf-8"))
        if (lock := here / "pylock.trainyard.toml").is_file():
            packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
            found["versions"] = {one["name"]: one.get("version", "0") for one in packages}
        return found


def last(said: str) -> str:
    """Return the line that says why a command ended."""
    lines = [line for line in said.splitlines() if line.strip()]
    refused = [line for line in lines if not line.startswith(("WARNING", "note")) and "must be corrected" not in line]
    return (refused or lines or ["nothing was said"])[-1]


def counted(row: Mapping[str, Any], folder: Path, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the second count finds in a checkout that the commands lost, did not say, or said falsely."""
    top = folder / row["repository"].replace("/", "+")
    here, config = top / row["folder"], found["config"]
    if not config:
        return []
    command = str(config.get("run", ""))
    pins, texts = second_count.read(here, command)
    said, first = "\n".join(found["said"].values()), found["said"]["init"]
    roots = [top, here, here / "src", *(here / Path(one).parent for one in re.findall(r"\S+\.py", command)[:1])]
    listed = {path.name: set(re.findall(r'(?m)^name = "(.+)"', path.read_text())) for path in here.glob("*.lock")}
    for one in pins:
        listed.setdefault(one.file, set()).add(one.name)
    return [
        *(("lost", line) for line in second_count.lost(pins, config, texts, said, found["versions"])),
        *(("unsaid", line) for line in second_count.unsaid(texts, str(config.get("extends")), first)),
        *(("false", line) for line in second_count.untrue(roots, listed, set(found["versions"]), said)),
        *(("false", match[0]) for pattern in row.get("false", []) if (match := re.search(pattern, said))),
    ]


def page(rows: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return docs/repositories.md."""
    both = list(zip(rows, results, strict=True))
    lines = [(link(row), *one) for row, found in both for one in counted(row, folder, found)]
    counts = Counter(key for _, key, _ in lines)
    failed = Counter(found["failed"] for found in results)
    late = sum(found["failed"] == "lock" for found in results)
    kinds = Counter(row["kind"] for row in rows)
    locked = Counter(row["kind"] for row, found in both if not found["failed"])
    measures = [
        ("lock at the first try", f"{failed['']} of {len(rows)}", f"at least {TARGET}"),
        ("the same, of those in reach of the machine", f"{failed['']} of {len(rows) - failed['network']}", ""),
        *((name, str(counts[key]), "0") for key, name in COUNTS.items()),
        ("`check` found nothing, and `lock` refused", str(late), ""),
        *((f"of the kind {kind}", f"{locked[kind]} of {kinds[kind]}", "") for kind in kinds),
    ]  # fmt: skip
    return PAGE_TEXT.format(
        date=datetime.date.today(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        measures=table(measures),
        lines=table([(name, COUNTS[key], line) for name, key, line in lines]),
        rows=table([
            (link(row), row["kind"], found["config"].get("extends", ""), second_count.lists(found["config"]),
             f"no: {found['failed']}" if found["failed"] else f"{len(found['versions'])} in {found['seconds']:.0f} s",
             found["answered"] or "", re.sub(r"\w+://\S+", "(an address)", found["reason"])[:240])
            for row, found in both
        ]),
        draw=DRAW,
        ten=DRAW_TEN,
        taken=table([(link(one), one["command"], one["by_hand"], one["result"], one["seconds"]) for one in taken()]),
        images=table([
            (link(row), one["by_hand"], one["result"], one["seconds"]) for row in rows if (one := row.get("image"))
        ]),
        forms=table([(one["form"], one["target"], one.get("said", "")) for one in known("torch_forms")]),
        pairs=", ".join(f"{package} ({module})" for package, module in known("module_pairs")),
    )  # fmt: skip


def known(name: str) -> Any:
    """Return a table of the unit tests, which judge it."""
    return yaml.safe_load((ROOT / "tests" / "unit" / f"{name}.yaml").read_text(encoding="utf-8"))


def link(row: Mapping[str, Any]) -> str:
    """Return a repository's name, and its address at the commit."""
    return f"[{row['repository']}](https://github.com/{row['repository']}/tree/{row['commit'][:12]})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows of a table."""
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the checkouts")
    parser.add_argument("--only", default="", help="a word of the names of repositories")
    parser.add_argument("--trainyard", default=str(Path(sys.executable).with_name("trainyard")), help="another command")
    parser.add_argument("--save", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    given = parser.parse_args(arguments)
    rows = [row for row in chosen() if given.only in row["repository"]]
    kept = given.folder / ".results"
    kept.mkdir(exist_ok=True)

    def one(row: Mapping[str, Any]) -> dict[str, Any]:
        file = kept / f"{row['repository'].replace('/', '+')}.json"
        if not file.exists():
            file.write_text(json.dumps(measure(row, given.folder, given.trainyard), indent=1), encoding="utf-8")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        print(
            f"{found['failed'] or 'locks':7} {found['seconds']:5.1f} s  {row['repository']}: {found['reason']}",
            flush=True,
        )
        return found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        results = list(pool.map(one, rows))
    text = page(rows, results, given.folder)
    if given.save:
        PAGE.write_text(text, encoding="utf-8")
    print(text.partition("## Each repository")[0])
    return int(
        sum(not one["failed"] for one in results) < TARGET
        or any(f"| {name} | 0 |" not in text for name in COUNTS.values())
    )


if __name__ == "__main__":
    sys.exit(main())
