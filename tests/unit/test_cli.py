"""The command line: every mistake is one clear line and an exit status, every command and option is documented."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from trainyard import cli
from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError

ROOT = Path(__file__).resolve().parents[2]

Command = Callable[..., tuple[int, str, str]]
Ended = Callable[[Callable[[], object]], tuple[int, str, str]]

#: What `make VERB` called before there were commands; all of them still work.
COMMANDS = {
    "audit", "authorize-tpu", "base", "build", "check", "check-job", "clean", "diff", "image",
    "images", "job", "list", "lock", "login", "pod", "promote", "push", "rehearse", "render", "repository", "reproduce",
    "rollback", "rules", "sbom", "shell", "sign", "sizes", "smoke", "test", "verify",
}  # fmt: skip


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a user types, where no engine can be reached."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "MAKE", "MFLAGS"))}
    environment = mine | {"DOCKER_HOST": "tcp://127.0.0.1:1", "PYTHON": sys.executable} | variables
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run("make", *words, **variables)


def direct(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "trainyard", *words, **variables)


def short_names() -> dict[str, click.Command]:
    """Commands by the names that need no group."""
    context = click.Context(cli.trainyard)
    found = {name: cli.trainyard.get_command(context, name) for name in cli.trainyard.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


commands = pytest.mark.parametrize("name", cli.trainyard.all_commands())


def first_line(text: str) -> str:
    return text.splitlines()[0]


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]) -> Ended:
    """``ended(function)``: exit status, stdout and stderr of a command ``list`` that does this."""

    def run(function: Callable[[], object]) -> tuple[int, str, str]:
        class Own(cli.Commands):
            def get_command(self, *_: object) -> click.Command:
                return click.Command("list", callback=function)

        status = cli.run(["list"], Own("trainyard"))
        out, err = capsys.readouterr()
        return status, out, err

    return run


def raising(error: Exception) -> Callable[[], object]:
    def function() -> object:
        raise error

    return function


# What is documented


def test_every_command_of_today_is_there() -> None:
    assert set(short_names()) >= COMMANDS


def test_the_first_help_is_short_and_short_names_of_grouped_commands_are_hidden() -> None:
    shown = {name for name, command in short_names().items() if not command.hidden}
    assert len(shown - {"dev", "job", "pod"}) <= 19
    assert not shown & {"build", "check-job", "authorize-tpu"}


def test_a_command_of_a_group_has_the_groups_name_or_none() -> None:
    for words in (["dev", "rules"], ["rules"]):
        assert json.loads(direct(*words, "gke", "--json").stdout)["rules"]
    assert direct("job", "check", "--help").stdout.startswith("Usage: trainyard job check [OPTIONS] FILE...")
    assert direct("check-job", "--help").stdout.startswith("Usage: trainyard check-job [OPTIONS] FILE...")


def test_a_group_lists_its_commands() -> None:
    assert "dev build" in direct("dev").stdout
    assert "job check" in direct("job", "--help").stdout
    assert "pod authorize-tpu" in direct("pod", "--help").stdout


def test_a_misspelt_command_of_a_group_is_named_with_the_nearest() -> None:
    done = direct("dev", "biuld")
    assert done.returncode == 2
    assert (
        done.stderr == "dev: no such command dev biuld (did you mean 'dev build'?); 'trainyard dev --help' lists them\n"
    )


def test_the_error_of_a_command_of_a_group_begins_with_its_name() -> None:
    done = direct("job", "check", "missing.yaml")
    assert (done.returncode, done.stderr) == (2, "job check: missing.yaml: No such file or directory\n")


@commands
def test_every_command_is_documented(name: str, trainyard: Command) -> None:
    command = cli.trainyard.all_commands()[name]
    assert sys.modules[str(command.callback.__module__)].__dict__["GROUP"] in cli.GROUPS
    status, out, _ = trainyard(*name.split(), "--help")
    assert status == 0
    assert out.startswith(f"Usage: trainyard {name}")
    if not command.hidden:
        assert command.short_help and command.short_help.endswith(".") and len(command.short_help) <= 80
        assert command.help
        assert "Examples:" in (command.epilog or "")
        assert f"trainyard {name}" in (command.epilog or "")


@commands
def test_every_option_is_documented_and_has_a_variable_of_ours(name: str) -> None:
    for parameter in cli.trainyard.all_commands()[name].params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{name} {parameter.opts}"
            assert str(parameter.help).endswith("."), f"{name} {parameter.opts}: {parameter.help}"
            assert parameter.envvar, f"{name} {parameter.opts}"
        variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or []
        assert all(variable.startswith("TRAINYARD_") for variable in variables)


def test_help_groups_the_commands(trainyard: Command) -> None:
    status, out, err = trainyard("--help")
    assert (status, err) == (0, "")
    places = [out.index(f"\n{heading}:\n") for heading in cli.GROUPS.values()]
    assert places == sorted(places)
    shown = {name for name, command in short_names().items() if not command.hidden}
    assert {line.split()[0] for line in out[places[0] :].splitlines() if line.startswith("  ")} >= shown


def test_without_a_command_the_help_is_printed(trainyard: Command) -> None:
    assert trainyard() == trainyard("--help")


def test_the_version_is_the_distributions(trainyard: Command) -> None:
    from importlib.metadata import version

    assert trainyard("--version") == (0, f"trainyard {version('trainyard-images')}\n", "")


HEAVY = {"docker", "jinja2", "numpy", "packaging", "pydantic", "requests", "rich", "ruamel", "yaml"}


@pytest.mark.parametrize("words", [["--help"], ["image", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_no_library(words: list[str]) -> None:
    script = (
        "import sys\nfrom trainyard import cli\n"
        f"assert cli.run({words!r}) == 0\n"
        "print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    )
    found = run(sys.executable, "-c", script)
    assert found.returncode == 0, found.stderr
    assert not HEAVY & set(found.stdout.splitlines()[-1].split())


# make


def test_make_alone_prints_the_help() -> None:
    found = make()
    assert found.returncode == 0
    for name in ("init", "image", "run", "push", "verify", "list", "clean", "lock", "job", "pod", "dev"):
        assert f"\n  {name} " in found.stdout


def test_an_unknown_command_names_the_nearest() -> None:
    for found, program in ((make("imgae"), ".venv/bin/trainyard"), (direct("imgae"), "trainyard")):
        assert found.returncode == 2
        assert first_line(found.stderr) == (
            f"imgae: no such command (did you mean 'image'?); '{program} --help' lists them"
        )
        assert "Traceback" not in found.stderr


def test_a_variable_of_make_reaches_the_command_as_it_is() -> None:
    target = "'; echo hacked; $(reboot) -h \\"  # what a shell would act on
    found = make("build", "TARGET=" + target.replace("$", "$$"))
    assert found.returncode == 2
    assert found.stderr.startswith(f"build: unknown target '{target}'")
    assert "valid targets: cpu, " in found.stderr
    assert found.stdout == ""


STRAY = {"TARGET": "nonsense", "NAME": "wsl", "FROM": "x", "A": "x", "B": "x", "IMAGE": "x", "FILE": "x", "ALL": "1"}


@pytest.mark.parametrize(
    "words", [("make", "build"), (sys.executable, "-m", "trainyard", "build")], ids=["make", "run"]
)
def test_bare_variables_of_the_environment_change_nothing(words: tuple[str, ...]) -> None:
    found = run(*words, **STRAY)
    assert (found.returncode, found.stdout) == (2, "")
    assert first_line(found.stderr) == first_line(run(*words).stderr)
    assert "nonsense" not in found.stderr


def test_our_own_variables_of_the_environment_count() -> None:
    assert "unknown target 'nonsense'" in direct("build", TRAINYARD_TARGET="nonsense").stderr
    assert "unknown target 'nonsense'" in make("build", TRAINYARD_TARGET="nonsense").stderr


def test_a_misspelt_variable_of_make_names_the_nearest() -> None:
    found = make("verify", "TARGT=tf-cpu")
    assert found.returncode == 2
    assert first_line(found.stderr) == (
        "verify: no variable TARGT (did you mean 'TARGET'?); '.venv/bin/trainyard verify --help' lists them"
    )


def test_several_goals_of_make_share_their_variables(trainyard: Command) -> None:
    assert trainyard("rules", MAKE_VARIABLES="REGISTRY", MAKE_GOALS="rules push", REGISTRY="x")[0] == 0
    assert trainyard("rules", MAKE_VARIABLES="REGISTRY", MAKE_GOALS="rules", REGISTRY="x")[0] == 2


def test_variables_of_other_programs_and_full_names_may_be_on_makes_command_line() -> None:
    words = (
        "DOCKER_HOST=tcp://127.0.0.1:2",
        "SOURCE_DATE_EPOCH=1",
        "TRAINYARD_INDEX_PYTORCH_CPU=x",
        "TRAINYARD_TARGET=cpu",
    )
    found = make("clean", *words)
    assert (found.returncode, found.stdout) == (2, "")
    assert "no engine answers at DOCKER_HOST=tcp://127.0.0.1:2" in found.stderr


def test_makes_variables_do_not_reach_a_make_that_a_command_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", " -- SUITE=unit")
    monkeypatch.setenv("SUITE", "unit")
    monkeypatch.setenv("TRAINYARD_MAKE_VARIABLES", "SUITE")
    assert settings.adopt_make_variables() == ["SUITE"]
    child = settings.environment()
    assert child["TRAINYARD_SUITE"] == "unit"
    assert "MAKEFLAGS" not in child


def test_a_full_name_on_makes_command_line_overrides_a_stray_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """WSL sets NAME."""
    monkeypatch.setenv("NAME", "stray")
    monkeypatch.setenv("TRAINYARD_NAME", "mine")
    monkeypatch.setenv("TRAINYARD_MAKE_VARIABLES", "TRAINYARD_NAME")
    assert settings.adopt_make_variables() == ["NAME"]
    assert settings.variable("NAME") == "mine"


def test_make_can_set_the_state_folder() -> None:
    script = "from trainyard.common import settings; settings.adopt_make_variables(); print(settings.state_folder())"
    given = {"BUILD": "/elsewhere", "TRAINYARD_MAKE_VARIABLES": "BUILD"}
    found = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | given, capture_output=True, text=True, check=True
    )
    assert found.stdout == "/elsewhere\n"


# Mistakes and failures


def test_a_mistake_is_one_line_and_2(ended: Ended) -> None:
    assert ended(raising(UserError("no such thing: use another"))) == (2, "", "list: no such thing: use another\n")


def test_a_failed_step_is_one_line_and_1(ended: Ended) -> None:
    assert ended(raising(StepFailed("the build failed"))) == (1, "", "list: the build failed\n")


def test_a_full_disk_is_one_line_and_1(ended: Ended) -> None:
    full = OSError(28, "No space left on device", "/somewhere")
    assert ended(raising(full)) == (1, "", "list: No space left on device (/somewhere)\n")


def test_a_fault_of_ours_keeps_its_traceback(ended: Ended) -> None:
    with pytest.raises(KeyError):
        ended(raising(KeyError("x")))


def test_an_unknown_option_is_one_line_and_2(trainyard: Command) -> None:
    status, out, err = trainyard("verify", "--imgae", "x")
    assert (status, out) == (2, "")
    assert err.startswith("verify: No such option")
    assert "--image" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["dataset"], "dataset: Missing argument '{digits|flowers|text}'. Choose from: digits, flowers, text"),
        (["dataset", "digits"], "dataset: Missing argument 'FOLDER'."),
        (["dataset", "flowers", "x", "--train=few"], "'few' is not a valid whole number"),
        (["dataset", "flowers", "x", "--train=0"], "0 is not in the range x>=1"),
        (["build", "--compression=zip"], "'zip' is not one of 'zstd', 'gzip'"),
        (["promote", "cpu", "--registry=localhost:5000/a", "--to=x y"], "'--to x y' is not HOST[:PORT]/PATH"),
    ],
)
def test_an_invalid_value_is_one_line_and_2(trainyard: Command, arguments: list[str], words: str) -> None:
    status, out, err = trainyard(*arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_the_variable_of_a_flag_is_1_or_0(trainyard: Command) -> None:
    assert trainyard("rules", "gke", JSON="0") == trainyard("rules", "gke", JSON="")
    assert json.loads(trainyard("rules", "gke", JSON="1")[1])
    status, out, err = trainyard("rules", JSON="always")
    assert (status, out) == (2, "")
    assert err == "rules: Invalid value for '--json' (env var: 'TRAINYARD_JSON'): 'always' is neither 1 nor 0\n"


@commands
def test_help_shows_no_empty_default(name: str, trainyard: Command) -> None:
    assert 'default: ""' not in " ".join(trainyard(*name.split(), "--help")[1].split())


def test_no_engine_is_one_line_with_what_to_do() -> None:
    found = direct("clean")
    assert found.returncode == 2
    said = "clean: no engine answers at DOCKER_HOST=tcp://127.0.0.1:1: start it, or unset DOCKER_HOST\n"
    assert found.stderr.endswith(said) and found.stderr.count("\n") == 1


def test_an_interrupt_while_modules_are_imported_prints_nothing() -> None:
    """As the console script imports them: a module of the command line that takes seconds, and Ctrl-C meanwhile."""
    script = (
        "import sys, types, importlib.abc\n"
        "class Slow(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'trainyard.cli':\n"
        "            print('ready', flush=True)\n"
        "            import time; time.sleep(30)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "from trainyard.__main__ import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert (process.returncode, stderr) == (-signal.SIGINT, "")


#: A process whose command `list` does what follows.
STARTED = """\
import sys, time, click
from trainyard import cli
def body():
    {}
class Own(cli.Commands):
    def get_command(self, *_):
        return click.Command("list", callback=body)
sys.exit(cli.run(["list"], Own("trainyard")))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_is_one_line_and_130(number: signal.Signals) -> None:
    script = STARTED.format("print('ready', flush=True); time.sleep(30)")
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    started = time.monotonic()
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "list: interrupted\n")
    assert time.monotonic() - started < 20  # of the 30 that the command sleeps


@pytest.mark.parametrize(
    "output", ["[print('x' * 10**6) for _ in range(9)]", "[click.echo('x' * 10**6) for _ in range(9)]"]
)
def test_a_closed_pipe_ends_a_command_without_a_word(output: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTED.format(output)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.wait(30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize("words", ["--help", "--version", "list --json", "list --help", "job check none --json"])
def test_a_full_device_as_output_is_one_line_and_1(words: str) -> None:
    found = run("sh", "-c", f"{sys.executable} -m trainyard {words} >/dev/full")
    assert found.returncode == 1
    assert re.fullmatch(r"[a-z ]+: No space left on device", found.stderr.splitlines()[-1])
    assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr


# Settings


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "status"), [("render tf-cpu --stdout", 0), ("check-job", 2)])
def test_a_closed_stream_changes_no_exit_status(words: str, status: int, redirection: str) -> None:
    found = run("sh", "-c", f"{sys.executable} -m trainyard {words} {redirection}")
    assert found.returncode == status
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("words", ["check-job job.yaml", "dataset digits here"])
def test_a_removed_current_folder_is_named(tmp_path: Path, words: str) -> None:
    found = run(
        "sh",
        "-c",
        f"mkdir {tmp_path}/gone && cd {tmp_path}/gone && rmdir ../gone && {sys.executable} -m trainyard {words}",
    )
    assert found.returncode == 1
    assert found.stderr == f"{words.split()[0]}: the current folder was removed: change to another one\n"


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
@pytest.mark.parametrize(
    ("text", "why"), [(None, "No such file or directory"), ("no certificate", "no certificate or crl found")]
)
def test_a_ca_bundle_that_is_none_is_one_line_with_its_variable(
    tmp_path: Path, variable: str, text: str | None, why: str
) -> None:
    bundle = tmp_path / "ca.pem"
    if text is not None:
        bundle.write_text(text, encoding="utf-8")
    others = dict.fromkeys(("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"), "")
    found = direct("find", "torch", "--registry", "registry.invalid:1/ml", **others | {variable: str(bundle)})
    assert "Traceback" not in found.stderr and found.returncode in (1, 2)
    last = found.stderr.splitlines()[-1]
    assert re.fullmatch(
        rf"find: {variable}={bundle} is no CA bundle \(.*{why}.*\): name a PEM file, or unset the variable", last, re.I
    )


def test_the_hosts_ca_bundle_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    settings.ca_bundle.cache_clear()
    assert settings.ca_bundle() == bundle
    settings.ca_bundle.cache_clear()


def test_a_state_folder_that_cannot_be_written_is_named(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere but below a file, so that what refuses it is made up."""
    state = tmp_path / "state" / "trainyard"
    monkeypatch.setenv("TRAINYARD_BUILD", str(state))
    status, _, err = ended(raising(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "state"))))
    kept = f"{state}, where results are kept, cannot be written"
    assert (status, err) == (1, f"list: {kept} (Permission denied): set 'TRAINYARD_BUILD=<folder>'\n")


@pytest.mark.parametrize(
    ("state", "reason"), [("/dev/null/state", "Not a directory"), ("/proc/nope/state", "No such file or directory")]
)
def test_a_state_folder_that_cannot_be_made_is_named(
    ended: Ended, monkeypatch: pytest.MonkeyPatch, state: str, reason: str
) -> None:
    """As where HOME is /dev/null."""
    monkeypatch.setenv("TRAINYARD_BUILD", state)
    status, _, err = ended(lambda: Path(state, "mine").mkdir(parents=True))
    kept = f"{state}, where results are kept, cannot be written"
    assert (status, err) == (1, f"list: {kept} ({reason}): set 'TRAINYARD_BUILD=<folder>'\n")


def test_a_missing_file_in_the_state_folder_is_no_reason_to_choose_another(
    ended: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    assert (
        ended(lambda: (tmp_path / "missing").read_text())[2]
        == f"list: No such file or directory ({tmp_path}/missing)\n"
    )
