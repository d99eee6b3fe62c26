"""`make rehearse` with real images: jobs of each platform train in containers, lose replicas, resume and complete."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import ENGINE
from trainyard.common.docker_engine import OWNER, owner_name
from trainyard.common.settings import ROOT
from trainyard.sandbox.datasets import digits
from trainyard.sandbox.datasets import flowers as flowers_data

pytestmark = pytest.mark.concurrent

REGISTRY = "us-central1-docker.pkg.dev/my-project/ml/trainyard"


@dataclass
class Rehearsed:
    """A finished rehearsal: exit status, stderr, the report, and its folders."""

    status: int
    log: str
    report: dict[str, Any]
    output: Path
    buckets: Path

    def of(self, replica: str) -> list[str]:
        """The lines of one replica."""
        return (self.output / "logs" / f"{replica}.log").read_text().splitlines()

    def finished(self) -> dict[str, Any]:
        """The report of a job that succeeded; fails with the log otherwise."""
        assert self.status == 0 and self.report["status"] == "succeeded", self.log[-6000:]
        return self.report


Rehearse = Callable[..., Rehearsed]


@pytest.fixture
def buckets(tmp_path: Path) -> Path:
    """A folder of buckets with the digits, readable for the images' user."""
    digits.write_idx(tmp_path / "buckets" / "data" / "mnist")
    return tmp_path / "buckets"


@pytest.fixture
def rehearse(tmp_path: Path, buckets: Path) -> Rehearse:
    """``rehearse(image, job, PREEMPT="worker-0")``: run ``make rehearse`` with a job file of this text."""

    def run(image: str, text: str, **variables: str) -> Rehearsed:
        path, output = tmp_path / "job.yaml", tmp_path / "output"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        words = {"FILE": path, "IMAGE": image, "BUCKETS": buckets, "OUTPUT": output, "TIMEOUT": "400", "JSON": "1"}
        words |= variables
        command = ["make", "rehearse", *(f"{name}={value}" for name, value in words.items())]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
        status = ended.returncode and int((re.search(r"\] Error (\d+)", ended.stderr) or [0, 2])[1])
        report = json.loads(ended.stdout) if ended.stdout.strip() else {}
        return Rehearsed(status, ended.stderr, report, output, buckets)

    return run


def custom_job(pools: int, container: str, more: str = "") -> str:
    """A CustomJob of ``pools`` replicas that all run ``container``, flow-style YAML."""
    spec = f"{{machineSpec: {{machineType: n1-standard-4}}, replicaCount: %d, containerSpec: {container}}}"
    workers = f", {spec % (pools - 1)}" if pools > 1 else ""
    return f"displayName: test\njobSpec:\n  workerPoolSpecs: [{spec % 1}{workers}]\n{textwrap.indent(more, '  ')}"


# --- complete trainings -------------------------------------------------------------------------------------------


@pytest.fixture
def flowers(buckets: Path) -> Path:
    return flowers_data.write(buckets / "data" / "flowers", train=48, test=16)


@pytest.mark.slow("test_trainers_tf_cluster.py, and mnist on three nodes below")
def test_flowers_stop_and_resume_on_two_workers_with_multiworkermirroredstrategy(
    built_image: Callable[[str], str], rehearse: Rehearse, flowers: Path
) -> None:
    arguments = (
        "[flowers, --datadir=/gcs/data/flowers, --image-size=32, --epochs=4, --batch-size=8, --test-batch-size=8, "
        "--log-steps=1, --seed=1]"
    )
    found = rehearse(
        built_image("tf-cpu"),
        custom_job(
            2,
            f"{{imageUri: '{REGISTRY}:tf-cpu', args: {arguments}}}",
            "baseOutputDirectory: {outputUriPrefix: gs://out/flowers}",
        ),
        PREEMPT="worker-0@step4",
    )
    report = found.finished()
    assert report["summary"]["processes"] == 2 and report["summary"]["global_batch"] == 16
    assert report["summary"]["global_step"] == 4 * 3 and 0 <= report["accuracy"] <= 100, "48 images, 16 a step"
    assert [one["status"] for one in report["replicas"]] == [0, 0]
    # SIGTERM to one worker stops both, after a step, well before GKE's SIGKILL at 15 s (measured: 2 s).
    (fault,) = report["faults"]
    assert [one["attempts"][0]["status"] for one in report["replicas"]] == [143, 143]
    assert all(one["attempts"][0]["ended"] - fault["at"] < 12 for one in report["replicas"])
    assert report["resumed_from"]
    # The model was written to gs://, so to the folder, and belongs to the folder's owner.
    model = found.buckets / "out" / "flowers" / "model"
    assert any(model.iterdir())
    assert {path.stat().st_uid for path in model.rglob("*")} == {found.buckets.stat().st_uid}
    assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [\d.]+ \[0\] step \d+/12: loss ", found.log, re.MULTILINE)


NODES = """\
    apiVersion: jobset.x-k8s.io/v1alpha2
    kind: JobSet
    metadata: {name: mnist}
    spec:
      failurePolicy: {maxRestarts: 2}
      replicatedJobs:
      - name: node
        replicas: 1
        template:
          spec:
            parallelism: 3
            completions: 3
            backoffLimit: 0
            template:
              spec:
                restartPolicy: Never
                containers:
                - name: train
                  image: REGISTRY:cpu
                  args: [mnist, --device=cpu, --datadir=gs://data/mnist, --epochs=3, --batch-size=16, --log-steps=5, --seed=1,
                         --checkpoint-dir=gs://out/mnist]
                  env:
                  - {name: NNODES, value: "3"}
                  - {name: PET_RDZV_BACKEND, value: c10d}  # the launcher starts torchrun, which meets its peers there
                  - {name: JOBSET_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/jobset-name']"}}}
                  - {name: REPLICATED_JOB_NAME, valueFrom: {fieldRef: {fieldPath: "metadata.labels['jobset.sigs.k8s.io/replicatedjob-name']"}}}
    """.replace("REGISTRY", REGISTRY)  # noqa: E501


@pytest.mark.big("cpu")
def test_mnist_on_three_nodes_of_torchrun_is_restarted_and_resumes_after_a_preemption(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    found = rehearse(built_image("cpu"), NODES, PREEMPT="node-0-1@step20")
    report = found.finished()
    assert "torch.distributed.run --nnodes=3" in "\n".join(found.of("node-0-2"))
    assert report["restarts"] == 1
    assert [fault["targets"] for fault in report["faults"]] == [["node-0-1"]]
    assert report["resumed_from"] == [report["summary"]["resumed_from"]] != [None]
    assert report["accuracy"] > 80 and report["summary"]["processes"] == 3
    preempted = report["replicas"][1]["attempts"]
    assert [one["cause"] for one in preempted] == ["preempted", "exit"] and preempted[1]["status"] == 0
    assert (found.output / "report.png").read_bytes().startswith(b"\x89PNG")


SLICE = """\
    apiVersion: jobset.x-k8s.io/v1alpha2
    kind: JobSet
    metadata: {{name: pod}}
    spec:
      failurePolicy: {{maxRestarts: 1}}
      replicatedJobs:
      - name: slice
        replicas: 1
        template:
          spec:
            parallelism: 4
            completions: 4
            backoffLimit: 0
            template:
              spec:
                restartPolicy: Never
                nodeSelector:
                  cloud.google.com/gke-tpu-accelerator: tpu-v5-lite-podslice
                  cloud.google.com/gke-tpu-topology: 4x4
                containers:
                - name: train
                  image: {image}
                  command: {command}
                  args: {args}
                  env:
                  - name: ATTEMPT
                    valueFrom: {{fieldRef: {{fieldPath: "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"}}}}
                  # Without optimisation the CPU backend compiles in a fifth of the time.
                  - {{name: XLA_FLAGS, value: "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}}
                  resources: {{limits: {{google.com/tpu: 4}}}}
    """  # noqa: E501


@pytest.mark.big("xla")
def test_imagenet_on_fake_data_trains_on_the_four_hosts_of_a_tpu_pod(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    arguments = (
        "[imagenet, --fake-data, --model=squeezenet1_1, --fake-images=8, --image-size=32, --num-classes=10, "
        "--lr=0.001, --batch-size=4, --num-steps=2, --log-steps=1, --num-workers=1, --checkpoint-dir=gs://out/pod]"
    )
    found = rehearse(built_image("xla"), SLICE.format(image=f"{REGISTRY}:xla", command="null", args=arguments))
    report = found.finished()
    assert [one["status"] for one in report["replicas"]] == [0] * 4
    for number in range(4):
        lines = "\n".join(found.of(f"slice-0-{number}"))
        assert "runtime   tpu-local" in lines and f"node {number} of 4" in lines
        # All hosts train; the first one logs and saves checkpoints, as on a real slice.
        assert ("| Training Device=xla" in lines) == (number == 0)
    assert report["summary"]["global_step"] == 2
    assert [path.name for path in (found.buckets / "out" / "pod").iterdir()] == ["step-000000002"]
    assert any("independently" in note for note in report["notes"])


def test_a_tuning_job_runs_four_trials_and_reports_the_best(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    found = rehearse(
        built_image("tf-cpu"),
        f"""
        displayName: tune
        maxTrialCount: 4
        parallelTrialCount: 2
        studySpec:
          metrics: [{{metricId: accuracy, goal: MAXIMIZE}}]
          parameters:
          - {{parameterId: lr, scaleType: UNIT_LOG_SCALE, doubleValueSpec: {{minValue: 0.0001, maxValue: 0.1}}}}
        trialJobSpec:
          baseOutputDirectory: {{outputUriPrefix: gs://out/tune}}
          workerPoolSpecs:
          - machineSpec: {{machineType: n1-standard-4}}
            replicaCount: 1
            containerSpec:
              imageUri: {REGISTRY}:tf-cpu
              args: [mnist, --datadir=/gcs/data/mnist, --epochs=1, --seed=1]
        """,
    )
    report = found.finished()
    trials = report["trials"]
    assert [one["trial"] for one in trials] == [1, 2, 3, 4]
    assert len({one["parameters"]["lr"] for one in trials}) == 4
    for one in trials:  # the measurement is the trainer's accuracy
        assert one["metric"] == pytest.approx(one["accuracy"] / 100)
        assert (found.buckets / "out" / "tune" / str(one["trial"]) / "checkpoints").is_dir()
    assert report["best"]["metric"] == max(one["metric"] for one in trials)


# --- restart policies, with a trainer of a few lines --------------------------------

#: Counts to 30 in steps of 0.1 s, saves each, and resumes from the last. SIGTERM ends it after the step, so that each
#: start and each saved step is in the log; SIGKILL leaves a whole number in the file.
COUNTER = """\
import os, pathlib, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
saved = pathlib.Path("/gcs/scratch") / os.uname().nodename
step = int(saved.read_text()) if saved.exists() else 0
print("Resumed from step", step, "attempt", os.environ.get("ATTEMPT"), flush=True)
while step < 30 and not stopped:
    step += 1
    new = saved.with_name(saved.name + ".new")
    new.write_text(str(step))
    os.replace(new, saved)
    print("step", step, flush=True)
    time.sleep(0.1)
sys.exit(143 if stopped else 0)
"""

#: For the chief: wait until the worker has counted to 30, so that steps in the log before that are the worker's.
WAITING = """\
import os, pathlib, time
worker = pathlib.Path("/gcs/scratch") / os.uname().nodename.replace("workerpool0", "workerpool1")
end = time.monotonic() + (60 if "workerpool0" in os.uname().nodename else 0)
while time.monotonic() < end and not (worker.exists() and worker.read_text() == "30"):
    time.sleep(0.1)
"""


def counter(script: str = COUNTER) -> str:
    return json.dumps({"imageUri": f"{REGISTRY}:tf-cpu", "command": ["python3", "-c", script]})


def test_a_slice_is_preempted_as_a_whole_and_the_jobset_restarted(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    command = json.dumps(["python3", "-c", COUNTER])
    found = rehearse(
        built_image("tf-cpu"),
        SLICE.format(image=f"{REGISTRY}:tf-cpu", command=command, args="null"),
        PREEMPT="slice-0-2@step5",
    )
    report = found.finished()
    assert report["faults"][0]["targets"] == [f"slice-0-{number}" for number in range(4)]
    assert report["restarts"] == 1
    for one in report["replicas"]:
        lines = found.of(one["name"])
        assert [line.split()[-1] for line in lines if line.startswith("Resumed")] == ["0", "1"]
        assert [line for line in lines if line.startswith("step")].count("step 30") == 1


def test_a_killed_worker_of_a_custom_job_is_restarted_alone(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    script = WAITING + COUNTER
    found = rehearse(
        built_image("tf-cpu"), custom_job(2, counter(script), "labels: {data: gs://scratch}"), KILL="worker-0@step5"
    )
    report = found.finished()
    attempts = {
        one["name"]: [(try_["status"], try_["cause"]) for try_ in one["attempts"]] for one in report["replicas"]
    }
    assert attempts == {"chief": [(0, "exit")], "worker-0": [(137, "killed"), (0, "exit")]}
    resumed = [int(line.split()[3]) for line in found.of("worker-0") if line.startswith("Resumed")]
    assert resumed[0] == 0 < resumed[1]


def test_an_error_of_the_program_is_permanent(built_image: Callable[[str], str], rehearse: Rehearse) -> None:
    found = rehearse(built_image("tf-cpu"), custom_job(2, counter("import time; time.sleep(1); raise SystemExit(3)")))
    assert found.status == 1 and found.report["status"] == "failed"
    assert "(exit status 3): exit statuses 1 to 127 are permanent errors" in found.log
    assert found.report["restarts"] == 0


def test_a_fault_that_was_never_injected_is_a_failure(built_image: Callable[[str], str], rehearse: Rehearse) -> None:
    found = rehearse(
        built_image("tf-cpu"), custom_job(1, counter(), "labels: {data: gs://scratch}"), PREEMPT="chief@step900"
    )
    assert found.status == 1 and "'preempt chief at step900' was never injected" in found.log


def test_a_replica_that_hangs_is_stopped_and_reported(built_image: Callable[[str], str], rehearse: Rehearse) -> None:
    script = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('stuck', flush=True); time.sleep(600)"
    found = rehearse(built_image("tf-cpu"), custom_job(1, counter(script)), TIMEOUT="20")
    assert found.status == 1
    assert "still running after 20 s: chief" in found.log and "chief: stuck" in found.log


def test_running_out_of_memory_is_reported(built_image: Callable[[str], str], rehearse: Rehearse) -> None:
    script = "blocks = [bytearray(16 << 20) for _ in range(1000)]"
    found = rehearse(built_image("tf-cpu"), custom_job(1, counter(script)), MEMORY="80m")
    assert found.status == 1
    assert "chief ran out of memory: its limit was 80 MB" in found.log and "--memory" in found.log


def test_a_later_rehearsal_can_write_to_the_same_buckets(built_image: Callable[[str], str], rehearse: Rehearse) -> None:
    """Files that containers wrote belong to the folder's owner afterwards, and containers can write them again."""
    script = """if True:
        import pathlib
        file = pathlib.Path("/gcs/scratch/run/log")
        file.parent.mkdir(exist_ok=True)
        with file.open("a") as log:
            log.write("x")
        print("runs:", len(file.read_text()), len(list(file.parent.iterdir())))
    """
    for number in (1, 2):
        found = rehearse(built_image("tf-cpu"), custom_job(1, counter(script)))
        found.finished()
        assert f"runs: {number} 1" in found.of("chief")
        file = found.buckets / "scratch" / "run" / "log"
        assert file.stat().st_uid == file.parent.stat().st_uid == found.buckets.stat().st_uid


def created_by(pid: int) -> list[str]:
    """Names of the containers and networks that process ``pid`` created."""
    wanted: dict[str, Any] = {"label": f"{OWNER}={owner_name(pid)}"}
    client = ENGINE.client
    return [
        str(one.name)
        for one in (*client.containers.list(all=True, filters=wanted), *client.networks.list(filters=wanted))
    ]


def test_ctrl_c_leaves_nothing_behind(built_image: Callable[[str], str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(custom_job(2, counter("import time; print('step 1', flush=True); time.sleep(600)")))
    options = {"FILE": str(job), "IMAGE": built_image("tf-cpu"), "OUTPUT": str(tmp_path / "output")}
    environment = os.environ | {f"TRAINYARD_{name}": value for name, value in options.items()}
    # A shell without job control ignores SIGINT in background processes, which the test may run in.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "trainyard", "rehearse"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr
        for line in running.stderr:
            if "step 1" in line:
                break
        assert len(created_by(running.pid)) == 5  # two replicas, two sidecars, the network
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
        assert running.returncode == 130
    end = time.monotonic() + 60
    while created_by(running.pid) and time.monotonic() < end:
        time.sleep(0.2)
    assert created_by(running.pid) == []


# --- Cloud Storage ---------------------------------------------------------------------------------------------

CLIENTS = """\
import fsspec, tensorflow as tf
from google.cloud import storage
from pathlib import Path

files = fsspec.filesystem("gs")
with files.open("gs://scratch/by/fsspec.bin", "wb") as file:
    file.write(b"x" * (12 << 20))
assert Path("/gcs/scratch/by/fsspec.bin").stat().st_size == 12 << 20
with files.open("gs://scratch/by/fsspec.bin") as file:
    file.seek(11 << 20)
    assert len(file.read()) == 1 << 20
assert files.ls("gs://scratch/by") == ["scratch/by/fsspec.bin"] and not files.exists("gs://scratch/by/nothing")

bucket = storage.Client(project="p").bucket("scratch")
bucket.blob("by/storage.txt").upload_from_string("from google-cloud-storage")
assert bucket.blob("by/storage.txt").download_as_text() == "from google-cloud-storage"
assert [blob.name for blob in bucket.list_blobs(prefix="by/")] == ["by/fsspec.bin", "by/storage.txt"]

gfile = tf.io.gfile
with gfile.GFile("gs://scratch/tf/a.txt", "w") as file:
    file.write("one\\ntwo")
assert Path("/gcs/scratch/tf/a.txt").read_text() == "one\\ntwo"
assert list(tf.data.TextLineDataset("gs://scratch/tf/a.txt").as_numpy_iterator()) == [b"one", b"two"]
gfile.rename("gs://scratch/tf/a.txt", "gs://scratch/tf/deep/b.txt")
assert gfile.listdir("gs://scratch/tf") == ["deep/"] and gfile.glob("gs://scratch/*/*/b.txt")
Path("/gcs/scratch/by/fuse.txt").write_text("through /gcs")
assert gfile.GFile("gs://scratch/by/fuse.txt").read() == "through /gcs"

files.rm(["gs://scratch/by/fsspec.bin", "gs://scratch/by/fuse.txt"])
bucket.blob("by/storage.txt").delete()
gfile.rmtree("gs://scratch/tf")
assert files.find("gs://scratch") == []
print("every client agrees")
"""


def test_every_client_of_cloud_storage_uses_the_same_folder(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    container = {"imageUri": f"{REGISTRY}:tf-cpu", "args": ["--", "/opt/venv/bin/python", "-c", CLIENTS]}
    found = rehearse(built_image("tf-cpu"), custom_job(1, json.dumps(container)))
    found.finished()
    assert "every client agrees" in found.of("chief")


def test_the_nodes_of_a_train_job_reach_the_first_one_at_the_address_that_its_runtime_gives(
    built_image: Callable[[str], str], rehearse: Rehearse
) -> None:
    """The job of examples/jobs has the shape of Kubeflow Trainer's example."""
    text = (ROOT / "examples" / "jobs" / "train-job.yaml").read_text(encoding="utf-8")
    found = rehearse(built_image("tf-cpu"), text)
    assert [one["status"] for one in found.finished()["replicas"]] == [0, 0, 0]
    first, *greetings = found.of("node-0-0")
    assert first == "node 0 of 3: 2 processes, node 0 at ('hello-node-0-0.hello', 29500)"
    assert sorted(greetings) == ["hello, node 1", "hello, node 2"]


# --- the page --------------------------------------------------------------------------------------------------


def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    """As dry runs: the tests above start such containers."""
    text = (ROOT / "docs" / "jobs" / "rehearse.md").read_text(encoding="utf-8")
    for path in ROOT.iterdir():
        (tmp_path / path.name).symlink_to(path)
    commands = "\n".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands.replace("job rehearse", "job rehearse --dry-run")],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"platform": ') == commands.count("job rehearse")
