"""The distribution, built from the working tree, and an environment outside the checkout that it is installed in."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def call(*command: str | Path, cwd: Path, umask: int = -1, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program, which the variables of Trainyard and of Python do not reach."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRAINYARD_", "PYTHON"))}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        umask=umask,
        check=False,
    )


def run(*command: str | Path, cwd: Path, umask: int = -1, **environment: str) -> str:
    """Run a program that must succeed; its standard output."""
    found = call(*command, cwd=cwd, umask=umask, **environment)
    assert found.returncode == 0, found.stderr
    return found.stdout


def clone(folder: Path, umask: int = -1) -> Path:
    """A clone in ``folder`` of a repository with one commit: the working tree, without what git ignores."""
    origin = folder.parent / "origin"
    if not origin.exists():
        names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (origin / name).parent.mkdir(parents=True, exist_ok=True)
                (origin / name).write_bytes((ROOT / name).read_bytes())
                (origin / name).chmod((ROOT / name).stat().st_mode)
        run("git", "init", "--quiet", cwd=origin)
        run("git", "add", "--all", cwd=origin)
        who = ("-c", "user.name=test", "-c", "user.email=test@example.com")
        date = "2026-11-20T12:00:00Z"
        run("git", *who, "commit", "--quiet", "-m", "All", cwd=origin, GIT_COMMITTER_DATE=date, GIT_AUTHOR_DATE=date)
    run("git", "clone", "--quiet", origin, folder, cwd=folder.parent, umask=umask)
    return folder


def build(project: Path, kind: str, output: Path, umask: int = -1) -> Path:
    """Build the ``wheel`` or ``sdist`` of a project folder into ``output``; the file."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", output, cwd=project, umask=umask)
    (built,) = output.iterdir()
    return built


def install(wheel: Path, folder: Path, umask: int = -1) -> Path:
    """Install a wheel into a new environment, which sees this one's dependencies; its command ``trainyard``."""
    uv = (sys.executable, "-m", "uv", "--quiet")
    run(*uv, "venv", "--no-project", "--python", sys.executable, folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    run(*uv, "pip", "install", "--offline", "--no-deps", "--python", python, wheel, cwd=folder.parent, umask=umask)
    purelib = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (purelib / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    return folder / "bin" / "trainyard"
