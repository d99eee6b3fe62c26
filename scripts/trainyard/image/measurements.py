"""The last measured sizes of the catalogue's images: docs/sizes.json, which `make sizes` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.spec.model import relative

FILE = ROOT / "docs" / "sizes.json"


def load(path: Path = FILE) -> dict[str, dict[str, Any]]:
    """Target -> its last measurement, as :func:`trainyard.image.sizes.compared` gives it; empty if there is no file.

    Raises:
        UserError: the file is not what `make sizes` writes.
    """
    try:
        found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["targets"]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError) as error:
        sizes = "trainyard dev sizes"
        raise UserError(
            f"{relative(path)}: not what '{sizes}' writes ({error!r}): remove it and run '{sizes}'"
        ) from None
    return found


def save(found: dict[str, dict[str, Any]], path: Path = FILE) -> None:
    """Write the measurements."""
    path.write_text(json.dumps({"targets": found}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
