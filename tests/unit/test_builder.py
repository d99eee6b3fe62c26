"""The builder that images are built on: how it is found, checked and given what it lacks, and how images get back."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest
from tests import plans
from tests.fakes.engine import FakeEngine, Image

from trainyard.common.context import Context
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.image import build, buildx, offline, planning, provenance, working_directory
from trainyard.image.plan import Plan
from trainyard.oci import builder, image_store
from trainyard.oci.builder import Builder, Node
from trainyard.release import reproduce
from trainyard.spec import model
from trainyard.spec.architectures import AMD64, ARM64, Architecture

#: As buildx 0.13.1 prints it (https://github.com/docker/buildx/blob/v0.13.1/commands/inspect.go).
TEAM = """Name:          team
Driver:        docker-container
Last Activity: 2026-11-23 15:02:37 +0000 UTC

Nodes:
Name:             amd64
Endpoint:         unix:///var/run/docker.sock
Driver Options:   network="host"
Status:           running
BuildKit version: v0.13.2
Platforms:        linux/amd64, linux/amd64/v2, linux/386, linux/arm64
Labels:
 org.mobyproject.buildkit.worker.executor: oci

Name:             arm64
Endpoint:         ssh://builder@arm.example
Status:           running
Platforms:        linux/arm64*, linux/arm/v7
"""
ENGINE = "Name: default\nDriver: docker\n\nNodes:\nName: default\nStatus: running\nPlatforms: linux/amd64\n"


def current(name: str = "") -> Builder:
    """Return the builder that ``--builder`` names, of an engine that was not asked before."""
    return builder.current(Context(builder=name))


def parse(text: str) -> Builder:
    return builder.parse(text, Engine())


@pytest.fixture
def team(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Builder:
    """Images are built on a builder of two machines; the engine's is amd64 and stores images in containerd."""
    fake_engine.builders["team"] = TEAM
    monkeypatch.setenv("TRAINYARD_BUILDER", "team")
    return parse(TEAM)


def test_the_nodes_of_a_builder_are_read() -> None:
    assert parse(TEAM) == Builder(
        "team",
        "docker-container",
        (
            Node("amd64", ("linux/amd64", "linux/amd64/v2", "linux/386", "linux/arm64")),
            Node("arm64", ("linux/arm64", "linux/arm/v7"), given=("linux/arm64",)),
        ),
    )


def test_a_native_node_builds_although_the_first_one_emulates(team: Builder) -> None:
    for architecture in (AMD64, ARM64):
        node = team.node(architecture)
        assert node is not None and node.name == architecture.name
        assert team.machine(architecture) == architecture
        team.require(architecture)


def test_a_node_that_emulates_builds_on_its_own_machine() -> None:
    emulating = parse(TEAM.partition("\nName:             arm64")[0])
    assert emulating.node(ARM64) == emulating.nodes[0]
    assert emulating.machine(ARM64) == AMD64


def test_a_builder_without_the_platform_is_one_line_that_says_how_to_add_it() -> None:
    alone = parse(TEAM.replace(", linux/arm64", "").partition("\nName:             arm64")[0])
    with pytest.raises(UserError) as error:
        alone.require(ARM64)
    assert str(error.value) == (
        "builder team runs no programs for linux/arm64: run 'docker buildx create --append --name team --platform "
        "linux/arm64 <endpoint>' to add a machine that does"
    )


def test_the_error_of_a_node_is_named_where_its_platform_is_missing() -> None:
    text = TEAM.replace(", linux/arm64", "").replace(
        "Status:           running\nPlatforms:        linux/arm64*, linux/arm/v7",
        "Error:            failed to dial: connection refused",
    )
    found = parse(text)
    assert found.node(AMD64) == found.nodes[0]
    with pytest.raises(UserError, match=r"for linux/arm64 \(node arm64: failed to dial: connection refused\): run"):
        found.require(ARM64)


def test_a_node_that_does_not_say_what_it_runs_is_tried() -> None:
    found = Builder("team", "remote", (Node("one"),))
    found.require(ARM64)


@pytest.mark.parametrize("runs", [True, False])
def test_the_builder_of_the_engine_runs_what_the_engine_runs(fake_engine: FakeEngine, runs: bool) -> None:
    fake_engine.platforms += ["linux/arm64"] if runs else []
    engine = parse(ENGINE)
    assert engine.in_engine
    if runs:
        engine.require(ARM64)
    else:
        with pytest.raises(
            UserError, match="the engine runs no programs for linux/arm64: run 'trainyard setup --emulation"
        ):
            engine.require(ARM64)


def test_the_builder_is_the_one_that_is_given_else_that_of_buildx(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """buildx reads BUILDX_BUILDER and what `docker buildx use` has set itself."""
    fake_engine.builders |= {"team": TEAM, "selected": TEAM.replace("team", "selected")}
    monkeypatch.setenv("BUILDX_BUILDER", "selected")
    assert current().name == "selected"
    assert current("team").name == "team"
    assert fake_engine.calls == [
        ["buildx", "inspect", "--bootstrap"], ["buildx", "inspect", "--bootstrap", "--builder=team"],
    ]  # fmt: skip


def test_the_builder_is_asked_for_once(fake_engine: FakeEngine) -> None:
    context = Context()
    assert builder.current(context) == builder.current(context)
    assert len(fake_engine.calls) == 1


@pytest.mark.parametrize(
    ("option", "variable", "given"), [("taem", "", "'--builder taem'"), ("", "taem", "BUILDX_BUILDER=taem")]
)
def test_an_unknown_builder_is_one_line_with_those_that_exist(
    monkeypatch: pytest.MonkeyPatch, fake_engine: FakeEngine, option: str, variable: str, given: str
) -> None:
    monkeypatch.setenv("BUILDX_BUILDER", variable)
    fake_engine.builders["team"] = TEAM
    with pytest.raises(UserError) as error:
        current(option)
    assert str(error.value) == (
        f"{given}: there is no such builder; 'docker buildx ls' lists team, default (did you mean 'team'?)"
    )


def test_a_builder_that_cannot_be_used_has_the_reason(fake_engine: FakeEngine) -> None:
    fake_engine.builders["default"] = "Name: team\nDriver: remote\nError: no valid drivers found\n\nNodes:\n"
    with pytest.raises(
        StepFailed, match=r"^builder team cannot be used: no valid drivers found; to .* '--builder default'$"
    ):
        current()


@pytest.fixture
def desktop(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine is that of the Docker context ``desktop``."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    docker.context.ContextAPI.create_context("desktop", host=fake_engine.address)
    monkeypatch.setenv("DOCKER_CONTEXT", "desktop")


@pytest.mark.parametrize("name", ["far", "default"])
def test_the_builder_of_another_engine_is_refused(fake_engine: FakeEngine, desktop: None, name: str) -> None:
    """It would keep the image in that engine."""
    fake_engine.builders[name] = ENGINE.replace("default", name)
    with pytest.raises(UserError) as raised:
        current(name)
    assert str(raised.value) == f"'--builder {name}': it builds in another Docker context: give '--builder desktop'"


def test_the_builder_of_the_docker_context_is_that_of_the_engine(fake_engine: FakeEngine, desktop: None) -> None:
    """As with Docker Desktop, colima, and Docker without root; newer buildx takes `--builder=default` for it."""
    fake_engine.builders["default"] = ENGINE.replace("default", "desktop")
    assert current().in_engine and current("default").in_engine


def test_podman_is_named(fake_engine: FakeEngine) -> None:
    """Its `buildx inspect` fails, and no `--builder` would help."""
    fake_engine.version = {"Components": [{"Name": "Podman Engine", "Version": "5.4.2"}]}
    fake_engine.builders["default"] = "Name: x\nError: See 'docker buildx --help'\n\nNodes:\n"
    with pytest.raises(UserError, match=r"^the engine is Podman, which has no BuildKit: use Docker Engine 24"):
        current()


def test_the_engine_is_asked_what_the_engine_runs_whatever_builder_is_selected(
    fake_engine: FakeEngine, team: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUILDX_BUILDER", "team")
    assert not Engine().can_run("linux/arm64")
    assert fake_engine.calls == [["buildx", "inspect", "--bootstrap", "--builder=default"]]


@pytest.mark.parametrize(("name", "option"), [("team", ["--builder=team"]), ("", [])])
def test_registries_are_asked_once_through_the_builder_which_may_use_mirrors(
    fake_engine: FakeEngine, name: str, option: list[str]
) -> None:
    fake_engine.digest_at_registry = lambda _: "sha256:1"
    engine = Engine()
    for _ in range(2):
        assert engine.digest_at_registry("debian:13", name) == ("sha256:1", "")
    (asked,) = fake_engine.calls
    assert (asked[1:-3], asked[-1]) == (["imagetools", "inspect", *option], "debian:13")


# --- a build ------------------------------------------------------------------------------------------------------


DIGEST = "sha256:" + "1" * 64


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Plan]:
    """``sources(base, architecture)``: the plan of tf-cpu on that base; the build base is ``build:1``."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))

    def make(base: str, architecture: Architecture = AMD64, build_base: str = "build:1") -> Plan:
        return plans.plan(
            model.load("tf-cpu", architecture.name), base=base, base_digest=base.partition("@")[2],
            build_base=build_base, pythons={"debian-12": "python:1", "debian-13": "tools"},
        )  # fmt: skip

    return make


@pytest.fixture
def engine_saves(fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The OCI layouts that the engine's images are written to: reference -> name of the architecture."""
    saved: dict[str, str] = {}

    def write(_engine: Engine, reference: str, folder: Path, architecture: Architecture) -> None:
        saved[reference] = architecture.name
        folder.mkdir(parents=True)
        (folder / "index.json").write_text(json.dumps({"manifests": [{"digest": f"sha256:{reference}"}]}))

    for name in ("trainyard-base:debian-13", "build:1", "python:1"):
        image = fake_engine.add(name, digest=f"sha256:{name}", config={"WorkingDir": "/workspace"})
        platforms = [one.platform for one in (AMD64, ARM64)]
        index = Image(image.id, [name], config=image.config, platforms=platforms)
        fake_engine.at_registries[name] = index
    fake_engine.add(repo_digests=[f"debian@{DIGEST}"], config={"WorkingDir": "/workspace"})
    monkeypatch.setattr(working_directory, "write", write)
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path))
    return saved


@pytest.mark.parametrize("architecture", [AMD64, ARM64])
def test_base_images_of_the_engine_are_sent_to_the_builder_as_layouts_for_its_machine(
    team: Builder,
    sources: Callable[..., Plan],
    engine_saves: dict[str, str],
    tmp_path: Path,
    architecture: Architecture,
) -> None:
    """The native node of arm64 installs wheels in a build base for arm64."""
    found = build._base_contexts(sources("trainyard-base:debian-13", architecture))
    assert found == {
        name: f"oci-layout://{tmp_path}/bases/{name}-{architecture.name}-in-workspace@sha256:{name}"
        for name in ("trainyard-base:debian-13", "build:1", "python:1")
    }
    assert engine_saves == dict.fromkeys(found, architecture.name)


def test_base_images_at_registries_are_not_sent(
    team: Builder, sources: Callable[..., Plan], engine_saves: dict[str, str]
) -> None:
    found = build._base_contexts(sources(f"debian@{DIGEST}", build_base=f"debian@{DIGEST}"))
    assert list(found) == list(engine_saves) == ["python:1"]


def test_the_engines_builder_is_sent_nothing(
    sources: Callable[..., Plan],
    engine_saves: dict[str, str],
) -> None:
    assert build._base_contexts(sources("trainyard-base:debian-13")) == {}
    assert not engine_saves


def test_an_engine_that_saves_no_layouts_is_one_line(
    team: Builder, sources: Callable[..., Plan], fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit in the engine, which takes the place of a layout there, is not on the builder."""
    pinned = f"debian@{DIGEST}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("manifest.json"))
    names = ("trainyard-base:debian-13", "build:1", "python:1")
    fake_engine.add(*names, repo_digests=[pinned], config={"WorkingDir": "/"}, saved=packed.getvalue())
    for base in ("trainyard-base:debian-13", pinned):
        with pytest.raises(StepFailed, match="the engine did not save an OCI layout"):
            build._base_contexts(sources(base))


@pytest.mark.parametrize(
    ("containerd", "output"),
    [
        (
            True,
            "type=docker,name=x:1,oci-mediatypes=true,compression=zstd,compression-level=3,force-compression=true",
        ),
        (False, "type=docker,name=x:1"),
    ],
)
@pytest.mark.parametrize("attested", [False, True])
def test_the_image_and_its_provenance_are_loaded_into_the_engine(
    team: Builder,
    sources: Callable[..., Plan],
    fake_engine: FakeEngine,
    containerd: bool,
    output: str,
    attested: bool,
) -> None:
    if not containerd:
        fake_engine.info["DriverStatus"] = []
    arguments = build.bake_arguments(sources(f"debian@{DIGEST}"), compression="zstd", name="x:1", provenance=attested)
    assert f"tf-cpu.output={output}" in arguments


def test_the_engines_builder_stores_the_image_where_it_is(
    sources: Callable[..., Plan], fake_engine: FakeEngine
) -> None:
    arguments = build.bake_arguments(sources(f"debian@{DIGEST}"), compression="gzip", name="x:1")
    assert "tf-cpu.output=type=image,name=x:1,oci-mediatypes=true,compression=gzip,force-compression=true" in arguments


def test_the_password_of_an_index_is_a_secret_of_the_build(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build.settings, "ca_bundle", lambda: tmp_path / "ca.pem")
    monkeypatch.setattr(planning.workspace_files, "secrets", lambda _: {"netrc": "password hunter2"})
    copy = plans.with_index("cpu", "pytorch-cpu", tmp_path)
    spec = model.load(str(copy), context=Context(state=tmp_path / "state"))
    for address, more in (
        ("https://index.example/whl", []),
        ("https://me:hunter2@index.example/whl", ["id=index,env="]),
    ):
        monkeypatch.setenv("TRAINYARD_INDEX_PYTORCH_CPU", address)
        found = plans.plan(spec, index="pytorch-cpu", index_url="https://index.example/whl")
        arguments = build.bake_arguments(found, compression="zstd")
        assert "cpu.args.INDEX_URL=https://index.example/whl" in arguments
        assert not any("hunter2" in word for word in arguments)
        secrets = [word.partition(".secrets=")[2] for word in arguments if ".secrets=" in word]
        wanted = [f"id=ca,src={tmp_path}/ca.pem", "id=netrc,env=TRAINYARD_SECRET_netrc"]
        assert secrets == wanted + [f"{one}TRAINYARD_INDEX_PYTORCH_CPU" for one in more]


def test_secrets_of_a_build_are_never_on_the_disk(
    team: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that is killed would leave their files; both builds, the image's and its provenance's, have them."""
    ran: list[dict[str, str]] = []

    def run(command: list[str], *, variables: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(variables)
        assert "cpu.secrets=id=netrc,env=TRAINYARD_SECRET_netrc" in command
        assert not any("hunter2" in word for word in command)
        written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        assert not any(b"hunter2" in content for content in written)
        metadata = next(word.partition("=")[2] for word in command if word.startswith("--metadata-file="))
        Path(metadata).write_text(json.dumps({"cpu": {"containerimage.digest": DIGEST}}), encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(buildx, "_run", run)
    monkeypatch.setattr(build, "_base_contexts", lambda _: {})
    monkeypatch.setattr(build, "_digest", lambda *_: DIGEST)
    monkeypatch.setattr(planning.workspace_files, "secrets", lambda _: {"netrc": "password hunter2"})
    monkeypatch.setattr(image_store, "documents", lambda *_: {})
    made = plans.plan(model.load("cpu", context=Context(state=tmp_path)))
    _, again = build._build(made, team, tmp_path, "zstd", name="x:1", on_step=None)
    with pytest.raises(StepFailed, match="gave another digest"):  # there is no statement
        provenance.keep(Context(), tmp_path, DIGEST, "cpu", *again)
    assert ran == [{"TRAINYARD_SECRET_netrc": "password hunter2"}] * 2


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_fetch_that_is_killed_leaves_the_base_that_was_fetched_before(
    team: Builder, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renames: int
) -> None:
    """Before the new one is written, between the two steps that put it in its place, and after them."""
    fetched = plans.plan(model.load("tf-cpu", context=Context(state=tmp_path)), base="base:1.2")
    written: list[str] = []

    def write(_engine: Engine, _reference: str, folder: Path, _architecture: Architecture) -> None:
        written.append("new" if written else "old")
        folder.mkdir(parents=True)
        (folder / "index.json").write_text(written[-1])

    monkeypatch.setattr(working_directory, "write", write)
    fake_engine.add("base:1.2")
    offline.keep(fetched)
    really, left = Path.rename, [renames]

    def rename(path: Path, to: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt  # nothing after it runs, as after SIGKILL
        left[0] -= 1
        return really(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with contextlib.nullcontext() if renames == 2 else pytest.raises(KeyboardInterrupt):
            offline.keep(fetched)
    layout = offline._layout(tmp_path, "base:1.2", AMD64)
    assert (layout / "index.json").read_text() == ("new" if renames == 2 else "old")


def test_every_build_runs_on_the_builder(team: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the image and that of its provenance."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        metadata = next(word.partition("=")[2] for word in command if word.startswith("--metadata-file="))
        Path(metadata).write_text('{"tf-cpu": {}}', encoding="utf-8")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(buildx, "_run", run)
    buildx.bake(Context(), "tf-cpu", ["tf-cpu"])
    assert started[0][:4] == ["docker", "buildx", "bake", "--builder=team"]


@pytest.mark.parametrize(
    ("key", "known"), [("containerimage.digest", True), ("containerimage.config.digest", True), ("x", False)]
)
def test_the_image_is_known_by_the_digest_that_the_engine_gives_it(
    team: Builder, fake_engine: FakeEngine, key: str, known: bool
) -> None:
    """Results are recorded for it: the manifest's with the containerd store, else the configuration's."""
    fake_engine.add("x:1", digest=DIGEST)
    metadata = {"containerimage.digest": "sha256:built"} | {key: DIGEST}
    if known:
        assert build._digest("x:1", metadata, team) == DIGEST
    else:
        with pytest.raises(StepFailed, match=r"^builder team built x:1 as sha256:built, and the engine has sha256:1"):
            build._digest("x:1", metadata, team)


def test_a_full_disk_may_be_that_of_the_builder_or_of_the_engine(team: Builder) -> None:
    said = "ERROR: failed to solve: write /x: no space left on device"
    assert buildx.reason(said).startswith("the engine's disk is full")
    assert buildx.reason(said, team).startswith(
        "the disk of builder team or of the engine is full: 'docker buildx prune --builder=team' empties"
    )


def test_the_disk_of_the_engine_does_not_limit_builds_elsewhere(
    team: Builder, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_engine.info["DockerRootDir"] = str(tmp_path)
    monkeypatch.setattr(reproduce.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    reproduce.require_space(plans.plan(model.load("tf-cpu", context=Context(state=tmp_path))))


def test_base_images_are_fetched_for_the_machine_that_builds(team: Builder, sources: Callable[..., Plan]) -> None:
    expected = {"base:1": ARM64, "build:1": ARM64, "python:1": ARM64}
    assert sources("base:1", ARM64).images() == expected


@pytest.mark.parametrize("command", ["build", "image", "images", "reproduce", "fetch"])
def test_the_commands_that_build_take_a_builder(
    command: str, trainyard: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def asked(*given: object, **named: object) -> None:
        seen.extend(one.builder for one in (*given, *named.values()) if isinstance(one, Context))
        raise UserError("asked")

    # The last one last: modules that are imported now keep the function that they import.
    for target in ("trainyard.release.candidate.make", "trainyard.release.batch.wanted", "trainyard.spec.model.load"):
        monkeypatch.setattr(target, asked)
    assert trainyard(command, "tf-cpu", "--builder", "team")[0] == 2
    assert seen == ["team"]
