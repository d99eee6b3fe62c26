"""The real gcloud, kubectl and SDK accept what `make job` writes and send it unchanged; SUBMIT=1 follows the job."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import aiplatform
from google.cloud.aiplatform_v1 import JobServiceClient
from google.cloud.aiplatform_v1.types import CustomJob as CustomJobMessage
from google.cloud.aiplatform_v1.types import CustomJobSpec, HyperparameterTuningJob
from tests.engine import CONTEXT, ENGINE
from tests.fakes.kubernetes import Kubernetes
from tests.fakes.server import Route, Server, gcloud_environment
from tests.fakes.tpu_vms import TpuVms
from tests.fakes.vertex import PROJECT, Vertex, message
from tests.image.registry import running

from trainyard import cli
from trainyard.common.settings import ROOT
from trainyard.image import base_image, recipes
from trainyard.recipe import PATH, Recipe
from trainyard.spec.model import load
from trainyard.spec.naming import LABELS
from trainyard_jobs.check import files
from trainyard_jobs.model import image_metadata
from trainyard_jobs.platforms import submission

pytestmark = pytest.mark.concurrent

REGISTRY = f"us-central1-docker.pkg.dev/{PROJECT}/ml"
Finished = subprocess.CompletedProcess[str]
Write = Callable[..., tuple[Path, list[str]]]


@pytest.fixture
def write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Write:
    """Write a job to a file: its path, and the command that submits that file."""

    def run(*arguments: str) -> tuple[Path, list[str]]:
        assert cli.run(["job", *arguments, f"--registry={REGISTRY}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        path = tmp_path / "job.yaml"
        path.write_text(found["config"], encoding="utf-8")
        return path, [re.sub(r"\bjob\.(yaml|sh)$", str(path), word) for word in found["command"]]

    return run


def submitted(command: list[str], environment: dict[str, str]) -> Finished:
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=180, check=False
    )


def proto(spec: dict[str, Any]) -> CustomJobSpec:
    return CustomJobSpec.from_json(json.dumps(spec))


# --- gcloud and Vertex AI --------------------------------------------------------------------------------------------

FORMS = {
    "machines": ["cpu", "--workers=3", "--spot", "--timeout=12h", "--args=--epochs 2 --seed 007"],
    "gpus": ["--image=gcr.io/p/i", "--accelerator=4xT4", "--service-account=a@p.iam.gserviceaccount.com",
             "--output=gs://bucket/run", f"--tensorboard=projects/{PROJECT}/locations/us-central1/tensorboards/1"],
    "v3": ["xla", "--accelerator=v3-8", "--region=us-central1"],
    "v5e": ["xla", "--accelerator=v5litepod-16"],
    "all that a job can say": [
        "--image=gcr.io/p/i", "--workers=3", "--pool=chief=n1-standard-16", "--pool=workers=n1-standard-8+2xT4",
        "--pool=servers=2xn1-highmem-8", "--pool=evaluators=n1-standard-4", "--env=A=1,2", "--env=B=it's $x",
        "--command=python -m 'my pkg'", "--args=--lr 0.1", "--network=projects/1/global/networks/n",
        "--mount=nfs://10.0.0.2/share:/mnt/nfs/data", "--web-access", "--disk=200",
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.needs("gcloud")
def test_gcloud_submits_a_custom_job_unchanged(form: str, write: Write, tmp_path: Path) -> None:
    path, command = write("--platform=vertex", *FORMS[form])
    with Vertex() as cloud:
        done = submitted(command, cloud.environment(tmp_path))
        assert done.returncode == 0, done.stderr
        (arrived,) = cloud.jobs.values()
    assert proto(arrived["jobSpec"]) == proto(yaml.safe_load(path.read_text()))
    assert arrived["displayName"] in " ".join(command)


@pytest.mark.needs("gcloud")
def test_gcloud_submits_a_tuning_job_unchanged(write: Write, tmp_path: Path) -> None:
    path, command = write(
        "--platform=vertex", "cpu", "--tune=lr=1e-3:1e-1:log batch-size=32,64 epochs=2:4", "--trials=4"
    )
    with Vertex() as cloud:
        done = submitted(command, cloud.environment(tmp_path))
        assert done.returncode == 0, done.stderr
        (arrived,) = cloud.jobs.values()
    ours = HyperparameterTuningJob.from_json(json.dumps(yaml.safe_load(path.read_text())))
    assert HyperparameterTuningJob.from_json(json.dumps(arrived)) == ours
    assert ours.max_trial_count == 4


@pytest.mark.needs("gcloud")
def test_the_service_refuses_what_gcloud_sends_and_check_job_finds(write: Write, tmp_path: Path) -> None:
    """gcloud sends misspelt fields and invalid values; check-job finds both before."""
    path, command = write("--platform=vertex", "cpu")
    good = path.read_text()
    with Vertex() as cloud:
        path.write_text(good.replace("machineSpec", "machinSpec"))
        done = submitted(command, cloud.environment(tmp_path))
        assert (done.returncode, cloud.jobs) == (1, {})
        assert "machinSpec" in done.stderr
        _, found = files.check_file(path, offline=True)
        assert any("did you mean 'machineSpec'" in one.what for one in found)
        path.write_text(good.replace("replicaCount: 1", "replicaCount: 2"))
        done = submitted(command, cloud.environment(tmp_path))
    assert done.returncode == 1
    assert "jobSpec.workerPoolSpecs[0].replicaCount" in done.stderr, "the violation's field"
    _, found = files.check_file(path, offline=True)
    assert any("2 replicas in the first pool" in one.what for one in found if one.fails)


# --- the SDK ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sdk() -> Iterator[Vertex]:
    """The fake, and the SDK pointed at it over REST."""
    with Vertex(token="") as cloud:
        aiplatform.init(project=PROJECT, location="us-central1", staging_bucket="gs://bucket",
                        credentials=AnonymousCredentials(), api_transport="rest",
                        api_endpoint=cloud.url.rstrip("/"))  # fmt: skip
        yield cloud


def test_the_sdk_submits_a_custom_job_unchanged(sdk: Vertex, write: Write) -> None:
    path, _ = write("--platform=vertex", "xla", "--accelerator=v5litepod-16", "--output=gs://bucket/run")
    spec = yaml.safe_load(path.read_text())
    pools = CustomJobSpec.to_dict(proto(spec), preserving_proto_field_name=True)["worker_pool_specs"]
    pools = [{key: value for key, value in pool.items() if value} for pool in pools]
    aiplatform.CustomJob("x", worker_pool_specs=pools, base_output_dir="gs://bucket/run").submit()
    (arrived,) = sdk.jobs.values()
    assert proto(arrived["jobSpec"]) == proto(spec)


def test_the_client_of_the_sdk_accepts_the_files_as_messages(sdk: Vertex, write: Write) -> None:
    """`from_json` is strict: an unknown field is an error."""
    client = JobServiceClient(
        transport="rest",
        credentials=AnonymousCredentials(),
        client_options=ClientOptions(api_endpoint=sdk.url.rstrip("/")),
    )
    parent = f"projects/{PROJECT}/locations/us-central1"
    path, _ = write("--platform=vertex", "cpu", "--workers=2")
    spec = yaml.safe_load(path.read_text())
    made = client.create_custom_job(parent=parent, custom_job=CustomJobMessage(display_name="a", job_spec=proto(spec)))
    path, _ = write("--platform=vertex", "cpu", "--tune=lr=0.1:1")
    tuning = HyperparameterTuningJob.from_json(json.dumps(yaml.safe_load(path.read_text())))
    client.create_hyperparameter_tuning_job(parent=parent, hyperparameter_tuning_job=tuning)
    first, second = sdk.jobs.values()
    assert proto(first["jobSpec"]) == proto(spec)
    assert message("hyperparameterTuningJobs", second)["studySpec"]["metrics"][0]["metricId"] == "accuracy"
    assert client.get_custom_job(name=made.name).state.name == "JOB_STATE_RUNNING"


# --- AI Platform -----------------------------------------------------------------------------------------------------


@pytest.mark.needs("gcloud")
def test_gcloud_submits_an_ai_platform_job_unchanged(write: Write, tmp_path: Path) -> None:
    words = ["--accelerator=v2-8", "--tpu-version=2.11", "--args=--epochs 2", "--output=gs://bucket/run"]
    path, command = write("--platform=ai-platform", "tf-cpu", *words)
    with Vertex(ai_platform=True) as cloud:
        done = submitted(command, cloud.environment(tmp_path))
        assert done.returncode == 0, done.stderr
        (arrived,) = cloud.jobs.values()
    ours = yaml.safe_load(path.read_text())["trainingInput"]
    theirs = arrived["trainingInput"]
    assert theirs.pop("enableWebAccess") is False, "gcloud's own addition"
    # int64 arrive as text
    theirs["workerCount"] = int(theirs["workerCount"])
    accelerator = theirs["workerConfig"]["acceleratorConfig"]
    accelerator["count"] = int(accelerator["count"])
    assert theirs == ours


@pytest.mark.needs("gcloud")
def test_the_service_answers_that_it_was_shut_down(write: Write, tmp_path: Path) -> None:
    _, command = write("--platform=ai-platform", "tf-cpu")
    with Vertex() as cloud:
        done = submitted(command, cloud.environment(tmp_path))
    assert done.returncode == 1
    assert "Cloud AI Platform has been deprecated. Please use Vertex AI" in done.stderr


# --- SUBMIT=1 --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Direct the gcloud and kubectl that the command runs to a fake, with short intervals."""
    monkeypatch.setenv("TRAINYARD_POLL", "1")

    def use(environment: dict[str, str]) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return use


@pytest.mark.parametrize(
    ("states", "arguments"),
    [
        (("JOB_STATE_PENDING", "JOB_STATE_RUNNING", "JOB_STATE_SUCCEEDED"), ["cpu"]),
        (("JOB_STATE_PENDING", "JOB_STATE_FAILED"), ["cpu", "--tune=lr=0.1:1"]),
    ],
    ids=["succeeds", "tuning-fails"],
)
@pytest.mark.needs("gcloud")
def test_a_job_is_followed_to_its_end(
    states: tuple[str, ...],
    arguments: list[str],
    at: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gcloud's stream-logs would not end; SUBMIT=1 ends with the job, after its log, with its state."""
    # The job of this test may end before gcloud, which takes seconds to start on a busy machine, asks for its log.
    monkeypatch.setattr(submission, "LAST_LINES", 30)
    words = ["job", "--platform=vertex", *arguments, f"--registry={REGISTRY}", "--submit"]
    with Vertex(log=["epoch 1 done", "accuracy 0.98"], states=states) as cloud:
        at(cloud.environment(tmp_path))
        failed = states[-1] == "JOB_STATE_FAILED"
        assert cli.run(words) == (1 if failed else 0)
        assert len(cloud.jobs) == 1
    said = capfd.readouterr()
    assert "accuracy 0.98" in said.err
    assert ("ended as JOB_STATE_FAILED" in said.err) == failed
    assert not said.out


@pytest.mark.parametrize(
    ("arguments", "kind", "pods"),
    [
        (["--platform=gke", "xla", "--accelerator=v5litepod-16", "--slices=2"], "jobsets", 8),
        (["--platform=gke", "--image=gcr.io/p/i", "--accelerator=8xA100", "--workers=2"], "jobs", 2),
        (["--platform=kubeflow", "--image=gcr.io/p/i", "--accelerator=8xA100", "--workers=2"], "trainjobs", 2),
    ],
)
@pytest.mark.needs("kubectl")
def test_kubectl_creates_the_objects_and_follows_every_pod(
    arguments: list[str], kind: str, pods: int, at: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Kubernetes(log=["epoch 1 done"]) as cluster:
        at(cluster.environment(tmp_path))
        words = ["job", *arguments, f"--registry={REGISTRY}", "--name=run", "--submit", "--json"]
        assert cli.run(words) == 0
        assert (kind, "run") in cluster.objects
        said = capfd.readouterr()
        assert said.err.count("/trainer] epoch 1 done") == pods
        assert '"state": "Complete' in said.out
        assert cli.run(words) == 1
        assert "kubectl could not create the job" in capfd.readouterr().err


@pytest.mark.needs("gcloud")
def test_ctrl_c_stops_following_and_shows_how_to_cancel_the_job(tmp_path: Path) -> None:
    words = ["--platform=vertex", "cpu", f"--registry={REGISTRY}", "--submit", "--poll=1"]
    with Vertex(log=["epoch 1 done"], states=["JOB_STATE_RUNNING"]) as cloud:
        # A shell without job control ignores SIGINT in background processes, which the test may run in.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "trainyard", "job", *words]
        following = subprocess.Popen(
            command, cwd=ROOT, text=True, env=os.environ | cloud.environment(tmp_path), stderr=subprocess.PIPE
        )
        assert following.stderr
        said = ""
        for line in following.stderr:
            said += line
            if "epoch 1 done" in line:
                following.send_signal(signal.SIGINT)
        assert following.wait(timeout=60) == 130
        assert not [path for _, path, _ in cloud.requests if path.endswith(":cancel")], "it is still running"
    assert "To cancel it: gcloud ai custom-jobs cancel 1000 --region=us-central1" in " ".join(said.split())


@pytest.mark.parametrize("platform", ["gke", "kubeflow"])
@pytest.mark.needs("kubectl")
def test_the_api_server_checks_a_job_without_creating_it(
    platform: str, at: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["job", f"--platform={platform}", "--image=gcr.io/p/i", "--name=run", "--namespace=ml", "--cpu=8",
             "--memory=9Gi", "--secret=TOKEN=wandb:key", "--mount=nfs://10.0.0.2/share:/data"]  # fmt: skip
    with Kubernetes() as cluster:
        at(cluster.environment(tmp_path))
        assert cli.run([*words, "--dry-run"]) == 0
        assert not cluster.objects
        assert "run created (server dry run)" in capfd.readouterr().err
        assert cli.run([*words, "--submit"]) == 0
        assert {one["metadata"]["namespace"] for one in cluster.objects.values()} == {"ml"}


class Queue(Server):
    """A fake of the queue of the Cloud TPU API, which never has capacity.

    Attributes:
        wanted: what was requested, in order.
    """

    token = "fake-token"

    def __init__(self) -> None:
        super().__init__()
        self.wanted: list[dict[str, Any]] = []

    def routes(self) -> list[Route]:
        place = r"/v2(?:alpha1)?/projects/p/locations/us-central1-a"
        return [
            ("POST", f"{place}/queuedResources", self._request),
            ("GET", f"{place}/operations/1", lambda **_: {"name": "1", "done": True, "response": {}}),
            ("GET", f"{place}/queuedResources/run", lambda **_: {"state": {"state": "FAILED"}}),
            ("DELETE", f"{place}/queuedResources/run", lambda **_: _OPERATION),
        ]

    def _request(self, *, body: dict[str, Any], query: Mapping[str, str]) -> dict[str, Any]:
        self.wanted.append(body)
        return _OPERATION


_OPERATION = {"name": "projects/p/locations/us-central1-a/operations/1", "done": True, "response": {}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (["--queued", "--spot", "--labels=team=x"], {"spot": {}, "nodeId": "run", "labels": {"team": "x"}}),
        (["--slices=2"], {"multisliceParams": {"nodeCount": 2, "nodeIdPrefix": "run"}}),
        (["--queued", "--reservation=any"], {"reservationName": "projects/p/locations/us-central1-a/reservations/-"}),
        (["--reservation=mine"], {"reservationName": "projects/p/locations/us-central1-a/reservations/mine"}),
        (["--flex-start", "--timeout=4h", "--max-wait=1h"],
         {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "14400s"}}),
    ],
)  # fmt: skip
@pytest.mark.needs("gcloud")
def test_gcloud_requests_what_the_script_of_a_tpu_vm_says(
    said: list[str], expected: dict[str, Any], write: Write, tmp_path: Path
) -> None:
    """The script itself, up to the queue's answer, after which it deletes its request."""
    path, _ = write("--platform=tpu-vm", "xla", "--accelerator=v5litepod-16", "--name=run", "--project=p", *said)
    with Queue() as queue:
        environment = gcloud_environment(tmp_path, {"TPU": queue.url}, token=queue.token, project="p")
        done = submitted(["bash", str(path)], environment)
        assert (done.returncode, "run: FAILED" in done.stderr) == (1, True), done.stderr
        (wanted,) = queue.wanted
        assert "DELETE" in [method for method, _, _ in queue.requests]
    (node,) = wanted["tpu"]["nodeSpec"]
    found = wanted | node | node["node"]
    assert {name: found.get(name) for name in expected} == expected
    assert (found["acceleratorType"], found["runtimeVersion"]) == ("v5litepod-16", "v2-alpha-tpuv5-lite")


@pytest.mark.needs("kubectl")
def test_kubectl_shows_what_the_server_refuses(write: Write, tmp_path: Path) -> None:
    path, command = write("--platform=gke", "xla", "--accelerator=v5litepod-16")
    path.write_text(path.read_text().replace("replicatedJobs", "replicatedJob"))
    with Kubernetes() as cluster:
        done = submitted(command, cluster.environment(tmp_path))
    assert done.returncode == 1
    assert 'unknown field "spec.replicatedJob"' in done.stderr


_INVALID = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: digits
spec:
  completionMode: Indexed
  template:
    spec:
      containers: [{name: main, image: gcr.io/p/i}]
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            _INVALID,
            [
                "job.yaml:5: spec.completions: Required value: when completion mode is Indexed",
                'job.yaml:8: spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"',
            ],
        ),
        (
            f"{_INVALID}---\n{_INVALID.replace('digits', 'other')}",
            [
                "job.yaml:5: spec.completions: Required value: when completion mode is Indexed",
                "job.yaml:15: spec.completions: Required value: when completion mode is Indexed",
            ],
        ),
        (
            _INVALID.replace("batch/v1", "leaderworkerset.x-k8s.io/v1").replace("Job", "LeaderWorkerSet"),
            ["job.yaml:2: the cluster has no LeaderWorkerSet of leaderworkerset.x-k8s.io/v1"],
        ),
        (
            _INVALID.replace("  name: digits", "  generateName: a-")
            .replace("    spec:", "    spec:\n      restartPolicy: Never")
            .replace("  completionMode: Indexed\n", ""),
            [],
        ),
    ],
    ids=["two fields of a job", "two jobs", "no such kind", "a generated name"],
)
@pytest.mark.needs("kubectl")
def test_a_check_asks_the_cluster(
    text: str,
    said: list[str],
    at: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(text, encoding="utf-8")
    with Kubernetes() as cluster:
        at(cluster.environment(tmp_path))
        assert cli.run(["job", "check", "job.yaml", "--offline", "--server", "--json"]) == (1 if said else 0)
        assert not cluster.objects
    (file,) = json.loads(capfd.readouterr().out)["files"]
    found = [one for one in file["findings"] if one["rule"] == "cluster_takes_the_objects"]
    assert [f"{one['where']}: {one['what']}" for one in found] == said


@pytest.mark.needs("gcloud")
def test_a_tpu_vm_runs_the_image_on_every_worker_and_is_deleted(tmp_path: Path) -> None:
    """The whole script, with the real gcloud, and real ssh into containers instead of workers."""
    image = f"{REGISTRY}/small:1"
    words = ["--platform=tpu-vm", f"--image={image}", "--accelerator=v4-16", "--name=run", "--submit",
             "--args=sh -c 'echo trained; exit 3'"]  # fmt: skip
    with TpuVms(images={image: base_image.resolve(CONTEXT, "debian-12").reference}) as cloud:
        done = submitted([sys.executable, "-m", "trainyard", "job", *words], cloud.environment(tmp_path))
        assert sorted(re.findall(r"\[\d\] trained", done.stderr)) == ["[0] trained", "[1] trained"], done.stderr
        assert not done.stdout, "the log is on stderr"
        assert done.returncode == 1, "the status of a container is not 0"
        assert "ended with status 3" in " ".join(done.stderr.split())
        assert not cloud.nodes, "the slice is deleted"
        created = next(body for method, path, body in cloud.requests if method == "POST" and path.endswith("/nodes"))
    assert (created["acceleratorType"], created["runtimeVersion"]) == ("v4-16", "tpu-ubuntu2204-base")


# --- what is in an image ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with running.container() as started:
        yield running.address(started)


def made(reference: str, *, labels: dict[str, str], recipe: Recipe | None = None) -> str:
    """A local image of a few bytes."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        if recipe is not None:
            data = recipe.text().encode()
            entry = tarfile.TarInfo(PATH.lstrip("/"))
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    name, _, tag = reference.rpartition(":")
    changes = [f"LABEL {key}={value}" for key, value in labels.items()] + ['CMD ["/nothing"]']
    ENGINE.client.api.import_image_from_data(layer.getvalue(), name, tag, changes)
    return reference


TF = {f"{LABELS}.framework": "tensorflow==2.21.0", f"{LABELS}.target": "tf-cpu"}


def test_an_image_is_looked_up_at_its_registry_without_pulling(registry: str, tmp_path: Path) -> None:
    """tpuTfVersion is compared with the image's framework, by its labels at the registry."""
    reference = made(f"{registry}/team/trainyard:tf", labels=TF)
    ENGINE.client.images.push(reference)
    ENGINE.client.images.remove(reference, force=True)
    path = tmp_path / "old.yaml"
    path.write_text(
        yaml.safe_dump({"trainingInput": {
            "scaleTier": "BASIC_TPU", "region": "us-central1", "masterConfig": {"imageUri": reference},
            "workerConfig": {"tpuTfVersion": "2.11"}}})
    )  # fmt: skip
    _, found = files.check_file(path, engine=ENGINE)
    (finding,) = [one for one in found if one.rule == "tpu_runtime_matches_image"]
    assert "tpuTfVersion 2.11, but the image has tensorflow 2.21.0 (by its labels at the registry)" in finding.what
    assert finding.where.endswith("old.yaml:7")
    assert not ENGINE.images(reference), "nothing was pulled"
    path.write_text(path.read_text().replace(":tf", ":other"))
    _, found = files.check_file(path, engine=ENGINE)
    assert [one.what for one in found if one.rule == "images_exist"] == [
        f"{registry}/team/trainyard:other: {registry} has no team/trainyard:other"
    ]


def test_an_image_for_another_accelerator_is_found_by_its_label(registry: str, tmp_path: Path) -> None:
    """Its framework does not tell: torch from the default index runs on CPUs and GPUs."""
    reference = made(f"{registry}/team/trainyard:cpu", labels={f"{LABELS}.accelerator": "none"})
    ENGINE.client.images.push(reference)
    ENGINE.client.images.remove(reference, force=True)
    path = tmp_path / "job.yaml"
    machine = {"machineType": "a2-highgpu-1g", "acceleratorType": "NVIDIA_TESLA_A100", "acceleratorCount": 1}
    pool = {"machineSpec": machine, "replicaCount": 1, "containerSpec": {"imageUri": reference}}
    path.write_text(yaml.safe_dump({"workerPoolSpecs": [pool]}))
    _, found = files.check_file(path, engine=ENGINE)
    (finding,) = [one for one in found if one.rule == "images_support_accelerator"]
    assert "a GPU job with an image for CPUs" in finding.what and "by its labels at the registry" in finding.what


def test_a_job_can_name_an_image_by_its_digest(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference = made(f"{registry}/team/trainyard:pinned", labels=TF)
    ENGINE.client.images.push(reference)
    ENGINE.client.images.remove(reference, force=True)
    assert cli.run(["job", "--platform=vertex", f"--image={reference}", "--pin", "--json"]) == 0
    spec = yaml.safe_load(json.loads(capsys.readouterr().out)["config"])
    image = spec["workerPoolSpecs"][0]["containerSpec"]["imageUri"]
    assert re.fullmatch(rf"{registry}/team/trainyard@sha256:[0-9a-f]{{64}}", image)
    assert image_metadata.read_contents(ENGINE, image).tensorflow == "2.21.0"
    assert cli.run(["job", "--platform=vertex", f"--image={registry}/team/trainyard:none", "--pin"]) == 2
    assert "has no team/trainyard:none" in " ".join(capsys.readouterr().err.split())


def test_the_contents_of_a_local_image_are_read_from_its_recipe(tmp_path: Path) -> None:
    recipe = recipes.make(load("tf-gpu"))
    reference = made("trainyard-check-job:recipe", labels={}, recipe=recipe)
    try:
        held = image_metadata.read_contents(ENGINE, reference)
    finally:
        ENGINE.client.images.remove(reference, force=True)
    assert (held.framework, held.device, held.source) == (f"tensorflow {recipe.version}", "gpu", PATH)


def test_an_unreachable_registry_is_a_note(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    pool = {"machineSpec": {"machineType": "n1-standard-8"}, "replicaCount": 1,
            "containerSpec": {"imageUri": "registry.invalid/team/image:1"}}  # fmt: skip
    path.write_text(yaml.safe_dump({"workerPoolSpecs": [pool]}))
    _, found = files.check_file(path, engine=ENGINE)
    (note,) = found
    assert not note.fails
    assert "could not be looked up" in note.what


def test_make_passes_its_variables_on(tmp_path: Path) -> None:
    """`make job ... >file` writes the job alone, and `make check-job` accepts it; values may contain spaces."""
    path = tmp_path / "job.yaml"
    arguments = ["PLATFORM=vertex", "TARGET=cpu", f"REGISTRY={REGISTRY}", "ARGS=--lr 0.1 --epochs 2"]
    with path.open("w") as file:
        done = subprocess.run(["make", "-s", "job", *arguments], cwd=ROOT,
                              stdout=file, stderr=subprocess.PIPE, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"--config={path}" in " ".join(done.stderr.split())
    args = yaml.safe_load(path.read_text())["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert args[0] == "mnist" and args[-2:] == ["--epochs", "2"]
    done = subprocess.run(["make", "-s", "check-job", f"FILE={path}", "OFFLINE=1"], cwd=ROOT, capture_output=True,
                          text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
