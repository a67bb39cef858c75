"""The text is real, split by document, of unequal length and the same for the same seed."""

from __future__ import annotations

import pathlib
import re
import sysconfig

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import corpus
from labkit.corpus import Window, batch, documents, made, split, window
from labkit.errors import LabError
from labkit.nets import IGNORE

torch.set_num_threads(1)


def test_documents_are_docstrings_of_this_python() -> None:
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    source = "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py"))[::3])
    words = set(re.findall(r"\w+", source))
    for text in documents()[::50]:
        assert set(re.findall(r"\w+", text)) - words == set() or "?" in text
    assert all(text.isascii() and len(text) >= 4 for text in documents())


def test_no_document_is_on_both_sides_or_twice() -> None:
    train, held_out = documents(), documents(held_out=True)
    assert len(train) > 500 and 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.15
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert [len(text) for text in train] == sorted(len(text) for text in train)
    assert documents() is documents()


@pytest.mark.parametrize("text", ["documents", "made"])
def test_counts_are_very_unequal(text: str) -> None:
    ratios = []
    for seed in range(50):
        counts = window([batch(seed, text=text)]).sequences
        ratios.append(float(counts.max() / counts.min()))
    assert sorted(ratios)[25] > 3 and max(ratios) > 6


@pytest.mark.parametrize("text", ["documents", "made"])
@given(seed=st.integers(0, 9999), sequences=st.integers(1, 32), length=st.integers(4, 64), data=st.data())
@settings(deadline=None)
def test_a_batch_is_padded_text(text: str, seed: int, sequences: int, length: int, data: st.DataObject) -> None:
    shortest = data.draw(st.integers(4, length))
    tokens, labels = batch(seed, sequences, length, shortest=shortest, text=text)
    assert tokens.shape == labels.shape == (sequences, length) and tokens.dtype == labels.dtype == torch.long
    valid = labels != IGNORE
    counts = valid.sum(1)
    assert torch.equal(valid, torch.arange(length) < counts[:, None])
    assert torch.equal(tokens, torch.where(valid, labels, 0)) and int(tokens.max()) < 128
    assert int(counts.min()) >= shortest
    again = batch(seed, sequences, length, shortest=shortest, text=text)
    assert torch.equal(again[0], tokens) and torch.equal(again[1], labels)


def test_rows_are_documents_and_no_two_begin_alike() -> None:
    for seed in range(20):
        rows = ["".join(map(chr, row[row > 0])) for row in batch(seed, 16)[0]]
        assert len(set(rows)) == 16
        assert all(any(text.startswith(row) for text in documents()) for row in rows)
        held_out = ["".join(map(chr, row[row > 0])) for row in batch(seed, 4, held_out=True)[0]]
        assert all(any(text.startswith(row) for text in documents(True)) for row in held_out)


def test_shortest_equal_to_the_length_makes_counts_equal() -> None:
    assert set(window([batch(0, 32, shortest=32)]).sequences.tolist()) == {31}


def test_made_text_is_the_same_on_every_python() -> None:
    tokens, _ = batch(0, 2, 12, text="made")
    assert ["".join(map(chr, row[row > 0])) for row in tokens] == ["stttstuuutuu", "hiiiijhjjjjh"]


def test_seeds_differ() -> None:
    assert not torch.equal(batch(0)[0], batch(1)[0])


def test_sequences_may_be_longer_than_any_document() -> None:
    tokens, _ = batch(0, 4, 100_000)
    assert int((tokens > 0).sum(1).max()) <= max(map(len, documents()))


@given(st.integers(1, 32), st.integers(-3, 40))
@settings(deadline=None)
def test_split_keeps_every_sequence_in_order(sequences: int, K: int) -> None:
    tokens, labels = batch(0, sequences)
    if not 1 <= K <= sequences:
        with pytest.raises(LabError, match=f"accumulation steps = {K} is outside 1 … {sequences}") as caught:
            split(tokens, labels, K)
        K = int(str(caught.value).rpartition("try ")[2])
    microbatches = split(tokens, labels, K)
    assert len(microbatches) == K
    assert torch.equal(torch.cat([each for each, _ in microbatches]), tokens)
    assert torch.equal(torch.cat([each for _, each in microbatches]), labels)
    sizes = [len(each) for each, _ in microbatches]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequences": 0}, "0 sequences of 32 tokens are none"),
        ({"length": 3}, "8 sequences of 3 tokens"),
        ({"shortest": 3}, r"shortest = 3 is outside 4 … 32 tokens: try 4"),
        ({"shortest": 40}, r"shortest = 40 is outside 4 … 32 tokens: try 32"),
        ({"text": "wiki"}, "text = 'wiki' is none of documents, made"),
    ],
)
def test_what_cannot_be_drawn_is_said(arguments: dict[str, int | str], message: str) -> None:
    with pytest.raises(LabError, match=message):
        batch(0, **arguments)  # type: ignore[arg-type]


def test_a_python_without_source_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    corpus._parts.cache_clear()
    try:
        with pytest.raises(LabError, match="no source of the standard library"):
            documents()
    finally:
        corpus._parts.cache_clear()


def test_made_targets_by_hand() -> None:
    microbatches = made([[[8], []], [[3, 2, 1]]])
    assert microbatches[0][0].tolist() == [[8, 0], [0, 0]]
    assert microbatches[0][1].tolist() == [[1, 1], [IGNORE, IGNORE]]
    assert microbatches[1][1].tolist() == [[1, 1, 1, 1]]
    with pytest.raises(LabError, match=r"no sequences: try \[\[\]\]"):
        made([[]])
    made([[[]]])


def test_a_window_by_hand() -> None:
    counted = window(made([[[8], []], [[3, 2, 1], [5]]]), 3)
    assert counted == Window(((1, 0), (3, 1)), positions=2 + 6, labelled=2 + 0 + 4 + 2, steps=3)
    assert counted.counts.tolist() == [1, 4] and counted.sequences.tolist() == [1, 0, 3, 1]
    assert counted.total == 5
    assert window(made([[[1]], [[1, 2]], [[1, 2, 3]]]), 2).total == 5


@pytest.mark.parametrize(
    ("microbatches", "steps", "message"),
    [
        ([], None, "0 microbatches"),
        (made([[[1]]]), 0, "0 accumulation steps"),
        (made([[[]]]), None, "0 valid tokens"),
        (made([[[1]], [[]]]), 1, "0 valid tokens"),
    ],
)
def test_windows_that_are_none(microbatches: list[corpus.Batch], steps: int | None, message: str) -> None:
    with pytest.raises(LabError, match=message):
        window(microbatches, steps)
