"""A missing engine is one line, few commands install one, and builds are retried after a transient error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import docker
import pytest

from trainyard.common import settings
from trainyard.common.errors import StepFailed, UserError
from trainyard.oci import docker_engine
from trainyard.project import test
from trainyard.spec.architectures import AMD64, ARM64, Architecture

#: ``docker_engine.client`` without the client that other tests got before.
new_client: Callable[[], docker.DockerClient] = docker_engine.client.__wrapped__

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, before all others on PATH, of a host without an engine.

    `docker` reaches an engine once `dockerd` was called. Programs that change a host only write their names to `calls`.
    """

    def no_engine() -> None:
        raise docker.errors.DockerException

    programs = {
        "docker": f"test -e {tmp_path}/calls && grep -q dockerd {tmp_path}/calls",
        "id": "echo 0",
        "uname": "echo Linux",
        "apt-get": f"echo apt-get $* >>{tmp_path}/calls; exit 100",
        "dockerd": f"echo dockerd >>{tmp_path}/calls",
    }
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("TRAINYARD_SYSROOT", str(tmp_path))
    monkeypatch.setenv("TRAINYARD_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker_engine, "existing_client", no_engine)
    monkeypatch.setattr(docker_engine, "client", new_client)
    return tmp_path


def calls(host: Path) -> list[str]:
    return (host / "calls").read_text().splitlines() if (host / "calls").exists() else []


@pytest.mark.parametrize(
    "words",
    [
        ("clean",),
        ("verify", "tf-cpu"),
        ("run", "tf-cpu"),
        ("images", "tf-cpu"),
        ("sbom", "tf-cpu"),
        ("sbom", "--image", "mine:1", "--json"),
        ("diff", "trainyard:a", "trainyard:b"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("checkout", [settings.CHECKOUT, None])
def test_a_command_without_an_engine_starts_and_installs_none(
    words: tuple[str, ...],
    checkout: Path | None,
    host: Path,
    trainyard: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settings, "CHECKOUT", checkout)
    status, out, err = trainyard(*words)
    said = f"{words[0]}: no Docker engine answers: run 'trainyard setup', which starts or installs one\n"
    assert (status, out, err, calls(host)) == (2, "", said, [])


def test_setup_starts_the_engine_that_is_installed(host: Path, trainyard: Command) -> None:
    assert trainyard("setup")[0] == 0
    assert calls(host) == ["dockerd"]
    assert trainyard("setup")[0] == 0
    assert calls(host) == ["dockerd"], "an engine answers"


def test_setup_says_what_it_changes_and_how_to_undo_it(
    host: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an apt-get that installs an engine, and no configuration of one before."""
    programs = (
        "awk bash cat comm cp date dirname env grep head mkdir nohup paste rm sed seq setsid sh sleep sort tail tr"
    )
    for name in programs.split():
        (host / "bin" / name).symlink_to(str(shutil.which(name)))
    (host / "bin" / "dockerd").rename(host / "dockerd")
    (host / "bin" / "docker").write_text(f"#!/bin/sh\ntest -e {host}/calls && grep -q dockerd {host}/calls\n")
    (host / "packages").write_text("ii libc6\nrc runc\n")
    (host / "etc").mkdir()
    (host / "etc" / "os-release").write_text("ID=debian\nVERSION_ID=13\n")
    (host / "bin" / "dpkg-query").write_text(f"#!/bin/sh\ncat {host}/packages\n")
    (host / "bin" / "dpkg-query").chmod(0o755)
    (host / "bin" / "apt-get").write_text(
        f'#!/bin/sh\ncase "$*" in *" install "*) cp {host}/dockerd {host}/bin/; '
        f"printf 'ii docker.io\\nii runc\\n' >>{host}/packages ;; esac\n"
    )
    monkeypatch.setenv("PATH", str(host / "bin"))
    status, _, err = trainyard("setup")
    assert status == 0, err
    written, undo = host / "etc" / "docker" / "daemon.json", host / "state" / "undo-setup"
    said = (
        f"dockerd opens the firewall for containers; apt updates its packages; 'sh {undo}' removes what was installed"
    )
    assert f"engine: {said}\n" in err and "containerd-snapshotter" in written.read_text()
    commands = [line for line in undo.read_text().splitlines() if not line.startswith("#")]
    assert commands == [
        '[ -d /run/systemd/system ] || kill "$(cat /run/docker.pid)"',
        "apt-get remove -y docker.io runc",
        f"rm -f {written}",
    ]


def test_setup_installs_what_only_root_can_install(host: Path, trainyard: Command) -> None:
    (host / "bin" / "id").write_text("#!/bin/sh\necho 1000\n")
    status, _, err = trainyard("setup", "--emulation")
    assert (status, calls(host)) == (2, [])
    assert err.startswith(
        "setup: no Docker engine answers, and installing one needs root: run 'sudo trainyard setup' once, or"
    )


def test_emulation_is_set_up_after_the_engine(host: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(docker_engine, "_run_script", lambda *words: ran.append(words))
    assert trainyard("setup", EMULATION="0")[0] == 0
    assert ran == [("install-engine.sh", "trainyard setup")]
    monkeypatch.setattr(settings, "CHECKOUT", None)
    assert trainyard("setup", EMULATION="1")[0] == 0
    assert ran[1:] == [
        ("install-engine.sh", "trainyard setup"),
        ("setup-emulation.sh", "trainyard setup --emulation"),
    ]


@pytest.mark.parametrize("words", [("image", "tf-cpu"), ("image", "--from", "mine:1"), ("test", "--suite", "cloud")])
def test_in_a_checkout_the_commands_of_the_readme_install_an_engine(
    words: tuple[str, ...], host: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*words: str) -> None:
        raise UserError(" ".join(words))

    monkeypatch.setattr(docker_engine, "_run_script", run)
    monkeypatch.setattr(test, "run", lambda *_, **__: 0)
    assert trainyard(*words) == (2, "", f"{words[0]}: install-engine.sh trainyard setup\n")
    monkeypatch.setattr(settings, "CHECKOUT", None)
    if words[0] == "image":
        assert trainyard(*words) == (2, "", "image: install-engine.sh trainyard setup --check\n")


def test_unit_tests_need_no_engine(host: Path, trainyard: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test, "run", lambda *_, **__: 0)
    assert trainyard("test", "--suite", "unit") == (0, "", "")
    assert calls(host) == []


def test_an_engine_that_only_the_docker_command_reaches_is_one_line(host: Path) -> None:
    (host / "calls").write_text("dockerd\n")
    with pytest.raises(UserError, match=r"^'docker' reaches an engine that is not at DOCKER_HOST: set it as"):
        new_client()


def test_an_engine_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From scripts/install-engine.sh, which changes nothing where DOCKER_HOST names an engine."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^no engine answers at DOCKER_HOST=tcp://127\.0\.0\.1:9: start it, or unset"):
        new_client()
    assert capfd.readouterr().err == "", "the line is printed once, by the command"


def test_the_engine_is_that_of_the_docker_context_in_dockers_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """DOCKER_HOST, then DOCKER_CONTEXT, then `docker context use`."""
    monkeypatch.setattr(docker.DockerClient, "ping", lambda _: True)
    monkeypatch.setattr(docker.api.client.APIClient, "_retrieve_server_version", lambda _: "1.45")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    for name, port in (("used", 1), ("named", 2)):
        (tmp_path / "config.json").write_text("{}")
        docker.context.ContextAPI.create_context(name, host=f"tcp://127.0.0.1:{port}")

    def engine() -> tuple[str, str]:
        return docker_engine.context(), docker_engine.existing_client().api.base_url.rpartition("/")[2]

    assert engine() == ("default", "localhost")
    docker.context.ContextAPI.set_current_context("used")
    assert engine() == ("used", "127.0.0.1:1")
    monkeypatch.setenv("DOCKER_CONTEXT", "named")
    assert engine() == ("named", "127.0.0.1:2")
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:3")
    assert engine() == ("default", "127.0.0.1:3")


@pytest.mark.parametrize("config", ["", '{"currentContext": "gone"}'], ids=["DOCKER_CONTEXT", "current context"])
def test_a_context_that_does_not_exist_is_no_other_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: str
) -> None:
    """Nor is it one that the current folder brings."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.chdir(tmp_path)
    if config:
        (tmp_path / "docker").mkdir()
        (tmp_path / "docker" / "config.json").write_text(config)
    else:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("DOCKER_CONTEXT", "gone")
        docker.context.ContextAPI.create_context("gone", host="tcp://127.0.0.1:1")
        assert (tmp_path / "contexts").is_dir()
    with pytest.raises(docker.errors.ContextNotFound):
        docker_engine.existing_client()


def test_a_context_without_an_engine_is_one_line(host: Path) -> None:
    (host / "bin" / "docker").write_text(
        "#!/bin/sh\ntest $1 = context && echo 'colima: unix:///home/me/.colima/docker.sock'\n"
    )
    with pytest.raises(
        UserError, match=r"^no engine answers in the Docker context \(colima: unix:///home/me/\.colima/do"
    ):
        docker_engine.set_up()
    assert calls(host) == [], "none is installed or started"


def test_what_an_installer_prints_is_shown_whatever_its_bytes_and_its_error_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "scripts" / "install-engine.sh"
    script.parent.mkdir()
    script.write_bytes(b"#!/bin/sh\necho 'M\xfcnchen' >&2\necho 'engine: error: no archive answers' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    monkeypatch.setattr(docker_engine, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"^no archive answers$"):
        docker_engine.set_up()
    assert capsys.readouterr().err == "M\N{REPLACEMENT CHARACTER}nchen\n"


@pytest.mark.parametrize(("words", "attempts"), [("no active sessions", 3), ("hash mismatch", 1)])
def test_a_quiet_build_is_retried_after_a_transient_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, attempts: int
) -> None:
    """With a ``docker`` that records its calls and fails."""
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho called >>{tmp_path}/calls\necho 'ERROR: {words}' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(docker_engine, "client", lambda: None)
    monkeypatch.setattr(docker_engine, "_PAUSES", (0, 0))
    with pytest.raises(StepFailed, match=f"'docker buildx build' failed: ERROR: {words}"):
        docker_engine.buildx("build", ".")
    assert (tmp_path / "calls").read_text().count("called") == attempts


def test_a_pull_that_fails_after_the_engine_answered_has_the_engines_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports such an error in its answer, whose status is 200."""

    class Engine:
        api = images = property(lambda self: self)

        def get(self, reference: str) -> None:
            raise docker.errors.ImageNotFound(f"No such image: {reference}")

        def pull(self, repository: str, tag: str = "", **_: object) -> list[dict[str, str]]:
            assert (repository, tag) in (("registry:5000/xla:nightly", "sha256:1"), ("xla", "latest"))
            return [{"status": "Pulling"}, {"error": "no space left on device"}, {"status": "Digest"}]

    monkeypatch.setattr(docker_engine, "client", Engine)
    for reference in ("registry:5000/xla:nightly@sha256:1", "xla"):
        with pytest.raises(UserError, match=rf"^no local image {reference}, and .* pulled: no space left on device$"):
            docker_engine.pull(reference)


INSPECTED = """Name:          default
Driver:        docker

Nodes:
Name:      default
Status:    running
Platforms: linux/amd64, linux/amd64/v2, linux/arm64*
"""


@pytest.mark.parametrize(
    ("wanted", "printed", "runs"),
    [(AMD64, "", True), (ARM64, INSPECTED, True), (ARM64, INSPECTED.replace("arm64", "386"), False), (ARM64, "", True)],
)
def test_whether_programs_run_is_what_the_engine_says(
    monkeypatch: pytest.MonkeyPatch, wanted: Architecture, printed: str, runs: bool
) -> None:
    monkeypatch.setattr(docker_engine, "architecture", lambda: AMD64)
    monkeypatch.setattr(docker_engine, "buildx", lambda *_, **__: printed)
    assert docker_engine.can_run(wanted) is runs
    if runs:
        docker_engine.require_emulation(wanted)
    else:
        with pytest.raises(
            UserError, match=r"^the engine runs no programs for linux/arm64: run 'trainyard setup --emulation'"
        ):
            docker_engine.require_emulation(wanted)


@pytest.mark.parametrize(
    ("of_engine", "wanted", "emulated"),
    [(AMD64, AMD64, False), (AMD64, ARM64, True), (ARM64, ARM64, False), (ARM64, AMD64, False)],
)
def test_emulated_arm64_has_a_processor_that_is_fast_to_emulate(
    monkeypatch: pytest.MonkeyPatch, of_engine: Architecture, wanted: Architecture, emulated: bool
) -> None:
    monkeypatch.setattr(docker_engine, "architecture", lambda: of_engine)
    assert ("QEMU_CPU" in docker_engine.emulated_environment(wanted)) is emulated


def test_an_image_that_is_removed_while_images_are_listed_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(identity: str) -> SimpleNamespace:
        if identity == "removed":
            raise docker.errors.ImageNotFound("No such image: removed")
        return SimpleNamespace(id=identity)

    asked: list[object] = []

    def listed(name: str | None, *, filters: object) -> list[dict[str, str]]:
        asked.append((name, filters))
        return [{"Id": "kept"}, {"Id": "removed"}]

    engine = SimpleNamespace(api=SimpleNamespace(images=listed), images=SimpleNamespace(get=get))
    monkeypatch.setattr(docker_engine, "client", lambda: engine)
    assert [image.id for image in docker_engine.images("trainyard")] == ["kept"]
    assert [image.id for image in docker_engine.images(label="a=b")] == ["kept"]
    assert asked == [("trainyard", None), (None, {"label": ["a=b"]})]
