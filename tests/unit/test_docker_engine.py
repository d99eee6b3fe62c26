"""A missing engine is one line, few commands install one, and builds are retried after a transient error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import docker
import pytest
from tests.fakes.engine import FakeEngine, Ran, Refusal

from trainyard.common import docker_engine, settings
from trainyard.common.docker_engine import Engine
from trainyard.common.errors import StepFailed, UserError
from trainyard.project import test

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, before all others on PATH, of a host without an engine.

    `docker` reaches an engine once `dockerd` was called. Programs that change a host only write their names to `calls`.
    """
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
    monkeypatch.setattr(Engine, "existing_client", lambda _: None)  # whatever listens at /var/run/docker.sock
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
        Engine().require()


def test_an_engine_that_does_not_answer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """From scripts/install-engine.sh, which changes nothing where DOCKER_HOST names an engine."""
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^no engine answers at DOCKER_HOST=tcp://127\.0\.0\.1:9: start it, or unset"):
        Engine().require()
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
        found = Engine()
        return found.docker_context, found.client.api.base_url.rpartition("/")[2]

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
    assert Engine().existing_client() is None


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
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, words: str, attempts: int
) -> None:
    fake_engine.docker = lambda *_: Ran(1, err=f"ERROR: {words}\n".encode())
    monkeypatch.setattr(docker_engine, "_PAUSES", (0, 0))
    with pytest.raises(StepFailed, match=f"'docker buildx build' failed: ERROR: {words}"):
        Engine().buildx("build", ".")
    assert fake_engine.calls == [["buildx", "build", "."]] * attempts


def test_a_pull_that_fails_after_the_engine_answered_has_the_engines_reason(fake_engine: FakeEngine) -> None:
    """The engine reports such an error in its answer, whose status is 200."""
    events = [{"status": "Pulling"}, {"error": "no space left on device"}, {"status": "Digest"}]
    fake_engine.instead("POST /images/create", lambda: iter([json.dumps(event).encode() for event in events]))
    for reference in ("registry:5000/xla:nightly@sha256:1", "xla"):
        with pytest.raises(UserError, match=rf"^no local image {reference}, and .* pulled: no space left on device$"):
            Engine().pull(reference)
    assert [request.partition("?")[2] for request in fake_engine.requests if "create" in request] == [
        "tag=sha256%3A1&fromImage=registry%3A5000%2Fxla", "tag=latest&fromImage=xla",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "platforms", "runs"),
    [
        ("amd64", [], True),
        ("arm64", ["linux/amd64", "linux/amd64/v2", "linux/arm64*"], True),
        ("arm64", ["linux/amd64", "linux/386"], False),
        ("arm64", [], True),
    ],
)
def test_whether_programs_run_is_what_the_engine_says(
    fake_engine: FakeEngine, wanted: str, platforms: list[str], runs: bool
) -> None:
    fake_engine.platforms = platforms
    engine = Engine()
    assert engine.can_run(f"linux/{wanted}") is runs
    if runs:
        engine.require_emulation(f"linux/{wanted}")
    else:
        with pytest.raises(
            UserError, match=r"^the engine runs no programs for linux/arm64: run 'trainyard setup --emulation'"
        ):
            engine.require_emulation(f"linux/{wanted}")


@pytest.mark.parametrize(
    ("of_engine", "wanted", "emulated"),
    [("amd64", "amd64", False), ("amd64", "arm64", True), ("arm64", "arm64", False), ("arm64", "amd64", False)],
)
def test_emulated_arm64_has_a_processor_that_is_fast_to_emulate(
    fake_engine: FakeEngine, of_engine: str, wanted: str, emulated: bool
) -> None:
    fake_engine.architecture = of_engine
    assert ("QEMU_CPU" in Engine().emulated_environment(wanted)) is emulated


def test_an_image_that_is_removed_while_images_are_listed_is_none_of_them(fake_engine: FakeEngine) -> None:
    kept, removed = (fake_engine.add(f"trainyard:{name}", labels={"a": "b"}) for name in ("kept", "removed"))
    fake_engine.instead(f"GET /images/{removed.id}/json", Refusal(404, f"No such image: {removed.id}"))
    assert [image.id for image in Engine().images("trainyard")] == [kept.id]
    assert [image.id for image in Engine().images(label="a=b")] == [kept.id]
