"""What benchmarks/cold_start.py makes of an engine's log, a container's output and the link's counter."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import cold_start, images_sides, import_times
from benchmarks import cold_start_report as report

from trainyard.image import dockerfile
from trainyard.spec.model import load

LOWER, UPPER = "sha256:" + "1" * 64, "sha256:" + "2" * 64

OTHER = pytest.mark.slow("with tf-cpu")

#: Of Docker 26.1.5 with containerd 1.7.24.
LOG = f"""\
time="2026-11-23T03:30:03.327615217Z" level=debug msg="layer unpacked" duration=18.78958ms layer="{LOWER}" spanID=bd
time="2026-11-23T03:30:00.724133596Z" level=debug msg="diff applied" d=5.853132673s digest="{LOWER}" media=a size=264
time="2026-11-23T03:30:03.335067166Z" level=debug msg="diff applied" d="470.892µs" digest="{UPPER}" media=a size=348
"""

#: Readings of the meter every second: nothing, 100 MB in each of two seconds, a request, 50 MB after the pull.
READINGS = [(1000.0, 0, 0, 0), (1001.0, 10, 200, 200), (1002.0, 100_000_010, 300, 400), (1003.0, 200_000_010, 300, 600),
            (1004.0, 200_000_510, 350, 800), (1005.0, 250_000_510, 550, 1000)]  # fmt: skip


def seen() -> report.Observed:
    """A round of 10 seconds whose two layers are complete after 1 and 3, and whose second one is unpacked in 0.5."""
    return report.Observed(
        begun=1000.0,
        pulled=1004.5,
        started=1005.0,
        imports=[("keras", 1007.0, 1008.0), ("tensorflow", 1005.5, 1007.5)],
        logged=1010.0,
        ready={LOWER: 1001.0, UPPER: 1003.0},
        unpacked={LOWER: 2.75, UPPER: 0.5},
        readings=READINGS,
        others=0.04,
    )


def target(ours: float, original: float) -> dict[str, Any]:
    """The figures of a target whose sides took so many seconds in their only round."""
    layers = {LOWER: {"name": "tensorflow-cpu", "packed": 264_174_140, "unpacked": 1_307_850_143},
              UPPER: {"name": "other files", "packed": 348, "unpacked": 496}}  # fmt: skip
    return {
        "sides": {
            side: {"digest": LOWER, "layers": layers, "rounds": [report.round_of(seen()) | {"seconds": seconds}]}
            for side, seconds in (("ours", ours), ("original", original))
        },
        "link": 0.95e9,
        "machine": {"cpu": "Some CPU", "date": "2026-11-23"},
        "command": "python -m benchmarks.cold_start tf-cpu --rounds 1",
    }


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("5.853132673s", 5.853132673), ("589.983117ms", 0.589983117), ("470.892µs", 470.892e-6), ("1m2.5s", 62.5)],
)
def test_durations_are_read_as_go_prints_them(duration: str, seconds: float) -> None:
    assert report.seconds(duration) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "5s later"])
def test_other_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        report.seconds(text)


def test_the_time_of_unpacking_a_layer_is_that_of_applying_its_difference() -> None:
    assert report.unpacked(LOG) == pytest.approx({LOWER: 5.853132673, UPPER: 470.892e-6})


def test_phases_add_up_to_the_whole_time() -> None:
    one = report.round_of(seen())
    assert one["seconds"] == 10.0
    assert one["phases"] == {
        "download": 3.0, "unpack": 1.5, "start": 0.5, "launch": 0.5, "import": 2.5, "step": 2.0,
    }  # fmt: skip
    assert sum(one["phases"].values()) == one["seconds"]


def test_a_package_that_another_imports_counts_once() -> None:
    within = [("tensorflow", 1.0, 5.0), ("keras", 2.0, 4.0)]
    assert report.import_seconds(within) == 4.0
    assert report.import_seconds([*within, ("torch", 7.0, 8.0)]) == 5.0


def test_the_link_is_in_use_from_the_first_to_the_last_large_reading_before_the_pull_ends() -> None:
    assert report.network(READINGS, 1004.5) == {"bytes": 200_000_510, "seconds": 2.0}


def test_a_processor_is_busy_when_it_is_not_idle() -> None:
    assert report.busy(READINGS, 1001.0, 1003.0) == 0.75
    assert report.busy(READINGS, 1001.0, 1001.5) == 0.0


def test_the_estimate_unpacks_each_layer_when_it_is_complete() -> None:
    one = report.round_of(seen())
    # The lower layer is unpacked 3.75 s after the beginning, the upper one 3.5 s; the pull took 4.5 s.
    assert report.in_parallel(one) == pytest.approx(10 - 0.75)
    slow = dataclasses.replace(seen(), unpacked={LOWER: 9.0, UPPER: 0.5})
    assert report.in_parallel(report.round_of(slow)) == 10.0


@pytest.mark.parametrize(("original", "met"), [(18.0, True), (17.9, False)])
def test_the_target_is_times_of_the_medians(original: float, met: bool) -> None:
    found = {"targets": {"tf-cpu": target(10.0, original)}}
    assert [row[2] for row in report.verdicts(found)] == [met]
    assert ("MISSED" in report.document(found)) is not met


def test_the_document_says_what_was_measured_on_what() -> None:
    written = report.document({"targets": {"tf-cpu": target(10.0, 20.0)}})
    assert "on cpu Some CPU, date 2026-11-23. The link carried 0.95 Gbit/s." in written
    assert "| used by others before | 4 % | 4 % |" in written
    assert "| times as long as ours | 1.00 | 2.00 |" in written
    assert "| tensorflow-cpu | 264.2 MB | 1.31 GB | 1.00 s | 2.75 s |" in written
    assert "| 1 smaller layer | 348 B | 496 B |  | 0.50 s |" in written
    assert "*estimate: layers unpacked in parallel*" in written


@pytest.mark.parametrize("path", sorted(cold_start.RESULTS.parent.glob("cold-start.json")), ids=lambda path: path.stem)
def test_the_committed_table_is_what_the_code_writes(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.document(found)


def test_imports_in_a_container_are_printed_with_their_times(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_bytes(Path(import_times.__file__).read_bytes())
    (tmp_path / "inner.py").write_text("import time\ntime.sleep(0.05)\n", encoding="utf-8")
    (tmp_path / "outer.py").write_text("import inner\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "COLD_START_PACKAGES": "outer,inner"}
    command = [sys.executable, "-c", "import outer, inner; print(outer.__spec__.name)"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = ended.stderr.splitlines()
    imports = [found for line in lines if (found := report.read_import(line))]
    (inner, begun, ended_inner), (outer, before, after) = imports
    assert (inner, outer, ended.stdout) == ("inner", "outer", "outer\n")
    assert before <= begun < ended_inner <= after
    assert lines[0].startswith("cold-start python ")


def test_nothing_is_printed_where_no_packages_are_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_bytes(Path(import_times.__file__).read_bytes())
    environment = {key: value for key, value in os.environ.items() if key != "COLD_START_PACKAGES"}
    ended = subprocess.run(
        [sys.executable, "-c", ""], env=environment | {"PYTHONPATH": str(tmp_path)}, capture_output=True, check=True
    )
    assert ended.stderr == b""


@pytest.mark.parametrize(
    "name", ["tf-cpu", *(pytest.param(one, marks=OTHER) for one in cold_start.TARGETS if one != "tf-cpu")]
)
def test_the_single_layer_has_every_wheel_and_all_else_is_as_it_was(name: str, tmp_path: Path) -> None:
    spec = load(name)
    images_sides.OneLayer(images_sides.Tree(tmp_path, spec), "trainyard", ("base", "base")).prepare()
    text = (tmp_path / "images" / name / "Dockerfile").read_text(encoding="utf-8")
    assert _wheel_copies(text) == ["COPY --link --from=wheels-1 /out /"]
    for layer in dockerfile.wheels(spec):
        assert all(pin.requirement() in text for pin in layer.pins)
    assert _after_wheels(text) == _after_wheels(dockerfile.dockerfile(spec))


def _wheel_copies(text: str) -> list[str]:
    """The copies of wheels into the image."""
    lines = [line for line in text.splitlines() if line.startswith("COPY --link --from=wheel")]
    return [line for line in lines if line.endswith(" /out /")]


def _after_wheels(text: str) -> list[str]:
    """The lines from the stage `about` on, without the copies of wheels."""
    lines = text.splitlines()
    return [line for line in lines[lines.index("FROM tools AS about") :] if line not in _wheel_copies(text)]
