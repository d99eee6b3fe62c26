"""Compare what every layer holds with what was built from the recipe on this host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence, Expected
from trainyard.oci import layers
from trainyard.oci.layer_contents import Contents, Item
from trainyard.oci.layers import Layer

#: What an engine creates in every container, and some leave behind in the layers of builds that ran in one:
#: https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md#default-filesystems
_OF_ENGINES = (
    ".dockerenv", "dev", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab", "proc", "sys", "run/.containerenv",
)  # fmt: skip


def compared(image: Evidence) -> str:
    """Return what of an image was compared with the build, and what was trusted, in a line."""
    total = len(image.stored.layers)
    if image.expected is None:
        return "files: not compared, as this host has no build of the recipe whose layers it could read"
    if _unread(image, image.expected):
        return "files: not compared, as this process cannot read where the engine has unpacked the layers"
    read = [layer.stage for layer in image.stored.layers if layer.entries is not None]
    trusted = sum(layer.diff_id in image.expected.layers for layer in image.stored.layers)
    words = f"files: {trusted} of {total} layers are those of the build, by their digests"
    return f"{words}; {len(read)} compared file by file ({', '.join(read)})" if read else words


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def files_are_those_of_the_build(image: Evidence) -> Iterator[Finding]:
    """Every file is one that the build of the recipe made, or the base has."""
    expected = image.expected
    if expected is None or _unread(image, expected):
        return
    changed = [layer for layer in image.stored.layers if layer.entries is not None]
    missing = expected.layers.keys() - {layer.diff_id for layer in image.stored.layers}
    if not changed and not missing:
        return
    known = expected.entries()
    fix = f"run '{image.required_recipe.command('dev build')}'"
    for layer in changed:
        yield from _unexpected(layer, known, fix)
    present = _visible(
        [expected.layers[layer.diff_id] if layer.entries is None else layer.entries for layer in image.stored.layers]
    )
    for path in sorted(_visible(expected.layers.values()) - present):
        if path not in _OF_ENGINES:
            why = "what imports or runs it fails"
            yield Finding(f"/{path}", "is missing; the build has it", why, fix)


#: What the build changes after uv has written RECORD: byte code (templates/steps/wheels/seal.sh), and the first line of
#: the commands beside a framework of the base (templates/steps/requirements.sh).
_CHANGED = re.compile(r"(?:.*/)?__pycache__/.*|opt/requirements/bin/[^/]+")


@rule(
    "target",
    severity=Severity.REFUSE,
    source="https://packaging.python.org/en/latest/specifications/recording-installed-packages/#the-record-file",
)
def files_are_those_of_their_wheels(image: Evidence) -> Iterator[Finding]:
    """Every file that the RECORD of a locked wheel lists is there, with its SHA-256; a base is as others made it."""
    fix = f"run '{image.required_recipe.command('dev build')}' with '--no-cache'"
    recorded: dict[str, set[str]] = {}
    for layer in image.stored.layers:
        for path, hashes in layer.contents.records.items() if layer.kind == "copied" else ():
            recorded.setdefault(path, set()).update(hashes)
    for path, listed in sorted(recorded.items()):
        if not path.startswith(layers.SITES) or _CHANGED.fullmatch(path):
            continue
        holder = next((layer for layer in reversed(image.stored.layers) if path in layer.contents.files), None)
        if holder is None:
            yield Finding(f"/{path}", "is missing; the RECORD of its wheel lists it", "what imports it fails", fix)
            continue
        where = f"/{path} in layer {holder.stage}"
        if holder.contents.hashes.get(path) not in listed:
            why = "the lock has the hash of other code than what runs"
            yield Finding(where, "is not what the RECORD of its wheel lists", why, fix)
        elif len(listed) > 1:
            what, why = "is brought by several wheels, with different contents", "one of them runs with code of another"
            yield Finding(where, what, why, "require one of the packages alone", image.of_several_wheels)


def _unread(image: Evidence, expected: Expected) -> bool:
    """Return whether the image has a layer whose contents are neither known nor were read."""
    return any(layer.entries is None and layer.diff_id not in expected.layers for layer in image.stored.layers)


def _unexpected(layer: Layer, known: dict[str, tuple[Item, ...]], fix: str) -> Iterator[Finding]:
    """Report what a layer holds that no layer of the build does."""
    for path, item in sorted((layer.entries or {}).items()):
        options = known.get(path, ())
        if item in options or path in _OF_ENGINES or item.kind == "whiteout":
            continue
        where = f"/{path} in layer {layer.stage}"
        if not options:
            what = f"is in no layer of the build ({item.kind}, mode {item.mode:04o})"
        else:
            what = f"differs from the build: {item.differences(options[-1])}"
        yield Finding(where, what, "it is in no lock and in no layer that was tested", fix)


def _visible(layers: Iterable[Contents]) -> set[str]:
    """Return the paths that a container sees, of layers from the bottom up."""
    paths: set[str] = set()
    for contents in layers:
        for path, item in contents.items():
            if item.kind == "whiteout":
                paths -= {path, *(other for other in paths if other.startswith(f"{path}/"))}
            else:
                paths.add(path)
    return paths
