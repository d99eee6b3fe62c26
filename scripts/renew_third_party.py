"""Write the files of other projects that the package carries, from the newest releases of the packages that have them.

    uvx --with google-api-python-client --with kubernetes-validate --with scikit-learn \
        python scripts/renew_third_party.py
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "trainyard" / "common" / "third_party"

#: Package -> patterns of its files that are carried, as its wheel names them; its licence is carried with them. Of
#: Kubernetes the newest version is, with schemas that allow no unknown fields.
FILES = {
    "google-api-python-client": r"googleapiclient/discovery_cache/documents/(aiplatform|cloudbuild|ml)\.v1\.json",
    "kubernetes-validate": r"kubernetes_validate/kubernetes-json-schema/v{newest}-local-strict/[^/]+\.json",
    "scikit-learn": r"sklearn/datasets/(data/digits\.csv\.gz|descr/digits\.rst)",
}


def contents(package: str) -> dict[str, bytes]:
    """Return the carried files of an installed package by their last names."""
    files = [file for file in metadata.files(package) or [] if file.suffix != ".pyc"]
    versions = {match[1] for file in files if (match := re.search(r"/v(\d+(?:\.\d+)+)-local-strict/", file.as_posix()))}
    newest = max(versions, key=lambda version: [int(part) for part in version.split(".")], default="")
    wanted = re.compile(FILES[package].replace("{newest}", re.escape(newest)) + r"|[^/]+\.dist-info/licenses/[^/]+")
    return {file.name: Path(file.locate()).read_bytes() for file in files if wanted.fullmatch(file.as_posix())}


def digest(files: dict[str, bytes]) -> str:
    """Return the SHA-256 of the lines that sha256sum prints of files in the order of their names."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write(package: str, files: dict[str, bytes]) -> None:
    """Write an archive that is the same for the same files."""
    with zipfile.ZipFile(FOLDER / f"{package}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Write the archives, and their sources with the digests of their files."""
    sources = {}
    for package in FILES:
        files = contents(package)
        write(package, files)
        sources[package] = {"version": metadata.version(package), "files": len(files), "sha256": digest(files)}
    (FOLDER / "sources.json").write_text(json.dumps(sources, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
