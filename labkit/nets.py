"""The tiny models of the labs and the one loss that all accumulation rules are about.

A model takes tokens [b, T] and returns logits [b, T, V]. Labels stand beside their tokens; the loss
shifts them: the logits at t are judged by the label at t + 1, and the label -100 is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.errors import LabError
from labkit.fit import gradient_of

IGNORE = -100
VOCABULARY = 128


def next_token_loss(model: nn.Module, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
    """Cross-entropy of every next token: its "sum" or "mean" over valid tokens, or "none" for each, [b, T - 1].

    >>> tokens, labels = torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, IGNORE]])
    >>> round(next_token_loss(Scalar(), tokens, labels).item(), 4)
    0.6931

    Shapes: tokens and labels [b, T] of int64. Unit: nat. Raises torch's own errors.
    """
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORE, reduction=reduction)


def valid_tokens(labels: Tensor) -> int:
    """Number of targets that the loss does not ignore.

    >>> valid_tokens(torch.tensor([[7, 8, 9, IGNORE], [7, IGNORE, IGNORE, IGNORE]]))
    2

    Shapes: labels [b, T]; the label at position 0 is no target.
    """
    return int((labels[:, 1:] != IGNORE).sum())


def sequence_gradients(model: nn.Module, microbatches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The summed-loss gradient of each sequence alone: any gradient of the window is a weighted sum of these.

    >>> tokens, labels = torch.tensor([[8, 0], [3, 2]]), torch.tensor([[1, 1], [1, 1]])
    >>> sequence_gradients(Scalar(), [(tokens, labels)])
    tensor([[8.],
            [3.]], dtype=torch.float64)

    Shapes: [B, P], the sequences in order, the parameters flat and in theirs, in the model's dtype, on the CPU.
    Leaves .grad alone.
    """
    parameters = list(model.parameters())
    rows = []
    for tokens, labels in microbatches:
        for at in range(len(tokens)):
            loss = next_token_loss(model, tokens[at : at + 1], labels[at : at + 1])
            parts = torch.autograd.grad(loss, parameters, materialize_grads=True)
            rows.append(torch.cat([part.reshape(-1) for part in parts]).cpu())
    return torch.stack(rows)


def microbatch_gradients(model: nn.Module, microbatches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The summed-loss gradient of each microbatch alone, from its own forward and backward.

    >>> pair = torch.tensor([[8, 0], [3, 2]]), torch.tensor([[1, 1], [1, 1]])
    >>> microbatch_gradients(Scalar(), [pair])
    tensor([[11.]], dtype=torch.float64)

    Shapes: [K, P], float64 on the CPU. Leaves .grad alone.
    """
    return torch.stack([gradient_of(model, next_token_loss(model, *each)) for each in microbatches])


class Scalar(nn.Module):
    """A model of one weight, at zero, where a target's gradient is the token before it: for cases by hand.

    >>> model = Scalar()
    >>> next_token_loss(model, torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, 1]])).backward()
    >>> float(model.weight.grad)
    8.0

    Two classes, the label is always 1: loss = log(1 + exp(2 w x)), and its derivative at w = 0 is x. float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, T, 2]."""
        push = 2 * self.weight * tokens
        return torch.stack([push, torch.zeros_like(push)], -1)


class Block(nn.Module):
    """Attention, then a two-layer network, each on the normalised stream and added to it (pre-LN)."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Parameter(torch.empty(3 * width, width))
        self.out = nn.Parameter(torch.empty(width, width))
        self.up = nn.Parameter(torch.empty(4 * width, width))
        self.down = nn.Parameter(torch.empty(width, 4 * width))
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Stream [b, T, width] in and out."""
        b, t, width = x.shape
        q, k, v = F.linear(norm(x), self.qkv).view(b, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(F.linear(mixed.transpose(1, 2).flatten(2), self.out))
        x = x + self.drop(F.linear(F.gelu(F.linear(norm(x), self.up)), self.down))
        return x


def norm(x: Tensor) -> Tensor:
    """Every token's vector with mean 0 and variance 1.

    >>> norm(torch.tensor([[1.0, 3.0]])).round()
    tensor([[-1.,  1.]])

    Shapes: [..., width] in and out.
    """
    return F.layer_norm(x, x.shape[-1:])


class Transformer(nn.Module):
    """A causal language model, small enough for a live comparison: 10,752 weights by default.

    >>> model = Transformer(seed=0)
    >>> model(torch.zeros(2, 32, dtype=torch.long)).shape
    torch.Size([2, 32, 128])

    Pre-LN, no biases, learned positions, the embedding shared with the output. The weights come
    from the model's own generator: the global random state is neither read nor changed.
    Raises LabError where heads do not divide the width, or a sequence is longer than `length`.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        length: int = 32,
        width: int = 24,
        heads: int = 2,
        blocks: int = 1,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if width % heads:
            raise LabError(f"heads = {heads} does not divide width = {width}: try heads=1")
        self.embedding = nn.Parameter(torch.empty(vocabulary, width))
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.to(dtype)
        draw(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, T, V] of tokens [b, T]."""
        if tokens.shape[1] > len(self.position):
            allowed = f"{tokens.shape[1]} tokens are more than the model's length {len(self.position)}"
            raise LabError(f"{allowed}: try Transformer(length={tokens.shape[1]})")
        x = self.embedding[tokens] + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(norm(x), self.embedding)


@torch.no_grad()
def draw(model: nn.Module, seed: int) -> None:
    """Fill every weight from a seed: normal, of standard deviation 1 / sqrt(fan-in).

    >>> model = Transformer(seed=0)
    >>> draw(model, 1); round(model.blocks[0].down.std().item(), 2)
    0.1

    In double precision first, so that float32 and float64 models of one seed hold the same numbers, rounded.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        values = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.copy_(values / weight.shape[-1] ** 0.5)
