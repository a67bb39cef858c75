"""Shipped faults of accumulation: what a token weighs in one window."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD

from labkit import rules
from labkit.accumulation import compare
from labkit.accumulation.equivalence import library_mean, masked_mean
from labkit.audit import probe
from labkit.casebook.entry import Build, Case, Loop, Numbers, add
from labkit.corpus import Batch, made
from labkit.nets import IGNORE, VOCABULARY, Transformer, next_token_loss, valid_tokens
from labkit.rules import Microbatches

GRADIENT = "gradient"


class Marked(nn.Module):
    """A weight for every token, all at zero, where a target's gradient is the token before it, in that token's weight.

    >>> model = Marked()
    >>> next_token_loss(model, torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, 1]])).backward()
    >>> model.weight.grad.nonzero().flatten().tolist(), float(model.weight.grad.sum())
    ([3, 5], 8.0)

    As `nets.Scalar`, but the tokens leave marks in different places: a fit can tell who contributed what. float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, T, 2] of tokens [b, T] below 64."""
        push = 2 * self.weight[tokens] * tokens
        return torch.stack([push, torch.zeros_like(push)], -1)


def total(model: Marked) -> float:
    """The sum of the gradient over all weights."""
    return 0.0 if model.weight.grad is None else float(model.weight.grad.sum())


def of_window(*targets: list[int], rate: float = 0.0) -> Callable[[Loop], Numbers]:
    """Run a loop on microbatches of one sequence each: the gradient, then the weight × N of every microbatch.

    With a learning rate, what one step of SGD does to the weights stands between.
    """

    def measure(loop: Loop) -> Numbers:
        microbatches, model = made([[each] for each in targets]), Marked()
        loop(model, microbatches)
        numbers = {GRADIENT: total(model)}
        if rate:
            SGD(model.parameters(), lr=rate).step()
            numbers["change of the weights"] = float(model.weight.detach().sum())
        weights = compare(Marked(), microbatches, loop).token_weights.tolist()
        return numbers | {f"weight × N of microbatch {m}": weight for m, weight in enumerate(weights, 1)}

    return measure


def stepping(loop: Loop) -> Build:
    """A loop that leaves a gradient, with a step of SGD after it: what the audit takes."""

    def build() -> tuple[nn.Module, Callable[[Microbatches], None]]:
        model = Transformer(seed=0, width=8, dtype=torch.float64)
        optimizer = SGD(model.parameters(), lr=0.1)

        def step(microbatches: Microbatches) -> None:
            loop(model, microbatches)
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    return build


# The empty microbatch: loops that return the loss they would log.

Mean = Callable[[nn.Module, Tensor, Tensor, int, int], Tensor]


def mean_of_each(model: nn.Module, microbatches: Microbatches, mean: Mean = library_mean) -> float:
    """Every microbatch's own mean over K, of however few targets."""
    logged, K = 0.0, len(microbatches)
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = mean(model, tokens, labels, N, K)
        loss.backward()
        logged += loss.item()
    return logged


def sum_over_all(model: nn.Module, microbatches: Microbatches, mean: Mean = library_mean) -> float:
    """Sums over the N of the window: an empty microbatch adds 0."""
    logged = 0.0
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        loss.backward()
        logged += loss.item()
    return logged


def with_an_empty_one(loop: Loop) -> Numbers:
    """A microbatch without a target, and one of four: the library's mean, and a mean by hand."""
    library, by_hand = Marked(), Marked()
    logged = loop(library, made([[[]], [[2, 2, 2, 2]]]), library_mean)
    loop(by_hand, made([[[]], [[2, 2, 2, 2]]]), masked_mean)
    return {GRADIENT: total(library), "gradient, mean by hand": total(by_hand), "logged loss": logged}


def one_emptied() -> list[Batch]:
    """Microbatches that tell faults apart, the second without a target."""
    microbatches = probe(VOCABULARY)
    microbatches[1][1].fill_(IGNORE)
    return microbatches


# The auxiliary loss.


class Routed(Marked):
    """The same with a router, whose auxiliary loss is 1.2 times its weight, in every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.ones((), dtype=torch.float64))

    def auxiliary(self) -> Tensor:
        """How badly the experts are balanced."""
        return 1.2 * self.router


def auxiliary_in_each(model: Routed, microbatches: Microbatches, coefficient: float) -> None:
    """The main loss is divided by the window's N, and the auxiliary loss by nothing."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        (loss + coefficient * model.auxiliary()).backward()


def auxiliary_over_k(model: Routed, microbatches: Microbatches, coefficient: float) -> None:
    """The auxiliary loss of a window is the mean over its microbatches."""
    N = sum(valid_tokens(labels) for _, labels in microbatches)
    for tokens, labels in microbatches:
        loss = next_token_loss(model, tokens, labels, "sum") / N
        auxiliary = coefficient * model.auxiliary() / len(microbatches)
        (loss + auxiliary).backward()


def of_router(loop: Loop) -> Numbers:
    """Eight microbatches, coefficient 0.01: the router starts at 1, so its gradient is the auxiliary loss."""
    model = Routed()
    loop(model, made([[[1]]] * 8), 0.01)
    assert model.router.grad is not None
    added = float(model.router.grad)
    return {"auxiliary loss in the window's loss": added, "effective coefficient": added / model.auxiliary().item()}


add(
    Case(
        id="B01",
        topic="mean of means",
        family="weights",
        source="huggingface/transformers#34191",
        also=("huggingface/blog#2414", "meta-pytorch/torchtune#1875", "NovaSky-AI/SkyRL#925"),
        versions="transformers before 4.46 (October 2024), torchtune before PR 1875",
        symptom="With accumulation, loss and gradient differ from the same samples in one batch, where microbatches "
        "hold different numbers of target tokens.",
        fault="Each microbatch's mean weighs 1/K and not n/N: a token in a microbatch of n weighs 1/(K n).",
        recognise="Equal counts hide it. Cut the same window in another way: if the gradient changes, weights depend "
        "on company.",
        given="K = 2: one target of gradient 8, then three with 6 together.",
        number=GRADIENT,
        wrong=rules.mean_of_means,
        right=rules.token_mean,
        measure=of_window([8], [3, 2, 1]),
        word="mean-of-means",
        step=stepping,
    ),
    Case(
        id="B02",
        topic="nobody divides by K",
        family="weights",
        source="Lightning-AI/pytorch-lightning#87",
        also=("karpathy/nanoGPT#206", "lukas-blecher/LaTeX-OCR#148"),
        versions="Lightning, August 2019",
        symptom="Turning accumulation on makes the step as large as if the learning rate had been multiplied by K.",
        fault="Backward runs on each undivided microbatch mean, so the gradient is K times too large.",
        recognise="The logged gradient norm grows with K. Adam hides it in the step; clipping and an L2 term do not.",
        given="K = 4, equal microbatches, mean gradients 1, 2, 3, 2; SGD, learning rate 0.1.",
        number=GRADIENT,
        wrong=rules.sum_of_means,
        right=rules.token_mean,
        measure=of_window([1, 1], [3, 1], [5, 1], [4, 0], rate=0.1),
        word="sum-of-means",
        step=stepping,
    ),
    Case(
        id="B04",
        topic="divided twice",
        family="weights",
        source="huggingface/transformers#35808",
        also=("modelscope/ms-swift#10116",),
        versions="transformers from about 4.46 until January 2025",
        symptom="Under DeepSpeed the gradient norm shrinks as gradient_accumulation_steps grows; DDP is unaffected.",
        fault="The loss is divided by the window's token count already, and the engine divides by the accumulation "
        "steps again.",
        recognise="The right direction, 1/K of the length. Double K at the same window: the norm halves.",
        given="K = 4, sums 20, 10, 30, 20 over N = 40 targets.",
        number=GRADIENT,
        wrong=rules.double_division,
        right=rules.token_mean,
        measure=of_window([2] * 10, [1] * 10, [3] * 10, [4] * 5 + [0] * 5),
        word="double-division",
        step=stepping,
    ),
    Case(
        id="B15",
        topic="gradients wiped",
        family="weights",
        source="pytorch/torchtitan#3575",
        also=("bytetriper/RAE#67", "allenai/open-instruct#1498", "NVIDIA-NeMo/Automodel#3530"),
        versions="torchtitan's RL trainer before June 2026",
        symptom="Accumulation has no effect on the update, although the loss looks normal.",
        fault="Gradients are cleared before each microbatch, so only the last one reaches the optimizer, still over K.",
        recognise="Change the first microbatch: the update stays the same.",
        given="K = 4, gradients 1, 2, 3, 6, one target each.",
        number=GRADIENT,
        wrong=rules.last_microbatch_only,
        right=rules.token_mean,
        measure=of_window([1], [2], [3], [6]),
        word="last-microbatch-only",
        step=stepping,
    ),
    Case(
        id="B29",
        topic="an empty microbatch",
        family="weights",
        source="karpathy/nanochat#590",
        also=(
            *("karpathy/nanochat#618", "karpathy/nanochat#623", "karpathy/nanochat#662"),
            *("NVIDIA-NeMo/Automodel#3796", "EleutherAI/bergson#461", "pytorch/pytorch#70348"),
        ),
        versions="nanochat, March 2026; PyTorch returns NaN from 1.11 on",
        symptom="Fine-tuning with small device batches prints NaN from the first step: a microbatch has no target.",
        fault="A mean over zero targets is 0/0: NaN in the log, and in the gradient where the mean is made by hand.",
        recognise="NaN in the log and a model that lives: the library's mean sends no gradient back, and K counts it.",
        given="K = 2: no target, then four of gradient 8 together.",
        number=GRADIENT,
        wrong=mean_of_each,
        right=sum_over_all,
        measure=with_an_empty_one,
        word="mean-of-means",
        step=stepping,
        microbatches=one_emptied,
    ),
    Case(
        id="B32",
        topic="auxiliary loss K times",
        family="weights",
        source="NVIDIA-NeMo/Automodel#3359",
        also=("OpenNMT/OpenNMT-py#2209", "AI-Hypercomputer/maxtext#1483"),
        versions="Automodel before August 2026",
        symptom="The router's balance loss weighs more as accumulation steps rise.",
        fault="The main loss is normalised over the window; the auxiliary loss enters every microbatch undivided.",
        recognise="Double K at the same window: the experts get more even, and the main loss gets worse.",
        given="8 microbatches, coefficient 0.01, auxiliary value 1.2 in each.",
        number="auxiliary loss in the window's loss",
        wrong=auxiliary_in_each,
        right=auxiliary_over_k,
        measure=of_router,
    ),
)
