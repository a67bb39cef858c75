"""The rules of layers that look at the batch or draw random numbers."""

from __future__ import annotations

from labkit.normalization.randomness import redraw
from labkit.normalization.sync_batchnorm import accumulated
from labkit.rules import Rule, add, none

add(
    Rule(
        "batch-dependent-layer",
        accumulated,
        none,
        "no weights explain the gradient; loss and running statistics differ too, the more the smaller a microbatch",
        "GroupNorm or LayerNorm, frozen statistics, or statistics synchronised over the whole window",
        topic="normalization",
        changes="the statistics that the layer normalises by",
    ),
    Rule(
        "nondeterministic",
        redraw,
        none,
        "another gradient for another partition of the same seed, and for another seed of the same partition",
        "dropout and augmentation off, or their numbers keyed by the example, wherever equality is asked",
        topic="randomness",
        changes="the random numbers that each image meets",
    ),
)
