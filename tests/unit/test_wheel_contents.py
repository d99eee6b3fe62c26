"""What is read from a wheel: its modules, and the libraries that every use of it loads."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from tests.unit.test_mutations import shared_library

from trainyard.common.errors import UserError
from trainyard.workspace import wheel_contents, wheel_reader
from trainyard.workspace.wheel_contents import Contents


def wheel(folder: Path, files: dict[str, bytes], name: str = "x-1.0-py3-none-any.whl") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, data in {**files, "x-1.0.dist-info/METADATA": b""}.items():
            archive.writestr(path, data)
    return folder / name


@pytest.mark.parametrize(
    ("paths", "modules"),
    [
        ("a/__init__.py a/b/__init__.py one.py tests/__init__.py setup.py", "a one"),
        ("google/protobuf/__init__.py google/_upb/m.abi3.so", "google._upb google.protobuf"),
        ("google/cloud/location/a.py google/cloud/extended.py google/cloud/storage/__init__.py",
         "google.cloud.location google.cloud.storage"),
        ("fast.cpython-311-x86_64-linux-gnu.so _fast.abi3.so libfast.so x.libs/libz.so.1", "fast"),
        ("_only.abi3.so", "_only"),
        ("x-1.0.data/purelib/old/__init__.py x-1.0.data/scripts/run.py", "old"),
        ("cmeel.prefix/lib/python3.11/site-packages/arm/__init__.py share/x.json", "arm"),
        ("data/a.csv nvidia/lib/libcuda.so", ""),
    ],
)  # fmt: skip
def test_modules_are_the_top_ones_and_those_of_namespaces(tmp_path: Path, paths: str, modules: str) -> None:
    found = wheel_reader.read(wheel(tmp_path, dict.fromkeys(paths.split(), b"")))
    assert (found.version, " ".join(found.modules)) == ("1.0", modules)


@pytest.mark.parametrize(
    ("files", "libraries"),
    [
        ({"a/m.abi3.so": ["libgomp.so.1", "libc.so.6"]}, "libgomp.so.1"),
        ({"a/m.abi3.so": ["libb-1.so"], "a.libs/libb-1.so": ["libGL.so.1"]}, "libGL.so.1"),
        ({"a/m.abi3.so": ["libgomp.so.1"], "a.libs/libgomp.so.1": []}, ""),
        # One of several modules, and a library that nothing needs beside a module.
        ({"a/m.abi3.so": ["libgomp.so.1"], "a/n.abi3.so": []}, ""),
        ({"a/m.abi3.so": [], "a/plugins/libq.so": ["libGL.so.1"]}, ""),
        # A library that Python code loads by its name.
        ({"a/lib_a.so": ["libgomp.so.1"]}, "libgomp.so.1"),
        ({"a/m.abi3.so": ["libcuda.so.1", "libof_another_wheel.so"]}, ""),
    ],
)
def test_libraries_are_those_that_every_use_loads(tmp_path: Path, files: dict[str, list[str]], libraries: str) -> None:
    path = wheel(tmp_path, {"a/__init__.py": b"", **{name: shared_library(*needed) for name, needed in files.items()}})
    assert " ".join(wheel_reader.read(path).libraries) == libraries


def test_the_newest_wheel_that_fits_an_image_counts(tmp_path: Path) -> None:
    names = ["x-1.9-py3-none-any.whl", "x-1.10-cp311-cp311-manylinux_2_28_x86_64.whl", "y-1-cp39-abi3-linux_x86_64.whl",
             "x-2.0-cp311-cp311-win_amd64.whl", "x-3.0-cp311-cp311-manylinux_2_28_aarch64.whl"]  # fmt: skip
    for name in names:
        wheel(tmp_path, {}, name)
    assert wheel_reader.newest([tmp_path]) == {"x": tmp_path / names[1], "y": tmp_path / names[2]}


@pytest.mark.parametrize("name", ["x.whl", "x-1.0-py3-none-any.whl"])
def test_what_is_no_wheel_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=name):
        wheel_reader.read(wheel_reader.newest([tmp_path])["x"])


def test_the_table_is_sorted_small_and_knows_well_known_packages() -> None:
    wheels = json.loads(wheel_contents.FILE.read_text(encoding="utf-8"))["wheels"]
    assert list(wheels) == sorted(wheels)
    assert len(wheels) > 900
    assert wheel_contents.FILE.stat().st_size < 200_000
    assert wheel_contents.known()["lightgbm"] == Contents(wheels["lightgbm"][0], ("lightgbm",), ("libgomp.so.1",))
