"""What a learner sees: one panel for each experiment, by the name of its topic."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Callable
from typing import Any

from labkit.labs._classroom import class_board
from labkit.labs._doctor import Installation as installation
from labkit.labs._handin import report
from labkit.labs._lab import Lab
from labkit.labs._open import projector
from labkit.labs._overview import overview as map
from labkit.labs._panel import check, errors

__all__ = [
    "Lab",
    "accumulation",
    "all",
    "audit",
    "batch",
    "cadence",
    "casebook",
    "check",
    "class_board",
    "clipping",
    "data_parallel",
    "errors",
    "installation",
    "map",
    "memory",
    "noise",
    "normalization",
    "packing",
    "pipeline",
    "projector",
    "report",
    "roofline",
    "shown",
    "throughput",
]

_TOPICS = (
    "batch",
    "roofline",
    "accumulation",
    "data_parallel",
    "pipeline",
    "normalization",
    "cadence",
    "clipping",
    "memory",
    "throughput",
    "noise",
    "packing",
    "audit",
    "casebook",
)


def batch(experiment: str = "", **values: Any) -> Lab:
    """Batch quantities: what one optimizer step is made of, the wanted batch, two plans, a step in time, progress.

    >>> batch("planner", world=128).values["world"]
    128
    """
    return _topic("batch", experiment, values)


def roofline(experiment: str = "", **values: Any) -> Lab:
    """The roofline: a modelled ceiling, this machine measured, and four traps.

    >>> roofline().experiments[0]
    'ceiling'

    With the name of an experiment the panel shows that one alone; values set its controls.
    """
    return _topic("roofline", experiment, values)


def accumulation(experiment: str = "", **values: Any) -> Lab:
    """Mean or token sum: the weight of each token, layers, trainings, and what breaks an equivalence.

    >>> accumulation("by_hand").experiments
    ['by_hand']
    """
    return _topic("accumulation", experiment, values)


def data_parallel(experiment: str = "", **values: Any) -> Lab:
    """Data parallel: recipes, no_sync and buckets on real ranks, what an all-reduce costs, ranks that are not alike.

    >>> data_parallel("recipes", ranks=3).values["ranks"]
    3
    """
    from labkit import workers

    workers.warm()  # the ranks load torch while the learner reads
    return _topic("data_parallel", experiment, values)


def pipeline(experiment: str = "", **values: Any) -> Lab:
    """Pipeline: losses and scale_grads, batches that do not divide, a step in time, the bubble, the best M.

    >>> pipeline("bubble", ranks=3).values["ranks"]
    3

    The experiments run in processes of their own, which begin to load here.
    """
    importlib.import_module("labkit.workers").warm()
    return _topic("pipeline", experiment, values)


def normalization(experiment: str = "", **values: Any) -> Lab:
    """BatchNorm and randomness: what a microbatch sees, what helps, running statistics, masks.

    >>> normalization("running", momentum=0.2).values["momentum"]
    0.2
    """
    return _topic("normalization", experiment, values)


def cadence(experiment: str = "", **values: Any) -> Lab:
    """Adam and cadence: what must happen once in an optimizer step, and what becomes of it K times.

    >>> cadence("count").experiments
    ['count']
    """
    return _topic("cadence", experiment, values)


def memory(experiment: str = "", **values: Any) -> Lab:
    """Memory: what is kept for backward, what stands beside it, the classic mistake, and the peak on this device.

    >>> memory("kept").experiments
    ['kept']
    """
    return _topic("memory", experiment, values)


def clipping(experiment: str = "", **values: Any) -> Lab:
    """Clipping and loss scaling: the order of unscale and clip, what half precision loses, and skipped steps.

    >>> clipping("ranks").experiments
    ['ranks']
    """
    return _topic("clipping", experiment, values)


def throughput(experiment: str = "", **values: Any) -> Lab:
    """Throughput: steps by the size of a microbatch, what is faster about them, whether it can be told, a data loader.

    >>> throughput("decision", runs=9).values["runs"]
    9
    """
    return _topic("throughput", experiment, values)


def noise(experiment: str = "", **values: Any) -> Lab:
    """Noise and learning rate: what averaging does, the noise scale, what a larger batch is good for, warmup, decay.

    >>> noise("norms", noise=2).values["noise"]
    2.0
    """
    return _topic("noise", experiment, values)


def packing(experiment: str = "", **values: Any) -> Lab:
    """Packing and mixture: padding, the leak, boundaries, positions, weights of a mixture, the order of the data.

    >>> packing("leak").experiments
    ['leak']
    """
    return _topic("packing", experiment, values)


def audit(experiment: str = "", **values: Any) -> Lab:
    """The audit: loops that look right, the hunt for a hidden fault, and whether a changed step may be adopted.

    >>> audit("hunt").experiments
    ['hunt']
    """
    return _topic("audit", experiment, values)


def casebook(experiment: str = "", **values: Any) -> Lab:
    """The casebook: one fault that was shipped, beside the right loop, and all of them in one picture.

    >>> casebook("case", case="B07 mean of rank means").values["case"]
    'B07 mean of rank means'
    """
    return _topic("casebook", experiment, values)


def shown(found: Any) -> Any:
    """The Report of an audit as a picture, or the findings of `inspect` as a table.

    >>> from labkit.hunt.suspects import loops
    >>> repr(shown(loops(loop="B"))).splitlines()[0]
    'schedule-per-microbatch'
    """
    return importlib.import_module("labkit.labs._report").shown(found)


def all() -> dict[str, Callable[..., Lab]]:
    """Every lab, by name.

    >>> "roofline" in all()
    True
    """
    return {name: globals()[name] for name in _TOPICS}


def _topic(name: str, experiment: str, values: dict[str, Any]) -> Lab:
    found = importlib.import_module(f"labkit.labs._{name}").EXPERIMENTS
    chosen = [kind for kind in found if kind.name == experiment] if experiment else builtins.list(found)
    lab = Lab([kind() for kind in chosen or found], experiment, **values)
    lab.topic = name
    return lab
