"""Images in the containers of platforms that give less: shared memory, memory, IPv6, or a clock that is right."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine import CONTEXT, ENGINE
from tests.image.conftest import Finished
from tests.image.trainer_box import Box, box
from trainyard.common.docker_engine import resource_labels
from trainyard.image import base_image, recipes, smoke_containers, smoke_test
from trainyard.image.smoke_containers import SmokeSandbox
from trainyard.sandbox import containers
from trainyard.sandbox.datasets import digits
from trainyard.spec import model

pytestmark = pytest.mark.concurrent

BuiltImage = Callable[[str], str]

#: Saves two checkpoints as most programs do, and prints what is left of the first when it is started again.
ATOMIC = """
import os
folder = "/smoke/out/"
if os.path.exists(folder + "last"):
    print("found", open(folder + "last").read(), sorted(os.listdir(folder)))
for number in (1, 2):
    with open(folder + "new", "w") as file:
        file.write(f"checkpoint {number}")
    os.replace(folder + "new", folder + "last")
"""


@pytest.fixture
def sandbox(built_image: BuiltImage) -> Iterator[SmokeSandbox]:
    with SmokeSandbox(ENGINE, built_image("tf-cpu"), smoke_containers.files(), ("out",)) as found:
        yield found


@pytest.mark.slow("test_miniature.py, test_image.py")
def test_the_smoke_test_says_in_which_containers_an_image_has_trained(built_image: BuiltImage) -> None:
    facts = smoke_test.smoke(recipes.make(model.load("tf-cpu")), built_image("tf-cpu"), CONTEXT)
    assert facts["restricted"] and facts["killed_while_saving"], facts
    assert (facts["processes"], facts["worker_processes"], facts["notes"]) == (2, 2, [])


def test_a_program_is_killed_at_its_memory_limit_before_a_checkpoint_has_its_name(sandbox: SmokeSandbox) -> None:
    options = smoke_containers.restricted(sandbox)
    first = ATOMIC.replace("(1, 2)", "(1,)")
    assert containers.wait(sandbox.start("python", "-c", first, **options), 60) == 0
    environment = smoke_containers.fill_memory(sandbox, "/smoke/out")
    killed = sandbox.start("python", "-c", ATOMIC.replace("1, 2", "2,"), environment=environment, **options)
    assert smoke_containers.limit_memory(sandbox, killed)
    assert containers.wait(killed, 60) == 137
    assert smoke_containers.out_of_memory(killed), "by the kernel, not by itself"
    again = sandbox.start("python", "-c", ATOMIC, **options)
    assert containers.wait(again, 60) == 0
    assert "found checkpoint 1 ['last', 'new']" in "\n".join(containers.lines_of(again)), "the new one is complete"


def test_a_program_that_renames_no_checkpoint_ends_by_itself(sandbox: SmokeSandbox) -> None:
    script = "open('/smoke/out/last', 'w').write('checkpoint 1')"
    environment = smoke_containers.fill_memory(sandbox, "/smoke/out")
    container = sandbox.start("python", "-c", script, environment=environment, **smoke_containers.restricted(sandbox))
    assert not smoke_containers.limit_memory(sandbox, container)
    assert containers.wait(container, 60) == 0


def test_a_restricted_container_has_an_unknown_user_and_no_ipv6(sandbox: SmokeSandbox) -> None:
    script = (
        "import os, shutil, socket; print(os.getuid(), os.getgid(), shutil.disk_usage('/dev/shm').total >> 20);"
        "socket.create_server(('::1', 0), family=socket.AF_INET6)"
    )
    container = sandbox.start("python", "-c", script, **smoke_containers.restricted(sandbox))
    assert containers.wait(container, 60) == 1
    log = "\n".join(containers.lines_of(container))
    assert "54321 0 64" in log and "OSError" in log, log


@pytest.mark.parametrize("target", ["tf-cpu", pytest.param("xla", marks=pytest.mark.big)])
def test_worker_processes_need_no_more_than_the_default_shared_memory(
    built_image: BuiltImage, docker_run: Callable[..., Finished], target: str
) -> None:
    program = Path(smoke_containers.__file__).with_name("worker_processes.py").read_text(encoding="utf-8")
    flags = smoke_containers.RESTRICTED_FLAGS.split()
    done = docker_run(*flags, "--network=none", built_image(target), "python", "-c", program)
    assert done.returncode == 0 and "2 worker processes delivered" in done.stdout, done.stderr
    if target == "xla":  # Python's own pool falls back to /tmp
        done = docker_run(*flags, "--shm-size=4m", built_image(target), "python", "-c", program)
        assert done.returncode != 0, "the arrays are handed over in /dev/shm"


# --- a clock before the build's time ----------------------------------------------------------------------------------

CLOCK = "libfaketime.so.1"
LIBRARY = "FROM {base}\nRUN apt-get -qq update && apt-get -qq install -y --no-install-recommends libfaketime\n"
TAG = "trainyard-test:faketime"


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with libfaketime, built for the older of the catalogue's Debian releases."""
    base = base_image.resolve(CONTEXT, model.load("xla").base).reference
    command = ["docker", "build", "--quiet", "--provenance=false", f"--tag={TAG}", "-"]
    made = subprocess.run(command, input=LIBRARY.format(base=base), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    folder = tmp_path_factory.mktemp("clock")
    container = ENGINE.client.containers.create(TAG, ["true"], labels=resource_labels("test"))
    stream, _ = container.get_archive("/usr/lib")
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as tar:
        (member,) = (one for one in tar if one.name.endswith(f"/faketime/{CLOCK}"))
        member.name = CLOCK
        tar.extract(member, folder, filter="data")
    container.remove(force=True)
    yield folder
    ENGINE.untag(TAG)


#: 1975: a machine whose clock starts at 1970, before the times of the image's files, too.
CLOCKS = {"before the build": "@2015-06-01 00:00:00", "before the files' times": "@1975-06-01 00:00:00"}

DIGITS = ("--datadir=/data/digits", "--epochs=3", "--seed=3")
TARGETS = {"xla": ("torch.mnist", ("--device=cpu",)), "tf-cpu": ("tf.mnist", ())}


@pytest.fixture(params=["tf-cpu", pytest.param("xla", marks=pytest.mark.big("xla"))])
def timed(
    request: pytest.FixtureRequest, built_image: BuiltImage, clock: Path, tmp_path: Path
) -> Iterator[tuple[Box, str, tuple[str, ...]]]:
    """A container with digits and libfaketime in /data, the trainer that it has, and that trainer's flags."""
    with box(built_image(request.param)) as started:
        started.put(digits.write_idx(tmp_path), "digits")
        started.put(clock, "clock")
        yield started, *TARGETS[request.param]


@pytest.mark.slow("the smoke test of every image, which resumes to the same weights with the right clock")
@pytest.mark.parametrize("when", CLOCKS.values(), ids=CLOCKS)
def test_a_run_resumes_to_the_same_weights_though_the_clock_is_early(
    timed: tuple[Box, str, tuple[str, ...]], when: str
) -> None:
    here, trainer, flags = timed
    early = {"LD_PRELOAD": f"/data/clock/{CLOCK}", "FAKETIME": when}
    whole = here.trainer(trainer, *DIGITS, *flags).learned()
    kept = (*DIGITS, *flags, "--checkpoint-dir=/tmp/kept")
    assert here.trainer(trainer, *kept, "--num-steps=30").learned()["global_step"] == 30
    resumed = here.trainer(trainer, *kept, **early).learned()
    assert resumed["time"] < whole["time"] - 10 * 365 * 86400, "the clock was early"
    assert (resumed["resumed_from"], resumed["weights_sha256"]) == (30, whole["weights_sha256"])


def test_byte_code_of_the_image_is_used_though_the_clock_is_early(timed: tuple[Box, str, tuple[str, ...]]) -> None:
    here, _, _ = timed
    early = {"LD_PRELOAD": f"/data/clock/{CLOCK}", "FAKETIME": CLOCKS["before the build"]}
    done = here.python("import json", PYTHONVERBOSE="1", **early)
    compiled = [line for line in done.lines if line.startswith("# code object from") and line.endswith(".py'")]
    assert "json" in done.output and not compiled, compiled


def test_an_export_of_keras_before_1980_is_one_line(built_image: BuiltImage, clock: Path, tmp_path: Path) -> None:
    """model.keras is a zip file."""
    with box(built_image("tf-cpu")) as here:
        here.put(digits.write_idx(tmp_path), "digits")
        here.put(clock, "clock")
        early = {"LD_PRELOAD": f"/data/clock/{CLOCK}", "FAKETIME": CLOCKS["before the files' times"]}
        ended = here.trainer("tf.mnist", "--datadir=/data/digits", "--epochs=1", "--export-dir=/tmp/model", **early)
    said = [line for line in ended.lines if line.startswith("mnist: ")]
    assert ended.code == 1 and len(said) == 1 and "clock before 1980: set the clock" in said[0], ended.output
    assert "Traceback" not in ended.output
