"""What must hold for an image to be what its tag says: labels, tags, start, and spec = lock = installed.

Rules about builds of frameworks are in builds.py, those about layers in contents.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from scripts import locks, plan, render
from scripts.findings import Finding
from scripts.rules.book import spec_rule
from scripts.rules.evidence import Evidence, Package
from scripts.spec import Spec, relative, requirements_of

#: What an immutable tag looks like (:func:`scripts.plan.make_plan`): target and version, day, content hash.
_TAG = r"{name}-\d{{8}}-[0-9a-f]{{8}}"

# What the image says about itself.


@spec_rule
def labels_match_spec(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """Labels say what the spec says."""
    build = image.build or {}
    name = plan.version_tag(spec)
    tag = _TAG.format(name=re.escape(name))
    base = build.get("base") or (spec.held.reference if spec.held else None)
    pinned = image.labels.get("org.opencontainers.image.base.name", "").partition("@")[2]
    # What the build's arguments may have been: a pattern, and how to say it.
    allowed = {
        "CREATED": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "a time such as 2026-11-20T12:00:00Z"),
        "REVISION": (r"[0-9a-f]{40}(-dirty)?|unknown", "a commit"),
        "VERSION": (re.escape(build["tag"]) if "tag" in build else tag, build.get("tag", f"{name}-<day>-<hash>")),
        "BASE": (re.escape(base) if base else r".+", base or "the base's reference"),
        "BASE_DIGEST": (re.escape(pinned), pinned or "nothing, as the base's name has no digest"),
        "INDEX": (
            re.escape(build["index"]) if "index" in build else "|".join({"default", spec.framework.index}),
            build.get("index", f"'default' or '{spec.framework.index}'"),
        ),
    }
    expected = {label: (re.escape(text), repr(text)) for label, text in plan.labels(spec).items()}
    expected |= {label: allowed[argument] for label, argument in plan.LABELS_FROM_ARGUMENTS.items()}
    for label, (pattern, words) in expected.items():
        value = image.labels.get(label)
        if value is None or not re.fullmatch(pattern, value):
            yield Finding(
                "labels_match_spec",
                f"label {label}",
                f"{'missing' if value is None else repr(value)}; expected {words}",
                "tools and people choose images by their labels",
                f"make build TARGET={spec.target}",
            )


@spec_rule
def tags_match_spec(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """Local tags name this target and no other."""
    target, version = spec.target, spec.framework.version
    moving = {target, f"{target}-candidate", plan.version_tag(spec)}
    immutable = image.labels.get("org.opencontainers.image.version", "")
    for reference in image.tags:
        repository, _, tag = reference.rpartition(":")
        if repository.rsplit("/", 1)[-1] == plan.NAME.rsplit("/", 1)[-1] and tag not in {*moving, immutable}:
            yield Finding(
                "tags_match_spec",
                f"tag {reference}",
                f"names an image of {target} {version}, whose own tag is {immutable}",
                "who pulls that tag gets something else than it says",
                f"docker rmi {reference}, and build what it should name",
            )


@spec_rule
def image_json_matches_spec(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """image.json, which the launcher reads, says what the spec says."""
    where, fix = "/opt/trainyard/image.json", f"make build TARGET={spec.target}"
    why = "the launcher starts trainers and reports versions by it"
    expected = json.loads(render.image_json(spec))
    try:
        found = json.loads(image.inside.texts.get("image.json", ""))
    except ValueError:
        yield Finding("image_json_matches_spec", where, "missing or not JSON", why, fix)
        return
    for key in sorted({*expected, *(found if isinstance(found, dict) else {})}):
        value = found.get(key) if isinstance(found, dict) else None
        if value != expected.get(key):
            what = f"{key} is {json.dumps(value)}; the spec gives {json.dumps(expected.get(key))}"
            yield Finding("image_json_matches_spec", where, what, why, fix)


@spec_rule
def starts_as_specified(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """It starts the launcher under tini, as a user that is not root, with the variables of its spec."""
    expected = ["tini", "--", "launch"]
    fix = f"make render and make build TARGET={spec.target}"
    if image.settings.get("Entrypoint") != expected:
        yield Finding(
            "starts_as_specified",
            "ENTRYPOINT",
            f"{image.settings.get('Entrypoint')}; expected {expected}",
            "without tini nothing reaps processes, without the launcher no accelerator is found",
            fix,
        )
    for variable, value in render.environment(spec).items():
        if image.environment.get(variable) != value:
            what = f"is {image.environment.get(variable)!r}; the spec gives {value!r}"
            why = "drivers and libraries are found by it"
            yield Finding("starts_as_specified", f"ENV {variable}", what, why, fix)
    user = str(image.settings.get("User") or "root")
    if user.partition(":")[0] in ("root", "0"):
        yield Finding(
            "starts_as_specified", "USER", f"{user!r}", "clusters with a restricted policy refuse to run root", fix
        )


# Spec = lock = installed.


@spec_rule
def pins_reach_the_lock(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """Every pin of the spec is in the lock."""
    lock = relative(locks.requirements_lock(spec, image.index))
    for text in [*spec.framework.packages, *requirements_of(spec)]:
        pin = Requirement(text)
        locked = image.locked.get(canonicalize_name(pin.name))
        if locked is None or not pin.specifier.contains(locked, prereleases=True):
            yield Finding(
                "pins_reach_the_lock",
                spec.where,
                f"asks for {text}, the lock {'has none' if locked is None else f'has {locked}'}",
                "the image is built from the lock: the pin has no effect",
                f"make lock TARGET={spec.target}, and look at {lock}",
            )


@spec_rule
def installed_matches_locks(image: Evidence, spec: Spec) -> Iterator[Finding]:
    """Installed packages are the locked ones: none other, none missing, none twice."""
    name = "installed_matches_locks"
    fix = f"make build TARGET={spec.target}; to change what is in it, edit the spec and make lock"
    for package, version in image.locked.items():
        if package not in image.installed:
            why = "an import that the lock promises fails"
            yield Finding(name, f"package {package}", f"is not installed; the lock has {version}", why, fix)
    for package, everywhere in image.installed.items():
        found = _meant(everywhere, package, spec, image)
        locked = image.locked.get(package)
        if locked is None:
            where = f"package {package} {found[0].version} in {found[0].folder}"
            yield Finding(name, where, "is in no lock", "nobody chose it, and no hash vouches for it", fix)
        elif any(not _same(one.version, locked) for one in found):
            versions = " and ".join(one.version for one in found)
            why = "results differ from those of the version that was tested"
            yield Finding(name, f"package {package}", f"is {versions}; the lock has {locked}", why, fix)
        elif len(found) > 1:
            what = f"is installed in {' and '.join(one.folder for one in found)}"
            yield Finding(name, f"package {package}", what, "which of them is imported is chance", fix)


def _meant(found: list[Package], package: str, spec: Spec, image: Evidence) -> list[Package]:
    """The distributions of a name without the base's own where the lock has another one, which comes before it."""
    if spec.held is None or image.locked.get(package) == spec.held.packages.get(package):
        return found
    return [one for one in found if not image.of_base(one.folder)] or found


def _same(one: str, other: str) -> bool:
    """Whether two versions are equal (PEP 440), local part included."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other
