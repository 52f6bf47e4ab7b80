"""Sampling one token a row, as a pure function of logits and given uniforms.

Order of work: temperature, then which tokens are kept (min-p, top-k, top-p), then the draw.
The log-prob reported for a token is that of logits / temperature before anything is cut off, and
`log_kept_mass` is what was kept; training uses the first and, if it corrects for truncation, both.

Nothing here sorts a whole vocabulary unless a nucleus is that wide: a draw is one pass of
cumulative sums, top-k a partial selection.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rft_algos.input_checks import refuse

_CHUNK_ELEMENTS = 2**18
"""On a CPU rows are handled in chunks of about 1 MiB, which stay in its cache: on one core a draw from
[512, 32000] takes 24 ms instead of 110 ms."""

_FIRST_CANDIDATES = 256
"""Most nuclei are narrower; rows that are not are tried again with sixteen times as many."""

_BLOCK = 32
"""Tokens whose mass `draw_whole` sums at once. A running sum costs five times as much for each entry as a plain one."""

_MASS_ROUNDING = 1e-6
"""float32 probabilities carry about this much rounding. Four tokens of 1/4 with top-p 0.5 must
keep two, though the float32 sum of two may fall short of 0.5 by 1e-8."""


def temperature_scaled_logprobs(logits_BV: Tensor, temperature: float | Tensor) -> Tensor:
    """log softmax(logits / temperature).

    Args:
        logits_BV: [B, V], any floating type; -inf forbids a token.
        temperature: positive, one for all rows or [B]; use `greedy` for 0. Those of a tensor are not
            checked, because that would wait for the device.

    Returns:
        [B, V] log-probs in nats, float32 (float64 for float64 logits).
    """
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        rows = logits_BV.shape[:1]
        if temperature.shape != rows:
            refuse(f"temperatures {temperature.shape} for rows {rows}")
        return torch.log_softmax(logits / temperature[:, None].to(logits), dim=1)
    if not temperature > 0:
        refuse(f"temperature must be positive, it is {temperature}; greedy() is for 0")
    # at temperature 1 a pass over the vocabulary is spared
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def log_normaliser(logits_BV: Tensor, temperature: float) -> Tensor:
    """Log of the sum of exp(logits / temperature): what a few log-probs of a row need of all the others.

    A pass over the logits that writes nothing of their size, where `temperature_scaled_logprobs` writes them all.

    Args:
        logits_BV: [B, V], any floating type; -inf forbids a token.
        temperature: positive.

    Returns:
        [B] in nats, float32 (float64 for float64 logits).
    """
    if not temperature > 0:
        refuse(f"temperature must be positive, it is {temperature}; greedy() is for 0")
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    chunks = [logits[rows] for rows in _row_chunks(logits)]
    return torch.cat([(one if temperature == 1.0 else one / temperature).logsumexp(1) for one in chunks])


def fire_temperatures(num_generated_B: Tensor, temperature: float, first_token_temperature: float) -> Tensor:
    """Temperature of each row's next token under FIRE: high for the first token, then as usual.

    A high temperature makes the first token nearly uniform over what may be drawn, and the responses
    differ from there on; the paper bounds it by top-k. The log-prob that is reported for a first
    token is at its own temperature, so training must divide its logits by that one too.

    Source: Chen et al. 2024, "Flaming-hot initiation with regular execution sampling" (arXiv 2410.21236).

    Args:
        num_generated_B: [B] tokens that each row's response has so far.
        temperature: of all tokens but the first, positive.
        first_token_temperature: of the first, positive.

    Returns:
        [B] float64, for `temperature_scaled_logprobs`.
    """
    for value in (temperature, first_token_temperature):
        if not value > 0:
            refuse(f"temperatures must be positive: {temperature}, {first_token_temperature} for the first token")
    temperatures_B = torch.full_like(num_generated_B, temperature, dtype=torch.float64)
    return temperatures_B.masked_fill_(num_generated_B == 0, first_token_temperature)


def truncated_logprobs(logprobs_B: Tensor, log_kept_mass_B: Tensor, kept_B: Tensor | None = None) -> Tensor:
    """Log-prob of a token within the set it was drawn from: log p(token) - log(mass of the kept set).

    What the sampler did, where top-p, top-k or min-p cut tokens off. A ratio of two policies needs it
    on both sides, with the same kept set: the mass is the one that each policy gives to that set.

    Args:
        logprobs_B: [B] log-probs of the tokens under the full distribution, in nats; the gradient
            flows through them.
        log_kept_mass_B: [B] log of the mass that the same distribution gives to the kept set, likewise;
            0 where nothing was cut off.
        kept_B: [B] bool, whether the token is in the kept set; None where all are, as drawn tokens are.

    Returns:
        [B] log-probs in nats; -inf, without gradient, for a token that is not kept.
    """
    within_B = logprobs_B - log_kept_mass_B
    return within_B if kept_B is None else torch.where(kept_B, within_B, -math.inf)


def kept_tokens(logprobs_BV: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Mask the tokens that may be sampled, cutting off by min-p, then top-k, then top-p of what is left.

    min-p keeps p >= min_p * max p. top-k keeps the k most probable. top-p keeps the smallest set of
    the most probable tokens whose share of the remaining mass is at least top_p, the token that
    crosses it included. Equal probabilities go to the lower token id first. A token of
    probability 0 is never kept, the most probable one always.

    Sources: Holtzman et al. 2020 (top-p, arXiv 1904.09751); Nguyen et al. 2024 (min-p, arXiv
    2407.01082). The order is the one that vLLM uses.

    Args:
        logprobs_BV: [B, V] normalised log-probs at the sampling temperature.
        top_p: in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.
        min_p: in [0, 1]; 0 keeps all.

    Returns:
        [B, V] bool.
    """
    if not 0 < top_p <= 1:
        refuse(f"top_p must be in (0, 1], it is {top_p}")
    if not top_k >= 0:
        refuse(f"top_k must be 0 (all) or more, it is {top_k}")
    if not 0 <= min_p <= 1:
        refuse(f"min_p must be in [0, 1], it is {min_p}")
    chunks = [_kept_rows(logprobs_BV[rows], top_p, top_k, min_p) for rows in _row_chunks(logprobs_BV)]
    return torch.cat(chunks)


def draw(logprobs_BV: Tensor, kept_BV: Tensor | None, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row by inverse CDF in token-id order: the first id whose cumulative kept mass exceeds u * total.

    A token of probability 0 is never drawn. If u * total rounds up to the total, the last kept
    token is drawn.

    Args:
        logprobs_BV: [B, V] normalised log-probs at the sampling temperature.
        kept_BV: [B, V] bool from `kept_tokens`, or None where nothing is cut off.
        uniforms_B: [B] in [0, 1), one a row.

    Returns:
        token_ids_B [B] int64, logprobs_B [B] (of the full distribution, not of the kept one) and
        log_kept_mass_B [B] (log of the mass kept, 0 where `kept_BV` is None), both in nats.
    """
    chunks = [
        _draw_rows(logprobs_BV[rows], None if kept_BV is None else kept_BV[rows], uniforms_B[rows])
        for rows in _row_chunks(logprobs_BV)
    ]
    token_ids_B = torch.cat([token_ids for token_ids, _ in chunks])
    log_kept_mass_B = torch.cat([log_mass for _, log_mass in chunks])
    return token_ids_B, logprobs_BV.gather(1, token_ids_B[:, None])[:, 0], log_kept_mass_B


def draw_whole(logits_BV: Tensor, temperature: float, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row where nothing is cut off: `draw` of the same distribution, in less than half of its passes.

    The mass of blocks of token ids is searched first, then the block: probabilities are made once, and log-probs of
    the drawn tokens alone. A token may differ from that of `draw` where the uniform is within the rounding of a
    boundary.

    Args:
        logits_BV: [B, V], any floating type; -inf forbids a token.
        temperature: positive; use `greedy` for 0.
        uniforms_B: [B] in [0, 1), one a row.

    Returns:
        token_ids_B [B] int64 and logprobs_B [B] in nats, float32 (float64 for float64 logits).
    """
    if logits_BV.device.type != "cpu" or logits_BV.shape[1] % _BLOCK or not logits_BV.shape[0]:
        token_ids_B, logprobs_B, _ = draw(temperature_scaled_logprobs(logits_BV, temperature), None, uniforms_B)
        return token_ids_B, logprobs_B
    if not temperature > 0:
        refuse(f"temperature must be positive, it is {temperature}; greedy() is for 0")
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    chunks = [_draw_by_blocks(logits[rows], temperature, uniforms_B[rows]) for rows in _row_chunks(logits)]
    return torch.cat([token_ids for token_ids, _ in chunks]), torch.cat([logprobs for _, logprobs in chunks])


def draw_allowed(
    logits_BV: Tensor,
    allowed_BC: Tensor,
    there_BC: Tensor,
    uniforms_B: Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row among the few that are allowed, by inverse CDF in the order of their columns.

    What is allowed is normalised first, so that it can be drawn from however little the model gives to it; min-p,
    top-k and top-p cut within that. With Z the sum of exp(logit / temperature) over all tokens and A that over the
    allowed ones, a token's log-prob is log p(token | allowed) + log(A / Z).

    Args:
        logits_BV: [B, V], any floating type.
        allowed_BC: [B, C] int64 token ids, each at most once in a row.
        there_BC: [B, C] bool, False for places that hold no token; at least one a row.
        uniforms_B: [B] in [0, 1); not used at temperature 0.
        temperature: 0 takes the likeliest allowed token and counts log-probs at temperature 1.
        top_p: as for `kept_tokens`, within what is allowed; not used at temperature 0.
        top_k: likewise.
        min_p: likewise.

    Returns:
        columns_B [B] int64, logprobs_B [B] over the whole vocabulary, log_kept_mass_B [B] of what could have been
        drawn, both in nats and no number where the model gives everything that is allowed probability 0.
    """
    # greedy takes the largest whatever the temperature is; log-probs are then those at 1
    heat = temperature or 1.0
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    whole_B = log_normaliser(logits, heat)
    left_BC = (logits.gather(1, allowed_BC) / heat).masked_fill_(~there_BC, -math.inf)
    left_B1 = left_BC.logsumexp(1, keepdim=True)
    within_BC = left_BC - left_B1
    # rounding may put the allowed share above the whole
    log_allowed_B = (left_B1[:, 0] - whole_B).clamp(max=0.0)
    if temperature == 0.0:
        columns_B = within_BC.argmax(1)
        return columns_B, within_BC.gather(1, columns_B[:, None])[:, 0] + log_allowed_B, log_allowed_B
    is_cut = top_p < 1 or top_k > 0 or min_p > 0
    kept_BC = kept_tokens(within_BC, top_p, top_k, min_p) if is_cut else None
    columns_B, within_B, log_kept_B = draw(within_BC, kept_BC, uniforms_B)
    return columns_B, within_B + log_allowed_B, log_kept_B + log_allowed_B


def greedy(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most probable token of each row, the lowest id among equals, with its log-prob at temperature 1.

    Args:
        logits_BV: [B, V], any floating type.

    Returns:
        token_ids_B [B] int64 and logprobs_B [B] in nats, float32 (float64 for float64 logits).
    """
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    token_ids_B = logits.argmax(dim=1)
    largest_B = logits.gather(1, token_ids_B[:, None])[:, 0]
    return token_ids_B, largest_B - torch.logsumexp(logits, dim=1)


def _row_chunks(logprobs_BV: Tensor) -> list[slice]:
    num_rows, vocab_size = logprobs_BV.shape
    size = max(1, _CHUNK_ELEMENTS // vocab_size) if logprobs_BV.device.type == "cpu" else num_rows
    # no rows are still one empty chunk, because `cat` of nothing is an error
    return [slice(start, start + size) for start in range(0, num_rows, size)] or [slice(0, 0)]


def _kept_rows(logprobs_BV: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    kept_BV = logprobs_BV > -math.inf
    if min_p > 0:
        kept_BV &= logprobs_BV >= logprobs_BV.amax(1, keepdim=True) + math.log(min_p)
    if 0 < top_k < logprobs_BV.shape[1]:
        smallest_B1 = logprobs_BV.topk(top_k, dim=1).values[:, -1:]
        kept_BV &= _most_probable(logprobs_BV, smallest_B1, torch.full_like(smallest_B1, top_k, dtype=torch.int64))
    if top_p < 1:
        kept_BV &= _nucleus(logprobs_BV.masked_fill(~kept_BV, -math.inf), top_p)
    return kept_BV


def _draw_rows(logprobs_BV: Tensor, kept_BV: Tensor | None, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    mass_BV = logprobs_BV.exp()
    if kept_BV is not None:
        mass_BV.mul_(kept_BV)
    cumulative_BV = mass_BV.cumsum_(1)
    total_B1 = cumulative_BV[:, -1:]
    # right=True: the first id whose cumulative mass exceeds the target, so its own mass is not 0
    target_B1 = uniforms_B[:, None].to(total_B1) * total_B1
    token_ids_B = torch.searchsorted(cumulative_BV, target_B1, right=True)[:, 0]
    # u * total may round up to the total, and then no id exceeds it
    beyond_B = token_ids_B >= logprobs_BV.shape[1]
    if bool(beyond_B.any()):
        kept = None if kept_BV is None else kept_BV[beyond_B]
        token_ids_B[beyond_B] = _last_possible(logprobs_BV[beyond_B], kept)
    # rounding may put the kept mass above 1, whose log would be positive
    log_mass_B = torch.zeros_like(total_B1[:, 0]) if kept_BV is None else total_B1[:, 0].log().clamp(max=0.0)
    return token_ids_B, log_mass_B


def _draw_by_blocks(logits_BV: Tensor, temperature: float, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    scaled_BV = logits_BV if temperature == 1.0 else logits_BV / temperature
    mass_BV = torch.softmax(scaled_BV, 1)
    mass_BNK = mass_BV.view(mass_BV.shape[0], -1, _BLOCK)
    ends_BN = mass_BNK.sum(2).cumsum_(1)
    target_B1 = uniforms_B[:, None].to(ends_BN) * ends_BN[:, -1:]
    # right=True: the first block whose end exceeds the target, so that its mass is not 0
    block_B1 = torch.searchsorted(ends_BN, target_B1, right=True).clamp_(max=ends_BN.shape[1] - 1)
    before_B1 = ends_BN.gather(1, (block_B1 - 1).clamp_(min=0)).masked_fill_(block_B1 == 0, 0.0)
    rows_B1 = torch.arange(mass_BV.shape[0])[:, None]
    within_BK = mass_BNK[rows_B1, block_B1][:, 0].cumsum_(1).add_(before_B1)
    token_ids_B1 = torch.searchsorted(within_BK, target_B1, right=True)
    beyond_B = token_ids_B1[:, 0] >= _BLOCK
    token_ids_B1 += block_B1 * _BLOCK
    if bool(beyond_B.any()):
        # u * total rounded up to the total, or the block's own sum below its end: the last token that may be drawn
        behind_BV = torch.arange(mass_BV.shape[1]) >= (block_B1[beyond_B] + 1) * _BLOCK
        possible_BV = (mass_BV[beyond_B] > 0).masked_fill_(behind_BV, value=False)
        last_B = mass_BV.shape[1] - 1 - possible_BV.flip(1).to(torch.uint8).argmax(1)
        token_ids_B1[beyond_B] = last_B[:, None]
    # from the likeliest token, since the log of a probability below 1e-38 would have few digits
    below_B = (scaled_BV.gather(1, token_ids_B1) - scaled_BV.amax(1, keepdim=True))[:, 0]
    return token_ids_B1[:, 0], below_B + mass_BV.amax(1).log()


def _last_possible(logprobs_BV: Tensor, kept_BV: Tensor | None) -> Tensor:
    possible_BV = logprobs_BV.exp() > 0
    if kept_BV is not None:
        possible_BV &= kept_BV
    # argmax takes the first of equals, which in the reversed row is the last possible token
    return logprobs_BV.shape[1] - 1 - possible_BV.flip(1).to(torch.uint8).argmax(1)


def _nucleus(logprobs_BV: Tensor, top_p: float) -> Tensor:
    """[B, V] bool of the smallest most probable set with at least top_p of each row's mass."""
    vocab_size = logprobs_BV.shape[1]
    needed_B1 = logprobs_BV.exp().sum(1, keepdim=True, dtype=torch.float64) * (top_p * (1 - _MASS_ROUNDING))
    smallest_B1 = torch.empty_like(logprobs_BV[:, :1])
    counts_B1 = torch.empty_like(smallest_B1, dtype=torch.int64)
    rows = torch.arange(logprobs_BV.shape[0], device=logprobs_BV.device)
    num_candidates = min(_FIRST_CANDIDATES, vocab_size)
    while rows.numel() > 0:
        candidates = logprobs_BV[rows].topk(num_candidates, dim=1).values
        short = candidates.exp().cumsum(1, dtype=torch.float64) < needed_B1[rows]
        # the candidate that reaches the mass is in the set
        counts = (short.sum(1, keepdim=True) + 1).clamp(max=num_candidates)
        smallest_B1[rows], counts_B1[rows] = candidates.gather(1, counts - 1), counts
        # rows whose candidates fall short go into another round, with more of them
        rows = rows[short[:, -1]] if num_candidates < vocab_size else rows[:0]
        num_candidates = min(16 * num_candidates, vocab_size)
    return _most_probable(logprobs_BV, smallest_B1, counts_B1)


def _most_probable(logprobs_BV: Tensor, smallest_B1: Tensor, counts_B1: Tensor) -> Tensor:
    """[B, V] bool of the `counts` largest of each row, of which `smallest` is the last."""
    larger_BV = logprobs_BV > smallest_B1
    equal_BV = logprobs_BV == smallest_B1
    room_B1 = counts_B1 - larger_BV.sum(1, keepdim=True)
    # equals are told apart only where they are more than the places left: that takes another pass
    if bool((equal_BV.sum(1, keepdim=True) > room_B1).any()):
        equal_BV &= equal_BV.cumsum(1) <= room_B1
    return larger_BV | equal_BV
