"""Exercises: a function that a learner wrote goes in, a sentence on what it really does, with its number, comes out."""

from labkit.check.accumulation import accumulate, token_mean
from labkit.check.roofline import intensity

__all__ = ["accumulate", "intensity", "token_mean"]
