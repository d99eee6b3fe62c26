"""Survey the Python files of a repository: imports, options, devices and training, for ``init``.

Files are parsed, never imported or run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

from trainyard.spec.repository_files import git_root, leads_out
from trainyard.workspace import code_files, import_names
from trainyard.workspace.command_flags import Option, constants, of_call, of_types, word_of
from trainyard.workspace.lines import syntax_tree

#: Bytes from which on a file is data.
_LARGEST = 1_000_000

#: Folders that hold no code of the repository, and paths whose code is not what an image runs.
_NOT_CODE = frozenset({"node_modules", "site-packages", "build", "dist"})
_NOT_RUN = re.compile(
    r"(^|/)(tests?|testing|docs?|conftest\.py|setup\.py|noxfile\.py)(/|$)|(^|/)test_[^/]*$|_test\.py$"
)

#: Mark -> the calls, names and attributes that show it.
_MARKS = {
    "trains": "backward|GradientTape|zero_grad|fit|Trainer|train_on_batch|optimizer_step|value_and_grad|apply_gradients"
    "|apply_updates",
    "download": "load_dataset|from_pretrained|urlretrieve|hf_hub_download|snapshot_download|download_url|urlopen"
    "|download_and_extract_archive|dataset_download|load_data",
    "asks": "is_available|current_accelerator|device_count|list_physical_devices|xla_device|Accelerator",
    "tpu": "TPUStrategy|TPUClusterResolver",
}


@dataclass(frozen=True)
class Import:
    """An import of a file.

    Attributes:
        level: its leading dots.
        optional: not at the top of the file. ``conditional``: in a ``try`` or under a condition at the top.
    """

    module: str
    line: int
    level: int
    optional: bool
    conditional: bool

    @property
    def top(self) -> str:
        """Return the first part of the module's name."""
        return self.module.partition(".")[0]


@dataclass
class Source:
    """One file.

    Attributes:
        path: relative to the repository, with ``/``.
        main: it has ``if __name__ == "__main__"``; ``acts``: it has a loop or a call at its top.
        marks: ``cuda``, ``demands`` (a GPU), ``compiles`` and the keys of :data:`_MARKS` -> the first line that shows
            them, and the word.
        repeated: names in the ``range`` of a loop inside another loop: the outer one runs them again.
    """

    path: str
    main: bool = False
    acts: bool = False
    imports: list[Import] = field(default_factory=list)
    options: list[Option] = field(default_factory=list)
    marks: dict[str, tuple[int, str]] = field(default_factory=dict)
    repeated: set[str] = field(default_factory=set)

    @property
    def run(self) -> bool:
        """Return whether an image may run it: it is no test, and no part of the documentation."""
        return not _NOT_RUN.search(self.path)

    def at(self, line: int) -> str:
        """Return ``train.py:3``."""
        return f"{self.path}:{line}"

    def where(self, mark: str) -> str:
        """Return the place of a mark; empty if the file does not have it."""
        return self.at(self.marks[mark][0]) if mark in self.marks else ""


def read(file: Path, path: str) -> Source | None:
    """Return the :class:`Source` of a file whose path in the repository is ``path``; None if it is not Python 3."""
    foreign = file.is_symlink() and leads_out(file, git_root(file.parent))
    if foreign or not file.is_file() or file.stat().st_size > _LARGEST or (tree := syntax_tree(file)) is None:
        return None
    source = Source(path)
    marks: list[tuple[int, str, str]] = []
    for statement in tree.body:
        is_main = isinstance(statement, ast.If) and any(
            isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
        )
        source.main |= is_main
        source.acts |= isinstance(statement, ast.For | ast.While | ast.With) or (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Call)
            and not ast.unparse(statement.value).startswith("__all__.")
        )
        conditional = isinstance(statement, ast.If | ast.Try) and not is_main
        program = is_main or (isinstance(statement, ast.FunctionDef) and statement.name == "main")
        for inner in statement.body if program else [statement]:  # type: ignore[attr-defined]
            if word := _demanded(inner):
                marks.append((inner.lineno, "demands", word))
        offered: set[ast.AST] = set()
        for node in ast.walk(statement):
            if node in offered:
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                source.imports += _imports(node, optional=node is not statement, conditional=conditional)
            elif isinstance(node, ast.Call):
                source.options += of_call(node)
                offered |= {one for key in node.keywords if key.arg == "choices" for one in ast.walk(key.value)}
            elif isinstance(node, ast.IfExp) and any(getattr(one, "value", "") == "cpu" for one in ast.walk(node)):
                marks.append((node.lineno, "asks", "cpu"))
            elif isinstance(node, ast.For | ast.While):
                source.repeated.update(_repeated(node))
            if isinstance(node, ast.expr):
                marks += [(node.lineno, mark, word) for mark, word in _marks(node)]
    source.options += of_types(tree, file)
    for line, mark, word in sorted(marks, key=lambda mark: mark[0]):
        source.marks.setdefault(mark, (line, word))
    return source


def _imports(node: ast.Import | ast.ImportFrom, *, optional: bool, conditional: bool) -> Iterator[Import]:
    base, level = (f"{node.module or ''}.", node.level) if isinstance(node, ast.ImportFrom) else ("", 0)
    for alias in node.names:
        yield Import(f"{base}{alias.name}".strip(".*"), node.lineno, level, optional, conditional)


def _marks(node: ast.expr) -> Iterator[tuple[str, str]]:
    """Yield what a call, a name or a text shows: a mark, and the word."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str) and re.fullmatch(r"(cuda|gpu)(:\d+)?|nccl", node.value):
            yield "cuda", node.value
        return
    if isinstance(node, ast.Attribute) and node.attr == "compile" and word_of(node.value) == "torch":
        yield "compiles", "torch.compile"
    called = isinstance(node, ast.Call)
    word = word_of(node.func if isinstance(node, ast.Call) else node)
    for mark in ("trains", "download") if called else ("asks", "tpu"):
        if re.fullmatch(_MARKS[mark], word):
            yield mark, word
    if isinstance(node, ast.Call) and constants(node).get("download") is True:
        yield "download", f"{word}(download=True)"
    if isinstance(node, ast.Call) and word == "cuda" and isinstance(node.func, ast.Attribute):
        yield "cuda", word


def _demanded(statement: ast.stmt) -> str:
    """Return the beginning of a statement that ends a program without a GPU; empty if it is none."""
    lines = ast.unparse(statement).splitlines() if isinstance(statement, ast.Assert | ast.If) else [""]
    called = r"(torch\.)?cuda\.is_available\(\)"
    if re.match(rf"assert {called}", lines[0]):
        return lines[0].partition(",")[0]
    ends = re.match(r"    (raise|exit|quit|sys\.exit|os\._exit)\b", lines[-1])
    return lines[0].removesuffix(":") if ends and re.fullmatch(rf"if not {called}:", lines[0]) else ""


def _repeated(loop: ast.For | ast.While) -> Iterator[str]:
    """Yield the names in the ranges of the loops inside a loop: ``num_steps`` of ``range(args.num_steps)``."""
    for inner in ast.walk(loop):
        if isinstance(inner, ast.For) and inner is not loop:
            for call in ast.walk(inner.iter):
                if isinstance(call, ast.Call) and word_of(call.func) in ("range", "trange"):
                    yield from filter(None, (word_of(node) for node in ast.walk(call) if isinstance(node, ast.expr)))


def files(root: Path) -> list[str]:
    """Return the files of a repository below ``root`` that may be code, sorted: not those that .gitignore leaves out.

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
    """Hold the Python files of a repository, and which imports which. A file is parsed when it is needed.

    Args:
        files: path in the repository -> the file; those that are not Python are left out.
    """

    def __init__(self, files: Mapping[str, Path | str]) -> None:
        self._files = {path: file for path, file in files.items() if path.endswith(".py")}
        self.of = cache(self._read)
        self.imported = cache(self._imported)
        self._packages = {path.rpartition("/")[0] for path in self._files if path.endswith("/__init__.py")}
        # The module path: the top, src, and every folder that holds a package.
        self._roots = sorted({"", "src", *(name.rpartition("/")[0] for name in self._packages)} - self._packages)
        self._modules: dict[str, str] = {}
        by_depth = sorted(self._files, key=lambda path: path.count("/"))
        for folder in self._roots:
            for path in by_depth:
                if not folder or path.startswith(f"{folder}/"):
                    self._modules.setdefault(self.module(path, folder), path)
        self._tops = {top for top, dot, _ in (name.partition(".") for name in self._modules) if dot}

    def _read(self, path: str) -> Source | None:
        return read(Path(self._files[path]), path) if path in self._files else None

    @cached_property
    def all(self) -> dict[str, Source]:
        """Return path -> file, of all that are Python 3."""
        return {path: source for path in self._files if (source := self.of(path))}

    @cached_property
    def run(self) -> list[Source]:
        """Return the files that an image may run."""
        return [source for source in self.all.values() if source.run]

    @staticmethod
    def module(path: str, folder: str) -> str:
        """Return the module name of a file below a folder of the module path."""
        inside = path.removeprefix(f"{folder}/") if folder else path
        return inside.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def run_as(self, source: Source, said: Collection[str] = ()) -> tuple[str, ...]:
        """Return the command that runs a file: as it is said, by its path, or as a module where it is in a package.

        Args:
            said: what the repository's documents give to Python: paths, and modules with ``-m`` before them.
        """
        folder = source.path.rpartition("/")[0]
        modules = {f"-m {self.module(source.path, root)}" for root in ("", "src")}
        if by_module := sorted(modules & set(said)):
            return ("python", *by_module[0].split())
        if source.path in said:
            return ("python", source.path)
        if folder in self._packages:
            while folder in self._packages:
                folder = folder.rpartition("/")[0]
        elif any(statement.level for statement in source.imports):  # a package without __init__.py
            folder = next(root for root in reversed(self._roots) if not root or source.path.startswith(f"{root}/"))
        else:
            return ("python", source.path)
        return ("python", "-m", self.module(source.path, folder).removesuffix(".__main__"))

    def path_of(self, name: str) -> str:
        """Return the path of a module of the repository; empty if it has none of this name."""
        return self._modules.get(name, "")

    def above(self, source: Source, words: Sequence[str], roots: Collection[str]) -> list[str]:
        """Return the folders above a program that alone have the module of its command, or modules that it imports.

        Args:
            words: the command; Python has the folder of a program that it is given by its path on the module path.
            roots: the folders that are on it in any case.
        """
        own = source.path.rpartition("/")[0] if source.path in words else ""
        module = words[words.index("-m") + 1].replace(".", "/") if "-m" in words else ""
        program = source.path.removesuffix(".py").removesuffix("/__main__")
        needed = [program.removesuffix(module).rstrip("/")] if module and program.endswith(module) else []
        for one in self.closure(source.path):
            for statement in one.imports:
                path = None if statement.level else self.resolve(statement, one)
                folder = re.split(rf"(?:^|/){re.escape(statement.top)}(?:/|\.py)", path)[0] if path else ""
                needed += [folder] if source.path.startswith(f"{folder}/") else []
        return list(dict.fromkeys(one for one in needed if one not in ("", own, *roots)))

    def of_module(self, name: str) -> Source | None:
        """Return the file of a module of the repository; None if it has none of this name."""
        return self.of(self.path_of(name))

    def resolve(self, statement: Import, source: Source) -> str | None:
        """Return the path of an import; None if it is not in the repository.

        Scripts import from their own folder, too. Modules of packages do not: ``import jax`` in backend/utils.py is
        JAX, even if there is a backend/jax.py, and ``import typing`` is Python's.
        """
        folder = source.path.split("/")[:-1]
        parts = statement.module.split(".") if statement.module else []
        if statement.level:
            bases = [folder[: len(folder) - statement.level + 1]]
        elif "/".join(folder) in self._packages and (
            import_names.names_backend(parts[0]) or parts[0] in sys.stdlib_module_names
        ):
            bases = [[]]
        else:
            bases = [folder, []]
            if not import_names.proposed(parts[0]):
                bases += [folder[:depth] for depth in range(len(folder) - 1, 0, -1)]
        names = (".".join([*base, *parts[:count]]) for base in bases for count in range(len(parts), 0, -1))
        return next((self._modules[name] for name in names if name in self._modules), None)

    def _imported(self, path: str) -> list[tuple[Import, str | None]]:
        """Return the imports of a file, each with its path in the repository."""
        source = self.of(path)
        return [(statement, self.resolve(statement, source)) for statement in source.imports] if source else []

    def is_local(self, statement: Import, source: Source) -> bool:
        """Return whether an import is of the repository itself, which may be a folder without ``__init__.py``."""
        return bool(statement.level) or statement.top in self._tops or self.resolve(statement, source) is not None

    def closure(self, path: str, *, conditional: bool = True) -> list[Source]:
        """Return a file and the files of the repository that it imports, directly or not; the file comes first.

        Args:
            conditional: follow imports that only some runs have, such as those of one of several backends.
        """
        closure: dict[str, Source] = {}
        queue = [path]
        while queue:
            name = queue.pop(0)
            source = None if name in closure else self.of(name)
            if source is None:
                continue
            closure[name] = source
            for statement, imported in self.imported(name):
                if conditional or not statement.conditional:
                    queue.append(imported or "")
        return list(closure.values())

    def unread(self, path: str) -> dict[str, str]:
        """Return those files that are not Python 3 -> the place of a file's import of it, of all that a file needs."""
        found: dict[str, str] = {}
        for source in self.closure(path, conditional=False):
            for statement, imported in self.imported(source.path):
                name = "" if statement.optional or statement.conditional else imported
                if name and self.of(name) is None:
                    found.setdefault(name, source.at(statement.line))
        return found
