"""Packing of samples into tensors: assignment to ranks, micro-batches, concatenation without padding.

Nothing here changes a result: losses take denominators counted over the whole optimizer step,
so any cut and any assignment to ranks adds up to the same gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rft_algos.packed.packed_ids import packed_segment_ids
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.units import unit_lengths, units_of
from rft_trainer.data.media_cache import load_media
from rft_trainer.protocols import Collectives
from rft_trainer.records.flat_numbers import behind_zeros, flat_tensor
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample


def count(samples: Sequence[TrainingSample]) -> Counts:
    """Count the denominators of one optimizer step: tokens in the loss, sequences that have any, and units."""
    lengths = [sample.num_loss_tokens for sample in samples]
    return Counts(
        num_loss_tokens=sum(lengths),
        num_sequences=sum(length > 0 for length in lengths),
        num_units=len(units_of(samples)),
        loss_weight=_loss_weight(samples, lengths),
    )


def _loss_weight(samples: Sequence[TrainingSample], lengths: Sequence[int]) -> float | None:
    """Return the sum of weight x loss tokens; None where all weights are 1."""
    if all(sample.weight == 1.0 for sample in samples):
        return None
    # rounded once, so that the order of the samples does not show
    return math.fsum(sample.weight * length for sample, length in zip(samples, lengths, strict=True))


def assign_to_ranks(num_tokens: Sequence[int], world_size: int) -> list[list[int]]:
    """Assign the indices of units to ranks, balanced by tokens: longest first to the lightest rank.

    Deterministic, so every rank computes the same answer; within a rank the given order is kept.
    """
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    # ties by index and by rank: every rank must come to the same assignment
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        lightest = min(range(world_size), key=lambda rank: (loads[rank], rank))
        ranks[lightest].append(index)
        loads[lightest] += num_tokens[index]
    return [sorted(indices) for indices in ranks]


def rank_micro_batches(
    samples: Sequence[TrainingSample],
    rank: int,
    world_size: int,
    cut: Callable[[Sequence[int]], list[list[int]]],
) -> list[list[TrainingSample]]:
    """Return the samples of one rank in its micro-batches, units undivided.

    `cut` maps the units' numbers of tokens to the indices of each micro-batch.
    """
    units = units_of(samples)
    share = [units[index] for index in assign_to_ranks(unit_lengths(units), world_size)[rank]]
    return [[sample for i in indices for sample in share[i]] for indices in cut(unit_lengths(share))]


def num_filler_batches(
    num_tokens: Sequence[int], rank: int, world_size: int, cut: Callable[[Sequence[int]], list[list[int]]]
) -> int:
    """Return how many micro-batches this rank has fewer than the rank with the most; computed without communication."""
    shares = assign_to_ranks(num_tokens, world_size)
    # every rank computes the cuts of all ranks from the lengths alone
    num_batches = [len(cut([num_tokens[index] for index in share])) for share in shares]
    return max(num_batches) - num_batches[rank]


def filler_batches(
    samples: Sequence[TrainingSample],
    ranks: Collectives,
    cut: Callable[[Sequence[int]], list[list[int]]],
    device: torch.device | str,
) -> list[TokenBatch]:
    """Return a short batch for every micro-batch that this rank lacks, where forwards are collective operations."""
    if not samples:
        return []
    units = units_of(samples)
    num_batches = num_filler_batches(unit_lengths(units), ranks.rank, ranks.world_size, cut)
    # the shortest unit, because its result is thrown away; one batch stands for all of them
    shortest = min(units, key=lambda unit: sum(sample.num_tokens for sample in unit))
    return [pack(shortest, device)] * num_batches


def pack(
    samples: Sequence[TrainingSample], device: torch.device | str = "cpu", *, pin_memory: bool = False
) -> TokenBatch:
    """Concatenate samples to one packed batch. Response-only lists stand at the response, zeros at the prompt.

    `pin_memory` copies from page-locked memory, so that the host does not wait; on a CPU there is no copy.
    """
    pinned = pin_memory and torch.device(device).type == "cuda"

    not_finite: list[str] = []

    def to_device(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        # on the host, where it costs no wait for the device
        if name and not bool(tensor.isfinite().all()):
            not_finite.append(name)
        return tensor.pin_memory().to(device, non_blocking=True) if pinned else tensor.to(device)

    lengths = torch.tensor([sample.num_tokens for sample in samples])
    # at least 1: the first token of a sequence has nothing before it and cannot be predicted
    prompt_lengths = torch.tensor([max(sample.prompt_length, 1) for sample in samples])
    starts = lengths.cumsum(0) - lengths
    segment_ids = packed_segment_ids(lengths)
    positions = torch.arange(int(lengths.sum())) - starts[segment_ids]
    token_ids = flat_tensor((sample.token_ids for sample in samples), torch.int64)
    loss_mask = _learned(samples, positions >= prompt_lengths[segment_ids])
    on_host = torch.device(device).type == "cpu"
    return TokenBatch(
        token_ids_T=to_device(token_ids),
        positions_T=to_device(positions),
        segment_ids_T=to_device(segment_ids),
        loss_mask_T=to_device(loss_mask),
        advantages_T=to_device(_advantages(samples, segment_ids), "advantages"),
        old_logprobs_T=_per_token(samples, "old_logprobs", to_device),
        behaviour_logprobs_T=_per_token(samples, "behaviour_logprobs", to_device),
        reference_logprobs_T=_per_token(samples, "reference_logprobs", to_device),
        old_values_T=_per_token(samples, "old_values", to_device),
        returns_T=_per_token(samples, "returns", to_device),
        token_weights_T=_per_token(samples, "token_weights", to_device, otherwise=1.0),
        selected_T=_marks(samples, to_device),
        mm_inputs=_images(samples),
        row_weights_S=_row_weights(samples, to_device),
        unit_ids_S=_unit_ids(samples, to_device),
        sequence_numbers_SN=_sequence_numbers(samples, to_device),
        not_finite=not_finite[0] if not_finite else "",
        host=None if on_host else PackedTokens(token_ids, positions, segment_ids, loss_mask),
    )


def _learned(samples: Sequence[TrainingSample], response_T: torch.Tensor) -> torch.Tensor:
    """Return [T] bool: the response tokens without those that the samples' loss masks leave out."""
    kept_T = _per_token(samples, "loss_mask", lambda mask_T, _: mask_T.bool(), otherwise=1.0)
    return response_T if kept_T is None else response_T & kept_T


def _unit_ids(
    samples: Sequence[TrainingSample], to_device: Callable[[torch.Tensor, str], torch.Tensor]
) -> torch.Tensor | None:
    """Return [S]: the unit of each segment, counted from 0; None where every segment is a unit by itself."""
    if not any(sample.unit for sample in samples):
        return None
    sizes = [len(unit) for unit in units_of(samples)]
    return to_device(torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)), "")


def _sequence_numbers(
    samples: Sequence[TrainingSample], to_device: Callable[[torch.Tensor, str], torch.Tensor]
) -> torch.Tensor | None:
    """Return [S, N] float32: the numbers of each sample; None where none carries any."""
    if not any(sample.sequence_numbers for sample in samples):
        return None
    rows = [sample.sequence_numbers for sample in samples]
    assert len(set(map(len, rows))) == 1, "every sample of a batch carries as many numbers"
    return to_device(torch.tensor(rows, dtype=torch.float32), "sequence_numbers")


def _row_weights(
    samples: Sequence[TrainingSample], to_device: Callable[[torch.Tensor, str], torch.Tensor]
) -> torch.Tensor | None:
    """Return [S] float64, or None where all samples weigh 1."""
    if all(sample.weight == 1.0 for sample in samples):
        return None
    return to_device(torch.tensor([sample.weight for sample in samples], dtype=torch.float64), "weight")


def _images(samples: Sequence[TrainingSample]) -> tuple[Any, ...] | None:
    if all(sample.media is None for sample in samples):
        return None
    return tuple(load_media(sample.media) for sample in samples)


def _marks(
    samples: Sequence[TrainingSample], to_device: Callable[[torch.Tensor, str], torch.Tensor]
) -> torch.Tensor | None:
    marks_T = _per_token(samples, "selected", to_device, otherwise=0.0)
    return None if marks_T is None else marks_T != 0


def _advantages(samples: Sequence[TrainingSample], segment_ids_T: torch.Tensor) -> torch.Tensor:
    """Return [T] float32 advantages: one number for a whole sample, or 0 at the prompt and one a response token."""
    # one number a sample is spread by its segment: no list as long as the batch is built
    if not any(sample.token_advantages for sample in samples):
        return torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)[segment_ids_T]
    rows = (
        (sample.prompt_length, sample.token_advantages)
        if sample.token_advantages
        else (0, (sample.advantage,) * sample.num_tokens)
        for sample in samples
    )
    return behind_zeros(rows, torch.float32)


def _per_token(
    samples: Sequence[TrainingSample],
    name: str,
    to_device: Callable[[torch.Tensor, str], torch.Tensor],
    *,
    otherwise: float | None = None,
) -> torch.Tensor | None:
    """Return a response-only field as [T] float32, or None when no sample carries it.

    `otherwise` fills the responses of samples that do not carry it beside some that do.
    """
    # None rather than zeros: a term whose field nobody carries is left out of the loss
    if not any(getattr(sample, name) for sample in samples):
        return None
    rows = ((sample.prompt_length, _row(sample, name, otherwise)) for sample in samples)
    return to_device(behind_zeros(rows, torch.float32), name)


def _row(sample: TrainingSample, name: str, otherwise: float | None) -> tuple[float, ...]:
    num_response = sample.num_tokens - sample.prompt_length
    values: tuple[float, ...] = getattr(sample, name)
    if not values and otherwise is not None:
        values = (otherwise,) * num_response
    assert len(values) == num_response, f"sample {sample.sample_id} has no {name}, others of its micro-batch do"
    return values
