"""Train the language model in JAX, in the jax image: several devices in all ways, exact resume, checkpoints, export."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.image.trainer_box import PYTHON, Box, Ended, box, serve_storage
from trainyard.sandbox.datasets import text
from trainyard_jobs.model.request import output_variables

pytestmark = [pytest.mark.concurrent, pytest.mark.big("jax")]

TINY = ("--device=cpu", "--precision=fp32", "--layers=2", "--width=32", "--heads=4", "--block-size=32",
        "--max-steps=20", "--eval-steps=10", "--eval-tokens=5000", "--warmup-steps=5", "--sample-tokens=0",
        "--log-steps=1", "--cache-dir=/tmp/packed", "--datadir=/data/text")  # fmt: skip
#: The largest difference of two losses whose sums of float32 had another order; see test_trainers_torch_gpt.py.
CLOSE = 2.0**-24 * 32 * 6 * 2


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("jax"), tmpfs={"/full": "size=2500k,mode=1777"}) as started:
        started.container.exec_run(["sh", "-c", "echo 127.0.0.1 $(hostname) >>/etc/hosts"], user="root")
        started.put(text.write(tmp_path_factory.mktemp("text")), "text")
        yield started


@pytest.fixture(scope="module")
def whole(here: Box) -> Ended:
    """Return an uninterrupted run on one device."""
    ended = gpt(here, "--output-dir=/tmp/whole")
    ended.learned()
    return ended


def gpt(here: Box, *words: str) -> Ended:
    return here.trainer("jax.gpt", *TINY, *words)


def losses(here: Box, folder: str) -> list[float]:
    """Return the losses of all steps and tests in the report, with six decimals."""
    report = json.loads(here.run("cat", f"{folder}/report.json").output)
    return [loss for _, loss in (*report["loss"], *report["val_loss"])]


def one_line(ended: Ended) -> str:
    """Return the line with which the trainer has reported an error."""
    said = [line for line in ended.lines if line.startswith("gpt: ")]
    assert len(said) == 1 and "Traceback" not in ended.output, ended.output
    return said[0]


def test_it_learns_and_continues_a_text(here: Box) -> None:
    ended = gpt(here, "--max-steps=150", "--eval-steps=75", "--lr=0.01", "--sample-tokens=20", "--log-steps=50")
    learned = ended.learned()
    assert learned["val_loss"] < 0.6 * learned["loss_first"]
    (sample,) = [line for line in ended.lines if line.startswith("sample: ")]
    assert len(sample) > 10


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("--num-cores=4", "--batch-size=3"), id="four devices"),
        pytest.param(("--num-cores=4", "--batch-size=3", "--parallel=fsdp"), id="fully sharded"),
        pytest.param(("--num-cores=4", "--batch-size=6", "--tensor=2"), id="tensor parallel"),
        pytest.param(("--num-cores=8", "--batch-size=3", "--tensor=2", "--parallel=fsdp"), id="both"),
        pytest.param(("--batch-size=4", "--accumulate=3"), id="accumulated"),
        pytest.param(("--activation-checkpointing",), id="computed again"),
    ],
)
def test_the_same_global_batch_gives_the_same_losses(here: Box, whole: Ended, words: tuple[str, ...]) -> None:
    folder = f"/tmp/same{'-'.join(words)}"
    learned = gpt(here, *words, f"--output-dir={folder}").learned()
    assert learned["global_batch"] == whole.summary["global_batch"] == 12
    pairs = zip(losses(here, "/tmp/whole"), losses(here, folder), strict=True)
    assert max(abs(one - other) for one, other in pairs) <= CLOSE


def test_two_processes_equal_one_and_write_one_checkpoint_that_one_device_resumes(here: Box, whole: Ended) -> None:
    command = f"{PYTHON} -m trainers.jax.gpt {' '.join(TINY)} --batch-size=6 --parallel=fsdp"
    folders = "--checkpoint-dir=/tmp/pair --output-dir=/tmp/pair-out --num-steps=10"
    address = "JAX_COORDINATOR_ADDRESS=127.0.0.1:29671 JAX_NUM_PROCESSES=2"
    chief, other = here.run_parallel(*(f"env {address} JAX_PROCESS_ID={rank} {command} {folders}" for rank in (0, 1)))
    assert chief.learned()["processes"] == 2 and other.code == 0, other.output
    resumed = gpt(here, "--checkpoint-dir=/tmp/pair", "--output-dir=/tmp/pair-resumed").learned()
    assert resumed["resumed_from"] == 10
    pairs = zip(losses(here, "/tmp/whole"), losses(here, "/tmp/pair-resumed"), strict=True)
    assert max(abs(one - other) for one, other in pairs) <= CLOSE


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_gives_the_same_bits(here: Box, optimizer: str) -> None:
    words = (f"--optimizer={optimizer}", f"--checkpoint-dir=/tmp/exact-{optimizer}")
    straight = gpt(here, words[0]).learned()
    assert gpt(here, *words, "--num-steps=7").learned()["status"] == "stopped"
    resumed = gpt(here, *words).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (7, straight["weights_sha256"])


def test_a_killed_run_resumes_from_its_last_complete_checkpoint(here: Box, whole: Ended) -> None:
    command = f"{PYTHON} -m trainers.jax.gpt {' '.join(TINY)} --checkpoint-dir=/tmp/killed --checkpoint-steps=2"
    here.run("sh", "-c", f"{command} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid; "
             "until [ -e /tmp/killed/step-000000004/run.json ]; do sleep 0.05; done; "
             "kill -9 $(cat /tmp/killed.pid)")  # fmt: skip
    here.run("mkdir", "-p", "/tmp/killed/step-000000099/state")  # as if it was killed while writing
    resumed = gpt(here, "--checkpoint-dir=/tmp/killed").learned()
    assert resumed["resumed_from"] >= 4 and resumed["weights_sha256"] == whole.summary["weights_sha256"]
    kept = here.run("ls", "/tmp/killed").output.split()
    assert "step-000000099" not in kept and "step-000000020" in kept


def test_a_damaged_checkpoint_is_passed_over_and_none_that_works_is_one_line(here: Box, whole: Ended) -> None:
    folder = "--checkpoint-dir=/tmp/damaged"
    gpt(here, folder).learned()
    here.run("sh", "-c", "find /tmp/damaged/step-000000020/state -type f | while read f; do echo x >$f; done")
    again = gpt(here, folder)
    assert again.learned()["resumed_from"] == 10 and again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert "step-000000020 cannot be used" in again.output
    here.run("sh", "-c", "find /tmp/damaged -name '_METADATA' -delete; find /tmp/damaged -path '*/state/*' -delete")
    ended = gpt(here, folder)
    assert ended.code == 1 and "none of its checkpoints can be used (the last: " in one_line(ended)


def test_sigterm_saves_the_step_and_ends_with_143(here: Box) -> None:
    command = f"{PYTHON} -m trainers.jax.gpt {' '.join(TINY)} --max-steps=100000 --eval-steps=100000"
    (ended,) = here.run_parallel(f"sh -c '{command} --checkpoint-dir=/tmp/termed & echo $! >/tmp/term.pid; "
                             "until grep -q step.1/ /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143 and ended.summary["status"] == "preempted", ended.output
    saved = ended.summary["global_step"]
    words = ("--max-steps=100000", "--eval-steps=100000", "--checkpoint-dir=/tmp/termed", f"--num-steps={saved + 2}")
    assert gpt(here, *words).learned()["resumed_from"] == saved


def test_a_new_run_moves_the_checkpoints_away_and_another_run_is_refused(here: Box) -> None:
    folder = "--checkpoint-dir=/tmp/fresh"
    gpt(here, folder, "--num-steps=4").learned()
    refused = gpt(here, folder, "--batch-size=4")
    assert refused.code == 2 and "its checkpoints have global_batch 12, this run has 4" in one_line(refused)
    fresh = gpt(here, folder, "--num-steps=3", "--no-resume")
    assert fresh.learned()["resumed_from"] is None and "the checkpoints of an earlier run are in" in fresh.output
    assert gpt(here, folder, "--eval-only").learned()["resumed_from"] == 3


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(here: Box) -> None:
    ended = gpt(here, "--lr=1e30", "--warmup-steps=0", "--clip-norm=0", "--checkpoint-dir=/tmp/infinite",
                "--export-dir=/tmp/infinite-model")  # fmt: skip
    assert (ended.code, ended.summary["status"]) == (22, "diverged"), ended.output
    assert "lower --lr" in one_line(ended)
    assert not here.run("find", "/tmp/infinite", "/tmp/infinite-model", "-type", "f").output


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--datadir=/none",), 1, "--datadir /none: does not exist"),
        (("--num-cores=4", "--tensor=3"), 2, "--tensor 3: does not divide 4 devices"),
        (("--num-cores=8", "--tensor=8"), 2, "--tensor 8 does not divide 4 heads of keys and values"),
        (("--checkpoint-dir=/tmp/nothing", "--eval-only"), 2, "--eval-only: /tmp/nothing has no checkpoint"),
        (("--width=30",), 2, "--width 30 is not an even multiple of --heads 4"),
        (("--seed=18446744073709551615",), 2, "--seed: '18446744073709551615' is not an integer of at least 0"),
        (("--warmup-steps=20",), 2, "--warmup-steps 20: must be less than --max-steps 20"),
        (("--max-steps=4000000000", "--num-steps=1", "--warmup-steps=3999999999"), 0, ""),
        (("--init-from=/data/text",), 2, "--init-from /data/text/config.json: No such file or directory"),
    ],
)
def test_a_user_error_is_one_line(here: Box, words: tuple[str, ...], code: int, message: str) -> None:
    ended = gpt(here, *words)
    assert ended.code == code and (not message or message in one_line(ended)), ended.output


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    """Give the folder 2.5 MB: it holds one checkpoint of this model, but not two."""
    run = ("--width=64", "--checkpoint-dir=/full", "--checkpoint-steps=1", "--eval-tokens=32")
    gpt(here, *run, "--num-steps=1").learned()
    before = here.run("ls", "-A", "/full").output
    ended = gpt(here, *run)
    said = [
        line for line in ended.lines if not line.startswith(("step ", "Resumed ", "{")) and " weights, " not in line
    ]
    assert ended.code == 1 and len(said) == 1 and said[0].startswith("gpt: "), ended.output
    assert "cannot be saved (No space left on device); the checkpoint of step 1 is intact" in said[0]
    assert here.run("ls", "-A", "/full").output == before, "no file lost, no partial file"


def test_a_model_of_thousands_of_layers_is_lowered_in_seconds(here: Box) -> None:
    lowered = here.python("""
import time, jax, numpy
from functools import partial
from trainers.common.language import Config
from trainers.jax import _llama, gpt
config = Config(64, 8, 64, 5000, 2, 2, 16)
logits = partial(_llama.logits, config=config, dtype="float32", attention=None, recompute=True)
optimizer = _llama.make_optimizer(gpt.parse_args([]), lambda step: 0.1)
def start():
    weights = _llama.initial(config, jax.random.key(0))
    return {"weights": weights, "optimizer": optimizer.init(weights)}
state, windows = jax.eval_shape(start), jax.ShapeDtypeStruct((1, 2, 17), "int32")
began = time.process_time()
text = jax.jit(partial(gpt.train_step, logits, optimizer)).lower(state, windows).as_text()
print(len(text), time.process_time() - began)
""")
    size, seconds = map(float, lowered.lines[-1].split())
    assert size < 1e6 and seconds < 10, lowered.output


def test_a_run_starts_from_the_weights_of_another(here: Box) -> None:
    gpt(here, "--export-dir=/tmp/given").learned()
    words = [word for word in TINY if not word.startswith(("--layers", "--width", "--heads"))]
    start = here.trainer("jax.gpt", *words, "--init-from=/tmp/given", "--lr=1e-9",
                         "--batch-size=12", "--export-dir=/tmp/again").learned()  # fmt: skip
    assert start["loss_first"] < 5.4, "not the 5.6 of random weights"
    compared = here.python("""
import numpy
from safetensors.numpy import load_file
one, other = (load_file(f"/tmp/{name}/model.safetensors") for name in ("given", "again"))
assert one.keys() == other.keys()
print(max(float(abs(one[name] - other[name]).max()) for name in one))
""")
    assert float(compared.lines[-1]) < 1e-6, "nothing is learned at such a rate"


@pytest.mark.big("xla", "jax")
@pytest.mark.parametrize("words", [(), ("--kv-heads=2", "--no-tie-embeddings")], ids=["tied", "grouped"])
def test_the_export_is_the_same_function_in_pytorch(
    here: Box, built_image: Callable[[str], str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The trainer for PyTorch is compared with transformers; its model loads these weights by the same names."""
    gpt(here, *words, "--export-dir=/tmp/exported").learned()
    asked = here.python("""
import json, jax, numpy
from trainers.common.language import read_config
from trainers.jax import _llama, gpt
config = read_config("/tmp/exported")
shapes = jax.eval_shape(lambda: _llama.initial(config, jax.random.key(0)))
weights = gpt.load_pretrained("/tmp/exported", shapes, config)
found = _llama.logits(weights, numpy.arange(32)[None], config, "float32", None, recompute=False)
print(json.dumps(numpy.asarray(found).tolist()))
""")
    assert asked.code == 0, asked.output
    with box(built_image("xla")) as there:
        for name in ("config.json", "model.safetensors"):
            content = here.run("base64", f"/tmp/exported/{name}").output
            (tmp_path / name).write_bytes(base64.b64decode(content))
        there.put(tmp_path, "exported")
        answered = there.python("""
import json, torch
from trainers.common.language import read_config
from trainers.torch.gpt import load_pretrained
from trainers.torch._llama import GPT
model = GPT(read_config("/data/exported"))
load_pretrained(model, "/data/exported")
print(json.dumps(model.eval()(torch.arange(32)[None]).detach().tolist()))
""")
    assert answered.code == 0, answered.output
    one, other = (json.loads(ended.lines[-1]) for ended in (asked, answered))
    difference = max(
        abs(a - b) for row, also in zip(one[0], other[0], strict=True) for a, b in zip(row, also, strict=True)
    )
    assert difference <= 1e-4 * max(abs(value) for row in one[0] for value in row)


def test_checkpoints_logs_and_export_can_be_in_a_bucket(here: Box, whole: Ended, tmp_path: Path) -> None:
    """TensorStore and gcsfs with a fake Storage API, and the variables of Vertex AI."""
    job = {**serve_storage(here, tmp_path), **output_variables("gs://bucket/job")}
    stopped = here.trainer("jax.gpt", *TINY, "--num-steps=7", **job)
    assert stopped.learned()["global_step"] == 7, stopped.output
    resumed = here.trainer("jax.gpt", *TINY, **job).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (7, whole.learned()["weights_sha256"])
    files = here.run("sh", "-c", "cd /buckets/bucket/job && ls -A checkpoints && ls model").lines
    assert files == ["step-000000007", "step-000000010", "step-000000020", "config.json", "model.safetensors",
                     "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    over = here.trainer("jax.gpt", *TINY, "--num-steps=1", "--no-resume", **job)
    moved = here.run("sh", "-c", "cd /buckets/bucket/job/checkpoints && ls -d step-* old-*/*/run.json").output.split()
    assert over.learned()["resumed_from"] is None and len(moved) == 4 and moved[-1] == "step-000000001", moved
