"""The images that a job file names, in documents of any kind, and where it leaves images to others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainyard.spec.yaml_source import Location
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.rules.fields import walk
from trainyard_jobs.schema.job_file import JobFile
from trainyard_jobs.schema.kubernetes_defaults import mapping

#: Keys of a container or of a list of containers: in pods, Argo Workflows, Tekton's tasks and TrainJobs.
_CONTAINERS = {
    "container", "containers", "ephemeralContainers", "initContainers", "script", "sidecars", "stepTemplate", "steps",
    "trainer",
}  # fmt: skip

#: Keys of the names of other objects with images: of Kubeflow Trainer, Tekton and Argo Workflows.
_OBJECTS = {"pipelineRef", "runtimeRef", "taskRef", "templateRef", "workflowTemplateRef"}

#: What no reference of an image has, but expressions and patterns of custom resources have.
_TO_FILL_IN = re.compile(r"[{$*]")

#: ``file:line`` of an image and its reference, or of what may have other images and words about it.
Place = tuple[str, str]


def look(job: JobFile) -> tuple[list[Place], list[Place]]:
    """Return the images of all documents of a file, and what names images that are not in the file."""
    images: list[Place] = []
    others: list[Place] = []
    names = {str(mapping(document.get("metadata")).get("name")) for document in job.documents}
    for number, document in enumerate(job.documents):
        group = str(document.get("apiVersion", "")).rpartition("/")[0]
        custom = "." in group and not group.endswith("k8s.io")
        found = list(_named(document))
        for location, value in found:
            at, key = job.where(location, number), location[-1]
            if key == gke_objects.BUCKET_VOLUMES:
                others.append((at, "GKE adds the sidecar of Cloud Storage FUSE to the pod"))
            elif key not in _OBJECTS and not (custom and _TO_FILL_IN.search(value)):
                images.append((at, value))
            elif key not in _OBJECTS:
                others.append((at, f"{value} is an image only after something is filled in"))
            elif value not in names:
                others.append((at, f"{key} {value} is not in this file"))
        # Kubernetes' own kinds without an image, such as a Service, have none.
        if not found and (custom or job.kind != "gke"):
            others.append((job.where((), number), f"this {document.get('kind', 'job')} names no image"))
    return images, others


def _named(document: object) -> Iterator[tuple[Location, str]]:
    """Yield the location and the value of everything in a document that names an image or an object with images."""
    for location, value in walk(document):
        *above, name = location
        # The key of the mapping, or of the list of mappings, that the value is in.
        key = next((step for step in reversed(above) if isinstance(step, str)), "")
        if name in _OBJECTS or (name == gke_objects.BUCKET_VOLUMES and key == "annotations"):
            yield location, str(mapping(value).get("name", value))
        elif (
            isinstance(value, str)
            and value
            and (
                name in ("imageUri", "executorImageUri")
                or (name == "image" and key in _CONTAINERS)
                or (name == "reference" and key == "image" and "volumes" in above[-3:])
            )
        ):
            yield location, value
