"""Shipped faults of rows and batches: who looks at whom, where a token stands, against whom it is scored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from labkit.casebook.entry import Case, Loop, add
from labkit.packing.rows import block_causal, positions_of


def plain_causal_attention(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """A token looks at all that stands before it in the row."""
    same = torch.zeros_like(values)
    return attention(same, same, values, is_causal=True)


def attention_in_documents(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """A token looks at what stands before it in its own document."""
    same = torch.zeros_like(values)
    return attention(same, same, values, attn_mask=block_causal(lengths))


def last_output(loop: Loop) -> float:
    """Values 10, 10 and 2, 4 of two documents, equal scores: the last token's output."""
    values = torch.tensor([[[10.0], [10.0], [2.0], [4.0]]], dtype=torch.float64)
    return float(loop(values, [2, 2])[0, -1, 0])


def positions_run_on(lengths: Sequence[int]) -> Tensor:
    """Positions are counted through the row."""
    return torch.arange(sum(lengths))


def third_of_second(loop: Loop) -> float:
    """Documents of 3 and 5 tokens: where the third token of the second stands."""
    return float(loop([3, 5])[3 + 2])


def negatives_of_the_microbatch(scores: Tensor, K: int) -> Tensor:
    """A row is told from the others of its own microbatch."""
    losses = []
    for rows in torch.arange(len(scores)).tensor_split(K):
        own = scores[rows][:, rows]
        losses.append(F.cross_entropy(own, torch.arange(len(rows))))
    return torch.stack(losses).mean()


def negatives_of_the_batch(scores: Tensor, K: int) -> Tensor:
    """A row is told from all others: the scores of the window stand side by side before the loss."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


def equal_scores(loop: Loop) -> dict[str, float]:
    """B = 8, K = 4."""
    return {"loss": float(loop(torch.zeros(8, 8, dtype=torch.float64), 4))}


add(
    Case(
        id="B30",
        topic="packed documents leak",
        family="data",
        source="axolotl-ai-cloud/axolotl#1375",
        also=("huggingface/transformers#46634", "huggingface/nanoVLM#204", "MeetKai/functionary#265"),
        versions="axolotl, March 2024; transformers in 2026 with a 2D mask",
        symptom="Tokens of a packed document attend to earlier documents in the row; the loss still falls.",
        fault="The boundaries are ignored (batch above 1, or a 2D mask of ones), which leaves a plain causal mask.",
        recognise="Change the first document: nothing may change in the outputs of the second.",
        given="Values 10, 10 of document A and 2, 4 of document B, equal scores.",
        number="output of the last token",
        wrong=plain_causal_attention,
        right=attention_in_documents,
        measure=last_output,
    ),
    Case(
        id="B53",
        topic="positions run on",
        family="data",
        source="hiyouga/LlamaFactory#7318",
        also=("huggingface/nanoVLM#201", "huggingface/nanoVLM#204"),
        versions="LlamaFactory before March 2025",
        symptom="Later documents in a pack start at a position that is not zero.",
        fault="Positions are offset by the lengths before: learned positions shift, rotary ones do not mind.",
        recognise="Print the position ids of one packed row: they must fall back to 0 at every boundary.",
        given="Documents of 3 and 5 tokens; the third token of the second.",
        number="its position",
        wrong=positions_run_on,
        right=positions_of,
        measure=third_of_second,
    ),
    Case(
        id="B57",
        topic="negatives of a microbatch",
        family="data",
        source="huggingface/sentence-transformers#1822",
        also=("kamalkraj/e5-mistral-7b-instruct#15",),
        versions="any",
        symptom="Contrastive training with accumulation does not behave like the large batch.",
        fault="In-batch negatives are those of the microbatch alone: B/K candidates for a row, and not B.",
        recognise="The loss at the start is ln(B/K), not ln B: no weighting repairs it, the loss is no sum over rows.",
        given="B = 8, K = 4, all scores equal.",
        number="loss",
        unit="nat",
        wrong=negatives_of_the_microbatch,
        right=negatives_of_the_batch,
        measure=equal_scores,
    ),
)
