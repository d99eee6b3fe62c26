"""The smoke test runs a user's own command, here in an image that has Python and the launcher, and no framework."""

from __future__ import annotations

import dataclasses
import io
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import workspaces
from tests.engine import CONTEXT, ENGINE
from trainyard.common.errors import StepFailed, UserError
from trainyard.common.settings import ROOT, state_folder
from trainyard.image import base_image, recipes, smoke_command, smoke_search, smoke_test, workspace_files
from trainyard.image.smoke_failure import HostFiles
from trainyard.recipe import Recipe
from trainyard.release import candidate
from trainyard.spec import model, state
from trainyard.workspace.short_run import ShortRun

pytestmark = pytest.mark.concurrent

Made = tuple[model.Spec, str]

LAUNCHER = """
FROM {system}
COPY launcher /opt/trainyard/launcher
RUN mv /opt/trainyard/launcher/launch /usr/local/bin/launch && chmod 755 /usr/local/bin/launch
ENV PYTHONUNBUFFERED=1 HOME=/home/trainer
LABEL io.trainyard.target=cpu
USER 1000
ENTRYPOINT ["tini", "--", "launch"]
CMD []
"""

CODE = """
FROM {launcher}
ADD files.tar /
WORKDIR /workspace
"""


def build(context: Path | bytes, *arguments: str) -> str:
    """The id of an image that ``docker build`` makes."""
    where, given = (str(context), None) if isinstance(context, Path) else ("-", context)
    command = ["docker", "build", "--quiet", "--provenance=false", *arguments, where]
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def recipe_of(spec: model.Spec) -> Recipe:
    """Return the recipe of a repository, whose lock has no packages but the target's."""
    workspaces.lock(spec)
    return recipes.make(workspaces.render(spec))


def tar_of(files: dict[str, tuple[bytes, int]], *more: str) -> bytes:
    """Files, and ``more`` folders, as the code's layer has them: of uid 1000 and group 0, which may write."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        folders = sorted({str(parent) for name in files for parent in Path(name).parents} - {".", "opt"} | {*more})
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode, entry.uid = tarfile.DIRTYPE, 0o775, 1000
            tar.addfile(entry)
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.uid = len(content), mode, 1000
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="module")
def launcher_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The system packages of every image, and the launcher."""
    base = base_image.resolve(CONTEXT, model.load("cpu").base).reference
    tag = "trainyard-test:smoke-system"
    build(ROOT, f"--file={ROOT}/images/cpu/Dockerfile", "--target=system", f"--build-arg=BASE={base}", f"--tag={tag}")
    dockerfile = tmp_path_factory.mktemp("launcher") / "Dockerfile"
    dockerfile.write_text(LAUNCHER.format(system=tag), encoding="utf-8")
    name = "trainyard-test:smoke-launcher"
    build(ROOT, f"--file={dockerfile}", f"--tag={name}")
    yield name
    for one in (name, tag):
        ENGINE.untag(one)


@pytest.fixture
def make(tmp_path: Path, launcher_image: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Made]]:
    """``make("run: python3 train.py", **{"train.py": "..."})``: a repository, the current folder, and its image."""
    made: list[str] = []

    def write(document: str, left_out: tuple[str, ...] = (), executable: tuple[str, ...] = (), **files: str) -> Made:
        folder = tmp_path / "mine"
        folder.mkdir(exist_ok=True)
        (folder / ".git").mkdir(exist_ok=True)
        (folder / "trainyard.yaml").write_text(f"extends: cpu\n{document}\n", encoding="utf-8")
        code = {}
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
            if name not in left_out:
                code[f"workspace/{name}"] = (text.encode(), 0o775 if name in executable else 0o664)
        monkeypatch.chdir(folder)
        spec = model.load(None)
        code["opt/trainyard/recipe.json"] = (recipe_of(spec).text().encode(), 0o644)
        context = tar_of(
            {
                "Dockerfile": (CODE.format(launcher=launcher_image).encode(), 0o644),
                "files.tar": (tar_of(code, "data"), 0o644),
            }
        )
        tag = f"trainyard-test:smoke-{len(made)}"
        build(context, f"--tag={tag}")
        made.append(tag)
        return spec, tag

    yield write
    for tag in made:
        ENGINE.untag(tag)


def smoked(made: Made, files: HostFiles | None = None) -> dict[str, Any]:
    spec, tag = made
    return smoke_test.smoke(recipe_of(spec), tag, spec.context, files or workspace_files.on_host(spec))


def passes(made: Made) -> dict[str, Any]:
    facts = smoked(made)
    recorded = state.recall(state_folder() / made[0].target, "smoke", facts["digest"])
    assert recorded is not None and recorded["passed"] and recorded["level"] == facts["level"]
    return facts


def fails(made: Made, files: HostFiles | None = None) -> str:
    with pytest.raises(StepFailed) as found:
        smoked(made, files)
    return str(found.value)


def test_a_command_with_help_is_started(make: Callable[..., Made]) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()\nraise SystemExit('not reached')\n"
    facts = passes(make("run: python3 train.py", **{"train.py": text}))
    assert (facts["level"], facts["notes"]) == ("started", [])


def test_a_command_that_ignores_help_is_ended(make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_command, "HELP_SECONDS", 3)
    facts = passes(make("run: python3 train.py", **{"train.py": "import time\ntime.sleep(100)\n"}))
    assert facts["level"] == "started"
    assert [note.rpartition(" after ")[0] for note in facts["notes"]] == ["it ignores --help and was ended"]


def package(code: str) -> dict[str, str]:
    """A repository whose program imports a framework, which has this code, from a folder of packages."""
    return {"train.py": "import sys\n\nsys.path.append('lib/python3/site-packages')\nimport slow\n"
            "while True:\n    pass\n", "lib/python3/site-packages/slow.py": code}  # fmt: skip


ADDED = "Trainyard added --help, as trainyard.yaml has no smoke: write 'smoke: {args: [...], expect: loss}' there"


def test_the_time_in_which_a_command_imports_does_not_count(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher, the interpreter and the imports take as long as they take; the clock is that of its own code."""
    monkeypatch.setattr(smoke_command, "HELP_SECONDS", 2)
    facts = passes(
        make("run: bash train.sh", **{"train.sh": "python3 train.py", **package("import time; time.sleep(5)")})
    )
    (note,) = facts["notes"]
    assert note.startswith("it ignores --help and was ended after ") and int(note.split()[-2]) >= 7
    line = fails(make("run: python3 train.py", **package("import time; time.sleep(0)\nraise ValueError('--help')\n")))
    assert line == f"lib/python3/site-packages/slow.py:2: ValueError: --help: {ADDED}, with arguments for a short run"


def test_a_command_that_still_imports_has_not_started(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_command, "IMPORT_SECONDS", 10)
    line = fails(make("run: python3 train.py", **package("import time; time.sleep(90)")))
    where = "trainyard.yaml:2: run: still importing at /workspace/train.py:4 after 10 s"
    assert line == f"{where}: {ADDED}, with arguments for a short run"


def test_a_program_without_python_that_ignores_help_is_ended_later(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke_command, "HELP_SECONDS", 1)
    (note,) = passes(make("run: bash train.sh", **{"train.sh": "sleep 90\n"}))["notes"]
    assert note.startswith("it ignores --help and was ended after ") and int(note.split()[-2]) >= 3


def test_a_command_that_takes_help_for_a_value_is_told_what_was_added(make: Callable[..., Made]) -> None:
    text = "import sys\nfor word in sys.argv[1:]:\n    assert '=' in word, word\n"
    line = fails(make("run: python3 train.py", **{"train.py": text}))
    assert line == f"train.py:3: AssertionError: --help: {ADDED}, with arguments for a short run"


def test_a_command_that_refuses_help_has_started(make: Callable[..., Made]) -> None:
    text = "import argparse\nargparse.ArgumentParser(add_help=False).parse_args()\n"
    facts = passes(make("run: python3 train.py", **{"train.py": text}))
    assert facts["notes"] == ["it has no --help (exit status 2)"]


MISSING = "ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("run", "files", "line"),
    [
        (
            "python3 -m model.train",
            {"model/train.py": "from model import data\n", "model/data.py": "\nimport einops\n"},
            f"model/data.py:2: {MISSING} 'einops': add it to requirements in trainyard.yaml",
        ),
        (
            "python3 trian.py",
            {"train.py": ""},
            "trainyard.yaml:2: run: no file trian.py in the image",
        ),
        (
            "./trian.sh",
            {"train.sh": "#!/bin/sh\n"},
            "trainyard.yaml:2: run: no file ./trian.sh in the image",
        ),
        (
            "./train.sh",
            {"train.sh": "#!/bin/sh\n"},
            "trainyard.yaml:2: run: train.sh is not executable: run 'chmod +x train.sh'",
        ),
        (
            "python3 -m modle.train",
            {"model/train.py": ""},
            "trainyard.yaml:2: run: no module 'modle.train' in the image (did you mean 'model.train'?)",
        ),
        (
            "pyhton3 train.py",
            {"train.py": ""},
            "trainyard.yaml:2: run: no command 'pyhton3' in the image (did you mean 'python3'?)",
        ),
        ("python3 train.py", {"train.py": "\ndef f(:\n"}, "train.py:2: SyntaxError: invalid syntax"),
    ],
)
def test_a_command_that_cannot_start_is_refused_with_the_line_of_the_file(
    make: Callable[..., Made], run: str, files: dict[str, str], line: str
) -> None:
    made = make(f"run: {run}", **files)
    assert fails(made) == line
    assert state.recall(state_folder() / "mine", "smoke", ENGINE.digest(made[1])) is None


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("#!/usr/bin/python2\n", "train.sh:1: the image has no interpreter '/usr/bin/python2'"),
        ("#!/usr/bin/env python2\n", "train.sh:1: the image has no interpreter 'python2'"),
        ("echo\n", "train.sh:1: the file has no #! line"),
        ("#!/bin/bash\n\nfoo\n", "train.sh:3: foo: command not found"),
    ],
)
def test_a_script_that_cannot_start_is_refused_with_its_line(make: Callable[..., Made], first: str, line: str) -> None:
    assert fails(make("run: ./train.sh", executable=("train.sh",), **{"train.sh": first})).startswith(line)


RUN = """
import os, pathlib, sys
assert os.getuid() == 54321 and os.getgid() == 0
assert os.environ["HF_HUB_OFFLINE"] == "1"
pathlib.Path("made").write_text("x")
pathlib.Path("/tmp/made").write_text("x")
pathlib.Path("/output/made").write_text("x")
pathlib.Path.home().joinpath("made").write_text("x")
print("data", pathlib.Path("/data/deep/x.txt").read_text(), sys.argv[1:])
try:
    pathlib.Path("/data/y").write_text("x")
except OSError:
    print("loss: 0.5")
"""


def test_a_run_has_the_folders_and_users_of_a_cluster(make: Callable[..., Made]) -> None:
    document = "run: python3 train.py\nsmoke: {args: --epochs=1, data: tests/data, expect: 'loss: [0-9.]+'}"
    files = {"train.py": RUN, "tests/data/deep/x.txt": "read"}
    facts = passes(make(document, ("tests/data/deep/x.txt",), **files))
    assert (facts["level"], facts["notes"]) == ("trained", [])


def test_an_argument_that_looks_like_a_command_is_an_argument(make: Callable[..., Made]) -> None:
    text = "import sys\nassert sys.argv[1:] == ['/bin/true', '--force'], sys.argv\n"
    assert passes(make("run: python3 train.py\nsmoke: {args: /bin/true --force}", **{"train.py": text}))
    text = "import sys\nassert sys.argv[1:] == ['--help'], sys.argv\nprint('own')\n"
    assert passes(make("run: python3 train.py\nsmoke: {args: --help, expect: own}", **{"train.py": text}))


def test_a_command_may_write_beside_its_own_folder(make: Callable[..., Made]) -> None:
    """PyTorch's examples download to ../data, which is /data; with smoke.data there, the message says so."""
    text = "import os\nos.makedirs('../data/MNIST/raw')\nopen('../data/MNIST/raw/x', 'w').write('x')\n"
    facts = passes(make("run: python3 train.py\nsmoke: {}", **{"train.py": text}))
    assert (facts["level"], facts["notes"]) == ("ran", [])
    line = fails(make("run: python3 train.py\nsmoke: {data: tests}", **{"train.py": text, "tests/x": ""}))
    assert line.endswith("'../data/MNIST': /data is mounted read-only: write to /workspace or /tmp")


def test_writes_elsewhere_are_a_note(make: Callable[..., Made]) -> None:
    text = "import pathlib\npathlib.Path('/var/tmp/cache').mkdir()\npathlib.Path('/var/tmp/cache/x').touch()\n"
    facts = passes(make("run: python3 train.py\nsmoke: {}", **{"train.py": text}))
    assert facts["level"] == "ran"
    assert [note.split(",")[0] for note in facts["notes"]] == ["wrote /var/tmp/cache/x"]


def test_a_run_that_prints_nothing_expected_is_refused(make: Callable[..., Made]) -> None:
    line = fails(make("run: python3 train.py\nsmoke:\n  expect: 'loss'", **{"train.py": "print('done')\n"}))
    assert line == "trainyard.yaml:4: smoke.expect: no line of the output matches 'loss'; the last is: done"


def test_a_run_that_takes_too_long_is_refused(make: Callable[..., Made]) -> None:
    document = "run: python3 train.py\nsmoke: {timeout: 2}"
    assert "smoke.timeout: still running after 2 s" in fails(
        make(document, **{"train.py": "import time\ntime.sleep(90)\n"})
    )


def test_a_service_passes_if_it_is_alive(make: Callable[..., Made]) -> None:
    text = "import time\nprint('ready')\ntime.sleep(90)\n"
    facts = passes(make("run: python3 train.py\nsmoke: {for: 8, expect: ready}", **{"train.py": text}))
    assert facts["level"] == "trained"


ASKS = """
import socket, sys
try:
    socket.create_connection(("huggingface.co", 443))
except OSError:
    {then}
"""


def test_a_run_that_asked_a_host_says_which(make: Callable[..., Made]) -> None:
    line = fails(make("run: python3 train.py\nsmoke: {}", **{"train.py": ASKS.format(then="raise")}))
    assert line.startswith("train.py:4: socket.gaierror: ")
    assert "asked for huggingface.co, which a smoke test cannot reach: give the files as smoke.data" in line


def test_a_run_that_goes_on_without_a_host_passes_with_a_note(make: Callable[..., Made]) -> None:
    facts = passes(make("run: python3 train.py\nsmoke: {}", **{"train.py": ASKS.format(then="pass")}))
    assert facts["notes"] == ["asked for huggingface.co, which a smoke test cannot reach, and went on without it"]


#: Connecting a datagram socket sends nothing: it needs a route to the address (RFC 5737), and no host there.
CONNECTS = """
import os, socket
one = socket.socket(type=socket.SOCK_DGRAM)
one.connect(("198.51.100.1", 9))
print("HF_HUB_OFFLINE" in os.environ, os.environ["WANDB_MODE"])
"""


def test_a_network_is_for_a_repository_that_this_host_allows_it(make: Callable[..., Made]) -> None:
    made, tag = make("run: python3 train.py\nsmoke: {expect: False offline}", **{"train.py": CONNECTS})
    refused = "and read them from /data, or give '--smoke-network'"
    assert fails((made, tag)).endswith(refused)

    def told(said: bool | None) -> Made:
        return made.model_copy(update={"context": dataclasses.replace(made.context, smoke_network=said)}), tag

    for said in (True, None):
        assert passes(told(said))["notes"] == ["ran with a network, as --smoke-network allows on this host"]
    stranger = HostFiles(Path(shutil.copy(made.folder / "trainyard.yaml", made.folder.parent)))  # of the same name
    assert fails((made, tag), stranger).endswith(refused)
    for said in (False, None):
        assert fails(told(said)).endswith(refused)


def test_the_users_own_sitecustomize_runs_too(make: Callable[..., Made]) -> None:
    document = "run: env PYTHONPATH=/smoke/observer:/workspace python3 -c 'import builtins; builtins.MINE'\nsmoke: {}"
    assert passes(make(document, **{"sitecustomize.py": "import builtins\nbuiltins.MINE = 1\n"}))


RESUMES = """
import os, pathlib, signal, sys, time
saved = pathlib.Path("/output/step")
step = int(saved.read_text()) if saved.exists() and {read} else 0
def stop(*_):
    {save}
    sys.exit({status})
signal.signal(signal.SIGTERM, stop)
while step < 20:
    step += 1
    print("step", step)
    time.sleep(0.2)
"""
SAVE = "temporary = saved.with_suffix('.new'); temporary.write_text(str(step)); os.replace(temporary, saved)"


def resumes(make: Callable[..., Made], read: str = "True", save: str = SAVE, status: int = 143) -> Made:
    text = RESUMES.format(read=read, save=save, status=status)
    return make("run: python3 train.py\nsmoke: {resume: true}", **{"train.py": text})


def test_a_command_that_stops_and_continues_passes(make: Callable[..., Made]) -> None:
    facts = passes(resumes(make))
    assert (facts["level"], facts["continued_from"]) == ("trained", "/output/step")
    assert facts["restricted"] and not facts["notes"]


@pytest.mark.parametrize(
    ("needs", "error"),
    [
        ("open('/dev/shm/block', 'wb').write(bytes(100 << 20))", "OSError: [Errno 28] No space left on device"),
        pytest.param(
            "socket.create_server(('::1', 0), family=socket.AF_INET6)",
            "OSError: [Errno 99]",
            marks=pytest.mark.slow("with /dev/shm"),
        ),
    ],
)
def test_what_fails_in_a_restricted_container_alone_is_a_note(
    make: Callable[..., Made], needs: str, error: str
) -> None:
    text = f"import socket\n{needs}\n" + RESUMES.format(read="True", save=SAVE, status=143)
    facts = passes(make("run: python3 train.py\nsmoke: {resume: true}", **{"train.py": text}))
    assert facts["continued_from"] == "/output/step" and "restricted" not in facts
    (note,) = facts["notes"]
    assert note.startswith("failed in a container with uid 54321 of group 0, 64 MB of /dev/shm, no IPv6: train.py:2: ")
    assert error in note


def test_a_command_that_starts_over_is_refused(make: Callable[..., Made]) -> None:
    assert "smoke.resume: started over: it read none of the files" in fails(resumes(make, read="False"))


def test_a_command_that_saves_nothing_is_refused(make: Callable[..., Made]) -> None:
    assert "smoke.resume: the stopped run left no file" in fails(resumes(make, save="pass"))


def test_a_command_that_ends_with_0_at_sigterm_is_refused(make: Callable[..., Made]) -> None:
    assert "smoke.resume: exit status 0 after SIGTERM where 143 was expected" in fails(resumes(make, status=0))


OWN = """
FROM {launcher}
ADD files.tar /
WORKDIR /app
CMD {command}
"""


@pytest.fixture
def own_dockerfile(launcher_image: str, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """``own_dockerfile('["python3", "train.py"]', "print()")``: an image that the user's own Dockerfile made."""
    tag = "trainyard-test:smoke-own"

    def write(command: str, text: str, more: str = "", launcher: str = launcher_image) -> str:
        commands = {"commands": {"mnist": ("python3", "/app/train.py")}, "default": "mnist"}
        document = recipes.make(model.load("cpu")).model_copy(update=commands).text()
        files = {
            "opt/trainyard/recipe.json": (document.encode(), 0o644),
            "app/train.py": (text.encode(), 0o664),
        }
        dockerfile = OWN.format(launcher=launcher, command=command) + more
        build(tar_of({"Dockerfile": (dockerfile.encode(), 0o644), "files.tar": (tar_of(files), 0o644)}), f"--tag={tag}")
        return tag

    yield write
    ENGINE.untag(tag)


def subject_of(tag: str, spec: model.Spec | None = None) -> smoke_command.Subject:
    image = ENGINE.client.images.get(tag)
    repository = None
    if spec and (files := workspace_files.on_host(spec)):
        repository = candidate.Repository(spec.target, files, tuple(spec.run or ()), recipes.command_test(spec))
    return candidate.subject(ENGINE, image, tag, repository)


def test_an_image_of_the_users_own_dockerfile_is_started_with_its_command(own_dockerfile: Callable[..., str]) -> None:
    text = "import sys\nassert sys.argv[1:] == ['--help'], sys.argv\n"
    facts = smoke_command.check(ENGINE, subject_of(own_dockerfile('["python3", "train.py"]', text)))
    assert (facts["level"], facts["command"]) == ("started", ["python3", "train.py"])
    facts = smoke_command.check(ENGINE, subject_of(own_dockerfile("[]", text)))
    assert facts["command"] == ["python3", "/app/train.py"], "the default trainer of the image"


def test_an_image_of_the_users_own_dockerfile_is_run_as_trainyard_yaml_says(
    own_dockerfile: Callable[..., str], make: Callable[..., Made]
) -> None:
    spec, _ = make("run: python3 train.py\nsmoke: {args: --epochs=1, expect: loss}", **{"train.py": "\n\nimport x\n"})
    tag = own_dockerfile("[]", "import sys\nprint('loss', sys.argv[1:])\nassert sys.argv[1:] == ['--epochs=1']\n")
    assert smoke_command.check(ENGINE, subject_of(tag, spec))["level"] == "trained"
    tag = own_dockerfile("[]", "\n\nimport x\n")
    with pytest.raises(StepFailed, match=f"^train.py:3: {MISSING} 'x'"):
        smoke_command.check(ENGINE, subject_of(tag, spec))


def test_an_image_without_the_launcher_is_not_one_of_trainyards(own_dockerfile: Callable[..., str]) -> None:
    base = base_image.resolve(CONTEXT, "debian-12").reference
    with pytest.raises(UserError, match="is not made from an image of Trainyard: begin the Dockerfile with 'FROM"):
        subject_of(own_dockerfile("[]", "", launcher=base))
    with pytest.raises(UserError, match=r"its ENTRYPOINT python3 train\.py does not start the launcher"):
        subject_of(own_dockerfile("[]", "", 'ENTRYPOINT ["python3", "train.py"]\n'))


#: Trains for --epochs, on a GPU by default, and requires an output folder.
TRAINS = """
import argparse, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda")
parser.add_argument("--epochs", type=int, default=10**6)
parser.add_argument("--work", required=True)
args = parser.parse_args()
if args.device == "cuda":
    raise RuntimeError("Found no NVIDIA driver on your system.")
open(f"{args.work}/weights", "w").close()
for epoch in range(args.epochs):
    time.sleep(0.01)
    print(f"epoch {epoch} loss: {1 / (1 + epoch):.3f}")
"""


def test_the_smoke_test_is_found_and_written(make: Callable[..., Made]) -> None:
    spec, image = make("run: python3 train.py", **{"train.py": TRAINS})
    subprocess.run(["git", "init", "--quiet"], check=True)
    recipe = recipe_of(spec)
    ENGINE.image(image, made_by="").tag(*recipe.candidate.split(":"))
    files = workspace_files.on_host(spec)
    assert smoke_search.found(spec, files, recipe)
    again = model.load(str(spec.folder))
    smoke = again.workspace.document.smoke
    assert smoke and (smoke.args, smoke.seconds) == (["--epochs=1", "--work=/output", "--device=cpu"], None)
    assert again.workspace.level == "trained"
    assert not smoke_search.found(again, files, recipe), "what is written is the user's"


def test_an_image_that_was_only_started_is_searched_again_with_the_data_that_are_given(
    make: Callable[..., Made], tmp_path: Path
) -> None:
    text = "import os\nos.listdir('/data')\nprint('loss 0.5')\n"
    spec, image = make("run: python3 train.py", **{"train.py": text})
    subprocess.run(["git", "init", "--quiet"], check=True)
    recipe = recipe_of(spec)
    ENGINE.image(image, made_by="").tag(*recipe.candidate.split(":"))
    assert not smoke_search.found(spec, workspace_files.on_host(spec), recipe, True)
    (tmp_path / "own").mkdir()
    context = dataclasses.replace(spec.context, data=tmp_path / "own")
    given = model.load(str(spec.folder), context=context)
    assert smoke_search.found(given, workspace_files.on_host(given), recipe, True)


@pytest.mark.parametrize(
    ("text", "shortened", "said"),
    [
        ("while True: print('loss 0.5', flush=True); time.sleep(0.2)", True, "and was ended"),
        ("while True: pass", True, "and was ended"),
        ("time.sleep(999)", False, "neither used a CPU nor printed anything"),
        ("open('flowers/1.jpg')", False, "'flowers/1.jpg'"),
        ("import einops", False, "add it to requirements"),
    ],
)
def test_a_run_that_goes_on_is_shortened_if_it_works(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, text: str, shortened: bool, said: str
) -> None:
    monkeypatch.setattr(smoke_search, "WATCHED", 3)
    spec, image = make("run: python3 train.py", **{"train.py": f"import time\n{text}\n"})
    subject = smoke_command.Subject(image, ("python3", "train.py"), files=workspace_files.on_host(spec))
    subject = dataclasses.replace(subject, start=("--", *subject.command))
    smoke, told, late = smoke_search.search(ENGINE, subject, ShortRun())
    assert (bool(smoke), smoke.get("for", 0) > 0) == (shortened, shortened)
    assert said in told and not late
    assert ("expect" in smoke) == ("loss" in text)


#: Trains for --epochs, and fails when it is done.
FAILS_AT_ITS_END = """
import argparse, time
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10**6)
for epoch in range(parser.parse_args().epochs):
    time.sleep(0.2)
    print(f"epoch {epoch} loss: 0.5", flush=True)
raise ValueError("weights only load failed")
"""


def test_a_failure_after_the_training_is_told_with_the_smoke_test_that_does_not_reach_it(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(smoke_search, "WATCHED", 3)
    spec, image = make("run: python3 train.py", **{"train.py": FAILS_AT_ITS_END})
    subprocess.run(["git", "init", "--quiet"], check=True)
    recipe = recipe_of(spec)
    ENGINE.image(image, made_by="").tag(*recipe.candidate.split(":"))
    assert smoke_search.found(spec, workspace_files.on_host(spec), recipe)
    said = "'python3 train.py --epochs=1' trained, and failed: train.py:8: ValueError: weights only load failed"
    assert f"the smoke test ends before the program does: {said}" in caplog.text
