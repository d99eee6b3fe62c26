"""Configurations as YAML that YAML 1.1 readers (gcloud, kubectl) and YAML 1.2 readers (Trainyard) parse alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

#: Plain scalars that are numbers in YAML 1.2 but text in YAML 1.1, which PyYAML implements: 1e5, 0o17.
_NUMBERS = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+|0x[0-9a-fA-F]+")


class _Dumper(yaml.SafeDumper):
    """Block style, lists indented below their key, quotes around text that a reader may take for another type."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # In YAML 1.1 y and n are booleans too; PyYAML does not implement that, gcloud does.
    quoted = _NUMBERS.fullmatch(value) or value in ("y", "Y", "n", "N")
    style = '"' if quoted else "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def dump(data: Any) -> str:
    """``data`` as one document."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110, allow_unicode=True)


def comment(lines: Sequence[str]) -> str:
    """Lines as a comment block."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)
