"""Run the JAX trainers in the jax image: on one device and eight, in two processes; checkpoints and exports."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.image.trainer_box import (
    COUNT,
    FLOAT32,
    MNIST_FORWARD,
    MNIST_GRADIENT,
    PYTHON,
    Box,
    Ended,
    box,
    few_digits,
)
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = [pytest.mark.concurrent, pytest.mark.big("jax")]

SHORT = ("--datadir=/data/digits", "--epochs=3")
RUN = f"{PYTHON} -m trainers.jax.mnist --datadir=/data/digits --epochs=3"
FLOWERS = ("--datadir=/data/flowers", "--image-size=48", "--batch-size=25", "--num-workers=2")


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("jax"), tmpfs={"/full": "size=2500k,mode=1777"}) as started:
        started.container.exec_run(["sh", "-c", "echo 127.0.0.1 $(hostname) >>/etc/hosts"], user="root")
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits"), gz=True), "digits")
        started.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tar", train=300, test=60), "flowers")
        yield started


@pytest.fixture(scope="module")
def whole(here: Box) -> dict[str, object]:
    """Return the summary of an uninterrupted run."""
    return here.trainer("jax.mnist", *SHORT).learned()


def pair(here: Box, port: int, *words: str, name: str = "jax.mnist") -> list[Ended]:
    """Run a trainer in two processes, as the launcher starts them on two nodes."""
    command = f"{PYTHON} -m trainers.{name} {' '.join(words)}"
    address = f"JAX_COORDINATOR_ADDRESS=127.0.0.1:{port} JAX_NUM_PROCESSES=2"
    return here.run_parallel(*(f"env {address} JAX_PROCESS_ID={rank} {command}" for rank in (0, 1)))


def test_mnist_learns_digits_and_its_exports_give_the_same_answers(here: Box) -> None:
    ended = here.trainer("jax.mnist", "--datadir=/data/digits", "--epochs=10", "--export-dir=/tmp/model",
                         "--output-dir=/tmp/out", "--logdir=/tmp/board", "--profile=3")  # fmt: skip
    found = ended.learned()
    assert found["accuracy"] >= 98.05, "as in the test of the TensorFlow trainer"
    assert found["loss_last"] < found["loss_first"] / 5
    assert not [line for line in ended.lines if line.startswith(("WARNING", "ERROR", "Traceback"))], ended.output
    loaded = here.python(f"""{COUNT}
import json, jax, jax.export, numpy
from safetensors import safe_open
from trainers.common import mnist
from trainers.jax.mnist import parse_args
(_, _, images, labels), _ = mnist.load(parse_args(["--datadir=/data/digits"]))
program = jax.export.deserialize(open("/tmp/model/model.stablehlo", "rb").read())
probabilities = numpy.asarray(program.call(images))
with safe_open("/tmp/model/model.safetensors", "numpy") as weights:
    about, shapes = weights.metadata(), {{name: list(weights.get_tensor(name).shape) for name in weights.keys()}}
print(json.dumps([*count(probabilities, labels, {MNIST_FORWARD * FLOAT32}), program.platforms, about, shapes]))
""")
    assert loaded.code == 0, loaded.output
    right, close, platforms, about, shapes = json.loads(loaded.lines[-1])
    assert abs(right - round(found["accuracy"] * 3.6)) <= close, "360 digits; only near ties may differ"
    assert platforms == ["cpu", "cuda", "tpu"]
    assert about["model"] == "cnn" and json.loads(about["classes"])[-1] == "9" and shapes["head.kernel"] == [128, 10]
    files = here.run("find", "/tmp/out", "/tmp/board", "-type", "f").output
    assert all(name in files for name in ("report.json", "events.out.tfevents", ".xplane.pb"))


@pytest.mark.parametrize(("model", "optimizer"), [("small", "sgd"), ("vit", "adamw")])
def test_a_resumed_run_of_every_model_gives_the_same_bits(here: Box, model: str, optimizer: str) -> None:
    """Averages of batch norm, dropout and the moments of AdamW continue."""
    run = (*SHORT, f"--model={model}", f"--optimizer={optimizer}", "--clip-norm=1")
    straight = here.trainer("jax.mnist", *run).learned()
    kept = (*run, f"--checkpoint-dir=/tmp/resumed-{model}")
    here.trainer("jax.mnist", *kept, "--num-steps=30").learned()
    resumed = here.trainer("jax.mnist", *kept).learned()
    assert resumed["resumed_from"] == 30 and resumed["weights_sha256"] == straight["weights_sha256"]
    assert straight["loss_last"] < straight["loss_first"]


def test_the_same_seed_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    assert here.trainer("jax.mnist", *SHORT).learned()["weights_sha256"] == whole["weights_sha256"]
    assert here.trainer("jax.mnist", *SHORT, "--seed=1").learned()["weights_sha256"] != whole["weights_sha256"]


def test_a_killed_and_resumed_run_gives_the_same_bits(here: Box, whole: dict[str, object]) -> None:
    folder = "--checkpoint-dir=/tmp/killed --checkpoint-steps=5"
    here.run("sh", "-c", f"{RUN} {folder} >/tmp/killed.log 2>&1 & echo $! >/tmp/killed.pid")
    step = random.randrange(5, 60)  # of 66
    reached = f'[ "$(ls -d /tmp/killed/*/run.json 2>/dev/null | tail -n 1)" ">" /tmp/killed/step-{step:09d} ]'
    here.run("bash", "-c", f"until {reached}; do sleep 0.01; done; sleep 0.0$RANDOM; kill -9 $(cat /tmp/killed.pid)")
    resumed = here.trainer("jax.mnist", *SHORT, *folder.split()).learned()
    assert resumed["resumed_from"] >= step, f"killed after step {step}"
    assert resumed["weights_sha256"] == whole["weights_sha256"] and resumed["accuracy"] == whole["accuracy"]


def test_sigterm_saves_the_step_and_ends_with_143(here: Box) -> None:
    endless = RUN.replace("epochs=3", "epochs=1000")
    (ended,) = here.run_parallel(f"sh -c '{endless} --checkpoint-dir=/tmp/termed & echo $! >/tmp/term.pid; "
                             "until grep -q ^step.1/ /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/term.pid); "
                             "wait $(cat /tmp/term.pid)'")  # fmt: skip
    assert ended.code == 143 and ended.summary["status"] == "preempted", ended.output
    saved = ended.summary["global_step"]
    words = ("--datadir=/data/digits", "--epochs=1000", f"--num-steps={saved + 5}")
    resumed = here.trainer("jax.mnist", *words, "--checkpoint-dir=/tmp/termed").learned()
    straight = here.trainer("jax.mnist", *words).learned()
    assert resumed["resumed_from"] == saved and resumed["weights_sha256"] == straight["weights_sha256"]


#: The arrays of a checkpoint by their paths.
ARRAYS = """
import json, os, sys, jax, numpy
import orbax.checkpoint as ocp
def arrays(folder):
    reader = ocp.PyTreeCheckpointer()  # to this host, whatever the devices were
    known = reader.metadata(folder + "/state").item_metadata.tree
    wanted = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=numpy.ndarray), known)
    state = reader.restore(folder + "/state", restore_args=wanted)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): numpy.asarray(array)
            for path, array in jax.tree.leaves_with_path(state)}
"""
#: The largest difference between the momenta of two checkpoints after one step, which are the gradients, relative to
#: the largest of each variable.
COMPARE = (
    ARRAYS
    + """
one, other = (arrays(f"{folder}/step-000000001") for folder in sys.argv[1:])
names = [name for name in one if "trace" in name]
assert len(names) == 8 and one.keys() == other.keys(), sorted(one)
print(json.dumps(max(float(abs(one[name] - other[name]).max() / abs(one[name]).max()) for name in names)))
"""
)


def test_eight_devices_and_two_processes_equal_one(here: Box, tmp_path: Path) -> None:
    here.put(few_digits(tmp_path, 64, 53), "step")
    step = ("--datadir=/data/step", "--epochs=1", "--test-batch-size=20", "--precision=fp32")
    one = here.trainer("jax.mnist", *step, "--checkpoint-dir=/tmp/one").learned()
    eight = here.trainer("jax.mnist", *step, "--device=cpu", "--num-cores=8", "--batch-size=8",
                         "--checkpoint-dir=/tmp/eight").learned()  # fmt: skip
    chief, other = pair(here, 29661, *step, "--batch-size=32", "--checkpoint-dir=/tmp/two")
    two = chief.learned()
    assert other.code == 0 and not other.summary, other.output
    assert (eight["replicas"], eight["processes"], two["replicas"], two["processes"]) == (8, 1, 2, 2)
    for name, found in (("eight", eight), ("two", two)):
        assert (found["global_batch"], found["global_step"]) == (64, 1)
        compared = here.python(COMPARE, "/tmp/one", f"/tmp/{name}")
        assert compared.code == 0, compared.output
        # A wrong, missing or repeated image changes the gradient by about 1/64, and the mean loss by about 1/53.
        assert float(compared.lines[-1]) <= MNIST_GRADIENT * FLOAT32 < 1 / 64 / 4
        assert abs(found["test_loss"] / one["test_loss"] - 1) <= MNIST_GRADIENT * FLOAT32


def test_a_signal_to_one_process_stops_both_at_the_same_step_and_both_resume(here: Box) -> None:
    endless = f"{RUN.replace('epochs=3', 'epochs=500')} --batch-size=32 --checkpoint-dir=/tmp/agreed"
    members = [
        f"env JAX_COORDINATOR_ADDRESS=127.0.0.1:29662 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={rank} "
        f"sh -c '{endless} & echo $! >/tmp/pid{rank}; wait $(cat /tmp/pid{rank})'"
        for rank in (0, 1)
    ]
    signaller = "sh -c 'until grep -q accuracy /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/pid1)'"
    chief, other, _ = here.run_parallel(*members, signaller)
    assert (chief.code, other.code) == (143, 143), chief.output + other.output
    saved = chief.summary["global_step"]
    assert f"step-{saved:09d}" in here.run("ls", "/tmp/agreed").output
    words = (*endless.split()[3:], f"--num-steps={saved + 2}")
    assert pair(here, 29663, *words)[0].learned()["resumed_from"] == saved


def test_processes_on_a_host_whose_name_has_no_address_end_with_one_line(
    built_image: Callable[[str], str],
) -> None:
    """As in a container without a network."""
    with box(built_image("jax")) as alone:
        for ended in pair(alone, 29665, "--fake-data"):
            assert ended.code == 1 and len(ended.lines) == 1, ended.output
            assert "has no address, by which the processes could meet: add it to /etc/hosts" in ended.output


def test_processes_with_different_data_end_with_one_line(here: Box, tmp_path: Path) -> None:
    here.put(few_digits(tmp_path, 64, 53), "other")
    address = "JAX_COORDINATOR_ADDRESS=127.0.0.1:29664 JAX_NUM_PROCESSES=2"
    command = f"{PYTHON} -m trainers.jax.mnist --epochs=1 --batch-size=16 --datadir=/data"
    for ended in here.run_parallel(*(
        f"env {address} JAX_PROCESS_ID={rank} {command}/{folder}" for rank, folder in enumerate(("digits", "other"))
    )):  # fmt: skip
        assert (
            ended.code == 1 and "the processes see different data" in ended.output and "Traceback" not in ended.output
        )


def test_compiled_programs_of_accelerators_are_kept_beside_the_checkpoints(here: Box) -> None:
    """On a CPU only where JAX_COMPILATION_CACHE_DIR says so."""
    asked = here.python("""
import json
from trainers.jax._peers import compiled_folder
print(json.dumps([compiled_folder(*words) for words in (
    ("tpu", "/c"), ("gpu", "/c"), ("cpu", "/c"), ("tpu", ""), ("tpu", "gs://b/c"))]))
""")
    assert json.loads(asked.lines[-1]) == ["/c/compiled", "/c/compiled", "", "", ""], asked.output
    cache = {"JAX_COMPILATION_CACHE_DIR": "/tmp/cache", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first = here.trainer("jax.mnist", *SHORT, "--num-steps=2", **cache).learned()
    again = here.trainer("jax.mnist", *SHORT, "--num-steps=2", **cache).learned()
    assert "jit_train_step" in here.run("ls", "/tmp/cache").output
    assert again["weights_sha256"] == first["weights_sha256"]
    named = here.python("""
from trainers.jax._peers import compiled_folder
print(repr(compiled_folder("tpu", "/c")))
""", JAX_COMPILATION_CACHE_DIR="/tmp/cache")  # fmt: skip
    assert named.lines[-1] == "''", named.output


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(here: Box) -> None:
    ended = here.trainer("jax.mnist", *SHORT, "--lr=1e38", "--checkpoint-dir=/tmp/nan", "--log-steps=1000")
    assert (ended.code, ended.summary["status"]) == (22, "diverged") and "lower --lr" in ended.output
    assert here.run("ls", "/tmp/nan").output == ""


def test_a_checkpoint_with_weights_that_are_not_finite_is_left_out(here: Box, whole: dict[str, object]) -> None:
    run = (*SHORT, "--checkpoint-dir=/tmp/poisoned", "--keep-checkpoints=9")
    here.trainer("jax.mnist", *run).learned()
    poisoned = here.python(f"""{ARRAYS}
place = "/tmp/poisoned/step-000000066/state"
with ocp.StandardCheckpointer() as checkpointer:
    state = checkpointer.restore(place)
    (bias,) = [path for path, _ in jax.tree.leaves_with_path(state) if "head" in str(path) and "bias" in str(path)
               and "0" in str(path[0])]
    state = jax.tree.map_with_path(lambda path, array: array.at[0].set(numpy.inf) if path == bias else array, state)
    checkpointer.save(place, state, force=True)
""")
    assert poisoned.code == 0, poisoned.output
    ended = here.trainer("jax.mnist", *run)
    assert "its weight head/bias is not finite" in ended.output
    assert ended.learned()["weights_sha256"] == whole["weights_sha256"]


def test_a_checkpoint_of_another_model_is_one_line(here: Box) -> None:
    folder = "--checkpoint-dir=/tmp/other-model"
    here.trainer("jax.mnist", *SHORT, "--num-steps=1", folder).learned()
    ended = here.trainer("jax.mnist", *SHORT, "--optimizer=adamw", folder)
    assert ended.code == 2 and "its checkpoints have optimizer sgd, this run has adamw" in ended.lines[-1]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--datadir=/nowhere"], 1, "mnist: /nowhere: no train-images-idx3-ubyte[.gz] in it"),
        (["--datadir=/data/digits", "--device=tpu"], 2, "mnist: --device tpu: not available here"),
        (["--datadir=/data/digits", "--num-cores=2"], 2, "mnist: --num-cores 2: there are 1 devices; --device cpu"),
        (["--datadir=/data/digits", "--precision=fp16"], 2, "mnist: --precision fp16: the JAX trainers have fp32 and"),
        (["--datadir=/data/digits", "--batch_size=5000"], 1, "do not fill one step of 5000"),
        (["--datadir=/data/digits", "--export-dir=/usr"], 1, "mnist: /usr: cannot be written: Permission denied"),
        (["--seed=18446744073709551615"], 2, "mnist: --seed: '18446744073709551615' is not an integer of at least 0"),
        (["--batch_size=none"], 2, "mnist: --batch-size: 'none' is not an integer of at least 1"),
    ],
)
def test_a_user_error_is_one_line(here: Box, words: list[str], code: int, message: str) -> None:
    ended = here.trainer("jax.mnist", *words)
    assert ended.code == code and message in ended.output
    assert len(ended.lines) == 1, ended.output


def test_a_number_of_a_process_that_is_none_is_one_line(here: Box) -> None:
    rubbish = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:29666", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "x"}
    ended = here.trainer("jax.mnist", "--fake-data", **rubbish)
    assert ended.code == 1 and len(ended.lines) == 1, ended.output
    assert "mnist: process x: this process cannot join the others at 127.0.0.1:29666" in ended.output


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here: Box) -> None:
    """Give the folder 2.5 MB: it holds one checkpoint of this network, but not two."""
    run = (*SHORT, "--checkpoint-dir=/full", "--checkpoint-steps=1")
    here.trainer("jax.mnist", *run, "--num-steps=1")
    before = here.run("ls", "-A", "/full").output
    assert "step-000000001" in before, "the first one fits"
    ended = here.trainer("jax.mnist", *run)
    said = [line for line in ended.lines if not line.startswith(("step ", "66 steps ", "Resumed ", "{"))]
    assert ended.code == 1 and len(said) == 1 and said[0].startswith("mnist: "), ended.output
    assert "cannot be saved (No space left on device)" in said[0]
    assert here.run("ls", "-A", "/full").output == before, "no file lost, no partial file"


def test_flowers_learns_resumes_and_exports(here: Box) -> None:
    run = (*FLOWERS, "--epochs=6")
    straight = here.trainer("jax.flowers", *run, "--export-dir=/tmp/flowers-model").learned()
    assert straight["accuracy"] >= 90, "of 60 images of five kinds; chance gives 20"
    kept = (*run, "--checkpoint-dir=/tmp/flowers-kept")
    here.trainer("jax.flowers", *kept, "--num-steps=40").learned()
    resumed = here.trainer("jax.flowers", *kept).learned()
    assert resumed["resumed_from"] == 40 and resumed["weights_sha256"] == straight["weights_sha256"]
    served = here.python("""
import jax.export, numpy
program = jax.export.deserialize(open("/tmp/flowers-model/model.stablehlo", "rb").read())
print(numpy.asarray(program.call(numpy.zeros((3, 48, 48, 3), "uint8"))).shape)
""")
    assert served.lines[-1] == "(3, 5)", served.output


@pytest.mark.big("xla", "jax")
@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_pretrained_weights_give_the_logits_of_torchvision(
    here: Box, built_image: Callable[[str], str], tmp_path: Path, model: str
) -> None:
    """A ResNet of torchvision with random weights, saved as safetensors, is the same function here."""
    with box(built_image("xla")) as there:
        made = there.python(f"""
import numpy, torch, torchvision
from safetensors.torch import save_file
torch.manual_seed(0)
network = torchvision.models.get_model("{model}", weights=None, num_classes=5)
for module in network.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        for values in (module.weight.data, module.running_var):
            values.uniform_(0.5, 1.5)
        for values in (module.bias.data, module.running_mean):
            values.normal_(0, 0.1)
save_file({{name: value.contiguous() for name, value in network.state_dict().items()}}, "/tmp/weights.safetensors")
network.fc = torch.nn.Identity()
images = torch.rand(2, 3, 64, 64)
numpy.savez("/tmp/logits.npz", images=images.permute(0, 2, 3, 1), features=network.eval()(images).detach())
""")
        assert made.code == 0, made.output
        for name in ("weights.safetensors", "logits.npz"):
            content = there.run("base64", f"/tmp/{name}").output
            (tmp_path / name).write_bytes(base64.b64decode(content))
    here.put(tmp_path, model)
    compared = here.python(f"""
import json, jax, numpy
from flax import nnx
from trainers.jax import _networks
network = _networks.ResNet("{model}", 5, jax.numpy.float32, nnx.Rngs(0))
_networks.load_pretrained(network, "/data/{model}/weights.safetensors")
network.eval()
network.fc = lambda features: features
wanted = numpy.load("/data/{model}/logits.npz")
found = numpy.asarray(network(wanted["images"]))
print(json.dumps(float(abs(found - wanted["features"]).max() / abs(wanted["features"]).max())))
""")
    assert compared.code == 0, compared.output
    assert float(compared.lines[-1]) <= 1e-4, "rounding of 18 to 50 layers in float32; other weights change all of it"
    trained = here.trainer("jax.flowers", *FLOWERS, f"--model={model}", f"--weights=/data/{model}/weights.safetensors",
                           "--epochs=1", "--num-steps=1")  # fmt: skip
    assert trained.code == 0, trained.output
    other = here.trainer("jax.flowers", *FLOWERS, "--model=resnet34", f"--weights=/data/{model}/weights.safetensors")
    assert other.code == 1 and "is of another model" in other.lines[-1] and "Traceback" not in other.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights=/data/digits/none"], "--weights needs --model resnet18, resnet34 or resnet50"),
        (["--model=resnet18", "--weights=/data/none"], "--weights /data/none: cannot be read as safetensors: "),
        (["--model=vit", "--image-size=47"], "--model vit: --image-size 47 is not a multiple of 8"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(here: Box, words: list[str], message: str) -> None:
    ended = here.trainer("jax.flowers", *FLOWERS, *words)
    assert ended.code in (1, 2) and len(ended.lines) == 1 and f"flowers: {message}" in ended.output, ended.output
