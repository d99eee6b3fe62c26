"""Completion in shells, and the JSON schema for editors."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainyard.common.errors import UserError
from trainyard.spec import model
from trainyard_jobs import platforms
from trainyard_jobs.model import machines, options, request

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., tuple[int, str, str]]


def completed(*words: str, shell: str = "bash") -> list[str]:
    """What the last of the words is completed to, as ``type,value`` of click's scripts."""
    given = ["trainyard", *words]
    variables = {"_TRAINYARD_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(given)}
    variables["COMP_CWORD"] = str(len(given) - 1)
    found = subprocess.run(
        [sys.executable, "-m", "trainyard"], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert found.stderr == ""
    return [line.removeprefix("plain,") for line in found.stdout.splitlines() if line]


def test_commands_are_completed() -> None:
    assert completed("ru") == ["run"]
    assert completed("dev", "ru") == ["rules"]
    assert completed("job", "re") == ["rehearse"]
    assert completed("job", "check", "--str") == ["--strict"]


def test_options_are_completed() -> None:
    assert completed("job", "--plat") == ["--platform"]


@pytest.mark.parametrize("command", ["image", "run", "job"])
def test_targets_are_completed(command: str) -> None:
    assert completed(command, "tf-") == ["tf-cpu", "tf-gpu", "tf-nightly", "tf-tpu"]
    assert completed(command, "gp") == ["gpu", "gpu-2.7"]


def test_the_target_of_init_is_completed() -> None:
    assert completed("init", "--target", "x") == ["xla", "xla-nightly", "xla-nightly-fallback"]


def test_folders_are_completed_for_a_target() -> None:
    assert completed("image", "./exa") == ["dir,./exa"]


def test_platforms_are_completed() -> None:
    assert completed("job", "--platform", "v") == ["vertex"]
    assert options.platforms() == sorted(platform.name for platform in platforms.PLATFORMS)


def test_accelerators_are_completed() -> None:
    assert completed("job", "--accelerator", "v5litepod-1") == ["v5litepod-1", "v5litepod-16", "v5litepod-128"]


def test_every_accelerator_that_is_offered_is_known() -> None:
    offered = options.accelerators()
    assert set(machines.slices()) <= set(offered)
    for name in offered:
        gpus, slice_name = request.accelerator(name)
        assert gpus or machines.slice_of(str(slice_name))
    assert len(offered) == len(machines.slices()) + len(machines.table().gpus)


def test_an_unknown_command_completes_nothing() -> None:
    assert completed("nonsense", "x") == []


@pytest.mark.parametrize("words", [["image", "t"], ["job", "--platform", ""], ["job", "--accelerator", ""]])
def test_completion_imports_no_slow_library(words: list[str]) -> None:
    script = (
        "import sys, os, atexit\n"
        "atexit.register(lambda: print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules})))\n"
        "from trainyard import cli\ncli.run([])"
    )
    given = ["trainyard", *words]
    variables = {"_TRAINYARD_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(given), "COMP_CWORD": str(len(words))}
    found = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    slow = {"docker", "jinja2", "numpy", "packaging", "pydantic", "requests", "rich", "ruamel"}
    assert not slow & set(found.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_valid(shell: str, trainyard: Command) -> None:
    status, out, err = trainyard("completion", shell)
    assert (status, err) == (0, "")
    assert f"_TRAINYARD_COMPLETE={shell}_complete" in out
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=out, text=True, check=True)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which trainyard is the command of this checkout."""
    program = tmp_path / "bin" / "trainyard"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainyard "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


#: What is typed, and the word that it is completed to: a command, an option, a target, a platform, an accelerator.
TYPED = {
    "trainyard job rehe": "rehearse",
    "trainyard promo": "promote",
    "trainyard run --moun": "--mount",
    "trainyard job --platf": "--platform",
    "trainyard image --comp": "--compression",
    "trainyard image torch-": "torch-tpu",
    "trainyard job --platform ver": "vertex",
    "trainyard job --accelerator v5litepod-12": "v5litepod-128",
}


@pytest.mark.parametrize(("typed", "word"), TYPED.items())
def test_bash_completes_with_the_script(typed: str, word: str, path: str, trainyard: Command) -> None:
    """The function that the script defines, called as bash calls it, in a bash without the user's settings."""
    words = typed.split()
    script = trainyard("completion", "bash")[1] + (
        f"\nCOMP_WORDS=({typed})\nCOMP_CWORD={len(words) - 1}\n_trainyard_completion trainyard\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    found = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{word}\n"


@pytest.mark.needs("fish")
@pytest.mark.parametrize(("typed", "word"), TYPED.items())
def test_fish_completes_with_the_script(typed: str, word: str, path: str, tmp_path: Path, trainyard: Command) -> None:
    (tmp_path / "trainyard.fish").write_text(trainyard("completion", "fish")[1], encoding="utf-8")
    found = subprocess.run(
        ["fish", "--no-config", "-c", f"source {tmp_path}/trainyard.fish; complete --do-complete '{typed}'"],
        env=os.environ | {"PATH": path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.partition("\t")[0] for line in found.stdout.splitlines()] == [word]


@pytest.fixture(scope="module")
def zsh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """``zsh("trainyard ru")``: the command line after Tab, in an interactive zsh with the script in its $fpath."""
    folder = tmp_path_factory.mktemp("zsh")
    program = folder / "trainyard"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trainyard "$@"\n')
    program.chmod(0o755)
    script = [sys.executable, "-m", "trainyard", "completion", "zsh"]
    (folder / "_trainyard").write_bytes(subprocess.run(script, capture_output=True, check=True).stdout)
    (folder / ".zshrc").write_text(
        f"fpath+={folder}; path=({folder} $path); autoload -Uz compinit; compinit -u -d {folder}/dump\n"
        # Ctrl-X writes the command line to a file, and empties it.
        f"show() {{ print -r -- $BUFFER >{folder}/line.new; mv {folder}/line.new {folder}/line; BUFFER= }}\n"
        f"zle -N show; bindkey '^X' show; PS1=; touch {folder}/ready\n"
    )
    outer, inner = pty.openpty()
    environment = os.environ | {"ZDOTDIR": str(folder), "HOME": str(folder), "TERM": "vt100"}
    process = subprocess.Popen(
        ["zsh", "--interactive"], env=environment, stdin=inner, stdout=inner, stderr=inner, start_new_session=True
    )
    os.close(inner)

    def wait(path: Path) -> None:
        until = time.monotonic() + 30  # it takes 0.3 s
        while not path.exists():
            assert process.poll() is None and time.monotonic() < until, "zsh did not answer"
            if select.select([outer], [], [], 0.02)[0]:
                os.read(outer, 65536)  # what it shows: it would wait for a reader

    def complete(typed: str) -> str:
        wait(folder / "ready")
        os.write(outer, f"{typed}\t\x18".encode())
        wait(folder / "line")
        shown = (folder / "line").read_text(encoding="utf-8").strip()
        (folder / "line").unlink()
        return shown

    yield complete
    process.kill()
    process.wait()
    os.close(outer)


@pytest.mark.needs("zsh")
@pytest.mark.parametrize(("typed", "word"), TYPED.items())
def test_zsh_completes_with_the_script(typed: str, word: str, zsh: Callable[[str], str]) -> None:
    assert zsh(typed) == f"{typed.rpartition(' ')[0]} {word}"


def test_an_unknown_shell_is_one_line(trainyard: Command) -> None:
    status, out, err = trainyard("completion", "tcsh")
    assert (status, out) == (2, "")
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in err


# The schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-m", "trainyard", "schema"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded: dict[str, Any] = json.loads(found.stdout)
    return loaded


def test_the_schema_is_valid(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)


def test_the_schema_is_written_to_a_file(tmp_path: Path, trainyard: Command, schema: dict[str, Any]) -> None:
    path = tmp_path / "new" / "schema.json"
    assert trainyard("schema", "--output", str(path))[:2] == (0, "")
    assert json.loads(path.read_text(encoding="utf-8")) == schema


#: trainyard.yaml without its `extends: cpu`, and whether it is valid.
DOCUMENTS = {
    "": True,
    "name: my-image": True,
    "name: My Image": False,
    "requirements: requirements.txt": True,
    "requirements: [einops, 'tqdm>=4']": True,
    "requirements: {file: pyproject.toml, extras: [train], groups: [dev], packages: [tqdm]}": True,
    "requirements: {files: pyproject.toml}": False,
    "requirements: 3": False,
    "requirements: [3]": False,
    "system: [libsndfile1]": True,
    "system: ['Not A Package']": False,
    "system: libsndfile1": False,
    "environment: {NAME: x}": True,
    "environment: {NAME: 1}": False,
    "code: [src, configs]\nrun: python -m x": True,
    "code: src\nrun: python -m x": False,
    "run: python -m x": True,
    "run: [python, -m, x]": True,
    "run: []": False,
    "run: 3": False,
    "run: python -m x\nsmoke: {args: [--epochs=1], expect: loss}": True,
    "run: python -m x\nsmoke: {args: --epochs 1, for: 30}": True,
    "run: python -m x\nsmoke: {resume: true, timeout: 60}": True,
    "run: python -m x\nsmoke: {for: 0}": False,
    "run: python -m x\nsmoke: {for: soon}": False,
    "run: python -m x\nsmoke: {resume: 'yes'}": False,
    "run: python -m x\nsmoke: {arg: [--epochs=1]}": False,
    "build: {packages: [g++], sources: [flash-attn==2.8.3], environment: {MAX_JOBS: '2'}}": True,
    "build: {packages: [g++]}": False,
    "build: {sources: []}": False,
    "budget: {size: 2 GB}": True,
    "budget: {size: 2}": False,
    "budget: {}": False,
    "runs: python -m x": False,
}


@pytest.mark.parametrize(("text", "valid"), DOCUMENTS.items(), ids=list(DOCUMENTS))
def test_schema_and_model_accept_the_same_documents(
    text: str, valid: bool, schema: dict[str, Any], tmp_path: Path
) -> None:
    text = f"extends: cpu\n{text}\n"
    (tmp_path / "trainyard.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "src").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "requirements.txt").touch()
    assert jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(text)) is valid
    if valid:
        model.load(str(tmp_path))
    else:
        with pytest.raises(UserError, match=r"trainyard\.yaml:\d+: "):
            model.load(str(tmp_path))


def test_extends_is_needed(schema: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "trainyard.yaml").write_text("name: x\n", encoding="utf-8")
    assert not jsonschema.Draft202012Validator(schema).is_valid({"name": "x"})
    with pytest.raises(UserError, match="'extends' is missing"):
        model.load(str(tmp_path))
