"""Text as tokens: files of text or JSON lines, packed into one memory-mapped file, and the order of its windows.

A token is a byte of UTF-8, or what a tokenizer.json of the package ``tokenizers`` makes of the text. Documents (files,
or lines of .jsonl) follow each other, each with an end token behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from trainers.common import paths, storage
from trainers.common.exits import USAGE, UserError
from trainers.common.flags import Flag, number
from trainers.common.order import random_bits

FLAGS = (
    Flag("datadir", str, "", "file or folder (or gs:// address) of text (.txt, .md, .rst, .py) or .jsonl with the key"
         ' "text", also as .gz; its folders train and val, if it has both', "data"),
    Flag("fake-data", None, False, "train on random tokens: no data needed", "data"),
    Flag("tokenizer", str, "", "tokenizer.json of the package tokenizers; default: the bytes of UTF-8", "data"),
    Flag("end-token", str, "", "the tokenizer's token behind each document; default: the first that it has of"
         " <|endoftext|>, <|end_of_text|>, </s>, <eos>", "data"),
    Flag("val-fraction", number(0.0001, 0.5), 0.1, "part of the tokens, at the end, that validates if there are no"
         " folders train and val", "data"),
    Flag("cache-dir", str, "", "folder of the packed tokens; default: .packed in --datadir, or a temporary folder if"
         " that cannot be written", "data"),
)  # fmt: skip

_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BLOCK = 1 << 20  # bytes of a text file, and of documents, that are tokenized at a time
_FORMAT = 1  # of the packed file; another number packs again


# --- tokens -------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """The bytes of UTF-8 as tokens 0 to 255, and 256 at the end of a document."""

    vocab_size, end, end_token = 257, 256, "<|endoftext|>"

    @property
    def json(self) -> str:
        """Return this tokenizer as the tokenizer.json of ``tokenizers``: byte-level BPE without merges.

        GPT-2's characters for bytes: printable ones stand for themselves, others for those from U+0100.
        https://github.com/openai/gpt-2/blob/master/src/encoder.py
        """
        printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
        others = iter(range(256, 512))
        vocab = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
        special = {"id": self.end, "content": self.end_token, "single_word": False, "lstrip": False, "rstrip": False,
                   "normalized": False, "special": True}  # fmt: skip
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                 "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                 "vocab": {**vocab, self.end_token: self.end}, "merges": []}  # fmt: skip
        return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
                           "normalizer": None, "pre_tokenizer": level, "post_processor": None, "decoder": level,
                           "model": model})  # fmt: skip

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return the tokens of each of ``texts``."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, without end tokens."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


class FileTokenizer:
    """The tokenizer of a tokenizer.json, without the special tokens that it would add."""

    def __init__(self, path: str, end_token: str = "") -> None:
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise UserError("--tokenizer needs the package tokenizers: pip install tokenizers, or leave it out to train"
                            " on bytes") from None  # fmt: skip
        try:
            self.json = paths.read_file(path).decode()
            self._tokenizer = Tokenizer.from_str(self.json)
        except OSError as error:
            raise UserError(f"--tokenizer {path}: {error.strerror}", USAGE) from None
        except Exception as error:  # tokenizers raises Exception itself
            raise UserError(f"--tokenizer {path}: is not a tokenizer.json ({' '.join(str(error).split())[:120]})",
                            USAGE) from None  # fmt: skip
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values())
        names = [end_token] if end_token else _END_TOKENS
        self.end_token = next((name for name in names if self._tokenizer.token_to_id(name) is not None), "")
        if not self.end_token:
            raise UserError(f"--tokenizer {path}: has no token {' or '.join(names)}: name the one that ends a document"
                            " with --end-token", USAGE)  # fmt: skip
        self.end: int = self._tokenizer.token_to_id(self.end_token)

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return the tokens of each of ``texts``; raises ``UnicodeDecodeError``."""
        encoded = self._tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(text.ids, np.uint32) for text in encoded]

    def decode(self, tokens: list[int]) -> str:
        """Return the text of ``tokens``, without special tokens."""
        return str(self._tokenizer.decode(tokens))


Tokenizer = ByteTokenizer | FileTokenizer


# --- files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A file of text: ``name`` is its path within the data, ``version`` changes with its contents."""

    path: str
    name: str
    size: int
    version: str

    @property
    def is_jsonl(self) -> bool:
        """Return whether each line is a document."""
        return self.path.removesuffix(".gz").endswith(".jsonl")


def files_in(folder: str, prefix: str = "") -> list[File]:
    """Return the files of text in ``folder`` and in its folders, sorted; hidden ones are left out."""
    files: list[File] = []
    for name, entry in storage.entries(folder).items():
        path = paths.join(folder, name)
        if name.startswith("."):
            continue
        if entry.folder:
            files += files_in(path, f"{prefix}{name}/")
        elif name.removesuffix(".gz").endswith(_SUFFIXES):
            files.append(File(path, prefix + name, entry.size, entry.version))
    return files


def _files(datadir: str) -> dict[str, list[File]]:
    """Return the files of ``datadir`` by what they are for: "train" and "val", or "all"."""
    entries = storage.entries(datadir)
    if not entries:  # a file, whose folder lists it
        folder, _, name = datadir.rstrip("/").rpartition("/")
        entry = storage.entries(folder or ("/" if datadir.startswith("/") else ".")).get(name)
        if entry is None or entry.folder:
            raise UserError(f"--datadir {datadir}: {'is empty' if entry else 'does not exist'}")
        return {"all": [File(datadir, name, entry.size, entry.version)]}
    if all(name in entries and entries[name].folder for name in ("train", "val")):
        splits = {name: files_in(paths.join(datadir, name)) for name in ("train", "val")}
    else:
        splits = {"all": files_in(datadir)}
    for name, files in splits.items():
        if not files:
            where = datadir if name == "all" else paths.join(datadir, name)
            raise UserError(f"--datadir: no files {', '.join(_SUFFIXES)} (or .gz) in {where}")
    return splits


def _pieces(file: File) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of ``file`` in pieces, and whether a document ends behind each.

    Raises :class:`UserError` if a line of a .jsonl is not an object with a string ``text``.
    """
    try:
        with contextlib.ExitStack() as stack:
            lines: Any = stack.enter_context(paths.open_file(file.path))
            if file.path.endswith(".gz"):
                lines = stack.enter_context(gzip.open(lines))
            if not file.is_jsonl:
                while piece := lines.read(_BLOCK):
                    yield piece + lines.readline(), False  # whole lines: no character is cut
                yield b"", True
                return
            for count, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"].encode()
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise UserError(f'{file.path}: line {count} is not a JSON object with a string "text"') from None
                yield text, True
    except (OSError, EOFError) as error:
        raise UserError(f"{file.path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _write(files: list[File], tokenizer: Tokenizer, out: IO[bytes], dtype: Any) -> dict[str, Any]:
    """Write the tokens of ``files`` to ``out``; returns their number and their SHA-256."""
    digest, count = hashlib.sha256(), 0
    end = np.array([tokenizer.end], dtype)

    def write(texts: list[bytes], ends: list[bool], file: File) -> int:
        try:
            encoded = tokenizer.encode(texts)
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path}: is not UTF-8 ({error.reason}): convert it, or train on bytes") from None
        parts = [end[:0]]
        for tokens, ended in zip(encoded, ends, strict=True):
            parts += [tokens, end] if ended else [tokens]
        packed = np.concatenate(parts).astype(dtype)
        digest.update(packed.tobytes())
        out.write(packed.tobytes())
        return len(packed)

    for file in files:
        texts: list[bytes] = []
        ends: list[bool] = []
        size = 0
        for text, ended in _pieces(file):
            texts.append(text)
            ends.append(ended)
            size += len(text)
            if size >= _BLOCK:
                count += write(texts, ends, file)
                texts, ends, size = [], [], 0
        count += write(texts, ends, file)
    return {"tokens": count, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold the lock ``path``, which the kernel releases if the process is killed."""
    with open(path, "w", encoding="utf-8") as file:
        with contextlib.suppress(OSError):  # a mount without locks, where each process packs, to the same bytes
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pack(files: list[File], tokenizer: Tokenizer, folder: str, say: Callable[[str], None]) -> tuple[np.ndarray, str]:
    """Return the tokens of ``files``, memory-mapped, and their SHA-256; packs them unless ``folder`` has them already.

    The packed file is found again by the names, sizes and times of ``files`` and by the tokenizer. Of the processes of
    a machine, one packs and the others wait.
    """
    about = [[file.name, file.size, file.version] for file in files]
    key = hashlib.sha256(json.dumps([_FORMAT, about, tokenizer.json, tokenizer.end]).encode()).hexdigest()[:16]
    data, meta = os.path.join(folder, f"{key}.bin"), os.path.join(folder, f"{key}.json")
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    with _locked(os.path.join(folder, "lock")):
        if not os.path.exists(meta):
            say(f"Packing {len(files)} files, {sum(file.size for file in files):,} bytes, into {data}")
            with paths.atomic_file(data) as out:
                packed = _write(files, tokenizer, out, dtype)
            with paths.atomic_file(meta) as out:  # last: it says that the file beside it is complete
                out.write(json.dumps(packed).encode())
    with open(meta, encoding="utf-8") as file:
        packed = json.load(file)
    if os.path.getsize(data) != packed["tokens"] * np.dtype(dtype).itemsize:
        raise UserError(f"{data}: is damaged: remove {folder}, which is written again")
    empty = not packed["tokens"]  # which cannot be mapped
    return np.zeros(0, dtype) if empty else np.memmap(data, dtype, "r"), packed["sha256"]


def _cache_folder(args: argparse.Namespace) -> str:
    """Return an existing folder for packed files that can be written."""
    beside = args.datadir if paths.is_folder(args.datadir) else os.path.dirname(args.datadir) or "."
    temporary = os.path.join(tempfile.gettempdir(), f"packed-{os.getuid()}")
    tried = [args.cache_dir] if args.cache_dir else [os.path.join(beside, ".packed"), temporary]
    for folder in tried:
        if not paths.is_remote(folder):
            with contextlib.suppress(UserError):
                paths.check_writable(folder)
                return folder
    raise UserError(f"{' and '.join(tried)}: cannot be written: name a local folder for the tokens with --cache-dir")


@dataclass(frozen=True)
class Text:
    """The tokens of a run, memory-mapped: ``train`` and ``val``."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprints: dict[str, str]


def load(args: argparse.Namespace, say: Callable[[str], None]) -> Text:
    """Return the text of ``--datadir``, packed on first use, or random tokens for ``--fake-data``."""
    tokenizer = FileTokenizer(args.tokenizer, args.end_token) if args.tokenizer else ByteTokenizer()
    if args.fake_data:
        tokens = (random_bits(1 << 20, args.seed, 7) % np.uint64(tokenizer.vocab_size)).astype(np.uint32)
        return Text(tokens[: -(1 << 16)], tokens[-(1 << 16) :], tokenizer, {"tokens": f"fake {args.seed}"})
    if not args.datadir:
        raise UserError("--datadir: which text? Give a file or folder, or --fake-data", USAGE)
    splits, folder = _files(args.datadir), _cache_folder(args)
    packed = {name: pack(files, tokenizer, folder, say) for name, files in splits.items()}
    fingerprints = {{"all": "tokens"}.get(name, f"{name} tokens"): digest[:16] for name, (_, digest) in packed.items()}
    if "all" in packed:
        tokens = packed["all"][0]
        cut = len(tokens) - int(len(tokens) * args.val_fraction)
        fingerprints["validation part"] = f"{args.val_fraction:g}"
        return Text(tokens[:cut], tokens[cut:], tokenizer, fingerprints)
    return Text(packed["train"][0], packed["val"][0], tokenizer, fingerprints)


# --- order --------------------------------------------------------------------------------------------------------


def permuted(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Return where ``places`` are in a random permutation of ``count`` places, which depends on ``key`` only.

    Nothing of the size of ``count`` is stored: a Feistel network of four rounds permutes the numbers of an even number
    of bits, and is applied again to those that leave the range (J. Black and P. Rogaway, Ciphers with arbitrary finite
    domains, https://doi.org/10.1007/3-540-45760-7_9).
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = random_bits(4, *key)

    def encrypt(numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> half, numbers & mask
        for round_key in keys:
            mixed = (right + round_key) * np.uint64(0x9E3779B97F4A7C15)  # wraps around, as a hash should
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        return (left << half) | right

    numbers = encrypt(places.astype(np.uint64))
    while (outside := numbers >= count).any():
        numbers[outside] = encrypt(numbers[outside])
    return numbers.astype(np.int64)


def windows_of(tokens: np.ndarray, block_size: int) -> int:
    """Return how many windows of ``block_size`` inputs an epoch has; raises :class:`UserError` if there is none."""
    count = (len(tokens) - block_size) // block_size
    if count < 1:
        raise UserError(f"the text has {len(tokens):,} tokens to train on, which is less than two windows of"
                        f" {block_size}: lower --block-size, or add text")  # fmt: skip
    return count


def window_starts(samples: np.ndarray, count: int, block_size: int, seed: int) -> np.ndarray:
    """Return where the windows ``samples`` begin: their numbers since the start of training, as ``int64``.

    Every epoch has ``count`` windows that do not overlap, in another order and cut at another place. The result depends
    on its arguments only: not on the step at which a run was resumed, nor on how many processes share a batch.
    """
    epochs, places = samples // count, samples % count
    starts = np.empty(len(samples), np.int64)
    for epoch in np.unique(epochs):
        shift = int(random_bits(1, seed, int(epoch), 1)[0]) % block_size
        chosen = epochs == epoch
        starts[chosen] = shift + block_size * permuted(places[chosen], count, seed, int(epoch))
    return starts


def windows(tokens: np.ndarray, starts: np.ndarray, block_size: int) -> np.ndarray:
    """Return the windows ``int64[len(starts), block_size + 1]`` of ``tokens``: inputs, and one token more."""
    return np.stack([tokens[start : start + block_size + 1] for start in starts]).astype(np.int64)
