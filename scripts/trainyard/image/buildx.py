"""Run `docker buildx bake` for one target: keep its log, report its steps, and give the reason of a failure."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainyard.common import settings, stages
from trainyard.common.context import Context
from trainyard.common.docker_engine import cannot_run, is_transient, retry_transient
from trainyard.common.errors import EngineFailed, StepFailed
from trainyard.common.settings import ROOT
from trainyard.oci import builder
from trainyard.oci.builder import Builder
from trainyard.spec import state
from trainyard.spec.units import in_units
from trainyard.spec.yaml_source import relative

logger = logging.getLogger(__name__)

#: Called with the stage that a build is at and the step within it: ``("framework", "2/3")``.
OnStep = Callable[[str, str], None]

#: How many lines of a build's output are kept; they are searched for the reason of a failure.
_KEPT = 400

#: Lines of a failed step that are shown.
_SHOWN = 20

#: A step in the output of ``--progress=plain``, as in ``#12 [framework 3/3] RUN ...``, what the exporter and pulls do,
#: and the end of a step (https://github.com/moby/buildkit/blob/v0.13.0/util/progress/progressui/display.go).
#: ``--progress=rawjson`` would be easier to parse, but buildx 0.13 does not document it, and this is the log, too.
_STEP = re.compile(r"(#\d+) \[([a-z][\w-]*) +(\d+/\d+)\]")
_DOES = re.compile(
    r"(#\d+) (?:sha256:\S+ (?P<pulled>\S+ / \S+)|(?P<words>(?:exporting|sending|unpacking|extracting|transferring) "
    r"[a-z ]*[a-z](?=[ :]|$)))(?!.* done$)"
)
_ENDED = re.compile(r"(#\d+) (?:DONE|CACHED|CANCELED|ERROR)\b")

#: Lines of a failed step that say what is wrong; installers print details, such as hashes, after them.
_ERROR_LINE = re.compile(
    r"\berror\b|\bE:|mismatch|caused by|cannot|could not|unable|not found|no such|read-only|denied", re.IGNORECASE
)

#: What is written if a disk of the engine or of its builder is full.
_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)

#: BuildKit tries several ways to write a layer, logs why each failed, and reports the error of the last, which cannot
#: write zstd at all (https://github.com/moby/buildkit/blob/v0.13.0/cache/blobs.go). It was a full disk (2026-11).
_LAYER_NOT_WRITTEN = "unsupported diff media type"

#: Seconds that `docker buildx` gets to cancel a build after an interrupt; it took under 1 s (2026-11).
_CANCEL = 20

_PACKAGES = "to 'packages' under 'build:'"
_ENVIRONMENT = "in 'environment' under 'build:'"

#: The compiler is three wheels, whose metadata does not say that they need the same version
#: (https://docs.nvidia.com/cuda/cuda-installation-guide-linux/); the headers that it includes are those of the image.
_CUDA = (
    "it compiles CUDA code: extend a target with CUDA, and add nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm, of "
    "the same version as nvidia-cuda-runtime in pylock.trainyard.toml, to 'requires' under 'build:'"
)

_NO_NETWORK = "its build uses a network, and gets none: require a release that has a wheel, or a wheel that you built"

#: What a line says, and what to do about it; the first that matches a line is the reason. The words are those of
#: setuptools, of GCC, of NVCC, of torch.utils.cpp_extension, of Python and of the shell.
_KNOWN = (
    (r"Killed signal terminated program|died due to signal 9",
     "its compiler ran out of memory: set MAX_JOBS, such as '1', {environment}, or give the engine more memory"),
    (r"CUDA_HOME environment variable is not set|\bnvcc: (?:command )?not found|nvcc not found at"
     r"|No such file or directory: '(?:[^']*/)?nvcc'|fatal error: cu(?:da|blas|dnn|fft|solver|sparse)\w*\.h: No such",
     _CUDA),
    (r"arch_list\[-1\] \+= '\+PTX'",
     "a build has no GPU to compile for: set TORCH_CUDA_ARCH_LIST, such as '8.0;9.0', {environment}"),
    (r"Unsupported gpu architecture '(\w+)'", "nvcc cannot compile for {}: change TORCH_CUDA_ARCH_LIST {environment}"),
    (r"^ptxas .*Unsupported \.version",
     "its CUDA compiler is of several versions: pin nvidia-cuda-nvcc, nvidia-cuda-crt and nvidia-nvvm to one in "
     "'requires' under 'build:'"),
    (r"command '(?:[^']*/)?([^'/]+)' failed: No such file", "there is no compiler '{}': add g++ {packages}"),
    (r"([\w-]+\+\+|g?cc): (?:command )?not found$", "there is no compiler '{}': add g++ {packages}"),
    (r"fatal error: (\S+): No such file", "there is no header '{}': add the Debian package that has it {packages}"),
    (r"^ModuleNotFoundError: No module named '([\w.]+)'",
     "its build imports '{}' and does not declare it: add the package that has it to 'requires' under 'build:'"),
    (r"FileNotFoundError: \[Errno 2\] No such file or directory: '([\w.+-]+)'",
     "there is no program '{}': add the Debian package that has it {packages}"),
    (r"([\w.+-]+): (?:command )?not found$", "there is no program '{}': add the Debian package that has it {packages}"),
    (r"Because (\S+) was not found in the provided package locations",
     "its setup.py asks for '{}' while it is built: add that to 'requires' under 'build:'"),
    (r"[Nn]ame resolution|Name or service not known|Could not resolve host|Network is unreachable", _NO_NETWORK),
)  # fmt: skip

#: Lines with the cause if none of those is there: an error of a compiler with its place, then an exception.
_CAUSES = (r"^\S+(?::\d+(?::\d+)?|\(\d+\)): error: .+", r"^nvcc fatal +: .+", r"^\w+(?:Error|Exception): .+")

#: The folder in which uv compiles a source distribution, which has a random name.
_FOLDER = re.compile(r"/\S*/sdists-v\d+/\S*?/src/")


class Steps:
    """Follow the lines of a build, and report what it does now.

    Args:
        words: stage of the Dockerfile -> what its steps do, in words; the others are named.
        on_step: called at every step.
        sizes: stage -> bytes of what it downloads and installs.
    """

    def __init__(
        self, words: Mapping[str, str], on_step: OnStep | None = None, sizes: Mapping[str, int] | None = None
    ) -> None:
        self._words, self._on_step = words, on_step
        self._running: dict[str, str] = {}
        self._stages: dict[str, str] = {}
        self._left = {**(sizes or {})}
        self._total = sum(self._left.values())

    def add(self, line: str) -> None:
        """Take the next line."""
        if step := _STEP.match(line):
            number, stage, part = step.groups()
            self._running[number], self._stages[number] = self._words.get(stage, f"{stage} {part}"), stage
            if self._on_step:
                self._on_step(stage, part)
        elif does := _DOES.match(line):
            self._running[does[1]] = (does["words"] or f"pulling {does['pulled']}").strip()
        elif ended := _ENDED.match(line):
            self._running.pop(ended[1], None)
            self._left.pop(self._stages.get(ended[1], ""), None)
        else:
            return
        if self._running:
            done = self._total - sum(self._left.values())
            total = f"{in_units(done)} of {in_units(self._total)}: " if self._left and self._total else ""
            stages.now(total + ", ".join(dict.fromkeys(self._running.values())))


def bake(
    context: Context,
    target: str,
    arguments: list[str],
    *,
    log: Path | None = None,
    steps: Steps | None = None,
    variables: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Build ``target``, and return BuildKit's metadata of the result (``containerimage.digest`` and more).

    Args:
        arguments: of ``docker buildx bake``, except progress and metadata.
        log: file for BuildKit's output, ``steps``: gets its lines, ``variables``: of the command, such as secrets.
    Raises:
        StepFailed: the build failed; the message names the stage and its error, and the log, whose end is reported.
        EngineFailed: the same for a reason of the engine, such as a full disk.
    """
    chosen = builder.current(context)
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.json"
        options = [chosen.option, "--progress=plain", f"--metadata-file={metadata}"]
        command = ["docker", "buildx", "bake", *options, *arguments]
        ended = retry_transient(lambda: _run(command, log=log, steps=steps, variables=variables))
        if ended.returncode:
            for line in failed_step(ended.stderr)[1][-_SHOWN:]:
                logger.info(f"  | {line}")
            where = f" ({place(log)})" if log else ""
            of_engine = is_transient(ended.stderr) or _FULL.search(ended.stderr) or _LAYER_NOT_WRITTEN in ended.stderr
            kind = EngineFailed if of_engine else StepFailed
            raise kind(f"the build of {target} failed: {reason(ended.stderr, chosen) or 'see its log'}{where}")
        made: dict[str, Any] = json.loads(metadata.read_text(encoding="utf-8"))[target]
        return made


def place(log: Path) -> str:
    """Return where a log is, in words. In another folder than a checkout, a path from its top would mislead."""
    return f"log: {relative(log) if Path.cwd().is_relative_to(ROOT) else log}"


def _run(
    command: list[str], *, log: Path | None = None, steps: Steps | None = None, variables: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run a command that prints its progress on standard error; ``stderr`` of the result has its last lines."""
    kept: deque[str] = deque(maxlen=_KEPT)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=settings.environment(BUILDX_NO_DEFAULT_ATTESTATIONS="1", **variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        if log:
            state.own(log.parent)
        with log.open("w", buffering=1, encoding="utf-8") if log else contextlib.nullcontext() as file:
            for line in process.stderr or ():
                kept.append(line)
                if file:
                    file.write(line)
                    logger.debug(line.rstrip())
                if steps:
                    steps.add(line.rstrip())
        return subprocess.CompletedProcess(command, process.wait(), stderr="".join(kept))
    except BaseException:
        # Otherwise the engine would continue to build.
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CANCEL)
        process.kill()
        raise


def reason(text: str, of: Builder | None = None) -> str:
    """Return why a build failed, from the end of what ``--progress=plain`` printed; empty if it does not say.

    Args:
        of: the builder; None for that of the engine.
    """
    if _FULL.search(text):
        return _disk_is_full(of)
    if _LAYER_NOT_WRITTEN in text:
        return f"a layer could not be written; probably {_disk_is_full(of)}"
    if re.search(r"exec /bin/\w+: exec format error", text):
        return "exec format error: " + cannot_run("programs of the image's architecture")
    name, said = failed_step(text)
    built = "built" in name.split("-")
    if (name == "compiled" or built) and (known := compile_failure(said)):
        package, _, words = known.rpartition(".tar.gz: ") if built else ("", "", known)
        if not package or words == _NO_NETWORK:
            return f"{name}: {_short(known)}"
        how = f"has no wheel and has to be compiled: add it to 'sources' under 'build:' ({_short(words)})"
        return f"{name}: {package} {how}"
    if unknown := re.search(
        r"E: (?:Unable to locate package (\S+)|Package '(\S+)' has no installation)", "\n".join(said)
    ):
        package = unknown[1] or unknown[2]
        where = "'packages' under 'build'" if name == "compiled" else "'system'"
        return f"{name}: the Debian of this base has no package '{package}': correct it in {where}"
    if errors_of_step := [line for line in said if _ERROR_LINE.search(line)] or said:
        words = re.sub(r"^(caused by|cause|error): ", "", errors_of_step[-1].strip(), flags=re.IGNORECASE)
        return f"{name}: {_short(words)}"
    return _short(_error(text))


def _error(text: str) -> str:
    """Return the last error of the build itself; empty if there is none."""
    return str((re.findall(r"(?m)^ERROR: (.*)", text) or [""])[-1])


def failed_step(text: str) -> tuple[str, list[str]]:
    """Return the stage of the step that failed a build, and the lines that it wrote; nothing if no step did."""
    # BuildKit names the failed step again at the end, " > [stage 3/4] RUN ...:", then repeats what it wrote, up to
    # dashes. It repeats the last ten pieces only, which may be less than ten lines: the output itself comes first.
    steps = re.findall(r"(?ms)^ > \[([^\]]+)\][^\n]*\n(.*?)^-{6,}$", text)
    if not steps:
        return "", []
    name, repeated = steps[-1]
    return name.split(" ")[0], _output_of_failed_step(text, _error(text)) or _without_seconds(repeated.splitlines())


def compile_failure(said: Sequence[str]) -> str:
    """Return what failed in one line, from the output of the step that compiles; empty if it is not known."""
    lines = [line.strip() for line in said]
    text = "\n".join(lines)
    built = re.search(r"Failed to (?:build|download and build) `(?:/\S+/)?([^`]+)`", text)
    package = f"{built[1]}: " if built else ""
    for pattern, words in _KNOWN:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + words.format(*match.groups(), packages=_PACKAGES, environment=_ENVIRONMENT)
    for pattern in _CAUSES:
        if match := re.search(pattern, text, re.MULTILINE):
            return package + _FOLDER.sub("", match[0])
    return ""


def _disk_is_full(of: Builder | None) -> str:
    empty = "'trainyard clean --cache' empties the cache"
    if of is None or of.in_engine:
        return f"the engine's disk is full: 'docker system df' shows what uses it, {empty}"
    return (
        f"the disk of builder {of.name} or of the engine is full: 'docker buildx prune {of.option}' empties the cache "
        f"of the builder, {empty} of the engine"
    )


def _output_of_failed_step(text: str, error: str) -> list[str]:
    """Return what the step wrote that failed the build with ``error``, of lines such as ``#12 0.283 words``.

    Other steps may have failed, too, or were cancelled: the build's error ends with that of the step that failed it.
    """
    for number, words in re.findall(r"(?m)^(#\d+) ERROR: (.+)", text):
        if error.endswith(words):
            prefix = f"{number} "
            return _without_seconds(
                [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]
            )
    return []


def _without_seconds(lines: list[str]) -> list[str]:
    """Return the text of those lines that begin with the seconds since the step started, as output does."""
    return [line.split(" ", 1)[1] for line in lines if re.match(r"\d+\.\d+ .*\S", line)]


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= 300 else f"…{line[-300:]}"
