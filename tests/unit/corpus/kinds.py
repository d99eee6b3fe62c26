"""Files as public repositories have them: of kinds around Jobs, with keys twice, with shell variables, and templates.

All were written for this corpus. The links are to what says how the platform reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.unit.corpus.case import Case, Document, cases, dumped

IMAGE = "us-docker.pkg.dev/team/images/train:1.4"
CORE = "https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1"
CRON = "https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/cron-job-v1"
LWS = "https://github.com/kubernetes-sigs/lws/blob/main/api/leaderworkerset/v1/leaderworkerset_types.go"
RAY = "https://github.com/ray-project/kuberay/blob/master/ray-operator/apis/ray/v1/rayjob_types.go"
PATHWAYS = "https://github.com/google/pathways-job/blob/main/api/v1/pathwaysjob_types.go"
LIST = "https://kubernetes.io/docs/reference/using-api/api-concepts#collections"
TWICE = "https://github.com/kubernetes/kubernetes/issues/89303"
EXPANSION = "https://kubernetes.io/docs/tasks/inject-data-application/define-command-argument-container"
VERTEX = "https://cloud.google.com/vertex-ai/docs/reference/rest/v1/CustomJobSpec"

TPU = {"cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "4x4"}


def pod(*, chips: int = 0, gpus: int = 0, **fields: Any) -> Document:
    """The spec of a pod."""
    container: Document = {"name": "main", "image": IMAGE}
    if chips or gpus:
        container["resources"] = {"limits": {"google.com/tpu": chips} if chips else {"nvidia.com/gpu": gpus}}
    found: Document = {"containers": [container | fields.pop("container", {})], **fields}
    return found | ({"nodeSelector": dict(TPU)} if chips else {})


def thing(kind: str, api: str, spec: Document, **metadata: Any) -> Document:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "train", **metadata}, "spec": spec}


def job(**fields: Any) -> Document:
    return thing("Job", "batch/v1", {"template": {"spec": pod(restartPolicy="Never", **fields)}})


def cron(**fields: Any) -> Document:
    spec = {"template": {"spec": pod(**({"restartPolicy": "OnFailure"} | fields))}}
    return thing("CronJob", "batch/v1", {"schedule": "0 3 * * *", "jobTemplate": {"spec": spec}})


def group(worker: Document, leader: Document | None = None) -> Document:
    """A LeaderWorkerSet."""
    templates: Document = {"size": 4, "workerTemplate": {"spec": worker}}
    templates |= {"leaderTemplate": {"metadata": {"labels": {"role": "leader"}}, "spec": leader}} if leader else {}
    return thing("LeaderWorkerSet", "leaderworkerset.x-k8s.io/v1", {"replicas": 2, "leaderWorkerTemplate": templates})


def ray(worker: Document, submitter: Document | None = None) -> Document:
    head = {"rayStartParams": {}, "template": {"spec": pod()}}
    workers = [{"groupName": "w", "replicas": 2, "rayStartParams": {}, "template": {"spec": worker}}]
    spec: Document = {
        "entrypoint": "python train.py",
        "rayClusterSpec": {"headGroupSpec": head, "workerGroupSpecs": workers},
    }
    return thing("RayJob", "ray.io/v1", spec | ({"submitterPodTemplate": {"spec": submitter}} if submitter else {}))


def pathways(controller: Document) -> Document:
    workers = [{"type": "ct6e-standard-4t", "topology": "4x4", "numSlices": 2}]
    spec = {"workers": workers, "pathwaysDir": "gs://team-bucket/tmp", "controller": {"template": {"spec": controller}}}
    return thing("PathwaysJob", "pathways-job.pathways.domain/v1", spec)


def _pods() -> Iterator[tuple[str, Document, bool]]:
    def of(spec: Document, **metadata: Any) -> Document:
        return thing("Pod", "v1", spec, **metadata)

    yield "of a CPU", of(pod(restartPolicy="Never")), True
    yield "that restarts", of(pod(restartPolicy="Always"), labels={"app": "a"}, namespace="team"), True
    yield "of one host of a slice", of(pod(chips=4)), True
    gpu = {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    yield "of a GPU", of(pod(gpus=1, nodeSelector=gpu)), True
    yield "with init containers", of(pod(initContainers=[{"name": "a", "image": "busybox"}])), True
    yield "of more GPUs than a node has", of(pod(gpus=9, nodeSelector=gpu)), False
    yield "of half a host of a slice", of(pod(chips=2)), False
    yield "with an unknown field", of(pod(container={"imagePullPolice": "Always"})), False


def _cron_jobs() -> Iterator[tuple[str, Document, bool]]:
    yield "nightly", cron(), True
    yield "with a GPU", cron(gpus=1), True
    yield "without a schedule", thing("CronJob", "batch/v1", {"jobTemplate": cron()["spec"]["jobTemplate"]}), False
    yield "with an unknown field", thing("CronJob", "batch/v1", cron()["spec"] | {"suspended": True}), False


CLAIM = {"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {
    "storage": "1Gi"}}}}  # fmt: skip
MOUNTED = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}


def _groups() -> Iterator[tuple[str, Document, bool]]:
    yield "of TPU hosts", group(pod(chips=4)), True
    yield "with a leader", group(pod(chips=4), pod(chips=4)), True
    yield "of GPUs, with a leader without", group(pod(gpus=8), pod()), True
    claimed = group(pod(container=MOUNTED))
    claimed["spec"]["leaderWorkerTemplate"]["volumeClaimTemplates"] = [CLAIM]
    yield "with the volumes of its claims", claimed, True
    yield "with half a TPU host", group(pod(chips=2)), False


def _rays() -> Iterator[tuple[str, Document, bool]]:
    yield "of GPUs", ray(pod(gpus=1)), True
    yield "of TPU hosts", ray(pod(chips=4)), True
    yield "with a submitter", ray(pod(), pod(restartPolicy="Never")), True
    yield "with a volume that KubeRay adds", ray(pod(container={"volumeMounts": [
        {"name": "ray-token", "mountPath": "/token"}]})), True  # fmt: skip
    yield "without a cluster", thing("RayJob", "ray.io/v1", {"entrypoint": "a", "clusterSelector": {"c": "d"}}), True
    cluster = ray(pod(gpus=1))["spec"]["rayClusterSpec"]
    yield "RayCluster", thing("RayCluster", "ray.io/v1", cluster), True
    yield "with an unknown field in a pod", ray(pod(container={"comand": ["a"]})), False
    yield "with a topology that v6e has not", ray(pod(chips=4) | {"nodeSelector": TPU | {
        "cloud.google.com/gke-tpu-topology": "3x3"}}), False  # fmt: skip


def _pathways() -> Iterator[tuple[str, Document, bool]]:
    yield "a controller", pathways(pod()), True
    none = thing("PathwaysJob", "pathways-job.pathways.domain/v1", {"controller": {"deploymentMode": "colocate_head"}})
    yield "no template", none, True


def _lists() -> Iterator[tuple[str, Document, bool]]:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"clusterIP": "None"}}
    for name, items, valid in (
        ("of a Job and a Service", [service, job()], True),
        ("of two Jobs", [job(), job() | {"metadata": {"name": "other"}}], True),
        ("of a Pod", [thing("Pod", "v1", pod())], True),
        ("of a Job with an unknown field", [service, job(container={"comand": ["a"]})], False),
    ):
        yield name, {"apiVersion": "v1", "kind": "List", "items": items}, valid


_CUSTOM = (
    "workerPoolSpecs: [{replicaCount: 1, machineSpec: {machineType: n1-standard-8}, "
    f"containerSpec: {{imageUri: {IMAGE}}}}}]\n"
)

#: Keys that are twice there, and whether what the platform reads is valid.
_TWICE = [
    ("resources, the last of them valid", dumped(job()) + "spec:\n  template:\n    spec: {restartPolicy: Never, "
     "containers: [{name: m, image: a, resources: {limits: {cpu: none}}, resources: {limits: {cpu: 1}}}]}\n", True),
    ("a machine, the first of them valid",
     _CUSTOM.replace("machineType: n1-standard-8", "machineType: n1-standard-8, machineType: [no]"), True),
    ("a machine, the first of them invalid",
     _CUSTOM.replace("machineType: n1-standard-8", "machineType: [no], machineType: n1-standard-8"), False),
]  # fmt: skip

#: Words of programs that look like placeholders, and are none.
PROGRAMS = [
    {"command": ["sh", "-c", "exec python train.py --rank=${RANK} --dir=$HOME/run <input.txt >out"]},
    {"args": ["--host=$(POD_IP)", "--pad=<pad>", "--token=<IMG_CONTEXT>", "{{.Names}}"]},
    {"args": ["docker ps --format '{{.ID}} {{json .Names}}' # <YOUR_NAME> and REPLACE_WITH_X are in a comment"]},
    {"env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64:${LD_LIBRARY_PATH}"}]},
    {"env": [{"name": "PROJECT_ID", "value": "a"}, {"name": "CHAT", "value": "{% for m in x %}{{ m }}{% endfor %}"}]},
    {"args": ["--filter=a < b and c > d"], "env": [{"name": "PLACEHOLDER", "value": "X"}]},
    {"image": "us-docker.pkg.dev/team/images/train:PROJECT_ID"},
    {"workingDir": "/workspace/NAME"},
    {"command": ["kubectl", "get", "pods", "--output=go-template={{range .items}}{{.metadata.name}}{{end}}"]},
    {"livenessProbe": {"httpGet": {"port": 80, "httpHeaders": [{"name": "X-USER-ID", "value": "<a>"}]}}},
]  # fmt: skip


def corpus() -> Iterator[Case]:
    """The tables above; templates are apart: :data:`TEMPLATES`."""
    for prefix, source, entries in (
        ("Pod", CORE, _pods()),
        ("CronJob", CRON, _cron_jobs()),
        ("LeaderWorkerSet", LWS, _groups()),
        ("RayJob", RAY, _rays()),
        ("PathwaysJob", PATHWAYS, _pathways()),
        ("List", LIST, _lists()),
    ):
        yield from cases(prefix, source, entries)
    for name, text, valid in _TWICE:
        yield Case(f"key twice: {name}", TWICE, text, valid)
    for number, fields in enumerate(PROGRAMS):
        yield Case(f"words of programs {number}", EXPANSION, dumped(job(container=fields)), valid=True)


def _job(text: str, new: str) -> str:
    """A Job with a part of its text replaced."""
    found = dumped(job(gpus=1, volumes=[{"name": "v", "persistentVolumeClaim": {"claimName": "data"}}]))
    assert text in found
    return found.replace(text, new)


def _custom(text: str, new: str) -> str:
    assert text in _CUSTOM
    return _CUSTOM.replace(text, new)


_NAME, _IMAGE, _GPUS = "name: train", f"image: {IMAGE}", "nvidia.com/gpu: 1"

#: Templates in the forms of public repositories: text, and what is to be filled in first.
TEMPLATES: list[tuple[str, str]] = [
    # Helm and Jinja
    (_job(_NAME, "name: {{ .Release.Name }}"), "{{ .Release.Name }}"),
    (_job(_NAME, 'name: "{{ .Release.Name }}-train"'), "{{ .Release.Name }}"),
    ("{{- if .Values.enabled }}\n" + _job(_NAME, _NAME) + "{{- end }}\n", "{{- if .Values.enabled }}"),
    (_job(_IMAGE, "image: {{IMAGE}}"), "{{IMAGE}}"),
    (_job(_IMAGE, "image: '{{ image }}'"), "{{ image }}"),
    (_job(_IMAGE, "image: {{IMAGE}}:1.0"), "{{IMAGE}}"),
    (_job(_GPUS, "nvidia.com/gpu: {{ .Values.gpus }}"), "{{ .Values.gpus }}"),
    (_job("  - name: main", "  {{- range .Values.x }}\n      - name: main"), "{{- range .Values.x }}"),
    (_job(_IMAGE, f'{_IMAGE}\n        args: ["--data={{{{ .Values.data }}}}"]'), "{{ .Values.data }}"),
    (_job(_IMAGE, f"{_IMAGE}\n        env:\n{{{{ toYaml .Values.e }}}}"), "{{ toYaml .Values.e }}"),
    (_job(_NAME, "name: train\n{% if queue %}\n  labels: {a: b}\n{% endif %}"), "{% if queue %}"),
    # variables of a shell, for envsubst
    (_job(_NAME, "name: ${JOB_NAME}"), "${JOB_NAME}"),
    (_job(_NAME, "name: train-${USER}"), "${USER}"),
    (_job(_NAME, "name: $JOB_NAME"), "$JOB_NAME"),
    (_job(_IMAGE, "image: ${IMAGE_URI}"), "${IMAGE_URI}"),
    (_job(_IMAGE, "image: us-docker.pkg.dev/${PROJECT}/r/i:${TAG}"), "${PROJECT}"),
    (_job(_IMAGE, "image: $IMAGE"), "$IMAGE"),
    (_job(_IMAGE, "image: $(IMAGE)"), "$(IMAGE)"),
    (_job(_GPUS, "nvidia.com/gpu: ${GPUS}"), "${GPUS}"),
    (_job("spec:\n  template:", "spec:\n  completions: ${NODES}\n  template:"), "${NODES}"),
    (_job("claimName: data", "claimName: ${PVC:-data}"), "${PVC:-data}"),
    # brackets
    (_job(_NAME, "name: <JOB_NAME>"), "<JOB_NAME>"),
    (_job(_IMAGE, "image: <IMAGE_URL>"), "<IMAGE_URL>"),
    (_job(_IMAGE, "image: gcr.io/<your-project>/train"), "<your-project>"),
    (_job(_IMAGE, f'{_IMAGE}\n        args: ["--bucket=<YOUR_BUCKET>"]'), "<YOUR_BUCKET>"),
    (_job(_IMAGE, "image: gcr.io/[PROJECT_ID]/train"), "[PROJECT_ID]"),
    (_job(_IMAGE, "image: gcr.io/{project}/train"), "{project}"),
    (_job(_IMAGE, "image: @IMAGE@"), "@IMAGE@"),
    (_job(_IMAGE, "image: __IMAGE__"), "__IMAGE__"),
    # words in capitals
    (_job("claimName: data", "claimName: REPLACE_WITH_YOUR_TRAINING_PVC"), "REPLACE_WITH_YOUR_TRAINING_PVC"),
    (_job(_IMAGE, "image: PLACEHOLDER"), "PLACEHOLDER"),
    (_job(_IMAGE, "image: us-docker.pkg.dev/PROJECT_ID/r/train"), "PROJECT_ID"),
    (_job(_NAME, "name: train-USERNAME"), "USERNAME"),
    (_job("spec:\n  template:", "spec:\n  completions: NUM_NODES\n  template:"), "NUM_NODES"),
    (_job(_IMAGE, f"{_IMAGE}\n        env:\n        - name: KEY\n          value: YOUR_API_KEY"), "YOUR_API_KEY"),
    (_job("      volumes:", "      nodeSelector:\n        cloud.google.com/gke-tpu-topology: TOPOLOGY\n      volumes:"),
     "TOPOLOGY"),
    # Vertex AI
    (_custom(IMAGE, "gcr.io/PROJECT_ID/train"), "PROJECT_ID"),
    (_custom(IMAGE, "${IMAGE_URI}"), "${IMAGE_URI}"),
    (_custom("n1-standard-8", "<MACHINE>"), "<MACHINE>"),
    (_custom("replicaCount: 1", "replicaCount: ${WORKERS}"), "${WORKERS}"),
    (_CUSTOM + "baseOutputDirectory: {outputUriPrefix: gs://BUCKET_NAME/run}\n", "BUCKET_NAME"),
    (_CUSTOM + "serviceAccount: trainer@YOUR_PROJECT.iam.gserviceaccount.com\n", "YOUR_PROJECT"),
    # other kinds
    (dumped(pathways(pod(container={"image": "<image>"}))), "<image>"),
    (dumped(ray(pod(container={"image": "REPLACE_WITH_IMAGE"}))), "REPLACE_WITH_IMAGE"),
    (dumped(thing("Pod", "v1", pod(), name="POD_NAME")), "POD_NAME"),
]  # fmt: skip
