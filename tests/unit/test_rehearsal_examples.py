"""The jobs of examples/jobs, which have the shape of public documents that docs/jobs/rehearse.md links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rehearsing import rehearsal_of, resolved

from trainyard.common.settings import ROOT
from trainyard_jobs import platforms
from trainyard_jobs.platforms import all_rules
from trainyard_jobs.rehearsal.model import Rehearsal
from trainyard_jobs.rules.evidence import Evidence
from trainyard_jobs.schema import job_file

JOBS = ROOT / "examples" / "jobs"
FILES = sorted(JOBS.glob("*.yaml"))


def rehearsed(name: str, folder: Path) -> Rehearsal:
    return rehearsal_of(folder, (JOBS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_rule_finds_anything_in_a_job_of_the_shape_of_a_public_document(path: Path) -> None:
    assert all_rules.check(Evidence(job_file.load(path))) == []
    assert platforms.of_job_file(job_file.load(path)).name in ("vertex", "gke")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_page_links_the_job_and_its_public_document(path: Path) -> None:
    page = (ROOT / "docs" / "jobs" / "rehearse.md").read_text(encoding="utf-8")
    assert f"examples/jobs/{path.name}" in page
    (link,) = re.findall(r"https://\S+", path.read_text(encoding="utf-8"))
    assert link in page


def test_a_worker_pool_that_is_not_in_a_list_is_the_chief(tmp_path: Path) -> None:
    (one,) = rehearsed("custom-job", tmp_path).replicas
    assert (one.name, one.command) == ("chief", None)
    assert one.arguments == ("mnist", "--datadir=gs://data/mnist", "--epochs=1", "--job-dir=gs://out/digits")
    assert list(json.loads(one.environment["CLUSTER_SPEC"])["cluster"]) == ["workerpool0"]


def test_the_pods_of_a_jobset_are_ranked_by_the_variables_that_it_sets(tmp_path: Path) -> None:
    found = rehearsed("jobset", tmp_path)
    groups = [resolved(one, tmp_path)["cluster"] for one in found.replicas]
    assert [(one["node_rank"], one["nnodes"]) for one in groups] == [(rank, 4) for rank in range(4)]
    assert {(one["master_addr"], one["master_port"]) for one in groups} == {("digits-workers-0-0.digits", 3389)}
    assert "digits-workers-0-0.digits" in found.replicas[0].aliases


def test_the_nodes_of_a_train_job_have_the_variables_of_its_runtime(tmp_path: Path) -> None:
    found = rehearsed("train-job", tmp_path)
    assert [one.environment["PET_NODE_RANK"] for one in found.replicas] == ["0", "1", "2"]
    assert {one.environment["PET_MASTER_ADDR"] for one in found.replicas} == {"hello-node-0-0.hello"}
    assert "hello-node-0-0.hello" in found.replicas[0].aliases
