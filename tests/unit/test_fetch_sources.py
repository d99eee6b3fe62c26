"""templates/steps/fetch_sources.py: what has no wheel is downloaded with what builds it, and nothing of it is run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes import package_index
from tests.fakes.package_index import PackageIndex

from trainyard.common.settings import ROOT

PYPROJECT = '[build-system]\nrequires = ["tool>=1"]\nbuild-backend = "tool"\n'


def entry(name: str, *bodies: bytes) -> str:
    """The entry of a lock that accepts files with these bytes."""
    hashes = (f"    --hash=sha256:{hashlib.sha256(body).hexdigest()}" for body in bodies)
    return " \\\n".join([f"{name}==1.0", *hashes]) + "\n"


@pytest.fixture
def index() -> PackageIndex:
    return PackageIndex(("me", "correct-horse-battery"))


def fetched(folder: Path, index: PackageIndex, locks: dict[str, str], *, file: str = "") -> dict[str, set[str]]:
    """Run the program with its folders below ``folder``; the files of each layer. ``file``: a lock that it is given."""
    text = (ROOT / "templates" / "steps" / "fetch_sources.py").read_text(encoding="utf-8")
    for place in ("/sources", "/wheels", "/locks/uv.lock"):
        text = text.replace(f'"{place}', f'"{folder}{place}')
    (folder / "locks").mkdir()
    (folder / "locks" / "uv.lock").touch()
    words = "".join(f"[{name}]\n{lock}" for name, lock in locks.items())
    settings, credentials = folder / "given.toml", folder / "netrc"
    settings.write_text(f'[[index]]\nurl = "{index.url}"\ndefault = true\n', encoding="utf-8")
    host = index.host.partition(":")[0]
    credentials.write_text(f"machine {host} login me password correct-horse-battery\n", encoding="utf-8")
    variables = {"UV_CONFIG_FILE": str(settings), "NETRC": str(credentials), "UV_NO_CACHE": "1"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | variables | {"PATH": path}
    arguments = [str(folder / file)] if file else []
    subprocess.run([sys.executable, "-c", text, *arguments], env=environment, input=words, text=True, check=True)
    return {one.name: {file.name for file in one.iterdir()} for one in (folder / "sources").iterdir()}


def test_what_has_no_wheel_is_downloaded_with_what_builds_it_and_not_run(index: PackageIndex, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    files = {"setup.py": f"open({str(ran)!r}, 'w')", "pyproject.toml": PYPROJECT, "PKG-INFO": "Metadata-Version: 1.0\n"}
    source, both = (package_index.source_distribution(name, "1.0", files) for name in ("source", "both"))
    wheel, plain, tool, needed = (
        package_index.wheel(name, "1.0", requires)
        for name, requires in (("both", ()), ("plain", ()), ("tool", ("needed",)), ("needed", ()))
    )
    with index as served:
        served.add(source, both, wheel, plain, tool, needed)
        first = entry("plain", plain[1]) + entry("source", source[1])
        found = fetched(tmp_path, served, {"a": first, "b": entry("both", both[1], wheel[1]), "c": ""})
    assert found["a"] == {"source-1.0.tar.gz", tool[0], needed[0], "pins", "wheels.lock", "all.lock"}
    assert found["b"] == found["c"] == {"wheels.lock", "all.lock"}
    of = {name: (tmp_path / "sources" / name / "wheels.lock").read_text(encoding="utf-8") for name in "abc"}
    assert of == {"a": entry("plain", plain[1]), "b": entry("both", both[1], wheel[1]), "c": ""}
    assert (tmp_path / "sources" / "a" / "pins").read_text(encoding="utf-8") == "source==1.0\n"
    assert not ran.exists()


def test_locked_build_requirements_are_downloaded_and_no_others_resolved(index: PackageIndex, tmp_path: Path) -> None:
    files = {"setup.py": "", "pyproject.toml": PYPROJECT, "PKG-INFO": "Metadata-Version: 1.0\n"}
    source, other = package_index.source_distribution("source", "1.0", files), package_index.wheel("other", "1.0")
    with index as served:
        served.add(source, other)
        locks = {"build-requires": entry("other", other[1]), "compiled": entry("source", source[1])}
        found = fetched(tmp_path, served, locks)
    assert found["build-requires"] == {other[0], "wheels.lock", "all.lock"}
    assert found["compiled"] == {"source-1.0.tar.gz", "pins", "wheels.lock", "all.lock"}
    assert (tmp_path / "sources" / "compiled" / "all.lock").read_text(encoding="utf-8") == locks["compiled"]


def test_a_lock_in_a_file_leads_to_the_layer_of_its_name(index: PackageIndex, tmp_path: Path) -> None:
    plain = package_index.wheel("plain", "1.0")
    (tmp_path / "gsutil.lock").write_text(f"# Locked by `make lock`.\n{entry('plain', plain[1])}", encoding="utf-8")
    with index as served:
        served.add(plain)
        assert fetched(tmp_path, served, {}, file="gsutil.lock") == {"gsutil": {"wheels.lock", "all.lock"}}
    assert (tmp_path / "sources" / "gsutil" / "wheels.lock").read_text(encoding="utf-8") == entry("plain", plain[1])
