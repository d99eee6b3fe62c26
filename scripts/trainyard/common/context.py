"""Carry the options of a run from the command line to the libraries."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.common import settings
from trainyard.common.docker_engine import Engine


@dataclass(frozen=True)
class Context:
    """Hold the options of a run. The command line makes it once, and passes it to the libraries that need it.

    What is not given is that of the environment.

    Attributes:
        state: the folder of results about images, file locks and logs.
        offline: whether no network may be used (``--offline``).
        builder: what ``docker buildx`` builds on; empty: the builder that it uses (``--builder``).
        trust_config: file about a Sigstore instance; empty: the public instance (``--trust-config``).
        smoke_network: whether a user's command is smoke-tested with a network; None: as it was last told.
        data: folder that smoke tests have at /data (``--data``); empty: ``smoke.data`` of trainyard.yaml.
        no_build: whether no build backend may run (``--no-build``).
        as_of: time (RFC 3339) after which files of package indexes do not count; empty: all count.
        engine: the Docker engine.
    """

    state: Path = field(default_factory=settings.state_folder)
    offline: bool = field(default_factory=lambda: settings.switch("OFFLINE"))
    builder: str = field(default_factory=lambda: settings.variable("BUILDER"))
    trust_config: str = field(default_factory=lambda: settings.variable("TRUST_CONFIG"))
    smoke_network: bool | None = None
    data: str = field(default_factory=lambda: settings.variable("DATA") and os.path.abspath(settings.variable("DATA")))
    no_build: bool = field(default_factory=lambda: settings.switch("NO_BUILD"))
    as_of: str = ""
    engine: Engine = field(default_factory=Engine, repr=False, compare=False)

    def variables(self) -> dict[str, str]:
        """Return the variables that give a child process of this command the same choices."""
        given = {"BUILD": str(self.state), "OFFLINE": "1" if self.offline else "", "BUILDER": self.builder}
        given |= {"TRUST_CONFIG": self.trust_config, "DATA": self.data, "NO_BUILD": "1" if self.no_build else ""}
        return {settings.PREFIX + name: value for name, value in given.items()}
