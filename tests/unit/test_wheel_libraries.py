"""The libraries that wheels have in them: by the SBOM in a wheel, else by names and texts of its files."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from tests.unit.test_mutations import layer, shared_library

from trainyard.oci import inventory, wheel_libraries
from trainyard.oci.inventory import Image, LayerSummary
from trainyard.oci.wheel_libraries import Library
from trainyard.release import sbom

SITE = "opt/venv/lib/python3.13/site-packages"


def binary(*texts: str, before: int = 1000) -> bytes:
    """A shared library with these texts at some distance from its start."""
    return shared_library("libc.so.6") + b"x" * before + b"".join(b"\0" + text.encode() + b"\0" for text in texts)


def wheel(files: dict[str, bytes], *, name: str = "demo", version: str = "1.0", listed: bool = True) -> bytes:
    """A layer with a wheel; its RECORD lists its files, or no file."""
    about = f"{name}-{version}.dist-info"
    record = "".join(f"{path},sha256=,1\n" for path in files if listed)
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
    files = {f"{about}/METADATA": metadata.encode(), f"{about}/RECORD": record.encode(), **files}
    return layer(*((f"{SITE}/{path}", content) for path, content in files.items()))


def image(*layers: bytes, libraries: bool = True) -> Image:
    """An image with these layers, which were read."""
    read = [inventory.read_layer(io.BufferedReader(io.BytesIO(one)), libraries=libraries) for one in layers]
    return Image(
        reference="trainyard:demo",
        digest=f"sha256:{'ab' * 32}",
        config={"config": {}},
        documents={},
        layers=tuple(LayerSummary(f"l{number}", "", f"sha256:{number}", 1, 1) for number in range(len(read))),
        layer_contents={f"sha256:{number}": contents for number, contents in enumerate(read)},
    )


def found(files: dict[str, bytes], **about: Any) -> list[tuple[str, str]]:
    """Name and version of the libraries in a wheel."""
    (libraries,) = image(wheel(files, **about)).libraries().values()
    return [(one.name, one.version) for one in libraries]


def stating(*components: dict[str, str]) -> dict[str, bytes]:
    """The SBOM of a wheel (PEP 770)."""
    document = {"bomFormat": "CycloneDX", "specVersion": "1.4", "components": list(components)}
    return {"demo-1.0.dist-info/sboms/auditwheel.cdx.json": json.dumps(document).encode()}


#: From the sources of each project, or a wheel that has it.
TEXTS = {
    "boringssl": ("BoringSSL", ""),
    "bzip2": ("1.0.8, 13-Jul-2019", "1.0.8"),
    "curl": ("libcurl/8.20.0", "8.20.0"),
    "expat": ("expat_2.7.1", "2.7.1"),
    "ffmpeg": ("FFmpeg version n7.1.1", "7.1.1"),
    "giflib": ("Data is not in GIF format", ""),
    "hdf5": ("HDF5 library version: 2.0.0", "2.0.0"),
    "icu": ("ICU_DATA", ""),
    "libjpeg-turbo": ("libjpeg-turbo version 3.2.0 (build 20261016)", "3.2.0"),
    "libpng": (" libpng version 1.6.58\n", "1.6.58"),
    "libtiff": ("LIBTIFF, Version 4.7.2\nCopyright (c) 1988-1996 Sam Leffler", "4.7.2"),
    "libuv": ("UV_THREADPOOL_SIZE", ""),
    "llvm": ("LLVM version 24.0.0git", "24.0.0git"),
    "lua": ("$LuaVersion: Lua 5.4.7  Copyright (C) 1994-2024 Lua.org, PUC-Rio $", "5.4.7"),
    "mkl": ("Intel(R) oneAPI Math Kernel Library Version ", ""),
    "onednn": ("oneDNN_3.7.3:jit_avx2_gemm_s8u8s32_kern", "3.7.3"),
    "openblas": ("OpenBLAS 0.3.31.dev DYNAMIC_ARCH NO_AFFINITY ", "0.3.31.dev"),
    "openssl": ("OpenSSL 3.0.16 11 Feb 2025", "3.0.16"),
    "qt": ("Qt 6.10.1 (x86_64-little_endian-lp64 shared (dynamic) release build; by GCC 10.3.1)", "6.10.1"),
    "sqlite": ("SQLite format 3", ""),
    "zlib": (" inflate 1.3.1 Copyright 1995-2024 Mark Adler ", "1.3.1"),
    "zstd": ("Restored data doesn't match checksum", ""),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_tells_what_is_linked_statically(name: str) -> None:
    text, version = TEXTS[name]
    assert found({"demo/core.abi3.so": binary(text)}) == [(name, version)]
    assert found({"demo/core.txt": binary(text)}) == [] == found({"demo/core.abi3.so": text.encode()}), "no library"


def test_every_library_of_the_table_that_has_texts_is_tried_here() -> None:
    assert {name for name, *_ in wheel_libraries._texts()} == TEXTS.keys()
    assert all(len(plain) > 5 for _, plain, _ in wheel_libraries._texts())


@pytest.mark.parametrize(
    "text",
    [
        "OpenSSL 1.1.1 (compatible; BoringSSL)",
        "BoringSSL error %s",
        "needs OpenSSL 3.0.16 or later",
        "NCCL version %d does not support this",
        "LLVM version 18.",
        "HDF5 library version 1.10 or later)",
        "libpng version",
        "GCC: (GNU) 10.2.1",
        "clang version 18.1.8",
    ],
)
def test_what_only_names_a_library_is_none(text: str) -> None:
    assert found({"demo/core.abi3.so": binary(text)}) == []


@pytest.mark.parametrize("before", range(-30, 8, 3))
def test_a_text_is_found_wherever_the_file_is_cut_to_be_read(before: int) -> None:
    """Never the beginning of a version, as 1.6.5 of 1.6.58."""
    start = wheel_libraries._CHUNK - len(shared_library("libc.so.6")) + before
    for text, version in (TEXTS["libpng"], TEXTS["bzip2"], TEXTS["qt"]):
        assert [told for _, told in found({"demo/core.so": binary(text, before=start)})] == [version]


@pytest.mark.parametrize(
    ("file", "library"),
    [
        ("demo.libs/libzstd-40ad5e7e.so.1.5.7", ("zstd", "1.5.7")),
        ("demo.libs/libz.cac6d5fc.so.1", ("zlib", "")),
        ("demo.libs/libtiff-20b7e810.so.6.3.0", ("libtiff", "")),
        ("demo.libs/libavcodec-3b0c4a3e.so.61.19.100", ("ffmpeg", "")),
        ("demo.libs/libgfortran-040039e1-0352e75f.so.5.0.0", ("libgfortran", "")),
        ("demo.libs/libscipy_openblas64_-32a4b2a6.so", ("openblas", "")),
        ("demo.libs/libXau-154567c4.so.6.0.0", ("libXau", "")),
        ("demo/lib/libssl.so.3", ("openssl", "")),
        ("demo/Qt5/lib/libQt5Core.so.5.15.16", ("qt", "5.15.16")),
        ("demo/lib/libcupti.so.2025.1.1", ("cupti", "2025.1.1")),
        ("demo/lib/libdemo.so.1.2.3", None),
    ],
)
def test_a_name_tells_a_library_and_its_version_only_where_it_is_that_of_the_release(
    file: str, library: tuple[str, str] | None
) -> None:
    assert found({file: binary()}) == ([library] if library else [])


def test_files_of_one_library_are_one_and_two_versions_are_two() -> None:
    files = {
        "demo.libs/libcrypto-0123abcd.so.3": binary("OpenSSL 3.0.16 11 Feb 2025"),
        "demo.libs/libssl-0123abcd.so.3": binary(),
    }
    (libraries,) = image(wheel(files)).libraries().values()
    purl, cpe = "pkg:generic/openssl@3.0.16", "cpe:2.3:a:openssl:openssl:3.0.16:*:*:*:*:*:*:*"
    assert libraries == (Library("openssl", "3.0.16", purl, cpe, tuple(f"{SITE}/{path}" for path in files)),)
    several = image(wheel({f"demo/{number}.so": binary("expat_2.7.1") for number in range(9, 0, -1)}))
    assert re.findall(r"/demo/(\d).so\"\n", sbom.bill(several, {})) == list("123456789"), "always in this order"
    other = {"demo/core.so": binary("OpenSSL 1.1.1w  11 Sep 2023")}
    assert found(files | other) == [("openssl", "1.1.1w"), ("openssl", "3.0.16")]


def test_a_library_of_nvidia_has_the_version_of_its_wheel_and_no_other_has() -> None:
    files = {"nvidia/cudnn/lib/libcudnn.so.9": binary("LLVM version 23.0.2")}
    assert found(files, name="nvidia_cudnn_cu12", version="9.28.0.42") == [("cudnn", "9.28.0.42")]
    assert found({"demo/libcudart.e8e8b82a.so.12": binary()}) == [("cudart", "")]


def test_the_sbom_in_a_wheel_comes_first() -> None:
    """Take what is optional, and may be absent, only if a file shows that it is there (pillow's libimagequant)."""
    files = {
        "demo.libs/libXau-154567c4.so.6.0.0": binary(),
        "demo.libs/libfreetype-57f805ba.so.6.20.6": binary(),
        "demo.libs/libavif-c6062d5f.so.16.4.2": binary(),
        "demo.libs/libjpeg-6dc8d115.so.62.4.0": binary("libjpeg-turbo version 3.2.0 (build 20261016)"),
        "demo/rust.abi3.so": binary("Restored data doesn't match checksum", "OpenSSL 4.0.3 14 Oct 2026"),
    }
    stated = stating(
        {"name": "demo", "version": "1.0", "purl": "pkg:pypi/demo@1.0?file_name=demo.whl"},
        {"name": "libXau", "version": "1.0.9-3.el8", "purl": "pkg:rpm/almalinux/libXau@1.0.9-3.el8"},
        {"name": "FreeType", "version": "2.14.3", "scope": "optional"},
        {"name": "libimagequant", "version": "4.4.1", "scope": "optional"},
        {"name": "libavif", "version": "no version", "scope": "optional"},
        {"name": "pybind11", "scope": "excluded"},
        {"name": "libjpeg / libjpeg-turbo", "version": "3.2.0"},
        {"name": "zlib", "version": "2.3.3", "purl": "no purl"},
        {"name": "zstd", "version": "0.13.3", "purl": "pkg:cargo/zstd@0.13.3"},
        {"name": "openssl", "version": "4.0.3", "purl": "pkg:generic/openssl@4.0.3?download_url=https://openssl.org"},
    )
    read = image(wheel(files | stated))
    assert [(one.name, one.version) for one in read.libraries()["demo"]] == [
        ("freetype", "2.14.3"),
        ("libavif", ""),
        ("libjpeg-turbo", "3.2.0"),
        ("libXau", "1.0.9-3.el8"),
        ("openssl", "4.0.3"),
        ("zlib", "2.3.3"),
        ("zstd", ""),
        ("zstd", "0.13.3"),
    ]
    text = sbom.bill(read, {})
    assert sbom.violation(text) is None
    (demo,) = json.loads(text)["components"]
    parts = {one["name"]: one for one in demo["components"]}
    assert parts["libXau"]["purl"] == "pkg:rpm/almalinux/libXau@1.0.9-3.el8" and "purl" not in parts["zlib"]
    assert "download_url" in parts["openssl"]["purl"] and parts["openssl"]["cpe"].startswith(
        "cpe:2.3:a:openssl:openssl:4"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"components": 1}', b'{"components": [{"name": 1}]}', b"\xff"])
def test_an_sbom_that_is_none_is_passed_over(content: bytes) -> None:
    sboms = {"demo-1.0.dist-info/sboms/x.json": content, "demo-1.0.dist-info/sboms/x.spdx": b"SPDXVersion: SPDX-2.3"}
    assert found(sboms | {"demo.libs/libXau-154567c4.so.6.0.0": binary()}) == [("libXau", "")]


def test_libraries_are_components_of_the_wheel_that_has_them() -> None:
    """As CycloneDX writes what a component contains, with the files; with a CPE that scanners look for."""
    read = image(wheel({"demo/core.abi3.so": binary("OpenSSL 3.0.16 11 Feb 2025", "BoringSSL")}))
    text = sbom.bill(read, {})
    assert sbom.violation(text) is None and sbom.bill(read, {}) == text
    (demo,) = json.loads(text)["components"]
    path = f"{SITE}/demo/core.abi3.so"
    where = {
        name: {"occurrences": [{"bom-ref": f"pkg:pypi/demo@1.0#{name}#{path}", "location": f"/{path}"}]}
        for name in ("boringssl@", "pkg:generic/openssl@3.0.16")
    }
    assert demo["components"] == [
        {
            "bom-ref": "pkg:pypi/demo@1.0#boringssl@",
            "evidence": where["boringssl@"],
            "name": "boringssl",
            "type": "library",
        },
        {
            "bom-ref": "pkg:pypi/demo@1.0#pkg:generic/openssl@3.0.16",
            "cpe": "cpe:2.3:a:openssl:openssl:3.0.16:*:*:*:*:*:*:*",
            "evidence": where["pkg:generic/openssl@3.0.16"],
            "name": "openssl",
            "purl": "pkg:generic/openssl@3.0.16",
            "type": "library",
            "version": "3.0.16",
        },
    ]
    assert len(set(re.findall(r'"bom-ref": "([^"]*)"', text))) == text.count('"bom-ref"')


def test_a_library_is_of_the_wheel_whose_record_lists_it_as_long_as_that_is_installed() -> None:
    files = {"demo/core.abi3.so": binary("OpenSSL 3.0.16 11 Feb 2025")}
    assert found(files, listed=False) == []
    newer = wheel({"demo/core.abi3.so": binary("OpenSSL 3.5.4 30 Sep 2025")}, version="2.0")
    removed = layer((f"{SITE}/.wh.demo-1.0.dist-info", b""))
    assert [one.version for one in image(wheel(files), removed, newer).libraries()["demo"]] == ["3.5.4"]
    assert json.loads(sbom.bill(image(wheel(files), removed), {})).get("components") is None
    assert image(wheel(files), libraries=False).libraries() == {"demo": ()}, "only an SBOM asks for them"
