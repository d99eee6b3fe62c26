"""Text of Python's documentation: real English to learn from without a network."""

from __future__ import annotations

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

# Parts of the standard library that are not documentation for its users: tests, and packages of other projects.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "ensurepip", "__pycache__",
             "pydoc_data"}  # fmt: skip


def _docstrings(source: str) -> Iterator[str]:
    """Yield the documentation strings in ``source``, in its order, those of a few words left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 80:
                yield text


def write(folder: str | Path, *, sources: bool = False) -> Path:
    """Write the documentation of the Python that runs this as ``.jsonl`` with the key ``text`` into ``folder``.

    ``topics.jsonl`` has the pages of the language reference that ``help()`` prints, ``library.jsonl`` the documentation
    strings of the standard library, one document for each module. The same Python always writes the same.

    Args:
        sources: write the sources of the standard library, too, as ``sources.jsonl``.
    Returns:
        ``folder``.
    """
    from pydoc_data.topics import topics

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "topics.jsonl", (text for _, text in sorted(topics.items())))
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(library.rglob("*.py")) if not _LEFT_OUT & set(path.relative_to(library).parts)]
    contents = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old sources
        documents = ["\n\n".join(_docstrings(content)) for content in contents]
    _write(folder / "library.jsonl", filter(None, documents))
    if sources:
        _write(folder / "sources.jsonl", contents)
    return folder


def _write(path: Path, texts: Iterator[str] | list[str] | filter[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
