"""The structure of a JobSet (jobset.x-k8s.io/v1alpha2), for fakes: field names, types, enums and required fields.

Written down from the custom resource definition that a cluster's API server validates JobSets with:
https://github.com/kubernetes-sigs/jobset/blob/08dfbdfd682714a9ab929633eca8dc95315187e7/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
It is separate from Trainyard's schema, which tests compare with the fakes. Job templates are validated as Jobs.
"""

from __future__ import annotations

from typing import Any

_TEXT: dict[str, Any] = {"type": "string"}
_WHOLE: dict[str, Any] = {"type": "integer"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_SWITCH: dict[str, Any] = {"type": "boolean"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}


def _choice(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


def _message(required: str = "", **properties: Any) -> dict[str, Any]:
    """A mapping with these fields and no others; ``required`` lists the names of required ones."""
    found = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required.split()} if required else {})


def _list(items: dict[str, Any], most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": items} | ({"maxItems": most} if most else {})


_ACTIONS = _choice(
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts"
)

_SPEC = _message(
    coordinator=_message("replicatedJob", jobIndex=_WHOLE, podIndex=_WHOLE, replicatedJob=_TEXT),
    failurePolicy=_message(
        maxRestarts=_WHOLE,
        restartStrategy=_choice("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=_list(
            _message(
                "action name",
                action=_ACTIONS,
                name=_TEXT,
                onJobFailureMessagePatterns=_TEXTS,
                onJobFailureReasons=_TEXTS,
                targetReplicatedJobs=_TEXTS,
            )
        ),
    ),
    managedBy=_TEXT,
    network=_message(enableDNSHostnames=_SWITCH, publishNotReadyAddresses=_SWITCH, subdomain=_TEXT),
    replicatedJobs=_list(
        _message(
            "name template",
            dependsOn=_list(_message("name status", name=_TEXT, status=_choice("Ready", "Complete")), most=5),
            groupName=_TEXT,
            name=_TEXT,
            replicas=_COUNT,
            template={"type": "object"},
        )
    ),
    startupPolicy=_message("startupPolicyOrder", startupPolicyOrder=_choice("AnyOrder", "InOrder")),
    successPolicy=_message("operator", operator=_choice("All", "Any"), targetReplicatedJobs=_TEXTS),
    suspend=_SWITCH,
    ttlSecondsAfterFinished=_COUNT,
    volumeClaimPolicies=_list({"type": "object"}, most=50),
)

#: JSON Schema of a JobSet.
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_message(apiVersion=_TEXT, kind=_TEXT, metadata={"type": "object"}, spec=_SPEC, status={"type": "object"}),
}
