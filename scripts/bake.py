"""Run `docker buildx bake` for one target: its progress for people, and on failure the reason in a line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from scripts import engine
from scripts.cli import ROOT, StepFailed

#: Lines of a build's output that are kept to find the reason of a failure in.
_KEPT = 400

#: Lines of a failed step that say what is wrong; installers follow them with details, such as hashes.
_TELLING = re.compile(r"\berror\b|\bE:|mismatch|caused by|cannot|could not|unable|not found|no such", re.IGNORECASE)

#: What BuildKit of Docker 26.1 says through no fault of the build's; the next turn does it. The first: a step that two
#: builds share was asked for by the one that has ended, when one of two targets fails or ends while the other waits for
#: a stage of both. The second: the engine collected a snapshot that it had just found, after other images were removed.
_STUMBLED = re.compile(r"no active sessions|failed to prepare extraction snapshot .*: not found")

#: How often a build is begun, if that happens.
_TURNS = 3

#: Seconds that `docker buildx` gets to cancel a build after an interrupt; it took under 1 s (2026-11).
_CANCEL = 20


def bake(target: str, arguments: list[str], *, quiet: bool = False) -> dict[str, Any]:
    """Build ``target``; what BuildKit says about the result (``containerimage.digest`` and more).

    Args:
        arguments: of ``docker buildx bake``, but for progress and metadata.
        quiet: say nothing.
    Raises:
        StepFailed: it failed; the line says in which stage and with which words.
    """
    engine.client()
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.json"
        # On a terminal BuildKit draws; its lines cannot be read at the same time, but they stay in sight.
        drawn = sys.stderr.isatty() and not quiet
        progress = f"--progress={'auto' if drawn else 'plain'}"
        command = ["docker", "buildx", "bake", progress, f"--metadata-file={metadata}", *arguments]
        for _ in range(_TURNS):
            status, lines = _run(command, piped=not drawn, shown=not quiet)
            if not status or not any(_STUMBLED.search(line) for line in lines):
                break
        if status:
            raise StepFailed(f"the build of {target} failed: {reason(lines) or 'see above'}")
        found: dict[str, Any] = json.loads(metadata.read_text(encoding="utf-8"))[target]
        return found


def _run(command: list[str], *, piped: bool, shown: bool) -> tuple[int, list[str]]:
    """Exit status and last lines of a command whose progress comes on standard error."""
    kept: deque[str] = deque(maxlen=_KEPT)
    environment = os.environ | {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if piped else None,
        text=True,
        errors="replace",
    )
    try:
        for line in process.stderr or ():
            kept.append(line.rstrip("\n"))
            if shown:
                sys.stderr.write(line)
                sys.stderr.flush()
        return process.wait(), list(kept)
    except BaseException:
        # Left alone, the engine would go on building.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CANCEL)
        process.kill()
        raise


def reason(lines: list[str]) -> str:
    """Why a build failed, by the last lines of ``--progress=plain``; empty if they do not say."""
    text = "\n".join(lines)
    if re.search(r"no space left on device|disk quota exceeded", text, re.IGNORECASE):
        return (
            "the engine's disk is full: 'docker system df' shows what fills it, 'make clean CACHE=1' empties the cache"
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    # BuildKit repeats the failed step: " > [stage 3/4] RUN ...:", its output with seconds in front, a rule.
    steps = re.findall(r"(?ms)^ > \[([^\]]+)\][^\n]*\n(.*?)^-{6,}$", text)
    if steps:
        name, output = steps[-1]
        said = [re.sub(r"^[\d.]+ ", "", line) for line in output.splitlines() if line.strip()]
        telling = [line for line in said if _TELLING.search(line)] or said
        if telling:
            words = re.sub(r"^(caused by|cause|error): ", "", telling[-1].strip(), flags=re.IGNORECASE)
            return f"{name.split(' ')[0]}: {_short(words)}"
    return _short(errors[-1]) if errors else ""


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= 300 else f"…{line[-300:]}"
