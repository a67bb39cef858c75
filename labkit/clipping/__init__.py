"""Clipping and loss scaling: how the order of accumulate, unscale, clip and step changes the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD

from labkit.clipping.ordering import ORDERS, Order, Parts, clip_once, clip_per_microbatch, clip_weight, once
from labkit.clipping.overflow_across_ranks import ranks as ranks
from labkit.clipping.scaling import overflow as overflow
from labkit.clipping.scaling import underflow as underflow
from labkit.corpus import Seed, Sequences, Steps, batch, split
from labkit.declare import Choice, Range, quantity
from labkit.fit import Distance, distance, fit, flat, gradient
from labkit.gradients import Gradients, composed
from labkit.nets import Transformer, microbatch_gradients, valid_tokens
from labkit.rules import Microbatches
from labkit.tolerance import Compared, Tolerance, depth, tolerance

Threshold = Annotated[float, Range(0.01, 1e5, log=True, help="c, the longest gradient that may be stepped with")]


@dataclass(frozen=True, eq=False)
class Ordered(Distance, Compared):
    """The gradient that an order stepped with, beside clip-once's, and the weights it is made of."""

    rule: str = quantity("the order's word")
    refused: str = quantity("what torch's scaler says to this order, where it refuses it")
    whole: float = quantity("‖G‖, the whole window's gradient before any clip")
    right_weight: float = quantity("min(1, c/‖G‖), clip-once's weight of every microbatch")
    counts: Tensor = quantity("valid tokens of each microbatch", "tokens")
    norms: Tensor = quantity("‖g_m‖ of each microbatch's own mean gradient")
    weights: Tensor = quantity("fitted weight × N of each microbatch; 1 is right where nothing is clipped")
    predicted: Tensor = quantity("the same by the order's algebra")
    residual: float = quantity("share of the gradient that no weights explain")
    condition: float = quantity("how much the fit may enlarge an error")
    tolerance: Tolerance = quantity("relative error that rounding alone explains")
    gradients: Gradients = quantity("both gradients, and what each part contributes to them")


def orders(
    *,
    rule: Annotated[str, Choice(tuple(ORDERS), help="when to unscale, and when to clip")] = "unscale-early",
    accumulation_steps: Steps = 4,
    scale_exponent: Annotated[int, Range(0, 16, help="the loss is multiplied by S = 2 to this power")] = 4,
    max_norm: Threshold = 1e5,
    sequences: Sequences = 8,
    seed: Seed = 0,
) -> Ordered:
    """The weight with which each microbatch reached the optimizer, by the order of unscaling and clipping.

    >>> orders().weights.round(decimals=9)  # unscaled after the first microbatch, S = 16
    tensor([ 1., 16., 16., 16.], dtype=torch.float64)

    torch.amp.GradScaler, clip_grad_norm_ and SGD on a transformer in float64; the gradient is read as the optimizer's
    step begins. S is a power of two, since GradScaler keeps 1/S in float32. Raises LabError for more
    microbatches than sequences.
    """
    model, scale = Transformer(seed=seed, dtype=torch.float64), 2.0**scale_exponent
    microbatches = split(*batch(seed, sequences), accumulation_steps)
    parts = taken_apart(model, microbatches, scale, max_norm)
    order, algebra = ORDERS[rule]
    right, weight = once(parts) @ parts.rows, float(once(parts)[0])
    g = stepped_with(order, model, microbatches, scale, max_norm)
    fitted, rounding = fit(g, parts.rows), _tolerance(model, parts, microbatches)
    counts = torch.tensor([valid_tokens(labels) for _, labels in microbatches])
    both = fitted.values.nan_to_num()[:, None] * parts.rows, weight * parts.rows
    return Ordered(
        **vars(distance(g, right)),
        rule=rule,
        refused=refusal(scale) if rule == "unscale-every" and accumulation_steps > 1 else "",
        whole=float(parts.rows.sum(0).norm()),
        right_weight=weight,
        counts=counts,
        norms=parts.norms,
        weights=fitted.values,
        predicted=algebra(parts),
        residual=fitted.residual,
        condition=fitted.condition,
        tolerance=rounding,
        gradients=composed(
            g, *both, list(map(str, counts.tolist())), rounding.value, model=model, names=("clip once", rule)
        ),
    )


def taken_apart(model: nn.Module, microbatches: Microbatches, scale: float, max_norm: float) -> Parts:
    """The gradient of each microbatch alone, from its own backward, unscaled."""
    counts = torch.tensor([valid_tokens(labels) for _, labels in microbatches], dtype=torch.float64)
    return Parts(microbatch_gradients(model, microbatches) / counts.sum(), counts / counts.sum(), scale, max_norm)


def stepped_with(order: Order, model: nn.Module, microbatches: Microbatches, scale: float, max_norm: float) -> Tensor:
    """Run an order; the gradient that the optimizer found in .grad when its step began, flat."""
    gradients: list[Tensor] = []
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat(gradient(model))))
    model.zero_grad()
    order(model, microbatches, optimizer, GradScaler("cpu", init_scale=scale), max_norm)
    return gradients[0]


def refusal(scale: float) -> str:
    """What GradScaler says to a second unscale_ in one window.

    >>> refusal(16)
    'RuntimeError: unscale_() has already been called on this optimizer since the last update().'
    """
    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler = SGD([weight], lr=0.1), GradScaler("cpu", init_scale=scale)
    try:
        for _ in range(2):
            scaler.scale(weight.sum()).backward()
            scaler.unscale_(optimizer)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _tolerance(model: nn.Module, parts: Parts, microbatches: Microbatches) -> Tolerance:
    """The sum's twice over, and P more: the norm that it is divided by errs as the sum does, and adds P squares."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    roundings = 2 * depth(model) + parts.rows.shape[1]
    return tolerance(parts.rows, count=2 * N, depth=roundings, dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Clips:
    """The gradient clipped once after accumulation, and clipped in every microbatch, over the threshold."""

    max_norm: float = quantity("c, the threshold")
    whole: float = quantity("‖G‖, the whole window's gradient before any clip")
    norms: Tensor = quantity("‖g_m‖ of each microbatch's own mean gradient")
    clipped: int = quantity("microbatches that are longer than c", "microbatches")
    once: float = quantity("length of the step's gradient, clipped once")
    each: float = quantity("length of the step's gradient, each microbatch clipped")
    cosine: float = quantity("cosine between the two")
    angle: float = quantity("angle between the two", "degrees")
    relative_error: float = quantity("‖g − G‖ / ‖G‖, G clipped once")
    thresholds: Tensor = quantity("c of the modelled curves")
    modelled_once: Tensor = quantity("min(c, ‖G‖)")
    modelled_each: Tensor = quantity("‖Σ n_m/N · min(1, c/‖g_m‖) · g_m‖")
    modelled_angle: Tensor = quantity("angle between the two", "degrees")
    gradients: Gradients = quantity("both gradients, and what each part contributes to them")


def clip(
    *,
    max_norm: Annotated[float, Range(0.1, 10, log=True, help="c, the longest gradient that is allowed")] = 1.0,
    accumulation_steps: Steps = 4,
    sequences: Sequences = 8,
    seed: Seed = 0,
) -> Clips:
    """The whole window's gradient clipped once, against each microbatch's clipped separately.

    >>> clips = clip(max_norm=10.0)  # longer than any gradient here: nothing is clipped
    >>> clips.clipped, round(clips.each / clips.once, 9)
    (0, 1.0)

    Dots are measured at `max_norm` by running both loops, float64; curves follow from the microbatches' gradients.
    Raises LabError for more microbatches than sequences.
    """
    model = Transformer(seed=seed, dtype=torch.float64)
    microbatches = split(*batch(seed, sequences), accumulation_steps)
    parts = taken_apart(model, microbatches, 1.0, max_norm)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    right = stepped_with(clip_once, model, microbatches, 1.0, max_norm)
    model.load_state_dict(start)
    g = stepped_with(clip_per_microbatch, model, microbatches, 1.0, max_norm)
    difference = distance(g, right)
    weights = torch.tensor([clip_weight(norm, max_norm) for norm in parts.norms.tolist()], dtype=torch.float64)
    both = weights[:, None] * parts.rows, float(once(parts)[0]) * parts.rows
    counts = [str(valid_tokens(labels)) for _, labels in microbatches]
    thresholds = torch.logspace(-1, 1, 81, dtype=torch.float64)
    lengths, cosines = _curves(parts, thresholds)
    return Clips(
        max_norm=max_norm,
        whole=float(parts.rows.sum(0).norm()),
        norms=parts.norms,
        clipped=int((parts.norms > max_norm).sum()),
        once=difference.right_norm,
        each=difference.norm,
        cosine=difference.cosine,
        angle=_degrees(difference.cosine),
        relative_error=difference.relative_error,
        thresholds=thresholds,
        modelled_once=thresholds.clamp(max=float(parts.rows.sum(0).norm())),
        modelled_each=lengths,
        modelled_angle=torch.tensor([_degrees(each) for each in cosines.tolist()]),
        gradients=composed(
            g,
            *both,
            counts,
            _tolerance(model, parts, microbatches).value,
            model=model,
            names=("clipped once", "each microbatch clipped"),
        ),
    )


def _curves(parts: Parts, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """Length of Σ w_m S_m/N with w_m = min(1, c/‖g_m‖), and its cosine with G, for every threshold c."""
    weights = (thresholds[:, None] / parts.norms).clamp(max=1.0)
    inner = parts.rows @ parts.rows.T
    lengths = (weights @ inner * weights).sum(1).sqrt()
    return lengths, (weights @ inner).sum(1) / (lengths * inner.sum().sqrt())


def _degrees(cosine: float) -> float:
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
