"""What each word says, by pencil, by count and by what is left: without the algebra that predicts whole steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.audit import watching
from tests.audit.plain import double
from tests.audit.proofs import alone, by_name, of, plainly, rounding, run, summed_gradients, with_any
from tests.audit.steps import Step
from tests.audit.watching import flat, gap

K4 = (12, 15, 7, 3)  # valid tokens of most windows: 37 of 80 positions and of 47 labels


def fitted(entry: Step) -> Tensor:
    """The weights × N with which the first optimizer step took the microbatches; they explain its gradient fully."""
    rows, counts = summed_gradients(entry)
    found = run(entry)[0].events[0].gradient
    weights = torch.linalg.lstsq(rows.T, found[:, None]).solution[:, 0]
    assert (weights @ rows - found).norm() <= rounding(entry) * found.norm()
    return weights * counts.sum()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("the_usual_tutorial", [37 / (4 * n) for n in K4]),
        ("a_trainer_that_divides_by_the_accumulation_steps", [37 / (4 * n) for n in K4]),
        ("the_mean_of_a_stack_of_means", [16 / (4 * n) for n in (2, 5, 3, 6)]),
        ("nobody_divides", [37 / n for n in K4]),
        ("the_sum_of_all_losses_hidden_by_adam", [37 / n for n in K4]),
        ("undivided_where_the_mean_of_means_is_meant", [37 / n for n in K4]),
        ("sums_from_a_generator", [37] * 4),
        ("a_sum_hidden_by_adam", [37] * 4),
        ("divided_by_the_tokens_and_by_k", [1 / 4] * 4),
        ("the_engine_divides_again", [1 / 4] * 4),
        ("the_size_of_the_tensor", [37 / 80] * 4),
        ("labels_counted_before_the_shift", [37 / 47] * 4),
        ("attention_masks_counted", [37 / 47] * 4),
        ("cleared_in_the_loop", [0, 0, 0, 1]),
        ("a_buffer_that_is_overwritten", [0, 0, 0, 1]),
        ("the_loss_is_assigned_and_not_added", [0, 0, 0, 1]),
        ("a_tail_of_three_divided_by_four", [34 / (4 * n) for n in (12, 15, 7)]),
        ("a_tail_whose_tokens_share_three_quarters", [3 / 4] * 3),
        ("unscaled_after_the_first_backward", [1, 16, 16, 16]),
        ("the_fifth_microbatch_waits_for_the_next_window", [51 / 37] * 4 + [0]),
        ("the_second_microbatch_has_the_wrong_sign", [1, -1, 1, 1]),
    ],
)
def test_weights_by_pencil(name: str, expected: list[float]) -> None:
    entry = by_name(name)
    size = 100 * rounding(entry) * max(map(abs, expected))  # the fit's condition is below 100
    assert fitted(entry).tolist() == pytest.approx(expected, abs=size)


def test_the_counts_of_the_usual_window() -> None:
    assert tuple(summed_gradients(by_name("the_usual_tutorial"))[1].tolist()) == K4


@of([entry for entry in alone("clip-scaled") if not entry.plan.precision])
def test_a_scaled_clip_leaves_the_s_th_part_of_the_threshold(entry: Step) -> None:
    norm = float(run(entry)[0].events[0].gradient.norm())
    assert norm == pytest.approx(entry.plan.max_norm / entry.plan.scale, rel=1e-5)
    assert norm < 0.5 * min(entry.plan.max_norm, float(plainly(entry)[0].events[0].gradient.norm()))


def test_every_mean_is_clipped_by_its_own_norm() -> None:
    entry = by_name("every_mean_gradient_clipped_and_then_added")
    rows, counts = summed_gradients(entry)
    norms = rows.norm(dim=1) / counts
    assert fitted(entry).tolist() == pytest.approx((0.3 / (norms + 1e-6)).tolist())
    assert float(norms.min()) > 0.3


@of([entry for entry in alone("sequence-means") if not isinstance(entry.microbatches[0], str)])
def test_every_sequence_weighs_the_same(entry: Step) -> None:
    model, rows = double(entry), []
    for tokens, labels in map(entry.task.language, entry.microbatches):
        for at in range(len(tokens)):
            logits = model(tokens[at : at + 1])[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.mT, labels[at : at + 1, 1:], ignore_index=-100)
            rows.append(flat(torch.autograd.grad(loss, list(model.parameters()))))
    found = run(entry)[0].events[0].gradient
    assert (torch.stack(rows).mean(0) - found).norm() <= rounding(entry) * found.norm()


@of(with_any("step-per-microbatch"))
def test_k_optimizer_steps_move_the_parameters(entry: Step) -> None:
    for window in run(entry):
        assert len(window.events) == len(entry.microbatches)
        norms = [float(event.gradient.norm()) for event in window.events]
        assert min(norms) > 0 and len(set(norms)) == len(norms)
    (optimizer,) = entry.plan.optimizers(double(entry))
    adam = isinstance(optimizer, torch.optim.AdamW)
    assert not adam or set(run(entry)[-1].counts) == {entry.windows * len(entry.microbatches)}


@of([*alone("adam-count-per-microbatch"), *alone("moments-per-microbatch")])
def test_adams_count_is_k_times_the_windows(entry: Step) -> None:
    K = len(entry.microbatches)
    assert [set(window.counts) for window in run(entry)] == [{K * n} for n in range(1, entry.windows + 1)]


def test_adams_first_update_is_too_short_by_the_bias_of_four_steps() -> None:
    entry = by_name("an_adam_that_counts_its_calls")
    found, right = run(entry)[0], plainly(entry)[0]
    short = (1 - 0.9) / (1 - 0.9**4) * ((1 - 0.999**4) / (1 - 0.999)) ** 0.5
    moved, meant = found.after - found.before, right.after - right.before
    assert (moved - short * meant).norm() <= 1e-3 * meant.norm() and short == pytest.approx(0.581, abs=1e-3)


@of(with_any("schedule-per-microbatch", "schedule-per-process"))
def test_the_schedule_stands_where_it_should_be_later(entry: Step) -> None:
    factor = len(entry.microbatches) if "schedule-per-microbatch" in entry.faults else entry.plan.processes
    (optimizer,) = entry.plan.optimizers(double(entry))
    base, schedule = optimizer.param_groups[0]["lr"], entry.plan.schedule
    for n, window in enumerate(run(entry), 1):
        assert window.rates == pytest.approx((base * schedule(factor * n),))
        assert window.rates != pytest.approx((base * schedule(n),), rel=1e-2)


@of([entry for entry in alone("ema-per-microbatch") if not entry.plan.first_copied])
def test_an_average_in_the_loop_forgets_decay_to_the_k(entry: Step) -> None:
    K, decay, average = len(entry.microbatches), entry.plan.average, run(entry)[0].before
    for window in run(entry):
        average = decay ** (K - 1) * average + (1 - decay ** (K - 1)) * window.before
        average = decay * average + (1 - decay) * window.after
        assert (window.average - average).norm() <= rounding(entry) * (window.after - window.before).norm()


def test_decay_in_the_loop_is_a_power() -> None:
    found = run(by_name("decayed_in_the_loop"))[0]
    moved = found.after - 0.97**4 * found.before
    assert moved.abs().max() <= 0.1 * (1 + 1e-9)  # Adam's first update of every weight is at most its rate
    assert (found.after - 0.97 * found.before).abs().max() > 0.15


@of(alone("momentum-per-microbatch"))
def test_the_momentum_forgets_k_times(entry: Step) -> None:
    first, K = run(entry)[0], len(entry.microbatches)
    (group,) = entry.plan.optimizers(double(entry))[0].param_groups
    buffer = sum(group["momentum"] ** (K - 1 - k) * event.gradient for k, event in enumerate(first.events))
    moved = first.before - first.after
    assert len(first.events) == K and (moved - group["lr"] * buffer).norm() <= rounding(entry) * moved.norm()


@of(
    [
        entry
        for entry in alone("stale-gradient")
        if entry.structure not in ("several optimizers", "step before the backward")
    ]
)
def test_a_stale_gradient_holds_all_of_the_one_before(entry: Step) -> None:
    first, second, *_ = run(entry)
    model = double(entry)
    torch.nn.utils.vector_to_parameters(first.after, model.parameters())
    rows, counts = summed_gradients(entry, model)
    fresh = rows.sum(0) / counts.sum()
    left = second.events[0].gradient - fresh
    assert (left - first.events[0].gradient).norm() <= rounding(entry) * fresh.norm()


def test_a_late_step_moves_nothing_at_first() -> None:
    first, second, _ = run(by_name("the_step_takes_the_gradient_of_the_window_before"))
    assert torch.equal(first.before, first.after) and not torch.equal(second.before, second.after)


@of(alone("no-step"))
def test_nothing_moves(entry: Step) -> None:
    assert float(plainly(entry)[0].events[0].gradient.norm()) > 0.1
    for window in run(entry):
        assert torch.equal(window.before, window.after) and not window.events


@of(alone("non-finite"))
def test_numbers_are_lost_that_the_whole_window_has(entry: Step) -> None:
    assert not run(entry)[0].events[0].gradient.isfinite().all() and not run(entry)[0].after.isfinite().all()
    assert plainly(entry)[0].after.isfinite().all()


@of(alone("nondeterministic"))
def test_other_random_numbers_give_another_gradient(entry: Step) -> None:
    found = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found.append(watching.run(entry))
    assert gap(found[0], found[1]) == 0 and gap(found[0], found[2]) >= 0.1


@of(alone("batch-dependent-layer"))
def test_the_examples_of_a_batch_depend_on_each_other(entry: Step) -> None:
    rows, counts = summed_gradients(entry)
    model = double(entry)
    total, count = entry.loss_sum(model, entry.concat(entry.microbatches))
    together = flat(torch.autograd.grad(total, list(model.parameters())))
    assert count == counts.sum() and (rows.sum(0) - together).norm() >= 0.1 * together.norm()
    assert fitted(entry).tolist() == pytest.approx([1.0] * len(counts))  # so no weight of a microbatch shows it
