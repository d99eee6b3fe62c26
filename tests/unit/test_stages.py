"""Test what a command prints while it runs: one moving line per stage on a terminal, and few lines everywhere."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine, Ran
from tests.unit.test_verify import good

from trainyard import recipe as recipes
from trainyard.image import build, smoke_packages, smoke_search, smoke_test
from trainyard.image import recipes as made
from trainyard.oci import layers, probe_runner
from trainyard.oci.layers import Stored
from trainyard.oci.probe_runner import ProbeResult
from trainyard.release import candidate
from trainyard.sandbox import containers
from trainyard.spec import model, state

Run = Callable[..., tuple[int, str, str]]

DIGEST = "sha256:" + "1" * 64

#: What is found out about an image that trains.
TRAINED = {"passed": True, "level": "trained", "notes": [], "seconds": 1.0, "accuracy": 99.0, "seconds_to_stop": 1.0}

#: A process with a command whose stage `build` does what follows.
STARTED = """\
import sys, time, click, logging
from trainyard import cli
from trainyard.common import console, stages
def body(verbose=False):
    if verbose:
        console.be_verbose()
    with stages.stage("build", 48.8) as stage:
        stages.now("installing tensorflow-cpu 280.0 MB, numpy 20.0 MB, grpcio 7.1 MB, 15 wheels 20.0 MB")
        time.sleep(0.3)
        {}
        stage.done = "log: build/mine/build.log"
    console.say("image    trainyard:mine")
cli.Commands.get_command = lambda *_: click.Command("list", callback=body)
sys.exit(cli.run(["list"]))
"""


def on_terminal(script: str, columns: int = 80, interrupt: bool = False, **variables: str) -> tuple[int, str]:
    """Run a script on a terminal; its exit status, and what it wrote there."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", **variables}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stderr=inner, stdout=subprocess.PIPE)
    os.close(inner)
    written = b""
    while True:
        try:
            piece = os.read(outer, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written += piece
        if interrupt and b"installing" in written:
            process.send_signal(signal.SIGINT)
            interrupt = False
    os.close(outer)
    return process.wait(60), written.decode()


def screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after what was written to it: enough for what rich writes."""
    lines, row = [""], 0
    for word in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if word == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif word.endswith("A") and word.startswith("\x1b"):
            row -= int(word[2:-1] or 1)
        elif word == "\x1b[2K":
            lines[row] = ""
        elif word == "\r" or word.startswith("\x1b"):
            continue
        else:
            lines[row] += word
    return [line for line in lines if line.strip()]


def test_a_terminal_shows_a_moving_line_that_one_line_replaces() -> None:
    status, written = on_terminal(STARTED.format("console.warn('the index is slow')"))
    assert status == 0
    assert re.search(
        r"build 0 s, 49 s last time +installing tensorflow-cpu 280.0", re.sub(r"\x1b\[[0-9;]*m", "", written)
    )
    warning, built, image = screen(written)
    assert warning == "WARNING: the index is slow"
    assert re.fullmatch(r"build +\d\.\d s  log: build/mine/build.log", built)
    assert image == "image    trainyard:mine"


#: A title, a clipboard, a cleared screen, 8-bit forms of the same, DEL, and a return to the start of the line.
FOREIGN = r"x\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x9d0;t\x9c\x7f\rsafe"

FOREIGN_WORDS = f"""
from rich.table import Table
from rich.text import Text
foreign = "{FOREIGN}"
stages.now(foreign)
time.sleep(0.3)
console.warn(foreign)
console.show(foreign)
for cell in foreign, Text(foreign):
    table = Table(foreign)
    table.add_row(cell)
    console.show(table)
stage.done = foreign
raise cli.UserError(foreign + chr(10) + chr(9) + "next line")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_foreign_words_move_no_cursor_and_set_no_clipboard(terminal: bool) -> None:
    script = STARTED.format(FOREIGN_WORDS.replace("\n", "\n        "))
    if terminal:
        status, written = on_terminal(script, columns=200)
        # What rich itself writes: colours, the cursor of a moving line, and how a terminal ends lines.
        written = re.sub(r"\x1b\[(\d*(;\d+)*m|\?25[lh]|1A|2K)|\r", "", written)
    else:
        found = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        status, written = found.returncode, found.stderr
    assert status == 2
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", written), repr(written)
    assert written.count(r"x\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\x9d0;t\x9c\x7f\rsafe") >= 3
    assert written.count(r"\x1b]0;title") >= 7, "in tables too"
    assert re.search(r"safe\\n\s+next line\n$", written), "a name with a line feed makes no second line"


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_the_moving_line_is_one_line_at_any_width(columns: int) -> None:
    _, written = on_terminal(STARTED.format(""), columns)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    drawn = [line for line in re.split(r"[\r\n]+", plain) if "build " in line and "log" not in line]
    assert drawn and all(len(line) <= columns for line in drawn)
    if columns == 40:
        assert any(line.rstrip().endswith("…") for line in drawn)


def test_an_interrupt_clears_the_moving_line_and_leaves_one() -> None:
    status, written = on_terminal(STARTED.format("time.sleep(30)"), interrupt=True)
    assert (status, screen(written)) == (130, ["list: interrupted"])


def test_no_color_leaves_the_line_without_colors() -> None:
    _, written = on_terminal(STARTED.format(""), NO_COLOR="1")
    assert "installing" in written
    assert not re.search(r"\x1b\[(?:\d+;)*(?:3[0-7]|38|9\d)[;\dm]", written)


def lines(script: str, **variables: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"} | variables
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return [re.sub(r" +\d\.\d s", " T s", line) for line in done.stderr.splitlines()]


def test_a_log_has_a_line_at_the_beginning_and_at_the_end_of_a_stage() -> None:
    expected = ["build, 49 s last time", "build T s  log: build/mine/build.log", "image    trainyard:mine"]
    assert lines(STARTED.format("")) == expected
    assert lines(STARTED.format(""), FORCE_COLOR="1") == expected, "a log in color has no moving line, either"


def test_a_dumb_terminal_gets_the_lines_of_a_log() -> None:
    _, written = on_terminal(STARTED.format(""), TERM="dumb")
    assert "\x1b" not in written
    assert [line.split(" ")[0] for line in written.splitlines()] == ["build,", "build", "image"]


def test_verbose_prints_what_a_stage_does_and_groups_it_on_github() -> None:
    script = STARTED.replace("verbose=False", "verbose=True").format("logging.getLogger('trainyard').debug('#1 x')")
    begun, now, log, ended, _ = lines(script)
    assert (begun, log) == ("build, 49 s last time", "#1 x") and now.startswith("installing ")
    assert ended == "build T s  log: build/mine/build.log"
    assert lines(script, GITHUB_ACTIONS="true") == [
        "::group::build, 49 s last time", now, "#1 x", "::endgroup::", ended, "image    trainyard:mine",
    ]  # fmt: skip


def test_a_failed_stage_has_no_last_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED.format("raise cli.StepFailed('the disk is full')")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "build, 49 s last time\nlist: the disk is full\n")


@pytest.fixture
def building(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngine:
    """An engine that builds the image of tf-cpu as its spec says; it trains well."""
    spec = model.load("tf-cpu", "amd64")
    base = spec.base_spec()
    names = [f"{base.image}@{DIGEST}", f"{base.build_base}@{DIGEST}"]
    fake_engine.add(repo_digests=names, config={"WorkingDir": "/workspace"})

    def build(words: Sequence[str], _environment: Mapping[str, str]) -> Ran:
        bake_file = next(Path(word.partition("=")[2]) for word in words if word.startswith("--file="))
        (target,) = json.loads(bake_file.read_text(encoding="utf-8"))["target"].values()
        text = (Path(target["contexts"]["recipe"]) / recipes.FILE).read_text(encoding="utf-8")
        labels = recipes.parse(text).image_labels() | {recipes.DIGEST: recipes.digest(text)}
        option = next(word for word in words if word.startswith("--metadata-file="))
        metadata = {"tf-cpu": {"containerimage.digest": DIGEST}}
        Path(option.partition("=")[2]).write_text(json.dumps(metadata), encoding="utf-8")
        if not any(image.id == DIGEST for image in fake_engine.images):
            fake_engine.add(digest=DIGEST, labels=labels, files={recipes.PATH: text.encode()})
        name = next(word.partition("=")[2] for word in words if word.startswith("tf-cpu.tags="))
        fake_engine.tag(fake_engine.image(DIGEST), name)
        return Ran()

    def stored(*_: object, **__: object) -> Stored:
        found = good("tf-cpu").stored
        found.config["config"]["Labels"] = fake_engine.image(DIGEST).labels
        return found

    def probed(*_: object) -> ProbeResult:
        inside = good("tf-cpu").inside
        text = fake_engine.image(DIGEST).files[recipes.PATH].decode()
        return replace(inside, texts=inside.texts | {"recipe.json": text})

    fake_engine.docker = build
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    monkeypatch.setenv("TRAINYARD_PROVENANCE", "0")
    fake_engine.digest_at_registry = lambda _: DIGEST
    monkeypatch.setattr(layers, "read", stored)
    monkeypatch.setattr(probe_runner, "probe", probed)
    monkeypatch.setattr(smoke_test, "_train", lambda *_: TRAINED)
    nothing = SimpleNamespace(result=lambda: ({}, []))
    monkeypatch.setattr(smoke_packages, "beside", lambda *_: contextlib.nullcontext(nothing))
    return fake_engine


def test_an_image_is_a_few_lines(building: FakeEngine, trainyard: Run) -> None:
    """The second time nothing is verified and trained in, and no seconds of the first time are shown as now's."""
    status, _, err = trainyard("image", "tf-cpu")
    assert status == 0
    first = err.splitlines()
    assert [line.split()[0].rstrip(",") for line in first] == [
        "build", "build", "verify", "verify", "smoke", "smoke", "image", "size", "tested", "changed", "next",
    ]  # fmt: skip
    assert "/build.log" in first[1]
    assert first[5].endswith("trained, accuracy 99.00 %, stopped and resumed")
    assert "changed  everything: no image passed before" in first
    assert first[-1] == "next     docker run --rm trainyard:tf-cpu mnist --fake-data --epochs 1"

    status, _, err = trainyard("image", "tf-cpu")
    again = err.splitlines()
    passed = state.when(model.load("tf-cpu").kept, "smoke", DIGEST)
    assert [line for line in again if line.startswith(("verify", "smoke", "changed"))] == [
        f"verify   unchanged, passed {passed}",
        f"smoke    unchanged, passed {passed}",
        f"changed  nothing since {passed}",
    ]


def test_a_smoke_test_is_not_unchanged_before_another_one_is_found(
    building: FakeEngine, trainyard: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainyard("image", "tf-cpu")
    answers = iter([True, False])
    monkeypatch.setattr(smoke_search, "found", lambda *_: next(answers))
    lines = [line for line in trainyard("image", "tf-cpu")[2].splitlines() if "unchanged" in line]
    assert [line.split()[0] for line in lines] == ["verify", "verify", "smoke"]


@pytest.mark.parametrize("recipe", [{}, {"recipe": '{"schema": 0}'}])
def test_what_another_version_recorded_is_no_image_that_passed(
    building: FakeEngine, trainyard: Run, recipe: dict[str, str]
) -> None:
    kept, other = model.load("tf-cpu", "amd64").kept, "sha256:" + "2" * 64
    state.record(kept, "build", other, {"passed": True, "seconds": 1.0, "layers": ["sha256:" + "3" * 64], **recipe})
    state.record(kept, "smoke", other, {"passed": True})
    status, _, err = trainyard("image", "tf-cpu")
    assert status == 0 and "changed  everything: no image passed before" in err


def test_the_layers_are_a_table_with_verbose(building: FakeEngine, trainyard: Run) -> None:
    _, _, err = trainyard("image", "tf-cpu", "--verbose")
    assert "largest packages" in err and "The unpacked size is within the budget" in err
    assert "largest packages" not in trainyard("verify", "tf-cpu")[2]


INPUTS = {"Dockerfile": "1", "pylock.toml": "1", "code.tar": "1", "trainers/common/job.py": "1"}
VERSIONS = {"numpy": "2.4.5", "einops": "0.8.2", "six": "1.17.0"}


def built(
    digest: str = "2",
    base: str = "debian:13",
    layers: Sequence[str] = ("a", "b"),
    inputs: Mapping[str, str] = {},
    versions: Mapping[str, str] = VERSIONS,
) -> dict[str, Any]:
    """Return the facts of a build; ``inputs``: those that differ from INPUTS."""
    recipe = made.make(model.load("tf-cpu", "amd64"))
    pins = tuple(recipes.Pin(name=name, version=each, sha256=(), size=0) for name, each in versions.items())
    host = recipes.Built(
        tag="", created="2026-11-20T12:00:00Z", revision="unknown", base=base, base_digest="", notes=()
    )
    layer = recipe.layers[-1].model_copy(update={"pins": pins})
    changes = {"built": host, "layers": (layer,), "inputs": {**INPUTS, **inputs}}
    return {"digest": digest, "layers": list(layers), "recipe": recipe.model_copy(update=changes).text()}


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"digest": "1"}, "nothing"),
        ({"inputs": {"code.tar": "2"}, "layers": ["a", "c"]}, "code (1 of 2 layers)"),
        ({"inputs": {"Dockerfile": "2"}}, "settings (0 of 2 layers)"),
        ({}, "settings (0 of 2 layers)"),
        ({"layers": ["c", "b"]}, "base or system packages (1 of 2 layers)"),
        ({"base": "debian:12", "layers": ["c", "d"]}, "base (2 of 2 layers)"),
        (
            {"versions": {"numpy": "2.4.6", "six": "1.17.0", "attrs": "26.1.0"}, "inputs": {"Dockerfile": "2"}},
            "numpy 2.4.5 -> 2.4.6, attrs 26.1.0 added, einops removed (0 of 2 layers)",
        ),
        (
            {"versions": {"a": "1", "b": "1", "numpy": "2.4.5"}, "inputs": {"code.tar": "2", "trainers/tf/x.py": "1"}},
            "a 1 added, b 1 added, einops removed, 1 more packages, code, trainers (0 of 2 layers)",
        ),
    ],
)
def test_what_changed_since_the_last_image_is_named(now: dict[str, Any], words: str) -> None:
    assert candidate.changed(built(digest="1"), built(**now)) == words


def test_the_last_image_that_passed_is_the_last_that_was_built(tmp_path: Path) -> None:
    """Not one that failed, and not one that was tested later and built before."""
    for digest, passed in (("a", True), ("b", True), ("c", False), ("a", True)):
        state.record(tmp_path, "build", digest, {"passed": True, "seconds": 1.0})
        state.record(tmp_path, "smoke", digest, {"passed": passed})
    state.record(tmp_path, "smoke", "b", {"passed": True})
    found = state.passed(tmp_path)
    assert found and found["digest"] == "a"
    assert state.passed(tmp_path / "none") is None


def test_how_long_a_step_took_last_time_is_known_from_its_last_result(tmp_path: Path) -> None:
    assert state.seconds(tmp_path, "build") is None
    state.record(tmp_path, "build", "a", {"passed": True, "seconds": 3.5})
    assert state.seconds(tmp_path, "build") == 3.5
    state.record(tmp_path, "build", "b", {"passed": True})
    assert state.seconds(tmp_path, "build") is None


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ([("numpy", 20_000_000)], "installing numpy 20.0 MB"),
        ([("a", 400_000), ("b", 600_000)], "installing 2 wheels 1.0 MB"),
        ([("numpy", 0)], "installing numpy"),
    ],
)
def test_a_build_names_wheels_and_bytes(pins: list[tuple[str, int]], words: str) -> None:
    wheels = tuple(recipes.Pin(name=name, version="1", sha256=("0" * 64,), size=size) for name, size in pins)
    layer = recipes.Layer(stage="wheels-1", instruction="COPY", copied=True, pins=wheels, index=False, private=False)
    assert build._words(layer) == words


class Trains:
    """Stand in for a container that prints these pieces, and ends."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def logs(self, **_: object) -> Any:
        return iter(self._pieces)

    def wait(self, **_: object) -> dict[str, int]:
        return {"StatusCode": 3}


def test_a_run_is_followed_by_step_and_accuracy(caplog: pytest.LogCaptureFixture) -> None:
    pieces = [
        b"launch: start\n| Training Device=cpu Epoch=1 Step=20 Loss=0.52 Rate=812.00 GlobalRate=800.00 Time=10:32:11\n",
        b"Epoch 1 test end 10:32:12, Accuracy=97.12\n",
        b"\n",
        b'{"event": "summary", "accuracy": 97.12, "loss": null}\n',
        b"a bar 10 %\ra bar \x1b[1m20 %",
    ]
    with caplog.at_level("DEBUG", "trainyard"):
        assert containers.watch(Trains(*pieces), 10, "straight run") == 3  # type: ignore[arg-type]
    assert caplog.messages == [
        "straight run: epoch 1, step 20, loss 0.52",
        "straight run: epoch 1, accuracy 97.12",
        "straight run: accuracy 97.12",
        "straight run: a bar \\x1b[1m20 %",
    ]


@pytest.mark.parametrize("built", [False, True])
def test_the_list_of_targets_fits_20_lines_at_80_columns(built: bool, trainyard: Run, fake_engine: FakeEngine) -> None:
    for spec in model.catalogue() if built else ():
        version = f"{spec.target}-2.21.0-20261125-76c90026-amd64"
        fake_engine.add(f"trainyard:{spec.local_name}", labels={"org.opencontainers.image.version": version})
    found = trainyard("list")[2].splitlines()
    assert len(found) <= 20 and all(len(line) <= 80 for line in found)
    assert {line.split()[0] for line in found[1:]} == set(model.targets()) | {"gpu-2.7"}
    assert ("2.21.0-20261125-76c90026" in found[1]) is built
