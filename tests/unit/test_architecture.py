"""The packages import downwards, in one order, and what runs inside an image imports nothing that runs outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

#: What runs inside the images, and the packages outside.
ROOTS = {
    "launcher": ROOT / "launcher",
    "trainers": ROOT / "trainers",
    "trainyard": SCRIPTS / "trainyard",
    "trainyard_jobs": SCRIPTS / "trainyard_jobs",
}

#: The packages outside -> those that each may import.
OUTSIDE = {
    "trainyard": {"trainyard", "trainyard_jobs"},
    "trainyard_jobs": {"trainyard", "trainyard_jobs"},
}

#: Package -> at most so many rooms (its folders and files), arrows (imports between two rooms) and floors (a room is
#: one above the highest that it imports).
SIZES = {"trainyard": (13, 51, 10), "trainyard_jobs": (9, 27, 6)}

outside = pytest.mark.parametrize("root", OUTSIDE)


def order(root: str) -> list[str]:
    """Rooms of a package from top to bottom: its table in CONTRIBUTING.md, row by row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## The order of packages")[1]
    section = text.split("\n## ")[0].split(f"### `{root}`")[1].split("\n### ")[0]
    rows = re.findall(r"(?m)^\| (`.+?`) \|", section)
    return [name.rstrip("/") for row in rows for name in re.findall("`(.+?)`", row)]


@cache
def modules(root: str) -> dict[str, Path]:
    """Return name -> file of every module of a package, such as ``trainyard.oci.layers``."""
    found = {}
    for path in sorted(ROOTS[root].rglob("*.py")):
        parts = path.relative_to(ROOTS[root]).with_suffix("").parts
        found[".".join((root, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return every node of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def outside_modules() -> list[tuple[str, Path]]:
    """Name and file of every module of the packages outside."""
    return [module for root in OUTSIDE for module in modules(root).items()]


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules that a module imports anywhere: at the top, in functions, for type checking."""
    known = {module for root in ROOTS for module in modules(root)}
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes(path):
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
    """Module -> the modules of all packages that it imports."""
    return {
        name: {other for other in imported(name, path) if other.split(".")[0] in ROOTS} - {name}
        for name, path in modules(root).items()
    }


def room(module: str) -> str:
    """The folder or file at the top of a package that a module is in; empty for the package itself."""
    return [*module.split("."), ""][1]


def arrows(root: str) -> dict[str, set[str]]:
    """Room of a package -> the other rooms of the same package that its modules import."""
    found: dict[str, set[str]] = {room(name): set() for name in modules(root) if room(name)}
    for name, others in graph(root).items():
        if room(name):
            found[room(name)] |= {room(other) for other in others if other.split(".")[0] == root} - {room(name), ""}
    return found


@outside
def test_every_room_has_a_place_in_the_order(root: str) -> None:
    assert set(arrows(root)) == set(order(root))


@outside
def test_rooms_import_downwards(root: str) -> None:
    places = {name: place for place, name in enumerate(order(root))}
    upwards = []
    for name, others in graph(root).items():
        for other in others:
            here, there = room(name), room(other)
            if other.split(".")[0] == root and here and there not in ("", here) and places[there] <= places[here]:
                upwards.append(f"{name} imports {other}")
    assert not upwards, "\n".join(sorted(upwards))


@outside
def test_packages_stay_as_simple_as_they_are(root: str) -> None:
    edges = arrows(root)

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in edges[name]), default=0)

    measured = (len(edges), sum(map(len, edges.values())), max(map(floor, edges)))
    assert all(size <= limit for size, limit in zip(measured, SIZES[root], strict=True)), measured


def test_the_command_line_alone_joins_the_builder_to_jobs() -> None:
    joining = {name for name, others in graph("trainyard").items() if any("trainyard_jobs" in each for each in others)}
    assert joining == {"trainyard.cli"}


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


#: Classes that say what a spec is of: of a user's repository; of an image whose framework is in wheels, or in its base.
KINDS = {"RepositorySpec", "Wheels", "InBase"}

#: How many conditions may ask which of them a spec is; there were 66 when each caller did.
MOST_CONDITIONS = 25


def leaves(*nodes: ast.AST) -> set[str]:
    """Return the names and attributes in expressions."""
    every = [leaf for node in nodes for leaf in ast.walk(node)]
    names = {leaf.id for leaf in every if isinstance(leaf, ast.Name)}
    return names | {leaf.attr for leaf in every if isinstance(leaf, ast.Attribute)}


def parts(condition: ast.AST) -> Iterator[ast.AST]:
    """Yield the conditions that are joined by ``and`` and ``or``, without ``not`` and ``bool``."""
    match condition:
        case ast.BoolOp(values=joined) | ast.Call(func=ast.Name("bool"), args=joined):
            for part in joined:
                yield from parts(part)
        case ast.UnaryOp(op=ast.Not(), operand=negated):
            yield from parts(negated)
        case _:
            yield condition


def asks(node: ast.AST, predicates: set[str]) -> bool:
    """Tell if an expression asks for the kind of a spec, or names a predicate."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]) | ast.MatchClass(cls=kinds):
            return bool(leaves(kinds) & KINDS)
        case ast.Compare(left=left, comparators=others):
            return bool(leaves(left, *others) & KINDS)
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
            return name in predicates
    return False


def holds_framework(part: ast.AST) -> bool:
    """Tell if a condition is that a base of images/bases.yaml has a framework."""
    return isinstance(part, ast.Attribute) and part.attr == "framework" and bool(leaves(part) & {"base_spec", "bases"})


def returned(function: ast.FunctionDef) -> list[ast.AST]:
    """Return the parts of what a function returns that does nothing else."""
    match [node for node in function.body if not isinstance(node, ast.Expr)]:
        case [ast.Return(value=ast.expr() as value)]:
            return list(parts(value))
    return []


def conditions(sources: dict[str, str]) -> list[str]:
    """Return ``module:line`` of each condition on the kind of a spec.

    A function or property that does nothing but return such a condition is a predicate: its uses count, whatever its
    name, and its definition does not. Neither do values of a dictionary: the variables of the Dockerfile's template.
    """
    nodes = [(module, node) for module, text in sources.items() for node in ast.walk(ast.parse(text))]
    functions = [(node.name, returned(node)) for _, node in nodes if isinstance(node, ast.FunctionDef)]
    predicates: set[str] = set()
    known = -1
    while known < len(predicates):
        known = len(predicates)
        for name, values in functions:
            if any(asks(getattr(value, "func", value), predicates) for value in values):
                predicates.add(name)
            if any(asks(value, predicates) or holds_framework(value) for value in values):
                predicates.add(name)
    ignored = {
        id(node) for name, values in functions if name in predicates for value in values for node in ast.walk(value)
    }
    ignored |= {id(value) for _, node in nodes if isinstance(node, ast.Dict) for value in node.values}
    asking = [(module, node) for module, node in nodes if asks(node, predicates)]
    for module, node in nodes:
        tests = getattr(node, "ifs", None) or filter(None, [getattr(node, "test", None)])
        asking += [(module, part) for test in tests for part in parts(test) if holds_framework(part)]
    return sorted(f"{module}:{getattr(node, 'lineno', 0)}" for module, node in asking if id(node) not in ignored)


def test_conditions_on_the_kind_of_a_spec_are_found() -> None:
    text = """
def is_own(spec):
    '''Whether it is one.'''
    return isinstance(spec, model.RepositorySpec) and spec.run
def other(spec):
    return not is_own(spec)
def f(spec):
    if is_own(spec) or other(spec): pass
    a = [each for each in spec if type(each) is InBase]
    match spec.kind:
        case Wheels(): pass
    return a if spec.base_spec().framework else spec.framework
"""
    assert conditions({"m": text}) == ["m:11", "m:12", "m:8", "m:8", "m:9"]


def test_callers_ask_a_spec_what_differs_instead_of_its_kind() -> None:
    asking = conditions({name: path.read_text(encoding="utf-8") for name, path in outside_modules()})
    assert len(asking) <= MOST_CONDITIONS, "\n".join(asking)


def test_no_command_imports_another() -> None:
    for root in OUTSIDE:
        for name, others in graph(root).items():
            if room(name) == "commands":
                assert not {other for other in others if room(other) == "commands"}, name


def test_commands_import_libraries_inside_their_function_so_that_help_is_quick() -> None:
    allowed = (
        "trainyard.common.context",
        "trainyard.common.options",
        "trainyard.common.settings",
        "trainyard_jobs.model.options",
    )
    for name, path in outside_modules():
        if room(name) == "commands":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OUTSIDE:
                    taken = [f"{node.module}.{alias.name}" for alias in node.names]
                    assert all(one.startswith(allowed) for one in taken), f"{name}: {taken}"


@pytest.mark.parametrize("root", ROOTS)
def test_what_runs_inside_an_image_and_what_runs_outside_do_not_import_each_other(root: str) -> None:
    others = {other.split(".")[0] for imports in graph(root).values() for other in imports}
    assert others <= OUTSIDE.get(root, {root})


#: Modules that send HTTP requests -> to whom.
SENDERS = {
    "trainyard.common.gcloud": "Google's APIs",
    "trainyard.image.package_index": "package indexes",
    "trainyard.image.sizes": "package indexes",
    "trainyard.image.wheels": "package indexes",
    "trainyard.common.docker_engine": "the engine",
    "trainyard.common.engine_client": "the engine",
    "trainyard.oci.registry": "registries",
    "trainyard.oci.transport": "registries",
    "trainyard.release.advisories": "databases of advisories",
    "trainyard.image.running": "the engine",
    "trainyard.sandbox.containers": "the engine",
    "trainyard_jobs.pods.authorization": "Google's APIs",
    "trainyard.workspace.source_distributions": "package indexes",
    "trainyard.workspace.wheels": "package indexes",
}


def test_registries_are_read_in_one_module_which_checks_what_they_answer() -> None:
    """A manifest is taken as its checked document, and no other module sends requests to a registry."""
    senders = set()
    for name, path in outside_modules():
        if name.startswith("trainyard.sandbox.fakes"):
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
    for name, path in outside_modules():
        for node in nodes(path):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in ("environ", "getenv", "putenv", "environb")
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            ):
                reading.add(name)
    assert {name for name in reading if room(name) != "commands"} == {
        "trainyard.common.settings",
        "trainyard.image.ask_backend",  # runs in a container, as the next three do
        "trainyard.image.record_reads",
        "trainyard.image.gpu_kernels",
        "trainyard.image.network_observer",
    }


def test_options_write_no_environment_variable_and_modules_have_no_state_folder() -> None:
    """What a command was started with is its Context. Two modules still choose for all of their process."""
    writing = {
        name for name, path in outside_modules() if re.search(r"settings\.set_\w*variable", path.read_text("utf-8"))
    }
    assert writing == {"trainyard.spec.architectures", "trainyard.release.cloud_build_steps"}
    naming = {name for name, path in outside_modules() if "state_folder" in path.read_text("utf-8")}
    assert naming == {
        "trainyard.cli",  # for the line about a folder that cannot be written
        "trainyard.common.context",
        "trainyard.common.settings",
        "trainyard.oci.registry",  # of a repository that no command named
    }


def test_commands_load_targets_in_their_context() -> None:
    for name, path in outside_modules():
        if room(name) == "commands":
            for node in nodes(path):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("load", "model.load"):
                    assert "context" in {word.arg for word in node.keywords}, f"{name}: {ast.unparse(node)}"


def test_libraries_return_and_commands_print() -> None:
    """A library reports to its logger, and gives what people read to its caller; ``print`` is left to what it starts
    in a separate process."""
    printing = set()
    for name, path in outside_modules():
        calls = {node.func.id for node in nodes(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        if "trainyard.common.console" in set(imported(name, path)) or "print" in calls:
            printing.add(name)
    assert {name for name in printing if room(name) not in ("commands", "cli")} == {
        "trainyard.common.console",
        "trainyard.common.options",  # --quiet
        "trainyard.image.compiled_step",  # runs inside an image, as the next four do
        "trainyard.image.installed_packages",
        "trainyard.image.gpu_kernels",
        "trainyard.image.peak_memory",
        "trainyard.image.worker_processes",
        "trainyard.sandbox.fakes.google_cloud",  # its own process, which prints its address
        "trainyard.sandbox.fakes.storage",
        "trainyard_jobs.pods.connectivity_probe",  # runs on the workers of a pod
        "trainyard_jobs.pods.logs",  # the workers' lines, which are the result of `pod`
    }


def test_the_package_imports_nothing_of_the_tests() -> None:
    for name, path in outside_modules():
        assert not {found for found in imported(name, path) if found.split(".")[0] in ("tests", "benchmarks")}, name
