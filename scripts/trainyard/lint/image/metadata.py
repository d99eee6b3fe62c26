"""Check metadata: labels, tags and entry point match the spec; the pins of the spec are locked and installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.image import dockerfile, plan
from trainyard.lint.image.evidence import Evidence
from trainyard.lint.waivers import same_version
from trainyard.oci.probe_runner import Distribution
from trainyard.oci.reference import Reference
from trainyard.spec import naming
from trainyard.spec.model import RepositorySpec, Spec, relative, requirements_of

#: What an immutable tag looks like (:func:`trainyard.image.plan.make_plan`): target and version, day, content hash.
_TAG = r"{name}-\d{{8}}-[0-9a-f]{{8}}{suffix}"


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#labels")
def labels_match_spec(image: Evidence) -> Iterator[Finding]:
    """Labels match the spec."""
    spec = image.required_spec
    build = image.build or {}
    name = spec.version_tag()
    suffix = f"-{spec.arch}" if len(spec.platforms) > 1 else ""
    tag = _TAG.format(name=re.escape(name), suffix=suffix)
    base = build.get("base") or (spec.base_contents.reference if spec.base_contents else None)
    pinned = image.labels.get("org.opencontainers.image.base.name", "").partition("@")[2]
    # That of the repository may have been edited since.
    code = image.stored.layers[-1].diff_id if image.stored.layers else ""
    # Build argument -> pattern of its valid values, and the words for them.
    allowed = {
        "CODE": (re.escape(code), code),
        "CREATED": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "a time such as 2026-11-20T12:00:00Z"),
        "REVISION": (r"[0-9a-f]{40}(-dirty)?|unknown", "a commit"),
        "VERSION": (
            re.escape(build["tag"]) if "tag" in build else tag,
            build.get("tag", f"{name}-<day>-<hash>{suffix}"),
        ),
        "BASE": (re.escape(base) if base else r".+", base or "the base's reference"),
        "BASE_DIGEST": (re.escape(pinned), pinned or "nothing, as the base's name has no digest"),
        "INDEX": (
            re.escape(build["index"]) if "index" in build else "|".join({"default", spec.framework.index}),
            build.get("index", f"'default' or '{spec.framework.index}'"),
        ),
    }
    expected = {label: (re.escape(text), repr(text)) for label, text in plan.labels(spec).items()}
    for argument in spec.lock_labels.values():
        locked = plan.sha256_of(spec.lock_file)
        allowed[argument] = (locked, locked)
    expected |= {label: allowed[argument] for label, argument in plan.labels_from_arguments(spec).items()}
    why, fix = "tools and users choose images by their labels", f"run '{spec.command('dev build')}'"
    for label, (pattern, words) in expected.items():
        value = image.labels.get(label)
        if value is None or not re.fullmatch(pattern, value):
            what = f"{'missing' if value is None else repr(value)}; expected {words}"
            yield Finding(f"label {label}", what, why, fix)


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#labels")
def tag_has_the_hash_of_the_inputs(image: Evidence) -> Iterator[Finding]:
    """The hash in the immutable tag is that of the Dockerfile, the locks, the trainers, the launcher and the base."""
    spec = image.required_spec
    version = image.labels.get(naming.TAG, "")
    if image.inputs and naming.day_and_hash(version)[1] != image.inputs:
        changed = f", and {' and '.join(image.changed)} changed since it was built" if image.changed else ""
        yield Finding(
            f"label {naming.TAG}",
            f"{version!r} was made of other files: those of {spec.where} have the hash {image.inputs}{changed}",
            "the locks and files that are checked here are not those that it was built from",
            f"run '{spec.command('dev build')}', or check it in the checkout that it was built from",
        )


@rule("target", severity=Severity.REFUSE, source="https://github.com/opencontainers/image-spec/blob/main/config.md")
def platform_matches_spec(image: Evidence) -> Iterator[Finding]:
    """The configuration names the platform that the image was built for."""
    spec = image.required_spec
    config = image.stored.config
    found = f"{config.get('os')}/{config.get('architecture')}"
    if found != spec.platform:
        yield Finding(
            "platform",
            f"{found}; expected {spec.platform}",
            "engines and clusters choose the image of an index by it",
            f"run '{spec.command('dev build')}'",
        )


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def tags_match_spec(image: Evidence) -> Iterator[Finding]:
    """Local tags name this target and no other."""
    spec = image.required_spec
    target, version = spec.target, spec.version
    floating = {target, spec.local_name, f"{spec.local_name}-candidate", spec.version_tag()}
    # The tag of an index, by which the image of one platform was pulled.
    pattern = _TAG.format(name=re.escape(spec.version_tag()), suffix="")
    index = re.compile(pattern) if len(spec.platforms) > 1 else None
    immutable = image.labels.get("org.opencontainers.image.version", "")
    for reference in image.tags:
        named = Reference.parse(reference)
        ours = named.repository.rpartition("/")[2] == naming.NAME.rpartition("/")[2]
        if ours and named.tag not in {*floating, immutable} and not (index and index.fullmatch(named.tag)):
            yield Finding(
                f"tag {reference}",
                f"names an image of {target} {version}, with the tag {immutable}",
                "a pull of that tag gets another image",
                f"run 'docker rmi {reference}', and build its target",
            )


@rule("target", severity=Severity.REFUSE, source="docs/launcher-contract.md#r10.3")
def image_json_matches_spec(image: Evidence) -> Iterator[Finding]:
    """image.json, which the launcher reads, matches the spec."""
    spec = image.required_spec
    where, fix = "/opt/trainyard/image.json", f"run '{spec.command('dev build')}'"
    why = "the launcher reads trainers and versions from it"
    expected = json.loads(dockerfile.image_json(spec))
    try:
        found = json.loads(image.inside.texts.get("image.json", ""))
    except ValueError:
        yield Finding(where, "missing or not JSON", why, fix)
        return
    for key in sorted({*expected, *(found if isinstance(found, dict) else {})}):
        value = found.get(key) if isinstance(found, dict) else None
        if value != expected.get(key):
            what = f"{key} is {json.dumps(value)}; the spec gives {json.dumps(expected.get(key))}"
            yield Finding(where, what, why, fix)


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def pins_reach_the_lock(image: Evidence) -> Iterator[Finding]:
    """Every pin of the spec is in the lock."""
    spec = image.required_spec
    lock = relative(spec.lock_file)
    # A user's requirements may replace those of the target that it extends.
    requirements = [] if isinstance(spec, RepositorySpec) else requirements_of(spec)
    for text in [*spec.packages, *requirements]:
        pin = Requirement(text)
        locked = image.locked.get(canonicalize_name(pin.name))
        if locked is None or not pin.specifier.contains(locked, prereleases=True):
            yield Finding(
                spec.where,
                f"asks for {text}, the lock {'has none' if locked is None else f'has {locked}'}",
                "the image is built from the lock: the pin has no effect",
                f"run '{spec.command('lock')}', and look at {lock}",
            )


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def python_lists_what_is_installed(image: Evidence) -> Iterator[Finding]:
    """The image's Python starts, and reads the metadata of all packages."""
    if image.inside.error:
        yield Finding(
            "Python",
            image.inside.error,
            "trainers need it, and no rule about packages can be checked",
            image.package_remediation,
            severity=Severity.NOTE if image.spec is None else Severity.REFUSE,
        )


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def installed_matches_locks(image: Evidence) -> Iterator[Finding]:
    """Installed packages are the locked ones, each once."""
    spec = image.required_spec
    if image.inside.error:
        return
    fix = f"run '{spec.command('dev build')}'; to change it, edit the spec and run '{spec.command('lock')}'"
    for package, version in image.locked.items():
        if package not in image.installed:
            why = "an import that the lock promises fails"
            yield Finding(f"package {package}", f"is not installed; the lock has {version}", why, fix)
    for package, everywhere in image.installed.items():
        found = _effective(everywhere, package, spec, image)
        locked = image.locked.get(package)
        if locked is None and spec.has_code and _in_code(image, package):
            continue
        if locked is None:
            where = f"package {package} {found[0].version} in {found[0].folder}"
            yield Finding(where, "is in no lock", "it was not chosen, and no hash is checked", fix)
        elif any(not same_version(one.version, locked) for one in found):
            versions = " and ".join(one.version for one in found)
            why = "results differ from those of the version that was tested"
            yield Finding(f"package {package}", f"is {versions}; the lock has {locked}", why, fix)
        elif len(found) > 1:
            what = f"is installed in {' and '.join(one.folder for one in found)}"
            yield Finding(f"package {package}", what, "it is undefined which of them is imported", fix)


def _in_code(image: Evidence, package: str) -> bool:
    """Return whether the metadata of a package is in the layer of the user's code."""
    code, site = image.stored.layers[-1].contents.files, re.escape(image.required_spec.site.packages)
    return any(
        canonicalize_name(match[1]) == package
        for path in code
        if (match := re.fullmatch(rf"{site}/(.+)-[^-/]+\.dist-info/METADATA", path))
    )


def _effective(found: list[Distribution], package: str, spec: Spec, image: Evidence) -> list[Distribution]:
    """Return the distributions of a name, without the base's where the lock has another version, which comes first."""
    if spec.base_contents is None or image.locked.get(package) == spec.base_contents.packages.get(package):
        return found
    return [one for one in found if not image.of_base(one.folder)] or found
