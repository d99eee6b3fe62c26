"""Write what is derived from the specs: images/<target>/Dockerfile, images/docker-bake.json and cloudbuild.yaml.

make render             all targets
make render TARGET=x    one; x may be the path of a folder of your own
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import cli, images_page, plan
from scripts.cli import ROOT, say
from scripts.cloud import plan as cloud_plan
from scripts.jobs import tables
from scripts.spec import IMAGES, Spec, load, relative, targets

BAKE_FILE = IMAGES / "docker-bake.json"


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ROOT / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def image_json(spec: Spec) -> str:
    """What the launcher reads inside the image: /opt/trainyard/image.json."""
    pins = [Requirement(text) for text in spec.framework.packages]
    versions = {_module(pin.name): next(iter(pin.specifier)).version for pin in pins}
    return json.dumps(_about(spec, versions | {spec.framework.name: spec.framework.version}), indent=2)


def _module(name: str) -> str:
    """How a package is called in image.json."""
    return canonicalize_name(name).replace("-", "_")


def _about(spec: Spec, versions: dict[str, str]) -> dict[str, Any]:
    return {
        "schema": 1,
        "target": spec.target,
        "accelerator": spec.accelerator,
        "framework": spec.framework.name,
        "versions": versions,
        "trainers": spec.trainer_commands(),
        "default": spec.trainers.default,
    }


def _image_json_text(spec: Spec) -> str:
    """What the Dockerfile writes as image.json: with no versions yet where they are the base's, and only then."""
    if not spec.on_framework:
        return image_json(spec)
    names = dict.fromkeys([*map(_module, spec.base_spec().framework), spec.framework.name], "")
    return json.dumps(_about(spec, names), indent=2)


#: Where programs are looked for in an image; last, what the host's NVIDIA driver brings on GKE and Vertex AI.
_PATH = "/opt/venv/bin:/opt/requirements/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: Variables of images for NVIDIA GPUs. The container runtime mounts the driver's libraries by the first two
#: (docs.nvidia.com, container toolkit, "Environment variables"); GKE and Vertex AI mount them under /usr/local/nvidia.
_NVIDIA = {
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
}


def search_path(spec: Spec) -> str:
    """PATH inside the image; with the base's own where the base holds the framework and its Python."""
    path = "/opt/requirements/bin:$PATH" if spec.on_framework else _PATH
    return f"{path}:/usr/local/nvidia/bin" if spec.accelerator == "nvidia" else path


def environment(spec: Spec) -> dict[str, str]:
    """Every variable that the image sets, but for PATH (:func:`search_path`)."""
    fixed = {"PYTHONUNBUFFERED": "1", "HOME": "/home/trainer"}
    return fixed | (_NVIDIA if spec.accelerator == "nvidia" else {}) | spec.environment


def _quoted(value: str) -> str:
    """Text of a spec in a Dockerfile, so that nothing in it is expanded."""
    return '"{}"'.format(re.sub(r'([\\"$])', r"\\\1", value))


def _environment_lines(spec: Spec) -> str:
    pairs = {
        name: value if name not in spec.environment else _quoted(value) for name, value in environment(spec).items()
    }
    return " \\\n    ".join(f"{name}={value}" for name, value in ({"PATH": search_path(spec)} | pairs).items())


def _label_lines(spec: Spec) -> str:
    """The LABEL instruction's pairs; text of the spec is quoted so that nothing in it is expanded."""
    pairs = {name: _quoted(value) for name, value in plan.labels(spec).items()}
    pairs |= {name: f'"${{{argument}}}"' for name, argument in plan.LABELS_FROM_ARGUMENTS.items()}
    if spec.on_framework:
        pairs[f"{plan.LABELS}.framework"] = f'"{spec.framework.name}==${{FRAMEWORK_VERSION}}"'
    return " \\\n      ".join(f"{name}={value}" for name, value in sorted(pairs.items()))


@dataclass(frozen=True)
class Source:
    """Where a Dockerfile copies a folder's files from: the project's build context, or a named one of its own.

    Attributes:
        copy: what stands between COPY and a file's name.
        context: name of the build context, empty for the project's.
    """

    copy: str
    context: str = ""

    @property
    def inside(self) -> bool:
        return not self.context


def source(folder: Path, context: str) -> Source:
    """The project's context holds images/ only, so a folder elsewhere is handed in as ``context``."""
    if folder.is_relative_to(IMAGES):
        return Source(f"{relative(folder)}/")
    return Source(f"--from={context} ", context)


def sources(spec: Spec) -> tuple[Source, Source]:
    """Where the framework's lock, and everything else of the spec's own folder, are copied from."""
    own = source(spec.folder, "own-files")
    return (own if spec.framework_folder == spec.folder else source(spec.framework_folder, "framework-files"), own)


def contexts(spec: Spec) -> dict[str, str]:
    """Named build contexts of an image of the user's own: name -> folder."""
    framework, own = sources(spec)
    found = {framework.context: relative(spec.framework_folder), own.context: relative(spec.folder)}
    return {name: folder for name, folder in found.items() if name}


def variables(spec: Spec) -> dict[str, Any]:
    """Everything templates may use, in one namespace."""
    base = spec.base_spec()
    return {
        "spec_file": spec.where,
        "dockerfile": relative(spec.folder / "Dockerfile"),
        "contexts": "".join(f"--build-context {name}={path} " for name, path in contexts(spec).items()),
        "framework_source": sources(spec)[0],
        "own_source": sources(spec)[1],
        "trainers_package": spec.trainers.package,
        "own_trainers": spec.trainers.folder or "",
        "target": spec.target,
        "base": base,
        "on_framework": spec.on_framework,
        "interpreter": '"$PYTHON"' if spec.on_framework else "/usr/bin/python3",
        "shebang": "/usr/bin/env python3" if spec.on_framework else "/opt/venv/bin/python",
        "path": search_path(spec),
        "environment_lines": _environment_lines(spec),
        "tools": spec.tools,
        "profile": spec.profile,
        "system": spec.system,
        "epoch": plan.FILE_EPOCH,
        "image_json": _image_json_text(spec),
        "version": "unlocked" if spec.on_framework else spec.framework.version,
        "label_lines": _label_lines(spec),
    }


def dockerfile(spec: Spec) -> str:
    """The text of a target's Dockerfile."""
    return _environment().get_template("Dockerfile.j2").render(variables(spec)).rstrip("\n") + "\n"


def bake(specs: list[Spec]) -> str:
    """The text of images/docker-bake.json: one target an image, all of them in group ``default``."""
    plan_of_targets = {
        "//": "Generated from images/*/image.yaml by `make render`. Do not edit.",
        "group": {"default": {"targets": [spec.target for spec in specs]}},
        "target": {
            spec.target: {
                "context": ".",
                **({"contexts": contexts(spec)} if contexts(spec) else {}),
                "dockerfile": relative(spec.folder / "Dockerfile"),
                "tags": [f"{plan.NAME}:{spec.target}-candidate"],
                "platforms": ["linux/amd64"],
            }
            for spec in specs
        },
    }
    return json.dumps(plan_of_targets, indent=2) + "\n"


def rendered(only: Spec | None = None) -> dict[Path, str]:
    """Path -> text of every generated file; with ``only``, of what that image is built from."""
    if only is not None and only.folder.parent != IMAGES:
        return {only.folder / "Dockerfile": dockerfile(only)}
    specs = [load(target) for target in targets()]
    if only is not None:
        return {only.folder / "Dockerfile": dockerfile(only), BAKE_FILE: bake(specs)}
    found = {spec.folder / "Dockerfile": dockerfile(spec) for spec in specs} | {BAKE_FILE: bake(specs)}
    for path, (template, values) in {
        **cloud_plan.rendered(specs),
        **images_page.rendered(specs),
        **tables.rendered(),
    }.items():
        found[path] = _environment().get_template(template).render(values)
    return found


def drift(only: Spec | None = None) -> list[Path]:
    """Generated files whose committed text is not what the specs give."""
    return [
        path for path, text in rendered(only).items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]


def main(arguments: list[str]) -> int:
    options = cli.parser(__doc__).parse_args(arguments)
    only = load(options.target) if options.target else None
    changed = drift(only)
    for path, text in rendered(only).items():
        if path in changed:
            path.write_text(text, encoding="utf-8")
            say(f"wrote {relative(path)}")
    if not changed:
        say("everything generated is up to date")
    cli.result({"written": [relative(path) for path in changed]}, as_json=options.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
