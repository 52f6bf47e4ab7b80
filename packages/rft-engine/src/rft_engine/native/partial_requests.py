"""Requests and results of engine replicas: samples to draw, including those that are partly drawn already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.request_checks import check_prompts, refusal
from rft_engine.weight_sync.shared_images import SharedImage

DrawnReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class SampledTokens:
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
class SampleRequests:
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
    media: Sequence[int] = ()
    """For each request the place of its prompt's images in `shown`, -1 where it has none; empty: none has any."""
    shown: Sequence[SharedImage] = ()
    """Images of prompts, no two the same."""
    constraint: TokenTrie | None = None
    """Every completion is one of its sequences, whole; such samples are drawn from their first token to their last."""

    def part(self, requests: Sequence[int]) -> SampleRequests:
        """These requests of the call, in this order."""
        budgets = [self.budgets[i] for i in requests]
        media = [self.media[i] for i in requests] if self.media else []
        # images are numbered anew: a part carries only those of its own requests
        new_index = {index: number for number, index in enumerate(sorted({index for index in media if index >= 0}))}
        return SampleRequests(
            [self.prefixes[i] for i in requests],
            [self.keys[i] for i in requests],
            [self.starts[i] for i in requests],
            budgets,
            # the cache of a part is sized by its own largest budget
            replace(self.options, max_new_tokens=max(budgets, default=1)),
            [new_index.get(index, -1) for index in media] if new_index else [],
            [self.shown[index] for index in new_index],
            self.constraint,
        )

    def contexts(self) -> list[tuple[int, ...]]:
        """Return the context of each request: image index, then prefix.

        Requests with equal contexts share one prefill; equal tokens may belong to different images.
        """
        indices = self.media or [-1] * len(self.prefixes)
        return [(index, *prefix) for index, prefix in zip(indices, self.prefixes, strict=True)]

    def media_of(self, request: int) -> int:
        """The place of a request's images in `shown`; -1 without any."""
        return self.media[request] if self.media else -1

    def fields(self) -> dict[str, Any]:
        """JSON for a replica's process."""
        return {
            "prefixes": [list(prefix) for prefix in self.prefixes],
            "keys": list(self.keys),
            "starts": list(self.starts),
            "budgets": list(self.budgets),
            "options": asdict(self.options),
            "media": list(self.media),
            "shown": [dict(one.plain) for one in self.shown],
            "constraint": None if self.constraint is None else self.constraint.as_lists(),
        }

    def check(self, max_len: int, vocab_size: int) -> None:
        """Raise `OptionsError` for what no engine could draw."""
        num = len(self.prefixes)
        lengths = (num, len(self.keys), len(self.starts), len(self.budgets), len(self.media) or num)
        assert len(set(lengths)) == 1, f"prefixes, keys, starts, budgets, media: {lengths}"
        self.options.check_vocabulary(vocab_size)
        for prefix, start, budget in zip(self.prefixes, self.starts, self.budgets, strict=True):
            check_prompts([prefix], budget, max_len, vocab_size)
            if budget < 1 or not 0 <= start < len(prefix):
                what = f"a request with budget {budget}, start {start} and {len(prefix)} tokens before it"
                raise refusal("engine.draw_request", what, "a request begins with its prompt", "budget >= 1")
        begun = any(self.starts)
        if begun and self.constraint is not None:
            why = "a sequence of a token trie is drawn whole, so that it can be checked"
            what = "constrained samples that were started elsewhere"
            raise refusal("engine.draw_constrained", what, why, "--async_deterministic")
        # the draw counts tokens of this call, so a resumed sample would be taken for a new one
        if begun and (self.options.min_new_tokens or self.options.first_token_temperature is not None):
            why = "min_new_tokens and the first token's temperature count from the first token of a whole sample"
            raise refusal("engine.draw_resumed", "samples that were started elsewhere", why, "--async_deterministic")
