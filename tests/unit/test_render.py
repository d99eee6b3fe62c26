"""Generated files are committed and up to date, and contain what a Dockerfile should and nothing else."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import cpu_time, locks, plans

from trainyard import cli, recipe
from trainyard.common.settings import ROOT
from trainyard.image import dockerfile as render
from trainyard.image import recipes
from trainyard.project import generated
from trainyard.spec import model, naming
from trainyard.spec.catalog import bases
from trainyard.spec.lock import DEFAULT, Lock

EXAMPLES = [model.relative(path.parent) for path in sorted(ROOT.glob("examples/*/image.yaml"))]
ALL = [*model.targets(), *EXAMPLES]

#: The programs of the steps of Dockerfiles, and those that run code of packages.
STEPS = ROOT / "templates" / "steps"
PROGRAMS = sorted(path for path in STEPS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
RUN_CODE = {"build_sources.sh", "compiled.sh", "extensions.sh"}


def steps(text: str) -> list[str]:
    """The RUN instructions of a Dockerfile, without here-documents."""
    text = re.sub(r"(<<'([A-Z]+)'.*\n)(?s:.*?)\n\2\n", r"\1", text)
    return [re.sub(r"\\\n *", "", step) for step in re.findall(r"(?m)^RUN ((?:.*\\\n)*.*)$", text)]


def mounted(step: str) -> dict[str, str]:
    """The path of each program that a step mounts, below templates/steps -> the path in the step."""
    return dict(re.findall(r"--mount=from=steps,source=(\S+),target=(\S+)", step))


@pytest.mark.parametrize("target", [None, *EXAMPLES])
def test_committed_files_are_what_the_specs_give(target: str | None) -> None:
    assert generated.drift(cli.trainyard, model.load(target) if target else None) == [], (
        "run 'trainyard dev render' and commit"
    )


@pytest.mark.parametrize("target", ALL)
def test_the_image_stage_holds_nothing_but_linked_copies(target: str) -> None:
    last_stage = render.dockerfile(model.load(target)).rpartition("\nFROM ")[2].splitlines()[1:]
    words = {line.split()[0] for line in last_stage if re.match(r"[A-Z]+ ", line)}
    assert words == {"COPY", "ENV", "ARG", "LABEL", "USER", "ENTRYPOINT", "CMD"}
    assert all(" --link --from=" in line for line in last_stage if line.startswith("COPY"))


def test_the_content_hash_is_that_of_the_files_wherever_they_are(tmp_path: Path) -> None:
    """It is in the immutable tag: the same image must have the same tag."""
    copied, elsewhere = tmp_path / "tf-cpu", tmp_path / "elsewhere" / "tf-cpu"
    for folder in (copied, elsewhere):
        shutil.copytree(model.load("tf-cpu").folder, folder)
    before, same = recipes.make(model.load(str(copied))), recipes.make(model.load(str(elsewhere)))
    assert {f"templates/steps/{path.relative_to(STEPS)}" for path in PROGRAMS} <= set(before.inputs)
    assert before.content_hash("base") == same.content_hash("base") != before.content_hash("another base")
    of_catalog = recipes.make(model.load("tf-cpu"))
    assert of_catalog.model_copy(update={"source": before.source}) == before, "no other field says where it is"
    assert not list(recipe.differences(before, of_catalog)), "so that an image is verified against a copy of its target"
    locked, arm64 = (model.load(str(copied), arch).locked() for arch in ("amd64", "arm64"))
    longer = locks.locked(*locked.pins, locks.pin("more==1", "", 5_000))
    locks.write(copied, Lock("3.13", {DEFAULT: {"amd64": longer, "arm64": arm64}}))
    after = recipes.make(model.load(str(copied)))
    assert after.content_hash("base") != before.content_hash("base")
    assert [name for name in after.inputs if after.inputs[name] != before.inputs[name]] == ["pylock.toml"]


@pytest.mark.parametrize("target", ALL)
def test_every_argument_that_is_passed_is_declared_and_used(
    target: str, inspect_base: Callable[[model.Spec], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """BuildKit does not warn about a build argument that no ARG declares."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    loaded = model.load(target)
    if not loaded.version_known:
        loaded = model.load(str(inspect_base(loaded)))
    text = render.dockerfile(loaded)
    for name in plans.plan(loaded).arguments:
        if name == "SOURCE_DATE_EPOCH":  # BuildKit's own
            continue
        assert re.search(rf"^ARG (?:.* )?{name}\b", text, re.M), f"{name} is passed but not declared"
        assert re.search(rf"\$\{{?{name}\b", text), f"{name} is declared but never used"


@pytest.mark.parametrize("target", ALL)
def test_no_secret_and_no_cache_can_stay_in_a_layer(target: str) -> None:
    text = render.dockerfile(model.load(target))
    assert "type=secret" not in text.rpartition("\nFROM ")[2]
    assert "CERT" not in text and "curl " not in text and ":latest" not in text


def test_programs_set_certificates_for_their_process_alone() -> None:
    lines = [line.strip() for path in PROGRAMS for line in path.read_text(encoding="utf-8").splitlines()]
    set_ = [line for line in lines if "SSL_CERT_FILE" in line or "PIP_CERT" in line]
    assert len(set_) == 2 and all(line.startswith("[ ! -s /run/secrets/ca ] || export ") for line in set_)


@pytest.mark.parametrize("target", ALL)
def test_steps_that_run_code_of_packages_have_no_network_cache_or_secret(target: str) -> None:
    for step in steps(render.dockerfile(model.load(target))):
        assert "id=uv" not in step
        if RUN_CODE & {Path(program).name for program in mounted(step)}:
            assert step.startswith("--network=none ") and "type=secret" not in step and "type=cache" not in step


def test_all_other_programs_build_nothing() -> None:
    for path in PROGRAMS:
        text = re.sub(r"\\\n *", "", path.read_text(encoding="utf-8"))
        assert ("uv build" in text or "--no-build-isolation" in text) == (path.name in RUN_CODE), path
        for line in text.splitlines():
            if "pip install" in line and not line.startswith(("#", "    return")) and path.name not in RUN_CODE:
                assert "--no-build " in line or ('"${options[@]}"' in line and "(--only-binary :all: " in text), line


@pytest.mark.parametrize("target", ALL)
def test_files_of_the_build_context_get_modes_that_do_not_depend_on_the_checkout(target: str) -> None:
    """They reach an image below /opt/trainyard alone, whose modes `seal` sets, or `chmod` after they were moved."""
    text = render.dockerfile(model.load(target))
    copies = [line.split() for line in text.splitlines() if re.match(r"COPY (?!--link )", line)]
    for words in copies:
        assert "--chmod=" in " ".join(words) or words[-1].startswith("/out/opt/trainyard/"), words
    assert "chmod -R u=rwX,go=rX /out/opt/trainyard" in (STEPS / "wheels" / "seal.sh").read_text(encoding="utf-8")
    moved = [line for line in text.splitlines() if " mv /out/opt/trainyard/" in line]
    assert len(moved) == 1 and "chmod 755 /out/usr/local/bin/launch && /steps/seal.sh" in text


@pytest.mark.parametrize("target", ALL)
def test_a_dockerfile_has_at_most_200_lines_besides_its_pins(target: str) -> None:
    for one in model.each_platform(model.load(target)):
        for path, text in render.rendered(one).items():
            others = re.sub(r"(?s)<<'LOCKS'\n.*?\nLOCKS\n", "\n", text).splitlines()
            others = [line for line in others if not re.search(r"==\S+ \\$|^    --hash=", line)]
            assert path == render.BAKE_FILE or len(others) <= 200, path


@pytest.mark.parametrize("target", ALL)
def test_a_step_mounts_the_programs_that_it_runs_and_no_others(target: str) -> None:
    """BuildKit runs a step again if what it mounts has changed."""
    for step in steps(render.dockerfile(model.load(target))):
        programs = mounted(step)
        for source in programs:
            assert (STEPS / source).exists() or (model.IMAGES / source).suffix == ".lock", source
        runs = set(re.findall(r"(?<!target=)/(?:steps|tmp)/[\w/]+\.(?:sh|py)\b", step))
        sourced = {"/tmp/apt.sh"} if runs & {"/tmp/system.sh", "/tmp/compiler.sh"} else set()
        files = {path for path in programs.values() if path.endswith((".sh", ".py"))}
        assert files - runs == sourced, step
        folders = [path for path in programs.values() if "." not in path]
        for program in runs - files:
            assert any(program.startswith(f"{folder}/") for folder in folders), step


def test_every_program_is_mounted_or_copied_by_a_step() -> None:
    text = (ROOT / "templates" / "Dockerfile.j2").read_text(encoding="utf-8")
    for path in PROGRAMS:
        top = path.relative_to(STEPS)
        folder = f"program('{top.parts[0]}')" if top.parts[0] != "wheels" else "source=wheels,"
        assert top.as_posix() in text or folder in text, path


def test_times_of_files_are_those_that_verify_expects() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PROGRAMS]
    assert {number for text in texts for number in re.findall(r"\b\d{9}\b", text)} == {str(naming.FILE_EPOCH)}


def test_a_changed_spec_is_drift(write_locked_spec: Callable[[str], str], spec_text: str) -> None:
    loaded = model.load(write_locked_spec(spec_text))
    dockerfile = loaded.folder / "Dockerfile"
    assert render.drift(loaded) == [dockerfile]
    dockerfile.write_text(render.dockerfile(loaded), encoding="utf-8")
    assert render.drift(loaded) == []
    dockerfile.write_text(dockerfile.read_text() + "RUN true\n", encoding="utf-8")
    assert render.drift(loaded) == [dockerfile]


@pytest.mark.parametrize("summary", ['with "quotes"', "a $HOME and ${PATH}", "back\\slash", "`x`"])
def test_text_of_a_spec_is_not_expanded_in_a_dockerfile(
    write_locked_spec: Callable[[str], str], spec_text: str, summary: str
) -> None:
    loaded = model.load(write_locked_spec(spec_text.replace("A test image", json.dumps(summary))))
    (value,) = re.findall(r'image\.description="((?:\\.|[^"\\])*)"', render.dockerfile(loaded))
    assert value.replace("\\$", "$").replace('\\"', '"').replace("\\\\", "\\") == summary
    assert not re.search(r"(?<!\\)\$", value)


@pytest.mark.parametrize("target", ALL)
def test_the_working_directory_makes_no_layer_unless_the_base_holds_the_framework(target: str) -> None:
    """The base's configuration has it: WORKDIR makes an empty layer, with which GKE streams no image."""
    loaded = model.load(target)
    lines = [line for line in render.dockerfile(loaded).splitlines() if line.startswith("WORKDIR ")]
    assert lines == (["WORKDIR /workspace"] if loaded.framework_in_base else [])


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("stage", ["common", "trainers", "launcher"])
def test_layers_of_all_images_have_the_byte_code_of_each_shared_base(target: str, stage: str) -> None:
    """Their stage is on one base, and has the Python of the others mounted."""
    loaded = model.load(target)
    text = render.dockerfile(loaded)
    below, lines = re.findall(rf"\nFROM (\S+) AS {stage}\n(.*?)\n(?:\n|FROM )", text, re.DOTALL)[0]
    mounted = re.findall(r"from=(\S+),target=/pythons/", lines)
    shared = [name for name, base in bases().items() if base.shared]
    own = f"python-{loaded.base}" if loaded.base in shared else ""
    assert sorted([own if below == "tools" else below, *mounted]) == [f"python-{base}" for base in shared]


@pytest.mark.parametrize(
    ("base", "libraries"), [("debian-12", ["libpython3.11"]), ("debian-13", ["libpython3.13"]), ("python-3.12", [])]
)
def test_the_library_of_python_is_that_of_the_base(base: str, libraries: list[str]) -> None:
    """torch_xla links to it; a Python that was compiled brings it."""
    assert model.load("xla").model_copy(update={"base": base}).libraries == libraries


def test_each_pair_of_locks_has_a_dockerfile(write_locked_spec: Callable[[str], str], spec_text: str) -> None:
    """Only the stage whose wheel may come from the other index differs, and its lock."""
    torch = spec_text.replace("name: tensorflow", "name: torch").replace("tensorflow-cpu==2.21.0", "torch==2.15.0")
    torch = torch.replace("packages: [torch==2.15.0]", "packages: [torch==2.15.0]\n  index: pytorch-cpu")
    folder = Path(write_locked_spec(torch.replace("[tf]", "[torch]").replace("package: tf", "package: torch")))
    loaded = model.load(str(folder))
    assert list(render.rendered(loaded)) == [folder / "Dockerfile"]
    requirement = locks.pin("a==1", "", 5_000, ["0" * 64])
    of_index = {
        DEFAULT: locks.pin("torch==2.15.0", "framework", 500_000_000),
        "pytorch-cpu": locks.pin("torch==2.15.0+cpu", "framework", 200_000_000),
    }
    indexes = {index: {"amd64": locks.locked(pin, requirement)} for index, pin in of_index.items()}
    locks.write(folder, Lock("3.11", indexes))
    loaded = model.load(str(folder))
    default, cpu = render.rendered(loaded).items()
    assert (default[0].name, cpu[0].name) == ("Dockerfile", "Dockerfile.pytorch-cpu")
    assert f"-f {folder}/Dockerfile.pytorch-cpu " in cpu[1] and f"-f {folder}/Dockerfile " in default[1]

    def stages(text: str) -> dict[str, str]:
        return {
            one.splitlines()[0].split()[-1]: one for one in text.split("\nFROM ")[1:] if " AS " in one.splitlines()[0]
        }

    before, after = stages(default[1]), stages(cpu[1])
    assert {name for name in before if before[name] != after[name]} == {"wheel-torch"}
    assert "ARG INDEX_URL=\n" in after["wheel-torch"] and "INDEX_URL=" not in default[1]
    assert "--mount=type=secret,id=index " in after["wheel-torch"] and "id=index" not in default[1]
    assert " torch==2.15.0+cpu \\\n" in after["wheel-torch"]


def test_bake_describes_every_target_and_no_host() -> None:
    plan = json.loads(render.BAKE_FILE.read_text(encoding="utf-8"))
    expected = [one.bake_name for spec in model.catalogue() for one in model.each_platform(spec)]
    assert sorted(plan["target"]) == sorted(expected)
    assert plan["group"]["default"]["targets"] == [name.replace(".", "_") for name in model.targets()]
    for target in plan["target"].values():
        assert (ROOT / target["dockerfile"]).is_file()
        assert not Path(target["context"]).is_absolute()


def test_rendering_everything_takes_less_than_25_reference_loops_of_cpu_time() -> None:
    """All files, in a new process: 1.2 s (2026-11), of a loop that takes 0.2 s. Other work slows both."""
    command = [sys.executable, "-m", "trainyard", "render"]
    loop = cpu_time.reference_loop(cpu_time.STEPS // 10)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert found.returncode == 0
    assert "up to date" in found.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 25 * loop


def test_the_dockerfile_of_a_target_is_printed_alone(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = trainyard("render", "tf-cpu", "--stdout")
    assert (status, err) == (0, "")
    assert out == (model.IMAGES / "tf-cpu" / "Dockerfile").read_text(encoding="utf-8")


def test_a_dockerfile_to_print_needs_a_target(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = trainyard("render", "--stdout")
    assert (status, out) == (2, "") and "no target given" in err


def test_rendering_a_folder_writes_its_dockerfile_once(
    write_locked_spec: Callable[[str], str], spec_text: str, trainyard: Callable[..., tuple[int, str, str]]
) -> None:
    folder = Path(write_locked_spec(spec_text))
    status, out, _ = trainyard("render", str(folder), "--json")
    assert status == 0 and json.loads(out) == {"written": [str(folder / "Dockerfile")]}
    assert trainyard("render", str(folder), "--json")[1] == '{\n  "written": []\n}\n'
