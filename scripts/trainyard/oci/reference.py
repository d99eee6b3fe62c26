"""Parse references of images, ``[HOST[:PORT]/]PATH[:TAG][@DIGEST]``, as Docker does.

The grammar and the normalization of short names are those of https://github.com/distribution/reference (regexp.go and
normalize.go): ``debian`` is ``docker.io/library/debian``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainyard.common.errors import UserError

#: The registry of a reference that names none.
DOCKER_HUB = "docker.io"

#: An older name of it, which normalizes to ``docker.io``.
_LEGACY_DOCKER_HUB = "index.docker.io"

#: Where Docker Hub keeps images whose name has one component.
_OFFICIAL = "library/"

#: Most characters of a repository's path (reference.go, RepositoryNameTotalLengthMax).
MAX_REPOSITORY = 255

_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_PATH = rf"{_COMPONENT}(?:/{_COMPONENT})*"
_HOST_LABEL = r"(?:[A-Za-z0-9]|[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9])"

#: Hosts of Artifact Registry: https://cloud.google.com/artifact-registry/docs/docker/names
_ARTIFACT_REGISTRY = re.compile(r"[a-z0-9-]+-docker\.pkg\.dev")

#: ``host[:port]`` of a registry.
REGISTRY = re.compile(rf"(?:{_HOST_LABEL}(?:\.{_HOST_LABEL})*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?")

#: A repository's path at its registry.
REPOSITORY = re.compile(_PATH)
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)

#: Digest algorithm -> hexadecimal digits of its digests (github.com/opencontainers/go-digest, algorithm.go).
_DIGITS = {"sha256": 64, "sha384": 96, "sha512": 128}

#: What an image ID looks like, which is not a reference.
_IDENTIFIER = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """An image at a registry.

    Attributes:
        registry: ``host[:port]``; ``docker.io`` where the text names none.
        repository: path below it, such as ``library/debian``.
        tag: empty if the text has none.
        digest: ``sha256:…``; empty if the text has none.
    """

    registry: str
    repository: str
    tag: str = ""
    digest: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the reference that ``text`` is, or raise a :class:`UserError` that says which part is wrong."""
        if not text or text != text.strip():
            raise _invalid(text, "expected [HOST[:PORT]/]PATH[:TAG][@DIGEST]")
        if "://" in text:
            raise _invalid(text, f"leave out '{text.split('://')[0]}://'")
        if _IDENTIFIER.fullmatch(text):
            raise _invalid(text, "64 hexadecimal digits are an image ID")
        name, at, digest = text.partition("@")
        if at:
            _check_digest(text, digest)
        # A colon before the last slash belongs to the port.
        head, slash, last = name.rpartition("/")
        component, colon, tag = last.partition(":")
        if colon and not _TAG.fullmatch(tag):
            rule = "letters, digits, '_', '.' and '-', at most 128, not starting with '.' or '-'"
            raise _invalid(text, f"the tag {tag!r} must consist of {rule}")
        registry, repository = _normalized(f"{head}{slash}{component}")
        if not REGISTRY.fullmatch(registry):
            raise _invalid(text, f"{registry!r} is not a registry's HOST[:PORT]")
        if repository != repository.lower():
            raise _invalid(text, f"the repository {repository!r} must be lowercase")
        if not REPOSITORY.fullmatch(repository):
            raise _invalid(text, "expected [HOST[:PORT]/]PATH[:TAG][@DIGEST]")
        if len(repository) > MAX_REPOSITORY:
            raise _invalid(text, f"the repository has more than {MAX_REPOSITORY} characters")
        return cls(registry, repository, tag, digest)

    @property
    def name(self) -> str:
        """Return registry and repository, without tag and digest."""
        return f"{self.registry}/{self.repository}"

    @property
    def familiar_name(self) -> str:
        """Return the shortest spelling of :attr:`name`, as ``docker image ls`` prints it: ``debian``."""
        if self.registry != DOCKER_HUB:
            return self.name
        short = self.repository.removeprefix(_OFFICIAL)
        # 'library/localhost/x' would read as a registry.
        return self.repository if "/" in short else short

    @property
    def names_docker_hub(self) -> bool:
        """Return whether the registry is Docker Hub, by its name or because the text names no registry."""
        return self.registry == DOCKER_HUB

    @property
    def version(self) -> str:
        """Return what selects the image in its repository: the digest, else the tag, else ``latest``."""
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        return self.name + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def why_unusable(text: str, *, pushed: bool = True) -> str:
    """Return why a text names no image; empty if it names one.

    Args:
        pushed: whether it is an image at a registry. Paths at Artifact Registry have a project, a repository and an
            image: https://cloud.google.com/artifact-registry/docs/docker/troubleshoot#push.
    """
    try:
        found = Reference.parse(text)
    except UserError as error:
        return str(error)
    if pushed and _ARTIFACT_REGISTRY.fullmatch(found.registry) and found.repository.count("/") < 2:
        return str(_invalid(text, f"the path at {found.registry} is not PROJECT/REPOSITORY/IMAGE"))
    return ""


def _invalid(text: str, why: str) -> UserError:
    shown = text if len(text) <= 100 else f"{text[:100]}…"
    return UserError(f"{shown!r} is not an image reference: {why}")


def _check_digest(text: str, digest: str) -> None:
    algorithm, _, encoded = digest.partition(":")
    digits = _DIGITS.get(algorithm)
    if digits is None:
        raise _invalid(
            text, f"the digest {digest!r} must start with one of {', '.join(f'{name}:' for name in _DIGITS)}"
        )
    if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", encoded):
        raise _invalid(text, f"a {algorithm} digest has {digits} lowercase hexadecimal digits")


def _normalized(name: str) -> tuple[str, str]:
    """Return registry and repository of a name; the first component is a registry if it cannot be part of a path."""
    first, slash, rest = name.partition("/")
    if slash and (first == "localhost" or re.search(r"[.:]", first) or first != first.lower()):
        registry, repository = (DOCKER_HUB if first == _LEGACY_DOCKER_HUB else first), rest
    else:
        registry, repository = DOCKER_HUB, name
    if registry == DOCKER_HUB and "/" not in repository:
        repository = _OFFICIAL + repository
    return registry, repository
