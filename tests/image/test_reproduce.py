"""`make reproduce` with a real engine: it finds the planted differences and no others, and removes what it built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import plans
from tests.engine import ENGINE
from tests.workspaces import write_lock
from trainyard import cli
from trainyard.image import dockerfile, planning
from trainyard.oci import image_store
from trainyard.release import reproduce
from trainyard.spec import model as spec

#: Everything under /out in its own stage, as our template has it, with what `seal` does at its end.
TEXT = """\
ARG BASE
FROM ${BASE} AS framework
RUN mkdir -p /out/opt && echo same >/out/opt/same && ln -s same /out/opt/link
%s
RUN find /out ! -name late -exec touch -hd @315532800 {} +
FROM scratch
COPY --link --from=framework /framework/../out /
"""
PLANTED = (
    "RUN date +%N >/out/opt/now && touch /out/opt/late "
    "&& mkdir /out/opt/x.dist-info && date +%N >/out/opt/x.dist-info/RECORD"
)

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a target with a Dockerfile of the test; its folder."""
    monkeypatch.setattr(dockerfile, "drift", lambda _: [])
    monkeypatch.setattr(dockerfile, "dockerfile", lambda spec, _="": spec.dockerfile().read_text(encoding="utf-8"))

    def target(planted: str) -> str:
        folder = tmp_path / "tiny"
        folder.mkdir()
        (folder / "image.yaml").write_text(
            "summary: tiny\nbase: debian-12\nframework: {name: torch, packages: [torch==2.9.1]}\n"
            "trainers: {package: torch, default: mnist}\nbudget: {size: 1 GB}\n"
            "smoke: {trainer: mnist, accuracy: 0.9}\n",
            encoding="utf-8",
        )
        write_lock(folder, framework="torch==2.9.1", requirements="")
        (folder / "Dockerfile").write_text(TEXT % planted, encoding="utf-8")
        return str(folder)

    return target


def leftovers() -> list[str]:
    return [tag for image in ENGINE.images() for tag in image.tags if tag.startswith("trainyard:tiny")]


def test_two_equal_builds_have_no_differences(write: Write) -> None:
    builds, found = reproduce.reproduce(planning.plan_for(spec.load(write(""))))
    assert found == [] and builds[0].digest == builds[1].digest
    assert leftovers() == []


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_layers_are_compressed_as_configured(compression: str, write: Write) -> None:
    """zstd by default; gzip for registries and engines without zstd."""
    target, reference = spec.load(write("")), "trainyard:tiny-packed"
    plans.built(target, compression=compression, name=reference)
    try:
        documents = [json.loads(text) for text in image_store.documents(ENGINE, reference).values()]
    finally:
        ENGINE.untag(reference)
    kinds = [layer["mediaType"] for one in documents for layer in one.get("layers", [])]
    assert kinds == [f"application/vnd.oci.image.layer.v1.tar+{compression}"]


def test_planted_differences_are_found_with_their_reason_and_no_others(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = ENGINE.cached().keys()
    assert cli.run(["reproduce", write(PLANTED), "--json"]) == 1
    out, err = capsys.readouterr()
    assert "reproduce: tiny is not reproducible: 3 differences in framework" in err
    result = json.loads(out)
    assert result["same"] is False and len(set(result["digests"])) == 2
    found = {one["path"]: one for one in result["differences"]}
    assert set(found) == {"opt/now", "opt/late", "opt/x.dist-info/RECORD"}
    assert [reason.split(":")[0] for reason in found["opt/now"]["reasons"]] == ["content"]
    assert [reason.split(":")[0] for reason in found["opt/late"]["reasons"]] == ["mtime"]
    assert "list of installed packages" in found["opt/x.dist-info/RECORD"]["cause"]
    assert leftovers() == []
    # The builds left nothing in the cache either.
    made = ENGINE.cached().keys() - before
    records = ENGINE.buildx("du", "--verbose").split("\n\n")
    assert not [one for one in records if "date +%N" in one and any(identity in one for identity in made)]
