"""The commands that work on a checkout: checks, tests, and what an installation lacks."""

from __future__ import annotations

import contextlib
import datetime
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests import suites

from trainyard import cli
from trainyard.common import installation
from trainyard.common.errors import StepFailed, UserError
from trainyard.lint import waivers
from trainyard.project import check, test
from trainyard_jobs.model import machines

ROOT = Path(__file__).resolve().parents[2]

#: The packages outside of the images.
SCRIPTS = {"trainyard", "trainyard_jobs"}

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day on which all targets are supported and no table is old, so that checks warn of nothing."""
    monkeypatch.setattr(waivers, "today", lambda: datetime.date(2026, 12, 1))


@pytest.mark.usefixtures("day")
def test_failed_checks_are_named_and_their_findings_printed(
    monkeypatch: pytest.MonkeyPatch, trainyard: Command
) -> None:
    parts = {"one": lambda: [], "two": lambda: ["file.py:1: wrong"], "three": lambda: ["file.yaml: wrong"]}
    monkeypatch.setattr(check, "checks", lambda *_, **__: parts)
    status, out, err = trainyard("dev", "check", "--json")
    assert (status, out) == (1, '{\n  "failed": [\n    "two",\n    "three"\n  ]\n}\n')
    assert err == "file.py:1: wrong\nfile.yaml: wrong\ndev check: failed: two, three\n"


def test_a_table_that_was_compared_long_ago_is_a_warning(monkeypatch: pytest.MonkeyPatch, trainyard: Command) -> None:
    """The exit status of a commit's checks is the same on every day."""
    monkeypatch.setattr(check, "checks", lambda *_, **__: {"one": lambda: []})
    monkeypatch.setattr(machines, "MAX_AGE", -100_000)
    status, out, err = trainyard("dev", "check")
    assert (status, out) == (0, "")
    assert "machines.yaml: tpus was last compared with https://" in " ".join(err.split())


@pytest.mark.usefixtures("day")
def test_passed_checks_are_named(monkeypatch: pytest.MonkeyPatch, trainyard: Command) -> None:
    monkeypatch.setattr(check, "checks", lambda *_, **__: {"one": lambda: [], "two": lambda: []})
    assert trainyard("dev", "check") == (0, "", "passed: one, two\n")


@pytest.mark.usefixtures("day")
@pytest.mark.parametrize("arch", ["amd64", "arm64", "aarch64"])
def test_all_platforms_are_checked_whatever_arch_is(
    monkeypatch: pytest.MonkeyPatch, trainyard: Command, arch: str
) -> None:
    monkeypatch.setattr(check, "programs", lambda *_: {})
    words = "passed: locks, generated files, matrix, advisories, shell programs\n"
    assert trainyard("dev", "check", ARCH=arch) == (0, "", words)


def test_an_architecture_that_does_not_exist_is_one_line_where_arch_is_ignored(trainyard: Command) -> None:
    for words, name in ((["dev", "check"], "dev check"), (["lock", "xla"], "lock")):
        status, out, err = trainyard(*words, ARCH="amr64")
        assert (status, out) == (2, "")
        assert err == f"{name}: 'TRAINYARD_ARCH=amr64': use one of amd64, arm64 (did you mean 'arm64'?)\n"


def test_output_of_a_program_is_a_finding_only_if_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = "print('a'); import sys; print('b', file=sys.stderr, flush=True); sys.exit({})"
    commands = {name: [sys.executable, "-u", "-c", script.format(name)] for name in ("0", "1")}
    commands["2"] = [sys.executable, "-c", "raise SystemExit(2)"]
    monkeypatch.setattr(check, "programs", lambda *_: commands)
    parts = check.checks(cli.trainyard)
    assert {name: parts[name]() for name in commands} == {"0": [], "1": ["a", "b"], "2": ["exited with 2"]}


def test_every_dockerfile_and_workflow_is_checked() -> None:
    words = {word for command in check.programs(ROOT, cli.trainyard).values() for word in command}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    expected = {name for name in tracked if name.endswith("Dockerfile") or name.startswith(".github/workflows/")}
    small = {"tests/image/registry/Dockerfile"}  # of a fixture
    assert expected - small <= words


def test_words_for_pytest_that_cannot_be_parsed_are_one_line(trainyard: Command) -> None:
    status, out, err = trainyard("test", SUITE="unit", ARGS='-k "x')
    assert (status, out) == (2, "")
    assert err.startswith("test: Invalid value for '--args'") and "No closing quotation" in err
    assert len(err.splitlines()) == 1


def test_a_misspelt_suite_names_the_suites(trainyard: Command) -> None:
    status, _, err = trainyard("test", SUITE="uint")
    assert status == 2
    assert "'uint' is not one of 'unit', 'image', 'cloud', 'builder', 'jobs', 'launcher', 'trainers'" in err
    assert len(err.splitlines()) == 1


def test_a_program_that_is_required_and_missing_fails_the_run(trainyard: Command) -> None:
    status, out, err = trainyard("test", SUITE="unit", REQUIRE=f"{sys.executable},no-such-program")
    assert (status, out, err) == (1, "", "test: required, and not on PATH: no-such-program\n")
    with pytest.raises(StepFailed):
        test.check_programs("no-such-program other")
    test.check_programs("")


def pytest_runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each run of pytest, which selects no test."""
    words: list[list[str]] = []

    def run(commands: Iterable[list[str]]) -> Iterator[int]:
        for command in commands:
            words.append(command[3:])
            yield suites.NOTHING_SELECTED

    monkeypatch.setattr(suites, "_beside_each_other", run)
    return words


def test_the_runs_of_pytest_have_their_folders_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    words = pytest_runs(monkeypatch)
    assert suites.run("image", ["-x"], big=True) == 0, "-k may select no test of a folder"
    assert suites.run(None, []) == 5
    assert words[0] == ["tests/image", "--concurrent=without", "--big", "-x"]
    three = ["--numprocesses=3", "--dist=loadfile", "--no-loadscope-reorder"]
    assert words[1] == ["tests/image", "--concurrent=only", *three, "--big", "-x"]
    assert words[2] == ["tests/image", "tests/cloud", "--concurrent=without"]
    assert words[3] == ["tests/unit", "--numprocesses=auto"]


def test_runs_at_the_same_time_print_one_after_the_other(tmp_path: Path) -> None:
    meet = "import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\nprint('here is', sys.argv[1], flush=True)\n"
    meet += "while not pathlib.Path(sys.argv[2]).exists(): time.sleep(0.01)\nprint('with', sys.argv[2])\nsys.exit(3)"
    commands = [[sys.executable, "-c", meet, *(str(tmp_path / name) for name in names)] for names in ("ab", "ba")]
    script = f"from tests import suites; print(list(suites._beside_each_other({commands})), flush=True)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    spoken = [
        f"here is {tmp_path / 'a'}",
        f"with {tmp_path / 'b'}",
        f"here is {tmp_path / 'b'}",
        f"with {tmp_path / 'a'}",
    ]
    assert done.stdout.splitlines() == [*spoken, "[3, 3]"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_all_runs_and_prints_the_failures_that_they_have_seen(
    tmp_path: Path, number: signal.Signals
) -> None:
    """A signal to the one process that `make test` becomes, as CI systems send it."""
    tests = "import pathlib, subprocess\nHERE = pathlib.Path(__file__).parent\n"
    tests += "def test_seen(): assert HERE.name == 'another'\n"
    tests += "def test_stays():\n    (HERE / 'begun').touch()\n    subprocess.run(['sleep', '601'])\n"
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
        (folder / "test_it.py").write_text(tests)
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    commands = [[sys.executable, "-m", "pytest", str(folder), *options] for folder in folders]
    commands[1] += ["-n", "1"]
    script = "import sys; from tests import suites; sys.argv[1:] = []\n"
    script += f"suites.run = lambda *_, **__: max(suites._beside_each_other({commands}))\nsuites.main()"
    command = ["env", "--default-signal=INT", sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        while not all((folder / "begun").exists() for folder in folders):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    for folder in folders:
        assert f"AssertionError: assert '{folder.name}' == 'another'" in out
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            line = path.read_bytes()
            assert str(tmp_path).encode() not in line and line != b"sleep\x00601\x00"


def test_variables_of_make_test_do_not_reach_the_commands_that_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    monkeypatch.setattr(test.os, "execve", lambda _program, command, env: seen.append((command[2:], env)))
    monkeypatch.setattr(test.os, "chdir", lambda _: None)
    monkeypatch.setenv("TRAINYARD_ALL", "1")
    monkeypatch.setenv("TRAINYARD_ARGS", "-x")
    test.run("image", ["-x"], big=True)
    test.run(None, [], part="1/3")
    assert [words for words, _ in seen] == [
        ["tests.suites", "--suite=image", "--big", "-x"], ["tests.suites", "--part=1/3"]
    ]  # fmt: skip
    assert not {"TRAINYARD_ALL", "TRAINYARD_ARGS"} & set(seen[0][1])


def test_suites_of_the_command_are_those_of_the_tests() -> None:
    options = {one.name: one for one in cli.trainyard.all_commands()["dev test"].params}
    assert list(options["suite"].type.choices) == [*suites.FOLDERS, *suites.PACKAGES]
    command = [sys.executable, "-m", "tests.suites", "--suite=unit", "--part=200/200", "--collect-only", "-k=no_such"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def files_run(monkeypatch: pytest.MonkeyPatch, suite: str | None, part: str = "") -> set[str]:
    """Return the folders and files that `trainyard test` gives to pytest."""
    runs = pytest_runs(monkeypatch)
    assert suites.run(suite, [], part=part) == 0, "a part of one package may have no test of a kind"
    return {word for words in runs for word in words if not word.startswith("-")}


def all_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for folder in suites.FOLDERS
        for path in (ROOT / "tests" / folder).rglob("test_*.py")
    }


def test_suites_by_package_have_each_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {suite: files_run(monkeypatch, suite) for suite in suites.PACKAGES}
    assert set().union(*found.values()) == all_files()
    assert sum(map(len, found.values())) == len(all_files())
    assert "tests/unit/launcher/tpu_node/test_xrt.py" in found["launcher"]
    assert {"tests/unit/test_job.py", "tests/image/test_rehearse.py", "tests/cloud/test_pod.py"} <= found["jobs"]
    assert {"tests/image/test_trainers_tf.py", "tests/unit/trainers/test_trainer_arguments.py"} <= found["trainers"]
    assert {"tests/image/test_build.py", "tests/unit/test_locks.py"} <= found["builder"]
    for suite, patterns in suites.PACKAGES.items():
        for pattern in patterns:
            assert any(fnmatch.fnmatch(file, f"tests/{pattern}") for file in found[suite]), f"{pattern}: no such file"


def test_pytest_can_collect_all_folders_at_once() -> None:
    """pytest refuses two files of the same name in folders that are no packages."""
    files = (ROOT / "tests").rglob("test_*.py")
    names = Counter(path.name for path in files if not (path.parent / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []


def test_parts_have_each_file_once_and_take_about_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [files_run(monkeypatch, None, f"{number}/3") for number in (1, 2, 3)]
    assert set().union(*found) == all_files() and sum(map(len, found)) == len(all_files())
    assert files_run(monkeypatch, "trainers", "2/2") < all_files()
    recorded = json.loads((ROOT / "tests" / suites.MINUTES).read_text(encoding="utf-8"))
    assert recorded.keys() <= {file.removeprefix("tests/") for file in all_files()}
    minutes = {f"tests/{name}": recorded.get(name, suites.SHORT) for name in suites.parts(recorded, 1)[0]}
    totals = [sum(minutes.get(file, suites.SHORT) for file in files) for files in found]
    assert max(totals) - min(totals) <= max(minutes.values())


def test_parts_are_the_longest_files_first_in_the_part_with_least() -> None:
    assert suites.parts({"a": 5.0, "b": 4.0, "c": 3.0, "d": 1.0}, 2) == [["a", "d"], ["b", "c"]]


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/0"])
def test_a_part_that_does_not_exist_is_one_line(part: str, trainyard: Command) -> None:
    status, out, err = trainyard("test", SUITE="unit", PART=part)
    assert (status, out) == (2, "")
    assert err == f"test: no part {part!r} of the tests: write the first of three as 1/3\n"


def pytest_run(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on a file of tests, with the options and marks of this project."""
    (folder / "conftest.py").write_text("from tests.conftest import *  # noqa: F403\n", encoding="utf-8")
    (folder / "test_x.py").write_text(tests, encoding="utf-8")
    # Hypothesis is not used here, and its import takes most of the time.
    plugins = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    words = [*plugins, f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={folder}", *options]
    environment = os.environ | {"PYTEST_ADDOPTS": ""}  # of the run that this test is part of
    command = [sys.executable, "-m", "pytest", *words, str(folder)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_runs_of_concurrent_tests_and_of_the_others_have_each_test_once(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.concurrent\ndef test_a(): pass\ndef test_b(): pass\n"
    for part, name in (("only", "test_a"), ("without", "test_b")):
        found = pytest_run(tmp_path, marked, f"--concurrent={part}", "-vv")
        assert f"::{name} PASSED" in found.stdout and "1 passed, 1 deselected" in found.stdout, found.stdout
    assert "2 passed" in pytest_run(tmp_path, marked).stdout


def test_of_concurrent_tests_the_files_that_take_longest_run_first() -> None:
    files = [f"tests/image/test_{name}.py" for name in ("containers", "miniature", "trainers_jax")]
    assert suites.minutes()["image/test_containers.py"] < suites.minutes()["image/test_miniature.py"]
    words = ["--concurrent=only", "--big", "--collect-only", *files]
    command = [sys.executable, "-m", "pytest", *words]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seen = [line.split("::")[0] for line in found.splitlines() if "::" in line]
    assert list(dict.fromkeys(seen)) == [files[1], files[0], files[2]], "big images last, in their order"


def test_slow_tests_run_with_the_big_ones(tmp_path: Path) -> None:
    marked = "import pytest\n@pytest.mark.slow('test_b')\ndef test_a(): pass\ndef test_b(): pass\n"
    found = pytest_run(tmp_path, marked, "-vv")
    assert "::test_b PASSED" in found.stdout and "1 passed, 1 deselected" in found.stdout, found.stdout
    assert "2 passed" in pytest_run(tmp_path, marked, "--big").stdout


TESTS = """\
import pytest
@pytest.mark.needs("no-such-program")
@pytest.mark.parametrize("number", [1, 2])
def test_a(number): raise AssertionError
@pytest.mark.needs("{python}", "no-other-program")
def test_b(): raise AssertionError
@pytest.mark.needs("{python}")
def test_c(): pass
"""


@pytest.mark.parametrize("workers", [[], ["--numprocesses=1"]], ids=["one process", "xdist"])
def test_tests_that_need_a_missing_program_are_counted_in_one_line(workers: list[str], tmp_path: Path) -> None:
    found = pytest_run(tmp_path, TESTS.format(python=sys.executable), *workers)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "not run: 1 test needs no-other-program, 2 tests need no-such-program\n" in found.stdout


def test_a_missing_optional_dependency_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "securesystemslib", None)
    with pytest.raises(UserError) as error:
        installation.require_extra("securesystemslib", "sign")
    assert str(error.value) == f"'trainyard sign' needs securesystemslib: run {installation.again('sign')}"


@pytest.mark.parametrize(
    ("came", "wanted"),
    [
        ({"url": "file:///src/t y", "dir_info": {}}, "'trainyard-images[sign] @ file:///src/t y'"),
        (
            {"url": "https://example.org/t.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'trainyard-images[sign] @ git+https://example.org/t.git@abc'",
        ),
        (None, "'trainyard-images[sign]'"),
    ],
)
def test_a_remedy_names_the_place_that_this_copy_came_from(
    came: dict[str, Any] | None, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "trainyard_images-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainyard-images\nVersion: 1\n")
    if came:
        (info / "direct_url.json").write_text(json.dumps(came))
    monkeypatch.syspath_prepend(tmp_path)
    assert installation.again("sign") == f"uv pip install --python {sys.executable} {wanted}"
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "uv-receipt.toml").touch()
    assert installation.again("sign") == f"uv tool install --reinstall {wanted}"


def test_an_installation_without_extras_has_what_is_imported_or_says_what_to_install() -> None:
    """README's last step, `trainyard job rehearse`, works after its first, `uv tool install .`."""
    import ast
    import tomllib

    waiting = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    installed = set[str]()
    while waiting:
        needed = Requirement(waiting.pop())
        if (name := canonicalize_name(needed.name)) not in installed:
            installed.add(name)
            for text in importlib.metadata.requires(name) or ():
                inner = Requirement(text)
                if not inner.marker or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *needed.extras)):
                    waiting.append(text.partition(";")[0])
    brought, guarded, imported = importlib.metadata.packages_distributions(), set[str](), dict[str, str]()
    for path in (path for package in SCRIPTS for path in (ROOT / "scripts" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("require_extra"):
                guarded.add(ast.literal_eval(node.args[0]))
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            imported |= {name.partition(".")[0]: str(path) for name in names}
    assert {"cryptography", "optuna"} <= imported.keys() - guarded
    lacking = {
        module: path
        for module, path in imported.items()
        if module in brought
        and module not in guarded | SCRIPTS
        and installed.isdisjoint(map(canonicalize_name, brought[module]))
    }
    # 'dev dataset flowers' asks for Pillow; the extra keyless brings id.
    assert lacking.keys() <= {"PIL", "id"}, lacking


def test_every_extra_that_a_command_names_exists() -> None:
    import ast
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    named = set()
    for path in (ROOT / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require_extra":
                named.add(ast.literal_eval(node.args[1]))
    assert named and named <= set(extras)


def test_files_of_an_installed_package_are_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation.settings, "CHECKOUT", None)
    monkeypatch.setattr(installation.settings, "ROOT", tmp_path / "data")
    with pytest.raises(UserError, match=r"^images/x\.lock is part of the installed package: .* checkout of Trainyard$"):
        installation.check_writable(tmp_path / "data" / "images" / "x.lock")
    installation.check_writable(tmp_path / "mine" / "x.lock")
