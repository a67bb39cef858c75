"""The one exception that labkit raises on purpose."""


class LabError(ValueError):
    """Something asked for cannot be done: one sentence with the value, what is allowed and what to try.

    >>> raise LabError("microbatch = 0 is outside 1 … 64: try 1")
    Traceback (most recent call last):
    labkit.errors.LabError: microbatch = 0 is outside 1 … 64: try 1
    """
