"""Test the trainers' command lines: both spellings, the YAML file, environment variables, and one line for an error."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from trainers.common import imagenet_data
from trainers.common.arguments import Parser, add, classification

ROOT = Path(__file__).resolve().parents[3]
TRAINERS = sorted(f"{path.parent.name}.{path.stem}" for path in ROOT.glob("trainers/[!c]*/[a-z]*.py"))


def parse(*words: str) -> argparse.Namespace:
    parser = Parser("mnist", "about")
    add(parser.learning, "--sizes", "128", "image sizes")
    return classification(parser, words, sgd=0.03, adamw=0.003)


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


@pytest.fixture(autouse=True)
def no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AIP_CHECKPOINT_DIR", "AIP_MODEL_DIR", "AIP_TENSORBOARD_LOG_DIR", "CLOUD_ML_HP_METRIC_TAG"):
        monkeypatch.delenv(name, raising=False)


def test_dashes_and_underscores_are_equivalent_and_a_value_keeps_its_own() -> None:
    assert parse("--batch_size=7", "--num_epochs", "3") == parse("--batch-size", "7", "--epochs=3")
    assert parse("--datadir=my_data").datadir == "my_data"


def test_a_file_url_is_a_local_path() -> None:
    args = parse("--output-dir=file:///tmp/x", "--checkpoint-dir", "file:///y")
    assert (args.output_dir, args.checkpoint_dir) == ("/tmp/x", "/y")


def test_pytorch_xlas_names_work() -> None:
    words = "--datadir d --logdir l --batch_size 1 --num_epochs 2 --num_steps 3 --log_steps 4 --lr 0.1 --momentum 0.5"
    args = parse(*words.split(), "--target_accuracy", "98", "--fake_data", "--test_set_batch_size=9")
    assert (args.logdir, args.num_steps, args.target_accuracy, args.fake_data) == ("l", 3, 98.0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epohcs", "3"], "unknown flag --epohcs, did you mean --epochs?"),
        (["--lr", "fast"], "--lr: 'fast' is not a number above 0"),
        (["--lr", "nan"], "--lr: 'nan' is not a number above 0"),
        (["--target-accuracy", "101"], "'101' is not a number of at least 0 and at most 100"),
        (["--batch_size", "0"], "--batch-size: '0' is not an integer of at least 1"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8' (choose from "),
        (["--batch-size"], "--batch-size: expected one argument"),
        (["--seed", str(2**64)], f"--seed: '{2**64}' is not an integer of at least 0 and at most {2**32 - 1}"),
        (["--lr", "1e39"], "--lr: '1e39' is not a number above 0 and at most 3.4e+38"),
        (["--output-dir", "file://x/y"], "--output-dir: file://x/y has no path after its host: write x/y, or file:///"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["--eval-only"], "--eval-only: needs --checkpoint-dir"),
        (["--keep-best"], "--keep-best: needs --checkpoint-dir"),
        (["--eval-only", "--checkpoint-dir=c", "--no-resume"], "--eval-only: tests a checkpoint"),
    ],
)
def test_an_invalid_option_is_a_one_line_error_with_what_is_allowed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *words)


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_CHECKPOINT_DIR", "from-env")
    monkeypatch.setenv("AIP_MODEL_DIR", "model-from-env")
    file = tmp_path / "c.yaml"
    file.write_text("epochs: 3\nbatch_size: 9\nfake_data: true\nresume: false\ncheckpoint-dir: from-file\n"
                    "sizes: [64, 96]\n")  # fmt: skip
    args = parse("--config", str(file), "--epochs=4")
    assert (args.epochs, args.batch_size, args.fake_data, args.resume) == (4, 9, True, False)
    assert (args.checkpoint_dir, args.export_dir, args.sizes) == ("from-file", "model-from-env", "64,96")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs: 3", "c.yaml: unknown flag --epohcs, did you mean --epochs?"),
        ("lr: fast", "c.yaml: --lr: 'fast' is not a number"),
        ("fake_data: 3", "c.yaml: --fake-data: "),
        ("lr: {a: 1}", "c.yaml: --lr: "),
        ("- 1", "c.yaml: cannot be read: must be a mapping"),
        ("a: [", "c.yaml: cannot be read: must be a mapping of YAML"),
    ],
)
def test_an_error_in_the_config_file_names_the_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert message in error_of(capsys, "--config", str(tmp_path / "c.yaml"))


def test_job_dir_sets_the_default_folders() -> None:
    args = parse("--job-dir=gs://b/job/", "--export-dir=mine")
    assert (args.checkpoint_dir, args.export_dir, args.logdir) == ("gs://b/job/checkpoints", "mine", "gs://b/job/logs")


def test_the_default_learning_rate_depends_on_the_optimizer() -> None:
    assert (parse().lr, parse("--optimizer=adamw").lr, parse("--optimizer=adamw", "--lr=2").lr) == (0.03, 0.003, 2.0)


def test_options_of_places_devices_and_reports_do_not_decide_what_a_run_learns() -> None:
    imagenet_data.options(parser := Parser("toy", ""))
    learning = set(classification(parser, [], sgd=0.03, adamw=0.003).learning)
    assert {"lr", "epochs", "image_size", "scale_lr", "weight_decay", "ema", "precision", "seed"} <= learning
    assert not learning & {"datadir", "job_dir", "output_dir", "num_workers", "num_cores", "batch_size", "num_steps",
                           "log_steps", "resume", "keep_checkpoints"}  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
def test_help_takes_little_cpu_time_and_imports_no_framework(trainer: str) -> None:
    """Measure CPU time, which other work on the machine does not change; importing a framework takes seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"trainers.{trainer}", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert "--checkpoint-dir" in ended.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"torch", "torch_xla", "tensorflow", "keras", "jax"}


def test_the_trainers_are_found() -> None:
    assert {"torch.mnist", "torch_xla.mnist", "tf.mnist", "jax.mnist"} <= set(TRAINERS)
