"""What all tests share. Tests say what the product promises; how an image comes to be there is said here, once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import examples, suites
from tests import miniature as miniatures
from tests.engine import ENGINE
from tests.miniature import Miniature
from tests.usage import Usage
from trainyard.common.errors import UserError
from trainyard.common.settings import state_folder

# Ryuk, testcontainers' reaper, is an image of a registry that closed networks do not reach; fixtures clean up instead.
os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")

# Commands that a shell starts in the background ignore interrupts, and so would those that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every worker and every command that tests start would compile all modules anew, which takes half of its time.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The umask, proxy and colors of the shell must not decide whether containers can read files, whether tests reach the
# servers that they start, and what commands print.
os.umask(0o022)
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))
for name in ("FORCE_COLOR", "PY_COLORS", "COLUMNS"):
    os.environ.pop(name, None)

# An example that takes long says that the machine is busy, nothing about what is tested.
settings.register_profile("without deadline", settings.default, deadline=None)
settings.load_profile("without deadline")

ROOT = Path(__file__).resolve().parent.parent

#: Program -> number of tests that are left out because it is not on PATH.
_LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--big", action="store_true", help="also run the tests marked big or slow")
    parser.addoption(
        "--concurrent", choices=["only", "without"], help="only the tests marked concurrent, or no such test"
    )
    parser.addoption("--update-goldens", action="store_true", help="write the files of tests/goldens/ again")
    parser.addoption("--usage", action="store_true", help="say how long each file takes, and how full the disk becomes")


def pytest_configure(config: pytest.Config) -> None:
    examples.ALL = config.getoption("--big")
    if config.getoption("--usage") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Usage(ROOT))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of another run, slow ones without --big, and those that need a program that is not on PATH."""
    left_out: Counter[str] = Counter()
    kept, dropped = [], []
    part = config.getoption("--concurrent")
    for item in items:
        if part and (item.get_closest_marker("concurrent") is None) == (part == "only"):
            dropped.append(item)
            continue
        if item.get_closest_marker("slow") and not config.getoption("--big"):
            dropped.append(item)
            continue
        needed = [program for mark in item.iter_markers("needs") for program in mark.args]
        missing = next((program for program in needed if not shutil.which(program)), None)
        if missing:
            left_out[missing] += 1
            dropped.append(item)
        else:
            kept.append(item)
    if part == "only":
        # The longest files first, so that the workers end at about the same time; big images keep their order.
        minutes = suites.minutes()
        kept.sort(key=lambda item: 0 if item.get_closest_marker("big") else -minutes[suites.name_of(item.path)])
    config.stash[_LEFT_OUT] = left_out
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Of what a failed test printed, keep the last lines: the log of one build would hide the other failures."""
    report = yield
    report.sections = [(title, "".join(text.splitlines(keepends=True)[-40:])) for title, text in report.sections]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    # A worker of pytest-xdist hands its result to the process that prints the summary.
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        left_out: Counter[str] = session.config.stash.get(_LEFT_OUT, Counter())
        output["left_out"] = dict(left_out)
    elif session.config.pluginmanager.hasplugin("dsession") and session.config.getoption("--concurrent"):
        # No worker uses them any more. Where no engine runs, there are none.
        with contextlib.suppress(UserError):
            miniatures.remove_images()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """A worker of pytest-xdist ended; each of them has collected all tests."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[_LEFT_OUT] = Counter(left_out)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(_LEFT_OUT, None):
        counts = ", ".join(
            f"{number} {'test needs' if number == 1 else 'tests need'} {name}"
            for name, number in sorted(left_out.items())
        )
        terminalreporter.write_line(f"not run: {counts}", yellow=True)


@pytest.fixture(autouse=True)
def messages() -> Iterator[None]:
    """What libraries report is on stderr, as while a command runs."""
    from trainyard.common.console import Messages

    with Messages():
        yield


@pytest.fixture(scope="session")
def built_image() -> Callable[[str], str]:
    """``built_image("tf-cpu")`` is the reference of that target's image, which has passed verify and smoke.

    It is built unless the engine has the image of these inputs and this checkout has its results: tests that run two
    at a time would build it twice at once, which takes the disk of three images. An engine may have the image from
    another checkout, whose results are not here.
    """
    from tests.image import catalogue
    from trainyard.image import build
    from trainyard.release import candidate
    from trainyard.spec import state
    from trainyard.spec.model import load
    from trainyard.spec.naming import NAME

    made: dict[str, str] = {}

    def shrink_cache() -> None:
        """A throw-away machine never installs these wheels again: 16 GB less at the peak (of 40 allowed)."""
        if os.environ.get("CI"):
            ENGINE.buildx("prune", "--force", "--filter=type=exec.cachemount")
            catalogue.drop_stages()

    def passed(target: str) -> str | None:
        plan = build.plan_for(load(target))
        for image in ENGINE.images(f"{NAME}:{plan.tag}"):
            if plan.local in image.tags:
                with contextlib.suppress(UserError):
                    state.require(state_folder() / target, str(image.id), "build", "verify", "smoke")
                    return plan.local
        return None

    def reference(target: str) -> str:
        if target not in made or not ENGINE.images(made[target]):
            found = passed(target)
            if not found:
                shrink_cache()
                found = str(candidate.make(load(target))["image"])
                shrink_cache()
            made[target] = found
        return made[target]

    return reference


@pytest.fixture(scope="session")
def miniature(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Miniature]:
    """A checkout with the target ``mini``; see :mod:`tests.miniature`. Images of its targets are removed at the end."""
    from tests.image.small_images import bridge

    with miniatures.checkout(tmp_path_factory.mktemp("miniature"), bridge()) as made:
        made.add("mini")
        yield made
    if not hasattr(request.config, "workerinput"):
        miniatures.remove_images()
