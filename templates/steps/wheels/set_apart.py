#!/usr/bin/python3
"""Move what several wheels bring from /out to /for-site/shared: the layer of the stage `site` has it, no other has.

That is the `__init__.py` of a package that is spread over several wheels, such as nvidia: an empty file, and the only
one in its folder. And a command whose code is in another wheel, which brings the command itself, as tensorflow-tpu has
that of tensorboard. Both follow from a wheel alone, so that its layer is the same whatever else an image has.

The argument is the folder that has out and gets for-site; / without one.
"""

import configparser
import pathlib
import sys

ROOT = pathlib.Path(*sys.argv[1:2] or ["/"])
(SITE,) = ROOT.glob("out/opt/venv/lib/python3*/site-packages")
BROUGHT_BY_SEVERAL = ROOT / "for-site" / "shared"


def set_apart(path):
    """Move a file to the same place below /for-site/shared."""
    shared = BROUGHT_BY_SEVERAL / path.relative_to(ROOT / "out")
    shared.parent.mkdir(parents=True, exist_ok=True)
    path.rename(shared)


def is_spread(folder):
    """Whether a package at the top may be one of several wheels."""
    entries = list(folder.iterdir())
    files = [one for one in entries if not one.is_dir()]
    return len(entries) > 1 and [one.name for one in files] == ["__init__.py"] and not files[0].stat().st_size


def commands_of_others():
    """Names of commands whose module no wheel here has."""
    for file in SITE.glob("*.dist-info/entry_points.txt"):
        points = configparser.RawConfigParser(delimiters=("=",))
        points.optionxform = str
        points.read_string(file.read_text(encoding="utf-8"))
        for section in {"console_scripts", "gui_scripts"} & set(points.sections()):
            for name, value in points.items(section):
                module = value.partition(":")[0].strip().partition(".")[0]
                if not (SITE / module).exists() and not any(SITE.glob(f"{module}.*")):
                    yield name


BROUGHT_BY_SEVERAL.mkdir(parents=True)
for package in [one for one in SITE.iterdir() if one.is_dir()]:
    if is_spread(package):
        set_apart(package / "__init__.py")
for command in set(commands_of_others()):
    if (SITE.parents[2] / "bin" / command).is_file():
        set_apart(SITE.parents[2] / "bin" / command)
# The names of the others, for the stage `site`.
files = sorted(str(file.relative_to(ROOT / "out")) for file in ROOT.glob("out/**/*") if file.is_file())
(ROOT / "for-site" / "files").write_text("".join(f"{file}\n" for file in files), encoding="utf-8")
