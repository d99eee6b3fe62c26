"""Settings of an image: the OCI configuration that its containers start with."""

from __future__ import annotations

from typing import Any


class Configured:
    """Base class of what has an OCI configuration."""

    def _configuration(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The ``config`` part of the OCI configuration."""
        return dict(self._configuration().get("config") or {})

    @property
    def labels(self) -> dict[str, str]:
        """Name -> value of the labels."""
        return dict(self.settings.get("Labels") or {})

    @property
    def environment(self) -> dict[str, str]:
        """Name -> value of the environment variables."""
        return dict(entry.partition("=")[::2] for entry in self.settings.get("Env") or [])
