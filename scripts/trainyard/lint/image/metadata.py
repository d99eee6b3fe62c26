"""Check that an image is its recipe: the document in it, labels, tags, how it starts, and what is installed."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from trainyard import recipe as recipes
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence
from trainyard.lint.waivers import same_version
from trainyard.oci.probe_runner import Distribution
from trainyard.oci.reference import Reference
from trainyard.recipe import Recipe
from trainyard.spec import markers, naming
from trainyard.spec.naming import FOLDER, LABELS

#: What starts every image, and its user, which clusters with a restricted policy accept.
_ENTRYPOINT, _USER = ["tini", "--", "launch"], "1000"

#: Longest value that a finding repeats.
_SHOWN = 200


@rule(
    "target",
    severity=Severity.REFUSE,
    source="docs/anatomy.md#the-recipe; docs/launcher-contract.md#r10.3; "
    "https://github.com/opencontainers/image-spec/blob/main/config.md",
)
def image_is_its_recipe(image: Evidence) -> Iterator[Finding]:
    """The document in the image is its recipe, and so are its labels, its tags, its platform, and how it starts."""
    recipe = image.required_recipe
    text = image.inside.texts.get("recipe.json", "")
    try:
        own = recipes.parse(text)
    except ValueError as error:
        words = f"is no recipe ({error})" if text else "is missing: the image was built before recipes, or by others"
        yield _finding(recipe, recipes.PATH, words, "the launcher reads it")
        own = recipe
    else:
        yield from _document(image, own)
    yield from _labels(image, text, own)
    yield from _platform(image)
    yield from _tags(image)
    yield from _start(image)


def _finding(recipe: Recipe, where: str, what: str, why: str, fix: str = "") -> Finding:
    return Finding(where, what, why, fix or f"run '{recipe.command('dev build')}'")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _document(image: Evidence, own: Recipe) -> Iterator[Finding]:
    """Compare the recipe in the image with the one that it must have."""
    recipe = image.required_recipe
    for field, value, expected in recipes.differences(own, recipe):
        # The code of a repository may have been edited since: a label names the layer that the image has.
        if recipe.is_repository and (field.startswith("inputs.") or field == f"labels.{LABELS}.code"):
            continue
        what = f"{field} is {_short(value)}; the recipe gives {_short(expected)}"
        yield _finding(recipe, recipes.PATH, what, "the image was made of other files than those that are checked here")


def _labels(image: Evidence, text: str, own: Recipe) -> Iterator[Finding]:
    """Compare the labels with the recipe, and with what the building host added to it."""
    recipe, why = image.required_recipe, "tools and users choose images by their labels"
    expected = recipe.model_copy(update={"built": own.built}).image_labels()
    expected |= {recipes.DIGEST: recipes.digest(text)} if text else {}
    if recipe.has_code:
        expected[f"{LABELS}.code"] = image.stored.layers[-1].diff_id if image.stored.layers else ""
    for label, value in expected.items():
        if (given := image.labels.get(label)) != value:
            what = f"{'missing' if given is None else repr(given)}; the recipe gives {value!r}"
            yield _finding(recipe, f"label {label}", what, why)
    if built := own.built:
        if built.base_digest != (pinned := built.base.partition("@")[2]):
            what = f"{built.base_digest!r}; the base's name has {pinned or 'none'}"
            yield _finding(recipe, "base digest", what, why)
        suffix = f"-{own.architecture.name}" if len(own.platforms) > 1 else ""
        name, made_of = re.escape(own.version_tag), own.content_hash(built.base_digest or built.base)
        if not re.fullmatch(rf"{name}-{own.day or r'[0-9]{8}'}-{made_of}{suffix}", built.tag):
            what = f"{built.tag!r}; its recipe gives {own.version_tag}-{own.day or '<day>'}-{made_of}{suffix}"
            yield _finding(recipe, f"label {naming.TAG}", what, "a tag with the hash of other files gets this image")


def _platform(image: Evidence) -> Iterator[Finding]:
    recipe, config = image.required_recipe, image.stored.config
    if (platform := f"{config.get('os')}/{config.get('architecture')}") != recipe.platform:
        why = "engines and clusters choose the image of an index by it"
        yield _finding(recipe, "platform", f"{platform}; the recipe gives {recipe.platform}", why)


def _tags(image: Evidence) -> Iterator[Finding]:
    """Report the local tags that name another target or version."""
    recipe = image.required_recipe
    floating = {*recipe.tags, recipe.local_name, f"{recipe.local_name}-candidate"}
    # The tag of an index, by which the image of one platform was pulled.
    several = len(recipe.platforms) > 1
    index = re.compile(rf"{re.escape(recipe.version_tag)}-\d{{8}}-[0-9a-f]{{8}}") if several else None
    immutable = image.labels.get(naming.TAG, "")
    for reference in image.tags:
        named = Reference.parse(reference)
        ours = named.repository.rpartition("/")[2] == naming.NAME.rpartition("/")[2]
        if ours and named.tag not in {*floating, immutable} and not (index and index.fullmatch(named.tag)):
            what = f"names an image of {recipe.name} {recipe.version}, with the tag {immutable}"
            fix = f"run 'docker rmi {reference}', and build its target"
            yield _finding(recipe, f"tag {reference}", what, "a pull of that tag gets another image", fix)


def _start(image: Evidence) -> Iterator[Finding]:
    """Compare entry point, variables, working directory and user."""
    recipe, settings = image.required_recipe, image.settings
    if (entrypoint := settings.get("Entrypoint")) != _ENTRYPOINT:
        why = "without tini nothing reaps processes, without the launcher no accelerator is found"
        yield _finding(recipe, "ENTRYPOINT", f"{entrypoint}; expected {_ENTRYPOINT}", why)
    for variable, value in recipe.environment.items():
        given = image.environment.get(variable)
        # PATH of a base that holds the framework is part of it.
        before, inherits, after = value.partition("$PATH") if variable == "PATH" else (value, "", "")
        if given is None or not (given.startswith(before) and given.endswith(after) if inherits else given == value):
            what, why = f"is {given!r}; the recipe gives {value!r}", "drivers, libraries and programs are found by it"
            yield _finding(recipe, f"ENV {variable}", what, why)
    if (folder := settings.get("WorkingDir")) != FOLDER:
        why = "relative paths in the commands of jobs mean other files"
        yield _finding(recipe, "WORKDIR", f"{folder!r}; expected {FOLDER!r}", why)
    if (user := str(settings.get("User") or "root")) != _USER:
        why = "clusters with a restricted policy refuse to run root, and other users cannot write to the home directory"
        yield _finding(recipe, "USER", f"{user!r}; expected {_USER!r}", why)
    if settings.get("Cmd"):
        what, why = f"{settings['Cmd']}; expected none", "the launcher starts it, not the default"
        yield _finding(recipe, "CMD", what, why)


@rule("image", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def python_lists_what_is_installed(image: Evidence) -> Iterator[Finding]:
    """The image's Python starts, and reads the metadata of all packages."""
    if image.inside.error:
        yield Finding(
            "Python",
            image.inside.error,
            "trainers need it, and no rule about packages can be checked",
            image.package_remediation,
            severity=Severity.NOTE if image.recipe is None else Severity.REFUSE,
        )


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def installed_matches_locks(image: Evidence) -> Iterator[Finding]:
    """Installed packages are the locked ones, each once."""
    recipe = image.required_recipe
    if image.inside.error:
        return
    fix = f"run '{recipe.command('dev build')}'; to change it, edit the spec and run '{recipe.command('lock')}'"
    for package, version in recipe.versions.items():
        if package not in image.installed:
            why = "an import that the lock promises fails"
            yield Finding(f"package {package}", f"is not installed; the lock has {version}", why, fix)
    for package, everywhere in image.installed.items():
        distributions = _effective(everywhere, package, image)
        locked = recipe.versions.get(package)
        if locked is None and recipe.has_code and _in_code(image, package):
            continue
        first = distributions[0]
        if locked is None:
            where = f"package {package} {first.version} in {first.folder}"
            yield Finding(where, "is in no lock", "it was not chosen, and no hash is checked", fix)
        elif any(not same_version(each.version, locked) for each in distributions):
            versions = " and ".join(each.version for each in distributions)
            why = "results differ from those of the version that was tested"
            yield Finding(f"package {package}", f"is {versions}; the lock has {locked}", why, fix)
        elif len(distributions) > 1:
            what = f"is installed in {' and '.join(each.folder for each in distributions)}"
            yield Finding(f"package {package}", what, "it is undefined which of them is imported", fix)


@rule(
    "target",
    severity=Severity.REFUSE,
    source="https://packaging.python.org/en/latest/specifications/core-metadata/#requires-dist-multiple-use",
)
def requirements_are_met(image: Evidence) -> Iterator[Finding]:
    """Each package has what it requires, in a version that it takes (what `pip check` looks at)."""
    recipe = image.required_recipe
    environment = markers.environment(recipe.base.python, recipe.architecture.machine)
    # A repository can override dependencies, as with uv's override-dependencies.
    severity = Severity.NOTE if recipe.is_repository or recipe.base.packages else Severity.REFUSE
    for name, distributions in image.installed.items():
        for text in distributions[0].requires:
            with contextlib.suppress(InvalidRequirement, InvalidVersion):  # of wheels from before PEP 440 and PEP 508
                wanted = markers.requirement(text)
                # tensorflow-cpu is installed where tensorflow is required.
                builds = (one for one in recipe.framework.packages if one.startswith(f"{wanted.name}-"))
                has = next(filter(None, map(image.version, (wanted.name, *builds))), None)
                if wanted.marker and not wanted.marker.evaluate(environment):
                    continue
                if has is not None and wanted.specifier.contains(has, prereleases=True):
                    continue
                what = f"requires {wanted}; the image has {has or 'none'}"
                why = "it was not made for that, and may fail where it uses it"
                where = f"package {name} {distributions[0].version}"
                yield Finding(where, what, why, image.package_remediation, severity)


def _in_code(image: Evidence, package: str) -> bool:
    """Return whether the metadata of a package is in the layer of the user's code."""
    code, site = image.stored.layers[-1].contents.files, re.escape(image.required_recipe.site)
    return any(
        canonicalize_name(match[1]) == package
        for path in code
        if (match := re.fullmatch(rf"{site}/(.+)-[^-/]+\.dist-info/METADATA", path))
    )


def _effective(everywhere: list[Distribution], package: str, image: Evidence) -> list[Distribution]:
    """Return the distributions of a name, without the base's where the lock has another version, which comes first."""
    recipe = image.required_recipe
    if not recipe.base.packages or recipe.versions.get(package) == recipe.base.packages.get(package):
        return everywhere
    return [each for each in everywhere if not image.of_base(each.folder)] or everywhere
