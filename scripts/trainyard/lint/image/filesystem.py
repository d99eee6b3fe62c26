"""Check the content of layers: secrets, certificates, duplicates, set-id files, byte code, size, waivers."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import layers, secret_scan
from trainyard.oci.binaries import Binaries
from trainyard.oci.probe_runner import Distribution
from trainyard.spec.architectures import ARCHITECTURES, Architecture
from trainyard.spec.catalog import packages_with
from trainyard.spec.units import in_units

#: What to do about a credential.
_REVOKE = "revoke it, and pass it to the build as a secret (RUN --mount=type=secret)"


def _without_recipe(image: Evidence) -> Severity:
    """Return NOTE without a recipe, as it is unknown which layers are the base's then, else REFUSE."""
    return Severity.NOTE if image.recipe is None else Severity.REFUSE


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def no_credentials_in_layers(image: Evidence) -> Iterator[Finding]:
    """No layer contains a credential."""
    for layer in image.stored.layers:
        for suspect in layer.contents.suspects:
            if not image.publicly_known(suspect.path, suspect.hash):
                why = "everyone who can pull the image can read it, even if a later layer deletes it"
                yield Finding(f"/{suspect.path} in layer {layer.stage}", f"holds {suspect.kind}", why, _REVOKE)


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def no_credentials_in_settings(image: Evidence) -> Iterator[Finding]:
    """No variable, label or history entry contains a credential."""
    places = [(f"ENV {key}", secret_scan.in_setting(key, value)) for key, value in image.environment.items()]
    places += [(f"label {key}", secret_scan.in_setting(key, value)) for key, value in image.labels.items()]
    for number, entry in enumerate(image.stored.config.get("history", []), 1):
        command = str(entry.get("created_by", ""))
        first_word = command.partition(" ")[0]
        places.append((f"history line {number} ({first_word})", secret_scan.in_command(command)))
    why = "'docker image inspect' shows it to everyone who can pull the image"
    for where, kinds in places:
        for kind in kinds:
            yield Finding(where, f"holds {kind}", why, _REVOKE)


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def no_foreign_certificates(image: Evidence) -> Iterator[Finding]:
    """Certificate authorities are those of the distribution and of locked packages."""
    why = "the authority of one network could then read the traffic of every user of the image"
    fix = "pass the bundle to the build as a secret ('trainyard dev build' does), and do not copy it"
    distribution: set[str] = set()
    for layer in image.stored.layers:
        # Without a recipe it is unknown which layer is the distribution's, but its folder is known.
        if layer.kind in ("base", "below") or image.recipe is None:
            for bundle in layer.contents.bundles:
                if bundle.path.startswith("usr/share/ca-certificates/"):
                    distribution |= bundle.certificates
    removed = tuple(f"{path}/" for layer in image.ours for path in layer.contents.removed)
    for layer in image.stored.layers:
        for bundle in layer.contents.bundles:
            if layer.kind == "base" and f"{bundle.path}/".startswith(removed):  # as pip's, of a compiled Python
                continue
            # update-ca-certificates fills /etc/ssl/certs with the distribution's certificates and with local ones.
            foreign = bundle.certificates - distribution
            if foreign and not image.publicly_known(bundle.path, bundle.hash):
                what = f"holds {len(foreign)} certificates that the distribution does not have"
                yield Finding(f"/{bundle.path} in layer {layer.stage}", what, why, fix)
    for variable in sorted(secret_scan.CA_VARIABLES & image.environment.keys()):
        what = f"is {image.environment[variable]!r}"
        yield Finding(f"ENV {variable}", what, "it points at a bundle of the build host's network", fix)


#: Files that Debian's tools rewrite with every package, so that two layers of packages both have them (100 KB).
_PACKAGE_DATABASE = re.compile(
    r"etc/ld\.so\.cache|var/lib/dpkg/(?:status|available|triggers/.*|info/.*)|var/lib/apt/.*"
)


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#design")
def no_path_stored_twice(image: Evidence) -> Iterator[Finding]:
    """No path is stored in two layers, or stored and deleted."""
    fix = "create each file in one stage, and copy it once"
    why = "users download and store it twice, and see only the upper copy"
    ours = image.recipe.layers if image.recipe else ()
    wheels = {layer.stage for layer in ours if layer.pins and layer.stage not in ("compiled", "requirements")}
    owner: dict[str, str] = {}
    for layer in image.ours:
        for path in layer.contents.removed:
            hidden = next((owner[other] for other in owner if f"{other}/".startswith(f"{path}/")), None)
            if hidden:
                what = f"is stored by layer {hidden} and deleted by {layer.stage}"
                yield Finding(f"/{path}", what, why, fix, severity=_without_recipe(image))
        for path, file in layer.contents.files.items():
            packages = (layer.kind == "below" or image.recipe is None) and _PACKAGE_DATABASE.fullmatch(path)
            if path in owner and not packages:
                what = f"is stored by layer {owner[path]} and again by {layer.stage} ({in_units(file.size)})"
                of_wheels = {owner[path], layer.stage} <= wheels
                severity = image.of_several_wheels if of_wheels else _without_recipe(image)
                yield Finding(f"/{path}", what, why, fix, severity)
        owner |= dict.fromkeys(layer.contents.files, layer.stage)


@rule(
    "image",
    severity=Severity.REFUSE,
    source="https://cloud.google.com/kubernetes-engine/docs/how-to/image-streaming#limitations",
)
def no_empty_or_duplicate_layer(image: Evidence) -> Iterator[Finding]:
    """No layer is empty, and no layer occurs twice."""
    why = "GKE streams no image that has such a layer: its nodes download all of it before a container starts"
    severity = _without_recipe(image) if image.recipe is None or image.base_is_debian else Severity.NOTE
    seen: dict[str, str] = {}
    for layer in image.stored.layers:
        where = f"layer {layer.stage}"
        if layer.diff_id in layers.EMPTY:
            what = f"is empty ({layer.created_by.split(' ', 1)[0] or 'by an unknown instruction'})"
            fix = "set WORKDIR in the base's configuration, and remove instructions that change no file"
            yield Finding(where, what, why, fix, severity)
        elif layer.diff_id in seen:
            fix = "copy from each stage once"
            yield Finding(where, f"is the same as layer {seen[layer.diff_id]}", why, fix, severity)
        seen[layer.diff_id] = layer.stage


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def no_setuid_beyond_the_base(image: Evidence) -> Iterator[Finding]:
    """No setuid or setgid file is added to the base's."""
    base = {
        path
        for layer in image.stored.layers
        if not layer.ours
        for path, file in layer.contents.files.items()
        if file.mode & 0o6000
    }
    for layer in image.ours:
        for path, file in layer.contents.files.items():
            if file.mode & 0o6000 and path not in base:
                yield Finding(
                    f"/{path} in layer {layer.stage}",
                    f"has mode {file.mode & 0o7777:04o}",
                    "it lets the image's user become another user",
                    f"chmod a-s /{path} in the stage that makes it",
                    severity=_without_recipe(image),
                )


@rule(
    "image",
    severity=Severity.REFUSE,
    source="https://refspecs.linuxfoundation.org/elf/gabi4+/ch4.eheader.html",
)
def binaries_are_for_the_architecture(image: Evidence) -> Iterator[Finding]:
    """Programs and shared libraries are for the image's architecture."""
    expected = image.architecture
    if expected is None:
        return
    others = {other.elf: other for other in ARCHITECTURES.values() if other != expected}
    for layer in image.stored.layers:
        for path, machine in layer.contents.machines.items():
            if machine in others:
                yield Finding(
                    f"/{path} in layer {layer.stage}",
                    f"is for {others[machine].machine}; the image is for {expected.machine}",
                    "it does not start, or cannot be loaded: exec format error",
                    f"build or install it for {expected.platform}",
                    severity=_without_recipe(image),
                )


#: What is installed and used together: a package in a site directory, and the modules of Python itself.
_TOGETHER = re.compile(r".*/(?:(?:site|dist)-packages/[^/]+|lib-dynload)(?=/)")
_WITHOUT_DESKTOP = {"cv2": "opencv-python-headless"}  # https://github.com/opencv/opencv-python#installation-and-usage


@rule("image", severity=Severity.REFUSE, source="https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html")
def binaries_find_their_libraries(image: Evidence) -> Iterator[Finding]:
    """Every library that programs and modules load is in the image, or comes from the host.

    Some modules of a package may lack theirs (PySide6's for sound), and some libraries that no file needs (torchcodec's
    for each FFmpeg): the others are used without them.
    """
    binaries, stage = _binaries(image)
    groups: dict[str, list[str]] = {}
    for path in binaries.needed:
        together = _TOGETHER.match(path)
        groups.setdefault(together[0] if together else path, []).append(path)
    base, where = (image.recipe.base.name, image.recipe.source) if image.recipe else ("", "its spec")
    for paths in groups.values():
        starts, used = binaries.starts(paths)
        lacking = {path: gone for path in starts if (gone := binaries.lacking(path))}
        whole = len(lacking) == len(starts)
        if lacking and (used or whole):
            names = sorted((whole and set.intersection(*lacking.values())) or set.union(*lacking.values()))
            first = min(lacking)
            other = _WITHOUT_DESKTOP.get(posixpath.basename(posixpath.dirname(first)), "")
            other = "" if other in image.installed else other
            yield Finding(
                f"/{first} in layer {stage[first]}",
                f"needs {', '.join(names)}, which {'are' if names[1:] else 'is'} nowhere in the image",
                "it does not start, or its import fails" if used else "what loads it by name fails",
                f"add {packages_with(names, base)} to system in {where}" + (", or require " + other if other else ""),
                severity=_without_recipe(image) if used and whole else Severity.NOTE,
            )


def _binaries(image: Evidence) -> tuple[Binaries, dict[str, str]]:
    """Return the programs and libraries of all layers, and in which layer each file is."""
    stage, searched, needed = dict[str, str](), dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    for layer in image.stored.layers:
        removed = tuple(f"{path}/" for path in layer.contents.removed)
        stage = {path: name for path, name in stage.items() if not f"{path}/".startswith(removed)}
        stage |= dict.fromkeys(layer.contents.files, layer.stage)
        needed |= layer.contents.needed
        searched |= layer.contents.searched
    return Binaries(stage, {path: names for path, names in needed.items() if path in stage}, searched), stage


@rule(
    "image",
    severity=Severity.REFUSE,
    source="https://packaging.python.org/en/latest/specifications/platform-compatibility-tags/",
)
def wheels_are_for_the_architecture(image: Evidence) -> Iterator[Finding]:
    """Packages come from wheels for the image's architecture, or for any."""
    expected = image.architecture
    if expected is None:
        return
    for package in image.inside.packages:
        platforms = sorted({tag.rsplit("-", 1)[-1] for tag in package.tags})
        if platforms and all(_is_foreign(platform, expected) for platform in platforms):
            yield Finding(
                f"package {package.name} {package.version} in {package.folder}",
                f"is from a wheel for {', '.join(platforms)}; the image is for {expected.machine}",
                "its compiled modules cannot be imported",
                image.package_remediation,
                severity=_without_recipe(image),
            )


def _is_foreign(platform: str, expected: Architecture) -> bool:
    """Return whether the platform of a wheel's tag is certainly another one.

    Not if its name is unknown: nvidia-cusparselt-cu13 0.8.1 for arm64 calls it manylinux2014_sbsa (Server Base System
    Architecture), although the name of its file ends with aarch64.
    """
    others = [other.machine for other in ARCHITECTURES.values() if other != expected]
    return platform.startswith(("win", "macosx")) or platform.endswith(tuple(f"_{machine}" for machine in others))


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def imports_do_not_compile(image: Evidence) -> Iterator[Finding]:
    """Every source file has valid byte code."""
    fix = "run templates/steps/wheels/seal.sh last in the stage that makes the layer"
    for path in image.inside.missing:
        if image.of_workspace(path):  # code is mounted, edited and replaced: byte code would be of other sources
            continue
        why = "every new container compiles it again: importing a large framework takes seconds longer"
        severity = Severity.NOTE if image.of_base(path) else _without_recipe(image)
        yield Finding(path, "has no byte code that Python would use", why, fix, severity)
    for path in image.inside.stale:
        why = "Python uses it without a check, and runs other code than the source"
        yield Finding(path, "has the byte code of another source", why, fix)


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def size_within_budget(image: Evidence) -> Iterator[Finding]:
    """The unpacked size is within the budget."""
    recipe = image.required_recipe
    over = image.size - recipe.budget.size
    if over <= 0 or not recipe.budget.enforced:
        return
    by_layer = ", ".join(
        f"{layer.stage} {in_units(layer.contents.size)}"
        for layer in sorted(image.stored.layers, key=lambda layer: -layer.contents.size)
        if layer.contents.size > image.size // 50
    )
    packages = ", ".join(f"{package.name} {in_units(package.bytes)}" for package in heaviest(image.inside.packages, 5))
    what = f"{in_units(image.size)}, {in_units(over)} over the budget of {in_units(recipe.budget.size)}"
    what += f": {by_layer}; of packages {packages}"
    if image.fell_back:
        what += (
            f". The framework came from the default index instead of {recipe.framework.index}; the budget does not "
            "apply to the builds there, so this is a note"
        )
    yield Finding(
        image.reference,
        what,
        "pulling takes longer on every node, and some platforms refuse large images",
        f"remove what is not needed, or raise budget.size in {recipe.source} and say why in the commit",
        severity=Severity.NOTE if image.fell_back else Severity.REFUSE,
    )


def heaviest(packages: Iterable[Distribution], count: int) -> list[Distribution]:
    """Return the packages that take most bytes."""
    return sorted(packages, key=lambda package: -package.bytes)[:count]


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def no_waiver_has_expired(image: Evidence) -> Iterator[Finding]:
    """No waiver for this image has expired."""
    for waiver in image.waivers:
        if image.recipe is None or not waiver.expired(image.day):
            continue
        if waiver.package is not None:
            version = image.version(waiver.package)
            concerns = waiver.covers_package(waiver.rule, waiver.package, version or "", image.target)
            what = f"package {waiver.package} {waiver.version}"
        else:
            concerns, what = waiver.target in (None, image.target), str(waiver.where)
        if concerns:
            yield Finding(
                f"waiver of {waiver.rule} for {what}",
                f"expired on {waiver.expires}; owner {waiver.owner}: {waiver.reason}",
                "the cause was to be corrected by then",
                "correct the cause and delete the waiver, or renew it, in images/waivers.yaml",
            )
