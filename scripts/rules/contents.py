"""Rules about what lies in an image's layers: secrets, certificates, duplicates, set-id files, byte code, size."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.findings import Finding
from scripts.rules.book import rule, spec_rule
from scripts.rules.evidence import Evidence, Package
from scripts.spec import Spec
from scripts.stored import leaks
from scripts.units import in_units
from scripts.waivers import expired


@rule
def no_credentials_in_layers(image: Evidence) -> Iterator[Finding]:
    """No layer holds a credential."""
    for layer in image.stored.layers:
        for suspect in layer.contents.suspects:
            if not image.publicly_known(suspect.path, suspect.hash):
                yield Finding(
                    "no_credentials_in_layers",
                    f"/{suspect.path} in layer {layer.stage}",
                    f"holds {suspect.kind}",
                    "everyone who can pull the image can read it, even if a later layer deletes it",
                    "revoke it, and pass it to the build as a secret (RUN --mount=type=secret)",
                )


@rule
def no_credentials_in_settings(image: Evidence) -> Iterator[Finding]:
    """No variable, label or line of history holds a credential."""
    places = [(f"ENV {key}", leaks.in_setting(key, value)) for key, value in image.environment.items()]
    places += [(f"label {key}", leaks.in_setting(key, value)) for key, value in image.labels.items()]
    for number, entry in enumerate(image.stored.config.get("history", []), 1):
        command = str(entry.get("created_by", ""))
        first_word = command.partition(" ")[0]
        places.append((f"history line {number} ({first_word})", leaks.in_command(command)))
    for where, kinds in places:
        for kind in kinds:
            yield Finding(
                "no_credentials_in_settings",
                where,
                f"holds {kind}",
                "'docker image inspect' shows it to everyone who can pull the image",
                "revoke it, and pass it to the build as a secret (RUN --mount=type=secret)",
            )


@rule
def no_foreign_certificates(image: Evidence) -> Iterator[Finding]:
    """No certificate authorities but the distribution's and those of the locked packages."""
    name = "no_foreign_certificates"
    why = "the authority of one network could then read the traffic of every user of the image"
    fix = "hand the bundle to the build as a secret (make build does), and copy it nowhere"
    distribution: set[str] = set()
    for layer in image.stored.layers:
        # Which layer is the distribution's cannot be told without a spec; its own folder can.
        if layer.kind in ("base", "below") or image.spec is None:
            for bundle in layer.contents.bundles:
                if bundle.path.startswith("usr/share/ca-certificates/"):
                    distribution |= bundle.certificates
    for layer in image.stored.layers:
        for bundle in layer.contents.bundles:
            # update-ca-certificates puts together /etc/ssl/certs from the distribution's files, and adds local ones.
            foreign = bundle.certificates - distribution
            if foreign and not image.publicly_known(bundle.path, bundle.hash):
                what = f"holds {len(foreign)} certificates that the distribution does not have"
                yield Finding(name, f"/{bundle.path} in layer {layer.stage}", what, why, fix)
    for variable in sorted(leaks.CA_VARIABLES & image.environment.keys()):
        what = f"is {image.environment[variable]!r}"
        yield Finding(name, f"ENV {variable}", what, "it points at a bundle of the build host's network", fix)


#: What Debian's tools write anew with every package, so that two layers of packages both have it: some 100 KB.
_PACKAGE_DATABASE = re.compile(
    r"etc/ld\.so\.cache|var/lib/dpkg/(?:status|available|triggers/.*|info/.*)|var/lib/apt/.*"
)


@rule
def no_path_stored_twice(image: Evidence) -> Iterator[Finding]:
    """No path is stored in two of our layers, or stored and deleted."""
    name, fix = "no_path_stored_twice", "make each file in one stage, and copy it once"
    why = "users download and store it twice, and see only the upper one"
    owner: dict[str, str] = {}
    for layer in image.ours:
        for path in layer.contents.removed:
            hidden = next((owner[one] for one in owner if one == path or one.startswith(f"{path}/")), None)
            if hidden:
                what = f"is stored by layer {hidden} and deleted by {layer.stage}"
                yield Finding(name, f"/{path}", what, why, fix, note=image.spec is None)
        for path, file in layer.contents.files.items():
            packages = (layer.kind == "below" or image.spec is None) and _PACKAGE_DATABASE.fullmatch(path)
            if path in owner and not packages:
                what = f"is stored by layer {owner[path]} and again by {layer.stage} ({in_units(file.size)})"
                yield Finding(name, f"/{path}", what, why, fix, note=image.spec is None)
        owner |= dict.fromkeys(layer.contents.files, layer.stage)


@rule
def no_setuid_beyond_the_base(image: Evidence) -> Iterator[Finding]:
    """No setuid or setgid file beyond the base's."""
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
                    "no_setuid_beyond_the_base",
                    f"/{path} in layer {layer.stage}",
                    f"has mode {file.mode & 0o7777:04o}",
                    "it lets the image's plain user become another one",
                    f"chmod a-s /{path} in the stage that makes it",
                    note=image.spec is None,
                )


# What it costs to use.


@rule
def imports_do_not_compile(image: Evidence) -> Iterator[Finding]:
    """Every source has byte code of its own, so that no container compiles at its start."""
    fix = "run templates/seal.sh last in the stage that makes the layer"
    for path in image.inside.missing:
        why = "every new container compiles it again: an import of a big framework then takes seconds longer"
        note = image.spec is None or image.of_base(path)
        yield Finding("imports_do_not_compile", path, "has no byte code that Python would use", why, fix, note)
    for path in image.inside.stale:
        why = "Python trusts it without a check, and runs something else than the source says"
        yield Finding("imports_do_not_compile", path, "has the byte code of another source", why, fix)


@spec_rule
def size_within_budget(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """The unpacked size is within the spec's budget."""
    over = image.size - spec.budget.size
    if over <= 0:
        return
    by_layer = ", ".join(
        f"{layer.stage} {in_units(layer.contents.size)}"
        for layer in sorted(image.stored.layers, key=lambda layer: -layer.contents.size)
        if layer.contents.size > image.size // 50
    )
    packages = ", ".join(f"{package.name} {in_units(package.bytes)}" for package in heaviest(image.inside.packages, 5))
    what = f"{in_units(image.size)}, {in_units(over)} over the budget of {in_units(spec.budget.size)}"
    what += f": {by_layer}; of packages {packages}"
    if image.fell_back:
        what += (
            f". The framework came from the default index instead of {spec.framework.index}; the budget is not "
            "about the builds found there, so this is no failure"
        )
    yield Finding(
        "size_within_budget",
        image.reference,
        what,
        "pulling takes longer on every node, and some platforms refuse big images",
        f"leave out what is not needed, or raise budget.size in {spec.where} and say why in the commit",
        note=image.fell_back,
    )


def heaviest(packages: tuple[Package, ...], count: int) -> list[Package]:
    """The packages that take most bytes."""
    return sorted(packages, key=lambda package: -package.bytes)[:count]


@rule
def no_waiver_has_expired(image: Evidence) -> Iterator[Finding]:
    """No waiver that is about this image has expired."""
    for waiver in expired(image.waivers, image.day):
        if waiver.package is not None:
            version = image.version(waiver.package)
            concerns = waiver.covers_package(waiver.rule, waiver.package, version or "", image.target)
            what = f"package {waiver.package} {waiver.version}"
        else:
            concerns, what = waiver.target in (None, image.target), str(waiver.where)
        if concerns and image.spec is not None:
            yield Finding(
                "no_waiver_has_expired",
                f"waiver of {waiver.rule} for {what}",
                f"expired on {waiver.expires}; {waiver.owner} answers for it: {waiver.reason}",
                "what was to be mended by then is not known to be",
                "mend the cause and delete the waiver, or decide again: images/waivers.yaml",
            )
