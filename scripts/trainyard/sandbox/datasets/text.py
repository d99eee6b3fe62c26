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
_VAL = 10  # every tenth document validates


def _docstrings(source: str) -> Iterator[str]:
    """Yield the documentation strings in ``source``, in its order, those of a few words left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and len(text) >= 80:
                yield text


def _distinct(texts: list[str]) -> list[str]:
    """Return ``texts`` without the paragraphs that one before has, so that none is in both parts."""
    seen: set[str] = set()
    distinct = []
    for text in texts:
        paragraphs = [paragraph for paragraph in dict.fromkeys(text.split("\n\n")) if paragraph not in seen]
        seen.update(paragraphs)
        distinct.append("\n\n".join(paragraphs))
    return [text for text in distinct if text.strip()]


def write(folder: str | Path, *, sources: bool = False) -> Path:
    """Write the documentation of the Python that runs this into ``folder``, as ``.jsonl`` with the key ``text``.

    ``topics.jsonl`` has the pages of the language reference that ``help()`` prints, ``library.jsonl`` the documentation
    strings of the standard library, one document for each module. Paragraphs that several have occur once. Every tenth
    document is in ``val/``, the others are in ``train/``. The same Python always writes the same.

    Args:
        sources: write the sources of the standard library, too, as ``sources.jsonl``.
    Returns:
        ``folder``.
    """
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in sorted(library.rglob("*.py")) if not _LEFT_OUT & set(path.relative_to(library).parts)]
    contents = [path.read_text(encoding="utf-8", errors="replace") for path in modules]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of invalid escapes in old sources
        strings = ["\n\n".join(_docstrings(content)) for content in contents]
    documents = {"topics": [text for _, text in sorted(topics.items())], "library": strings}
    if sources:
        documents["sources"] = contents
    folder = Path(folder)
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for name, texts in documents.items():
            numbered = enumerate(_distinct(texts))
            chosen = [text for number, text in numbered if (number % _VAL == 0) == (split == "val")]
            lines = "".join(json.dumps({"text": text}) + "\n" for text in chosen)
            (folder / split / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder
