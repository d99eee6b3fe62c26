"""Check what needs no engine: specs, locks and what is known about them, generated files, lint and types.

make check
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from scripts import audit, cli, locks, render
from scripts.cli import ROOT, StepFailed, say
from scripts.spec import load, relative, targets


def _tool(name: str) -> str:
    """A tool of this project's own environment."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name) or name


def checks() -> dict[str, list[str]]:
    """Name -> command of every outside tool that must be content."""
    dockerfiles = [relative(path) for path in render.rendered() if path.name == "Dockerfile"]
    dockerfiles += [relative(path) for path in sorted(ROOT.glob("examples/*/Dockerfile"))]
    dockerfiles += ["scripts/builder/Dockerfile", "scripts/fakes/worker/Dockerfile"]
    return {
        "hadolint": [_tool("hadolint"), *dockerfiles],
        "ruff check": [_tool("ruff"), "check", "--quiet", "--output-format=concise"],
        "ruff format": [_tool("ruff"), "format", "--check", "--quiet"],
        "GitHub's schema": [
            _tool("check-jsonschema"),
            "--quiet",
            "--builtin-schema=vendor.github-workflows",
            *(relative(path) for path in sorted(ROOT.glob(".github/workflows/*.yml"))),
        ],
        "zizmor": [_tool("zizmor"), "--offline", "--quiet", "--no-progress", ".github"],
        "mypy": [_tool("mypy"), "--no-error-summary"],
    }


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__, target=False).parse_args(arguments)
    failed = []
    examples = [load(relative(path.parent)) for path in sorted(ROOT.glob("examples/*/image.yaml"))]
    specs = [*map(load, targets()), *examples]
    for spec in specs:
        if spec.locked:
            locks.installed(spec, "default")
    for path in [*render.drift(), *(path for spec in examples for path in render.drift(spec))]:
        say(f"{relative(path)}: not what the specs give: run 'make render' and commit")
        failed.append("render")
    for finding in audit.offline(specs):
        if finding.fails:
            say(f"{finding}: update it, or waive it in images/waivers.yaml")
            failed.append("audit")
    for what, command in checks().items():
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(what)
    cli.result({"failed": failed}, as_json=options.json)
    if failed:
        raise StepFailed(f"not content: {', '.join(dict.fromkeys(failed))}")
    say(f"{len(specs)} specs, their locks and generated files, and {', '.join(checks())}: all content")
    return 0


if __name__ == "__main__":
    cli.run(main)
