"""Test which arguments ``trainyard image`` tries for a short run, and how errors correct them."""

from __future__ import annotations

import re
import subprocess
import textwrap
from pathlib import Path

import pytest

from trainyard.image import smoke_search
from trainyard.spec import model
from trainyard.spec.workspace import Workspace, WorkspaceDocument
from trainyard.spec.yaml_source import plain, read
from trainyard.workspace import short_run
from trainyard.workspace.python_survey import Sources, files
from trainyard.workspace.short_run import ShortRun

#: Programs that train, each with the parser of another library, and the arguments of the first run.
PROGRAMS = {
    "argparse": ("parser.add_argument('--num_epochs', type=int)", ["--num_epochs=1"]),
    "click": ("@click.command()\n@click.option('--epochs', default=9)\ndef main(epochs): pass", ["--epochs=1"]),
    "absl": ("flags.DEFINE_integer('max_steps', 100, 'steps')", ["--max_steps=2"]),
    "tyro": ("@dataclass\nclass Config:\n    max_steps: int = 9\n\ntyro.cli(Config)", ["--max-steps=2"]),
    "a dataclass in another": (
        "class Loop:\n    epochs: int = 9\n\nclass Config:\n    loop: Loop = Loop()\n\ntyro.cli(Config)",
        ["--loop.epochs=1"],
    ),
    "Hugging Face": ("transformers.HfArgumentParser((Mine, TrainingArguments))", ["--max_steps=2"]),
    "Fire": ("def main(num_epochs=9, lr=0.1): pass\n\nfire.Fire(main)", ["--num_epochs=1"]),
    "typer": ("@app.command()\ndef main(epochs: int = typer.Option(9)): pass", ["--epochs=1"]),
    "a configurator": ("max_iters = 9\nexec(open('configurator.py').read())", ["--max_iters=2"]),
    "made-up data": ("p.add_argument('--epochs')\np.add_argument('--fake-data', action='store_true')",
                     ["--epochs=1", "--fake-data"]),
    "what is required": ("p.add_argument('--epochs')\np.add_argument('--work-dir', required=True)\n"
                         "p.add_argument('name')\np.add_argument('--kind', required=True, choices=['a', 'b'])",
                         ["--epochs=1", "--work-dir=/output", "--kind=a", "smoke"]),
    "no limit": ("p.add_argument('--lr')", []),
}  # fmt: skip


def proposed(folder: Path, text: str, command: str = "python train.py", **more: str) -> ShortRun:
    for name, content in {"train.py": text, **more}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    names = files(folder)
    sources = Sources({name: folder / name for name in names})
    words = command.split()
    documents = short_run.documents(folder, names).values()
    return short_run.propose(words, short_run.program_of(words, sources, {}), sources, names, documents)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_the_parser_tells_a_short_run(tmp_path: Path, kind: str) -> None:
    text, args = PROGRAMS[kind]
    assert list(proposed(tmp_path, text).words) == args


def test_hydras_files_tell_a_short_run(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    run = proposed(
        tmp_path,
        "@hydra.main(version_base='1.3', config_path='configs', config_name='train.yaml')\ndef main(cfg): pass\n",
        **{
            "configs/train.yaml": "defaults:\n  - _self_\n  - trainer: default\nseed: 1\n",
            "configs/trainer/default.yaml": "max_epochs: 10\naccelerator: auto\n",
        },
    )
    assert run.words == ("trainer.max_epochs=1",)
    run.seen.append(run.words)
    assert run.correct("RuntimeError: No CUDA GPUs are available", "no GPU") == ""
    assert run.words == ("trainer.max_epochs=1", "trainer.accelerator=cpu")


def test_files_outside_of_the_repository_are_not_hydras(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "own"], check=True)
    (tmp_path / "train.yaml").write_text("epochs: 1\n", encoding="utf-8")
    text = "@hydra.main(config_path='..', config_name='train')\ndef main(cfg): pass\n"
    assert proposed(tmp_path / "own", text).words == ()


@pytest.mark.parametrize("inner", ["range(0, args.num_steps)", "tqdm(range(args.num_steps))", "trange(num_steps)"])
def test_steps_of_a_loop_inside_another_loop_limit_no_run(tmp_path: Path, inner: str) -> None:
    text = (
        f"p.add_argument('--num-steps')\nfor update in range(9):\n    for step in {inner}:\n        loss.backward()\n"
    )
    assert proposed(tmp_path, text).words == ()


def test_options_of_the_command_are_left_alone(tmp_path: Path) -> None:
    text = "p.add_argument('--epochs')\np.add_argument('--config', required=True)\n"
    assert proposed(tmp_path, text, "python train.py --config=a.yaml --epochs 3").words == ()


def test_data_of_the_tests_is_taken(tmp_path: Path) -> None:
    run = proposed(tmp_path, "p.add_argument('--data-dir')", **{"tests/data/a.txt": "1\n"})
    assert (run.words, run.data) == (("--data-dir=/data",), "tests/data")


@pytest.mark.parametrize(
    ("option", "readme", "words"),
    [
        ("'--data', default=ROOT / 'data/coco.yaml'", "", ()),
        ("'--data', help='path of dataset.yaml'", "", ()),
        ("'--data'", "python train.py --data coco.yaml", ()),
        ("'--data', required=True", "python train.py --data ./data/own.yaml", ("--data=data/own.yaml",)),
        ("'--data-dir', help='folder with meta.json'", "", ("--data-dir=/data",)),
        ("'--archive', default='../corpus_data'", "", ("--archive=/data",)),
        ("'--archive', default=os.path.join('..', 'data')", "", ("--archive=/data",)),
        ("'--save-dir', default='../data/out'", "", ()),
    ],
)
def test_an_option_that_takes_a_file_is_given_no_folder_and_one_that_leaves_the_repository_is_given_the_data(
    tmp_path: Path, option: str, readme: str, words: tuple[str, ...]
) -> None:
    files = {"README.md": readme, "data/own.yaml": "x: 1\n", "tests/data/a.txt": "1\n"}
    run = proposed(tmp_path, f"p.add_argument({option})", **files)
    assert run.words == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("path: ../datasets/coco\n", "a.yaml:1: from the working directory of the image ../datasets is /data, for 'tr"),
        ("path: ../../datasets\nfile: ../data.yaml\n", ""),
        ("# os.path.join(os.path.dirname(__file__), '../data')\n", ""),
    ],
)
def test_a_folder_beside_the_repository_that_is_the_data_is_said(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    workspace = Workspace(tmp_path / "trainyard.yaml", WorkspaceDocument(extends="cpu"))
    line = smoke_search.outside(workspace)
    assert said in line and bool(said) == bool(line)


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("python ./train.py", "train.py"),
        ("torchrun --nproc-per-node=2 train.py", "train.py"),
        ("python -m pack.fit", "pack/fit.py"),
        ("python -m pack", "pack/__main__.py"),
        ("fit --x", "pack/fit.py"),
        ("bash train.sh", ""),
    ],
)
def test_the_program_of_a_command(tmp_path: Path, command: str, path: str) -> None:
    names = ["train.py", "pack/__init__.py", "pack/__main__.py", "pack/fit.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    sources = Sources({name: tmp_path / name for name in names})
    assert short_run.program_of(command.split(), sources, {"fit": "pack.fit:main"}) == path


OPTIONS = "\n".join(
    f"p.add_argument('--{name}')" for name in ("epochs", "device", "batch-size", "data-dir", "output_dir", "report_to")
)


@pytest.mark.parametrize(
    ("error", "hosts", "words"),
    [
        ("train.py: error: unrecognized arguments: --epochs=1", (), []),
        ("Error: No such option: --epochs", (), []),
        ("ERROR: Could not consume arg: --epochs=1", (), []),
        ("train.py: error: the following arguments are required: --output_dir", (), ["--epochs=1",
                                                                                      "--output_dir=/output"]),
        ("Error: Missing option '--name'.", (), ["--epochs=1", "--name=smoke"]),
        ("flag --workdir=None: Flag --workdir must have a value other than None.", (), ["--epochs=1",
                                                                                        "--workdir=/output"]),
        ("RuntimeError: Found no NVIDIA driver on your system.", (), ["--epochs=1", "--device=cpu"]),
        ("AssertionError: Torch not compiled with CUDA enabled", (), ["--epochs=1", "--device=cpu"]),
        ("AssertionError: CUDA is not available but cuda was specified.", (), ["--epochs=1", "--device=cpu"]),
        ("ValueError: GPU unavailable", (), ["--epochs=1", "--device=cpu"]),
        ("requests.exceptions.ConnectionError: x", ("api.wandb.ai",), ["--epochs=1", "--report_to=none"]),
        ("PermissionError: [Errno 13] Permission denied: '/x'", (), ["--epochs=1", "--output_dir=/output"]),
        ("ZeroDivisionError: integer division or modulo by zero", (), []),
    ],
)  # fmt: skip
def test_the_next_run_is_corrected_by_what_the_last_one_met(
    tmp_path: Path, error: str, hosts: tuple[str, ...], words: list[str]
) -> None:
    run = proposed(tmp_path, OPTIONS)
    run.seen.append(run.words)
    assert run.correct(error, "why", hosts) == ""
    assert list(run.words) == words


@pytest.mark.parametrize(
    ("error", "missing"),
    [
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x'", "why (or 'trainyard image --data FOLDER')"),
        ("ModuleNotFoundError: No module named 'einops'", "why"),
        ("train.py: error: the following arguments are required: --teacher", "it needs a value for --teacher"),
        ("train.py: error: the following arguments are required: --clean_images",
         "it needs a value for --clean_images and a folder for it: 'trainyard image --data FOLDER' (it gets "
         "FOLDER/clean-images if there is one)"),
        ("train.py: error: the following arguments are required: --data_dir",
         "it needs a value for --data_dir and a folder for it: 'trainyard image --data FOLDER'"),
    ],
)  # fmt: skip
def test_what_no_argument_changes_is_said(tmp_path: Path, error: str, missing: str) -> None:
    run = proposed(tmp_path, OPTIONS)
    run.seen.append(run.words)
    assert run.correct(error, "why") == missing


def test_data_that_is_given_is_read_when_it_is_missed(tmp_path: Path) -> None:
    run = proposed(tmp_path, "p.add_argument('--corpus', required=True)")
    assert run.words == ()
    run.mounted = True
    assert run.correct("error: the following arguments are required: --corpus", "why") == ""
    assert run.words == ("--corpus=/data",)


def test_a_required_folder_is_the_one_of_its_name_in_the_data(tmp_path: Path) -> None:
    required = ("--clean_dir", "--noisy-dir", "--images")
    text = "\n".join(f"p.add_argument('{name}', required=True)" for name in required)
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    data = tmp_path / "recordings"
    for name in ("clean", "noisy_dir", "other"):
        (data / name).mkdir(parents=True)
    sources = Sources({"train.py": tmp_path / "train.py"})
    run = short_run.propose(["python", "train.py"], "train.py", sources, ["train.py"], mounted=str(data))
    assert run.words == ("--clean_dir=/data/clean", "--noisy-dir=/data/noisy_dir", "--images=/data")


def test_data_that_is_given_is_read_by_name_if_its_folder_is_fixed(tmp_path: Path) -> None:
    run = proposed(tmp_path, "p.add_argument('--dataset', default='openwebtext')")
    run.mounted = True
    run.seen.append(run.words)
    missed = "FileNotFoundError: [Errno 2] No such file or directory: 'data/openwebtext/train.bin'"
    assert run.correct(missed, "why") == ""
    assert run.words == ("--dataset=/data",)


def test_a_batch_that_is_larger_than_the_data_is_made_smaller_before_the_run_is_longer(tmp_path: Path) -> None:
    run = proposed(tmp_path, OPTIONS)
    run.mounted = True
    for words in (["--batch-size=2", "--epochs=1"], ["--batch-size=2"]):
        run.seen.append(run.words)
        assert run.correct("UnboundLocalError: cannot access local variable 'input'", "why") == ""
        assert sorted(run.words) == words


def test_no_arguments_are_tried_twice(tmp_path: Path) -> None:
    run = proposed(tmp_path, OPTIONS)
    for _ in range(2):
        run.seen.append(run.words)
        missing = run.correct("RuntimeError: Found no NVIDIA driver", "why")
    assert missing == "it needs a GPU: why"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("epoch 1 train loss 4.2, val loss 3", True),
        ("{'loss': 2.1}", True),
        ("Train_Loss: -0.3", True),
        ("loss: nan", False),
        ("no loss yet", False),
    ],
)
def test_a_loss_is_a_number(line: str, shown: bool) -> None:
    assert bool(re.search(short_run.LOSS, line)) is shown


def test_what_passed_is_written_below_what_is_there(tmp_path: Path) -> None:
    text = textwrap.dedent("""\
        extends: tf-cpu  # as ours
        run: python train.py
        # To write it yourself:
        # smoke: {args: [--epochs=1], data: tests/data, expect: loss}
        """)
    (tmp_path / ".git").mkdir()
    (tmp_path / "trainyard.yaml").write_text(text, encoding="utf-8")
    spec = model.load(str(tmp_path))
    smoke = {"args": ["--epochs=1", "x=a b"], "for": 40, "expect": short_run.LOSS}
    smoke_search.write(spec, smoke)
    written = (tmp_path / "trainyard.yaml").read_text(encoding="utf-8")
    assert written.startswith("extends: tf-cpu  # as ours\nrun: python train.py\n# To write it yourself:\nsmoke:\n")
    assert plain(read(tmp_path / "trainyard.yaml"))["smoke"] == smoke
    assert model.load(str(tmp_path)).workspace.level == "trained"
