"""Samples a minute of supervised training, from the arithmetic of a step and a rate that was measured elsewhere.

    samples / minute = 60 R devices / F(n)        F(n) = (6 P + 4 P') n + 6 L q n^2

R is the rate of one device in training (`time/model_tflops` of a run on such a device), n the tokens of a sample, P and
P' the weights in matrices that are trained and frozen (`rft_models.backbone.training_flops`). Nothing is known of a
rate that nobody measured, nor of the seconds that sampling, scoring and evaluations take.
"""

from __future__ import annotations

from dataclasses import dataclass

from rft_dist.planning.memory_estimate import DecoderSizes


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """Samples a minute of the whole grid, and what the prediction assumes."""

    samples_a_minute: float
    flops_a_sample: float
    num_tokens: int
    """Of a sample, the longest that the settings allow."""
    model_tflops: float
    """Of one device."""
    num_devices: int


def predicted_speed(
    sizes: DecoderSizes,
    *,
    num_tokens: int,
    model_tflops: float,
    num_devices: int,
    adapter_weights: int = 0,
    has_token_head: bool = True,
) -> PredictedSpeed:
    """Return the samples a minute of forward and backward passes, with nothing beside them.

    Args:
        sizes: widths of the model.
        num_tokens: of a sample.
        model_tflops: 10^12 operations a second of one device in training, as a run measured it.
        num_devices: that the samples are divided among.
        adapter_weights: trained in the place of the model's own; 0 = all are trained.
        has_token_head: whether there is an output matrix.
    """
    matrices = active_matrices(sizes) + (sizes.vocab * sizes.hidden if has_token_head else 0)
    per_token = 4 * matrices + 6 * adapter_weights if adapter_weights else 6 * matrices
    flops = per_token * num_tokens + 6 * sizes.layers * sizes.query_width * num_tokens**2
    rate = model_tflops * 1e12 * num_devices
    return PredictedSpeed(60 * rate / flops, flops, num_tokens, model_tflops, num_devices)


def active_matrices(sizes: DecoderSizes) -> int:
    """Return the weights in matrices of the layers that one token is multiplied with."""
    attention = 2 * sizes.hidden * (sizes.query_width + sizes.kv_width)
    return sizes.layers * (attention + sizes.hidden * (3 * sizes.active_ffn + sizes.num_experts))
