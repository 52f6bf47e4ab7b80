"""Final hidden states of packed segments: what log-probabilities and values are both computed from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_algos.errors import PreflightError
from rft_models.packed_attention import IMPLEMENTATION, PackedLayout, RowLayout, no_mask
from rft_models.shared_prompts import share_prompts

_PROBE_LENGTHS = (3, 5)


class Backbone:
    """A transformers decoder without its head, and the way its packed forward is computed.

    `packed` says which: true runs it once on all tokens with segment-wise attention (and on a prompt that
    several segments begin with once for all of them, see `shared_prompts`), false runs the decoder's own
    attention on segments padded into blocks of similar length. Both are exact.
    """

    def __init__(self, decoder: Any, *, packed: bool) -> None:
        self.decoder = decoder
        self.packed = packed
        self._drops_out = _drops_out(decoder)
        self._accepts = frozenset(inspect.signature(decoder.forward).parameters)

    def states(
        self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor, wanted_T: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """([K, D] final hidden states, [T] the row among them of each token); None: in the order of the tokens."""
        shared = None
        if self.packed and not (self.decoder.training and self._drops_out):  # copies of a prompt drop other entries
            shared = share_prompts(token_ids_T, positions_T, segment_ids_T, wanted_T)
        if shared is None:
            return self.hidden_states(token_ids_T, positions_T, segment_ids_T), None
        states_KD = self._packed_states(token_ids_T[shared.kept_K], positions_T[shared.kept_K], shared.layout)
        return states_KD, shared.place_T

    def hidden_states(self, token_ids_T: Tensor, positions_T: Tensor, segment_ids_T: Tensor) -> Tensor:
        """[T, D] final hidden states (after the last norm), each seeing its own segment only."""
        layout = PackedLayout.from_segment_ids(segment_ids_T)
        if self.packed:
            return self._packed_states(token_ids_T, positions_T, layout)
        return self._padded_states(token_ids_T, positions_T, layout)

    def own_states(self, token_ids_L: Tensor) -> Tensor:
        """[L, D] of one sequence by the decoder's own forward, to compare with."""
        with own_attention(self.decoder, packed=self.packed):
            return self.decoder(input_ids=token_ids_L[None], use_cache=False).last_hidden_state[0]

    def accepts(self, argument: str) -> bool:
        """Whether the decoder's forward has an argument of this name."""
        return argument in self._accepts

    def _packed_states(self, token_ids_T: Tensor, positions_T: Tensor, layout: RowLayout) -> Tensor:
        output = self.decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            attention_mask=no_mask(token_ids_T.device),
            use_cache=False,
            packed_layout=layout,
        )
        return output.last_hidden_state[0]

    def _padded_states(self, token_ids_T: Tensor, positions_T: Tensor, layout: PackedLayout) -> Tensor:
        """The decoder's own forward on right-padded blocks; a causal row never sees what stands after it."""
        lengths = sorted(layout.lengths, reverse=True)
        places, done = [], 0
        for block in layout.blocks:
            shape = (block.num_segments, block.length)
            ids, positions = token_ids_T, positions_T
            inside = torch.ones(shape, dtype=torch.int64, device=ids.device)
            if block.gather_SL is not None:
                ids, positions = ids[block.gather_SL], positions[block.gather_SL]
                real_S = torch.tensor(lengths[done : done + block.num_segments], device=ids.device)
                inside = (torch.arange(block.length, device=ids.device) < real_S[:, None]).to(torch.int64)
            done += block.num_segments
            given = {"position_ids": positions.view(shape)} if self.accepts("position_ids") else {}
            output = self.decoder(input_ids=ids.view(shape), attention_mask=inside, use_cache=False, **given)
            places.append(output.last_hidden_state.flatten(0, 1))
        joined = torch.cat(places)
        return joined if layout.scatter_T is None else joined.index_select(0, layout.scatter_T)


def follows_its_own(segment_ids_T: Tensor) -> Tensor:
    """[T] bool: the token before is of the same segment, so that there is something to predict this one from."""
    follows_T = torch.zeros_like(segment_ids_T, dtype=torch.bool)
    follows_T[1:] = segment_ids_T[1:] == segment_ids_T[:-1]
    return follows_T


@contextmanager
def own_attention(model: Any, *, packed: bool) -> Iterator[None]:
    """Let a model that was switched to the packed attention compute its own for a while."""
    if packed:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if packed:
            model.set_attn_implementation(IMPLEMENTATION)


@dataclass(frozen=True, slots=True)
class Probe:
    """Two short segments that a forward is tried on."""

    segments: list[Tensor]
    token_ids_T: Tensor
    positions_T: Tensor
    segment_ids_T: Tensor

    @classmethod
    def of(cls, vocab_size: int, device: torch.device) -> Probe:
        """Ids that differ between the segments, whatever the vocabulary."""
        segments = [
            (torch.arange(length, device=device) * 7 + 3 + start) % vocab_size
            for start, length in enumerate(_PROBE_LENGTHS)
        ]
        return cls(
            segments,
            torch.cat(segments),
            torch.cat([torch.arange(len(tokens), device=device) for tokens in segments]),
            torch.cat([torch.full_like(tokens, number) for number, tokens in enumerate(segments)]),
        )


def refuse_difference(expected: Tensor, found: Tensor, *, of: str, dtype: torch.dtype, where: str) -> None:
    """Raise `PreflightError` where the two differ by more than weights of this dtype explain."""
    error, spread = difference(expected, found), float(expected.abs().max()) + 1.0
    if not error <= tolerance(dtype):
        raise PreflightError(
            code="models.forward_differs",
            what=f"{of} differ from its own forward by {error * spread:.3g} of {spread:.3g}",
            where=where,
            why="what is computed must be what the model computes; its head or attention does more than is known here",
            do="choose a model of one of the families in the README of rft-models",
        )


def difference(expected: Tensor, found: Tensor) -> float:
    """Largest difference over the largest expected number and one."""
    return float((expected - found).abs().max()) / (float(expected.abs().max()) + 1.0)


def tolerance(dtype: torch.dtype) -> float:
    """Of `difference`, for two ways to compute with weights of this dtype."""
    return 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2


def _drops_out(model: Any) -> bool:
    """Whether training mode zeroes entries at random."""
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    return any(float(getattr(m, "attention_dropout", None) or 0.0) > 0 for m in model.modules())
