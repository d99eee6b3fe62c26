"""Rules that the API server applies to the pods of Jobs: containers, volumes, resources, scheduling, labels.

The API server validates the pod template of a Job; see ``ValidatePodTemplateSpec`` in :data:`_CORE`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.rules.job_templates import JobTemplate, job_rule, pod_templates
from trainyard_jobs.rules.problems import Problem, findings, out_of_range
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping, sequence

_CORE = "https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/core/validation/validation.go"
_LABELS = "https://github.com/kubernetes/apimachinery/blob/master/pkg/apis/meta/v1/validation/validation.go"

#: Most bytes of an object's annotations (TotalAnnotationSizeLimitB).
_ANNOTATIONS = 256 * 1024
_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt")
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"

#: Fields of a pod that a variable can have, besides single labels and annotations.
_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)


@rule("gke", severity=Severity.REFUSE, source=f"{_LABELS} (ValidateLabels); {_CORE} (ValidateAnnotations)")
def labels_are_valid(job: Evidence) -> Iterator[Finding]:
    """Labels and annotations have valid keys and values."""
    for number, document in enumerate(job.job.documents):
        problems = _metadata(mapping(document, "metadata"), ("metadata",))
        yield from findings(job, number, problems, "the API server refuses the object")
    for template in pod_templates(job):
        if template.kind != "Pod":  # whose labels are those of the object
            metadata = mapping(template.template, "metadata")
            yield from template.findings(job, _metadata(metadata, (*template.pod_at[:-1], "metadata")))
        yield from template.findings(job, _labels(template.pod, "nodeSelector", "node label", template.pod_at))


def _labels(part: dict[str, Any], field: str, what: str, at: Location) -> Iterator[Problem]:
    for key, value in mapping(part, field).items():
        if wrong := names.qualified_name(str(key)) or names.label_value(str(value)):
            yield (*at, field, str(key)), f"{what} '{key}: {value}'", wrong


def _metadata(metadata: dict[str, Any], at: Location) -> Iterator[Problem]:
    yield from _labels(metadata, "labels", "label", at)
    annotations = mapping(metadata, "annotations")
    for key in annotations:
        if wrong := names.qualified_name(str(key).lower()):
            yield (*at, "annotations", str(key)), f"annotation '{key}'", wrong
    size = sum(len(str(entry).encode()) for pair in annotations.items() for entry in pair)
    if size > _ANNOTATIONS:
        yield (*at, "annotations"), f"annotations of {size} bytes", f"use at most {_ANNOTATIONS}"


@job_rule(f"{_CORE} (validateContainers, validateInitContainers)", pods=True)
def containers_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Containers have unique names and an image; init containers that end have no probes."""
    if template.pod and not template.containers:
        yield template.pod_at, "a pod without containers", "add one"
    seen: set[str] = set()
    for at, entry in template.all_containers():
        name = str(entry.get("name", ""))
        if wrong := names.dns_1123_label(name):
            yield (*at, "name"), f"a container is named '{name}'", wrong
        elif name in seen:
            yield (*at, "name"), f"two containers are named '{name}'", "rename one"
        seen.add(name)
        if not entry.get("image"):
            yield at, f"container '{name}' without an image", "add image"
        if "initContainers" in at and entry.get("restartPolicy") != "Always":
            for key in ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"):
                if key in entry:
                    yield (*at, key), f"{key} in an init container", "remove it, or add restartPolicy: Always"


@job_rule(f"{_CORE} (ValidateEnv, ValidateEnvFrom)", pods=True)
def container_variables_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Environment variables have a valid name, and one value or source."""
    for at, container in template.all_containers():
        for here, entry in entries(container, at, "env"):
            name = str(entry.get("name", ""))
            if not re.fullmatch(r"[ -<>-~]+", name):
                yield here, f"a variable is named '{name}'", "use printable ASCII characters without '='"
            if isinstance(entry.get("valueFrom"), dict):
                yield from _sources(entry, name, here)
        for here, entry in entries(container, at, "envFrom"):
            number = sum(entry.get(key) is not None for key in ("configMapRef", "secretRef"))
            if number != 1:
                yield here, f"envFrom with {number} sources", "give one of configMapRef, secretRef"
    if not template.in_jobset:  # a JobSet with such a list is refused: jobset_lists_have_unique_keys
        for at, container in template.all_containers():
            count = Counter(str(entry.get("name", "")) for _, entry in entries(container, at, "env"))
            for name in (name for name, number in count.items() if number > 1):
                what = f"{name} is there {count[name]} times"
                yield (*at, "env"), what, "remove the others", Severity.NOTE, "the last one applies"


def _sources(variable: dict[str, Any], name: str, at: Location) -> Iterator[Problem]:
    """Yield problems of the source of a variable's value."""
    source = variable["valueFrom"]
    sources = [key for key, value in source.items() if value is not None]
    if variable.get("value"):
        yield at, f"{name} has both value and valueFrom", "remove one of them"
    elif len(sources) != 1:
        yield at, f"valueFrom of {name} has {len(sources)} sources", "give it one"
    field = str(mapping(source, "fieldRef").get("fieldPath", ""))
    single = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field)
    known = field in _FIELDS or (single and not names.qualified_name(single[2].lower()))
    if "fieldRef" in sources and not known:
        what = f"{name} is the field '{field}', which pods do not pass to variables"
        yield at, what, f"use {', '.join(_FIELDS)}, or metadata.annotations['<key>']"


@job_rule(f"{_CORE} (validateContainerPorts, checkHostPortConflicts)", pods=True)
def ports_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Ports exist, have valid names, and are used by one container of the host's network."""
    hosts: set[tuple[object, ...]] = set()
    for at, container in template.all_containers():
        seen: set[str] = set()
        for here, port in entries(container, at, "ports"):
            yield from _port(port, here, seen)
            if port.get("hostPort") and "containers" in at:
                host = (port["hostPort"], port.get("protocol", "TCP"), port.get("hostIP", ""))
                if host in hosts:
                    yield (*here, "hostPort"), f"hostPort {port['hostPort']} is used twice", "use another port"
                hosts.add(host)
    if template.pod.get("hostNetwork"):
        yield from _host_network_ports(template)


def _port(port: dict[str, Any], at: Location, seen: set[str]) -> Iterator[Problem]:
    """Yield problems of a port; ``seen`` are the names of its container's earlier ones."""
    yield from out_of_range(port, "containerPort", at, 1, 65535)
    if port.get("hostPort") != 0:
        yield from out_of_range(port, "hostPort", at, 1, 65535)
    if "containerPort" not in port:
        yield at, "a port without containerPort", "add containerPort"
    if port.get("protocol", "TCP") not in ("TCP", "UDP", "SCTP"):
        yield (*at, "protocol"), f"protocol is {port.get('protocol')}", "write TCP, UDP or SCTP"
    name = str(port.get("name") or "")
    if name and (wrong := names.port_name(name)):
        yield (*at, "name"), f"a port is named '{name}'", wrong
    elif name in seen:
        yield (*at, "name"), f"two ports are named '{name}'", "rename one"
    seen |= {name} if name else set()


def _host_network_ports(template: JobTemplate) -> Iterator[Problem]:
    """On the host's network, a pod's ports are ports of the host: the pod is refused, though not its template."""
    seen: set[tuple[object, ...]] = set()
    for at, container in template.all_containers():
        for here, port in entries(container, at, "ports") if "containers" in at else ():
            host, severity = port.get("hostPort") or port.get("containerPort"), Severity.CANNOT_START
            if port.get("hostPort") and port["hostPort"] != port.get("containerPort"):
                what = f"hostPort is {host} on the host's network"
                yield (*here, "hostPort"), what, "make it the same as containerPort", severity
            key = (host, port.get("protocol", "TCP"), port.get("hostIP", ""))
            if key in seen:
                what = f"port {host} of the host's network is used twice"
                yield here, what, "remove one, or use another port", severity
            seen.add(key)


@job_rule(f"{_CORE} (ValidateVolumes, ValidateVolumeMounts, ValidateVolumeDevices)", pods=True)
def volumes_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Volumes have unique names and one source, and every mount names one of them."""
    seen = set(template.claims)
    for at, entry in entries(template.pod, template.pod_at, "volumes"):
        name = str(entry.get("name", ""))
        if wrong := names.dns_1123_label(name):
            yield at, f"a volume is named '{name}'", wrong
        elif name in seen and name not in template.claims:
            yield at, f"two volumes are named '{name}'", "rename one"
        seen.add(name)
        sources = [key for key, value in entry.items() if key != "name" and value is not None]
        if len(sources) > 1:
            yield at, f"volume '{name}' has the sources {', '.join(sources)}", "give it one"
        for source, field in (("hostPath", "path"), ("persistentVolumeClaim", "claimName"), ("csi", "driver"),
                              ("configMap", "name"), ("secret", "secretName"),
                              ("gcePersistentDisk", "pdName")):  # fmt: skip
            if isinstance(entry.get(source), dict) and not entry[source].get(field):
                yield (*at, source), f"{source} of volume '{name}' without {field}", f"add {field}"
        size = mapping(entry, "emptyDir").get("sizeLimit")
        if size is not None and ((number := names.quantity(size)) is None or number < 0):
            yield (*at, "emptyDir", "sizeLimit"), f"sizeLimit is {size}", "write a size such as 16Gi"
    for at, container in template.all_containers():
        # Controllers of custom resources add volumes, such as KubeRay's ray-token.
        yield from _mounts(container, at, seen, may_be_added=not template.is_job and template.kind != "Pod")


def _mounts(container: dict[str, Any], at: Location, volumes: set[str], *, may_be_added: bool) -> Iterator[Problem]:
    """Yield problems of mounts, of which volumes that are not there may be added."""
    paths: set[str] = set()
    for here, entry in entries(container, at, "volumeMounts"):
        path = str(entry.get("mountPath", ""))
        if entry.get("name") not in volumes:
            known = f"it has {', '.join(sorted(volumes))}" if volumes else "it has none"
            problem = here, f"no volume '{entry.get('name')}'; {known}", "add the volume, or correct the name"
            yield (*problem, Severity.NOTE, "its controller has to add it") if may_be_added else problem
        if not path or path in paths:
            what = f"two volumes are mounted at {path}" if path else "a volumeMount without mountPath"
            yield here, what, "give it another path"
        paths.add(path)
        for key in ("subPath", "subPathExpr"):
            inner = str(entry.get(key) or "")
            if inner.startswith("/") or ".." in inner.split("/"):
                yield (*here, key), f"{key} is '{inner}'", "write a path below the volume, without '..'"
        if entry.get("subPath") and entry.get("subPathExpr"):
            yield here, "both subPath and subPathExpr", "remove one of them"
        privileged = mapping(container, "securityContext").get("privileged")
        if entry.get("mountPropagation") == "Bidirectional" and not privileged:
            what = "mountPropagation: Bidirectional in a container that is not privileged"
            yield (*here, "mountPropagation"), what, "use HostToContainer"
    for here, entry in entries(container, at, "volumeDevices"):
        if entry.get("name") not in volumes:
            yield here, f"no volume '{entry.get('name')}'", "add the volume"


@job_rule(
    f"{_CORE} (ValidateContainerResourceRequirements); "
    "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers#extended-resources",
    pods=True,
)
def resources_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Requests are at most the limits; accelerators and huge pages are requested and limited equally."""
    claims = {str(mapping(entry).get("name")) for entry in sequence(template.pod, "resourceClaims")}
    for at, container in template.all_containers():
        yield from resource_problems(mapping(container, "resources"), (*at, "resources"))
        for here, entry in entries(container, at, "resources", "claims"):
            if entry.get("name") not in claims:
                what = f"no resource claim '{entry.get('name')}' in the pod's resourceClaims"
                yield here, what, "add it to resourceClaims"


def _overcommittable(name: str) -> bool:
    """Whether requests may be lower than limits: CPU, memory and storage, but neither huge pages nor devices."""
    own = "/" not in name or "kubernetes.io/" in name
    return own and not name.startswith("hugepages-")


def resource_problems(resources: dict[str, Any], here: Location) -> Iterator[Problem]:
    """What is wrong in the requests and limits of a container."""
    given = {kind: mapping(resources, kind) for kind in ("requests", "limits")}
    for kind, values in given.items():
        for name, value in values.items():
            yield from _quantity(str(name), value, (*here, kind, str(name)))
    for name, requested in given["requests"].items():
        limit = given["limits"].get(name)
        amount, most = names.quantity(requested), names.quantity(limit)
        if amount is None or (limit is not None and most is None):
            continue  # reported above
        free = _overcommittable(str(name))
        if (limit is None and not free) or (most is not None and (amount > most or (amount != most and not free))):
            what = f"{name}: {requested} requested, limit {limit if limit is not None else 'none'}"
            yield here, what, "request at most the limit" if free else "give both the same number"
    huge = any(str(name).startswith("hugepages-") for values in given.values() for name in values)
    if huge and not any(name in values for values in given.values() for name in ("cpu", "memory")):
        yield here, "huge pages without cpu or memory", "add a request for cpu or memory"


def _quantity(name: str, value: object, at: Location) -> Iterator[Problem]:
    standard = name in ("cpu", "memory", "ephemeral-storage") or name.startswith("hugepages-")
    if wrong := names.qualified_name(name):
        yield at, f"resource '{name}'", wrong
    elif "/" not in name and not standard:
        yield at, f"resource '{name}'", "use cpu, memory, ephemeral-storage, or a device such as google.com/tpu"
    amount = names.quantity(value)
    if amount is None or amount < 0:
        yield at, f"{name} is {value}", "write a number, with a unit such as m, Mi or Gi"
    elif not _overcommittable(name) and "/" in name and amount.denominator != 1:
        yield at, f"{name} is {value}", "write a whole number"


@job_rule(f"{_CORE} (ValidateTolerations, validateAffinity, validateTopologySpreadConstraints)", pods=True)
def scheduling_is_valid(template: JobTemplate) -> Iterator[Problem]:
    """Tolerations, affinities, spread constraints and gates have valid operators and values."""
    for check in (_tolerations, _node_affinity, _pod_affinity, _spread, _gates):
        yield from check(template.pod, template.pod_at)


def _tolerations(pod: dict[str, Any], at: Location) -> Iterator[Problem]:
    for here, entry in entries(pod, at, "tolerations"):
        key = str(entry.get("key") or "")
        operator, value = entry.get("operator") or "Equal", str(entry.get("value") or "")
        if operator not in ("Equal", "Exists", "Lt", "Gt"):
            yield (*here, "operator"), f"operator is {operator}", "write Equal or Exists"
        if key and (wrong := names.qualified_name(key)):
            yield (*here, "key"), f"toleration of '{key}'", wrong
        if not key and operator != "Exists":
            yield here, "a toleration without key", "add the key, or write operator: Exists"
        if operator == "Exists" and value:
            yield (*here, "value"), f"operator Exists with the value '{value}'", "remove the value, or write Equal"
        elif operator == "Equal" and (wrong := names.label_value(value)):
            yield (*here, "value"), f"value is '{value}'", wrong
        effect = entry.get("effect") or ""
        if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
            yield (*here, "effect"), f"effect is {effect}", "write NoSchedule, PreferNoSchedule or NoExecute"
        elif "tolerationSeconds" in entry and effect != "NoExecute":
            yield here, "tolerationSeconds without effect: NoExecute", "remove it, or write effect: NoExecute"


def _node_affinity(pod: dict[str, Any], at: Location) -> Iterator[Problem]:
    affinity, here = mapping(pod, "affinity", "nodeAffinity"), (*at, "affinity", "nodeAffinity")
    if isinstance(affinity.get(_REQUIRED), dict):
        if not sequence(affinity, _REQUIRED, "nodeSelectorTerms"):
            yield (*here, _REQUIRED), "a required node affinity without nodeSelectorTerms", "add a term"
        for where, term in entries(affinity, here, _REQUIRED, "nodeSelectorTerms"):
            yield from _expressions(term, where)
    for where, entry in entries(affinity, here, _PREFERRED):
        yield from out_of_range({"weight": 0} | entry, "weight", where, 1, 100)
        yield from _expressions(mapping(entry, "preference"), (*where, "preference"))


def _expressions(term: dict[str, Any], at: Location) -> Iterator[Problem]:
    for here, entry in entries(term, at, "matchExpressions"):
        operator, values = entry.get("operator"), sequence(entry, "values")
        if wrong := names.qualified_name(str(entry.get("key", ""))):
            yield (*here, "key"), f"node label '{entry.get('key')}'", wrong
        if operator not in _OPERATORS:
            yield (*here, "operator"), f"operator is {operator}", f"write one of {', '.join(_OPERATORS)}"
        elif operator in ("In", "NotIn") and not values:
            yield here, f"{operator} without values", "add values"
        elif operator in ("Exists", "DoesNotExist") and values:
            yield here, f"{operator} with values", "remove the values, or write In"
        elif operator in ("Gt", "Lt") and len(values) != 1:
            yield here, f"{operator} with {len(values)} values", "give one number, in quotes"


def _pod_affinity(pod: dict[str, Any], at: Location) -> Iterator[Problem]:
    for kind in ("podAffinity", "podAntiAffinity"):
        terms = [*entries(pod, at, "affinity", kind, _REQUIRED)]
        for here, entry in entries(pod, at, "affinity", kind, _PREFERRED):
            yield from out_of_range({"weight": 0} | entry, "weight", here, 1, 100)
            terms.append(((*here, "podAffinityTerm"), mapping(entry, "podAffinityTerm")))
        for here, term in terms:
            if wrong := names.qualified_name(str(term.get("topologyKey") or "")):
                yield here, f"{kind} with the topologyKey '{term.get('topologyKey', '')}'", wrong
            yield from _label_selector(term, here)


def _label_selector(term: dict[str, Any], at: Location) -> Iterator[Problem]:
    for here, entry in entries(term, at, "labelSelector", "matchExpressions"):
        operator, values = entry.get("operator"), sequence(entry, "values")
        if operator not in _OPERATORS[:4]:
            yield here, f"operator is {operator}", f"write one of {', '.join(_OPERATORS[:4])}"
        elif (operator in ("In", "NotIn")) != bool(values):
            yield here, f"{operator} with {len(values)} values", "In and NotIn have values, the others have none"


def _spread(pod: dict[str, Any], at: Location) -> Iterator[Problem]:
    seen: set[tuple[object, object]] = set()
    for here, entry in entries(pod, at, "topologySpreadConstraints"):
        when = entry.get("whenUnsatisfiable")
        yield from out_of_range(entry, "maxSkew", here, 1)
        if wrong := names.qualified_name(str(entry.get("topologyKey") or "")):
            yield here, f"topologyKey is '{entry.get('topologyKey', '')}'", wrong
        if when not in ("DoNotSchedule", "ScheduleAnyway"):
            yield here, f"whenUnsatisfiable is {when}", "write DoNotSchedule or ScheduleAnyway"
        elif "minDomains" in entry and when != "DoNotSchedule":
            yield (*here, "minDomains"), f"minDomains with whenUnsatisfiable: {when}", "write DoNotSchedule"
        if (entry.get("topologyKey"), when) in seen:
            yield here, f"two constraints of {entry.get('topologyKey')}, {when}", "remove one"
        seen.add((entry.get("topologyKey"), when))


def _gates(pod: dict[str, Any], at: Location) -> Iterator[Problem]:
    gates: set[str] = set()
    for here, entry in entries(pod, at, "schedulingGates"):
        name = str(entry.get("name", ""))
        if (wrong := names.qualified_name(name)) or name in gates:
            yield here, f"scheduling gate '{name}'", wrong or "remove the second"
        gates.add(name)


@job_rule(f"{_CORE} (ValidatePodSpec)", pods=True)
def pod_settings_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Host names, accounts, DNS and deadlines of a pod are valid."""
    pod, at = template.pod, template.pod_at
    for key in ("hostname", "subdomain"):
        if pod.get(key) and (wrong := names.dns_1123_label(str(pod[key]))):
            yield (*at, key), f"{key} is '{pod[key]}'", wrong
    for key in ("serviceAccountName", "nodeName", "priorityClassName", "runtimeClassName"):
        if pod.get(key) and (wrong := names.dns_1123_subdomain(str(pod[key]))):
            yield (*at, key), f"{key} is '{pod[key]}'", wrong
    policies = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")
    policy = pod.get("dnsPolicy") or "ClusterFirst"
    if policy not in policies:
        yield (*at, "dnsPolicy"), f"dnsPolicy is {policy}", f"write one of {', '.join(policies)}"
    elif policy == "None" and not sequence(pod, "dnsConfig", "nameservers"):
        yield (*at, "dnsPolicy"), "dnsPolicy: None without dnsConfig.nameservers", "add a name server"
    yield from out_of_range(pod, "activeDeadlineSeconds", at, 1)
    if pod.get("shareProcessNamespace") and pod.get("hostPID"):
        yield (*at, "shareProcessNamespace"), "shareProcessNamespace with hostPID", "remove one of them"
