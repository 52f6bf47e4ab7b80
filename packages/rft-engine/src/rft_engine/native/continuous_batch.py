"""Continuous batching: rows enter with a prefill, get one token a step, and leave when they are done.

Between two changes of the batch is a segment of steps during which the rows stay as they are.
A step keeps its tokens and figures as tensors in a list; they are written into the results when the
segment ends, and become Python lists once, at the end of the call. Nothing per token runs in
Python but the loop itself.

Shape letters: B rows of the batch now, S samples of the call, M `max_new_tokens`, V vocabulary,
N steps of a segment, P prompts of one prefill, L tokens of the longest of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, TypeAlias

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import keyed_random
from rft_engine.decoding.token_sampler import TokenSampler
from rft_engine.native.scheduler import PrefillScheduler, PromptCopies
from rft_engine.protocols import CacheT, DecodableModel
from rft_engine.typed_lists import to_ints

SampleTensors: TypeAlias = tuple[Tensor, ...]
"""Tokens, their log-probs and the log of the mass they were drawn from, [B] each; more in a constrained batch."""

_LEAVING_SHARE = 5  # one row in five must be done before the cache is compacted, which copies all of it


class ContinuousBatch(Generic[CacheT]):
    """All samples of one `generate` call."""

    max_segment_steps = 64
    """Steps after which results are looked at, at the latest."""

    def __init__(
        self,
        model: DecodableModel[CacheT],
        cache: CacheT,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[int],
        options: SamplingOptions,
        device: torch.device,
        budgets: Sequence[int],
    ) -> None:
        """Sample s, counted over all prompts, draws under `sample_keys[s]` and has at most `budgets[s]` tokens."""
        self._model, self._cache, self._prompts, self._keys = model, cache, prompts, sample_keys
        self._options, self._device = options, device
        self._sampler = TokenSampler(options, model.vocab_size, device)
        self._first_sampler = TokenSampler(options.for_first_token, model.vocab_size, device)
        shape = (len(sample_keys), options.max_new_tokens)
        self.tokens_SM = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs_SM = torch.zeros(shape, device=device)
        self.log_kept_mass_SM = torch.zeros(shape, device=device)
        self.lengths_S = list(budgets)
        self._budgets = budgets
        self.media: Sequence[object | None] | None = None
        """Images of each prompt, None where it has none; None: no prompt has any."""
        self.stopped_S = [False] * len(sample_keys)
        self.num_steps, self.prefill_seconds = 0, 0.0
        self._ends_early = self._sampler.has_stop_tokens
        self._samples: list[int] = []
        self._ages: list[int] = []
        self._last_B = torch.zeros(0, dtype=torch.int64, device=device)
        self._alive_B = torch.zeros(0, dtype=torch.bool, device=device)
        self._uniforms_BM = torch.zeros((0, options.max_new_tokens), dtype=torch.float64, device=device)

    def run(self, queue: PrefillScheduler) -> None:
        """Run until every sample has stopped or reached its budget."""
        while self.advance(queue):
            pass

    def advance(self, queue: PrefillScheduler) -> bool:
        """Read prompts that fit, else decode a segment; False when nothing is left to do."""
        self._retire()
        if pieces := queue.take(self._cache.max_rows - len(self._samples)):
            started = time.perf_counter()
            self._admit(pieces)
            self.prefill_seconds += time.perf_counter() - started
        # only when nothing can enter: a segment with free rows wastes a part of every step
        elif self._samples:
            self._decode_segment(self._num_done_to_leave(queue))
        else:
            return False
        return True

    def _admit(self, pieces: Sequence[PromptCopies]) -> None:
        """Read prompts and draw the first token of each of their samples."""
        lengths = [piece.length for piece in pieces]
        # padded on the right, where the causal mask hides it from the prompt's own tokens
        tokens_PL = torch.zeros((len(pieces), max(lengths)), dtype=torch.int64)
        for row, piece in zip(tokens_PL, pieces, strict=True):
            row[: piece.length] = torch.tensor(self._prompts[piece.prompt_index], dtype=torch.int64)
        copies = [piece.num_copies for piece in pieces]
        lengths_P = torch.tensor(lengths, device=self._device)
        seen = [] if self.media is None else [[self.media[piece.prompt_index] for piece in pieces]]
        logits_PV = self._model.prefill(self._cache, tokens_PL.to(self._device), lengths_P, copies, *seen)
        samples = [s for piece in pieces for s in range(piece.first_sample, piece.first_sample + piece.num_copies)]
        # the whole stream of each sample as it enters: token t takes column t, whatever else is in the batch
        uniforms_BM = self._uniforms_of(samples).to(self._device)
        # a prompt is read once for all of its samples
        logits_BV = logits_PV.repeat_interleave(torch.tensor(copies, device=self._device), dim=0)
        drawn = self._draw_first(logits_BV, uniforms_BM[:, 0])
        self._record(samples, [0] * len(samples), [drawn])
        self._samples += samples
        self._ages += [1] * len(samples)
        self._last_B = torch.cat([self._last_B, drawn[0]])
        self._alive_B = torch.cat([self._alive_B, ~self._has_ended(drawn)])
        self._uniforms_BM = torch.cat([self._uniforms_BM, uniforms_BM])

    def _uniforms_of(self, samples: Sequence[int]) -> Tensor:
        """[B, M] float64: the draws of samples that enter."""
        return keyed_random.uniforms([self._keys[sample] for sample in samples], self._options.max_new_tokens)

    def _decode_segment(self, num_done_to_leave: int) -> None:
        """Decode with an unchanged set of rows, until enough are done or one has no room for more."""
        left = sorted(self._budgets[sample] - age for sample, age in zip(self._samples, self._ages, strict=True))
        enough = left[min(num_done_to_leave, len(left)) - 1]  # so many steps end so many budgets
        # a row that is done but still here is drawn on, so the oldest row must not pass the end of the tables
        num_steps = min(self.max_segment_steps, self._options.max_new_tokens - max(self._ages), enough)
        # one gather a segment: rows have different ages, so a step's draws stand in different columns
        uniforms_NB = self._uniforms_BM.gather(1, self._columns(self._ages, num_steps)).T.contiguous()
        drawn: list[SampleTensors] = []
        for step in range(num_steps):
            logits_BV = self._model.step(self._cache, self._last_B)
            drawn.append(self._draw(logits_BV, uniforms_NB[step], step))
            self._last_B = drawn[-1][0]
            if self._ends_early:
                self._alive_B = self._alive_B & ~self._has_ended(drawn[-1])
                # waits for the device at every step, hence only where a row can end before its budget
                if len(self._samples) - int(self._alive_B.sum()) >= num_done_to_leave:
                    break
            if self._is_interrupted():
                break
        self.num_steps += len(drawn)
        self._record(self._samples, self._ages, drawn)
        self._ages = [age + len(drawn) for age in self._ages]

    def _is_interrupted(self) -> bool:
        """Return True when the segment must end with this step, whatever its planned length."""
        return False

    def _draw_first(self, logits_BV: Tensor, uniforms_B: Tensor) -> SampleTensors:
        """The first token of rows that enter."""
        return self._first_sampler.draw(logits_BV, uniforms_B, self._may_stop([0] * logits_BV.shape[0], 0))

    def _draw(self, logits_BV: Tensor, uniforms_B: Tensor, step: int) -> SampleTensors:
        """The token of step `step` of a segment."""
        return self._sampler.draw(logits_BV, uniforms_B, self._may_stop(self._ages, step))

    def _has_ended(self, drawn: SampleTensors) -> Tensor:
        """Return a bool tensor in the shape of the tokens: True where the token completes its row."""
        return self._sampler.is_stop_V[drawn[0]]

    def _record(self, samples: list[int], ages: list[int], drawn: Sequence[SampleTensors]) -> None:
        """Write the columns of a segment into the results, and record which samples stopped at which token.

        A row that stopped earlier or spent its budget, and has not left yet, writes behind its end, where nothing
        is read.
        """
        rows_B1 = torch.tensor(samples, device=self._device).unsqueeze(1)
        columns_BN = self._columns(ages, len(drawn))
        together = tuple(torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True))
        self.tokens_SM[rows_B1, columns_BN], self.logprobs_SM[rows_B1, columns_BN] = together[0], together[1]
        self.log_kept_mass_SM[rows_B1, columns_BN] = together[2]
        if not self._ends_early:
            return
        is_stop_BN = self._has_ended(together)
        # argmax gives the first of equals, so the earliest stop; one copy to the host a segment, not one a token
        first_B = to_ints(torch.where(is_stop_BN.any(1), is_stop_BN.int().argmax(1), -1))
        for sample, age, first in zip(samples, ages, first_B, strict=True):
            # a stop token behind the budget was drawn only because the row had not left yet
            ends_within = 0 <= first < self._budgets[sample] - age
            if ends_within and not self.stopped_S[sample]:
                self.stopped_S[sample] = True
                self.lengths_S[sample] = age + first + 1

    def _retire(self) -> None:
        """Take the rows that are done out of the cache, if there are any."""
        staying = [
            row
            for row, (sample, age) in enumerate(zip(self._samples, self._ages, strict=True))
            if age < self._budgets[sample] and not self.stopped_S[sample]
        ]
        if len(staying) == len(self._samples):
            return
        rows = torch.tensor(staying, dtype=torch.int64, device=self._device)
        # one compaction for all rows that are done: each one copies the cache
        self._cache.keep(rows)
        self._samples = [self._samples[row] for row in staying]
        self._ages = [self._ages[row] for row in staying]
        self._keep(rows)

    def _keep(self, rows: Tensor) -> None:
        """Keep only these rows of the per-row state, in their order."""
        self._last_B, self._alive_B = self._last_B[rows], self._alive_B[rows]
        self._uniforms_BM = self._uniforms_BM[rows]

    def _num_done_to_leave(self, queue: PrefillScheduler) -> int:
        """Rows that must be done before the batch changes: a fifth, and as many as the next prompt lacks."""
        num_rows = len(self._samples)
        # all samples of a prompt enter together: fewer free rows than it needs would be of no use
        lacking = queue.next_num_rows - (self._cache.max_rows - num_rows) if queue.next_num_rows else 0
        return max(-(-num_rows // _LEAVING_SHARE), lacking)

    def _columns(self, ages: list[int], num_steps: int) -> Tensor:
        """[B, N] int64: where each row's next tokens go."""
        return torch.tensor(ages, device=self._device).unsqueeze(1) + torch.arange(num_steps, device=self._device)

    def _may_stop(self, ages: list[int], step: int) -> Tensor | None:
        """[B] bool: rows old enough to stop; None when all are."""
        # None spares the sampler the distribution without stop tokens, which most steps do not need
        if not self._sampler.has_stop_tokens or min(ages) + step >= self._options.min_new_tokens:
            return None
        if max(ages) + step < self._options.min_new_tokens:
            # the usual case: a list of all rows made a tensor at every step takes five times as long
            return torch.zeros(len(ages), dtype=torch.bool, device=self._device)
        return torch.tensor([age + step >= self._options.min_new_tokens for age in ages], device=self._device)
