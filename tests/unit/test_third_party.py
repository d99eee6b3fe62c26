"""The files of other projects that the package carries are those of their packages, with their licences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

import renew_third_party
from trainyard.common import third_party

GOOGLE = "google-api-python-client"

#: Files of google-api-python-client 2.202.0, kubernetes-validate 1.37.0 and scikit-learn 1.9.1, and their SHA-256 in
#: the packages' wheels.
PUBLISHED = [
    (GOOGLE, "aiplatform.v1.json", "36906859efd3eede2bf20e8a5cc68d7e79352d31d5884fd5faa1213010fb2d39"),
    (GOOGLE, "cloudbuild.v1.json", "ba5222eaeb3fcb2f16d02347529b7c5d7d2b1d297e40dddf4602dbf81ee12cbe"),
    (GOOGLE, "ml.v1.json", "063ebc123f87e9b00620b596326de1fa5dd6e012d85d215a255bce46c3064d4d"),
    ("kubernetes-validate", "_definitions.json", "a3dcf2f82ff63d271aaa62f6b77442a0ac00b73239c39109a4dd235251b16f41"),
    ("kubernetes-validate", "job-batch-v1.json", "eeb8157764e8dd98747a07658b007c0a14fd01ba1c6baff6d9faeebd36c384a1"),
    ("scikit-learn", "digits.csv.gz", "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"),
]


@pytest.mark.parametrize(("package", "file", "digest"), PUBLISHED)
def test_a_file_is_as_published(package: str, file: str, digest: str) -> None:
    assert hashlib.sha256(third_party.archive(package).read(file)).hexdigest() == digest


@pytest.mark.parametrize("package", renew_third_party.FILES)
def test_an_archive_has_the_files_of_its_source_and_a_licence(package: str) -> None:
    archive = third_party.archive(package)
    files = {name: archive.read(name) for name in archive.namelist()}
    assert {"LICENSE", "COPYING"} & files.keys()
    source = third_party.sources()[package]
    assert (len(files), renew_third_party.digest(files)) == (source["files"], source["sha256"])


def test_the_digits_are_written_as_with_scikit_learn(
    trainyard: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    assert trainyard("dataset", "digits", str(tmp_path / "d"))[0] == 0
    content = b"".join(path.read_bytes() for path in sorted((tmp_path / "d").iterdir()))
    expected = "568c005e11e9433ccd2254d621f13e384dc31f1c66d002f701635bcfd87337ef"
    assert hashlib.sha256(content).hexdigest() == expected
