"""What must hold for an image to be what its tag says: one function a rule, found by :data:`RULES`.

A rule takes the :class:`Evidence` and yields a :class:`Finding` for everything that breaks it; the first line of its
docstring is what it promises. To add a rule, write a function and decorate it with :func:`rule`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from scripts import leaks, locks, plan, render
from scripts.layers import Layer, Stored
from scripts.lock import requirements_of
from scripts.spec import Spec, relative
from scripts.units import in_units

#: Findings of one rule that are told one by one; the rest is counted.
SHOWN = 20

#: What an immutable tag looks like (:func:`scripts.plan.make_plan`): target, version, day, content hash.
_TAG = r"{target}-{version}-\d{{8}}-[0-9a-f]{{8}}"


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be.

    Attributes:
        rule: name of the rule it breaks.
        where: file, layer, label or package.
        what: what was found there, and what was expected.
        why: what goes wrong for users because of it.
        fix: what to do.
        note: whether it is said loudly but does not fail the image.
    """

    rule: str
    where: str
    what: str
    why: str
    fix: str
    note: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Package:
    """A distribution that Python finds inside the image; ``bytes`` on disk with its byte code."""

    name: str
    version: str
    folder: str
    requires: tuple[str, ...]
    bytes: int


@dataclass(frozen=True)
class Inside:
    """What scripts/probe.py saw from inside: ``texts`` maps a file's name to its content, where the file exists."""

    python: str
    packages: tuple[Package, ...]
    sources: int
    missing: tuple[str, ...]
    stale: tuple[str, ...]
    texts: dict[str, str]


@dataclass(frozen=True)
class Evidence:
    """All that is known about an image; rules look at nothing else.

    Attributes:
        reference: how the image was named, for messages.
        tags: the engine's names for the same digest.
        stored: configuration and layers.
        build: facts that `make build` recorded for this digest, or None if it was built elsewhere.
    """

    spec: Spec
    reference: str
    tags: tuple[str, ...]
    stored: Stored
    inside: Inside
    build: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any]:
        """The ``config`` part of the OCI configuration."""
        return dict(self.stored.config.get("config") or {})

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.get("Labels") or {})

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.partition("=")[::2] for entry in self.settings.get("Env") or [])

    @property
    def index(self) -> str:
        """Name of the index the framework came from, by the image's label; the spec's if the label says nonsense."""
        label = self.labels.get(f"{plan.LABELS}.index", "")
        return label if label in ("default", self.spec.framework.index) else self.spec.framework.index

    @property
    def fell_back(self) -> bool:
        """Whether the framework came from the default index because the spec's did not answer."""
        return self.index != self.spec.framework.index

    @property
    def ours(self) -> list[Layer]:
        return [layer for layer in self.stored.layers if layer.ours]

    @property
    def size(self) -> int:
        """Bytes of all files in all layers: what the image takes on a disk, unpacked."""
        return sum(layer.contents.size for layer in self.stored.layers)

    @cached_property
    def locked(self) -> dict[str, str]:
        return locks.installed(self.spec, self.index)

    @cached_property
    def installed(self) -> dict[str, list[Package]]:
        """Canonical name -> the distributions of that name: one, unless something is wrong."""
        found: dict[str, list[Package]] = {}
        for package in self.inside.packages:
            found.setdefault(canonicalize_name(package.name), []).append(package)
        return found

    def version(self, name: str) -> str | None:
        """Version of an installed distribution, or None."""
        packages = self.installed.get(canonicalize_name(name))
        return packages[0].version if packages else None

    @cached_property
    def recorded(self) -> dict[str, str]:
        """Path -> SHA-256 of what the locked wheels brought, as they themselves say."""
        found: dict[str, str] = {}
        for layer in self.ours:
            if layer.kind == "copied":
                found |= layer.contents.records
        return found

    def publicly_known(self, path: str, sha256: str) -> bool:
        """Whether a file is, byte for byte, part of a locked wheel: what anyone can download is nobody's secret."""
        return self.recorded.get(path) == sha256


Rule = Callable[[Evidence], Iterator[Finding]]

#: Every rule, in the order in which they are told.
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def title(function: Rule) -> str:
    """What a rule promises."""
    return (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")


def check(evidence: Evidence) -> dict[str, list[Finding]]:
    """Rule name -> findings, for every rule; more than :data:`SHOWN` of a rule end in one that counts the rest."""
    found: dict[str, list[Finding]] = {}
    for function in RULES:
        findings = list(function(evidence))
        if len(findings) > SHOWN:
            last = findings[SHOWN]
            rest = Finding(last.rule, "and", f"{len(findings) - SHOWN} more", last.why, last.fix, last.note)
            findings = [*findings[:SHOWN], rest]
        found[function.__name__] = findings
    return found


# What the image says about itself.


@rule
def labels_match_spec(image: Evidence) -> Iterator[Finding]:
    """Labels say what the spec says."""
    build = image.build or {}
    name = rf"{image.spec.target}-{image.spec.framework.version}"
    tag = _TAG.format(target=re.escape(image.spec.target), version=re.escape(image.spec.framework.version))
    pinned = image.labels.get("org.opencontainers.image.base.name", "").partition("@")[2]
    # What the build's arguments may have been: a pattern, and how to say it.
    allowed = {
        "CREATED": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "a time such as 2026-11-20T12:00:00Z"),
        "REVISION": (r"[0-9a-f]{40}(-dirty)?|unknown", "a commit"),
        "VERSION": (re.escape(build["tag"]) if "tag" in build else tag, build.get("tag", f"{name}-<day>-<hash>")),
        "BASE": (re.escape(build["base"]) if "base" in build else r".+", build.get("base", "the base's reference")),
        "BASE_DIGEST": (re.escape(pinned), pinned or "nothing, as the base's name has no digest"),
        "INDEX": (
            re.escape(build["index"]) if "index" in build else "|".join({"default", image.spec.framework.index}),
            build.get("index", f"'default' or '{image.spec.framework.index}'"),
        ),
    }
    expected = {label: (re.escape(text), repr(text)) for label, text in plan.labels(image.spec).items()}
    expected |= {label: allowed[argument] for label, argument in plan.LABELS_FROM_ARGUMENTS.items()}
    for label, (pattern, words) in expected.items():
        value = image.labels.get(label)
        if value is None or not re.fullmatch(pattern, value):
            yield Finding(
                "labels_match_spec",
                f"label {label}",
                f"{'missing' if value is None else repr(value)}; expected {words}",
                "tools and people choose images by their labels",
                f"make build TARGET={image.spec.target}",
            )


@rule
def tags_match_spec(image: Evidence) -> Iterator[Finding]:
    """Local tags name this target and no other."""
    target, version = image.spec.target, image.spec.framework.version
    moving = {target, f"{target}-candidate", f"{target}-{version}"}
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


@rule
def image_json_matches_spec(image: Evidence) -> Iterator[Finding]:
    """image.json, which the launcher reads, says what the spec says."""
    where, fix = "/opt/trainyard/image.json", f"make build TARGET={image.spec.target}"
    why = "the launcher starts trainers and reports versions by it"
    expected = json.loads(render.image_json(image.spec))
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


@rule
def starts_as_specified(image: Evidence) -> Iterator[Finding]:
    """It starts the launcher under tini, as a user that is not root."""
    expected = ["tini", "--", "launch"]
    fix = f"make render and make build TARGET={image.spec.target}"
    if image.settings.get("Entrypoint") != expected:
        yield Finding(
            "starts_as_specified",
            "ENTRYPOINT",
            f"{image.settings.get('Entrypoint')}; expected {expected}",
            "without tini nothing reaps processes, without the launcher no accelerator is found",
            fix,
        )
    user = str(image.settings.get("User") or "root")
    if user.partition(":")[0] in ("root", "0"):
        yield Finding(
            "starts_as_specified", "USER", f"{user!r}", "clusters with a restricted policy refuse to run root", fix
        )


# Spec = lock = installed.


@rule
def pins_reach_the_lock(image: Evidence) -> Iterator[Finding]:
    """Every pin of the spec is in the lock."""
    lock = relative(locks.requirements_lock(image.spec, image.index))
    for text in [*image.spec.framework.packages, *requirements_of(image.spec)]:
        pin = Requirement(text)
        locked = image.locked.get(canonicalize_name(pin.name))
        if locked is None or not pin.specifier.contains(locked, prereleases=True):
            yield Finding(
                "pins_reach_the_lock",
                image.spec.where,
                f"asks for {text}, the lock {'has none' if locked is None else f'has {locked}'}",
                "the image is built from the lock: the pin has no effect",
                f"make lock TARGET={image.spec.target}, and look at {lock}",
            )


@rule
def installed_matches_locks(image: Evidence) -> Iterator[Finding]:
    """Installed packages are the locked ones: none other, none missing, none twice."""
    name = "installed_matches_locks"
    fix = f"make build TARGET={image.spec.target}; to change what is in it, edit the spec and make lock"
    for package, version in image.locked.items():
        if package not in image.installed:
            why = "an import that the lock promises fails"
            yield Finding(name, f"package {package}", f"is not installed; the lock has {version}", why, fix)
    for package, found in image.installed.items():
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


def _same(one: str, other: str) -> bool:
    """Whether two versions are equal (PEP 440), local part included."""
    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return one == other


# What the framework was built for.


def torch_build(text: str) -> tuple[str | None, str | None]:
    """``__version__`` and ``cuda`` in the text of a torch or torchvision version.py; None where not assigned."""
    version = re.search(r"(?m)^__version__(?:: *\w+)? *= *['\"]([^'\"]+)['\"]", text)
    cuda = re.search(r"(?m)^cuda(?:: *[\w\[\]]+)? *= *['\"]([^'\"]+)['\"]", text)
    return version[1] if version else None, cuda[1] if cuda else None


@rule
def torch_is_the_build_of_its_index(image: Evidence) -> Iterator[Finding]:
    """torch and torchvision are the builds of the index that the label names."""
    name, fix = "torch_is_the_build_of_its_index", f"make lock and make build TARGET={image.spec.target}"
    text = image.inside.texts.get("torch/version.py")
    if text is None:
        return
    where = "torch/version.py"
    version, cuda = torch_build(text)
    installed = image.version("torch") or ""
    if version is None or Version(version).public != Version(installed).public:
        what = f"says {version}, the package's metadata {installed}"
        yield Finding(name, where, what, "torch itself is not the version that pip and the tag say", fix)
        return
    # PyTorch's indexes are called after the local version of their wheels: …/whl/cpu has +cpu, …/whl/cu128 has +cu128.
    variant = image.index.removeprefix("pytorch-") if image.index.startswith("pytorch-") else None
    local = Version(version).local
    if variant is not None and local != variant:
        what = f"is {version}; index {image.index} has +{variant}"
        yield Finding(name, where, what, "the image is another variant than it says", fix)
    named_cuda = re.fullmatch(r"cu(\d+)(\d)", local or "")
    expected_cuda = f"{named_cuda[1]}.{named_cuda[2]}" if named_cuda else None
    if local is not None and cuda != expected_cuda:
        what = f"torch.version.cuda is {cuda}, {version} means {expected_cuda}"
        yield Finding(name, where, what, "torch was built for another accelerator than its version says", fix)
    vision = torch_build(image.inside.texts.get("torchvision/version.py", ""))[0]
    if vision is not None and Version(vision).local != local:
        why = "their operators do not load together: torch and torchvision must come from one index"
        yield Finding(name, "torchvision/version.py", f"is {vision} beside torch {version}", why, fix)


@rule
def torch_xla_has_its_libtpu(image: Evidence) -> Iterator[Finding]:
    """libtpu is the one that torch_xla asks for, and torch the one it was built for."""
    name, fix = "torch_xla_has_its_libtpu", f"correct the pins in {image.spec.where}, then make lock and make build"
    for package in image.installed.get("torch-xla", []):
        installed = image.version("libtpu")
        for requirement in map(Requirement, package.requires):
            wants_tpu = requirement.marker is not None and 'extra == "tpu"' in str(requirement.marker)
            if requirement.name != "libtpu" or not wants_tpu:
                continue
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                needs = f"torch_xla {package.version} needs libtpu{requirement.specifier}"
                what = f"is {installed or 'not installed'}; {needs}"
                why = "torch_xla loads libtpu by its exact interface: another one ends in a crash on the TPU"
                yield Finding(name, "package libtpu", what, why, fix)
        torch = Version(image.version("torch") or "0")
        if torch.release[:2] != Version(package.version).release[:2]:
            what = f"is {torch} beside torch_xla {package.version}"
            why = "torch_xla links to the C++ interface of the torch release of its own number"
            yield Finding(name, "package torch", what, why, fix)


def tensorflow_build(text: str) -> dict[str, Any]:
    """``build_info`` of the text of TensorFlow's build_info.py, read without running it; empty if it has none."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "build_info":
            value = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
            return dict(ast.literal_eval(value))
    return {}


@rule
def tensorflow_has_its_cudnn(image: Evidence) -> Iterator[Finding]:
    """TensorFlow's build matches the variant asked for and the cuDNN present."""
    name, fix = "tensorflow_has_its_cudnn", f"correct the pins in {image.spec.where}, then make lock and make build"
    where = "tensorflow/python/platform/build_info.py"
    text = image.inside.texts.get(where)
    if text is None:
        return
    build = tensorflow_build(text)
    if not build:
        yield Finding(name, where, "has no build_info", "what TensorFlow was built for cannot be told", fix)
        return
    cuda = bool(build.get("is_cuda_build"))
    if cuda and "tensorflow-cpu" in image.installed:
        what = "is a CUDA build under the name tensorflow-cpu"
        yield Finding(name, where, what, "the image is larger and another one than it says", fix)
    if not cuda or not any(package.startswith("nvidia-") for package in image.installed):
        return  # a CUDA build without CUDA packages runs on the CPU, as tensorflow from the default index does
    wanted = str(build.get("cudnn_version", "")).split(".")[0]
    found = next((one for package, one in image.installed.items() if package.startswith("nvidia-cudnn-")), None)
    if wanted and (found is None or str(Version(found[0].version).major) != wanted):
        what = f"{found[0].version if found else 'none'} is installed; TensorFlow was built with cuDNN {wanted}"
        why = "TensorFlow looks for the cuDNN of its build, and finding none, trains without the GPU"
        yield Finding(name, "package nvidia-cudnn", what, why, fix)


# What must not be in it.


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
        if layer.kind in ("base", "below"):
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
                yield Finding(name, f"/{path}", f"is stored by layer {hidden} and deleted by {layer.stage}", why, fix)
        for path, file in layer.contents.files.items():
            if path in owner and not (layer.kind == "below" and _PACKAGE_DATABASE.fullmatch(path)):
                what = f"is stored by layer {owner[path]} and again by {layer.stage} ({in_units(file.size)})"
                yield Finding(name, f"/{path}", what, why, fix)
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
                )


# What it costs to use.


@rule
def imports_do_not_compile(image: Evidence) -> Iterator[Finding]:
    """Every source has byte code of its own, so that no container compiles at its start."""
    fix = "run templates/seal.sh last in the stage that makes the layer"
    for path in image.inside.missing:
        why = "every new container compiles it again: an import of a big framework then takes seconds longer"
        yield Finding("imports_do_not_compile", path, "has no byte code that Python would use", why, fix)
    for path in image.inside.stale:
        why = "Python trusts it without a check, and runs something else than the source says"
        yield Finding("imports_do_not_compile", path, "has the byte code of another source", why, fix)


@rule
def size_within_budget(image: Evidence) -> Iterator[Finding]:
    """The unpacked size is within the spec's budget."""
    over = image.size - image.spec.budget.size
    if over <= 0:
        return
    by_layer = ", ".join(
        f"{layer.stage} {in_units(layer.contents.size)}"
        for layer in sorted(image.stored.layers, key=lambda layer: -layer.contents.size)
        if layer.contents.size > image.size // 50
    )
    packages = ", ".join(f"{package.name} {in_units(package.bytes)}" for package in heaviest(image.inside.packages, 5))
    what = f"{in_units(image.size)}, {in_units(over)} over the budget of {in_units(image.spec.budget.size)}"
    what += f": {by_layer}; of packages {packages}"
    if image.fell_back:
        what += (
            f". The framework came from the default index instead of {image.spec.framework.index}; the budget is not "
            "about the builds found there, so this is no failure"
        )
    yield Finding(
        "size_within_budget",
        image.reference,
        what,
        "pulling takes longer on every node, and some platforms refuse big images",
        f"leave out what is not needed, or raise budget.size in {image.spec.where} and say why in the commit",
        note=image.fell_back,
    )


def heaviest(packages: tuple[Package, ...], count: int) -> list[Package]:
    """The packages that take most bytes."""
    return sorted(packages, key=lambda package: -package.bytes)[:count]
