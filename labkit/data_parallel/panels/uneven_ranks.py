"""Ranks that do not hold the same: one without a valid token, one with fewer microbatches."""

from __future__ import annotations

import math

from labkit.data_parallel import uneven_ranks
from labkit.data_parallel.panels.rank_weights import Rows, right
from labkit.frame.canvas import Canvas
from labkit.frame.experiment import Experiment
from labkit.wording import percent, three


class EmptyRank(Experiment[uneven_ranks.EmptyRank]):
    """A rank that has nothing to predict."""

    title = "A rank without a valid token"
    question = "sum / max(n, 1) on every rank: how far off is the gradient?"
    unit = "%"
    note = "Measured in real DDP, float64. Striped: the gradient is wrong. Cross: it is not finite, on every rank."
    run = staticmethod(uneven_ranks.empty_rank)
    shown = (*uneven_ranks.POLICIES.values(), uneven_ranks.run_policies)
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("relative error (%)", "", moving="")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(-3, 110), y=(len(uneven_ranks.POLICIES) - 0.4, -0.6), xticks=[0, 100])
        self.dots = canvas.line(self.axes, "right", linestyle="none", markersize=9)
        self.bars = [canvas.bar(self.axes, "wrong", linewidth=12) for _ in uneven_ranks.POLICIES]
        self.lost = canvas.line(self.axes, "wrong", linestyle="none", markersize=12)
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in uneven_ranks.POLICIES]

    def draw(self, canvas: Canvas, result: uneven_ranks.EmptyRank) -> None:
        fine = [at for at, each in enumerate(result.policies) if each.relative_error <= result.tolerance]
        lost = [at for at, each in enumerate(result.policies) if each.broken]
        self.dots.set_data([0] * len(fine), [at + 0.2 for at in fine])
        self.lost.set_data([106] * len(lost), [at + 0.2 for at in lost])
        for at, each in enumerate(result.policies):
            shown = at not in fine and at not in lost
            self.bars[at].set_data([0, 100 * each.relative_error] if shown else [], [at + 0.2] * 2 if shown else [])
            said = _broken(each, result.ranks) if each.broken else right(each.relative_error, result.tolerance)
            self.words[at].set(text=f"{each.name}: {said}", position=(-2, at - 0.02))

    def answer(self, result: uneven_ranks.EmptyRank) -> float:
        return 100 * next(each for each in result.policies if each.name == "sum / max(n, 1)").relative_error

    def headline(self, result: uneven_ranks.EmptyRank) -> str:
        return f"sum / max(n, 1): no NaN, and {percent(self.answer(result) / 100)} off"

    def describe(self, result: uneven_ranks.EmptyRank) -> str:
        counts = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(result.counts))
        said = []
        for each in result.policies:
            loss = "NaN" if math.isnan(each.empty_loss) else three(each.empty_loss)
            lost = f"the gradient {_broken(each, result.ranks)}"
            what = lost if each.broken else right(each.relative_error, result.tolerance)
            said.append(f"{each.name}: the empty rank's loss is {loss}, {what}")
        return f"Valid tokens: {counts}. {'; '.join(said)}."


def _broken(policy: uneven_ranks.Policy, ranks: int) -> str:
    return f"NaN on {policy.broken} of {ranks} ranks"


class Uneven(Experiment[uneven_ranks.Uneven]):
    """The last rank has fewer microbatches than the others."""

    title = "A rank with fewer microbatches"
    question = "The lightest microbatch: how much of its right weight does it get?"
    unit = "times"
    note = (
        "Measured in real DDP: weights fitted from the first rank's gradient, 1 is right. A rank that gives no answer "
        "within a second hangs; all are ended then."
    )
    run = staticmethod(uneven_ranks.uneven)
    shown = (*uneven_ranks.WAYS.values(), uneven_ranks.run_way)
    aspect = 0.6

    def layout(self, canvas: Canvas) -> None:
        self.rows = Rows(canvas, 16)

    def draw(self, canvas: Canvas, result: uneven_ranks.Uneven) -> None:
        owner = result.owner.tolist()
        self.rows.draw(owner, result.counts.tolist(), [result.fitted.tolist()], instead=_hang(result))

    def answer(self, result: uneven_ranks.Uneven) -> float:
        return 0.0 if result.hangs else float(result.fitted.min())

    def headline(self, result: uneven_ranks.Uneven) -> str:
        if result.hangs:
            return f"{result.way}: {_hang(result)}"
        return f"{result.way}: no hang, {right(result.relative_error, result.tolerance)}"

    def describe(self, result: uneven_ranks.Uneven) -> str:
        steps = ", ".join(f"rank {rank}: {K}" for rank, K in enumerate(result.steps))
        if result.hangs:
            return f"Microbatches: {steps}. {result.hangs[0].upper()}{result.hangs[1:]}."
        weights = [
            f"rank {rank}: {three(w)}" for rank, w in zip(result.owner.tolist(), result.fitted.tolist(), strict=True)
        ]
        off = right(result.relative_error, result.tolerance)
        return f"Microbatches: {steps}. Weight × N of each: {', '.join(weights)}. In all: {off}."


def _hang(result: uneven_ranks.Uneven) -> str:
    return f"{result.hangs.partition(' gave')[0]} hangs" if result.hangs else ""


class Overflow(Experiment[overflow_on_one_rank.Drift]):
    """One rank skips a step, the others do not."""

    title = "An overflow on one rank"
    question = "After the last step: how far apart are the replicas?"
    unit = "% of the way"
    note = (
        "Measured in real DDP, float64. The overflow is an inf in one rank's copy of the averaged gradient. Distance: "
        "between the replicas, of the way that one has gone by then."
    )
    run = staticmethod(overflow_on_one_rank.overflow)
    shown = (
        overflow_on_one_rank.finite,
        overflow_on_one_rank.any_overflow,
        overflow_on_one_rank.spoil,
        overflow_on_one_rank.scaled_step,
        overflow_on_one_rank.run_training,
    )
    aspect = 0.5

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("optimizer step", "distance (% of the way)", whole="x", moving="xy")
        canvas.frame(self.axes, x=(0, 13), y=(-5, 100))
        self.when = canvas.line(self.axes, "reference")
        self.lines = {True: canvas.line(self.axes, "right"), False: canvas.line(self.axes, "wrong")}
        self.words = canvas.text(self.axes, "overflow", va="top")

    def draw(self, canvas: Canvas, result: overflow_on_one_rank.Drift) -> None:
        distance = result.distance.tolist()
        last, top = len(distance), max(1.0, *distance)
        canvas.frame(self.axes, x=(0, last + 1), y=(-0.05 * top, 1.25 * top), xticks=[1, last])
        self.when.set_data([result.overflow_at] * 2, [-0.05 * top, 1.25 * top])
        early = result.overflow_at < last / 2
        place = result.overflow_at + (0.01 if early else -0.01) * last
        self.words.set(x=place, y=1.23 * top, ha="left" if early else "right")
        for right_, line in self.lines.items():
            shown = right_ == (result.last == 0)
            line.set_data(range(1, last + 1) if shown else [], distance if shown else [])

    def answer(self, result: overflow_on_one_rank.Drift) -> float:
        return result.last

    def headline(self, result: overflow_on_one_rank.Drift) -> str:
        if result.agree:
            return "All ranks skip the step together: the replicas stay equal"
        return f"One rank skips a step alone: the replicas are {percent(result.last / 100)} of the way apart"

    def describe(self, result: overflow_on_one_rank.Drift) -> str:
        scales = ", ".join(f"rank {rank}: 2^{log:.0f}" for rank, log in enumerate(result.scales.tolist()))
        who = "every rank skips it" if result.agree else "that rank alone skips it"
        return (
            f"At step {result.overflow_at} the gradient of rank {result.overflow_on} overflows, and {who}. Distance of "
            f"the replicas after {len(result.distance)} steps: {three(result.last)} % of the way that one has gone. "
            f"Loss scales in the end: {scales}."
        )


class Killed(Experiment[killed_rank.Killed]):
    """A rank is killed while the others wait for it."""

    title = "A rank is killed"
    question = "How long until the notebook knows?"
    unit = "s"
    note = "Measured: a real SIGKILL, while the others wait in a collective. Then the same ranks are asked for again."
    run = staticmethod(killed_rank.killed)
    shown = (killed_rank.run_doomed,)
    aspect = 0.3

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("time (s)", "", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 1), y=(-0.6, 1.2))
        self.bars = [canvas.bar(self.axes, role) for role in ("wrong", "right")]
        self.words = canvas.text(self.axes, ha="left", va="center")

    def draw(self, canvas: Canvas, result: killed_rank.Killed) -> None:
        end = result.noticed + result.again
        canvas.frame(self.axes, x=(0, 1.05 * end), xticks=[result.noticed])
        self.bars[0].set_data([0, result.noticed], [0, 0])
        self.bars[1].set_data([result.noticed, end], [0, 0])
        said = f"{three(result.noticed)} s to the sentence, {three(result.again)} s to new ranks"
        self.words.set(text=said, position=(0.01 * end, 0.75))

    def answer(self, result: killed_rank.Killed) -> float:
        return result.noticed

    def headline(self, result: killed_rank.Killed) -> str:
        return f"Known after {three(result.noticed)} s, and the next run works"

    def describe(self, result: killed_rank.Killed) -> str:
        answers = ", ".join(map(three, result.answers))
        return (
            f"The notebook was told: “{result.said}”. That took {three(result.noticed)} s. New ranks answered "
            f"{three(result.again)} s later, each with the sum of 1 over all of them: {answers}."
        )


class Fsdp(Experiment[sharding.Sharded]):
    """FSDP2's collectives."""

    title = "Parameters in shards: FSDP2"
    question = "How many all-gathers does one optimizer step make?"
    unit = "all-gathers"
    note = "Counted on each rank: torch.distributed.fsdp.fully_shard, four layers, each sharded by itself, float64."
    run = staticmethod(sharding.fsdp)
    aspect = 0.4

    def source(self) -> str:
        """What a rank runs, and what compares."""
        shown: list[Any] = [sharding.shard, sharding.run_sharded, sharding.fsdp]
        return sources(*shown)

    def layout(self, canvas: Canvas) -> None:
        self.axes = canvas.axes("collectives of one optimizer step", "", whole="x", moving="x")
        self.axes.set_yticks([])
        canvas.frame(self.axes, x=(0, 30), y=(1.6, -0.6))
        self.bars = [canvas.bar(self.axes, "measured") for _ in range(2)]
        self.words = [canvas.text(self.axes, ha="left", va="bottom") for _ in range(2)]

    def draw(self, canvas: Canvas, result: sharding.Sharded) -> None:
        found = {"all-gathers": result.all_gathers, "reduce-scatters": result.reduce_scatters}
        most = max(1, *found.values())
        canvas.frame(self.axes, x=(0, 1.05 * most), xticks=[0, *found.values()])
        for at, (name, count) in enumerate(found.items()):
            self.bars[at].set_data([0, count], [at + 0.2] * 2)
            self.words[at].set(text=f"{name}: {count}", position=(0.01 * most, at - 0.1))

    def answer(self, result: sharding.Sharded) -> float:
        return result.all_gathers

    def headline(self, result: sharding.Sharded) -> str:
        return f"{result.all_gathers} all-gathers and {result.reduce_scatters} reduce-scatters in one step"

    def describe(self, result: sharding.Sharded) -> str:
        return (
            f"{result.layers} layers, K = {result.accumulation_steps}: {result.all_gathers} all-gathers and "
            f"{result.reduce_scatters} reduce-scatters on each rank. In the end a rank keeps {result.shard:,} of "
            f"{result.parameters:,} numbers of the gradient. The whole of it: "
            f"{right(result.relative_error, result.tolerance)}, {result.relative_error:.1g} off."
        )
