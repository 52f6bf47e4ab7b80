"""Results of a finished batch of the in-process engine: completions on the host, and statistics."""

from __future__ import annotations

import statistics

import torch

from rft_engine.completions import Completion, EngineStats
from rft_engine.native.continuous_batch import ContinuousBatch
from rft_engine.protocols import CacheT
from rft_engine.typed_lists import to_floats, to_ints


def completions_of(batch: ContinuousBatch[CacheT], weight_version: int) -> list[Completion]:
    """Return the results as records, on the host; one copy from the device for each of the three tables."""
    lengths_S = torch.tensor(batch.lengths_S)
    tokens_SM = batch.tokens_SM.cpu()
    # one conversion for all samples: one a sample costs more than its numbers where responses are short
    drawn_SM = torch.arange(tokens_SM.shape[1]) < lengths_S[:, None]
    token_ids = to_ints(tokens_SM[drawn_SM])
    logprobs, mass = (to_floats(table_SM.cpu()[drawn_SM]) for table_SM in (batch.logprobs_SM, batch.log_kept_mass_SM))
    completions: list[Completion] = []
    start = 0
    for length, stopped in zip(batch.lengths_S, batch.stopped_S, strict=True):
        own = slice(start, start + length)
        completions.append(
            Completion(
                token_ids=tuple(token_ids[own]),
                logprobs=tuple(logprobs[own]),
                log_kept_mass=tuple(mass[own]),
                finish_reason="stop" if stopped else "length",
                weight_version=weight_version,
            )
        )
        start += length
    return completions


def stats_of(
    batch: ContinuousBatch[CacheT], num_prefill_tokens: int, rows: int, rows_asked: int, seconds: float
) -> EngineStats:
    """Figures of one call; `rows` were decoded at once, `rows_asked` were to be."""
    num_tokens, num_samples = sum(batch.lengths_S), len(batch.lengths_S)
    slots = batch.num_steps * rows
    return EngineStats(
        num_generated_tokens=num_tokens,
        num_prefill_tokens=num_prefill_tokens,
        num_decode_steps=batch.num_steps,
        # the first token of a sample comes from the prefill
        mean_occupancy=(num_tokens - num_samples) / slots if slots else 0.0,
        tail_ratio=max(batch.lengths_S) / statistics.median(batch.lengths_S),
        seconds=seconds,
        prefill_seconds=batch.prefill_seconds,
        rows=rows,
        rows_asked=rows_asked,
    )
