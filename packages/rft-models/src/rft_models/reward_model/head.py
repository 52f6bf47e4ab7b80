"""Score head on the states of packed texts: pooling, then one linear layer with a row a head, all in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, keyed_normal
from rft_models.reward_model.spec import RewardSpec

_FIRST_SCALE = math.log(1 / 0.07)


class AttentionPooling(nn.Module):
    """A learned query attends to the states of each segment: one vector a segment, whatever its length.

    Head i of H has the query q_i [d], d = D / H. With keys k_t = W_k h_t and values v_t = W_v h_t cut into
    heads, p_i = sum_t softmax_t(q_i . k_ti / sqrt(d)) v_ti, and the result is W_o [p_1 .. p_H] (Vaswani et al.
    2017, 1706.03762, with one query that is a parameter). The softmax runs over the segment's own tokens alone.
    """

    def __init__(self, width: int, num_heads: int, *, seed: int) -> None:
        super().__init__()
        if width % num_heads:
            raise OptionsError(
                code="models.reward_pooling",
                what=f"attention_heads = {num_heads} on a width of {width}",
                where="reward head",
                why="each query covers its own part of the width, so the number of queries must divide it",
                do=f"attention_heads {math.gcd(width, num_heads)}",
            )
        self.num_heads = num_heads
        self.query = nn.Parameter(_drawn((num_heads, width // num_heads), seed, "query"))
        self.key_weight = nn.Parameter(_drawn((width, width), seed, "key"))
        self.value_weight = nn.Parameter(_drawn((width, width), seed, "value"))
        self.output_weight = nn.Parameter(_drawn((width, width), seed, "output"))

    def forward(self, states_TD: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
        """[S, D]; `segment_T` [T] int64 counts segments from 0."""
        size = states_TD.shape[1] // self.num_heads
        keys_THd = F.linear(states_TD, self.key_weight).unflatten(1, (self.num_heads, size))
        values_THd = F.linear(states_TD, self.value_weight).unflatten(1, (self.num_heads, size))
        logits_TH = torch.einsum("thd,hd->th", keys_THd, self.query) / math.sqrt(size)
        weights_TH = segment_softmax(logits_TH, segment_T, num_segments)
        pooled_SHd = values_THd.new_zeros(num_segments, self.num_heads, size)
        pooled_SHd = pooled_SHd.index_add(0, segment_T, weights_TH[..., None] * values_THd)
        return F.linear(pooled_SHd.flatten(1), self.output_weight)


class ScoreHead(nn.Module):
    """Pooled states to one number a head. Tensors: `score.weight` [K, D], and those of the pooling if it has any.

    A head that was read from a token classifier has `score.bias` [K] too.
    """

    def __init__(self, spec: RewardSpec, weight_KD: Tensor, *, bias_K: Tensor | None = None, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        # without memory: values of its own would be drawn from torch's generator and replaced in the next line
        self.score = nn.Linear(weight_KD.shape[1], weight_KD.shape[0], bias=False, device="meta")
        self.score.weight = nn.Parameter(weight_KD)
        if bias_K is not None:
            self.score.bias = nn.Parameter(bias_K)
        learned = spec.pooling == "attention"
        self.pooling = AttentionPooling(weight_KD.shape[1], spec.attention_heads, seed=seed) if learned else None
        self.log_scale = nn.Parameter(torch.tensor(_FIRST_SCALE)) if spec.scale_for_train else None

    def forward(self, pooled_SD: Tensor) -> Tensor:
        """[S, K]; in training mode times the learned scale, where there is one."""
        scores_SK = self.score(pooled_SD)
        return scores_SK * self.log_scale.exp() if self.log_scale is not None and self.training else scores_SK


def new_head(spec: RewardSpec, width: int, *, seed: int) -> ScoreHead:
    """Draw a head from the seed: rows from N(0, 1 / (D + 1)), as the value head (2009.01325, appendix B.1)."""
    weight_KD = keyed_normal((len(spec.heads), width), derive_key(seed, "reward-head")) / math.sqrt(width + 1)
    return ScoreHead(spec, weight_KD, seed=seed)


def segment_softmax(logits_TH: Tensor, segment_T: Tensor, num_segments: int) -> Tensor:
    """Compute [T, H]: of each column, the softmax over the tokens of one segment."""
    index_TH = segment_T[:, None].expand_as(logits_TH)
    max_SH = logits_TH.new_full((num_segments, logits_TH.shape[1]), -math.inf)
    # the maximum cancels in the quotient, so no gradient goes through it
    max_SH = max_SH.scatter_reduce(0, index_TH, logits_TH.detach(), "amax")
    powers_TH = (logits_TH - max_SH[segment_T]).exp()
    sums_SH = torch.zeros_like(max_SH).index_add(0, segment_T, powers_TH)
    return powers_TH / sums_SH[segment_T]


def last_tokens(token_ids_T: Tensor, segment_T: Tensor, num_segments: int, pad_id: int | None) -> Tensor:
    """Return [S] indices of each segment's last token that is not `pad_id`; its first token where all are.

    transformers' classifiers read the same token: where the end token is the padding token too, that is the
    token before it.
    """
    index_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
    real_T = torch.ones_like(token_ids_T, dtype=torch.bool) if pad_id is None else token_ids_T != pad_id
    first_S = index_T.new_full((num_segments,), len(index_T)).scatter_reduce(0, segment_T, index_T, "amin")
    last_S = index_T.new_full((num_segments,), -1).scatter_reduce(0, segment_T, index_T.where(real_T, -1), "amax")
    return torch.where(last_S < 0, first_S, last_S)


def _drawn(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Draw a matrix from N(0, 1 / inputs), a function of seed and name."""
    return keyed_normal(shape, derive_key(seed, f"reward-pooling:{name}")) / math.sqrt(shape[-1])
