"""Every loop against one backward of the whole window, arithmetic by hand, and the count of what it advances."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from labkit import rules
from labkit.cadence.stepping import Average, Training, adam_states, learning_rate_times
from labkit.corpus import window

torch.set_num_threads(1)

WORDS = (
    "once-per-window",
    "adam-count-per-microbatch",
    "moments-per-microbatch",
    "step-per-microbatch",
    "momentum-per-microbatch",
    "decay-per-microbatch",
    "ema-per-microbatch",
    "schedule-per-microbatch",
    "schedule-per-process",
)
OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1),
}


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one(*, value: float = 1.0) -> Tensor:
    return double(value).requires_grad_()


def loop(word: str) -> Callable[..., None]:
    return rules.rule(word).loop


def slopes(weight: Tensor) -> Callable[[float], Tensor]:
    """The loss of a microbatch that is its own gradient, whatever the weight."""
    return lambda slope: slope * weight.sum()


def test_the_table_has_every_word_once_with_how_to_recognise_it_and_the_fix() -> None:
    assert tuple(word for word, each in rules.every().items() if each.topic == "cadence") == WORDS
    counted = window([(torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.long))] * 2)
    for word in WORDS:
        rule = rules.rule(word)
        assert rule.word == word and rule.right == (word == "once-per-window") == (not rule.changes)
        assert rule.weights(counted).tolist() == [1, 1] and rule.loop.__doc__
        assert len(rule.looks_like) > 20 and rule.fix and "\n" not in rule.looks_like + rule.fix


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (((x @ self.a.T).tanh() @ self.b - y) ** 2).mean()

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.a, self.unused]}, {"params": [self.b], "lr": 0.03}]

    def all(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.parameters()])


def batches(K: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = torch.randn(K, 4, 3, generator=generator, dtype=torch.float64)
    return [(each[:, :2], each[:, 2]) for each in draw]


def together(microbatches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*microbatches, strict=True)
    return torch.cat(x), torch.cat(y)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("K", [1, 3, 8])
def test_once_per_window_is_one_large_batch(name: str, K: int) -> None:
    net, whole, microbatches = Net(), Net(), batches(K)
    optimizer, expected = OPTIMIZERS[name](net.groups()), OPTIMIZERS[name](whole.groups())
    scheduler, schedule = (LambdaLR(each, lambda index: 1 / (1 + index)) for each in (optimizer, expected))
    average = Average(net.parameters(), decay=0.8)
    averaged = AveragedModel(whole, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    averaged.update_parameters(whole)  # torch's first update copies
    for _ in range(5):
        loop("once-per-window")(net, microbatches, Training(optimizer, scheduler, average))
        whole(together(microbatches)).backward()
        expected.step()
        schedule.step()
        averaged.update_parameters(whole)
        expected.zero_grad()
    assert (net.all() - whole.all()).norm() < 1e-13 * whole.all().norm()
    for value, p in zip(average.values, averaged.module.parameters(), strict=True):
        assert (value - p).norm() < 1e-13


# How often each loop advances Adam's step, the schedule and the average in one window of K microbatches.
ADVANCES = {word: ("K" if word in WORDS[1:5] else "1", "1", "1") for word in WORDS} | {
    "ema-per-microbatch": ("1", "1", "K"),
    "schedule-per-microbatch": ("1", "K", "1"),
    "schedule-per-process": ("1", "W", "1"),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(("K", "W"), [(1, 1), (3, 5), (8, 2)])
def test_what_a_loop_advances_and_what_it_leaves(word: str, K: int, W: int) -> None:
    weight, value = one(), double(0.0)
    optimizer = torch.optim.AdamW([weight], lr=0.0)
    scheduler = LambdaLR(optimizer, lambda index: 1.0)
    average = Average([value], decay=0.9)
    value += 1
    training = Training(optimizer, scheduler, average, world_size=W)
    for done in (1, 2, 3):
        loop(word)(slopes(weight), [1.0] * K, training)
        steps, schedule, averages = (done * {"1": 1, "K": K, "W": W}[each] for each in ADVANCES[word])
        assert optimizer.state[weight]["step"] == steps and scheduler.last_epoch == schedule
        assert average.values[0].item() == pytest.approx(1 - 0.9**averages, rel=1e-13)
        assert weight.grad is None and optimizer.param_groups[0]["lr"] == 0.0


@pytest.mark.parametrize("word", WORDS)
def test_a_loop_needs_neither_schedule_nor_average_and_keeps_the_learning_rates(word: str) -> None:
    net = Net()
    optimizer = OPTIMIZERS["AdamW"](net.groups())
    before = net.all()
    loop(word)(net, batches(3), Training(optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03]
    assert all(p.grad is None for p in net.parameters())
    moved = (net.all() - before).abs() > 1e-3
    assert moved[:-1].all() and moved[-1] == (word == "decay-per-microbatch")  # which decays what has no gradient


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_one_microbatch_every_loop_is_right(word: str, name: str) -> None:
    net, right = Net(), Net()
    training, expected = (Training(OPTIMIZERS[name](each.groups())) for each in (net, right))
    for _ in range(3):
        loop(word)(net, batches(1), training)
        loop("once-per-window")(right, batches(1), expected)
    assert torch.equal(net.all(), right.all())


def adam(gradients: list[list[float]], times: int, decay: float = 0.0) -> list[float]:
    """Adam by hand, lr 0.1, ε 1e-8: m and v of every gradient of a window, t so many at each; the weight after each."""
    w, m, v, t, path = 1.0, 0.0, 0.0, 0, []
    for each in gradients:
        for g in each:
            m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, t + times
        w = w * (1 - 0.1 * decay)
        w -= 0.1 * m / (1 - 0.9**t) / (math.sqrt(v / (1 - 0.999**t)) + 1e-8)
        path.append(w)
    return path


WINDOWS = [[1.0, -2.0, 4.0], [0.5, 3.0, -1.0], [2.0, 2.0, -3.0]]
MEANS = [[sum(each) / 3] for each in WINDOWS]
THIRDS = [[g / 3 for g in each] for each in WINDOWS]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("once-per-window", adam(MEANS, 1, decay=0.5)),
        ("adam-count-per-microbatch", adam(MEANS, 3, decay=0.5)),
        ("moments-per-microbatch", adam(THIRDS, 1, decay=0.5)),
    ],
)
def test_adam_by_hand(word: str, expected: list[float]) -> None:
    weight = one()
    training = Training(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5))
    for each, after in zip(WINDOWS, expected, strict=True):
        loop(word)(slopes(weight), each, training)
        assert weight.item() == pytest.approx(after, rel=1e-14)


def test_the_shipped_case_of_the_count() -> None:
    weight = one()
    training = Training(torch.optim.Adam([weight], lr=1.0, eps=0.0))
    loop("adam-count-per-microbatch")(slopes(weight), [1.0] * 3, training)
    assert 1 - weight.item() == pytest.approx(0.6388, abs=5e-5)  # B23


def test_the_buffer_in_fractions() -> None:
    weight = one()
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)
    buffer, w = Fraction(0), Fraction(1)
    for each in WINDOWS:
        loop("momentum-per-microbatch")(slopes(weight), each, Training(optimizer))
        for g in each:
            buffer = buffer / 2 + Fraction(g) / 3
        w -= buffer / 2
        assert weight.item() == pytest.approx(float(w), rel=1e-14)
    assert optimizer.state[weight]["momentum_buffer"].item() == pytest.approx(float(buffer), rel=1e-14)


def test_steps_of_plain_sgd_add_up_to_one_on_the_mean_at_fixed_weights_alone() -> None:
    weight = one()
    loop("step-per-microbatch")(slopes(weight), WINDOWS[0], Training(torch.optim.SGD([weight], lr=0.3)))
    assert weight.item() == pytest.approx(1 - 0.3, rel=1e-15)
    loop("step-per-microbatch")(lambda c: (weight**2).sum() / 2, range(3), Training(torch.optim.SGD([weight], lr=0.3)))
    assert weight.item() == pytest.approx(0.7 * 0.9**3, rel=1e-14)  # the right one: 0.7 · 0.7


def test_decay_happens_between_the_gradients() -> None:
    weight = one()
    training = Training(torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1, eps=1e9))  # ε drowns the gradient
    loop("decay-per-microbatch")(slopes(weight), [0.0] * 3, training)
    assert weight.item() == pytest.approx(0.970299, rel=1e-14)  # B22
    seen: list[float] = []

    def loss(_: int) -> Tensor:
        seen.append(weight.item())
        return weight.sum()

    loop("decay-per-microbatch")(loss, range(3), training)
    assert seen == pytest.approx([0.99**3, 0.99**4, 0.99**5], rel=1e-14)
    assert weight.item() == pytest.approx(0.99**6, rel=1e-9)


def test_the_average_sees_old_weights_until_the_step() -> None:
    weight = one(value=0.0)
    average = Average([weight], decay=0.5)
    training = Training(torch.optim.SGD([weight], lr=1.0), average=average)
    loop("ema-per-microbatch")(slopes(weight), [-1.0] * 4, training)  # the weight goes from 0 to 1
    assert average.values[0].item() == 0.5
    loop("ema-per-microbatch")(slopes(weight), [0.0] * 2, training)
    assert average.values[0].item() == 0.875


@pytest.mark.parametrize(
    ("word", "index", "rate"), [("schedule-per-microbatch", 400, 5e-4), ("once-per-window", 50, 6.25e-5)]
)
def test_the_shipped_case_of_the_schedule(word: str, index: int, rate: float) -> None:
    weight = one()
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda index: min(1.0, index / 800))
    for _ in range(50):
        loop(word)(slopes(weight), [0.0] * 8, Training(optimizer, scheduler))
    assert scheduler.last_epoch == index and optimizer.param_groups[0]["lr"] == pytest.approx(rate)  # B20


def test_the_state_is_made_once_and_a_count_set_before_torch_makes_it_is_lost() -> None:
    weight, without = one(), one()
    optimizer = torch.optim.Adam([weight, without], lr=1.0)
    weight.sum().backward()
    (state,) = adam_states(optimizer)
    state["step"] += 7
    optimizer.step()
    assert adam_states(optimizer)[0] is state and state["step"] == 8 and not optimizer.state[without]


def test_learning_rates_come_back_after_an_error_too() -> None:
    optimizer = OPTIMIZERS["SGD"](Net().groups())
    with pytest.raises(ZeroDivisionError), learning_rate_times(0.5, optimizer):
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.015]
        _ = 1 / 0
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.03]
    rate = torch.tensor(0.1)
    with learning_rate_times(0.0, torch.optim.Adam([one()], lr=rate)):
        assert rate == torch.tensor(0.1)  # a learning rate that is a tensor is not written into
