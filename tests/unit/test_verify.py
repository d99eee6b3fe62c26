"""Rules for images, on evidence assembled here: a valid image has no finding, and each fault is found and named."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from tests import locks
from tests.fakes.engine import FakeEngine
from tests.workspaces import lock

from trainyard.common.errors import StepFailed, UserError
from trainyard.image import dockerfile, recipes
from trainyard.lint.image import core as rules
from trainyard.lint.image import verify
from trainyard.lint.image.evidence import Evidence
from trainyard.lint.waivers import Waiver
from trainyard.oci import layers, probe, secret_scan
from trainyard.oci.probe_runner import Distribution, Library, ProbeResult
from trainyard.recipe import DIGEST, Built, Recipe
from trainyard.recipe import digest as digest_of
from trainyard.spec.model import bases, catalogue, each_platform, load
from trainyard.spec.units import in_units

Change = Callable[[Evidence], Evidence]

KEY = b"-----BEGIN PRIVATE KEY-----\n" + b"QUJD" * 32 + b"\n-----END PRIVATE KEY-----\n"
TORCH = "from typing import Optional\n__version__ = '2.9.1+cpu'\ndebug = False\ncuda: Optional[str] = None\n"


SITE = "/opt/venv/lib/python3.13/site-packages"
TORCH_CUDA = f"{SITE}/torch/lib/libtorch_cuda.so"
BUILD_INFO = "tensorflow/python/platform/build_info.py"
CUDA_BUILD = "build_info = dict({'is_cuda_build': True, 'cudnn_version': '9'})\n"


def certificate(seed: int) -> bytes:
    """Text in the form of a PEM certificate."""
    body = base64.b64encode(bytes([seed]) * 90)
    return b"-----BEGIN CERTIFICATE-----\n" + body[:64] + b"\n" + body[64:] + b"\n-----END CERTIFICATE-----\n"


def tar_of(files: dict[str, bytes], modes: dict[str, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), (modes or {}).get(name, 0o644)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def contents(files: dict[str, bytes], modes: dict[str, int] | None = None) -> layers.LayerFiles:
    return layers.scan(io.BufferedReader(io.BytesIO(tar_of(files, modes))))  # type: ignore[arg-type]


def layer(stage: str, kind: layers.Kind, files: dict[str, bytes], modes: dict[str, int] | None = None) -> layers.Layer:
    diff_id = f"sha256:{hashlib.sha256(tar_of(files, modes)).hexdigest()}"
    created_by = "COPY /wheel-x/../out / # buildkit"
    return layers.Layer("sha256:" + "0" * 64, diff_id, created_by, stage, kind, 1000, contents(files, modes))


def elf(machine: int) -> bytes:
    """The beginning of a 64-bit, little-endian shared library for a machine."""
    return b"\x7fELF\x02\x01\x01" + bytes(9) + (3).to_bytes(2, "little") + machine.to_bytes(2, "little")


def good(target: str = "xla", arch: str = "amd64") -> Evidence:
    """An image of ``target`` as it should be, built from the index its spec asks for."""
    spec = load(target, arch)
    site = "opt/venv/lib/python3.11/site-packages"
    roots = certificate(9)
    digest = base64.urlsafe_b64encode(hashlib.sha256(roots).digest()).rstrip(b"=")
    record = b"certifi/cacert.pem,sha256=" + digest + b",100\ncertifi-1.dist-info/RECORD,,\n"
    authority = {
        "usr/share/ca-certificates/mozilla/one.crt": certificate(1),
        "etc/ssl/certs/ca-certificates.crt": certificate(1),
    }
    wheel = {f"{site}/certifi/cacert.pem": roots, f"{site}/certifi-1.dist-info/RECORD": record}
    stored_layers = [
        layer("base", "base", {"usr/bin/su": b"su"}, {"usr/bin/su": 0o4755}),
        layer("system", "below", authority),
        layer("wheels-1", "copied", wheel),
    ]
    # Where PyTorch's index was never reached there is no lock for it: the default index's packages stand in.
    recipe = recipes.make(spec, code_layer=stored_layers[-1].diff_id if spec.has_code else "")
    recipe = of_index(recipe, spec.framework.index)
    packages = recipe.versions
    base = spec.base_spec().image
    suffix = f"-{arch}" if len(spec.platforms) > 1 else ""
    built = Built(
        tag=f"{recipe.version_tag}-{recipe.day or '20261120'}-{recipe.content_hash(base)}{suffix}",
        created="2026-11-20T21:28:46Z",
        revision="0" * 40,
        base=base,
        base_digest="",
        notes=(),
    )
    recipe = recipe.model_copy(update={"built": built})
    requires = {"torch-xla": ('libtpu==0.0.21; extra == "tpu"', "numpy")}
    config = {
        "os": "linux",
        "architecture": arch,
        "config": {
            "Labels": recipe.image_labels() | {DIGEST: digest_of(recipe.text())},
            "Env": [f"{name}={value}" for name, value in recipe.environment.items()],
            "Entrypoint": ["tini", "--", "launch"],
            "User": "1000",
            "WorkingDir": "/workspace",
        },
        "history": [{"created_by": "COPY /wheel-x/../out / # buildkit"}],
    }
    stored = layers.Stored(config, stored_layers, "sha256:" + "1" * 64, 100, 100)
    texts = {"recipe.json": recipe.text()}
    gpu = spec.accelerator == "nvidia"
    if spec.framework.name == "tensorflow":
        texts[BUILD_INFO] = CUDA_BUILD if gpu else "build_info = dict({'is_cuda_build': False})\n"
    elif spec.framework.name != "jax":
        local, cuda = ("+cpu", "None") if spec.framework.index == "pytorch-cpu" else ("", "'13.0'")
        texts["torch/version.py"] = f"__version__ = '{packages['torch']}{local}'\ncuda: Optional[str] = {cuda}\n"
        texts["torchvision/version.py"] = f"__version__ = '{packages['torchvision']}{local}'\n"
    inside = ProbeResult(
        "3.11.2",
        tuple(Distribution(n, v, "/opt/venv", requires.get(n, ()), 10**6) for n, v in packages.items()),
        1000,
        (),
        (),
        texts,
    )
    reference = f"trainyard:{spec.local_name}"
    return Evidence(recipe, reference, (f"{reference}-candidate",), stored, inside)


def of_index(recipe: Recipe, index: str) -> Recipe:
    """The recipe as if the framework came from an index."""
    return recipe.model_copy(update={"index": index, "labels": recipe.labels | {"io.trainyard.index": index}})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    """The image of a user's repository as it should be."""
    monkeypatch.setenv("TRAINYARD_BUILD", str(tmp_path / "state"))
    folder = tmp_path / "repository"
    (folder / ".git").mkdir(parents=True)
    (folder / "train.py").touch()
    (folder / "trainyard.yaml").write_text("extends: tf-cpu\nrun: python train.py\n", encoding="utf-8")
    lock(load(str(folder)))
    spec = load(str(folder))
    dockerfile.write(dockerfile.rendered(spec))
    (spec.build_folder / "code.tar").write_bytes(b"")
    return good(str(folder))


def changed(evidence: Evidence, **changes: Any) -> Evidence:
    return dataclasses.replace(evidence, **changes)


def with_label(name: str, value: str) -> Change:
    def change(image: Evidence) -> Evidence:
        config = json.loads(json.dumps(image.stored.config))
        config["config"]["Labels"][name] = value
        return changed(image, stored=dataclasses.replace(image.stored, config=config))

    return change


def with_setting(**settings: Any) -> Change:
    def change(image: Evidence) -> Evidence:
        config = image.stored.config | {"config": image.settings | settings}
        return changed(image, stored=dataclasses.replace(image.stored, config=config))

    return change


def with_platform(arch: str) -> Change:
    def change(image: Evidence) -> Evidence:
        config = image.stored.config | {"architecture": arch}
        return changed(image, stored=dataclasses.replace(image.stored, config=config))

    return change


def with_tags(name: str, *tags: str) -> Change:
    """The tags of a package's wheel."""

    def change(image: Evidence) -> Evidence:
        packages = tuple(
            dataclasses.replace(one, tags=tags) if one.name == name else one for one in image.inside.packages
        )
        return changed(image, inside=dataclasses.replace(image.inside, packages=packages))

    return change


def with_author(name: str) -> Change:
    def change(image: Evidence) -> Evidence:
        config = image.stored.config | {"author": name}
        return changed(image, stored=dataclasses.replace(image.stored, config=config))

    return change


def with_history(command: str) -> Change:
    def change(image: Evidence) -> Evidence:
        config = image.stored.config | {"history": [{"created_by": command}]}
        return changed(image, stored=dataclasses.replace(image.stored, config=config))

    return change


def with_layer(files: dict[str, bytes], modes: dict[str, int] | None = None, stage: str = "added") -> Change:
    def change(image: Evidence) -> Evidence:
        more = [*image.stored.layers, layer(stage, "added" if stage == "added" else "copied", files, modes)]
        return changed(image, stored=dataclasses.replace(image.stored, layers=more))

    return change


def with_needed(path: str, *names: str, searched: tuple[str, ...] = ()) -> Change:
    """A layer with a library that loads others, and looks for them in the folders ``searched`` first."""

    def change(image: Evidence) -> Evidence:
        added = layer("added", "added", {path: b"library"})
        found = dataclasses.replace(added.contents, needed={path: names}, searched={path: searched})
        more = [*image.stored.layers, dataclasses.replace(added, contents=found)]
        return changed(image, stored=dataclasses.replace(image.stored, layers=more))

    return change


def with_package(name: str, version: str, folder: str = "/opt/venv") -> Change:
    """Another distribution, in place of the one of that name and folder."""

    def change(image: Evidence) -> Evidence:
        old = image.installed.get(name, [])
        kept = tuple(one for one in image.inside.packages if one not in old or one.folder != folder)
        requires = next((one.requires for one in old), ())
        packages = (*kept, Distribution(name, version, folder, requires, 10**6))
        return changed(image, inside=dataclasses.replace(image.inside, packages=packages))

    return change


def without_packages(prefix: str) -> Change:
    def change(image: Evidence) -> Evidence:
        packages = tuple(one for one in image.inside.packages if not one.name.startswith(prefix))
        return changed(image, inside=dataclasses.replace(image.inside, packages=packages))

    return change


def without_package(name: str) -> Change:
    def change(image: Evidence) -> Evidence:
        packages = tuple(one for one in image.inside.packages if one.name != name)
        return changed(image, inside=dataclasses.replace(image.inside, packages=packages))

    return change


def with_text(name: str, text: str) -> Change:
    def change(image: Evidence) -> Evidence:
        return changed(image, inside=dataclasses.replace(image.inside, texts=image.inside.texts | {name: text}))

    return change


def with_own_recipe(**fields: Any) -> Change:
    """Another recipe in the image than it must have, with the label of that one."""

    def change(image: Evidence) -> Evidence:
        text = image.required_recipe.model_copy(update=fields).text()
        return with_label(DIGEST, digest_of(text))(with_text("recipe.json", text)(image))

    return change


def with_library(path: str, package: str, code: str, ptx: str = "") -> Change:
    """A shared library with device code."""

    def change(image: Evidence) -> Evidence:
        more = {path: Library(tuple(code.split()), tuple(ptx.split()), package)}
        return changed(image, inside=dataclasses.replace(image.inside, libraries=image.inside.libraries | more))

    return change


def with_ptxas(release: str) -> Change:
    compilers = {f"{SITE}/triton/backends/nvidia/bin/ptxas": release}
    return lambda image: changed(image, inside=dataclasses.replace(image.inside, ptxas=compilers))


def with_waiver(expires: str, **about: str) -> Change:
    waiver = Waiver(owner="me", reason="until it is fixed", expires=expires, **about)  # type: ignore[arg-type]
    return lambda image: changed(image, waivers=(*image.waivers, waiver), day=datetime.date(2026, 11, 20))


def with_wheel(name: str, files: dict[str, bytes], lists: dict[str, bytes], stage: str = "wheels-2") -> Change:
    """A layer with a wheel's ``files``, and a RECORD of those that it ``lists`` with their content."""
    rows = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},9\n"
        for path, content in lists.items()
    ]
    record = {f"{name}-1.dist-info/RECORD": "".join(rows).encode()}
    return with_layer({f"{SITE[1:]}/{path}": content for path, content in {**files, **record}.items()}, stage=stage)


FAULTS: list[tuple[str, str, list[Change], str]] = [
    ("xla", "image_is_its_recipe", [with_label("io.trainyard.framework", "torch_xla==2.8.0")], "torch_xla==2.8.0"),
    (
        "xla",
        "image_is_its_recipe",
        [with_label("io.trainyard.index", "somewhere")],
        "'somewhere'; the recipe gives 'pytorch-cpu'",
    ),
    (
        "xla",
        "image_is_its_recipe",
        [with_label("org.opencontainers.image.version", "xla-2.9.1-20261120-0123abcd")],
        "2.9.1",
    ),
    ("xla", "image_is_its_recipe", [with_label("org.opencontainers.image.base.digest", "sha256:1")], "base.digest"),
    ("xla", "image_is_its_recipe", [with_own_recipe(day="20200101")], "its recipe gives xla-2.9.0-20200101-"),
    (
        "xla",
        "image_is_its_recipe",
        [with_own_recipe(summary="another")],
        'summary is "another"; the recipe gives "PyTorch/XLA',
    ),
    (
        "xla",
        "image_is_its_recipe",
        [with_own_recipe(inputs={"Dockerfile": "0"})],
        'recipe.json: inputs.Dockerfile is "0"; the recipe gives "',
    ),
    ("xla", "image_is_its_recipe", [with_label("io.trainyard.recipe", "0")], "label io.trainyard.recipe: '0'"),
    ("xla", "image_is_its_recipe", [with_platform("arm64")], "platform: linux/arm64; the recipe gives linux/amd64"),
    (
        "tf-cpu",
        "binaries_are_for_the_architecture",
        [with_layer({"opt/a.so.1": elf(183)})],
        "/opt/a.so.1 in layer added: is for aarch64; the image is for x86_64",
    ),
    (
        "tf-cpu",
        "binaries_are_for_the_architecture",
        [with_layer({"opt/program": elf(183)}, {"opt/program": 0o755})],
        "/opt/program in layer added: is for aarch64",
    ),
    (
        "tf-cpu",
        "binaries_find_their_libraries",
        [with_needed("opt/a.so", "libgone.so.1")],
        "/opt/a.so in layer added: needs libgone.so.1, which is nowhere in the image",
    ),
    (
        "tf-cpu",
        "binaries_find_their_libraries",
        [
            with_layer({"lib/libm.so.6": b"m"}),
            with_needed("opt/a.so", "libm.so.6"),
            with_layer({"lib/.wh.libm.so.6": b""}),
        ],
        "/opt/a.so in layer added: needs libm.so.6",
    ),
    (
        "tf-cpu",
        "wheels_are_for_the_architecture",
        [with_tags("numpy", "cp313-cp313-manylinux_2_17_aarch64", "cp313-cp313-manylinux2014_aarch64")],
        "is from a wheel for manylinux2014_aarch64, manylinux_2_17_aarch64; the image is for x86_64",
    ),
    (
        "tf-cpu",
        "wheels_are_for_the_architecture",
        [with_tags("numpy", "cp313-cp313-macosx_14_0_x86_64")],
        "macosx_14_0",
    ),
    ("xla", "image_is_its_recipe", [lambda image: changed(image, tags=("trainyard:cpu",))], "trainyard:cpu"),
    ("xla", "image_is_its_recipe", [with_text("recipe.json", "{}")], "is no recipe (name: Field required)"),
    (
        "xla",
        "image_is_its_recipe",
        [with_text("recipe.json", "")],
        "recipe.json: is missing: the image was built",
    ),
    ("xla", "image_is_its_recipe", [with_setting(Entrypoint=["launch"])], "expected ['tini', '--', 'launch']"),
    ("xla", "image_is_its_recipe", [with_setting(User="0:0")], "USER: '0:0'"),
    ("xla", "image_is_its_recipe", [with_setting(WorkingDir="/")], "WORKDIR: '/'; expected '/workspace'"),
    ("xla", "image_is_its_recipe", [with_setting(WorkingDir=None)], "WORKDIR: None; expected '/workspace'"),
    (
        "tf-cpu",
        "python_lists_what_is_installed",
        [
            lambda image: changed(
                image, inside=dataclasses.replace(image.inside, error="cannot list: UnicodeDecodeError")
            )
        ],
        "Python: cannot list: UnicodeDecodeError",
    ),
    ("tf-cpu", "installed_matches_locks", [with_package("numpy", "1.0")], "package numpy: is 1.0; the lock has"),
    (
        "xla",
        "requirements_are_met",
        [without_package("numpy")],
        "package torch-xla 2.9.0: requires numpy; the image has none",
    ),
    ("tf-cpu", "installed_matches_locks", [with_package("sneaked", "1.0")], "package sneaked 1.0 in /opt/venv"),
    ("tf-cpu", "installed_matches_locks", [without_package("keras")], "package keras: is not installed"),
    (
        "xla",
        "torch_is_the_build_of_its_index",
        [with_text("torch/version.py", TORCH.replace("+cpu", "+cu128"))],
        "+cpu",
    ),
    (
        "xla",
        "torch_is_the_build_of_its_index",
        [with_text("torch/version.py", TORCH.replace("None", "'12.8'"))],
        "12.8",
    ),
    (
        "xla",
        "torch_is_the_build_of_its_index",
        [with_text("torch/version.py", TORCH.replace("2.9.1", "2.9.0"))],
        "2.9.0",
    ),
    (
        "xla",
        "torch_is_the_build_of_its_index",
        [with_text("torchvision/version.py", "__version__ = '0.24.1+cu128'\n")],
        "torchvision/version.py: is 0.24.1+cu128; torch is 2.9.1+cpu",
    ),
    (
        "tf-cpu",
        "tensorflow_has_its_cudnn",
        [with_text(BUILD_INFO, CUDA_BUILD)],
        "CUDA build under the name tensorflow-cpu",
    ),
    ("tf-cpu", "tensorflow_has_its_cudnn", [with_text(BUILD_INFO, "x = 1\n")], "has no build_info"),
    ("xla", "no_credentials_in_layers", [with_layer({"home/trainer/.netrc": b"machine"})], "/home/trainer/.netrc"),
    (
        "xla",
        "no_credentials_in_layers",
        [with_layer({"opt/a.json": KEY})],
        "/opt/a.json in layer added: holds a private key",
    ),
    (
        "xla",
        "no_credentials_in_settings",
        [with_setting(Env=["HF_TOKEN=x"])],
        "ENV HF_TOKEN: holds a secret by its name",
    ),
    (
        "xla",
        "no_credentials_in_settings",
        [with_history("RUN curl -H 'Authorization: Bearer 0123x456789abcdxef' host")],
        "history line 1 (RUN)",
    ),
    ("xla", "no_credentials_in_settings", [with_history("RUN pip -i https://me:pw@host/x")], "history line 1 (RUN)"),
    (
        "xla",
        "no_foreign_certificates",
        [with_layer({"opt/ca.pem": certificate(7)})],
        "/opt/ca.pem in layer added: holds 1",
    ),
    (
        "xla",
        "no_foreign_certificates",
        [with_layer({"etc/ssl/certs/ca-certificates.crt": certificate(1) + certificate(7)})],
        "/etc/ssl/certs/ca-certificates.crt in layer added: holds 1",
    ),
    ("xla", "no_foreign_certificates", [with_setting(Env=["SSL_CERT_FILE=/x"])], "ENV SSL_CERT_FILE"),
    (
        "xla",
        "no_path_stored_twice",
        [with_layer({"etc/ssl/certs/ca-certificates.crt": certificate(1)})],
        "/etc/ssl/certs/ca-certificates.crt: is stored by layer system and again by added",
    ),
    (
        "xla",
        "no_path_stored_twice",
        [with_layer({"opt/venv/lib/.wh.python3.11": b""})],
        "/opt/venv/lib/python3.11: is stored by layer wheels-1 and deleted by added",
    ),
    (
        "xla",
        "no_path_stored_twice",
        [with_layer({"x/a.py": b"a"}, stage="wheel-a"), with_layer({"x/a.py": b"b"}, stage="wheel-b")],
        "/x/a.py: is stored by layer wheel-a and again by wheel-b",
    ),
    (
        "xla",
        "files_are_those_of_their_wheels",
        [with_wheel("six", {"six.py": b"changed"}, {"six.py": b"six"})],
        f"{SITE}/six.py in layer wheels-2: is not what the RECORD of its wheel lists",
    ),
    (
        "xla",
        "files_are_those_of_their_wheels",
        [with_wheel("six", {"six.py": b""}, {"six.py": b"six"})],
        f"{SITE}/six.py in layer wheels-2: is not what",
    ),
    (
        "xla",
        "files_are_those_of_their_wheels",
        [with_wheel("six", {"six.py": b"six"}, {"six.py": b"six"}), with_layer({f"{SITE[1:]}/six.py": b"changed"})],
        f"{SITE}/six.py in layer added: is not what",
    ),
    (
        "xla",
        "files_are_those_of_their_wheels",
        [with_wheel("six", {}, {"six.py": b"six"})],
        f"{SITE}/six.py: is missing; the RECORD of its wheel lists it",
    ),
    (
        "xla",
        "files_are_those_of_their_wheels",
        [
            with_wheel("six", {}, {"six.py": b"six"}),
            with_wheel("other", {"six.py": b"changed"}, {"six.py": b"changed"}),
        ],
        f"{SITE}/six.py in layer wheels-2: is brought by several wheels, with different contents",
    ),
    (
        "xla",
        "no_empty_or_duplicate_layer",
        [with_layer({})],
        "layer added: is empty (COPY",
    ),
    (
        "xla",
        "no_empty_or_duplicate_layer",
        [with_layer({"x": b"x"}, stage="wheel-a"), with_layer({"x": b"x"})],
        "layer added: is the same as layer wheel-a",
    ),
    (
        "xla",
        "no_setuid_beyond_the_base",
        [with_layer({"bin/x": b"x"}, {"bin/x": 0o4755})],
        "/bin/x in layer added: has mode 4755",
    ),
    ("xla", "no_setuid_beyond_the_base", [with_layer({"bin/x": b"x"}, {"bin/x": 0o2755})], "has mode 2755"),
    (
        "gpu",
        "image_is_its_recipe",
        [with_setting(Env=["NVIDIA_VISIBLE_DEVICES=none"])],
        "ENV NVIDIA_VISIBLE_DEVICES: is 'none'; the recipe gives 'all'",
    ),
    ("torch-tpu", "image_is_its_recipe", [with_setting(Env=[])], "ENV LD_PRELOAD: is None"),
    (
        "xla",
        "image_is_its_recipe",
        [with_setting(Env=["PATH=/tmp:/usr/bin"])],
        "ENV PATH: is '/tmp:/usr/bin'; the recipe",
    ),
    ("xla", "image_is_its_recipe", [with_setting(User="1001")], "USER: '1001'; expected '1000'"),
    ("xla", "image_is_its_recipe", [with_setting(Cmd=["bash"])], "CMD: ['bash']; expected none"),
    (
        "xla",
        "nothing_else_is_configured",
        [with_setting(Env=["PYTHONPATH=/x"])],
        "ENV PYTHONPATH: is '/x'; the recipe gives none",
    ),
    ("xla", "nothing_else_is_configured", [with_setting(Env=["FOO="])], "ENV FOO: is ''; the recipe gives none"),
    (
        "xla",
        "nothing_else_is_configured",
        [with_label("maintainer", "me")],
        "label maintainer: 'me'; the recipe gives none",
    ),
    (
        "xla",
        "nothing_else_is_configured",
        [with_label("io.trainyard.base", "debian-14")],
        "label io.trainyard.base: 'debian-14'; the recipe gives 'debian-12'",
    ),
    (
        "xla",
        "nothing_else_is_configured",
        [with_setting(ExposedPorts={"22/tcp": {}})],
        "ExposedPorts: {'22/tcp': {}}; the recipe gives none",
    ),
    ("xla", "nothing_else_is_configured", [with_setting(Volumes={"/data": {}})], "Volumes: {'/data': {}}"),
    ("xla", "nothing_else_is_configured", [with_setting(OnBuild=["RUN x"])], "OnBuild: ['RUN x']"),
    ("xla", "nothing_else_is_configured", [with_setting(Healthcheck={"Test": ["CMD", "x"]})], "Healthcheck: "),
    ("xla", "nothing_else_is_configured", [with_setting(StopSignal="SIGKILL")], "StopSignal: SIGKILL"),
    ("xla", "nothing_else_is_configured", [with_setting(Shell=["/bin/sh"])], "Shell: ['/bin/sh']"),
    ("xla", "nothing_else_is_configured", [with_author("me")], "author: 'me'; the recipe gives none"),
    ("xla", "nothing_else_is_configured", [with_setting(Unknown=1)], "Unknown: 1; the recipe gives none"),
    (
        "gpu",
        "framework_is_built_for_the_accelerator",
        [with_text("torch/version.py", "__version__ = '2.15.0+cpu'\ncuda: Optional[str] = None\n")],
        "torch 2.15.0+cpu is built without CUDA",
    ),
    (
        "tf-gpu",
        "framework_is_built_for_the_accelerator",
        [with_text(BUILD_INFO, "build_info = dict({'is_cuda_build': False})\n")],
        "TensorFlow is built without CUDA",
    ),
    (
        "tf-gpu",
        "framework_is_built_for_the_accelerator",
        [lambda image: without_packages("nvidia-")(image)],
        "packages nvidia-*: none is installed",
    ),
    (
        "cpu",
        "torch_is_the_build_of_its_index",
        [with_text("torch/version.py", "__version__ = '2.15.0+cu130'\ncuda: Optional[str] = '13.0'\n")],
        "is 2.15.0+cu130; index pytorch-cpu has +cpu",
    ),
    ("tf-gpu", "tensorflow_has_its_cudnn", [with_package("nvidia-cudnn-cu12", "8.9.7.29")], "8.9.7.29 is installed"),
    ("tf-tpu", "nothing_known_to_conflict", [with_package("libtpu", "0.0.51")], "'import tensorflow' aborts"),
    ("torch-tpu", "nothing_known_to_conflict", [with_package("libtpu", "0.0.21")], "torch_tpu needs libtpu 0.0.50"),
    (
        "gpu",
        "framework_has_code_for_its_gpus",
        [with_library(TORCH_CUDA, "torch", "8.0 8.6 9.0a 10.0 12.0f")],
        "package torch: has no code for 7.5, which label io.trainyard.gpus promises; it has machine code for 8.0 8.6",
    ),
    (
        "tf-gpu",
        "framework_has_code_for_its_gpus",
        [with_library(f"{SITE}/tensorflow/libtensorflow_cc.so.2", "tensorflow", "7.0 8.0 8.9 9.0", "9.0a")],
        "package tensorflow: has no code for 9.0+PTX, which label io.trainyard.gpus promises",
    ),
    (
        "gpu",
        "wheels_are_of_one_cuda",
        [with_package("nvidia-nccl-cu12", "2.26.2")],
        "package nvidia-nccl-cu12: 2.26.2 is for CUDA 12; the framework is built for CUDA 13",
    ),
    (
        "gpu",
        "compilers_match_the_driver",
        [with_ptxas("14.0")],
        "triton/backends/nvidia/bin/ptxas: is of CUDA 14.0; the image is for CUDA 13.2",
    ),
    (
        "tf-gpu",
        "compilers_match_the_driver",
        [without_package("nvidia-cuda-nvcc-cu12")],
        "package nvidia-cuda-nvcc-cu12: is not installed: XLA finds neither ptxas nor libdevice",
    ),
    (
        "xla",
        "no_waiver_has_expired",
        [with_waiver("2026-11-19", rule="GHSA-x", package="torch", version="2.9.1")],
        "waiver of GHSA-x for package torch 2.9.1: expired on 2026-11-19; owner me",
    ),
    (
        "xla",
        "no_waiver_has_expired",
        [with_waiver("2026-11-19", rule="size_within_budget", where="trainyard:xla*", target="xla")],
        "waiver of size_within_budget for trainyard:xla*: expired",
    ),
]


@pytest.mark.parametrize(
    ("target", "arch"),
    [(spec.target, one.arch) for spec in catalogue() if spec.version_known for one in each_platform(spec)],
)
def test_a_faultless_image_has_no_finding(target: str, arch: str) -> None:
    assert [str(one) for found in rules.check(good(target, arch)).values() for one in found] == []


def test_what_an_unknown_base_configures_is_a_note() -> None:
    """A base that was set with BASE, or that holds the framework, may have variables, labels and ports."""
    of_base = [with_label("org.opencontainers.image.base.name", "registry.example/mine"), with_label("vendor", "me")]
    image = good("xla")
    for change in [*of_base, with_setting(ExposedPorts={"22/tcp": {}})]:
        image = change(image)
    found = rules.check(image)["nothing_else_is_configured"]
    assert [one.where for one in found] == ["label vendor", "ExposedPorts"]
    assert not any(one.fails for one in found)


def test_a_bootstrapped_base_is_expected() -> None:
    image = with_setting(ArgsEscaped=True, Cmd=[])(with_label("io.trainyard.base", "debian-12")(good("xla")))
    assert not rules.check(image)["nothing_else_is_configured"]


@pytest.mark.parametrize("name", ["libcuda.so.1", "libnvidia-ml.so.1", "libibverbs.so.1", "libm.so.6"])
def test_libraries_of_the_host_and_of_any_folder_of_the_image_are_found(name: str) -> None:
    image = with_needed("opt/a.so", name)(with_layer({"usr/lib/x86_64-linux-gnu/libm.so.6": b"m"})(good("gpu")))
    assert not rules.check(image)["binaries_find_their_libraries"]


@pytest.mark.parametrize(
    ("path", "severity"),
    [
        ("opt/liba.so.5", rules.Severity.NOTE),  # as PyTorch's libgfortran.so.5
        ("opt/a.so", rules.Severity.REFUSE),
        ("opt/liba.cpython-313-x86_64-linux-gnu.so", rules.Severity.REFUSE),
        ("opt/liba.abi3.so", rules.Severity.REFUSE),
        ("usr/bin/a", rules.Severity.REFUSE),
    ],
)
def test_a_library_that_nothing_loads_may_lack_what_it_needs(path: str, severity: rules.Severity) -> None:
    found = rules.check(with_needed(path, "libgone.so.1")(good("gpu")))["binaries_find_their_libraries"]
    assert [one.severity for one in found] == [severity]


SITE_PACKAGES = "opt/venv/lib/python3.13/site-packages"


def missing_libraries(target: str, *changes: Change) -> list[rules.Finding]:
    """Return what is found of the libraries of an image with more files."""
    image = good(target)
    for change in changes:
        image = change(image)
    return rules.check(image)["binaries_find_their_libraries"]


def test_a_library_that_a_module_loads_needs_all_it_names() -> None:
    (finding,) = missing_libraries(
        "gpu", with_needed("opt/libb.so.1", "libgone.so.1"), with_needed("opt/a.so", "libb.so.1")
    )
    assert str(finding) == "/opt/a.so in layer added: needs libgone.so.1, which is nowhere in the image"
    assert finding.fails
    assert finding.remediation == (
        "add the Debian package or the wheel that has libgone.so.1 to system in images/gpu/image.yaml"
    )


def test_what_the_loader_finds_first_counts_and_not_a_wheels_copy_of_it() -> None:
    """As pymeshlab, which has a libsystemd.so.0 that needs what Debian's does not."""
    assert not missing_libraries(
        "tf-cpu",
        with_needed("usr/bin/who", "libsystemd.so.0"),
        with_layer({"usr/lib/x86_64-linux-gnu/libsystemd.so.0": b"s"}),
        with_needed(f"{SITE_PACKAGES}/pymeshlab/lib/libsystemd.so.0", "libgpg-error.so.0"),
    )


@pytest.mark.parametrize(
    ("target", "packages"),
    [("tf-cpu", "libgl1, libglib2.0-0t64, libxcb1"), ("tf-tpu", "libgl1, libglib2.0-0, libxcb1")],
)
def test_all_that_a_module_lacks_is_one_finding_with_the_packages_of_the_base(target: str, packages: str) -> None:
    """As opencv-python, whose plugin libqxcb.so nothing loads before a window is opened."""
    bundled = f"{SITE_PACKAGES}/opencv_python.libs"
    (finding,) = missing_libraries(
        target,
        with_needed(f"{SITE_PACKAGES}/cv2/cv2.abi3.so", "libQt5Core.so.5", "libGL.so.1", searched=(bundled,)),
        with_needed(f"{bundled}/libQt5Core.so.5", "libgthread-2.0.so.0", "libglib-2.0.so.0", "libxcb.so.1"),
        with_needed(f"{SITE_PACKAGES}/cv2/qt/plugins/libqxcb.so", "libX11.so.6"),
    )
    assert finding.fails
    names = "libGL.so.1, libglib-2.0.so.0, libgthread-2.0.so.0, libxcb.so.1"
    assert finding.what == f"needs {names}, which are nowhere in the image"
    where = f"images/{target}/image.yaml"
    assert finding.remediation == f"add {packages} to system in {where}, or require opencv-python-headless"


def test_a_plugin_that_no_file_needs_may_lack_libraries() -> None:
    module, plugin = f"{SITE_PACKAGES}/cv2/cv2.abi3.so", f"{SITE_PACKAGES}/cv2/qt/plugins/libqxcb.so"
    assert not missing_libraries("tf-cpu", with_needed(module), with_needed(plugin, "libX11.so.6"))


def test_alternatives_of_which_one_can_be_loaded_are_no_finding() -> None:
    """As torchcodec, which has libraries for each release of FFmpeg, and loads the first that it can."""
    folder = f"{SITE_PACKAGES}/torchcodec/libtorchcodec"
    changes = [with_needed(f"{folder}_core{number}.so", f"libavcodec.so.{57 + number}") for number in (4, 5, 6)]
    assert not missing_libraries("gpu", *changes, with_needed(f"{folder}_ops.so"))


def test_a_library_that_is_loaded_by_its_path_and_lacks_one_is_a_note_with_the_package() -> None:
    """As lightgbm, whose Python code loads it; the import in the smoke test shows whether that happens."""
    (finding,) = missing_libraries(
        "tf-cpu", with_needed(f"{SITE_PACKAGES}/lightgbm/lib/lib_lightgbm.so", "libgomp.so.1")
    )
    assert not finding.fails
    assert finding.remediation == "add libgomp1 to system in images/tf-cpu/image.yaml"


def test_a_package_of_which_some_modules_find_their_libraries_is_used_without_the_others() -> None:
    """As PySide6 without a sound server; nothing is said of its programs, such as a designer."""
    (finding,) = missing_libraries(
        "gpu",
        with_needed(f"{SITE_PACKAGES}/PySide6/QtCore.abi3.so"),
        with_needed(f"{SITE_PACKAGES}/PySide6/QtMultimedia.abi3.so", "libpulse.so.0"),
        with_needed(f"{SITE_PACKAGES}/PySide6/designer", "libgone.so.1"),
    )
    assert (finding.what, finding.fails) == ("needs libpulse.so.0, which is nowhere in the image", False)


def test_what_all_modules_of_a_package_lack_is_named_and_not_what_some_do() -> None:
    (finding,) = missing_libraries(
        "gpu",
        with_needed(f"{SITE_PACKAGES}/PySide6/QtCore.abi3.so", "libglib-2.0.so.0"),
        with_needed(f"{SITE_PACKAGES}/PySide6/QtMultimedia.abi3.so", "libglib-2.0.so.0", "libpulse.so.0"),
    )
    assert (finding.what, finding.fails) == ("needs libglib-2.0.so.0, which is nowhere in the image", True)


def test_of_two_libraries_of_one_name_the_one_in_the_folder_that_is_searched_counts() -> None:
    whole, other = "opt/a/libb.so.1", "opt/other/libb.so.1"
    both = [with_needed(whole), with_needed(other, "libgone.so.1")]
    assert not missing_libraries("gpu", *both, with_needed("opt/a/m.so", "libb.so.1", searched=("opt/a",)))
    assert missing_libraries("gpu", *both, with_needed("opt/a/m.so", "libb.so.1", searched=("opt/other",)))


def test_libraries_that_load_each_other_end_the_search() -> None:
    (finding,) = missing_libraries(
        "gpu",
        with_needed("opt/a.so", "libb.so.1"),
        with_needed("opt/libb.so.1", "libc1.so.1"),
        with_needed("opt/libc1.so.1", "libb.so.1", "libgone.so.1"),
    )
    assert finding.where == "/opt/a.so in layer added"


def test_a_wheel_whose_tag_names_no_known_architecture_is_not_refused() -> None:
    """NVIDIA's wheels for arm64 say sbsa in their metadata, and aarch64 in the names of their files."""
    image = with_tags("numpy", "py3-none-manylinux2014_sbsa")(good("tf-cpu", "arm64"))
    assert not rules.check(image)["wheels_are_for_the_architecture"]


def test_the_image_of_an_index_may_have_the_tag_of_the_index() -> None:
    index, other = "trainyard:tf-cpu-2.21.0-20261121-0a1b2c3d", "trainyard:tf-gpu-2.21.0-20261121-0a1b2c3d"
    found = [rules.check(changed(good("tf-cpu"), tags=(tag,)))["image_is_its_recipe"] for tag in (index, other)]
    assert found[0] == [] and [one.where for one in found[1]] == [f"tag {other}"]


@pytest.mark.parametrize(
    ("target", "rule", "changes", "words"), FAULTS, ids=[f"{one[1]}-{n}" for n, one in enumerate(FAULTS)]
)
def test_each_fault_is_found_and_named(target: str, rule: str, changes: list[Change], words: str) -> None:
    image = good(target)
    for change in changes:
        image = change(image)
    found = rules.check(image)[rule]
    assert any(words in str(one) for one in found), [str(one) for one in found]
    assert all(one.rule == rule and one.where and one.why and one.remediation and one.fails for one in found)


def test_every_rule_has_a_fault_that_it_finds() -> None:
    elsewhere = {"torch_xla_has_its_libtpu", "imports_do_not_compile", "size_within_budget"}
    elsewhere |= {"files_are_those_of_the_build"}  # test_layer_contents.py
    elsewhere |= {"extensions_have_code_for_their_gpus"}  # test_device_code.py
    assert {rule.id for rule in rules.RULES} == {fault[1] for fault in FAULTS} | elsewhere


def test_a_package_that_requires_tensorflow_has_it_where_tensorflow_cpu_is_installed() -> None:
    image = good("tf-cpu")
    package = Distribution("tf-keras", "2.21.0", "/opt/venv", ("tensorflow>=2.21,<2.22",), 10**6)
    image = changed(image, inside=dataclasses.replace(image.inside, packages=(*image.inside.packages, package)))
    assert not rules.check(image)["requirements_are_met"]


@pytest.mark.parametrize(
    ("libtpu", "words"), [("0.0.50", "is 0.0.50; torch_xla 2.9.0 needs libtpu==0.0.21"), (None, "not installed")]
)
def test_libtpu_must_be_the_one_torch_xla_asks_for(libtpu: str | None, words: str) -> None:
    image = (with_package("libtpu", libtpu) if libtpu else without_package("libtpu"))(good())
    (finding,) = rules.check(image)["torch_xla_has_its_libtpu"]
    assert words in str(finding)


WAIVED = {"rule": "no_setuid_beyond_the_base", "where": "/bin/x in layer *"}


@pytest.mark.parametrize(
    ("waiver", "passes"),
    [
        (with_waiver("2026-11-20", **WAIVED), True),
        (with_waiver("2026-11-20", **WAIVED, target="xla"), True),
        (with_waiver("2026-11-20", **WAIVED, target="tf-cpu"), False),
        (with_waiver("2026-11-19", **WAIVED), False),
        (with_waiver("2026-11-20", rule="no_path_stored_twice", where="*"), False),
        (with_waiver("2026-11-20", rule="no_setuid_beyond_the_base", where="/bin/y in layer *"), False),
    ],
)
def test_a_waiver_turns_its_finding_into_a_note_until_it_expires(waiver: Change, passes: bool) -> None:
    image = waiver(with_layer({"bin/x": b"x"}, {"bin/x": 0o4755})(good()))
    (finding,) = rules.check(image)["no_setuid_beyond_the_base"]
    assert finding.fails is not passes
    assert ("waived until 2026-11-20 by me: until it is fixed" in finding.what) is passes


def test_an_image_without_a_spec_is_checked_with_the_rules_that_need_none() -> None:
    image = with_layer({"home/a/.netrc": b"machine", "bin/x": b"x"}, {"bin/x": 0o4755})(good())
    image = with_setting(Entrypoint=["bash"], User="root")(with_package("sneaked", "1.0")(image))
    found = rules.check(changed(image, recipe=None))
    failures = {one.rule for some in found.values() for one in some if one.fails}
    assert failures == {"no_credentials_in_layers"}
    assert [one.fails for one in found["no_setuid_beyond_the_base"]] == [False], "the base is unknown"
    assert not {rule.id for rule in rules.rules_for(changed(image, recipe=None))} & {
        "image_is_its_recipe",
        "installed_matches_locks",
        "size_within_budget",
    }


def test_torch_must_be_of_the_release_torch_xla_was_built_for() -> None:
    found = rules.check(with_package("torch", "2.8.0")(good()))["torch_xla_has_its_libtpu"]
    assert [str(one) for one in found] == ["package torch: is 2.8.0; torch_xla is 2.9.0"]


@pytest.mark.parametrize(("vision", "loads"), [("cu132", True), ("cu130", True), ("cu128", False), ("cpu", False)])
def test_torchvision_must_be_built_for_the_major_version_of_cuda_of_torch(vision: str, loads: bool) -> None:
    """torch 2.14.1 of the default index is built for CUDA 13.0, and the torchvision that goes with it for 13.2."""
    image = with_text("torch/version.py", "__version__ = '2.15.0+cu130'\ncuda: Optional[str] = '13.0'\n")(good("gpu"))
    image = with_text("torchvision/version.py", f"__version__ = '0.29.2+{vision}'\n")(image)
    assert (not rules.check(image)["torch_is_the_build_of_its_index"]) == loads


def test_cudnn_must_be_the_one_tensorflow_was_built_with() -> None:
    image = without_package("tensorflow-cpu")(with_text(BUILD_INFO, CUDA_BUILD)(good("tf-cpu")))
    rule = "tensorflow_has_its_cudnn"
    assert not rules.check(image)[rule], "a CUDA build without CUDA packages runs on the CPU"
    old = with_package("nvidia-cudnn-cu12", "8.9.7")(image)
    assert [str(one) for one in rules.check(old)[rule]] == [
        "package nvidia-cudnn: 8.9.7 is installed; TensorFlow was built with cuDNN 9"
    ]
    assert not rules.check(with_package("nvidia-cudnn-cu12", "9.10.2.21")(image))[rule]


def test_a_package_installed_twice_names_both_folders() -> None:
    image = good("tf-cpu")
    version = image.version("numpy")
    assert version
    other = "/usr/lib/python3/dist-packages"
    found = rules.check(with_package("numpy", version, other)(image))["installed_matches_locks"]
    assert [str(one) for one in found] == [f"package numpy: is installed in /opt/venv and {other}"]


def test_an_image_whose_lock_lacks_a_pin_of_its_spec_has_no_recipe() -> None:
    spec = load("tf-cpu")
    spec = spec.with_lock(locks.lock(*(pin for pin in spec.locked().pins if pin.name != "gcsfs")))
    with pytest.raises(UserError, match=r"asks for gcsfs==.*has none: run 'trainyard lock tf-cpu'"):
        recipes.make(spec)


def test_missing_and_stale_byte_code_are_distinguished() -> None:
    image = good()
    image = changed(image, inside=dataclasses.replace(image.inside, missing=("/opt/a.py",), stale=("/opt/b.py",)))
    found = [str(one) for one in rules.check(image)["imports_do_not_compile"]]
    assert found == [
        "/opt/a.py: has no byte code that Python would use",
        "/opt/b.py: has the byte code of another source",
    ]


def test_findings_of_a_rule_above_the_limit_are_counted() -> None:
    image = good()
    missing = tuple(f"/opt/{number}.py" for number in range(rules.LIMIT + 5))
    image = changed(image, inside=dataclasses.replace(image.inside, missing=missing))
    found = rules.check(image)["imports_do_not_compile"]
    assert len(found) == rules.LIMIT + 1 and str(found[-1]) == "and: 5 more"


def over_budget(image: Evidence) -> Evidence:
    budget = image.required_recipe.budget.model_copy(update={"size": image.size - 10})
    return changed(image, recipe=image.required_recipe.model_copy(update={"budget": budget}))


def test_a_size_over_the_budget_names_layers_and_packages() -> None:
    image = with_package("torch", "2.9.1")(with_layer({"opt/big": bytes(5000)})(good()))
    inside = tuple(
        dataclasses.replace(one, bytes=1770000000) if one.name == "torch" else one for one in image.inside.packages
    )
    image = over_budget(changed(image, inside=dataclasses.replace(image.inside, packages=inside)))
    (finding,) = rules.check(image)["size_within_budget"]
    assert finding.fails
    assert "10 B over the budget" in finding.what and "added 5.0 KB" in finding.what and "torch 1.77 GB" in finding.what


def test_a_framework_from_the_fallback_index_is_over_budget_with_a_note_only() -> None:
    image = good()
    image = over_budget(changed(image, recipe=of_index(image.required_recipe, "default")))
    (finding,) = rules.check(image)["size_within_budget"]
    assert not finding.fails and "default index instead of pytorch-cpu" in finding.what


def test_certificates_of_a_locked_wheel_are_allowed_unless_changed() -> None:
    site = "opt/venv/lib/python3.11/site-packages"
    for content, expected in ((certificate(9), 0), (certificate(9) + certificate(8), 1)):
        image = with_layer({f"{site}/certifi/cacert.pem": content})(good())
        assert len(rules.check(image)["no_foreign_certificates"]) == expected


@pytest.mark.parametrize(("removed", "expected"), [("lib/pip", 0), ("lib/pi", 1)])
def test_certificates_of_the_base_that_the_image_removes_are_read_by_nothing(removed: str, expected: int) -> None:
    """As those of pip, which a compiled Python has."""
    image = good()
    folder, _, name = removed.rpartition("/")
    pip = layer("base", "base", {"lib/pip/cacert.pem": certificate(7)})
    system = layer("system", "below", {f"{folder}/.wh.{name}": b""})
    more = [pip, system, *image.stored.layers]
    image = changed(image, stored=dataclasses.replace(image.stored, layers=more))
    assert len(rules.check(image)["no_foreign_certificates"]) == expected


@pytest.mark.parametrize("base", ["python-3.12", "debian-12"])
def test_variables_of_the_official_images_of_python_are_known_where_they_are_the_base(base: str) -> None:
    image = with_setting(Env=["LANG=C.UTF-8", "GPG_KEY=7169605F", "PYTHON_VERSION=3.12.12", "PYTHON_SHA256=fb85"])(
        good()
    )
    recipe = image.required_recipe
    of_base = recipe.base.model_copy(update={"name": base, "reference": bases()[base].image})
    found = rules.check(changed(image, recipe=recipe.model_copy(update={"base": of_base})))
    assert len(found["nothing_else_is_configured"]) == (0 if base == "python-3.12" else 4)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("root/.aws/credentials", "AWS credentials"),
        ("home/trainer/.config/gcloud/application_default_credentials.json", "gcloud credentials"),
        ("root/.ssh/id_ed25519", "an SSH key"),
        ("opt/app/.env", "an environment file"),
        ("root/.ssh/id_ed25519.pub", None),
        ("opt/venv/lib/python3.11/site-packages/google/auth/credentials.py", None),
    ],
)
def test_credential_files_are_known_by_their_names(path: str, kind: str | None) -> None:
    assert secret_scan.in_name(path) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (json.dumps({"private_key": KEY.decode()}), "a private key"),
        ("if line.startswith('-----BEGIN PRIVATE KEY-----'):", None),
        ("half_precision hf_hub https://user:password@example.com/", None),
    ],
)
def test_private_keys_are_known_by_their_format(text: str, kind: str | None) -> None:
    assert secret_scan.in_text(f"x = '{text}'\n".encode()) == ([kind] if kind else [])


def test_addresses_with_passwords_are_found_in_configuration_files() -> None:
    line = b"extra-index-url = https://me:hunter2@index.example/simple\n"
    assert secret_scan.in_text(line, "etc/pip.conf") == ["an address with a password"]
    assert secret_scan.in_text(line, "opt/readme.md") == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("RUN |1 GITHUB_TOKEN=abc123 /bin/sh -c true", ["a secret by its name (GITHUB_TOKEN)"]),
        ("RUN PASSWORD=$OTHER GOOGLE_APPLICATION_CREDENTIALS=/run/secrets/x true", []),
        ("ARG TOKENS=3", []),
    ],
)
def test_secrets_in_history(command: str, found: list[str]) -> None:
    assert secret_scan.in_command(command) == found


def test_a_secret_is_never_repeated() -> None:
    token = "gh" + "p_" + "z9" * 18
    image = with_layer({"opt/notes": token.encode()})(with_setting(Env=[f"A={token}", f"GH_TOKEN={token}"])(good()))
    found = rules.check(image)
    assert found["no_credentials_in_layers"] and len(found["no_credentials_in_settings"]) == 3
    assert token not in repr(found)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.ZstdCompressor(level=1).compress])
def test_layers_are_read_whatever_their_compression(compress: Callable[[bytes], bytes]) -> None:
    big = os.urandom(3 << 20)
    plain = tar_of({"opt/big.bin": big, "opt/a/.wh.b": b"", "opt/c/.wh..wh..opq": b"", "root/.netrc": b"machine"})
    found = layers.scan(io.BufferedReader(io.BytesIO(compress(plain))))  # type: ignore[arg-type]
    assert found.files["opt/big.bin"].size == len(big) and found.size == len(big) + 7
    assert found.removed == ["opt/a/b", "opt/c"]
    assert [one.path for one in found.suspects] == ["root/.netrc"]


@pytest.mark.parametrize("cut", [100, 3000])
def test_a_broken_layer_is_one_clear_line(cut: int) -> None:
    whole = zstandard.ZstdCompressor().compress(tar_of({"opt/a": os.urandom(5000)}))
    with pytest.raises(StepFailed, match="a layer cannot be read"):
        layers.scan(io.BufferedReader(io.BytesIO(whole[:cut])))  # type: ignore[arg-type]


def test_findings_about_metadata_come_first() -> None:
    """The one line of a failure is the first finding: a wrong label says more than what follows from it."""
    modules = [rule.function.__module__.rpartition(".")[2] for rule in rules.RULES]
    assert list(dict.fromkeys(modules)) == [
        "metadata",
        "configuration",
        "framework",
        "device_code",
        "contents",
        "filesystem",
    ]


def test_layers_are_named_after_the_stages_of_the_recipe() -> None:
    known = recipes.make(load("xla")).layers
    below, copies = [[each for each in known if each.copied is copied] for copied in (False, True)]
    wheels = [each.stage for each in copies if each.pins]
    assert [each.stage for each in copies] == [*wheels, "site", "about", "common", "trainers", "launcher"]
    made_by = [
        "",
        *(f"{each.instruction} x" for each in below),
        *["COPY /wheel-x/../out / # buildkit"] * len(copies),
        "RUN later",
    ]
    names = layers.name_layers(made_by, known)
    assert [stage for stage, _ in names] == ["base", *(each.stage for each in known), "added"]
    assert [kind for _, kind in names] == ["base", *["below"] * len(below), *["copied"] * len(copies), "added"]


def test_where_the_base_holds_the_framework_the_working_directory_is_a_layer_of_the_system() -> None:
    below, _ = layers.stages(dockerfile.dockerfile(load("xla-nightly")))
    assert below == [("system", "RUN"), ("system", "WORKDIR")]


def test_files_that_the_build_makes_or_changes_are_not_those_of_a_wheel(repository: Evidence) -> None:
    """Byte code, commands beside a framework of the base, what a package brings of others, and the rest."""
    site = "../../../../../requirements"
    lists = {"a/__pycache__/a.cpython-313.pyc": b"", f"{site}/bin/a": b"#!python", "a/__init__.py": b""}
    files = {"a/__init__.py": b"", "a/extra.py": b"x", "a/__pycache__/a.cpython-313.pyc": b"compiled"}
    files["a/_vendor/b-1.dist-info/RECORD"] = b"../../bin/b,sha256=x,1\n"
    image = with_layer({"opt/requirements/bin/a": b"#!/usr/bin/env python3"}, stage="wheels-1")(repository)
    image = with_wheel("b", {}, {"a/__init__.py": b""})(with_wheel("a", files, lists)(image))
    assert rules.check(image)["files_are_those_of_their_wheels"] == []


def test_wheels_that_a_user_chose_may_bring_the_same_file_with_different_contents(repository: Evidence) -> None:
    image = with_wheel("cv", {"cv2.py": b"gui"}, {"cv2.py": b"gui"}, stage="wheel-cv")(repository)
    image = with_wheel("headless", {}, {"cv2.py": b"none"}, stage="wheels-added")(image)
    (finding,) = rules.check(image)["files_are_those_of_their_wheels"]
    assert not finding.fails


@pytest.mark.parametrize(
    ("stages", "note"),
    [(("wheel-a", "wheels-added"), True), (("wheels-1", "wheel-b"), True), (("site", "wheel-b"), False)],
)
def test_wheels_that_a_user_chose_may_have_a_path_in_common(
    repository: Evidence, stages: tuple[str, str], note: bool
) -> None:
    recipe = repository.required_recipe
    added = (recipe.layers[-1].model_copy(update={"stage": name, "pins": recipe.layers[2].pins}) for name in stages)
    wheels = (layer for layer in added if layer.stage.startswith("wheel"))
    image = changed(repository, recipe=recipe.model_copy(update={"layers": (*recipe.layers, *wheels)}))
    for stage, content in zip(stages, (b"a", b"b"), strict=True):
        image = with_layer({"x/a.py": content}, stage=stage)(image)
    (finding,) = rules.check(image)["no_path_stored_twice"]
    assert finding.fails is not note


@pytest.mark.parametrize("target", ["xla-nightly", None])
def test_an_empty_layer_is_a_note_where_it_cannot_be_avoided(target: str | None) -> None:
    """A base that holds the framework is not copied for a folder; other images are as their owners made them."""
    image = with_layer({})(good())
    recipe = image.required_recipe
    in_base = recipe.model_copy(update={"base": recipe.base.model_copy(update={"packages": {"torch": "2.9"}})})
    image = changed(image, recipe=in_base if target else None)
    (rule,) = (one for one in rules.RULES if one.id == "no_empty_or_duplicate_layer")
    (finding,) = rule.function(image)
    assert not finding.fails


def test_the_project_of_the_users_code_is_in_no_lock(repository: Evidence) -> None:
    """Its metadata is in the layer of the code, in the site directory of the image."""
    image = with_package("My.Model", "1.0")(repository)
    info = f"{image.required_recipe.site}/my_model-1.0.dist-info/METADATA"
    assert not rules.check(with_layer({info: b"x"}, stage="code")(image))["installed_matches_locks"]
    for path in (info.replace("site-packages", "dist-packages"), info.replace("my_model", "another")):
        (finding,) = rules.check(with_layer({path: b"x"}, stage="code")(image))["installed_matches_locks"]
        assert "package my-model 1.0" in str(finding) and "is in no lock" in str(finding)


def test_the_probe_finds_missing_and_stale_byte_code(tmp_path: Path) -> None:
    import py_compile

    for name in ("good", "stale", "timed", "outdated", "missing"):
        (tmp_path / f"{name}.py").write_text(f"x = '{name}'\n")
    (tmp_path / "template.py").write_text("{{ not python }} at all\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for name in ("good", "stale"):
        py_compile.compile(str(tmp_path / f"{name}.py"), invalidation_mode=unchecked)
    for name in ("timed", "outdated"):
        py_compile.compile(str(tmp_path / f"{name}.py"), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    (tmp_path / "stale.py").write_text("x = 'changed'\n")
    os.utime(tmp_path / "outdated.py", (1, 1))
    found = probe.bytecode([str(tmp_path)])
    assert found["sources"] == 6
    assert [Path(path).name for path in found["missing"]] == ["missing.py", "outdated.py"]
    assert [Path(path).name for path in found["stale"]] == ["stale.py"]


def test_the_probe_reads_no_source_behind_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    """As of Debian's /usr/lib/python3.13/sitecustomize.py where a small image has no /etc."""
    (tmp_path / "sitecustomize.py").symlink_to("/nonexistent/sitecustomize.py")
    (tmp_path / "module.py").write_text("x = 1\n", encoding="utf-8")
    assert list(probe.sources(str(tmp_path), [])) == [str(tmp_path / "module.py")]


def test_the_probe_is_valid_for_the_oldest_python() -> None:
    import ast

    ast.parse(Path(probe.__file__).read_text(encoding="utf-8"), feature_version=(3, 8))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (67587, "67.6 KB"), (340937340, "340.9 MB"), (1.85e9, "1.85 GB")]
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert in_units(count) == text


def test_an_unknown_target_lists_the_valid_ones(trainyard: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = trainyard("verify", "tf-cpux")
    assert (status, out) == (2, "") and "did you mean 'tf-cpu'?" in err and len(err.splitlines()) == 1


def test_the_result_of_an_image_that_failed_is_printed_as_json(
    trainyard: Callable[..., tuple[int, str, str]], fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"passed": False, "findings": [{"rule": "image_is_its_recipe"}]}

    def verified(*_: object, **__: object) -> None:
        raise verify.VerifyFailed("any:tag does not match its recipe: label x", facts)

    fake_engine.add("any:tag")
    monkeypatch.setattr(verify, "verify", verified)
    status, out, err = trainyard("verify", "--image=any:tag", "--json")
    assert (status, json.loads(out)) == (1, facts)
    assert err == "verify: any:tag does not match its recipe: label x\n"
