"""Read the options of a program's command line from its code, which is parsed, never imported or run.

Of argparse, click and absl from the calls that declare them; of tyro, Hugging Face's parser, typer and Fire from
fields and parameters; of Hydra from its YAML files; of programs with a configurator from the names at their top, as in
https://github.com/karpathy/nanoGPT/blob/master/configurator.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.common.errors import UserError
from trainyard.spec import yaml_source
from trainyard.spec.repository_files import git_root, leads_out

#: Calls that make options of the classes and functions that they are given; those that give them dashes and switches.
_TYPED = re.compile(r"(tyro)\.(cli|extras.*)|(typer)\.run|(?:\w+\.)?(HfArgumentParser|Fire)")
_DASHED = ("tyro", "typer")

#: How deep dataclasses and files of Hydra may be in each other.
_DEPTH = 5


@dataclass(frozen=True)
class Option:
    """Describe an option of the command line; the name of a positional one has no dashes, a switch takes no value.

    Attributes:
        choices: the values that it takes, if it names them. ``key``: it is given as ``name=value``, as Hydra has it.
        shown: its default and its help, as the code has them.
    """

    name: str
    line: int
    required: bool
    switch: bool
    choices: tuple[str, ...] = ()
    key: bool = False
    shown: str = ""

    @property
    def word(self) -> str:
        """Return the name as tables have it: ``max-epochs`` of ``--max_epochs`` and of ``trainer.max_epochs``."""
        return self.name.lstrip("-").rpartition(".")[2].replace("_", "-").lower()

    def given(self, value: str) -> str:
        """Return the argument that gives it a value; an empty one sets a switch."""
        if self.switch:
            return self.name
        return f"{self.name}={value}" if self.key or self.name.startswith("-") else value


def word_of(node: ast.AST) -> str:
    """Return the last part of a name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def constants(node: ast.Call) -> dict[str | None, Any]:
    """Return the keywords of a call; None for values that are no constants."""
    return {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}


def of_call(node: ast.Call) -> Iterator[Option]:
    """Yield the option that a call declares: with argparse, click, absl's flags or Hugging Face's TrainingArguments."""
    name, keywords = word_of(node.func), constants(node)
    words = [node.value for node in node.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = [*node.args[1:], *(key.value for key in node.keywords if key.arg in ("default", "help"))]
    shown = " ".join(map(ast.unparse, said))
    if words and name.startswith("DEFINE_"):
        yield Option(f"--{words[0]}", node.lineno, False, name in ("DEFINE_bool", "DEFINE_boolean"), shown=shown)
    elif name == "HfArgumentParser" and any(
        isinstance(part, ast.expr) and word_of(part).endswith("TrainingArguments")
        for argument in node.args
        for part in ast.walk(argument)
    ):
        # https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments.max_steps
        yield from (Option(one, node.lineno, False, False) for one in ("--max_steps", "--output_dir", "--report_to"))
        yield Option("--use_cpu", node.lineno, False, True)
    elif not words or name not in ("add_argument", "option", "argument"):
        return
    else:
        values = next((key.value for key in node.keywords if key.arg == "choices"), None)
        choices = tuple(str(getattr(one, "value", "")) for one in getattr(values, "elts", ()))
        if long := next((word for word in words if word.startswith("--")), ""):
            switch = str(keywords.get("action")).startswith("store_") or keywords.get("is_flag") is True
            required = keywords.get("required") is True
            yield Option(long.split("/")[0], node.lineno, required, switch, choices, shown=shown)
        elif words[0].isidentifier():
            optional = keywords.get("nargs") in ("?", "*") or keywords.get("required") is False or "default" in keywords
            yield Option(words[0], node.lineno, not optional, False, choices, shown=shown)


def of_types(tree: ast.Module, file: Path) -> Iterator[Option]:
    """Yield the options that a file declares without naming each in a call."""
    named = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    for node in ast.walk(tree):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and (typed := _TYPED.fullmatch(called)):
            library = next(filter(None, typed.groups()[:1] + typed.groups()[2:]))
            given = {word_of(part) for argument in node.args for part in ast.walk(argument)}
            for name in sorted(given & named.keys()):
                yield from _of(named[name], named, library in _DASHED)
        elif isinstance(node, ast.Call) and called == "exec" and "configurator" in ast.unparse(node):
            yield from _of_constants(tree)
        elif isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                text = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
                if text in ("hydra.main", "main") and isinstance(decorator, ast.Call):
                    yield from _of_hydra(decorator, file)
                elif text.endswith(".command") and "typer" in ast.unparse(node.args):
                    yield from _of(node, named, True)


def _of(
    node: ast.ClassDef | ast.FunctionDef, named: dict[str, Any], dashed: bool, prefix: str = "", depth: int = 0
) -> Iterator[Option]:
    """Yield the fields of a dataclass, or the parameters of a function, as options."""
    fields: list[tuple[str, int, ast.expr | None, ast.expr | None]] = []
    if isinstance(node, ast.ClassDef):
        for base in node.bases:
            if isinstance(parent := named.get(word_of(base)), ast.ClassDef) and depth < _DEPTH:
                yield from _of(parent, named, dashed, prefix, depth + 1)
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                fields.append((one.target.id, one.lineno, one.annotation, one.value))
    else:
        plain = [*node.args.posonlyargs, *node.args.args]
        defaults = [*[None] * (len(plain) - len(node.args.defaults)), *node.args.defaults, *node.args.kw_defaults]
        for arg, default in zip([*plain, *node.args.kwonlyargs], defaults, strict=True):
            fields.append((arg.arg, arg.lineno, arg.annotation, default))
    for name, line, kind, value in fields:
        if name == "self":
            continue
        if isinstance(inner := named.get(word_of(kind) if kind else ""), ast.ClassDef) and depth < _DEPTH:
            yield from _of(inner, named, dashed, f"{prefix}{name}.", depth + 1)
            continue
        text, set_to = ast.unparse(kind) if kind else "", ast.unparse(value) if value else ""
        required = not set_to or set_to.startswith(("typer.Option(...", "typer.Argument(..."))
        required |= set_to.startswith(("field(", "dataclasses.field(")) and "default" not in set_to
        choices = tuple(re.findall(r"'([^']*)'", text)) if "Literal[" in text else ()
        positional = set_to.startswith("typer.Argument")
        written = f"{prefix}{name}".replace("_", "-") if dashed else f"{prefix}{name}"
        option = name if positional else f"--{written}"
        yield Option(option, line, required, dashed and text == "bool", choices, shown=set_to)


def _of_constants(tree: ast.Module) -> Iterator[Option]:
    """Yield the names at the top of a file that are set to a constant."""
    for one in tree.body:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and isinstance(one.targets[0], ast.Name):
            yield Option(f"--{one.targets[0].id}", one.lineno, False, False, shown=ast.unparse(one.value))


def _of_hydra(decorator: ast.Call, file: Path) -> Iterator[Option]:
    """Yield the keys of the configuration of a program of Hydra: https://hydra.cc/docs/advanced/defaults_list/."""
    given = constants(decorator) | dict(zip(("config_path", "config_name"), map(_value, decorator.args), strict=False))
    if not isinstance(name := given.get("config_name"), str):
        return
    folder = file.parent / str(given.get("config_path") or "")
    for key, value in _keys(folder, name.removesuffix(".yaml"), "", git_root(file.parent)).items():
        yield Option(key, decorator.lineno, value == "???", False, (), True, repr(value))


def _value(node: ast.expr) -> Any:
    return getattr(node, "value", None)


def _keys(folder: Path, name: str, package: str, top: Path, depth: int = 0) -> dict[str, Any]:
    """Return the keys of a file of Hydra and of those in its defaults, with dots -> value."""
    path = folder / f"{name}.yaml"
    if depth > _DEPTH or not path.is_file() or leads_out(path, top):
        return {}
    try:
        text, document = yaml_source.text(path), yaml_source.plain(yaml_source.read(path))
    except UserError:
        return {}
    found: dict[str, Any] = {}
    for entry in document.pop("defaults", None) or ():
        for group, choice in entry.items() if isinstance(entry, dict) else [("", entry)]:
            group = group.removeprefix("optional ").partition("@")[0].strip("/")
            if isinstance(choice, str) and choice != "_self_" and not group.startswith("override "):
                inner = ".".join(filter(None, (package, group.replace("/", "."))))
                place = folder / path.parent.relative_to(folder) / group
                found |= _keys(place, choice, inner, top, depth + 1)
    if "@package _global_" in text[:200]:
        package = ""
    return found | dict(_flat(document, f"{package}." if package else ""))


def _flat(document: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
