"""Shipped faults of what is counted: tokens, batches, peaks. Nothing trains wrongly, and the report is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from labkit.batch.plans import Plan, plan
from labkit.casebook.entry import Case, Loop, Numbers, add
from labkit.roofline.accelerators import ACCELERATORS

H100 = ACCELERATORS["H100 SXM 80 GB"]
SECONDS = 0.5
SEQUENCES = 1000


def every_rank_counts(batches: Sequence[Tensor], tp: int) -> int:
    """The tokens of all ranks are added."""
    return sum(tokens.numel() for tokens in batches)


def one_rank_of_each_replica(batches: Sequence[Tensor], tp: int) -> int:
    """The ranks of a replica hold the same batch: one of them counts."""
    return sum(tokens.numel() for tokens in batches[::tp])


def tokens_per_second(loop: Loop) -> float:
    """8 GPUs, tp = 4: a batch of 2 rows of 1024 tokens for each of 2 replicas, held by 4 ranks each."""
    of_replica = [torch.zeros(2, 1024, dtype=torch.long) for _ in range(2)]
    return float(loop([of_replica[rank // 4] for rank in range(8)], 4) / SECONDS)


def all_devices_are_replicas(world: int, cp: int) -> Plan:
    """Every device is taken for a replica."""
    return plan(microbatch=1, world=world, accumulation=4)


def context_ranks_share(world: int, cp: int) -> Plan:
    """One replica is made of cp devices."""
    return plan(microbatch=1, world=world, cp=cp, accumulation=4)


def epoch_of_a_thousand(loop: Loop) -> Numbers:
    """2 GPUs, cp = 2: what is believed, and how many sequences so many steps really see."""
    believed, real = loop(2, 2), context_ranks_share(2, 2)
    steps = believed.updates(SEQUENCES)
    return {"global batch": believed.global_batch, "steps": steps, "sequences seen": steps * real.global_batch}


def over_the_sparse_peak(rate: float) -> float:
    """The larger figure of the data sheet."""
    return rate / max(H100.dense, H100.sparse or 0.0)


def over_the_dense_peak(rate: float) -> float:
    """What dense operands can reach."""
    return rate / H100.dense


def in_per_cent(loop: Loop) -> float:
    """400 TFLOP/s were measured."""
    return float(100 * loop(400.0))


add(
    Case(
        id="B35",
        topic="tp ranks counted twice",
        family="counting",
        source="huggingface/trl#7100",
        also=(
            *("huggingface/trl#7101", "meta-pytorch/torchtune#2622"),
            *("deepspeedai/DeepSpeed#171", "Modalities/modalities#409"),
        ),
        versions="TRL 1.1x, September 2026; torchtune, 2025",
        symptom="Logged tokens and tokens per second are inflated under tensor parallelism.",
        fault="Counts are summed over all ranks, although the ranks of one tensor-parallel group hold the same batch.",
        recognise="Throughput grows with tp at the same step time, and the epoch does not get shorter.",
        given="8 GPUs, tp = 4, dp = 2; 2 rows of 1024 tokens for each dp rank; a step takes 0.5 s.",
        number="throughput",
        unit="tokens/s",
        wrong=every_rank_counts,
        right=one_rank_of_each_replica,
        measure=tokens_per_second,
    ),
    Case(
        id="B36",
        topic="cp ranks as replicas",
        family="counting",
        source="axolotl-ai-cloud/axolotl#3444",
        also=("axolotl-ai-cloud/axolotl#3218",),
        versions="axolotl before March 2026",
        symptom="With context parallelism the number of epochs and the share of data seen are wrong.",
        fault="The global batch uses the world size and not world size / cp.",
        recognise="Count the sequences that an epoch really loads.",
        given="2 GPUs, cp = 2, microbatch 1, K = 4, 1000 sequences.",
        number="global batch",
        unit="sequences",
        wrong=all_devices_are_replicas,
        right=context_ranks_share,
        measure=epoch_of_a_thousand,
    ),
    Case(
        id="B38",
        topic="the sparse peak",
        family="counting",
        source="foundation-model-stack/fms-fsdp#89",
        also=("NVIDIA/Megatron-LM#1565", "allenai/OLMo-core#614"),
        symptom="MFU looks half as high as expected.",
        fault="The data sheet's figure with 2:4 sparsity is taken as the peak.",
        recognise="Look for a footnote at the peak: with sparsity it is twice the dense one.",
        given="400 TFLOP/s measured on an H100: 1979 sparse, 989 dense.",
        number="MFU",
        unit="%",
        wrong=over_the_sparse_peak,
        right=over_the_dense_peak,
        measure=in_per_cent,
    ),
)
