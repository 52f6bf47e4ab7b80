"""Keyed sampling inside vLLM: a logits processor that chooses every token itself, as the native engine does.

vLLM's own sampler cannot say what a `Completion` must hold. Its log-probs are either those of the
bare logits (`raw_logprobs`: temperature 1 only) or those after temperature and truncation together
(`processed_logprobs`), never both, and temperatures above 2 are refused. A logits processor gets the
logits of each step. This one draws with `rft_engine.decoding.token_sampler.TokenSampler` under the sample's key, notes
the token, its log-probability over the whole vocabulary and the log of the mass that was left, and
leaves vLLM a single token to pick. So a key gives the token here that it gives in the native
engine, whatever else is in the batch, and a request that is asked for again gives the same tokens.

Shape letters: B rows of vLLM's batch, S samples of the call, M `max_new_tokens`, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core import keyed_random
from rft_engine.decoding.token_sampler import TokenSampler
from rft_engine.decoding.trie_constraint import TrieSampler
from rft_engine.typed_lists import to_floats, to_ints

SAMPLE_ARGUMENT = "rft_sample"
"""Name under which a request's `SamplingParams.extra_args` carries the number of its sample."""


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens drawn for one sample, in order."""

    token_ids: list[int]
    logprobs: list[float]
    log_kept_mass: list[float]


@dataclass(frozen=True, slots=True)
class _Row:
    sample: int
    output: Sequence[int]
    """vLLM's own running list of the sample's tokens: its length is the number of the next one."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Rows whose next tokens are wanted."""

    samples_B: Tensor
    ages_B: Tensor
    uniforms_B: Tensor
    may_stop_B: Tensor | None

    def __getitem__(self, rows: Tensor) -> _Chosen:
        may_stop = None if self.may_stop_B is None else self.may_stop_B[rows]
        return _Chosen(self.samples_B[rows], self.ages_B[rows], self.uniforms_B[rows], may_stop)


class _Call:
    """Options, uniforms and results of one `generate` call."""

    def __init__(self, options: SamplingOptions, keys: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.options = options
        self._sampler = TokenSampler(options, vocab_size, device)
        self._first_sampler = TokenSampler(options.for_first_token, vocab_size, device)
        shape = (len(keys), options.max_new_tokens)
        self.uniforms_SM = keyed_random.uniforms(keys, options.max_new_tokens).to(device)
        self.tokens_SM = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs_SM = torch.zeros(shape, device=device)
        self.log_kept_mass_SM = torch.zeros(shape, device=device)

    def draw(self, logits_BV: Tensor, rows: Sequence[_Row]) -> Tensor:
        """[B] tokens, noted at their places; a place that is drawn again is overwritten."""
        # read anew at every step and not counted here: a request that was preempted comes back with what it had
        ages = [len(row.output) for row in rows]
        device = logits_BV.device
        samples_B = torch.tensor([row.sample for row in rows], device=device)
        ages_B = torch.tensor(ages, device=device)
        may_stop = [age >= self.options.min_new_tokens for age in ages]
        may_stop_B = None
        if self._sampler.has_stop_tokens and not all(may_stop):
            may_stop_B = torch.tensor(may_stop, device=device)
        chosen = _Chosen(samples_B, ages_B, self.uniforms_SM[samples_B, ages_B], may_stop_B)
        if self.options.first_token_temperature is None or all(ages):
            drawn = self._draw(logits_BV, chosen, is_first=False)
        else:
            drawn = self._draw_with_first(logits_BV, chosen)
        # by sample and age, not appended: rows of vLLM's batch move, and a token may be drawn again
        self.tokens_SM[samples_B, ages_B], self.logprobs_SM[samples_B, ages_B] = drawn[0], drawn[1]
        self.log_kept_mass_SM[samples_B, ages_B] = drawn[2]
        return drawn[0]

    def _draw(self, logits_BV: Tensor, chosen: _Chosen, *, is_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, log-probs and the log of the kept mass; `is_first`: at the temperature of first tokens."""
        sampler = self._first_sampler if is_first else self._sampler
        return sampler.draw(logits_BV, chosen.uniforms_B, chosen.may_stop_B)

    def _draw_with_first(self, logits_BV: Tensor, chosen: _Chosen) -> tuple[Tensor, Tensor, Tensor]:
        """Rows at their first token and the others, each at their own temperature."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        orders: list[Tensor] = []
        for is_first, chosen_B in ((True, chosen.ages_B == 0), (False, chosen.ages_B > 0)):
            rows = chosen_B.nonzero().squeeze(1)
            if rows.numel():
                parts.append(self._draw(logits_BV[rows], chosen[rows], is_first=is_first))
                orders.append(rows)
        # rows in the order of the batch again
        back = torch.cat(orders).argsort()
        tokens, logprobs, mass = (torch.cat(column)[back] for column in zip(*parts, strict=True))
        return tokens, logprobs, mass


class _ConstrainedCall(_Call):
    """Call constrained to a tree of sequences; the state before every token is kept: a token may be drawn again."""

    def __init__(
        self, options: SamplingOptions, keys: Sequence[int], vocab_size: int, device: torch.device, trie: TokenTrie
    ) -> None:
        super().__init__(options, keys, vocab_size, device)
        trie = trie.to(device)
        self._walk, self._first_walk = TrieSampler(options, trie), TrieSampler(options.for_first_token, trie)
        self._states_SM1 = TrieSampler.start(len(keys) * (options.max_new_tokens + 1), device).view(len(keys), -1)

    def _draw(self, logits_BV: Tensor, chosen: _Chosen, *, is_first: bool) -> tuple[Tensor, Tensor, Tensor]:
        states_B = self._states_SM1[chosen.samples_B, chosen.ages_B]
        walk = self._first_walk if is_first else self._walk
        *drawn, behind_B = walk.draw(logits_BV, chosen.uniforms_B, states_B)
        # one place further, so that the state before this token stays for another draw of it
        self._states_SM1[chosen.samples_B, chosen.ages_B + 1] = behind_B
        return drawn[0], drawn[1], drawn[2]


class KeyedSampler:
    """vLLM's V1 logits-processor protocol: `update_state`, then `apply`, once a step."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._call: _Call | None = None

    def begin(
        self,
        options: SamplingOptions,
        keys: Sequence[int],
        vocab_size: int,
        device: torch.device,
        constraint: TokenTrie | None = None,
    ) -> None:
        """Sample s of the requests to come is drawn under `keys[s]`; results of an earlier call are dropped."""
        arguments = (options, keys, vocab_size, device)
        self._call = _Call(*arguments) if constraint is None else _ConstrainedCall(*arguments, constraint)

    def take(self, samples: Sequence[int], lengths: Sequence[int]) -> list[DrawnTokens]:
        """Return the draws of these samples: the first `lengths[i]` tokens of `samples[i]`."""
        assert self._call is not None, "take before begin"
        chosen = torch.tensor(list(samples), dtype=torch.int64, device=self._call.tokens_SM.device)
        tables = (self._call.tokens_SM, self._call.logprobs_SM, self._call.log_kept_mass_SM)
        tokens_KM, logprobs_KM, mass_KM = (table[chosen].cpu() for table in tables)
        return [
            DrawnTokens(
                to_ints(tokens_KM[row, :length]), to_floats(logprobs_KM[row, :length]), to_floats(mass_KM[row, :length])
            )
            for row, length in enumerate(lengths)
        ]

    def update_state(self, batch_update: Any | None) -> None:
        """Follow the batch: requests that left, came and moved, in that order (vLLM's `BatchUpdate`)."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _prompt, output in batch_update.added:
            extra: dict[str, Any] = params.extra_args or {}
            sample = extra.get(SAMPLE_ARGUMENT)
            # a row of a request that is not ours must not keep the sample that was there before
            self._rows.pop(index, None)
            if sample is not None:
                self._rows[index] = _Row(int(sample), output)
        for source, target, direction in batch_update.moved:
            # both out before one goes in: source and target may change places
            moving, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moving is not None:
                self._rows[target] = moving
            if replaced is not None and direction.name == "SWAP":
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """[B, V] float32 in; the same tensor with 0 at each row's token and -inf elsewhere out.

        Rows of requests that are not ours (a warm-up) are left alone.
        """
        indices = sorted(index for index in self._rows if index < logits.shape[0])
        if self._call is None or not indices:
            return logits
        rows = [self._rows[index] for index in indices]
        if len(indices) == logits.shape[0]:
            # before the logits are overwritten in place
            tokens_B = self._call.draw(logits, rows)
            logits.fill_(-math.inf)
            return logits.scatter_(1, tokens_B.unsqueeze(1), 0.0)
        indices_B = torch.tensor(indices, device=logits.device)
        tokens_B = self._call.draw(logits[indices_B], rows)
        logits[indices_B] = -math.inf
        logits[indices_B, tokens_B] = 0.0
        return logits

    def is_argmax_invariant(self) -> bool:
        """The likeliest token changes: greedy decoding is done here too."""
        return False
