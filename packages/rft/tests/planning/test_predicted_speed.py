"""Samples a minute from the arithmetic of a sample and a rate that was measured."""

from __future__ import annotations

import pytest

from rft.planning.predicted_speed import active_matrices, predicted_speed
from rft_dist.planning.memory_estimate import DecoderSizes

DENSE = DecoderSizes(vocab=100, hidden=16, layers=2, query_width=16, kv_width=8, ffn=40, tied=False)


def test_a_sample_has_the_operations_of_a_hand_calculation() -> None:
    matrices = 2 * (2 * 16 * (16 + 8) + 3 * 16 * 40)
    assert active_matrices(DENSE) == DENSE.layer_matrices == matrices
    speed = predicted_speed(DENSE, num_tokens=10, model_tflops=2.0, num_devices=3)
    flops = 6 * (matrices + 1600) * 10 + 6 * 2 * 16 * 100
    assert speed.flops_a_sample == flops
    assert speed.samples_a_minute == pytest.approx(60 * 3 * 2e12 / flops)


def test_adapters_cost_less_and_a_model_without_a_head_too() -> None:
    whole = predicted_speed(DENSE, num_tokens=10, model_tflops=1, num_devices=1)
    adapted = predicted_speed(DENSE, num_tokens=10, model_tflops=1, num_devices=1, adapter_weights=50)
    headless = predicted_speed(DENSE, num_tokens=10, model_tflops=1, num_devices=1, has_token_head=False)
    assert whole.flops_a_sample - adapted.flops_a_sample == 2 * (active_matrices(DENSE) + 1600) * 10 - 6 * 50 * 10
    assert whole.flops_a_sample - headless.flops_a_sample == 6 * 1600 * 10


def test_a_token_passes_through_its_own_experts_alone() -> None:
    mixture = DecoderSizes(
        vocab=100, hidden=16, layers=1, query_width=16, kv_width=8, ffn=8, tied=True, num_experts=4, experts_per_token=2
    )
    assert active_matrices(mixture) == 2 * 16 * 24 + 16 * (3 * 2 * 8 + 4)
