"""Decode steps as one recording: on a GPU a CUDA graph, so that a step is one launch and not several hundred.

Decoding a small batch, a GPU waits for the host, which takes about ten microseconds to start each of
the twenty kernels of a layer. A CUDA graph starts all of them at once, with the shapes and addresses of the step
that was recorded. Both stay as they are while the rows of the cache do, but for one thing: every step reads one
column more. So a recording reads a whole number of `_COLUMNS` columns, and what a row does not have yet is masked.

    rows change ──► a few steps one kernel at a time (a batch that changes again at once is not worth recording)
                      ──► record ──► replay ... replay ──► columns used up ──► record ──► replay ...

A recording belongs to a cache, whose memory it reads, and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from rft_models.decode.attention import BlockAttention, StepAttention, hidden_columns
from rft_models.decode.kv_cache import StaticCache
from rft_models.decode.row_groups import RowBlock, as_scores, whole_block

_COLUMNS = 64
"""Columns by which a recording grows; those that a row has not written yet are masked."""
_PLAIN_STEPS = 2
"""Steps without a recording after the rows changed; they also make what libraries make at their first call."""


class GraphCapture(Protocol):
    """Recorder of a step, which makes it repeatable."""

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record what `forward` starts on the device, without running it; each call of the result runs it once.

        Every call returns the same tensor with new values. Numbers of the host are those of the recording.
        """
        ...


class CudaGraphs:
    """Records CUDA graphs, all that live at a time in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._stream = torch.cuda.Stream()

    def record(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `forward`, see `GraphCapture.record`; other threads may use the device meanwhile."""
        if not self._graphs:
            # a pool ends with its last graph, and torch refuses to record into one that has ended
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # a capture needs a stream of its own; it begins behind the work that is under way on the present one
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = forward()
            finally:  # a capture left open would make every later call on this stream fail
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs.add(graph)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(slots=True)
class StepInputs:
    """Inputs that change from step to step, on the device, for B rows."""

    token_ids_B: Tensor
    positions_B: Tensor
    own_lengths_B: Tensor
    prompt_lengths_B: Tensor

    @classmethod
    def of(cls, cache: StaticCache, token_ids_B: Tensor) -> StepInputs:
        """Build the inputs of the next step of a cache."""
        device = cache.keys[0].device
        return cls(
            token_ids_B.to(device),
            cache.positions_B.to(device),
            cache.own_lengths_B.to(device, copy=True),  # a copy on the CPU too: `advance` writes into it
            cache.prompt_lengths_P[cache.prompt_of_row_B].to(device),
        )

    def advance(self) -> None:
        """Advance every row by one token."""
        self.positions_B.add_(1)
        self.own_lengths_B.add_(1)


Forward: TypeAlias = Callable[[StaticCache, StepInputs, StepAttention | BlockAttention], Tensor]
"""Logits [B, V] of a step; writes the new keys and values into the cache."""


class _WideAttention(BlockAttention):
    """Attention over more own columns than the rows have; the mask is made of lengths on the device."""

    def __init__(
        self,
        cache: StaticCache,
        block: RowBlock,
        num_kv_heads: int,
        scaling: float,
        inputs: StepInputs,
        own_columns: int,
    ) -> None:
        super().__init__(cache, block, num_kv_heads, scaling)
        self._own_columns, self._inputs = own_columns, inputs

    @property
    def even_column(self) -> None:
        """None: every replay writes another column than the one that the host knew when it was recorded."""
        return None

    def _mask(self, sliding_window: int | None) -> Tensor:
        if (mask := self._masks.get(sliding_window)) is not None:
            return mask
        like, columns = self._cache.keys[0], self._block.prompt_columns
        prompt_B1, own_B1 = self._inputs.prompt_lengths_B[:, None], self._inputs.own_lengths_B[:, None]
        # part of the recording: each replay makes the mask of the lengths as they are then
        hidden_BC = hidden_columns(prompt_B1, own_B1, columns, self._own_columns, sliding_window)
        self._masks[sliding_window] = mask = as_scores(hidden_BC, like)
        return mask


@dataclass(slots=True)
class _Recording:
    replay: Callable[[], Tensor]
    inputs: StepInputs
    block: RowBlock
    """Its tensors are read by every replay."""
    layout: int
    weights: int
    own_columns: int

    def serves(self, cache: StaticCache, weights: int) -> bool:
        """Return true where the rows, the weights and the columns are those of the recording."""
        return self.layout == cache.layout and self.weights == weights and cache.longest_own() < self.own_columns


class GraphedDecoder:
    """Steps of one decoder, recorded where rows stay for a while."""

    def __init__(self, forward: Forward, recorder: GraphCapture, num_kv_heads: int, scaling: float) -> None:
        """Set up steps without a recording so far.

        Args:
            forward: one step with the weights as they are.
            recorder: what records it.
            num_kv_heads, scaling: of the attention.
        """
        self._forward, self._recorder = forward, recorder
        self._num_kv_heads, self._scaling = num_kv_heads, scaling
        self._weights = 0
        self._plain = (-1, 0)  # layout of the cache that had the last step, and steps since it changed
        self.num_recordings = 0

    def refresh(self) -> None:
        """Make recordings invalid: the weights have other addresses now."""
        self._weights += 1

    def step(self, cache: StaticCache, token_ids_B: Tensor) -> Tensor | None:
        """Logits [B, V], valid until the next step; None = this one is to be done without a recording."""
        recording = cache.recording if isinstance(cache.recording, _Recording) else None
        if recording is None or not recording.serves(cache, self._weights):
            if self._is_too_new(cache, recording):
                return None
            recording = self._record(cache, token_ids_B)
        recording.inputs.token_ids_B.copy_(token_ids_B)  # in place: a replay reads the recorded address
        logits = recording.replay()
        # the host's lengths advance too: shapes, and whether the recording still serves, follow from them
        cache.own_lengths_B = cache.own_lengths_B + 1
        return logits

    def _is_too_new(self, cache: StaticCache, recording: _Recording | None) -> bool:
        if recording is not None and recording.layout == cache.layout and recording.weights == self._weights:
            return False  # its columns are used up: the rows have stayed long enough
        layout, steps = self._plain
        steps = steps + 1 if layout == cache.layout else 1
        self._plain = (cache.layout, steps)
        return steps <= _PLAIN_STEPS

    def _record(self, cache: StaticCache, token_ids_B: Tensor) -> _Recording:
        # replays read these columns before the rows write them: masked, but NaN of a former row would pass through
        own_columns = cache.clear_columns(_COLUMNS)
        inputs = StepInputs.of(cache, token_ids_B.clone())
        block = whole_block(cache)  # copies to the device, which a recording may not

        def forward() -> Tensor:
            attention = _WideAttention(cache, block, self._num_kv_heads, self._scaling, inputs, own_columns)
            logits = self._forward(cache, inputs, attention)
            inputs.advance()  # inside the recording, so that every replay advances the lengths on the device
            return logits

        replay = self._recorder.record(forward)
        self.num_recordings += 1
        recording = _Recording(replay, inputs, block, cache.layout, self._weights, own_columns)
        cache.recording = recording  # the one before it frees its memory now, behind the new one's
        return recording
