"""Find what a template leaves to fill in: Helm's tags, ``${VAR}``, ``<X>``, REPLACE_WITH_X, PROJECT_ID.

Text of programs can have all of these: commands, arguments, variables, scripts, annotations. There, only what no
program has is found; elsewhere, what no platform takes there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainyard.common.errors import UserError, one_line
from trainyard.spec import yaml_source
from trainyard_jobs.rules import fields
from trainyard_jobs.schema import kinds, kubernetes
from trainyard_jobs.schema.job_file import JobFile, camel

#: Keys, in camelCase, below which text is a program's or for people.
_PROGRAM = {
    "annotations", "args", "binaryData", "categoricalValueSpec", "categoricalValues", "command", "containerArgs",
    "data", "description", "displayName", "entrypoint", "env", "httpHeaders", "rayStartParams", "runtimeEnvYAML",
    "script", "stringData",
}  # fmt: skip

#: Keys of names and images: in these, no platform takes brackets, ``$`` and capitals.
_NAMES = {
    "bucketName", "claimName", "executorImageUri", "generateName", "hostname", "image", "imageUri", "machineType",
    "name", "namespace", "network", "persistentResourceId", "priorityClassName", "secretName", "serviceAccount",
    "serviceAccountName", "storageClassName", "subdomain",
}  # fmt: skip

#: Keys of numbers, whose value is no word; and prefixes of labels of nodes, whose values have no capitals.
_NUMBERS = {
    "acceleratorCount", "backoffLimit", "bootDiskSizeGb", "completions", "google.com/tpu", "maxRestarts", "numNodes",
    "numSlices", "nvidia.com/gpu", "parallelism", "replicaCount", "replicas", "size",
}  # fmt: skip
_LABELS = ("cloud.google.com/", "node.kubernetes.io/", "kueue.x-k8s.io/")

#: Words of the placeholders of documents, such as PROJECT_ID and BUCKET_NAME.
_WORDS = (
    "ACCELERATOR|ACCOUNT|BUCKET|CLAIM|CLUSTER|COUNT|ID|IMAGE|LOCATION|MACHINE|MY|NAME|NAMESPACE|NETWORK|NUM|NUMBER|PATH|"
    "PLACEHOLDER|PROJECT|PVC|QUEUE|REGION|REGISTRY|REPO|REPOSITORY|SECRET|TAG|TOPOLOGY|TYPE|URI|URL|USER|USERNAME|YOUR|ZONE"
)
# Patterns take linear time: what begins a placeholder ends the search for the end of the one before it.
_CAPITALS = re.compile(r"(?<![A-Za-z0-9])[A-Z0-9]+(?:_[A-Z0-9]+)*(?![A-Za-z0-9])")
_REST = r"(?:(?!\{[{%]).)*?"
_CHART = rf"\{{\{{-?\s*(?:\.(?:Values|Release|Chart)|include|toYaml)\b{_REST}\}}\}}"
_SURE = r"\bREPLACE_(?:WITH|ME)\w*|\b\w*PLACEHOLDER\w*|\bYOUR_\w+|\bCHANGE_?ME\b|\b__[A-Z]\w*__\b"
_ANYWHERE = re.compile(rf"\$\{{[^{{}}]*\}}|<[A-Za-z][^<>]*>|\{{\{{{_REST}\}}\}}|\{{%{_REST}%\}}|{_SURE}")
_IN_NAMES = re.compile(r"\$\w+|\$\([^()]*\)|\{[\w.-]+\}|\[[\w .-]+\]|%\w+%|@\w+@|(?<!_)__\w+__")
#: In text of programs: only in a single word, which is no script.
_IN_PROGRAMS = re.compile(rf"\bREPLACE_WITH_\w+|<[Yy](?:our|OUR)[ _-][^<>]*>|\bYOUR_[A-Z0-9_]+|{_CHART}")
#: In a file that is no YAML because of it.
_IN_TEXT = re.compile(
    rf"{_CHART}|\{{\{{-?\s*(?:if|else|end|range|with)\b{_REST}\}}\}}|"
    rf"(?:^|: |- )\s*(\{{\{{{_REST}\}}\}})|\{{%{_REST}%\}}"
)


class TemplateError(UserError):
    """A template of a job: something in it is to be filled in."""


def refuse(found: Iterator[tuple[int | None, str]], where: str) -> None:
    """Raise an error that names what is to be filled in, if something is.

    Args:
        found: (line, text) of each place.
        where: name of the file.
    Raises:
        TemplateError: something is.
    """
    places: dict[str, int] = {}
    for line, text in found:
        places.setdefault(text, line or 1)
    if not places:
        return
    named = [f"{one_line(text)[:60]} at line {line}" for text, line in places.items()]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    raise TemplateError(f"{where}:{min(places.values())}: a template: fill in {', '.join(named[:3])}{more}")


def in_job(job: JobFile) -> Iterator[tuple[int | None, str]]:
    """Yield (line, text) of what is to be filled in in a file that can be read as a job."""
    for number, node in enumerate(job.nodes):
        document = job.documents[number]
        if job.kind == "gke" and kubernetes.is_custom(document) and not kinds.kind_of(document):
            continue  # such as a workflow, whose expressions look the same
        for location, value in fields.walk(node):
            # {{X}} without quotes is a mapping for a key.
            key = re.match(r"(?:ordereddict\(\[\(|\{)'(.+?)'", str(location[-1]))
            found = f"{{{{ {key[1]} }}}}" if key else _in_value(location, value) if isinstance(value, str) else ""
            if found:
                yield yaml_source.line_of(node, location), found


def _in_value(location: tuple[Any, ...], text: str) -> str:
    """Return the first part of a value that is to be filled in; empty without one."""
    keys = [camel(step) for step in location if isinstance(step, str)]
    key = keys[-1] if keys else ""
    if _PROGRAM & set(keys):
        match = _IN_PROGRAMS.search(text)
        return match[0] if match and ("{{" in match[0] or not re.search(r"\s", text.replace(match[0], ""))) else ""
    match = _ANYWHERE.search(text)
    if not match and (key in _NAMES or key.startswith(_LABELS)):
        match = _IN_NAMES.search(text)
    if not match and key in _NUMBERS:
        match = re.fullmatch(r"[A-Z][A-Z0-9_]+", text)
    if not match:
        # No tag of an image, and of a path in Cloud Storage only the bucket.
        path = re.match(r"(?:gs://|projects/)[^/]*", text)
        plain = path[0] if path else re.sub(r"@.*|:[^/:]*$", "", text) if "mage" in key else text
        words = _CAPITALS.finditer(plain) if path or key in _NAMES or key.startswith(_LABELS) else ()
        match = next((word for word in words if re.search(rf"(?:^|_)(?:{_WORDS})(?:_|$)", word[0])), None)
    return match[0] if match else ""


def in_text(text: str, error: str) -> Iterator[tuple[int | None, str]]:
    """Yield (line, text) of what is to be filled in in a text that is not YAML, as ``error`` says."""
    lines = [line if not line.lstrip().startswith("#") else "" for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        for match in _IN_TEXT.finditer(line):
            yield number, match[1] or match[0]
    at = re.search(r":(\d+): not valid YAML", error)
    for number in range(int(at[1]) - 1, int(at[1]) + 1) if at else ():
        line = lines[number - 1] if 0 < number <= len(lines) else ""
        if placeholder := _ANYWHERE.search(line) or re.search(r"(?<=: )[@%]\w+[@%]", line):
            yield number, placeholder[0]
