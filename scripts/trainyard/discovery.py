"""The discovery documents of Google's APIs, which google-api-python-client carries: they need no network."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def schemas(api: str) -> dict[str, Any]:
    """Name -> schema of an API such as ``aiplatform.v1``, in the language of discovery documents
    (https://developers.google.com/discovery/v1/type-format).
    """
    document = files("googleapiclient.discovery_cache").joinpath("documents", f"{api}.json")
    found: dict[str, Any] = json.loads(document.read_text(encoding="utf-8"))["schemas"]
    return found
