"""SkyPilot itself reads the tasks that are written: sky/utils/schemas.py and sky/task.py of its package.

https://github.com/skypilot-org/skypilot/blob/7e595970a806dcc9eefadf459f399edf1733e962/sky/utils/schemas.py (0.14.1).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainyard.image import recipes
from trainyard.spec.model import load
from trainyard_jobs import platforms
from trainyard_jobs.model import request

pytestmark = pytest.mark.concurrent

SKYPILOT = Path(__file__).with_name("skypilot.lock")
IMAGE = "docker.io/me/i"
#: Only machines of Google Cloud can read it.
REGISTRY = "us-central1-docker.pkg.dev/my-project/ml"

#: Reads tasks as `sky launch` does, before it looks for machines: against the schemas, then into objects.
READ = """
import json, sys, yaml
from sky import task
from sky.utils import schemas
import jsonschema

def read(path):
    with open(path) as file:
        data = yaml.safe_load(file)
    try:
        jsonschema.validate(data, schemas.get_task_schema())
        jsonschema.validate(data.get("resources", {}), schemas.get_resources_schema())
        # What `sky launch --secret TOKEN` adds: the value of that variable.
        found = task.Task.from_yaml_config(data, secrets_overrides=[(name, "x") for name in data.get("secrets", {})])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    (one,) = found.resources
    return {
        "nodes": found.num_nodes,
        "cloud": str(one.cloud),
        "accelerators": one.accelerators,
        "spot": one.use_spot,
        "disk": one.disk_size,
        "place": [one.region, one.zone],
        "mounts": sorted(found.storage_mounts),
        "cpus": one.cpus,
        "memory": one.memory,
        "secrets": sorted(found.secrets),
    }

print(json.dumps([read(path) for path in sys.argv[1:]]))
"""


def written(**options: Any) -> str:
    """The task that `make job PLATFORM=skypilot` writes."""
    target = options.get("target")
    known = recipes.outlines(load(target)) if target else []
    wanted = request.parse_request(options, known, lambda _: None, tpu_machine=False)
    return platforms.by_name("skypilot").write(wanted).text


MINIMAL: dict[str, Any] = {"image": IMAGE, "trainer": "mnist"}
DEFAULTS: dict[str, Any] = {"nodes": 1, "spot": False, "disk": 256, "place": [None, None], "mounts": [],
                            "cpus": None, "memory": None, "secrets": []}  # fmt: skip

#: Options -> what SkyPilot reads: the task's nodes, and its machines.
TASKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (MINIMAL, {"cloud": "None", "accelerators": None}),
    (MINIMAL | {"accelerator": "4xA100_80GB", "workers": 2},
     {"nodes": 2, "cloud": "None", "accelerators": {"A100-80GB": 4}}),
    (
        MINIMAL | {"accelerator": "8xH100_80GB", "spot": True, "disk": "300", "labels": "team=x"},
        {"cloud": "None", "accelerators": {"H100": 8}, "spot": True, "disk": 300},
    ),
    (MINIMAL | {"accelerator": "H200_141GB", "region": "us-central1"},
     {"cloud": "GCP", "accelerators": {"H200": 1}, "place": ["us-central1", None]}),
    ({"target": "gpu", "registry": REGISTRY, "accelerator": "2xT4", "mount": "gs://bucket/data:/data:ro"},
     {"cloud": "GCP", "accelerators": {"T4": 2}, "mounts": ["/data"]}),
    ({"target": "gpu", "registry": REGISTRY, "accelerator": "RTX_PRO_6000"},
     {"cloud": "GCP", "accelerators": {"RTXPRO6000": 1}}),
    ({"target": "xla", "registry": REGISTRY, "accelerator": "v6e-8", "zone": "us-east5-b"},
     {"cloud": "GCP", "accelerators": {"tpu-v6e-8": 1}, "place": ["us-east5", "us-east5-b"]}),
    (MINIMAL | {"cpu": "7.5", "memory": "32Gi", "env": ("A=1,2",), "secret": ("TOKEN=env",)},
     {"cloud": "None", "accelerators": None, "cpus": "8+", "memory": "32+", "secrets": ["TOKEN"]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def read(installed: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[Path]], Any]:
    """SkyPilot's reading of files, without its account of usage."""
    home = tmp_path_factory.mktemp("home")

    def run(paths: list[Path]) -> Any:
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(installed(SKYPILOT)),
               "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}  # fmt: skip
        words = [sys.executable, "-c", READ, *map(str, paths)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_sky_pilot_reads_what_is_written(read: Callable[[list[Path]], Any], tmp_path: Path) -> None:
    """In one process: it takes 8 s to import SkyPilot. The last file shows that a wrong field is found."""
    paths = [tmp_path / f"{number}.yaml" for number in range(len(TASKS) + 1)]
    texts = [written(**options) for options, _ in TASKS]
    wrong = yaml.safe_load(texts[0])
    texts.append(yaml.safe_dump(wrong | {"num_node": 2}))
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    *found, refused = read(paths)
    assert found == [DEFAULTS | expected for _, expected in TASKS]
    assert "num_node" in refused["error"]
