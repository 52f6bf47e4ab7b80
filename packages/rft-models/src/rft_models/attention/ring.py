"""Attention of rows that several ranks share, with keys and values going round a ring (arXiv 2310.01889).

Each rank keeps its queries. The keys and values of all ranks pass by, one rank's at a time, and what they add is
merged by its log-sum-exp: of two sets of keys with outputs o1, o2 and log-sums a, b

    c = log(exp a + exp b)        o = exp(a - c) o1 + exp(b - c) o2

The backward pass forms the weights of each tile again from the log-sums, p = exp(s - c), and lets the gradients of
keys and values travel with them until they are home:

    dv = p^T g        ds = p (g v^T - sum(g o))        dq = ds k        dk = ds^T q

Any number of heads is shared so; nothing is padded. Sums and log-sums are float32 (float64 for float64 inputs). Kept
for the backward pass are this rank's queries, keys, values, outputs and log-sums: 1 / S of the row's.

Shape letters: L rows here, C keys of a tile, Q queries of one, H = G E query heads on G key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rft_models.attention.ring_layout import RingRow, Tile


class Ring(Protocol):
    """The ranks of a ring, each of which can hand something to the next."""

    @property
    def size(self) -> int:
        """S; 1 or above."""
        ...

    @property
    def rank(self) -> int:
        """Index of this rank, 0 to S - 1; after the last comes the first."""
        ...

    def pass_on(self, tensors: Sequence[Tensor], num_arriving: int) -> Callable[[], list[Tensor]]:
        """Start giving tensors [L, ...] to the next rank.

        The result waits for those of the rank before, which have `num_arriving` rows and are otherwise of the same
        shapes and types. All ranks must call it as often.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Settings:
    row: RingRow
    ring: Ring
    scaling: float
    sliding_window: int | None
    softcap: float | None


def ring_attention(
    query_LHD: Tensor,
    key_LGD: Tensor,
    value_LGD: Tensor,
    row: RingRow,
    ring: Ring,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """`packed_attention` of the whole row, for this rank's rows in the order of `row`; [L, H, D]."""
    assert not dropout, "the weights are formed twice, and would drop other entries"
    settings = _Settings(row, ring, scaling, sliding_window, softcap)
    attended = _RingAttention.apply(query_LHD, key_LGD, value_LGD, settings)
    assert isinstance(attended, Tensor)
    return attended


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, settings: _Settings) -> Tensor:
        out_GEL, log_sum_GEL = _attend(query_LHD, key_LGD, value_LGD, settings)
        attended_LHD = _to_rows(out_GEL).to(query_LHD.dtype)
        ctx.save_for_backward(query_LHD, key_LGD, value_LGD, attended_LHD, log_sum_GEL)
        ctx.settings = settings
        return attended_LHD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query_LHD, key_LGD, value_LGD, attended_LHD, log_sum_GEL = ctx.saved_tensors
        num_groups = key_LGD.shape[1]
        out, upstream = (_to_groups(tensor, num_groups) for tensor in (attended_LHD, gradients[0]))
        # sum(g o) is the mean of g v^T under the weights, so it costs no pass over the ring
        terms = _Terms(
            _to_groups(query_LHD, num_groups) * ctx.settings.scaling,
            upstream,
            log_sum_GEL,
            (upstream * out).sum(-1),
        )
        query_grad, key_grad, value_grad = _gradients(terms, key_LGD, value_LGD, ctx.settings)
        return (
            (_to_rows(query_grad) * ctx.settings.scaling).to(query_LHD.dtype),
            key_grad.to(key_LGD.dtype),
            value_grad.to(value_LGD.dtype),
            None,
        )


def _attend(query_LHD: Tensor, key_LGD: Tensor, value_LGD: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """(outputs [G, E, L, D], log-sums [G, E, L]) over the keys of all ranks."""
    query = _to_groups(query_LHD, key_LGD.shape[1]) * settings.scaling
    out = query.new_zeros(*query.shape[:-1], value_LGD.shape[-1])
    log_sum = query.new_full(query.shape[:-1], -torch.inf)
    row, ring = settings.row, settings.ring
    visiting = [key_LGD, value_LGD]
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        # started before the tiles, so that the transfer runs while they are computed
        arriving = _start(settings, visiting, source) if hop + 1 < ring.size else None
        key, value = (_columns(tensor, query.dtype) for tensor in visiting)
        for tile in row.tiles(source, settings.sliding_window):
            _add_tile(out, log_sum, _scores(query, key, tile, source, settings)[0], value, tile)
        visiting = arriving() if arriving else visiting
    return out, log_sum


def _start(settings: _Settings, tensors: Sequence[Tensor], source: int) -> Callable[[], list[Tensor]]:
    """Give what came from `source` to the next rank; what comes is of the rank before `source`."""
    return settings.ring.pass_on(tensors, settings.row.lengths[(source - 1) % settings.ring.size])


def _scores(query: Tensor, key: Tensor, tile: Tile, source: int, settings: _Settings) -> tuple[Tensor, Tensor | None]:
    """([G, E, Q, C] scores with -inf where nothing is seen, slope of the softcap or None)."""
    scores, slope = query[:, :, tile.query] @ key[:, :, tile.keys].transpose(-1, -2), None
    if settings.softcap is not None:
        bent = torch.tanh(scores / settings.softcap)
        scores, slope = settings.softcap * bent, 1.0 - bent.square()
    if not tile.is_whole:
        row = settings.row
        rows_Q, keys_C = row.rows_of(row.rank)[tile.query], row.rows_of(source)[tile.keys]
        scores = scores.masked_fill(~row.sight(settings.sliding_window).mask(rows_Q, keys_C), -torch.inf)
    return scores, slope


def _add_tile(out: Tensor, log_sum: Tensor, scores: Tensor, value: Tensor, tile: Tile) -> None:
    """Merge a tile into the outputs so far, in place."""
    before = log_sum[:, :, tile.query]
    after = torch.logaddexp(before, torch.logsumexp(scores, -1))
    # a row that has seen nothing yet has -inf: measured from a finite number it weighs 0 and not NaN
    level = after.clamp(min=torch.finfo(after.dtype).min)[..., None]
    part = out[:, :, tile.query]
    part.mul_((before[..., None] - level).exp_()).add_((scores - level).exp_() @ value[:, :, tile.keys])
    log_sum[:, :, tile.query] = after


@dataclass(frozen=True, slots=True)
class _Terms:
    """[G, E, L, D] scaled queries and upstream gradients; [G, E, L] log-sums and sum(g o)."""

    query: Tensor
    upstream: Tensor
    log_sum: Tensor
    mean: Tensor


def _gradients(terms: _Terms, key_LGD: Tensor, value_LGD: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of scaled queries [G, E, L, D], keys and values [L, G, D], in the type of the sums."""
    query_grad = torch.zeros_like(terms.query)
    dtype, ring = terms.query.dtype, settings.ring
    visiting = [key_LGD, value_LGD]
    # gradients of the visiting keys and values; after as many hops as there are ranks they are this rank's own
    sums = [torch.zeros_like(tensor, dtype=dtype) for tensor in visiting]
    for hop in range(ring.size):
        source = (ring.rank - hop) % ring.size
        arriving = _start(settings, visiting, source) if hop + 1 < ring.size else None
        key, value = (_columns(tensor, dtype) for tensor in visiting)
        # views: what the tiles add goes into `sums`
        key_sum, value_sum = (tensor.movedim(0, 1) for tensor in sums)
        for tile in settings.row.tiles(source, settings.sliding_window):
            query, upstream = terms.query[:, :, tile.query], terms.upstream[:, :, tile.query]
            # formed again: only the log-sums of the forward pass were kept
            scores, slope = _scores(terms.query, key, tile, source, settings)
            weights = (scores - terms.log_sum[:, :, tile.query, None]).exp_()
            value_sum[:, tile.keys] += _over_queries(weights, upstream)
            slopes = upstream @ value[:, :, tile.keys].transpose(-1, -2)
            slopes.sub_(terms.mean[:, :, tile.query, None]).mul_(weights)
            slopes = slopes if slope is None else slopes.mul_(slope)
            query_grad[:, :, tile.query] += slopes @ key[:, :, tile.keys]
            key_sum[:, tile.keys] += _over_queries(slopes, query)
        if ring.size > 1:  # the gradients travel with their keys and values until they are home
            sums = _start(settings, sums, source)()
        visiting = arriving() if arriving else visiting
    return query_grad, sums[0], sums[1]


def _over_queries(weights: Tensor, rows: Tensor) -> Tensor:
    """[G, C, D]: the sum over E and Q of [G, E, Q, C] times [G, E, Q, D]."""
    return weights.flatten(1, 2).transpose(-1, -2) @ rows.flatten(1, 2)


def _to_groups(rows_LHD: Tensor, num_groups: int) -> Tensor:
    """[L, H, D] -> [G, E, L, D] in the type of the sums."""
    num_rows, num_heads, width = rows_LHD.shape
    dtype = torch.float64 if rows_LHD.dtype is torch.float64 else torch.float32
    return rows_LHD.view(num_rows, num_groups, num_heads // num_groups, width).permute(1, 2, 0, 3).to(dtype)


def _to_rows(heads_GELD: Tensor) -> Tensor:
    """[G, E, L, D] -> [L, H, D]."""
    return heads_GELD.permute(2, 0, 1, 3).flatten(1, 2)


def _columns(rows_LGD: Tensor, dtype: torch.dtype) -> Tensor:
    """[L, G, D] -> [G, 1, L, D] in the type of the sums."""
    return rows_LGD.movedim(0, 1)[:, None].to(dtype)
