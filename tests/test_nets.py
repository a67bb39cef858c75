"""The model is causal and reproducible, and the loss is the one that numpy gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from labkit.corpus import batch
from labkit.errors import LabError
from labkit.nets import (
    IGNORE,
    Scalar,
    Transformer,
    microbatch_gradients,
    next_token_loss,
    norm,
    sequence_gradients,
    valid_tokens,
)

torch.set_num_threads(1)


def test_the_loss_is_numpys() -> None:
    model = Transformer(seed=1, dtype=torch.float64)
    tokens, labels = batch(1, 3, 16)
    logits = model(tokens).detach().numpy()
    each = np.zeros((3, 15))
    for row in range(3):
        for t in range(15):
            if labels[row, t + 1] != IGNORE:
                z = logits[row, t]
                each[row, t] = np.log(np.exp(z - z.max()).sum()) + z.max() - z[labels[row, t + 1]]
    count = int((each != 0).sum())
    assert valid_tokens(labels) == count
    assert next_token_loss(model, tokens, labels, "none").detach().numpy() == pytest.approx(each, abs=1e-12)
    assert next_token_loss(model, tokens, labels).item() == pytest.approx(each.sum())
    assert next_token_loss(model, tokens, labels, "mean").item() == pytest.approx(each.sum() / count)


def test_the_logits_are_numpys() -> None:
    model = Transformer(seed=1, width=8, heads=2, blocks=2, dtype=torch.float64)
    tokens = batch(1, 1, 16)[0]
    e, p = (each.detach().numpy() for each in (model.embedding, model.position))

    def normed(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    x = e[tokens[0]] + p[:16]
    for block in model.blocks:
        qkv, out, up, down = (weight.detach().numpy() for weight in block.parameters())
        q, k, v = np.split(normed(x) @ qkv.T, 3, 1)
        heads = []
        for h in (slice(0, 4), slice(4, 8)):
            scores = q[:, h] @ k[:, h].T / 2 + np.log(np.tril(np.ones((16, 16))) + 1e-300)
            share = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(share / share.sum(1, keepdims=True) @ v[:, h])
        x = x + np.concatenate(heads, 1) @ out.T
        hidden = normed(x) @ up.T
        x = x + hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2 @ down.T
    assert model(tokens)[0].detach().numpy() == pytest.approx(normed(x) @ e.T, abs=1e-10)


def test_an_empty_microbatch_has_a_sum_of_zero_and_a_mean_of_nan() -> None:
    tokens, labels = batch(0, 2)
    model = Transformer()
    assert next_token_loss(model, tokens, labels.fill_(IGNORE)).item() == 0
    assert next_token_loss(model, tokens, labels, "mean").isnan()
    assert valid_tokens(labels) == 0


def test_no_token_sees_a_later_one() -> None:
    model = Transformer(blocks=2, dtype=torch.float64)
    tokens = batch(0, 2)[0]
    changed = tokens.clone()
    changed[:, 20:] = 7
    assert torch.equal(model(tokens)[:, :20], model(changed)[:, :20])
    assert not torch.equal(model(tokens)[:, 20:], model(changed)[:, 20:])


def test_a_sequence_is_computed_alone_as_in_a_batch() -> None:
    model = Transformer(dtype=torch.float64)
    tokens = batch(0, 4)[0]
    assert (model(tokens)[2:3] - model(tokens[2:3])).abs().max() < 1e-13


def test_one_seed_is_one_model_in_either_precision_and_draws_nothing_global() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other, double = Transformer(seed=2), Transformer(seed=2), Transformer(seed=2, dtype=torch.float64)
    assert torch.equal(torch.rand(1), expected)
    for a, b, c in zip(one.parameters(), other.parameters(), double.parameters(), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c.float()) and c.dtype == torch.float64
    assert not torch.equal(one.embedding, Transformer(seed=3).embedding)


def test_weights_have_the_variance_of_their_fan_in() -> None:
    model = Transformer(width=64, heads=4)
    for weight in model.parameters():
        assert float(weight.detach().std()) == pytest.approx(weight.shape[-1] ** -0.5, rel=0.05)


def test_dropout_is_off_unless_asked_for() -> None:
    tokens = batch(0, 2)[0]
    still, random = Transformer(), Transformer(dropout=0.5)
    assert torch.equal(still(tokens), still(tokens)) and not torch.equal(random(tokens), random(tokens))
    assert not any(isinstance(each, nn.Dropout) for each in still.modules())


@pytest.mark.parametrize(("gradients", "count"), [(sequence_gradients, 4), (microbatch_gradients, 2)])
def test_gradients_of_the_parts_add_up_to_the_batch(gradients: Any, count: int) -> None:
    model = Transformer(dtype=torch.float64)
    tokens, labels = batch(0, 4)
    rows = gradients(model, [(tokens[:3], labels[:3]), (tokens[3:], labels[3:])])
    assert rows.shape == (count, sum(p.numel() for p in model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    next_token_loss(model, tokens, labels).backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (rows.sum(0) - whole).norm() < 1e-13 * whole.norm()


def test_scalar_is_worth_its_token() -> None:
    model = Scalar()
    tokens = torch.tensor([[4, 9, 0], [7, 0, 0]])
    labels = torch.tensor([[1, 1, 1], [1, 1, IGNORE]])
    assert sequence_gradients(model, [(tokens, labels)]).tolist() == [[13], [7]]
    assert next_token_loss(model, tokens, labels, "mean").item() == pytest.approx(np.log(2))


def test_norm_by_hand() -> None:
    assert norm(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1.2247, 0, 1.2247], abs=1e-3)


def test_what_cannot_be_built_is_said_and_the_remedy_works() -> None:
    with pytest.raises(LabError, match="heads = 5 does not divide width = 24: try heads=1"):
        Transformer(heads=5)
    Transformer(heads=1)
    with pytest.raises(LabError, match=r"40 tokens are more .* length 32: try Transformer\(length=40\)"):
        Transformer()(batch(0, 1, 40)[0])
    Transformer(length=40)(batch(0, 1, 40)[0])
