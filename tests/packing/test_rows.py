"""A packed row and who reads it, against loops, torch's own attention, complex numbers, and a padded batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.corpus import batch
from labkit.fit import distance
from labkit.nets import IGNORE, norm
from labkit.packing import rows
from labkit.packing.rows import Reader, one_by_one, rotate, texts
from labkit.tolerance import depth

torch.set_num_threads(1)

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def owners(lengths: list[int]) -> list[int]:
    return [at for at, n in enumerate(lengths) for _ in range(n)]


@given(LENGTHS)
def test_positions_and_documents_by_a_loop(lengths: list[int]) -> None:
    assert rows.positions_of(lengths).tolist() == [at for n in lengths for at in range(n)]
    assert rows.document_of(lengths).tolist() == owners(lengths)


@given(LENGTHS)
def test_the_right_mask_is_a_triangle_for_each_document(lengths: list[int]) -> None:
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    assert torch.equal(rows.block_causal(lengths), expected)


@given(LENGTHS)
def test_every_wrong_mask_is_wrong_as_it_says(lengths: list[int]) -> None:
    own, T = owners(lengths), sum(lengths)
    pairs = [(t, s) for t in range(T) for s in range(T)]
    seen = {name: {(t, s) for t, s in pairs if mask(lengths)[t, s]} for name, mask in rows.MASKS.items()}
    right = {(t, s) for t, s in pairs if own[t] == own[s] and s <= t}
    before = {(t, s) for t, s in pairs if s == sum(lengths[: own[t]]) - 1}
    assert seen["block causal"] == right
    assert seen["plain causal"] - right == {(t, s) for t, s in pairs if s < t and own[t] != own[s]}
    assert seen["block, both ways"] - right == {(t, s) for t, s in pairs if s > t and own[t] == own[s]}
    assert seen["block, off by one"] - right == before and right <= seen["block, off by one"]


@given(st.lists(st.integers(2, 6), min_size=1, max_size=5))
def test_labels_by_a_loop(lengths: list[int]) -> None:
    tokens, T = torch.arange(10, 10 + sum(lengths)), sum(lengths)
    firsts = {sum(lengths[:at]) for at in range(len(lengths))}
    lasts = {first - 1 for first in firsts if first} | {T - 1}
    for name, ignored in (
        ("first ignored", firsts),
        ("nothing ignored", set()),
        ("last ignored", lasts),
        ("both ignored", firsts | lasts),
    ):
        expected = [IGNORE if t in ignored else 10 + t for t in range(T)]
        assert rows.LABELS[name](tokens, lengths).tolist() == expected, name
    assert tokens.tolist() == list(range(10, 10 + T))


@given(st.integers(0, 9999), st.integers(0, 500))
@settings(max_examples=20)
def test_a_rotation_is_a_product_of_complex_numbers_and_knows_differences_alone(seed: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    at = torch.tensor([0, 3, 4, 9, 100])
    turn = torch.polar(
        torch.ones(5, 6, dtype=torch.float64),
        at[:, None] * torch.tensor([10_000.0 ** (-i / 6) for i in range(6)], dtype=torch.float64),
    )
    turned = torch.complex(q[:, :6], q[:, 6:]) * turn
    assert torch.cat([turned.real, turned.imag], 1).sub(rotate(q, at)).abs().max() < 1e-12
    here = rotate(q, at) @ rotate(k, at).T
    there = rotate(q, at + offset) @ rotate(k, at + offset).T
    assert (here - there).abs().max() < 1e-12 * (q.norm() * k.norm())
    assert rotate(q, at).norm(dim=1).tolist() == pytest.approx(q.norm(dim=1).tolist(), rel=1e-14)


def test_angles_are_as_exact_as_the_numbers_that_are_turned() -> None:
    x = torch.zeros(1, 24, dtype=torch.float64)
    x[0, 5] = 1.0
    turned = rotate(x, torch.tensor([119]))
    angle = 119 * 10_000.0 ** (-5 / 12)
    assert turned[0, 5].item() == pytest.approx(math.cos(angle), abs=1e-14)
    assert turned[0, 17].item() == pytest.approx(math.sin(angle), abs=1e-14)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("mask", rows.MASKS)
def test_the_model_is_torchs_own_attention(mask: str, rotary: bool) -> None:
    lengths, model = [4, 5, 3], Reader(seed=1, rotary=rotary)
    may_look, at = rows.MASKS[mask](lengths), torch.tensor([0, 1, 2, 3, 7, 8, 9, 10, 11, 40, 41, 42])
    tokens = torch.arange(60, 72)
    x = model.embedding[tokens]
    stream = x if rotary else x + F.embedding(at, model.position)
    for layer in model.layers:
        q, k, v = (F.linear(norm(stream), part) for part in layer.qkv.split(24))
        if rotary:
            q, k = rotate(q, at), rotate(k, at)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=may_look[None])[0]
        stream = stream + F.linear(mixed, layer.out)
        stream = stream + F.linear(F.gelu(F.linear(norm(stream), layer.up)), layer.down)
    expected = norm(stream) @ model.embedding.T
    found = model(x, at, may_look)
    assert found.dtype == torch.float64 and (found - expected).norm() < 1e-13 * expected.norm()
    assert (model.position is None) == rotary


def test_the_same_seed_gives_the_same_model_and_leaves_torchs_numbers_alone() -> None:
    state = torch.get_rng_state()
    one, other, third = (list(Reader(seed=seed).parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)) and not torch.equal(one[0], third[0])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rotary", [False, True])
@given(seed=st.integers(0, 9999), documents=st.integers(2, 5), longest=st.integers(8, 24))
@settings(max_examples=8)
def test_one_by_one_is_the_padded_batch_in_one_pass(rotary: bool, seed: int, documents: int, longest: int) -> None:
    model, (tokens, labels) = Reader(seed=seed, rotary=rotary), batch(seed, documents, longest)
    right = one_by_one(model, texts(seed, documents, longest))
    T = tokens.shape[1]
    logits = model(model.embedding[tokens], torch.arange(T), torch.ones(T, T).tril().bool())
    targets = labels[:, 1:] != IGNORE
    loss = F.cross_entropy(logits[:, :-1][targets], labels[:, 1:][targets])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    found, bound = distance(gradient, right.right), right.tolerance(model)
    assert right.targets == int(targets.sum()) and found.relative_error <= bound.value < 1e-11
    assert sum(right.losses) / right.targets == pytest.approx(loss.item(), rel=1e-13)
    assert (right.logits - logits[labels != IGNORE].detach()).norm() < 1e-13 * logits.norm()
    terms = right.gradients.norm(dim=1).sum() / right.gradients.sum(0).norm()
    assert bound.cancellation == pytest.approx(float(terms)) and bound.terms == right.targets + depth(model) + 3 * len(
        right.logits
    )
