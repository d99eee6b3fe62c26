"""Commands print what their transcripts in tests/goldens/ say: help, results, messages and exit statuses.

They run in this process without an engine, a network and gcloud. Rendered Dockerfiles are not here: they are committed
beside their specs, and `make check` compares them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests import environment, workspaces
from tests.goldens import transcript
from tests.goldens.transcript import FOLDER, ROOT
from tests.unit.corpus import google_jobs, kubernetes, names, published
from tests.unit.corpus.case import Case

from trainyard import cli
from trainyard.image import lock_origin
from trainyard.spec import model, pylock
from trainyard.spec.naming import LABELS

Command = Callable[..., tuple[int, str, str]]

#: Examples that are users' repositories.
REPOSITORIES = ("gpt", "keras", "lora", "maxtext")

COMMANDS = sorted(path.stem for path in (FOLDER / "commands").glob("*.txt"))

#: The release of a nightly, which changes with the locks, and a file of the product, which may move.
_NIGHTLY = re.compile(r"\d+\.\d+\.\d+\.dev\d{8}")
_PLACE = re.compile(r"\bscripts/\w+/(?:\w+/)*(?=\w+\.(?:py|yaml)\b)")

#: All rules, which SARIF repeats from `trainyard rules`.
_SARIF_RULES = re.compile(r'"rules": \[\n.*?\n {10}\]', re.DOTALL)


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens"))


@pytest.fixture
def run(trainyard: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> transcript.Run:
    """Run a command as on a machine without anything, with a copy of examples/ in the current folder."""
    home = tmp_path / "home"
    home.mkdir()
    if git := shutil.which("git"):
        (home / "git").symlink_to(git)
    here = tmp_path / "here"
    here.mkdir()
    shutil.copytree(ROOT / "examples", here / "examples", ignore=shutil.ignore_patterns("__pycache__", ".*"))
    for repository in ("gpt", "keras"):  # locked by whoever has tried them
        (here / "examples" / repository / "pylock.trainyard.toml").unlink(missing_ok=True)
    (here / "catalogue").symlink_to(ROOT / "images")
    monkeypatch.chdir(here)

    def command(variables: Mapping[str, str], words: list[str]) -> tuple[int, str, str]:
        if words[0] == "write-lock":
            workspaces.lock_without_resolution(words[1])
            return 0, "", ""
        assert words[0] == "trainyard", words
        with environment.only({**transcript.environment(home), **variables}):
            return trainyard(*words[1:])

    return command


@pytest.fixture
def normalize(tmp_path: Path) -> Callable[[str], str]:
    """Replace what differs between machines, checkouts and releases."""

    def replace(text: str) -> str:
        for path, name in ((tmp_path / "here", "<folder>"), (tmp_path / "home", "<home>"), (ROOT, "<checkout>")):
            text = text.replace(str(path), name)
        text = text.replace(f"trainyard {metadata.version('trainyard-images')}", "trainyard <version>")
        text = _SARIF_RULES.sub('"rules": [...]', text)
        return _PLACE.sub("<package>/", _NIGHTLY.sub("<nightly>", text))

    return replace


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_prints(name: str, run: transcript.Run, normalize: Callable[[str], str], update: bool) -> None:
    file = f"commands/{name}.txt"
    text = (FOLDER / file).read_text(encoding="utf-8")
    transcript.compare(file, transcript.replay(text, run, normalize), update=update)


def test_every_command_has_a_transcript(trainyard: Command) -> None:
    help_ = "".join(trainyard(*words)[1] for words in (["--help"], ["dev"], ["job", "--help"], ["pod", "--help"]))
    listed = re.findall(r"^  ([a-z][a-z -]+?)  ", help_, re.MULTILINE)
    names = {cli.trainyard.get_command(click.Context(cli.trainyard), name).callback.__module__ for name in listed}
    assert {name.rpartition(".")[2].replace("_", "-") for name in names} <= set(COMMANDS)


def _short(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe in fewer lines: packages of a layer in one, names of the inputs of the image alone."""
    layers = {
        layer["stage"]: [f"{len(layer['pins'])} packages", hashlib.sha256(json.dumps(layer).encode()).hexdigest()[:16]]
        for layer in recipe["layers"]
    }
    inputs = [name for name in recipe["inputs"] if not name.startswith(("trainers/", "launcher/"))]
    lock = {name: "of the lock" for name in recipe["labels"] if name == f"{LABELS}.lock"}  # which names this Trainyard
    return recipe | {
        "labels": recipe["labels"] | lock,
        "layers": layers,
        "inputs": inputs,
        "base": recipe["base"] | {"packages": len(recipe["base"]["packages"])},
    }


@pytest.mark.parametrize("name", [*sorted(model.targets()), *REPOSITORIES])
def test_every_fact_of_an_image(name: str, run: transcript.Run, normalize: Callable[[str], str], update: bool) -> None:
    target = name
    if name in REPOSITORIES:
        target = f"examples/{name}"
        workspaces.lock_without_resolution(target)
        spec = workspaces.repository(target)  # the lock says that another Trainyard wrote it
        assert spec.usable_lock and spec.usable_lock.origin
        origin = replace(spec.usable_lock.origin, contents=lock_origin.contents(spec))
        pylock.write(spec.lock_file, replace(spec.usable_lock, origin=origin))
    status, out, error = run({}, ["trainyard", "dev", "plan", target, "--json"])
    if status:
        text = error
    else:
        recipes = [_short(recipe) for recipe in json.loads(out)["recipes"]]
        text = yaml.safe_dump_all(recipes, width=118, sort_keys=False, default_flow_style=None)
    transcript.compare(f"recipes/{name}.yaml", normalize(text), update=update)


#: File and line at the start of a message.
_WHERE = re.compile(r"\d{4}\.yaml(?::\d+)?: ")

CORPORA: dict[str, Callable[[], Iterable[Case]]] = {
    "google_jobs": google_jobs.corpus,
    "kubernetes": kubernetes.corpus,
    "names": names.corpus,
    # A program makes these faults, most of which one rule finds: test_corpus.py checks all of them, this file a third.
    "published": lambda: itertools.islice(published.corpus(), None, None, 3),
}

SLOW = pytest.mark.slow("test_corpus.py, with these cases or a quarter of them")


def _verdict(case: Case, file: dict[str, Any]) -> str:
    rules = sorted({f"{one['rule']} ({one['severity']})" for one in file["findings"]})
    error = [_WHERE.sub("", file["error"])] if file["error"] else []
    return f"{case.name} | {'passes' if file['passed'] else 'fails'}{'; '.join(['', *error, *rules])}"


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=SLOW if one in ("kubernetes", "published") else ()) for one in CORPORA]
)
def test_the_verdicts_over_a_corpus(name: str, run: transcript.Run, update: bool) -> None:
    """A line for each case: its name, whether it passes, and the rules with their severities, or the error."""
    cases = list(CORPORA[name]())
    for number, one in enumerate(cases):
        Path(f"{number:04}.yaml").write_text(one.text, encoding="utf-8")
    paths = [f"{number:04}.yaml" for number in range(len(cases))]
    files = json.loads(run({}, ["trainyard", "check-job", *paths, "--offline", "--json"])[1])["files"]
    assert [one["file"] for one in files] == paths
    lines = [_verdict(case, file) for case, file in zip(cases, files, strict=True)]
    transcript.compare(f"corpora/{name}.txt", "".join(f"{line}\n" for line in lines), update=update)
