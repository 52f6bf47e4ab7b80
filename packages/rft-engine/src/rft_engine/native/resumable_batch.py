"""Resumable generation: an in-process engine whose calls can be interrupted and continued.

Between two steps of a batch a call may be ended from outside. What its samples have by then is handed
out, and a later call, on this engine or another, under these weights or newer ones, resumes them: the keys
and values are computed again from the prompt with all that was drawn, and token number t of a sample
takes draw number t of its key as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rft_core import keyed_random
from rft_engine.native.constrained_batch import ConstrainedBatch
from rft_engine.native.continuous_batch import ContinuousBatch
from rft_engine.native.engine import NativeEngine
from rft_engine.native.memory_budget import CacheRequest
from rft_engine.native.partial_requests import DrawnReason, SampledTokens, SampleRequests
from rft_engine.native.results import stats_of
from rft_engine.native.scheduler import PrefillScheduler
from rft_engine.protocols import CacheT
from rft_engine.typed_lists import to_floats, to_ints


class ResumableBatch(ContinuousBatch[CacheT]):
    """A batch in which sample s draws its next token with draw `starts[s]` of its stream."""

    max_segment_steps = 16
    """Few: a trainer may wait for a sample that has ended."""

    def __init__(self, starts: Sequence[int], interrupted: Callable[[], bool], *arguments: Any, is_tight: bool) -> None:
        """Make a batch that can be interrupted between two steps.

        Args:
            starts: of each sample.
            interrupted: whether the call is to end, asked after every step.
            *arguments: of `ContinuousBatch`.
            is_tight: a row that has ended and goes on for a while, as rows do, would not fit into the cache.
        """
        super().__init__(*arguments)
        self._starts, self._interrupted, self._is_tight, self._reported = starts, interrupted, is_tight, set[int]()

    def _uniforms_of(self, samples: Sequence[int]) -> Tensor:
        num = self._options.max_new_tokens
        rows = torch.empty((len(samples), num), dtype=torch.float64)
        first_draws = [self._starts[sample] for sample in samples]
        starts = torch.tensor(first_draws)
        keys = torch.tensor([self._keys[sample] for sample in samples])
        for start in sorted(set(first_draws)):
            is_same_start_S = starts == start
            # one call for each first draw: token number t takes draw number t of its key's stream
            rows[is_same_start_S] = keyed_random.uniforms(keys[is_same_start_S], num, start)
        return rows

    @property
    def cache(self) -> CacheT:
        """Cache that holds the rows of the batch."""
        return self._cache

    def _is_interrupted(self) -> bool:
        return self._interrupted()

    def _num_done_to_leave(self, queue: PrefillScheduler) -> int:
        # a row may be at the end of the cache with its last token, so it must leave before the next step
        return 1 if self._is_tight else super()._num_done_to_leave(queue)

    def newly_done(self) -> list[int]:
        """Return the samples that have ended since the last call of this method."""
        done = [
            sample
            for sample, age in zip(self._samples, self._ages, strict=True)
            if sample not in self._reported and (self.stopped_S[sample] or age >= self._budgets[sample])
        ]
        self._reported.update(done)
        return done

    def unfinished(self) -> list[tuple[int, int]]:
        """Return (sample, number of its tokens) of the samples that have not ended."""
        ages = dict(zip(self._samples, self._ages, strict=True))
        return [(sample, ages.get(sample, 0)) for sample in range(len(self._keys)) if sample not in self._reported]

    def drawn(self, sample: int, length: int) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
        """The first `length` tokens of a sample, with their log-probs and the log of what was kept."""
        return (
            tuple(to_ints(self.tokens_SM[sample, :length])),
            tuple(to_floats(self.logprobs_SM[sample, :length])),
            tuple(to_floats(self.log_kept_mass_SM[sample, :length])),
        )


class ConstrainedResumableBatch(ResumableBatch[CacheT], ConstrainedBatch[CacheT]):
    """A batch that can be interrupted, of whole sequences of a tree, which is the last of its `arguments`."""


class ResumableEngine(NativeEngine[CacheT]):
    """Native engine whose calls can be interrupted and resumed: `NativeEngine` with `draw`."""

    def draw(self, call: SampleRequests, interrupted: Callable[[], bool]) -> Iterator[SampledTokens]:
        """Yield the requests of a call as they end; once `interrupted()`, called between steps, is true, all others.

        Raises:
            OptionsError, PreflightError, ServiceError: as of `generate`.
        """
        self._states.require_ready("draw")
        call.check(self._max_len, self._model.vocab_size)
        if not call.prefixes:
            return
        batch, queue, requests, rows = self._begun(call, interrupted)
        started = time.perf_counter()
        while not (ends := interrupted()):
            # closed before each yield: the mode belongs to the thread and would reach into the caller's code
            with torch.inference_mode():
                more = batch.advance(queue)
            # after every advance: the next one takes the rows that are done out of the batch
            for sample in batch.newly_done():
                reason: DrawnReason = "stop" if batch.stopped_S[sample] else "length"
                yield self._result(batch, requests, sample, batch.lengths_S[sample], reason)
            if not more:
                break
        if ends:
            for sample, length in batch.unfinished():
                yield self._result(batch, requests, sample, length, "interrupted")
            self._drop_cache()  # rows are left in it
        else:
            self._cache = batch.cache
        seconds = time.perf_counter() - started
        self._stats = stats_of(batch, queue.num_prefill_tokens, batch.cache.max_rows, rows, seconds)

    def _begun(
        self, call: SampleRequests, interrupted: Callable[[], bool]
    ) -> tuple[ResumableBatch[CacheT], PrefillScheduler, list[int], int]:
        """Return the batch, its prefill queue, the request of each of its samples, and the rows asked for."""
        # equal contexts become one prompt with several samples, which is read once
        requests_by_context: dict[tuple[int, ...], list[int]] = {}
        for request, context in enumerate(call.contexts()):
            requests_by_context.setdefault(context, []).append(request)
        firsts = [together[0] for together in requests_by_context.values()]
        prompts, requests = (
            [call.prefixes[i] for i in firsts],
            [i for together in requests_by_context.values() for i in together],
        )
        lengths, rows = [len(prompt) for prompt in prompts], min(self._max_rows, len(requests))
        # the longest prefix and the largest budget may be of two requests: each request fits, their sum may not
        full_len = max(lengths) + call.options.max_new_tokens
        with torch.inference_mode():
            cache = self._fitting_cache(CacheRequest(rows, full_len, len(prompts), max(lengths)))
            arguments = (
                [call.starts[request] for request in requests],
                interrupted,
                self._model,
                cache,
                prompts,
                [call.keys[request] for request in requests],
                call.options,
                self._device,
                [call.budgets[request] for request in requests],
            )
            is_tight = full_len > self._max_len
            batch = (
                ResumableBatch[CacheT](*arguments, is_tight=is_tight)
                if call.constraint is None
                else ConstrainedResumableBatch[CacheT](*arguments, call.constraint, is_tight=is_tight)
            )
        if call.shown:
            indices = [call.media_of(first) for first in firsts]
            batch.media = [call.shown[index].media if index >= 0 else None for index in indices]
        queue = PrefillScheduler(lengths, [len(together) for together in requests_by_context.values()], cache.max_rows)
        return batch, queue, requests, rows

    def _result(
        self, batch: ResumableBatch[CacheT], requests: Sequence[int], sample: int, length: int, reason: DrawnReason
    ) -> SampledTokens:
        return SampledTokens(requests[sample], *batch.drawn(sample, length), reason, self.weight_version)
