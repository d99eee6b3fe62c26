"""Why a user's command failed, in one line, and what the smoke test decides without running anything."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher import cli
from tests import workspaces

from trainyard.common.errors import UserError
from trainyard.image import command_words, network_observer, recipes, smoke_command, smoke_test, workspace_files
from trainyard.image.smoke_failure import Explanation, HostFiles, Run, tracebacks
from trainyard.recipe import Recipe
from trainyard.release import candidate
from trainyard.spec import model, state

Explain = Callable[..., str]
Repository = Callable[..., model.Spec]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """``repository("run: ./train.sh", "train.sh")``: a repository with empty files, the current folder."""

    def write(document: str = "run: python train.py", *files: str, **contents: str) -> model.Spec:
        folder = tmp_path / "mine"
        (folder / ".git").mkdir(parents=True)
        (folder / "trainyard.yaml").write_text(f"extends: cpu\n{document}\n", encoding="utf-8")
        for name, text in (dict.fromkeys(files, "") | contents).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        monkeypatch.chdir(folder)
        monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
        return model.load(None)

    return write


@pytest.fixture
def explain(repository: Repository) -> Explain:
    """``explain(log, "train.py", run=...)``: the line about a run that ended with this log."""

    def line(log: str, *files: str, run: str = "python train.py", status: int = 1, **contents: str) -> str:
        spec = repository(f"run: {run}", *files, **contents)
        explanation = Explanation(shlex.split(run), recipes.make(spec.extends), workspace_files.on_host(spec))
        return explanation.of(Run(status, log.splitlines()))

    return line


def raised(error: str, *frames: str, head: str = "Traceback (most recent call last):") -> str:
    """A traceback as Python 3.11 prints it; frames are ``file:line``, the innermost last."""
    lines = [head]
    for frame in frames:
        file, _, number = frame.rpartition(":")
        lines += [f'  File "{file}", line {number}, in <module>', "    import x", "    ^^^^^^^^"]
    return "\n".join([*lines, error])


SITE, TRAIN = "/opt/venv/lib/python3.11/site-packages/lightning/__init__.py:1", "/workspace/train.py:3"
NO_MODULE, NO_FILE = "ModuleNotFoundError: No module named", "FileNotFoundError: [Errno 2] No such file or directory:"
LIBRARY = "ImportError: libGL.so.1: cannot open shared object file: No such file or directory"
BY_PATH = "OSError: libgomp.so.1: cannot open shared object file: No such file or directory"
UNKNOWN = "OSError: libgone.so.1: cannot open shared object file: No such file or directory"
DENIED = "PermissionError: [Errno 13] Permission denied: '/opt/x'"
NO_USER = "KeyError: 'getpwuid(): uid not found: 54321'"
OLD_NUMPY = "A module that was compiled using NumPy 1.x cannot be run in"
OF_PIL = "/opt/venv/lib/python3.13/site-packages/PIL/__init__.py:1"
RANKS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "


#: Exceptions of a process whose worker has exited.
WORKER_EXITED = pytest.mark.parametrize(
    "last",
    [
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "EOFError",
        "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1",
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
    ],
)


@WORKER_EXITED
def test_the_exception_of_the_worker_is_explained(explain: Explain, last: str) -> None:
    log = f"{raised('ValueError: no episode', SITE, '/workspace/envs.py:5')}\n{raised(last, TRAIN, SITE)}"
    assert explain(log, "train.py", "envs.py").startswith("envs.py:5: ValueError: no episode")


@WORKER_EXITED
def test_a_worker_that_exits_without_a_traceback_is_named_by_its_parent(explain: Explain, last: str) -> None:
    assert explain(raised(last, TRAIN, SITE), "train.py").startswith(f"train.py:3: {last}")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            raised(f"{NO_MODULE} 'einops'", TRAIN, "/workspace/src/m/net.py:7"),
            f"src/m/net.py:7: {NO_MODULE} 'einops': add it to requirements in trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'torchmetrics.text'", TRAIN, SITE),
            f"train.py:3: {NO_MODULE} 'torchmetrics.text': add it to requirements in trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'sklearn'", TRAIN),
            f"train.py:3: {NO_MODULE} 'sklearn': add scikit-learn, which has it, to requirements in trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'no_such_module'", TRAIN),
            f"train.py:3: {NO_MODULE} 'no_such_module': add the package that has it to requirements in trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'helpers.io'", TRAIN),
            f"train.py:3: {NO_MODULE} 'helpers.io': helpers/io.py is not in the image: add it to code in "
            "trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'torch_xla'", TRAIN),
            f"train.py:3: {NO_MODULE} 'torch_xla': the image has no torch_xla: set extends to a target with torch_xla "
            "('trainyard list' shows them)",
        ),
        (raised(LIBRARY, TRAIN), f"train.py:3: {LIBRARY}: add libgl1 to system in trainyard.yaml"),
        (raised(BY_PATH, TRAIN), f"train.py:3: {BY_PATH}: add libgomp1 to system in trainyard.yaml"),
        (
            raised(UNKNOWN, TRAIN),
            f"train.py:3: {UNKNOWN}: add the Debian package or the wheel that has libgone.so.1 to system in "
            "trainyard.yaml",
        ),
        (
            raised(f"{NO_MODULE} 'pkg_resources'", TRAIN),
            f"train.py:3: {NO_MODULE} 'pkg_resources': add setuptools<82, which has it, to requirements in "
            "trainyard.yaml",
        ),
        (
            raised("AttributeError: module 'numpy' has no attribute 'trapz'", TRAIN),
            "train.py:3: AttributeError: module 'numpy' has no attribute 'trapz': numpy 2.4.6, which the image has, "
            "has no trapz: if an earlier one has it, require that in trainyard.yaml, as in numpy<2",
        ),
        (
            raised("ImportError: cannot import name 'Old' from 'PIL' (/opt/venv/x.py)", TRAIN),
            "train.py:3: ImportError: cannot import name 'Old' from 'PIL' (/opt/venv/x.py): pillow 13.0.0, which the "
            "image has, has no Old: if an earlier one has it, require that in trainyard.yaml, as in pillow<13",
        ),
        (
            raised("AttributeError: 'google._upb._message.FieldDescriptor' object has no attribute 'label'", TRAIN),
            "train.py:3: AttributeError: 'google._upb._message.FieldDescriptor' object has no attribute 'label': "
            "protobuf 7.36.2, which the image has, has no label: if an earlier one has it, require that in "
            "trainyard.yaml, as in protobuf<7",
        ),
        (
            f"{OLD_NUMPY}\n" + raised("ImportError: numpy.core.multiarray failed to import", TRAIN, OF_PIL),
            "train.py:3: ImportError: numpy.core.multiarray failed to import: pillow 13.0.0 was built for numpy 1: "
            "require a later one in trainyard.yaml, or numpy<2",
        ),
        (
            raised("AttributeError: 'NoneType' object has no attribute 'shape'", TRAIN),
            "train.py:3: AttributeError: 'NoneType' object has no attribute 'shape'",
        ),
        (
            raised(f"{NO_FILE} 'data/x.bin'", TRAIN),
            f"train.py:3: {NO_FILE} 'data/x.bin': add data/x.bin to code in trainyard.yaml, or give its folder as "
            "smoke.data",
        ),
        (
            raised(f"{NO_FILE} '/mnt/y.bin'", TRAIN),
            f"train.py:3: {NO_FILE} '/mnt/y.bin': a smoke test finds data in /data: give its folder as smoke.data, and "
            "name /data in smoke.args",
        ),
        (
            raised(DENIED, TRAIN),
            f"train.py:3: {DENIED}: the image runs as any user: write to /workspace, /tmp or a folder that is mounted",
        ),
        (
            raised(NO_USER, TRAIN, "/usr/lib/python3.11/getpass.py:1"),
            f"train.py:3: {NO_USER}: the image has no such user: set USER to a name in environment in trainyard.yaml",
        ),
        ("step 1\n" + raised("ValueError: bad", TRAIN), "train.py:3: ValueError: bad"),
        (raised("ValueError: bad", SITE), "trainyard.yaml:2: run: ValueError: bad"),
        (
            raised("SyntaxError: invalid syntax", head='  File "/workspace/train.py", line 4\n    def f(:\n'),
            "train.py:4: SyntaxError: invalid syntax",
        ),
        (
            raised("OSError: first", "/workspace/src/m/net.py:7")
            + "\n\nDuring handling of the above exception, another exception occurred:\n\n"
            + raised("RuntimeError: second", TRAIN),
            "train.py:3: RuntimeError: second",
        ),
        (
            "\n".join(
                f"[rank0]: {line}" for line in [*raised("ValueError: bad", TRAIN).splitlines(), raised(RANKS, SITE)]
            ),
            "train.py:3: ValueError: bad",
        ),
        (
            "launch: start     python train.py\nloading\n  no such model\n",
            "trainyard.yaml:2: run: exit status 1: no such model",
        ),
        ("", "trainyard.yaml:2: run: exit status 1: it printed nothing"),
    ],
)
def test_a_failure_names_the_users_file_and_line(explain: Explain, log: str, line: str) -> None:
    assert explain(log, "train.py", "src/m/net.py", "helpers/io.py", "data/x.bin") == line


@pytest.mark.parametrize(
    ("run", "log", "line"),
    [
        (
            "./trian.sh",
            "launch: error: './trian.sh' not found: no such file, no such command on PATH, or its #! line",
            "run: no file ./trian.sh in the image",
        ),
        (
            "./train.sh",
            "launch: error: './train.sh' not found: no such file, no such command on PATH, or its #! line",
            "run: train.sh is not in the image: add it to code in trainyard.yaml",
        ),
        (
            "tool.py",
            "launch: error: 'tool.py' not found: no such file, no such command on PATH, or its #! line",
            "run: no command 'tool.py' in the image",
        ),
        (
            "./train.sh",
            "launch: error: cannot execute './train.sh': Permission denied",
            "run: train.sh is not executable: run 'chmod +x train.sh'",
        ),
        (
            "python src/m/trian.py",
            "python: can't open file '/workspace/src/m/trian.py': [Errno 2] No such file or directory",
            "run: no file src/m/trian.py in the image",
        ),
        (
            "python -m m.trian",
            "/opt/venv/bin/python: No module named m.trian",
            "run: no module 'm.trian' in the image (did you mean 'm.train'?)",
        ),
        (
            "python -m mm.train",
            "/opt/venv/bin/python: Error while finding module specification for 'mm.train' (ModuleNotFoundError: No "
            "module named 'mm')",
            "run: no module 'mm.train' in the image (did you mean 'm.train'?)",
        ),
    ],
)
def test_a_command_that_does_not_exist_names_the_key_and_what_is_near(
    explain: Explain, run: str, log: str, line: str
) -> None:
    assert explain(log, "train.sh", "src/m/train.py", run=run, status=127) == f"trainyard.yaml:2: {line}"


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("/bin/bash: line 1: nothing", "trainyard.yaml:2: run: exit status 127: /bin/bash: line 1: nothing"),
        ("./train.sh: line 3: foo: command not found", "train.sh:3: foo: command not found"),
        ("./train.sh: 3: foo: not found", "train.sh:3: foo: not found"),
        (
            "/usr/bin/env: 'python2': No such file or directory",
            "train.sh:1: the image has no interpreter 'python2': write '#!/usr/bin/env python3' or '#!/bin/bash'",
        ),
        (
            "launch: error: cannot execute './train.sh': Exec format error; it may be a script without a #! line",
            "train.sh:1: the file has no #! line: begin it with '#!/usr/bin/env python3' or '#!/bin/bash'",
        ),
        (
            "launch: error: './train.sh' not found: no such file",
            "train.sh:1: the image has no interpreter '/usr/bin/fish': write '#!/usr/bin/env python3' or '#!/bin/bash'",
        ),
    ],
)
def test_a_script_that_fails_is_named_with_its_line(explain: Explain, log: str, line: str) -> None:
    assert explain(log, run="./train.sh", status=127, **{"train.sh": "#!/usr/bin/fish\n"}) == line


def test_a_script_with_windows_line_endings_is_named(explain: Explain) -> None:
    log = "launch: error: './train.sh' not found: no such file"
    line = explain(log, run="./train.sh", status=127, **{"train.sh": "#!/bin/bash\r\necho\r\n"})
    assert line.startswith("train.sh:1: the line ends with a carriage return")


def test_a_killed_run_ran_out_of_memory(explain: Explain) -> None:
    assert explain("", status=137).startswith("trainyard.yaml:2: run: was killed (137), as when memory is short")


def test_a_run_that_asked_a_host_says_which_and_what_to_do(repository: Repository) -> None:
    log = raised("urllib.error.URLError: <urlopen error [Errno -3]>", TRAIN)
    files = workspace_files.on_host(repository("run: python train.py", "train.py"))
    explanation = Explanation(["python", "train.py"], None, files)
    assert explanation.of(Run(1, log.splitlines(), ["huggingface.co"])).endswith(
        ": asked for huggingface.co, which a smoke test cannot reach: give the files as smoke.data in trainyard.yaml, "
        "and read them from /data, or give '--smoke-network'"
    )
    other = raised(f"{NO_MODULE} 'einops'", TRAIN)
    assert "asked for" not in explanation.of(Run(1, other.splitlines(), ["huggingface.co"])), "it is not the reason"


def test_no_package_has_a_module_that_python_has_no_longer(explain: Explain) -> None:
    said = explain(raised(f"{NO_MODULE} 'uu'", TRAIN))
    assert said.endswith("Python 3.13 has no uu any longer: set base in trainyard.yaml to one with an earlier Python")


def test_a_missing_module_may_be_the_folder_of_the_repository_itself(explain: Explain) -> None:
    said = explain(raised(f"{NO_MODULE} 'jax_az'", TRAIN), "__init__.py", "train.py")
    assert "if jax_az is this folder, which is a package, run trainyard in the folder above; else add the" in said


def test_without_an_observer_the_host_is_in_the_log(explain: Explain) -> None:
    assert "asked for files.example, which" in explain("curl: (6) Network is unreachable https://files.example/x")


def test_lines_between_a_frame_and_its_error_belong_to_it() -> None:
    log = raised("ValueError: bad", "/workspace/a.py:1").replace("ValueError", "    x = 1\n    ~~^\nValueError")
    assert [one.error for one in tracebacks(log.splitlines())] == ["ValueError: bad"]


@pytest.mark.parametrize(
    "log",
    [
        "usage: train.py [--epochs N]\ntrain.py: error: unrecognized arguments: --help",
        "Usage: train.py CONFIG",
        "\n       USAGE: train.py [flags]\nflags:\n",
        "Error: No such option: --help",
        "FATAL Flags parsing error: Unknown command line flag 'help'\nPass --helpshort or --helpfull to see help.",
        "Try --helpfull to get a list of all flags.",
    ],
)
def test_a_command_that_refuses_help_has_started(log: str) -> None:
    assert smoke_command.help_passes(log.splitlines())


@pytest.mark.parametrize(
    "log",
    [
        "launch: start     python train.py --help\nkilled",
        raised("ModuleNotFoundError: No module named 'einops'", "/workspace/train.py:1"),
        "usage: train.py\n" + raised("ModuleNotFoundError: No module named 'einops'", "/workspace/train.py:1"),
        "\n".join(f"[rank0]: {line}" for line in ("usage: train.py", *raised("ValueError: x", TRAIN).splitlines())),
        raised("ValueError: invalid literal for int() with base 10: '--help'", "/workspace/train.py:1"),
        raised("argparse.ArgumentError: unrecognized arguments: --help", "/workspace/train.py:1"),
        "config file --help: no such file",
        'usage: train.py\n  File "/workspace/train.py", line 2\nSyntaxError: invalid syntax',
    ],
)
def test_a_command_that_fails_otherwise_has_not_started(log: str) -> None:
    assert not smoke_command.help_passes(log.splitlines())


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        ("IndexError: list index out of range", True),
        ("AttributeError: module 'mine.base' has no attribute 'Problem'", False),
        ("ImportError: cannot import name 'x' from 'mine'", False),
        ("NameError: name 'x' is not defined", False),
    ],
)
def test_arguments_for_a_short_run_are_advised_where_they_may_help(error: str, advised: bool) -> None:
    explanation = Explanation(["python", "train.py"], None, None)
    explanation.otherwise = ": give arguments"
    run = Run(1, raised(error, "/workspace/train.py:1").splitlines())
    assert explanation.of(run).endswith(": give arguments") is advised


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], []),
        (["--epochs=1"], ["--epochs=1"]),
        (["--epochs", "1", "--force"], ["--epochs", "1", "--force"]),
        (["--force"], ["run", "--force"]),
        (["--runtime=cpu"], ["run", "--runtime=cpu"]),
        (["--help"], ["run", "--help"]),
        (["configs/small.yaml"], ["run", "configs/small.yaml"]),
        (["--"], ["run", "--"]),
    ],
)
def test_arguments_reach_the_command_and_not_the_launcher(arguments: list[str], words: list[str]) -> None:
    assert command_words.container_words(arguments) == words
    parsed = cli.parse(words)
    assert (parsed.words or ["run"])[-len(arguments) :] == arguments or not arguments
    assert not parsed.mode and not parsed.flags and not parsed.is_command


def test_the_launchers_options_are_known() -> None:
    known = {*cli.SWITCHES, *cli.MODES, "--help", "--json", "--runtime", "--", "--version"}
    assert known == command_words.LAUNCHER_OPTIONS


def test_writes_elsewhere_are_files_and_not_the_folders_that_hold_them() -> None:
    changes = [
        {"Path": path, "Kind": 0} for path in ("/var", "/var/lib", "/var/lib/x", "/home", "/home/trainer/y", "/tmp")
    ]
    assert smoke_command.written_elsewhere(changes, ("/tmp", "/home/trainer")) == ["/var/lib/x"]


def observed(folder: Path, program: str, **files: str) -> tuple[str, list[str]]:
    """What a program prints, and the hosts that it asked for."""
    observer = folder / "observer"
    (observer / "asked").mkdir(parents=True)
    shutil.copy(network_observer.__file__, observer / "sitecustomize.py")
    own = folder / "own"
    own.mkdir()
    for name, text in files.items():
        (own / name).write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{observer}:{own}"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    asked = [line for path in sorted((observer / "asked").iterdir()) for line in path.read_text().splitlines()]
    return done.stdout + done.stderr, asked


# Names below .invalid do not exist (RFC 6761). Connecting a datagram socket sends nothing.
ASKS = """
import socket
own = ("localhost", "127.0.0.1", "::1", "metadata.google.internal")
for host in ("hub.invalid", "HUB.invalid.", b"other.invalid", *own):
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        pass
one = socket.socket(type=socket.SOCK_DGRAM)
for address in (("8.8.8.8", 9), ("10.0.0.1", 9)):
    try:
        one.connect(address)
    except OSError:
        pass
"""


def test_the_observer_writes_down_hosts_of_other_networks(tmp_path: Path) -> None:
    printed, asked = observed(tmp_path, ASKS)
    assert (printed, asked) == ("", ["hub.invalid", "hub.invalid", "other.invalid", "8.8.8.8"])


def test_the_observer_runs_the_sitecustomize_that_it_hides(tmp_path: Path) -> None:
    program = "import sys, sitecustomize; print(sitecustomize.MINE, [p for p in sys.path if p.endswith('observer')])"
    printed, _ = observed(tmp_path, program, **{"sitecustomize.py": "MINE = 'own'\n"})
    assert printed == "own []\n"


def test_the_observer_never_fails(tmp_path: Path) -> None:
    program = "import shutil, os; shutil.rmtree(os.environ['PYTHONPATH'].split(':')[0] + '/asked')\n" + ASKS
    program += "os.mkdir(os.environ['PYTHONPATH'].split(':')[0] + '/asked')"
    assert observed(tmp_path, program) == ("", [])


def watched(folder: Path, program: str, code: str) -> list[str]:
    """Return the observer's records of a program in ``code`` that imports a package beside it for about a second."""
    observer, own = folder / "observer", folder / code
    (observer / "started").mkdir(parents=True)
    shutil.copy(network_observer.__file__, observer / "sitecustomize.py")
    (own / "lib/python3").mkdir(parents=True)
    (own / "lib/python3" / "slow.py").write_text("import time\ntime.sleep(1.2)\n", encoding="utf-8")
    (own / "train.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{observer}:{own}/lib/python3", "SMOKE_FOLDER": str(own)}
    subprocess.run([sys.executable, own / "train.py"], env=environment, check=True, timeout=60)
    (file,) = (observer / "started").iterdir()
    return file.read_text(encoding="utf-8").splitlines()


def test_the_observer_tells_imports_from_the_users_own_code(tmp_path: Path) -> None:
    lines = watched(tmp_path, "\nimport slow\nimport time\ntime.sleep(1.2)\n", "code")
    importing = [line for line in lines if line == f"importing at {tmp_path}/code/train.py:2"]
    assert importing and lines[-1] == "running"
    assert lines.index("running", lines.index(importing[0])) > lines.index(importing[-1])


def test_the_observer_counts_a_call_of_a_package_as_own_code(tmp_path: Path) -> None:
    """A program that waits for another one runs, and imports nothing."""
    lines = watched(tmp_path, "import subprocess\nsubprocess.run(['sleep', '1.2'])\n", "code")
    assert lines[-1] == "running"


def recipe(spec: model.Spec) -> Recipe:
    """Return the recipe of a repository, whose lock has no packages but the target's."""
    workspaces.lock(spec)
    return recipes.make(workspaces.render(spec))


@pytest.mark.parametrize(
    ("document", "command"),
    [
        ("run: ./train.sh", "trainyard run -- --help"),
        ("run: ./train.sh\nsmoke: {}", "trainyard run"),
        ("run: ./train.sh\nsmoke: {args: --epochs=1}", "trainyard run -- --epochs=1"),
        ("run: ./train.sh\nsmoke: {args: a.yaml}", "trainyard run -- a.yaml"),
        ("", "docker run --rm trainyard:mine mnist --fake-data --epochs 1"),
    ],
)
def test_the_closing_command_is_that_of_the_image(repository: Repository, document: str, command: str) -> None:
    assert candidate.closing_command(recipe(repository(document, "train.sh")), {}) == command


def test_the_closing_command_has_an_output_folder_and_a_target_if_needed(repository: Repository) -> None:
    made = recipe(repository("run: ./train.sh\nsmoke: {args: --epochs=1}", "train.sh"))
    command = candidate.closing_command(made, {"writes_output": True}, "../mine")
    assert command == "trainyard run ../mine --output=output -- --epochs=1"


def test_the_closing_command_of_an_own_trainer_asks_nothing_of_it() -> None:
    made = recipes.make(model.load("examples/patches"))
    assert candidate.closing_command(made, {}) == "docker run --rm trainyard:patches patches --help"


def told(spec: model.Spec, said: bool | None, **more: bool) -> bool:
    """Return whether a repository's smoke test has a network, given ``smoke_network=said``."""
    context = dataclasses.replace(spec.context, smoke_network=said, **more)
    return smoke_test.network_of(spec.target, workspace_files.on_host(spec), context)


def test_a_network_is_what_this_host_was_told_last(repository: Repository, tmp_path: Path) -> None:
    spec = repository("run: ./train.sh")
    assert not told(spec, None)
    assert told(spec, True) and told(spec, None)
    assert (spec.kept / state.MARKER).is_file(), "'clean --all' removes the folder"
    assert not told(spec, None, offline=True)
    other = tmp_path / "stranger" / "mine"
    other.mkdir(parents=True)
    same_name = HostFiles(other / "trainyard.yaml")
    assert not smoke_test.network_of(spec.target, same_name, spec.context), "a repository of the same name"
    assert told(spec, None)
    assert not told(spec, False) and not told(spec, None)


def test_no_repository_gives_itself_a_network(repository: Repository) -> None:
    with pytest.raises(UserError, match="network"):
        repository("run: ./train.sh\nsmoke: {network: true}")


def test_a_network_is_for_a_command_of_a_repository(repository: Repository) -> None:
    for spec in (model.load("tf-cpu"), repository("requirements: [einops]")):
        assert not told(spec, None) and not told(spec, False)
        with pytest.raises(UserError, match=f"^--smoke-network is for .*, and {spec.target} has none: leave it out$"):
            told(spec, True)


@pytest.mark.usefixtures("fake_engine")
def test_the_option_reaches_the_context(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    line = "--smoke-network is for the command of a repository, and tf-cpu has none: leave it out"
    assert trainyard("smoke", "tf-cpu", "--smoke-network")[2].splitlines()[-1] == f"smoke: {line}"


def test_the_level_and_the_command_are_shown() -> None:
    assert candidate.tested({"level": "ran", "command": ["python", "-m", "m.train"]}) == "ran (python -m m.train)"
    assert candidate.tested({"accuracy": 98.0}) == "trained", "results of older versions have no level"


def test_from_takes_no_target_of_the_catalogue(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = trainyard("image", "cpu", "--from", "x")
    assert status == 2 and err.splitlines()[-1].startswith(
        "image: --from takes no target of the catalogue: cpu is built"
    )
