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

from scripts import cli, cloud_plan, plan
from scripts.cli import ROOT, say
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
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins = [Requirement(text) for text in spec.framework.packages]
    about = {
        "schema": 1,
        "target": spec.target,
        "framework": spec.framework.name,
        "versions": {canonicalize_name(pin.name).replace("-", "_"): next(iter(pin.specifier)).version for pin in pins}
        | {spec.framework.name: spec.framework.version},
        "trainers": spec.trainer_commands(),
        "default": spec.trainers.default,
    }
    return json.dumps(about, indent=2)


def _label_lines(spec: Spec) -> str:
    """The LABEL instruction's pairs; text of the spec is quoted so that nothing in it is expanded."""
    pairs = {name: re.sub(r'([\\"$])', r"\\\1", value) for name, value in plan.labels(spec).items()}
    pairs |= {name: f"${{{argument}}}" for name, argument in plan.LABELS_FROM_ARGUMENTS.items()}
    return " \\\n      ".join(f'{name}="{value}"' for name, value in sorted(pairs.items()))


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
        "base": base,
        "system": spec.system,
        "epoch": plan.FILE_EPOCH,
        "image_json": image_json(spec),
        "version": spec.framework.version,
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
    """Path -> text of every generated file; of one spec's Dockerfile alone if ``only`` is a user's own image."""
    if only is not None and only.folder.parent != IMAGES:
        return {only.folder / "Dockerfile": dockerfile(only)}
    specs = [load(target) for target in targets()]
    found = {spec.folder / "Dockerfile": dockerfile(spec) for spec in specs} | {BAKE_FILE: bake(specs)}
    for path, (template, values) in cloud_plan.rendered(specs).items():
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
