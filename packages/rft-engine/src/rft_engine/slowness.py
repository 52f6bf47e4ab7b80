"""Diagnosis of an engine's statistics: the figure that limits its speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rft_engine.completions import EngineStats

LONG_TAIL = 3.0
"""Longest over median completion, above which idle rows are the tail's doing."""
_SHARE = 0.3  # of the wall time that a cause must take before it is named
_PREEMPTED = 0.05  # preemptions for each row that are worth naming

Cause = Literal["nothing", "preemptions", "prefill", "tail", "memory", "occupancy", "forward"]
NO_LOSS: tuple[Cause, ...] = ("nothing", "forward")
"""Causes that lose no time: no call, or a call at the speed of the model's forward."""


@dataclass(frozen=True, slots=True)
class SlowestReason:
    """Limiting figure of a call: its cause, value and text."""

    cause: Cause
    value: float
    """Of the figure that the cause is read from."""
    text: str
    """The figure with its value, and what would help."""


def slowest_reason(stats: EngineStats) -> SlowestReason:
    """Return the cause of most of the time that a call lost.

    Prefill costs its share of the wall time. Of the rest, idle rows cost 1 - occupancy, attributed to a long tail
    where the longest completion is `LONG_TAIL` times the median, to the memory where it held fewer rows than asked,
    and else to too few samples. A cause of less than three tenths is not named: then the forward itself is the limit.

    Args:
        stats: of one `generate`.

    Returns:
        The cause with its figure.
    """
    if not stats.num_generated_tokens:
        return SlowestReason("nothing", 0.0, "no tokens were generated")
    if stats.num_preemptions and stats.num_preemptions > _PREEMPTED * max(stats.rows, 1):
        words = (
            f"{stats.num_preemptions} preemptions: the cache is too small for its rows; a smaller --engine_max_rows "
            "or a larger --engine_mem_util"
        )
        return SlowestReason("preemptions", float(stats.num_preemptions), words)
    prefill = _prefill_share(stats)
    idle = (1.0 - prefill) * (1.0 - stats.mean_occupancy) if stats.num_decode_steps else 0.0
    if prefill >= max(idle, _SHARE):
        words = (
            f"prefill share {prefill:.2f}: prompts cost more than drawing; with a larger --n_samples_per_prompt more "
            "samples share one"
        )
        return SlowestReason("prefill", prefill, words)
    if idle >= _SHARE and stats.tail_ratio >= LONG_TAIL:
        words = f"tail ratio {stats.tail_ratio:.1f}: most rows wait for the longest; a smaller --generate_max_len"
        return SlowestReason("tail", stats.tail_ratio, words)
    # before idle rows: where the memory held fewer rows, more samples would only wait
    if stats.rows < stats.rows_asked:
        words = (
            f"{stats.rows} rows of {stats.rows_asked} fit into the memory: end other programs on the device, or a "
            "smaller --generate_max_len"
        )
        return SlowestReason("memory", stats.rows / stats.rows_asked, words)
    if idle >= _SHARE:
        words = f"occupancy {stats.mean_occupancy:.2f}: rows are idle; a larger --rollout_batch_size"
        return SlowestReason("occupancy", stats.mean_occupancy, words)
    words = f"{stats.tokens_per_second:.0f} tokens per second with {stats.mean_occupancy:.2f} of the rows at work"
    return SlowestReason("forward", stats.tokens_per_second, f"{words}: the model's forward is the limit")


def _prefill_share(stats: EngineStats) -> float:
    """Return the prefill's share of the wall time where it is known, else of the tokens that went through the model."""
    if stats.prefill_seconds is not None and stats.seconds:
        return min(stats.prefill_seconds / stats.seconds, 1.0)
    return stats.num_prefill_tokens / (stats.num_prefill_tokens + stats.num_generated_tokens)
