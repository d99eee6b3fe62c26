"""Check the configuration: containers start as the spec says, and nothing else is configured."""

from __future__ import annotations

from collections.abc import Iterator

from trainyard.common.rule_engine import Finding, Severity, rule
from trainyard.image import base_image, dockerfile, plan
from trainyard.lint.image.evidence import Evidence
from trainyard.oci import secret_scan
from trainyard.oci.reference import Reference
from trainyard.spec import naming
from trainyard.spec.model import Spec
from trainyard.spec.workspace import FOLDER

#: The shell of the Dockerfile's RUN instructions, which Docker keeps in the configuration.
_SHELL = ["/bin/bash", "-Eeuo", "pipefail", "-c"]

#: Label of a bootstrapped base (:func:`trainyard.image.base_image.bootstrap`).
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

#: Part of a configuration -> what it does, of those that no spec has.
#: https://github.com/opencontainers/image-spec/blob/main/config.md#properties, and Docker's additions:
#: https://github.com/moby/docker-image-spec/blob/main/spec.md
_UNUSED = {
    "ExposedPorts": "'docker run -P' publishes them, and scanners report them",
    "Volumes": "every container gets an anonymous volume there, which hides what the image has and is left behind",
    "OnBuild": "it runs in every image that is built from this one",
    "Healthcheck": "Docker runs it in every container, and calls the training unhealthy if it fails",
    "StopSignal": "the trainer is stopped by another signal than SIGTERM, on which it saves a checkpoint",
}


@rule(
    "target",
    severity=Severity.REFUSE,
    source="docs/launcher-contract.md#r15.2; docs/anatomy.md#optional-keys-of-a-spec",
)
def starts_as_specified(image: Evidence) -> Iterator[Finding]:
    """The entry point is the launcher under tini, and user, variables and working directory match."""
    spec = image.required_spec
    expected = ["tini", "--", "launch"]
    fix = _build_again(spec)
    if (entrypoint := image.settings.get("Entrypoint")) != expected:
        why = "without tini nothing reaps processes, without the launcher no accelerator is found"
        yield Finding("ENTRYPOINT", f"{entrypoint}; expected {expected}", why, fix)
    for variable, value in dockerfile.environment(spec).items():
        if image.environment.get(variable) != value:
            what = f"is {image.environment.get(variable)!r}; the spec gives {value!r}"
            why = "drivers and libraries are found by it"
            yield Finding(f"ENV {variable}", what, why, fix)
    # That of a base that holds the framework is part of it.
    path, given = dockerfile.search_path(spec), image.environment.get("PATH", "")
    before, _, after = path.partition("$PATH")
    if not (given.startswith(before) and given.endswith(after) if "$PATH" in path else given == path):
        yield Finding("ENV PATH", f"is {given!r}; the spec gives {path!r}", "other programs are found first", fix)
    folder = image.settings.get("WorkingDir")
    if folder != FOLDER:
        why = "relative paths in the commands of jobs mean other files"
        yield Finding("WORKDIR", f"{folder!r}; expected {FOLDER!r}", why, fix)
    user = str(image.settings.get("User") or "root")
    if user != "1000":
        why = "clusters with a restricted policy refuse to run root, and other users cannot write to the home directory"
        yield Finding("USER", f"{user!r}; expected '1000'", why, fix)
    if image.settings.get("Cmd"):
        yield Finding("CMD", f"{image.settings['Cmd']}; expected none", "the launcher starts it, not the default", fix)


@rule("target", severity=Severity.REFUSE, source="docs/anatomy.md#checking-an-image")
def nothing_else_is_configured(image: Evidence) -> Iterator[Finding]:
    """The configuration has no variable, label or property that the spec does not give."""
    spec = image.required_spec
    severity = Severity.REFUSE if _base_is_known(image) else Severity.NOTE
    fix = _build_again(spec)
    for variable in sorted(image.environment.keys() - dockerfile.environment(spec).keys() - {"PATH"}):
        why = _BEFORE_THE_TRAINER.get(variable, "programs in the image may read it")
        what = f"is {_shown(variable, image.environment[variable])}; the spec gives none"
        yield Finding(f"ENV {variable}", what, why, fix, severity)
    known = {*plan.labels(spec), *plan.labels_from_arguments(spec), _BASE_LABEL}
    for label in sorted(image.labels.keys() - known):
        what = f"{_shown(label, image.labels[label])}; the spec gives none"
        yield Finding(f"label {label}", what, "tools and users choose images by their labels", fix, severity)
    if author := image.stored.config.get("author"):
        yield Finding("author", f"{author!r}; the spec gives none", "tools show it as the maintainer", fix, severity)
    expected = {"Env", "Labels", "Entrypoint", "Cmd", "User", "WorkingDir", "ArgsEscaped"}
    for name, value in sorted(image.settings.items()):
        if not value or name in expected or (name, value) == ("Shell", _SHELL):
            continue
        why = _UNUSED.get(name, "containers start in another way than the spec says")
        yield Finding(name, f"{value}; the spec gives none", why, fix, severity)


def _shown(name: str, value: str) -> str:
    """Return a value for messages, which never repeat what may be a secret."""
    return "a secret" if secret_scan.in_setting(name, value) else repr(value)


def _build_again(spec: Spec) -> str:
    return f"run '{spec.command('dev render')}' and '{spec.command('dev build')}'"


def _base_is_known(image: Evidence) -> bool:
    """Return whether the base has no variable, label or property that is inherited, but PATH.

    That is so of Debian's images and of bootstrapped ones. A base that holds the framework, or that was set with BASE,
    may have any.
    """
    spec = image.required_spec
    if not image.base_is_debian:
        return False
    base, debian = image.labels.get("org.opencontainers.image.base.name", ""), spec.base_spec().image
    bootstrapped = base_image.local_reference(spec.base, spec.architecture)
    return base == bootstrapped or base.partition("@")[0] in (debian, Reference.parse(debian).name)
