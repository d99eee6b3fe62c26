"""The accelerator types that the fake Cloud TPU API offers, written down from Google's documentation.

They are not read from scripts/trainyard_jobs/model/machines.yaml: a mistake there would then be accepted here too.

Zones: https://cloud.google.com/tpu/docs/regions-zones
Hosts: https://cloud.google.com/tpu/docs/v4 and https://cloud.google.com/tpu/docs/v5e ("Number of VMs" of each topology)
Software versions for PyTorch and JAX: https://cloud.google.com/tpu/docs/runtimes
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TpuType:
    """An accelerator type: the number of its TPU VMs, the zones that have it, and the runtime versions for it."""

    accelerator_type: str
    hosts: int
    zones: tuple[str, ...]
    runtime_versions: tuple[str, ...]


_V4 = (("us-central2-b",), ("tpu-ubuntu2204-base",))
_V5E = (
    ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a", "europe-west4-b"),
    ("v2-alpha-tpuv5-lite", "tpu-ubuntu2204-base"),
)

#: Name -> accelerator type.
TYPES = {
    each.accelerator_type: each
    for each in (
        TpuType("v4-8", 1, *_V4),
        TpuType("v4-16", 2, *_V4),
        TpuType("v4-32", 4, *_V4),
        TpuType("v5litepod-4", 1, *_V5E),
        TpuType("v5litepod-8", 1, *_V5E),
        TpuType("v5litepod-16", 4, *_V5E),
    )
}

#: Zones that the API knows.
ZONES = {zone for each in TYPES.values() for zone in each.zones}
