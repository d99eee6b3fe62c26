"""What the images of the catalogue were last measured to be: docs/sizes.json, which `make sizes` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.cli import ROOT, UserError
from scripts.spec import relative

FILE = ROOT / "docs" / "sizes.json"


def load(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Target -> its last measurement, as :func:`scripts.sizes.since` gives it; empty where there is no file.

    Raises:
        UserError: the file is not what `make sizes` writes.
    """
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["targets"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError) as error:
        raise UserError(f"{relative(path)}: not what 'make sizes' writes ({error!r}): remove it and run that") from None
    return found


def save(found: dict[str, dict[str, Any]], path: Path = FILE) -> None:
    """Write what was measured."""
    path.write_text(json.dumps({"targets": found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
