"""Code whose names, sizes and links are at every limit of the tar format."""

from __future__ import annotations

from pathlib import Path

#: The diff id of its layer, as exported by BuildKit 0.13 of Docker 26.1 (tests/image/test_code_layer.py).
DIFF_ID = "sha256:2bf2918b5462a846e1ce2535f3385309fa33e3896148e5d9667a00375652fcc0"

PYPROJECT = """\
[project]
name = "My.Package"
version = "1.0"
dependencies = ["numpy>=1", "tomli; python_version < '3.11'"]
optional-dependencies = {dev = ["pytest; python_version > '3'", "ruff"]}
scripts = {train = "mypackage.train:main"}
"""


def write(folder: Path) -> None:
    """Write it, with a trainyard.yaml, into an empty folder."""
    files = {
        "pyproject.toml": PYPROJECT.encode(),
        "src/mypackage/__init__.py": b"",
        "trainyard.yaml": b"extends: cpu\n",
    }
    files["src/mypackage/train.py"] = b"def main():\n    print('trained')\n"
    files |= dict.fromkeys(["a/x", "a.b", "a-b/c", "a0", "A", " lead", "with space\nnewline", "back\\slash"], b"x\n")
    files |= {f"size/{size}": b"z" * size for size in (0, 1, 511, 512, 513, 1024, 3_000_001)}
    # A name has 100 bytes; before it there are 155 for folders, if a slash is at the right place.
    files |= {f"{'n' * length}": b"" for length in (90, 91, 99, 100, 101, 255)}
    files |= {f"names/{'l' * length}/z": b"" for length in range(80, 130)}
    files |= {f"prefix/{'t' * length}/z": b"" for length in range(130, 156)}
    files |= {"/".join([letter * 60] * depth) + "/file": b"x" for letter, depth in (("d", 3), ("e", 5), ("f", 7))}
    files |= {"/".join(["g" * 99] * 4) + "/" + "h" * 120: b"x"}
    files |= {"ünï/cödé.py": b"", "日本/" + "語" * 60 + ".txt": b"", "y" * 90 + "é": b"", "i" * 80 + "/ü/x": b""}
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "train.sh").write_bytes(b"#!/bin/sh\necho trained\n")
    (folder / "train.sh").chmod(0o755)
    links = {"to-file": "a/x", "to-folder": "a", "to-nothing": "nothing/here", "to-ü": "ünï", "100": "x" * 100}
    links |= {"101": "x" * 101, "j" * 101: "ünï/" + "x" * 120, "to-long": "/".join(["d" * 60] * 3) + "/file"}
    for name, target in links.items():
        (folder / name).symlink_to(target)
