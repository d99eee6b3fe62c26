"""Kubernetes objects that the API server and JobSet's webhook take or refuse, as their own tests and examples have it.

Each table names its source. The expected results are those of upstream, not of our rules:

- JobSet's webhook: pkg/webhooks/jobset_webhook_test.go and site/static/examples/ of
  https://github.com/kubernetes-sigs/jobset/tree/08dfbdfd682714a9ab929633eca8dc95315187e7
- Jobs: https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/validation/validation_test.go
- pods: https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/core/validation/validation_test.go
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from tests.unit.corpus.case import Case, Document, dumped

from trainyard.common.rule_engine import Severity

JOBSET_TEST = (
    "https://github.com/kubernetes-sigs/jobset/blob/08dfbdfd682714a9ab929633eca8dc95315187e7"
    "/pkg/webhooks/jobset_webhook_test.go"
)
JOBSET_DEFINITION = (
    "https://github.com/kubernetes-sigs/jobset/blob/08dfbdfd682714a9ab929633eca8dc95315187e7"
    "/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
)
#: The functions below that write manifests in use name the page or tool of each.
IN_USE = "https://cloud.google.com/kubernetes-engine/docs/how-to/tpus"
MAX = 2**31 - 1
GONE = object()

CONTAINER: Document = {"name": "ctr", "image": "bash:latest"}
POD: Document = {"restartPolicy": "Never", "containers": [CONTAINER]}
JOB: Document = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "myjob"},
    "spec": {"template": {"spec": POD}},
}


def part(name: str = "rj", /, **fields: Any) -> Document:
    """A replicated job; ``fields`` are those of its Jobs, or its own."""
    own: Document = {key: fields.pop(key) for key in ("replicas", "groupName", "dependsOn") if key in fields}
    pod = fields.pop("pod", {"containers": [CONTAINER]})
    return {"name": name, **own, "template": {"spec": {**fields, "template": {"spec": pod}}}}


def jobset(*parts: Document, name: str = "js", metadata: Document | None = None, **spec: Any) -> Document:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata if metadata is not None else {"name": name},
        "spec": {**spec, "replicatedJobs": list(parts or (part(),))},
    }


def job(**spec: Any) -> Document:
    """A Job; ``pod`` has fields of its pod, ``container`` those of its container."""
    pod = POD | spec.pop("pod", {})
    if "container" in spec:
        pod = pod | {"containers": [CONTAINER | spec.pop("container")]}
    return JOB | {"spec": {**spec, "template": {"spec": pod}}}


def indexed(completions: int, **spec: Any) -> Document:
    return job(completionMode="Indexed", completions=completions, **spec)


# --- JobSet's webhook and definition ---------------------------------------------------------------------------------


def rules(*some: Document, **policy: Any) -> Document:
    complete = [{"action": "FailJobSet", **one} for one in some]
    return jobset(part(completions=1, parallelism=1), failurePolicy={"rules": complete, **policy})


def coordinated(*, name: str = "js", target: str = "rj", job: int = 0, pod: int = 0, **spec: Any) -> Document:
    replicated = spec.pop("part", part(target, completions=1))
    coordinator = {"replicatedJob": target, "jobIndex": job, "podIndex": pod}
    return jobset(replicated, name=name, coordinator=coordinator, **spec)


def chain(**needed: list[str]) -> Document:
    """Replicated jobs with what each depends on."""
    parts = []
    for name, others in needed.items():
        own = {"dependsOn": [{"name": one, "status": "Complete"} for one in others]} if others else {}
        parts.append(part(name, **own))
    return jobset(*parts)


def claimed(*names: str, mounted: tuple[str, ...] = ("data",), **pod: Any) -> Document:
    mounts = [{"name": name, "mountPath": f"/{number}"} for number, name in enumerate(mounted)]
    claims = [
        {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteMany"],
                                              "resources": {"requests": {"storage": "1Gi"}}}}
        for name in names
    ]  # fmt: skip
    containers = {"containers": [CONTAINER | {"volumeMounts": mounts}], **pod}
    return jobset(part(pod=containers), volumeClaimPolicies=[{"templates": claims}])


def in_place(**fields: Any) -> Document:
    whole = {"backoffLimit": MAX, "podReplacementPolicy": "Failed", "completions": 2, "parallelism": 2, **fields}
    given = {key: value for key, value in whole.items() if value is not GONE}
    return jobset(part(**given), failurePolicy={"restartStrategy": "InPlaceRestart"})


ENV = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]

#: Line of the case in JOBSET_TEST (0: the definition, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml) ->
#: JobSet, and words of the finding; none where it is taken.
JOBSETS: list[tuple[int, Document, str]] = [
    (996, jobset(part("job-0", replicas=1)), ""),
    (1181, jobset(part("rj", completions=1, parallelism=1), name="a" * 50), ""),
    (1273, jobset(managedBy="jobset.sigs.k8s.io/jobset-controller"), ""),
    (1298, jobset(part(completions=1, parallelism=1)), ""),
    (1325, rules({"name": "superAwesomeFailurePolicyRule"}), ""),
    (626, rules({}, {}), ""),
    (1453, rules({"name": "a" * 128}), ""),
    (1706, coordinated(), ""),
    (1845, jobset(part(replicas=1025), failurePolicy={"rules": [{"action": "RestartJobSet"}]}), ""),
    (1988, chain(a=[], b=["a"], c=["a"]), ""),
    (2042, chain(a=[], b=["a"], c=["b"]), ""),
    (2096, chain(a=[], b=[], c=["a", "b"]), ""),
    (2298, jobset() | {"spec": {"replicatedJobs": []}}, ""),
    (2350, claimed("data"), ""),
    (2402, claimed("data", mounted=(), initContainers=[CONTAINER | {"name": "first", "volumeMounts": [
        {"name": "data", "mountPath": "/d"}]}]), ""),
    (2978, in_place(), ""),
    (0, jobset(part(pod={"containers": [CONTAINER | {"ports": [
        {"containerPort": 1}, {"containerPort": 1, "protocol": "UDP"}]}]})), ""),
    (0, jobset(part("a"), part("b", dependsOn=[{"name": "a", "status": "Ready"}]),
               startupPolicy={"startupPolicyOrder": "AnyOrder"}), ""),
    (0, jobset(part("a"), part("b", dependsOn=[{"name": "a", "status": "Done"}])), "'Done' is not one of"),
    (0, jobset(part(replicas=-1)), "less than the minimum"),
    (0, jobset(successPolicy={"operator": "Most"}), "'Most' is not one of"),
    (0, jobset(successPolicy={}), "'operator' is a required property"),
    (0, jobset(startupPolicy={"startupPolicyOrder": "Random"}), "'Random' is not one of"),
    (0, jobset(ttlSecondsAfterFinished=-1), "less than the minimum"),
    (0, jobset(failurePolicy={"maxRestarts": -1}), ""),
    (0, rules({"action": "Restart"}), "'Restart' is not one of"),
    (0, rules({"onJobFailureReasons": ["PodFailurePolicy", "PodFailurePolicy"]}), ""),
    (0, jobset(network=None, coordinator=None, suspend=None), ""),
    (0, jobset(metadata={"name": "js", "label": {}}), "unknown field 'label'"),
    (0, jobset(metadata={"name": "js", "labels": {"a": 1}}), "1 is not of type"),
]  # fmt: skip


# --- Jobs ------------------------------------------------------------------------------------------------------------


def codes(operator: str = "In", values: list[int] | None = None, **more: Any) -> Document:
    given = {"operator": operator, "values": [1] if values is None else values, **more}
    return {"action": "FailJob", "onExitCodes": given}


def condition(**fields: Any) -> Document:
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True", **fields}]}


def on_failure(*some: Document, **spec: Any) -> Document:
    return job(podFailurePolicy={"rules": list(some)}, **spec)


def succeeded(*some: Document, completions: int = 5, **spec: Any) -> Document:
    return indexed(completions, successPolicy={"rules": list(some)}, **spec)


def selected(labels: Document, **spec: Any) -> Document:
    found = job(selector={"matchLabels": {"a": "b"}}, **spec)
    return found | {"spec": found["spec"] | {"template": {"metadata": {"labels": labels}, "spec": POD}}}


MANY = {"backoffLimitPerIndex": 1}

#: Name of the case in validation_test.go -> Job, and words of the finding; none where it is taken.
JOBS: list[tuple[str, Document, str]] = [
    ("valid success policy", succeeded({"succeededCount": 1, "succeededIndexes": "0,2,4"},
                                       {"succeededIndexes": "1,3,5-9"}, completions=10), ""),
    ("valid pod failure policy with negative exitCodes", on_failure(codes("NotIn", [-1073741819, -1073741510])), ""),
    ("valid pod failure policy", on_failure(
        condition(), condition(type="CustomConditionType", status="False"), codes(containerName="ctr"),
        codes(values=[4], containerName="def"), codes("NotIn", [5, 6, 7]),
        pod={"initContainers": [{"name": "def", "image": "i"}]}), ""),
    ("valid pod failure policy with FailIndex", on_failure(
        codes() | {"action": "FailIndex"}, completionMode="Indexed", completions=2, backoffLimitPerIndex=1), ""),
    ("valid manual selector", selected({"a": "b"}, manualSelector=True), ""),
    ("valid generated selector", job(), ""),
    ("valid pod replacement", job(podReplacementPolicy="TerminatingOrFailed"), ""),
    ("valid pod replacement with failed", job(podReplacementPolicy="Failed"), ""),
    ("valid hostnet", job(pod={"hostNetwork": True}, container={"ports": [{"containerPort": 12345}]}), ""),
    ("valid NonIndexed completion mode", job(completionMode="NonIndexed"), ""),
    ("valid Indexed completion mode", indexed(2, parallelism=100000), ""),
    ("valid parallelism for high completions",
     indexed(100000, parallelism=100000, maxFailedIndexes=100000, **MANY), ""),
    ("valid parallelism for unlimited completions",
     indexed(1000000000, parallelism=10000, maxFailedIndexes=10000, **MANY), ""),
    ("valid managedBy field", job(managedBy="example.com/foo"), ""),
    ("action: Required value", on_failure({"onExitCodes": codes()["onExitCodes"]}), "'action' is a required property"),
    ("operator: Required value", on_failure({"action": "Ignore", "onExitCodes": {"values": [1]}}),
     "'operator' is a required property"),
    ("NotIn may have 0", on_failure(codes("NotIn", [0])), ""),
    ("status: defaulted to True (v1/defaults.go)",
     on_failure({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}), ""),
    ("Indexed alone has both defaults of 1 (v1/defaults.go)", job(completionMode="Indexed"), ""),
    ("metadata.name: with a dot", job() | {"metadata": {"name": "a.b"}}, ""),
    ("metadata.generateName", job() | {"metadata": {"generateName": "a-"}}, ""),
]  # fmt: skip


# --- pods ------------------------------------------------------------------------------------------------------------


def limits(requests: Document | None = None, **given: Any) -> Document:
    return job(container={"resources": {"limits": given.pop("limits", {}), "requests": requests or {}, **given}})


def variable(**fields: Any) -> Document:
    return job(container={"env": [{"name": "A", **fields}]})


def field(path: str) -> Document:
    return variable(valueFrom={"fieldRef": {"fieldPath": path}})


def tolerating(**fields: Any) -> Document:
    return job(pod={"tolerations": [fields]})


def required(expression: Document) -> Document:
    terms = [{"matchExpressions": [expression]}]
    return job(pod={"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": terms}}}})  # fmt: skip


def mounting(*mounts: Document, volumes: list[Document] | None = None, **container: Any) -> Document:
    given = [{"name": "v", "emptyDir": {}}] if volumes is None else volumes
    return job(pod={"volumes": given}, container={"volumeMounts": list(mounts), **container})


TPU, GPU = "google.com/tpu", "nvidia.com/gpu"
SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
LIFE = {"exec": {"command": ["true"]}}

#: Volumes named v, and words of the finding; none where they are taken.
VOLUMES: list[tuple[Document, str]] = [
    ({"hostPath": {"path": "/a", "type": ""}}, ""),
    ({"hostPath": {"path": "/a", "type": "DirectoryOrCreate"}}, ""),
    ({"gcePersistentDisk": {"pdName": "d", "fsType": "ext4"}}, ""),
    ({"nfs": {"server": "s", "path": "/a"}}, ""),
    ({"configMap": {"name": "c", "defaultMode": 0o755, "items": [{"key": "a", "path": "b/c"}]}}, ""),
    ({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "metadata.labels"}}]}}, ""),
    ({"downwardAPI": {"items": [{"path": "a", "resourceFieldRef": {
        "containerName": "ctr", "resource": "limits.cpu"}}]}}, ""),
    ({"projected": {"sources": [{"secret": {"name": "a"}}, {"configMap": {"name": "b"}}]}}, ""),
    ({"projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}, ""),
    ({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}, ""),
]  # fmt: skip

#: Pods in Jobs, and words of the finding; none where they are taken.
PODS: list[tuple[Document, str]] = [
    # names of containers, and what they need
    (job(pod={"initContainers": [CONTAINER | {"name": "i", "restartPolicy": "Always", "readinessProbe": LIFE}]}), ""),
    # variables
    (job(container={"env": ENV}), ""),
    (job(container={"env": [{"name": "with space-and.dot"}]}), ""),
    (field("metadata.name"), ""),
    (field("metadata.annotations['jobset.sigs.k8s.io/job-index']"), ""),
    (field("metadata.labels['batch.kubernetes.io/job-completion-index']"), ""),
    (job(container={"envFrom": [{"configMapRef": {"name": "c"}}, {"prefix": "X_", "secretRef": {"name": "s"}}]}), ""),
    # ports
    (job(container={"ports": [{"containerPort": 8471}, {"containerPort": 8471}]}), ""),
    (job(container={"ports": [{"containerPort": 1, "hostPort": 80},
                              {"containerPort": 2, "hostPort": 80, "protocol": "UDP"}]}), ""),
    # volumes
    (mounting({"name": "v", "mountPath": "/v"}), ""),
    (mounting({"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/w", "subPath": "a/b"}), ""),
    (mounting({"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"},
              securityContext={"privileged": True}), ""),
    (mounting(volumes=[{"name": "v"}]), ""),
    (mounting(volumes=[{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]), ""),
    (mounting(volumes=[{"name": "v", "csi": {"driver": "gcsfuse.csi.storage.gke.io",
                                             "volumeAttributes": {"bucketName": "b"}}}]), ""),
    # resources
    (limits(limits={TPU: 4}), ""),
    (limits({TPU: "4"}, limits={TPU: 4}), ""),
    (limits({TPU: 4}), "4 requested, limit none"),
    (limits({GPU: 4}, limits={GPU: 8}), "4 requested, limit 8"),
    (limits({"cpu": "500m", "memory": "1G"}, limits={"cpu": 1, "memory": "1Gi"}), ""),
    (limits({"cpu": 1}), ""),
    # scheduling
    (tolerating(key=TPU, operator="Exists", effect="NoSchedule"), ""),
    (tolerating(operator="Exists"), ""),
    (tolerating(key=TPU, operator="Equal", value="present"), ""),
    (tolerating(key=TPU, operator="Exists", effect="NoExecute", tolerationSeconds=10), ""),
    (required({"key": "zone", "operator": "In", "values": ["a"]}), ""),
    (job(pod={"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "cloud.google.com/gke-nodepool", "labelSelector": {"matchExpressions": [
            {"key": "a", "operator": "In", "values": ["b"]}]}}]}}}), ""),
    (job(pod={"topologySpreadConstraints": [SPREAD]}), ""),
    (job(pod={"schedulingGates": [{"name": "gke.io/topology-aware-auto-x"}]}), ""),
    # labels
    (JOB | {"metadata": {"name": "a", "labels": {"kueue.x-k8s.io/queue-name": "q", "empty": ""}}}, ""),
    (JOB | {"metadata": {"name": "a", "annotations": {"a": "any text: at all"}}}, ""),
    # values of containers
    (job(container={"imagePullPolicy": "IfNotPresent", "terminationMessagePolicy": "FallbackToLogsOnError"}), ""),
    *((job(container={"livenessProbe": probe}), said) for probe, said in [
        ({"httpGet": {"path": "/healthz", "port": 8080}, "initialDelaySeconds": 0}, ""),
        ({"tcpSocket": {"port": "http"}, "successThreshold": 1}, ""),
        ({"grpc": {"port": 2379}}, ""),
        ({"exec": {"command": ["true"]}, "timeoutSeconds": 0}, ""),
    ]),
    (job(container={"readinessProbe": {"exec": {"command": ["a"]}, "successThreshold": 2}}), ""),
    (job(container={"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}), ""),
    (job(container={"lifecycle": {"preStop": {"sleep": {"seconds": 60}}}}, pod={"terminationGracePeriodSeconds": 90}),
     ""),
    *((job(container={"securityContext": context}), said) for context, said in [
        ({"privileged": True, "runAsUser": 0, "runAsGroup": 1000}, ""),
        ({"allowPrivilegeEscalation": False, "capabilities": {"add": ["NET_ADMIN"]}}, ""),
    ]),
    (variable(valueFrom={"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}), ""),
    (variable(valueFrom={"resourceFieldRef": {"resource": "requests.hugepages-2Mi"}}), ""),
    # content of volumes
    *((mounting(volumes=[{"name": "v", **volume}]), said) for volume, said in VOLUMES),
    # values of pods
    (job(pod={"dnsConfig": {"nameservers": ["8.8.8.8"], "options": [{"name": "ndots", "value": "2"}]}}), ""),
    (job(pod={"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["a.b", "c"]}, {"ip": "fd00::1"}]}), ""),
    (job(pod={"hostAliases": [{"ip": "010.0.0.01", "hostnames": ["a"]}]}), ""),
    (job(pod={"hostUsers": False}), ""),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"minDomains": 2, "nodeTaintsPolicy": "Honor"}]}), ""),
    (job(completions=2**31), "2147483648"),
    # settings
    (job(pod={"serviceAccountName": "a.b"}), ""),
    (job(pod={"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": True}), ""),
]  # fmt: skip


# --- nodes of GKE ----------------------------------------------------------------------------------------------------

ACCELERATOR, TOPOLOGY = "cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"
GPU_LABEL, MACHINE = "cloud.google.com/gke-accelerator", "node.kubernetes.io/instance-type"
SLICE = "cloud.google.com/gke-tpu-slice-topology"


def tpu_pod(kind: str, topology: str | None, chips: int, *, containers: int = 1, **pod: Any) -> Document:
    selector = {ACCELERATOR: kind} | ({TOPOLOGY: topology} if topology else {})
    limit = {"resources": {"limits": {TPU: chips}}} if chips else {}
    some = [{"name": f"c{n}", "image": "i", **limit} for n in range(containers)]
    return {"nodeSelector": selector, "containers": some, **pod}


def tpu(kind: str, topology: str | None, pods: int, chips: int, *, slices: int = 1, **more: Any) -> Document:
    """A JobSet of TPU slices."""
    pod = tpu_pod(kind, topology, chips, containers=more.pop("containers", 1), **more.pop("pod", {}))
    spec = {"completions": pods, "parallelism": pods, "backoffLimit": 0, **more.pop("job", {})}
    found = jobset(part("slice", replicas=slices, pod=pod, **spec), **more)
    return found


def annotated(document: Document, **annotations: str) -> Document:
    found = copy.deepcopy(document)
    for one in found["spec"]["replicatedJobs"]:
        names = {SLICE: annotations["slice"]} if "slice" in annotations else {}
        one["template"]["spec"]["template"]["metadata"] = {"annotations": names}
    return found


def gpu(label: str, count: int, **labels: str) -> Document:
    pod = {"nodeSelector": {GPU_LABEL: label} | labels,
           "containers": [CONTAINER | {"resources": {"limits": {GPU: count}}}]}  # fmt: skip
    return job(pod=pod)


V5E, V6E, V5P, V7 = "tpu-v5-lite-podslice", "tpu-v6e-slice", "tpu-v5p-slice", "tpu7x"

#: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus and https://cloud.google.com/compute/docs/gpus:
#: object, severity of the finding, and its words; no severity where it runs.
NODES: list[tuple[Document, Severity | None, str]] = [
    (tpu(V5E, "4x4", 4, 4), None, ""),
    (tpu(V6E, "2x4", 2, 4), None, ""),
    (tpu(V6E, "2x4", 1, 8), None, ""),
    (tpu(V7, "4x4x4", 16, 2, containers=2), None, ""),
    (tpu(V7, "4x4x4", 16, 2), Severity.CANNOT_START, "16 pods of 4 chips"),
    (tpu(V7, "2x2x1", 1, 4), None, ""),
    (tpu(V5P, "4x4x16", 64, 4), None, ""),
    (tpu(V5P, "3x3x3", 7, 4), Severity.CANNOT_START, "has no topology '3x3x3'"),
    (tpu(V6E, "3x3", 2, 4), Severity.CANNOT_START, "has no topology '3x3'"),
    (tpu(V6E, "4by4", 2, 4), Severity.CANNOT_START, "has no topology '4by4'"),
    (tpu("tpu9x", "4x4x4", 16, 4), Severity.NOTE, "TPU 'tpu9x' is not in the table of 2026-"),
    (tpu(V6E, None, 1, 4), Severity.NOTE, "gke-tpu-accelerator without"),
    (tpu(V5E, "4x4", 3, 4), Severity.CANNOT_START, "make it 4 pods of 4 chips"),
    (tpu(V5E, "4x4", 4, 1), Severity.CANNOT_START, "make it 4 pods of 4 chips"),
    (tpu(V5E, "4x4", 1, 4, slices=4), Severity.NOTE, "1 completions"),
    (tpu(V5E, "2x2", 6, 4), None, ""),
    (tpu(V5E, "4x4", 4, 0), Severity.CANNOT_START, "no container asks for google.com/tpu"),
    (tpu(V5E, "4x4", 4, 0, pod={"tolerations": [{"operator": "Exists"}]}), Severity.NOTE, "no container asks"),
    # slices of parts of nodes' slices, and of several: xpk's recipes Workload_create_{sub,super}-slicing.md
    (annotated(tpu(V6E, "4x4", 2, 4), slice="2x4"), None, ""),
    (annotated(tpu(V7, None, 80, 2, containers=2), slice="4x4x20"), None, ""),
    (annotated(tpu(V7, None, 3, 4), slice="2x2x4"), Severity.NOTE, "3 pods of 4 chips for a slice of 2x2x4"),
    # queues add node labels: https://kueue.sigs.k8s.io/docs/concepts/resource_flavor
    (jobset(part(pod={"containers": [CONTAINER | {"resources": {"limits": {TPU: 4}}}]}),
            metadata={"name": "js", "labels": {"kueue.x-k8s.io/queue-name": "q"}}), None, ""),
    (jobset(part(pod={"containers": [CONTAINER | {"resources": {"limits": {TPU: 4}}}]})), Severity.NOTE,
     "google.com/tpu without a nodeSelector"),
    (tpu(V6E, "4x4", 4, 4, pod={"nodeSelector": {ACCELERATOR: V6E, TOPOLOGY: "4x4", MACHINE: "ct6e-standard-4t"}}),
     None, ""),
    (tpu(V6E, "4x4", 4, 4, pod={"nodeSelector": {ACCELERATOR: V6E, TOPOLOGY: "4x4", MACHINE: "ct6e-standard-8t"}}),
     Severity.CANNOT_START, "ct6e-standard-8t is not a machine of the topology 4x4"),
    (tpu(V6E, "4x4", 4, 4, pod={"nodeSelector": {ACCELERATOR: V6E, TOPOLOGY: "4x4", MACHINE: "ct5lp-hightpu-4t"}}),
     Severity.CANNOT_START, "ct5lp-hightpu-4t has no tpu-v6e-slice"),
    (tpu(V6E, "4x4", 4, 4, pod={"nodeSelector": {ACCELERATOR: V6E, TOPOLOGY: "4x4", GPU_LABEL: "nvidia-l4"}}),
     Severity.CANNOT_START, "no machine has both"),
    # GPUs
    (gpu("nvidia-l4", 8), None, ""),
    (gpu("nvidia-l4", 9), Severity.CANNOT_START, "requests 9 GPUs; a node has at most 8"),
    (gpu("nvidia-h100-80gb", 16), Severity.CANNOT_START, "at most 8"),
    (gpu("nvidia-tesla-a100", 16), None, ""),
    (gpu("nvidia-tesla-a100", 16, **{"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}), None, ""),
    (gpu("nvidia-tesla-a100", 20, **{"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}), None, ""),
    (gpu("nvidia-x900", 8), Severity.NOTE, "GPU 'nvidia-x900' is not in the table of 2026-"),
    (gpu("nvidia-l4", 1, **{MACHINE: "g2-standard-8"}), None, ""),
    (gpu("nvidia-l4", 2, **{MACHINE: "g2-standard-8"}), Severity.CANNOT_START, "at most 1"),
    (gpu("nvidia-l4", 1, **{MACHINE: "a3-highgpu-8g"}), Severity.CANNOT_START, "nvidia-l4 is selected"),
    (gpu("nvidia-l4", 1, **{MACHINE: "e2-standard-8"}), Severity.CANNOT_START, "has no GPU"),
    (gpu("nvidia-tesla-t4", 4, **{MACHINE: "n1-standard-32"}), None, ""),
    (gpu("nvidia-l4", 1, **{MACHINE: "z9-standard-8"}), None, ""),
]  # fmt: skip


# --- manifests that are in use ---------------------------------------------------------------------------------------


def xpk(kind: str, topology: str, pods: int, chips: int, slices: int, containers: int = 1) -> Document:
    """A workload in the form that xpk writes: nulls, the host's network, exit codes that restart it.

    https://github.com/AI-Hypercomputer/xpk/blob/main/recipes/Workload_create.md
    """
    document = tpu(kind, topology, pods, chips, slices=slices, containers=containers)
    document["metadata"] = {"name": "work", "labels": {"kueue.x-k8s.io/queue-name": "multislice-queue"},
                            "annotations": None}  # fmt: skip
    document["spec"] |= {
        "ttlSecondsAfterFinished": 43200,
        "failurePolicy": {"maxRestarts": 0, "rules": [{"action": "FailJobSet",
                                                       "onJobFailureReasons": ["PodFailurePolicy"]}]},
    }  # fmt: skip
    spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    names = [one["name"] for one in spec["template"]["spec"]["containers"]]
    spec["podFailurePolicy"] = {
        "rules": [{"action": "FailJob", "onPodConditions": [],
                   "onExitCodes": {"containerName": name, "operator": "NotIn", "values": [42, *range(127, 256)]}}
                  for name in names]
    }  # fmt: skip
    spec["template"]["spec"] |= {
        "restartPolicy": "Never",
        "imagePullSecrets": [{"name": "pull"}],
        "priorityClassName": "medium",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "serviceAccountName": None,
        "tolerations": [{"operator": "Exists", "key": TPU}],
        "volumes": [{"emptyDir": {"medium": "Memory"}, "name": "dshm-2"}],
    }
    for one in spec["template"]["spec"]["containers"]:
        one |= {"env": None, "securityContext": {"privileged": True},
                "volumeMounts": [{"mountPath": "/dev/shm", "name": "dshm-2"}]}  # fmt: skip
    return document


def documented(kind: str, topology: str, pods: int, chips: int) -> list[Document]:
    """A headless Service and an indexed Job, as GKE's page about TPUs has them.

    https://cloud.google.com/kubernetes-engine/docs/how-to/tpus
    """
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "headless-svc"},
               "spec": {"clusterIP": "None", "selector": {"job-name": "tpu-job"}}}  # fmt: skip
    pod = tpu_pod(kind, topology, chips, restartPolicy="Never", subdomain="headless-svc")
    pod["containers"][0] |= {"ports": [{"containerPort": 8471}, {"containerPort": 8431}],
                             "securityContext": {"privileged": True}}  # fmt: skip
    spec = {"backoffLimit": 0, "completions": pods, "parallelism": pods, "completionMode": "Indexed"}
    return [service, {**JOB, "metadata": {"name": "tpu-job"}, "spec": {**spec, "template": {"spec": pod}}}]


def gpu_group(label: str, machine: str, nodes: int, *, rdma: bool) -> Document:
    """A JobSet of GPU machines with their network interfaces, as in GKE's pages about GPUDirect.

    https://cloud.google.com/ai-hypercomputer/docs/create/gke-ai-hypercompute-custom
    """
    annotations = {"networking.gke.io/default-interface": "eth0",
                   "networking.gke.io/interfaces": '[{"interfaceName":"eth0","network":"default"}]'}  # fmt: skip
    mounts = [{"name": "library", "mountPath": "/usr/local/nvidia"}, {"name": "gib", "mountPath": "/usr/local/gib"},
              {"name": "shm", "mountPath": "/dev/shm"}]  # fmt: skip
    limit = {GPU: 8} | ({"memory": "1Ti", "ephemeral-storage": "100Gi"} if rdma else {})
    pod = {
        "nodeSelector": {GPU_LABEL: label, MACHINE: machine},
        "hostNetwork": not rdma,
        "dnsPolicy": "ClusterFirstWithHostNet" if not rdma else "ClusterFirst",
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"},
                        {"key": "cloud.google.com/impending-node-termination", "operator": "Exists"}],
        "volumes": [{"name": "library", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}},
                    {"name": "gib", "hostPath": {"path": "/home/kubernetes/bin/gib"}},
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "250Gi"}}],
        "containers": [CONTAINER | {"resources": {"limits": limit}, "volumeMounts": mounts,
                                    "env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"},
                                            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata."
                                             "annotations['batch.kubernetes.io/job-completion-index']"}}}]}],
    }  # fmt: skip
    spec = {"completions": nodes, "parallelism": nodes, "backoffLimit": 0}
    document = jobset(part("worker", pod=pod, **spec), network={"enableDNSHostnames": True, "subdomain": "group"})
    document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"] = {"annotations": annotations}
    return document


def in_use() -> Iterator[tuple[str, list[Document]]]:
    """Valid manifests by the forms in which public tools and pages have them."""
    shapes = [(V5E, "4x4", 4, 4), (V5E, "4x8", 8, 4), (V5E, "16x16", 64, 4), (V6E, "4x4", 4, 4), (V6E, "8x16", 32, 4),
              ("tpu-v4-podslice", "2x2x4", 4, 4), (V5P, "2x2x2", 2, 4), (V5P, "8x8x12", 192, 4)]  # fmt: skip
    for kind, topology, pods, chips in shapes:
        yield f"GKE's page, {kind} {topology}", documented(kind, topology, pods, chips)
        for slices in (1, 2, 16):
            yield f"xpk, {slices} of {kind} {topology}", [xpk(kind, topology, pods, chips, slices)]
    for topology, pods in (("2x2x1", 1), ("2x2x2", 2), ("4x4x4", 16), ("4x4x8", 32)):
        yield f"xpk, tpu7x {topology} by NUMA node", [xpk(V7, topology, pods, 2, 1, containers=2)]
    for kind, topology, chips in ((V5E, "1x1", 1), (V5E, "2x2", 4), (V6E, "2x4", 8), (V6E, "1x1", 1)):
        yield f"one machine, {kind} {topology}", [job(backoffLimit=3, pod=tpu_pod(kind, topology, chips))]
    for label, machine in (("nvidia-h100-80gb", "a3-highgpu-8g"), ("nvidia-h100-mega-80gb", "a3-megagpu-8g"),
                           ("nvidia-h200-141gb", "a3-ultragpu-8g"), ("nvidia-b200", "a4-highgpu-8g")):  # fmt: skip
        for nodes in (1, 2, 8):
            group = gpu_group(label, machine, nodes, rdma=machine not in ("a3-highgpu-8g", "a3-megagpu-8g"))
            yield f"{nodes} {machine}", [group]
    # site/static/examples/ of JobSet, by what they show
    sleeping = {"containers": [{"name": "sleep", "image": "busybox", "command": ["sleep"], "args": ["100s"]}]}
    yield "simple/coordinator", [coordinated(target="driver", part=part("driver", completions=1, pod=sleeping))]
    yield "simple/paralleljobs", [jobset(part("workers", completions=2, parallelism=2, backoffLimit=0, pod=sleeping),
                                         part("driver", pod=sleeping))]  # fmt: skip
    yield "simple/group", [jobset(part("a", groupName="g1"), part("b", groupName="g1"), part("c"))]
    success = {"operator": "Any", "targetReplicatedJobs": ["b"]}
    yield "simple/success-policy", [jobset(part("a"), part("b"), successPolicy=success)]
    yield "simple/ttl-after-finished", [jobset(ttlSecondsAfterFinished=20)]
    yield "startup-policy", [jobset(part("driver"), part("workers"), startupPolicy={"startupPolicyOrder": "InOrder"})]
    yield "failure-policy", [rules({"action": "RestartJobSetAndIgnoreMaxRestarts"}, {"action": "FailJobSet"},
                                   maxRestarts=3)]  # fmt: skip
    yield "in-place-restart", [in_place()]
    yield "volume-claim-policy", [claimed("data")]
    yield "depends-on", [chain(initializer=[], node=["initializer"])]


CORPUS = dict(in_use())


# --- all of them -----------------------------------------------------------------------------------------------------

_VALIDATION = "https://github.com/kubernetes/kubernetes/blob/000f26050b9be6fb3d79fae95e06b47fc96128cd/pkg/apis"
WORDS = "https://github.com/kubernetes-sigs/yaml/blob/742f5e6f06b9847d2d7e4efa2fe6587f64897ad0/goyaml.v2/resolve.go"
NODES_PAGE = "https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus"


def corpus() -> Iterator[Case]:
    """The tables above; of the nodes, what cannot start counts as invalid."""
    for number, (line, document, said) in enumerate(JOBSETS):
        source = f"{JOBSET_TEST}#L{line}" if line else JOBSET_DEFINITION
        yield Case(f"JobSet {number}: {said}", source, dumped(document), not said)
    for name, document, said in JOBS:
        source = f"{_VALIDATION}/batch/validation/validation_test.go"
        yield Case(f"Job: {name}", source, dumped(document), not said)
    for number, (document, said) in enumerate(PODS):
        source = f"{_VALIDATION}/core/validation/validation_test.go"
        yield Case(f"pod {number}: {said}", source, dumped(document), not said)
    for number, (document, severity, said) in enumerate(NODES):
        starts = severity is not Severity.CANNOT_START
        yield Case(f"nodes {number}: {said}", NODES_PAGE, dumped(document), starts)
    spaced = job(container={"image": "busybox "})
    yield Case(
        "pod: an image with a space", f"{_VALIDATION}/core/validation/validation.go", dumped(spaced), valid=False
    )
    for name, documents in CORPUS.items():
        yield Case(f"in use: {name}", IN_USE, dumped(*documents), valid=True)
    for number, (words, valid) in enumerate(_READ_AS_YAML_1_1):
        text = dumped(job(container={"env": [{"name": "A", "value": "VALUE"}]}, suspend="SUSPEND"))
        for name, value in words.items():
            text = text.replace(name, value)
        yield Case(f"YAML 1.1 {number}: {' '.join(words.values())}", WORDS, text, valid)


#: Words without quotes in place of a text and of a boolean, and whether the API server takes them.
_READ_AS_YAML_1_1 = [
    ({"VALUE": "a", "SUSPEND": "yes"}, True),
    ({"VALUE": "a", "SUSPEND": "Off"}, True),
    ({"VALUE": "1:30", "SUSPEND": "n"}, True),
    ({"VALUE": "'yes'", "SUSPEND": "false"}, True),
    ({"VALUE": "a", "SUSPEND": "'yes'"}, False),
    ({"VALUE": "yes", "SUSPEND": "false"}, False),
    ({"VALUE": "N", "SUSPEND": "false"}, False),
    ({"VALUE": "a", "SUSPEND": "oN"}, False),
]
