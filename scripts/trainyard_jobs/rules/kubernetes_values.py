"""Rules that the API server applies to values in the pods of Jobs: probes, hooks, the content of volumes, DNS."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.rule_engine import Severity
from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import kubernetes_names as names
from trainyard_jobs.rules.job_templates import JobTemplate, job_rule
from trainyard_jobs.rules.problems import Problem, out_of_range
from trainyard_jobs.schema.kubernetes_defaults import entries, mapping, sequence

_CORE = (
    "https://github.com/kubernetes/kubernetes/blob/000f26050b9be6fb3d79fae95e06b47fc96128cd"
    "/pkg/apis/core/validation/validation.go"
)

#: Field of a container -> its values.
_CONTAINER_CHOICES = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}
_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_HOOKS = ("postStart", "preStop")
_NOT_NEGATIVE = ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold")
_HOST_PATHS = ("Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice")

#: Fields of a pod that a file of a volume can have, besides single labels and annotations.
_FILE_FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.labels",
    "metadata.annotations",
    "metadata.uid",
)

#: What of a container's resources a variable can have, besides huge pages.
_RESOURCES = tuple(
    f"{kind}.{name}" for kind in ("limits", "requests") for name in ("cpu", "memory", "ephemeral-storage")
)

#: Seconds that a pod has to end, unless it says so.
_GRACE = 30


def _choice(part: dict[str, Any], key: str, values: tuple[str, ...], at: Location) -> Iterator[Problem]:
    """The problem of a field that has none of its values; empty text is the default."""
    value = part.get(key)
    if value not in (None, "", *values):
        yield (*at, key), f"{key} is {value}", f"write {', '.join(values[:-1])} or {values[-1]}"


@job_rule(f"{_CORE} (validateContainerCommon, validateProbe, validateHandler, ValidateSecurityContext)")
def container_values_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Policies and privileges of containers are possible; probes and hooks have one action, and no negative times."""
    grace = template.pod.get("terminationGracePeriodSeconds")
    for at, container in template.all_containers():
        yield from _container(container, at, grace if isinstance(grace, int) else _GRACE)
        yield from _privileges(mapping(container, "securityContext"), (*at, "securityContext"))
        yield from _resource_fields(container, at)
        image = str(container.get("image") or "")
        if image != image.strip():
            # The template is taken, its pods are not (validateContainerOnlyForPod).
            what = f"image is '{image}', with a space at an end"
            yield (*at, "image"), what, "remove the space", Severity.CANNOT_START


def _privileges(context: dict[str, Any], at: Location) -> Iterator[Problem]:
    for key in ("runAsUser", "runAsGroup"):
        yield from out_of_range(context, key, at, 0, 2**31 - 1)
    yield from _choice(context, "procMount", ("Default", "Unmasked"), at)
    if context.get("allowPrivilegeEscalation") is False:
        added = "CAP_SYS_ADMIN" in sequence(context, "capabilities", "add")
        for what in ["privileged"] * (context.get("privileged") is True) + ["CAP_SYS_ADMIN"] * added:
            yield at, f"{what} with allowPrivilegeEscalation: false", "remove one of them"


def _resource_fields(container: dict[str, Any], at: Location) -> Iterator[Problem]:
    for here, entry in entries(container, at, "env"):
        field = mapping(entry, "valueFrom", "resourceFieldRef").get("resource")
        huge = str(field).startswith(("limits.hugepages-", "requests.hugepages-"))
        if field is not None and field not in _RESOURCES and not huge:
            what = f"{entry.get('name')} is the resource '{field}', which variables cannot have"
            yield (*here, "valueFrom"), what, f"use {', '.join(_RESOURCES)}"


def _container(container: dict[str, Any], at: Location, grace: int) -> Iterator[Problem]:
    for key, values in _CONTAINER_CHOICES.items():
        yield from _choice(container, key, values, at)
    for key in _PROBES:
        if isinstance(container.get(key), dict):
            yield from _probe(container[key], key, (*at, key))
    hooks = mapping(container, "lifecycle")
    for key in _HOOKS:
        if isinstance(hooks.get(key), dict):
            here = (*at, "lifecycle", key)
            yield from _action(hooks[key], ("exec", "httpGet", "tcpSocket", "sleep"), here)
            seconds = mapping(hooks, key, "sleep").get("seconds")
            if isinstance(seconds, int) and not 0 <= seconds <= grace:
                what = f"sleep of {seconds} s; the pod has terminationGracePeriodSeconds: {grace}"
                yield (*here, "sleep"), what, f"write 0 to {grace}, or give the pod more time"


def _probe(probe: dict[str, Any], key: str, at: Location) -> Iterator[Problem]:
    yield from _action(probe, ("exec", "httpGet", "tcpSocket", "grpc"), at)
    for name in _NOT_NEGATIVE:
        yield from out_of_range(probe, name, at, 0)
    if key != "readinessProbe" and probe.get("successThreshold") not in (None, 0, 1):
        yield (*at, "successThreshold"), f"successThreshold of a {key} is {probe['successThreshold']}", "write 1"


def _action(handler: dict[str, Any], kinds: tuple[str, ...], at: Location) -> Iterator[Problem]:
    """Problems of what a probe or hook does."""
    given = [kind for kind in kinds if handler.get(kind) is not None]
    if len(given) != 1:
        yield at, f"{len(given)} of {', '.join(kinds)}", "write one of them"
    if "exec" in given and not sequence(handler, "exec", "command"):
        yield (*at, "exec"), "exec without a command", "add command"
    for kind in ("httpGet", "tcpSocket", "grpc"):
        port = mapping(handler, kind).get("port")
        valid = 1 <= port <= 65535 if isinstance(port, int) else not names.port_name(str(port))
        if port is not None and not valid:
            yield (*at, kind, "port"), f"port is {port}", "write 1 to 65535, or the name of a port"
    yield from _choice(mapping(handler, "httpGet"), "scheme", ("HTTP", "HTTPS"), (*at, "httpGet"))


@job_rule(f"{_CORE} (validateVolumeSource)")
def volume_contents_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """Files of volumes have a key, a path below the volume and a mode; paths of hosts and servers are absolute."""
    for at, volume in entries(template.pod, template.pod_at, "volumes"):
        yield from _volume(volume, at)


def _volume(volume: dict[str, Any], at: Location) -> Iterator[Problem]:
    host, nfs = mapping(volume, "hostPath"), mapping(volume, "nfs")
    yield from _choice(host, "type", _HOST_PATHS, (*at, "hostPath"))
    if ".." in str(host.get("path", "")).split("/"):
        yield (*at, "hostPath", "path"), f"path is '{host['path']}'", "write a path without '..'"
    if nfs.get("path") and not str(nfs["path"]).startswith("/"):
        yield (*at, "nfs", "path"), f"path is '{nfs['path']}'", "write an absolute path"
    for kind in ("configMap", "secret", "downwardAPI"):
        yield from _files(mapping(volume, kind), kind, (*at, kind))
    yield from _mode(mapping(volume, "projected"), "defaultMode", (*at, "projected"))
    for where, source in entries(volume, at, "projected", "sources"):
        yield from _projection(source, where)


def _projection(source: dict[str, Any], at: Location) -> Iterator[Problem]:
    kinds = [kind for kind, value in source.items() if value is not None]
    if len(kinds) > 1:
        yield at, f"a source of {', '.join(kinds)}", "write a source for each"
    for kind in ("configMap", "secret", "downwardAPI"):
        part = source.get(kind)
        if isinstance(part, dict):
            if kind != "downwardAPI" and not part.get("name"):
                yield (*at, kind), f"{kind} without name", "add name"
            yield from _files(part, kind, (*at, kind))
    token = source.get("serviceAccountToken")
    if isinstance(token, dict):
        yield from out_of_range(token, "expirationSeconds", (*at, "serviceAccountToken"), 600, 2**32)
        if not token.get("path"):
            yield (*at, "serviceAccountToken"), "serviceAccountToken without path", "add path"


def _mode(part: dict[str, Any], key: str, at: Location) -> Iterator[Problem]:
    mode = part.get(key)
    # kubectl reads 0644 as an octal number; as a decimal one it would be too large.
    octal = isinstance(mode, int) and re.fullmatch("[0-7]{1,3}", str(mode))
    if isinstance(mode, int) and not octal and not 0 <= mode <= 0o777:
        yield (*at, key), f"{key} is {mode}", "write an octal number from 0000 to 0777"


def _files(source: dict[str, Any], kind: str, at: Location) -> Iterator[Problem]:
    """Problems of the files of a ConfigMap, Secret or of the downward API."""
    yield from _mode(source, "defaultMode", at)
    for here, item in entries(source, at, "items"):
        path = str(item.get("path") or "")
        yield from _mode(item, "mode", here)
        if not path or path.startswith("/") or ".." in path.split("/"):
            yield (*here, "path"), f"path is '{path}'", "write a path below the volume, without '..'"
        if kind != "downwardAPI":
            if not item.get("key"):
                yield here, "a file without key", "add key"
            continue
        given = [key for key in ("fieldRef", "resourceFieldRef") if item.get(key) is not None]
        if len(given) != 1:
            yield here, f"a file of {' and '.join(given) or 'no field'}", "give one of fieldRef, resourceFieldRef"
        field = str(mapping(item, "fieldRef").get("fieldPath", ""))
        single = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field)
        if given == ["fieldRef"] and field not in _FILE_FIELDS and not single:
            what = f"a file has the field '{field}', which pods do not pass to files"
            yield (*here, "fieldRef"), what, f"use {', '.join(_FILE_FIELDS)}"


@job_rule(f"{_CORE} (validatePodDNSConfig, ValidateHostAliases, validateHostUsers, validateTopologySpreadConstraints)")
def pod_values_are_valid(template: JobTemplate) -> Iterator[Problem]:
    """A pod has at most 3 name servers, no namespace of the host beside hostUsers: false, and known spread policies."""
    pod, at = template.pod, template.pod_at
    servers = sequence(pod, "dnsConfig", "nameservers")
    if len(servers) > 3:
        yield (*at, "dnsConfig", "nameservers"), f"{len(servers)} name servers", "write at most 3"
    addresses = [((*at, "dnsConfig", "nameservers", number), entry) for number, entry in enumerate(servers)]
    for here, alias in entries(pod, at, "hostAliases"):
        addresses.append(((*here, "ip"), alias.get("ip")))
        for index, host in enumerate(sequence(alias, "hostnames")):
            if wrong := names.dns_1123_subdomain(str(host)):
                yield (*here, "hostnames", index), f"a host is named '{host}'", wrong
    yield from (
        (where, f"'{entry}' is no IP address", "correct it") for where, entry in addresses if not _is_address(entry)
    )
    for here, option in entries(pod, at, "dnsConfig", "options"):
        if not option.get("name"):
            yield here, "an option without name", "add name"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get("hostUsers") is False and pod.get(key):
            yield (*at, key), f"{key} with hostUsers: false", "remove one of them"
    for here, entry in entries(pod, at, "topologySpreadConstraints"):
        least = entry.get("minDomains")
        for key in ("nodeAffinityPolicy", "nodeTaintsPolicy"):
            yield from _choice(entry, key, ("Honor", "Ignore"), here)
        if isinstance(least, int) and (least <= 0 or entry.get("whenUnsatisfiable") != "DoNotSchedule"):
            yield (*here, "minDomains"), f"minDomains is {least}", "write 1 or more, with DoNotSchedule"


def _is_address(value: object) -> bool:
    """Return whether a text is an IP address; the API server takes zeros in front of a number."""
    try:
        ipaddress.ip_address(re.sub(r"(?<![0-9a-fA-F:])0+(?=[0-9]+(\.|$))", "", str(value)))
    except ValueError:
        return False
    return True
