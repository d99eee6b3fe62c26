"""Which command of a repository trains: candidates for ``run`` of trainyard.yaml, and arguments for a short run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.spec import yaml_source
from trainyard.workspace.python_source import Option, Source, Sources

#: Words of a file's or command's name, and what they say about its purpose.
_NAMES = {"train": 6, "training": 6, "finetune": 6, "pretrain": 6, "fit": 4, "trainer": 3, "main": 2, "run": 2}
_OTHER_PURPOSE = (
    "eval|evaluate|evaluation|test|tests|demo|infer|inference|predict|prediction|generate|sample|plot|convert|download"
    "|prepare|preprocess|export|benchmark|bench|serve|server|app|score|visualize|analyze|setup|utils|check|tune|sweep"
)

#: Least score of a candidate that is proposed: a file with a main program that trains, or one that is named so.
_LEAST = 5

#: Options that limit a run, each with the value for a run as short as possible. Two steps: some learning rate schedules
#: divide by the number of steps less one.
_LIMITS = {
    name: value
    for value, names in {
        "2": "max-steps max-iters max-iter max-iterations num-steps n-steps total-steps train-steps num-iters steps "
        "iterations iters",
        "1": "epochs num-epochs n-epochs max-epochs num-train-epochs nepochs epoch",
    }.items()
    for name in names.split()
}

#: Switches that replace the data set by made-up data.
_MADE_UP_DATA = ("fake-data", "dummy", "dummy-data", "synthetic", "synthetic-data", "fast-dev-run", "dry-run")


@dataclass(frozen=True)
class Candidate:
    """A command that may train.

    Attributes:
        words: the command. ``why``: what speaks for it. ``path``: the file of its program.
        arguments: how many of the words are arguments of the program, from the README.
    """

    words: tuple[str, ...]
    why: str
    path: str
    score: int
    arguments: int = 0

    @property
    def command(self) -> str:
        """The command as a shell reads it."""
        return shlex.join(self.words)


@dataclass(frozen=True)
class ShortRun:
    """Arguments for a short run of a command; ``obstacle``: why it would not pass a smoke test, empty if it may."""

    args: tuple[str, ...] = ()
    data: str = ""
    obstacle: str = ""


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1-\2", name).lower())


def _name_score(name: str) -> int:
    words = _words(name)
    other = any(re.fullmatch(_OTHER_PURPOSE, word) for word in words)
    return max((_NAMES.get(word, 0) for word in words), default=0) - (5 if other else 0)


def _readme_commands(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """File or module -> the words after it in the first command of the README that runs it."""
    readme = next((name for name in names if re.fullmatch(r"readme(\.\w+)?", name, re.IGNORECASE)), None)
    if readme is None:
        return {}
    text = yaml_source.text(root / readme, errors="replace").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    pattern = (
        r"^[\s$>`]*(?:\w+=\S+ +)*(?:uv run +|poetry run +)?(?:python3? +(?:-u +)?|torchrun .*?|accelerate launch .*?)"
    )
    for match in re.finditer(pattern + r"(?:-m +([\w.]+)|(?:\./)?([\w./-]+\.py))([^\n`|;&]*)", text, re.MULTILINE):
        try:
            words = shlex.split(match[3], comments=True)
        except ValueError:
            continue
        found.setdefault(match[1] or match[2], words)
    return found


def _command(source: Source, sources: Sources) -> tuple[str, ...]:
    root = sources.package_root(source.path)
    relative = any(one.level for one in source.imports)
    if root is None and relative:
        root = next((one for one in reversed(sources.roots) if source.path.startswith(f"{one}/")), "")
    if root is None:
        return ("python", source.path)
    module = sources.module(source.path, root)
    return ("python", "-m", module.removesuffix(".__main__"))


def _file_score(source: Source, sources: Sources) -> tuple[int, str]:
    """How much speaks for a Python file, and what."""
    closure = sources.closure(source.path)
    training = min(sum(one.training for one in closure if one.run), 6)
    stem = source.path.rpartition("/")[2].removesuffix(".py")
    script = source.script >= 3 or (source.acts and _name_score(stem) >= _LEAST)
    if not (source.main or source.path.endswith("__main__.py") or script):
        return -10, ""
    stem = source.path.split("/")[-2] if stem == "__main__" and "/" in source.path else stem
    score = _name_score(stem) + training + (2 if source.main else 0) - source.path.count("/")
    if re.search(r"(^|/)(examples?|demos?|benchmarks?|tools|notebooks?|scripts/data)/", source.path):
        score -= 2
    if any(re.fullmatch(rf"--({'|'.join(_LIMITS)})", one.name.replace("_", "-")) for one in source.options):
        score += 2
    reasons = ["a main program"] if source.main else []
    reasons += ["a training loop"] if training >= 3 else []
    return score, " and ".join(reasons) or "the name of a training program"


def candidates(root: Path, names: Sequence[str], sources: Sources, scripts: Mapping[str, str]) -> list[Candidate]:
    """The commands that may train, the most likely first.

    Args:
        names: the files of the repository.
        scripts: command -> object of its projects, as ``package.module:function``.
    """
    readme = _readme_commands(root, names)
    found = []
    modules = {
        source.path: sources.module(source.path, sources.package_root(source.path) or "")
        for source in sources.all.values()
    }
    for source in sources.all.values():
        score, why = _file_score(source, sources)
        if not source.run or score < 0:
            continue
        words = _command(source, sources)
        shown = readme.get(source.path, readme.get(modules[source.path]))
        if shown is not None:
            score, why = score + 3, f"{why}, and the README runs it"
        needed = tuple(_needed(source, shown or [], root))
        about = f"{source.path} has {why}"
        found.append(Candidate(words + needed, about, source.path, score, len(needed)))
    for command, target in scripts.items():
        path = next((path for path, module in modules.items() if module == target.partition(":")[0]), None)
        if path is None or not sources.all[path].run:
            continue
        training = min(sum(one.training for one in sources.closure(path) if one.run), 6)
        score = _name_score(command) + training + 3 - 2 * (sources.all[path].subcommands)
        found.append(Candidate((command,), f"a command of the project, {target}", path, score))
    for name in names:
        if (
            name.endswith(".sh")
            and name.count("/") <= 1
            and _name_score(name.rpartition("/")[2].removesuffix(".sh")) > 0
        ):
            text = yaml_source.text(root / name, errors="replace")
            if re.search(r"\b(python3?|torchrun|accelerate)\b", text):
                executable = (root / name).stat().st_mode & 0o100
                words = (f"./{name}",) if executable else ("bash", name)
                score = _name_score(name.rpartition("/")[2].removesuffix(".sh")) + 1 - name.count("/")
                found.append(Candidate(words, f"{name} runs Python", name, score))
    found.sort(key=lambda one: (-one.score, one.path.count("/"), len(one.command), one.command))
    return [one for one in found if one.score >= _LEAST]


def _needed(source: Source, shown: list[str], root: Path) -> list[str]:
    """The README's arguments, if the program needs some and these name no file that the repository lacks."""
    needs = [one for one in source.options if one.required]
    placeholders = any(re.search(r"[<>$*{}\[\]]|path/to|^/|^~", word) for word in shown)
    if not needs or not shown or placeholders:
        return []
    missing = [
        one for one in shown if re.search(r"/|\.\w+$", one) and not one.startswith("-") and not (root / one).exists()
    ]
    return [] if missing else shown


def short_run(candidate: Candidate, sources: Sources, root: Path, names: Sequence[str]) -> ShortRun:
    """The arguments that make a command end soon."""
    closure = sources.closure(candidate.path)
    if not closure:
        return ShortRun(obstacle=f"arguments of {candidate.path} are not known")
    if closure[0].subcommands:
        return ShortRun(obstacle=f"{candidate.path} has subcommands: choose one")
    options = {
        one.name.lstrip("-").replace("_", "-"): (one, source) for source in reversed(closure) for one in source.options
    }
    given = {word.partition("=")[0] for word in candidate.words}
    args: list[str] = []
    limit = next((name for name in _LIMITS if name in options and not options[name][0].switch), None)
    if limit:
        args.append(f"{options[limit][0].name}={_LIMITS[limit]}")
    made_up = next((name for name in _MADE_UP_DATA if name in options and options[name][0].switch), None)
    if made_up:
        args.append(options[made_up][0].name)
    data = ""
    if not made_up:
        data, option = _data(options, names)
        args += [f"{option}=/data"] if option else []
    for one, source in options.values():
        with_readme = not one.name.startswith("-") and candidate.arguments > 0
        taken = any(word.startswith(one.name) for word in args)
        if one.required and not taken and not with_readme and one.name not in given:
            return ShortRun(tuple(args), data, f"it needs {one.name} ({source.path}:{one.line})")
    if not limit and not made_up:
        return ShortRun(tuple(args), data, "no option that limits the training was found")
    near = {path for one in closure[0].imports if (path := sources.resolve(one, closure[0]))} | {closure[0].path}
    download = next(((source, source.download) for source in closure if source.download and source.path in near), None)
    if download and not made_up and not data:
        source, (line, call) = download
        return ShortRun(tuple(args), data, f"{source.path}:{line} downloads ({call}), and smoke tests run offline")
    return ShortRun(tuple(args), data)


def _data(options: Mapping[str, tuple[Option, Source]], names: Sequence[str]) -> tuple[str, str]:
    """A folder with data for tests, and the option that takes such a folder; both are empty if one is missing."""
    option = next(
        (
            options[name][0].name
            for name in ("data-dir", "data-path", "data-root", "data", "dataset-dir")
            if name in options
        ),
        "",
    )
    folders = (
        "tests/data",
        "test/data",
        "tests/fixtures/data",
        "sample_data",
        "sample-data",
        "data/sample",
        "data/samples",
    )
    folder = next((one for one in folders if any(name.startswith(f"{one}/") for name in names)), "")
    return (folder, option) if folder and option else ("", "")
