"""Write what the claims about an image say: the predicates of in-toto statements.

https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trainyard
from trainyard.common.errors import UserError
from trainyard.image import provenance as buildkit
from trainyard.oci import attached_sbom, statements
from trainyard.spec.state import SmokeResult, VerifyResult

_TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"

#: Kind of claim -> predicate type. cosign's names for some of the types are in docs/supply-chain.md.
TYPES = {
    "signature": "https://sigstore.dev/cosign/sign/v1",  # what 'cosign sign' writes: it says nothing more
    "sbom": attached_sbom.PREDICATE,
    "provenance": f"{buildkit.SLSA}v1",
    "verify": _TEST_RESULT,
    "smoke": _TEST_RESULT,
    "summary": "https://slsa.dev/verification_summary/v1",
}

#: The kinds of claims that every image has which is built with provenance and pushed.
ABOUT_IMAGES = ("sbom", "provenance", "verify", "smoke")

#: Who builds, where BuildKit names none; SLSA requires a name.
BUILDER = "https://trainyard.io/builder@v1"

#: Who writes verification summaries, and by which policy; the claims that were demanded follow as a query.
VERIFIER, POLICY = "https://trainyard.io/promote@v1", "https://trainyard.io/policies/promote@v1"

#: Provenance of version 1 by BuildKit
#: (https://github.com/moby/buildkit/blob/master/docs/attestations/slsa-definitions.md).
_BUILD_TYPE = "https://github.com/moby/buildkit/blob/master/docs/attestations/slsa-definitions.md"

#: Metadata of provenance in version 0.2 -> its name in version 1.
_METADATA = {
    "buildInvocationID": "invocationId",
    "buildStartedOn": "startedOn",
    "buildFinishedOn": "finishedOn",
    "https://mobyproject.org/buildkit@v1#metadata": "buildkit_metadata",
    "https://mobyproject.org/buildkit@v1#hermetic": "buildkit_hermetic",
    "reproducible": "buildkit_reproducible",
}

#: Levels of the smoke test, in the order in which a command reaches them.
_LEVELS = ("started", "ran", "trained")

#: What else a smoke test found out -> the name of that test.
_TESTS = {
    "accuracy": "accuracy",
    "resumed_from": "resume",
    "continued_from": "continue",
    "writes_output": "output",
    "seconds_to_stop": "stop",
    "tpu_states": "tpu-address",
    "restricted": "restricted-container",
    "killed_while_saving": "memory-limit",
    "processes": "two-processes",
    "worker_processes": "worker-processes",
}


@dataclass(frozen=True)
class Claim:
    """Hold a document about an image, to be signed or attached as it is: ``kind`` is one of :data:`TYPES`."""

    kind: str
    predicate: Mapping[str, Any]


def kind_of(predicate_type: str, predicate: Mapping[str, Any]) -> str:
    """Return the kind of a claim; the predicate type for one that Trainyard does not make."""
    if predicate_type == _TEST_RESULT:
        match predicate.get("configuration"):
            case [{"name": "trainyard-verify"}, *_]:
                return "verify"
            case [{"name": "trainyard-smoke"}, *_]:
                return "smoke"
        return predicate_type
    return next((kind for kind, one in TYPES.items() if one == predicate_type), predicate_type)


def says_failed(kind: str, predicate: Mapping[str, Any]) -> bool:
    """Return whether a claim is the result of a test that did not pass."""
    return TYPES.get(kind) == _TEST_RESULT and predicate.get("result") not in ("PASSED", "WARNED")


def signature() -> Claim:
    """Claim that the signer has seen the image."""
    return Claim("signature", {})


def sbom(text: str) -> Claim:
    """Claim what is in an image, by a CycloneDX document."""
    return Claim("sbom", json.loads(text))


def _test_result(name: str, passed: Iterable[str], warned: Iterable[str] = ()) -> Claim:
    """Claim that an image passed a test (https://github.com/in-toto/attestation/blob/main/spec/predicates/test-result.md)."""
    tests = {"passedTests": sorted(passed), "warnedTests": sorted(warned), "failedTests": []}
    tool = {"name": f"trainyard-{name}", "uri": f"pkg:pypi/trainyard-images@{trainyard.__version__}"}
    return Claim(name, {"result": "WARNED" if tests["warnedTests"] else "PASSED", "configuration": [tool], **tests})


def verify(result: VerifyResult) -> Claim:
    """Claim which rules an image meets that passed verify; a rule with a note is a warning."""
    warned = {str(note["rule"]) for note in result.get("notes", [])}
    return _test_result("verify", set(result.get("rules", [])) - warned, warned)


def smoke(result: SmokeResult) -> Claim:
    """Claim how far an image was tested that passed the smoke test."""
    level = result.get("level")
    reached = _LEVELS[: _LEVELS.index(level) + 1] if level in _LEVELS else ["environment"] * (level == "environment")
    tested = {key for key, value in result.items() if value is not False}
    return _test_result("smoke", [*reached, *(test for key, test in _TESTS.items() if key in tested)])


def summary(resource: str, kinds: Sequence[str], inputs: Iterable[str], now: datetime.datetime) -> Claim:
    """Claim that the claims about an image were verified (https://slsa.dev/spec/v1.0/verification_summary).

    Provenance that is signed by whoever builds is SLSA's build level 1.

    Args:
        resource: the image, as a package URL.
        kinds: of the claims that were demanded, all of which are valid.
        inputs: digests of the artifacts with those claims.
    """
    level = 1 if "provenance" in kinds else 0
    predicate = {
        "verifier": {"id": VERIFIER, "version": {"trainyard": trainyard.__version__}},
        "timeVerified": statements.rfc_3339(now),
        "resourceUri": resource,
        "policy": {"uri": f"{POLICY}?claims={','.join(kinds)}"},
        "inputAttestations": [{"digest": dict([digest.split(":", 1)])} for digest in inputs],
        "verificationResult": "PASSED",
        "verifiedLevels": [f"SLSA_BUILD_LEVEL_{level}"],
        "slsaVersion": "1.0",
    }
    return Claim("summary", predicate)


def kinds_in(text: str) -> list[str]:
    """Return the kinds of claims in a text such as ``sbom,provenance``, or raise a :class:`UserError`."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    if not kinds or not set(kinds) <= set(ABOUT_IMAGES):
        raise UserError(f"'--claims {text}': give some of {','.join(ABOUT_IMAGES)}, separated by commas")
    return kinds


def provenance(statement: Mapping[str, Any]) -> Claim:
    """Claim how an image was built, by BuildKit's statement, as SLSA 1.0 has it.

    Older versions of BuildKit write version 0.2. Its fields become those that BuildKit itself writes in version 1.
    """
    predicate = statement["predicate"]
    if statement["predicateType"] != TYPES["provenance"]:
        predicate = _version_1(predicate)
    details = predicate["runDetails"]
    builder = details["builder"] | {"id": details["builder"].get("id") or BUILDER}
    return Claim("provenance", predicate | {"runDetails": details | {"builder": builder}})


def _version_1(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return provenance of version 0.2 as version 1."""
    invocation, metadata = old["invocation"], old.get("metadata", {})
    source, completeness = invocation.get("configSource", {}), metadata.get("completeness", {})
    environment = dict(invocation.get("environment", {}))
    internal = {"builderPlatform": environment.pop("platform", ""), **environment}
    return {
        "buildDefinition": {
            "buildType": _BUILD_TYPE,
            "externalParameters": {
                "configSource": _renamed(source, {"uri": "uri", "digest": "digest", "entryPoint": "path"}),
                "request": invocation.get("parameters", {}),
            },
            "internalParameters": internal | _renamed(old, {"buildConfig": "buildConfig"}),
            "resolvedDependencies": list(old.get("materials", [])),
        },
        "runDetails": {
            "builder": dict(old["builder"]),
            "metadata": {
                **_renamed(metadata, _METADATA),
                "buildkit_completeness": {
                    "request": bool(completeness.get("parameters")),
                    "resolvedDependencies": bool(completeness.get("materials")),
                },
            },
        },
    }


def _renamed(found: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of ``found`` that ``names`` lists, under their new names."""
    return {new: found[old] for old, new in names.items() if old in found}
