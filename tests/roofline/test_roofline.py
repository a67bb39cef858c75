"""The roofline: the model by hand, the measured parts by what must hold on every machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import device, roofline
from labkit.device import Machine, Spread
from labkit.errors import LabError

POSITIVE = st.floats(1e-6, 1e6)
BAD = st.one_of(
    st.floats(max_value=0.0),
    st.sampled_from([math.nan, math.inf, 10**400, None, "2", True, False, [2.0], 2j]),
    st.integers(max_value=0),
)
EXPERIMENTS: list[Callable[..., Any]] = [
    roofline.ceiling,
    roofline.machine,
    roofline.counting,
    roofline.sparse,
    roofline.cache,
    roofline.precision,
]
MADE = Machine("made", 1, "float32", 10.0, 100.0, 10.0, 512, Spread.of([10.0]), Spread.of([100.0]), 1.0)


@pytest.mark.parametrize(("intensity", "rate"), [(2, 160), (8, 640), (12.5, 1000), (12.6, 1000), (64, 1000)])
def test_the_figures_of_the_lesson(intensity: float, rate: float) -> None:
    result = roofline.ceiling(intensity=intensity, bandwidth=80)
    assert result.attainable == roofline.attainable(intensity, 80) == rate
    assert (result.ridge, result.ceiling) == (12.5, 1000)
    assert result.bound == ("memory-bound" if intensity < 12.5 else "compute-bound")


def test_the_defaults_are_the_lesson() -> None:
    assert roofline.ceiling().attainable == 160


@given(POSITIVE, POSITIVE, POSITIVE)
def test_attainable_is_the_lower_roof(intensity: float, bandwidth: float, ceiling: float) -> None:
    rate = roofline.attainable(intensity, bandwidth, ceiling)
    assert rate == min(intensity * bandwidth, ceiling)
    assert rate <= roofline.attainable(2 * intensity, bandwidth, ceiling)


@given(st.sampled_from(["intensity", "bandwidth", "ceiling"]), BAD)
def test_a_value_that_is_no_positive_number_is_named(name: str, value: Any) -> None:
    values = {"intensity": 2.0, "bandwidth": 80.0, "ceiling": 1000.0} | {name: value}
    for run in (roofline.attainable, roofline.ceiling):
        with pytest.raises(LabError, match=re.escape(f"{name} = {value!r} is no positive finite number")):
            run(**values)


def test_the_remedy_of_the_message_is_true() -> None:
    with pytest.raises(LabError, match="try 1"):
        roofline.attainable(-2, 80)
    assert roofline.attainable(1, 80) == 80


@pytest.mark.parametrize(
    ("math", "memory", "measured", "word"),
    [
        (1.0, 2.0, 2.0, "memory-bound"),
        (2.0, 1.0, 2.0, "compute-bound"),
        (1.0, 1.0, 2.0, "compute-bound"),
        (1.0, 2.0, 1.0, "memory-bound"),  # faster than modelled: the bytes came from a cache
        (1.0, 2.0, 15.0, "memory-bound"),
        (1.0, 2.0, 15.1, "overhead-bound"),
        (2.0, 1.0, 15.1, "overhead-bound"),
    ],
)
def test_the_word_for_a_time(math: float, memory: float, measured: float, word: str) -> None:
    assert roofline.bound(math, memory, measured) == word


def test_a_matmul_is_placed_by_hand() -> None:
    """1 × 64 by 64 × 64 in float32: 8192 FLOP, 4 · (2 · 64 + 4096) = 16,896 bytes, at 10 GB/s and 100 GFLOP/s."""
    row = roofline.place(1, 64, 4, MADE, [2e-6, 4e-6, 3e-6])
    assert row.intensity == 8192 / 16896
    assert row.attainable == pytest.approx(8192 / 1689.6)
    assert (row.time_math, row.time_memory) == pytest.approx((8.192e-8, 1.6896e-6))
    assert (row.time_max, row.time_sum) == pytest.approx((1.6896e-6, 1.77152e-6))
    assert (row.rates.median, row.rates.highest, row.times.count) == pytest.approx((8192 / 3e3, 4.096, 3))
    assert row.bound == "memory-bound"


@given(st.integers(1, 4096), st.integers(64, 2048), st.sampled_from([2, 4, 8]))
def test_the_roof_is_the_time_of_perfect_overlap(microbatch: int, width: int, itemsize: int) -> None:
    row = roofline.place(microbatch, width, itemsize, MADE, [1.0])
    flop = 2 * microbatch * width**2
    assert row.attainable == pytest.approx(flop / row.time_max / 1e9)
    assert row.time_max <= row.time_sum <= 2 * row.time_max
    assert row.intensity < min(2 * microbatch, width) / itemsize


def drain(results: Iterator[Any]) -> Any:
    """The last result of an experiment whose progress grows up to 1."""
    shares = [0.0]
    for result in results:
        shares.append(result.progress)
    assert shares == sorted(shares)
    assert shares[-1] == 1 and 0 < shares[1] < 1
    return result


@pytest.fixture(scope="module")
def measured() -> Machine:
    return roofline.measure("cpu")


@pytest.fixture(scope="module")
def sweep() -> roofline.Sweep:
    result: roofline.Sweep = drain(roofline.machine(width=64, largest_microbatch=12))
    return result


def test_this_machine(measured: Machine) -> None:
    assert measured.ridge == measured.ceiling / measured.bandwidth
    assert measured.bandwidth == measured.bandwidths.highest >= measured.bandwidths.median > 0
    assert measured.ceiling == measured.ceilings.highest >= measured.ceilings.median > 0
    assert (measured.threads, measured.dtype, measured.progress) == (device.threads(), "float32", 1)
    assert measured.size in device.SIZES and measured.device


def test_what_is_not_measured_yet_is_nan() -> None:
    first = next(roofline.measuring("cpu"))
    assert first.bandwidth > 0 and math.isnan(first.ceiling) and math.isnan(first.ridge)
    assert first.ceilings.count == first.size == 0


def test_matmuls_under_the_roof(sweep: roofline.Sweep) -> None:
    """Largest first left out, where a busy machine has no time for all."""
    assert [*(row.microbatch for row in sweep.rows), *sweep.left_out] == [1, 2, 4, 8, 12]
    assert sweep.rows and sweep.machine.progress == 1
    for row, more in itertools.pairwise(sweep.rows):
        assert row.intensity < more.intensity
    for row in sweep.rows:
        assert row.rates.lowest > 0 and row.times.count > 0
        assert row.bound == roofline.bound(row.time_math, row.time_memory, row.times.lowest)


def test_threads_are_as_before(sweep: roofline.Sweep, measured: Machine) -> None:
    before = torch.get_num_threads()
    for _ in itertools.islice(roofline.measuring("cpu"), 2):
        assert torch.get_num_threads() == before


@pytest.fixture
def made_times(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replaces all timing: no call is run, every matmul multiplies at the given GFLOP/s."""

    def make(rate: float) -> None:
        def matmul(rows: int, weights: Any, where: Any, budget: float = 0.0) -> list[float]:
            return [2 * rows * len(weights[0]) ** 2 / rate / 1e9]

        monkeypatch.setattr(device, "_far", lambda _: 2**16)
        monkeypatch.setattr(device, "SIZES", (64, 128, 256, 512))
        monkeypatch.setattr(device, "timings", lambda *_: [1e-6])
        monkeypatch.setattr(device, "matmul", matmul)
        monkeypatch.setattr(roofline, "matmul", matmul)

    return make


def test_bytes_are_counted_as_stream_counts(made_times: Callable[[float], None]) -> None:
    made_times(1.0)
    assert roofline.measure("cpu").bandwidth == pytest.approx(3 * 2**16 / 1e-6 / 1e9)


@pytest.mark.parametrize(("rate", "size"), [(1.0, 256), (1000.0, 512), (1e-6, 64)])
def test_sizes_grow_while_one_matmul_is_short(made_times: Callable[[float], None], rate: float, size: int) -> None:
    made_times(rate)
    machine = drain(roofline.measuring("cpu"))
    assert machine.ceiling == pytest.approx(rate)
    assert machine.size <= size and 2 * size**3 / rate / 1e9 <= max(device.LONGEST, 2 * 64**3 / rate / 1e9)


def test_what_would_take_too_long_is_left_out(made_times: Callable[[float], None]) -> None:
    """At 1 GFLOP/s, 1 × 1024 takes 2 ms: 32 rows 67 ms, 64 rows too long."""
    made_times(1.0)
    sweep = drain(roofline.machine(largest_microbatch=256))
    assert [row.microbatch for row in sweep.rows] == [1, 2, 4, 8, 16, 32]
    assert sweep.left_out == (64, 128, 256)


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9])
def test_microbatches_double_up_to_the_largest(made_times: Callable[[float], None], largest: int) -> None:
    made_times(1e6)
    rows = drain(roofline.machine(width=64, largest_microbatch=largest)).rows
    assert [row.microbatch for row in rows] == [b for b in range(1, largest + 1) if b == largest or b & (b - 1) == 0]


def test_a_dtype_that_is_none() -> None:
    with pytest.raises(LabError, match="dtype = 'float8' is none of float32, float64, bfloat16, float16"):
        roofline.measure("cpu", "float8")


def test_counting_changes_the_reading_only() -> None:
    result = roofline.counting(width=64, microbatch=16)
    assert result.multiply_adds == 16 * 64 * 64
    assert result.rate_two == 2 * result.rate_one > 0
    assert result.intensity_two == 2 * result.intensity_one == 2 * 16 * 64**2 / (4 * (2 * 16 * 64 + 64**2))
    assert result.rate_one == result.multiply_adds / result.times.median / 1e9


def test_the_sparse_peak_halves_the_utilisation() -> None:
    result = roofline.sparse(accelerator="A100 SXM 80 GB", achieved=156)
    assert (result.of_dense, result.of_sparse) == (0.5, 0.25)


@pytest.mark.parametrize("achieved", [312.1, math.inf, math.nan])
def test_no_dense_program_beats_the_dense_peak(achieved: float) -> None:
    with pytest.raises(LabError, match=r"achieved = .* TFLOP/s is above the dense peak 312 .*A100.*: try 312$"):
        roofline.sparse(accelerator="A100 SXM 80 GB", achieved=achieved)
    assert roofline.sparse(accelerator="A100 SXM 80 GB", achieved=312).of_dense == 1


def test_caches_beat_the_memory_roof_on_any_machine_or_tie() -> None:
    result = drain(roofline.cache(largest=64))
    sizes = [point.size for point in result.points]
    assert sizes == [2**15 << k for k in range(12)]
    assert result.memory == result.points[-1].bandwidths.highest > 0
    assert result.fastest == max(point.bandwidths.highest for point in result.points)
    assert result.ratio == result.fastest / result.memory >= 1


def test_the_same_matmul_in_four_types() -> None:
    result = drain(roofline.precision(width=128))
    assert [row.dtype for row in result.rows] == ["float32", "float64", "bfloat16", "float16"]
    single = result.rows[0].rates.highest
    assert [row.promised for row in result.rows] == [single, single / 2, 2 * single, 2 * single]
    for row in result.rows:
        assert row.ratio == row.rates.highest / single > 0
        assert row.emulated == (row.dtype in ("bfloat16", "float16") and row.ratio < 0.5)


def test_an_emulated_type_is_named_and_keeps_the_matmul_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 at 0.9 GFLOP/s: 512³ would take 0.3 s, 256³ takes 37 ms."""
    rates = {torch.float32: 86.0, torch.float64: 43.0, torch.bfloat16: 0.9, torch.float16: 172.0}
    monkeypatch.setattr(
        roofline, "matmul", lambda rows, weights, *_: [2 * rows * len(weights[0]) ** 2 / rates[weights[0].dtype] / 1e9]
    )
    result = drain(roofline.precision(width=2048))
    assert result.size == 256
    assert [row.emulated for row in result.rows] == [False, False, True, False]
    assert [row.ratio for row in result.rows] == pytest.approx([1, 0.5, 0.9 / 86, 2])


@pytest.mark.parametrize("row", roofline.ACCELERATORS.values(), ids=lambda row: row.name)
def test_every_accelerator_has_a_source(row: roofline.Accelerator) -> None:
    assert row.source and row.url.startswith("https://") and re.fullmatch(r"20\d\d", row.date)
    assert 10 < row.ridge < 1000
    assert row.float32 is None or row.float32 < row.dense
    assert row.sparse is None or row.sparse == pytest.approx(2 * row.dense, rel=2e-3)


def test_the_figures_often_confused() -> None:
    h100 = roofline.ACCELERATORS["H100 SXM 80 GB"]
    assert (h100.dense, h100.sparse, h100.bandwidth) == (989, 1979, 3350)
    assert 8 <= len(roofline.ACCELERATORS) <= 12


def test_results_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        roofline.ceiling().intensity = 3.0  # type: ignore[misc]
