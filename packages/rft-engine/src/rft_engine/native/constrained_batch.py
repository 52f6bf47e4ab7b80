"""Continuous batching in which every row walks through a tree of sequences and leaves at the end of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_engine.decoding.trie_constraint import TrieSampler
from rft_engine.native.continuous_batch import ContinuousBatch, SampleTensors
from rft_engine.protocols import CacheT, DecodableModel


class ConstrainedBatch(ContinuousBatch[CacheT], Generic[CacheT]):
    """A `ContinuousBatch` whose completions are whole sequences of a tree; `check_constraint` has passed."""

    def __init__(
        self,
        model: DecodableModel[CacheT],
        cache: CacheT,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[int],
        options: SamplingOptions,
        device: torch.device,
        budgets: Sequence[int],
        trie: TokenTrie,
    ) -> None:
        super().__init__(model, cache, prompts, sample_keys, options, device, budgets)
        trie = trie.to(device)
        self._walk, self._first_walk = TrieSampler(options, trie), TrieSampler(options.for_first_token, trie)
        self._states_B = TrieSampler.start(0, device)
        # a sequence may end without a stop token, so ends are looked for at every step
        self._ends_early = True

    def _draw_first(self, logits_BV: Tensor, uniforms_B: Tensor) -> SampleTensors:
        drawn = self._first_walk.draw(logits_BV, uniforms_B, TrieSampler.start(logits_BV.shape[0], self._device))
        # behind the others, as `_admit` appends the rows of the samples
        self._states_B = torch.cat([self._states_B, drawn[3]])
        return drawn

    def _draw(self, logits_BV: Tensor, uniforms_B: Tensor, step: int) -> SampleTensors:
        drawn = self._walk.draw(logits_BV, uniforms_B, self._states_B)
        self._states_B = drawn[3]
        return drawn

    def _has_ended(self, drawn: SampleTensors) -> Tensor:
        return self._walk.ends_S[drawn[3]]

    def _keep(self, rows: Tensor) -> None:
        super()._keep(rows)
        self._states_B = self._states_B[rows]
