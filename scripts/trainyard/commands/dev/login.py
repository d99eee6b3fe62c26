"""``trainyard dev login``."""

from __future__ import annotations

from trainyard.common import options

GROUP = "publish"


@options.command(
    "Let Docker use gcloud's credentials for Artifact Registry.",
    "trainyard dev login --registry us-central1-docker.pkg.dev/my-project/ml",
)
@options.registry
@options.json_output
def command(registry: str | None, as_json: bool) -> None:
    """Set gcloud as the Docker client's credential helper for an Artifact Registry host.

    For any other registry, run 'docker login HOST'.
    """
    from trainyard.common import console
    from trainyard.oci.registry import check_address
    from trainyard.release import artifact_registry

    host = artifact_registry.login(check_address(registry))
    console.say(f"the Docker client gets its credentials for {host} from gcloud")
    console.result({"host": host}, as_json=as_json)
