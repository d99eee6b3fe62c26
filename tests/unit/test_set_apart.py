"""templates/steps/wheels/set_apart.py: what several wheels bring is taken out of their layers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainyard.common.settings import ROOT

SITE, COMMANDS = "opt/venv/lib/python3.11/site-packages", "opt/venv/bin"

POINTS = "[console_scripts]\n{name} = {module}:main\n"


def run(folder: Path, files: dict[str, str]) -> tuple[set[str], set[str]]:
    """The paths below out and for-site/shared after the script has run on ``files`` (path below out -> text)."""
    for path, text in files.items():
        file = folder / "out" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "templates" / "steps" / "wheels" / "set_apart.py", folder], check=True)
    out, shared = (
        {one.relative_to(folder / name).as_posix() for one in (folder / name).rglob("*") if one.is_file()}
        for name in ("out", "for-site/shared")
    )
    return out, shared


def test_the_empty_init_of_a_spread_package_is_set_apart(tmp_path: Path) -> None:
    out, shared = run(tmp_path, {f"{SITE}/nvidia/__init__.py": "", f"{SITE}/nvidia/cublas/lib/libcublas.so": "x"})
    assert shared == {f"{SITE}/nvidia/__init__.py"}
    assert out == {f"{SITE}/nvidia/cublas/lib/libcublas.so"}


def test_packages_with_modules_or_code_of_their_own_stay_whole(tmp_path: Path) -> None:
    files = {
        f"{SITE}/torch/__init__.py": "",
        f"{SITE}/torch/nn/__init__.py": "",
        f"{SITE}/torch/version.py": "x = 1\n",
        f"{SITE}/google/__init__.py": "__path__ = []\n",
        f"{SITE}/google/api/__init__.py": "",
        f"{SITE}/empty/__init__.py": "",
    }
    assert run(tmp_path, files) == (set(files), set())


def test_a_command_whose_code_is_in_another_wheel_is_set_apart(tmp_path: Path) -> None:
    files = {
        f"{SITE}/tensorflow/__init__.py": "x = 1\n",
        f"{SITE}/tensorflow_tpu-2.20.dist-info/entry_points.txt": POINTS.format(
            name="tensorboard", module="tensorboard.main"
        )
        + "saved_model_cli = tensorflow.python.tools:main\n",
        f"{COMMANDS}/tensorboard": "#!/opt/venv/bin/python\n",
        f"{COMMANDS}/saved_model_cli": "#!/opt/venv/bin/python\n",
    }
    out, shared = run(tmp_path, files)
    assert shared == {f"{COMMANDS}/tensorboard"}
    assert f"{COMMANDS}/saved_model_cli" in out


def test_commands_of_single_modules_and_of_compiled_ones_stay(tmp_path: Path) -> None:
    files = {
        f"{SITE}/black.py": "",
        f"{SITE}/black-1.0.dist-info/entry_points.txt": POINTS.format(name="black", module="black"),
        f"{SITE}/fast.cpython-311-x86_64-linux-gnu.so": "x",
        f"{SITE}/fast-1.0.dist-info/entry_points.txt": POINTS.format(name="fast", module="fast"),
        f"{COMMANDS}/black": "",
        f"{COMMANDS}/fast": "",
    }
    assert run(tmp_path, files) == (set(files), set())


def test_entry_points_without_commands_and_with_colons_are_read(tmp_path: Path) -> None:
    text = "[tensorflow.plugins]\nmine = mine:plugin\n\n[gui_scripts]\nShow.It = other.gui:main\n"
    files = {f"{SITE}/mine-1.dist-info/entry_points.txt": text, f"{COMMANDS}/Show.It": ""}
    assert run(tmp_path, files)[1] == {f"{COMMANDS}/Show.It"}
