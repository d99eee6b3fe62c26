"""What a container of an image starts with, by the image's OCI configuration."""

from __future__ import annotations

from typing import Any


class Configured:
    """Something that has an OCI configuration: an image, or what is known about one."""

    def _configuration(self) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The ``config`` part of the OCI configuration."""
        return dict(self._configuration().get("config") or {})

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.settings.get("Labels") or {})

    @property
    def environment(self) -> dict[str, str]:
        return dict(entry.partition("=")[::2] for entry in self.settings.get("Env") or [])
