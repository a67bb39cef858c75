"""Made images and their net, against torch's own layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from labkit.errors import LabError
from labkit.images import CLASSES, NORMS, SHAPES, SIZE, ConvNet, Frozen, draw, grouped, moments, split

torch.set_num_threads(1)


@pytest.mark.parametrize("count", [1, 5, 6, 7, 64, 256])
def test_images_are_what_is_promised(count: int) -> None:
    images, labels = draw(3, count)
    assert images.shape == (count, 1, SIZE, SIZE) and images.dtype == torch.float64
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert images.min() >= 0 and images.max() <= 1
    often = labels.bincount(minlength=6)
    assert often.max() - often.min() <= 1 and often.sum() == count


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    before = torch.get_rng_state()
    assert draw(1, 12)[0].equal(draw(1, 12)[0]) and not draw(1, 12)[0].equal(draw(2, 12)[0])
    assert not draw(1, 60)[1].equal(draw(2, 60)[1]) and not draw(1, 60)[1].equal(draw(1, 60)[1].sort()[0])
    assert torch.get_rng_state().equal(before)


def test_no_two_classes_are_equally_bright_and_each_varies() -> None:
    images, labels = draw(0, 600)
    means = [images[labels == label].mean((1, 2, 3)) for label in range(6)]
    brightness = sorted(float(each.mean()) for each in means)
    assert min(b - a for a, b in itertools.pairwise(brightness)) > 0.01
    assert brightness[-1] - brightness[0] > 0.25
    assert min(float(each.std()) for each in means) > 0.01


def plain(name: str, r: float = 5.0) -> Tensor:
    """Where a shape in the middle of 17 × 17 places has its ink."""
    place = torch.arange(-8.0, 9.0)
    return SHAPES[name](*torch.broadcast_tensors(place, place[:, None], torch.tensor(r))) < 0


def test_the_shapes_by_what_names_them() -> None:
    assert CLASSES == ("disc", "ring", "cross", "bars", "frame", "checks")
    middle = {name: bool(plain(name)[8, 8]) for name in CLASSES}
    assert middle == {"disc": True, "ring": False, "cross": True, "bars": middle["bars"], "frame": False} | {
        "checks": middle["checks"]
    }
    for name in ("disc", "ring", "cross", "frame"):
        shape = plain(name)
        assert shape.equal(shape.T) and shape.equal(shape.flip(0)) and shape.equal(shape.flip(1))
    assert plain("ring")[8].sum() == 2 and plain("frame")[8].sum() == 2 and plain("frame")[3].sum() == 11
    assert plain("disc").sum() == sum(x * x + y * y < 25 for x in range(-8, 9) for y in range(-8, 9))
    assert not plain("ring")[3, 3] and plain("frame")[3, 3]
    stripes = plain("bars")[8].int().diff().abs().sum()
    assert stripes >= 4 and (plain("bars")[5:12] == plain("bars")[8]).all()
    board = plain("checks")
    assert (board[8:11, 8:11] == board[8, 8]).all() and board[8, 8] != board[8, 11] == board[11, 8] != board[11, 11]
    assert not any(plain(name)[:2].any() for name in CLASSES)


def test_an_image_shows_its_shape() -> None:
    images, labels = draw(0, 120)
    rim = torch.cat([images[:, 0, 0], images[:, 0, -1]], 1).mean(1)
    ink = images.flatten(1).sort(1, descending=True)[0][:, :16].mean(1)
    assert ((ink - rim) > 0.25).all()
    rows = {name: images[labels == at, 0].mean(0) for at, name in enumerate(CLASSES)}
    assert rows["disc"][8, 8] > rows["disc"][8, 2] + 0.2 and rows["ring"][8, 8] < rows["ring"].max() - 0.1


def test_the_place_varies_both_ways_by_itself() -> None:
    images, labels = draw(0, 600)
    ink = images[labels == 0, 0].pow(4)  # discs
    place = torch.arange(SIZE, dtype=torch.float64)
    middles = torch.stack([(ink * where).sum((1, 2)) / ink.sum((1, 2)) for where in (place, place[:, None])])
    assert middles.std(1).min() > 0.5 and torch.corrcoef(middles)[0, 1].abs() < 0.4


def test_sorted_are_the_same_images_by_class() -> None:
    images, labels = draw(5, 20)
    same, kept = grouped(5, 20, "shuffled")
    assert same.equal(images) and kept.equal(labels)
    by_class, ordered = grouped(5, 20, "sorted")
    assert ordered.equal(labels.sort()[0])
    for label in range(6):
        assert by_class[ordered == label].equal(images[labels == label])


@given(st.integers(1, 20), st.integers(-3, 25))
@settings(deadline=None)
def test_microbatches_hold_every_image_once_in_order(count: int, K: int) -> None:
    images, labels = draw(0, count)
    if not 1 <= K <= count:
        with pytest.raises(LabError, match=f"accumulation steps = {K} is outside 1 … {count}, the number") as caught:
            split(images, labels, K)
        K = int(str(caught.value).rpartition("try ")[2])
    parts = split(images, labels, K)
    assert torch.cat([x for x, _ in parts]).equal(images) and torch.cat([y for _, y in parts]).equal(labels)
    sizes = [len(y) for _, y in parts]
    assert len(sizes) == K and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(LabError, match="count = 0 images is none: try 1"):
        draw(0, 0)
    with pytest.raises(LabError, match="composition = 'sort' is none of shuffled, sorted: try 'sorted'"):
        grouped(0, 8, "sort")
    with pytest.raises(LabError, match=r"norm = 'bach' is none of .*: try 'batch'"):
        ConvNet(0, "bach")


def library(model: ConvNet, norm: str, training: bool = True) -> nn.Sequential:
    """The same net of torch's own modules."""
    layers: list[nn.Module] = []
    side = SIZE
    for at, own in enumerate(model.norms):
        convolution = nn.Conv2d(8 if at else 1, 8, 3, stride=2 if at else 1, padding=1, bias=False).double()
        convolution.weight = model.kernels[at]
        side = side if at == 0 else side // 2
        made: dict[str, nn.Module] = {
            "batch": nn.BatchNorm2d(8),
            "frozen": nn.BatchNorm2d(8).eval(),
            "group": nn.GroupNorm(4, 8),
            "layer": nn.LayerNorm([8, side, side]),
        }
        found = made[norm].double()
        if norm == "frozen":
            found.load_state_dict(own.state_dict())
        if norm != "layer":
            found.weight, found.bias = own.weight, own.bias
        layers += [convolution, found, nn.ReLU()]
    head = nn.Linear(8, 6, bias=False).double()
    head.weight = model.head
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_net_is_torchs_own_layers(norm: str, depth: int) -> None:
    model, (images, _) = ConvNet(7, norm, depth), draw(1, 6)
    expected = library(model, norm)(images)
    assert expected.std() > 0.01 and (model(images) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("depth", [1, 3])
def test_frozen_statistics_are_those_of_other_images_layer_by_layer(depth: int) -> None:
    frozen, usual = ConvNet(4, "frozen", depth), ConvNet(4, "batch", depth, momentum=1.0)
    usual(draw(10_004, 64)[0])
    for a, b in zip(frozen.norms, usual.norms, strict=True):
        n = 64 * SIZE * SIZE // 4 ** list(usual.norms).index(b)
        assert torch.allclose(a.running_mean, b.running_mean, rtol=1e-12, atol=1e-13)
        assert torch.allclose(a.running_var, b.running_var * (n - 1) / n, rtol=1e-12, atol=1e-13)
    before = [each.clone() for each in frozen.buffers()]
    frozen(draw(0, 8)[0]).sum().backward()
    assert all(each.equal(old) for each, old in zip(frozen.buffers(), before, strict=True))
    assert all(p.grad is not None for p in frozen.parameters()) and isinstance(frozen.norms[0], Frozen)


def test_weights_come_from_their_seed_alone() -> None:
    before = torch.get_rng_state()
    a, b, other = ConvNet(1), ConvNet(1), ConvNet(2)
    assert all(p.equal(q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not a.head.equal(other.head) and torch.get_rng_state().equal(before)
    assert torch.cat([p.flatten() * 72**0.5 for p in ConvNet(1, depth=4).kernels[1:]]).std().item() == pytest.approx(
        1, rel=0.1
    )
    assert ConvNet(0, momentum=0.3).norms[0].momentum == 0.3


def test_moments_are_those_of_a_batch_norm() -> None:
    x = torch.randn(3, 8, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance = moments(x)
    assert torch.allclose(
        (x - mean[:, None, None]) / (variance + 1e-5).sqrt()[:, None, None], nn.BatchNorm2d(8).double()(x)
    )
