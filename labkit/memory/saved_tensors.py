"""The tensors that autograd keeps for backward, counted in bytes; and the net of the measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from labkit.corpus import Batch
from labkit.declare import Range, quantity
from labkit.nets import Transformer, microbatch_gradients, norm, valid_tokens
from labkit.tolerance import Tolerance, depth, tolerance

Length = Annotated[int, Range(8, 64, log=True, unit="tokens", help="T, tokens of a sequence, padding too")]


class Kept:
    """Bytes that autograd keeps for backward, counted from the moment they are saved until they are released.

    >>> x = torch.ones(1000, requires_grad=True)
    >>> with Kept(x) as kept:
    ...     y = (2 * x).exp().sum()
    >>> kept.bytes, y.backward(), kept.bytes, kept.peak
    (4000, None, 0, 4000)

    A storage counts once, however many tensors of it are saved; those of the tensors given (weights, inputs) exist
    anyway and do not count. `bytes`: now; `peak`: most at once. Holds in the thread that entered it.
    Source: PyTorch, notes on autograd mechanics, "Hooks for saved tensors".
    """

    def __init__(self, *apart: Tensor) -> None:
        self.bytes = self.peak = 0
        self._holders = Counter(each.untyped_storage().data_ptr() for each in apart)
        self._hooks = saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def __enter__(self) -> Kept:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def hold(self, tensor: Tensor) -> None:
        """One more holder of the tensor's storage."""
        storage = tensor.untyped_storage()
        if not self._holders[storage.data_ptr()]:
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)
        self._holders[storage.data_ptr()] += 1

    def release(self, tensor: Tensor) -> None:
        """One holder less."""
        storage = tensor.untyped_storage()
        self._holders[storage.data_ptr()] -= 1
        if not self._holders[storage.data_ptr()]:
            self.bytes -= storage.nbytes()


class _Saved:
    """One saved tensor; autograd holds this object for as long as it would hold the tensor."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor = tensor.detach()  # a saved output with its grad_fn would hold the graph that holds it
        self.kept = kept
        kept.hold(self.tensor)

    def __del__(self) -> None:
        self.kept.release(self.tensor)


@dataclass(frozen=True)
class Timeline:
    """Bytes kept for backward over one window; the time of a microbatch begins with its forward."""

    highest: tuple[int, ...] = quantity("most at once in the time of each microbatch", "B")
    left: tuple[int, ...] = quantity("still kept at its end", "B")

    @property
    def peak(self) -> int:
        """Most at once."""
        return max(self.highest, default=0)


Loop = Callable[[nn.Module, Sequence[Batch]], None]


def watch(model: nn.Module, microbatches: Sequence[Batch], loop: Loop) -> Timeline:
    """Run a loop over a window, and count the bytes that autograd keeps for backward.

    >>> from labkit.nets import Scalar
    >>> from labkit.rules import token_mean
    >>> tokens, labels = torch.tensor([[8, 0]]), torch.tensor([[1, 1]])
    >>> timeline = watch(Scalar(), [(tokens.clone(), labels) for _ in range(3)], token_mean)
    >>> timeline.peak == timeline.highest[0] == timeline.highest[2], timeline.left
    (True, (0, 0, 0))

    Weights and inputs do not count. The time of a microbatch ends where the model first sees the tokens of another.
    The gradients are cleared first; the loop's stay in .grad.
    """
    counter = Kept(*model.parameters(), *(each for pair in microbatches for each in pair))
    highest, left, last = [], [], None

    def end() -> None:
        highest.append(counter.peak)
        left.append(counter.bytes)
        counter.peak = counter.bytes

    def begin(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal last
        if last is not None and inputs and inputs[0] is not last:
            end()
        last = inputs[0] if inputs else last

    model.zero_grad()
    with counter, model.register_forward_pre_hook(begin):
        loop(model, microbatches)
    end()
    return Timeline(tuple(highest), tuple(left))


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once.

    >>> x = torch.zeros(10)
    >>> size([x, x[2:], torch.zeros(2)])
    48
    """
    return sum({s.data_ptr(): s.nbytes() for s in (each.untyped_storage() for each in tensors)}.values())


class Net(Transformer):
    """The labs' transformer with four blocks; `checkpointing` runs a block again in the backward."""

    def __init__(self, seed: int, length: int, checkpointing: bool = False, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(seed=seed, length=length, width=32, blocks=4, dtype=dtype)
        self.checkpointing = checkpointing

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, T, V] of tokens [b, T]."""
        x = self.embedding[tokens] + self.position[: tokens.shape[1]]
        for block in self.blocks:
            # Reentrant, so that the tensors it keeps while it reruns a block pass through the same hooks.
            x = checkpoint(block, x, use_reentrant=True, preserve_rng_state=False) if self.checkpointing else block(x)
        return F.linear(norm(x), self.embedding)


def rounding(seed: int, length: int, microbatches: Sequence[Batch]) -> Tolerance:
    """How far apart the gradients of that net may be for two ways to cut these microbatches.

    >>> from labkit.corpus import batch
    >>> rounding(0, 8, [batch(0, 2, 8)]).value < 1e-11
    True
    """
    model, N = Net(seed, length), sum(valid_tokens(labels) for _, labels in microbatches)
    return tolerance(microbatch_gradients(model, microbatches) / N, count=N, depth=depth(model), dtype=torch.float64)
