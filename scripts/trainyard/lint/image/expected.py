"""What an image must hold: the contents of the layers that were built from its spec on this host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainyard.image import plan
from trainyard.oci import layer_contents
from trainyard.oci.layer_contents import Contents, Item
from trainyard.spec import naming, state
from trainyard.spec.model import Spec
from trainyard.spec.state import BuildResult


@dataclass(frozen=True)
class Expected:
    """The layers of a build, which may be that of the image or another one of the same spec.

    Attributes:
        layers: diff id -> contents, bottom first.
    """

    layers: Mapping[str, Contents]

    def entries(self) -> dict[str, tuple[Item, ...]]:
        """Path -> what the layers hold there, bottom first."""
        return layer_contents.union(self.layers.values())


def of(spec: Spec, digest: str) -> Expected | None:
    """What an image of a spec must hold; None if this host has no build of the spec, or could not read its layers.

    Args:
        digest: of the image.
    """
    own = state.recall(spec.kept, "build", digest)
    record = own if own and own.get("layers") else _of_same_inputs(spec)
    if record is None:
        return None
    found = {diff_id: layer_contents.recall(spec.context.state, diff_id) for diff_id in record["layers"]}
    known = {diff_id: contents for diff_id, contents in found.items() if contents is not None}
    return Expected(known) if len(known) == len(found) else None


def _of_same_inputs(spec: Spec) -> BuildResult | None:
    """The last build of what the spec, its locks and its code are now."""
    for record in state.builds(spec.kept):
        base = record["base"]
        made_of = plan.content_hash(spec, record["index"], base.partition("@")[2] or base)
        if record.get("layers") and naming.day_and_hash(record["tag"])[1] == made_of:
            return record
    return None
