"""``trainyard run``: the `docker run` that it becomes, and what it says before."""

from __future__ import annotations

import csv
import itertools
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import FakeEngine, Ran

from trainyard.common.errors import UserError
from trainyard.image import facts, local_run
from trainyard.image.local_run import Host, Request
from trainyard.release import pushes
from trainyard.spec import model, state
from trainyard.spec.model import Spec
from trainyard.workspace import code_layer

Command = Callable[..., tuple[int, str, str]]

IMAGE = "trainyard:mine"
HOST = Host(user="501:20")
DEFAULT = Request()


@pytest.fixture
def workspace(tmp_path: Path) -> Callable[..., Spec]:
    """The spec of a repository with this trainyard.yaml."""

    def make(text: str = "run: python train.py\n", target: str = "cpu") -> Spec:
        folder = tmp_path / "repository" / "mine"
        for name in ("src", "tests/data", "../libs/x"):
            (folder / name).mkdir(parents=True)
        subprocess.run(["git", "init", "--quiet", folder.parent], check=True)
        (folder / "train.py").touch()
        (folder / "trainyard.yaml").write_text(f"extends: {target}\n{text}", encoding="utf-8")
        return model.load(str(folder))

    return make


def arguments(spec: Spec, request: Request = DEFAULT, host: Host = HOST) -> list[str]:
    return local_run.arguments(spec, IMAGE, request, host)


def options(found: list[str]) -> list[str]:
    return found[: found.index(IMAGE)]


def words(found: list[str]) -> list[str]:
    return found[found.index(IMAGE) + 1 :]


def mounts(found: list[str]) -> list[list[str]]:
    return [next(csv.reader([value])) for name, value in itertools.pairwise(found) if name == "--mount"]


def test_the_command_of_the_image_gets_the_arguments(workspace: Callable[..., Spec]) -> None:
    found = arguments(workspace(), Request(words=("--epochs", "1")))
    assert found == ["docker", "run", "--rm", "--shm-size=16g", IMAGE, "--epochs", "1"]


@pytest.mark.parametrize(
    "given",
    [("data.root=/x", "epochs=2"), ("conf/a.yaml",), ("mnist",), ("python", "-V"), ("--explain",), ("--version",)],
)
def test_arguments_of_a_repositorys_command_are_never_another_command(
    workspace: Callable[..., Spec], given: tuple[str, ...]
) -> None:
    """Hydra's overrides have slashes, which the launcher would take for the path of a program."""
    assert words(arguments(workspace(), Request(words=given))) == ["run", *given]


def test_the_first_word_is_a_trainer_where_there_is_no_command(workspace: Callable[..., Spec]) -> None:
    request = Request(words=("mnist", "--epochs", "1"))
    assert words(arguments(model.load("cpu"), request)) == ["mnist", "--epochs", "1"]
    assert words(arguments(workspace(""), request)) == ["mnist", "--epochs", "1"]


def test_another_command_gets_the_arguments(workspace: Callable[..., Spec]) -> None:
    request = Request(words=("data.root=/x",), command=("python", "evaluate.py"))
    assert words(arguments(workspace(), request)) == ["--", "python", "evaluate.py", "data.root=/x"]


def test_a_terminal_is_passed_on(workspace: Callable[..., Spec]) -> None:
    assert {"--interactive", "--tty"} <= set(arguments(workspace(), Request(terminal=True)))


def test_the_code_takes_the_place_of_that_in_the_image(workspace: Callable[..., Spec]) -> None:
    spec = workspace("code: [src, train.py, ../libs/x]\nrun: python train.py\n")
    found = arguments(spec, Request(mount=True))
    root = spec.folder
    assert mounts(found) == [
        ["type=bind", f"source={root}/src", "target=/workspace/src"],
        ["type=bind", f"source={root}/train.py", "target=/workspace/train.py"],
        ["type=bind", f"source={root.parent}/libs/x", "target=/workspace/libs/x"],
    ]
    assert found[found.index("--user") + 1] == "501:20"
    assert "--group-add=0" in found


def test_a_repository_whose_code_is_all_of_it_is_mounted_at_workspace(workspace: Callable[..., Spec]) -> None:
    spec = workspace()
    expected = [["type=bind", f"source={spec.folder}", "target=/workspace"]]
    assert mounts(arguments(spec, Request(mount=True))) == expected


def test_root_in_a_rootless_engine_is_the_user(workspace: Callable[..., Spec]) -> None:
    found = arguments(workspace(), Request(mount=True), Host(rootless=True, user="501:20"))
    assert found[found.index("--user") + 1] == "0:0"


def test_a_container_that_writes_nothing_here_keeps_the_images_user(workspace: Callable[..., Spec]) -> None:
    spec = workspace()
    assert "--user" not in arguments(spec, Request(data=spec.folder))


def test_selinux_lets_the_container_read_what_is_mounted(workspace: Callable[..., Spec]) -> None:
    spec, host = workspace(), Host(selinux=True)
    assert "--security-opt=label=disable" in arguments(spec, Request(mount=True), host)
    assert "--security-opt=label=disable" not in arguments(spec, Request(), host)


def test_data_is_read_only_and_output_is_writable(workspace: Callable[..., Spec], tmp_path: Path) -> None:
    data = tmp_path / 'with, comma and "quotes"'
    data.mkdir()
    found = arguments(workspace(), Request(data=data, output=tmp_path / "new"))
    assert mounts(found) == [
        ["type=bind", f"source={data}", "target=/data", "readonly"],
        ["type=bind", f"source={tmp_path}/new", "target=/output"],
    ]
    assert "--user" in found


def test_the_data_of_the_smoke_test_is_the_default(workspace: Callable[..., Spec], tmp_path: Path) -> None:
    spec = workspace("run: python train.py\nsmoke: {data: tests/data}\n")
    assert mounts(arguments(spec))[0][1] == f"source={spec.folder}/tests/data"
    assert mounts(arguments(spec, Request(data=tmp_path)))[0][1] == f"source={tmp_path}"


@pytest.mark.parametrize(
    ("gpus", "target", "nvidia", "expected"),
    [
        ("auto", "gpu", True, ["--gpus", "all"]),
        ("auto", "gpu", False, []),
        ("auto", "cpu", True, []),
        ("none", "gpu", True, []),
        ("device=0,2", "gpu", False, ["--gpus", '"device=0,2"']),
        ("device=1", "gpu", False, ["--gpus", "device=1"]),
    ],
)
def test_gpus(workspace: Callable[..., Spec], gpus: str, target: str, nvidia: bool, expected: list[str]) -> None:
    found = options(arguments(workspace(target=target), Request(gpus=gpus), Host(nvidia=nvidia)))
    at = found.index("--gpus") if "--gpus" in found else len(found)
    assert found[at : at + 2] == expected


def test_a_free_gpu_is_the_one_that_uses_the_least_memory() -> None:
    """Lines as nvidia-smi prints them: index, MiB in use, MiB in all."""
    assert local_run.free_gpu("0, 70123, 81559\n1, 14, 81559\n2, 900, 81559\n") == "device=1"
    with pytest.raises(UserError, match=r"no GPU is free \(0: 70123 of 81559 MiB\)"):
        local_run.free_gpu("0, 70123, 81559\n")
    with pytest.raises(UserError, match="nvidia-smi lists none"):
        local_run.free_gpu("No devices were found\n")


def test_folders_files_and_volumes_are_mounted_as_docker_does(workspace: Callable[..., Spec], tmp_path: Path) -> None:
    spec = workspace()
    found = arguments(spec, Request(volumes=(f"{tmp_path}:/a:ro", "cache:/b:ro")))
    assert mounts(found) == [
        ["type=bind", f"source={tmp_path}", "target=/a", "readonly"],
        ["type=volume", "source=cache", "target=/b", "readonly"],
    ]
    assert "--user" not in found
    assert "--user" in arguments(spec, Request(volumes=(f"{tmp_path}:/a",)))
    for wrong, said in (("/nonexistent/x:/a", "no file or folder"), (str(tmp_path), "is not SOURCE:/PATH")):
        with pytest.raises(UserError, match=said):
            arguments(spec, Request(volumes=(wrong,)))


def test_ports_answer_on_this_machine_unless_an_address_is_named(workspace: Callable[..., Spec]) -> None:
    found = arguments(workspace(), Request(ports=("6006", "8080:80", "0.0.0.0:5678:5678")))
    assert [word for word in found if word.startswith("--publish")] == [
        "--publish=127.0.0.1:6006:6006", "--publish=127.0.0.1:8080:80", "--publish=0.0.0.0:5678:5678"
    ]  # fmt: skip


def test_a_container_that_is_left_alone_is_found_by_its_label(workspace: Callable[..., Spec], tmp_path: Path) -> None:
    found = arguments(workspace(), Request(detach=True, name="trainyard-mine-1", output=tmp_path))
    assert found[:5] == ["docker", "run", "--detach", "--name=trainyard-mine-1", "--label=io.trainyard.run=mine"]
    assert f"--label=io.trainyard.run.output={tmp_path}" in found and "--rm" not in found
    assert not [word for word in found if "owned" in word], "'clean' would remove it while it runs"


def test_a_tpu_vm_gives_its_chips_to_an_image_for_tpus(workspace: Callable[..., Spec]) -> None:
    spec = workspace(target="xla")
    assert {"--privileged", "--net=host"} <= set(arguments(spec, Request(), Host(tpu=True)))
    assert not {"--privileged", "--net=host"} & set(arguments(spec))


def test_what_the_image_is_for_and_this_machine_lacks_is_said(workspace: Callable[..., Spec]) -> None:
    spec = workspace(target="gpu")
    assert "the engine has no NVIDIA runtime" in local_run.notes(spec, Request(), HOST)[0]
    assert not local_run.notes(spec, Request(), Host(nvidia=True))
    assert not local_run.notes(spec, Request(gpus="none"), HOST)


def test_a_shell_is_bash_with_the_launchers_variables(workspace: Callable[..., Spec]) -> None:
    spec = workspace()
    assert words(arguments(spec, Request(shell=True, terminal=True))) == ["--", "bash"]
    assert words(arguments(spec, Request(shell=True, words=("-c", "ls")))) == ["--", "bash", "-c", "ls"]
    with pytest.raises(UserError, match="--shell: no terminal"):
        arguments(spec, Request(shell=True))


def test_jupyter_answers_on_this_machine_only(workspace: Callable[..., Spec]) -> None:
    found = arguments(workspace(), Request(jupyter=True, port=9999, words=("--debug",)))
    assert "--publish=127.0.0.1:9999:9999" in options(found)
    assert words(found) == ["--", "jupyter-lab", "--ip=0.0.0.0", "--port=9999", "--no-browser", "--debug"]
    on_tpu = arguments(model.load("xla"), Request(jupyter=True), Host(tpu=True))
    assert "--ip=127.0.0.1" in on_tpu and not [word for word in on_tpu if word.startswith("--publish")]


@pytest.mark.parametrize(
    ("target", "folders"),
    [
        ("cpu", []),
        (
            "xla-nightly",
            [
                "JUPYTER_PATH=/opt/requirements/share/jupyter",
                "JUPYTER_CONFIG_PATH=/opt/requirements/etc/jupyter",
                "JUPYTERLAB_DIR=/opt/requirements/share/jupyter/lab",
            ],
        ),
    ],
)
def test_jupyter_finds_the_files_of_its_packages(
    workspace: Callable[..., Spec], target: str, folders: list[str]
) -> None:
    """Jupyter looks below the prefix of Python: where the files are, unless the base holds the framework."""
    spec = workspace(target=target)
    found = arguments(spec, Request(jupyter=True, environment=("JUPYTERLAB_DIR=/mine",)))
    given = [found[at + 1] for at, word in enumerate(found) if word == "--env"]
    assert given == [*folders, "JUPYTERLAB_DIR"]  # the last one counts
    assert "--env" not in arguments(spec, Request())


def test_values_of_variables_are_no_arguments(workspace: Callable[..., Spec]) -> None:
    """Every user of the machine can read the arguments of a process."""
    request = Request(environment=("A=1=2\n3", "EMPTY=", "WANDB_API_KEY", "PATH=/own", "DOCKER_HOST=tcp://engine"))
    found = arguments(workspace(), request)
    named = ["A", "EMPTY", "WANDB_API_KEY", "PATH=/own", "DOCKER_HOST=tcp://engine"]  # docker would read the last two
    assert found[found.index("--env") : found.index(IMAGE)] == [word for one in named for word in ("--env", one)]
    assert local_run.variables(request) == {"A": "1=2\n3", "EMPTY": ""}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(data=Path("/nonexistent/data")), "--data: no folder '/nonexistent/data'"),
        (Request(output=Path("/etc/passwd")), "--output: '/etc/passwd' is not a folder"),
    ],
)
def test_a_folder_that_is_none_is_named(workspace: Callable[..., Spec], request_: Request, said: str) -> None:
    with pytest.raises(UserError, match=said):
        arguments(workspace(), request_)


@pytest.mark.parametrize("option", ["--data", "--output"])
def test_an_empty_text_is_no_folder(run: Callable[..., subprocess.CompletedProcess[str]], option: str) -> None:
    """As of a shell's variable that is not set: it does not mean the current folder."""
    done = run(option, "")
    assert (done.returncode, done.stdout) == (2, "") and "no folder is given" in done.stderr


def test_a_target_of_the_catalogue_has_no_code_to_mount() -> None:
    with pytest.raises(UserError, match="--mount: cpu is a target of the catalogue"):
        arguments(model.load("cpu"), Request(mount=True))


# The command, with a `docker` that prints its arguments and an engine that knows the image


@pytest.fixture
def run(workspace: Callable[..., Spec], fake_engine: FakeEngine) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run("--", "--epochs", "1", code="sha256:...")``: the command in a repository, as a process."""
    spec = workspace()
    fake_engine.docker = lambda words, _: Ran(7, "".join(f"{word}\n" for word in words).encode())
    script = (
        "import sys\n"
        "from trainyard import cli\n"
        "from trainyard.image import local_run\n"
        "if sys.argv[1] == 'current':\n"
        "    local_run.code_changed = lambda spec, labels: False\n"
        "sys.exit(cli.run(['run', *sys.argv[2:]]))\n"
    )

    def call(*arguments: str, code: str = "current") -> subprocess.CompletedProcess[str]:
        if code != "missing":
            fake_engine.add("trainyard:mine", labels={"io.trainyard.code": code})
        return subprocess.run(
            [sys.executable, "-c", script, code, *arguments],
            cwd=spec.folder / "src",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def test_what_follows_the_dashes_reaches_the_container_and_its_status_is_ours(run: Callable[..., object]) -> None:
    found = run("--", "--epochs", "1", "--", "x")
    assert isinstance(found, subprocess.CompletedProcess)
    assert found.returncode == 7
    assert found.stdout.splitlines()[-6:] == ["--shm-size=16g", "trainyard:mine", "--epochs", "1", "--", "x"]
    assert re.fullmatch(
        r"docker run --name=trainyard-mine-\w{6} --label=io.trainyard.run=mine --label=io.trainyard.owned=run "
        r"--label=io.trainyard.owned.by=\d+\.\S+ --shm-size=16g trainyard:mine --epochs 1 -- x\n",
        found.stderr,
    )


def test_arguments_may_come_from_makes_variable(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert run("--args", "--name 'a b'").stdout.splitlines()[-2:] == ["--name", "a b"]


def test_an_image_that_was_not_built_is_named(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    found = run(code="missing")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "run: no local image trainyard:mine: run 'trainyard image' first\n"


def test_code_that_changed_since_the_build_is_said(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    said = "the code has changed since trainyard:mine was built: --mount uses it, 'trainyard image' builds it"
    assert said in run(code="sha256:0").stderr
    assert said not in run("--mount", code="sha256:0").stderr


def test_the_output_folder_is_made(run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    run("--output", str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()


def test_a_value_of_a_variable_reaches_docker_and_nobody_else(
    run: Callable[..., subprocess.CompletedProcess[str]], fake_engine: FakeEngine
) -> None:
    fake_engine.docker = lambda words, given: Ran(int(given["TOKEN"] != "hunter2"), " ".join(words).encode())
    found = run("--env", "TOKEN=hunter2")
    assert found.returncode == 0, "docker did not get the value"
    assert "--env TOKEN trainyard:mine" in found.stdout and "--env TOKEN trainyard:mine" in found.stderr
    assert "hunter2" not in found.stdout + found.stderr


def test_the_end_of_a_run_is_reported_and_its_container_removed(
    run: Callable[..., subprocess.CompletedProcess[str]], fake_engine: FakeEngine, tmp_path: Path
) -> None:
    """Read the losses in the engine's log; write run.json and the curves to the folder at /output."""

    def docker(words: Sequence[str], _: object) -> Ran:
        labels = dict(word.removeprefix("--label=").split("=", 1) for word in words if word.startswith("--label="))
        name = next(word.removeprefix("--name=") for word in words if word.startswith("--name="))
        image = fake_engine.image("trainyard:mine")
        made = fake_engine._make("container", name, {"Labels": labels, "Image": "trainyard:mine"}, image)
        log = "".join(f"2026-11-28T10:00:0{at}.5Z {line}\n" for at, line in enumerate(("loss 3", "bar 9\rloss 1", "x")))
        made.ran, made.status = Ran(3, log.encode()), 3
        return Ran(3)

    fake_engine.docker = docker
    run("--output", str(tmp_path / "made"))
    assert (tmp_path / "made/.gitignore").read_text() == "*\n", "results are no code of the next image"
    found = run("--output", str(tmp_path))
    assert (found.returncode, (tmp_path / ".gitignore").exists()) == (3, False)
    assert "status 3 after 0.0 s\nloss █▁ 3 to 1, lowest 1, 2 values\nrun.json, curves.csv, events.out." in found.stderr
    report = json.loads((tmp_path / "run.json").read_text())
    assert (report["status"], report["losses"], report["image"]) == (3, {"loss": 1.0}, "trainyard:mine")
    assert not fake_engine.of_kind("container")


@pytest.mark.parametrize("command", ["logs", "stop"])
def test_without_a_container_logs_and_stop_say_so(
    workspace: Callable[..., Spec],
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    trainyard: Command,
    command: str,
) -> None:
    monkeypatch.chdir(workspace().folder)
    assert trainyard(command) == (2, "", f"{command}: no container of mine: 'trainyard run --detach' starts one\n")


def test_another_command_is_an_option(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    found = run("--command", "python -m 'a b'", "--", "x=/y")
    assert found.stdout.splitlines()[-6:] == ["trainyard:mine", "--", "python", "-m", "a b", "x=/y"]


@pytest.mark.parametrize(
    ("given", "both"),
    [
        (("--shell", "--jupyter"), "--shell and --jupyter"),
        (("--shell", "--command=ls"), "--command and --shell"),
        (("--jupyter", "--command=ls"), "--command and --jupyter"),
    ],
)
def test_a_command_a_shell_and_jupyter_exclude_each_other(
    trainyard: Command, given: tuple[str, ...], both: str
) -> None:
    status, _, err = trainyard("run", "cpu", *given)
    assert (status, err) == (2, f"run: {both} cannot be used together\n")


def test_unclosed_quotes_are_one_line(trainyard: Command) -> None:
    status, _, err = trainyard("run", "cpu", "--args", "'x")
    assert status == 2
    assert "no closing quotation: 'x" in err


# Images of other repositories of the same name


@pytest.fixture
def image_of(workspace: Callable[..., Spec], tmp_path: Path) -> Callable[..., tuple[Spec, Any]]:
    """``image_of("/other", config="")``: the repository, and its image, which was built in that folder."""
    spec = workspace()

    def make(folder: str, **labels: str) -> tuple[Spec, Any]:
        digest = f"sha256:{'1' * 64}"
        state.record(spec.kept, "build", digest, {"passed": True, "folder": folder})
        code = code_layer.write(spec.workspace, tmp_path / "code.tar", spec.site).diff_id
        lock = facts.sha256_of(spec.lock_file) if spec.lock_file.exists() else ""
        own = {"config": spec.workspace.config_hash, "lock": lock, "code": code}
        own = {f"io.trainyard.{name}": value for name, value in (own | labels).items()}
        return spec, types.SimpleNamespace(id=digest, labels=own)

    return make


@pytest.mark.parametrize("tag", ["mine", "mine-candidate"])
@pytest.mark.parametrize("label", ["config", "lock", "code"])
def test_the_image_of_another_repository_of_that_name_is_neither_run_nor_pushed(
    image_of: Callable[..., tuple[Spec, Any]],
    fake_engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    trainyard: Command,
    label: str,
    tag: str,
) -> None:
    spec, image = image_of("/home/me/other", **{label: "another"})
    said = (
        r"^trainyard:mine is the image of /home/me/other, which has the same name: run 'trainyard image', "
        r"or give another 'name' in .*trainyard\.yaml$"
    )
    with pytest.raises(UserError, match=said):
        local_run.check_own(spec, image)
    fake_engine.add(f"trainyard:{tag}", digest=image.id, labels=image.labels)
    monkeypatch.chdir(spec.folder)
    status, out, err = trainyard("push", "--registry=registry.example/ml", BUILD=str(spec.context.state))
    assert (status, out) == (2, "") and re.search(said, err.removeprefix("push: ").rstrip())


def test_the_image_of_a_copy_and_an_image_that_is_out_of_date_are_ones_own(
    image_of: Callable[..., tuple[Spec, Any]],
) -> None:
    local_run.check_own(*image_of("/home/me/copy"))
    spec, _ = image_of("")
    local_run.check_own(*image_of(str(spec.folder), config="another", code="another"))
    spec, image = image_of("/home/me/other", code="another")
    image.id = f"sha256:{'2' * 64}"  # built elsewhere, and pulled
    local_run.check_own(spec, image)


def test_what_another_repository_of_that_name_pushed_is_not_taken(tmp_path: Path) -> None:
    push = pushes.Push("host/ml/trainyard", "mine-1", "sha256:1", "", "", "")
    pushes.record(tmp_path / "mine", replace(push, folder="/home/me/other"))
    assert pushes.last(tmp_path / "mine", folder=tmp_path) is None
    assert pushes.last(tmp_path / "mine", push.repository, tmp_path) is None
    assert pushes.last(tmp_path / "mine", folder=Path("/home/me/other")) is not None
    pushes.record(tmp_path / "mine", push)  # by an earlier Trainyard
    assert pushes.last(tmp_path / "mine", folder=tmp_path) is not None
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700
