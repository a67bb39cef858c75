"""The exercises of the BatchNorm lab: freezing what looks at the batch, and two formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.device import quota_threads
from labkit.exercise import sandbox
from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import Function, Verdict, aside, exercise, join, refusal
from labkit.fit import distance, flat
from labkit.images import draw, split
from labkit.normalization import effective_momentum, pooled
from labkit.tolerance import tolerance
from labkit.wording import percent

CHECKS = (
    "microbatches give the gradient of one batch",
    "the running statistics stay as they are",
    "dropout still drops",
    "every weight still trains",
    "the same function in eval mode",
)
NORM = nn.modules.batchnorm._BatchNorm


class Net(nn.Module):
    """Two BatchNorms, one of them inside a block, a dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, 6)
        generator = torch.Generator().manual_seed(4)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        self.double()
        for _ in range(4):
            self.norm(self.first(draw(4, 24)[0]))  # running statistics of images like those it will see

    def forward(self, images: Tensor) -> Tensor:
        """Logits [b, 6] of images [b, 1, 16, 16]."""
        logits: Tensor = self.head(self.dropout(self.norm(self.first(images)).mean((2, 3))))
        return logits


@exercise
@quota_threads(1)
def frozen(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `freeze(model)`: BatchNorm shall stop to look at the batch, and all else train as before.

    >>> frozen(lambda model: model.eval()).sentence
    'Your function switches dropout off too: put only the BatchNorm layers in eval mode.'

    The model has two BatchNorm2d, one of them inside a block, and a dropout; it comes in training mode, and is changed
    in place. float64. What stops the function is contained by `sandbox.run`.
    """
    if why := refusal(function, "model"):
        return Verdict(False, tuple((check, False) for check in CHECKS), why, "")
    with torch.random.fork_rng(devices=[]):
        model, before = Net(), Net()
        outcome = sandbox.run(function, model, seconds=seconds)
        if outcome.error:
            return Verdict(False, tuple((check, False) for check in CHECKS), outcome.error, outcome.printed)
        results, sentence = _judge(model, before, outcome.value)
    return Verdict(all(results), tuple(zip(CHECKS, results, strict=True)), sentence + aside(outcome), outcome.printed)


def _judge(model: Net, before: Net, value: object) -> tuple[list[bool], str]:
    """Which checks hold, and the first fault."""
    modes = {name: module.training for name, module in model.named_modules()}
    same = _same(model, before)
    error, explained = _difference(model)
    stay = same and _stays(model, before)
    drops = model.dropout.training and model.dropout.p == before.dropout.p
    untrainable = [name for name, p in model.named_parameters() if not p.requires_grad]
    results = [error <= explained, stay, drops, not untrainable, same]
    faults = (*_layers(model, modes, error, explained, stay), *_others(drops, untrainable, same))
    if isinstance(value, nn.Module) and value is not model and not all(results):
        return results, "Your function returns another model: change the one it is given, which the optimizer knows."
    praise = f"Right: microbatches are {error:.1g} off one batch, and rounding alone explains {explained:.1g}."
    return results, next(iter(faults), praise)


def _layers(model: Net, modes: dict[str, bool], error: float, explained: float, stay: bool) -> Iterator[str]:
    """What is wrong with the BatchNorm layers."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, NORM)}
    gap = f"the gradient of four microbatches is still {percent(error)} off that of one batch"
    if error > explained:
        eager = [name for name in norms if modes[name]]
        if 0 < len(eager) < len(norms):
            yield f"{join(eager)} still looks at the batch: go through model.modules(), which finds nested ones too."
        if any(norm.running_mean is None or not norm.track_running_stats for norm in norms.values()):
            yield f"Without running statistics a BatchNorm uses those of the microbatch in eval mode too: {gap}."
        if not all(p.requires_grad for norm in norms.values() for p in norm.parameters()):
            yield f"requires_grad=False freezes a layer's weight and bias, which do not look at the batch: {gap}."
        if stay:
            yield f"The running statistics stand still, and the layers do not use them: {gap}. Call .eval() on them."
        yield f"The layers still normalise by their own microbatch: {gap}. Call .eval() on each BatchNorm."


def _others(drops: bool, untrainable: list[str], same: bool) -> Iterator[str]:
    """What is wrong with all else."""
    if not drops:
        yield "Your function switches dropout off too: put only the BatchNorm layers in eval mode."
    if untrainable:
        yield f"{join(untrainable)} would never train again: requires_grad has nothing to do with the statistics."
    if not same:
        yield "In eval mode the model gives other outputs than before: leave layers, weights and statistics alone."


def _same(model: Net, before: Net) -> bool:
    """Whether both are the same function in eval mode."""
    modes = [(module, module.training) for module in model.modules()]
    images, _ = draw(5, 8)
    with torch.no_grad():
        outputs, reference = model.eval()(images), before.eval()(images)
    for module, training in modes:
        module.training = training
    before.train()
    return torch.equal(outputs, reference)


def _difference(model: Net) -> tuple[float, float]:
    """Relative error of four microbatches against one batch, without dropout, and what rounding explains."""
    training, model.dropout.training = model.dropout.training, False
    microbatches = split(*draw(6, 24), 4)
    whole = [tuple(torch.cat(each) for each in zip(*microbatches, strict=True))]
    parts = torch.stack([_gradient(model, [each]) for each in microbatches])
    reference = _gradient(model, whole)  # type: ignore[arg-type]
    model.dropout.training = training
    if not reference.any():
        return 0.0, 0.0
    bound = tolerance(parts, count=24 * 64, depth=24 * 64, dtype=torch.float64, result=float(reference.norm()))
    return distance(parts.sum(0), reference).relative_error, bound.value


def _gradient(model: Net, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Gradient of the loss over 24 images, zero where a weight does not train."""
    model.zero_grad()
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels, reduction="sum") / 24
        if loss.requires_grad:
            loss.backward()
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def _stays(model: Net, before: Net) -> bool:
    """Whether the statistics are what they were, after all these forward passes."""
    theirs, ours = (
        {name: each for name, each in model.state_dict().items() if "running" in name} for model in (model, before)
    )
    return theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in ours)


MOMENTUM = Exercise(
    ("momentum", "accumulation"),
    {
        "torch's momentum": (0.1, 8),
        "no accumulation": (0.3, 1),
        "a small momentum": (0.01, 4),
        "a large momentum": (0.5, 2),
        "momentum 1": (1.0, 3),
    },
    effective_momentum,
    {
        "the running statistics move K times, not once": lambda m, K: m,
        "K moves do not add up, since each starts where the last one ended": lambda m, K: m * K,
        "K moves do not add up, and a share above 1 is none": lambda m, K: min(1.0, m * K),
        "each microbatch moves by the whole momentum, and not by its K-th": lambda m, K: m / K,
        "that is the share of the old value that is left after K moves": lambda m, K: (1 - m) ** K,
        "m to the K-th is the share of none of them: 1 − m is left at each move": lambda m, K: m**K,
        "1 − m is left at each move, not m": lambda m, K: 1 - m**K,
        "that is one move too few": lambda m, K: 1 - (1 - m) ** (K - 1),
        "what is left shrinks K times, by multiplication": lambda m, K: 1 - (1 - m) * K,
    },
)
Values = list[float]


def _plain(values: Values, counts: list[int]) -> float:
    return sum(values) / len(values)


def _weighted(values: Values, counts: list[int]) -> float:
    return sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)


def _between(mean: Callable[[Values, list[int]], float]) -> Callable[..., float]:
    return lambda m, v, n: mean(v, n) + mean([(each - mean(m, n)) ** 2 for each in m], n)


def _pooled(means: Values, variances: Values, counts: list[int]) -> float:
    of_each = (torch.tensor(each, dtype=torch.float64) for each in (means, variances, counts))
    return pooled(*of_each)[1].item()


POOLED = Exercise(
    ("means", "variances", "counts"),
    {
        "equal ranks": ([0.0, 4.0], [1.0, 3.0], [8, 8]),
        "uneven ranks": ([0.0, 4.0], [1.0, 2.0], [3, 1]),
        "equal means": ([2.0, 2.0, 2.0], [1.0, 4.0, 2.5], [2, 5, 9]),
        "one rank": ([3.0], [2.0], [6]),
        "four ranks": ([1.0, -2.0, 0.5, 7.0], [0.5, 2.0, 0.25, 1.5], [7, 2, 11, 4]),
    },
    _pooled,
    {
        "it is the mean of the ranks' variances: their counts and the spread of their means are missing": (
            lambda m, v, n: _plain(v, n)
        ),
        "the spread between the ranks' means is missing": lambda m, v, n: _weighted(v, n),
        "every rank counts the same, however many images it has": _between(_plain),
        "the spread is taken around the plain mean of the means, and not around the weighted one": (
            lambda m, v, n: _weighted(v, n) + _weighted([(each - _plain(m, n)) ** 2 for each in m], n)
        ),
        "the spread of the means is not weighted by the counts": (
            lambda m, v, n: _weighted(v, n) + _plain([(each - _weighted(m, n)) ** 2 for each in m], n)
        ),
        "the variances are not weighted by the counts": (
            lambda m, v, n: _plain(v, n) + _weighted([(each - _weighted(m, n)) ** 2 for each in m], n)
        ),
        "that is the spread of the means alone, without what varies within a rank": (
            lambda m, v, n: _weighted([(each - _weighted(m, n)) ** 2 for each in m], n)
        ),
        "that is the mean of the squares, and the square of the mean has to go": (
            lambda m, v, n: _weighted([b + a * a for a, b in zip(m, v, strict=True)], n)
        ),
        "the variances are added and never divided": lambda m, v, n: sum(v),
        "the distance of the means is not squared": (
            lambda m, v, n: _weighted(v, n) + _weighted([abs(each - _weighted(m, n)) for each in m], n)
        ),
    },
)


@exercise
def momentum(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `momentum(momentum, accumulation)`: by how much running statistics really move in an optimizer step.

    >>> momentum(lambda momentum, accumulation: momentum * accumulation).sentence.partition(": ")[2]
    'K moves do not add up, since each starts where the last one ended.'

    Source: `labkit.normalization.effective_momentum`, tested against torch's BatchNorm.
    """
    return MOMENTUM.judge(function, seconds)


@exercise
def pooled_variance(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `pooled_variance(means, variances, counts)`: the variance of all images, from that of every rank.

    >>> pooled_variance(lambda means, variances, counts: sum(variances) / len(variances)).sentence.partition(": ")[2]
    "it is the mean of the ranks' variances: their counts and the spread of their means are missing."

    All variances are biased: divided by the count. Source: the law of total variance.
    """
    return POOLED.judge(function, seconds)
