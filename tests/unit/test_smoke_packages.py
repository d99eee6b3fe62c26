"""Test what is tried beside a training, and how failures are judged: nothing here needs an engine."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests import workspaces

from trainyard.common.errors import StepFailed
from trainyard.image import installed_packages, recipes, smoke_packages
from trainyard.image.smoke_packages import Finding
from trainyard.spec import yaml_source
from trainyard.spec.model import Spec, load

Install = Callable[..., None]
Check = Callable[..., dict[str, Any]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Install a distribution from its files, with console scripts and other entry points."""

    def installed(
        name: str,
        files: Mapping[str, str | bytes],
        scripts: Mapping[str, str] | None = None,
        entry_points: str = "",
        requires: str = "",
    ) -> None:
        about = tmp_path / "site" / f"{name.replace('-', '_')}-1.0.dist-info"
        about.mkdir(parents=True)
        for path, content in files.items():
            file = tmp_path / "site" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        (about / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        points = "".join(f"{script} = {target}\n" for script, target in (scripts or {}).items())
        (about / "entry_points.txt").write_text(f"[console_scripts]\n{points}\n{entry_points}")
        for script, target in (scripts or {}).items():
            module, _, function = target.split(" ")[0].partition(":")
            (tmp_path / "bin").mkdir(exist_ok=True)
            place = tmp_path / "bin" / script
            lines = (f"#!{sys.executable}", "import sys", f"from {module} import {function}", f"sys.exit({function}())")
            place.write_text("\n".join(lines))
            place.chmod(0o755)

    return installed


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Run the program as the container does, in an environment that has what was installed and nothing else."""

    def checked(
        packages: Sequence[str], named: Sequence[str] = (), skip: Sequence[dict[str, str]] = ()
    ) -> dict[str, Any]:
        variables = os.environ | {
            "PYTHONPATH": str(tmp_path / "site"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path),
        }
        words = [sys.executable, "-S", installed_packages.__file__]
        request = json.dumps({"packages": packages, "named": named, "skip": skip})
        done = subprocess.run([*words, request], env=variables, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return checked


ARGUMENTS = "import argparse\ndef main():\n    argparse.ArgumentParser().parse_args()\n"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (ARGUMENTS, ""),
        ("def main():\n    print('usage: tool FILE')\n    return 2\n", ""),
        ("def main():\n    import sys\n    print(open(sys.argv[1]).read())\n", ""),
        ("def main():\n    import sys\n    assert sys.argv[1] == '--version'\n    print('tool 1.0')\n", ""),
        ("def main():\n    raise KeyError(\"unknown option 'help'\")\n", ""),
        ("def main():\n    raise RuntimeError('to use it, please install \"tool[cli]\"')\n", ""),
        ("def main():\n    import rich_cli\n", ""),
        ("def main():\n    import sys\n    assert sys.argv[1] == '--version' or [].help\n",
         "AttributeError: 'list' object has no attribute 'help'"),
        ("import gone\ndef main(): ...\n", "ModuleNotFoundError: No module named 'gone'"),
        ("import math\ndef main():\n    math.floaty\n", "AttributeError: module 'math' has no attribute 'floaty'"),
        ("def main():\n    import os\n    os.kill(os.getpid(), 11)\n", "SIGSEGV ended it"),
        ("def main():\n    print('\\x1b[31mboom\\n\\x1b[0m')\n    return 3\n", "boom"),
    ],
    ids=[
        "help", "usage", "a file", "version", "no help", "an extra", "of an extra", "help alone", "module", "attribute",
        "crash", "status",
    ],
)  # fmt: skip
def test_a_console_script_starts_or_the_reason_is_told(source: str, why: str, install: Install, check: Check) -> None:
    requires = "" if why else "Provides-Extra: cli\nRequires-Dist: rich-cli>=1; extra=='cli'\n"
    install("tool", {"tool.py": source}, {"tool": "tool:main"}, requires=requires)
    found = check(["tool"])
    assert (found["scripts"], [row["why"] for row in found["findings"]]) == (1, [why] if why else [])


def test_a_server_that_knows_no_help_has_started(
    install: Install, check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_packages, "SCRIPT_LIMIT", 0.5)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    install("server", {"server.py": "def main(): ..."}, {"server": "server:main"})
    (tmp_path / "bin" / "server").write_text("#!/bin/sh\nsleep 100 & sleep 100\n")
    assert installed_packages.start_script("server") == ""


def test_scripts_of_extras_and_those_left_out_are_not_started(install: Install, check: Check) -> None:
    scripts = {"one": "tool:main [cli]", "two": "tool:main"}
    install("tool", {"tool.py": "raise SystemExit('no')"}, scripts)
    found = check(["tool"], skip=[{"package": "tool", "script": "two"}, {"group": "x"}])
    assert (found["scripts"], found["findings"]) == (0, [])


def test_modules_entry_points_and_extension_modules_are_loaded(install: Install, check: Check) -> None:
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    files: dict[str, str | bytes] = {
        "good/__init__.py": "import math",
        "good/behind/__init__.py": "",
        "bad/__init__.py": "import gone",
        "tests/__init__.py": "import gone",
        "_private.py": "import gone",
        "space/part/__init__.py": "import gone",
        f"good/whole{suffix}": b"\x7fELF PyInit_whole",
        f"good/other{suffix}": b"\x7fELF PyInit_other",
        f"good/libother{suffix}": b"\x7fELF",
    }
    points = "[plugins]\nfine = good:math\ndotted = good.math\nbehind = good:behind\nbroken = good:mathematics\n"
    points += "extra = gone [cli]\n[left.out]\nx = gone\n"
    install("tool", files, entry_points=points)
    found = check(
        ["tool"], ["tool"], [{"group": "left.out"}, {"package": "tool", "files": "good/oth"}, {"group": "good/wh"}]
    )
    assert {kind: found[kind] for kind in ("modules", "entry_points", "extension_modules")} == {
        "modules": 2, "entry_points": 4, "extension_modules": 1
    }  # fmt: skip
    failed = {row["what"]: row["why"] for row in found["findings"]}
    assert failed.pop(f"load good/whole{suffix}").startswith("OSError: ")
    assert failed == {
        "import bad": "ModuleNotFoundError: No module named 'gone'",
        "entry point broken of plugins": "AttributeError: module 'good' has no attribute 'mathematics'",
    }


def test_a_crash_is_told_with_what_was_being_imported(install: Install, check: Check) -> None:
    install("tool", {"tool.py": "import os; print('noise', flush=True); os.abort()"})
    install("other", {"other.py": ""})
    rows = check(["tool", "other"], ["tool", "other"])["findings"]
    assert [(row["package"], row["what"], row["why"]) for row in rows] == [("tool", "import tool", "SIGABRT ended it")]


def test_it_supports_the_oldest_python_of_a_base() -> None:
    ast.parse(Path(installed_packages.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))


def test_what_is_left_out_has_a_reason_and_names_what_it_is_of() -> None:
    rows = yaml_source.plain(yaml_source.read(smoke_packages._LEFT_OUT))["left_out"]
    keys = {tuple(sorted(row.keys() - {"reason"})) for row in rows}
    assert all(row["reason"] for row in rows) and keys <= {
        ("package", "script"),
        ("package",),
        ("group",),
        ("files", "package"),
    }


class Silent(smoke_packages.Beside):
    """Give no result, as a container that is killed does."""

    def start(self, sandbox: Any) -> None:
        self._sandbox, self._container = sandbox, None  # type: ignore[assignment]

    def _printed(self, container: Any) -> dict[str, Any]:
        raise StepFailed("no result")


def test_a_test_without_a_result_fails_a_target_and_is_a_note_on_a_repository() -> None:
    target = recipes.make(load("tf-cpu"))
    for recipe in (target, target.model_copy(update={"extends": "tf-cpu"})):
        beside = Silent(recipe, None)  # type: ignore[arg-type]
        beside.start(object())
        if recipe.is_repository:
            assert beside.result() == ({}, ["no result"])
        else:
            with pytest.raises(StepFailed, match="no result"):
                beside.result()


class Importing(Silent):
    """Stand in for a container in which importing a package fails with ModuleNotFoundError."""

    dependency = ""

    def _printed(self, container: Any) -> dict[str, Any]:
        why = f"ModuleNotFoundError: No module named '{self.dependency}'"
        row = {"package": "peft", "version": "1.0", "kind": "modules", "what": "import peft", "why": why}
        return {"requires": [f"{self.dependency}>=0.1"], "findings": [row]}

    def _with_remedy(self, finding: Finding) -> Finding:
        return finding


@pytest.mark.parametrize(("dependency", "excluded"), [("numpy", False), ("llm", True)])
def test_a_dependency_that_the_image_does_not_have_was_excluded(dependency: str, excluded: bool) -> None:
    """The lock has every dependency of its packages but those, and the image of tf-cpu has numpy."""
    recipe = recipes.make(load("tf-cpu")).model_copy(update={"extends": "tf-cpu", "listed": ("peft",)})
    beside = Importing(recipe, None)  # type: ignore[arg-type]
    beside.dependency = dependency
    beside.start(object())
    line = f"peft 1.0: import peft fails: ModuleNotFoundError: No module named '{dependency}'"
    if excluded:
        assert beside.result()[1] == [line]
    else:
        with pytest.raises(StepFailed, match=line):
            beside.result()


CERTAIN = "ModuleNotFoundError: No module named 'x'"


@pytest.mark.parametrize(
    ("kind", "why", "of_target", "listed", "unlisted"),
    [
        ("scripts", "OSError: anything", True, False, False),
        ("scripts", CERTAIN, True, True, False),
        ("modules", CERTAIN, True, True, False),
        ("scripts", "ModuleNotFoundError: No module named 'peft.cli'", True, False, False),
        ("modules", "ModuleNotFoundError: No module named 'llm.models'", True, False, False),
        ("modules", "ImportError: libcuda.so.1: cannot open shared object file", True, False, False),
        ("modules", "RuntimeError: no GPU", True, False, False),
        ("extension_modules", "ImportError: libfoo.so.1", True, False, False),
        ("entry_points", CERTAIN, True, False, False),
    ],
)
def test_what_fails_ends_the_test_of_a_target_and_what_a_repository_lists_if_it_is_certain(
    kind: str, why: str, of_target: bool, listed: bool, unlisted: bool
) -> None:
    """It is no error that peft was released without peft.cli, or that the repository excludes its dependency llm."""
    target = recipes.make(load("tf-cpu"))
    own = target.model_copy(update={"extends": "tf-cpu", "listed": ("peft",)})
    judged = [
        smoke_packages.is_refused(recipe, Finding(package, "1.0", kind, "what", why), {"llm"})
        for recipe, package in ((target, "psutil"), (own, "peft"), (own, "psutil"))
    ]
    assert judged == [of_target, listed, unlisted]


def test_what_fails_alike_in_a_package_is_one_line() -> None:
    why = "ModuleNotFoundError: No module named 'cliffdemo'"
    names = [f"entry point {name} of cliff.demo" for name in ("error", "file", "files")]
    findings = [Finding("cliff", "4.17.0", "entry_points", name, why) for name in names]
    other = Finding("stevedore", "5.10.0", "entry_points", "entry point e2", why)
    assert list(map(str, smoke_packages.grouped([*findings, other], alike=True))) == [
        f"cliff 4.17.0: entry point error of cliff.demo fails (and 2 more): {why}",
        f"stevedore 5.10.0: entry point e2 fails: {why}",
    ]


def test_a_package_is_one_note_with_what_may_be_mended() -> None:
    findings = [
        Finding("orbax-checkpoint", "0.6.4", "modules", "import orbax.test", "RuntimeError: no devices"),
        Finding("orbax-checkpoint", "0.6.4", "modules", "import orbax.x", "ModuleNotFoundError: No module named 'x'"),
        Finding("orbax-checkpoint", "0.6.4", "scripts", "orbax", "ModuleNotFoundError: No module named 'y'"),
    ]
    assert list(map(str, smoke_packages.grouped(findings))) == [
        "orbax-checkpoint 0.6.4: import orbax.x fails (and 2 more of it, which '--json' lists): ModuleNotFoundError: "
        "No module named 'x'"
    ]


@pytest.mark.parametrize(
    ("why", "proposed"),
    [
        ("ModuleNotFoundError: No module named 'pkg_resources'", ["setuptools<82"]),
        ("ModuleNotFoundError: No module named 'click.core'", ["click"]),
        ("ModuleNotFoundError: No module named 'nobody_knows'", []),
        ("AttributeError: module 'numpy' has no attribute 'float_'", ["numpy<2"]),
        ("ImportError: cannot import name 'Tensor' from 'torch.autograd' (/opt/x.py)", []),
    ],
)
def test_a_remedy_is_a_requirement_that_is_known_to_have_what_is_missing(why: str, proposed: list[str]) -> None:
    recipe = recipes.make(load("tf-cpu"))
    assert list(smoke_packages.proposed(recipe, why)) == proposed


def test_a_target_lists_what_its_files_name_and_tries_everything() -> None:
    target = recipes.make(load("tf-cpu"))
    assert {"tensorflow-cpu", "tensorboard", "numpy"} <= {*target.listed} < {*target.tried}
    assert {*target.tried} == {*target.versions}


def test_a_repository_tries_what_it_adds_and_everything_if_it_moves_a_package_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspaces.empty(tmp_path / "repository", monkeypatch)
    Path("trainyard.yaml").write_text("extends: tf-cpu\nrequirements: [einops, numpy]\nrun: python train.py\n")
    spec = workspaces.repository()
    workspaces.lock(spec, workspaces.added("einops"))
    adding = recipes.make(workspaces.render(spec))
    assert (adding.listed, adding.tried) == (("einops", "numpy"), ("einops",))
    target = load("tf-cpu").locked()
    moved = [replace(pin, version="81.0.1") if pin.name == "setuptools" else pin for pin in target.pins]
    monkeypatch.setattr(Spec, "locked", lambda *_: replace(target, pins=tuple(moved)))
    moving = recipes.make(workspaces.render(spec))
    assert {"setuptools", "tensorboard"} <= {*moving.tried}
