"""The library jsonschema, imported when it is needed: that takes longer than all else a command does."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


@cache
def jsonschema() -> Any:
    """The module ``jsonschema``, without its check of the format ``iri``, which no schema here has.

    Where ``rfc3987_syntax`` is installed (the SBOM library requires jsonschema[format-nongpl]), jsonschema imports it
    for that check, and it compiles a grammar for 2 seconds (1.1.0, src/rfc3987_syntax/syntax_helpers.py of
    https://github.com/willynilly/rfc3987-syntax). Remove this when it compiles the grammar on first use.
    """
    hidden = "rfc3987_syntax"
    imported = sys.modules.get(hidden)
    if imported is None:
        sys.modules[hidden] = None  # type: ignore[assignment]  # an import of it raises ImportError
    try:
        import jsonschema
    finally:
        if imported is None:
            del sys.modules[hidden]
    return jsonschema
