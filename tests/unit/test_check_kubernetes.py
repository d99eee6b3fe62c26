"""What clusters take of Kubernetes objects, as their own tests and examples have it, and what no node can run.

The tables are those of :mod:`tests.unit.corpus.kubernetes`, which names the source of each.
"""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tests.unit.corpus.case import Document
from tests.unit.corpus.kubernetes import (
    CONTAINER,
    CORPUS,
    GPU,
    GPU_LABEL,
    JOB,
    JOBS,
    JOBSET_TEST,
    JOBSETS,
    MAX,
    NODES,
    POD,
    PODS,
    indexed,
    job,
    jobset,
    part,
)

from trainyard.common.errors import UserError
from trainyard.common.rule_engine import Finding, Severity
from trainyard_jobs import platforms
from trainyard_jobs.kubernetes import gke_objects
from trainyard_jobs.model import yaml_writer
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file, kubernetes_defaults


def findings(*documents: Document) -> list[Finding]:
    text = "---\n".join(yaml_writer.dump(one) for one in copy.deepcopy(documents))
    return all_rules.check(Evidence(job_file.parse(text, Path("job.yaml"))))


def failing(*documents: Document) -> list[Finding]:
    return [one for one in findings(*documents) if one.fails]


@pytest.mark.parametrize(("line", "document", "said"), JOBSETS, ids=lambda one: str(one)[:40])
def test_jobsets_are_taken_or_refused_as_by_their_definition(line: int, document: Document, said: str) -> None:
    found = failing(document)
    where = f"{JOBSET_TEST}#L{line}" if line else "definition"
    assert bool(found) == bool(said), f"{where}: {found}"
    refused = " ".join(f"{one.what} {one.remediation}" for one in found if one.severity is Severity.REFUSE)
    assert said in refused, where
    assert all(one.where.startswith("job.yaml:") and one.why and one.remediation for one in found)


@pytest.mark.parametrize(("name", "document", "said"), JOBS, ids=[name for name, *_ in JOBS])
def test_jobs_are_taken_or_refused_as_by_their_schema(name: str, document: Document, said: str) -> None:
    found = failing(document)
    assert bool(found) == bool(said), found
    assert said in " ".join(f"{one.what} {one.remediation}" for one in found if one.severity is Severity.REFUSE)


def test_defaults_of_a_jobset_are_those_of_its_webhook() -> None:
    """pkg/webhooks/jobset_webhook_test.go, lines 56, 94, 296 and 341."""
    given = jobset(part(), part("b", completionMode="NonIndexed", pod=POD))
    before = copy.deepcopy(given)
    found = kubernetes_defaults.jobset(given)["spec"]
    first, second = (one["template"]["spec"] for one in found["replicatedJobs"])
    assert (first["completionMode"], first["template"]["spec"]["restartPolicy"]) == ("Indexed", "OnFailure")
    assert (second["completionMode"], second["template"]["spec"]["restartPolicy"]) == ("NonIndexed", "Never")
    assert given == before


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({}, {"completions": 1, "parallelism": 1, "backoffLimit": 6, "completionMode": "NonIndexed"}),
        ({"completions": 3}, {"completions": 3, "parallelism": 1}),
        ({"parallelism": 3}, {"parallelism": 3}),
        ({"backoffLimitPerIndex": 1}, {"backoffLimit": MAX}),
    ],
)
def test_defaults_of_a_job_are_those_of_the_api_server(spec: Document, wanted: Document) -> None:
    """https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/v1/defaults_test.go"""
    found = kubernetes_defaults.job_spec(spec)
    assert {key: found[key] for key in wanted} == wanted
    assert ("completions" in found) == ("completions" in wanted or "parallelism" not in spec)


@pytest.mark.parametrize(("document", "said"), PODS, ids=[said or f"valid {n}" for n, (_, said) in enumerate(PODS)])
def test_pods_are_taken_or_refused_as_by_their_schema_and_accelerators(document: Document, said: str) -> None:
    found = failing(document)
    assert bool(found) == bool(said), found
    assert said in " ".join(f"{one.what} {one.remediation}" for one in found)


TWO = [CONTAINER | {"name": name, "ports": [{"containerPort": 8471}]} for name in ("a", "b")]
SHARED = job(pod={"hostNetwork": True, "containers": TWO})


def test_a_port_of_the_hosts_network_that_two_containers_use_cannot_start() -> None:
    """The template is taken (the case "valid hostnet"); the pod gets hostPort from containerPort, and is refused."""
    (found,) = failing(SHARED)
    assert found.severity is Severity.CANNOT_START and "8471" in found.what
    assert failing(job(pod={"containers": TWO})) == []


@pytest.mark.parametrize(
    ("document", "said", "fails"),
    [
        ({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a.b"}}, "", False),
        ({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "a:b"}, "rules": []},
         "", False),
        ({"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": "q"},
          "spec": {"clusterQueue": "c"}}, "LocalQueue of kueue.x-k8s.io/v1beta1 is not checked", False),
        ({"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "q"}, "spec": {"tasks": []}},
         "Job of batch.volcano.sh/v1alpha1 is not checked", False),
        ({"apiVersion": "apps/v1", "kind": "Jobb", "metadata": {"name": "q"}}, "has no Jobb of apps/v1", True),
    ],
)  # fmt: skip
def test_other_objects_of_the_file_are_checked_if_their_kind_is_known(
    document: Document, said: str, fails: bool
) -> None:
    found = findings(document, JOB)
    assert said in " ".join(one.what for one in found)
    assert bool(found) == bool(said)
    assert any(one.fails for one in found) == fails


@pytest.mark.parametrize(("document", "severity", "said"), NODES, ids=[f"{n} {one[2]}" for n, one in enumerate(NODES)])
def test_nodes_that_cannot_exist_are_found(document: Document, severity: Severity | None, said: str) -> None:
    found = findings(document)
    assert [one for one in found if one.fails and severity is not Severity.CANNOT_START] == []
    assert {str(one.severity) for one in found if said and said in f"{one.what} {one.remediation}"} == (
        {str(severity)} if severity else set()
    ), found
    assert severity or not found, found


def test_labels_of_a_required_affinity_count_as_selected() -> None:
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [{"matchExpressions": [{"key": GPU_LABEL, "operator": "In", "values": ["nvidia-l4"]}]}]
    pod = {"affinity": {"nodeAffinity": {key: {"nodeSelectorTerms": terms}}}}
    document = job(pod=pod, container={"resources": {"limits": {GPU: 9}}})
    assert "requests 9 GPUs" in failing(document)[0].what


def test_a_jobset_with_retries_and_an_indexed_job_of_independent_work_only_have_notes() -> None:
    work = indexed(100, parallelism=10, backoffLimitPerIndex=2)
    retried = jobset(part(completions=4, parallelism=4, backoffLimit=3))
    for document in (work, retried):
        found = findings(document)
        assert found and not any(one.fails for one in found)


@pytest.mark.parametrize("name", CORPUS)
def test_manifests_in_use_have_no_failing_finding(name: str) -> None:
    assert failing(*CORPUS[name]) == []


@pytest.mark.parametrize("name", [name for name in CORPUS if name.startswith(("xpk", "GKE's"))])
def test_no_rule_needs_the_order_of_keys_or_a_field_that_may_be_missing(name: str) -> None:
    """The same objects without labels, annotations, tolerations and ports are no more refused than with them."""
    for document in (documents := copy.deepcopy(CORPUS[name])):
        _strip(document)
    assert failing(*reversed(documents)) == []


def _strip(node: Any) -> None:
    for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _strip(value)
    if isinstance(node, dict):
        for key in ("tolerations", "ports", "annotations", "labels", "env"):
            node.pop(key, None)


# --- quantities and names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), (8, 8), ("500m", Fraction(1, 2)), ("1Ki", 1024), ("1.5Gi", 1610612736), ("1e3", 1000), ("1E", 10**18),
     ("1E2", 100), (".5", Fraction(1, 2)), ("5.", 5), ("+1k", 1000), ("-1", -1), (0.5, Fraction(1, 2)),
     ("", None), ("four", None), ("1 Gi", None), ("1gb", None), ("1KI", None), (True, None), ("0x1", None)],
)  # fmt: skip
def test_quantities(text: object, value: Fraction | None) -> None:
    """https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity"""
    assert gke_objects.quantity(text) == value


def test_names_that_are_written_are_valid_in_every_object() -> None:
    """JobSets, Services and TPU VMs need a letter first."""
    for name in ("1run", "My job_1!", "9" * 80, "a" * 80, "x", "2024-05-01"):
        found = f"{gke_objects.object_name(name)}-slice-999-999-abcde"
        assert re.fullmatch("[a-z][-a-z0-9]{,61}[a-z0-9]", found), found
    assert gke_objects.object_name("1run") == "job-1run"
    with pytest.raises(UserError, match="no letter"):
        gke_objects.object_name("--")


def test_every_rule_about_kubernetes_objects_has_a_fault_here() -> None:
    faulty = [*(one for _, one, _ in (*JOBSETS, *JOBS)), *(one for one, _ in PODS), *(one for one, *_ in NODES)]
    # In test_check_job.py, test_image_gpus.py, test_check_train_job.py and test_check_server.py.
    other = {"no_ambiguous_yaml_words", "spot_grace_period_fits", "nodes_have_the_driver", "cluster_takes_the_objects"}
    own = {one.id for one in platforms.RULES if one.subjects == ("gke",) and not one.id.startswith("train_job_")}
    assert {finding.rule for one in (*faulty, SHARED) for finding in findings(one)} >= own - other
