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
    (863, jobset(part("worker", completions=1), metadata={"generateName": f"{'a' * 49}-"}), "its Jobs are named"),
    (895, jobset(part("worker", pod={"containers": [CONTAINER | {"volumeMounts": [
        {"name": "datasets", "mountPath": "/mnt/data"}]}]}), metadata={"generateName": f"{'a' * 49}-"},
        volumeClaimPolicies=[{"templates": [{"metadata": {"name": "datasets"}, "spec": {}}]}]), "the claim is named"),
    (953, jobset(part("job-0", replicas=MAX, parallelism=MAX)), "replicas times parallelism"),
    (996, jobset(part("job-0", replicas=1)), ""),
    (1024, jobset(successPolicy={"operator": "All", "targetReplicatedJobs": ["none"]}), "no replicated job 'none'"),
    (1055, jobset(network={"enableDNSHostnames": True, "subdomain": "a" * 64}), "subdomain is 'aaa"),
    (1089, jobset(part("username.llama65b")), "named js-username.llama65b-0"),
    (1119, jobset(part("rj", groupName="a" * 64)), "groupName is 'aaa"),
    (1149, jobset(part("rj", replicas=101), name="a" * 62), "at most 63"),
    (1181, jobset(part("rj", completions=1, parallelism=1), name="a" * 56), "with a random ending"),
    (1181, jobset(part("rj", completions=1, parallelism=1), name="a" * 50), ""),
    (1219, jobset(managedBy="notDomainPrefixed"), "managedBy is"),
    (1246, jobset(managedBy=f"foo.bar/{'a' * 63}"), "managedBy is"),
    (1273, jobset(managedBy="jobset.sigs.k8s.io/jobset-controller"), ""),
    (1298, jobset(part(completions=1, parallelism=1)), ""),
    (1325, rules({"name": "superAwesomeFailurePolicyRule"}), ""),
    (1354, rules({"onJobFailureReasons": ["fakeReason"]}), "no reason 'fakeReason'"),
    (1389, rules({"targetReplicatedJobs": ["fakeReplicatedJob"]}), "no replicated job 'fakeReplicatedJob'"),
    (626, rules({}, {}), ""),
    (1453, rules({"name": "a" * 129}), "a rule is named 'aaa"),
    (1453, rules({"name": "a" * 128}), ""),
    (1484, rules({"name": "same"}, {"name": "same"}), "2 rules are named 'same'"),
    (1516, rules({"name": "1ruleToRuleThemAll"}), "named '1ruleToRuleThemAll'"),
    (1547, rules({"name": "ruleToRuleThemAll,"}), "named 'ruleToRuleThemAll,'"),
    (1578, coordinated(target="none", part=part(completions=2)), "no replicated job 'none'"),
    (1621, coordinated(part=part()), "has no completions"),
    (1663, coordinated(job=2, part=part(completions=2, replicas=2)), "jobIndex is 2, of 2 replicas"),
    (1706, coordinated(pod=2, part=part(completions=2)), "podIndex is 2, of 2 pods"),
    (1749, coordinated(name="a" * 60, part=part("rj", completions=1)), "the coordinator's address"),
    (1780, coordinated(name="jobset", target="a" * 60), "the coordinator's address"),
    (1811, coordinated(name="jobset", network={"subdomain": "a" * 60}), "the coordinator's address"),
    (1621, coordinated(part=part("rj", completions=1, completionMode="NonIndexed")), "is not Indexed"),
    (1706, coordinated(), ""),
    (1845, jobset(part(replicas=1025), failurePolicy={"rules": [{"action": "RestartJob"}]}), "1025 replicas"),
    (1880, jobset(part(replicas=1025), failurePolicy={"rules": [{"action": "RestartJobAndIgnoreMaxRestarts"}]}),
     "1025 replicas"),
    (1845, jobset(part(replicas=1025), failurePolicy={"rules": [{"action": "RestartJobSet"}]}), ""),
    (1988, chain(a=[], b=["a"], c=["a"]), ""),
    (2042, chain(a=[], b=["a"], c=["b"]), ""),
    (2096, chain(a=[], b=[], c=["a", "b"]), ""),
    (2148, chain(a=[], b=["c"], c=[]), "b depends on 'c'"),
    (2202, chain(a=[], b=["c", "a"], c=[]), "b depends on 'c'"),
    (2260, chain(a=[], b=["invalid"]), "b depends on 'invalid'"),
    (2298, jobset() | {"spec": {"replicatedJobs": []}}, ""),
    (2308, chain(a=["invalid"]), "the first replicated job depends on another"),
    (2350, claimed("data"), ""),
    (2402, claimed("data", mounted=(), initContainers=[CONTAINER | {"name": "first", "volumeMounts": [
        {"name": "data", "mountPath": "/d"}]}]), ""),
    (2473, claimed("data", "data"), "claim 'data' is there twice"),
    (2538, claimed("Data", mounted=("Data",)), "claim 'Data'"),
    (2590, claimed("a" * 64, mounted=("a" * 64,)), "the claim is named"),
    (2642, claimed("data", mounted=()), "no container mounts the claim 'data'"),
    (2688, claimed("data", volumes=[{"name": "data", "emptyDir": {}}]), "a volume and a claim are named 'data'"),
    (2978, in_place(), ""),
    (3008, in_place(backoffLimit=0), f"write {MAX}"),
    (3008, in_place(backoffLimit=GONE), f"write {MAX}"),
    (3038, in_place(podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy is not Failed"),
    (3068, in_place(parallelism=1), "completions and parallelism differ"),
    (3098, in_place(completions=GONE), "completions and parallelism differ"),
    (3127, in_place(parallelism=GONE), "completions and parallelism differ"),
    (0, jobset(part("a"), part("a")), "name a is there twice"),
    (0, jobset(part(pod={"containers": [CONTAINER | {"env": ENV}]})), "name A is there twice"),
    (0, jobset(part(pod={"containers": [CONTAINER | {"ports": [{"containerPort": 1}, {"containerPort": 1}]}]})),
     "is there twice"),
    (0, jobset(part(pod={"containers": [CONTAINER | {"ports": [
        {"containerPort": 1}, {"containerPort": 1, "protocol": "UDP"}]}]})), ""),
    (0, jobset(part("a"), part("b", dependsOn=[{"name": "a", "status": "Ready"}]),
               startupPolicy={"startupPolicyOrder": "InOrder"}), "with startupPolicyOrder: InOrder"),
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
    ("managedBy: Too long", job(managedBy=f"example.com/{'x' * 60}"), "managedBy is"),
    ("managedBy: must be a domain-prefixed path", job(managedBy="invalid custom controller name"), "managedBy is"),
    ("successPolicy: requires indexed completion mode", job(successPolicy={"rules": [{"succeededCount": 1}]}),
     "not Indexed"),
    ("successPolicy.rules: Required value", succeeded(), "0 rules"),
    ("succeededCount or succeededIndexes must be specified", succeeded({}), "neither succeededIndexes nor"),
    ("succeededIndexes: invalid-format", succeeded({"succeededIndexes": "invalid-format"}), "indexes 'invalid-format'"),
    ("succeededIndexes: above completions", succeeded({"succeededIndexes": "0-5"}), "indexes '0-5'"),
    ("succeededIndexes: decreasing", succeeded({"succeededIndexes": "3,1"}), "indexes '3,1'"),
    ("succeededCount: negative", succeeded({"succeededCount": -1}), "succeededCount is -1"),
    ("succeededCount: above completions", succeeded({"succeededCount": 6}), "succeededCount is 6"),
    ("succeededCount: above the number of indexes",
     succeeded({"succeededCount": 4, "succeededIndexes": "0-2"}), "write 0 to 3"),
    ("successPolicy.rules: Too many", succeeded(*[{"succeededCount": 5}] * 21), "21 rules"),
    ("one of OnExitCodes and OnPodConditions is required", on_failure({"action": "FailJob"}), "neither onExitCodes"),
    ("values: Duplicate value: 11", on_failure(codes(values=[11, 11])), "in increasing order"),
    ("values: Too many", on_failure(codes(values=list(range(1, 257)))), "256 exit codes"),
    ("rules: Too many", on_failure(*[codes(values=[n]) for n in range(1, 22)]), "21 rules"),
    ("onPodConditions: Too many", on_failure({"action": "Ignore", "onPodConditions": [
        {"type": f"CustomType_{n}", "status": "True"} for n in range(21)]}), "21 conditions"),
    ("values: must be ordered", on_failure(codes(values=[19, 11])), "in increasing order"),
    ("values: at least one value is required", on_failure(codes(values=[])), "0 exit codes"),
    ("action: Required value", on_failure({"onExitCodes": codes()["onExitCodes"]}), "'action' is a required property"),
    ("operator: Required value", on_failure({"action": "Ignore", "onExitCodes": {"values": [1]}}),
     "'operator' is a required property"),
    ("both OnExitCodes and OnPodConditions", on_failure(codes() | condition()), "both onExitCodes and onPodConditions"),
    ("values: must not be 0 for the In operator", on_failure(codes(values=[0, 1])), "exit code 0"),
    ("NotIn may have 0", on_failure(codes("NotIn", [0])), ""),
    ("containerName: must be one of the containers", on_failure(codes(containerName="xyz")), "no container 'xyz'"),
    ("action: Unsupported value", on_failure(codes() | {"action": "UnknownAction"}), "action is UnknownAction"),
    ("action FailIndex requires backoffLimitPerIndex", on_failure(codes() | {"action": "FailIndex"}),
     "FailIndex without backoffLimitPerIndex"),
    ("operator: Unsupported value", on_failure(codes("UnknownOperator")), "operator is UnknownOperator"),
    ("status: defaulted to True (v1/defaults.go)",
     on_failure({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}), ""),
    ("status: Unsupported value", on_failure(condition(status="UnknownStatus")), "status is UnknownStatus"),
    ("type: name part must be non-empty", on_failure(condition(type="")), "condition ''"),
    ("type: Invalid Condition Type", on_failure(condition(type="Invalid Condition Type")), "condition 'Invalid"),
    ("podReplacementPolicy: only Failed with podFailurePolicy",
     on_failure(condition(), podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy is"),
    ("podReplacementPolicy: Unsupported value", job(podReplacementPolicy="Sometimes"), "podReplacementPolicy is"),
    ("restartPolicy: only Never with podFailurePolicy", on_failure(pod={"restartPolicy": "OnFailure"}),
     "restartPolicy is OnFailure with a podFailurePolicy"),
    ("parallelism: negative", job(parallelism=-1), "parallelism is -1"),
    ("backoffLimit: negative", job(backoffLimit=-1), "backoffLimit is -1"),
    ("backoffLimitPerIndex: requires indexed", job(backoffLimitPerIndex=1), "not Indexed"),
    ("backoffLimitPerIndex: negative", indexed(1, backoffLimitPerIndex=-1), "backoffLimitPerIndex is -1"),
    ("maxFailedIndexes: above completions", indexed(10, maxFailedIndexes=11, **MANY), "at most 10"),
    ("maxFailedIndexes: Required value", indexed(100001, parallelism=1, **MANY), "no maxFailedIndexes"),
    ("parallelism: 50000 of many", indexed(100001, parallelism=50000, maxFailedIndexes=1, **MANY),
     "parallelism is 50000"),
    ("maxFailedIndexes: 100001", indexed(100001, maxFailedIndexes=100001, **MANY), "at most 100000"),
    ("maxFailedIndexes: 50000 of many", indexed(100001, maxFailedIndexes=50000, **MANY), "at most 10000"),
    ("maxFailedIndexes: negative", indexed(1, maxFailedIndexes=-1, **MANY), "maxFailedIndexes is -1"),
    ("backoffLimitPerIndex: Required value", indexed(1, maxFailedIndexes=1), "without backoffLimitPerIndex"),
    ("maxFailedIndexes: requires indexed", job(maxFailedIndexes=1, **MANY), "not Indexed"),
    ("completions: negative", job(completions=-1), "completions is -1"),
    ("activeDeadlineSeconds: negative", job(activeDeadlineSeconds=-1), "activeDeadlineSeconds is -1"),
    ("selector: Required value", job(manualSelector=True), "manualSelector without a selector"),
    ("selector does not match template labels", selected({"y": "z"}, manualSelector=True), "does not match the labels"),
    ("selector not auto-generated", selected({"a": "b"}), "a selector without manualSelector"),
    ("restartPolicy: Required value", job(pod={"restartPolicy": None}), "restartPolicy is Always"),
    ("restartPolicy: Unsupported value", job(pod={"restartPolicy": "Invalid"}), "restartPolicy is Invalid"),
    ("ttlSecondsAfterFinished: negative", job(ttlSecondsAfterFinished=-1), "ttlSecondsAfterFinished is -1"),
    ("completions: Required value when Indexed", job(completionMode="Indexed", parallelism=2), "without completions"),
    ("Indexed alone has both defaults of 1 (v1/defaults.go)", job(completionMode="Indexed"), ""),
    ("parallelism: at most 100000 when Indexed", indexed(2, parallelism=100001), "parallelism of an Indexed Job"),
    ("metadata.name: invalid DNS label of the last pod", indexed(100) | {"metadata": {"name": "a" * 61}},
     "the host names of its pods have 64"),
    ("metadata.name: with a dot, Indexed", indexed(2) | {"metadata": {"name": "a.b"}}, "the host names of its pods"),
    ("metadata.name: with a dot", job() | {"metadata": {"name": "a.b"}}, ""),
    ("metadata.name: 64 characters, too many for the label job-name", job() | {"metadata": {"name": "a" * 64}},
     "becomes a label"),
    ("metadata.generateName", job() | {"metadata": {"generateName": "a-"}}, ""),
    ("metadata.name: Required value", job() | {"metadata": {}}, "the Job has no name"),
    ("metadata.name: upper case", job() | {"metadata": {"name": "A"}}, "named 'A'"),
    ("completionMode: Unsupported value", job(completionMode="Random"), "completionMode is Random"),
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
    ({"hostPath": {"path": "/a", "type": "Folder"}}, "type is Folder"),
    ({"hostPath": {"path": "/a/../b"}}, "path is '/a/../b'"),
    ({"gcePersistentDisk": {"pdName": "d", "fsType": "ext4"}}, ""),
    ({"gcePersistentDisk": {"pdName": ""}}, "without pdName"),
    ({"nfs": {"server": "s", "path": "/a"}}, ""),
    ({"nfs": {"server": "s", "path": "a"}}, "path is 'a'"),
    ({"configMap": {"name": "c", "defaultMode": 0o755, "items": [{"key": "a", "path": "b/c"}]}}, ""),
    ({"configMap": {"name": "c", "defaultMode": 1000}}, "defaultMode is 1000"),
    ({"configMap": {"name": "c", "items": [{"key": "a", "path": "/b"}]}}, "path is '/b'"),
    ({"secret": {"secretName": "s", "items": [{"key": "a", "path": "../b"}]}}, "path is '../b'"),
    ({"secret": {"secretName": "s", "items": [{"key": "", "path": "b"}]}}, "a file without key"),
    ({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "metadata.labels"}}]}}, ""),
    ({"downwardAPI": {"items": [{"path": "a", "resourceFieldRef": {
        "containerName": "ctr", "resource": "limits.cpu"}}]}}, ""),
    ({"downwardAPI": {"items": [{"path": "a", "fieldRef": {"fieldPath": "status.podIP"}}]}}, "'status.podIP'"),
    ({"downwardAPI": {"items": [{"path": "a"}]}}, "a file of no field"),
    ({"projected": {"sources": [{"secret": {"name": "a"}}, {"configMap": {"name": "b"}}]}}, ""),
    ({"projected": {"sources": [{"secret": {"name": "a"}, "configMap": {"name": "b"}}]}}, "a source of secret"),
    ({"projected": {"sources": [{"secret": {}}]}}, "secret without name"),
    ({"projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 600}}]}}, ""),
    ({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}, ""),
    ({"projected": {"sources": [{"serviceAccountToken": {"path": "a", "expirationSeconds": 60}}]}}, "is 60"),
]  # fmt: skip

#: Pods in Jobs, and words of the finding; none where they are taken.
PODS: list[tuple[Document, str]] = [
    # names of containers, and what they need
    (job(container={"name": "A"}), "a container is named 'A'"),
    (job(container={"name": "a" * 64}), "at most 63"),
    (job(container={"image": ""}), "without an image"),
    (job(pod={"containers": []}), "a pod without containers"),
    (job(pod={"containers": [CONTAINER, CONTAINER]}), "two containers are named 'ctr'"),
    (job(pod={"initContainers": [CONTAINER]}), "two containers are named 'ctr'"),
    (job(pod={"initContainers": [CONTAINER | {"name": "i", "readinessProbe": LIFE}]}), "in an init container"),
    (job(pod={"initContainers": [CONTAINER | {"name": "i", "restartPolicy": "Always", "readinessProbe": LIFE}]}), ""),
    # variables
    (job(container={"env": ENV}), ""),
    (job(container={"env": [{"name": "with space-and.dot"}]}), ""),
    (job(container={"env": [{"name": "a=b"}]}), "a variable is named 'a=b'"),
    (job(container={"env": [{"name": ""}]}), "a variable is named ''"),
    (variable(value="x", valueFrom={"fieldRef": {"fieldPath": "metadata.name"}}), "both value and valueFrom"),
    (variable(valueFrom={}), "0 sources"),
    (variable(valueFrom={"fieldRef": {"fieldPath": "metadata.name"}, "secretKeyRef": {"name": "s", "key": "k"}}),
     "2 sources"),
    (field("metadata.name"), ""),
    (field("metadata.annotations['jobset.sigs.k8s.io/job-index']"), ""),
    (field("metadata.labels['batch.kubernetes.io/job-completion-index']"), ""),
    (field("metadata.labels"), "is the field 'metadata.labels'"),
    (field("status.phase"), "is the field 'status.phase'"),
    (job(container={"envFrom": [{"configMapRef": {"name": "c"}}, {"prefix": "X_", "secretRef": {"name": "s"}}]}), ""),
    (job(container={"envFrom": [{"prefix": "X_"}]}), "envFrom with 0 sources"),
    # ports
    (job(container={"ports": [{"containerPort": 8471}, {"containerPort": 8471}]}), ""),
    (job(container={"ports": [{"containerPort": 0}]}), "containerPort is 0"),
    (job(container={"ports": [{"containerPort": 65536}]}), "containerPort is 65536"),
    (job(container={"ports": [{"containerPort": 1, "protocol": "HTTP"}]}), "protocol is HTTP"),
    (job(container={"ports": [{"containerPort": 1, "name": "coordinator-port"}]}), "at most 15"),
    (job(container={"ports": [{"containerPort": 1, "name": "1234"}]}), "a port is named '1234'"),
    (job(container={"ports": [{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}]}),
     "two ports are named 'a'"),
    (job(container={"ports": [{"containerPort": 1, "hostPort": 80}, {"containerPort": 2, "hostPort": 80}]}),
     "hostPort 80 is used twice"),
    (job(container={"ports": [{"containerPort": 1, "hostPort": 80},
                              {"containerPort": 2, "hostPort": 80, "protocol": "UDP"}]}), ""),
    # volumes
    (mounting({"name": "v", "mountPath": "/v"}), ""),
    (mounting({"name": "w", "mountPath": "/v"}), "no volume 'w'"),
    (mounting({"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/v"}), "two volumes are mounted at /v"),
    (mounting({"name": "v", "mountPath": "/v"}, {"name": "v", "mountPath": "/w", "subPath": "a/b"}), ""),
    (mounting({"name": "v", "mountPath": "/v", "subPath": "../a"}), "subPath is '../a'"),
    (mounting({"name": "v", "mountPath": "/v", "subPath": "a", "subPathExpr": "b"}), "both subPath and subPathExpr"),
    (mounting({"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}), "is not privileged"),
    (mounting({"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"},
              securityContext={"privileged": True}), ""),
    (mounting(volumes=[{"name": "v"}]), ""),
    (mounting(volumes=[{"name": "v", "emptyDir": {}}, {"name": "v", "emptyDir": {}}]), "two volumes are named 'v'"),
    (mounting(volumes=[{"name": "a_b", "emptyDir": {}}]), "a volume is named 'a_b'"),
    (mounting(volumes=[{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]), "has the sources"),
    (mounting(volumes=[{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}]), ""),
    (mounting(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "64 GB"}}]), "sizeLimit is 64 GB"),
    (mounting(volumes=[{"name": "v", "csi": {"driver": "gcsfuse.csi.storage.gke.io",
                                             "volumeAttributes": {"bucketName": "b"}}}]), ""),
    (mounting(volumes=[{"name": "v", "configMap": {}}]), "configMap of volume 'v' without name"),
    # resources
    (limits(limits={TPU: 4}), ""),
    (limits({TPU: "4"}, limits={TPU: 4}), ""),
    (limits({TPU: 4}), "4 requested, limit none"),
    (limits({GPU: 4}, limits={GPU: 8}), "4 requested, limit 8"),
    (limits(limits={GPU: "0.5"}), "nvidia.com/gpu is 0.5"),
    (limits(limits={GPU: "four"}), "nvidia.com/gpu is four"),
    (limits(limits={GPU: -1}), "nvidia.com/gpu is -1"),
    (limits({"cpu": 2}, limits={"cpu": "1500m"}), "2 requested, limit 1500m"),
    (limits({"cpu": "500m", "memory": "1G"}, limits={"cpu": 1, "memory": "1Gi"}), ""),
    (limits({"memory": "1Gi"}, limits={"memory": "1G"}), "1Gi requested, limit 1G"),
    (limits({"cpu": 1}), ""),
    (limits(limits={"gpu": 1}), "resource 'gpu'"),
    (limits(limits={"hugepages-2Mi": "4Mi"}), "huge pages without cpu or memory"),
    (limits({"hugepages-2Mi": "2Mi", "cpu": 1}, limits={"hugepages-2Mi": "4Mi"}), "2Mi requested, limit 4Mi"),
    (limits(claims=[{"name": "c"}]), "no resource claim 'c'"),
    # scheduling
    (tolerating(key=TPU, operator="Exists", effect="NoSchedule"), ""),
    (tolerating(operator="Exists"), ""),
    (tolerating(key=TPU, operator="Equal", value="present"), ""),
    (tolerating(key=TPU, operator="Exists", value="present"), "Exists with the value"),
    (tolerating(effect="NoSchedule"), "a toleration without key"),
    (tolerating(key="a b", operator="Exists"), "toleration of 'a b'"),
    (tolerating(key=TPU, operator="In"), "operator is In"),
    (tolerating(key=TPU, operator="Exists", effect="Never"), "effect is Never"),
    (tolerating(key=TPU, operator="Exists", tolerationSeconds=10), "tolerationSeconds without"),
    (tolerating(key=TPU, operator="Exists", effect="NoExecute", tolerationSeconds=10), ""),
    (required({"key": "zone", "operator": "In", "values": ["a"]}), ""),
    (required({"key": "zone", "operator": "In", "values": []}), "In without values"),
    (required({"key": "zone", "operator": "Exists", "values": ["a"]}), "Exists with values"),
    (required({"key": "zone", "operator": "Gt", "values": ["1", "2"]}), "Gt with 2 values"),
    (required({"key": "zone", "operator": "Is", "values": ["1"]}), "operator is Is"),
    (required({"key": "a b", "operator": "Exists"}), "node label 'a b'"),
    (job(pod={"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": []}}}}), "without nodeSelectorTerms"),
    (job(pod={"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 0, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}]}}}), "weight is 0"),
    (job(pod={"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": ""}]}}}), "podAntiAffinity with the topologyKey ''"),
    (job(pod={"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "cloud.google.com/gke-nodepool", "labelSelector": {"matchExpressions": [
            {"key": "a", "operator": "In", "values": ["b"]}]}}]}}}), ""),
    (job(pod={"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "a", "labelSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}}}),
     "In with 0 values"),
    (job(pod={"topologySpreadConstraints": [SPREAD]}), ""),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"maxSkew": 0}]}), "maxSkew is 0"),
    (job(pod={"topologySpreadConstraints": [SPREAD, SPREAD]}), "two constraints of zone"),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"whenUnsatisfiable": "Wait"}]}), "whenUnsatisfiable is Wait"),
    (job(pod={"schedulingGates": [{"name": "gke.io/topology-aware-auto-x"}]}), ""),
    (job(pod={"schedulingGates": [{"name": "a"}, {"name": "a"}]}), "scheduling gate 'a'"),
    # labels
    (job(pod={"nodeSelector": {"a b": "c"}}), "node label 'a b: c'"),
    (JOB | {"metadata": {"name": "a", "labels": {"kueue.x-k8s.io/queue-name": "q", "empty": ""}}}, ""),
    (JOB | {"metadata": {"name": "a", "labels": {"a": "b c"}}}, "label 'a: b c'"),
    (JOB | {"metadata": {"name": "a", "labels": {"a": "b" * 64}}}, "at most 63"),
    (JOB | {"metadata": {"name": "a", "labels": {"a/b/c": "d"}}}, "label 'a/b/c: d'"),
    (JOB | {"metadata": {"name": "a", "annotations": {"a": "any text: at all"}}}, ""),
    (JOB | {"metadata": {"name": "a", "annotations": {"a b": "c"}}}, "annotation 'a b'"),
    (JOB | {"metadata": {"name": "a", "annotations": {"a": "b" * 262144}}}, "annotations of 262145 bytes"),
    # values of containers
    (job(container={"imagePullPolicy": "IfNotPresent", "terminationMessagePolicy": "FallbackToLogsOnError"}), ""),
    (job(container={"imagePullPolicy": "Sometimes"}), "imagePullPolicy is Sometimes"),
    (job(container={"terminationMessagePolicy": "Log"}), "terminationMessagePolicy is Log"),
    *((job(container={"livenessProbe": probe}), said) for probe, said in [
        ({"httpGet": {"path": "/healthz", "port": 8080}, "initialDelaySeconds": 0}, ""),
        ({"tcpSocket": {"port": "http"}, "successThreshold": 1}, ""),
        ({"grpc": {"port": 2379}}, ""),
        ({"exec": {"command": ["true"]}, "timeoutSeconds": 0}, ""),
        ({}, "0 of exec"),
        ({"httpGet": {"port": 80}, "exec": {"command": ["a"]}}, "2 of exec"),
        ({"exec": {"command": []}}, "exec without a command"),
        ({"httpGet": {"port": 0}}, "port is 0"),
        ({"tcpSocket": {"port": "no_port"}}, "port is no_port"),
        ({"httpGet": {"port": 80, "scheme": "FTP"}}, "scheme is FTP"),
        ({"httpGet": {"port": 80}, "periodSeconds": -1}, "periodSeconds is -1"),
        ({"httpGet": {"port": 80}, "successThreshold": 2}, "successThreshold of a livenessProbe"),
    ]),
    (job(container={"readinessProbe": {"exec": {"command": ["a"]}, "successThreshold": 2}}), ""),
    (job(container={"lifecycle": {"preStop": {"sleep": {"seconds": 5}}}}), ""),
    (job(container={"lifecycle": {"preStop": {"sleep": {"seconds": 60}}}}), "sleep of 60 s"),
    (job(container={"lifecycle": {"preStop": {"sleep": {"seconds": 60}}}}, pod={"terminationGracePeriodSeconds": 90}),
     ""),
    (job(container={"lifecycle": {"preStop": {}}}), "0 of exec"),
    *((job(container={"securityContext": context}), said) for context, said in [
        ({"privileged": True, "runAsUser": 0, "runAsGroup": 1000}, ""),
        ({"allowPrivilegeEscalation": False, "capabilities": {"add": ["NET_ADMIN"]}}, ""),
        ({"privileged": True, "allowPrivilegeEscalation": False}, "privileged with allowPrivilegeEscalation"),
        ({"allowPrivilegeEscalation": False, "capabilities": {"add": ["CAP_SYS_ADMIN"]}}, "CAP_SYS_ADMIN with"),
        ({"runAsUser": -1}, "runAsUser is -1"),
        ({"runAsGroup": 2**31}, "runAsGroup is 2147483648"),
        ({"procMount": "Masked"}, "procMount is Masked"),
    ]),
    (variable(valueFrom={"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1m"}}), ""),
    (variable(valueFrom={"resourceFieldRef": {"resource": "requests.hugepages-2Mi"}}), ""),
    (variable(valueFrom={"resourceFieldRef": {"resource": "limits.nvidia.com/gpu"}}), "'limits.nvidia.com/gpu'"),
    # content of volumes
    *((mounting(volumes=[{"name": "v", **volume}]), said) for volume, said in VOLUMES),
    # values of pods
    (job(pod={"dnsConfig": {"nameservers": ["8.8.8.8"], "options": [{"name": "ndots", "value": "2"}]}}), ""),
    (job(pod={"dnsConfig": {"nameservers": ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"]}}), "4 name servers"),
    (job(pod={"dnsConfig": {"nameservers": ["dns.example.com"]}}), "is no IP address"),
    (job(pod={"dnsConfig": {"options": [{"value": "2"}]}}), "an option without name"),
    (job(pod={"hostAliases": [{"ip": "127.0.0.1", "hostnames": ["a.b", "c"]}, {"ip": "fd00::1"}]}), ""),
    (job(pod={"hostAliases": [{"ip": "010.0.0.01", "hostnames": ["a"]}]}), ""),
    (job(pod={"hostAliases": [{"ip": "300.0.0.1", "hostnames": ["a"]}]}), "'300.0.0.1' is no IP address"),
    (job(pod={"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["A_b"]}]}), "a host is named 'A_b'"),
    (job(pod={"hostUsers": False}), ""),
    (job(pod={"hostUsers": False, "hostNetwork": True}), "hostNetwork with hostUsers"),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"minDomains": 2, "nodeTaintsPolicy": "Honor"}]}), ""),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"minDomains": 0}]}), "minDomains is 0"),
    (job(pod={"topologySpreadConstraints": [SPREAD | {"nodeAffinityPolicy": "Keep"}]}), "nodeAffinityPolicy is Keep"),
    (job(completions=2**31), "2147483648"),
    # settings
    (job(pod={"subdomain": "a.b"}), "subdomain is 'a.b'"),
    (job(pod={"hostname": "A"}), "hostname is 'A'"),
    (job(pod={"serviceAccountName": "a_b"}), "serviceAccountName is 'a_b'"),
    (job(pod={"serviceAccountName": "a.b"}), ""),
    (job(pod={"priorityClassName": "high priority"}), "priorityClassName is"),
    (job(pod={"dnsPolicy": "ClusterFirstWithHostNet", "hostNetwork": True}), ""),
    (job(pod={"dnsPolicy": "Cluster"}), "dnsPolicy is Cluster"),
    (job(pod={"dnsPolicy": "None"}), "without dnsConfig.nameservers"),
    (job(pod={"activeDeadlineSeconds": 0}), "activeDeadlineSeconds is 0"),
    (job(pod={"shareProcessNamespace": True, "hostPID": True}), "shareProcessNamespace with hostPID"),
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
