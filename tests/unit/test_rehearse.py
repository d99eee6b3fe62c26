"""`make rehearse`: its options, the choice of local images, the report, and the sidecars."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import re
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from tests.fakes.engine import FakeEngine, Image, Ran, Resource

from trainyard.common.docker_engine import Engine
from trainyard.common.errors import UserError
from trainyard.sandbox import containers
from trainyard.sandbox.fakes.google_cloud import GoogleCloud
from trainyard.spec.architectures import ARM64, Architecture
from trainyard_jobs.model import image_metadata, machines
from trainyard_jobs.model.image_metadata import Contents
from trainyard_jobs.model.machines import Hosts
from trainyard_jobs.model.options import Mount
from trainyard_jobs.rehearsal import faults, images, report, sandbox, session
from trainyard_jobs.rehearsal.images import LocalImage
from trainyard_jobs.rehearsal.model import Rehearsal, Replica, Trial
from trainyard_jobs.rehearsal.progress import Progress
from trainyard_jobs.rehearsal.restart_policy import TrainingService
from trainyard_jobs.rehearsal.runner import Attempt, Member, Outcome, prefixed

JOB = """\
workerPoolSpecs:
- replicaCount: 1
  machineSpec: {machineType: n1-standard-4}
  containerSpec: {imageUri: r/trainyard:xla, args: [mnist]}
"""
CHIEF = Replica("chief", "cmle-0", "chief", 0, "r/trainyard:xla")
WORKER = Replica("worker-0", "cmle-1", "worker", 1, "r/trainyard:xla")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return str(path)


# --- the command line ------------------------------------------------------------------------------------------


def test_dry_run_prints_what_each_replica_would_get(trainyard: Command, job: str) -> None:
    status, out, _ = trainyard("rehearse", job, "--dry-run")
    (replica,) = json.loads(out)["replicas"]
    assert status == 0 and replica["args"] == ["mnist"] and "CLUSTER_SPEC" in replica["environment"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preempt=worker-9"], "no replica 'worker-9'; replicas: chief"),
        (["--timeout=soon"], "'--timeout' (env var: 'TRAINYARD_TIMEOUT'): 'soon' is not a valid number"),
        (["--kill=the chief"], "'--kill the chief': write REPLICA or REPLICA@WHEN"),
        (["--preempt=@step2"], "'--preempt @step2': write REPLICA or REPLICA@WHEN"),
        (["--memory=lots"], "'--memory lots': expected a size such as 900m or 2g"),
        (["--env=A B=1"], "'--env': 'A' is not NAME=VALUE"),
        (["--env=A='"], "'--env A='': no closing quotation"),
        (["--timeout=-1"], "'--timeout' (env var: 'TRAINYARD_TIMEOUT'): -1.0 is not in the range x>=0"),
    ],
)
def test_invalid_options_are_refused(trainyard: Command, job: str, arguments: list[str], words: str) -> None:
    status, out, err = trainyard("rehearse", job, *arguments, "--dry-run")
    assert (status, out) == (2, "") and words in " ".join(err.split()) and "Traceback" not in err


def test_a_job_file_must_be_given_and_exist(trainyard: Command, job: str) -> None:
    assert "'trainyard job rehearse job.yaml'" in trainyard("rehearse")[2]
    assert trainyard("rehearse", job + ".not")[0] in (1, 2)


def test_variables_are_options_too(trainyard: Command, job: str) -> None:
    assert trainyard("rehearse", FILE=job, DRY_RUN="1", CPUS="", MEMORY="")[0] == 0


@pytest.mark.parametrize(("text", "size"), [("900m", 900 << 20), ("2g", 2 << 30), ("1.5GiB", 3 << 29), ("0", 0)])
def test_sizes_are_in_units_of_1024(text: str, size: int) -> None:
    assert session.parse_size(text) == size


# --- images ----------------------------------------------------------------------------------------------------

LOCAL = {
    "xla": {"io.trainyard.target": "xla", "io.trainyard.framework": "torch_xla==2.9.0",
            "org.opencontainers.image.version": "xla-2.9.0-20261120-9fc73416"},
    "xla-candidate": {"io.trainyard.target": "xla", "io.trainyard.framework": "torch_xla==2.9.0"},
    "other": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "local"),
    [
        ("xla", "xla"),
        ("xla-2.9.0", "xla"),
        ("xla-2.9.0-20261120-9fc73416", "xla"),
        ("xla-2.9.0-20251231-00000000", None),  # another build is another image
        ("xla-2.8.0", None),
        ("other", None),  # without labels its target is unknown
        ("latest", None),
    ],
)
def test_a_tag_means_a_local_image(tag: str, local: str | None) -> None:
    assert images.matching(tag, LOCAL) == local


def test_a_tag_means_the_local_image_of_another_architecture_where_that_is_what_there_is() -> None:
    arm = {"cpu-arm64": {"io.trainyard.target": "cpu", "io.trainyard.framework": "torch==2.9.1"}}
    for tag in ("cpu", "cpu-2.9.1", "cpu-arm64"):
        assert images.matching(tag, arm) == "cpu-arm64"
    assert images.matching("cpu-2.8.0", arm) is None
    both = arm | {"cpu": {"io.trainyard.target": "cpu", "io.trainyard.framework": "torch==2.9.1"}}
    assert images.matching("cpu", both) == "cpu"


AXION, N1 = machines.hosts_of("c4a-standard-4"), machines.hosts_of("n1-standard-4")
AT_REGISTRY = "r.example/team/trainyard:cpu"


BOTH = ("linux/amd64", "linux/arm64")


@pytest.fixture
def engine(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine for amd64 that emulates arm64; the registry does not answer."""
    fake_engine.platforms.append("linux/arm64")
    at_registry(fake_engine, monkeypatch, ())
    return fake_engine


@pytest.fixture
def registry_has(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``registry_has("linux/amd64")``: the platforms that the registry has the image for."""
    return lambda *platforms: at_registry(engine, monkeypatch, platforms)


def at_registry(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, platforms: tuple[str, ...]) -> None:
    def look_up(reference: str) -> Contents:
        if not platforms:
            raise image_metadata.ImageUnavailableError("connection refused")
        return Contents(reference, platforms=platforms)

    monkeypatch.setattr(image_metadata, "at_registry", look_up)
    engine.at_registries = {AT_REGISTRY: Image("sha256:index", platforms=list(platforms))} if platforms else {}


def add(engine: FakeEngine, name: str, architecture: str, target: str = "cpu") -> None:
    labels = {"io.trainyard.target": target, "io.trainyard.framework": "torch==2.9.1"}
    engine.add(name, digest=f"sha256:{name}", labels=labels, architecture=architecture)


@pytest.mark.parametrize(("hosts", "architecture"), [(AXION, ARM64), (N1, None), (machines.UNKNOWN_HOSTS, None)])
def test_the_image_of_an_index_is_the_one_for_the_jobs_machines(
    engine: FakeEngine, registry_has: Callable[..., None], hosts: Hosts, architecture: Architecture | None
) -> None:
    """Under emulation, with a processor that is emulated fast, if the engine has another architecture."""
    registry_has(*BOTH)
    found = images.find(Engine(), AT_REGISTRY, hosts=hosts)
    assert (found.id, found.note, found.architecture) == ("sha256:index", "", architecture)
    assert engine.pulls == [(AT_REGISTRY, {AXION: "linux/arm64", N1: "linux/amd64"}.get(hosts, ""))]
    assert (found.platform, bool(found.environment(Engine()))) == (
        ("linux/arm64", True) if architecture else (None, False)
    )


def test_a_local_image_for_other_machines_is_pulled_again_for_those_of_the_job(
    engine: FakeEngine, registry_has: Callable[..., None]
) -> None:
    add(engine, AT_REGISTRY, "amd64")
    registry_has(*BOTH)
    assert images.find(Engine(), AT_REGISTRY, hosts=N1).id == f"sha256:{AT_REGISTRY}", "the local one"
    assert images.find(Engine(), AT_REGISTRY, hosts=AXION).architecture == ARM64
    assert engine.pulls == [(AT_REGISTRY, "linux/arm64")]


def test_the_local_image_of_the_target_for_the_jobs_machines_is_used(engine: FakeEngine) -> None:
    add(engine, "trainyard:cpu", "amd64")
    add(engine, "trainyard:cpu-arm64", "arm64")
    for hosts, name, architecture in ((AXION, "cpu-arm64", ARM64), (N1, "cpu", None)):
        found = images.find(Engine(), AT_REGISTRY, hosts=hosts)
        assert (found.id, found.architecture) == (f"sha256:trainyard:{name}", architecture)
        assert found.note.startswith(f"the local trainyard:{name} is used for {AT_REGISTRY}")


def test_an_image_that_is_not_for_the_machines_is_reported_as_check_job_reports_it(
    engine: FakeEngine, registry_has: Callable[..., None]
) -> None:
    add(engine, "trainyard:cpu-arm64", "amd64")
    registry_has("linux/amd64")
    with pytest.raises(UserError) as error:
        images.find(Engine(), AT_REGISTRY, hosts=AXION)
    assert str(error.value) == (
        f"{AT_REGISTRY}: machines of type c4a-standard-4 run linux/arm64; the image is for linux/amd64: push an image "
        "of a target that has linux/arm64 ('trainyard list'), or use other machines"
    )
    assert not engine.pulls


def test_an_engine_that_cannot_run_the_image_is_one_line(engine: FakeEngine, registry_has: Callable[..., None]) -> None:
    engine.platforms = ["linux/amd64"]
    registry_has(*BOTH)
    with pytest.raises(
        UserError, match=r"^the engine runs no programs for linux/arm64: run 'trainyard setup --emulation'"
    ):
        images.find(Engine(), AT_REGISTRY, hosts=AXION)
    add(engine, "trainyard:cpu-arm64", "arm64")
    with pytest.raises(UserError, match=r"^the engine runs no programs for linux/arm64"):
        images.find(Engine(), "trainyard:cpu-arm64")
    with pytest.raises(UserError, match=r"^the engine runs no programs for linux/arm64"):
        images.find(Engine(), AT_REGISTRY, "trainyard:cpu-arm64", N1)
    assert not engine.pulls


@pytest.mark.parametrize(
    ("reference", "emulates"), [("trainyard:cpu", True), (AT_REGISTRY, True), (AT_REGISTRY, False)]
)
def test_what_was_built_on_this_machine_is_run_with_a_note_where_nothing_else_can_be(
    engine: FakeEngine, registry_has: Callable[..., None], reference: str, emulates: bool
) -> None:
    """As on a laptop with arm64, for a job on x86-64 machines; here, the other way round."""
    engine.platforms = list(BOTH) if emulates else ["linux/amd64"]
    if not emulates:
        registry_has(*BOTH)
    add(engine, "trainyard:cpu", "amd64")
    found = images.find(Engine(), reference, hosts=AXION)
    assert (found.id, found.architecture) == ("sha256:trainyard:cpu", None)
    assert found.note == (
        f"the local image for linux/amd64 is run for {reference}: machines of type c4a-standard-4 run linux/arm64"
    )


def test_an_image_that_is_nowhere_is_one_line(engine: FakeEngine) -> None:
    add(engine, "trainyard:cup", "amd64", "cup")
    for reference in ("trainyard:cpu", AT_REGISTRY):
        with pytest.raises(UserError, match=rf"^no local image for {reference} \(did you mean 'cup'\?\): build it"):
            images.find(Engine(), reference, hosts=N1)


def variables(container: Resource) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in container.given.get("Env") or ())


def test_containers_are_created_for_the_platform_of_their_image(fake_engine: FakeEngine, tmp_path: Path) -> None:
    """The fakes', too: they run in the image of the job."""
    fake_engine.add("job", digest="sha256:0", program=lambda *_: Ran(out=b'{"url": "http://fake"}\n'))
    for architecture, expected in ((ARM64, ("linux/arm64", "neoverse-n1")), (None, (None, None))):
        image = LocalImage("sha256:0", "", True, architecture)
        found = sandbox.RehearsalSandbox(Engine(), REHEARSAL, image, tmp_path, [])
        found._start_storage()
        found._start_google_cloud()
        found.create_replica(CHIEF, image, sandbox.Limits(1, 1 << 30), {})
        created = fake_engine.of_kind("container")
        assert [(one.given["platform"], variables(one).get("QEMU_CPU")) for one in created] == [expected] * 3
        fake_engine.resources.clear()


# --- the sandbox -------------------------------------------------------------------------------------------------


def test_a_volume_shows_its_folder_of_the_bucket(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_engine.add("job", digest="sha256:0")
    mounts = (
        Mount("/in", "data", "a/b", read_only=True),
        Mount("/again", "data", "a/b"),
        Mount("/all", "data"),
        Mount("/shm"),
        Mount("/none", read_only=True),
    )
    image = LocalImage("sha256:0", "", True, None)
    found = sandbox.RehearsalSandbox(Engine(), REHEARSAL, image, tmp_path, [])
    found.create_replica(dataclasses.replace(CHIEF, mounts=mounts), image, sandbox.Limits(1, 1 << 30), {})
    given = fake_engine.of_kind("container")[-1].given["HostConfig"]
    data = tmp_path / "data"
    assert [(one["Target"], one["Source"], one["ReadOnly"]) for one in given["Mounts"]] == [
        ("/in", str(data / "a" / "b"), True),
        ("/again", str(data / "a" / "b"), False),
        ("/all", str(data), False),
    ]
    assert [(one.stat().st_mode & 0o777) for one in (data / "a" / "b", data / "a", data)] == [0o777] * 3
    (data / "link").symlink_to(tmp_path)
    found.close()
    assert [(one.stat().st_mode & 0o777) for one in (data / "a" / "b", data / "a", data)] == [0o700] * 3
    assert given["Tmpfs"] == {"/shm": "mode=1777", "/none": "mode=1777,ro"}
    assert given["Binds"] == [f"{tmp_path}:/gcs:rw"]


def test_folders_of_buckets_have_their_permissions_again_after_a_rehearsal(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of folders that only their owner may enter, and of those that all may read; links are not followed."""
    fake_engine.add("job", digest="sha256:0")
    monkeypatch.setattr(sandbox.RehearsalSandbox, "_start_storage", lambda _: None)
    monkeypatch.setattr(sandbox.RehearsalSandbox, "_start_google_cloud", lambda _: None)
    buckets = tmp_path / "buckets"
    for name, mode in (("own", 0o700), ("all", 0o755), ("unused", 0o750)):
        (buckets / name).mkdir(parents=True)
        (buckets / name).chmod(mode)
    tmp_path.chmod(0o711)
    image = LocalImage("sha256:0", "", True, None)
    for _ in range(2):
        with sandbox.RehearsalSandbox(Engine(), REHEARSAL, image, buckets, ["own", "all", "new"]):
            opened = {one.name: one.stat().st_mode & 0o777 for one in buckets.iterdir() if not one.is_symlink()}
            (buckets / "by a container").mkdir(mode=0o777, exist_ok=True)
            if not (buckets / "link").is_symlink():
                (buckets / "link").symlink_to(tmp_path)
        assert [opened[name] for name in ("own", "all", "new", "unused")] == [0o777, 0o777, 0o777, 0o750]
        after = {one.name: one.stat().st_mode & 0o777 for one in buckets.iterdir() if not one.is_symlink()}
        assert after == {"own": 0o700, "all": 0o755, "new": 0o700, "unused": 0o750, "by a container": 0o700}
    assert tmp_path.stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize(("bucket", "folder"), [("..", ""), ("/etc", ""), ("data", "../other"), ("data", "a/link")])
def test_a_volume_shows_nothing_outside_of_its_bucket(
    bucket: str, folder: str, fake_engine: FakeEngine, tmp_path: Path
) -> None:
    fake_engine.add("job", digest="sha256:0")
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "link").symlink_to("/etc")
    image = LocalImage("sha256:0", "", True, None)
    found = sandbox.RehearsalSandbox(Engine(), REHEARSAL, image, tmp_path, [])
    chief = dataclasses.replace(CHIEF, mounts=(Mount("/in", bucket, folder),))
    with pytest.raises(UserError, match=rf"^the volume at /in: {bucket}/{folder} is not a folder of a bucket$"):
        found.create_replica(chief, image, sandbox.Limits(1, 1 << 30), {})
    assert not fake_engine.resources


def test_buckets_are_those_the_job_names() -> None:
    documents = [
        {"args": ["--in=gs://my-data/a", "--out=/gcs/out.b_c/x"], "volumeAttributes": {"bucketName": "fused"}},
        {"env": [{"value": "gs://my-data"}]},
    ]
    assert sandbox.buckets_named(documents) == ["fused", "my-data", "out.b_c"]


def test_replicas_share_the_machine(fake_engine: FakeEngine) -> None:
    fake_engine.info |= {"MemTotal": 8 << 30, "NCPU": 2}
    assert sandbox.limits(Engine(), 1) == sandbox.Limits(2, int((8 << 30) * 0.85))
    assert sandbox.limits(Engine(), 4) == sandbox.Limits(1, int((8 << 30) * 0.85 / 4))
    assert sandbox.limits(Engine(), 4, cpus=0.5, memory=1 << 20) == sandbox.Limits(0.5, 1 << 20)
    with pytest.raises(UserError, match="64 replicas on a machine"):
        sandbox.limits(Engine(), 64)


def test_an_archive_has_files_folders_and_links() -> None:
    import io
    import tarfile

    with tarfile.open(fileobj=io.BytesIO(containers.archive({"a/b": b"x"}, ["open"], {"root/opt": "/opt"}))) as tar:
        assert (tar.getmember("open").mode, tar.getmember("root/opt").linkname) == (0o1777, "/opt")
        assert tar.extractfile("a/b").read() == b"x"  # type: ignore[union-attr]


def test_without_matplotlib_there_is_a_report_without_a_chart(
    tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report.write(tmp_path, report.of_run(REHEARSAL, outcome))
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert "needs matplotlib: run uv pip install" in " ".join(capsys.readouterr().err.split())


def test_each_host_sees_its_own_attributes() -> None:
    attributes = {"localhost": {"agent-worker-number": "3"}, "elsewhere.invalid": {"agent-worker-number": "4"}}
    with GoogleCloud(host_attributes=attributes) as cloud:
        request = urllib.request.Request(
            f"{cloud.url}/computeMetadata/v1/instance/attributes/agent-worker-number",
            headers={"Metadata-Flavor": "Google"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.read() == b"3"


# --- what is shown and reported --------------------------------------------------------------------------------


def member(replica: Replica, *attempts: Attempt) -> Member:
    return Member(replica, LocalImage("sha256:0", "", True), status=0, address="172.18.0.5", attempts=list(attempts))


def test_lines_have_xla_dists_prefix() -> None:
    moment = datetime.datetime(2026, 11, 21, 9, 30).timestamp()
    assert (
        prefixed("| Training ...", member(WORKER), moment).plain == "2026-11-21 09:30:00 172.18.0.5 [1] | Training ..."
    )


def test_each_replica_has_a_colour() -> None:
    assert prefixed("x", member(CHIEF)).style != prefixed("x", member(WORKER)).style


@pytest.fixture
def outcome() -> Outcome:
    progress = Progress()
    progress.add("| Training Device=cpu/0 Epoch=1 Step=0 Loss=2.3 Rate=9.5 GlobalRate=9.5 Time=0", 1.0)
    progress.add("Epoch 1 test end 0, Accuracy=91.00", 3.0)
    return Outcome(
        succeeded=True,
        why="the primary replica ended with status 0",
        advice="",
        seconds=9.0,
        job_restarts=0,
        members=[
            member(CHIEF, Attempt(0.0, 9.0, 0, "exit")),
            member(WORKER, Attempt(0.5, 3.0, 143, "preempted"), Attempt(4.0, 9.0, 0, "exit")),
        ],
        progress=progress,
        injected=[(faults.Fault("preempt", ("worker-0",), "step5", step=5), 2.5)],
    )


REHEARSAL = Rehearsal("Vertex AI CustomJob", "job", (CHIEF, WORKER), TrainingService(("chief",)))


def test_the_report_has_status_restarts_accuracy_and_rate(tmp_path: Path, outcome: Outcome) -> None:
    found = report.of_run(REHEARSAL, outcome)
    report.write(tmp_path, found)
    read: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert (read["status"], read["accuracy"], read["images_per_second"]) == ("succeeded", 91.0, 9.5)
    assert [(one["name"], one["restarts"]) for one in read["replicas"]] == [("chief", 0), ("worker-0", 1)]
    assert read["faults"] == [{"action": "preempt", "targets": ["worker-0"], "when": "step5", "at": 2.5}]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_chart_and_none_of_an_earlier_rehearsal(
    tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report.of_run(REHEARSAL, outcome)
    assert report.write(tmp_path, found) == ["report.json", "report.png"]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.write(tmp_path, found) == ["report.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_command_names_the_files_that_were_written(
    trainyard: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = session.Result({}, tmp_path, ("report.json",), ())
    monkeypatch.setattr(session, "run", lambda *_: done)
    status, _, err = trainyard("rehearse", "examples/jobs/custom-job.yaml")
    assert status == 0 and err.endswith(f"rehearse: report.json and logs/ are in {tmp_path}\n")


def test_no_text_of_the_chart_covers_another(outcome: Outcome) -> None:
    for at in (2.4, 8.9):
        outcome.injected.append((faults.Fault("kill", ("chief", "worker-0"), "step5", step=5), at))
    job = dataclasses.replace(REHEARSAL, name="a-job-with-a-name-that-takes-most-of-the-width-of-the-chart")
    figure = report.chart(report.of_run(job, outcome))
    figure.draw_without_rendering()
    texts = {
        (text.get_text().strip(), text.get_window_extent())
        for text in figure.findobj(Text)
        if isinstance(text, Text) and text.get_text() and text.get_visible()
    }
    names = {text for text, _ in texts}
    assert names.issuperset({"preempt worker-0", "preempted", "worker-0"})
    assert not [(one, other) for (one, a), (other, b) in itertools.combinations(texts, 2) if a.overlaps(b)]
    labels = [label.get_window_extent() for axes in figure.axes for label in axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in labels)


def test_the_best_trial_is_the_highest_or_the_lowest(tmp_path: Path, outcome: Outcome) -> None:
    one = report.of_run(REHEARSAL, outcome)
    runs = [(Trial(1, {"lr": "0.1"}, "m"), one, 0.5), (Trial(2, {"lr": "0.2"}, "m"), one, 0.9),
            (Trial(3, {"lr": "0.3"}, "m"), one, None)]  # fmt: skip
    assert report.of_tuning(runs, "m", True, 9.0)["best"] == {"trial": 2, "metric": 0.9}
    assert report.of_tuning(runs, "m", False, 9.0)["best"] == {"trial": 1, "metric": 0.5}
    assert report.of_tuning(runs[2:], "m", True, 9.0)["best"] is None
    report.write(tmp_path, report.of_tuning(runs, "m", True, 9.0))
    assert re.search(rb"^\x89PNG", (tmp_path / "report.png").read_bytes())
