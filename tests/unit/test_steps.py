"""templates/steps: what the programs that Dockerfiles mount do, with their folders below a folder of the test."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainyard.common.settings import ROOT
from trainyard.spec import naming

STEPS = ROOT / "templates" / "steps"
SITE = "opt/venv/lib/python3.11/site-packages"

#: Folders of a step that are below the folder of the test.
PLACES = (
    "out",
    "built",
    "sources",
    "stages",
    "image",
    "wheels",
    "pythons",
    "opt",
    "run/secrets",
    "etc/bash.bashrc",
)

#: Writes its arguments to a file, each call in a line, and the file that -r names.
FAKE = """#!/bin/bash
echo "$(basename "$0") $*" >>{calls}
while [ $# -gt 0 ]; do
  [ "$1" != -r ] || cat "$2" >>{calls}
  shift
done
"""


class Step:
    """A folder for the root of a step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        for name in ("steps", "bin", "run/secrets"):
            (folder / name).mkdir(parents=True)
        for path in STEPS.rglob("*"):
            if path.is_file() and path.suffix in (".sh", ".py"):
                text = path.read_text(encoding="utf-8")
                for place in PLACES:
                    text = re.sub(rf"(?<![\w.$}}/-])/{place}\b", f"{folder}/{place}", text)
                copy = folder / "steps" / path.relative_to(STEPS)
                copy.parent.mkdir(exist_ok=True)
                text = text.replace("#!/usr/bin/python3", f"#!{sys.executable}").replace('["/"]', f'["{folder}"]')
                copy.write_text(text, encoding="utf-8")
                copy.chmod(0o755)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def fake(self, *programs: str, text: str = FAKE) -> None:
        for name in programs:
            path = self.folder / "bin" / name
            path.write_text(text.replace("{calls}", str(self.calls)), encoding="utf-8")
            path.chmod(0o755)

    def run(
        self, program: str, *arguments: str, fails: bool = False, stdin: str = "", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = [self.folder / "steps" / program, *arguments]
        environment = {"PATH": path, "PYTHON": sys.executable} | variables
        found = subprocess.run(command, capture_output=True, text=True, env=environment, input=stdin, check=False)
        assert (found.returncode != 0) == fails, found.stderr
        return found

    def called(self) -> list[str]:
        return self.calls.read_text(encoding="utf-8").replace(f"{self.folder}", "").splitlines()

    def files(self, top: str) -> set[str]:
        folder = self.folder / top
        return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002], ids=oct)
def test_seal_gives_files_modes_times_and_byte_code_that_do_not_depend_on_the_build(step: Step, umask: int) -> None:
    step.write(
        {
            "out/opt/trainyard/launcher/a.py": "x = 1\n",
            "out/opt/trainyard/launcher/__pycache__/old.cpython-38.pyc": "",
            f"out/{SITE}/b.py": "y = 2\n",
            f"out/{SITE}/template.py": "this is no Python\n",
            "out/opt/venv/bin/c.py": "z = 3\n",
        }
    )
    for path in (step.folder / "out" / "opt" / "trainyard").rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
    step.run("wheels/seal.sh")
    tag = sys.implementation.cache_tag
    compiled = {f"opt/trainyard/launcher/__pycache__/a.{tag}.pyc", f"{SITE}/__pycache__/b.{tag}.pyc"}
    assert {name for name in step.files("out") if name.endswith(".pyc")} == compiled
    for name in compiled:
        # PEP 552: the flags of a file whose source is not checked.
        assert (step.folder / "out" / name).read_bytes()[4:8] == b"\1\0\0\0"
    paths = [step.folder / "out", *(step.folder / "out").rglob("*")]
    assert {path.stat().st_mtime for path in paths} == {naming.FILE_EPOCH}
    modes = {path.stat().st_mode & 0o777 for path in (step.folder / "out" / "opt" / "trainyard").rglob("*")}
    assert modes == {0o755, 0o644}


def test_the_byte_code_of_a_file_does_not_name_the_folder_in_which_it_was_compiled(step: Step) -> None:
    step.write({f"out/{SITE}/b.py": "def f(): pass\n"})
    step.run("wheels/seal.sh")
    cached = importlib.util.cache_from_source(str(step.folder / "out" / SITE / "b.py"))
    assert str(step.folder).encode() not in Path(cached).read_bytes()


def test_a_layer_of_one_wheel_is_installed_with_its_hashes_and_one_of_a_group_from_its_files(step: Step) -> None:
    step.fake("uv")
    (step.folder / "out" / SITE).mkdir(parents=True)
    step.run("wheels/layer.sh", "numpy==1.0", "--hash=sha256:aa", "--hash=sha256:bb", WHEEL_PLATFORM="x86_64-linux")
    install = "uv pip install --quiet --no-deps --no-build --python /opt/venv/bin/python --python-platform x86_64-linux"
    first = f"{install} --prefix /out/opt/venv --require-hashes -r /built/wheels.lock"
    assert step.called() == [first, "numpy==1.0 --hash=sha256:aa --hash=sha256:bb"]
    step.calls.unlink()
    shutil.rmtree(step.folder / "for-site", ignore_errors=True)
    step.write({"built/wheels.lock": "", "built/pins": "a==1\nb==2\n"})
    step.run("wheels/install.sh", "/x/python", "--target", "/out")
    assert step.called() == [
        "uv pip install --quiet --no-deps --no-build --python /x/python --target /out --no-index --find-links /built "
        "a==1 b==2"
    ]


def test_nothing_is_installed_where_nothing_is_locked(step: Step) -> None:
    step.fake("uv")
    step.write({"built/wheels.lock": ""})
    step.run("wheels/install.sh", "/x/python")
    assert not step.calls.exists() and (step.folder / "out").is_dir()


def test_indexes_and_certificates_come_from_the_secrets_of_the_step(step: Step) -> None:
    script = f". {step.folder}/steps/wheels/uv.sh && env | grep -E '^(SSL|UV|NETRC)' | sort"

    def variables(**given: str) -> list[str]:
        # Debian's sh: the steps that source the file have no other shell.
        found = subprocess.run(["sh", "-euc", script], capture_output=True, text=True, env=given, check=False)
        return found.stdout.replace(str(step.folder), "").splitlines()

    assert variables() == []
    assert variables(INDEX_URL="https://a/") == ["UV_INDEX=https://a/", "UV_INDEX_STRATEGY=unsafe-best-match"]
    step.write({f"run/secrets/{name}": "https://me:password@a/\n" for name in ("ca", "uv.toml", "netrc", "index")})
    assert variables(INDEX_URL="https://a/") == [
        "NETRC=/run/secrets/netrc",
        "SSL_CERT_FILE=/run/secrets/ca",
        "UV_CONFIG_FILE=/run/secrets/uv.toml",
        "UV_INDEX=https://me:password@a/",
        "UV_INDEX_STRATEGY=unsafe-best-match",
    ]


def test_the_site_has_what_several_wheels_bring_and_no_layer_has(step: Step) -> None:
    step.write(
        {
            f"{SITE}/pip.pth": "",
            "opt/venv/.lock": "",
            f"stages/wheel-a/shared/{SITE}/nvidia/__init__.py": "",
            "stages/wheel-a/shared/opt/venv/bin/tensorboard": "of a\n",
            "stages/wheel-a/files": "",
            f"stages/wheel-b/shared/{SITE}/nvidia/__init__.py": "",
            "stages/wheel-b/files": f"{SITE}/b.py\nopt/venv/bin/tensorboard\n",
        }
    )
    step.run("site/site.sh")
    told = {"etc/profile.d/path.sh", "usr/local/bin/pip", "usr/local/bin/pip3", "usr/local/bin/uv"}
    assert step.files("out") == {f"{SITE}/pip.pth", f"{SITE}/_trainyard.pth", f"{SITE}/nvidia/__init__.py"} | told


def test_sources_are_built_for_each_layer_without_an_index_and_its_locks_go_with_them(step: Step) -> None:
    step.fake("uv")
    names = ("a-1.tar.gz", "tool-1-py3-none-any.whl", "pins", "wheels.lock", "all.lock")
    step.write({f"sources/wheels-1/{name}": name for name in names} | {"sources/wheels-2/wheels.lock": ""})
    step.run("build_sources.sh")
    (call,) = step.called()
    assert call.startswith("uv build --wheel --offline --no-index --find-links /sources/wheels-1/ --build-constraints ")
    assert call.endswith("--out-dir /built/wheels-1 /sources/wheels-1/a-1.tar.gz")
    assert step.files("built") == {"wheels-1/pins", "wheels-1/wheels.lock", "wheels-2/wheels.lock"}


def test_what_is_compiled_uses_the_cuda_compiler_that_its_build_requires(step: Step) -> None:
    cuda = f"{SITE}/nvidia/cu13"
    step.write({f"{cuda}/bin/nvcc": "", f"{cuda}/lib/libcudart.so.13": "", f"{cuda}/lib/libother.so.1.2": ""})
    (step.folder / cuda / "bin" / "nvcc").chmod(0o755)
    step.write({f"sources/{name}/all.lock": f"{name}\n" for name in ("build-requires", "compiled")})
    step.fake("uv", text=FAKE + 'echo "$CUDA_HOME $LDFLAGS" >>{calls}\n')
    step.run("compiled.sh", CUDA_HOME="", LDFLAGS="-lm")
    tools, requires, _, source, compiled, variables = step.called()
    assert (requires, compiled) == ("build-requires", "compiled")
    assert " --no-build " in tools and " --no-build-isolation --no-binary :all: --prefix /out/opt/venv " in source
    assert all(" --require-hashes --offline --no-index " in call for call in (tools, source))
    assert variables == f"/{cuda} -Wl,--strip-debug -lm"
    links = {path.name: os.readlink(path) for path in (step.folder / cuda / "lib").iterdir() if path.is_symlink()}
    assert links == {"libcudart.so": "libcudart.so.13", "libother.so": "libother.so.1.2"}


def test_a_library_that_the_image_lacks_is_named_with_its_package(step: Step) -> None:
    ldd = (
        "linux-vdso.so.1 (0x1)\n libgood.so.1 => /usr/lib/libgood.so.1 (0x1)\n libcuda.so.1 => not found\n"
        " libtorch.so => not found\n libgomp.so.1 => /usr/lib/libgomp.so.1 (0x2)\n libx.so.1 => not found\n"
    )
    step.fake("ldd", text=f"#!/bin/bash\ncat <<END\n{ldd}END\n")
    step.fake("dpkg-query", text='#!/bin/bash\n[ "$2" != "*/libgomp.so.1" ] || echo "libgomp1:amd64: /x"\n')
    step.write({f"out/{SITE}/fast.so": "", f"{SITE}/torch/lib/libtorch.so": "", "image/usr/lib/libgood.so.1": ""})
    words = (
        "the image lacks libgomp.so.1, libx.so.1, which fast.so needs: add libgomp1, the Debian package of libx.so.1"
    )
    assert step.run("missing_libraries.sh", fails=True).stderr == f"error: {words} to 'system:'\n"
    step.write({"image/usr/lib/libgomp.so.1": "", f"{SITE}/libx.so.1": ""})
    step.run("missing_libraries.sh")


def test_commands_beside_a_framework_in_the_base_get_its_interpreter(step: Step) -> None:
    step.write(
        {"out/opt/requirements/bin/a": "#!/opt/clean/bin/python3\nx\n", "out/opt/requirements/bin/b": "#!/bin/sh\n"}
    )
    program = step.folder / "steps" / "requirements.sh"
    program.write_text(program.read_text(encoding="utf-8").replace("/steps/install.sh", "true"), encoding="utf-8")
    step.run("requirements.sh", "/usr/bin/env python3")
    found = [(step.folder / "out/opt/requirements/bin" / name).read_text(encoding="utf-8") for name in "ab"]
    assert found == ["#!/usr/bin/env python3\nx\n", "#!/bin/sh\n"]


def test_interactive_shells_get_the_path_and_the_name_of_the_image(step: Step) -> None:
    step.write({"etc/bash.bashrc": "# Debian's\n"})
    step.run("profile/profile.sh", "cpu", "/opt/venv/bin:$PATH")
    texts = {name: (step.folder / "out/etc" / name).read_text(encoding="utf-8") for name in step.files("out/etc")}
    assert texts["debian_chroot"] == "cpu\n"
    assert texts["bash.bashrc"] == "# Debian's\n. /etc/profile.d/trainyard.sh\n"
    assert (
        "\nexport PATH=/opt/venv/bin:$PATH\n" in texts["profile.d/trainyard.sh"]
        and "@" not in texts["profile.d/trainyard.sh"]
    )


def test_the_line_in_the_place_of_pip_can_be_copied_into_a_dockerfile(tmp_path: Path) -> None:
    """Take another name, so that a pip of this machine is not started."""
    program = tmp_path / "pip0"
    program.write_bytes((STEPS / "site" / "pip.sh").read_bytes())
    done = subprocess.run(
        ["sh", str(program), "install", "numpy<2", "einops"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("pip0: not in this image: ")
    assert done.stderr.endswith(" uv --no-cache pip install 'numpy<2' einops\n")
