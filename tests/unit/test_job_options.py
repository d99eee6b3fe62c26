"""What `trainyard job` can say about containers, capacity and machines: each option on each platform that has it.

Written, read back by `trainyard job check` without a finding, and judged by what the platform publishes: the API's
discovery document, Kubernetes' schemas, Kubeflow's custom resource definition, SkyPilot's schema. bash reads scripts;
the real gcloud, kubectl, sbatch and sky read them in tests/cloud.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.fakes import kubernetes as fake_kubernetes
from tests.unit.test_job import SKY_TASK

from trainyard.common.errors import UserError
from trainyard_jobs import platforms
from trainyard_jobs.check import files
from trainyard_jobs.model import options
from trainyard_jobs.rehearsal import session
from trainyard_jobs.schema import google, job_file, kubernetes

REGISTRY = "us-central1-docker.pkg.dev/proj/ml"
NETWORK = "projects/1/global/networks/n"
Command = Callable[..., tuple[int, str, str]]
Write = Callable[..., str]

#: Platform -> arguments of a job that every option can be added to.
BASE = {
    "vertex": ["cpu"],
    "ai-platform": ["tf-cpu"],
    "gke": ["cpu"],
    "kubeflow": ["cpu"],
    "slurm": ["cpu"],
    "skypilot": ["cpu"],
    "tpu-vm": ["xla", "--accelerator", "v5litepod-16"],
}


@pytest.fixture
def write(trainyard: Command) -> Write:
    """Write a job; its text."""

    def run(platform: str, *arguments: str) -> str:
        status, out, err = trainyard("job", "--platform", platform, *arguments, "--registry", REGISTRY)
        assert status == 0, err
        return out

    return run


@pytest.fixture
def refused(trainyard: Command) -> Write:
    """The line that a job is refused with."""

    def run(platform: str, *arguments: str) -> str:
        status, out, err = trainyard("job", "--platform", platform, *arguments, "--registry", REGISTRY)
        assert (status, out) == (2, "")
        return " ".join(err.split())

    return run


def found_by_check(text: str, folder: Path) -> list[str]:
    """What `trainyard job check` says about a job."""
    path = folder / "job.yaml"
    path.write_text(text, encoding="utf-8")
    (found,), _ = files.check_files([path], functools.partial(files.check_file, offline=True))
    return [one.what for one in found.findings]


def judge(platform: str, text: str) -> None:
    """Fail if the platform's own description of jobs does not allow this one."""
    if platform in ("tpu-vm", "slurm"):
        assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
        return
    documents = list(yaml.safe_load_all(text))
    if platform == "vertex":
        assert google.validate("aiplatform.v1", "GoogleCloudAiplatformV1CustomJobSpec", documents[0]) == []
    if platform == "ai-platform":
        assert google.validate("ml.v1", "GoogleCloudMlV1__Job", documents[0]) == []
    if platform == "gke":
        for one in documents:
            fake_kubernetes.refuse_invalid(one)
    if platform == "kubeflow":
        assert list(kubernetes.validate(documents[0])) == []
    if platform == "skypilot":
        jsonschema.validate(documents[0], SKY_TASK)


# --- where a file has what an option says ----------------------------------------------------------------------------


def container(text: str) -> Any:
    """The container of a Vertex AI job's first pool, of a Job, or of a TrainJob with its resources."""
    first = list(yaml.safe_load_all(text))[-1]
    if "workerPoolSpecs" in first:
        return first["workerPoolSpecs"][0]["containerSpec"]
    if first["kind"] == "TrainJob":
        return first["spec"]["trainer"] | {"resources": first["spec"]["trainer"].get("resourcesPerNode")}
    return first["spec"]["template"]["spec"]["containers"][0]


def pod(text: str) -> Any:
    """The spec of a Job's pods, or what a TrainJob adds to those of its runtime."""
    first = list(yaml.safe_load_all(text))[-1]
    if first["kind"] == "TrainJob":
        runtime = first["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]
        return runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return first["spec"]["template"]["spec"]


def env(text: str) -> Any:
    return [one for one in container(text)["env"] if one["name"] in ("A", "B", "TOKEN")]


def nfs(text: str) -> Any:
    (volume,) = [one for one in pod(text)["volumes"] if "nfs" in one]
    return volume["nfs"]


def tolerations(text: str) -> Any:
    return pod(text)["tolerations"]


def pull_secrets(text: str) -> Any:
    return pod(text)["imagePullSecrets"]


def spec(text: str) -> Any:
    return yaml.safe_load(text)


def namespaces(text: str) -> Any:
    return {one["metadata"]["namespace"] for one in yaml.safe_load_all(text)}


def docker(text: str) -> list[str]:
    """The words by which a TPU VM or SkyPilot's machine starts the container."""
    if text.startswith("#!"):
        (line,) = [line for line in text.splitlines() if " docker run " in line]
        text = next(word for word in shlex.split(line) if word.startswith("--command="))
    else:
        text = yaml.safe_load(text)["run"].splitlines()[-1]
    return shlex.split(text[text.rindex("sudo ", 0, text.index("docker run ")) :])


def create(text: str) -> list[str]:
    """The words that request the TPU VM."""
    return shlex.split(next(line for line in text.splitlines() if " create " in line))


def resources(text: str) -> Any:
    return yaml.safe_load(text)["resources"]


def lines(text: str) -> list[str]:
    return text.splitlines()


AB = ["--env", "A=1,2", "--env", "B=it's $x"]
PAIRS = [{"name": "A", "value": "1,2"}, {"name": "B", "value": "it's $x"}]
SECRET = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}}}
PROGRAM = ["--command", "python -m 'my pkg'", "--args", "--lr 0.1"]
SHARE = {"server": "10.0.0.2", "path": "/share/x"}
TOLERATIONS = [
    {"key": "team", "effect": "NoSchedule", "operator": "Equal", "value": "ml"}, {"key": "spot", "operator": "Exists"}
]  # fmt: skip

#: Option, platform -> arguments, what has it in the file, and its value there; a set if these are some of the words.
SAID: dict[tuple[str, str], tuple[list[str], Callable[[str], Any], Any]] = {
    ("env", "vertex"): (AB, env, PAIRS),
    ("env", "gke"): (AB, env, PAIRS),
    ("env", "kubeflow"): (AB, env, PAIRS),
    ("env", "tpu-vm"): (AB, docker, {"--env=A=1,2", "--env=B=it's $x"}),
    ("env", "skypilot"): (AB, docker, {"--env=A=1,2", "--env=B=it's $x"}),
    ("env", "slurm"): (AB, lines, {"export A=1,2", "export B='it'\"'\"'s $x'"}),
    ("secret", "gke"): (["--secret", "TOKEN=wandb:api-key"], env, [SECRET]),
    ("secret", "kubeflow"): (["--secret", "TOKEN=wandb:api-key"], env, [SECRET]),
    ("secret", "tpu-vm"): (["--secret", "TOKEN=wandb"], docker, {"--preserve-env=TOKEN", "--env=TOKEN"}),
    ("secret", "skypilot"): (["--secret", "TOKEN=env"], docker, {"--preserve-env=TOKEN", "--env=TOKEN"}),
    ("cpu", "gke"): (["--cpu", "500m"], container, {"requests": {"cpu": "500m"}}),
    ("cpu", "kubeflow"): (["--cpu", "8"], container, {"requests": {"cpu": "8"}}),
    ("cpu", "skypilot"): (["--cpu", "500m"], resources, {"infra": "gcp", "cpus": "1+"}),
    ("cpu", "slurm"): (["--cpu", "7.5"], lines, {"#SBATCH --cpus-per-task=8"}),
    ("memory", "gke"): (["--memory", "9Gi"], container, {"requests": {"memory": "9Gi"}, "limits": {"memory": "9Gi"}}),
    ("memory", "kubeflow"): (["--memory", "9Gi"], container,
                             {"requests": {"memory": "9Gi"}, "limits": {"memory": "9Gi"}}),
    ("memory", "skypilot"): (["--memory", "1536Mi"], resources, {"infra": "gcp", "memory": "1.5+"}),
    ("memory", "slurm"): (["--memory", "1Gi"], lines, {"#SBATCH --mem=1024M"}),
    ("command", "vertex"): (PROGRAM, lambda text: [container(text)[key] for key in ("command", "args")],
                            [["python", "-m", "my pkg"], ["--lr", "0.1"]]),
    ("command", "ai-platform"): (PROGRAM, lambda text: spec(text)["trainingInput"]["masterConfig"]["containerCommand"],
                                 ["python", "-m", "my pkg", "--lr", "0.1"]),
    ("command", "gke"): (PROGRAM, lambda text: [container(text)[key] for key in ("command", "args")],
                         [["python", "-m", "my pkg"], ["--lr", "0.1"]]),
    ("command", "kubeflow"): (PROGRAM, lambda text: [container(text)[key] for key in ("command", "args")],
                              [["python", "-m", "my pkg"], ["--lr", "0.1"]]),
    ("command", "tpu-vm"): (PROGRAM, lambda text: [word for word in docker(text) if not word.startswith("--e")][-5:],
                            [f"{REGISTRY}/trainyard:xla-2.9.0", "-m", "my pkg", "--lr", "0.1"]),
    ("command", "skypilot"): (PROGRAM, lambda text: docker(text)[-6:],
                              ["--entrypoint=python", f"{REGISTRY}/trainyard:cpu-2.15.0", "-m", "my pkg", "--lr",
                               "0.1"]),
    ("command", "slurm"): (PROGRAM, lambda text: shlex.split(lines(text)[-1])[-7:],
                           ["--no-container-entrypoint", "--no-container-mount-home", "python", "-m", "my pkg", "--lr",
                            "0.1"]),
    ("namespace", "gke"): (["--namespace", "ml", "--workers", "2"], namespaces, {"ml"}),
    ("namespace", "kubeflow"): (["--namespace", "ml"], namespaces, {"ml"}),
    ("node-selector", "gke"): (["--node-selector", "cloud.google.com/compute-class=Performance"], pod,
                               {"nodeSelector": {"cloud.google.com/compute-class": "Performance"}}),
    ("node-selector", "kubeflow"): (["--node-selector", "cloud.google.com/compute-class=Performance"], pod,
                                    {"nodeSelector": {"cloud.google.com/compute-class": "Performance"}}),
    ("mount", "vertex"): (["--mount", "nfs://10.0.0.2/share/x:/mnt/nfs/data", "--network", NETWORK],
                          lambda text: spec(text)["workerPoolSpecs"][0]["nfsMounts"], [SHARE | {"mountPoint": "data"}]),
    ("mount", "gke"): (["--mount", "nfs://10.0.0.2/share/x:/data:ro"], nfs, SHARE | {"readOnly": True}),
    ("mount", "kubeflow"): (["--mount", "nfs://10.0.0.2/share/x:/data"], nfs, SHARE),
    ("mount", "slurm"): (["--mount", "/shared/x:/data:ro /scratch:/scratch"],
                         lambda text: shlex.split(lines(text)[-1])[-2],
                         "--container-mounts=/shared/x:/data:ro,/scratch:/scratch"),
    ("toleration", "gke"): (["--toleration", "team=ml:NoSchedule", "--toleration", "spot"], tolerations, TOLERATIONS),
    ("toleration", "kubeflow"): (["--toleration", "team=ml:NoSchedule", "--toleration", "spot"], tolerations,
                                 TOLERATIONS),
    ("image-pull-secret", "gke"): (["--image-pull-secret", "a"], pull_secrets, [{"name": "a"}]),
    ("image-pull-secret", "kubeflow"): (["--image-pull-secret", "a"], pull_secrets, [{"name": "a"}]),
    ("array", "slurm"): (["--array", "0-9%4"], lines, {"#SBATCH --array=0-9%4", "#SBATCH --output=%x-%A_%a.log"}),
    ("requeue", "slurm"): (["--requeue"], lines, {"#SBATCH --requeue", "#SBATCH --open-mode=append"}),
    ("web-access", "vertex"): (["--web-access"], lambda text: spec(text)["enableWebAccess"], True),
    ("pool", "vertex"): (
        ["--workers", "3", "--pool", "workers=n1-standard-8+2xT4", "--pool", "servers=2xn1-highmem-8"],
        lambda text: [(one["replicaCount"], *one["machineSpec"].values()) for one in spec(text)["workerPoolSpecs"]],
        [(1, "n1-standard-8"), (2, "n1-standard-8", "NVIDIA_TESLA_T4", 2), (2, "n1-highmem-8")],
    ),
    ("queued", "tpu-vm"): (["--queued", "--max-wait", "2h"], create,
                           {"queued-resources", "--node-id=xla-mnist", "--valid-until-duration=7200s"}),
    ("max-wait", "tpu-vm"): (["--queued", "--max-wait", "2h"], lambda text: "[ $SECONDS -lt 7200 ]" in text, True),
    ("reservation", "tpu-vm"): (["--reservation", "mine"], create, {"alpha", "queued-resources", "--reservation=mine"}),
    ("flex-start", "tpu-vm"): (["--flex-start", "--timeout", "4h"], create,
                               {"alpha", "--provisioning-model=flex-start", "--max-run-duration=14400s"}),
}  # fmt: skip

#: Options whose platforms all are in the table.
NEW = {"env", "secret", "cpu", "memory", "namespace", "node-selector", "web-access", "pool", "queued",
       "toleration", "image-pull-secret", "array", "requeue"}  # fmt: skip


def test_a_persistent_volume_claim_is_mounted_and_may_be_read_only(write: Write) -> None:
    found = pod(write("gke", *BASE["gke"], "--mount", "pvc://work:/work pvc://data.v2:/data:ro"))
    claims = [one["persistentVolumeClaim"] for one in found["volumes"] if "persistentVolumeClaim" in one]
    assert claims == [{"claimName": "work"}, {"claimName": "data.v2", "readOnly": True}]
    assert found["containers"][0]["volumeMounts"][-1] == {"name": "claim-1", "mountPath": "/data", "readOnly": True}


@pytest.mark.parametrize(
    ("runtime", "image", "said"),
    [
        ("pyxis", "/shared/mine.sqsh", "--container-image=/shared/mine.sqsh"),
        ("apptainer", "/shared/mine.sif", "apptainer run --bind=/a:/b /shared/mine.sif"),
    ],
)
def test_slurm_starts_a_file_without_a_registry(write: Write, runtime: str, image: str, said: str) -> None:
    text = write("slurm", "--image", image, "--container-runtime", runtime, "--mount", "/a:/b", "--args", "--epochs 2")
    assert said in lines(text)[-1] and lines(text)[-1].endswith("--epochs 2")


def test_every_task_of_an_array_has_its_folder_below_the_output(write: Write) -> None:
    text = write("slurm", *BASE["slurm"], "--array", "0-1", "--output", "/scratch/my run")
    assert lines(text)[-1].endswith("""'--job-dir=/scratch/my run/'"$SLURM_ARRAY_TASK_ID\"""")


def test_the_table_has_every_platform_of_an_option() -> None:
    having = {(option, one.name) for one in platforms.PLATFORMS for option in NEW & one.options}
    assert having | {("command", one.name) for one in platforms.PLATFORMS} <= SAID.keys()


@pytest.mark.parametrize(("option", "platform"), SAID, ids=lambda one: one)
def test_an_option_is_written_and_valid(write: Write, tmp_path: Path, option: str, platform: str) -> None:
    arguments, read, value = SAID[option, platform]
    if option == "pool":  # an image for CPUs cannot use the GPUs
        text = write(platform, "--image", "gcr.io/p/i", *arguments)
    else:
        text = write(platform, *BASE[platform], *arguments)
    found = read(text)
    if option in ("cpu", "memory") and platform in ("gke", "kubeflow"):
        found = found["resources"]
    if isinstance(value, set):
        assert value <= set(found)
    elif option == "node-selector":
        assert found["nodeSelector"] == value["nodeSelector"]
    else:
        assert found == value
    judge(platform, text)
    if platforms.by_name(platform).kinds or platform == "kubeflow":
        assert [one for one in found_by_check(text, tmp_path) if "was shut down" not in one] == []


@pytest.mark.parametrize(
    ("platform", "arguments", "said"),
    [
        ("vertex", ["--env", "A"], "'--env': 'A' is not NAME=VALUE"),
        ("vertex", ["--env", "1A=x"], "'--env': '1A' is not NAME=VALUE"),
        ("vertex", ["--env", "HF_TOKEN=abc"], "'--env HF_TOKEN=...' looks like a secret by its name (HF_TOKEN)"),
        ("gke", ["--env", f"X=hf_{'aB3dE5gH7j' * 3}kL9m"], "'--env X=...' looks like a Hugging Face token"),
        ("gke", ["--env", "DB=postgres://me:pw@host/db"], "looks like an address with a password"),
        ("kubeflow", ["--env", "PET_NNODES=2"], "PET_NNODES is set by the runtime"),
        ("vertex", ["--secret", "T=a:b"], "a CustomJob has no field for it: let the code read Secret Manager"),
        ("slurm", ["--secret", "T=a:b"], "sbatch passes your environment on: export the variable before 'sbatch'"),
        ("gke", ["--secret", "T=wandb"], "'--secret T=wandb': Kubernetes takes SECRET:KEY"),
        ("skypilot", ["--secret", "T=wandb"], "SkyPilot takes secrets from your environment: write T=env"),
        ("ai-platform", ["--env", "A=1"], "its jobs have no variables: give flags with '--args'"),
        ("vertex", ["--cpu", "8"], "'--platform vertex' has no '--cpu': '--machine' decides it; these have it: gke"),
        ("gke", ["--cpu", "many"], "'--cpu many' is not a number: 8"),
        ("gke", ["--memory", "32"], "'--memory 32' is not a size: 32Gi"),
        ("gke", ["--namespace", "My team"], "'--namespace My team' is not a name of a-z"),
        ("gke", ["--node-selector", "a b=c"], "'--node-selector': 'a b=c' is not NAME=VALUE"),
        ("gke", ["--spot", "--node-selector", "cloud.google.com/gke-spot=false"], "another option selects true"),
        ("vertex", ["--namespace", "ml"], "'--platform vertex' has no '--namespace'; these have it: gke, kubeflow"),
        ("vertex", ["--command", "python x.py", "--trainer", "mnist"], "leave out '--trainer'"),
        ("vertex", ["--command", "python 'x"], "'--command python 'x': no closing quotation"),
        ("vertex", ["--pool", "boss=n1-standard-8"], "is not chief/workers/servers/evaluators=[Nx]MACHINE[+GPUS]"),
        ("vertex", ["--pool", "chief=2xn1-standard-8"], "'--workers' gives the number of machines of chief"),
        ("vertex", ["--pool", "servers=n1-standard-8"], "the pool of workers is empty, which gcloud refuses"),
        ("vertex", ["--workers", "2", "--pool", "evaluators=n1-standard-8"], "give '--pool servers=MACHINE', too"),
        ("vertex", ["--pool", "chief=n1-standard-7"], "unknown machine type 'n1-standard-7'"),
        ("vertex", ["--pool", "chief=ct5lp-hightpu-4t+v5litepod-4"], "a TPU job has one pool"),
        ("vertex", ["--mount", "gs://bucket:/data"], "Vertex AI has every bucket below /gcs: leave it out"),
        ("vertex", ["--mount", "nfs://10.0.0.2/x:/data", "--network", NETWORK], "Vertex AI mounts NFS below /mnt/nfs/"),
        ("vertex", ["--mount", "nfs://10.0.0.2/x:/mnt/nfs/x"], "requires '--network' or '--network-attachment'"),
        ("skypilot", ["--mount", "nfs://10.0.0.2/x:/data"], "mounts no such folder; these do: vertex, gke, kubeflow"),
        ("slurm", ["--mount", "gs://bucket:/data"], "mounts no such folder; these do: vertex, gke, kubeflow, skypilot"),
        ("gke", ["--mount", "/shared:/shared"], "'--mount /shared:...': '--platform gke' mounts no such folder"),
        ("gke", ["--mount", "pvc://Claim:/x"], "is not gs://BUCKET"),
        ("gke", ["--toleration", "a b"], "'--toleration': 'a b' has not the form that Kubernetes takes"),
        ("gke", ["--array", "0-9"], "'--platform gke' has no '--array'; these have it: slurm"),
        ("slurm", ["--array", "a"], "'--array a' is not an array of sbatch"),
        ("gke", ["--queued"], "'--platform gke' has no '--queued'; these have it: tpu-vm"),
        ("tpu-vm", ["--max-wait", "1h"], "'--max-wait' requires '--flex-start' or '--queued'"),
        ("tpu-vm", ["--timeout", "1h"], "'--platform tpu-vm' has no '--timeout'"),
        ("gke", ["--submit", "--dry-run"], "'--submit' runs the job, '--dry-run' does not"),
        ("vertex", ["--dry-run"], "'--platform vertex' has no '--dry-run': no request of its API only checks a job"),
        ("tpu-vm", ["--dry-run"], "'--platform tpu-vm' has no '--dry-run': no request of its API only checks a job"),
    ],
)  # fmt: skip
def test_what_a_platform_cannot_say_is_one_line(refused: Write, platform: str, arguments: list[str], said: str) -> None:
    assert said in refused(platform, *BASE[platform], *arguments)


def test_a_refused_credential_is_not_shown(refused: Write) -> None:
    assert "s3cr3t" not in refused("gke", "cpu", "--env", "API_KEY=s3cr3t")


def test_a_variable_of_make_has_several_values(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINYARD_ENV", "A=1 B=2")
    assert [one["value"] for one in env(write("vertex", "cpu"))] == ["1", "2"]


def test_the_output_of_a_command_is_in_the_variables_of_vertex_ai(write: Write) -> None:
    """Flags of Trainyard's trainers are not those of any program."""
    found = container(write("gke", "cpu", "--command", "python x.py", "--output", "gs://bucket/run"))
    assert "args" not in found
    assert {"name": "AIP_MODEL_DIR", "value": "gs://bucket/run/model/"} in found["env"]


def test_a_group_in_a_namespace_is_followed_there(trainyard: Command, tmp_path: Path) -> None:
    """A program in place of kubectl, which writes its arguments down."""
    ended = json.dumps({"items": [], "status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    said = programs(tmp_path, kubectl=f"echo '{ended}'")
    assert trainyard("job", "--platform", "gke", "cpu", "--registry", REGISTRY, "--namespace", "ml", "--submit")[0] == 0
    assert all("--namespace=ml" in one for one in said()[1:]), "the file itself has that of its objects"


def programs(folder: Path, **scripts: str) -> Callable[[], list[str]]:
    """Put programs on PATH for this test; what returns the arguments that they got, a line for each call."""
    log = folder / "log"
    log.touch()
    for name, script in scripts.items():
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >>{log}\n{script}\n')
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    return lambda: log.read_text().splitlines()


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])


@pytest.mark.parametrize(
    ("platform", "program", "words"),
    [
        ("gke", "kubectl", "create --dry-run=server --filename"),
        ("kubeflow", "kubectl", "create --dry-run=server --filename"),
        ("slurm", "sbatch", "--test-only"),
        ("skypilot", "sky", "launch --dryrun --yes"),
    ],
)
def test_a_platform_checks_a_job_without_running_it(
    trainyard: Command, tmp_path: Path, platform: str, program: str, words: str
) -> None:
    said = programs(tmp_path, **{program: 'for last; do :; done; grep -q cpu-mnist "$last"'})
    arguments = ("job", "--platform", platform, "cpu", "--registry", REGISTRY, "--dry-run")
    status, out, err = trainyard(*arguments)
    assert (status, out) == (0, "")
    assert f"'--platform {platform}' accepts the job; nothing was started" in err
    (call,) = said()
    assert call.startswith(words)
    assert json.loads(trainyard(*arguments, "--json")[1]) == {"platform": platform, "accepted": True}
    programs(tmp_path, **{program: "exit 1"})
    status, _, err = trainyard(*arguments)
    assert (status, "did not accept the job; see above" in err) == (1, True)


# --- TPUs ------------------------------------------------------------------------------------------------------------


def test_a_train_job_on_a_tpu_slice_has_a_node_for_each_machine(write: Write, tmp_path: Path) -> None:
    text = write("kubeflow", "jax-tpu", "--accelerator", "v5litepod-16")
    judge("kubeflow", text)
    assert found_by_check(text, tmp_path) == []
    found = yaml.safe_load(text)["spec"]
    assert (found["runtimeRef"], found["trainer"]["numNodes"]) == ({"name": "jax-distributed"}, 4)
    assert found["trainer"]["resourcesPerNode"]["limits"] == {"google.com/tpu": "4"}
    assert pod(text)["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    annotations = found["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["metadata"]["annotations"]
    assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}


def test_an_image_of_ones_own_on_tpus_is_one_with_jax(write: Write) -> None:
    text = write("kubeflow", "--image", "gcr.io/p/i", "--accelerator", "v5litepod-4")
    assert yaml.safe_load(text)["spec"]["runtimeRef"] == {"name": "jax-distributed"}


def test_a_train_job_with_cpus_starts_one_process_on_each_node(write: Write) -> None:
    """The Torch plugin starts one for each CPU, https://github.com/kubeflow/trainer, plugins/torch/torch.go."""
    job = job_file.parse(write("kubeflow", "cpu", "--cpu", "8"), Path("job.yaml"))
    (replica,) = session.plan(platforms.of_job_file(job).rehearse(job))["replicas"]
    assert replica["environment"]["PET_NPROC_PER_NODE"] == "1"


def test_the_slice_determines_the_nodes_of_a_train_job(refused: Write) -> None:
    assert "leave out '--workers'" in refused("kubeflow", "jax-tpu", "--accelerator", "v5litepod-16", "--workers", "2")


def test_slices_that_train_together_are_one_queued_resource(write: Write) -> None:
    text = write("tpu-vm", "xla", "--accelerator", "v5litepod-16", "--slices", "2", "--name", "run")
    judge("tpu-vm", text)
    assert {"--node-count=2", "--node-prefix=run"} <= set(create(text))
    assert "trap 'gcloud compute tpus queued-resources delete run --zone=us-central1-a --force --quiet' EXIT" in text
    connections = [shlex.split(line) for line in text.splitlines() if " ssh " in line]
    assert all(
        {"queued-resources", "--node=all", "--worker=all", "--batch-size=all"} <= set(one) for one in connections
    )


def script(text: str, folder: Path, states: list[str]) -> tuple[int, list[str]]:
    """Run a script with a gcloud that answers with one state after the other; its status, and the calls."""
    answers = folder / "states"
    answers.write_text("".join(f"{one}\n" for one in states))
    said = programs(folder, sleep=":", gcloud=f"case $4 in describe) head -n1 {answers}; sed -i 1d {answers} ;; esac")
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    return done.returncode, [words.split()[3] for words in said() if words.startswith("compute")]


@pytest.mark.parametrize(
    ("states", "status", "calls"),
    [
        (["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], 0, ["create", *["describe"] * 3, "ssh", "ssh", "delete"]),
        (["WAITING_FOR_RESOURCES", "FAILED"], 1, ["create", *["describe"] * 2, "delete"]),
        (["SUSPENDED"], 1, ["create", "describe", "delete"]),
    ],
)
def test_a_script_waits_for_the_queue_and_deletes_what_it_requested(
    write: Write, tmp_path: Path, states: list[str], status: int, calls: list[str]
) -> None:
    text = write("tpu-vm", "xla", "--accelerator", "v5litepod-16", "--queued")
    assert script(text, tmp_path, states) == (status, calls)


def test_a_script_gives_up_waiting(write: Write, tmp_path: Path) -> None:
    text = write("tpu-vm", "xla", "--accelerator", "v5litepod-16", "--queued", "--max-wait", "1s")
    status, calls = script(text.replace("$SECONDS -lt 1 ", "9 -lt 1 "), tmp_path, ["WAITING_FOR_RESOURCES"] * 9)
    assert (status, calls) == (1, ["create", "describe", "delete"])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("wandb", "access latest --secret=wandb"),
        ("wandb:3", "access 3 --secret=wandb"),
        ("projects/p/secrets/wandb", "access latest --secret=projects/p/secrets/wandb"),
        ("projects/p/secrets/wandb/versions/2", "access 2 --secret=projects/p/secrets/wandb"),
    ],
)
def test_a_worker_reads_a_secret_and_shows_it_to_no_other_process(
    write: Write, tmp_path: Path, source: str, words: str
) -> None:
    """Run what ssh would run, with programs in place of gcloud, sudo, curl and docker."""
    text = write("tpu-vm", *BASE["tpu-vm"], "--secret", f"KEY={source}")
    line = next(line for line in text.splitlines() if " docker run " in line)
    command = next(word for word in shlex.split(line) if word.startswith("--command=")).removeprefix("--command=")
    said = programs(tmp_path, gcloud="echo s3cr3t", curl="echo '\"access_token\": \"t\"'",
                    sudo='case "$*" in *run*) echo "KEY is $KEY" ;; esac')  # fmt: skip
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == "KEY is s3cr3t\n"
    assert any(one.endswith(words) for one in said())
    assert not [one for one in said() if "s3cr3t" in one]


# --- rehearsals and conversions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["vertex", "gke", "kubeflow"])
def test_a_rehearsal_has_the_variables_and_the_command(write: Write, platform: str) -> None:
    job = job_file.parse(write(platform, "cpu", *AB, *PROGRAM), Path("job.yaml"))
    (replica,) = session.plan(platforms.of_job_file(job).rehearse(job))["replicas"]
    assert [replica["environment"][name] for name in "AB"] == ["1,2", "it's $x"]
    assert ([*replica["command"]], [*replica["args"]]) == (["python", "-m", "my pkg"], ["--lr", "0.1"])


def test_a_rehearsal_says_which_secret_it_has_not(write: Write) -> None:
    job = job_file.parse(write("gke", "cpu", "--secret", "TOKEN=wandb:api-key"), Path("job.yaml"))
    (replica,) = session.plan(platforms.of_job_file(job).rehearse(job))["replicas"]
    assert "TOKEN" not in replica["environment"]


def test_a_conversion_keeps_command_and_web_access(trainyard: Command, write: Write, tmp_path: Path) -> None:
    """https://cloud.google.com/ai-platform/training/docs/reference/rest/v1/projects.jobs#TrainingInput"""
    found = yaml.safe_load(write("ai-platform", "tf-cpu", "--workers", "2", *PROGRAM))
    found["trainingInput"]["enableWebAccess"] = True
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(found))
    status, out, _ = trainyard("job", "--platform", "vertex", "--from", str(tmp_path / "old.yaml"))
    new = yaml.safe_load(out)
    commands = [one["containerSpec"]["command"] for one in new["workerPoolSpecs"]]
    assert (status, new["enableWebAccess"]) == (0, True)
    assert commands == [["python", "-m", "my pkg", "--lr", "0.1"]] * 2
    judge("vertex", out)


@pytest.mark.parametrize("said", [["--env", "A=1"], ["--command", "x"], ["--web-access"]])
def test_a_conversion_takes_no_options_that_it_would_not_write(
    trainyard: Command, write: Write, tmp_path: Path, said: list[str]
) -> None:
    (tmp_path / "old.yaml").write_text(write("ai-platform", "tf-cpu"))
    status, out, err = trainyard("job", "--platform", "vertex", "--from", str(tmp_path / "old.yaml"), *said)
    assert (status, out) == (2, "")
    assert f"'--from' converts what the file says: leave out '{said[0]}'" in err


def test_values_of_every_unit_are_compared() -> None:
    assert [options.mebibytes(one) for one in ("900Mi", "2Gi")] == [900, 2048]
    assert [options.whole_cpus(one) for one in ("8", "0.5", "500m", "1500m")] == [8, 1, 1, 2]
    with pytest.raises(UserError, match="'--mount': /data is given twice"):
        options.mounts("nfs://a01/x:/data gs://bucket:/data")


def test_json_has_the_command_with_the_secrets_of_sky_pilot(trainyard: Command) -> None:
    words = ("job", "--platform", "skypilot", "cpu", "--registry", REGISTRY, "--secret", "TOKEN=env", "--json")
    found = json.loads(trainyard(*words)[1])
    assert found["command"] == ["sky", "launch", "--yes", "--down", "--secret=TOKEN", "task.yaml"]
    assert yaml.safe_load(found["config"])["secrets"] == {"TOKEN": None}
