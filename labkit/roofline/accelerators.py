"""Accelerators: the figures of their makers, each with its source document."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

from labkit.declare import Choice, Range, quantity
from labkit.errors import LabError
from labkit.wording import show


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One accelerator, a single chip or module, by the figures of its maker; all are peaks that no program reaches."""

    name: str = quantity("name and memory")
    dtype: str = quantity("16-bit type of its matrix units, accumulated in float32")
    dense: float = quantity("peak of the matrix units in that type, all operands dense", "TFLOP/s")
    sparse: float | None = quantity("peak with two of every four weights zero; None: not quoted", "TFLOP/s")
    float32: float | None = quantity("peak in IEEE float32, without the matrix units; None: not quoted", "TFLOP/s")
    bandwidth: float = quantity("peak bandwidth of its memory", "GB/s")
    source: str = quantity("title of the document")
    url: str = quantity("where it can be read")
    date: str = quantity("year of that document")

    @property
    def ridge(self) -> float:
        """Intensity in FLOP/byte from which the dense peak is the lower roof.

        >>> round(ACCELERATORS["H100 SXM 80 GB"].ridge)
        295
        """
        return 1000 * self.dense / self.bandwidth


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_A100 = (
    "NVIDIA A100 Tensor Core GPU data sheet",
    f"{_NVIDIA}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
)
_HALF = "data sheet (gives sparse peaks; dense is half)"
_AMD = "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets"
# fmt: off
_ROWS = (
    Accelerator(
        "V100 SXM2", "float16", 125, None, 15.7, 900, "NVIDIA Tesla V100 GPU Accelerator data sheet",
        "https://images.nvidia.com/content/technologies/volta/pdf/tesla-volta-v100-datasheet-letter-fnl-web.pdf",
        "2018",
    ),
    Accelerator(
        "T4 16 GB", "float16", 65, None, 8.1, 300, "NVIDIA T4 Tensor Core GPU data sheet",
        f"{_NVIDIA}/tesla-t4/t4-tensor-core-datasheet-951643.pdf", "2019",
    ),
    Accelerator("A100 SXM 40 GB", "bfloat16", 312, 624, 19.5, 1555, *_A100, "2021"),
    Accelerator("A100 SXM 80 GB", "bfloat16", 312, 624, 19.5, 2039, *_A100, "2021"),
    Accelerator(
        "RTX 4090 24 GB", "bfloat16", 165.2, 330.4, 82.6, 1008, "NVIDIA Ada GPU Architecture, appendix A",
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf", "2023",
    ),
    Accelerator(
        "L4 24 GB", "bfloat16", 121, 242, 30.3, 300, f"NVIDIA L4 Tensor Core GPU {_HALF}",
        "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet", "2023",
    ),
    Accelerator(
        "H100 SXM 80 GB", "bfloat16", 989, 1979, 67, 3350, f"NVIDIA H100 Tensor Core GPU {_HALF}",
        "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet", "2023",
    ),
    Accelerator(
        "H200 SXM 141 GB", "bfloat16", 989, 1979, 67, 4800, f"NVIDIA H200 Tensor Core GPU {_HALF}",
        "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446", "2023",
    ),
    Accelerator(
        "B200 SXM (HGX)", "bfloat16", 2250, 4500, 75, 7700, "NVIDIA Blackwell Architecture Technical Brief, table 3",
        "https://nvdam.widen.net/s/xqt56dflgh/nvidia-blackwell-architecture-technical-brief", "2024",
    ),
    Accelerator(
        "MI300X 192 GB", "bfloat16", 1307.4, 2614.9, 163.4, 5300, "AMD Instinct MI300X Accelerator data sheet",
        f"{_AMD}/amd-instinct-mi300x-data-sheet.pdf", "2023",
    ),
    Accelerator(
        "TPU v5e 16 GB", "bfloat16", 197, None, None, 819, "Google Cloud TPU documentation, TPU v5e",
        "https://cloud.google.com/tpu/docs/v5e", "2024",
    ),
    Accelerator(
        "TPU v5p 95 GB", "bfloat16", 459, None, None, 2765, "Google Cloud TPU documentation, TPU v5p",
        "https://cloud.google.com/tpu/docs/v5p", "2024",
    ),
)
# fmt: on
ACCELERATORS = {row.name: row for row in _ROWS}
SPARSE = tuple(name for name, row in ACCELERATORS.items() if row.sparse)


@dataclasses.dataclass(frozen=True)
class SparsePeak:
    """One achieved rate set against two peaks of an accelerator."""

    accelerator: Accelerator = quantity("the accelerator, with the source of its figures")
    achieved: float = quantity("rate that a dense program reached", "TFLOP/s")
    of_dense: float = quantity("achieved over dense peak: the utilisation")
    of_sparse: float = quantity("achieved over sparse peak: half of it, and wrong for dense weights")


def sparse(
    *,
    accelerator: Annotated[str, Choice(SPARSE, help="those with a sparse peak")] = "H100 SXM 80 GB",
    achieved: Annotated[float, Range(1, 2250, log=True, unit="TFLOP/s", help="rate a dense program reached")] = 400.0,
) -> SparsePeak:
    """Trap: utilisation set against the sparse peak, which dense weights can never reach.

    >>> result = sparse()
    >>> round(result.of_dense, 2), round(result.of_sparse, 2)
    (0.4, 0.2)

    The sparse peak holds where two of every four weights are zero. Computed from `ACCELERATORS`, nothing is measured.
    Raises LabError where the achieved rate is above the dense peak, which no dense program can do.
    """
    row = ACCELERATORS[accelerator]
    if not achieved <= row.dense:
        limit = f"above the dense peak {show(row.dense)} TFLOP/s of {row.name}"
        raise LabError(f"achieved = {show(achieved)} TFLOP/s is {limit}: try {show(row.dense)}")
    return SparsePeak(row, achieved, achieved / row.dense, achieved / (row.sparse or math.nan))
