"""Shipped faults inside the model: layers that look at the batch, masks that are drawn again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from labkit.audit import probe
from labkit.audit.bug_hunt.hidden import VOCABULARY, WIDTH, Suspect
from labkit.casebook.entry import Build, Case, Loop, Numbers, add
from labkit.corpus import Batch
from labkit.nets import next_token_loss, valid_tokens
from labkit.rules import Microbatches


def normalised_each(layer: nn.Module, microbatches: list[Tensor]) -> Tensor:
    """Every microbatch goes through the layer by itself."""
    return torch.cat([layer(x) for x in microbatches])


def normalised_together(layer: nn.Module, microbatches: list[Tensor]) -> Tensor:
    """The batch goes through the layer in one."""
    normalised: Tensor = layer(torch.cat(microbatches))
    return normalised


def of_four(loop: Loop) -> Numbers:
    """Four numbers, 0, 2 and 4, 10, through torch's BatchNorm at momentum 0.1, and the means that it took."""
    layer, means = nn.BatchNorm1d(1, eps=1e-12, dtype=torch.float64), list[float]()
    layer.register_forward_pre_hook(lambda _, inputs: means.append(inputs[0].mean().item()))
    column = torch.tensor([[0.0], [2.0], [4.0], [10.0]], dtype=torch.float64)
    normalised = loop(layer, list(column.split(2)))
    assert layer.running_mean is not None and layer.running_var is not None
    return {
        "what x = 2 becomes": normalised[1].item(),
        "mean that it meets": means[0],
        "mean that x = 10 meets": means[-1],
        "running mean": layer.running_mean.item(),
        "running variance": layer.running_var.item(),
    }


def with_layer(loop: Loop) -> Build:
    """A small model with a BatchNorm; the microbatches come one by one, or joined: what the audit takes."""

    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = Suspect(nn.BatchNorm1d(WIDTH), seed=0)
        optimizer = SGD(model.parameters(), lr=0.1)

        def step(microbatches: Microbatches) -> None:
            N = sum(valid_tokens(labels) for _, labels in microbatches)
            for tokens, labels in microbatches if loop is normalised_each else [joined(microbatches)]:
                (next_token_loss(model, tokens, labels) / N).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return build


def joined(microbatches: Microbatches) -> Batch:
    """All in one microbatch."""
    tokens, labels = (torch.cat(each) for each in zip(*microbatches, strict=True))
    return tokens, labels


Masks = Iterator[Tensor]


def recomputed(layer: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    """Nothing of the layer is kept for backward: it is computed there again, with whatever it draws then."""
    outputs: Tensor = checkpoint(layer, w, use_reentrant=False, preserve_rng_state=False)
    return outputs


def fresh_mask(w: Tensor, x: float, masks: Masks) -> Tensor:
    """The mask is drawn inside, so backward draws another."""

    def layer(w: Tensor) -> Tensor:
        return w * x * next(masks)

    return recomputed(layer, w).square() / 2


def same_mask(w: Tensor, x: float, masks: Masks) -> Tensor:
    """The mask is drawn once, and backward meets the same."""
    mask = next(masks)

    def layer(w: Tensor) -> Tensor:
        return w * x * mask

    return recomputed(layer, w).square() / 2


def expected_gradient(loop: Loop) -> Numbers:
    """The mean at w = 1, x = 3, p = 0.5 over all four pairs of draws, each as likely."""
    gradients = []
    for draws in itertools.product((0.0, 2.0), repeat=2):
        w = torch.ones((), dtype=torch.float64, requires_grad=True)
        loop(w, 3.0, iter(torch.tensor(draws, dtype=torch.float64))).backward()
        gradients.append(0.0 if w.grad is None else w.grad.item())
    return {"expected gradient": sum(gradients) / 4, "pairs of draws with a gradient": sum(map(bool, gradients))}


add(
    Case(
        id="B24",
        topic="BatchNorm by pieces",
        family="layers",
        source="pytorch/pytorch#46516",
        also=("andreped/GradientAccumulator#6", "giotto-ai/giotto-deep#75", "NVIDIA/DeepLearningExamples#625"),
        versions="all versions, by design",
        symptom="A model with BatchNorm, trained with accumulation, is not equivalent to the large batch.",
        fault="It normalises by the microbatch's own mean and variance, and its running ones move K times a step.",
        recognise="Ask the model for layers that look at the batch: labkit.audit.inspect(model).",
        given="x = 0, 2 and 4, 10 (K = 2), momentum 0.1, running mean 0 and variance 1 at the start.",
        number="what x = 2 becomes",
        wrong=normalised_each,
        right=normalised_together,
        measure=of_four,
        word="batch-dependent-layer",
        step=with_layer,
        microbatches=lambda: probe(VOCABULARY),
        concat=joined,
    ),
    Case(
        id="B26",
        topic="another mask in backward",
        family="layers",
        source="allenai/OLMo-core#828",
        versions="OLMo-core with preserve_rng_state=False and dropout, 2026",
        symptom="Activation checkpointing, which should change nothing, moves the loss when dropout is active.",
        fault="Recomputation draws a fresh mask, so the chain rule mixes two masks.",
        recognise="The same seed with and without checkpointing: with dropout at 0 they agree, else they do not.",
        given="w = 1, x = 3, dropout 0.5 (kept values doubled), loss y²/2; the mean over all draws.",
        number="expected gradient",
        wrong=fresh_mask,
        right=same_mask,
        measure=expected_gradient,
    ),
)
