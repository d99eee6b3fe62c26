"""Test text as tokens: what is packed, when it is packed again, and the order of windows."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trainers.common import language
from trainers.common.files import UserError


def arguments(datadir: Path | str, **more: Any) -> argparse.Namespace:
    given = {"datadir": str(datadir), "fake_data": False, "tokenizer": "", "end_token": "", "val_fraction": 0.25,
             "cache_dir": "", "seed": 0, "init_from": "", "train_tokenizer": 0,
             **dict.fromkeys(("output_dir", "logdir", "checkpoint_dir", "export_dir", "metrics_file"), "")}  # fmt: skip
    return argparse.Namespace(**{**given, **more})


def load(datadir: Path | str, **more: Any) -> tuple[language.Text, list[str]]:
    """Return the text, and the lines that were said."""
    said: list[str] = []
    return language.load(arguments(datadir, **more), said.append), said


def write(folder: Path, **files: str | bytes) -> Path:
    """Write ``files`` into ``folder``: two underscores in a name stand for a dot, three for a folder."""
    for name, content in files.items():
        path = folder / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


# --- packing --------------------------------------------------------------------------------------------------


def test_documents_follow_each_other_with_an_end_token_behind_each(tmp_path: Path) -> None:
    lines = '{"text": "c\\u00e9", "id": 1}\n\n{"text": ""}\n'
    write(tmp_path, b__txt="ab", a__jsonl=lines, c__bin="no text", sub___d__md__gz=gzip.compress(b"d\n"), __x__txt="no")
    write(tmp_path, e__parquet__gz=gzip.compress(b"no text"), f__bin__gz=gzip.compress(b"no text"))
    text, _ = load(tmp_path)
    tokens = [*text.train, *text.val]
    assert tokens == [*"cé".encode(), 256, 256, *b"ab", 256, *b"d\n", 256]
    assert len(text.val) == len(tokens) // 4 and text.train.dtype == np.uint16


def test_one_file_of_any_name_is_a_document(tmp_path: Path) -> None:
    text, _ = load(write(tmp_path, novel="abcd") / "novel")
    assert [*text.train, *text.val] == [*b"abcd", 256]


def test_folders_train_and_val_are_the_parts(tmp_path: Path) -> None:
    text, _ = load(write(tmp_path, train___a__txt="aa", val___a__txt="b"))
    assert ([*text.train], [*text.val]) == ([97, 97, 256], [98, 256])
    assert text.fingerprints.keys() == {"train tokens", "val tokens"}


def test_a_file_that_is_longer_than_a_block_is_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "".join(f"line {number} é\n" for number in range(100))
    monkeypatch.setattr(language, "_BLOCK", 64)
    text, _ = load(write(tmp_path, a__txt=content))
    assert [*text.train, *text.val] == [*content.encode(), 256]


def test_text_is_packed_once_and_again_after_a_change(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", a__txt="abcd")
    first, said = load(folder)
    assert len(said) == 1 and said[0].startswith("Packing 1 files, 4 bytes, into ")
    again, said = load(folder)
    assert said == [] and again.fingerprints == first.fingerprints
    assert isinstance(again.train.base, np.memmap) or isinstance(again.train, np.memmap), "not in memory"
    write(folder, b__txt="e")
    changed, said = load(folder)
    assert len(said) == 1 and changed.fingerprints != first.fingerprints
    moved, _ = load(folder.rename(tmp_path / "elsewhere"))
    assert moved.fingerprints == changed.fingerprints, "of the tokens, not of where they are"


def test_an_interrupted_packing_leaves_nothing_that_counts(tmp_path: Path) -> None:
    folder = write(tmp_path, a__jsonl='{"text": "ok"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match=r'a\.jsonl: line 2 is not a JSON object with a string "text"'):
        load(folder)
    assert [name for name in os.listdir(folder / ".packed") if name != "lock"] == []
    write(folder, a__jsonl='{"text": "ok"}\n{"text": "1"}\n')
    assert len(load(folder)[0].train) > 0


@pytest.mark.parametrize("suffix", [".bin", ".json"])
def test_a_packed_file_that_was_cut_is_packed_again(tmp_path: Path, suffix: str) -> None:
    whole, _ = load(write(tmp_path, a__txt="abcd"))
    packed = next((tmp_path / ".packed").glob(f"*{suffix}"))
    packed.write_bytes(packed.read_bytes()[:4])
    again, said = load(tmp_path)
    assert len(said) == 1 and again.fingerprints == whole.fingerprints and [*again.train] == [*b"abcd"]


def test_tokens_of_a_folder_that_cannot_be_written_are_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: str) -> None:
        if folder.endswith(".packed"):
            raise UserError("read-only")
        os.makedirs(folder, exist_ok=True)

    monkeypatch.setattr(language.files, "check_writable", check)
    monkeypatch.setattr(language.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    text, said = load(write(tmp_path / "data", a__txt="abcd"))
    assert len(text.train) == 4 and str(tmp_path / "temporary") in said[0]
    _, said = load(tmp_path / "data", cache_dir=str(tmp_path / "mine"))
    assert str(tmp_path / "mine") in said[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [("", "--datadir: which text"), ("none", "none: does not exist"), ("empty", "empty: no files .txt"),
     ("images", "no files .txt, .md, .rst, .py, .jsonl")],
)  # fmt: skip
def test_data_without_text_is_one_line(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "images", a__jpg="x")
    with pytest.raises(UserError, match=says) as raised:
        load(tmp_path / given if given else "")
    assert "\n" not in str(raised.value)


def test_fake_data_depends_on_the_seed_only() -> None:
    one, again, other = (load("", fake_data=True, seed=seed)[0].train for seed in (1, 1, 2))
    assert (one == again).all() and not (one == other).all() and one.max() == 256


# --- tokenizers -----------------------------------------------------------------------------------------------


def test_bytes_are_decoded_without_end_tokens() -> None:
    tokenizer = language.ByteTokenizer()
    assert tokenizer.decode([*"é".encode(), 256, 0xFF]) == "é�"


def test_the_file_of_bytes_has_a_character_for_each() -> None:
    about = json.loads(language.ByteTokenizer().json)
    vocab = about["model"]["vocab"]
    assert sorted(vocab.values()) == list(range(257)) and (vocab["A"], vocab["Ġ"], vocab["Ċ"]) == (65, 32, 10)


class Words:
    """Stand in for tokenizers.Tokenizer: number words by their length."""

    def __init__(self, vocab: dict[str, int]) -> None:
        self.vocab = vocab

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def token_to_id(self, token: str) -> int | None:
        return self.vocab.get(token)

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[SimpleNamespace]:
        assert not add_special_tokens
        return [SimpleNamespace(ids=[len(word) for word in text.split()]) for text in texts]


def installed(monkeypatch: pytest.MonkeyPatch, vocab: dict[str, int]) -> None:
    fake = SimpleNamespace(Tokenizer=SimpleNamespace(from_str=lambda text: Words(vocab)))
    monkeypatch.setitem(sys.modules, "tokenizers", fake)


def test_a_tokenizer_file_makes_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"a": 0, "</s>": 70_000})
    write(tmp_path, t__json="{}", data___a__jsonl='{"text": "aa bbb"}\n{"text": "c"}\n')
    text, _ = load(tmp_path / "data", tokenizer=str(tmp_path / "t.json"))
    assert [*text.train, *text.val] == [2, 3, 70_000, 1, 70_000]
    assert text.train.dtype == np.uint32 and text.tokenizer.vocab_size == 70_001


def test_another_tokenizer_packs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"</s>": 9})
    write(tmp_path, t__json="{}", u__json='{"b": 1}', data___a__txt="aa bbb\n")
    fingerprints = [load(tmp_path / "data", tokenizer=str(tmp_path / name))[1] for name in ("t.json", "u.json")]
    assert all(len(said) == 1 for said in fingerprints)


@pytest.mark.parametrize(
    ("vocab", "more", "says"),
    [({"a": 0}, {}, "has no token <|endoftext|> or "), ({"</s>": 0}, {"end_token": "<x>"}, "has no token <x>: name")],
)
def test_a_tokenizer_without_an_end_token_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: dict[str, int], more: dict[str, str], says: str
) -> None:
    installed(monkeypatch, vocab)
    write(tmp_path, t__json="{}", a__txt="a")
    with pytest.raises(UserError) as raised:
        load(tmp_path, tokenizer=str(tmp_path / "t.json"), **more)
    assert says in str(raised.value) and raised.value.code == 2


def test_a_missing_package_or_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    write(tmp_path, a__txt="a")
    with pytest.raises(UserError, match="needs the package tokenizers: pip install tokenizers"):
        load(tmp_path, tokenizer="t.json")
    installed(monkeypatch, {})
    with pytest.raises(UserError, match=r"--tokenizer .*: No such file"):
        load(tmp_path, tokenizer=str(tmp_path / "t.json"))


def test_text_that_is_not_utf8_is_one_line_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"</s>": 9})
    write(tmp_path, t__json="{}", data___a__txt=b"\xff\xfe")
    with pytest.raises(UserError, match=r"a.txt: is not UTF-8 \(invalid start byte\)"):
        load(tmp_path / "data", tokenizer=str(tmp_path / "t.json"))
    assert len(load(tmp_path / "data")[0].train) == 3, "bytes are bytes"


# --- order ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 1000, 4097])
def test_a_permutation_has_every_place_once(count: int) -> None:
    places = language.permuted(np.arange(count), count, 1, 2)
    assert sorted(places) == list(range(count))
    some = [int(language.permuted(np.array([place]), count, 1, 2)[0]) for place in range(min(count, 20))]
    assert some == [*places[:20]], "the same for a place alone"


def test_permutations_of_seeds_and_epochs_differ_and_leave_no_order() -> None:
    several = [language.permuted(np.arange(1000), 1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for index, one in enumerate(several):
        # The correlation of a random permutation with the order has the deviation 1 / sqrt(999) = 0.03.
        assert abs(np.corrcoef(one, np.arange(1000))[0, 1]) < 0.15
        assert all(abs(np.corrcoef(one, other)[0, 1]) < 0.15 for other in several[:index])


def test_the_windows_of_an_epoch_do_not_overlap_and_fit() -> None:
    tokens, block = np.zeros(1003, np.uint16), 10
    count = language.windows_of(tokens, block)
    assert count == 99
    firsts = set()
    for epoch in range(20):
        samples = np.arange(epoch * count, (epoch + 1) * count)
        starts = np.sort(language.window_starts(samples, count, block, seed=3))
        assert (np.diff(starts) == block).all() and starts[0] >= 0 and starts[-1] + block + 1 <= len(tokens)
        firsts.add(int(starts[0]))
    assert len(firsts) > 5, "each epoch cuts at another place"


@pytest.mark.parametrize(("ranks", "batch", "accumulate"), [(1, 12, 1), (2, 6, 1), (3, 2, 2), (1, 4, 3), (4, 3, 1)])
def test_the_order_of_tokens_does_not_depend_on_ranks_or_on_where_a_run_is_resumed(
    ranks: int, batch: int, accumulate: int
) -> None:
    """Number samples as trainers/torch/gpt.py does: a global batch of 12 windows."""
    whole = language.window_starts(np.arange(12 * 40), 99, 10, seed=5)
    for step in (0, 7, 8, 39):  # an epoch ends within step 8
        parts = [
            language.window_starts(np.arange(first, first + batch), 99, 10, seed=5)
            for part in range(accumulate)
            for rank in range(ranks)
            for first in [((step * accumulate + part) * ranks + rank) * batch]
        ]
        assert [*np.concatenate(parts)] == [*whole[12 * step : 12 * (step + 1)]]


def test_a_window_has_one_token_more_than_inputs() -> None:
    windows = language.windows(np.arange(100, dtype=np.uint16), np.array([3, 50]), 4)
    assert windows.dtype == np.int64 and windows.tolist() == [[3, 4, 5, 6, 7], [50, 51, 52, 53, 54]]


def test_text_that_is_too_short_is_one_line() -> None:
    with pytest.raises(UserError, match="the text has 19 tokens to train on, which is less than two windows of 10"):
        language.windows_of(np.zeros(19, np.uint16), 10)


# --- devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA GH200 480GB", 989), ("NVIDIA L4", 121),
        ("NVIDIA A100-SXM4-40GB", 312), ("NVIDIA L40S", 362), ("NVIDIA A10", 125), ("TPU v5 lite", 197),
        ("TPU v6 lite", 918), ("NVIDIA RTX A1000", None), ("Tesla V100-SXM2-16GB", None), ("cpu", None),
    ],
)  # fmt: skip
def test_a_device_has_the_peak_of_its_data_sheet(name: str, peak: float | None) -> None:
    assert language.peak_flops(name) == (peak and 1e12 * peak)
