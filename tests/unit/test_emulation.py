"""scripts/setup-emulation.sh registers QEMU with the kernel once, and says in one line where it cannot.

It runs on a folder that takes the place of the host's /proc and /usr, with fakes of the programs that change a host.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from trainyard.common.settings import ROOT

SCRIPT = ROOT / "scripts" / "setup-emulation.sh"
FORMAT = ":qemu-aarch64:M::\\x7fELF\\x02\\x01\\x01:\\xff\\xff:/usr/libexec/qemu-binfmt/aarch64-binfmt-P:OPF\n"
CONF = "lib/binfmt.d/qemu-aarch64.conf"
REGISTERED = "enabled\ninterpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P\nflags: POF\n"
DONE = "emulation: programs for arm64 run under QEMU: they start about 6 times slower than natively"
OLD = "emulation: PyTorch crashes in QEMU 7.2, trains in 10.0, and this is 7: for a newer one"
BY_HAND = "run 'docker run --privileged --rm tonistiigi/binfmt --install arm64'"


@dataclass
class Host:
    """A host whose programs are fakes that write their arguments to ``calls``.

    Attributes:
        folder: takes the place of /.
        programs: name of a program -> what it runs after that, in sh; without an entry, there is no such program.
    """

    folder: Path
    programs: dict[str, str] = field(default_factory=dict)

    @property
    def registry(self) -> Path:
        """Where the kernel keeps the formats of programs."""
        return self.folder / "proc/sys/fs/binfmt_misc"

    @property
    def format(self) -> Path:
        """What the package registers."""
        return self.folder / "usr" / CONF

    def offer(self, candidate: str, backport: str = "") -> None:
        """Let apt offer a version of QEMU, and another one in the backports of the archive."""
        for version in filter(None, (candidate, backport)):
            install(self.folder / version, version)
        self.programs["apt-cache"] = f"echo '  Installed: (none)'; echo '  Candidate: 1:{candidate}+dfsg-7'"
        self.programs["apt-get"] = f"""case "$*" in
          *indextargets*)
            echo 'Docker|http://docker.example bookworm'
            echo 'Debian|http://debian.example bookworm-updates'
            echo 'Debian|http://debian.example bookworm' ;;
          *SourceParts=*update) cat "${{3#*=}}"/* >{self.folder}/sources ;;
          *backports*install*) {f"cp -a {self.folder}/{backport}/usr {self.folder}" if backport else "exit 100"} ;;
          *install*) cp -a {self.folder}/{candidate}/usr {self.folder} ;;
        esac"""

    @property
    def qemu(self) -> str:
        """The installed program."""
        return (self.folder / "usr/bin/qemu").read_text(encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        """The commands that would have changed the host."""
        file = self.folder / "calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def run(self) -> tuple[int, list[str]]:
        """Run the script; its exit status and the lines that it printed."""
        path = self.folder / "bin"
        path.mkdir(exist_ok=True)
        for name in ("bash", "cat", "cp", "grep", "mktemp", "readlink", "rm", "sed", "sh", "sort"):
            (path / name).unlink(missing_ok=True)
            (path / name).symlink_to(str(shutil.which(name)))
        for name, text in self.programs.items():
            record = "" if name in ("uname", "id", "apt-cache") else f'echo "{name} $*" >>{self.folder}/calls\n'
            (path / name).write_text(f"#!{path}/sh\n{record}{text}\n", encoding="utf-8")
            (path / name).chmod(0o755)
        environment = {"PATH": str(path), "TRAINYARD_SYSROOT": str(self.folder)}
        done = subprocess.run(
            [path / "bash", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.stdout == ""
        return done.returncode, done.stderr.splitlines()


def install(folder: Path, version: str) -> None:
    """Put files of the package below a folder: a QEMU that prints this version, the link to it and the format."""
    program, link, file = (folder / "usr" / name for name in ("bin/qemu", "libexec/qemu-binfmt/aarch64-binfmt-P", CONF))
    for one in (program, link, file):
        one.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\necho 'qemu-aarch64 version {version} (Debian 1:{version})'\n", encoding="utf-8")
    program.chmod(0o755)
    link.unlink(missing_ok=True)
    link.symlink_to("../../bin/qemu")
    file.write_text(FORMAT, encoding="utf-8")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An x86-64 host with Debian, as root: binfmt_misc is mounted, the package is not installed."""
    found = Host(tmp_path)
    found.registry.mkdir(parents=True)
    found.format.parent.mkdir(parents=True)
    (found.registry / "register").touch()
    found.programs |= {
        "uname": 'case "$1" in -m) echo x86_64 ;; -s) echo Linux ;; esac',
        "id": "echo 0",
        "mount": f"cat /dev/null >{found.registry}/register",
    }
    found.offer("10.0.2")
    return found


INSTALLED = [
    "apt-get -qq update",
    "apt-get -qq install -y --no-install-recommends qemu-user-static",
]


def test_qemu_is_installed_and_registered(host: Host) -> None:
    status, said = host.run()
    assert status == 0 and len(said) == 2
    assert said[0] == "emulation: installing qemu-user-static" and said[1].startswith(DONE)
    assert host.calls == INSTALLED
    assert (host.registry / "register").read_text(encoding="utf-8") == FORMAT


def test_an_old_qemu_gives_way_to_that_of_the_backports(host: Host) -> None:
    """PyTorch crashes in QEMU 7.2, which Debian 12 has."""
    host.offer("7.2.22", backport="10.0.2")
    status, said = host.run()
    assert (status, len(said)) == (0, 2) and said[1].startswith(DONE)
    assert "10.0.2" in host.qemu
    assert (host.folder / "sources").read_text(encoding="utf-8") == (
        "deb http://debian.example bookworm-backports main\n"
    )


def test_without_backports_the_old_qemu_is_installed_and_the_last_line_says_what_crashes(host: Host) -> None:
    host.offer("7.2.22")
    status, said = host.run()
    assert status == 0 and "7.2.22" in host.qemu
    assert said[-1].startswith(OLD)
    assert BY_HAND in said[-1]


def test_a_new_qemu_is_installed_from_the_archive(host: Host) -> None:
    host.offer("10.0.2", backport="11.0.0")
    status, said = host.run()
    assert (status, len(said)) == (0, 2) and "10.0.2" in host.qemu


def test_an_old_qemu_that_is_registered_is_replaced(host: Host) -> None:
    """The kernel keeps the program of a registration open: it is removed and written again."""
    host.offer("7.2.22", backport="10.0.2")
    install(host.folder, "7.2.22")
    (host.registry / "qemu-aarch64").write_text(REGISTERED, encoding="utf-8")
    status, _ = host.run()
    assert status == 0 and "10.0.2" in host.qemu
    assert (host.registry / "qemu-aarch64").read_text(encoding="utf-8") == "-1\n"
    assert (host.registry / "register").read_text(encoding="utf-8") == FORMAT


def test_another_program_that_is_registered_is_kept_beside_an_old_package(host: Host) -> None:
    """Docker's may be newer, and the package could be all that apt has."""
    install(host.folder, "7.2.22")
    (host.registry / "qemu-aarch64").write_text("enabled\ninterpreter /usr/bin/qemu-aarch64\n", encoding="utf-8")
    assert host.run() == (0, [])
    assert host.calls == []


def test_without_root_an_old_qemu_that_is_registered_is_kept_and_one_line_says_so(host: Host) -> None:
    install(host.folder, "7.2.22")
    (host.registry / "qemu-aarch64").write_text(REGISTERED, encoding="utf-8")
    host.programs["id"] = "echo 1000"
    status, said = host.run()
    assert (status, len(said)) == (0, 1)
    assert said[0].startswith(OLD) and "for a newer one run 'sudo make setup EMULATION=1'" in said[0]
    assert host.calls == []


def test_what_systemd_registered_with_the_package_is_not_registered_twice(host: Host) -> None:
    host.programs["apt-get"] += f"\necho enabled >{host.registry}/qemu-aarch64"
    assert host.run()[0] == 0
    assert (host.registry / "register").read_text(encoding="utf-8") == ""


def test_after_a_restart_the_installed_qemu_is_registered_again(host: Host) -> None:
    """The kernel has forgotten it, and on hosts without systemd nothing else registers it."""
    host.format.write_text(FORMAT, encoding="utf-8")
    (host.registry / "register").unlink()
    status, said = host.run()
    assert (status, len(said)) == (0, 1) and said[0].startswith(DONE)
    assert host.calls == [f"mount -t binfmt_misc binfmt_misc {host.registry}"]
    assert (host.registry / "register").read_text(encoding="utf-8") == FORMAT


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_a_host_that_runs_arm64_natively_is_not_changed(host: Host, machine: str) -> None:
    host.programs["uname"] = f"echo {machine}"
    assert host.run() == (0, [])
    assert host.calls == []


def test_a_host_that_emulates_arm64_already_is_not_changed(host: Host) -> None:
    """By whatever program, such as Docker Desktop's; root is not needed to find out."""
    (host.registry / "qemu-aarch64").write_text("enabled\ninterpreter /usr/bin/qemu-aarch64\n", encoding="utf-8")
    host.programs["id"] = "echo 1000"
    assert host.run() == (0, [])
    assert host.calls == []


def test_a_registration_that_was_switched_off_is_switched_on(host: Host) -> None:
    """The kernel registers no name twice: https://docs.kernel.org/admin-guide/binfmt-misc.html"""
    (host.registry / "qemu-aarch64").write_text("disabled\n", encoding="utf-8")
    assert host.run()[0] == 0
    assert (host.registry / "qemu-aarch64").read_text(encoding="utf-8") == "1\n"
    assert (host.registry / "register").read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("program", "text", "line"),
    [
        ("uname", 'case "$1" in -m) echo x86_64 ;; *) echo Darwin ;; esac', "not a Linux host: Docker Desktop runs"),
        ("id", "echo 1000", "needs root: run 'sudo make setup EMULATION=1', or"),
        ("mount", "exit 32", "this kernel has no binfmt_misc, or this is a container without the right to mount it:"),
        ("apt-get", "exit 100", "qemu-user-static cannot be installed:"),
        ("apt-get", "", "QEMU for arm64 is not installed:"),
    ],
)
def test_what_it_cannot_do_is_one_line_with_another_way(host: Host, program: str, text: str, line: str) -> None:
    if program == "mount":
        (host.registry / "register").unlink()
    if text:
        host.programs[program] = text
    else:
        del host.programs[program]
    status, said = host.run()
    assert status == 1
    assert said[-1].startswith(f"emulation: error: {line}") and BY_HAND in said[-1]
    assert not (host.registry / "register").exists() or not (host.registry / "register").read_text(encoding="utf-8")


def test_a_kernel_that_refuses_the_registration_is_one_line(host: Host) -> None:
    (host.registry / "register").unlink()
    (host.registry / "register").mkdir()
    status, said = host.run()
    assert status == 1
    assert said[-1].startswith(f"emulation: error: the kernel refused QEMU for arm64: {BY_HAND}")
