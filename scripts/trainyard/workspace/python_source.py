"""What the Python files of a repository say about its training: imports, options, devices, downloads.

Files are parsed, never imported or run.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.workspace import code_files, import_names

#: Larger files are data.
_LARGEST = 1_000_000

#: Folders that hold no code of the repository.
_NOT_CODE = frozenset({"node_modules", "site-packages", "build", "dist"})

#: Folders whose code is not what an image runs.
_NOT_RUN = re.compile(
    r"(^|/)(tests?|testing|docs?|conftest\.py|setup\.py|noxfile\.py)(/|$)|(^|/)test_[^/]*$|_test\.py$"
)

#: Calls that training loops consist of, with their weight.
_TRAINING = {"backward": 3, "GradientTape": 3, "zero_grad": 2, "fit": 2, "Trainer": 2, "train_on_batch": 2}
_TRAINING |= {"optimizer_step": 2, "DataLoader": 1, "AdamW": 1, "Adam": 1, "SGD": 1, "compile": 1}

#: Calls that fetch data or weights.
_FETCHING = """
load_dataset from_pretrained urlretrieve hf_hub_download snapshot_download download_url urlopen
download_and_extract_archive dataset_download load_data
"""
_DOWNLOADS = frozenset(_FETCHING.split())

#: Attributes whose use shows that the code asks what the machine has.
_ASKS_FOR_DEVICE = frozenset(
    {"is_available", "current_accelerator", "device_count", "list_physical_devices", "xla_device", "Accelerator"}
)


@dataclass(frozen=True)
class Import:
    """An import of a file.

    Attributes:
        optional: in a function, a condition or a ``try``; ``conditional``: in one of the latter, outside of functions.
        level: its leading dots.
    """

    module: str
    line: int
    optional: bool
    level: int = 0
    conditional: bool = False


@dataclass(frozen=True)
class Option:
    """An option of the command line; ``switch``: it takes no value. ``name`` of a positional one has no dashes."""

    name: str
    line: int
    default: object = None
    required: bool = False
    switch: bool = False


@dataclass
class Source:
    """One file.

    Attributes:
        path: relative to the repository, with ``/``.
        main: it has ``if __name__ == "__main__"``; ``acts``: it has a loop or a call at its top.
        training: weight of the calls that training loops consist of; ``script``: of those outside of functions.
        subcommands: it has subcommands, which options belong to.
        cuda: line that needs CUDA; ``asks``: the code asks whether there is a device.
        tpu: line that uses TPUs with TensorFlow.
        download: line that fetches something, and the call's name.
        loss: line that prints a loss.
    """

    path: str
    imports: list[Import] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    main: bool = False
    acts: bool = False
    training: int = 0
    script: int = 0
    subcommands: bool = False
    cuda: int = 0
    asks: bool = False
    tpu: int = 0
    download: tuple[int, str] | None = None
    loss: int = 0

    @property
    def run(self) -> bool:
        """Whether it may be part of what an image runs: not a test, nor documentation."""
        return not _NOT_RUN.search(self.path)


class _Reader(ast.NodeVisitor):
    """Fills a :class:`Source`."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._inside = 0
        self._functions = 0
        self._conditions = 0

    def _nested(self, node: ast.AST) -> None:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions += 1
        self._nested(node)
        self._functions -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._nested(node)

    def visit_Try(self, node: ast.Try) -> None:
        self._conditions += 1
        self._nested(node)
        self._conditions -= 1

    def visit_If(self, node: ast.If) -> None:
        main = "__name__" in {one.id for one in ast.walk(node.test) if isinstance(one, ast.Name)}
        self.source.main |= main
        self._conditions += not main
        self._nested(node)
        self._conditions -= not main

    def _import(self, module: str, line: int, level: int = 0) -> None:
        conditional = self._conditions > 0 and not self._functions
        self.source.imports.append(Import(module, line, self._inside > 0, level, conditional))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        for alias in node.names:
            module = f"{base}.{alias.name}".lstrip(".") if alias.name != "*" else base
            self._import(module, node.lineno, node.level)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"(cuda|gpu)(:\d+)?|nccl", node.value):
            self.source.cuda = self.source.cuda or node.lineno

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.source.asks |= node.attr in _ASKS_FOR_DEVICE
        if node.attr in ("TPUStrategy", "TPUClusterResolver"):
            self.source.tpu = self.source.tpu or node.lineno
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.source.asks |= node.id in _ASKS_FOR_DEVICE

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords = {one.arg: one.value for one in node.keywords if one.arg}
        source = self.source
        weight = _TRAINING.get(name, 0)
        source.training += weight
        source.script += 0 if self._functions else weight
        if name == "cuda" and isinstance(node.func, ast.Attribute):
            source.cuda = source.cuda or node.lineno
        fetches = isinstance(keywords.get("download"), ast.Constant) and keywords["download"].value is True  # type: ignore[attr-defined]
        if (name in _DOWNLOADS or fetches) and source.download is None:
            source.download = (node.lineno, name if name in _DOWNLOADS else f"{name}(download=True)")
        if name in ("print", "info", "log", "write", "set_postfix") and "loss" in ast.dump(node).lower():
            source.loss = source.loss or node.lineno
        if name in ("add_subparsers", "group", "Group", "Typer"):
            source.subcommands = True
        if name in ("add_argument", "option", "argument") or name.startswith("DEFINE_"):
            self._option(name, node, keywords)
        self.generic_visit(node)

    def _option(self, call: str, node: ast.Call, keywords: dict[str, ast.expr]) -> None:
        def constant(value: ast.expr | None) -> object:
            return value.value if isinstance(value, ast.Constant) else None

        words = [str(one.value) for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if not words:
            return
        if call.startswith("DEFINE_"):  # absl.flags: name, default, help
            default = constant(node.args[1]) if len(node.args) > 1 else constant(keywords.get("default"))
            switch = call in ("DEFINE_bool", "DEFINE_boolean")
            self.source.options.append(Option(f"--{words[0]}", node.lineno, default, False, switch))
            return
        long = [word for word in words if word.startswith("--")]
        if long:
            switch = str(constant(keywords.get("action"))).startswith("store_") or bool(
                constant(keywords.get("is_flag"))
            )
            required = constant(keywords.get("required")) is True
            found = Option(long[0].split("/")[0], node.lineno, constant(keywords.get("default")), required, switch)
            self.source.options.append(found)
        elif not words[0].startswith("-") and re.fullmatch(r"[A-Za-z_]\w*", words[0]):
            needed = (
                constant(keywords.get("nargs")) not in ("?", "*") and constant(keywords.get("required")) is not False
            )
            self.source.options.append(Option(words[0], node.lineno, None, needed and "default" not in keywords))


def read(root: Path, path: str) -> Source | None:
    """A file's :class:`Source`; None if it is not Python 3."""
    file = root / path
    try:
        if file.stat().st_size > _LARGEST or not file.is_file():
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning of the user's strings
            tree = ast.parse(file.read_bytes(), filename=path)
        source = Source(path, acts=any(_acts(node) for node in tree.body))
        _Reader(source).visit(tree)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return source


def _acts(node: ast.stmt) -> bool:
    """Whether a statement at the top of a file does something, as those of scripts do."""
    return isinstance(node, ast.For | ast.While | ast.With) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )


def literal_argument(file: Path, keyword: str) -> list[str]:
    """The strings of a list that a Python file passes as a keyword argument; empty if it is computed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == keyword and isinstance(node.value, ast.List | ast.Tuple):
            values = [one.value if isinstance(one, ast.Constant) else None for one in node.value.elts]
            return [one for one in values if isinstance(one, str)] if None not in values else []
    return []


def files(root: Path) -> list[str]:
    """The files of a repository below ``root`` that may be code, sorted: not those that .gitignore leaves out.

    Raises:
        UserError: git cannot list them.
    """
    return [
        name
        for name in code_files.below(root)
        if not any(part in _NOT_CODE or part.startswith(".") for part in name.split("/")[:-1])
        and (root / name).is_file()
    ]


class Sources:
    """The Python files of a repository, and which imports which."""

    def __init__(self, root: Path, names: Iterable[str]) -> None:
        found = (read(root, name) for name in names if name.endswith(".py"))
        self.all = {source.path: source for source in found if source}
        self.packages = {path.rpartition("/")[0] for path in self.all if path.endswith("/__init__.py")}
        #: Folders of the module path: the top, src, and every folder that holds a package.
        self.roots = sorted({"", "src", *(one.rpartition("/")[0] for one in self.packages)} - self.packages)
        self._modules: dict[str, str] = {}
        for path in sorted(self.all, key=lambda path: (-path.count("/"), path), reverse=True):
            for root_folder in self.roots:
                if name := self.module(path, root_folder):
                    self._modules.setdefault(name, path)
        self.local = {name.partition(".")[0] for name in self._modules}
        # Scripts import modules of their own folder, too.
        self._beside: dict[str, set[str]] = {}
        for path in self.all:
            folder, _, file = path.rpartition("/")
            self._beside.setdefault(folder, set()).add(file.removesuffix(".py"))

    @staticmethod
    def module(path: str, root: str) -> str:
        """The module name of a file below a folder of the module path; empty if it is not below it."""
        inside = path.removeprefix(f"{root}/") if root else path
        if root and inside == path:
            return ""
        return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def package_root(self, path: str) -> str | None:
        """The folder that a file's package is imported from; None if it is in no package."""
        folder = path.rpartition("/")[0]
        if folder not in self.packages:
            return None
        while folder in self.packages:
            folder = folder.rpartition("/")[0]
        return folder

    def _looks_beside(self, one: Import, folder: str) -> bool:
        """Whether a file in ``folder`` may import a module from there: scripts do.

        Modules of packages do not: ``import jax`` in backend/utils.py is JAX, even if there is a backend/jax.py.
        """
        return folder not in self.packages or import_names.distribution(one.module.partition(".")[0]) is None

    def resolve(self, one: Import, source: Source) -> str | None:
        """The file of an import; None if it is not in the repository."""
        folder = source.path.rpartition("/")[0]
        if one.level:
            for _ in range(one.level - 1):
                folder = folder.rpartition("/")[0]
            places = [f"{folder}/" if folder else ""]
        else:
            places = [f"{root}/" if root else "" for root in self.roots]
            if self._looks_beside(one, folder):
                places.insert(0, f"{folder}/" if folder else "")
        parts = one.module.split(".") if one.module else []
        for place in places:
            for count in range(len(parts), 0, -1):
                path = place + "/".join(parts[:count])
                for file in (f"{path}.py", f"{path}/__init__.py"):
                    if file in self.all:
                        return file
        return None

    def closure(self, path: str, *, conditional: bool = True) -> list[Source]:
        """A file and the files of the repository that it imports, directly or not; the file comes first.

        Args:
            conditional: follow imports that only some runs have, such as those of one of several backends.
        """
        found: dict[str, Source] = {}
        queue = [path]
        while queue:
            name = queue.pop(0)
            if name in found or name not in self.all:
                continue
            found[name] = self.all[name]
            for one in found[name].imports:
                if one.conditional and not conditional:
                    continue
                if (file := self.resolve(one, found[name])) and file not in found:
                    queue.append(file)
        return list(found.values())

    def is_local(self, one: Import, source: Source) -> bool:
        """Whether an import is of the repository itself."""
        top = one.module.partition(".")[0]
        folder = source.path.rpartition("/")[0]
        beside = self._beside.get(folder, set()) if self._looks_beside(one, folder) else set()
        return bool(one.level) or top in self.local or top in beside or self.resolve(one, source) is not None
