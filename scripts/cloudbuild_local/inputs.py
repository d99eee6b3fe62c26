"""What a user gives to a local build: a cloudbuild.yaml, substitutions, a project. This needs no Docker engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudbuild_local import config as cloud_config
from cloudbuild_local.config import Judgement
from cloudbuild_local.substitutions import BUILT_IN
from trainyard.common.errors import UserError
from trainyard.spec import yaml_source


def pairs(text: str, option: str) -> dict[str, str]:
    """Parse ``A=b,C=d``. As in gcloud, ``^:^A=b:C=d,e`` sets another delimiter
    (https://cloud.google.com/sdk/gcloud/reference/topic/escaping).

    Raises:
        UserError: an entry has no ``=``.
    """
    delimiter = ","
    if text.startswith("^") and text.count("^") >= 2:
        _, delimiter, text = text.split("^", 2)
    found = {}
    for entry in filter(None, text.split(delimiter)):
        key, equals, value = entry.partition("=")
        if not equals:
            raise UserError(f"'{option}': {entry!r} is not NAME=VALUE")
        found[key] = value
    return found


def built_in(project: str, build_id: str) -> dict[str, str]:
    """The built-in substitutions of a submitted build. Those of triggers, such as the commit, are empty."""
    return {"PROJECT_ID": project, "PROJECT_NUMBER": "0", "BUILD_ID": build_id, "LOCATION": "local"}


def read_file(config: Path) -> dict[Any, Any]:
    """A configuration as plain data.

    Raises:
        UserError: there is no such file, or it is not YAML.
    """
    if not os.path.lexists(config):
        raise UserError(f"no file {config}: give the path of a cloudbuild.yaml")
    return cloud_config.read(yaml_source.text(config), config.name)


def check(config: Path, *, substitutions: Mapping[str, str], project: str) -> Judgement:
    """Check a configuration by the rules of gcloud and Cloud Build, without a Docker engine.

    The file may be one for a trigger, which sets the built-in substitutions that are empty in a submitted build: names
    of images are checked as if each had a value.

    Args:
        substitutions: they override those of the configuration.
        project: value of ``$PROJECT_ID``.
    Raises:
        UserError: there is no such file, or it is not YAML.
    """
    values = dict.fromkeys(BUILT_IN, "value") | built_in(project, "local-check")
    return cloud_config.judge(read_file(config), given=substitutions, built_in=values)
