"""Let the Docker client use gcloud's credentials for an Artifact Registry host.

    make login REGISTRY=us-central1-docker.pkg.dev/my-project/ml

Any other registry: docker login <host>.
"""

from __future__ import annotations

import os
import re

from scripts import cli
from scripts.cli import StepFailed, UserError, say
from scripts.published import registry
from scripts.repository import gcloud, last_words


def login(address: str) -> str:
    """Set gcloud as credential helper of the address's host; the host.

    Raises:
        UserError: it is no host of Google's. StepFailed: gcloud refused.
    """
    host = registry.host(address)
    if not re.fullmatch(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z]+\.)?gcr\.io)", host):
        raise UserError(f"{host} is no host of Artifact Registry: run 'docker login {host}'")
    # Credential helpers are named host by host: pkg.dev is not among those that gcloud sets by itself.
    done = gcloud("auth", "configure-docker", host)
    if done.returncode:
        raise StepFailed(f"{host}: {last_words(done)}")
    return host


def main(arguments: list[str]) -> int:
    parser = cli.parser(__doc__, target=False)
    parser.add_argument("--registry", default=os.environ.get("REGISTRY"), help="or REGISTRY")
    options = parser.parse_args(arguments)
    host = login(registry.check_address(options.registry))
    say(f"the Docker client asks gcloud for its credentials at {host}")
    cli.result({"host": host}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
