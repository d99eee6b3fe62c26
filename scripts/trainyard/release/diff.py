"""Compare two images: packages, labels, environment, layers, and the bytes that have to be downloaded.

Images at a registry are not pulled: only the manifest, the configuration and the SBOM that `make push` attached are
fetched. For an image without an SBOM, the layers that only one of the two images has are read for their packages.
"""

from __future__ import annotations

import logging
from typing import Any

from rich.table import Column, Table

from trainyard.oci import inventory
from trainyard.oci.attached_sbom import InstalledPackage
from trainyard.oci.inventory import Image, LayerSummary
from trainyard.spec.units import in_units

logger = logging.getLogger(__name__)

#: Settings of an image that are compared, in addition to labels and environment.
SETTINGS = ("Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts", "Volumes", "StopSignal")


def changes(one: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    """Return ``added`` and ``removed`` (key -> value), ``changed`` (key -> [before, after]), each sorted by key."""
    return {
        "added": {key: other[key] for key in sorted(other.keys() - one.keys())},
        "removed": {key: one[key] for key in sorted(one.keys() - other.keys())},
        "changed": {key: [one[key], other[key]] for key in sorted(one.keys() & other.keys()) if one[key] != other[key]},
    }


def packages(a: Image, b: Image) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return changes of Python and of Debian packages.

    If the packages of an image are not known, the layers that only one of the two images has are read: the packages of
    common layers are the same.
    """
    both = [_listed(image) for image in (a, b)]
    if both[0] is not None and both[1] is not None:
        pairs = list(zip(both[0], both[1], strict=True))
    else:
        common = {layer.diff_id for layer in a.layers} & {layer.diff_id for layer in b.layers}
        own = {}
        for image in (a, b):
            apart = [layer for layer in image.layers if layer.diff_id not in common]
            _read(image, apart)
            own[image.reference] = [layer.diff_id for layer in apart]
        debian = [image.debian(own[image.reference]) for image in (a, b)]
        if bool(debian[0]) != bool(debian[1]):  # one of the lists is in a layer that both have
            for image in (a, b):
                _read(image, list(image.layers))
            debian = [image.debian() for image in (a, b)]
        pairs = [(a.python(own[a.reference]), b.python(own[b.reference])), (debian[0], debian[1])]
    python, debs = (
        changes(*({name: package.version for name, package in packages.items()} for packages in pair)) for pair in pairs
    )
    return python, debs


def _listed(image: Image) -> tuple[dict[str, InstalledPackage], dict[str, InstalledPackage]] | None:
    """Return Python and Debian packages of an image; None if they are not known without reading its layers."""
    return (image.python(), image.debian()) if image.repository is None else image.listed


def _read(image: Image, wanted: list[LayerSummary]) -> None:
    missing = [layer for layer in wanted if layer.diff_id not in image.layer_contents]
    if missing and image.repository:
        size = in_units(sum(layer.stored for layer in missing))
        logger.info(f"{image.reference} has no SBOM attached: reading {size} of layers for their packages")
        inventory.fetch(image, image.repository, missing)


def layers(a: Image, b: Image) -> list[dict[str, Any]]:
    """Return the layers in rows: ``name``, ``a`` and ``b`` (``stored`` and ``size``, or None), ``same``."""
    rows: list[dict[str, Any]] = []
    left = list(a.layers)
    for layer in b.layers:
        twin = next((one for one in left if one.diff_id == layer.diff_id), None)
        twin = twin or next((one for one in left if one.name == layer.name), None)
        while twin and left and left[0] is not twin:  # in A only
            rows.append({"name": left[0].name, "a": _sizes(left.pop(0)), "b": None, "same": False})
        if twin:
            left.remove(twin)
        same = twin is not None and twin.diff_id == layer.diff_id
        rows.append({"name": layer.name, "a": _sizes(twin), "b": _sizes(layer), "same": same})
    return rows + [{"name": layer.name, "a": _sizes(layer), "b": None, "same": False} for layer in left]


def _sizes(layer: LayerSummary | None) -> dict[str, int | None] | None:
    return None if layer is None else {"stored": layer.stored, "size": layer.size}


def download(a: Image, b: Image) -> int:
    """Return bytes that a host with A downloads to get B: the blobs that A lacks, with configuration and manifest.

    The digests of layers are unknown if the engine does not keep blobs; then the uncompressed layers are compared.
    """
    have = {layer.digest or layer.diff_id for layer in a.layers} | a.documents.keys()
    moved = sum(layer.stored for layer in b.layers if (layer.digest or layer.diff_id) not in have)
    return moved + sum(size for digest, size in b.documents.items() if digest not in have)


def diff(a: Image, b: Image) -> dict[str, Any]:
    """Return everything that differs.

    Returns:
        ``a`` and ``b`` (``reference``, ``digest``, ``stored`` in bytes), ``python``, ``debian``, ``labels``,
        ``environment``, ``settings`` (each as :func:`changes`), ``layers`` (:func:`layers`), ``download`` in bytes.
    """
    python, debian = packages(a, b)
    settings = [{key: str(image.settings[key]) for key in SETTINGS if image.settings.get(key)} for image in (a, b)]
    return {
        "a": {"reference": a.reference, "digest": a.digest, "stored": a.stored},
        "b": {"reference": b.reference, "digest": b.digest, "stored": b.stored},
        "python": python,
        "debian": debian,
        "labels": changes(a.labels, b.labels),
        "environment": changes(a.environment, b.environment),
        "settings": changes(settings[0], settings[1]),
        "layers": layers(a, b),
        "download": download(a, b),
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the result for people."""
    shown = []
    for what in ("python", "debian", "labels", "environment", "settings"):
        part = found[what]
        table = Table(what, Column("A", overflow="fold"), Column("B", overflow="fold"))
        for name, value in part["removed"].items():
            table.add_row(name, value, "-", style="red")
        for name, value in part["added"].items():
            table.add_row(name, "-", value, style="green")
        for name, (before, after) in part["changed"].items():
            table.add_row(name, before, after)
        if table.row_count:
            shown.append(table)
    table = Table("layer", "A", "compressed", "B", "compressed", "")
    for row in found["layers"]:
        cells = []
        for side in ("a", "b"):
            sizes = row[side]
            size = "" if not sizes or sizes["size"] is None else in_units(sizes["size"])
            cells += [size, in_units(sizes["stored"])] if sizes else ["-", "-"]
        table.add_row(row["name"], *cells, "the same" if row["same"] else "", style="dim" if row["same"] else None)
    return [*shown, table]
