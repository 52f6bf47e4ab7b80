"""Results of an engine: completions, and statistics of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation; the three tuples have one entry a token.

    `logprobs[t]` is log p(token t | prompt and earlier tokens) of the logits divided by the
    temperature, over the whole vocabulary: what top-p, top-k, min-p or min_new_tokens took away
    does not change it. `log_kept_mass[t]` is the log of the probability that was left to draw
    from, 0 where nothing was taken away; `logprobs[t] - log_kept_mass[t]` is the log-probability
    with which the token was drawn.

    Example::

        Completion(token_ids=(7, 2), logprobs=(-0.51, -1.2), log_kept_mass=(0.0, 0.0),
                   finish_reason="stop", weight_version=3)
    """

    token_ids: tuple[int, ...]
    """The stop token is the last one when it was sampled."""
    logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    finish_reason: FinishReason
    """"stop" = a stop token was sampled; "length" = `max_new_tokens` were reached without one."""
    weight_version: int
    """Version of the weights that sampled every one of these tokens."""

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.logprobs), len(self.log_kept_mass))
        if len(set(lengths)) != 1:
            raise ValueError(f"completion: token_ids, logprobs, log_kept_mass have lengths {lengths}")


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of the engine's last `generate`; all 0 before the first."""

    num_generated_tokens: int = 0
    """Tokens of the completions."""
    num_prefill_tokens: int = 0
    """Prompt tokens that were read, padding left out; a prompt counts once for all its samples."""
    num_decode_steps: int = 0
    """Forward passes of one token for every row."""
    mean_occupancy: float = 0.0
    """Rows that still needed their token, as a share of the rows that could have been there, over all steps."""
    tail_ratio: float = 0.0
    """Longest completion over the median one, in tokens: how long the slowest keeps the others waiting."""
    seconds: float = 0.0
    """Wall time."""
    prefill_seconds: float | None = None
    """Of these, those spent on prompts; None where the engine does not tell."""
    num_preemptions: int | None = None
    """Sequences that lost their place to others and were read again; None where the engine does not tell."""
    rows: int = 0
    """Sequences that could be decoded at once."""
    rows_asked: int = 0
    """Sequences that were to be: fewer rows than that mean that the memory holds no more."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the completions over wall time."""
        return self.num_generated_tokens / self.seconds if self.seconds else 0.0
