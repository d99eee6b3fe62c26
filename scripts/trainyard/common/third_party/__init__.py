"""Files of other projects, which need no network: schemas of Google's APIs and of Kubernetes, and handwritten digits.

Each archive is named after the package that its files are from, byte for byte, and has its licence. sources.json has
the versions and digests; scripts/renew_third_party.py writes all of them.
"""

from __future__ import annotations

import json
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Return the version of each package, the number of its files, and their digest."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "sources.json").read_text(encoding="utf-8"))
    return found


@cache
def archive(package: str) -> zipfile.ZipFile:
    """Return the open archive of a package's files."""
    return zipfile.ZipFile(FOLDER / f"{package}.zip")


@cache
def schemas(api: str) -> dict[str, Any]:
    """Return name -> schema of an API such as ``aiplatform.v1``, in the language of discovery documents
    (https://developers.google.com/discovery/v1/type-format).
    """
    found: dict[str, Any] = json.loads(archive("google-api-python-client").read(f"{api}.json"))["schemas"]
    return found
