"""What is generated is committed, exact, clean under the linter, and says where it comes from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import render, spec

EXAMPLES = [spec.relative(path.parent) for path in sorted(spec.ROOT.glob("examples/*/image.yaml"))]
ALL = [*spec.targets(), *EXAMPLES]


@pytest.mark.parametrize("target", [None, *EXAMPLES])
def test_committed_files_are_what_the_specs_give(target: str | None) -> None:
    assert render.drift(spec.load(target) if target else None) == [], "run 'make render' and commit"


@pytest.mark.parametrize("target", ALL)
def test_the_image_stage_holds_nothing_but_linked_copies(target: str) -> None:
    last_stage = render.dockerfile(spec.load(target)).rpartition("\nFROM ")[2].splitlines()[1:]
    words = {line.split()[0] for line in last_stage if re.match(r"[A-Z]+ ", line)}
    assert words == {"COPY", "ENV", "ARG", "LABEL", "USER", "ENTRYPOINT", "CMD"}
    assert all(" --link --from=" in line for line in last_stage if line.startswith("COPY"))


@pytest.mark.parametrize("target", ALL)
def test_every_argument_that_is_passed_is_declared_and_used(
    target: str, look_into_base: Callable[[spec.Spec], Path]
) -> None:
    """BuildKit has no rule for a build argument that nothing binds; peers pass hundreds of them."""
    from scripts.plan import make_plan

    loaded = spec.load(target)
    if not loaded.locked:
        loaded = spec.load(str(look_into_base(loaded)))
    text = render.dockerfile(loaded)
    plan = make_plan(loaded, index="default", index_url="", base="base", base_digest="", notes=())
    for name in plan.build_args():
        if name == "SOURCE_DATE_EPOCH":  # BuildKit's own
            continue
        assert re.search(rf"^ARG {name}\b", text, re.M), f"{name} is passed but not declared"
        assert re.search(rf"\$\{{?{name}\b", text), f"{name} is declared but never used"


@pytest.mark.parametrize("target", ALL)
def test_no_secret_and_no_cache_can_stay_in_a_layer(target: str) -> None:
    text = render.dockerfile(spec.load(target))
    assert "/run/secrets" not in text.rpartition("\nFROM ")[2]
    for line in text.splitlines():
        if "SSL_CERT_FILE" in line or "PIP_CERT" in line:
            assert line.startswith("[ ! -s /run/secrets/ca.pem ] || export "), "set for one RUN, never by ENV"
    assert "curl " not in text
    assert ":latest" not in text


def test_a_changed_spec_is_drift(write_spec: Callable[[str], str], spec_text: str) -> None:
    loaded = spec.load(write_spec(spec_text))
    dockerfile = loaded.folder / "Dockerfile"
    assert render.drift(loaded) == [dockerfile]
    dockerfile.write_text(render.dockerfile(loaded), encoding="utf-8")
    assert render.drift(loaded) == []
    dockerfile.write_text(dockerfile.read_text() + "RUN true\n", encoding="utf-8")
    assert render.drift(loaded) == [dockerfile]


@pytest.mark.parametrize("summary", ['with "quotes"', "a $HOME and ${PATH}", "back\\slash", "`x`"])
def test_text_of_a_spec_is_never_code_in_a_dockerfile(
    write_spec: Callable[[str], str], spec_text: str, summary: str
) -> None:
    loaded = spec.load(write_spec(spec_text.replace("A test image", json.dumps(summary))))
    line = next(line for line in render.dockerfile(loaded).splitlines() if "image.description=" in line)
    value = line.strip().removesuffix(" \\").removeprefix('org.opencontainers.image.description="').removesuffix('"')
    assert value.replace("\\$", "$").replace('\\"', '"').replace("\\\\", "\\") == summary
    assert not re.search(r"(?<!\\)\$", value)


def test_bake_describes_every_target_and_no_host() -> None:
    plan = json.loads(render.BAKE_FILE.read_text(encoding="utf-8"))
    assert sorted(plan["target"]) == spec.targets()
    for target in plan["target"].values():
        assert (spec.ROOT / target["dockerfile"]).is_file()
        assert not Path(target["context"]).is_absolute()


def test_rendering_everything_takes_under_two_seconds() -> None:
    """The bar of the peers' review: the full matrix, as a fresh process."""
    command = [sys.executable, "-m", "scripts.render"]
    found = subprocess.run(command, cwd=spec.ROOT, capture_output=True, text=True, timeout=10, check=False)
    assert found.returncode == 0
    assert "up to date" in found.stderr
