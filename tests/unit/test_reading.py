"""A user's file that would hang a command, fill the memory or end it with a traceback is refused in one line."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainyard.common.errors import UserError
from trainyard.common.settings import ROOT
from trainyard.image import dockerfile
from trainyard.spec import model, pylock, yaml_source
from trainyard.workspace import (
    code_files,
    dependency_tables,
    dockerignore,
    init,
    python_projects,
    python_survey,
    requirement_choice,
    requirements_txt,
)
from trainyard.workspace.lines import Found
from trainyard_jobs.check import files
from trainyard_jobs.schema import job_file

Reader = Callable[[Path], Any]

#: Readers of a user's YAML; `rehearse`, `check-job` and `trainyard job` share the second.
YAML: dict[str, Reader] = {
    "trainyard.yaml": model._load_repository,
    "job.yaml": job_file.load,
    "environment.yml": yaml_source.read,
}
OTHERS: dict[str, Reader] = {
    "job.json": job_file.load,
    "pyproject.toml": dependency_tables.toml,
    "uv.lock": lambda path: dependency_tables.read_uv_lock(path, Found(), fits=lambda marker: True),
    "requirements.txt": lambda path: requirements_txt.read(path, Found()),
    ".dockerignore": lambda path: dockerignore.read(path.parent),
}


def refused(reader: Reader, path: Path) -> str:
    with pytest.raises(UserError) as error:
        reader(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    return str(error.value)


def aliases(levels: int) -> str:
    """Values that double with each level."""
    return "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, levels))


def merges(levels: int) -> str:
    """The same with merge keys."""
    return "a0: &a0 {x: y}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, levels))


@pytest.mark.parametrize("name", YAML)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(aliases(60), "more than 100,000 values", id="aliases"),
        pytest.param(merges(60), "more than 100,000 values", id="merge keys"),
        pytest.param("a: 1\nb: &b [*b]\n", ":2: an alias for a value that contains it", id="an alias of itself"),
        pytest.param("a: 1\nb: &b {<<: *b}\n", ":2: an alias for a value that contains it", id="a merge of itself"),
        pytest.param(f"a: 1\nb: {'9' * 5000}\n", ":2: a number of 5000 digits", id="a number"),
        pytest.param("a: 1\nb: 0x" + "f" * 5000, ":2: a number of 5002 digits", id="a hexadecimal number"),
        pytest.param('a: 1\nb: "\\ud800"\n', ":2: half of a surrogate pair", id="half a character"),
        pytest.param('a: 1\n"\\udc00": b\n', ":2: half of a surrogate pair", id="half a character as a key"),
        pytest.param(f"a: 1\nb: {'[' * 150}{']' * 150}\n", ":2: values nested more than 100 deep", id="depth"),
        pytest.param("a: " + "[" * 400 + "]" * 400, "nested", id="more depth"),
        pytest.param(
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 150)),
            "values nested more than 100 deep",
            id="depth by aliases",
        ),
        pytest.param("a: 2020-13-45\n", "", id="no date"),
    ],
)
def test_yaml_that_multiplies_or_is_no_text_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert said in refused(YAML[name], path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.json", '\t{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        ("job.json", '\t{"a": "\\ud800"}', "surrogate"),
        ("job.json", '\t{"a": ' + "[" * 100_000, "nested too deeply"),
        ("job.json", '{"a": ' + "9" * 5000 + "}", "5000 digits"),
        ("pyproject.toml", "a = " + "9" * 5000, "thousands of digits"),
        ("pyproject.toml", "a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("pyproject.toml", 'a = "\\ud800"', "pyproject.toml:1: not valid TOML"),
    ],
)
def test_json_and_toml_that_python_cannot_hold_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert said in refused(OTHERS[name], path)


def test_aliases_merge_keys_and_large_files_are_read(tmp_path: Path) -> None:
    text = "base: &base {a: [1, 2]}\nother: {<<: *base, b: *base}\nlist: [*base, *base]\n"
    assert yaml_source.plain(yaml_source.parse(text, tmp_path / "a.yaml")[0])["other"]["b"] == {"a": [1, 2]}
    large = "a:\n" + "".join(f"- {{name: x{number}, value: {number}}}\n" for number in range(500))
    assert len(yaml_source.parse(large, tmp_path / "a.yaml")[0]["a"]) == 500


def test_a_character_that_json_escapes_as_a_pair_is_one(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({"displayName": "🚂", "workerPoolSpecs": []}), encoding="utf-8")
    assert "\\ud83d\\ude82" in path.read_text(encoding="utf-8")
    assert job_file.load(path).documents[0]["displayName"] == "🚂"


@pytest.mark.parametrize("name", [*YAML, *OTHERS])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    assert refused((YAML | OTHERS)[name], path).endswith(": not a regular file")


@pytest.mark.parametrize("name", [*YAML, *OTHERS])
def test_a_folder_and_a_device_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert refused((YAML | OTHERS)[name], tmp_path / name).endswith(": Is a directory")
    (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to("/dev/zero")
    assert refused((YAML | OTHERS)[name], tmp_path / name).endswith(": not a regular file")


@pytest.mark.parametrize("name", [*YAML, *OTHERS])
def test_a_file_of_gigabytes_is_not_read(tmp_path: Path, name: str) -> None:
    readers = YAML | OTHERS
    with (tmp_path / name).open("wb") as file:
        file.truncate(3 * 10**9)
    said = refused(readers[name], tmp_path / name)
    assert said.endswith(f"{name}: more than 10.0 MB, too much for a file of text: name another one")


ODD_REQUIREMENTS = ["a ; " + "(" * 5000, "a ; " + "(" * 300 + "os_name == 'x'" + ")" * 300, "a==" + "9" * 5000]


@pytest.mark.parametrize("text", ODD_REQUIREMENTS)
@pytest.mark.parametrize("file", ["requirements.txt", "pyproject.toml", "trainyard.yaml", "setup.cfg"])
def test_any_requirement_is_read_or_refused(
    tmp_path: Path,
    file: str,
    text: str,
    trainyard: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = "requirements: [" + json.dumps(text) + "]\n" if file == "trainyard.yaml" else ""
    named = f"requirements: {file}\n" if file in ("requirements.txt", "pyproject.toml") else named
    Path("trainyard.yaml").write_text(f"extends: tf-cpu\nrun: python train.py\n{named}")
    Path("train.py").touch()
    texts = {
        "requirements.txt": text,
        "pyproject.toml": f'[project]\nname = "a"\nversion = "1"\ndependencies = [{json.dumps(text)}]\n',
        "setup.cfg": f"[metadata]\nname = a\nversion = 1\n[options]\ninstall_requires =\n    {text}\n",
    }
    if file in texts:
        Path(file).write_text(texts[file])
    status, out, err = trainyard("check")
    assert status in (0, 1, 2) and "Traceback" not in err
    assert len(out + err) < 1500


def test_a_project_whose_file_is_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pyproject.toml")
    assert refused(python_projects.read, tmp_path).endswith("pyproject.toml: not a regular file")


def test_no_pipe_of_a_repository_is_waited_for(tmp_path: Path) -> None:
    for name in (".gitignore", "README.md", "train.sh", "a.py"):
        os.mkfifo(tmp_path / name)
    assert code_files.below(tmp_path) == [".gitignore", "README.md", "a.py", "train.sh"], "its .gitignore says nothing"
    assert python_survey.read(tmp_path / "a.py", "a.py") is None
    sources = python_survey.Sources({})
    refused(lambda path: init.candidates(path, ["train.sh"], sources, {}, {}), tmp_path)
    os.mkfifo(tmp_path / pylock.REPOSITORY_FILE)
    refusal = refused(lambda path: pylock.read(path / pylock.REPOSITORY_FILE, "trainyard lock"), tmp_path)
    assert refusal.endswith("pylock.trainyard.toml: not a regular file")


def test_an_import_is_looked_up_once_however_many_programs_share_its_file(tmp_path: Path) -> None:
    class Counting(python_survey.Sources):
        asked = 0

        def resolve(self, statement: python_survey.Import, source: python_survey.Source) -> str | None:
            self.asked += 1
            return super().resolve(statement, source)

    parts = {f"pkg/part{number}.py": "import numpy\nimport torch\n" for number in range(20)}
    every = "".join(f"import pkg.part{number}\n" for number in range(20))
    files = {"pkg/__init__.py": every, **parts, **{f"train{number}.py": "import pkg\n" for number in range(20)}}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sources = Counting({name: tmp_path / name for name in files})
    for number in range(20):
        assert len(sources.closure(f"train{number}.py")) == 22
    assert sources.asked == 20 + 20 + 20 * 2


@pytest.mark.parametrize("text", ["a" + ".b" * 3000, "if a:\n b = 1\nel" * 500 + "se:\n b = 1\n"])
def test_python_that_is_nested_deeply_does_not_end_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text, encoding="utf-8")
    python_survey.read(tmp_path / "a.py", "a.py")


@pytest.mark.parametrize("text", ["dependencies: 5", "dependencies: text", "dependencies: {a: b}", "dependencies: [5]"])
def test_a_conda_environment_without_a_list_has_no_packages(tmp_path: Path, text: str) -> None:
    (tmp_path / "environment.yml").write_text(text, encoding="utf-8")
    assert requirement_choice.conda(tmp_path / "environment.yml") is None


def test_a_pipe_in_a_folder_of_jobs_does_not_stop_the_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    shutil.copy(ROOT / "examples" / "jobs" / "custom-job.yaml", tmp_path / "job.yaml")
    found, _ = files.check_files([tmp_path], functools.partial(files.check_file, offline=True))
    assert [(one.path.name, bool(one.job), one.error[-18:]) for one in found] == [
        ("job.yaml", True, ""),
        ("pipe.yaml", False, "not a regular file"),
    ]


def test_a_job_comes_from_a_pipe_of_the_shell() -> None:
    """As with `check-job <(kustomize build)` and `kustomize build | trainyard check-job /dev/stdin`."""
    text = (ROOT / "examples" / "jobs" / "custom-job.yaml").read_text(encoding="utf-8")
    script = (
        "from pathlib import Path; from trainyard_jobs.schema import job_file;"
        "print(job_file.load(Path('/dev/stdin')).kind)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr) == ("custom-job\n", "")


# --- specs and Dockerfiles ------------------------------------------------------------------------------------------

WriteSpec = Callable[[str], str]

#: A value with a line that would be another instruction of the Dockerfile.
INJECTED = r'"a\nUSER 0\nb"'


@pytest.fixture
def write_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "trainyard.yaml"
        path.write_text(f"extends: cpu\n{text}", encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (f"summary: {INJECTED}", "2: summary"),
        (f"environment:\n  A: {INJECTED}", "3: environment.A"),
        (f"build:\n  sources: [a]\n  environment: {{A: {INJECTED}}}", "4: build.environment.A"),
        (r'summary: "a\0"', "2: summary"),
        (r'summary: "a\rb"', "2: summary"),
        ("summary: |\n  a\n  USER 0\n", "2: summary"),
        (r'requirements: "a\0"', "2: requirements.file"),
        (r'code: ["a\0"]', "2: code.0"),
    ],
)
def test_a_value_of_a_spec_is_one_line(write_workspace: Callable[[str], Path], text: str, where: str) -> None:
    path = write_workspace(text + "\n")
    assert f"trainyard.yaml:{where}: it has a line break or a NUL" in refused(YAML["trainyard.yaml"], path)


def test_the_line_break_at_the_end_of_a_block_is_no_part_of_a_value(write_workspace: Callable[[str], Path]) -> None:
    spec = model._load_repository(write_workspace("summary: |\n  one line\nenvironment:\n  A: >\n    x\n    y\n"))
    assert (spec.summary, spec.environment["A"]) == ("one line", "x y")


def test_neither_a_summary_nor_a_folder_adds_an_instruction(
    write_locked_spec: WriteSpec, spec_text: str, tmp_path: Path
) -> None:
    usual = model.load(write_locked_spec(spec_text))
    instructions = len([line for line in dockerfile.dockerfile(usual).splitlines() if not line.startswith("#")])
    odd = tmp_path / "odd\nRUN true\n#"
    (tmp_path / "mine").rename(odd)
    (odd / "mine").mkdir()
    for file in odd.glob("*.*"):
        file.rename(odd / "mine" / file.name)
    text = dockerfile.dockerfile(model.load(str(odd / "mine")))
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == instructions
    assert "odd\\nRUN true\\n#" in text
    image = odd / "mine" / "image.yaml"
    image.write_text(spec_text.replace("A test image", INJECTED), encoding="utf-8")
    assert ": summary: it has a line break" in refused(lambda path: model.load(str(path)), odd / "mine")


@pytest.mark.parametrize("name", ["g++", "libstdc++6", "libgetfem5++", "python3.11", "ffmpeg"])
def test_names_of_packages_are_taken(write_workspace: Callable[[str], Path], name: str) -> None:
    assert model._load_repository(write_workspace(f"system: [{name}]\n")).system[-1] == name


@pytest.mark.parametrize("key", ["system", "build"])
def test_a_package_that_apt_would_remove_is_refused(write_workspace: Callable[[str], Path], key: str) -> None:
    text = "system: [tini-]" if key == "system" else "build: {sources: [a], packages: [tini-]}"
    said = refused(YAML["trainyard.yaml"], write_workspace(text + "\n"))
    assert said.endswith(": apt-get removes tini for 'tini-': write 'tini'")


@pytest.mark.parametrize("size", ["9" * 5000 + " GB", "9" * 400 + " GB", "9" * 16 + " B"])
def test_a_size_that_no_image_has_is_refused(write_workspace: Callable[[str], Path], size: str) -> None:
    said = refused(YAML["trainyard.yaml"], write_workspace(f"budget: {{size: '{size}'}}\n"))
    assert "trainyard.yaml:2: budget.size: '9999" in said and "is not a size" in said
