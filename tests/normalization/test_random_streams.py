"""Streams of random numbers, masks and changes of images, by hand and against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labkit.fit import flat
from labkit.images import draw
from labkit.normalization.random_streams import (
    UNITS,
    Net,
    augment,
    augmentation,
    contributions,
    draw_keyed,
    draw_stream,
    dropout,
)

torch.set_num_threads(1)


def test_the_net_is_torchs_own_layers() -> None:
    net, (x, _) = Net(3), draw(3, 7)
    masks = 2.0 * (draw_stream([7], UNITS, 0) < 0.5)
    first, second, head = net.weights
    h = F.linear(x.flatten(1) - 0.5, first).relu() * masks[:, :24]
    expected = F.linear(F.linear(h, second).relu() * masks[:, 24:], head, net.bias)
    assert (net(x, masks) - expected).abs().max() < 1e-14 and expected.std() > 0.01
    assert [p.shape for p in net.parameters()] == [(6,), (24, 256), (12, 24), (6, 12)]
    assert first.std().item() == pytest.approx(1 / 16, rel=0.05)


@pytest.mark.parametrize("images", [8, 12, 24])
def test_a_gradient_is_left_where_every_unit_is_dropped(images: int) -> None:
    for seed in range(50):
        rows = contributions(Net(seed), *draw(seed, images), torch.zeros(images, 36), [images])
        assert rows.norm() > 0.01


def test_a_stream_gives_its_numbers_in_the_order_asked() -> None:
    stream = torch.rand(30, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    expected = [
        torch.cat([stream[:8].reshape(4, 2), stream[8:12].reshape(4, 1)], 1),
        torch.cat([stream[12:24].reshape(6, 2), stream[24:30].reshape(6, 1)], 1),
    ]
    assert draw_stream([4, 6], [2, 1], 8).equal(torch.cat(expected))
    assert not draw_stream([4, 6], [2, 1], 8).equal(draw_stream([10], [2, 1], 8))
    assert draw_stream([4, 6], [2], 8).equal(draw_stream([10], [2], 8))  # one layer, one stream: nothing moves


def test_keyed_numbers_belong_to_the_image() -> None:
    many, few = draw_keyed(9, [3, 2], 1), draw_keyed(4, [3, 2], 1)
    assert many[:4].equal(few) and len(many.unique()) == 45
    assert not draw_keyed(4, [3, 2], 2).equal(few) and 0.3 < float(draw_keyed(200, [3], 0).mean()) < 0.7


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
def test_masks_drop_that_share_and_keep_the_mean(p: float) -> None:
    masks = dropout(draw_stream([500], [40], 0), p)
    assert masks.dtype == torch.float64 and float(masks.max()) == 1 / (1 - p)
    assert float((masks == 0).double().mean()) == pytest.approx(p, abs=0.01)
    assert float(masks.mean()) == pytest.approx(1, abs=0.1)


def test_augmentations_by_hand() -> None:
    numbers = torch.tensor([[0.4, 0.4, 0.99, 0.4, 0.25], [0.6, 0.6, 0.1, 0.6, 0.1], [0.6, 0.1, 0.0, 0.1, 0.9]])
    assert augmentation(numbers.double(), 0.5).tolist() == [
        pytest.approx([1, 2, 0.75]),
        [0, 0, 1],
        pytest.approx([0, -2, 1.4]),
    ]
    many = augmentation(draw_stream([4000], [1] * 5, 0), 1.0)
    assert many[:, 1].long().add(2).bincount().tolist() == pytest.approx([800] * 5, rel=0.15)
    assert 0.5 <= many[:, 2].min() < 0.51 and 1.49 < many[:, 2].max() <= 1.5


def test_an_image_is_mirrored_then_moved_then_lit() -> None:
    image = torch.arange(256, dtype=torch.float64).reshape(1, 1, 16, 16)
    chosen = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 1.0], [0.0, 0.0, 1.0]])
    flipped, moved, same = augment(image.repeat(3, 1, 1, 1), chosen)
    assert same.equal(image[0])
    assert flipped[0, 3].tolist() == [0.5 * (48 + each) for each in (1, 0, *range(15, 1, -1))]
    assert moved[0, 3].tolist() == [48 + each for each in (*range(1, 16), 0)]


@pytest.mark.parametrize("sizes", [[9], [4, 3, 2], [1] * 9])
def test_contributions_add_up_to_the_gradient_of_the_mean(sizes: list[int]) -> None:
    net, (x, y) = Net(0), draw(0, 9)
    masks = dropout(draw_stream([9], UNITS, 1), 0.5)
    rows = contributions(net, x, y, masks, sizes)
    right = flat(torch.autograd.grad(F.cross_entropy(net(x, masks), y), list(net.parameters())))
    assert rows.shape == (len(sizes), len(right)) and (rows.sum(0) - right).norm() < 1e-14
    first = F.cross_entropy(net(x[: sizes[0]], masks[: sizes[0]]), y[: sizes[0]], reduction="sum") / 9
    alone = flat(torch.autograd.grad(first, list(net.parameters())))
    assert (rows[0] - alone).norm() < 1e-15 and all(isinstance(p, nn.Parameter) for p in net.parameters())
