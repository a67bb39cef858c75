"""The data parallel lab: what it draws is what ran on the ranks, at every extreme of every control."""

from __future__ import annotations

import math
from typing import Any

import pytest

import labkit
from labkit.data_parallel import uneven_ranks
from labkit.data_parallel.panels import EXPERIMENTS
from labkit.frame import cell_panels
from labkit.frame.style import Page
from labkit.labs import Lab
from tests.frame.driven import ticks

NAMES = [kind.name for kind in EXPERIMENTS]


@pytest.fixture(autouse=True)
def small_page() -> None:
    cell_panels.page = Page(width=320)


def stepped(name: str, **values: object) -> Lab:
    lab = labkit.labs.data_parallel(name, **values)
    lab.step()
    return lab


def shown(lab: Lab) -> Any:
    return lab.experiment


def test_a_rank_mean_is_seen_in_every_rank_s_weights() -> None:
    lab = labkit.labs.data_parallel("recipes")
    lab.predict(30)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == pytest.approx(abs(0.30 - result.relative_error))
    assert lab.page["headline"].startswith("rank-means: ") and lab.page["headline"].endswith(" % off the full batch")
    assert list(seen.rows.fitted.get_xdata()) == [w for row in result.fitted.tolist() for w in row]
    assert list(seen.rows.predicted.get_xdata()) == result.predicted[0].tolist()
    assert list(seen.rows.predicted.get_ydata()) == [0.5, 1.5, 2.5, 3.5] and list(seen.rows.cuts.get_ydata())[:2] == [
        2,
        2,
    ]
    words = [words.get_text() for words in seen.rows.words if words.get_text()]
    assert words == [f"rank {r}: {int(n)} tokens" for r, n in zip((0, 0, 1, 1), result.counts, strict=True)]
    assert "The fix: on every rank: summed loss × W / N" in lab.text and "Norm ratio 1.04" in lab.text
    (left, right), (_, one) = seen.rows.axes.get_xlim(), seen.rows.one.get_xdata()
    assert left < 0 < one == 1 < float(result.fitted.max()) < right


def test_the_right_recipe_and_the_bypassed_one_say_so() -> None:
    right = stepped("recipes", recipe="token-mean")
    assert right.page["headline"] == "token-mean: the gradient is right" and "The fix" not in right.text
    lost = stepped("recipes", recipe="reduction-bypassed")
    assert "reduction-bypassed: every rank has a gradient of its own" in lost.page["headline"]
    assert "Another rank's gradient is" in lost.text and len(shown(lost).rows.fitted.get_xdata()) == 8
    means = stepped("recipes", recipe="mean-of-means")
    assert "N counted over all ranks" in means.text


def test_all_reduces_are_bars_and_wrong_gradients_are_striped() -> None:
    lab = labkit.labs.data_parallel("collectives")
    lab.predict(4)
    lab.step()
    seen, result = shown(lab), lab.result
    assert lab.score == 0
    assert lab.page["headline"] == "no_sync around the backward alone: synchronised four times all the same"
    for at, each in enumerate(result.patterns):
        blue, striped = ([x for x in bar.get_xdata()] for bar in seen.bars[at])
        fine = each.relative_error <= result.tolerance
        assert (blue, striped) == (([0, each.all_reduces], []) if fine else ([], [0, each.all_reduces]))
        assert seen.words[at].get_text().startswith(f"{each.name}: {each.all_reduces}")
        assert fine != ("% off" in seen.words[at].get_text())
    assert "all-reduces of 86 kB" in lab.text and "only backward: 4, the gradient is right" in lab.text
    assert len(result.patterns) == 6 and "def only_backward(" in seen.source() and "def record_bytes(" in seen.source()


def test_a_bucket_is_a_bar() -> None:
    lab = stepped("buckets")
    seen, result = shown(lab), lab.result
    assert lab.page["headline"] == "2 all-reduces for the same 8 MiB"
    bars = [list(bar.get_xdata()) for bar in seen.bars if len(bar.get_xdata())]
    assert bars == [[0, 4], [4, 8]] and "together 8,388,608 bytes" in lab.text
    assert stepped("buckets", bucket_cap=25).page["headline"] == "1 all-reduce for the same 8 MiB"
    assert shown(lab).answer(result) == 2


def test_a_step_in_time_is_drawn_as_it_was_measured() -> None:
    lab = stepped("timeline")
    seen, result = shown(lab), lab.result
    for name, bar in seen.bars.items():
        some = [each for each in result.stretches if each.name == name]
        x, y = bar.get_data()
        starts, ends = list(x)[::3], list(x)[1::3]
        gap = 0.002 * max(each.end for each in result.stretches)
        assert starts == pytest.approx([each.start for each in some], abs=1.01 * gap)
        assert all(end >= start for start, end in zip(starts, ends, strict=True)) and len(y) == 3 * len(some)
        assert {math.floor(row) for row in y if not math.isnan(row)} == {0, 1}
    assert [words.get_text() for words in seen.words] == ["rank 0", "rank 1", "", ""]
    medians = [result.microbatch, result.synchronisation, result.hidden, result.exposed, result.step]
    assert next(iter(seen.spreads.dots.get_xdata())) == medians[0].median
    assert (
        seen.answer(result) == pytest.approx(100 * result.hidden_share)
        and "% of the synchronisation" in lab.page["headline"]
    )
    one = stepped("timeline", bucket_cap=25.0)
    assert one.page["headline"].startswith("0 % of the synchronisation") and "in 1 all-reduce " in one.text


def test_all_reduces_their_line_and_a_payload() -> None:
    lab = stepped("allreduce")
    seen, result = shown(lab), lab.result
    assert list(seen.measured.dots.get_ydata()) == [each.median for each in result.measured]
    assert list(seen.measured.dots.get_xdata()) == [size / 1e3 for size in result.sizes.tolist()]
    for x, y in zip(*seen.line.get_data(), strict=True):
        assert y == pytest.approx(1e3 * result.line.seconds(1e3 * x))
    assert list(seen.payload.dots.get_data()[1]) == [result.found.median] == list(seen.ring.get_ydata())
    assert list(seen.modelled.get_ydata()) == [result.modelled] and seen.answer(result) == result.found.median
    assert lab.page["headline"].startswith("1 MB in 8 messages: ")


def test_an_empty_rank_under_each_policy() -> None:
    lab = stepped("empty_rank")
    seen, result = shown(lab), lab.result
    assert lab.page["headline"] == "sum / max(n, 1): no NaN, and 50 % off" and seen.answer(result) == pytest.approx(50)
    assert list(seen.dots.get_ydata()) == [0.2] and list(seen.lost.get_ydata()) == [3.2]
    lengths = [list(bar.get_xdata())[1:] for bar in seen.bars]
    assert lengths == [[], [pytest.approx(50)], [pytest.approx(50)], []]
    assert "masked mean by hand: the empty rank's loss is NaN, the gradient NaN on 2 of 2 ranks" in lab.text


def test_join_and_a_hang() -> None:
    lab = stepped("uneven")
    seen, result = shown(lab), lab.result
    assert list(seen.rows.fitted.get_xdata()) == result.fitted.tolist() and seen.answer(result) == pytest.approx(0.5)
    assert lab.page["headline"].startswith("every microbatch, with join: no hang, ")
    assert "rank 0: 0.5, rank 0: 0.5, rank 0: 0.5, rank 0: 1, rank 1: 0.5" in lab.text
    hangs = stepped("uneven", way="every microbatch")
    assert hangs.page["headline"] == "every microbatch: rank 0 hangs" and "within 1 s" in hangs.text
    assert shown(hangs).rows.middle.get_text() == "rank 0 hangs" and shown(hangs).answer(hangs.result) == 0
    fine = stepped("uneven", way="last microbatch only")
    assert fine.page["headline"] == "last microbatch only: no hang, the gradient is right"


def test_replicas_that_disagree_and_agree() -> None:
    lab = stepped("overflow")
    seen, result = shown(lab), lab.result
    assert list(seen.lines[False].get_ydata()) == result.distance.tolist() and not len(seen.lines[True].get_ydata())
    assert lab.page["headline"].startswith("One rank skips a step alone: the replicas are ")
    assert f"{result.last:.1f} % of the way apart" in lab.page["headline"]
    assert "rank 0: 2^10, rank 1: 2^9" in lab.text and list(seen.when.get_xdata()) == [4, 4]
    agreed = stepped("overflow", agree=True)
    assert agreed.page["headline"] == "All ranks skip the step together: the replicas stay equal"
    assert list(shown(agreed).lines[True].get_ydata()) == [0.0] * 12 and "every rank skips it" in agreed.text


def test_a_killed_rank_is_told() -> None:
    lab = stepped("killed", victim=0)
    seen, result = shown(lab), lab.result
    assert "rank 0 of 2 was killed by SIGKILL" in lab.text and "Known after" in lab.page["headline"]
    assert list(seen.bars[0].get_xdata()) == [0, result.noticed] == [0, seen.answer(result)]
    assert list(seen.bars[1].get_xdata()) == [result.noticed, result.noticed + result.again]


def test_shards_are_counted() -> None:
    lab = labkit.labs.data_parallel("fsdp")
    lab.predict(24)
    lab.step()
    seen = shown(lab)
    assert lab.score == 0 and lab.page["headline"] == "24 all-gathers and 4 reduce-scatters in one step"
    assert [list(bar.get_xdata()) for bar in seen.bars] == [[0, 24], [0, 4]]
    assert "keeps 512 of 1,024 numbers" in lab.text and "def run_sharded(" in seen.source()


@pytest.mark.parametrize("way", uneven_ranks.WAYS)
def test_a_last_rank_with_nothing_is_drawn(way: str) -> None:
    lab = stepped("uneven", way=way, accumulation_steps=2, missing=2)
    assert ticks(lab) <= 5 and (lab.page["headline"].endswith("hangs")) == (way != "every microbatch, with join")


@pytest.mark.parametrize("name", NAMES)
def test_the_source_on_the_page_holds_what_a_rank_runs(name: str) -> None:
    lab = labkit.labs.data_parallel(name)
    assert "rank: int" in lab.spec["source"] and lab.page["headline"] == shown(lab).title
    if name == "recipes":
        assert all(f"def {loop}(" in lab.spec["source"] for loop in ("token_mean", "rank_means", "mean_of_means"))
