"""Share what language models need: options, sizes, text as tokens, and files that transformers loads.

A token is a byte of UTF-8, or what a tokenizer.json of the package ``tokenizers`` makes of the text. Documents (files,
lines of .jsonl, rows of Parquet) follow each other in one memory-mapped file, each with an end token behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import gzip
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from trainers.common import files
from trainers.common.arguments import Parser, add, integer, number
from trainers.common.files import USAGE, UserError

_TEXT = (".txt", ".md", ".rst", ".py", ".jsonl")  # each also with .gz
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_BLOCK = 1 << 20  # bytes of a text file, and of documents, that are tokenized at a time
_FORMAT = 1  # of the packed file; another number packs again


# --- tokens -------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """Take the bytes of UTF-8 as tokens 0 to 255, and 256 at the end of a document."""

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
    """Make tokens by a tokenizer.json, without the special tokens that it would add; raises :class:`UserError`."""

    def __init__(self, path: str, end_token: str = "") -> None:
        try:
            from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise UserError("--tokenizer needs the package tokenizers: pip install tokenizers, or leave it out to train"
                            " on bytes") from None  # fmt: skip
        try:
            with files.open_file(path) as file:
                self.json = file.read().decode()
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


class NoTokenizer:
    """Show the tokens of pre-tokenized text, whose tokenizer is not known, as numbers."""

    end, end_token, json = None, "", ""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Return the numbers in ``texts``."""
        return [np.array(text.split(), np.uint32) for text in texts]

    def decode(self, tokens: list[int]) -> str:
        """Return ``tokens`` as numbers."""
        return " ".join(map(str, tokens))


Tokenizer = ByteTokenizer | FileTokenizer | NoTokenizer


# --- sizes and options ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """Describe a model of Llama's architecture in the words of transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden_size // self.num_attention_heads


# Layers, width, heads, heads of keys and values, block size, batch size. tiny and base have the sizes of nanoGPT's for
# characters (https://github.com/karpathy/nanoGPT#quick-start), 124m and 350m of GPT-2, 1b of Llama 3.2.
MODELS = {
    "tiny": (4, 128, 4, 4, 64, 12),
    "base": (6, 384, 6, 6, 256, 64),
    "124m": (12, 768, 12, 12, 1024, 16),
    "350m": (24, 1024, 16, 16, 1024, 8),
    "1b": (16, 2048, 32, 8, 2048, 4),
}


def configure(args: argparse.Namespace, kind: str, vocab_size: int) -> Config:
    """Return the model that the flags ask for, and set ``args.batch_size``; raises :class:`UserError`."""
    if args.init_from:
        config = read_config(args.init_from)
        args.batch_size = args.batch_size or 8
        return dataclasses.replace(config, max_position_embeddings=args.block_size or config.max_position_embeddings)
    name = args.model if args.model != "auto" else "tiny" if kind == "cpu" else "base"
    layers, width, heads, kv_heads, block_size, batch_size = MODELS[name]
    kv_heads = args.kv_heads or (args.heads or kv_heads)
    layers, width, heads = args.layers or layers, args.width or width, args.heads or heads
    args.batch_size = args.batch_size or batch_size
    if width % heads or width // heads % 2:
        raise UserError(f"--width {width} is not an even multiple of --heads {heads}", USAGE)
    if heads % kv_heads:
        raise UserError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}", USAGE)
    # SwiGLU has three matrices where GPT has two of four widths: 8/3 of the width is as much work.
    intermediate = 64 * math.ceil(width * 8 / 3 / 64)
    # Multiples of 64 are what tensor cores take at once; no token has the numbers behind vocab_size.
    vocab_size = 64 * math.ceil(vocab_size / 64)
    return Config(vocab_size, width, intermediate, layers, heads, kv_heads, args.block_size or block_size,
                  args.tie_embeddings)  # fmt: skip


def read_config(folder: str) -> Config:
    """Return the model of a folder in Hugging Face's format; raises :class:`UserError` unless it is a plain Llama."""
    place = files.join(folder, "config.json")
    try:
        with files.open_file(place) as file:
            given = json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f"--init-from {place}: {getattr(error, 'strerror', None) or 'is not JSON'}", USAGE) from None
    unlike = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in unlike.items():
        if given.get(name, value) != value:
            raise UserError(f"--init-from {place}: {name} is {given[name]}, not {value}", USAGE)
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"--init-from {place}: scaled rotary positions ({rope}) are not supported", USAGE)
    given = {"num_key_value_heads": given.get("num_attention_heads"), "tie_word_embeddings": False, **given}
    given["rope_theta"] = rope.get("rope_theta", given.get("rope_theta", 10000.0))
    try:
        config = Config(
            **{field.name: given[field.name] for field in dataclasses.fields(Config) if field.name in given}
        )
    except TypeError:
        raise UserError(f"--init-from {place}: does not describe a whole Llama", USAGE) from None
    if given.get("head_dim") not in (None, config.head_dim):
        raise UserError(f"--init-from {place}: head_dim is not hidden_size by num_attention_heads", USAGE)
    return config


def flops_per_token(weights: int, config: Config) -> float:
    """Return the operations of a training step per token: 6 per weight that multiplies, and attention.

    PaLM, appendix B: https://arxiv.org/abs/2204.02311
    """
    if not config.tie_word_embeddings:  # looking up a row of the embedding is no multiplication
        weights -= config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.hidden_size * config.max_position_embeddings
    return 6.0 * weights + attention


# Dense bf16 operations in TFLOP/s, by a word of the device's name, from NVIDIA's data sheets, which have some with
# sparsity only (twice as many): https://www.nvidia.com/en-us/data-center/h100/ and the pages of the others; and of a
# TPU chip, by the name that JAX has for it: https://cloud.google.com/tpu/docs/v6e and the pages of the others.
PEAKS = {"B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312,
         "L40S": 362, "L40": 181, "L4": 121, "A10": 125,
         "TPU v4": 275, "TPU v5 lite": 197, "TPU v5p": 459, "TPU v5": 459, "TPU v6 lite": 918}  # fmt: skip


def peak_flops(name: str) -> float | None:
    """Return the peak of a device in operations per second with bf16, None if it is not known."""
    return next((1e12 * peak for words, peak in PEAKS.items() if re.search(rf"\b{words}\b", name)), None)


def export(config: Config, tokenizer: Tokenizer, folder: str, save: Callable[[str], None]) -> list[str]:
    """Write what transformers' from_pretrained() reads into ``folder``; returns the names of the files.

    ``save(path)`` writes the weights as safetensors; without that package, a note says that they are not written.
    """
    about = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **dataclasses.asdict(config),
             "head_dim": config.head_dim, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
             "bos_token_id": None, "eos_token_id": tokenizer.end, "torch_dtype": "float32"}  # fmt: skip
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.end_token,
             "model_max_length": config.max_position_embeddings}  # fmt: skip
    contents = {"config.json": json.dumps(about, indent=1)}
    if tokenizer.json:
        contents |= {"tokenizer.json": tokenizer.json, "tokenizer_config.json": json.dumps(words, indent=1)}
    with files.complete_files(folder) as fresh:
        for name, content in contents.items():
            with open(os.path.join(fresh, name), "w", encoding="utf-8") as file:
                file.write(content + "\n")
        try:
            save(os.path.join(fresh, "model.safetensors"))
        except ImportError:
            print("note: model.safetensors is not written: pip install safetensors", flush=True)
        return sorted(os.listdir(fresh))


def options(parser: Parser) -> None:
    """Add the options of language models to ``parser``."""
    learn, data, run = parser.learning, parser.data, parser.running
    add(data, "--tokenizer", "", "tokenizer.json of the package tokenizers; default: the bytes of UTF-8")
    add(data, "--train-tokenizer", 0, "train a tokenizer of so many tokens (BPE) on the text first", type=integer(257))
    add(data, "--end-token", "", f"the tokenizer's token behind each document; default: {', '.join(_END_TOKENS)}")
    add(data, "--val-fraction", 0.1, "part of the tokens, at the end, to validate on, unless --datadir has folders or"
        " .bin files train and val", type=number(0.0001, 0.5))  # fmt: skip
    add(data, "--cache-dir", "", "folder of the packed tokens; default: .packed in --datadir, or a temporary folder")
    add(data, "--eval-tokens", 1 << 20, "tokens to validate on, from the start of the validation set", type=integer(1))
    add(run, "--model", "auto", "size; auto: tiny on a CPU, else base; 350m and 1b were never run at their size",
        choices=("auto", *MODELS))  # fmt: skip
    for name, about in (("layers", "layers"), ("width", "width of the residual stream"), ("heads", "attention heads"),
                        ("kv-heads", "heads of keys and values, which divide --heads"),
                        ("block-size", "tokens that the model sees at once")):  # fmt: skip
        add(run, f"--{name}", 0, f"{about}; 0: the model's", type=integer())
    add(run, "--tie-embeddings", True, "use the embedding of tokens as the last layer, too")
    add(
        run, "--init-from", "", "folder of a Llama in Hugging Face's format, whose weights, size and tokenizer are used"
    )
    add(run, "--batch-size", 0, "windows per process (JAX: per device) at a time; 0: the model's", type=integer())
    add(run, "--accumulate", 1, "such batches per step: the global batch is their windows of all", type=integer(1))
    add(learn, "--max-steps", 2000, "steps of the schedule", type=integer(1))
    add(learn, "--optimizer", "adamw", "AdamW, or Muon for the matrices of the layers and AdamW for the rest",
        choices=("adamw", "muon"))  # fmt: skip
    add(learn, "--lr", 1e-3, "peak of the learning rate", type=number(0, above=True))
    add(learn, "--weight-decay", 0.1, "of matrices and embeddings", type=number(0))
    add(learn, "--schedule", "cosine", "after the warm-up, a cosine to a tenth of --lr, or --lr and then a line to 0 in"
        " the last fifth", choices=("cosine", "wsd"))  # fmt: skip
    add(learn, "--warmup-steps", 100, "steps of linear warm-up, less than --max-steps", type=integer())
    add(run, "--eval-steps", 250, "steps between validations", type=integer(1))
    add(run, "--target-loss", 0.0, "stop at this validation loss; exit with 21 if it is never reached", type=number(0))
    add(run, "--prompt", "", "text that the sample at the end continues; default: the start of the validation set")
    add(run, "--sample-tokens", 200, "tokens to generate at the end; 0: none", type=integer())
    parser.set_defaults(clip_norm=1.0)


# --- files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """Describe a file of text: ``name`` is its path within the data, ``version`` changes with its contents."""

    path: str
    name: str
    size: int
    version: str

    @property
    def is_jsonl(self) -> bool:
        """Return whether each line is a document."""
        return self.path.removesuffix(".gz").endswith(".jsonl")


def files_in(place: str, own: tuple[str, ...] = ()) -> list[File]:
    """Return the files of text in the folder ``place``, or that file, sorted; without hidden ones and the run's own."""
    found = []
    try:
        if files.is_remote(place):
            with files.remote(place) as filesystem:
                listed = filesystem.find(filesystem._strip_protocol(place), detail=True)
            root, scheme = place.partition("://")[2].rstrip("/"), place.partition("://")[0]
            for path, about in listed.items():
                version = str(about.get("generation") or about.get("mtime") or "")
                found.append(
                    File(f"{scheme}://{path}", path.removeprefix(root).strip("/"), int(about["size"]), version)
                )
        elif os.path.isfile(place):  # of any name
            about = os.stat(place)
            return [File(place, os.path.basename(place), about.st_size, str(about.st_mtime_ns))]
        else:
            for folder, _, names in os.walk(place):
                for path in (os.path.join(folder, name) for name in names):
                    about = os.stat(path)
                    found.append(File(path, os.path.relpath(path, place), about.st_size, str(about.st_mtime_ns)))
    except OSError as error:
        raise UserError(f"{error.filename or place}: cannot be read: {error.strerror}") from None
    mine = tuple(f"{os.path.abspath(folder)}/" for folder in own if folder)
    return sorted((one for one in found if not re.search(r"(^|/)\.", one.name) and (one.path if files.is_remote(place)
                   else os.path.abspath(one.path)).startswith(mine) is False and (one.path.removesuffix(".gz").endswith(
                   _TEXT) or one.path.endswith((".parquet", ".bin")))), key=lambda one: one.name)  # fmt: skip


def splits_of(args: argparse.Namespace) -> dict[str, list[File]]:
    """Return the files of ``--datadir`` by what they are for: "train" and "val", or "all"."""
    own = (args.output_dir, args.logdir, args.checkpoint_dir, args.export_dir, args.metrics_file)
    found = files_in(args.datadir, tuple(folder for folder in own if not files.is_remote(folder)))
    tokens = [one for one in found if one.name in ("train.bin", "val.bin")]
    if len(tokens) == 2:
        return {one.name.removesuffix(".bin"): [one] for one in tokens}
    found = [one for one in found if not one.path.endswith(".bin")]
    splits = {name: [one for one in found if one.name.startswith(f"{name}/")] for name in ("train", "val")}
    if all(splits.values()):
        return splits
    if not found:
        if not files.is_remote(args.datadir) and not os.path.exists(args.datadir):
            raise UserError(f"--datadir {args.datadir}: does not exist")
        raise UserError(
            f"--datadir {args.datadir}: no files {', '.join(_TEXT)} (or .gz), .parquet, nor train.bin and val.bin"
        )
    return {"all": found}


def _pieces(file: File) -> Iterator[tuple[bytes, bool]]:
    """Yield the text of ``file`` in pieces, and whether a document ends behind each.

    Raises :class:`UserError` if a line of a .jsonl, or a row of Parquet, has no string ``text``.
    """
    try:
        if file.path.endswith(".parquet"):
            yield from ((text.encode(), True) for text in _rows(file.path))
            return
        with contextlib.ExitStack() as stack:
            lines: Any = stack.enter_context(files.open_file(file.path))
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


def _rows(path: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError(f"{path}: Parquet needs its package: pip install pyarrow") from None
    try:
        with files.open_file(path) as file:
            for batch in parquet.ParquetFile(file).iter_batches(1024, columns=["text"]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except (ArrowException, IndexError, AttributeError) as error:
        raise UserError(f'{path}: has no text in a column "text" ({" ".join(str(error).split())[:120]})') from None


def _write(texts_of: list[File], tokenizer: Tokenizer, out: IO[bytes], dtype: Any) -> dict[str, Any]:
    """Write the tokens of ``texts_of`` to ``out``; returns their number and their SHA-256."""
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

    for file in texts_of:
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


def pack(found: list[File], tokenizer: Tokenizer, args: argparse.Namespace, say: Callable[[str], None]
         ) -> tuple[np.ndarray, str]:  # fmt: skip
    """Return the tokens of the files ``found``, memory-mapped, and their SHA-256; packs them on first use.

    The packed file is found again by names, sizes and times and by the tokenizer, also on a read-only volume; it is
    packed again if it is damaged. Of the processes of a machine, one packs and the others wait.
    """
    about = [[file.name, file.size, file.version] for file in found]
    key = hashlib.sha256(json.dumps([_FORMAT, about, tokenizer.json, tokenizer.end]).encode()).hexdigest()[:16]
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    beside = args.datadir if not os.path.isfile(args.datadir) else os.path.dirname(args.datadir) or "."
    temporary = os.path.join(tempfile.gettempdir(), f"packed-{os.getuid()}")
    places = [args.cache_dir] if args.cache_dir else [os.path.join(beside, ".packed"), temporary]
    places = [place for place in places if not files.is_remote(place)]
    for folder in places:
        if packed := _packed(os.path.join(folder, key), dtype):
            return packed
    for folder in places:
        with contextlib.suppress(UserError):
            files.check_writable(folder)
            break
    else:
        raise UserError(f"{' and '.join(places)}: cannot be written: name a folder for the tokens with --cache-dir")
    with _locked(os.path.join(folder, "lock")):
        if not (packed := _packed(os.path.join(folder, key), dtype)):
            size = sum(file.size for file in found)
            say(f"Packing {len(found)} files, {size:,} bytes, into {folder}/{key}.bin")
            with files.atomic_file(os.path.join(folder, f"{key}.bin")) as out:
                made = _write(found, tokenizer, out, dtype)
            with files.atomic_file(os.path.join(folder, f"{key}.json")) as out:  # last: the other one is complete
                out.write(json.dumps(made).encode())
            packed = _packed(os.path.join(folder, key), dtype)
    assert packed is not None
    return packed


def _packed(path: str, dtype: np.dtype) -> tuple[np.ndarray, str] | None:
    """Return the packed tokens at ``path`` and their SHA-256, None if they are not there or damaged."""
    try:
        with open(f"{path}.json", encoding="utf-8") as file:
            about = json.load(file)
        if os.path.getsize(f"{path}.bin") != about["tokens"] * dtype.itemsize:
            return None
        tokens = np.memmap(f"{path}.bin", dtype, "r") if about["tokens"] else np.zeros(0, dtype)
        # Of the tokens themselves, too: 64 windows of them.
        starts = np.linspace(0, max(0, len(tokens) - 1024), 64).astype(np.int64)
        sample = hashlib.sha256(b"".join(tokens[start : start + 1024].tobytes() for start in starts)).hexdigest()
        return tokens, f"{about['sha256'][:16]} {sample[:16]}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pre_tokenized(path: str) -> np.ndarray:
    """Return the tokens of a .bin file: uint16 alone, as nanoGPT writes it, or behind llm.c's header of 1,024 bytes."""
    if files.is_remote(path):
        raise UserError(f"{path}: .bin files are memory-mapped: copy them to a local folder")
    tokens = np.memmap(path, np.uint16, "r")
    head = tokens[:4].view(np.int32) if len(tokens) > 512 else [0]
    return tokens[512:] if head[0] == 20240520 else tokens


def train_tokenizer(args: argparse.Namespace, found: list[File], say: Callable[[str], None]) -> str:
    """Train a BPE of bytes on the files ``found``; returns the path of its tokenizer.json, in --cache-dir."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("--train-tokenizer needs the package tokenizers: pip install tokenizers") from None
    folder = args.cache_dir or os.path.join(tempfile.gettempdir(), f"packed-{os.getuid()}")
    files.check_writable(folder)
    about = [[file.name, file.size, file.version] for file in found]
    key = hashlib.sha256(json.dumps([about, args.train_tokenizer]).encode()).hexdigest()[:16]
    path = os.path.join(folder, f"tokenizer-{key}.json")
    with _locked(os.path.join(folder, "lock")):
        if not os.path.exists(path):
            say(f"Training a tokenizer of {args.train_tokenizer} tokens into {path}")
            made = Tokenizer(models.BPE())
            made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
            trainer = trainers.BpeTrainer(vocab_size=args.train_tokenizer, special_tokens=list(_END_TOKENS[:1]),
                                          show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
                                          )  # fmt: skip
            texts = (text.decode("utf-8", "replace") for file in found for text, _ in _pieces(file))
            made.train_from_iterator(texts, trainer)
            with files.atomic_file(path) as out:
                out.write(made.to_str().encode())
    return path


@dataclass(frozen=True)
class Text:
    """Hold the tokens of a run, memory-mapped: ``train`` and ``val``."""

    train: np.ndarray
    val: np.ndarray
    tokenizer: Tokenizer
    fingerprints: dict[str, str]

    def bytes_per_token(self) -> float:
        """Return the bytes of text in a token of the validation set, which bits per byte need; 0 if it is unknown."""
        tokens = list(map(int, self.val[: 1 << 16]))
        if isinstance(self.tokenizer, NoTokenizer):
            return 0.0
        if isinstance(self.tokenizer, ByteTokenizer):
            return sum(token < 256 for token in tokens) / max(1, len(tokens))
        return len(self.tokenizer.decode(tokens).encode()) / max(1, len(tokens))


def load(args: argparse.Namespace, say: Callable[[str], None]) -> Text:
    """Return the text of ``--datadir``, packed on first use, or random tokens for ``--fake-data``."""
    if not args.datadir and not args.fake_data:
        raise UserError("--datadir: which text? Give a file or folder, or --fake-data", USAGE)
    beside = (
        files.join(args.init_from, "tokenizer.json") if "tokenizer.json" in files.names(args.init_from or ".") else ""
    )
    given = args.tokenizer or (beside if args.init_from else "")
    splits = {} if args.fake_data else splits_of(args)
    if args.train_tokenizer and splits:
        given = train_tokenizer(args, splits.get("train") or splits["all"], say)
    tokenizer: Tokenizer = FileTokenizer(given, args.end_token) if given else ByteTokenizer()
    if args.fake_data:
        tokens = (random_bits(1 << 20, args.seed, 7) % np.uint64(tokenizer.vocab_size)).astype(np.uint32)
        return Text(tokens[: -(1 << 16)], tokens[-(1 << 16) :], tokenizer, {"tokens": f"fake {args.seed}"})
    if all(found[0].path.endswith(".bin") for found in splits.values()):
        train, val = (_pre_tokenized(splits[name][0].path) for name in ("train", "val"))
        sizes = {f"{name} tokens": f"{len(tokens)} {hashlib.sha256(tokens[:65536].tobytes()).hexdigest()[:16]}"
                 for name, tokens in (("train", train), ("val", val))}  # fmt: skip
        return Text(train, val, tokenizer if given else NoTokenizer(1 + int(max(train.max(), val.max()))), sizes)
    packed = {name: pack(found, tokenizer, args, say) for name, found in splits.items()}
    fingerprints = {{"all": "tokens"}.get(name, f"{name} tokens"): digest for name, (_, digest) in packed.items()}
    if "all" in packed:
        tokens = packed["all"][0]
        cut = len(tokens) - int(len(tokens) * args.val_fraction)
        fingerprints["validation part"] = f"{args.val_fraction:g}"
        return Text(tokens[:cut], tokens[cut:], tokenizer, fingerprints)
    return Text(packed["train"][0], packed["val"][0], tokenizer, fingerprints)


# --- order --------------------------------------------------------------------------------------------------------


def random_bits(count: int, *key: int) -> np.ndarray:
    """Return ``count`` random uint64 that depend on ``key`` only; see :mod:`trainers.common.mnist`."""
    return np.random.Philox(np.random.SeedSequence(key)).random_raw(count)


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
