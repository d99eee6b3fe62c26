"""The language model trainer: exact order and resume, several processes in both ways, checkpoints, export, messages.

In the cpu image. ``TINY`` learns in seconds; most runs are in fp32 with one thread, so that their bits can be compared.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.image.trainer_box import PYTHON, Box, Ended, box
from trainyard.sandbox.datasets import text
from trainyard.sandbox.fakes import storage
from trainyard.spec.model import load

pytestmark = [pytest.mark.concurrent, pytest.mark.big("cpu")]

TINY = ("--device=cpu", "--precision=fp32", "--layers=2", "--width=32", "--heads=2", "--block-size=32",
        "--max-steps=20", "--eval-steps=10", "--eval-tokens=5000", "--warmup-steps=5", "--sample-tokens=0",
        "--log-steps=1", "--cache-dir=/tmp/packed")  # fmt: skip
TWO = "two-processes"
PORT = 8767
TRANSFORMERS = "transformers==5.24.0"
#: The largest difference of two losses whose sums of float32 had another order: 2**-24 for each of the 32 terms of a
#: sum in the model, relative to a loss of about 6, with a factor of 2 for what the steps add; see trainer_box.
CLOSE = 2.0**-24 * 32 * 6 * 2


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("cpu"), OMP_NUM_THREADS="1") as started:
        started.put(text.write(tmp_path_factory.mktemp("text")), "text")
        yield started


@pytest.fixture(scope="module")
def hugging_face(here: Box, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Add transformers, which no image of the catalogue has, to the container; return Python's variables for it."""
    folder = tmp_path_factory.mktemp("hugging-face")
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", f"--target={folder}", "--only-binary=:all:"]
    python = f"--python-version={load('cpu').python_version}"
    subprocess.run([*command, python, "--python-platform=x86_64-manylinux_2_28", TRANSFORMERS], check=True)
    for numpy in folder.glob("numpy*"):
        shutil.rmtree(numpy)  # the image has another version, which torch uses
    return {"PYTHONPATH": here.put(folder, "hugging-face"), "HF_HUB_OFFLINE": "1"}


def gpt(here: Box, *words: str, **environment: str) -> Ended:
    """Run it, with ``TWO`` among ``words`` in two processes."""
    words = (*TINY, "--datadir=/data/text", *words)
    if TWO in words:
        return here.processes(2, "torch.gpt", *(word for word in words if word != TWO), **environment)
    return here.trainer("torch.gpt", *words, **environment)


def one_line(ended: Ended) -> str:
    """The line with which the trainer has reported an error."""
    said = [line for line in ended.lines if line.startswith("gpt: ")]
    assert len(said) == 1 and "Traceback" not in ended.output, ended.output
    return said[0]


def losses(ended: Ended) -> list[float]:
    """The losses of all steps, as logged."""
    assert ended.code == 0, ended.output
    return [float(line.split("loss ")[1].split(",")[0]) for line in ended.lines if ": loss " in line]


def exact_losses(here: Box, folder: str) -> list[float]:
    """The losses of all steps in the report, with six decimals."""
    return [loss for _, loss in json.loads(here.run("cat", f"{folder}/report.json").output)["loss"]]


def stopped(here: Box, words: tuple[str, ...], folder: str, signal: str) -> Ended:
    """A run that gets a signal once its first checkpoint in ``folder`` is complete."""
    given = (word for word in words if word != TWO)
    start = f"LAUNCHER_NPROC=2 launch -- {PYTHON}" if TWO in words else PYTHON
    command = " ".join((start, "-m", "trainers.torch.gpt", *TINY, "--datadir=/data/text", *given))
    return here.run(
        "bash",
        "-c",
        f"{command} --checkpoint-dir={folder} & pid=$!\n"
        f"until ls {folder}/*/run.json >/dev/null 2>&1; do sleep 0.05; kill -0 $pid || exit 99; done\n"
        f"kill -{signal} $pid; wait $pid",
    )


def test_the_validation_loss_falls_and_a_sample_is_printed(here: Box) -> None:
    ended = gpt(here, "--max-steps=300", "--eval-steps=100", "--lr=0.01", "--sample-tokens=20", "--log-steps=50")
    learned = ended.learned()
    # Bytes that are equally likely have ln 256 = 5.5; their frequencies alone give about 3.1.
    assert learned["val_loss"] < 3.1 and learned["loss_first"] > 5, learned
    assert [line for line in ended.lines if line.startswith("sample: ")], ended.output
    assert "tokens/s" in ended.output and "MFU" not in ended.output, "a CPU's peak is not known"


def test_two_processes_give_the_bits_of_one_that_accumulates_and_the_losses_of_one_that_does_not(here: Box) -> None:
    runs = {
        "one": ("--batch-size=8",),
        "parts": ("--batch-size=4", "--accumulate=2"),
        "ddp": ("--batch-size=4", TWO),
        "fsdp": ("--batch-size=4", TWO, "--parallel=fsdp"),
    }
    summaries = {name: gpt(here, *words, f"--output-dir=/tmp/same-{name}").learned() for name, words in runs.items()}
    assert summaries["parts"]["weights_sha256"] == summaries["ddp"]["weights_sha256"]
    assert [summaries[name]["processes"] for name in runs] == [1, 1, 2, 2]
    one = exact_losses(here, "/tmp/same-one")
    assert len(one) == 20
    for name in runs:
        assert exact_losses(here, f"/tmp/same-{name}") == pytest.approx(one, abs=CLOSE), name
        assert summaries[name]["val_loss"] == pytest.approx(summaries["one"]["val_loss"], abs=CLOSE), name


@pytest.mark.parametrize("words", [(), ("--optimizer=muon", "--schedule=wsd"), (TWO,),
                                   (TWO, "--parallel=fsdp", "--optimizer=muon")])  # fmt: skip
def test_a_run_that_sigterm_stopped_continues_with_the_same_bits(here: Box, words: tuple[str, ...]) -> None:
    name = "-".join(word.rpartition("=")[2] for word in ("=sigterm", *words))
    most = 24 if TWO in words else 60  # several processes are slower; a signal has to come before the end
    words = (*words, f"--max-steps={most}")
    whole = gpt(here, *words, f"--checkpoint-dir=/tmp/{name}-whole").learned()
    cut = stopped(here, (*words, "--checkpoint-steps=3"), f"/tmp/{name}", "TERM")
    assert cut.code == 143 and cut.summary["status"] == "preempted", cut.output
    again = gpt(here, *words, f"--checkpoint-dir=/tmp/{name}").learned()
    assert 3 <= again["resumed_from"] == cut.summary["global_step"] < most
    assert again["weights_sha256"] == whole["weights_sha256"]


def test_a_checkpoint_of_fsdp_is_resumed_by_ddp_and_by_one_process(here: Box) -> None:
    two = ("--batch-size=4", TWO)
    run = (*two, "--parallel=fsdp", "--num-steps=10", "--checkpoint-dir=/tmp/fsdp")
    assert gpt(here, *run).learned()["status"] == "stopped"
    whole = gpt(here, *two, "--output-dir=/tmp/fsdp-whole").learned()
    for name, words in {"ddp": two, "one": ("--batch-size=8",), "parts": ("--batch-size=2", "--accumulate=4")}.items():
        here.run("cp", "-r", "/tmp/fsdp", f"/tmp/fsdp-{name}")
        folders = (f"--checkpoint-dir=/tmp/fsdp-{name}", f"--output-dir=/tmp/fsdp-{name}-log")
        learned = gpt(here, *words, *folders).learned()
        assert learned["resumed_from"] == 10
        assert learned["val_loss"] == pytest.approx(whole["val_loss"], abs=CLOSE), name
        straight = exact_losses(here, "/tmp/fsdp-whole")
        assert exact_losses(here, f"/tmp/fsdp-{name}-log") == pytest.approx(straight, abs=CLOSE), name
    refused = gpt(here, "--batch-size=4", "--checkpoint-dir=/tmp/fsdp")
    assert refused.code == 2 and "its checkpoints have global_batch 8, this run has 4" in one_line(refused)


def test_the_last_complete_checkpoint_is_used_after_sigkill(here: Box) -> None:
    words = ("--checkpoint-steps=1", "--max-steps=100000")
    assert stopped(here, words, "/tmp/killed", "KILL").code == 137
    # As if it had been killed while it wrote a later one: its data, but not yet .metadata.
    here.run("sh", "-c", "mkdir /tmp/killed/step-000099999; echo half >/tmp/killed/step-000099999/__0_0.distcp")
    last = here.run("sh", "-c", "ls -d /tmp/killed/*/run.json").lines[-1]
    step = int(last.split("step-")[1].split("/")[0])
    again = gpt(here, *words, f"--num-steps={step + 1}", "--checkpoint-dir=/tmp/killed").learned()
    assert (again["resumed_from"], again["global_step"]) == (step, step + 1)
    assert "step-000099999" not in here.run("ls", "/tmp/killed").output, "incomplete checkpoints are removed"


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(here: Box) -> None:
    whole = gpt(here, "--checkpoint-dir=/tmp/damaged").learned()
    here.run("sh", "-c", "truncate -s 1000 /tmp/damaged/step-000000020/__0_0.distcp")
    again = gpt(here, "--checkpoint-dir=/tmp/damaged")
    assert (again.learned()["resumed_from"], again.learned()["weights_sha256"]) == (10, whole["weights_sha256"])
    assert "/tmp/damaged/step-000000020 cannot be used (" in again.output
    here.run("sh", "-c", "truncate -s 1000 /tmp/damaged/*/__0_0.distcp")
    ended = gpt(here, "--checkpoint-dir=/tmp/damaged")
    assert ended.code == 1 and "none of its checkpoints can be used" in one_line(ended)


def test_a_run_that_does_not_resume_moves_the_earlier_checkpoints(here: Box) -> None:
    gpt(here, "--checkpoint-dir=/tmp/fresh", "--keep-checkpoints=1").learned()
    fresh = gpt(here, "--checkpoint-dir=/tmp/fresh", "--no-resume", "--num-steps=3").learned()
    assert fresh["resumed_from"] is None
    kept = here.run("sh", "-c", "cd /tmp/fresh && ls -d step-* old-*/*").output.split()
    assert kept[0].endswith("Z/step-000000020") and kept[1:] == ["step-000000003"]
    assert gpt(here, "--checkpoint-dir=/tmp/fresh").learned()["resumed_from"] == 3


def test_other_text_is_refused_and_other_flags_are_named(here: Box) -> None:
    gpt(here, "--num-steps=2", "--checkpoint-dir=/tmp/other").learned()
    other = gpt(here, "--datadir=/data/text/val", "--checkpoint-dir=/tmp/other")
    assert other.code == 2 and "/tmp/other: its checkpoints" in one_line(other)
    named = gpt(here, "--lr=0.002", "--checkpoint-dir=/tmp/other")
    assert named.learned()["resumed_from"] == 2 and "Resuming with --lr 0.002, was 0.001" in named.output


def test_loss_and_weights_that_are_not_finite_are_neither_saved_nor_exported(here: Box) -> None:
    ended = gpt(here, "--lr=1e30", "--warmup-steps=0", "--checkpoint-dir=/tmp/infinite", "--export-dir=/tmp/infinite/x")
    assert (ended.code, ended.summary["status"]) == (22, "diverged"), ended.output
    assert "is not finite by step" in one_line(ended)
    assert here.run("find", "/tmp/infinite", "-type", "f").output == ""


def test_eval_only_has_the_loss_of_the_run(here: Box) -> None:
    trained = gpt(here, "--checkpoint-dir=/tmp/only").learned()
    again = gpt(here, "--checkpoint-dir=/tmp/only", "--eval-only").learned()
    assert (again["val_loss"], again["weights_sha256"]) == (trained["val_loss"], trained["weights_sha256"])
    ended = gpt(here, "--checkpoint-dir=/tmp/nothing", "--eval-only")
    assert (ended.code, one_line(ended)) == (2, "gpt: --eval-only: /tmp/nothing has no checkpoint")


def test_a_target_loss_ends_a_run_and_missing_it_is_status_21(here: Box) -> None:
    run = ("--lr=0.01", "--max-steps=60")
    assert gpt(here, *run, "--target-loss=5").learned()["global_step"] == 10
    missed = gpt(here, *run, "--target-loss=0.1")
    assert (missed.code, missed.summary["status"]) == (21, "missed")


@pytest.mark.parametrize("words", [("--kv-heads=1",), ("--no-tie-embeddings",)])
def test_the_exported_weights_are_llamas(here: Box, words: tuple[str, ...]) -> None:
    gpt(here, *words, "--export-dir=/tmp/exported").learned()
    assert here.run("ls", "-A", "/tmp/exported").output.split() == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]  # fmt: skip
    config = json.loads(here.run("cat", "/tmp/exported/config.json").output)
    tied = "--no-tie-embeddings" not in words
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] == tied
    shapes = here.python("""
import json
from safetensors.torch import load_file
print(json.dumps({name: list(value.shape) for name, value in load_file("/tmp/exported/model.safetensors").items()}))
""")
    names = json.loads(shapes.lines[-1])
    assert names["model.layers.1.self_attn.k_proj.weight"] == [16 if "--kv-heads=1" in words else 32, 32]
    assert ("lm_head.weight" in names) != tied and len(names) == 2 * 9 + 2 + (not tied)


def test_the_exported_model_gives_the_logits_of_transformers(here: Box, hugging_face: dict[str, str]) -> None:
    gpt(here, "--kv-heads=1", "--export-dir=/tmp/hf").learned()
    compared = here.python(
        """
import json, torch
from safetensors.torch import load_file
from trainers.torch._llama import GPT, Config
from transformers import AutoTokenizer, LlamaForCausalLM
config = json.load(open("/tmp/hf/config.json"))
ours = GPT(Config(**{name: config[name] for name in Config.__dataclass_fields__}))
missing = ours.load_state_dict(load_file("/tmp/hf/model.safetensors"), strict=False)
assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys, missing
idx = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
with torch.no_grad():
    print((LlamaForCausalLM.from_pretrained("/tmp/hf")(idx).logits - ours(idx)).abs().max().item())
words = AutoTokenizer.from_pretrained("/tmp/hf")
assert words("naïve ☃")["input_ids"] == list("naïve ☃".encode()) and words.decode(list("naïve ☃".encode())) == "naïve ☃"
""",
        **hugging_face,
    )
    assert compared.code == 0 and float(compared.lines[-1]) < 1e-5, compared.output


def test_a_tokenizer_without_its_file_or_its_package_is_one_line(here: Box, tmp_path: Path) -> None:
    assert one_line(gpt(here, "--tokenizer=/tmp/none.json")).endswith("/tmp/none.json: No such file or directory")
    (tmp_path / "tokenizers.py").write_text("raise ImportError", encoding="utf-8")
    ended = gpt(here, "--tokenizer=/tmp/none.json", PYTHONPATH=here.put(tmp_path, "hidden"))
    assert "--tokenizer needs the package tokenizers: pip install tokenizers" in one_line(ended)


def test_a_tokenizer_file_trains_and_is_exported(here: Box, hugging_face: dict[str, str]) -> None:
    made = here.python(
        """
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, trainers
made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
made.train(["/data/text/val/topics.jsonl"], trainer)
made.save("/tmp/tokenizer.json")
""",
        **hugging_face,
    )
    assert made.code == 0, made.output
    words = ("--tokenizer=/tmp/tokenizer.json", "--export-dir=/tmp/words", "--sample-tokens=5")
    gpt(here, *words, **hugging_face).learned()
    assert json.loads(here.run("cat", "/tmp/words/config.json").output)["vocab_size"] == 320


# The trainer, where torch.compile fails, with the flag instead of a GPU.
NO_COMPILER = """
import sys
import torch
from trainers.torch import _llama, _peers, gpt
def fail(*functions, **options):
    def call(*tensors):
        raise RuntimeError("no kernel\\nfor this")
    return call
torch.compile = fail
compile_layers = _llama.compile_layers
def failed(model, *others):
    print("reason:", compile_layers(model, *others))
    assert "forward" not in vars(model.model.layers[0]) and "loss" not in vars(model)
    return ""
_llama.compile_layers = failed
_peers.run(gpt.main, gpt.parse_args(sys.argv[1:]), "gpt")
"""


def test_where_compilation_fails_steps_are_eager_or_the_flag_is_one_line(here: Box) -> None:
    run = (*TINY, "--datadir=/data/text", "--num-steps=2", "--compile=on")
    eager = here.python(NO_COMPILER, *run)
    assert eager.learned()["global_step"] == 2 and "reason: no kernel\n" in eager.output, eager.output
    assert eager.summary["weights_sha256"] == gpt(here, "--num-steps=2").learned()["weights_sha256"]
    refused = here.trainer("torch.gpt", *run, CXX="/none")
    assert refused.code == 1 and one_line(refused).startswith("gpt: --compile on: "), refused.output


# The trainer, where --precision auto is fp16, as on GPUs without bf16: it has no gradient scaler.
NO_BF16 = """
import sys
from trainers.torch import _peers, gpt
_peers.fastest_precision = lambda device: "fp16"
_peers.run(gpt.main, gpt.parse_args(sys.argv[1:]), "gpt")
"""


def test_a_gpu_without_bf16_trains_in_fp32(here: Box) -> None:
    ended = here.python(NO_BF16, *TINY, "--datadir=/data/text", "--precision=auto", "--num-steps=2")
    assert ended.learned()["weights_sha256"] == gpt(here, "--num-steps=2").learned()["weights_sha256"]
    assert " in a step, on 1 x cpu in fp32" in ended.output, ended.output


def test_text_checkpoints_logs_and_export_can_be_in_a_bucket(here: Box, tmp_path: Path) -> None:
    """gcsfs with a fake Storage API."""
    (tmp_path / "storage.py").write_bytes(Path(storage.__file__).read_bytes())
    serve = f"{PYTHON} -I -S {here.put(tmp_path, 'fake')}/storage.py /tmp/buckets"
    here.run("mkdir", "-p", "/tmp/buckets/bucket")
    here.run("cp", "-r", "/data/text", "/tmp/buckets/bucket/")
    here.run("sh", "-c", f"{serve} --port={PORT} >/tmp/storage.log 2>&1 &")
    here.until("/tmp/storage.log", "url")
    job = ("--datadir=gs://bucket/text", "--job-dir=gs://bucket/job", "--output-dir=gs://bucket/job/out")
    fake = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{PORT}"}
    stopped = here.trainer("torch.gpt", *TINY, *job, "--num-steps=7", **fake)
    assert stopped.learned()["global_step"] == 7 and "Warning" not in stopped.output, stopped.output
    resumed = here.trainer("torch.gpt", *TINY, *job, **fake).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (7, gpt(here).learned()["weights_sha256"])
    files = here.run("sh", "-c", "cd /tmp/buckets/bucket/job && find checkpoints model out -type f | sort").lines
    saved = [f"checkpoints/step-{step:09d}/{name}" for step in (7, 10, 20)
             for name in (".metadata", "__0_0.distcp", "run.json")]  # fmt: skip
    assert files == [*saved, "model/config.json", "model/model.safetensors", "model/tokenizer.json",
                     "model/tokenizer_config.json", "out/metrics.jsonl", "out/report.json"]  # fmt: skip


def test_fake_data_needs_no_files(here: Box) -> None:
    learned = here.trainer("torch.gpt", *TINY, "--fake-data", "--num-steps=3").learned()
    assert learned["global_step"] == 3


def test_training_starts_from_weights_of_hugging_face(here: Box) -> None:
    """Compare the loss of the exported weights, with a learning rate that changes nothing."""
    trained = gpt(here, "--kv-heads=1", "--export-dir=/tmp/start").learned()
    # The exported tokenizer needs its package, which this image lacks; without it, text is bytes as before.
    here.run("rm", "/tmp/start/tokenizer.json")
    started = gpt(here, "--init-from=/tmp/start", "--num-steps=1", "--eval-steps=1", "--lr=1e-30").learned()
    assert started["val_loss"] == pytest.approx(trained["val_loss"], abs=1e-6)
    here.run("sh", "-c", "sed -i s/silu/gelu/ /tmp/start/config.json")
    refused = gpt(here, "--init-from=/tmp/start")
    assert refused.code == 2 and "hidden_act is gelu, not silu" in one_line(refused)


@pytest.mark.parametrize("words", [("--activation-checkpointing",), ("--async-save", "--checkpoint-steps=4")])
def test_saving_memory_or_time_changes_no_bit(here: Box, words: tuple[str, ...]) -> None:
    plain = gpt(here).learned()
    folder = f"/tmp/saving{words[0]}"
    found = gpt(here, *words, f"--checkpoint-dir={folder}", "--num-steps=13")
    assert found.learned()["status"] == "stopped" and "Warning" not in found.output, found.output
    assert gpt(here, *words, f"--checkpoint-dir={folder}").learned()["weights_sha256"] == plain["weights_sha256"]


def test_documents_that_are_masked_do_not_see_each_other(here: Box) -> None:
    checked = here.python("""
import torch
from trainers.torch._llama import GPT, Config
config = Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=16)
torch.manual_seed(0)
idx = torch.randint(0, 60, (1, 16))
idx[0, 7] = 63
other = idx.clone()
other[0, :7] = 5
for end in (None, 63):
    torch.manual_seed(1)
    model = GPT(config, end)
    print(end, bool((model(idx)[0, 8:] - model(other)[0, 8:]).abs().max() > 0))
""")
    assert checked.lines[-2:] == ["None True", "63 False"], checked.output


def test_pre_tokenized_text_is_trained_on(here: Box) -> None:
    made = here.python("""
import os, numpy
os.makedirs("/tmp/tokens", exist_ok=True)
for name, count in (("train", 20000), ("val", 3000)):
    numpy.random.default_rng(0).integers(0, 300, count).astype(numpy.uint16).tofile(f"/tmp/tokens/{name}.bin")
""")
    assert made.code == 0, made.output
    assert gpt(here, "--datadir=/tmp/tokens", "--num-steps=3").learned()["global_step"] == 3


def test_parquet_without_its_package_is_one_line(here: Box) -> None:
    here.run("sh", "-c", "mkdir -p /tmp/parquet; echo x >/tmp/parquet/a.parquet")
    ended = gpt(here, "--datadir=/tmp/parquet")
    assert ended.code == 1 and ".parquet" in one_line(ended), ended.output


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--datadir=",), "--datadir: which text? Give a file or folder, or --fake-data"),
     (("--datadir=/data/none",), "--datadir /data/none: does not exist"),
     (("--heads=3",), "--width 32 is not an even multiple of --heads 3"),
     (("--heads=4", "--kv-heads=3"), "--heads 4 is not a multiple of --kv-heads 3"),
     (("--precision=fp16",), "--precision: fp16 is not one of auto, fp32, bf16"),
     (("--block-size=9999999",), "which is less than two windows of 9999999: lower --block-size, or add text")],
)  # fmt: skip
def test_a_mistake_is_one_line(here: Box, words: tuple[str, ...], says: str) -> None:
    ended = gpt(here, *words)
    assert ended.code in (1, 2) and says in one_line(ended)


def test_a_trial_reports_the_validation_loss(here: Box) -> None:
    ended = here.trainer("torch.gpt", *TINY, "--datadir=/data/text", CLOUD_ML_TRIAL_ID="3",
                         CLOUD_ML_HP_METRIC_FILE="/tmp/hp/metrics")  # fmt: skip
    reported = [json.loads(line) for line in here.run("cat", "/tmp/hp/metrics").lines]
    assert [entry["global_step"] for entry in reported] == ["10", "20"]
    assert float(reported[-1]["training/hptuning/metric"]) == pytest.approx(ended.learned()["val_loss"], abs=1e-6)
