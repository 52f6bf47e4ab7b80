"""Out of memory: which errors mean it, and the error of a step that no smaller micro-batch can save."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rft_core.errors import ServiceError
from rft_trainer.batches.memory_use import MemoryUse
from rft_trainer.batches.units import MicroBatching
from rft_trainer.protocols import Collectives
from rft_trainer.records.rollouts import TrainingSample

_WORDS = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
"""What torch's CPU allocator, cuBLAS and older CUDA errors say; the CUDA allocator has a class of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory of the device or of the host ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _WORDS)


def longest_sample(samples: Sequence[TrainingSample]) -> str:
    """Return id and length of the longest of some samples."""
    longest = max(samples, key=lambda sample: sample.num_tokens)
    return f"{longest.sample_id}, of {longest.num_tokens:,} tokens"


def no_split_left(limits: MicroBatching, longest: str, collectives: Collectives, use: MemoryUse | None) -> ServiceError:
    """Return the error for micro-batches of one unit that do not fit, of which `longest` is the longest.

    `use` is what holds the memory of this rank; None where it ran out on another one.
    """
    return ServiceError(
        code="memory.micro_batch",
        what=_what(limits, longest, use),
        where=f"rank {collectives.rank}, or another of {collectives.world_size}",
        why="a micro-batch of one sample is not divided further",
        state="no weight was changed by this step",
        do="--gradient_checkpointing, or shorter samples (sft: --max_len; rl: --generate_max_len, --prompt_max_len)",
    )


def no_room_in_collective(
    limits: MicroBatching, longest: str, collectives: Collectives, use: MemoryUse, remedy: str
) -> ServiceError:
    """Return the error for memory that runs out on one rank while the others wait in the same forward or backward."""
    return ServiceError(
        code="memory.collective_forward",
        what=_what(limits, longest, use),
        where=f"rank {collectives.rank} of {collectives.world_size}",
        why="with this way to divide the model every forward and backward exchanges tensors with other ranks, which "
        "wait in it: the ranks cannot agree to go on with smaller micro-batches",
        state="no weight was changed by this step",
        do=remedy,
    )


def _what(limits: MicroBatching, longest: str, use: MemoryUse | None) -> str:
    holders = f"; {use}" if use is not None else ""
    where = f"in the forward or backward pass, micro-batches of {limits}"
    return f"out of memory {where}; the longest sample is {longest}{holders}"
