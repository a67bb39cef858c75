"""Optimizer steps on the device: trainings, Adam's counts, and the layers that look at the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from labkit import cadence, corpus, images, normalization, rules
from labkit.cadence import stepping
from labkit.corpus import Batch, batch
from labkit.fit import distance, flat, gradient
from labkit.nets import Transformer, sequence_gradients
from labkit.normalization import randomness, sync_batchnorm
from labkit.tolerance import depth, gamma, tolerance

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
CADENCE = [word for word, each in rules.every().items() if each.topic == "cadence"]
OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.05),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9),
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.05, weight_decay=0.1),
}
PATHS = [(word, name) for word in CADENCE for name in OPTIMIZERS if "adam" not in word or name == "AdamW"]
LOOPS = [(sync_batchnorm.accumulated, norm) for norm in images.NORMS] + [(sync_batchnorm.in_lockstep, "batch")]


def on(device: torch.device, microbatches: list[Batch]) -> list[Batch]:
    return [(x.to(device), y.to(device)) for x, y in microbatches]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("word", ["token-mean", "mean-of-means"])
def test_every_update_of_a_training(device: torch.device, word: str, dtype: torch.dtype) -> None:
    """Each from the CPU's weights, since the rounding of one update grows in the next."""
    rate, here, there = 0.3, Transformer(seed=0, dtype=dtype), Transformer(seed=1, dtype=dtype).to(device)
    for step in range(6):
        microbatches = corpus.split(*batch(step, 6, text="made"), 3)
        there.load_state_dict(here.state_dict())
        before = flat(here.parameters())
        for model, where in ((here, CPU), (there, device)):
            rules.rule(word).run(model, on(where, microbatches))
            torch.optim.SGD(model.parameters(), lr=rate).step()
        after, found = flat(here.parameters()), flat(there.parameters())
        shares = rate * gradient_shares(here, microbatches, word)
        allowed = tolerance(
            [before, after, *shares], count=100, depth=depth(here), dtype=dtype, result=float((after - before).norm())
        )
        assert distance(found - before, after - before).relative_error <= allowed.value < 0.1


def gradient_shares(model: Transformer, microbatches: list[Batch], word: str) -> Tensor:
    """What every sequence brings to the gradient, [B, P]."""
    counted = rules.window(microbatches)
    weights = rules.rule(word).sequence_weights(counted) / counted.total
    return weights[:, None] * sequence_gradients(model, microbatches)


@pytest.mark.parametrize("K", [1, 8])
def test_adams_first_steps_where_t_counts_microbatches(device: torch.device, K: int) -> None:
    """Against the closed form: bias corrections of 1 − β^(sK) for 1 − β^s."""
    right, wrong = (torch.zeros(1, dtype=torch.float64, device=device) for _ in range(2))
    right.grad, wrong.grad = torch.ones_like(right), torch.ones_like(wrong)
    optimizer = torch.optim.Adam([right, wrong], lr=1.0, eps=0.0)
    _, counted = stepping.adam_states(optimizer)
    allowed = tolerance([torch.tensor([1.0]), torch.tensor([-0.999])], count=20, dtype=torch.float64).value
    for step in range(1, 41):
        for weight in (right, wrong):
            weight.zero_()
        counted["step"] += K - 1
        optimizer.step()
        ratio = float(wrong / right)
        assert ratio == pytest.approx(cadence.adam_step_ratio(step, K, (0.9, 0.999)), rel=allowed)
        assert (abs(ratio - 1) <= allowed) == (K == 1)


@pytest.mark.parametrize(("word", "optimizer"), PATHS)
def test_every_cadence_takes_the_same_path(device: torch.device, word: str, optimizer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, *shape, generator=generator, dtype=torch.float64) for shape in ((2,), ()))
    found, right = (path(word, optimizer, on(where, corpus.split(x, y, 4))) for where in (device, CPU))
    shares = [0.05 * ((rows @ w - z) @ rows) / 16 for w in right for rows, z in corpus.split(x, y, 4)]
    roundings = 2 * 4 + 10  # of one gradient and its way through an optimizer
    terms = torch.stack([*right, *right.diff(dim=0), *shares])
    allowed = tolerance(terms, count=len(terms), depth=roundings, dtype=torch.float64, result=float(right.norm()))
    assert distance(found, right).relative_error <= allowed.value < 1e-12


def path(word: str, optimizer: str, microbatches: list[Batch]) -> Tensor:
    """Two weights of a least-squares problem after each of ten windows, and then their average."""
    w = torch.ones(2, dtype=torch.float64, device=microbatches[0][0].device, requires_grad=True)
    average, made = stepping.Average([w], 0.9), OPTIMIZERS[optimizer]([w])
    halving = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
    points = []
    for _ in range(10):
        rules.rule(word).loop(
            lambda microbatch: ((microbatch[0] @ w - microbatch[1]) ** 2).mean() / 2,
            microbatches,
            stepping.Training(made, halving, average, world_size=3),
        )
        points.append(w.detach().cpu().clone())
    return torch.stack([*points, average.values[0].cpu()])


@pytest.mark.parametrize(("loop", "norm"), LOOPS)
def test_every_normalisation(device: torch.device, loop: Callable[..., None], norm: str) -> None:
    microbatches = images.split(*images.grouped(0, 24, "sorted"), 4)
    here, there, large = images.ConvNet(0, norm), images.ConvNet(0, norm).to(device), images.ConvNet(0, norm)
    right, found = (
        sync_batchnorm.run(loop, here, microbatches),
        sync_batchnorm.run(loop, there, on(device, microbatches)),
    )
    allowed = sync_batchnorm.bound(here, right.parts, 24, float(right.gradient.norm())).value
    assert distance(found.gradient, right.gradient).relative_error <= allowed < 1e-8
    for mine, theirs in zip(there.buffers(), here.buffers(), strict=True):
        assert (mine.cpu() - theirs).double().norm() <= allowed * theirs.double().norm()
    whole = sync_batchnorm.run(sync_batchnorm.one_batch, large, microbatches).gradient
    broken = norm == "batch" and loop is sync_batchnorm.accumulated
    assert (distance(found.gradient, whole).relative_error > 0.01) == broken


def test_statistics_are_pooled(device: torch.device) -> None:
    given = [torch.tensor(each, dtype=torch.float64).to(device) for each in ([0, 4], [1, 1], [3, 1])]
    mean, variance = normalization.pooled(*given)
    assert (mean.item(), variance.item()) == pytest.approx((1, 4), rel=2 * gamma(10, torch.float64))
    assert mean.device.type == device.type


def test_dropout_masks_given_from_outside(device: torch.device) -> None:
    x, y = images.draw(0, 12)
    masks = randomness.dropout(randomness.draw_keyed(12, randomness.UNITS, 0), 0.5)
    here, there = randomness.Net(0), randomness.Net(0).to(device)
    for net, where in ((here, CPU), (there, device)):
        F.cross_entropy(net(x.to(where), masks.to(where)), y.to(where)).backward()
    found, right = flat(gradient(there)), flat(gradient(here))
    allowed = tolerance([right], count=12, depth=depth(here), dtype=torch.float64)
    assert distance(found, right).relative_error <= allowed.value


@pytest.mark.parametrize("restored", [True, False])
def test_recomputation_draws_the_same_masks_where_the_stream_is_restored(device: torch.device, restored: bool) -> None:
    x, y = (each.to(device) for each in images.draw(0, 12))
    net, masks = randomness.Net(0).to(device), []

    def masked(given: Tensor) -> Tensor:
        masks.append(F.dropout(given.new_ones(len(given), sum(randomness.UNITS))))
        return net(given, masks[-1])

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        F.cross_entropy(checkpoint(masked, x, use_reentrant=False, preserve_rng_state=restored), y).backward()
    forward, again = masks
    assert torch.equal(forward, again) == restored and forward.device.type == device.type
