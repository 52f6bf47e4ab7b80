"""The output head: from final hidden states to logits, with what architectures add around the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft_core.errors import OptionsError, PreflightError
from rft_core.packed_tokens import AllowedTokens
from rft_models.layers.fast_linear import PackedMatrix, linear
from rft_models.logprobs.allowed_logprobs import allowed_logprobs
from rft_models.logprobs.fused_loss import LossOutputs, TokenObjective, linear_loss
from rft_models.logprobs.linear_logprobs import HeadOutputs, linear_logprobs, linear_outputs
from rft_models.logprobs.row_statistics import VocabularyShard

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Output head: logits = softcap(scale (h W^T + b)), softcap(z) = c tanh(z / c)."""

    layer: nn.Module
    """Holds `weight` [V, D] and perhaps `bias` [V]; read anew each time, since training replaces values."""
    scale: float = 1.0
    """Cohere's `logit_scale`, or one over Granite's `logits_scaling`."""
    softcap: float | None = None
    """Gemma 2's `final_logit_softcapping`."""
    shard: VocabularyShard | None = None
    """Which rows of the matrix this rank has, where ranks share it; None: all."""

    @property
    def weight(self) -> Tensor:
        """[V, D], or this rank's rows of it."""
        weight = self._own(self.layer.weight)
        assert isinstance(weight, Tensor)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """[V] with the scale applied, or None."""
        bias = self._own(getattr(self.layer, "bias", None))
        # `_scaled` multiplies the hidden states, so that the scale reaches the products and not yet the bias
        return bias if bias is None or self.scale == 1.0 else bias * self.scale

    def _own(self, tensor: Any) -> Any:
        # never gathered: the ranks merge a few numbers a row, see `row_statistics`
        return tensor if self.shard is None or tensor is None else tensor.to_local()

    def logits(self, hidden_RD: Tensor, matrix: PackedMatrix | None = None) -> Tensor:
        """[R, V] float32 (float64 for float64 weights); `matrix` is the weight where many products are made with it."""
        assert self.shard is None, "no rank has all logits"
        weight, bias = self._as(hidden_RD)
        scaled = self._scaled(hidden_RD)
        is_cast = weight is not self.weight
        logits_RV = linear(scaled, weight, bias) if matrix is None or is_cast else matrix.linear(scaled, bias)
        logits_RV = logits_RV if logits_RV.dtype is torch.float64 else logits_RV.float()
        return logits_RV if self.softcap is None else self.softcap * torch.tanh(logits_RV / self.softcap)

    def logprobs(
        self,
        hidden_RD: Tensor,
        targets_R: Tensor,
        *,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool = False,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the log-probability of each target and the entropy, see `linear_logprobs`."""
        weight, bias = self._as(hidden_RD)
        return linear_logprobs(
            self._scaled(hidden_RD),
            weight,
            targets_R,
            bias=bias,
            temperature=temperature,
            softcap=self.softcap,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            shard=self.shard,
            all_counted=True,
        )

    def allowed_logprobs(
        self,
        hidden_RD: Tensor,
        targets_R: Tensor,
        allowed: AllowedTokens,
        *,
        temperature: float,
        with_entropy: bool,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute each target's log-probability among the tokens that it was drawn among, and their entropy.

        Raises:
            OptionsError: ranks share the matrix, so that no rank has the rows of all these tokens.
        """
        if self.shard is not None:
            raise OptionsError(
                code="models.allowed_sharded",
                what="log-probs within a constraint with an output matrix that ranks share",
                where="--tp_size, --constraint",
                why="no rank has the rows of all tokens that may follow",
                state="no weight was changed",
                do="--tp_size 1, or --constraint_logprobs vocabulary",
            )
        weight, bias = self._as(hidden_RD)
        return allowed_logprobs(
            self._scaled(hidden_RD),
            weight,
            targets_R,
            allowed,
            bias=bias,
            temperature=temperature,
            softcap=self.softcap,
            entropy=("gradient" if entropy_gradient else "value") if with_entropy else "none",
        )

    def vocabulary_terms(
        self, hidden_RD: Tensor, targets_R: Tensor, *, with_mean: bool, chunk_size: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute log p(y), log Z and, on request, the mean of log p(v) over the vocabulary, each with a gradient.

        No logits are formed for the last two: log Z = z_y - log p(y), and the mean of the logits is h times the mean
        of the matrix's rows.

        Raises:
            OptionsError: the mean is asked for and the head has a soft cap, whose mean is no product.
        """
        assert self.shard is None, "no rank has all rows of the matrix"
        if with_mean and self.softcap is not None:
            raise OptionsError(
                code="models.smoothing_softcap",
                what=f"label smoothing with logits that are capped at {self.softcap:g}",
                where="--label_smoothing",
                why="the mean of capped logits over the vocabulary is not computed",
                state="no weight was changed",
                do="--label_smoothing 0",
            )
        logprobs_R, _ = self.logprobs(hidden_RD, targets_R, temperature=1.0, with_entropy=False, chunk_size=chunk_size)
        scaled_RD, (weight, bias) = self._scaled(hidden_RD).to(logprobs_R.dtype), self._as(hidden_RD)
        logits_R = (scaled_RD * weight.index_select(0, targets_R).to(logprobs_R.dtype)).sum(1)
        logits_R = logits_R if bias is None else logits_R + bias.index_select(0, targets_R)
        if self.softcap is not None:
            logits_R = self.softcap * torch.tanh(logits_R / self.softcap)
        log_normaliser_R = logits_R - logprobs_R
        if not with_mean:
            return logprobs_R, log_normaliser_R, None
        mean_D = weight.mean(0, dtype=logprobs_R.dtype)
        mean_R = scaled_RD @ mean_D - log_normaliser_R
        return logprobs_R, log_normaliser_R, mean_R if bias is None else mean_R + bias.mean(dtype=logprobs_R.dtype)

    def outputs(
        self,
        hidden_RD: Tensor,
        targets_R: Tensor,
        *,
        temperature: float,
        with_argmax: bool = False,
        top_k: int = 0,
        chunk_size: int | None = None,
    ) -> HeadOutputs:
        """Compute log-probabilities with entropies and, on request, the most probable entries, see `linear_outputs`."""
        weight, bias = self._as(hidden_RD)
        return linear_outputs(
            self._scaled(hidden_RD),
            weight,
            targets_R,
            bias=bias,
            temperature=temperature,
            softcap=self.softcap,
            chunk_size=chunk_size,
            with_entropy=True,
            with_argmax=with_argmax,
            top_k=top_k,
            shard=self.shard,
        )

    def loss(
        self,
        hidden_RD: Tensor,
        targets_R: Tensor,
        per_token_objective: TokenObjective,
        *,
        temperature: float,
        chunk_size: int | None = None,
    ) -> LossOutputs:
        """Sum an objective of each row's own log-probability and entropy, see `linear_loss`."""
        weight, bias = self._as(hidden_RD)
        return linear_loss(
            self._scaled(hidden_RD),
            weight,
            targets_R,
            per_token_objective,
            bias=bias,
            temperature=temperature,
            softcap=self.softcap,
            chunk_size=chunk_size,
            shard=self.shard,
            all_counted=True,
        )

    def _as(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the type of the states, which autocast makes narrower than the weights."""
        weight, bias = self.weight, self.bias
        if hidden_RD.dtype in (torch.bfloat16, torch.float16) and weight.dtype != hidden_RD.dtype:
            return weight.to(hidden_RD.dtype), None if bias is None else bias.to(hidden_RD.dtype)
        return weight, bias

    def _scaled(self, hidden_RD: Tensor) -> Tensor:
        return hidden_RD if self.scale == 1.0 else hidden_RD * self.scale


def head_of(model: Any, where: str) -> OutputHead:
    """Return the output head of a transformers causal language model.

    Raises `PreflightError` where the model has no single output matrix. Whether the reading of the
    configuration is complete is settled by `CausalPolicy.verify`, which compares with the model.
    """
    layer = model.get_output_embeddings()
    if layer is None or not isinstance(getattr(layer, "weight", None), Tensor):
        raise PreflightError(
            code="models.no_output_matrix",
            what=f"{type(model).__name__} has no output matrix of shape [vocabulary, hidden]",
            where=where,
            why="log-probabilities are computed from hidden states and one output matrix",
            do="use a model whose class ends in ForCausalLM and has an lm_head",
        )
    config = model.config.get_text_config(decoder=True)
    return OutputHead(layer, _scale(config.to_dict()), getattr(config, "final_logit_softcapping", None))


def _scale(config: Mapping[str, Any]) -> float:
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= float(config.get(name) or 1.0)
    for name in _DIVISORS:
        scale /= float(config.get(name) or 1.0)
    return scale
