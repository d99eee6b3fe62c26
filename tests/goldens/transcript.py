"""Run the commands of a transcript again, and compare the result with the file.

A transcript is a text file of this folder. It is the input and the expected result in one:

    # Lines between commands that start with # are comments.
    $ cat >job.yaml <<END
    > workerPoolSpecs: [
    > END
    $ TRAINYARD_REGION=us-central1 trainyard check-job job.yaml --offline
    (what it printed on stdout)
    [stderr]
    (what it printed on stderr)
    [status 2]

Of a shell it has variables before a command; ``cd FOLDER &&``, ``touch FILE &&`` and ``echo TEXT >FILE &&`` before
those; ``>FILE`` and ``2>/dev/null`` after it; and the commands ``cat`` and ``diff``. Files are below the current
folder, /dev too. To add a case, add its line and update the file (CONTRIBUTING.md).
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]

#: Environment and words of a command -> its exit status, stdout and stderr.
Run = Callable[[Mapping[str, str], list[str]], tuple[int, str, str]]

_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def compare(name: str, text: str, *, update: bool) -> None:
    """Compare a text with the file ``name`` of this folder, or write the file."""
    path = FOLDER / name
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if update:
        path.write_text(text, encoding="utf-8")
    elif text != before:
        file = path.relative_to(ROOT).as_posix()
        diff = difflib.unified_diff(before.splitlines(), text.splitlines(), file, "now", n=4, lineterm="")
        shown = "\n".join(list(diff)[:200])
        how = f'if it is meant, `make test SUITE=unit ARGS="--update-goldens -k goldens"` writes {file} again'
        pytest.fail(f"what users see differs from {file}:\n{shown}\n{how}", pytrace=False)


def replay(text: str, run: Run, normalize: Callable[[str], str]) -> str:
    """The transcript of the same commands, run now, in the current folder."""
    written: list[str] = []
    for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE):
        line, _, rest = part.partition("\n")
        if not line.startswith("$ "):
            written.append(part)
        elif here := re.fullmatch(r"\$ cat >(\S+) <<(\w+)", line):
            content, end, comments = rest.partition(f"> {here[2]}\n")
            _write(here[1], re.sub(r"^> ?", "", content, flags=re.MULTILINE))
            written += [f"{line}\n", content, end, comments]
        else:
            *_, comments = re.split(r"^\[status \d+\]\n", rest, flags=re.MULTILINE)
            written += [f"{line}\n", normalize(_run(line[2:], run)), comments]
    return "".join(written)


def _read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


def _write(name: str, content: str) -> None:
    path = Path(name.lstrip("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _diff(old: str, new: str) -> str:
    """The lines that differ, with one line around them and without their numbers."""
    lines = difflib.unified_diff(_read(old).splitlines(), _read(new).splitlines(), old, new, n=1, lineterm="")
    return "".join(f"{'@@' if line.startswith('@@ ') else line}\n" for line in lines)


def _run(line: str, run: Run) -> str:
    """What a command printed, and its exit status."""
    words = shlex.split(line)
    folder, file, quiet = ".", "", False
    while "&&" in words:
        end = words.index("&&")
        before, words = words[:end], words[end + 1 :]
        if before[0] == "cd":
            folder = before[1]
        elif before[0] == "touch":
            for name in before[1:]:
                _write(name, "")
        else:
            assert before[0] == "echo" and before[2].startswith(">"), before
            _write(before[2][1:], f"{before[1]}\n")
    if words[-1] == "2>/dev/null":
        quiet = bool(words.pop())
    if words[-1].startswith(">") and len(words[-1]) > 1:
        file = words.pop()[1:]
    variables = {}
    while found := _VARIABLE.fullmatch(words[0]):
        variables[found[1]] = found[2]
        del words[0]
    with contextlib.chdir(folder):
        if words[0] == "cat":
            status, out, err = 0, _read(words[1]), ""
        elif words[0] == "diff":
            out, err = _diff(words[1], words[2]), ""
            status = int(bool(out))
        else:
            status, out, err = run(variables, words)
        if file:
            _write(file, out)
            out = ""
    shown = [out, *(["[stderr]\n", err] if err and not quiet else []), f"[status {status}]\n"]
    return "".join(text if not text or text.endswith("\n") else f"{text}\n[no newline at the end]\n" for text in shown)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command: no engine, no gcloud, and nothing of this machine but git."""
    return {
        "PATH": str(folder),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "COLUMNS": "80",
        "DOCKER_HOST": "tcp://127.0.0.1:1",
        "GIT_CEILING_DIRECTORIES": os.pathsep.join(map(str, folder.parents)),
    }
