"""A data loader that is too slow, with and without prefetch."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from labkit.corpus import Seed, batch
from labkit.declare import Range, Switch, quantity
from labkit.device import Spread, pick
from labkit.throughput.timing import Device, cut, interleave, timed, trainee

ITEMS = 9  # steps of one measured loop; the first is not counted
BURST = 4  # with uneven loading, one item in so many takes the time of all of them


def schedule(loads: Sequence[float], compute: float, depth: int) -> list[float]:
    """When each step ends, modelled: items that take these seconds to load, steps that take `compute`.

    >>> schedule([2, 2, 2], 3, depth=0), schedule([2, 2, 2], 3, depth=1)
    ([5.0, 10.0, 15.0], [5.0, 8.0, 11.0])

    depth: items that may wait, loaded, while a step runs; at 0 nothing is loaded during a step. The loader goes on
    only when its item has found a place to wait: a bounded queue. A step begins when its item is there.
    """
    took: list[float] = []  # when each item was taken out
    put = end = 0.0
    ends = []
    for at, load in enumerate(loads):
        ready = (put if depth else end) + load
        put = max(ready, took[at - depth]) if depth and at >= depth else ready
        took.append(max(put, end))
        end = took[-1] + compute
        ends.append(end)
    return ends


def each(ends: Sequence[float]) -> float:
    """Seconds of a step, from the end of the first to the end of the last.

    >>> each([5.0, 8.0, 11.0])
    3.0
    """
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def items(loads: Sequence[float], depth: int) -> Iterator[int]:
    """The number of each item as soon as it is loaded, by a thread that runs ahead where there is a depth.

    >>> list(items([0.0, 0.0, 0.0], depth=2))
    [0, 1, 2]

    Loading is waiting here, as for a disk or a network: it needs no core.
    """
    if not depth:
        for at, load in enumerate(loads):
            time.sleep(load)
            yield at
        return
    waiting: queue.Queue[int] = queue.Queue(maxsize=depth)
    loader = threading.Thread(target=lambda: _fill(waiting, loads), daemon=True, name="labkit-loader")
    loader.start()
    for _ in loads:
        yield waiting.get()
    loader.join()


def _fill(waiting: queue.Queue[int], loads: Sequence[float]) -> None:
    for at, load in enumerate(loads):
        time.sleep(load)
        waiting.put(at)


def loop(loads: Sequence[float], work: Callable[[], object], depth: int) -> float:
    """Seconds of a step of a real loop: take an item, do the work.

    >>> loop([0.0, 0.0], lambda: None, depth=1) >= 0
    True
    """
    ends = []
    for _ in items(loads, depth):
        work()
        ends.append(time.perf_counter())
    return each(ends)


@dataclass(frozen=True)
class Loader:
    """A loop over loaded items, without prefetch and with it."""

    depth: int = quantity("items that may wait, loaded", "items")
    uneven: bool = quantity("whether one item in four takes the time of all four")
    load: float = quantity("time to load an item, declared, on average", "s")
    compute: Spread = quantity("an optimizer step alone, measured in turn with the loops", "s")
    plain: Spread = quantity("a step with its loading, without prefetch, measured", "s")
    ahead: Spread = quantity("the same with prefetch, measured", "s")
    plain_modelled: float = quantity("load + compute", "s")
    ahead_modelled: float = quantity("by the bounded queue; max(load, compute) where loading is even", "s")
    progress: float = quantity("share that is done")

    @property
    def gain(self) -> float:
        """How many times faster the loop is with prefetch."""
        return self.plain.median / self.ahead.median


def loader(
    *,
    load: Annotated[float, Range(0, 3, step=0.25, unit="steps", help="time to load an item, in optimizer steps")] = 1.0,
    depth: Annotated[int, Range(0, 8, unit="items", help="items that a thread may load ahead; 0: none")] = 2,
    uneven: Annotated[bool, Switch(help="one item in four takes the time of all four")] = False,
    repeats: Annotated[int, Range(3, 5, unit="loops", help="loops of nine steps, each way")] = 3,
    device: Device = "auto",
    seed: Seed = 0,
) -> Iterator[Loader]:
    """A real loop over items whose loading takes a declared time, one after the other and with prefetch.

    >>> *_, last = loader(load=0.5)
    >>> round(last.plain_modelled / (last.load + last.compute.median), 6), last.progress
    (1.0, 1.0)

    One after the other: load + compute. A thread that loads ahead: max(load, compute). A generator of the result so
    far; a step is one microbatch of 32 sequences.
    """
    where = pick(device)
    model, optimizer = trainee(seed, 32, where)
    work = functools.partial(timed, model, optimizer, cut(batch(seed, 32, 32, shortest=32), 32, where), where)
    *_, (times,) = interleave([work], 5)
    declared = load * Spread.of([every.step for every in times]).median
    loads = [declared * share for share in itertools.islice(itertools.cycle(shares(uneven)), ITEMS)]
    ways = ([0.0] * ITEMS, 0), (loads, 0), (loads, depth)
    works = [functools.partial(loop, delays, work, ahead) for delays, ahead in ways]
    for count, results in enumerate(interleave(works, repeats), 1):
        compute, plain, ahead = (Spread.of(every) for every in results)
        slow, fast = (each(schedule(loads, compute.median, deep)) for deep in (0, depth))
        yield Loader(depth, uneven, declared, compute, plain, ahead, slow, fast, count / (3 * repeats))


def shares(uneven: bool) -> list[float]:
    """How the time is spread over four items.

    >>> shares(True), sum(shares(False))
    ([0.0, 0.0, 0.0, 4.0], 4.0)
    """
    return [0.0] * (BURST - 1) + [float(BURST)] if uneven else [1.0] * BURST
