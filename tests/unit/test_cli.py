"""Every mistake gets one clear line and a non-zero exit, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import ModuleType

import pytest

from scripts import base, build, cli, engine, render, state
from scripts import list as list_verb
from scripts.cli import ROOT, UserError

Verb = Callable[..., tuple[int, str, str]]


def make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What a user types, with no engine to be reached."""
    environment = os.environ | {"DOCKER_HOST": "tcp://127.0.0.1:1"} | variables
    command = ["make", *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_make_alone_lists_the_verbs() -> None:
    found = make()
    assert found.returncode == 0
    for verb in ("image", "build", "verify", "smoke", "push", "list", "clean", "base", "shell", "lock", "render"):
        assert f" {verb} " in found.stderr


def test_an_unknown_verb_lists_the_verbs() -> None:
    found = make("imgae")
    assert found.returncode == 2
    assert "no verb 'imgae'; there are: " in found.stderr.splitlines()[0]
    assert "Traceback" not in found.stderr


def test_a_misspelt_target_lists_the_valid_ones() -> None:
    target = "'; echo hacked; $(reboot) -h \\"  # what a shell would act on reaches the verb as it is
    found = make("image", TARGET=target)
    assert found.returncode == 2
    assert found.stderr.startswith(f"image: unknown target '{target}'")
    assert "valid targets: cpu, " in found.stderr
    assert found.stdout == ""


def test_no_target_says_so() -> None:
    assert make("build").stderr.startswith("build: no target given, as in 'make image TARGET=tf-cpu'; valid targets:")


def test_no_engine_says_what_to_do() -> None:
    found = make("build", "TARGET=tf-cpu")
    assert found.returncode == 2
    assert "no engine answers at DOCKER_HOST=tcp://127.0.0.1:1: start it, or unset DOCKER_HOST" in found.stderr
    assert "Traceback" not in found.stderr


def test_wrong_compression_names_the_right_ones(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESSION", "brotli")
    status, _, err = verb(build, "tf-cpu")
    assert (status, err) == (2, "build: COMPRESSION='brotli': use one of zstd, gzip\n")


def test_an_unset_epoch_is_the_commits_and_rubbish_is_refused(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import plan

    assert plan.source_date_epoch() > 0
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(UserError, match="not a number of seconds"):
        plan.source_date_epoch()


def test_json_is_the_only_thing_on_stdout(verb: Verb) -> None:
    status, out, _ = verb(render, "--json")
    assert (status, out) == (0, '{\n  "written": []\n}\n')


def test_drift_stops_a_build(verb: Verb, write_spec: Callable[[str], str], spec_text: str) -> None:
    status, _, err = verb(build, write_spec(spec_text))
    assert status == 2
    assert "mine/Dockerfile: not what the spec gives; run 'make render'" in err.replace("\n", "")


def test_a_full_disk_is_one_line(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/somewhere")

    monkeypatch.setattr(list_verb, "load", full)
    status, _, err = verb(list_verb)
    assert (status, err) == (1, "list: No space left on device (/somewhere)\n")


def test_an_interrupt_is_one_line_and_130() -> None:
    script = (
        "import time\nfrom scripts import cli\n"
        "def main(a):\n  print('ready', flush=True)\n  time.sleep(30)\ncli.run(main)\n"
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started = time.monotonic()
        process.send_signal(number)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert err == "-c: interrupted; nothing was tagged or published\n"
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("module", [base, build, list_verb, render], ids=lambda module: module.__name__)
def test_help_says_how_make_calls_it(module: ModuleType, verb: Verb) -> None:
    status, out, _ = verb(module, "--help")
    assert status == 0
    assert f"make {module.__name__.rpartition('.')[2]}" in out


def test_results_are_kept_by_digest(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "STATE", tmp_path)
    state.record("x", "verify", "sha256:a", {"passed": True})
    assert state.recall("x", "verify", "sha256:a") == {"digest": "sha256:a", "passed": True}
    assert state.recall("x", "verify", "sha256:b") is None
    with pytest.raises(UserError, match="never passed 'smoke': run 'make image TARGET=x'"):
        state.require("x", "sha256:a", "verify", "smoke")


def test_the_hosts_ca_bundle_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    bundle = cli.Path(str(tmp_path)) / "ca.pem"
    bundle.write_text("x")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    assert engine.ca_bundle() == bundle
