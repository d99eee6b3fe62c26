"""Ask the build backend of a project for its metadata, the folders of its modules, or its wheel (PEP 517, PEP 660).

This program runs in a container, with the packages that the build requires on the module path and pyproject_hooks
beside it; :mod:`trainyard.image.build_backends` starts it and reads what it writes. Standard library besides.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: How deep below the project the folders of modules are looked for, and how many names are tried.
_DEEP, _MANY = 6, 20_000


def main(request: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        request: ``project``: its folder; ``backend``, ``path``: of its ``[build-system]``; ``requires``: what is
            installed; ``wheel``: whether to make a wheel in ``out``, and not to tell about an editable installation.
    Returns:
        ``requires``: what has to be installed first; or ``metadata``, ``entry_points`` and ``roots``, as far as they
        are known; and ``failure``, the hook that failed.
    """
    from pyproject_hooks import BackendUnavailable, BuildBackendHookCaller, HookMissing

    def run(cmd: Sequence[str], cwd: str | None = None, extra_environ: Mapping[str, str] | None = None) -> None:
        subprocess.run(cmd, cwd=cwd, env={**os.environ, **(extra_environ or {})}, stdout=sys.stderr, check=True)

    project = request["project"]
    hooks = BuildBackendHookCaller(project, request["backend"], request["path"], runner=run)
    answer: dict[str, Any] = {}
    hook = "wheel" if request["wheel"] else "editable"
    try:
        wanted = [*hooks.get_requires_for_build_wheel()]
        wanted += [] if request["wheel"] else hooks.get_requires_for_build_editable()
        if missing := [line for line in wanted if line not in request["requires"]]:
            return {"requires": missing}
        if request["wheel"]:
            hooks.build_wheel(str(out))
            return answer
        hook = "metadata"
        try:
            about = out / str(hooks.prepare_metadata_for_build_editable(str(out)))
        except HookMissing:
            about = out / str(hooks.prepare_metadata_for_build_wheel(str(out)))
        answer |= {"metadata": _text(about / "METADATA"), "entry_points": _text(about / "entry_points.txt")}
        hook = "editable"
        made = out / str(hooks.build_editable(str(out)))
        answer["roots"] = roots(made, Path(project), out / "site")
    except HookMissing:  # a backend of before PEP 660
        pass
    except BackendUnavailable as error:
        answer["failure"] = _last_line(error.traceback)
    except (subprocess.CalledProcessError, OSError, ValueError, zipfile.BadZipFile):
        answer["failure"] = f"its hook for {hook} failed"
    return answer


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _last_line(text: object) -> str:
    return (str(text).strip().splitlines() or ["it cannot be imported"])[-1]


def roots(wheel: Path, project: Path, site: Path) -> list[str]:
    """Return the folders, relative to the project, that an editable installation makes importable.

    An interpreter is asked, in which the wheel is installed: some backends write paths into a .pth file, others a
    finder of modules.

    Args:
        wheel: of ``build_editable``. ``site``: an empty folder to install it in.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = site.with_suffix(".json")
    command = [sys.executable, "-I", __file__, "--roots", str(site), str(project), str(result)]
    subprocess.run(command, stdout=sys.stderr, check=True)
    found: list[str] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _importable(site: str, project: Path) -> list[str]:
    """Return :func:`roots` in an interpreter that has no other packages."""
    import site as sites

    sites.addsitedir(site)
    found = [Path(path) for path in sys.path if Path(path).is_relative_to(project)]
    for name in _names(project):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError, AttributeError):
            continue
        places = list(spec.submodule_search_locations or []) if spec else []
        places += [spec.origin] if spec and spec.origin and not places else []
        for place in map(Path, places):
            if place.is_relative_to(project) and place.stem == name:
                found.append(place.parent)
    return [one.relative_to(project).as_posix() for one in dict.fromkeys(found)]


def _names(project: Path) -> list[str]:
    """Return the names that a folder or file of the project may have as a module."""
    names: dict[str, None] = {}
    for folder, folders, files in os.walk(project):
        deep = len(Path(folder).relative_to(project).parts)
        folders[:] = [one for one in sorted(folders) if one.isidentifier() and deep < _DEEP]
        names |= dict.fromkeys([*folders, *(one[:-3] for one in sorted(files) if re.fullmatch(r"[^\W\d]\w*\.py", one))])
        if len(names) > _MANY:
            break
    return [name for name in names if name not in sys.modules and name not in sys.stdlib_module_names]


if __name__ == "__main__":
    if sys.argv[1] == "--roots":
        found = _importable(sys.argv[2], Path(sys.argv[3]))
        Path(sys.argv[4]).write_text(json.dumps(found), encoding="utf-8")
    else:
        folder = Path(sys.argv[1])
        result = main(json.loads((folder / "request.json").read_text(encoding="utf-8")), folder / "out")
        (folder / "out" / "answer.json").write_text(json.dumps(result), encoding="utf-8")
