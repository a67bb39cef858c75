"""The batch lab: what it draws is what was counted, at every extreme of every control."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import labkit
from labkit.batch.panels import EXPERIMENTS, PLACES, drawn
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from tests.frame.driven import drive_anywhere


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: Any) -> Lab:
    lab = labkit.labs.batch(name, **values)
    lab.step()
    return lab


def said(texts: Any) -> list[str]:
    return [text.get_text() for text in texts if text.get_text()]


# The figures.


def test_one_step_is_256_sequences_and_the_devices_of_a_replica_do_not_count() -> None:
    lab = labkit.labs.batch("planner")
    lab.predict(2048)  # 8 × 64 × 4: every device taken for a replica
    lab.step()
    assert lab.score == 7 and lab.page["headline"] == "8 sequences × 8 replicas × 4 microbatches = 256 sequences"
    assert "1,048,576 tokens" in lab.text and "100 updates." in lab.text and "= 8 replicas" in lab.text
    shared = lab.experiment.shared.get_text().replace("\n", " ")
    assert shared == "a row is one replica: 8 devices that share its sequences"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"world": 512}, ["32,768 tokens at a time", "8,388,608 tokens", "12 updates; 1,024 sequences are left"]),
        ({"microbatch": 4, "world": 128, "tp": 1, "pp": 1, "accumulation_steps": 8}, ["16,777,216 tokens"]),
        ({"microbatch": 4, "world": 8, "tp": 1, "pp": 1, "accumulation_steps": 1}, ["32 sequences", "800 updates"]),
        ({"microbatch": 4, "world": 8, "tp": 1, "pp": 1, "accumulation_steps": 8}, ["256 sequences", "100 updates"]),
    ],
)
def test_the_figures_of_the_planner(values: dict[str, int], words: list[str]) -> None:
    lab = stepped("planner", **values)
    for each in words:
        assert each in lab.text


def test_the_figure_of_the_wanted_batch() -> None:
    lab = labkit.labs.batch("wanted")
    lab.predict(8)
    lab.step()
    assert lab.score == 0 and lab.page["headline"] == "b = 4, K = 8: exactly 16,777,216 tokens"
    assert "b = 2, K = 16; b = 1, K = 32. With b = 6, the largest that fits, no K is exact." in lab.text


def test_a_batch_that_does_not_divide_has_two_neighbours() -> None:
    lab = stepped("wanted", ki_tokens=1000, replicas=8)
    assert lab.page["headline"] == "Nothing gives 1,024,000 tokens exactly"
    assert "1 × 8 × 31 sequences, 1,015,808 tokens (-8,192)" in lab.text
    assert "4 × 8 × 8 sequences, 1,048,576 tokens (+24,576)" in lab.text
    one = stepped("wanted", ki_tokens=1, replicas=8)
    assert "The nearest: 1 × 8 × 1 sequences, 32,768 tokens (+31,744)." in one.text


def test_what_is_wanted_is_in_the_picture_though_every_batch_is_more() -> None:
    low, high = stepped("wanted", ki_tokens=31, replicas=8, largest_microbatch=1).experiment.axes.get_ylim()
    assert low < 0 < 100 / 31 < high


def test_two_plans_of_the_same_batch() -> None:
    lab = labkit.labs.batch("two_plans")
    lab.predict(100)
    lab.step()
    assert lab.score == 0 and "the same global batch, 256 sequences" in lab.page["headline"]
    assert "both optimise alike. As systems they differ in microbatch." in lab.text


def test_a_comparison_that_changes_two_things_says_so() -> None:
    lab = stepped("two_plans", accumulation_b=1)
    assert lab.page["headline"] == "A (8, 8, 4), B (4, 8, 1): 2 things change at once"
    assert "2 things change at once: global batch and microbatch. The batch goes 256 → 32 sequences." in lab.text
    assert "updates per epoch: 100 → 800; sequences in warmup: 25,600 → 3,200;" in lab.text
    assert lab.experiment.answer(lab.result) == 800


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"microbatch_b": 8, "accumulation_b": 4}, "Both plans are the same."),
        ({"microbatch_b": 8, "accumulation_b": 1}, "Only the global batch changes, 256 → 64 sequences"),
        ({"replicas_b": 16, "accumulation_b": 4}, "As systems they differ in microbatch and replicas."),
        ({"replicas_b": 16}, "3 things change at once: global batch and microbatch and replicas."),
    ],
)
def test_the_sentence_on_a_comparison(values: dict[str, int], words: str) -> None:
    assert words in stepped("two_plans", **values).text


def test_a_step_in_time() -> None:
    lab = stepped("timeline")
    assert lab.page["headline"] == "10.7 % of 840 ms wait for the synchronisation"
    assert "synchronised once, waiting 90 ms;" in lab.text and "4 optimizer steps: 1200 ms." in lab.text
    assert lab.experiment.answer(lab.result) == pytest.approx(100 * 90 / 840)
    assert "30 % of 300 ms" in stepped("timeline", accumulation_steps=1).page["headline"]
    wrong = stepped("timeline", every_microbatch=True)
    assert "32.4 % of 1110 ms" in wrong.page["headline"] and "synchronised 4 times" in wrong.text


def test_a_step_number_in_tokens() -> None:
    lab = labkit.labs.batch("progress")
    lab.predict(0.7)
    lab.step()
    assert lab.score == pytest.approx(0.7 / 0.699786067968 - 1)
    assert lab.page["headline"] == "Step 83,421 at 8,388,608 tokens: 0.70 trillion valid tokens"
    assert "is only 20,855 optimizer steps and 0.17 trillion valid tokens" in lab.text
    padded = stepped("progress", padding=0.4)
    assert "0.42 trillion valid" in padded.page["headline"]
    assert padded.experiment.answer(padded.result) == pytest.approx(0.6 * 0.699786067968)


# What is drawn.


def test_every_microbatch_is_a_tile_and_what_is_left_out_is_said() -> None:
    for D, K in ((1, 1), (8, 8), (9, 8), (8, 9), (1000, 64)):
        experiment: Any = stepped("planner", microbatch=3, world=D, tp=1, pp=1, accumulation_steps=K).experiment
        rows, columns = min(D, PLACES - (D > PLACES)), min(K, PLACES - (K > PLACES))
        assert len(experiment.tiles.get_paths()) == rows * columns == len(said(experiment.sizes))
        assert set(said(experiment.sizes)) == {"3"} and experiment.shared.get_text().endswith("one device")
        numbers = said(experiment.rows)
        assert numbers[-1] == str(D) and ("⋮" in numbers) == (D > PLACES) and len(numbers) == min(D, PLACES)
        assert said(experiment.columns)[-1] == str(K) and len(said(experiment.columns)) == min(K, PLACES)
        assert experiment.more.get_text() == (f"{D - rows:,} more replicas" if D > PLACES else "")
        x, y = experiment.edges.get_data()
        assert np.isnan(x).sum() == np.isnan(y).sum() == rows * columns


@given(st.integers(1, 10**6))
def test_all_are_drawn_or_the_first_and_the_last(count: int) -> None:
    numbers = drawn(count)
    assert numbers[0] == 1 and numbers[-1] == count and len(numbers) <= PLACES
    assert (0 in numbers) == (count > PLACES)


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 2**12), st.integers(1, 64), st.integers(1, 64))
def test_dots_are_exact_and_crosses_are_off_by_what_they_show(ki_tokens: int, largest: int, D: int) -> None:
    lab = stepped("wanted", ki_tokens=ki_tokens, largest_microbatch=largest, replicas=D, sequence_length=128)
    experiment: Any = lab.experiment
    x, y = experiment.right.get_data()
    assert set(x) == {way.microbatch for way in lab.result.exact} and all(value == 0 for value in y)
    points = sorted(zip(*experiment.wrong.get_data(), strict=True))
    off = [(way.microbatch, 100 * (way.tokens / (1024 * ki_tokens) - 1)) for way in lab.result.ways if way.off]
    assert np.array(points) == pytest.approx(np.array(sorted(off)))
    low, high = experiment.axes.get_ylim()
    assert low < min([0.0, *experiment.wrong.get_ydata()]) and high > max([0.0, *experiment.wrong.get_ydata()])
    labels = said([*experiment.over, *experiment.under])
    assert f"K = {lab.result.best.accumulation}" in labels
    few = largest <= 3 and all(way.accumulation < 100 for way in lab.result.ways)  # on a page as narrow as this
    assert len(labels) == (len(lab.result.ways) if few else 1)


def test_a_dot_is_what_stays_and_a_cross_is_what_changes() -> None:
    lab = stepped("two_plans", accumulation_b=1)
    experiment: Any = lab.experiment
    x, y = experiment.wrong.get_data()
    assert dict(zip(y, x, strict=True)) == pytest.approx({0: 1 / 8, 1: 1 / 8, 2: 8, 3: 1 / 8, 5: 8, 6: 1 / 4, 7: 1 / 2})
    assert list(experiment.right.get_ydata()) == [4] and list(experiment.right.get_xdata()) == [1]
    words = said(experiment.words)
    assert words[0] == "global batch: 256 → 32" and words[4] == "syncs per update: 1"
    none = stepped("two_plans", sequences=1)
    assert said(none.experiment.words)[2] == "updates per epoch: 0"


def lengths(line: Any) -> list[float]:
    x = np.asarray(line.get_xdata(), dtype=float).reshape(-1, 3)
    assert np.isnan(x[:, 2]).all()
    return [float(high - low) for low, high, _ in x]


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_bars_of_a_step_are_its_times(data: st.DataObject) -> None:
    lab = labkit.labs.batch("timeline")
    drive_anywhere(lab, data)
    result, experiment = lab.result, lab.experiment
    times = {"forward": result.forward, "backward": result.backward, "synchronise": result.waiting}
    for name, time in {**times, "update": result.optimizer}.items():
        assert sum(lengths(experiment.bars[name])) == pytest.approx(time, abs=1e-6)
    assert sum(lengths(experiment.hidden)) == pytest.approx(result.hidden + result.waiting, abs=1e-6)
    low, high = experiment.axes.get_xlim()
    assert low == 0 and result.total < high
    shares = [float(text.get_text().split()[0]) for text in experiment.words]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_the_bars_of_progress_are_valid_tokens() -> None:
    lab = stepped("progress", padding=0.5)
    experiment: Any = lab.experiment
    assert [bar.get_xdata()[1] for bar in experiment.bars] == [lab.result.right.valid, lab.result.wrong.valid]
    ends = [line.get_xdata()[1] for line in experiment.positions]
    assert ends == [699_786_067_968, 699_786_067_968 / 4]
    assert [line.get_xdata()[0] for line in experiment.positions] == [bar.get_xdata()[1] for bar in experiment.bars]
    assert said(experiment.words)[0].replace("\n", " ") == "83,421 optimizer steps: 0.35 trillion valid tokens"
    rows = {row[0]: row for row in lab.page["tables"][0]["rows"]}
    assert rows["samples"][1:3] == ["170846208", "42711552"] and rows["steps"][1:3] == ["83421", "20855"]


# All of them.


def test_every_note_says_that_it_is_modelled() -> None:
    assert all(kind.note.startswith("Modelled") for kind in EXPERIMENTS)


def test_the_source_on_the_page_holds_the_formula() -> None:
    source = labkit.labs.batch("planner").spec["source"]
    assert "return self.microbatch * self.replicas * self.accumulation" in source and "def planner(" in source
