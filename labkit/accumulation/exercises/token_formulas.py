"""Two formulas on tokens: the loss of one, and what it weighs in a mean of means."""

from __future__ import annotations

from collections.abc import Callable

from labkit.exercise.formula import Exercise
from labkit.exercise.verdict import EMPTY, Function, Verdict, exercise


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0


TOKEN_MEAN = Exercise(
    ("sums", "counts"),
    {
        "equal counts": ([6.0, 2.0], [4, 4]),
        "unequal counts": ([8.0, 6.0], [1, 3]),
        "one microbatch": ([9.0], [4]),
        EMPTY: ([0.0, 5.0, 8.0], [0, 4, 2]),
        "many microbatches": ([3.5, 9.25, 1.0, 22.0, 7.75, 0.5, 31.0], [2, 5, 1, 13, 4, 1, 9]),
    },
    lambda s, n: sum(s) / sum(n),
    {
        "it is the mean of the means, so a token of a short microbatch weighs more (mean-of-means)": (
            lambda s, n: sum(map(_mean, s, n)) / len(n)
        ),
        "it is the mean of the means of those that are not empty, so a token of a short one weighs more": (
            lambda s, n: sum(map(_mean, s, n)) / sum(count > 0 for count in n)
        ),
        "the means are added and never divided (sum-of-means)": lambda s, n: sum(map(_mean, s, n)),
        "the sums are added and never divided (token-sum)": lambda s, n: sum(s),
        "the total is divided by the number of microbatches, not of tokens": lambda s, n: sum(s) / len(n),
        "the loss per token is divided by the number of microbatches again (double-division)": (
            lambda s, n: sum(s) / sum(n) / len(n)
        ),
        "// drops the fraction, and / keeps it": lambda s, n: sum(s) // sum(n),
        "only the last microbatch is left (last-microbatch-only)": lambda s, n: s[-1] / n[-1],
        "it is upside down, tokens per loss": lambda s, n: sum(n) / sum(s),
    },
)


@exercise
def token_mean(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `token_mean(sums, counts)`: the loss per token, from each microbatch's summed loss and valid tokens.

    >>> token_mean(lambda sums, counts: sum(s / max(n, 1) for s, n in zip(sums, counts)) / len(sums))
    2 of 5 checks
    For sums = [8.0, 6.0], counts = [1, 3] your function gives 5, and 3.5 is
    right: it is the mean of the means, so a token of a short microbatch
    weighs more (mean-of-means).
      ✓ equal counts
      ✗ unequal counts
      ✓ one microbatch
      ✗ a microbatch without a valid target
      ✗ many microbatches

    `seconds` is for all five cases together; what stops a function is contained by `sandbox.run`.
    """
    return TOKEN_MEAN.judge(function, seconds)


WEIGHTS: dict[str, Callable[[list[int], int], float]] = {
    "": lambda n, m: sum(n) / (len(n) * n[m]),
    "1/(K·n_m) is what the token weighs, and N times that is its weight against the right one": (
        lambda n, m: 1 / (len(n) * n[m])
    ),
    "that is the weight in a sum of means, where nobody divides by K (sum-of-means)": lambda n, m: sum(n) / n[m],
    "that is the share that the microbatch should have, n_m / N": lambda n, m: n[m] / sum(n),
    "that is the share that each microbatch gets, 1/K, whatever its tokens": lambda n, m: 1 / len(n),
    "N / K is what a microbatch holds on average, and it is still to be divided by n_m": lambda n, m: sum(n) / len(n),
    "it is upside down: tokens in short company weigh more, not less": lambda n, m: len(n) * n[m] / sum(n),
    "that is 1 for every token, and it is right only where every mean has as many tokens": lambda n, m: 1.0,
    "that is the right weight 1/N itself": lambda n, m: 1 / sum(n),
    "that is 1/n_m, the weight inside the microbatch's own mean": lambda n, m: 1 / n[m],
    "the longest microbatch stands for N / K": lambda n, m: max(n) / n[m],
    "// drops the fraction, and / keeps it": lambda n, m: sum(n) // (len(n) * n[m]),
}

TOKEN_WEIGHT = Exercise(
    ("counts", "m"),
    {
        "a short microbatch": ([3, 1], 1),
        "a long microbatch": ([3, 1], 0),
        "equal counts": ([4, 4, 4], 1),
        "one microbatch": ([9], 0),
        "many microbatches": ([2, 5, 1, 13, 4, 1, 9], 3),
    },
    WEIGHTS[""],
    WEIGHTS,
)


@exercise
def token_weight(function: Function, *, seconds: float = 5.0) -> Verdict:
    """Judge `token_weight(counts, m)`: how heavy a token of microbatch m is in a mean of means, where 1 is right.

    >>> token_weight(lambda counts, m: 1 / (len(counts) * counts[m])).sentence.partition(" is what")[0]
    'For counts = [3, 1], m = 1 your function gives 0.5, and 2 is right: 1/(K·n_m)'

    counts: the valid tokens n_m of each of K microbatches, none of them 0; m: a position in it. N / (K · n_m).
    """
    return TOKEN_WEIGHT.judge(function, seconds)
