"""Stock uv resolves the committed locks again, from the package index that builds use."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.pylock import Pylock

from trainyard.common import settings
from trainyard.spec import markers, model, pylock


@pytest.mark.parametrize("target", ["cpu", "jax", "tf-cpu"])
def test_stock_uv_resolves_the_pins_of_a_lock_again(target: str, tmp_path: Path) -> None:
    """It gets what image.yaml requires, and the versions of the lock as constraints."""
    spec = model.load(target)
    platforms = model.each_platform(spec)
    known = {f"{name}=={version}" for one in platforms for name, version in one.locked().versions.items()}
    (tmp_path / "constraints.txt").write_text("\n".join(sorted(known)), encoding="utf-8")
    lines = [*spec.framework.packages, *model.requirements_of(spec)]
    (tmp_path / "requirements.in").write_text("\n".join(lines), encoding="utf-8")
    command = [*settings.UV, "pip", "compile", "--quiet", "--universal", "requirements.in", "-c", "constraints.txt"]
    command += ["--python-version", spec.python_version, "--format", "pylock.toml", "-o", "pylock.toml"]
    subprocess.run(command, cwd=tmp_path, check=True)
    again = Pylock.from_dict(tomllib.loads((tmp_path / "pylock.toml").read_text(encoding="utf-8")))
    for one in platforms:
        environment = {**markers.environment(one.python_version, one.architecture.machine)}
        tags = pylock.tags(one.python_version, one.arch)
        found = again.select(environment=environment, tags=tags)
        hashes = {package.name: file.hashes["sha256"] for package, file in found if hasattr(file, "hashes")}
        pins = one.locked().pins
        assert hashes.keys() == {pin.name for pin in pins}
        assert all(hashes[pin.name] in pin.hashes for pin in pins)
