"""The Docker engine of the tests that build and run images: one connection, which the first use makes."""

from __future__ import annotations

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine

ENGINE = Engine()

CONTEXT = Context(engine=ENGINE)
