"""Check that nothing else is configured than what the recipe gives."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard import recipe as recipes
from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import secret_scan
from trainyard.oci.reference import Reference
from trainyard.spec import naming

#: Label of a bootstrapped base, whose reference is ``trainyard-base:<name>``, maybe with an architecture
#: (:func:`trainyard.image.base_image.bootstrap`).
_BASE_LABEL = f"{naming.LABELS}.base"

#: Variable -> what it changes, of those that change what runs before the first line of a trainer.
#: https://docs.python.org/3/using/cmdline.html#environment-variables, ld.so(8), bash(1)
_BEFORE_THE_TRAINER = {
    "PYTHONPATH": "Python imports modules from there before those of the image",
    "PYTHONHOME": "Python takes its standard library from there",
    "PYTHONSTARTUP": "Python runs that file in every interactive session",
    "PYTHONINSPECT": "Python waits for input after the trainer ends",
    "PYTHONOPTIMIZE": "Python skips assertions, and uses other byte code",
    "PYTHONWARNINGS": "Python imports the classes that it names",
    "PYTHONBREAKPOINT": "Python calls what it names at every breakpoint",
    "PYTHONDONTWRITEBYTECODE": "Python compiles the user's code in every container",
    "PYTHONUSERBASE": "Python imports packages from there",
    "LD_PRELOAD": "the loader puts that library before all others in every process",
    "LD_LIBRARY_PATH": "the loader takes libraries from there first",
    "LD_AUDIT": "the loader runs that library in every process",
    "BASH_ENV": "bash runs that file before every script",
    "ENV": "sh runs that file when it starts",
}

#: Variables of the official images of Python: https://github.com/docker-library/python/blob/master/Dockerfile-linux.template
_OF_PYTHON = {"GPG_KEY", "LANG", "PYTHON_SHA256", "PYTHON_VERSION"}

#: Part of a configuration -> what it does, of those that no recipe has.
#: https://github.com/opencontainers/image-spec/blob/main/config.md#properties, and Docker's additions:
#: https://github.com/moby/docker-image-spec/blob/main/spec.md
_UNUSED = {
    "ExposedPorts": "'docker run -P' publishes them, and scanners report them",
    "Volumes": "every container gets an anonymous volume there, which hides what the image has and is left behind",
    "OnBuild": "it runs in every image that is built from this one",
    "Shell": "RUN instructions of images that are built from this one run in it, also those of dev containers",
    "Healthcheck": "Docker runs it in every container, and calls the training unhealthy if it fails",
    "StopSignal": "the trainer is stopped by another signal than SIGTERM, on which it saves a checkpoint",
}


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def nothing_else_is_configured(image: Evidence) -> Iterator[Finding]:
    """The configuration has no variable, label or property that the recipe does not give."""
    recipe = image.required_recipe
    severity = Severity.REFUSE if _base_is_known(image) else Severity.NOTE
    fix = f"run '{recipe.command('dev render')}' and '{recipe.command('dev build')}'"
    of_base = _OF_PYTHON if "/library/python:" in recipe.base.reference else set()
    for variable in sorted(image.environment.keys() - recipe.environment.keys() - of_base):
        why = _BEFORE_THE_TRAINER.get(variable, "programs in the image may read it")
        what = f"is {_shown(variable, image.environment[variable])}; the recipe gives none"
        yield Finding(f"ENV {variable}", what, why, fix, severity)
    known = {*recipe.image_labels(), *recipes.LABELS_OF_BUILDS, recipes.DIGEST, _BASE_LABEL}
    for label in sorted(image.labels.keys() - known):
        what = f"{_shown(label, image.labels[label])}; the recipe gives none"
        yield Finding(f"label {label}", what, "tools and users choose images by their labels", fix, severity)
    base = image.labels.get(_BASE_LABEL, recipe.base.name)  # of a base that was bootstrapped
    if base != recipe.base.name:
        what = f"{base!r}; the recipe gives {recipe.base.name!r}"
        yield Finding(f"label {_BASE_LABEL}", what, "tools and users choose images by their labels", fix, severity)
    if author := image.stored.config.get("author"):
        yield Finding("author", f"{author!r}; the recipe gives none", "tools show it as the maintainer", fix, severity)
    expected = {"Env", "Labels", "Entrypoint", "Cmd", "User", "WorkingDir", "ArgsEscaped"}
    for name, value in sorted(image.settings.items()):
        if not value or name in expected:
            continue
        why = _UNUSED.get(name, "containers start in another way than the recipe says")
        yield Finding(name, f"{value}; the recipe gives none", why, fix, severity)


def _shown(name: str, value: str) -> str:
    """Return a value for messages, which never repeat what may be a secret."""
    return "a secret" if secret_scan.in_setting(name, value) else repr(value)


def _base_is_known(image: Evidence) -> bool:
    """Return whether the base has no unknown variable, label or property that is inherited.

    That is so of official images and of bootstrapped ones. A base that holds the framework, or that was set with BASE,
    may have any.
    """
    if not image.base_is_debian:
        return False
    given, base = image.labels.get("org.opencontainers.image.base.name", ""), image.required_recipe.base
    bootstrapped = given.startswith(f"{naming.NAME}-base:{base.name}")
    return bootstrapped or given.partition("@")[0] in (base.reference, Reference.parse(base.reference).name)
