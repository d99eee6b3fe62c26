"""The packages import downwards, in one order, and what runs inside an image imports nothing that runs outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "scripts" / "trainyard"


def order() -> list[str]:
    """Packages and modules of trainyard from top to bottom: CONTRIBUTING.md's table, row by row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The order of packages")[1]
    rows = re.findall(r"(?m)^\| (`.+?`) \|", text.split("\n## ")[0])
    return ["__main__", *(name.rstrip("/") for row in rows for name in re.findall("`(.+?)`", row))]


#: What runs inside the images, and the package outside.
ROOTS = {"launcher": ROOT / "launcher", "trainers": ROOT / "trainers", "trainyard": PACKAGE}


@cache
def modules(root: str) -> dict[str, Path]:
    """Name -> file of every module of a package, such as ``trainyard.oci.layers``."""
    found = {}
    for path in sorted(ROOTS[root].rglob("*.py")):
        parts = path.relative_to(ROOTS[root]).with_suffix("").parts
        found[".".join((root, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules that a module imports anywhere: at the top, in functions, for type checking."""
    known = {module for root in ROOTS for module in modules(root)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in known else base


@cache
def graph(root: str) -> dict[str, set[str]]:
    """Module -> the modules of the three packages that it imports."""
    return {
        name: {found for found in imported(name, path) if found.split(".")[0] in ROOTS} - {name}
        for name, path in modules(root).items()
    }


def layer(module: str) -> str:
    """The package or top-level module of trainyard that a module belongs to; ``trainyard`` for itself."""
    return [*module.split("."), ""][1] or "trainyard"


def test_every_package_has_a_place_in_the_order() -> None:
    names = {layer(name) for name in modules("trainyard")} - {"trainyard"}
    assert names == set(order())


def test_packages_import_downwards() -> None:
    places = {name: place for place, name in enumerate(order())}
    upwards = []
    for name, others in graph("trainyard").items():
        for other in others:
            here, there = layer(name), layer(other)
            if there not in ("trainyard", here) and places.get(there, -1) <= places.get(here, -1):
                upwards.append(f"{name} imports {other}")
    assert not upwards, "\n".join(sorted(upwards))


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other: Tarjan's strongly connected components of more than one."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in edges:
        if node not in index:
            visit(node)
    return found


def test_cycles_are_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == [["a", "b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize("root", ROOTS)
def test_no_modules_import_each_other(root: str) -> None:
    assert cycles(graph(root)) == []


def test_no_command_imports_another() -> None:
    for name, others in graph("trainyard").items():
        if name.startswith("trainyard.commands."):
            assert not {other for other in others if layer(other) == "commands"}, name


def test_commands_import_libraries_inside_their_function_so_that_help_is_quick() -> None:
    allowed = ("trainyard.options", "trainyard.settings")
    for name, path in modules("trainyard").items():
        if name.startswith("trainyard.commands."):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainyard"):
                    taken = [f"{node.module}.{alias.name}" for alias in node.names]
                    assert all(one.startswith(allowed) for one in taken), f"{name}: {taken}"


@pytest.mark.parametrize("root", ROOTS)
def test_what_runs_inside_an_image_and_what_runs_outside_do_not_import_each_other(root: str) -> None:
    others = {other.split(".")[0] for imports in graph(root).values() for other in imports}
    assert others <= {root}


#: Modules that send HTTP requests -> to whom.
SENDERS = {
    "trainyard.cloudbuild.executor": "the engine",
    "trainyard.gcloud": "Google's APIs",
    "trainyard.image.package_index": "package indexes",
    "trainyard.image.sizes": "package indexes",
    "trainyard.image.smoke_sandbox": "the engine",
    "trainyard.image.wheels": "package indexes",
    "trainyard.oci.docker_engine": "the engine",
    "trainyard.oci.registry": "registries",
    "trainyard.oci.transport": "registries",
    "trainyard.release.advisories": "databases of advisories",
    "trainyard.release.debian_advisories": "databases of advisories",
    "trainyard.tpu_pods.authorization": "Google's APIs",
    "trainyard.workspace.source_distributions": "package indexes",
    "trainyard.workspace.wheels": "package indexes",
}


def test_registries_are_read_in_one_module_which_checks_what_they_answer() -> None:
    """A manifest is taken as its checked document, and no other module sends requests to a registry."""
    senders = set()
    for name, path in modules("trainyard").items():
        if name.startswith("trainyard.fakes"):
            continue
        libraries = {one.split(".")[0] for one in imported(name, path)} | set(imported(name, path))
        if libraries & {"requests", "urllib3", "httpx", "http.client", "urllib.request"}:
            senders.add(name)
        text = path.read_text(encoding="utf-8")
        if name != "trainyard.oci.registry":
            assert not re.search(r"json\.loads\([\w.]*\bbody\b", text), f"{name} parses a manifest: use its document"
            assert not re.search(r"\w\._(request|send|open|session)\(", text.replace("self._", "")), name
    assert senders <= SENDERS.keys(), "say in SENDERS to whom, and send to registries by trainyard.oci.registry"
    assert {one for one in senders if SENDERS[one] == "registries"} == {
        "trainyard.oci.registry",
        "trainyard.oci.transport",
    }


def test_the_environment_is_read_in_one_module_and_in_commands() -> None:
    reading = set()
    for name, path in modules("trainyard").items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv", "putenv", "environb")
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ):
                reading.add(name)
    assert {name for name in reading if not name.startswith("trainyard.commands.")} == {"trainyard.settings"}


def test_the_package_imports_nothing_of_the_tests() -> None:
    for name, path in modules("trainyard").items():
        assert not {found for found in imported(name, path) if found.split(".")[0] in ("tests", "benchmarks")}, name
