"""Platforms have one interface: looked up by name and by job file; what one of them cannot do is a single line."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard_jobs import platforms
from trainyard_jobs.model.request import Request
from trainyard_jobs.platforms.base import Conversion, Platform, RenderedJob
from trainyard_jobs.schema import job_file

CUSTOM_JOB = (
    "workerPoolSpecs: [{replicaCount: 1, machineSpec: {machineType: n1-standard-8}, containerSpec: {imageUri: i}}]"
)
KINDS = {
    "vertex": [CUSTOM_JOB, f"studySpec: {{}}\ntrialJobSpec: {{{CUSTOM_JOB}}}"],
    "ai-platform": ["trainingInput: {scaleTier: BASIC}"],
    "gke": ["{apiVersion: batch/v1, kind: Job, metadata: {name: x}, spec: {}}"],
}


class Minimal(Platform):
    """A platform that only writes jobs."""

    name = "minimal"

    def write(self, request: Request, file: str | None = None) -> RenderedJob:
        return RenderedJob(f"run {request.image}\n", ["run", file or self.file_name], request)


@pytest.mark.parametrize("platform", platforms.PLATFORMS, ids=lambda one: one.name)
def test_a_platform_is_found_by_its_name(platform: Platform) -> None:
    assert platforms.by_name(platform.name) is platform


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in KINDS.items() for text in texts])
def test_a_job_file_belongs_to_the_platform_that_runs_its_kind(name: str, text: str) -> None:
    assert platforms.of_job_file(job_file.parse(text, Path("job.yaml"))).name == name


def test_names_and_kinds_of_job_files_are_unique() -> None:
    names = [platform.name for platform in platforms.PLATFORMS]
    kinds = [kind for platform in platforms.PLATFORMS for kind in platform.kinds]
    assert len(set(names)) == len(names)
    assert len(set(kinds)) == len(kinds)
    assert set(kinds) == {job_file.parse(text, Path("x")).kind for texts in KINDS.values() for text in texts}


def test_what_a_platform_does_not_support_is_refused_by_default() -> None:
    job = job_file.parse(CUSTOM_JOB, Path("job.yaml"))
    minimal = Minimal()
    rendered = minimal.write(Request("x", "image"))
    assert (rendered.text, rendered.command) == ("run image\n", ["run", "job.yaml"])
    with pytest.raises(UserError, match="'--platform minimal': its jobs cannot be rehearsed"):
        minimal.rehearse(job)
    with pytest.raises(UserError, match="'--platform minimal': jobs cannot be submitted to it"):
        minimal.submit(rendered, interval=1)
    with pytest.raises(UserError, match="'--platform minimal': jobs cannot be converted to it"):
        minimal.convert(job, Conversion())


def test_every_module_of_a_platform_is_listed() -> None:
    """A new platform is a folder with a subclass of Platform in write.py, and an entry in PLATFORMS."""
    folder = ROOT / "scripts" / "trainyard_jobs" / "platforms"
    defined = {
        node.name
        for path in folder.glob("*/write.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Platform" for base in node.bases)
    }
    assert {type(platform).__name__ for platform in platforms.PLATFORMS} == defined


def test_job_and_rehearse_name_no_platform_in_their_code() -> None:
    """Only their texts do: the examples show every platform."""
    commands = ROOT / "scripts" / "trainyard_jobs" / "commands" / "job"
    job, rehearse = ((commands / f"{name}.py").read_text(encoding="utf-8") for name in ("__init__", "rehearse"))
    for platform in platforms.PLATFORMS:
        assert f"--platform {platform.name} " in job
        assert f'"{platform.name}"' not in job + rehearse
