"""Final hidden states of packed segments: what log-probabilities and values are both computed from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_algos.errors import OptionsError, PreflightError
from rft_models.attention_interface import IMPLEMENTATION, no_mask
from rft_models.packed_attention import PackedLayout, RowLayout
from rft_models.sequence_split import SequenceRanks, SplitLayout
from rft_models.shared_prompts import share_prompts
from rft_models.varlen_attention import VarlenKernel

_PROBE_LENGTHS = (3, 5)


class States(NamedTuple):
    """Final hidden states, and where they belong."""

    hidden_KD: Tensor
    """[K, D], or this rank's run of these rows where ranks share a row."""
    place_T: Tensor | None
    """[T] the row of each token; None: in the order of the tokens."""
    here: tuple[int, int] | None = None
    """First and behind-the-last row here, where ranks share a row."""
    num_rows: int = 0
    """K, where ranks share a row."""


class Backbone:
    """A transformers decoder without its head, and the way its packed forward is computed.

    `packed` says which: true runs it once on all tokens with segment-wise attention (and on a prompt that
    several segments begin with once for all of them, see `shared_prompts`), false runs the decoder's own
    attention on segments padded into blocks of similar length. Both are exact. `kernel` computes the segment-wise
    attention where it can, see `attention_choice`.
    """

    def __init__(self, decoder: Any, *, packed: bool, kernel: VarlenKernel | None = None) -> None:
        self.decoder = decoder
        self.packed = packed
        self.kernel = kernel
        self.split: SequenceRanks | None = None
        """The ranks that share a row, see `sequence_split`; None: each has rows of its own."""
        self._drops_out = _drops_out(decoder)
        self._accepts = frozenset(inspect.signature(decoder.forward).parameters)

    def states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        segment_ids_T: Tensor,
        wanted_T: Tensor,
        *,
        routed: list[Tensor] | None = None,
    ) -> States:
        """Final hidden states of the packed row, or of this rank's part of it.

        `routed` gets the logits [K, E] of each layer's router, in the rows of the states.
        """
        shared = None
        if self.packed and not (self.decoder.training and self._drops_out):  # copies of a prompt drop other entries
            shared = share_prompts(token_ids_T, positions_T, segment_ids_T, wanted_T)
        if shared is None and self.split is None:
            return States(self.hidden_states(token_ids_T, positions_T, segment_ids_T, routed=routed), None)
        if shared is None:
            layout = PackedLayout.from_segment_ids(segment_ids_T)
            layout.kernel = self.kernel
            return self._own_states(token_ids_T, positions_T, layout, None, routed)
        shared.layout.kernel = self.kernel
        kept_K = shared.kept_K
        return self._own_states(token_ids_T[kept_K], positions_T[kept_K], shared.layout, shared.place_T, routed)

    def _own_states(
        self,
        token_ids_K: Tensor,
        positions_K: Tensor,
        layout: RowLayout,
        place_T: Tensor | None,
        routed: list[Tensor] | None,
    ) -> States:
        if self.split is None:
            return States(self._packed_states(token_ids_K, positions_K, layout, routed), place_T)
        num_rows = token_ids_K.shape[0]
        first, behind = here = self.split.bounds(num_rows)
        split = SplitLayout(layout, self.split, num_rows)
        return States(
            self._packed_states(token_ids_K[first:behind], positions_K[first:behind], split, routed),
            place_T,
            here,
            num_rows,
        )

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        segment_ids_T: Tensor,
        *,
        routed: list[Tensor] | None = None,
    ) -> Tensor:
        """[T, D] final hidden states (after the last norm), each seeing its own segment only."""
        layout = PackedLayout.from_segment_ids(segment_ids_T)
        if self.packed:
            layout.kernel = self.kernel
            return self._packed_states(token_ids_T, positions_T, layout, routed)
        return self._padded_states(token_ids_T, positions_T, layout, routed)

    def all_rows(self, values_L: Tensor, states: States) -> Tensor:
        """[K] of what this rank has of the states' rows, with what the others have."""
        if self.split is None or states.here is None:
            return values_L
        first, behind = states.here
        return self.split.merge(F.pad(values_L, (first, states.num_rows - behind)))

    def split_over(self, ranks: SequenceRanks, where: str) -> None:
        """Share every row of `states` with other ranks.

        Raises:
            OptionsError: the decoder computes its own attention, which needs whole rows.
        """
        if ranks.size > 1 and not self.packed:
            raise OptionsError(
                code="models.split_native",
                what=f"sp_size = {ranks.size} with a decoder that computes its own attention",
                where=where,
                why="ranks share a row by trading heads inside the packed attention",
                state="nothing was changed",
                do="--sp_size 1, or a model of one of the families in the README of rft-models",
            )
        self.split = ranks if ranks.size > 1 else None

    def own_states(self, token_ids_L: Tensor) -> Tensor:
        """[L, D] of one sequence by the decoder's own forward, to compare with."""
        with own_attention(self.decoder, packed=self.packed):
            return self.decoder(input_ids=token_ids_L[None], use_cache=False).last_hidden_state[0]

    def accepts(self, argument: str) -> bool:
        """Whether the decoder's forward has an argument of this name."""
        return argument in self._accepts

    def _packed_states(
        self, token_ids_T: Tensor, positions_T: Tensor, layout: RowLayout, routed: list[Tensor] | None
    ) -> Tensor:
        output = self.decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            attention_mask=no_mask(token_ids_T.device),
            use_cache=False,
            packed_layout=layout,
            **_router_argument(routed),
        )
        if routed is not None:
            routed += [logits.flatten(0, -2) for logits in output.router_logits]
        return output.last_hidden_state[0]

    def _padded_states(
        self, token_ids_T: Tensor, positions_T: Tensor, layout: PackedLayout, routed: list[Tensor] | None
    ) -> Tensor:
        """The decoder's own forward on right-padded blocks; a causal row never sees what stands after it."""
        lengths = sorted(layout.lengths, reverse=True)
        places, done = [], 0
        blocks_logits: list[list[Tensor]] = []
        for block in layout.blocks:
            shape = (block.num_segments, block.length)
            ids, positions = token_ids_T, positions_T
            inside = torch.ones(shape, dtype=torch.int64, device=ids.device)
            if block.gather_SL is not None:
                ids, positions = ids[block.gather_SL], positions[block.gather_SL]
                real_S = torch.tensor(lengths[done : done + block.num_segments], device=ids.device)
                inside = (torch.arange(block.length, device=ids.device) < real_S[:, None]).to(torch.int64)
            done += block.num_segments
            given: dict[str, Any] = {"position_ids": positions.view(shape)} if self.accepts("position_ids") else {}
            given |= _router_argument(routed)
            output = self.decoder(input_ids=ids.view(shape), attention_mask=inside, use_cache=False, **given)
            places.append(output.last_hidden_state.flatten(0, 1))
            if routed is not None:
                blocks_logits.append([logits.flatten(0, -2) for logits in output.router_logits])
        if routed is not None:
            routed += [_in_order(list(layer), layout) for layer in zip(*blocks_logits, strict=True)]
        return _in_order(places, layout)


def _in_order(places: list[Tensor], layout: PackedLayout) -> Tensor:
    """[T, ...] of the places of all blocks."""
    joined = torch.cat(places)
    return joined if layout.scatter_T is None else joined.index_select(0, layout.scatter_T)


def _router_argument(routed: list[Tensor] | None) -> dict[str, Any]:
    return {} if routed is None else {"output_router_logits": True}


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
