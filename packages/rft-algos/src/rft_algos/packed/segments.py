"""Sums and means over the sequences of a packed row of tokens.

Sequences lie one after another in [T] tokens; `segment_ids_T` says which token belongs to which,
0..T-1 in any order, negative at padding. An equation that lives on whole sequences works in slots instead: one
for every id plus a spare one for the tokens that do not count (`SegmentIndex`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rft_algos.input_checks import refuse
from rft_algos.packed.packed_ids import known_runs
from rft_algos.packed.tensor_checks import check_group_ids, check_mask, check_vectors
from rft_algos.packed.tracing import is_traced

_ROW = 32
"""Tokens of a row."""
_ROWS_A_RUN = 4
"""Of the mean run, from which on rows pay."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens cut into rows of 32, most of which lie within one run: what is done to those is vectorised."""

    whole_2R: Tensor
    """[2R] for each run, how many rows before it lie within no run, and how many lie within it."""
    number: int
    """Of whole rows; T - 32 * number tokens are left over."""
    ragged_X: Tensor
    """[X] the rows that lie within no run."""

    def split(self, values_T: Tensor) -> tuple[Tensor, Tensor]:
        """The rows [number, 32] of T values, and those left over."""
        return values_T[: self.number * _ROW].view(-1, _ROW), values_T[self.number * _ROW :]

    def ragged(self, values_T: Tensor) -> Tensor:
        """Tokens that rows do not hold: the values of the ragged ones and of those left over, in one line."""
        rows, rest = self.split(values_T)
        return torch.cat([rows.index_select(0, self.ragged_X).flatten(), rest])


@dataclass(frozen=True, slots=True)
class SegmentIndex:
    """Index, for each token, of its sequence's entry in an array with one entry a sequence.

    Example, on the CPU: segment ids 0 0 0 1 -1 with loss mask 1 1 0 1 0 have the slots 0 0 2 1 2,
    of which 2 is the spare one, in the runs (0, 2 tokens), (2, 1), (1, 1), (2, 1).
    """

    index_T: Tensor
    """[T] int64: the token's segment id, or `spare`."""
    spare: int
    """Slot of masked tokens and padding, and the number of the other slots. How many sequences there
    are is asked on the CPU only; elsewhere the host would wait for the answer, and T always suffice."""
    runs: tuple[Tensor, Tensor] | None
    """On the CPU, the slot [R] and length [R] of every stretch of tokens of one slot: summing along
    stretches is there six times as fast as adding tokens to their slots one by one."""
    rows: Rows | None = None
    """On the CPU where runs are long: twice as fast again."""

    @property
    def keep_all(self) -> bool:
        """Return whether every token counts; asked on the CPU only, elsewhere False."""
        return self.runs is not None and not bool((self.runs[0] == self.spare).any())


def segment_index(loss_mask_T: Tensor, segment_ids_T: Tensor) -> SegmentIndex:
    """The slot of every token: of its sequence where it counts, the spare one where it is masked or padding.

    Args:
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.

    Returns:
        The slots of [T] tokens.
    """
    check_mask(loss_mask_T=loss_mask_T)
    check_group_ids(segment_ids_T=segment_ids_T)
    if loss_mask_T.shape != segment_ids_T.shape:
        refuse(f"{loss_mask_T.shape} mask for {segment_ids_T.shape} segment ids")
    check_vectors(loss_mask_T=loss_mask_T)
    num_tokens = segment_ids_T.shape[0]
    if is_traced() or not segment_ids_T.is_cpu or num_tokens == 0:
        index_T = torch.where(loss_mask_T & (segment_ids_T >= 0), segment_ids_T, num_tokens)
        return SegmentIndex(index_T, num_tokens, None)
    runs = _runs(segment_ids_T)
    lowest, highest = runs[0].aminmax()
    spare = int(highest) + 1
    # where nothing is masked the ids are the slots, and no pass is needed
    if lowest >= 0 and all_true(loss_mask_T):
        return SegmentIndex(segment_ids_T, spare, runs, _rows(runs[1], num_tokens))
    index_T = torch.where(loss_mask_T & (segment_ids_T >= 0), segment_ids_T, spare)
    # a masked token in the middle cuts a run in two
    runs = _runs(index_T)
    return SegmentIndex(index_T, spare, runs, _rows(runs[1], num_tokens))


def all_true(mask_T: Tensor) -> bool:
    """Return whether a mask masks nothing; asks the device for the answer.

    Args:
        mask_T: [T] bool.

    Returns:
        True if all T are, as they are where T is 0.
    """
    # bytes have a vectorised minimum: on a CPU a thirtieth of the time of `all`
    return mask_T.numel() == 0 or bool(mask_T.view(torch.uint8).amin())


def all_true_on_cpu(mask_T: Tensor) -> bool:
    """Return whether a mask masks nothing, where asking costs little: on the CPU, and not while tracing; else False.

    Args:
        mask_T: [T] bool.

    Returns:
        True if all T are known to be.
    """
    return not is_traced() and mask_T.is_cpu and all_true(mask_T)


def segment_sums(values_T: Tensor, segment_index: SegmentIndex) -> Tensor:
    """Sum over the loss tokens of each sequence, in float32 at least: a sum in bfloat16 stops growing at 256.

    Args:
        values_T: [T] values; what stands at the spare slot, NaN included, reaches neither sum nor gradient.
        segment_index: of the T tokens.

    Returns:
        [S] sums, S = spare + 1; 0 in the spare slot and in slots without tokens. float32 for half types.
    """
    if values_T.shape != segment_index.index_T.shape:
        refuse(f"{values_T.shape} values for {segment_index.index_T.shape} segment ids")
    values_T = values_T.to(_sum_type(values_T.dtype))
    if is_traced():
        return _added(values_T, segment_index.index_T, segment_index.spare)
    return cast(Tensor, _SlotSums.apply(values_T, segment_index))  # pyright: ignore[reportUnknownMemberType]


def segment_counts(segment_index: SegmentIndex, *, dtype: torch.dtype) -> Tensor:
    """Number of loss tokens of each sequence.

    Args:
        segment_index: of the T tokens.
        dtype: of the result.

    Returns:
        [S] numbers of tokens, S = spare + 1; 0 in the spare slot.
    """
    if segment_index.runs is None:
        ones_T = torch.ones(segment_index.index_T.shape, dtype=_sum_type(dtype), device=segment_index.index_T.device)
        return _added(ones_T, segment_index.index_T, segment_index.spare).to(dtype)
    runs_R, lengths_R = segment_index.runs
    return _added(lengths_R.to(_sum_type(dtype)), runs_R, segment_index.spare).to(dtype)


def segment_means(values_T: Tensor, segment_index: SegmentIndex) -> Tensor:
    """Mean over the loss tokens of each sequence.

    Args:
        values_T: [T] values, as in `segment_sums`.
        segment_index: of the T tokens.

    Returns:
        [S] means, S = spare + 1; 0 in the spare slot and in slots without tokens. float32 for half types.
    """
    sums_S = segment_sums(values_T, segment_index)
    return sums_S / segment_counts(segment_index, dtype=sums_S.dtype).clamp(min=1)


def broadcast_to_tokens(values_S: Tensor, segment_index: SegmentIndex) -> Tensor:
    """The value of its sequence at every loss token.

    Args:
        values_S: [S] one value a slot; that of the spare slot is not used.
        segment_index: of the T tokens.

    Returns:
        [T] values, 0 at masked tokens and padding; differentiable with respect to `values_S`.
    """
    # tokens that do not count read the spare slot, whatever was summed there
    zero_spare_S = torch.cat([values_S[:-1], values_S.new_zeros(1)])
    if is_traced():
        return zero_spare_S.index_select(0, segment_index.index_T)
    return cast(Tensor, _AtTokens.apply(zero_spare_S, segment_index))  # pyright: ignore[reportUnknownMemberType]


def spread_to_tokens(values_N: Tensor, segment_ids_T: Tensor) -> Tensor:
    """The value of its sequence at every token, masked or not.

    Args:
        values_N: [N] one value a sequence, without gradient.
        segment_ids_T: [T] int64 in 0..N-1.

    Returns:
        [T] values.
    """
    known = known_runs(segment_ids_T)
    if known is None:
        return values_N.index_select(0, segment_ids_T)
    runs = known.ids_R, known.lengths_R
    places = SegmentIndex(segment_ids_T, values_N.shape[0], runs, _rows(known.lengths_R, segment_ids_T.shape[0]))
    return _placed(values_N, places)


def segment_lengths(loss_mask_T: Tensor, segment_ids_T: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Count, at every token, the loss tokens of its sequence.

    Args:
        loss_mask_T: [T] bool.
        segment_ids_T: [T] int64 in 0..T-1; negative at padding.
        dtype: of the result.

    Returns:
        [T] numbers of tokens, 0 at padding.
    """
    return _at_all_tokens(segment_counts(segment_index(loss_mask_T, segment_ids_T), dtype=dtype), segment_ids_T)


def _sum_type(dtype: torch.dtype) -> torch.dtype:
    # bfloat16 counts to 256 and float16 to 2048, and neither can hold a ratio within 1 +- 3e-4
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _runs(index_T: Tensor) -> tuple[Tensor, Tensor]:
    known = known_runs(index_T)
    if known is not None:
        return known.ids_R, known.lengths_R
    return cast(
        tuple[Tensor, Tensor],
        index_T.unique_consecutive(return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )


def _added(values: Tensor, index: Tensor, spare: int) -> Tensor:
    # the spare slot stays 0, also where NaN stands at masked tokens
    kept = torch.where(index < spare, values, 0.0)
    return kept.new_zeros(spare + 1).index_add(0, index, kept)


def _at_all_tokens(values_S: Tensor, segment_ids_T: Tensor) -> Tensor:
    # masked tokens of a sequence get its value too: padding alone has the spare slot
    return broadcast_to_tokens(values_S, segment_index(segment_ids_T >= 0, segment_ids_T))


def _rows(lengths_R: Tensor, num_tokens: int) -> Rows | None:
    number = num_tokens // _ROW
    if number < _ROWS_A_RUN * lengths_R.shape[0]:
        return None
    ends_R = lengths_R.cumsum(0)
    # the rows that lie within a run begin and end at multiples of 32; a short run has none
    first_R = ((ends_R - lengths_R + (_ROW - 1)) // _ROW).clamp(max=number)
    last_R = torch.maximum(first_R, ends_R // _ROW)
    bounds_2R = torch.stack([first_R, last_R], 1).flatten()
    whole_2R = bounds_2R.diff(prepend=bounds_2R.new_zeros(1))
    # those before each run, counted on from where the whole rows of the one before it end
    gaps_R = whole_2R[::2]
    shifts_R = first_R - gaps_R.cumsum(0)
    shifts_X = shifts_R.repeat_interleave(gaps_R)
    ragged_X = shifts_X + torch.arange(shifts_X.shape[0])
    return Rows(whole_2R, number, ragged_X)


def _sums(values_T: Tensor, segment_index: SegmentIndex) -> Tensor:
    if segment_index.runs is None:
        return _added(values_T, segment_index.index_T, segment_index.spare)
    (runs_R, lengths_R), rows = segment_index.runs, segment_index.rows
    if rows is None:
        # the lengths are counted from these tokens, so their check is left out
        sums_R = torch.segment_reduce(values_T, "sum", lengths=lengths_R, unsafe=True)
        return _added(sums_R, runs_R, segment_index.spare)
    # whole rows are vectorised sums; only rows across a border are added token by token
    sums = rows.split(values_T)[0].sum(1)
    # every second stretch lies within a run
    sums_R = torch.segment_reduce(sums, "sum", lengths=rows.whole_2R, unsafe=True)[1::2]
    ends_S = _added(rows.ragged(values_T), rows.ragged(segment_index.index_T), segment_index.spare)
    return ends_S + _added(sums_R, runs_R, segment_index.spare)


def _placed(values_S: Tensor, segment_index: SegmentIndex) -> Tensor:
    if segment_index.runs is None or segment_index.rows is None:
        return values_S.index_select(0, segment_index.index_T)
    rows, values_R = segment_index.rows, values_S.index_select(0, segment_index.runs[0])
    placed_T = values_S.new_empty(segment_index.index_T.shape)
    placed, rest = rows.split(placed_T)
    of_rows_2R = torch.stack([values_R, values_R], 1).flatten()
    placed.copy_(of_rows_2R.repeat_interleave(rows.whole_2R, output_size=rows.number)[:, None])
    ends = values_S.index_select(0, rows.ragged(segment_index.index_T))
    num_ragged = rows.ragged_X.shape[0] * _ROW
    # rows across a border hold the value of one run so far, and get that of each token here
    placed.index_copy_(0, rows.ragged_X, ends[:num_ragged].view(-1, _ROW))
    rest.copy_(ends[num_ragged:])
    return placed_T


class _SlotSums(torch.autograd.Function):
    """Tokens added to their slots; the gradient is `_AtTokens`, without the spare slot."""

    @staticmethod
    def forward(ctx: Any, values_T: Tensor, segment_index: SegmentIndex) -> Tensor:  # pyright: ignore
        ctx.segment_index = segment_index
        return _sums(values_T, segment_index)

    @staticmethod
    def backward(ctx: Any, gradient_S: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return broadcast_to_tokens(gradient_S, ctx.segment_index), None


class _AtTokens(torch.autograd.Function):
    """values_S[index_T], whose gradient is `segment_sums`: torch's own accumulates token by token."""

    @staticmethod
    def forward(ctx: Any, values_S: Tensor, segment_index: SegmentIndex) -> Tensor:  # pyright: ignore
        ctx.segment_index = segment_index
        return _placed(values_S, segment_index)

    @staticmethod
    def backward(ctx: Any, gradient_T: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return segment_sums(gradient_T, ctx.segment_index), None
