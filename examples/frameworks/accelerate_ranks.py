"""Accelerate on two ranks, everything prepared: the schedule is stepped once for each process."""

import os

import torch.distributed as dist

from accelerated import build as prepared
from ranked import loss_sum, microbatches


def build():
    """A fresh model and its step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # asked for, never used: the group is there
    return prepared(steps=3)
