"""The launcher prints what tests/goldens/launcher.txt says, for environments and machines of every rule (R0 to R16)."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping

import pytest
from launching import Launch, Machine
from tests.goldens import transcript

#: The processes of one node meet at a free port.
_ONE_NODE = re.compile(r'"master_port": 0\b|\bNNODES=1\b')
_PORT = re.compile(r"(MASTER_PORT\W{1,4}|--master[-_]port=)\d+")


@pytest.mark.usefixtures("default_signals")
def test_what_the_launcher_prints(
    launch: Launch,
    machine: Machine,
    google_cloud: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Run each command on a separate machine on Google Cloud, with the files that are written before it."""
    google_cloud()
    address = machine.env["GCE_METADATA_HOST"]
    monkeypatch.chdir(machine.root)

    def run(variables: Mapping[str, str], words: list[str]) -> tuple[int, str, str]:
        assert words[0] == "launch", words
        machine.add("/proc/self/status", "Cpus_allowed_list:\t0-7\n")
        launched = launch(variables, *words[1:])
        for path in machine.root.iterdir():
            shutil.rmtree(path)
        return launched.status, launched.out, launched.err

    def normalize(text: str) -> str:
        if _ONE_NODE.search(text):
            text = _PORT.sub(r"\1<free port>", text)
        return text.replace(str(machine.root), "").replace(address, "<address>")

    text = (transcript.FOLDER / "launcher.txt").read_text(encoding="utf-8")
    update = bool(request.config.getoption("--update-goldens"))
    transcript.compare("launcher.txt", transcript.replay(text, run, normalize), update=update)
