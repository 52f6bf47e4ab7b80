"""What goes to engine replicas and what comes back: samples to be drawn, as far as they are drawn already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rft_engine.prompt_checks import check_prompts, refusal
from rft_engine.sampling import SamplingOptions

DrawnReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The new tokens of one request; the three tuples have one entry a token, none where it had no turn."""

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    log_kept_mass: tuple[float, ...]
    finish_reason: DrawnReason
    """ "interrupted" = the call ended before the sample did; it goes on with another call."""
    weight_version: int
    """Of the weights that drew every one of these tokens."""


@dataclass(frozen=True, slots=True)
class DrawCall:
    """Samples to draw, one request each; all sequences have one entry a request.

    A sample that was begun elsewhere has what it drew at the end of its prefix, and their number as its start:
    its next token takes draw number `start` of its key's stream, so its tokens are those of one call.
    """

    prefixes: Sequence[Sequence[int]]
    keys: Sequence[int]
    starts: Sequence[int]
    budgets: Sequence[int]
    """Tokens that each may still have."""
    options: SamplingOptions
    """`max_new_tokens` is the largest budget."""

    def part(self, requests: Sequence[int]) -> DrawCall:
        """These requests of the call, in this order."""
        budgets = [self.budgets[i] for i in requests]
        return DrawCall(
            [self.prefixes[i] for i in requests],
            [self.keys[i] for i in requests],
            [self.starts[i] for i in requests],
            budgets,
            replace(self.options, max_new_tokens=max(budgets, default=1)),
        )

    def check(self, max_len: int, vocab_size: int) -> None:
        """Raise `OptionsError` for what no engine could draw."""
        num = len(self.prefixes)
        lengths = (num, len(self.keys), len(self.starts), len(self.budgets))
        assert len(set(lengths)) == 1, f"prefixes, keys, starts, budgets: {lengths}"
        self.options.check(vocab_size)
        for prefix, start, budget in zip(self.prefixes, self.starts, self.budgets, strict=True):
            check_prompts([prefix], budget, max_len, vocab_size)
            if budget < 1 or not 0 <= start < len(prefix):
                what = f"a request with budget {budget}, start {start} and {len(prefix)} tokens before it"
                raise refusal("engine.draw_request", what, "a prompt comes before what was drawn", "budget >= 1")
        begun = any(self.starts)
        if begun and (self.options.min_new_tokens or self.options.first_token_temperature is not None):
            why = "min_new_tokens and the first token's temperature count from the first token of a whole sample"
            raise refusal("engine.draw_resumed", "samples that were begun elsewhere", why, "--async_deterministic")
