"""The TensorFlow trainers in the tf-cpu image: flowers and ImageNet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.image.trainer_box import COUNT, FLOAT32, VARIABLES, Box, Ended, box, step_differs
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = pytest.mark.concurrent

# For scripts in a container: the number of products that the layers of a Keras model sum up, one layer after another.
TERMS = """
import math
def terms(model):
    return sum(math.prod(weight.shape[:-1]) for weight in model.trainable_weights)
"""
# The same for the small network of flowers, forwards and backwards, and its largest sum for 8 images of 32 pixels.
SMALL_FLOWERS = 8 * 16 * 16 + 2 * (3 * 9 + 32 * 9 + 3 * 64 * 9 + 3 * 128 * 9 + 2 * 256 * 9 + 256)
SIZES = ("--image-size=48", "--batch-size=25", "--num-workers=2")
FORMS = ("folder", "tfrecord", "tar")
LEARNING = (*SIZES, "--epochs=8", "--precision=fp32")
#: Least accuracy in percent on 60 test images of five kinds; chance gives 20. The runs are in float32: by default, the
#: precision depends on the CPU.
FLOOR = 90


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("tf-cpu")) as started:
        for form in FORMS:
            made = flowers_data.write(tmp_path_factory.mktemp("flowers"), form, train=300, test=60)
            started.put(made, form)
        yield started


@pytest.fixture(scope="module")
def grown(here: Box) -> dict[str, object]:
    """The summary of flowers trained from class folders, and its model in /tmp/flowers."""
    return here.trainer("tf.flowers", "--datadir=/data/folder", *LEARNING, "--export-dir=/tmp/flowers").learned()


def test_flowers_learns_from_class_folders(grown: dict[str, object]) -> None:
    assert grown["accuracy"] >= FLOOR
    assert grown["classes"] == list(flowers_data.CLASSES)


@pytest.mark.parametrize(
    "form", ["tfrecord", pytest.param("tar", marks=pytest.mark.slow("imagenet, whose data are tar files"))]
)
def test_flowers_learns_from_shards(here: Box, form: str) -> None:
    ended = here.trainer("tf.flowers", f"--datadir=/data/{form}", *LEARNING, f"--target-accuracy={FLOOR}")
    assert ended.learned()["status"] == "reached", "or it had ended with 21"


def test_the_exports_of_flowers_give_the_same_answers_in_a_new_process(here: Box, grown: dict[str, object]) -> None:
    """For pixels, and for image files: JPEG bytes in, probabilities out."""
    loaded = here.python(f"""{TERMS}
import json, keras, numpy, tensorflow as tf
from trainers.common import images
from trainers.tf import flowers
found = images.find("/data/folder", "test")
pixels, labels = images.Loader(found, 2).all(48)
files = [found.read(number)[0] for number in range(found.count)]
resized = [flowers.resized(tf.io.decode_image(file, channels=3, expand_animations=False), 48) for file in files]
decoded = tf.cast(tf.round(tf.stack(resized)), tf.uint8)
model = tf.saved_model.load("/tmp/flowers/saved_model")
network = keras.models.load_model("/tmp/flowers/model.keras")
def serve(pixels):
    return model.signatures["serving_default"](images=tf.constant(pixels))["output_0"].numpy()
answers = serve(pixels)
pairs = [(answers, network.predict(pixels, verbose=0)),
         (serve(decoded), model.signatures["serve_files"](image_bytes=tf.constant(files))["output_0"].numpy())]
# The softmax turns the error of the logits, relative to the largest, into one of the probabilities.
bound = terms(network) * {FLOAT32} * abs(numpy.log(numpy.maximum(answers, 1e-30))).max()
assert all(abs(one - other).max() <= bound for one, other in pairs), (bound, [abs(a - b).max() for a, b in pairs])
print(json.dumps([100 * float((answer.argmax(1) == labels).mean()) for pair in pairs for answer in pair]))
""")
    assert loaded.code == 0, loaded.output
    # They may differ from the trainer's accuracy, because it resizes a larger copy of each image.
    assert min(json.loads(loaded.lines[-1])) >= FLOOR


@pytest.mark.slow("test_trainers_tf.py, with mnist, whose loop is the same")
def test_flowers_resumes_within_an_epoch_with_the_same_bits(here: Box, grown: dict[str, object]) -> None:
    words = ("--datadir=/data/folder", *LEARNING, "--checkpoint-dir=/tmp/kept")
    here.trainer("tf.flowers", *words, "--num-steps=17").learned()
    resumed = here.trainer("tf.flowers", *words).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (17, grown["weights_sha256"])


def test_flowers_compiled_with_xla_equals_flowers_without_and_crops_as_tensorflow_resizes(here: Box) -> None:
    """As TPUs require; boxes are cropped by matrix products, because XLA has no crop_and_resize."""
    words = (
        "--fake-data",
        "--fake-images=40",
        "--image-size=32",
        "--batch-size=8",
        "--num-steps=1",
        "--precision=fp32",
    )
    plain = here.trainer("tf.flowers", *words, "--checkpoint-dir=/tmp/flowers-plain").learned()
    kept = "--checkpoint-dir=/tmp/flowers-compiled"
    compiled = here.trainer("tf.flowers", *words, "--jit-compile", kept).learned()
    assert abs(compiled["loss_first"] / plain["loss_first"] - 1) <= SMALL_FLOWERS * FLOAT32
    assert step_differs(here, "/tmp/flowers-plain", "/tmp/flowers-compiled") <= SMALL_FLOWERS * FLOAT32
    checked = here.python("""
import numpy, tensorflow as tf
from trainers.tf import flowers
pictures = tf.constant(numpy.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), numpy.uint8))
numbers = tf.constant([4, 0])
def cut(upper, lower, left, right):
    boxes = tf.constant([[upper, lower, left, right]] * 2, tf.float32)
    return flowers.crops(tf.gather(pictures, numbers), boxes, 16).numpy()
part = tf.image.resize(tf.gather(pictures, numbers)[:, 10:30, 20:40], [16, 16], antialias=True).numpy()
whole = tf.image.resize(tf.gather(pictures, numbers), [16, 16], antialias=True).numpy()
# Two sums of 40 products each, whose weights depend on positions up to 40, on both sides; of values up to 255.
bound = 255 * 2 * (2 * 40 + 2 * 40) * 2**-24
assert abs(cut(0, 1, 0, 1) - whole).max() <= bound
assert abs(cut(0, 1, 1, 0) - whole[:, :, ::-1]).max() <= bound, "left and right exchanged mirrors"
# Except at the rim, where the filter reaches beyond the box.
assert abs(cut(.25, .75, .5, 1) - part)[:, 1:-1, 1:-1].max() <= bound
""")
    assert checked.code == 0, checked.output


def test_flowers_starts_from_the_weights_of_a_file(here: Box) -> None:
    """The body starts with the weights in the file, and has a tenth of the head's learning rate."""
    made = here.python("""
import keras
keras.utils.set_random_seed(7)
keras.applications.MobileNetV2((48, 48, 3), include_top=False, weights=None).save_weights("/tmp/body.weights.h5")
""")
    assert made.code == 0, made.output
    words = ("--datadir=/data/tar", *SIZES, "--model=mobilenetv2", "--num-steps=1", "--lr=1e-30", "--weight-decay=0")
    here.trainer("tf.flowers", *words, "--weights=/tmp/body.weights.h5", "--checkpoint-dir=/tmp/tuned").learned()
    compared = here.python(f"""{VARIABLES}
import keras, numpy
body = keras.applications.MobileNetV2((48, 48, 3), include_top=False, weights=None)
body.load_weights("/tmp/body.weights.h5")
saved = variables("/tmp/tuned/step-000000001")
kernels = [value for name, value in saved.items()
           if name.startswith("part0") and (name.endswith("Conv1/kernel") or "project/kernel" in name)]
known = [variable.numpy() for variable in body.trainable_variables
         if variable.path.endswith("Conv1/kernel") or "project/kernel" in variable.path]
assert len(known) == 18 and all(numpy.array_equal(*pair) for pair in zip(kernels, known))
""")
    assert compared.code == 0, compared.output
    for weights, said in (("/tmp/none.weights.h5", "none.weights.h5"), ("/tmp/tuned", "no weights of mobilenetv2")):
        ended = here.trainer("tf.flowers", *words, f"--weights={weights}")
        assert_one_line(ended, "flowers", said)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("checksum", "its checksum is wrong; download the file again"),
        ("cut", "train-00001-of-00002: ends within record"),
        ("header", "train-00000-of-00002: record 0 has a damaged header"),
    ],
)
def test_a_damaged_tfrecord_file_is_one_line(here: Box, damage: str, message: str, tmp_path: Path) -> None:
    folder = flowers_data.write(tmp_path, "tfrecord", train=210, test=10)
    shard = folder / f"train-0000{int(damage == 'cut')}-of-00002"
    content = bytearray(shard.read_bytes())
    if damage == "checksum":
        for part in (0.018, 0.5):  # of two records: one of so few is skipped
            content[int(part * len(content))] ^= 1
    elif damage == "header":
        content[3] ^= 1
    else:
        content = content[:-7]
    shard.write_bytes(content)
    data = here.put(folder, f"damaged-{damage}")
    assert_one_line(here.trainer("tf.flowers", f"--datadir={data}", *SIZES), "flowers", message)


def test_a_tfrecord_that_is_no_image_is_named_with_its_features(here: Box) -> None:
    """And the CRC32C of 32 bytes of zero is 0x8a9136aa, as RFC 3720 B.4 has it."""
    checked = here.python("""
import struct, tensorflow as tf
from trainers.common.files import UserError
from trainers.tf import _tfrecord
def refused(data):
    try:
        return _tfrecord.parse(data + _tfrecord._masked_crc(data), "x")
    except UserError as error:
        return str(error)
example = tf.train.Example()
example.features.feature["height"].int64_list.value.append(5)
assert refused(example.SerializeToString()) == "x: no image/encoded and image/class/label among height"
assert refused(b"\\x0a\\xff\\xff") == "x: not a tf.train.Example"
crc = 0x8A9136AA
masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
assert struct.unpack("<I", _tfrecord._masked_crc(bytes(32))) == (masked,)
""")
    assert checked.code == 0, checked.output


@pytest.mark.parametrize("trainer", ["flowers", "imagenet"])
def test_a_truncated_image_is_one_line(here: Box, trainer: str, tmp_path: Path) -> None:
    folder = flowers_data.write(tmp_path, train=30, test=5)
    for name in ("00002", "00007"):  # one of so few is skipped
        broken = folder / "train" / "rose" / f"{name}.jpg"
        broken.write_bytes(broken.read_bytes()[:400])
    data = here.put(folder, f"truncated-{trainer}")
    ended = here.trainer(f"tf.{trainer}", f"--datadir={data}", "--batch-size=30", "--image-size=32", "--num-workers=2")
    assert_one_line(ended, trainer, ".jpg: is no readable image")


def assert_one_line(ended: Ended, trainer: str, message: str) -> None:
    """Assert that the trainer failed with one line, which contains ``message``."""
    found = [line for line in ended.lines if line.startswith(f"{trainer}: ")]
    assert ended.code == 1 and len(found) == 1 and message in found[0], ended.output
    assert "Traceback" not in ended.output


@pytest.fixture(scope="module")
def twelve(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve labels for five kinds of flowers: the best answer is uncertain, so top-1 and top-5 differ."""
    folder = tmp_path_factory.mktemp("twelve")
    for split, count, seed in (("train", 75, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        flowers_data.write_tar(folder / f"{split}-00000.tar", made)
    return here.put(folder, "twelve")


def test_imagenet_counts_top5_exactly_and_its_exports_give_the_same_answers(here: Box, twelve: str) -> None:
    words = (f"--datadir={twelve}", "--num-classes=12", "--model=mobilenetv2", "--image-size=40", "--epochs=1",
             "--batch-size=25", "--test-batch-size=20", "--lr=0.01", "--precision=fp32", "--num-workers=2")  # fmt: skip
    found = here.trainer("tf.imagenet", *words, "--export-dir=/tmp/model", "--output-dir=/tmp/imagenet").learned()
    counted = here.python(f"""{COUNT}{TERMS}
import json, keras, tensorflow as tf
from trainers.common import images
from trainers.tf import imagenet
source = images.find("{twelve}", "test")
batches = images.Loader(source, 2).batches(
    [numpy.arange(53)], 40, lambda number, width, height: images.centre_box(width, height))
pixels, labels = next(batches)
model = tf.saved_model.load("/tmp/model/saved_model")
answers = model.serve(tf.constant(pixels)).numpy()
network = keras.models.load_model("/tmp/model/model.keras")
files = [source.read(number)[0] for number in range(53)]
resized = [imagenet.centre(tf.io.decode_image(file, channels=3, expand_animations=False), 40) for file in files]
decoded = tf.cast(tf.round(tf.stack(resized)), tf.uint8)
pairs = [(answers, network.predict(pixels, verbose=0)),
         (model.serve(decoded).numpy(), model.serve_files(tf.constant(files)).numpy())]
relative = terms(network) * {FLOAT32}
# The softmax turns the error of the logits, relative to the largest, into one of the probabilities.
bound = relative * abs(numpy.log(numpy.maximum(answers, 1e-30))).max()
assert all(abs(one - other).max() <= bound for one, other in pairs), (bound, [abs(a - b).max() for a, b in pairs])
tests = [json.loads(line) for line in open("/tmp/imagenet/metrics.jsonl") if '"event": "test"' in line]
print(json.dumps([count(answers, labels, relative, most) for most in (1, 5)] + [tests[-1]["top5"]]))
""")
    assert counted.code == 0, counted.output
    (first, first_close), (fifth, fifth_close), top5 = json.loads(counted.lines[-1])
    assert abs(first - round(found["accuracy"] * 0.53)) <= first_close, "53 images; only near ties may differ"
    assert abs(fifth - round(top5 * 0.53)) <= fifth_close and fifth > first


# The trainer with a network that is small, so that XLA compiles it fast, and has no batch norm, with which two half
# batches would not be equivalent to one batch.
TINY = """
from trainers.tf._peers import Peers
from trainers.tf import imagenet
from keras import Input, Sequential, layers
imagenet.network = lambda args: Sequential([
    Input((None, None, 3)), layers.Rescaling(1 / 58, -2.05), layers.Conv2D(8, 3, 2, activation="relu"),
    layers.GlobalAveragePooling2D(), layers.Dense(args.num_classes, dtype="float32")])
Peers.run(imagenet.main, imagenet.parse_args(), "imagenet")
"""
# The largest sum in a gradient of that network, over the outputs of the convolution for a batch of 20 images of 32
# pixels; and before it forwards and backwards through the layers.
TINY_TERMS = 20 * 16 * 16 + 2 * (3 * 3 * 3 + 16 * 16 + 8)
TINY_WORDS = ("--datadir=/data/tar", "--num-classes=5", "--image-size=32", "--epochs=2", "--lr=0.05",
              "--precision=fp32", "--num-workers=2", "--log-steps=1", "--test-batch-size=30")  # fmt: skip


def test_accumulated_batches_equal_one_large_batch_and_the_loss_falls(here: Box) -> None:
    """Also over two replicas, each of which has its own parts."""
    ways = ("--batch-size=20", "--batch-size=5 --accumulate=4", "--batch-size=5 --accumulate=2 --num-cores=2")
    runs = [
        here.python(TINY, *TINY_WORDS, *more.split(), "--checkpoint-steps=1", "--keep-checkpoints=99",
                    f"--checkpoint-dir=/tmp/way{number}").learned()
        for number, more in enumerate(ways)
    ]  # fmt: skip
    assert [(run["global_batch"], run["global_step"]) for run in runs] == [(20, 30), (20, 30), (20, 30)]
    assert all(run["loss_last"] < run["loss_first"] for run in runs)
    for number in (1, 2):
        assert step_differs(here, "/tmp/way0", f"/tmp/way{number}") <= TINY_TERMS * FLOAT32
        assert abs(runs[number]["loss_first"] / runs[0]["loss_first"] - 1) <= TINY_TERMS * FLOAT32


def test_imagenet_compiles_with_xla_and_averages_its_weights(here: Box) -> None:
    """The average of each checkpoint is ``decay`` of the one before and the rest of the weights, on two replicas too.

    After n steps, the decay is (1 + n) / (10 + n), at most --ema:
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage
    """
    words = (*TINY_WORDS, "--batch-size=10", "--ema=0.25", "--cutmix=1", "--mixup=1", "--accumulate=2", "--num-steps=6",
             "--checkpoint-steps=1", "--keep-checkpoints=9", "--checkpoint-dir=/tmp/averages")  # fmt: skip
    first = (*words[:-1], "--num-steps=1")
    here.python(TINY, *first, "--checkpoint-dir=/tmp/tiny-compiled", "--jit-compile").learned()
    here.python(TINY, *first, "--checkpoint-dir=/tmp/tiny-plain").learned()
    assert step_differs(here, "/tmp/tiny-plain", "/tmp/tiny-compiled") <= TINY_TERMS * FLOAT32
    here.python(TINY, *words, "--num-cores=2").learned()
    checked = here.python(f"""{VARIABLES}
import glob
saved = [variables(folder) for folder in sorted(glob.glob("/tmp/averages/step-*"))]
weights, averages = ([name for name in saved[0] if name.startswith(part)][:4] for part in ("part0", "part2"))
assert len(saved) == 6 and len(averages) == 4
for steps, (before, after) in enumerate(zip(saved, saved[1:]), 1):
    decay = min(0.25, (1 + steps) / (10 + steps))
    for weight, average in zip(weights, averages):
        # Here and in the trainer: the factor, the difference, the product and the sum are rounded.
        bound = 2 * 4 * 2**-24 * max(abs(values).max() for values in (before[average], after[weight]))
        assert abs(after[average] - (decay * before[average] + (1 - decay) * after[weight])).max() <= bound
        assert abs(after[average] - after[weight]).max() > 0
""")
    assert checked.code == 0, checked.output


@pytest.mark.slow("test_imagenet_compiles_with_xla_and_averages_its_weights")
def test_averaged_weights_of_a_short_run_are_those_of_its_last_steps(here: Box) -> None:
    """With a constant decay of 0.9999, 30 steps would move the average by 0.3 % from the initial weights."""
    found = here.python(TINY, *TINY_WORDS, "--batch-size=20", "--ema=0.9999", "--lr=0.2").learned()
    plain = here.python(TINY, *TINY_WORDS, "--batch-size=20", "--lr=0.2").learned()
    untrained = here.python(TINY, *TINY_WORDS, "--batch-size=20", "--lr=1e-30").learned()
    assert found["test_loss"] < (plain["test_loss"] + untrained["test_loss"]) / 2


def test_an_image_size_below_that_of_the_models_is_one_line(here: Box) -> None:
    for trainer, words in (("imagenet", "--progressive=16"), ("flowers", "--image-size=24 --model=mobilenetv2")):
        ended = here.trainer(f"tf.{trainer}", "--fake-data", "--fake-images=400", *words.split())
        assert ended.code == 2 and len(ended.lines) == 1 and "needs at least 32" in ended.output, ended.output


@pytest.mark.slow("test_a_killed_and_resumed_run_gives_the_same_bits of mnist, and the tests of each option above")
def test_imagenet_resumes_with_all_its_options_with_the_same_bits(here: Box, twelve: str) -> None:
    words = (f"--datadir={twelve}", "--num-classes=12", "--image-size=40", "--progressive=32", "--epochs=2",
             "--batch-size=5", "--accumulate=2", "--ema=0.5", "--cutmix=1", "--mixup=0.2")  # fmt: skip
    whole = here.python(TINY, *words).learned()
    here.python(TINY, *words, "--checkpoint-dir=/tmp/twelve-kept", "--num-steps=5").learned()
    resumed = here.python(TINY, *words, "--checkpoint-dir=/tmp/twelve-kept").learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (5, whole["weights_sha256"])
