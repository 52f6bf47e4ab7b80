"""Bytes of a rank: every formula against its own arithmetic, on sizes that share no factor by chance."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from rft_dist.planning.memory_estimate import (
    BUCKET_BYTES,
    GIB,
    DecoderSizes,
    MemoryTerm,
    TrainingMemoryConfig,
    activation_bytes_of_block,
    checkpoint_copy,
    estimate,
    host_peak,
    peak_bytes,
)
from rft_dist.planning.run_layout import RunLayout
from rft_dist.strategies.registry import SHARDINGS, run_dims, run_layout

V, H, L, Q, K, F = 1009, 48, 5, 40, 24, 104
SMALL = DecoderSizes(vocab=V, hidden=H, layers=L, query_width=Q, kv_width=K, ffn=F, tied=True)
ATTENTION = H * Q + 2 * H * K + Q * H
BLOCK = ATTENTION + 3 * H * F + 2 * H
P = V * H + L * BLOCK + H
LARGE = replace(SMALL, vocab=600_011)
"""Its gradients fill more than one bucket."""


def layout_of(
    sharding: str = "replicated", dp_size: int = 1, sp_size: int = 1, tp_size: int = 1, shard_size: int | None = None
) -> RunLayout:
    settings = replace(SHARDINGS[sharding], sp_size=sp_size, tp_size=tp_size, shard_size=shard_size)
    return run_layout(settings, run_dims(settings, dp_size * sp_size * tp_size))


RANKS = set(inspect.signature(layout_of).parameters)


def terms(sizes: DecoderSizes = SMALL, **options: Any) -> dict[str, MemoryTerm]:
    """Terms of a plan; options on ranks are those of `layout_of`."""
    layout = layout_of(**{name: value for name, value in options.items() if name in RANKS})
    others = {name: value for name, value in options.items() if name not in RANKS}
    found = estimate(sizes, TrainingMemoryConfig(layout=layout, **others))
    assert len({term.name for term in found}) == len(found)
    return {term.name: term for term in found}


def sizes_of(sizes: DecoderSizes = SMALL, **options: Any) -> dict[str, int]:
    return {name: term.num_bytes for name, term in terms(sizes, **options).items()}


def test_sizes_are_told_in_binary_units() -> None:
    assert GIB == 1024**3
    assert 16 * BUCKET_BYTES == GIB


def test_parameters_of_a_dense_decoder() -> None:
    assert SMALL.parameters == P
    assert replace(SMALL, tied=False).parameters == P + V * H
    assert replace(SMALL, attention_bias=True).parameters == P + L * (Q + 2 * K)
    assert replace(SMALL, output_bias=True).parameters == P + L * H
    assert replace(SMALL, ffn_bias=True).parameters == P + L * (2 * F + H)
    assert replace(SMALL, head_norm=8).parameters == P + L * 2 * 8
    assert SMALL.active_ffn == F


def test_parameters_of_a_mixture_of_experts() -> None:
    mixture = replace(SMALL, num_experts=6, experts_per_token=2, shared_ffn=50)
    experts = 6 * 3 * H * F + H * 6 + 3 * H * 50
    assert mixture.parameters == V * H + L * (ATTENTION + experts + 2 * H) + H
    assert replace(mixture, shared_gate=True).parameters == mixture.parameters + L * H
    assert replace(mixture, ffn_bias=True).parameters == mixture.parameters + L * 6 * (2 * F + H)
    assert mixture.active_ffn == 2 * F + 50


def test_one_rank_holds_weights_gradients_and_two_moments_in_their_own_type() -> None:
    assert sizes_of() == {"parameters": 4 * P, "gradients": 4 * P, "Adam moments": 8 * P, "activations": 0, "logits": 0}
    two = sizes_of(weight_bytes=2)
    assert (two["parameters"], two["gradients"], two["Adam moments"]) == (2 * P, 2 * P, 4 * P)


def test_master_copies_make_gradients_and_moments_float32() -> None:
    found = sizes_of(weight_bytes=2, master_copy=True, average=True)
    assert found["parameters"] == 2 * P
    assert (found["gradients"], found["Adam moments"]) == (4 * P, 8 * P)
    assert (found["master copy"], found["moving average"]) == (4 * P, 4 * P)
    assert "moving average" not in sizes_of(weight_bytes=2, master_copy=True)
    assert "master copy" not in sizes_of(average=True)


SHARED_OUT = {
    "replicated": set[str](),
    "zero1": {"Adam moments", "master copy", "moving average"},
    "zero2": {"Adam moments", "master copy", "moving average", "gradients"},
    "zero3": {"Adam moments", "master copy", "moving average", "gradients", "parameters"},
    "fsdp": {"Adam moments", "master copy", "moving average", "gradients", "parameters"},
}


@pytest.mark.parametrize("sharding", SHARED_OUT)
def test_each_way_of_sharding_divides_its_parts_by_the_ranks(sharding: str) -> None:
    options: dict[str, Any] = {"sharding": sharding, "weight_bytes": 2, "master_copy": True, "average": True}
    whole, shared = sizes_of(**options), sizes_of(**options, dp_size=7, sp_size=2)
    for name in ("parameters", "gradients", "Adam moments", "master copy", "moving average"):
        ranks = 14 if name in SHARED_OUT[sharding] else 1
        assert shared[name] == -(-whole[name] // ranks), name
    assert ("gathered weights" in shared) == (sharding in ("zero3", "fsdp"))
    assert ("gradient exchange" in shared) == (sharding == "replicated")
    adapters = sizes_of(**options, dp_size=7, adapter_weights=1001)
    expected = {"parameters": 2 * P, "adapters": 4 * 1001, "gradients": 4 * 1001, "Adam moments": 8 * 1001}
    expected["moving average"] = 4 * 1001
    divided = SHARED_OUT[sharding] | ({"adapters"} if sharding in ("zero3", "fsdp") else set[str]())
    for name, size in expected.items():
        assert adapters[name] == -(-size // (7 if name in divided else 1)), name
    assert ("gathered weights" in adapters) == (sharding in ("zero3", "fsdp"))


def test_copies_of_a_shard_group_and_a_tensor_group_divide_by_their_own_numbers() -> None:
    assert sizes_of(sharding="fsdp", dp_size=8, shard_size=4)["parameters"] == -(-4 * P // 4)
    assert sizes_of(dp_size=2, tp_size=3)["parameters"] == -(-4 * P // 3)
    assert sizes_of(sharding="fsdp", dp_size=2, tp_size=3)["Adam moments"] == -(-8 * P // 6)


def test_muon_keeps_one_momentum_of_each_matrix_of_the_layers() -> None:
    matrices = L * (ATTENTION + 3 * H * F)
    found = sizes_of(muon=True)
    assert (found["Muon momenta"], found["Adam moments"]) == (4 * matrices, 8 * (P - matrices))
    assert "Muon momenta" not in sizes_of()
    assert sizes_of(muon=True, sharding="fsdp", dp_size=5)["Muon momenta"] == -(-4 * matrices // 5)
    copied = checkpoint_copy(list(terms(muon=True).values()), with_optimizer=True)
    assert copied.num_bytes == 4 * P + 4 * matrices + 8 * (P - matrices)
    mixture = replace(SMALL, num_experts=7, experts_per_token=2, shared_ffn=11, shared_gate=True)
    assert mixture.layer_matrices == L * (ATTENTION + 7 * 3 * H * F + 7 * H + 3 * H * 11)


def test_autocast_halves_what_products_keep_and_has_copies_of_their_matrices() -> None:
    found, exact = sizes_of(autocast=True, micro_tokens=3), sizes_of(micro_tokens=3)
    assert found["autocast copies"] == 2 * (L * (ATTENTION + 3 * H * F) + V * H)
    assert found["activations"] == 3 * L * (activation_bytes_of_block(SMALL, 2) + 12 * H) < exact["activations"]
    assert all(found[name] == exact[name] for name in ("parameters", "gradients", "Adam moments", "logits"))
    assert "autocast copies" not in exact
    again = sizes_of(autocast=True, recomputes=True, recompute_every=2)
    assert again["autocast copies"] == 2 * (2 * (ATTENTION + 3 * H * F) + V * H)


def test_adapters_take_the_place_of_the_gradients_of_the_model() -> None:
    assert sizes_of(adapter_weights=1000, weight_bytes=2) == {
        "parameters": 2 * P,
        "adapters": 4000,
        "gradients": 4000,
        "Adam moments": 8000,
        "activations": 0,
        "logits": 0,
    }
    assert sizes_of(adapter_weights=1000, average=True)["moving average"] == 4000


def test_two_layers_and_the_embeddings_are_whole_at_a_moment() -> None:
    outside = V * H + H
    assert sizes_of(sharding="fsdp", dp_size=2)["gathered weights"] == 4 * (outside + 2 * BLOCK)
    assert sizes_of(sharding="zero3", dp_size=2, narrow_compute=True)["gathered weights"] == 2 * (outside + 2 * BLOCK)
    assert sizes_of(sharding="fsdp", tp_size=3)["gathered weights"] == 4 * (outside + 2 * BLOCK) // 3
    one = replace(SMALL, layers=1)
    assert sizes_of(one, sharding="fsdp", dp_size=2)["gathered weights"] == 4 * (outside + BLOCK)
    untied = replace(SMALL, tied=False)
    assert sizes_of(untied, sharding="fsdp", dp_size=2)["gathered weights"] == 4 * (outside + V * H + 2 * BLOCK)


def test_replicas_exchange_gradients_in_buckets_of_at_most_64_mib() -> None:
    assert BUCKET_BYTES == 64 * 2**20
    assert sizes_of(dp_size=2)["gradient exchange"] == 2 * 4 * P
    assert sizes_of(sp_size=2)["gradient exchange"] == 2 * 4 * P
    assert sizes_of(tp_size=3)["gradient exchange"] == 2 * -(-4 * P // 3)
    for dp, sp, tp in ((2, 2, 1), (1, 3, 3), (2, 1, 2)):
        assert "gradient exchange" in sizes_of(dp_size=dp, sp_size=sp, tp_size=tp)
    assert sizes_of(dp_size=2, weight_bytes=2)["gradient exchange"] == 2 * 4 * P
    assert sizes_of(LARGE, dp_size=2)["gradient exchange"] == 2 * BUCKET_BYTES
    assert sizes_of(LARGE, dp_size=2, adapter_weights=1000)["gradient exchange"] == 2 * 4 * 1000
    assert "gradient exchange" not in sizes_of()


def test_what_one_block_keeps_for_its_backward_pass() -> None:
    assert activation_bytes_of_block(SMALL, 2) == 2 * (6 * H + 4 * Q + 5 * K + 5 * F) + 16 * H
    assert activation_bytes_of_block(SMALL, 4, 3) == 4 * (6 * H + -(-(4 * Q + 5 * K + 5 * F) // 3)) + 16 * H
    mixture = replace(SMALL, num_experts=6, experts_per_token=2)
    assert activation_bytes_of_block(mixture, 2) == 2 * (6 * H + 4 * Q + 5 * K + 5 * 2 * F) + 16 * H


def test_activations_are_those_of_all_blocks_or_of_what_is_recomputed() -> None:
    block = activation_bytes_of_block(SMALL, 4)
    assert sizes_of(micro_tokens=101)["activations"] == 101 * L * block
    assert sizes_of(micro_tokens=101, sp_size=2)["activations"] == 51 * L * block
    assert sizes_of(micro_tokens=101, recomputes=True)["activations"] == 101 * (L * 4 * H + block)
    every_2 = sizes_of(micro_tokens=101, recomputes=True, recompute_every=2)["activations"]
    assert every_2 == 101 * (3 * 4 * H + 2 * block)
    narrow = activation_bytes_of_block(SMALL, 2, 3)
    found = sizes_of(micro_tokens=101, recomputes=True, narrow_compute=True, tp_size=3)["activations"]
    assert found == 101 * (L * 2 * H + narrow)


def test_logits_of_as_many_rows_as_the_head_computes_at_once() -> None:
    assert sizes_of(micro_tokens=101)["logits"] == 2 * 101 * V * 4
    assert sizes_of(micro_tokens=101, sp_size=2)["logits"] == 2 * 51 * V * 4
    assert sizes_of(micro_tokens=101, head_rows=30)["logits"] == 2 * 30 * V * 4
    assert sizes_of(micro_tokens=101, head_rows=300)["logits"] == 2 * 101 * V * 4
    assert sizes_of(micro_tokens=101, tp_size=2)["logits"] == 2 * 101 * 505 * 4


def test_an_engine_in_the_process_keeps_keys_and_values() -> None:
    assert sizes_of(cache_rows=7, cache_tokens=90)["keys and values"] == 7 * 90 * 2 * L * K * 4
    narrow = sizes_of(cache_rows=7, cache_tokens=90, narrow_compute=True)
    assert narrow["keys and values"] == 7 * 90 * 2 * L * K * 2
    assert "keys and values" not in sizes_of(cache_tokens=90)


def test_a_reference_is_spread_where_the_weights_are() -> None:
    assert sizes_of(reference=True)["reference model"] == 4 * P
    assert sizes_of(reference=True, dp_size=2, sharding="zero2", weight_bytes=2)["reference model"] == 2 * P
    for sharding in ("zero3", "fsdp"):
        assert sizes_of(reference=True, dp_size=3, sharding=sharding)["reference model"] == -(-4 * P // 3)
    assert "reference model" not in sizes_of()


def test_a_critic_is_whole_on_every_rank_but_for_blocks_over_all_of_them() -> None:
    options: dict[str, Any] = {"critic": True, "dp_size": 2, "tp_size": 3, "weight_bytes": 2}
    found = sizes_of(**options, master_copy=True, average=True, sharding="zero2", host_moments=True)
    critic = {name.removeprefix("critic "): size for name, size in found.items() if name.startswith("critic ")}
    assert critic == {"parameters": 2 * P, "gradients": 2 * P, "Adam moments": 4 * P}
    spread = sizes_of(**options, sharding="fsdp", narrow_compute=True)
    assert spread["critic parameters"] == -(-2 * P // 6)
    assert spread["critic gathered weights"] == 2 * (V * H + H + 2 * BLOCK)
    assert not [name for name in sizes_of() if name.startswith("critic ")]


HOST = {"host_moments": True, "host_weights": True, "sharding": "fsdp", "dp_size": 2}


def test_what_is_kept_in_host_memory_is_no_part_of_the_device_s() -> None:
    def on_host(**options: Any) -> set[str]:
        found = terms(average=True, master_copy=True, reference=True, micro_tokens=5, **options)
        return {name for name, term in found.items() if term.on_host}

    moments = {"Adam moments", "master copy", "moving average"}
    assert on_host(host_moments=True, sharding="fsdp") == moments
    assert on_host(host_weights=True, sharding="fsdp") == {"parameters", "gradients", "reference model"}
    assert on_host(sharding="fsdp") == set()
    adapters = terms(adapter_weights=10, average=True, **HOST)
    assert {n for n, t in adapters.items() if t.on_host} == {"parameters", "Adam moments", "moving average"}
    critic = terms(critic=True, host_moments=True)
    assert not critic["critic Adam moments"].on_host
    assert terms(critic=True, **HOST)["critic Adam moments"].on_host


def test_not_everything_is_alive_while_generating() -> None:
    options: dict[str, Any] = {"master_copy": True, "average": True, "reference": True, "micro_tokens": 9, "dp_size": 2}
    found = terms(**options, cache_rows=2, cache_tokens=9)
    passing = {"gradients", "gradient exchange", "activations", "logits"}
    assert {name for name, term in found.items() if not term.in_rollout} == passing
    assert {name for name, term in found.items() if not term.in_training} == {"keys and values"}
    blocks = terms(**options, sharding="fsdp")
    assert {n for n, t in blocks.items() if not t.in_rollout} == passing - {"gradient exchange"} | {"gathered weights"}
    for more in ({"adapter_weights": 10, "average": True}, {"recomputes": True, "micro_tokens": 9}):
        found = terms(**more)
        assert {n for n, t in found.items() if not t.in_rollout} == {"gradients", "activations", "logits"}


def test_peaks_add_what_is_alive_together() -> None:
    rows = [
        MemoryTerm("a", 1, ""),
        MemoryTerm("b", 10, "", in_rollout=False),
        MemoryTerm("c", 100, "", in_training=False),
        MemoryTerm("d", 1000, "", on_host=True),
    ]
    assert peak_bytes(rows) == (11, 101)
    assert host_peak(rows) == 1000


def test_a_formula_gives_the_number_of_ranks_that_divide() -> None:
    found = terms(sharding="zero1", dp_size=4)
    assert "4 ranks" in found["Adam moments"].formula
    assert "division" in found["Adam moments"].formula
    assert "ranks" not in found["parameters"].formula
    assert "division" not in found["parameters"].formula
    assert "1 ranks" not in terms(sharding="zero1")["Adam moments"].formula
