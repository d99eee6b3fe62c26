"""Do what people do with an image once it has trained: install, debug, look, and start it in their own ways.

The commands are those of docs/own-repository.md#on-top-of-an-image: :func:`typed` finds them there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uv

from tests.engine import ENGINE
from tests.image.conftest import Finished
from tests.image.small_images import wheel
from trainyard.common.docker_engine import resource_labels
from trainyard.common.settings import ROOT

Run = Callable[..., Finished]

_PAGE = (ROOT / "docs" / "own-repository.md").read_text(encoding="utf-8")
SECTION = _PAGE.partition("\n## On top of an image\n")[2].partition("\n## ")[0]

#: The indented blocks of the section.
BLOCKS = [
    textwrap.dedent(block).strip("\n") for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", SECTION, re.MULTILINE)
]

(DOCKERFILE,) = [block for block in BLOCKS if block.startswith("FROM ")]
UV = DOCKERFILE.splitlines()[2]


@pytest.fixture(
    scope="module", params=["tf-cpu", *(pytest.param(name, marks=pytest.mark.big(name)) for name in ("cpu", "jax"))]
)
def image(request: pytest.FixtureRequest, built_image: Callable[[str], str]) -> str:
    """An image of each framework."""
    return built_image(request.param)


def typed(start: str, image: str) -> list[str]:
    """The words of the line of the section that begins with ``start``, for ``image``; no terminal, quiet launcher."""
    (line,) = [line for block in BLOCKS for line in block.splitlines() if line.startswith(start)]
    line = line.replace("trainyard:mine", image).replace('"$(which uv)"', uv.find_uv_bin())
    words = shlex.split(line.replace("$PWD", os.getcwd()))
    if words[:2] == ["docker", "run"]:
        labels = [f"--label={name}={value}" for name, value in resource_labels("test").items()]
        words = ["docker", "run", "--env=LAUNCHER_LOG=quiet", *labels, *words[2:]]
        words = ["-i" if word == "-it" else word for word in words]
    return words


def call(words: list[str], text: str = "", folder: Path | None = None, **variables: str) -> Finished:
    environment = {**os.environ, **variables}
    return subprocess.run(
        words, input=text, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def built(dockerfile: str, *options: str) -> Finished:
    """``docker build`` of a Dockerfile without files."""
    return call(["docker", "build", "--progress=plain", *options, "-"], dockerfile)


@pytest.fixture
def index(own_index: str, tmp_path: Path) -> dict[str, str]:
    """Variables of pip and uv, for a package index that has einops."""
    (tmp_path / "index" / "einops").mkdir()
    wheel(tmp_path / "index" / "einops", "einops", "1.0", requires=("numpy",))
    host = own_index.removeprefix("http://").partition(":")[0]
    return {"PIP_INDEX_URL": own_index, "PIP_TRUSTED_HOST": host, "UV_DEFAULT_INDEX": own_index}


def settings(index: dict[str, str]) -> str:
    """Return the variables of ``index`` in a Dockerfile."""
    return "".join(f"ENV {name}={value}\n" for name, value in index.items())


@pytest.fixture
def tag() -> Iterator[str]:
    """A name for an image, which is removed."""
    name = f"trainyard-on-top-{os.getpid()}"
    yield name
    ENGINE.untag(name)


def test_pip_and_uv_say_in_a_line_how_packages_are_added(image: str, docker_run: Run) -> None:
    script = "for name in pip pip3 'uv pip'; do $name install einops; echo $?; done"
    found = docker_run("--env=LAUNCHER_LOG=quiet", image, "bash", "-c", script)
    assert found.stdout == "127\n127\n127\n"
    said = "not in this image: use 'requirements' of trainyard.yaml, or in a Dockerfile, after 'USER root':"
    assert found.stderr.splitlines() == [f"{name}: {said} {UV}" for name in ("pip", "pip3", "uv")]
    failed = built(f"FROM {image}\nRUN pip install einops\n")
    assert failed.returncode and f"pip: {said} {UV}\n" in failed.stderr


def test_uv_installs_in_a_dockerfile(image: str, index: dict[str, str]) -> None:
    text = DOCKERFILE.replace("trainyard:mine\n", f"{image}\n{settings(index)}")
    text += "\nRUN python -c 'import einops' && mkdir ~/.cache\n"  # root has made none
    uv_image = f"--build-context=ghcr.io/astral-sh/uv={Path(uv.find_uv_bin()).parent}"
    made = built(text, uv_image, "--output=type=cacheonly")
    assert made.returncode == 0, made.stderr


def test_a_dockerfile_of_two_runs_installs_into_the_environment(
    image: str, index: dict[str, str], tag: str, docker_run: Run
) -> None:
    (two,) = [block for block in BLOCKS if block.startswith("RUN apt-get")]
    assert two.count("RUN ") == 2
    text = DOCKERFILE.replace("trainyard:mine\n", f"{image}\n{settings(index)}").replace(UV, two)
    made = built(text, f"--tag={tag}")
    assert made.returncode == 0, made.stderr
    found = docker_run(tag, "--", "python", "-c", "import os, einops; print(os.getuid(), einops.__file__)")
    uid, path = found.stdout.split()
    assert uid == "1000" and re.fullmatch(r"/opt/venv/lib/python3\.\d+/site-packages/einops/__init__\.py", path)


@pytest.mark.parametrize("user", ["root", "4242"])
def test_uv_installs_in_a_container(image: str, user: str, index: dict[str, str]) -> None:
    """As root into the environment; as any uid into a folder, without numpy, which the image has."""
    how = "uv pip install " + ("einops" if user == "root" else "--target")
    (line,) = [line for block in BLOCKS for line in block.splitlines() if line.startswith(how)]
    words = typed(f"docker run --rm -it --user {user} ", image)
    words[2:2] = [f"--env={name}={value}" for name, value in index.items()]
    found = call(words, f"{line} && python -c 'import einops; print(einops.__file__)'\n")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("/opt/venv/" if user == "root" else "/tmp/more/einops/")
    assert " + numpy" not in found.stderr


def test_a_debugger_and_a_shell_are_there(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").write_text("x = 41\nprint('x is', x + 1)\n", encoding="utf-8")
    found = call(typed('docker run --rm -it --volume "$PWD":/workspace ', image), "n\np x + 100\nc\nq\n")
    assert found.returncode == 0 and "(Pdb) 141\n" in found.stdout and "x is 42\n" in found.stdout, found.stderr
    login = call(typed("docker run --rm -it trainyard:mine bash -l", image), "command -v python\nexit 3\n")
    assert (login.returncode, login.stdout) == (3, "/opt/venv/bin/python\n")


def test_tensorboard_serves_a_page(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    words = typed("docker run --rm --publish 127.0.0.1:6006:6006 ", image)
    words[words.index("127.0.0.1:6006:6006")] = "127.0.0.1::6006"
    name = call([*words[:2], "--detach", *words[2:]]).stdout.strip()
    try:
        address = call(["docker", "port", name, "6006"]).stdout.strip()
        page = ""
        for _ in range(240):
            try:
                with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
                    page = answer.read().decode()
                break
            except OSError:
                time.sleep(0.25)
        assert "<title>TensorBoard</title>" in page, call(["docker", "logs", name]).stderr
    finally:
        call(["docker", "rm", "--force", name])


#: Starts the kernel as Jupyter and VS Code do, and runs a cell in it.
_CELL = """
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
print(client.execute_interactive("import numpy; print(numpy.pi)", timeout=60)["content"]["status"])
manager.shutdown_kernel()
"""


@pytest.fixture(scope="module")
def repository(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A repository with ipykernel and a dev container, and its image."""
    target = ENGINE.client.images.get(image).labels["io.trainyard.target"]
    folder = tmp_path_factory.mktemp("next") / f"next-{target}"
    folder.mkdir()
    (folder / "trainyard.yaml").write_text(f"extends: {target}\nrequirements: [ipykernel]\n", encoding="utf-8")
    (folder / "train.py").write_text("print('loss 0.5')\n", encoding="utf-8")
    call(["git", "init", "--quiet"], folder=folder)
    for words in (["init", "--devcontainer"], ["lock"], ["dev", "build"]):
        done = call([sys.executable, "-m", "trainyard", *words], folder=folder, TRAINYARD_BUILD=f"{folder}-state")
        assert done.returncode == 0, done.stderr
    yield folder, f"trainyard:{folder.name}-candidate"
    ENGINE.untag(f"trainyard:{folder.name}-candidate")


def test_ipykernel_in_the_requirements_is_a_kernel(repository: tuple[Path, str], docker_run: Run) -> None:
    found = docker_run("--user=4242", repository[1], "--", "python", "-c", _CELL)
    assert (found.returncode, found.stdout) == (0, "3.141592653589793\nok\n"), found.stderr


def test_a_dev_container_opens_the_repository_with_the_users_uid(repository: tuple[Path, str], tag: str) -> None:
    """As VS Code does: it gives the image's user the uid of the machine's, and runs a shell in place of the entrypoint.

    https://github.com/devcontainers/cli/blob/main/scripts/updateUID.Dockerfile tests variables that may be unset.
    """
    folder, candidate = repository
    given = json.loads((folder / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert f"{given['image']}-candidate" == candidate
    user = given["remoteUser"]
    update = (
        f'[ -z "$EXISTING" ] && sed -i "s/^{user}:x:1000:1000:/{user}:x:4242:4242:/" /etc/passwd && chown -R 4242 ~'
    )
    made = built(f"FROM {candidate}\nUSER root\nRUN {update}\nUSER {user}\n", f"--tag={tag}")
    assert made.returncode == 0, made.stderr
    folder.chmod(0o777)
    mount = given["workspaceMount"].replace("${localWorkspaceFolder}", str(folder))
    keep = "echo Container started; trap 'exit 0' 15; while sleep 1 & wait $!; do :; done"
    labels = [f"--label={name}={value}" for name, value in resource_labels("test").items()]
    name = call(
        ["docker", "run", "--detach", *labels, f"--mount={mount}", "--entrypoint=/bin/sh", tag, "-c", keep]
    ).stdout
    try:
        # The server is a tar archive with a Node.js, which loads libstdc++: https://code.visualstudio.com/docs/remote/linux
        script = (
            "tar --version | head -1; ldconfig -p | grep -o 'libstdc++.so.6 ' | head -1; touch made ~/.vscode-server; "
            "stat -c %u made; python train.py; bash -lc 'command -v python'"
        )
        words = ["docker", "exec", f"--user={user}", f"--workdir={given['workspaceFolder']}", name.strip(), "sh", "-c"]
        found = call([*words, script])
    finally:
        call(["docker", "rm", "--force", name.strip()])
    interpreter = given["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    lines = found.stdout.splitlines()
    assert lines[0].startswith("tar ") and lines[1:] == ["libstdc++.so.6 ", "4242", "loss 0.5", interpreter], (
        found.stderr
    )


def test_it_trains_without_its_entrypoint_as_apptainer_and_enroot_start_it(
    image: str, docker_run: Run, tmp_path: Path
) -> None:
    """A read-only root, and the HOME, uid and folder of a user, whose own packages stay outside."""
    (line,) = [line for line in SECTION.splitlines() if "apptainer exec" in line]
    assert line.split()[4:] == ["launch", "python", "train.py"]
    for version in range(10, 15):
        packages = tmp_path / f".local/lib/python3.{version}/site-packages"
        packages.mkdir(parents=True)
        (packages / "numpy.py").write_text("raise SystemExit('of the host')\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(
        "import getpass, os, numpy\nprint(getpass.getuser(), os.getuid(), os.getcwd())\n"
    )
    tmp_path.chmod(0o777)
    options = [
        "--read-only",
        "--user=4242:4242",
        "--tmpfs=/tmp",
        f"--volume={tmp_path}:/home/me",
        "--env=HOME=/home/me",
    ]
    options += ["--env=USER=me", "--workdir=/home/me", "--env=LAUNCHER_LOG=quiet", "--entrypoint"]
    found = docker_run(*options, "launch", image, "python", "train.py")
    assert (found.returncode, found.stdout) == (0, "me 4242 /home/me\n"), found.stderr
    trained = docker_run(*options, "launch", image, "mnist", "--fake-data", "--fake-images=640", "--epochs=1")
    assert json.loads(trained.stdout.splitlines()[-1])["status"] == "completed", trained.stderr


def test_compose_reserves_gpus(tmp_path: Path) -> None:
    (text,) = [block for block in BLOCKS if block.startswith("services:")]
    (tmp_path / "compose.yaml").write_text(text, encoding="utf-8")
    check = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    assert check
    found = call([check, "--builtin-schema", "vendor.compose-spec", "compose.yaml"], folder=tmp_path)
    assert found.returncode == 0, found.stdout
    if call(["docker", "compose", "version"]).returncode == 0:
        found = call(["docker", "compose", "config", "--quiet"], folder=tmp_path)
        assert found.returncode == 0, found.stderr
