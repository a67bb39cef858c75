"""Mixture and order against counts, torch's own optimizer, and the first two orders of an expansion in η."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from labkit import corpus
from labkit.errors import LabError
from labkit.fit import distance, flat
from labkit.nets import IGNORE, Transformer, sequence_gradients, valid_tokens
from labkit.packing import mixing
from labkit.packing.mixing import DIVISORS, ORDERS, PAIRS, _ordered, domain, epoch, mixture, order
from tests.strategies import settings_of

torch.set_num_threads(1)


# The texts.


@pytest.mark.parametrize("name", ["code", "docstrings", "help"])
def test_a_domain_holds_documents_of_ascii(name: str) -> None:
    found = domain(name)
    assert all(len(text) >= corpus.SHORTEST and text.isascii() for text in found) and domain(name) is found


def test_code_is_code_and_reference_is_what_help_shows() -> None:
    wrapped = (f"async def f():\n{''.join(f' {line}' for line in text.splitlines(True))}" for text in domain("code"))
    firsts = [ast.parse(text).body[0].body[0] for text in itertools.islice(wrapped, 200)]
    assert not any(isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) for first in firsts)
    assert any(text.startswith('The "if" statement') for text in domain("help"))
    assert domain("docstrings") == corpus.documents()


def test_without_a_source_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> None:
        raise ImportError

    domain.cache_clear()
    monkeypatch.setattr(mixing.importlib, "import_module", gone)
    with pytest.raises(LabError, match="help = 0 documents in this Python: try a Python that comes with"):
        domain("help")
    domain.cache_clear()


# Weights of the mixture.


@given(settings_of(mixture))
@settings(max_examples=12)
def test_by_documents_the_tokens_decide_and_by_tokens_the_mixture_does(values: dict[str, Any]) -> None:
    mix = mixture(**values)
    tokens, documents = mix.tokens, mix.documents
    by_tokens, by_documents = mix.ways
    assert by_tokens.share == pytest.approx(mix.wanted, abs=1e-9) and by_tokens.relative_error < 1e-12
    assert by_documents.share == pytest.approx(tokens[0] / sum(tokens), abs=1e-9)
    assert max(by_tokens.residual, by_documents.residual) < 1e-10
    assert sum(documents) == values.get("documents", 8) and min(documents) >= 1
    assert abs(documents[0] - mix.wanted * sum(documents)) <= 0.5 or min(documents) == 1


@pytest.mark.parametrize(("share", "counts"), [(0.1, (1, 3)), (0.9, (3, 1)), (0.4, (2, 2)), (0.7, (3, 1))])
def test_documents_are_rounded_and_there_is_one_of_each(share: float, counts: tuple[int, int]) -> None:
    mix = mixture(share=share, documents=4, length=32)
    assert mix.documents == counts and mix.ways[0].share == pytest.approx(share)


@pytest.mark.parametrize("texts", PAIRS)
def test_cosines_and_error_by_each_gradient_by_itself(texts: str) -> None:
    mix = mixture(texts=texts, share=0.25, documents=8, length=64, seed=3)
    model = Transformer(seed=3, length=64, dtype=torch.float64)
    alone = []
    for name, count in zip(mix.names, mix.documents, strict=True):
        drawn = torch.randperm(len(domain(name)), generator=torch.Generator().manual_seed(3))[:count].tolist()
        total = torch.zeros(())
        for text in (domain(name)[at][:64] for at in drawn):
            row = torch.tensor([list(text.encode())])
            total = total + sequence_gradients(model, [(row, row)])[0]
        alone.append(total / sum(len(domain(name)[at][:64]) - 1 for at in drawn))
    assert mix.documents == (2, 6)
    for share, column in zip(mix.shares.tolist(), mix.cosines.T.tolist(), strict=True):
        g = share * alone[0] + (1 - share) * alone[1]
        assert column == pytest.approx([distance(g, each).cosine for each in alone], rel=1e-9)
    right = 0.25 * alone[0] + 0.75 * alone[1]
    for way in mix.ways:
        g = way.share * alone[0] + (1 - way.share) * alone[1]
        assert way.cosines == pytest.approx([distance(g, each).cosine for each in alone], rel=1e-9)
        off = abs(way.share - 0.25) * (alone[0] - alone[1]).norm() / right.norm()
        assert way.relative_error == pytest.approx(float(off), rel=1e-6, abs=1e-12)


# The order of the data.


@given(st.sampled_from(ORDERS), st.integers(0, 9999), st.integers(8, 64))
@settings(max_examples=30)
def test_another_order_is_the_same_examples(word: str, seed: int, examples: int) -> None:
    labels = corpus.batch(seed, examples)[1]
    found = _ordered(word, labels, seed)
    assert sorted(found.tolist()) == list(range(examples))
    counts = (labels[found] != IGNORE).sum(1).tolist()
    assert word != "sorted by length" or counts == sorted(counts)
    assert word != "reversed" or found.tolist() == list(range(examples - 1, -1, -1))


@pytest.mark.parametrize("divisor", DIVISORS)
def test_an_epoch_is_torchs_own_sgd(divisor: str) -> None:
    data, steps = corpus.batch(0, 10), torch.arange(10).flip(0)
    model, other = Transformer(seed=0, dtype=torch.float64), Transformer(seed=0, dtype=torch.float64)
    run = list(epoch(model, data, steps, 4, 0.3, divisor))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.3)
    usual = valid_tokens(data[1]) / 3
    assert len(run) == 4
    for weights, members in zip(run, ([9, 8, 7, 6], [5, 4, 3, 2], [1, 0]), strict=False):
        assert (flat(other.parameters()) - weights).norm() < 1e-13 * weights.norm()
        logits, labels = other(data[0][members])[:, :-1], data[1][members][:, 1:]
        loss = F.cross_entropy(logits[labels != IGNORE], labels[labels != IGNORE], reduction="sum")
        loss = loss / (int((labels != IGNORE).sum()) if divisor == "its own tokens" else usual)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (flat(other.parameters()) - run[-1]).norm() < 1e-13 * run[-1].norm()


@pytest.mark.parametrize("word", ORDERS)
def test_where_every_document_weighs_the_same_the_gap_is_proportional_to_the_learning_rate(word: str) -> None:
    gaps = [order(order=word, divisor="the same for all", learning_rate=rate).end for rate in (0.001, 0.002, 0.004)]
    assert gaps[1] / gaps[0] == pytest.approx(2, rel=0.02) and gaps[2] / gaps[1] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("word", ["shuffled", "sorted by length"])
def test_where_a_batch_has_its_own_mean_a_gap_remains_as_first_order_predicts(word: str) -> None:
    epochs = order(order=word, learning_rate=0.001, examples=32, batch=8, seed=1)
    tokens, labels = corpus.batch(1, 32)
    rows = sequence_gradients(Transformer(seed=1, dtype=torch.float64), [(tokens, labels)])
    counts = (labels[:, 1:] != IGNORE).sum(1)
    sums = []
    for at in (torch.arange(32), _ordered(word, labels, 1)):
        sums.append(sum(rows[each].sum(0) / counts[each].sum() for each in at.split(8)))
    assert epochs.end == pytest.approx(float((sums[1] - sums[0]).norm() / sums[0].norm()), rel=0.1)
    assert epochs.end > 0.02


def test_reversed_batches_are_the_same_batches() -> None:
    ends = [order(order="reversed", divisor=divisor, learning_rate=0.001).end for divisor in DIVISORS]
    assert max(ends) < 0.004 and order(order="reversed", examples=30, learning_rate=0.001).end > 0.02


def test_two_steps_swapped_differ_by_the_commutator() -> None:
    """W after a, b minus W after b, a: η² (H_b g_a − H_a g_b)."""
    eta, seed = 0.001, 5
    epochs = order(order="reversed", divisor="the same for all", examples=8, batch=4, learning_rate=eta, seed=seed)
    tokens, labels = corpus.batch(seed, 8)
    model = Transformer(seed=seed, dtype=torch.float64)
    names, sizes = zip(*((name, p.numel()) for name, p in model.named_parameters()), strict=True)
    shapes, usual = [p.shape for p in model.parameters()], valid_tokens(labels) / 2

    def slope(w: torch.Tensor, at: slice) -> torch.Tensor:
        parts = {n: each.view(s) for n, each, s in zip(names, w.split(sizes), shapes, strict=True)}
        logits = functional_call(model, parts, tokens[at])[:, :-1].transpose(1, 2)
        loss = F.cross_entropy(logits, labels[at][:, 1:], ignore_index=IGNORE, reduction="sum") / usual
        return torch.autograd.grad(loss, w, create_graph=True)[0]

    w = flat(model.parameters()).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # the one that has a second derivative
        a, b = slope(w, slice(0, 4)), slope(w, slice(4, 8))
        of_b = torch.autograd.grad(b @ a.detach(), w, retain_graph=True)[0]
        of_a = torch.autograd.grad(a @ b.detach(), w)[0]
    expected = eta * (of_b - of_a).norm() / (a + b).norm()
    assert epochs.end == pytest.approx(expected.item(), rel=0.02)
    assert epochs.step_error == pytest.approx(((b - a).norm() / a.norm()).item(), rel=1e-9)
    assert epochs.step_cosine == pytest.approx(distance(b.detach(), a.detach()).cosine, rel=1e-9)
    assert epochs.apart[1].item() == pytest.approx(((b - a).norm() / (a + b).norm()).item(), rel=0.02)


@pytest.mark.parametrize("divisor", DIVISORS)
@pytest.mark.parametrize("word", ORDERS)
def test_one_batch_of_all_examples_does_not_know_their_order(word: str, divisor: str) -> None:
    epochs = order(order=word, divisor=divisor, examples=16, batch=64)
    assert epochs.step_error < 1e-13 and epochs.end < 1e-13 and epochs.apart.shape == (2,)
    assert epochs.first[0] == epochs.first[1]


@given(settings_of(order))
@settings(max_examples=10)
def test_both_start_together_and_there_is_a_value_for_each_step(values: dict[str, Any]) -> None:
    epochs = order(**values)
    examples, size = values.get("examples", 32), values.get("batch", 8)
    assert epochs.apart[0] == 0 and len(epochs.apart) == 1 + -(-examples // size) and epochs.end == epochs.apart[-1]
    assert bool(epochs.apart.isfinite().all())


# All of them.


@pytest.mark.parametrize("run", [mixture, order])
@given(data=st.data())
@settings(max_examples=6)
def test_what_is_declared_runs_the_same_twice(run: Callable[..., Any], data: st.DataObject) -> None:
    values, state = data.draw(settings_of(run)), torch.get_rng_state()
    assert repr(vars(run(**values))) == repr(vars(run(**values))) and torch.equal(torch.get_rng_state(), state)
