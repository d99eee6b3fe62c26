"""The index that a build installs its framework from, and its credentials."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.package_index import PackageIndex, wheel

from trainyard.common.errors import StepFailed
from trainyard.image import package_index, planning, resolver
from trainyard.spec import model
from trainyard.spec.lock import Lock, Locked

VARIABLE = "TRAINYARD_INDEX_PYTORCH_CPU"


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    package_index.reachable.cache_clear()
    yield
    package_index.reachable.cache_clear()


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    """An index that asks for a password, which an address has percent-encoded."""
    with PackageIndex(("me", "hunter2/+")) as listener:
        listener.add(wheel("simple", "1"))  # the page of /simple/simple/
        yield listener


def address(index: PackageIndex, userinfo: str = "me:hunter2%2F+@") -> str:
    return f"http://{userinfo}{index.host}/simple/simple"


def test_an_index_is_asked_with_the_credentials_of_its_address(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, address(index))
    assert package_index.choose(model.load("cpu")) == ("pytorch-cpu", None)
    assert (index.seen, index.refused) == (["/simple/simple/"], [])


@pytest.mark.parametrize("userinfo", ["me:hunter2@", "hunter2@", "me:hunter2/@", "me:p@hunter2@"])
def test_the_reason_of_a_fallback_shows_no_password(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, userinfo: str
) -> None:
    monkeypatch.setenv(VARIABLE, address(index, userinfo))
    found, reason = package_index.choose(model.load("cpu"))
    assert (found, reason) == ("default", f"{address(index, '')} does not answer: HTTP 401")


@pytest.mark.parametrize("given", ["x", "http://127.0.0.1:port", "http://[::1", "http://127.0.0.1:1/a b"])
def test_an_address_that_is_none_is_a_reason(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(VARIABLE, given)
    found, reason = package_index.choose(model.load("cpu"))
    assert found == "default" and reason and reason.startswith(f"{given} does not answer: ")


def test_the_address_that_a_build_records_has_no_password(
    index: PackageIndex, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, address(index))
    spec = model.load("cpu")
    spec = spec.with_lock(
        Lock(spec.python_version, {name: {spec.arch: Locked()} for name in ("default", "pytorch-cpu")})
    )
    fake_engine.digest_at_registry = lambda _: "sha256:1"
    assert planning._reachable(spec)[1].index_url == address(index, "")


def test_uv_locks_with_the_credentials_and_its_errors_show_none(
    index: PackageIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "")
    where = address(index).removesuffix("/simple")
    index.add(wheel("tool", "1"))
    own = {"index": [{"name": "own", "url": where, "explicit": True}]}

    def entries(name: str) -> dict[str, str]:
        options = own | {"sources": {name: {"index": "own"}}}
        return resolver.Project("x", [name], "3.11", offline=False, options=options).entries()

    assert entries("tool").keys() == {"tool"} and "hunter2" not in str(entries("tool"))
    with pytest.raises(StepFailed) as error:
        entries("absent")
    assert "hunter2" not in str(error.value)
