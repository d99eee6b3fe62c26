"""The project's cloudbuild.yaml, submitted with the real gcloud to a fake of Cloud Build that runs its steps.

Not beside other tests: test_miniature.py builds the same target with the same engine.
"""

from __future__ import annotations

import base64
import json

import pytest
from tests.cloud.test_cloud_build import (  # noqa: F401  fixtures
    Gcloud,
    cloud,
    gcloud,
    local_registry,
    nothing_is_left,
)
from tests.engine import CONTEXT, ENGINE
from tests.fakes.cloud_build import PROJECT, CloudBuild
from tests.miniature import Miniature

from trainyard.common.settings import ROOT
from trainyard.image import base_image
from trainyard.oci import attached_sbom, image_index, registry
from trainyard.release import claims


@pytest.mark.parametrize("target", ["mini", pytest.param("tf-cpu", marks=pytest.mark.slow("with mini"))])
@pytest.mark.needs("gcloud")
def test_the_projects_cloudbuild_yaml_builds_verifies_and_pushes_a_target(
    target: str,
    miniature: Miniature,
    gcloud: Gcloud,  # noqa: F811
    cloud: CloudBuild,  # noqa: F811
    local_registry: str,  # noqa: F811
) -> None:
    """It takes 50 s with cached layers and 5 minutes without them (tf-cpu, 2 cores, 2026-11).

    Under emulation, training for linux/arm64 would take 17 minutes more.
    """
    checkout = miniature.folder if target == "mini" else ROOT
    address = f"{local_registry}/{PROJECT}/round-trip"
    resolved = base_image.resolve(CONTEXT, "debian-13")
    own_base = resolved.reference if resolved.note else ""  # without Docker Hub: the bootstrapped base, for all steps
    given = {
        "_TARGETS": target,
        "_PLATFORMS": "linux/amd64",
        "_REGISTRY": address,
        "_TAG": "rehearsal",
        "_BASE": own_base,
        "_PROMOTE": "yes",
        "_REVISION": "a" * 40,
    }
    substitutions = ",".join(f"{name}={value}" for name, value in given.items())
    words = [f"--config={checkout / 'cloudbuild.yaml'}", "--region=us-central1", f"--substitutions={substitutions}"]
    found = gcloud("builds", "submit", str(checkout), *words, timeout=880)
    (build,) = cloud.builds.values()
    assert found.returncode == 0, found.stderr + "\n".join(build.log[-30:])
    steps = {step["id"]: step for step in build.resource["steps"]}
    assert {step["status"] for step in steps.values()} == {"SUCCESS"}
    trained = steps[f"smoke-{target}"]["timing"]["endTime"]
    assert trained < steps["publish"]["timing"]["startTime"]
    output = base64.b64decode(build.resource["results"]["buildStepOutputs"][list(steps).index("publish")])
    image = json.loads(output)[target]
    words = [build.resource["id"], "--region=us-central1", "--format=value(results.buildStepOutputs[-2])"]
    shown = gcloud("builds", "describe", *words).stdout  # the command of docs/cloud-build.md
    assert base64.b64decode(shown) == output
    assert registry.digest_of(ENGINE, image["tag"]) == image["digest"]
    assert registry.digest_of(ENGINE, f"{address}/trainyard:{target}-rehearsal") == image["digest"]
    repository = registry.Repository(f"{address}/trainyard")
    members = image_index.members(repository, repository.existing(image["digest"]))
    assert list(members) == ["linux/amd64"]
    member = members["linux/amd64"]
    assert claims.passed(repository, member.digest)
    assert attached_sbom.document(repository, member.digest)
    labels = repository.config(member)["config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == "a" * 40
    assert (
        registry.digest_of(ENGINE, f"{address}/trainyard:{labels['org.opencontainers.image.version']}") == member.digest
    )
    assert registry.digest_of(ENGINE, f"{address}/trainyard:{target}") == image["digest"], "promoted by a step"
    log = "\n".join(build.log)
    assert "xla is not among _TARGETS: nothing to do" in log
    assert "linux/arm64 is not among _PLATFORMS: nothing to do" in log
    assert "the image index has no linux/arm64" in log
    assert nothing_is_left()
