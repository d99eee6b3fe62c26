"""Policies in examples/policies/ have the fields of their APIs, and demand claims that Trainyard makes.

The schema here states the fields that the policies use, as config/crds/kyverno/kyverno.io_clusterpolicies.yaml of
https://github.com/kyverno/kyverno (1.19.0) has them. The policies were checked with the whole definition on 2026-11-23.
"""

from __future__ import annotations

import copy
import datetime
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.claims import CLAIMS

from trainyard.release import predicates

POLICIES = Path(__file__).resolve().parents[2] / "examples" / "policies"
KYVERNO = ("kyverno.yaml", "kyverno-claims.yaml")
TEXT = {"type": "string"}


def fields(*required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def some(items: Any) -> dict[str, Any]:
    """The schema of a list that is not empty."""
    return {"type": "array", "items": items, "minItems": 1}


def policy(version: str, kind: str, spec: Any) -> dict[str, Any]:
    metadata = fields("name", name=TEXT)
    return fields("apiVersion", "kind", "metadata", "spec",
                  apiVersion={"const": version}, kind={"const": kind}, metadata=metadata, spec=spec)  # fmt: skip


CONDITION = fields(
    "key", "operator", "value",
    key=TEXT, operator={"enum": ["Equals", "NotEquals", "AnyIn", "AllIn", "AnyNotIn", "AllNotIn"]}, value={},
)  # fmt: skip
KEYS = fields(
    "secret",
    secret=fields("name", "namespace", name=TEXT, namespace=TEXT),
    rekor=fields("url", url=TEXT, ignoreTlog={"type": "boolean"}),
    ctlog=fields(ignoreSCT={"type": "boolean"}),
)
ATTESTATION = fields(
    "type", "attestors",
    type=TEXT,
    attestors=some(fields("entries", entries=some(fields("keys", keys=KEYS)))),
    conditions=some(fields("all", all=some(CONDITION))),
)  # fmt: skip
VERIFY_IMAGES = fields(
    "type", "imageReferences", "attestations",
    type={"enum": ["Cosign", "SigstoreBundle", "Notary"]},
    failureAction={"enum": ["Audit", "Enforce"]},
    imageReferences=some(TEXT),
    attestations=some(ATTESTATION),
)  # fmt: skip
RULE = fields(
    "name", "match", "verifyImages",
    name={"type": "string", "maxLength": 63},
    match=fields("any", any=some(fields("resources", resources=fields("kinds", kinds=some(TEXT))))),
    verifyImages=some(VERIFY_IMAGES),
)  # fmt: skip
WEBHOOK = fields(
    failurePolicy={"enum": ["Ignore", "Fail"]}, timeoutSeconds={"type": "integer", "minimum": 1, "maximum": 30}
)
CLUSTER_POLICY = policy(
    "kyverno.io/v1",
    "ClusterPolicy",
    fields("rules", background={"type": "boolean"}, webhookConfiguration=WEBHOOK, rules=some(RULE)),
)


def read(name: str) -> Any:
    return yaml.safe_load((POLICIES / name).read_text(encoding="utf-8"))


def attestations(name: str) -> list[dict[str, Any]]:
    ((rule,),) = (read(name)["spec"]["rules"],)
    return [one for entry in rule["verifyImages"] for one in entry["attestations"]]


def test_every_policy_is_tested() -> None:
    assert {path.name for path in POLICIES.glob("*.yaml")} == set(KYVERNO)


@pytest.mark.parametrize("name", KYVERNO)
def test_a_policy_has_the_fields_of_its_api(name: str) -> None:
    jsonschema.validate(read(name), CLUSTER_POLICY)


@pytest.mark.parametrize("name", KYVERNO)
def test_a_misspelt_field_is_found(name: str) -> None:
    document = copy.deepcopy(read(name))
    document["spec"]["rule"] = document["spec"].pop("rules", [])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, CLUSTER_POLICY)


def test_the_policy_for_images_demands_the_claims_that_every_image_has() -> None:
    demanded = {one["type"] for one in attestations("kyverno-claims.yaml")}
    assert demanded == {predicates.TYPES[kind] for kind in predicates.ABOUT_IMAGES}


def test_the_policy_for_what_was_promoted_demands_the_summary() -> None:
    (one,) = attestations("kyverno.yaml")
    assert one["type"] == predicates.TYPES["summary"]
    assert one["conditions"][0]["all"][0]["value"] == predicates.VERIFIER


@pytest.mark.parametrize("name", KYVERNO)
def test_the_claims_of_an_image_meet_the_conditions(name: str) -> None:
    """Kyverno evaluates the conditions for each statement of the type, with its predicate as the context."""
    summary = predicates.summary("pkg:oci/trainyard", predicates.ABOUT_IMAGES, [], datetime.datetime.now(datetime.UTC))
    for one in attestations(name):
        claims = [claim for claim in [*CLAIMS, summary] if predicates.TYPES[claim.kind] == one["type"]]
        assert claims
        for condition in [each for group in one.get("conditions", []) for each in group["all"]]:
            for claim in claims:
                value = field_of(claim.predicate, condition["key"])
                expected = condition["value"] if condition["operator"] == "AnyIn" else [condition["value"]]
                assert value in expected


def field_of(predicate: Any, expression: str) -> Any:
    """The value of ``{{ path.of.a.field }}``."""
    found = re.fullmatch(r"\{\{ ([\w.]+) \}\}", expression)
    assert found
    for name in found[1].split("."):
        predicate = predicate[name]
    return predicate


@pytest.mark.parametrize("name", KYVERNO)
def test_no_entry_of_a_transparency_log_is_demanded(name: str) -> None:
    """Bundles that are signed with a key have none; Kyverno demands one by default."""
    for one in attestations(name):
        for entry in one["attestors"][0]["entries"]:
            assert entry["keys"]["rekor"]["ignoreTlog"] is entry["keys"]["ctlog"]["ignoreSCT"] is True
