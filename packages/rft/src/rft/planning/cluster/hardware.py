"""GPUs and links that a cluster plan knows, each figure with its unit, its source, and whether it was measured.

Published figures are those of a datasheet or of another project's run. Nothing that follows from them was measured: a
time of this package is a prediction, and one of memory or of a link a lower bound, since it takes the rate of the
datasheet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rft_core.errors import OptionsError

Kind = Literal["measured", "published"]
GPUS_OF_MACHINE = 8


@dataclass(frozen=True, slots=True)
class Figure:
    """One constant with its unit and source."""

    name: str
    value: float
    unit: str
    kind: Kind
    source: str


_HOPPER = "NVIDIA, H100 and H200 Tensor Core GPU datasheets, SXM"
_TUNING = "NVIDIA/nccl, src/graph/tuning.cc: baseLat and hwLat, Simple protocol"
H100_MEMORY = Figure("memory of an H100", 79, "GiB", "published", f"{_HOPPER}: 80 GB, of which the driver shows 79 GiB")
H200_MEMORY = Figure("memory of an H200", 140, "GiB", "measured", "benchmarks/README.md, On a GPU: 143,771 MiB")
PEAK = Figure(
    "dense products in bfloat16", 989e12, "FLOP/s", "published", f"{_HOPPER}: 1,979 with sparsity, half without"
)
H100_HBM = Figure("memory bandwidth of an H100", 3.35e12, "bytes/s", "published", _HOPPER)
H200_HBM = Figure("memory bandwidth of an H200", 4.8e12, "bytes/s", "published", _HOPPER)
NVLINK = Figure("NVLink 4, one way", 450e9, "bytes/s", "published", f"{_HOPPER}: 900 GB/s both ways")
NETWORK = Figure(
    "InfiniBand NDR, one port a GPU, one way", 50e9, "bytes/s", "published", "NVIDIA, ConnectX-7 datasheet: 400 Gb/s"
)
PCIE = Figure("PCIe 5.0 x16, one way", 64e9, "bytes/s", "published", f"{_HOPPER}: 128 GB/s both ways")
TRAINING = Figure(
    "training of a dense model",
    297e12,
    "FLOP/s",
    "published",
    "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B, FSDP2 on 8 H100, 8,192 tokens, not "
    "compiled: 5,762 tokens/s a GPU, times F(8192) / 8192 of the equations below",
)
RING_START = Figure("start of a collective", 8.4e-6, "s", "published", _TUNING)
RING_NVLINK = Figure("step of a ring within a machine", 3.4e-6, "s", "published", _TUNING)
RING_NETWORK = Figure("step of a ring between machines", 14e-6, "s", "published", _TUNING)
TREE_STEP = Figure("step of a tree", 28e-6, "s", "published", _TUNING)
FIGURES: tuple[Figure, ...] = (
    PEAK,
    TRAINING,
    H100_MEMORY,
    H200_MEMORY,
    H100_HBM,
    H200_HBM,
    NVLINK,
    NETWORK,
    PCIE,
    RING_START,
    RING_NVLINK,
    RING_NETWORK,
    TREE_STEP,
)
"""All constants that a cluster plan is computed from."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, as far as a plan needs it."""

    name: str
    memory: Figure
    """GiB."""
    bandwidth: Figure
    """Of its memory."""


GPUS: Mapping[str, Gpu] = {
    "H100": Gpu("H100", H100_MEMORY, H100_HBM),
    "H200": Gpu("H200", H200_MEMORY, H200_HBM),
}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines of `GPUS_OF_MACHINE` equal GPUs each, or a part of one."""

    num_gpus: int
    gpu: Gpu

    @property
    def num_machines(self) -> int:
        """Return the number of machines."""
        return -(-self.num_gpus // GPUS_OF_MACHINE)

    @property
    def gpus_of_machine(self) -> int:
        """Return the GPUs of each machine."""
        return min(self.num_gpus, GPUS_OF_MACHINE)

    def __str__(self) -> str:
        return f"{self.num_gpus}x{self.gpu.name}"


def parse_cluster(text: str) -> Cluster:
    """Read a cluster, such as `64xH100`.

    Raises:
        OptionsError: another form, a GPU that is not known, or machines that are not full.
    """
    match = re.fullmatch(r"(\d+)x(\w+)", text)
    if match is None or match[2].upper() not in GPUS:
        raise _refused(text, f"it is a number of GPUs and their kind, of {', '.join(GPUS)}")
    count = int(match[1])
    if count < 1 or (count > GPUS_OF_MACHINE and count % GPUS_OF_MACHINE):
        raise _refused(text, f"machines have {GPUS_OF_MACHINE} GPUs: a multiple of that, or fewer")
    return Cluster(count, GPUS[match[2].upper()])


def _refused(text: str, why: str) -> OptionsError:
    what = f"--cluster = {text!r}"
    return OptionsError(code="plan.cluster", what=what, where="command line", why=why, do="--cluster 64xH100")
