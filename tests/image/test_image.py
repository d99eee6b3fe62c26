"""What every image does for its users."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.engine import ENGINE
from tests.image import catalogue
from tests.image.conftest import Finished
from trainyard import recipe as recipes
from trainyard.common.settings import state_folder
from trainyard.spec import model, state
from trainyard.spec.naming import FILE_EPOCH

BuiltImage = Callable[[str], str]
Run = Callable[..., Finished]


@pytest.fixture(scope="module", params=catalogue.parameters())
def target(request: pytest.FixtureRequest, built_image: BuiltImage) -> Iterator[str]:
    """Every target in turn; an image that no later test needs is removed before the next is built."""
    name = str(request.param)
    yield name
    catalogue.drop(name)


def test_it_trains_with_one_command(target: str, built_image: BuiltImage, docker_run: Run) -> None:
    found = docker_run(built_image(target), "mnist", "--fake-data", "--fake-images=6000", "--epochs=1")
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout.splitlines()[-1])
    assert summary["status"] == "completed"
    assert summary["global_step"] == 6000 // summary["global_batch"]


def test_it_runs_as_an_unprivileged_user_on_a_read_only_root(
    target: str, built_image: BuiltImage, docker_run: Run
) -> None:
    script = "import os; print(os.getuid(), os.access('/opt', os.W_OK), os.access('/usr/local/bin', os.W_OK))"
    found = docker_run("--read-only", "--cap-drop=ALL", built_image(target), "--", "python", "-c", script)
    assert found.stdout == "1000 False False\n"


def test_any_uid_of_group_0_has_a_home(target: str, built_image: BuiltImage, docker_run: Run) -> None:
    script = "import pathlib; p = pathlib.Path.home() / 'x'; p.write_text('y'); print(p.stat().st_uid)"
    found = docker_run("--user=123456", built_image(target), "--", "python", "-c", script)
    assert (found.returncode, found.stdout) == (0, "123456\n"), found.stderr


def test_init_is_process_1_and_forwards_signals(target: str, built_image: BuiltImage, docker_run: Run) -> None:
    found = docker_run(built_image(target), "--", "cat", "/proc/1/comm")
    assert found.stdout == "tini\n"


def test_importing_the_framework_compiles_nothing(target: str, built_image: BuiltImage, docker_run: Run) -> None:
    """Byte code is in the image: a fresh container that may write it anywhere still writes none of it."""
    module = model.load(target).framework.name
    script = (
        "import importlib.machinery as m; made = []; "
        "m.SourceFileLoader.set_data = lambda self, path, *a, **k: made.append(path); "
        # torch itself writes and imports a module under /tmp: that one cannot be in an image
        f"import {module}; made = [p for p in made if not p.startswith('/tmp/')]; print(len(made), made[:3])"
    )
    environment = ["-e", "PJRT_DEVICE=CPU", "-e", "TF_CPP_MIN_LOG_LEVEL=3"]
    found = docker_run("--user=0", *environment, built_image(target), "--", "python", "-c", script)
    assert found.stdout.splitlines()[-1] == "0 []", found.stderr


def test_its_labels_describe_what_it_was_built_from(target: str, built_image: BuiltImage) -> None:
    image = ENGINE.client.images.get(built_image(target))
    labels, loaded = image.labels, model.load(target)
    assert labels["io.trainyard.target"] == target
    assert labels["io.trainyard.framework"] == f"{loaded.framework.name}=={loaded.version}"
    assert labels["io.trainyard.index"] in ("default", loaded.framework.index)
    assert labels["org.opencontainers.image.base.name"]
    assert labels["org.opencontainers.image.description"] == loaded.summary
    assert f"trainyard:{labels['org.opencontainers.image.version']}" in image.tags, "the immutable tag is the label"


def test_its_users_do_not_say_on_which_day_it_was_built(target: str, built_image: BuiltImage, docker_run: Run) -> None:
    """useradd writes the day into /etc/shadow: the layer of one day would differ from that of the next.

    The base's own users have the day of the base. They have fixed ids; users that are added get ids from 100 to 59999
    (https://www.debian.org/doc/debian-policy/ch-opersys.html#uid-and-gid-classes).
    """
    script = (
        "import json, pwd; days = {line.split(':')[0]: line.split(':')[2] for line in open('/etc/shadow')}; "
        "print(json.dumps({user: day for user, day in days.items() if 100 <= pwd.getpwnam(user).pw_uid < 60000}))"
    )
    found = docker_run("--user=0", built_image(target), "--", "python", "-c", script)
    assert found.returncode == 0, found.stderr
    days = json.loads(found.stdout)
    assert "trainer" in days and set(days.values()) == {str(FILE_EPOCH // 86400)}, days


def test_every_fallback_is_recorded(target: str, built_image: BuiltImage) -> None:
    """If the index or the base of the spec was unreachable, the result names what was used instead."""
    image = ENGINE.client.images.get(built_image(target))
    recipe = recipes.parse(state.require(state_folder() / target, str(image.id), "build")["build"]["recipe"])
    built = recipe.built
    assert built
    fell_back = recipe.index != recipe.framework.index
    assert fell_back == any("come from the default index" in note for note in built.notes)
    bootstrapped = not built.base.startswith(recipe.base.reference)
    assert bootstrapped == any("bootstrapped" in note or "with TRAINYARD_BASE" in note for note in built.notes)


def test_it_passed_everything_under_its_digest(target: str, built_image: BuiltImage) -> None:
    digest = str(ENGINE.client.images.get(built_image(target)).id)
    passed = state.require(state_folder() / target, digest, "build", "verify", "smoke")
    assert passed["smoke"]["accuracy"] >= 97
    assert passed["smoke"]["tpu_states"][:2] == ["CREATING", "CREATING"], "the launcher waited for the TPU"
    assert passed["smoke"]["resumed_from"] > 0
    assert passed["smoke"]["seconds_to_stop"] < 15
