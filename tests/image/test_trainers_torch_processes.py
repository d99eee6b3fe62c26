"""The PyTorch trainers with several processes, buckets, uneven data, pretrained weights and traces.

All in one xla image, on the CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.image.trainer_box import FLOAT32, PYTHON, TENSORS, Box, box
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data
from trainyard.sandbox.fakes import storage

pytestmark = [pytest.mark.concurrent, pytest.mark.big("xla")]

CPU = ("--device=cpu", "--num-workers=2")
SMALL = (*CPU, "--image-size=32", "--batch-size=5", "--test-batch-size=7")
TWO = "--num-cores=2"
PORT = 8765


@pytest.fixture(scope="module")
def here(built_image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(built_image("xla"), PJRT_DEVICE="CPU") as started:
        started.put(digits.write_idx(tmp_path_factory.mktemp("digits"), gz=True), "digits")
        yield started


@pytest.fixture(scope="module")
def flowers(here: Box, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One shard for training and one of 53 images for the test: fewer shards than processes, and uneven shares."""
    return here.put(flowers_data.write(tmp_path_factory.mktemp("flowers"), "tar", train=103, test=53), "flowers")


def test_sigterm_to_the_launcher_saves_once_and_ends_with_143(here: Box) -> None:
    command = (
        f"launch -- {PYTHON} -m trainers.torch.mnist --datadir=/data/digits --device=cpu --batch-size=32 --epochs=500"
    )
    (ended,) = here.run_parallel(
        f"sh -c 'LAUNCHER_NPROC=2 {command} --checkpoint-dir=/tmp/two & echo $! >/tmp/two.pid; "
        "until grep -q accuracy /tmp/out0; do sleep 0.1; done; kill -TERM $(cat /tmp/two.pid);"
        "wait $(cat /tmp/two.pid)'"
    )
    assert (ended.code, ended.summary["status"], ended.summary["processes"]) == (143, "preempted", 2), ended.output
    assert f"step-{ended.summary['global_step']:09d}" in here.run("ls", "/tmp/two").output


def test_a_replica_that_does_not_train_ends_with_one_line(here: Box) -> None:
    ranked = {"RANK": "0", "WORLD_SIZE": "1"}
    words = ("--datadir=/data/digits", "--device=cpu", "--checkpoint-dir=/tmp/idle")
    ended = here.trainer("torch.mnist", *words, LAUNCHER_ROLE="server", **ranked)
    assert ended.code == 0, ended.output
    assert "which this trainer does not need" in ended.output.splitlines()[-1]
    assert here.run("ls", "/tmp/idle").code != 0, "nothing was written"


def test_torch_tpu_uses_the_chip_of_its_process_and_refuses_hosts_without_a_rank(here: Box) -> None:
    """With the accelerator of torch_tpu simulated: it has 8 chips, and binds each process to one, at index 0."""
    found = here.python("""
import os, types
import torch
from trainers.common.files import UserError
from trainers.torch import _peers
torch.accelerator = types.SimpleNamespace(
    is_available=lambda: True, current_accelerator=lambda: types.SimpleNamespace(type="tpu"), device_count=lambda: 8,
    current_device_index=lambda: 0)
torch.device = lambda *given: given
os.environ["TPU_WORKER_HOSTNAMES"] = "a,b"
try:
    _peers.find_device("auto", 1)
except UserError as error:
    print(error.code, error)
os.environ["RANK"] = "3"
print(_peers.find_device("auto", 8))
""")
    assert found.lines[0].startswith("2 this is one of 2 TPU hosts (TPU_WORKER_HOSTNAMES), but RANK is unset")
    assert found.lines[1] == "('tpu', 0)", found.output


def test_two_processes_test_every_image_of_one_uneven_shard_once(here: Box, flowers: str) -> None:
    run = (f"--datadir={flowers}", "--num-classes=5", "--model=resnet18", "--epochs=1", "--warmup-epochs=0",
           "--precision=fp32", "--lr=0.001", "--momentum=0", *SMALL)  # fmt: skip
    two = here.trainer("torch.imagenet", *run, TWO, "--output-dir=/tmp/uneven").learned()
    tests = here.python("""
import json
print([json.loads(line)["accuracy"] for line in open("/tmp/uneven/metrics.jsonl") if '"event": "test"' in line])
""")
    (accuracy,) = json.loads(tests.output)
    assert 0 < accuracy < 100 and accuracy * 53 / 100 == pytest.approx(round(accuracy * 53 / 100)), "53 images"
    assert (two["global_batch"], two["global_step"]) == (10, 10), "103 images make ten steps of two times five"


def test_a_truncated_image_in_one_of_two_processes_ends_both_with_one_line(
    here: Box, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = flowers_data.write(tmp_path_factory.mktemp("broken"), train=60, test=10)
    for name in ("00002", "00007", "00012"):  # one of so few is skipped in each process
        broken = folder / "train" / "rose" / f"{name}.jpg"
        broken.write_bytes(broken.read_bytes()[:400])
    run = f"--datadir={here.put(folder, 'broken')} --num-classes=5 --model=resnet18 --epochs=2 {' '.join(SMALL)} {TWO}"
    (ended,) = here.run_parallel(f"env LAUNCHER_NPROC=2 launch -- {PYTHON} -m trainers.torch.imagenet {run}")
    assert ended.code == 1, ended.output
    said = [line for line in ended.lines if line.startswith("imagenet: ")]
    # Another thread may have met the third when the line about the second one is written.
    damaged = re.compile(r"\.jpg: is no readable image .*\([23] damaged images")
    assert len([line for line in said if damaged.search(line)]) == 1, ended.output
    assert len(said) == 1 or "lost another process of the run" in ended.output
    assert "Traceback" not in ended.output


def test_data_checkpoints_exports_and_logs_can_be_in_a_bucket(here: Box, tmp_path: Path) -> None:
    """gcsfs with a fake Storage API: data, checkpoints, metrics, event files, export."""
    (tmp_path / "storage.py").write_bytes(Path(storage.__file__).read_bytes())
    serve = f"{PYTHON} -I -S {here.put(tmp_path, 'fake')}/storage.py /tmp/buckets"
    here.run("mkdir", "-p", "/tmp/buckets/bucket")
    here.run("cp", "-r", "/data/digits", "/tmp/buckets/bucket/")
    here.run("sh", "-c", f"{serve} --port={PORT} >/tmp/storage.log 2>&1 &")
    here.until("/tmp/storage.log", "url")
    fake = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{PORT}"}
    job = ("--datadir=gs://bucket/digits", "--epochs=2", "--device=cpu", "--job-dir=gs://bucket/job",
           "--output-dir=gs://bucket/job/out")  # fmt: skip
    stopped = here.trainer("torch.mnist", *job, "--num-steps=30", **fake).learned()
    found = here.trainer("torch.mnist", *job, **fake).learned()
    assert (stopped["global_step"], found["resumed_from"]) == (30, 30)
    whole = here.trainer("torch.mnist", "--datadir=/data/digits", "--epochs=2", "--device=cpu").learned()
    assert found["weights_sha256"] == whole["weights_sha256"]
    looked = here.python("""
import json, pathlib
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
bucket = pathlib.Path("/tmp/buckets/bucket")
files = {str(path.relative_to(bucket)): path.read_bytes() for path in (bucket / "job").rglob("*") if path.is_file()}
events = [event["event"] for event in map(json.loads, files["job/out/metrics.jsonl"].splitlines())]
board = [sum(1 for _ in RawEventFileLoader(str(bucket / name)).Load()) for name in sorted(files) if "tfevents" in name]
print(json.dumps([sorted(name for name in files if "tfevents" not in name), events, board]))
""")
    names, events, board = json.loads(looked.lines[-1])
    saved = [f"job/checkpoints/step-{step:09d}/{name}" for step in (22, 30, 44)
             for name in (".metadata", "__0_0.distcp", "run.json")]  # fmt: skip
    assert names == [*saved, "job/model/model.onnx", "job/model/model.pt2", "job/model/model.safetensors",
                     "job/out/metrics.jsonl", "job/out/report.json"]  # fmt: skip
    assert events.count("start") == events.count("summary") == 2, "a resumed run's metrics follow the first run's"
    # A first record of the format's version; loss, rate and learning rate of steps 1 and 20, accuracy and loss of the
    # test; then of steps 31 and 40.
    assert board == [1 + 2 * 3 + 2, 1 + 2 * 3 + 2], "no event is lost"
    here.trainer("torch.mnist", *job, "--no-resume", "--num-steps=1", **fake).learned()
    kept = here.run("sh", "-c", "cd /tmp/buckets/bucket/job/checkpoints && ls -d step-* old-*/*").output.split()
    moved = [name.rpartition("/")[2] for name in kept[:-1]]
    assert moved == ["step-000000022", "step-000000030", "step-000000044"]
    assert kept[-1] == "step-000000001" and kept[0].startswith("old-")
    # The same bucket, by a server that refuses every request.
    here.run("sh", "-c", f"{serve} --port={PORT + 1} --refuse=403 >/tmp/refusing.log 2>&1 &")
    here.until("/tmp/refusing.log", "url")
    refused = here.trainer("torch.mnist", *job, STORAGE_EMULATOR_HOST=f"http://127.0.0.1:{PORT + 1}")
    assert refused.code == 1 and len(refused.lines) == 1, refused.output
    assert refused.lines[0].startswith("mnist: gs://bucket/digits: cannot be reached: Forbidden")


def test_pretrained_weights_fill_all_but_the_last_layer_which_has_ten_times_the_learning_rate(
    here: Box, flowers: str
) -> None:
    """A step with a learning rate of 1e-30 shows the weights at the start: in float32 it only changes zeros."""
    made = here.python("""
import torch
from torchvision import models
torch.manual_seed(7)
torch.save(models.resnet18(num_classes=1000).state_dict(), "/tmp/resnet18.pth")
torch.save({"nonsense": torch.zeros(1)}, "/tmp/nonsense.pth")
""")
    assert made.code == 0, made.output
    run = (f"--datadir={flowers}", *SMALL, "--model=resnet18", "--epochs=1", "--momentum=0", "--precision=fp32")
    first = ("--num-steps=1", "--lr=1e-30", "--checkpoint-dir=/tmp/started")
    here.trainer("torch.flowers", *run, *first, "--weights=/tmp/resnet18.pth").learned()
    compared = here.python(f"""{TENSORS}
import argparse, glob
from torchvision import models
from trainers.torch import flowers
given = torch.load("/tmp/resnet18.pth", weights_only=True)
found = tensors(glob.glob("/tmp/started/step-*")[0])
names = [name for name, _ in models.resnet18().named_parameters() if not name.startswith("fc.")]
args = argparse.Namespace(weights="given", model="resnet18", weight_decay=0)
rates = [group["lr_scale"] for group in flowers.parameter_groups(args, models.resnet18())]
started = [torch.where(given[name] == 0, 0, found[name]) for name in names]
print(all(torch.equal(*pair) for pair in zip(started, (given[name] for name in names))), len(names),
      list(found["fc.weight"].shape), rates)
""")
    assert compared.output == "True 60 [5, 512] [1.0, 0.1]\n", compared.output
    for path, said in (("/tmp/none.pth", "[Errno 2] No such file"), ("/tmp/nonsense.pth", "conv1.weight is missing")):
        wrong = here.trainer("torch.flowers", *run, f"--weights={path}")
        assert wrong.code == 1 and "Traceback" not in wrong.output
        assert f"flowers: --weights {path}: no weights of resnet18: {said}" in wrong.output, wrong.output


# Models with random weights and averages of batch norm, and what loads a file of them as the trainer does.
WEIGHTS = """
import argparse, torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torchvision import models
from trainers.common.files import UserError
from trainers.torch import _images

def made(name):
    torch.manual_seed(5)
    model = models.get_model(name, weights=None)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and (tensor.dim() < 2 or name.startswith("heads.")):
            tensor.data.uniform_(0.5, 1.5)
    return model.eval()

def loaded(name, path, side=224, classes=1000):
    return _images.flowers_network(argparse.Namespace(model=name, weights=path, image_size=side), classes).eval()

# As timm 1.0.31 has it, by the names of its weights: https://github.com/huggingface/pytorch-image-models/blob/v1.0.31/timm/models/vision_transformer.py
def timm_vit(w, images):
    x = F.conv2d(images, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16).flatten(2).transpose(1, 2)
    x = torch.cat([w["cls_token"].expand(len(x), -1, -1), x], dim=1) + w["pos_embed"]
    def linear(name, x):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])
    def norm(name, x):
        return F.layer_norm(x, [768], w[name + ".weight"], w[name + ".bias"], 1e-6)
    for block in (f"blocks.{number}." for number in range(12)):
        qkv = linear(block + "attn.qkv", norm(block + "norm1", x)).reshape(len(x), -1, 3, 12, 64)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(2, 3) / 8).softmax(dim=3) @ v
        x = x + linear(block + "attn.proj", mixed.transpose(1, 2).reshape(x.shape))
        x = x + linear(block + "mlp.fc2", F.gelu(linear(block + "mlp.fc1", norm(block + "norm2", x))))
    return linear("head", norm("norm", x)[:, 0])

TIMM = {"cls_token": [1, 1, 768], "pos_embed": [1, 197, 768], "patch_embed.proj.weight": [768, 3, 16, 16],
        "patch_embed.proj.bias": [768], "norm.weight": [768], "norm.bias": [768], "head.weight": [1000, 768],
        "head.bias": [1000]}
for block in (f"blocks.{number}." for number in range(12)):
    for layer, rows, columns in (("attn.qkv", 2304, 768), ("attn.proj", 768, 768), ("mlp.fc1", 3072, 768),
                                 ("mlp.fc2", 768, 3072)):
        TIMM |= {f"{block}{layer}.weight": [rows, columns], f"{block}{layer}.bias": [rows]}
    TIMM |= {f"{block}norm{number}.{kind}": [768] for number in (1, 2) for kind in ("weight", "bias")}
images = torch.rand(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
"""


def test_safetensors_with_the_names_of_torchvision_or_timm_give_the_logits_of_their_models(here: Box) -> None:
    """ResNets have the same names in both. Of a vision transformer, timm's attention adds in another order."""
    compared = here.python(f"""{WEIGHTS}
with torch.no_grad():
    for name in ("resnet18", "resnet50", "vit_b_16"):
        model, path = made(name), f"/tmp/{{name}}.safetensors"
        save_file(model.state_dict(), path)
        ours, last = loaded(name, path), "heads" if name == "vit_b_16" else "fc"
        assert not torch.equal(ours(images), model(images)), "all but the last layer"
        getattr(ours, last).load_state_dict(getattr(model, last).state_dict())
        assert torch.equal(ours(images), model(images)) and model(images).abs().max() > 0, name
    import fsspec
    fsspec.filesystem("memory").pipe("/far.safetensors", open("/tmp/resnet18.safetensors", "rb").read())
    assert torch.equal(loaded("resnet18", "memory://far.safetensors").conv1.weight, made("resnet18").conv1.weight)
    torch.manual_seed(6)
    weights = {{name: torch.randn(shape) * 0.05 for name, shape in TIMM.items()}}
    save_file(weights, "/tmp/timm.safetensors")
    ours = loaded("vit_b_16", "/tmp/timm.safetensors")
    ours.heads.head.load_state_dict({{"weight": weights["head.weight"], "bias": weights["head.bias"]}})
    expected = timm_vit(weights, images)
    terms = 16 * 16 * 3 + 12 * (768 + 64 + 197 + 768 + 768 + 3072) + 768
    assert (ours(images) - expected).abs().max() <= terms * {FLOAT32} * expected.abs().max()
    smaller = loaded("vit_b_16", "/tmp/timm.safetensors", 64, 5)
    print(list(smaller.encoder.pos_embedding.shape), list(smaller(images[:, :, :64, :64]).shape))
""")
    assert compared.output == "[1, 17, 768] [2, 5]\n", compared.output


def test_a_file_that_does_not_have_the_weights_is_one_line_with_the_first_difference(here: Box) -> None:
    said = here.python(f"""{WEIGHTS}
for name in ("resnet18", "resnet34", "resnet50"):
    save_file(made(name).state_dict(), f"/tmp/{{name}}.safetensors")
torch.save(made("resnet18").state_dict(), "/tmp/pickled.safetensors")
torch.save(made("resnet18"), "/tmp/module.pth")
torch.save(torch.zeros(1), "/tmp/tensor.pth")
open("/tmp/cut.safetensors", "wb").write(open("/tmp/resnet18.safetensors", "rb").read()[:1000000])
for name, path in (("resnet18", "resnet50.safetensors"), ("resnet18", "resnet34.safetensors"),
                   ("resnet34", "resnet18.safetensors"), ("vit_b_16", "resnet18.safetensors"),
                   ("resnet18", "cut.safetensors"), ("resnet18", "pickled.safetensors"),
                   ("resnet18", "module.pth"), ("resnet18", "tensor.pth"), ("resnet18", "none.safetensors")):
    try:
        loaded(name, "/tmp/" + path)
    except UserError as error:
        print(str(error).removeprefix(f"--weights /tmp/{{path}}: no weights of {{name}}: "))
""")
    assert said.lines == [
        "layer1.0.conv1.weight has the shape [64, 64, 1, 1], not [64, 64, 3, 3]",
        "layer1.2.bn1.bias is not among them",
        "layer1.2.conv1.weight is missing",
        "class_token is missing",
        "it is no safetensors file, or not a whole one (Error while deserializing: incomplete metadata, file not fully"
        " covered)",
        "it is no safetensors file, or not a whole one (Error while deserializing: header too large)",
        "it is no file of torch.save(model.state_dict())",
        "it is a Tensor, not a model.state_dict()",
        "[Errno 2] No such file or directory: '/tmp/none.safetensors'",
    ]
    for model, words, line in (
        ("vit_b_16", (), "--model vit_b_16: --image-size 40 is not a multiple of 16"),
        ("vit", ("--weights=/tmp/resnet18.safetensors",), "--weights needs --model resnet18, resnet34, resnet50 or"
         " vit_b_16"),
    ):  # fmt: skip
        ended = here.trainer("torch.flowers", *CPU, "--fake-data", "--fake-images=50", "--image-size=40",
                             f"--model={model}", *words)  # fmt: skip
        assert (ended.code, ended.lines[-1]) == (2, f"flowers: {line}"), ended.output


def test_a_trace_has_the_operators_of_its_steps_and_a_deterministic_run_gives_the_same_bits(
    here: Box, flowers: str
) -> None:
    run = (f"--datadir={flowers}", *SMALL, "--epochs=1", "--deterministic")
    one = here.trainer("torch.flowers", *run, "--profile=3", "--output-dir=/tmp/traced").learned()
    two = here.trainer("torch.flowers", *run).learned()
    assert one["weights_sha256"] == two["weights_sha256"]
    counted = here.python("""
import json
names = [event.get("name") for event in json.load(open("/tmp/traced/trace.json"))["traceEvents"]]
print(names.count("aten::cross_entropy_loss"))
""")
    assert counted.output.strip() == "3", "three steps are traced"


def test_xla_writes_a_trace_for_tensorboard(here: Box) -> None:
    run = ("--fake-data", "--fake-images=640", "--epochs=1", "--batch-size=32", "--profile=3", "--output-dir=/tmp/xla")
    here.trainer("torch_xla.mnist", *run).learned()
    assert ".xplane.pb" in here.run("find", "/tmp/xla", "-name", "*.xplane.pb", "-size", "+1k").output


def test_xlas_log_lines_are_those_of_pytorch_xla(here: Box) -> None:
    """Compare the smoothed Rate, per device; the expression is from
    https://github.com/pytorch/xla/blob/master/test/utils/train_mp_result_analyzer.py"""
    said = here.python("""
import os, time
from types import SimpleNamespace
from trainers.torch_xla._spmd import XlaJob
job = XlaJob.__new__(XlaJob)
job.peers, job.every, job.count, job._first = SimpleNamespace(label="xla:0/14", replicas=2), 7, 200, 0
job.unit = "images"
job._began = time.monotonic() - 1000
for step, rate in ((1, 200.0), (2, 600.0)):
    print(job.line("train", step, {"loss": 6.875, "images_per_second": rate}))
os.environ["RATE_TRACKER_SMOOTHING"] = "0.9"
print(job.line("train", 8, {"loss": 6.875, "images_per_second": 2200.0}))
print(job.line("test", 7, {"accuracy": 98.528}))
""").lines[-5:]
    analyzer = r"^\| Training (Device=.+) (Epoch=.+) (Step=.+) (Loss=.+) (Rate=.+) (GlobalRate=.+) (Time=.+)"
    found = [match.groups()[:6] for line in said if (match := re.match(analyzer, line))]
    assert found == [
        ("Device=xla:0/14", f"Epoch={epoch}", f"Step={step}", "Loss=6.87500", f"Rate={rate}", f"GlobalRate={whole}")
        for epoch, step, rate, whole in ((1, 0, "100.00", "0.10"), (1, 1, "220.00", "0.20"), (2, 0, "308.00", "0.80"))
    ]  # 0.6 * 300 + 0.4 * 100, then 0.1 * 1100 + 0.9 * 220
    assert said[3].startswith("| Test Device=xla:0/14 Step=0 Epoch=1 Accuracy=98.53 Time=")


def test_fast_decoding_differs_from_pillows_by_rounding_only(here: Box) -> None:
    checked = here.python("""
import io, numpy as np
from PIL import Image
from trainers.common import images
from trainers.common.files import UserError
from trainers.torch import _decode
assert _decode._decode, "torchvision decodes here"
x, y = np.meshgrid(np.arange(500), np.arange(375))
picture = np.stack([127 + 120 * np.sin(x / 17 + y / 29), x / 2, y / 2], 2).astype(np.uint8)
for box in ((20, 30, 420, 330), (420, 30, 20, 330), (0, 0, 500, 375), (100, 100, 140, 150), (0, 0, 499, 374)):
    for mode in ("RGB", "L", "CMYK"):
        buffer = io.BytesIO()
        Image.fromarray(picture).convert(mode).save(buffer, "JPEG", quality=90)
        fast, slow = (decode(buffer.getvalue(), "x", 224, lambda width, height: box).astype(int)
                      for decode in (_decode.decode, images.decode))
        # Near its edge, Pillow's filter reaches beyond the box: by one pixel of the image, at most 6 of the crop.
        rim = 8
        differs = abs(fast - slow)[rim:-rim, rim:-rim].max()
        # Both resize in two passes that round to bytes. CMYK images go to Pillow.
        assert differs <= (0 if mode == "CMYK" else 2), (box, mode, differs)
buffer = io.BytesIO()
Image.fromarray(picture).save(buffer, "PNG")
assert _decode.decode(buffer.getvalue(), "x", 50, lambda width, height: (0, 0, width, height)).shape == (50, 50, 3)
for content in (b"no picture", buffer.getvalue()[:900], b"\\xff\\xd8\\xff\\xc0"):
    try:
        _decode.decode(content, "here.jpg", 50, lambda width, height: (0, 0, width, height))
    except UserError as error:
        assert "here.jpg: is no readable image" in str(error)
    else:
        raise AssertionError(content)
print("alike")
""")
    assert checked.output == "alike\n", checked.output


def test_under_spmd_a_host_reads_only_its_part_of_a_batch(here: Box) -> None:
    """The second of two hosts gets the second half of the rows, and each host shards its rows over its devices."""
    checked = here.python(
        """
import argparse, numpy as np, torch_xla
from trainers.torch_xla import mnist
from trainers.torch_xla._spmd import Mesh
mesh = Mesh(mnist.parse_args([]))
rows = mesh.put_batch(np.arange(8).reshape(4, 2))
print(torch_xla._XLAC._get_xla_sharding_spec(rows), rows.cpu().tolist())
mesh.rank, mesh.size, mesh._mesh = 1, 2, None
print(mesh.put_batch(np.arange(8)).tolist())
""".replace("import argparse", "import os; os.environ['CPU_NUM_DEVICES'] = '4'\nimport argparse")
    )
    assert checked.lines[-2:] == ["{devices=[4,1]0,1,2,3} [[0, 1], [2, 3], [4, 5], [6, 7]]", "[4, 5, 6, 7]"], (
        checked.output
    )
