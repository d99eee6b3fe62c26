"""`make sizes` and docs/images.md: measurements, why an image was rebuilt, and the page that shows both."""

from __future__ import annotations

import json
import os
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import requests

from trainyard.common import templates
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import catalog_page, sizes, wheels
from trainyard.oci.layers import File, Layer, LayerFiles, Stored
from trainyard.spec.model import load, targets


def measurement(**stages: str) -> dict[str, Any]:
    """A measured image with a layer of 1 GB a stage; the values are what the layers' digests are."""
    parts = [
        {"name": name.replace("_", "-"), "diff_id": digest, "size": 10**9, "packed": 3 * 10**8}
        for name, digest in stages.items()
    ]
    sums = {"size": len(parts) * 10**9, "packed": len(parts) * 3 * 10**8}
    return {"tag": "t", "digest": "d", "day": "2026-11-21", "index": "default", **sums, "layers": parts}


def test_the_reason_of_a_rebuild_is_what_changed() -> None:
    stages = dict.fromkeys(("base", "wheel_torch", "wheels_1", "wheels_2", "site", "launcher"), "1")
    before = measurement(**stages)
    for changed, words in (
        ({"wheel_torch": "2"}, "torch"),
        ({"base": "2", "wheels_1": "2", "wheels_2": "2"}, "base, small wheels"),
        ({"wheel_triton": "2"}, "triton"),
        ({"site": "2"}, "environment"),
        ({"launcher": "2"}, "launcher"),
    ):
        assert sizes.compared(before, measurement(**stages | changed))["why"] == words
    fewer = measurement(base="1", wheel_torch="1", wheels_1="1", site="1")
    assert sizes.compared(before, fewer)["why"] == "small wheels, launcher"
    assert sizes.compared({}, before)["why"] == "first measured"


def test_an_image_with_other_labels_does_not_count_as_rebuilt() -> None:
    before = sizes.compared({}, measurement(base="1", framework="1"))
    now = measurement(base="1", framework="1") | {"tag": "later", "day": "2026-12-01", "digest": "e"}
    assert sizes.compared(before, now) == before


def test_an_estimate_leaves_out_what_only_cuda_builds_have() -> None:
    site = "opt/venv/lib/python3.11/site-packages"
    cuda = [
        "nvidia/cublas/lib/libcublas.so.12",
        "nvidia_cublas_cu12-12.8.dist-info/RECORD",
        "triton/_C/libtriton.so",
        "torch/lib/libtorch_cuda.so",
        "torch/lib/libtorch_cuda_linalg.so",
        "torch/lib/libc10_cuda.so",
    ]
    kept = ["torch/lib/libtorch_cpu.so", "torch/cuda/__init__.py", "torch/lib/libc10.so", "libtpu/libtpu.so"]
    files = {f"{site}/{path}": File(1000, 0o644) for path in cuda + kept}
    layer = Layer("d", "i", "COPY", "wheel-torch", "copied", 1, LayerFiles(files=files))
    assert sizes.cuda_only(Stored({}, [layer], "", 0, 0)) == 1000 * len(cuda)


def test_the_chart_is_the_same_for_the_same_data_and_shows_every_target() -> None:
    found = {
        "cpu": measurement(base="1", wheel_torch="1"),
        "xla": measurement(base="1", wheel_torch="1", tools="1") | {"estimate": 10**9},
    }
    text = sizes.chart(found, {"cpu": 14 * 10**8, "xla": 21 * 10**8})
    assert text == sizes.chart(found, {"cpu": 14 * 10**8, "xla": 21 * 10**8})
    words = {element.text for element in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
    assert {"cpu", "xla", "large wheels", "budget", "2.00 GB"} <= words
    assert any("about 1.00 GB from the index of its spec" in (word or "") for word in words)


def test_every_layer_is_drawn_once() -> None:
    wheels = {"wheel_torch": "1", "wheel_triton": "2", "wheels_1": "1", "wheels_4": "1", "wheels_added": "1"}
    one = measurement(base="1", system="1", **wheels, about="1", trainers="1", launcher="1", gsutil="1")
    bars = sizes.bars(one)
    assert sum(bars.values()) == one["size"]
    assert (bars["large wheels"], bars["small wheels"], bars["trainers and launcher"]) == (
        2 * 10**9,
        3 * 10**9,
        4 * 10**9,
    )


def test_measurements_are_read_back_and_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    assert sizes.load(path) == {}
    sizes.save({"cpu": measurement(base="1")}, path)
    assert sizes.load(path) == {"cpu": measurement(base="1")}
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="not what 'trainyard dev sizes' writes"):
        sizes.load(path)


def page(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> str:
    monkeypatch.setattr(sizes, "load", lambda: found)
    ((template, values),) = catalog_page.rendered([load(name) for name in targets()]).values()
    return templates.environment().get_template(template).render(values)


def test_the_page_describes_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    xla = sizes.compared({}, measurement(base="1", framework="1")) | {"estimate": 9 * 10**8}
    text = page(monkeypatch, {"xla": xla})
    for name in targets():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert load(name).summary in section and f"trainyard:{name} mnist" in section
    assert "From its own index it is about 900.0 MB" in text and "since `pytorch-cpu` was unreachable" in text
    assert "| [`tf-cpu`](#tf-cpu) | TensorFlow for CPUs | none | linux/amd64, linux/arm64 | not measured yet |" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tf-cpuu: [x]", "no target 'tf-cpuu' (did you mean 'tf-cpu'?)"),
        ("tf-cpu: ['x', needs QEMU: or a machine]", "limits.yaml:1: tf-cpu.1: Input should be a valid string"),
    ],
)
def test_limits_are_sentences_about_targets_that_exist(tmp_path: Path, text: str, says: str) -> None:
    """A colon in a sentence makes it a mapping in YAML."""
    (tmp_path / "limits.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(says)):
        catalog_page.limits(targets(), tmp_path / "limits.yaml")


def test_the_committed_data_is_of_targets_that_exist() -> None:
    assert set(sizes.load()) <= set(targets())
    json.dumps(catalog_page.variables([load(name) for name in targets()]))


@pytest.fixture
def ranges(tmp_path: Path) -> Iterator[tuple[str, list[int]]]:
    """A server that serves ranges of a wheel; its address, and the bytes of each answer."""
    path = tmp_path / "torch-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("torch/lib/libtorch_cuda.so", os.urandom(3_000_000))
        wheel.writestr("torch/lib/libtorch_cpu.so", os.urandom(1_000_000))
    data, sent = path.read_bytes(), []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()

        def do_GET(self) -> None:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            sent.append(len(part))
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{path.name}", sent
        server.shutdown()


def test_the_files_of_a_wheel_are_listed_without_downloading_it(ranges: tuple[str, list[int]]) -> None:
    url, sent = ranges
    with requests.Session() as session:
        found = wheels.files(url, session)
    assert found == {"torch/lib/libtorch_cuda.so": 3_000_000, "torch/lib/libtorch_cpu.so": 1_000_000}
    assert sum(sent) < 2_500_000
    with pytest.raises(StepFailed, match="cannot read the directory of none"), requests.Session() as session:
        wheels.files("http://127.0.0.1:9/none.whl", session)


def test_without_an_index_there_is_no_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(*_: object) -> dict[str, str]:
        raise StepFailed("no answer")

    caplog.set_level("INFO")
    monkeypatch.setattr(wheels, "addresses", silent)
    assert sizes.by_wheels(load("cpu"), "default") is None and caplog.messages == ["cpu: no estimate: no answer"]
