"""The digest of a base is read from a real registry."""

from __future__ import annotations

import subprocess

from tests.image.registry import running
from trainyard.image import base_image
from trainyard.oci import docker_engine


def test_a_base_has_the_digest_that_its_registry_gives_its_tag() -> None:
    """Of a manifest, as of upstream's nightly, and of an index, as of Debian's images."""
    image = docker_engine.client().images.get(base_image.resolve("debian-12").reference)
    with running.container() as server:
        manifest, index = (f"{running.address(server)}/base:{name}" for name in ("manifest", "index"))
        image.tag(manifest)
        try:
            docker_engine.client().images.push(manifest)
        finally:
            docker_engine.untag(manifest)
        subprocess.run(
            ["docker", "buildx", "imagetools", "create", f"--tag={index}", manifest], capture_output=True, check=True
        )
        assert base_image._registry_digest(manifest) == (image.id, "")
        digest, _ = base_image._registry_digest(index)
        assert digest is not None and digest.startswith("sha256:") and digest != image.id
        assert base_image._registry_digest(f"{running.address(server)}/base:none") == (None, "not found")
