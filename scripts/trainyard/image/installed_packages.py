"""Start what an image's packages have beside a training: console scripts, modules, entry points, extension modules.

Runs INSIDE the image: the smoke test copies this file to its volume, and starts it with a JSON object (:func:`main`).
It uses the standard library only and supports Python 3.8 and newer. Each script, and each package, has a process of its
own, so that one that crashes ends no other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.metadata
import json
import mmap
import os
import pydoc
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

#: Seconds after which a script that still runs has started: servers know no ``--help``.
SCRIPT_LIMIT = 60
#: Seconds that the modules of a package may take.
PACKAGE_LIMIT = 300

#: What says how a command is used, or which version it is.
_USAGE = re.compile(r"(?i)\busage\b|\boptions:|\bcommands:|\bversion\b|^\S+ v?\d+(\.\d+)+$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"^(?:(?:\w+\.)+\w+|[A-Z_]\w*)(?:: .*)?$", re.MULTILINE)

#: Errors of a script that is broken, whether it knows ``--help`` or not.
_BROKEN = re.compile(r"(?:ModuleNotFound|Import|Attribute|Type|Name|Syntax)Error\b")

#: What colours a terminal: https://www.ecma-international.org/publications-and-standards/standards/ecma-48/
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

#: Modules that no extra brings: setuptools and Python had them.
_GONE = ("pkg_resources", "distutils", "imp")

#: Top-level modules that are in wheels by mistake.
_NOT_MODULES = frozenset(
    {"test", "tests", "testing", "docs", "doc", "examples", "example", "benchmarks", "scripts", "setup", "conftest"}
)

_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)


def canonical(name: str) -> str:
    """Return a name of a distribution in its normal form (https://packaging.python.org/specifications/name-normalization/)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(words: list[str], limit: float) -> tuple[int, str, bool]:
    """Return status and output of a command, and whether it was ended after ``limit`` seconds, with its children."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status, late = process.wait(limit), False
        except subprocess.TimeoutExpired:
            late = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        output.seek(0)
        return status, _COLOUR.sub("", output.read(1 << 20).decode(errors="replace")), late


def reason(text: str, status: int) -> str:
    """Return the last error in the output of a command that failed, else its last line or its status."""
    errors = _ERROR.findall(text[text.rfind(_TRACEBACK) :]) if _TRACEBACK in text else []
    if status < 0:
        names = {int(one): one.name for one in signal.Signals}
        return f"{names.get(-status, f'signal {-status}')} ended it"
    last = [line.strip() for line in text.splitlines() if line.strip()]
    return (errors or last or [f"exit status {status}"])[-1][:300]


def is_optional(installed: Installed, kind: str, why: str) -> bool:
    """Return whether an error says that an extra of the distribution, or a package beside it, has to be installed.

    What a script of a package with extras misses is taken for one of them: how a module is called tells no package.
    """
    missing = re.search(r"No module named '(\w+)", why)
    extras = [canonical(re.split(r"[^\w.-]", each)[0]) for each in installed.requires if re.search(r"extra\s*==", each)]
    asked = re.search(r"(?i)\binstall\b", why) or re.search(rf"(?i)\b{re.escape(installed.name)}\[", why)
    of_extra = missing and (canonical(missing[1]) in extras or (kind == "scripts" and extras))
    return bool(asked or (of_extra and missing and missing[1] not in _GONE))


def start_script(name: str) -> str:
    """Return why a console script does not start; empty if it does.

    It starts if it says how it is used, or ends with status 0, for one of its arguments, without an exception.
    """
    first = ""
    for argument in ("--help", "--version"):
        try:
            status, text, late = run([name, argument], SCRIPT_LIMIT)
        except OSError as error:
            return str(error)
        if late or (_TRACEBACK not in text and (not status or (status > 0 and _USAGE.search(text)))):
            return ""
        why = reason(text, status)
        first = first or why
        if _BROKEN.match(first):
            break
        # It has begun to work: it takes the word for a file or a value, or has no such option.
        if status > 0 and (argument in why or f"option '{argument.lstrip('-')}'" in why):
            return ""
    return first


def modules_of(distribution: importlib.metadata.Distribution) -> list[str]:
    """Return the public top-level modules of a distribution; parts of namespace packages have none."""
    names = set()
    for file in distribution.files or ():
        parts = file.parts
        if len(parts) == 1 and file.name.endswith((".py", *_SUFFIXES)):
            names.add(file.name.partition(".")[0])
        elif len(parts) == 2 and file.name == "__init__.py":
            names.add(parts[0])
    return sorted(name for name in names if name.isidentifier() and name[0] != "_" and name not in _NOT_MODULES)


def is_extension_module(path: str) -> bool:
    """Return whether a file is one that Python imports: it has an initialization function, and libraries have none.

    https://docs.python.org/3/extending/building.html
    """
    name = os.path.basename(path)
    if not name.endswith(_SUFFIXES) or not os.path.isfile(path) or not os.path.getsize(path):
        return False
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(b"PyInit_" + name.partition(".")[0].encode()) >= 0


def load(point: importlib.metadata.EntryPoint) -> None:
    """Load the object of an entry point; fsspec's have no colon, and a module stands behind that of pandas."""
    try:
        point.load()
    except (AttributeError, ImportError):
        if pydoc.locate(point.value.split(" ")[0].replace(":", ".")) is None:
            raise


def try_package(name: str, groups: list[str], files: list[str], said: str, *, imports: bool) -> None:
    """Import the modules of a distribution, load its entry points, and then its extension modules.

    Args:
        groups: of entry points that are left out. ``files``: beginnings of paths of extension modules that are.
        imports: whether modules and extension modules are tried.
        said: path of the file that is written to: a JSON string with what is tried, before it is; at the end a list of
            what was tried, and why it failed.
    """
    sys.argv = [name]  # which some modules read

    def attempt(what: str, work: Any) -> None:
        say(what)
        try:
            work()
        except BaseException as error:  # SystemExit, and pyo3's PanicException, are no Exceptions
            tried.append((what, f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]))
        else:
            tried.append((what, ""))

    def say(what: Any) -> None:
        with open(said, "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")

    distribution = importlib.metadata.distribution(name)
    tried: list[tuple[str, str]] = []
    for module in modules_of(distribution) if imports else ():
        attempt(f"import {module}", lambda module=module: importlib.import_module(module))
    for point in distribution.entry_points:
        if point.group in groups or "[" in point.value:  # of an extra, which is not installed
            continue
        attempt(f"entry point {point.name} of {point.group}", lambda point=point: load(point))
    with open("/proc/self/maps") as maps:
        loaded = {line.split(None, 5)[-1].strip() for line in maps}
    for file in distribution.files if imports and distribution.files else ():
        path = os.path.realpath(str(distribution.locate_file(file)))
        if path not in loaded and not str(file).startswith(tuple(files)) and is_extension_module(path):
            attempt(f"load {file}", lambda path=path: ctypes.CDLL(path, sys.getdlopenflags()))
    say(tried)
    os._exit(0)  # what runs at the end of a program was not asked for


def check_package(name: str, groups: list[str], files: list[str], *, imports: bool) -> list[tuple[str, str]]:
    """Run :func:`try_package` in a subprocess, and return each step with its error, empty if it succeeded."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as said:
        given = {"package": name, "groups": groups, "files": files, "imports": imports, "said": said.name}
        request = json.dumps(given)
        status, text, late = run([sys.executable, os.path.abspath(__file__), request], PACKAGE_LIMIT)
        lines = [json.loads(line) for line in said]
    if lines and isinstance(lines[-1], list):
        return [(what, why) for what, why in lines[-1]]
    doing = lines[-1] if lines else "it"
    return [(doing, f"still running after {PACKAGE_LIMIT} s" if late else reason(text, status))]


class Installed:
    """Read what is known of a distribution; ``damaged`` says why that cannot be read, empty if it can."""

    def __init__(self, distribution: importlib.metadata.Distribution) -> None:
        self.distribution, self.damaged = distribution, ""
        self.name, self.version = "", ""
        self.entry_points: list[Any] = []
        self.requires: list[str] = []
        try:
            self.name, self.version = canonical(distribution.metadata["Name"] or ""), distribution.version
            self.entry_points, self.requires = list(distribution.entry_points), list(distribution.requires or ())
        except Exception as error:  # whatever it holds
            self.damaged = f"{type(error).__name__}: {error}"[:300]


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Return how much was tried, by kind, the findings, and, if there are any, what all packages require.

    Args:
        request: see :func:`main`.
    """
    known: dict[str, Installed] = {}
    for each in map(Installed, importlib.metadata.distributions()):
        known.setdefault(each.name, each)  # of several, the first is imported
    packages = [name for name in known if name in request["packages"]]
    skipped = {(row.get("package"), row.get("script")) for row in request["skip"] if "files" not in row}
    groups = sorted({row["group"] for row in request["skip"] if "group" in row} | {"console_scripts", "gui_scripts"})
    of_files = [row for row in request["skip"] if "files" in row]
    files = {name: [row["files"] for row in of_files if row["package"] == name] for name in packages}
    scripts: dict[tuple[str, str], list[str]] = {}  # (package, function) -> its names: one is started
    for name in packages:
        for point in known[name].entry_points:
            if point.group == "console_scripts" and "[" not in point.value and (name, point.name) not in skipped:
                scripts.setdefault((name, point.value), []).append(point.name)
    named = [name for name in packages if name in request["named"] and (name, None) not in skipped]
    found: list[tuple[str, str, str, str]] = []
    counts = {"scripts": sum(map(len, scripts.values())), "modules": 0, "entry_points": 0, "extension_modules": 0}
    kinds = {"import": "modules", "entry": "entry_points", "load": "extension_modules"}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        started = [(pool.submit(start_script, words[0]), words, name) for (name, _), words in scripts.items()]
        loading = [
            (pool.submit(check_package, name, groups, files[name], imports=name in named), name)
            for name in packages
            if not known[name].damaged
            and (name in named or any(point.group not in groups for point in known[name].entry_points))
        ]
        for script, words, name in started:
            why = script.result()
            lacking = [f"there is no {word} on PATH" for word in words if not shutil.which(word)]
            found.append((name, "scripts", " and ".join(words), (lacking or [why])[0]))
        for package, name in loading:
            for what, why in package.result():
                kind = kinds.get(what.partition(" ")[0], "modules")
                counts[kind] += 1
                found.append((name, kind, what, why))
    found += [(name, "entry_points", "its metadata", known[name].damaged) for name in packages]
    findings = [
        {"package": name, "version": known[name].version, "kind": kind, "what": what, "why": why}
        for name, kind, what, why in found
        if why and not is_optional(known[name], kind, why)
    ]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    requires = sorted({text for each in known.values() for text in each.requires}) if findings else []
    seconds = round(used.ru_utime + used.ru_stime, 1)
    return {**counts, "cpu_seconds": seconds, "findings": findings, "requires": requires}


def main() -> None:
    """Print the result of :func:`check` for the object in the first argument, as the last line.

    Its keys: ``packages``, the canonical names of the distributions to check; ``named``, those whose modules are
    imported; ``skip``, rows of smoke_packages.yaml without their reasons.
    """
    request = json.loads(sys.argv[1])
    os.chdir(tempfile.gettempdir())
    if "package" in request:
        try_package(request.pop("package"), **request)
    else:
        os.nice(5)
        print(json.dumps(check(request)))


if __name__ == "__main__":
    main()
