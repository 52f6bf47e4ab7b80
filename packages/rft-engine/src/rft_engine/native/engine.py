"""The in-process engine: continuous batching over a model's own decode forward, in the trainer's process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic

import torch
from torch import Tensor

from rft_algos.decoding.beam_search import Mass
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.completions import Completion, EngineStats
from rft_engine.decoding.beam_search import BeamSearch
from rft_engine.decoding.trie_constraint import check_constraint, check_whole
from rft_engine.engine_base import EngineBase
from rft_engine.native.constrained_batch import ConstrainedBatch
from rft_engine.native.continuous_batch import ContinuousBatch
from rft_engine.native.memory_budget import CacheRequest, FreeMemory, free_memory, is_out_of_memory, max_rows_that_fit
from rft_engine.native.results import completions_of, stats_of
from rft_engine.native.scheduler import PrefillScheduler
from rft_engine.protocols import CacheT, DecodableModel
from rft_engine.request_checks import check_budgets, check_keys, check_media, check_prompts, refusal

_LENGTH_STEP = 64  # caches are made for whole multiples of this, so that similar calls share one


class NativeEngine(EngineBase, Generic[CacheT]):
    """Samples from a model that lives in this process; there are no weights to copy.

    A sample's tokens depend on its prompt, its key and the options only: not on the other
    samples, on `max_rows` or on the order of prompts (up to rounding, where a uniform falls
    within float noise of the boundary between two tokens). One owner at a time: calls from
    several threads must be serialised by the caller.
    """

    def __init__(
        self,
        model: DecodableModel[CacheT],
        *,
        max_rows: int,
        max_len: int,
        device: torch.device | str = "cpu",
        free_memory: FreeMemory = free_memory,
    ) -> None:
        """Make an engine that shares the parameters of `model`.

        Args:
            model: decode forward; its parameters are those that are being trained.
            max_rows: sequences decoded at once; fewer where the memory holds no more, as `stats().rows` then shows.
            max_len: tokens of the longest prompt with its completion.
            device: where the model is.
            free_memory: bytes that may be taken there.

        Raises:
            OptionsError: `max_rows` below 1, `max_len` below 2 or above what the model can place.
        """
        if max_rows < 1:
            raise refusal("engine.max_rows", f"max_rows = {max_rows}", "at least one row is needed", "max_rows=1")
        max_positions = model.max_positions or max_len  # 0 = no limit
        if not 2 <= max_len <= max_positions:
            allowed = f"a prompt and its completion have at least 2 tokens, and the model places {max_positions}"
            raise refusal("engine.max_len", f"max_len = {max_len}", allowed, f"max_len={max(2, max_positions)}")
        self._model, self._max_rows, self._max_len = model, max_rows, max_len
        self._device = torch.device(device)
        super().__init__()
        self._cache: CacheT | None = None
        self._cache_shape = (0, 0)
        self._free_memory, self._asked_shape = free_memory, (0, 0)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        *,
        budgets: Sequence[Sequence[int]] | None = None,
        constraint: TokenTrie | None = None,
        media: Sequence[object | None] | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt once for each of its keys.

        Args:
            prompts: token ids, at least one each.
            sample_keys: for each prompt the keys of its samples; token number t of the sample with
                key k is drawn with `keyed_random.uniforms([k], ...)[0, t]`.
            options: how tokens are drawn, and the budget of each completion.
            budgets: for each prompt the tokens that its samples may have at most, 1 to `max_new_tokens`, as for
                samples that continue what was begun elsewhere; None = `max_new_tokens` for all.
            constraint: every completion is one of its sequences, whole, and ends ("stop") with it. The other options
                work within what may follow, whose mass counts in `log_kept_mass`, at temperature 0 too. Budgets
                must hold the longest sequence and `min_new_tokens` lie below the shortest; a stop token may only
                end sequences.
            media: images of each prompt as the model's tokenizer made them beside its token ids, None where it has
                none; None: no prompt has any.

        Returns:
            One list a prompt, one completion a key, in the order given.

        Raises:
            OptionsError: a stop token that is none of the model's; a prompt that is empty, has an unknown token or
                leaves no room for `max_new_tokens`; a constraint that some option contradicts.
            PreflightError: the memory does not hold one sequence.
            ServiceError: the engine is asleep, closed, or waits for weights.
        """
        self._states.require_ready("generate")
        options.check_vocabulary(self._model.vocab_size)
        check_prompts(prompts, options.max_new_tokens, self._max_len, self._model.vocab_size)
        check_keys(prompts, sample_keys)
        check_media(prompts, media)
        allowed = check_budgets(sample_keys, budgets, options.max_new_tokens)
        if constraint is not None:
            check_constraint(constraint, options, allowed, self._model.vocab_size)
        keys = [key for prompt_keys in sample_keys for key in prompt_keys]
        if not keys:
            self._stats = EngineStats()
            return [[] for _ in prompts]
        copies = [len(prompt_keys) for prompt_keys in sample_keys]
        completions = self._run(prompts, copies, keys, options, allowed, constraint, media)
        if constraint is not None:
            check_whole(constraint, completions)
        flat = iter(completions)
        return [[next(flat) for _ in prompt_keys] for prompt_keys in sample_keys]

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        keys: Sequence[int],
        options: SamplingOptions,
        budgets: Sequence[int],
        constraint: TokenTrie | None,
        media: Sequence[object | None] | None,
    ) -> list[Completion]:
        """Return the samples of a call whose arguments are checked, prompt after prompt: `copies[p]` of prompt p."""
        started = time.perf_counter()
        lengths = [len(prompt) for prompt in prompts]
        rows, longest = min(self._max_rows, len(keys)), max(lengths)
        with torch.inference_mode():
            # sized by this call and not by `max_len`: shorter sequences leave memory for more rows
            cache = self._fitting_cache(CacheRequest(rows, longest + options.max_new_tokens, len(prompts), longest))
            arguments = (self._model, cache, prompts, keys, options, self._device, budgets)
            batch = ContinuousBatch(*arguments) if constraint is None else ConstrainedBatch(*arguments, constraint)
            batch.media = media
            # rows of the cache, which may be fewer than were asked for
            queue = PrefillScheduler(lengths, copies, cache.max_rows)
            batch.run(queue)
            # only after a call that ended: one that failed leaves rows in its cache, and the next call makes another
            self._cache = cache
        seconds = time.perf_counter() - started
        self._stats = stats_of(batch, queue.num_prefill_tokens, cache.max_rows, rows, seconds)
        return completions_of(batch, self.weight_version)

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        trie: TokenTrie,
        *,
        num_beams: int,
        temperature: float = 1.0,
        mass: Mass = "vocabulary",
    ) -> list[list[Completion]]:
        """The best sequences of a finite set after every prompt.

        Args:
            prompts: token ids, at least one each.
            trie: the sequences that may follow, each with its stop token where there is one.
            num_beams: sequences for each prompt, at least 1; where the set has fewer, all of it is given.
            temperature: divides the logits, above 0.
            mass: "vocabulary" ranks by the probability of each token among all, "allowed" by its share of
                what may follow.

        Returns:
            One list a prompt, best first: distinct sequences of the set. `logprobs` are over the whole vocabulary,
            `log_kept_mass` is that of the tokens which could have followed.

        Raises:
            OptionsError: an option out of range; a prompt as in `generate`; tokens that the model does not know;
                more beams than rows.
            ServiceError: the engine is asleep, closed, or waits for weights.
        """
        self._states.require_ready("beam_search")
        search = BeamSearch(trie.to(self._device), num_beams, temperature, mass)
        search.check(num_beams, self._max_rows, self._model.vocab_size)
        check_prompts(prompts, trie.depth, self._max_len, self._model.vocab_size)
        started, beams_by_prompt = time.perf_counter(), list[list[Completion]]()
        # prompts of similar length share a search, and the first of each search is its longest
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        with torch.inference_mode():
            while len(beams_by_prompt) < len(prompts):
                longest, left = len(prompts[order[len(beams_by_prompt)]]), len(prompts) - len(beams_by_prompt)
                num_prompts = min(left, self._max_rows // search.width)
                demand = CacheRequest(num_prompts * search.width, longest + trie.depth, num_prompts, longest)
                cache = self._fitting_cache(demand)
                # once more: the memory may hold fewer rows than were asked for
                search.check(num_beams, cache.max_rows, self._model.vocab_size)
                chosen = order[len(beams_by_prompt) : len(beams_by_prompt) + cache.max_rows // search.width]
                batch_prompts = [prompts[index] for index in chosen]
                beams_by_prompt += search.run(self._model, cache, batch_prompts, self.weight_version, self._device)
                # the next search begins with an empty cache
                cache.keep(torch.zeros(0, dtype=torch.int64, device=self._device))
                self._cache = cache
        self._stats = EngineStats(
            num_generated_tokens=sum(len(beam.token_ids) for beams in beams_by_prompt for beam in beams),
            num_prefill_tokens=sum(map(len, prompts)),
            num_decode_steps=search.num_steps,
            seconds=time.perf_counter() - started,
        )
        return [beams for _, beams in sorted(zip(order, beams_by_prompt, strict=True), key=lambda pair: pair[0])]

    def routes(self, sequences: Sequence[Sequence[int]]) -> Tensor | None:
        """The experts that the tokens of whole sequences go to, by a forward with the weights that samples have.

        Args:
            sequences: token ids, at least one each.

        Returns:
            As of `DecodableModel.routes`.

        Raises:
            ServiceError: the engine is asleep, closed, or waits for weights.
        """
        self._states.require_ready("routes")
        return self._model.routes(sequences)

    def load_weights(self, version: int) -> None:
        """Serve the model's present parameters as `version`.

        Raises:
            ServiceError: `version` is not above the present one, or the engine is closed.
        """
        # refuses an old version before anything is derived from the parameters
        self._states.load_weights(version)
        self._model.refresh()

    def refresh(self) -> None:
        """Serve the model's present parameters under the present version: they changed outside of a training step.

        Raises:
            ServiceError: the engine is closed.
        """
        self._states.refresh()
        self._model.refresh()

    def sleep(self, level: int = 1) -> None:
        """Free the cache until `wake`; at level 2 weights must be loaded again too. Does nothing when asleep."""
        self._states.sleep(level)
        self._drop_cache()

    def wake(self) -> None:
        """Be ready again; the cache is made at the next `generate`. Does nothing when awake."""
        self._states.wake()

    def close(self) -> None:
        """Free the cache for good. Does nothing when closed."""
        self._states.close()
        self._drop_cache()

    def _fitting_cache(self, demand: CacheRequest) -> CacheT:
        """A cache with as many rows, up to those of the demand, as the memory holds; what fitted once is kept.

        Raises:
            PreflightError: not one row fits.
        """
        asked = (demand.rows, self._padded(demand.length))
        if self._cache is None or self._asked_shape != asked:
            self._cache = None  # its memory is free for the next one
            demand = replace(demand, length=asked[1])
            rows = max_rows_that_fit(self._model, self._model.vocab_size, demand, self._device, self._free_memory)
        else:
            # the free memory is not asked again: the cache that is held would count as taken
            rows = self._cache_shape[0]
        self._asked_shape = asked
        try:
            return self._take_cache(rows, demand.length)
        except (RuntimeError, MemoryError) as error:
            if rows == 1 or not is_out_of_memory(error):
                raise
        return self._take_cache(rows // 2, demand.length)  # memory in pieces: once more with half of it

    def _padded(self, length: int) -> int:
        return min(-(-length // _LENGTH_STEP) * _LENGTH_STEP, self._max_len)

    def _take_cache(self, num_rows: int, length: int) -> CacheT:
        """The cache of the last call where its shape fits, else a new one; an error leaves none behind."""
        shape = (num_rows, self._padded(length))
        cache, self._cache = self._cache, None
        if cache is None or self._cache_shape != shape:
            del cache  # before the new one is made: both together may not fit
            cache = self._model.new_cache(*shape)
            self._cache_shape = shape
        return cache

    def _drop_cache(self) -> None:
        self._cache = None
        if self._device.type == "cuda":
            # else torch keeps the memory reserved, and no other process can take it
            torch.cuda.empty_cache()
