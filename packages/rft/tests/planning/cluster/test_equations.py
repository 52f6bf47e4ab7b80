"""Each equation against a calculation by hand."""

from __future__ import annotations

import pytest

from rft.planning.cluster.equations import (
    RankGroup,
    decode_step_bytes,
    decode_step_flops,
    forward_flops,
    gather_seconds,
    gathered_bytes,
    host_copy_seconds,
    matrix_weights,
    optimizer_seconds,
    sum_seconds,
    training_flops,
)
from rft.planning.cluster.hardware import TRAINING
from rft_dist.planning.memory_estimate import DecoderSizes

SMALL = DecoderSizes(vocab=100, hidden=16, layers=2, query_width=16, kv_width=8, ffn=40, tied=False)
LLAMA_8B = DecoderSizes(128256, 4096, 32, 4096, 1024, 14336, tied=False)
MATRICES = 2 * (2 * 16 * (16 + 8) + 3 * 16 * 40) + 100 * 16


def test_operations_of_a_sample() -> None:
    assert matrix_weights(SMALL) == MATRICES
    assert forward_flops(SMALL, 10) == 2 * MATRICES * 10 + 2 * 2 * 16 * 100
    assert training_flops(SMALL, 10, recomputes=False) == 3 * forward_flops(SMALL, 10)
    assert training_flops(SMALL, 10, recomputes=True) == 4 * forward_flops(SMALL, 10)


def test_the_rate_of_training_is_the_published_tokens_a_second() -> None:
    rate = 5762 * training_flops(LLAMA_8B, 8192, recomputes=False) / 8192
    assert rate == pytest.approx(TRAINING.value, rel=0.002)


def test_a_ring_within_a_machine_and_between_machines() -> None:
    machine, two = RankGroup(8, 8), RankGroup(16, 8)
    assert gathered_bytes(800, 8) == 700
    assert (machine.bandwidth, two.bandwidth, RankGroup(8, 1).bandwidth) == (450e9, 400e9, 50e9)
    assert gather_seconds(8e9, machine, 2) == pytest.approx(7e9 / 450e9 + 2 * (8.4e-6 + 7 * 3.4e-6))
    assert gather_seconds(16e9, two) == pytest.approx(15e9 / 400e9 + 8.4e-6 + 14 * 3.4e-6 + 14e-6)
    assert gather_seconds(1e9, RankGroup(1, 1)) == sum_seconds(1e9, RankGroup(1, 1)) == 0


def test_a_sum_takes_the_ring_or_the_tree() -> None:
    assert sum_seconds(8e9, RankGroup(8, 8)) == pytest.approx(14e9 / 450e9 + 8.4e-6 + 14 * 3.4e-6)
    # on 64 machines of 8 a small sum goes through the tree: 7 steps within a machine and 6 between them, up and down
    assert sum_seconds(1000, RankGroup(512, 8)) == pytest.approx(2000 / 400e9 + 8.4e-6 + 2 * 13 * 28e-6)


def test_a_decode_step_reads_the_weights_once_and_every_row_its_cache() -> None:
    of_token = 2 * 2 * 8 * 2
    assert decode_step_bytes(SMALL, 3, 50, 2, 1) == 2 * MATRICES + 3 * 50 * of_token
    assert decode_step_bytes(SMALL, 3, 50, 2, 4) == (2 * MATRICES + 3 * 50 * of_token) / 4
    assert decode_step_flops(SMALL, 3, 50, 1) == 3 * (2 * MATRICES + 4 * 2 * 16 * 50)


def test_copies_and_the_optimizer_take_their_bandwidth() -> None:
    assert host_copy_seconds(64e9) == 2
    assert optimizer_seconds(1e9, 2.8e12) == pytest.approx(0.01)
