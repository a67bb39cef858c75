"""What the tests of the pipeline run on ranks."""

from __future__ import annotations

from torch import nn

from labkit.pipeline.stages import build, chunks


def planned(rank: int, world: int, *, schedule: str, microbatches: int) -> list[tuple[str, int, int]]:
    """The order in which the library itself means to work on this rank."""
    parts = [nn.Linear(1, 1) for _ in range(chunks(schedule))]
    pipeline = build(schedule, parts, rank, world, microbatches, loss_fn=lambda out, target: out.sum())
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    actions = [action for action in pipeline.pipeline_order[rank] if action is not None]
    return [
        (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
        for action in actions
        if action.computation_type.name in kinds
    ]
