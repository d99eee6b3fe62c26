"""Create the Artifact Registry repository that images are pushed to, through gcloud, with a cleanup policy.

    make repository REGISTRY=us-central1-docker.pkg.dev/my-project/ml
    make repository REGISTRY=us-central1-docker.pkg.dev/my-project/ml-releases IMMUTABLE=1

With IMMUTABLE no tag in it can ever move or go: promote then needs a second repository for the moving tags (TO=).
Images without a tag are deleted after 30 days; the 20 newest are kept whatever their age. Running it again is harmless.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from scripts import cli
from scripts.cli import StepFailed, UserError, say
from scripts.plan import NAME
from scripts.published import registry

#: What Artifact Registry deletes and keeps (cloud.google.com/artifact-registry/docs/repositories/cleanup-policy).
POLICY: list[dict[str, Any]] = [
    {
        "name": "delete-untagged",
        "action": {"type": "Delete"},
        "condition": {"tagState": "UNTAGGED", "olderThan": "30d"},
    },
    {"name": "keep-newest", "action": {"type": "Keep"}, "mostRecentVersions": {"keepCount": 20}},
]


def parts(address: str) -> tuple[str, str, str]:
    """Location, project and name of an Artifact Registry address.

    Raises:
        UserError: it is not one.
    """
    match = re.fullmatch(
        r"([a-z0-9-]+)-docker\.pkg\.dev/([a-z][a-z0-9.:-]+)/([a-z](?:[a-z0-9-]{0,61}[a-z0-9])?)", address
    )
    if not match:
        raise UserError(f"REGISTRY={address!r} is not <location>-docker.pkg.dev/<project>/<repository>")
    return match[1], match[2], match[3]


def gcloud(*words: str) -> subprocess.CompletedProcess[str]:
    """What gcloud does with these words.

    Raises:
        UserError: it is not installed.
    """
    if not shutil.which("gcloud"):
        raise UserError("gcloud is not installed: cloud.google.com/sdk/docs/install")
    return subprocess.run(["gcloud", *words, "--quiet"], capture_output=True, text=True, check=False)


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """The line of gcloud's that says what went wrong, without its own prefix."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")] or done.stderr.splitlines()
    return re.sub(r"^ERROR: (\(gcloud[^)]*\) )?", "", lines[0]) if lines else "gcloud said nothing"


def create(address: str, *, immutable: bool) -> bool:
    """Create the repository and set its policy; whether it is new.

    Raises:
        UserError, StepFailed: it is there with the other kind of tags, or gcloud refused; one line.
    """
    location, project, name = parts(address)
    where = [f"--location={location}", f"--project={project}"]
    there = gcloud("artifacts", "repositories", "describe", name, *where, "--format=json")
    if there.returncode == 0:
        known = bool((json.loads(there.stdout).get("dockerConfig") or {}).get("immutableTags"))
        if known != immutable:
            kind = "immutable" if known else "movable"
            raise UserError(f"{address} is there already, and its tags are {kind}: give another name, or set IMMUTABLE")
    elif "NOT_FOUND" not in there.stderr:
        raise StepFailed(f"{address}: {last_words(there)}")
    else:
        flags = ["--repository-format=docker", f"--description={NAME} images"]
        made = gcloud("artifacts", "repositories", "create", name, *where, *flags,
                      *(["--immutable-tags"] if immutable else []))  # fmt: skip
        if made.returncode:
            raise StepFailed(f"{address} could not be created: {last_words(made)}")
    with tempfile.TemporaryDirectory() as folder:
        policy = Path(folder) / "policy.json"
        policy.write_text(json.dumps(POLICY), encoding="utf-8")
        command = ["set-cleanup-policies", name, *where, f"--policy={policy}", "--no-dry-run"]
        done = gcloud("artifacts", "repositories", *command)
    if done.returncode:
        raise StepFailed(f"{address}: its cleanup policy could not be set: {last_words(done)}")
    return there.returncode != 0


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="or REGISTRY")
    parser.add_argument("--immutable", action="store_true", default=bool(os.environ.get("IMMUTABLE")))
    options = parser.parse_args(arguments)
    address = registry.check_address(options.registry)
    new = create(address, immutable=options.immutable)
    say(f"{address}: {'created' if new else 'was there'}, cleanup policy set")
    cli.result({"repository": address, "created": new, "immutable": options.immutable}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
