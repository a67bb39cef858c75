"""The third gate: the training runs are compared for some updates, within what rounding grows to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.acceptance.equality import NO_TEST
from labkit.acceptance.record import FAILED, PASSED, UNSURE
from labkit.acceptance.side import Nudge, Trace
from labkit.wording import percent, word

CONTROLS = (1, 2, 3)  # seeds of the control runs


@dataclass(frozen=True, eq=False)
class Bands:
    """How far rounding can take the base's own trace, before and after each update."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def nudge(bound: float, seed: int) -> Nudge:
    """Move every microbatch's gradient, coordinate by coordinate, by a share of itself, up or down at random.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with nudge(0.5, 0)(model): model(torch.ones(1, 2)).sum().backward()
    >>> sorted({0.5, 1.5} | set(model.weight.grad.flatten().tolist()))
    [0.5, 1.5]

    With 2γ as bound the sum moves by as much as two orders of summing may differ: 2γ Σ|terms| in every coordinate.
    """

    @contextmanager
    def moving(model: nn.Module) -> Iterator[None]:
        generator = torch.Generator().manual_seed(seed)

        def hook(gradient: Tensor) -> Tensor:
            signs = 2 * torch.randint(2, gradient.shape, generator=generator, dtype=torch.float64) - 1
            return gradient + gradient * (bound * signs).to(gradient)

        with ExitStack() as stack:
            for p in model.parameters():
                if p.requires_grad:
                    stack.callback(p.register_hook(hook).remove)
            yield

    return moving


def bands(base: Trace, controls: Sequence[Trace], bound: float) -> Bands:
    """The largest distance between the base and its control runs so far, and the rounding of the number itself."""
    return Bands(
        _band(base.losses, [each.losses for each in controls], bound),
        _band(base.norms, [each.norms for each in controls], bound),
    )


def _band(base: Sequence[float], controls: Sequence[Sequence[float]], bound: float) -> tuple[float, ...]:
    distances = [max(abs(each - value) for each in others) for value, *others in zip(base, *controls, strict=True)]
    return tuple(
        grown + bound * abs(value) for grown, value in zip(itertools.accumulate(distances, max), base, strict=True)
    )


def differences(base: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """How far two traces are apart at each place.

    >>> differences([3.0, 2.0], [3.0, 2.5])
    [0.0, 0.5]
    """
    return [abs(b - a) for a, b in zip(base, candidate, strict=True)]


def progress(losses: Sequence[float]) -> float:
    """The furthest that training moved the loss from its first value.

    >>> progress([3.0, 2.0, 2.5])
    1.0
    """
    return max(abs(each - losses[0]) for each in losses)


def check_traces(base: Trace, candidate: Trace, allowed: Bands | None) -> tuple[str, str]:
    """The third gate: no more skipped updates, and traces as close as rounding allows; None: no bands known."""
    updates = len(base.losses) - 1
    if candidate.skipped > base.skipped:
        return FAILED, f"the candidate skipped {word(candidate.skipped)} of {updates} updates, the base {base.skipped}."
    if not all(each < float("inf") for each in candidate.losses):
        return FAILED, f"the candidate's loss is not finite within {updates} updates."
    gaps = differences(base.losses, candidate.losses)
    if allowed is None:
        what = f"over {updates} updates the losses differ by up to {max(gaps):.1g} nat"
        return UNSURE, f"{what}, and no band says how much of that is rounding."
    change = progress(base.losses)
    if not allowed.losses[-1] < NO_TEST * change:
        grown = f"rounding grows to {allowed.losses[-1]:.1g} nat in {updates} updates"
        than = f"more than {percent(NO_TEST)} of what training changed the loss by, {change:.1g}"
        return UNSURE, f"{grown}, {than}: take fewer windows, or float64."
    for name, values, band in (
        ("losses", gaps, allowed.losses),
        ("gradient norms", differences(base.norms, candidate.norms), allowed.norms),
    ):
        beyond = [at for at, (d, most) in enumerate(zip(values, band, strict=True)) if d > most]
        if beyond:
            at = beyond[0]
            return FAILED, f"after update {at} the {name} differ by {values[at]:.1g}, rounding explains {band[at]:.1g}."
    what = f"{updates} updates, {base.skipped} skipped; losses at most {max(gaps):.1g} nat apart"
    return PASSED, f"{what}, where rounding grows to {allowed.losses[-1]:.1g}."
