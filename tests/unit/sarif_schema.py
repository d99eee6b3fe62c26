"""The schema of SARIF 2.1.0 that OASIS publishes, from the copy of json.schemastore.org in the package schemastore.

The schema: https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json. The package:
https://github.com/python-jsonschema/schemastore. Its own interface would ask the network for schemas that are older
than 30 days, so the file with its answers is read.
"""

from __future__ import annotations

import importlib.metadata
import json
import pickle
import sqlite3
from contextlib import closing
from functools import cache
from typing import Any

URL = "https://json.schemastore.org/sarif-2.1.0.json"


@cache
def schema() -> dict[str, Any]:
    """The schema, as plain data."""
    package = importlib.metadata.distribution("schemastore")
    path = package.locate_file("schemastore/cache.sqlite")
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as answers:
        rows = answers.execute("SELECT value FROM responses WHERE instr(value, ?)", (URL.encode(),)).fetchall()
    found = [one for (value,) in rows if (one := pickle.loads(value))["url"] == URL]
    known: dict[str, Any] = json.loads(found[0]["_content"].decode("utf-8-sig"))
    assert known["title"] == "Static Analysis Results Format (SARIF) Version 2.1.0 JSON Schema"
    return known
