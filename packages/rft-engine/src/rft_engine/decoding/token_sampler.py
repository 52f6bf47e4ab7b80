"""Sampling of one token a row: which tokens are excluded, and the draw.

Order in which tokens are excluded: stop tokens before `min_new_tokens`, then top-k, top-p and min-p
over what is left. Log-probabilities stay those of the whole temperature distribution, and the
log of the mass that was left is handed out beside them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rft_algos.decoding import sampling
from rft_algos.decoding.sampling_options import SamplingOptions


class TokenSampler:
    """Draws tokens under fixed options. Shapes: B rows, V vocabulary."""

    def __init__(self, options: SamplingOptions, vocab_size: int, device: torch.device) -> None:
        self._options = options
        self.has_stop_tokens = bool(options.stop_token_ids)
        self.is_stop_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._stops_K = torch.tensor(sorted(set(options.stop_token_ids)), dtype=torch.int64, device=device)
        self.is_stop_V[self._stops_K] = True
        self._truncates = options.top_p < 1.0 or options.top_k > 0 or options.min_p > 0.0

    def draw(self, logits_BV: Tensor, uniforms_B: Tensor, may_stop_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Draw one token a row.

        Args:
            logits_BV: [B, V] float32.
            uniforms_B: [B] float64 in [0, 1); not used by greedy decoding.
            may_stop_B: [B] bool, False where a stop token may not be drawn yet; None = everywhere True.

        Returns:
            token ids [B] int64, their log-probabilities [B], the log of the mass they were drawn
            from [B]. Greedy takes the likeliest token; its log-probabilities are those at
            temperature 1 and its mass is not truncated: 0.
        """
        if self._options.temperature == 0.0:
            return self._take_likeliest(logits_BV, may_stop_B)
        if may_stop_B is not None:
            return self._draw_without_stops(logits_BV, uniforms_B, may_stop_B)
        return self._draw_kept(logits_BV, uniforms_B)

    def _draw_kept(self, logits_BV: Tensor, uniforms_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Truncate and draw: token ids, log-probs of the whole distribution, log of the kept mass, all [B]."""
        options = self._options
        if not self._truncates:
            tokens_B, logprobs_B = sampling.draw_whole(logits_BV, options.temperature, uniforms_B)
            return tokens_B, logprobs_B, torch.zeros_like(logprobs_B)
        logprobs_BV = sampling.temperature_scaled_logprobs(logits_BV, options.temperature)
        kept_BV = sampling.kept_tokens(logprobs_BV, options.top_p, max(options.top_k, 0), options.min_p)
        return sampling.draw(logprobs_BV, kept_BV, uniforms_B)

    def _draw_without_stops(
        self, logits_BV: Tensor, uniforms_B: Tensor, may_stop_B: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Truncate and draw within the distribution that is left when stop tokens are taken away.

        It is normalised first: top-p of the whole could keep stop tokens alone, and where stopping
        is nearly certain the mass of everything else is 0 in float32. With a the log-sum-exp of what
        is left and b that of the stop tokens, the log of what is left is a - log(e^a + e^b).
        """
        temperature = self._options.temperature
        stops_BK = logits_BV[:, self._stops_K].masked_fill(may_stop_B.unsqueeze(1), -math.inf)
        left_logits_BV = self._without_stops(logits_BV, may_stop_B)
        # normalised before truncation: top-p of the full distribution could keep stop tokens alone
        tokens_B, left_B, log_kept_of_left_B = self._draw_kept(left_logits_BV, uniforms_B)
        log_sum_left_B = left_logits_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1) / temperature - left_B
        log_left_B = -softplus((stops_BK / temperature).logsumexp(1) - log_sum_left_B)
        return tokens_B, left_B + log_left_B, log_kept_of_left_B + log_left_B

    def _take_likeliest(self, logits_BV: Tensor, may_stop_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if may_stop_B is None:
            tokens_B, logprobs_B = sampling.greedy(logits_BV)
            return tokens_B, logprobs_B, torch.zeros_like(logprobs_B)
        tokens_B, _ = sampling.greedy(self._without_stops(logits_BV, may_stop_B))
        # of the whole distribution: the log-prob of a token means the same with and without `min_new_tokens`
        logprobs_BV = sampling.temperature_scaled_logprobs(logits_BV, 1.0)
        logprobs_B = logprobs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        return tokens_B, logprobs_B, torch.zeros_like(logprobs_B)

    def _without_stops(self, logits_BV: Tensor, may_stop_B: Tensor) -> Tensor:
        """Return a copy in which rows that may not stop have -inf at the stop tokens (a few columns only)."""
        left_BV = logits_BV.clone()
        left_BV[:, self._stops_K] = left_BV[:, self._stops_K].masked_fill(~may_stop_B.unsqueeze(1), -math.inf)
        return left_BV
