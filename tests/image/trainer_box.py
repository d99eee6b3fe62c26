"""Running a trainer in a container as a user would, for the tests of the trainers.

Comparisons of floating-point results use one rule: a sum of n products, computed in any order, has a relative error of
at most n times the unit roundoff, measured against the magnitude of its terms (N. Higham, Accuracy and Stability of
Numerical Algorithms, section 3.1, https://doi.org/10.1137/1.9780898718027), for every CPU and library. The tests
measure it against the largest value of the result, which is smaller if terms cancel. This is not covered by the
theorem: it relies on errors that grow like the square root of n in practice, which leaves a factor of sqrt(n).

Results after many steps are not compared in float32: a max pooling or a ReLU that decides differently because of
rounding changes the gradients, and the difference grows with each step.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from trainers.common import mnist

from tests.engine import ENGINE
from trainyard.common.docker_engine import resource_labels
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.fakes import storage

PYTHON = "/opt/venv/bin/python"

# Unit roundoff: the largest relative error of a single operation.
FLOAT64, FLOAT32, BFLOAT16 = 2.0**-53, 2.0**-24, 2.0**-9

# Sums in the MNIST trainers, in numbers of terms: the layers of the network one after the other, and the largest sum in
# the gradient of its weights, which is over the outputs of the first convolution for a batch of 64 images.
MNIST_FORWARD = 5 * 5 + 5 * 5 * 32 + 4 * 4 * 64 + 128
MNIST_GRADIENT = 64 * 24 * 24 + 2 * MNIST_FORWARD

# Environment variables that restrict the libraries of PyTorch, TensorFlow and XLA to older instruction sets.
INSTRUCTION_SETS = {
    "native": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
    "sse4": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "TF_ENABLE_ONEDNN_OPTS": "0",
             "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"},
}  # fmt: skip

# For scripts in a container: of how many of ``probabilities[n, classes]`` the label is among the best ``most``, and for
# how many this may change if every logit changes by ``relative`` times the largest one.
COUNT = """
import numpy
def count(probabilities, labels, relative, most=1):
    logits = numpy.log(numpy.maximum(probabilities, 1e-30))
    order = numpy.sort(logits, axis=1)[:, ::-1]
    own = numpy.take_along_axis(logits, labels.astype(int)[:, None], axis=1)
    right = (logits > own).sum(axis=1) < most
    close = order[:, most - 1] - order[:, most] <= 2 * relative * abs(logits).max()
    return int(right.sum()), int(close.sum())
"""


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """``member``, readable for the user of the trainer: pytest's folders are private."""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


class Ended:
    """The exit code and output of a process, and the trainer's summary (the last JSON line)."""

    def __init__(self, code: int, output: str) -> None:
        self.code, self.output = code, output
        self.lines = output.splitlines()
        found = [line for line in self.lines if line.startswith('{"event": "summary"')]
        self.summary: dict[str, Any] = json.loads(found[-1]) if found else {}

    def learned(self) -> dict[str, Any]:
        """The summary of a successful run; fails with the output if the run failed."""
        assert self.code == 0 and self.summary, self.output
        return self.summary


class Box:
    """A running container of an image, with temporary space in /tmp, in which processes are started."""

    def __init__(self, container: Container, environment: dict[str, str]) -> None:
        self.container, self.environment = container, environment

    def put(self, folder: Path, name: str) -> str:
        """Copy the files of ``folder`` to /data/``name``; returns that path."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, arcname=name, filter=_readable)
        self.container.put_archive("/data", buffer.getvalue())
        return f"/data/{name}"

    def run(self, *words: str, **environment: str) -> Ended:
        """Run a command until it exits."""
        # One pipe for both streams, because Docker does not keep the order of two.
        command = ["sh", "-c", 'exec "$@" 2>&1', "sh", *words]
        code, output = self.container.exec_run(command, environment={**self.environment, **environment})
        assert isinstance(code, int) and isinstance(output, bytes), "as without stream=True"
        return Ended(code, output.decode())

    def python(self, script: str, *words: str, **environment: str) -> Ended:
        """Run a Python script in the image's virtual environment. ``environment`` sets variables."""
        return self.run(PYTHON, "-c", script, *words, **environment)

    def trainer(self, name: str, *words: str, **environment: str) -> Ended:
        """Run the trainer ``name``, such as "torch.mnist", as the launcher starts it, also with --num-cores=N."""
        cores = next((int(word.partition("=")[2]) for word in words if word.startswith("--num-cores=")), 1)
        if name.startswith("torch.") and cores > 1:
            return self.processes(cores, name, *words, **environment)
        return self.run(PYTHON, "-m", f"trainers.{name}", *words, **environment)

    def processes(self, count: int, name: str, *words: str, **environment: str) -> Ended:
        """Run the trainer ``name`` in so many processes, which the launcher starts."""
        variables = {"LAUNCHER_NPROC": str(count), **environment}
        return self.run("launch", "--", PYTHON, "-m", f"trainers.{name}", *words, **variables)

    def run_parallel(self, *commands: str, seconds: int = 240) -> list[Ended]:
        """Run shell ``commands`` in parallel, each with a timeout of ``seconds``."""
        script = " ".join(f"(timeout {seconds} {line} >/tmp/out{n} 2>&1; echo $? >/tmp/code{n}) &"
                          for n, line in enumerate(commands)) + " wait"  # fmt: skip
        self.run("sh", "-c", "rm -f /tmp/out* /tmp/code*; " + script)
        return [
            Ended(int(self.run("cat", f"/tmp/code{n}").output), self.run("cat", f"/tmp/out{n}").output)
            for n in range(len(commands))
        ]

    def until(self, path: str, text: str, seconds: float = 120) -> None:
        """Wait until the file ``path`` contains ``text``, for at most ``seconds``."""
        end = time.monotonic() + seconds
        while text not in self.run("sh", "-c", f"cat {path} 2>/dev/null").output:
            assert time.monotonic() < end, f"no {text!r} in {path}: {self.run('cat', path).output}"
            time.sleep(0.2)


def serve_storage(here: Box, folder: Path) -> dict[str, str]:
    """Serve /buckets as Cloud Storage in a box, with the bucket ``bucket``; returns the variables that clients need.

    TensorFlow's client does not support an emulator, so the server has the real host names and a certificate.
    """
    tools = folder / "tools"
    tools.mkdir()
    (tools / "storage.py").write_bytes(Path(storage.__file__).read_bytes())
    names = "storage.googleapis.com www.googleapis.com"
    serve = f"""set -e
mkdir -p /buckets/bucket /certificate
cd /certificate && openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=storage -keyout key.pem -out public.pem \
  -addext subjectAltName={",".join(f"DNS:{name}" for name in names.split())} 2>/dev/null
cat key.pem public.pem >both.pem && chmod 644 public.pem && echo 127.0.0.1 {names} >>/etc/hosts
{PYTHON} -I {here.put(tools, "tools")}/storage.py /buckets --port=4443 >/tmp/plain.log 2>&1 &
exec {PYTHON} -I /data/tools/storage.py /buckets --certificate both.pem >/tmp/storage.log 2>&1"""
    here.container.exec_run(["sh", "-c", serve], user="root", detach=True)
    for log in ("/tmp/plain.log", "/tmp/storage.log"):
        here.until(log, "url")
    plain = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), "http://127.0.0.1:4443")
    return {**plain, "CURL_CA_BUNDLE": "/certificate/public.pem", "NO_GCE_CHECK": "true",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token"}  # fmt: skip


def few_digits(folder: Path, train: int, test: int) -> Path:
    """Write the first ``train`` and ``test`` images of the digits as MNIST's files into ``folder``."""
    digits.write_idx(folder)
    for split, count in (("train", train), ("test", test)):
        for name in mnist.FILES[split]:
            digits.write_array(folder / name, mnist.read_idx(str(folder / name))[:count])
    return folder


# For scripts in a container: the weights, or with "momentum_buffer" those of SGD, in a checkpoint of a PyTorch trainer.
TENSORS = """
import os, tempfile, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def tensors(folder, kind=""):
    if os.path.exists(folder + "/state.pt"):  # torch_xla's
        state = torch.load(folder + "/state.pt", weights_only=True)
        # Those of a model without averages of batch norm; the optimizer has kernels and matrices first.
        names = sorted(state["model"], key=lambda name: state["model"][name].dim() <= 1)
        moments = {names[number]: entry for number, entry in state["optimizer"]["state"].items()}
    else:
        with tempfile.TemporaryDirectory() as made:
            dcp_to_torch_save(folder, made + "/whole.pt")
            state = torch.load(made + "/whole.pt", weights_only=False)
        moments = state["optimizer"].get("state", {})
    return {name: entry[kind] for name, entry in moments.items()} if kind else state["model"]
"""


# For scripts in a container: the variables in a checkpoint of a TensorFlow trainer, by part and name.
VARIABLES = """
import tensorflow as tf
def variables(folder):
    saved = tf.train.load_checkpoint(folder + "/state")
    names = sorted(name for name in saved.get_variable_to_shape_map() if name.startswith("part"))
    return {name.partition("/.A")[0].replace(".S", "/"): saved.get_tensor(name) for name in names}
"""


def step_differs(box: Box, one: str, other: str) -> float:
    """How much the first steps of two TensorFlow runs differ, relative to the largest update of each variable.

    ``one`` and ``other`` are their checkpoint folders. After the first step, the momentum variable of Keras' SGD is the
    gradient times the negative learning rate.
    """
    compared = box.python(f"""{VARIABLES}
import json
one, other = (variables(f"{{folder}}/step-000000001") for folder in ("{one}", "{other}"))
names = [name for name in one if name.endswith("_momentum")]
assert names and one.keys() == other.keys()
print(json.dumps(max(float(abs(one[name] - other[name]).max() / abs(one[name]).max()) for name in names)))
""")
    assert compared.code == 0, compared.output
    return float(compared.lines[-1])


@contextlib.contextmanager
def box(image: str, tmpfs: dict[str, str] | None = None, **environment: str) -> Iterator[Box]:
    """A :class:`Box` of ``image``: only the loopback network, /tmp and /data writable, removed at the end."""
    container = ENGINE.client.containers.run(
        image,
        ["sleep", "infinity"],
        entrypoint=["tini", "--"],
        detach=True,
        network_mode="none",
        tmpfs={"/tmp": "mode=1777", **(tmpfs or {})},
        labels=resource_labels("test"),
    )
    try:
        container.exec_run(["mkdir", "-p", "/data"], user="root")
        yield Box(container, environment)
    finally:
        container.remove(force=True)
