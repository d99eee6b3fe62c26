"""What changes from one image to another: packages, labels, environment, layers, and the bytes that have to be loaded.

    make diff A=trainyard:tf-cpu-2.21.0-20261120-0123abcd B=trainyard:tf-cpu
    make diff A=localhost:5000/ml/trainyard:xla B=trainyard:xla-candidate

A and B are images of this host or at a registry. Of those, nothing is pulled: the manifest and the configuration are
fetched, and the SBOM that `make push` left beside the image; without one, the layers that only one of the two has are
read for their packages.
"""

from __future__ import annotations

import os
from typing import Any

from rich.table import Column, Table

from scripts import cli
from scripts.cli import UserError, log, say
from scripts.stored import contents
from scripts.stored.contents import Image, Layer, Package
from scripts.units import in_units

#: What of an image's settings is compared beside labels and environment.
SETTINGS = ("Entrypoint", "Cmd", "User", "WorkingDir", "ExposedPorts", "Volumes", "StopSignal")


def changes(one: dict[str, str], other: dict[str, str]) -> dict[str, Any]:
    """``added`` and ``removed`` (key -> value), ``changed`` (key -> [before, after]), each sorted by key."""
    return {
        "added": {key: other[key] for key in sorted(other.keys() - one.keys())},
        "removed": {key: one[key] for key in sorted(one.keys() - other.keys())},
        "changed": {key: [one[key], other[key]] for key in sorted(one.keys() & other.keys()) if one[key] != other[key]},
    }


def _versions(packages: dict[str, Package]) -> dict[str, str]:
    return {name: package.version for name, package in packages.items()}


def packages(a: Image, b: Image) -> tuple[dict[str, Any], dict[str, Any]]:
    """Changes of Python and of Debian packages.

    Where both lists are known they are compared as they are; otherwise those layers are read that only one of the two
    images has, since the packages of a layer that both have are the same.
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
    python, debs = (changes(_versions(one), _versions(other)) for one, other in pairs)
    return python, debs


def _listed(image: Image) -> tuple[dict[str, Package], dict[str, Package]] | None:
    """Python and Debian packages of an image, as far as they are known without reading more of it."""
    return (image.python(), image.debian()) if image.repository is None else image.listed


def _read(image: Image, wanted: list[Layer]) -> None:
    missing = [layer for layer in wanted if layer.diff_id not in image.held]
    if missing:
        size = in_units(sum(layer.stored for layer in missing))
        say(f"{image.reference} has no SBOM beside it: reading {size} of layers for their packages")
        contents.fetch(image, missing)


def layers(a: Image, b: Image) -> list[dict[str, Any]]:
    """The layers side by side: ``name``, ``a`` and ``b`` (``stored`` and ``size``; None if it has none), ``same``."""
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


def _sizes(layer: Layer | None) -> dict[str, int | None] | None:
    return None if layer is None else {"stored": layer.stored, "size": layer.size}


def download(a: Image, b: Image) -> int:
    """Bytes that a host with A loads to get B: blobs that A has not, configuration and manifest included.

    An engine that keeps no blobs tells no digests: there the uncompressed layers are compared.
    """
    have = {layer.digest or layer.diff_id for layer in a.layers} | a.documents.keys()
    moved = sum(layer.stored for layer in b.layers if (layer.digest or layer.diff_id) not in have)
    return moved + sum(size for digest, size in b.documents.items() if digest not in have)


def diff(a: Image, b: Image) -> dict[str, Any]:
    """Everything that differs.

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


def shown(found: dict[str, Any]) -> list[Table]:
    """The result for people."""
    tables = []
    for what in ("python", "debian", "labels", "environment", "settings"):
        part = found[what]
        table = Table(what, *(Column(side, overflow="fold") for side in ("A", "B")))
        for name, value in part["removed"].items():
            table.add_row(name, value, "-", style="red")
        for name, value in part["added"].items():
            table.add_row(name, "-", value, style="green")
        for name, (before, after) in part["changed"].items():
            table.add_row(name, before, after)
        if table.row_count:
            tables.append(table)
    table = Table("layer", "A", "packed", "B", "packed", "")
    for row in found["layers"]:
        cells = []
        for side in ("a", "b"):
            sizes = row[side]
            cells += ["-", "-"] if sizes is None else [_cell(sizes["size"]), _cell(sizes["stored"])]
        table.add_row(row["name"], *cells, "the same" if row["same"] else "", style="dim" if row["same"] else None)
    return [*tables, table]


def _cell(size: int | None) -> str:
    return "" if size is None else in_units(size)


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("a", nargs="?", default=os.environ.get("A"), help="the one image; or A")
    parser.add_argument("b", nargs="?", default=os.environ.get("B"), help="the other image; or B")
    options = parser.parse_args(arguments)
    if not options.a or not options.b:
        raise UserError("two images to compare: make diff A=<reference> B=<reference>")
    found = diff(contents.find(options.a), contents.find(options.b))
    if found["a"]["digest"] == found["b"]["digest"]:
        say(f"both are {found['a']['digest']}")
    else:
        for table in shown(found):
            log.print(table)
    say(f"who has A loads {in_units(found['download'])} of {in_units(found['b']['stored'])} to get B")
    cli.result(found, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
