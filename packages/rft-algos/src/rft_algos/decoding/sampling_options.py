"""The sampling options of completions: one record for the trainer, the engines and their processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rft_core.errors import OptionsError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling options and length limits of completions, the same for all completions of one call.

    Example::

        options = SamplingOptions(temperature=1.0, max_new_tokens=32, stop_token_ids=(2,))
        greedy = replace(options, temperature=0.0)

    Raises:
        OptionsError: a value out of its range.
    """

    temperature: float
    """Divides the logits; 0 = greedy, which uses no key."""
    max_new_tokens: int
    """Budget of each completion, in tokens, at least 1."""
    stop_token_ids: tuple[int, ...] = ()
    """Each ends its completion and is part of it."""
    top_p: float = 1.0
    """Draw only among the likeliest tokens that hold this probability together; 1 = all."""
    top_k: int = 0
    """Draw only among this many likeliest tokens; 0 or -1 = all."""
    min_p: float = 0.0
    """Draw only among tokens at least this share as likely as the likeliest; 0 = all."""
    min_new_tokens: int = 0
    """Tokens before which no stop token is drawn. The mass that this takes away counts in `log_kept_mass`."""
    first_token_temperature: float | None = None
    """Temperature of the first token of each completion (FIRE, arXiv 2410.21236), whose log-prob is then that of the
    distribution it was drawn from; None = `temperature`."""

    def __post_init__(self) -> None:
        limits = (
            ("temperature", self.temperature, 0.0 <= self.temperature < math.inf, "0 (greedy) or above", "1.0"),
            (
                "first_token_temperature",
                self.first_token_temperature,
                self.first_token_temperature is None or 0.0 < self.first_token_temperature < math.inf,
                "above 0, or None for the same temperature at every token",
                "None",
            ),
            ("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1 (all)", "1.0"),
            ("top_k", self.top_k, self.top_k >= -1, "1 or above, 0 or -1 (all)", "0"),
            ("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 (all) to 1", "0.0"),
            ("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "1 or above", "1"),
            (
                "min_new_tokens",
                self.min_new_tokens,
                0 <= self.min_new_tokens <= self.max_new_tokens,
                f"0 to max_new_tokens = {self.max_new_tokens}",
                "0",
            ),
        )
        for name, value, is_allowed, allowed, remedy in limits:
            if not is_allowed:
                raise _refusal(name, f"{name} = {value}", f"allowed: {allowed}", f"{name}={remedy}")

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> SamplingOptions:
        """Make the record of its fields after JSON, which has lists in the place of tuples."""
        values: dict[str, Any] = {**fields, "stop_token_ids": tuple(fields["stop_token_ids"])}
        return cls(**values)

    @property
    def for_first_token(self) -> SamplingOptions:
        """The options under which the first token of a completion is drawn."""
        return self if self.first_token_temperature is None else replace(self, temperature=self.first_token_temperature)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `OptionsError` for stop tokens that a model of `vocab_size` tokens does not have, or that are all."""
        outside = [token for token in self.stop_token_ids if not 0 <= token < vocab_size]
        if outside:
            allowed = f"a stop token is one of the model's {vocab_size} tokens, 0 to {vocab_size - 1}"
            kept = tuple(token for token in self.stop_token_ids if token not in outside)
            raise _refusal("stop_token_ids", f"stop token {outside[0]}", allowed, f"stop_token_ids={kept}")
        if self.min_new_tokens > 0 and len(set(self.stop_token_ids)) == vocab_size:
            allowed = "min_new_tokens needs a token that does not stop"
            raise _refusal("stop_token_ids", "every token is a stop token", allowed, "min_new_tokens=0")


def _refusal(name: str, what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(
        code="engine.sampling_option",
        what=what,
        where=f"SamplingOptions({name}=...)",
        why=why,
        state="nothing was generated",
        do=remedy,
    )
