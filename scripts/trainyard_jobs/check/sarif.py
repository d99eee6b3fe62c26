"""Findings as SARIF, the format that code scanning reads.

SARIF 2.1.0: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html. What GitHub shows of it:
https://docs.github.com/en/code-security/code-scanning/integrating-with-code-scanning/sarif-support-for-code-scanning.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainyard import __version__
from trainyard.common.rule_engine import Finding, Rule, Severity

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.REFUSE: "error", Severity.CANNOT_START: "error", Severity.NOTE: "note"}


def log(
    rules: Sequence[Rule[Any]], findings: Iterable[Finding], unreadable: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A SARIF log with one run.

    Args:
        rules: all rules that were evaluated; those of the findings are among them.
        findings: with ``path:line`` or ``path`` as their place.
        unreadable: path -> why that file was not checked.
    """
    position = {one.id: number for number, one in enumerate(rules)}
    notifications = [
        {"level": "error", "message": {"text": why}, "locations": [_location(path)]}
        for path, why in (unreadable or {}).items()
    ]
    return {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {"name": "trainyard", "version": __version__, "rules": [_rule(one) for one in rules]}
                },
                "invocations": [
                    {"executionSuccessful": not notifications, "toolExecutionNotifications": notifications}
                ],
                "results": [_result(one, position[one.rule]) for one in findings],
            }
        ],
    }


def _rule(rule: Rule[Any]) -> dict[str, Any]:
    url = re.search(r"https://[^\s;,)\"']+", rule.source)
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in rule.id.split("_")),
        "shortDescription": {"text": f"{rule.title}."},
        "fullDescription": {"text": f"{rule.title}. Source: {rule.source}"},
        "help": {"text": f"{rule.title}.\n\nSeverity: {rule.severity}\nSource: {rule.source}"},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": list(rule.subjects), "severity": str(rule.severity)},
        **({"helpUri": url[0]} if url else {}),
    }


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    path = finding.where.rpartition(":")[0] if re.search(r":\d+$", finding.where) else finding.where
    # Without the line, so that a finding keeps its identity when lines are added above it.
    identity = hashlib.sha256("\0".join((finding.rule, path, finding.what)).encode()).hexdigest()
    return {
        "ruleId": finding.rule,
        "ruleIndex": rule,
        "level": _LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. {finding.why[:1].upper()}{finding.why[1:]}: {finding.remediation}."},
        "locations": [_location(finding.where)],
        "partialFingerprints": {"trainyardFinding/v1": identity},
        "properties": {"severity": str(finding.severity)},
    }


def _location(where: str) -> dict[str, Any]:
    match = re.fullmatch(r"(.*):(\d+)", where, re.DOTALL)
    path = match[1] if match else where
    address = (
        {"uri": Path(path).as_uri()} if Path(path).is_absolute() else {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    )
    region = {"region": {"startLine": int(match[2])}} if match else {}
    return {"physicalLocation": {"artifactLocation": address, **region}}
