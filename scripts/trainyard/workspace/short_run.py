"""Propose arguments for a short run of a command, and correct them by what a run with them met.

Nothing is run here: ``trainyard image`` tries the proposals in the image that it has built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainyard.workspace.command_flags import Option
from trainyard.workspace.lines import text_of
from trainyard.workspace.python_survey import Sources

#: Value -> options that limit a run, the preferred first, for a run as short as possible. Two steps: some learning rate
#: schedules divide by the number of steps less one. Steps of a loop inside another loop limit no run: in reinforcement
#: learning they are those of one rollout.
_LIMITS = {
    "2": "max-steps max-iters max-iter max-iterations num-steps n-steps total-steps train-steps num-iters steps "
    "iterations iters",
    "1": "epochs num-epochs n-epochs max-epochs num-train-epochs nepochs epoch",
}

#: Documents and scripts that show how programs are started.
_DOCUMENT = re.compile(r"(^|/)README[^/]*$|^docs?/[^/]*\.(md|rst)$|^([^/]*/)?[^/]*\.sh$")

#: Switches that replace the data set by made-up data; options that take its folder, and folders with data for tests.
_MADE_UP_DATA = ("fake-data", "dummy", "dummy-data", "synthetic", "synthetic-data", "fast-dev-run", "dry-run")
_DATA_OPTIONS = ("data-dir", "data-path", "data-root", "data-folder", "data", "dataset-dir", "dataset-path", "root-dir")
_DATA = ("tests/data", "test/data", "tests/fixtures/data", "sample_data", "sample-data", "data/sample", "data/samples")

#: Parts of the names of options that take a folder to write to; of those that take data, a setting, and a number.
_OUTPUT = re.compile(r"(^|-)(out|output|save|logs?|logdir|ckpt|checkpoints?|results?|work|workdir|exp|run)(-|$)")
_INPUT = re.compile(r"(^|-)(data|dataset|datasets|datadir|input|inputs|train|images|corpus|folder|path|dir|root)(-|$)")
_CONFIG = re.compile(r"(^|-)(config|cfg|conf|config-file|yaml)(-|$)")
#: A value that is a file, in the code and in a document; options that take a folder, whatever their help says of files
#: in it; a default outside of the repository, which is the user's folder.
_FILE = re.compile(r"([\w./-]*\w\.(?:ya?ml|json\b|[a-z]\w{1,6}(?=['\"])))")
_IN_DOCUMENT = r"[ =]['\"]?([\w./-]*\w\.[a-z]\w{1,6})\b"
_FOLDER = re.compile(r"(^|-)(dir|folder|root)(-|$)")
_OUTSIDE = re.compile(r"['\"]\.\.['\"/]")
#: What the name of an option says besides the name of its folder.
_PLACE = re.compile(r"(^|-)(data|dataset|datasets|input|dir|folder|path|root)(?=-|$)")
_NUMBER = re.compile(r"(^|-)(batch|size|num|n|epochs?|steps?|iters?|seed|gpus?|workers?|rank|count|port)(-|$)")
_NAME = re.compile(r"(^|-)(name|tag|id|project|experiment|comment)(-|$)")
_FIRST_CONFIGS = re.compile(r"tiny|debug|toy|smoke|mini|small|test|example|default|base")

#: Option -> the value with which a program needs no GPU, no account of a tracker, little memory. Words of
#: https://docs.pytorch.org/docs/stable/notes/cuda.html and https://lightning.ai/docs/pytorch/stable/common/trainer.html
_WITHOUT_GPU = {
    **{"device": "cpu", "accelerator": "cpu", "devices": "1", "gpus": "0", "num-gpus": "0", "n-gpu": "0"},
    **dict.fromkeys(("cuda", "use-cuda", "use-gpu", "compile"), "False"),
}
_WITHOUT_GPU_SWITCHES = ("no-cuda", "cpu", "no-gpu", "use-cpu", "no-accel", "force-cpu", "cpu-only", "disable-cuda")
_WITHOUT_TRACKER = {"report-to": "none", "wandb-mode": "offline", "wandb-log": "False", "use-wandb": "False"}
_WITHOUT_TRACKER_SWITCHES = ("no-wandb", "disable-wandb", "wandb-disabled", "no-log")
_LITTLE = dict.fromkeys(("batch-size", "per-device-train-batch-size", "train-batch-size", "bs", "batch"), "2")

#: What a parser says of an option that it does not have, or of a value that it does not take: argparse, click, absl,
#: Fire, Hugging Face's and Hydra's, in this order. And of what is missing.
_REFUSED = re.compile(
    r"unrecognized (?:arguments|options)?:? (?P<many>.+)|argument (?P<one>\S+): (?:invalid|expected|ignored)"
    r"|No such option:? '?(?P<click>[-\w]+)|Invalid value for '(?P<value>[-\w]+)"
    r"|Unknown command line flag '(?P<absl>\w+)"
    r"|Could not consume arg: (?P<fire>\S+)|not used by the HfArgumentParser: \[(?P<hf>.+?)\]"
    r"|Could not override '(?P<hydra>[\w.]+)'|Key '(?P<key>\w+)' is not in struct"
)
_REQUIRED = re.compile(
    r"(?:arguments are required|required options?): (?P<many>.+)|Missing (?:option|argument) '(?P<click>[-\w]+)"
    r"|[Ff]lag --(?P<absl>\w+) must (?:have a value|be specified)|required argument: (?P<fire>\w+)"
    r"|Missing mandatory value: (?P<hydra>[\w.]+)"
)
_NEEDS_GPU = re.compile(
    r"(?i)no nvidia driver|cudaaccelerator can ?not run"
    r"|not compiled with cuda|no cuda gpus? (is|are)|(cuda|gpus?) (gpu )?(is |are )?(not |un)available"
    r"|no supported gpu|cuda.{0,20}(required|not found)|torch\.cuda\.is_available\(\) is false"
    r"|(requires?|needs?) a? ?(cuda|gpu)|no gpu|invalid device.*cuda|torch\.cuda\.\w+ is not|nvidia-smi|libcuda\.so"
)
_NO_FILE = re.compile(
    r"(?i)FileNotFoundError|NotADirectoryError|No such file|not found or corrupted|does not exist|n't find any"
    r"|dataset (not found|is empty)|num_samples=0|no (images|files|data)\b"
)
#: What other arguments do not change.
_CODE = re.compile(r"ModuleNotFoundError|ImportError|SyntaxError|IndentationError|TabError")
_NOT_WRITABLE = re.compile(r"PermissionError|Read-only file system|Permission denied")

#: A line that shows a loss, as a number: an image whose smoke test expects it has trained.
LOSS = r"(?i)loss\W*\d"


@dataclass
class ShortRun:
    """Hold the arguments of the next run.

    Attributes:
        options: that the program is known to have, by :attr:`Option.word`.
        args: option -> its argument.
        data: folder of the repository for /data; empty: none. ``mounted``: /data holds data in any case.
        inside: names of the folders in /data.
        configs: files of settings of the repository.
        files: option that takes a file, no folder -> that of the repository which its default or a document names.
        refused: options that the program does not take, ``seen``: the arguments of the runs before.
    """

    options: Mapping[str, Option] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    data: str = ""
    mounted: bool = False
    inside: Collection[str] = ()
    configs: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    seen: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments: positional ones last."""
        return tuple(sorted(self.args.values(), key=lambda word: not (word.startswith("-") or "=" in word)))

    def _set(self, values: Mapping[str, str], switches: Iterable[str] = (), *, first: bool = True) -> bool:
        """Set the options that there are, by default the first of them alone; return whether one is new."""
        for name, value in (*((switch, "") for switch in switches), *values.items()):
            option = self.options.get(name)
            if option is None or name in self.refused or option.switch != (not value):
                continue
            if value and option.choices and value not in option.choices:
                continue
            new = self.args.get(name) != option.given(value)
            self.args[name] = option.given(value)
            if first:
                return new
        return False

    def correct(self, error: str, reason: str, hosts: Sequence[str] = (), *, out_of_memory: bool = False) -> str:
        """Correct the arguments by what a run with them met; return what is missing, empty if there is another try.

        Args:
            error: its last lines, ``reason``: why it failed, in one line. ``hosts``: that it asked for.
        """
        missing = self._corrected(error, reason, hosts, out_of_memory)
        return missing or (reason if self.words in self.seen else "")

    def _corrected(self, error: str, reason: str, hosts: Sequence[str], out_of_memory: bool) -> str:
        if _CODE.search(error):
            return reason
        if names := _said(_REFUSED, error):
            removed = [self._refuse(name) for name in names]
            return "" if any(removed) else reason
        if names := _said(_REQUIRED, error):
            return next((why for name in names if (why := self._fill(name))), "")
        if out_of_memory:
            return "" if self._set(_LITTLE) else reason
        if _NEEDS_GPU.search(error):
            found = self._set(_WITHOUT_GPU, first=False) or self._set({}, _WITHOUT_GPU_SWITCHES)
            return "" if found or self.words not in self.seen else f"it needs a GPU: {reason}"
        if hosts:
            asked = self._set({}, _MADE_UP_DATA) or self._set(_WITHOUT_TRACKER, _WITHOUT_TRACKER_SWITCHES)
            return "" if asked or self._read_data() else reason
        if _NOT_WRITABLE.search(error):
            places = (name for name in self.options if re.search(r"dir|path|folder|root|out(put)?$", name))
            writes = {name: "/output" for name in places if _OUTPUT.search(name) or "outdir" in name}
            self._set(writes, first=False)
            return "" if self.words not in self.seen else reason
        if _NO_FILE.search(error):
            # A name under a folder of data sets: os.path.join() leaves that out before an absolute path.
            named = {"dataset": "/data"} if (self.data or self.mounted) and "dataset" not in self.files else {}
            if self._set({}, _MADE_UP_DATA) or self._read_data() or self._set(named):
                return ""
            return reason if self.mounted or self.data else f"{reason} (or 'trainyard image --data FOLDER')"
        if (self.data or self.mounted) and self._set(_LITTLE):  # a batch may be larger than a folder for tests
            return ""
        # A short run is a special case, that a schedule or a logger may not have thought of: a longer one is shortened.
        limits = [name for name in self.args if name in _limiting()]
        for name in limits:
            self._refuse(name)
        return "" if limits else reason

    def _refuse(self, name: str) -> bool:
        word = Option(name, 0, False, False).word
        self.refused.add(word)
        return self.args.pop(word, None) is not None

    def _read_data(self) -> bool:
        values = dict.fromkeys(self.folders, "/data") if self.data or self.mounted else {}
        return self._set(values)

    @property
    def folders(self) -> list[str]:
        """Return the options that take the folder of the data: first those whose default is outside the repository."""
        outside = [
            word
            for word, option in self.options.items()
            if _OUTSIDE.search(option.shown) and "data" in f"{word}{option.shown}" and not _OUTPUT.search(word)
        ]
        return [word for word in (*outside, *_DATA_OPTIONS) if word in self.options and word not in self.files]

    def _fill(self, name: str) -> str:
        """Give a required option a value that its name tells; return what only the user knows, empty if it has one."""
        word = Option(name, 0, False, False).word
        option = self.options.get(word) or Option(name, 0, True, False, (), "." in name)
        value = ""
        if option.choices:
            value = option.choices[0]
        elif named := self.files.get(word):
            value = named
        elif _CONFIG.search(word):
            value = next(iter(self.configs), "")
        elif _NUMBER.search(word):
            value = "1"
        elif _OUTPUT.search(word):
            value = "/output"
        elif _INPUT.search(word):
            value = self._folder(word) if (self.data or self.mounted) and word not in self.files else ""
        elif _NAME.search(word):
            value = "smoke"
        if not value or word in self.args:
            takes_folder = _INPUT.search(word) and word not in self.files
            place = _place(word)
            named = f" (it gets FOLDER/{place} if there is one)" if place else ""
            needs = f" and a folder for it: 'trainyard image --data FOLDER'{named}" if takes_folder else ""
            return f"it needs a value for {name}{needs}"
        self.args[word] = option.given(value)
        return ""

    def _folder(self, word: str) -> str:
        """Return the folder of the data for an option: the one in it that has the option's name, or /data itself."""
        names = (word, _place(word))
        return next((f"/data/{name}" for name in self.inside if name.lower().replace("_", "-") in names), "/data")


def _place(word: str) -> str:
    """Return what an option calls its folder, ``clean`` for ``clean-dir``; empty for ``data-dir``."""
    return _PLACE.sub("", word).strip("-")


def _limiting() -> dict[str, str]:
    """Return option -> value, the preferred first."""
    return {name: value for value, names in _LIMITS.items() for name in names.split()}


def _said(pattern: re.Pattern[str], error: str) -> list[str]:
    """Return the options that a parser names in the last line that it has about them."""
    found = list(pattern.finditer(error))
    words = found[-1][found[-1].lastgroup or 0] if found else ""
    names = [name for word in re.split(r"[,\s'\"/]+", words) if re.match(r"[-\w]", name := word.split("=")[0])]
    # These two name an option without its dashes.
    return [f"--{name}" for name in names] if found and found[-1].lastgroup in ("absl", "fire") else names


def program_of(words: Sequence[str], sources: Sources, scripts: Mapping[str, str]) -> str:
    """Return the path of the program of a command; empty if it is none of the repository.

    Args:
        scripts: command -> object of its projects, as ``package.module:function``.
    """
    for number, word in enumerate(words):
        module = words[number + 1] if word == "-m" and words[number + 1 :] else scripts.get(word, "").partition(":")[0]
        source = sources.of(word.removeprefix("./"))
        source = source or (module and (sources.of_module(f"{module}.__main__") or sources.of_module(module))) or None
        if source:
            return source.path
    return ""


def documents(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the documents and shell scripts of a repository -> their text."""
    found = [name for name in names if _DOCUMENT.search(name) and not (folder / name).is_symlink()]
    return {name: text_of(folder / name) for name in found}


def _file(option: Option, documents: Collection[str]) -> str:
    """Return the file that a document, or else its default or help, gives an option; empty if none does."""
    pattern = f"{re.escape(option.name)}{_IN_DOCUMENT}" if option.name.startswith("-") else "(?!)"
    found = next(filter(None, (re.search(pattern, text) for text in documents)), None) or _FILE.search(option.shown)
    return found[1].removeprefix("./") if found else ""


def propose(
    words: Sequence[str],
    path: str,
    sources: Sources,
    names: Sequence[str],
    documents: Collection[str] = (),
    *,
    mounted: str = "",
) -> ShortRun:
    """Return the first run to try.

    Args:
        words: the command, ``path``: of its program; empty if that is not known.
        names: the files of the repository, ``documents``: texts that show how its programs are started.
        mounted: the folder of this machine that containers have at /data in any case; empty if there is none.
    """
    closure = sources.closure(path) if path else []
    options = {option.word: option for source in reversed(closure) for option in source.options}
    repeated = {name.replace("_", "-") for source in closure for name in source.repeated}
    configs = [name for name in names if re.search(r"(^|/)(configs?|conf)/.*\.(ya?ml|json|toml|py)$", name)]
    configs.sort(key=lambda name: (not _FIRST_CONFIGS.search(name.rpartition("/")[2]), name.count("/"), name))
    given = {Option(word.partition("=")[0], 0, False, False).word for word in words}
    folders = [folder for folder in _DATA if any(name.startswith(f"{folder}/") for name in names)]
    options = {word: one for word, one in options.items() if word not in given}
    taken = {word: _file(one, documents) for word, one in options.items() if not _FOLDER.search(word)}
    taken = {word: name if name in names else "" for word, name in taken.items() if name}
    run = ShortRun(options, mounted=bool(mounted), configs=configs, files=taken)
    run.inside = sorted(path.name for path in Path(mounted).glob("*/")) if mounted else ()
    limits = {name: value for name, value in _limiting().items() if value == "1" or name not in repeated}
    run._set(limits)
    run._set({}, _MADE_UP_DATA)
    if run.folders and not run.args.keys() & set(_MADE_UP_DATA):
        run.data = folders[0] if folders and not mounted else ""
        run._read_data()
    for option in run.options.values():
        # Required ones of a program alone: parsers of the files that it imports may be those of other programs.
        if option.required and option.word not in run.args and option in closure[0].options:
            run._fill(option.name)
    return run
