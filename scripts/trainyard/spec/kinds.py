"""Tell apart images with their framework in wheels, and in their base.

Both kinds answer the same questions, so that callers need not ask which of them it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from trainyard.spec.framework import BaseContents
from trainyard.spec.workspace import Site


@dataclass(frozen=True)
class Wheels:
    """Install the framework from wheels, which are installed in a venv with everything else.

    Attributes:
        python_version: without the patch level.
        build_python: interpreter of the Dockerfile's steps, a word of a shell; ``python``: that of trainers.
        search_path: PATH of the image.
        layered: whether what is locked is installed in layers of wheels.
        jupyter: variables with which Jupyter finds what is installed.
    """

    python_version: str
    build_python: str

    python: ClassVar[str] = "/opt/venv/bin/python"
    search_path: ClassVar[str] = "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    layered: ClassVar[bool] = True
    jupyter: ClassVar[Mapping[str, str]] = {}

    @property
    def site(self) -> Site:
        """Return where the image has the packages that are installed in it."""
        return Site(f"opt/venv/lib/python{self.python_version}/site-packages", "opt/venv/bin", self.python)

    def arguments(self, version: str, build_base: str) -> dict[str, str]:
        """Return the Dockerfile's arguments of this kind alone, for a version of the framework."""
        return {"BUILD_BASE": build_base}


@dataclass(frozen=True)
class InBase:
    """Use the framework of the base, with its Python; a second site directory has the wheels of everything else.

    Attributes:
        contents: of the base; None if it was never inspected.
    """

    contents: BaseContents | None

    python: ClassVar[str] = "python3"
    build_python: ClassVar[str] = '"$PYTHON"'
    search_path: ClassVar[str] = "/opt/requirements/bin:$PATH"
    layered: ClassVar[bool] = False
    #: Wheels have Jupyter's kernels, extensions and JupyterLab in share/ and etc/, which are beside the packages there,
    #: and Jupyter looks below the prefix of Python:
    #: https://docs.jupyter.org/en/latest/use/jupyter-directories.html,
    #: https://jupyterlab.readthedocs.io/en/stable/user/directories.html
    jupyter: ClassVar[Mapping[str, str]] = {
        "JUPYTER_PATH": "/opt/requirements/share/jupyter",
        "JUPYTER_CONFIG_PATH": "/opt/requirements/etc/jupyter",
        "JUPYTERLAB_DIR": "/opt/requirements/share/jupyter/lab",
    }

    @property
    def site(self) -> Site:
        return Site("opt/requirements", "opt/requirements/bin", f"/usr/bin/env {self.python}")

    def arguments(self, version: str, build_base: str) -> dict[str, str]:
        where = {"PYTHON": self.contents.interpreter, "SITE": self.contents.site} if self.contents else {}
        return where | {"FRAMEWORK_VERSION": version}
