"""``trainyard dev repository``."""

from __future__ import annotations

from trainyard.common import options

GROUP = "publish"


@options.command(
    "Create an Artifact Registry repository with a cleanup policy.",
    "trainyard dev repository --registry us-central1-docker.pkg.dev/my-project/ml",
    "trainyard dev repository --registry us-central1-docker.pkg.dev/my-project/ml-releases --immutable",
)
@options.registry
@options.flag(
    "--immutable", help="Tags can be neither moved nor deleted; promote then needs another repository (--to)."
)
@options.json_output
def command(registry: str | None, immutable: bool, as_json: bool) -> None:
    """Create the Artifact Registry repository that images are pushed to, with gcloud.

    Its cleanup policy deletes untagged images after 30 days and keeps the 20 newest. If the repository exists, only the
    policy is set.
    """
    from trainyard.common import console
    from trainyard.oci.registry import check_address
    from trainyard.release import artifact_registry

    address = check_address(registry)
    created = artifact_registry.create(address, immutable=immutable)
    console.say(f"{address}: {'created' if created else 'already exists'}, cleanup policy set")
    console.result({"repository": address, "created": created, "immutable": immutable}, as_json=as_json)
