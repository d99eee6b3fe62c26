"""The TensorFlow trainers in the tf-cpu image: flowers and ImageNet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.datasets import flowers as flowers_data
from tests.image.trainer_box import Box, Ended, box

SIZES = ("--image-size=48", "--batch-size=25", "--num-workers=2")
FORMS = ("folder", "tfrecord", "tar")


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
    return here.trainer(
        "tf.flowers", "--datadir=/data/folder", *SIZES, "--epochs=8", "--export-dir=/tmp/flowers"
    ).learned()


def test_flowers_learns_from_class_folders(grown: dict[str, object]) -> None:
    assert grown["accuracy"] >= 90 and grown["compile_count"] == 2
    assert grown["classes"] == list(flowers_data.CLASSES)


@pytest.mark.parametrize("form", FORMS[1:])
def test_flowers_learns_from_shards(here: Box, form: str) -> None:
    ended = here.trainer("tf.flowers", f"--datadir=/data/{form}", *SIZES, "--epochs=8", "--target-accuracy=90")
    assert ended.learned()["status"] == "reached", "or it had ended with 21"


def test_the_exports_of_flowers_answer_alike_in_a_fresh_process(here: Box, grown: dict[str, object]) -> None:
    """As pixels, and as the files themselves: the bytes of a JPEG in, probabilities out."""
    loaded = here.python("""
import json, keras, numpy, tensorflow as tf
from trainers.common import images
found = images.find("/data/folder", "test")
pixels, labels = images.Loader(found, 2).all(48)
files = tf.constant([found.read(number)[0] for number in range(found.count)])
model = tf.saved_model.load("/tmp/flowers/saved_model")
answers = [model.signatures["serving_default"](images=tf.constant(pixels))["output_0"].numpy(),
           model.signatures["serve_files"](image_bytes=files)["output_0"].numpy(),
           keras.models.load_model("/tmp/flowers/model.keras").predict(pixels, verbose=0)]
assert abs(answers[0] - answers[2]).max() < 1e-4 and abs(answers[0] - answers[1]).max() < 0.1
print(json.dumps([100 * float((answer.argmax(1) == labels).mean()) for answer in answers]))
""")
    assert loaded.code == 0, loaded.output
    # The trainer scales its own larger copy of an image down once more: a few pixels, at most two pictures differ.
    for accuracy in json.loads(loaded.lines[-1]):
        assert accuracy == pytest.approx(grown["accuracy"], abs=100 * 2 / 60)


def test_flowers_resumes_within_an_epoch_with_the_same_bits(here: Box, grown: dict[str, object]) -> None:
    words = ("--datadir=/data/folder", *SIZES, "--epochs=8", "--checkpoint-dir=/tmp/kept")
    here.trainer("tf.flowers", *words, "--num-steps=17").learned()
    resumed = here.trainer("tf.flowers", *words).learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (17, grown["weights_sha256"])


def test_flowers_compiles_with_xla_and_crops_as_tensorflow_resizes(here: Box) -> None:
    """What a TPU needs; the boxes are cut by matrix products, since XLA has no crop_and_resize."""
    words = (
        "--fake-data",
        "--fake-images=40",
        "--image-size=32",
        "--batch-size=8",
        "--num-steps=3",
        "--precision=fp32",
    )
    plain, compiled = (here.trainer("tf.flowers", *words, "--log-steps=1", *more).learned()
                       for more in ((), ("--jit-compile",)))  # fmt: skip
    assert compiled["loss_first"] == pytest.approx(plain["loss_first"], rel=1e-4)
    assert compiled["loss_last"] == pytest.approx(plain["loss_last"], rel=0.05)
    checked = here.python("""
import numpy, tensorflow as tf
from trainers.tf import flowers
pictures = tf.constant(numpy.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), numpy.uint8))
numbers = tf.constant([4, 0])
def cut(upper, lower, left, right):
    return flowers.cut_out(pictures, numbers, tf.constant([[upper, lower, left, right]] * 2, tf.float32), 16).numpy()
part = tf.image.resize(tf.gather(pictures, numbers)[:, 10:30, 20:40], [16, 16], antialias=True).numpy()
whole = tf.image.resize(tf.gather(pictures, numbers), [16, 16], antialias=True).numpy()
assert abs(cut(0, 1, 0, 1) - whole).max() < 1e-2
assert abs(cut(0, 1, 1, 0) - whole[:, :, ::-1]).max() < 1e-2, "left and right exchanged mirrors"
assert abs(cut(.25, .75, .5, 1) - part)[:, 1:-1, 1:-1].max() < 1e-2, "apart from the rim, where it sees beyond the box"
""")
    assert checked.code == 0, checked.output


def test_flowers_starts_from_a_weights_file(here: Box) -> None:
    """What is in the file is what the body starts with, and learns at a tenth of the rate of the new head."""
    made = here.python("""
import keras
keras.utils.set_random_seed(7)
keras.applications.MobileNetV2((48, 48, 3), include_top=False, weights=None).save_weights("/tmp/body.weights.h5")
""")
    assert made.code == 0, made.output
    words = ("--datadir=/data/tar", *SIZES, "--model=mobilenetv2", "--num-steps=1", "--lr=1e-30", "--weight-decay=0")
    here.trainer("tf.flowers", *words, "--weights=/tmp/body.weights.h5", "--checkpoint-dir=/tmp/tuned").learned()
    compared = here.python("""
import keras, numpy
body = keras.applications.MobileNetV2((48, 48, 3), include_top=False, weights=None)
body.load_weights("/tmp/body.weights.h5")
with numpy.load("/tmp/tuned/step-000000001.ckpt") as saved:
    kernels = [saved[name] for name in sorted(saved.files) if name.endswith("Conv1/kernel") or "project/kernel" in name]
known = [variable.numpy() for variable in body.trainable_variables
         if variable.path.endswith("Conv1/kernel") or "project/kernel" in variable.path]
assert len(known) == 18 and all(numpy.array_equal(*pair) for pair in zip(kernels, known))
""")
    assert compared.code == 0, compared.output
    for weights, said in (("/tmp/none.weights.h5", "none.weights.h5"), ("/tmp/tuned", "no weights of mobilenetv2")):
        ended = here.trainer("tf.flowers", *words, f"--weights={weights}")
        assert ended.code == 1 and len(ended.lines) == 1 and said in ended.output, ended.output


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("checksum", "train-00000-of-00002: record 3: its checksum is wrong; fetch the file again"),
        ("cut", "train-00001-of-00002: ends within record"),
        ("header", "train-00000-of-00002: record 0 has a damaged header"),
    ],
)
def test_a_damaged_tfrecord_is_one_clear_line(here: Box, damage: str, said: str, tmp_path: Path) -> None:
    folder = flowers_data.write(tmp_path, "tfrecord", train=210, test=10)
    shard = folder / f"train-0000{int(damage == 'cut')}-of-00002"
    content = bytearray(shard.read_bytes())
    if damage == "checksum":
        content[int(0.018 * len(content))] ^= 1
    elif damage == "header":
        content[3] ^= 1
    else:
        content = content[:-7]
    shard.write_bytes(content)
    data = here.put(folder, f"damaged-{damage}")
    assert_one_line(here.trainer("tf.flowers", f"--datadir={data}", *SIZES), "flowers", said)


@pytest.mark.parametrize("trainer", ["flowers", "imagenet"])
def test_a_truncated_picture_is_one_clear_line(here: Box, trainer: str, tmp_path: Path) -> None:
    folder = flowers_data.write(tmp_path, train=30, test=5)
    broken = folder / "train" / "rose" / "00002.jpg"
    broken.write_bytes(broken.read_bytes()[:400])
    data = here.put(folder, f"truncated-{trainer}")
    ended = here.trainer(f"tf.{trainer}", f"--datadir={data}", "--batch-size=30", "--image-size=32", "--num-workers=2")
    assert_one_line(ended, trainer, "rose/00002.jpg: is no readable image")


def assert_one_line(ended: Ended, trainer: str, said: str) -> None:
    """The process failed with one line of its own, which has ``said`` in it."""
    found = [line for line in ended.lines if line.startswith(f"{trainer}: ")]
    assert ended.code == 1 and len(found) == 1 and said in found[0], ended.output
    assert "Traceback" not in ended.output


@pytest.fixture(scope="module")
def twelve(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve labels for five kinds of flowers: nobody can be sure of the first guess, so top-1 and top-5 differ."""
    folder = tmp_path_factory.mktemp("twelve")
    for split, count, seed in (("train", 75, 1), ("test", 53, 2)):
        made = [(number % 12, content) for number, (_, content) in enumerate(flowers_data.pictures(count, seed))]
        flowers_data.write_tar(folder / f"{split}-00000.tar", made)
    return here.put(folder, "twelve")


def test_imagenet_counts_top5_exactly_and_its_exports_answer_alike(here: Box, twelve: str) -> None:
    words = (f"--datadir={twelve}", "--num-classes=12", "--model=mobilenetv2", "--image-size=40", "--epochs=1",
             "--batch-size=25", "--test-batch-size=20", "--lr=0.01", "--precision=fp32", "--num-workers=2")  # fmt: skip
    found = here.trainer("tf.imagenet", *words, "--export-dir=/tmp/model", "--output-dir=/tmp/imagenet").learned()
    assert found["compile_count"] == 2
    counted = here.python(f"""
import json, keras, numpy, tensorflow as tf
from trainers.common import images
source = images.find("{twelve}", "test")
batches = images.Loader(source, 2).batches(
    [numpy.arange(53)], 40, lambda number, width, height: images.centre_box(width, height))
pixels, labels = next(batches)
model = tf.saved_model.load("/tmp/model/saved_model")
answers = model.serve(tf.constant(pixels)).numpy()
again = keras.models.load_model("/tmp/model/model.keras").predict(pixels, verbose=0)
files = model.serve_files(tf.constant([source.read(number)[0] for number in range(53)])).numpy()
best = numpy.argsort(-answers, axis=1)[:, :5]
tests = [json.loads(line) for line in open("/tmp/imagenet/metrics.jsonl") if '"event": "test"' in line]
hits = best == labels[:, None]
print(json.dumps([100 * hits[:, 0].mean(), 100 * hits.any(1).mean(), tests[-1]["top5"],
                  float(abs(answers - again).max()), float(abs(answers - files).max())]))
""")
    top1, top5, reported, keras_differs, files_differ = json.loads(counted.lines[-1])
    assert top1 == pytest.approx(found["accuracy"], abs=1e-4)
    assert top5 == pytest.approx(reported, abs=1e-4) and top5 > top1
    assert keras_differs < 1e-4 and files_differ < 0.1


# The trainer as it is, but with a network so small that XLA compiles it at once, and without batch norm, under which
# two half batches would not be one whole.
TINY = """
import sys
from keras import Input, Model, Sequential, layers
from trainers.common import exits, flags, imagenet_data
from trainers.tf import _strategy, imagenet
from trainers.tf._flags import FLAGS
imagenet.network = lambda args: Sequential([
    Input((None, None, 3)), layers.Rescaling(1 / 58, -2.05), layers.Conv2D(8, 3, 2, activation="relu"),
    layers.GlobalAveragePooling2D(), layers.Dense(args.num_classes, dtype="float32")])
args = flags.parse("imagenet", "", (*FLAGS, *imagenet_data.FLAGS, imagenet.MODEL), sys.argv[1:], test_batch_size=30)
exits.guard(_strategy.together(imagenet.main), args, "imagenet")
"""
TINY_WORDS = ("--datadir=/data/tar", "--num-classes=5", "--image-size=32", "--epochs=2", "--lr=0.05",
              "--precision=fp32", "--num-workers=2", "--log-steps=1")  # fmt: skip


def test_accumulated_batches_equal_one_large_batch_and_the_loss_falls(here: Box) -> None:
    """Also over two replicas, each of which has its own parts."""
    ways = ("--batch-size=20", "--batch-size=5 --accumulate=4", "--batch-size=5 --accumulate=2 --num-cores=2")
    runs = [here.python(TINY, *TINY_WORDS, *more.split()).learned() for more in ways]
    assert [run["global_batch"] for run in runs] == [20, 20, 20]
    assert runs[0]["loss_last"] < runs[0]["loss_first"]
    for run in runs[1:]:
        assert run["loss_first"] == pytest.approx(runs[0]["loss_first"], rel=1e-5)
        assert run["test_loss"] == pytest.approx(runs[0]["test_loss"], rel=1e-3)


def test_imagenet_compiles_with_xla_and_averages_its_weights(here: Box) -> None:
    """The average of each checkpoint is 0.9 of the one before and 0.1 of the weights, on two replicas too."""
    words = (*TINY_WORDS, "--batch-size=10", "--ema=0.9", "--cutmix=1", "--mixup=1", "--accumulate=2", "--num-steps=6",
             "--checkpoint-steps=1", "--keep-checkpoints=9", "--checkpoint-dir=/tmp/averages")  # fmt: skip
    compiled = here.python(TINY, *words[:-1], "--checkpoint-dir=", "--jit-compile").learned()
    plain = here.python(TINY, *words[:-1], "--checkpoint-dir=").learned()
    assert compiled["loss_last"] == pytest.approx(plain["loss_last"], rel=1e-3)
    here.python(TINY, *words, "--num-cores=2").learned()
    checked = here.python("""
import glob, numpy
saved = [dict(numpy.load(path)) for path in sorted(glob.glob("/tmp/averages/*.ckpt"))]
names = sorted(name for name in saved[0] if name != "run")
weights, averages = names[:4], names[-4:]
assert len(saved) == 6 and len(names) > 8
for before, after in zip(saved, saved[1:]):
    for weight, average in zip(weights, averages):
        assert abs(after[average] - (0.9 * before[average] + 0.1 * after[weight])).max() < 1e-6
        assert abs(after[average] - after[weight]).max() > 0
""")
    assert checked.code == 0, checked.output


def test_imagenet_resumes_with_all_its_options_with_the_same_bits(here: Box, twelve: str) -> None:
    words = (f"--datadir={twelve}", "--num-classes=12", "--image-size=40", "--progressive=32", "--epochs=2",
             "--batch-size=5", "--accumulate=2", "--ema=0.5", "--cutmix=1", "--mixup=0.2")  # fmt: skip
    whole = here.python(TINY, *words).learned()
    assert whole["compile_count"] == 3, "one function for each of two sizes to train, one to test"
    here.python(TINY, *words, "--checkpoint-dir=/tmp/twelve-kept", "--num-steps=5").learned()
    resumed = here.python(TINY, *words, "--checkpoint-dir=/tmp/twelve-kept").learned()
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (5, whole["weights_sha256"])
