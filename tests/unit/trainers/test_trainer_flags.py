"""The trainers' command lines: both spellings, the YAML file, environment variables, and one line for an error."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from trainers.common import flags, flowers_data, imagenet_data, mnist_data

FLAGS = (flags.Flag("device", flags.one_of("auto", "cpu"), "auto", "where to train"),
         flags.Flag("sizes", flags.sizes, [128, 160], "image sizes"))  # fmt: skip
TRAINERS = sorted(
    f"{path.parent.name}.{path.stem}"
    for path in Path(flags.__file__).parents[1].glob("[!c]*/*.py")
    if not path.name.startswith("_")
)


def parse(*words: str) -> argparse.Namespace:
    return flags.parse("mnist", "about", FLAGS, list(words))


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


@pytest.fixture(autouse=True)
def no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in flags.COMMON:
        if flag.env:
            monkeypatch.delenv(flag.env, raising=False)


def test_dashes_and_underscores_are_equivalent() -> None:
    assert parse("--batch_size=7", "--num_epochs", "3") == parse("--batch-size", "7", "--epochs=3")


def test_a_value_keeps_its_underscores() -> None:
    assert parse("--datadir=my_data").datadir == "my_data"


def test_a_file_url_is_a_local_path() -> None:
    args = parse("--output-dir=file:///tmp/x", "--checkpoint-dir", "file:///y")
    assert (args.output_dir, args.checkpoint_dir) == ("/tmp/x", "/y")


def test_every_flag_has_help_and_pytorch_xlas_names_work() -> None:
    own = (mnist_data.FLAGS, flowers_data.FLAGS, imagenet_data.FLAGS, flags.TF)
    assert all(flag.help for several in (flags.COMMON, *own) for flag in several)
    words = "--datadir d --logdir l --batch_size 1 --num_epochs 2 --num_steps 3 --log_steps 4 --lr 0.1 --momentum 0.5"
    args = parse(*words.split(), "--target_accuracy", "98", "--drop_last", "--fake_data")
    assert (args.logdir, args.num_steps, args.target_accuracy, args.fake_data) == ("l", 3, 98.0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epohcs", "3"], "unknown flag --epohcs, did you mean --epochs?"),
        (["--lr", "fast"], "--lr: 'fast' is not a number above 0"),
        (["--lr", "nan"], "--lr: 'nan' is not a number above 0"),
        (["--target-accuracy", "101"], "'101' is not a number of at least 0 and at most 100"),
        (["--batch_size", "0"], "--batch-size: '0' is not an integer of at least 1"),
        (["--precision", "fp8"], "--precision: 'fp8' is not one of auto, fp32, bf16"),
        (["--sizes", "128,four"], "'128,four' is not a list of sizes"),
        (["--batch-size"], "--batch-size: expected one argument"),
        (["--seed", str(2**64)], f"--seed: '{2**64}' is not an integer of at least 0 and at most {2**32 - 1}"),
        (["--lr", "1e39"], "--lr: '1e39' is not a number above 0 and at most 3.4e+38"),
        (["--output-dir", "file://x/y"], "--output-dir: file://x/y has no path after its host: write x/y, or file:///"),
        (["stray"], "unexpected argument 'stray'"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
    ],
)
def test_an_invalid_flag_is_a_one_line_error_with_what_is_allowed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *words)


def test_the_command_line_overrides_the_file_and_the_file_overrides_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_CHECKPOINT_DIR", "from-env")
    monkeypatch.setenv("AIP_MODEL_DIR", "model-from-env")
    file = tmp_path / "c.yaml"
    file.write_text(
        "epochs: 3\nbatch_size: 9\nfake_data: true\nresume: false\ncheckpoint-dir: from-file\nsizes: [64, 96]\n"
    )
    args = parse("--config", str(file), "--epochs=4")
    assert (args.epochs, args.batch_size, args.fake_data, args.resume) == (4, 9, True, False)
    assert (args.checkpoint_dir, args.export_dir, args.sizes) == ("from-file", "model-from-env", [64, 96])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs: 3", "c.yaml: unknown flag --epohcs, did you mean --epochs?"),
        ("lr: fast", "c.yaml: --lr: 'fast' is not a number"),
        ("fake_data: 3", "c.yaml: fake_data: must be true or false, not 3"),
        ("lr: {a: 1}", "c.yaml: lr: must be one value"),
        ("- 1", "c.yaml: must be a mapping"),
        ("a: [", "c.yaml: is not YAML"),
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


@pytest.mark.parametrize("trainer", TRAINERS)
def test_help_takes_little_cpu_time_and_imports_no_framework(trainer: str) -> None:
    """CPU time, so that other work on the machine makes no difference; importing a framework takes several seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"trainers.{trainer}", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(flags.__file__).parents[2],
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3
    assert "--checkpoint-dir" in ended.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert not imported & {"torch", "tensorflow", "keras"}


def test_the_trainers_are_found() -> None:
    assert {"torch.mnist", "tf.mnist"} <= set(TRAINERS)
