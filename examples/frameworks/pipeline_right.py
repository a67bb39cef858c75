"""Pipelining made right: each sum over the N of all microbatches, and scale_grads off."""

from pipelined import piped, share


def build():
    """A fresh model and its step, on this rank."""
    return piped(share, scale_grads=False)
