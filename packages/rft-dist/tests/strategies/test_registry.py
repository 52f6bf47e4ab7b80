"""The row that settings choose, what it says of a run's layout, and which settings are refused together."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from rft_dist.planning.parallel_dims import ParallelDims
from rft_dist.planning.run_layout import REPLICATED, Sharding
from rft_dist.settings import StrategySettings
from rft_dist.strategies.registry import (
    DATA_PARALLEL,
    EXPERT_PARALLEL,
    FSDP,
    FULLY_SHARDED,
    SHARDINGS,
    STRATEGIES,
    TENSOR_PARALLEL,
    TENSOR_PARALLEL_FSDP,
    ZERO,
    choose_strategy,
    refusals,
    run_dims,
    run_layout,
    sharding_settings,
    smaller_shares,
    strategy_settings,
)


def name_of(value: object) -> str:
    """The part of a test's name that says which row or which settings it is about."""
    return str(getattr(value, "name", value))


MOMENTS, GRADIENTS = Sharding(optimizer=True), Sharding(optimizer=True, gradients=True)
ALL = Sharding(optimizer=True, gradients=True, weights=True)


def settings_of(**values: Any) -> StrategySettings:
    return StrategySettings(**values)


CHOSEN: list[tuple[dict[str, Any], Any, Sharding, bool, bool]] = [
    ({}, DATA_PARALLEL, REPLICATED, False, False),
    ({"sp_size": 2}, DATA_PARALLEL, REPLICATED, False, False),
    ({"fsdp": True}, FSDP, FULLY_SHARDED, True, True),
    ({"fsdp": True, "tp_size": 2}, TENSOR_PARALLEL_FSDP, FULLY_SHARDED, True, True),
    ({"tp_size": 2}, TENSOR_PARALLEL, REPLICATED, False, True),
    ({"ep_size": 2}, EXPERT_PARALLEL, replace(REPLICATED, expert_ranks=2), True, True),
    ({"zero_stage": 1}, ZERO, MOMENTS, True, False),
    ({"zero_stage": 2}, ZERO, GRADIENTS, True, False),
    ({"zero_stage": 3}, ZERO, ALL, True, True),
    ({"zero_stage": 1, "tp_size": 2}, ZERO, MOMENTS, True, True),
]


@pytest.mark.parametrize(("values", "row", "sharding", "collective", "sharded"), CHOSEN, ids=name_of)
def test_the_first_row_that_the_settings_choose_says_what_the_ranks_divide(
    values: dict[str, Any], row: Any, sharding: Sharding, collective: bool, sharded: bool
) -> None:
    settings = settings_of(**values)
    strategy = choose_strategy(settings)
    assert strategy is row
    assert strategy.sharding(settings) == sharding
    assert strategy.collective_forward == collective
    assert strategy.shards_weights(settings) == sharded
    assert strategy.group_sizes(settings) == (settings.sp_size, settings.tp_size)
    assert run_dims(settings, 8) == ParallelDims(1, 8, settings.sp_size, settings.tp_size)
    layout = run_layout(settings, ParallelDims(2, 4))
    assert (layout.dims, layout.policy, layout.shard_size) == (ParallelDims(2, 4), sharding, None)


FULL = {
    "zero_stage": 0,
    "sp_size": 1,
    "tp_size": 1,
    "ep_size": 1,
    "adam_offload": False,
    "use_mp_opt": False,
    "fp16": False,
    "enable_ema": False,
}
EVERYTHING: dict[str, Any] = {"use_mp_opt": True, "fp16": True, "enable_ema": True, "adam_offload": True, "sp_size": 2}
EVERYTHING |= {"meta_init": True, "shard_size": 4, "zpg": 2}
OWN_TYPE = {"use_mp_opt": False, "fp16": False, "enable_ema": False}


@pytest.mark.parametrize(
    ("values", "reference", "critic"),
    [
        ({}, {"sp_size": 1}, FULL),
        ({"fsdp": True}, {"sp_size": 1}, {**OWN_TYPE, "sp_size": 1, "meta_init": False}),
        (
            {"fsdp": True, "tp_size": 2},
            {},
            {**OWN_TYPE, "sp_size": 1, "tp_size": 1, "meta_init": False, "shard_size": None},
        ),
        ({"tp_size": 2}, {}, FULL),
        ({"ep_size": 2, "sp_size": 1}, {}, FULL),
        ({"zero_stage": 2}, {**OWN_TYPE, "zero_stage": 0, "sp_size": 1}, FULL),
        ({"zero_stage": 3}, {**OWN_TYPE, "zero_stage": 0, "sp_size": 1, "fsdp": True}, FULL),
    ],
    ids=name_of,
)
def test_references_and_critics_are_distributed_by_settings_of_their_own(
    values: dict[str, Any], reference: dict[str, Any], critic: dict[str, Any]
) -> None:
    settings = settings_of(**{**EVERYTHING, **values})
    strategy = choose_strategy(settings)
    assert asdict(strategy.reference(settings)) == asdict(settings) | reference
    assert asdict(strategy.critic(settings)) == asdict(settings) | critic
    layout = run_layout(settings, ParallelDims(1, 8))
    for found, changed in ((layout.reference, reference), (layout.critic, critic)):
        own = settings_of(**{**EVERYTHING, **values, **changed})
        assert found == choose_strategy(own).sharding(own)
    assert layout.shard_size == 4


def test_a_sharding_that_is_planned_takes_the_place_of_the_settings_own() -> None:
    settings = settings_of(fsdp=True, shard_size=2)
    expected = [REPLICATED, MOMENTS, GRADIENTS, ALL, FULLY_SHARDED]
    found = [run_layout(settings, ParallelDims(1, 4), sharding) for sharding in SHARDINGS.values()]
    assert list(SHARDINGS) == ["replicated", "zero1", "zero2", "zero3", "fsdp"]
    assert [layout.policy for layout in found] == expected
    assert [layout.reference for layout in found] == [REPLICATED] * 3 + [FULLY_SHARDED] * 2
    assert [layout.critic for layout in found] == [REPLICATED] * 4 + [FULLY_SHARDED]
    assert all(layout.shard_size == 2 for layout in found)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        ({"sp_size": 2}, []),
        ({"fsdp": True}, ["fsdp"]),
        ({"fsdp": True, "tp_size": 2}, ["fsdp", "tp_size"]),
        ({"tp_size": 2}, ["tp_size"]),
        ({"ep_size": 2}, ["ep_size"]),
        ({"zero_stage": 1}, ["zero_stage"]),
        ({"fsdp": True, "zero_stage": 3, "learning_rate": 1.0}, ["fsdp", "zero_stage"]),
    ],
    ids=name_of,
)
def test_settings_that_shard_or_exchange_in_a_forward_are_named_once(values: dict[str, Any], names: list[str]) -> None:
    assert sharding_settings(values) == names


def test_settings_of_a_strategy_are_taken_from_those_of_a_run() -> None:
    assert strategy_settings({"fsdp": True, "seed": 3, "tp_size": 4}) == settings_of(fsdp=True, tp_size=4)


def test_options_act_for_the_values_of_the_setting_that_chooses_their_row() -> None:
    acts = {(row.setting, name): test for row in STRATEGIES for name, test in row.options.items()}
    assert set(acts) == {
        ("fsdp", "shard_size"),
        ("fsdp", "fsdp_cpu_offload"),
        ("zero_stage", "zpg"),
        ("zero_stage", "overlap_comm"),
    }
    assert [acts["zero_stage", "zpg"](stage) for stage in range(4)] == [False, False, False, True]
    assert [acts["zero_stage", "overlap_comm"](stage) for stage in range(4)] == [False, True, True, True]
    assert [acts["fsdp", "shard_size"](value) for value in (False, True)] == [False, True]


PLAIN: dict[str, Any] = {**asdict(StrategySettings()), "aux_loss_coef": 0.0, "flash_attn": False}
PLAIN |= {"lora_rank": 0, "optimizer": "adamw"}
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"fsdp": True, "tp_size": 2}, []),
    ({"fsdp": True, "shard_size": 1}, []),
    ({"tp_size": 2, "shard_size": 1}, []),
    ({"fsdp": True, "tp_size": 2, "shard_size": 1}, ["strategy.tp_fsdp"]),
    ({"fsdp": True, "tp_size": 2, "fsdp_cpu_offload": True}, ["strategy.tp_fsdp"]),
    ({"fsdp": True, "tp_size": 2, "meta_init": True}, ["strategy.tp_fsdp"]),
    ({"fsdp": True, "fsdp_cpu_offload": True, "meta_init": True}, []),
    ({"zero_stage": 1}, []),
    ({"fsdp": True, "zero_stage": 1}, ["strategy.two"]),
    ({"zero_stage": 1, "overlap_comm": True}, ["strategy.overlap_stage"]),
    ({"zero_stage": 2, "overlap_comm": True}, []),
    ({"overlap_comm": True}, []),
    ({"zero_stage": 1, "zpg": 2}, ["strategy.zpg_stage"]),
    ({"zero_stage": 2, "zpg": 2}, ["strategy.zpg_stage"]),
    ({"zero_stage": 3, "zpg": 2}, []),
    ({"zpg": 2}, []),
    ({"zero_stage": 1, "fp16": True}, ["strategy.fp16_zero"]),
    ({"fp16": True}, []),
    ({"tp_size": 2, "zero_stage": 1}, ["strategy.tp_blocks"]),
    ({"tp_size": 2, "sp_size": 2}, ["strategy.tp_sp"]),
    ({"tp_size": 2, "aux_loss_coef": 0.1}, ["strategy.tp_router"]),
    ({"aux_loss_coef": 0.1}, []),
    ({"ep_size": 2, "aux_loss_coef": 0.1, "amp": True}, []),
    ({"ep_size": 2, "fsdp": True}, ["strategy.ep_size"]),
    ({"ep_size": 2, "zero_stage": 2}, ["strategy.ep_size"]),
    ({"ep_size": 2, "tp_size": 2}, ["strategy.ep_size"]),
    ({"ep_size": 2, "sp_size": 2}, ["strategy.ep_size"]),
    ({"ep_size": 2, "lora_rank": 4}, ["strategy.ep_size"]),
    ({"ep_size": 2, "optimizer": "muon"}, ["strategy.muon"]),
    ({"ep_size": 2, "compile": "on"}, ["strategy.compile"]),
    ({"sp_mode": "ring"}, ["strategy.sp_mode"]),
    ({"sp_mode": "ulysses", "sp_size": 2}, []),
    ({"sp_mode": "ring", "sp_size": 2}, []),
    ({"sp_mode": "ring", "sp_size": 2, "flash_attn": True}, ["strategy.ring_kernel"]),
    ({"sp_mode": "ulysses", "sp_size": 2, "flash_attn": True}, []),
    ({"sp_mode": "ring", "flash_attn": True}, ["strategy.sp_mode"]),
    ({"sp_size": 2, "aux_loss_coef": 0.1}, ["strategy.sp_router"]),
]


@pytest.mark.parametrize(("values", "codes"), REFUSED, ids=name_of)
def test_settings_that_no_strategy_can_do_together_are_refused(values: dict[str, Any], codes: list[str]) -> None:
    found = list(refusals(PLAIN | values))
    assert [refusal.code for refusal in found] == codes
    for refusal in found:
        assert set(refusal.names) <= set(PLAIN)
        assert [name for name in refusal.names if PLAIN[name] != (PLAIN | values)[name]], "a setting of it was given"


def test_a_remedy_repeats_the_values_that_may_stay() -> None:
    [zpg] = refusals(PLAIN | {"zero_stage": 2, "zpg": 4})
    assert zpg.remedy({"zpg": 4}) == "--zero_stage 3 --zpg 4"
    [blocks] = refusals(PLAIN | {"zero_stage": 2, "tp_size": 4})
    assert "--tp_size 4" in blocks.remedy({"zero_stage": 2, "tp_size": 4})


def lines(**values: Any) -> list[str]:
    settings = settings_of(**values)
    return list(choose_strategy(settings).summary(settings))


def test_a_summary_has_a_line_for_each_thing_that_was_asked_for() -> None:
    assert [len(lines(fsdp=True)), len(lines(fsdp=True, fsdp_cpu_offload=True))] == [1, 2]
    assert "groups of 4 ranks" in lines(fsdp=True, shard_size=4)[0]
    assert "all ranks" in lines(fsdp=True)[0]
    assert "groups of" not in lines(fsdp=True, tp_size=2)[0]
    stages = [lines(zero_stage=stage) for stage in (1, 2, 3)]
    assert [len(stage) for stage in stages] == [1, 1, 1]
    assert ["gradients" in stage[0] for stage in stages] == [False, True, True]
    assert ["weights" in stage[0] for stage in stages] == [False, False, True]
    assert len(lines(zero_stage=3, zpg=2)) == len(lines(zero_stage=2, overlap_comm=True)) == 2
    assert "every 2 ranks" in lines(zero_stage=3, zpg=2)[1]
    assert len(lines(tp_size=2)) == len(lines()) == 1
    assert [line[:31] for line in lines(ep_size=4)] == ["4 ranks hold the experts of eac"]


def test_a_strategy_is_imported_when_it_distributes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in STRATEGIES:
        monkeypatch.setitem(sys.modules, strategy.module, SimpleNamespace(parallelize=lambda *given: given))
        model, context = object(), object()
        assert strategy.parallelize(model, context) == (model, context)  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("values", "world_size", "on_device", "expected"),
    [
        ({}, 1, True, [{"adam_offload": True}]),
        ({}, 4, True, [{"fsdp": True}, {"adam_offload": True}]),
        ({"adam_offload": True}, 4, False, [{"fsdp": True}]),
        ({"adam_offload": True}, 1, True, []),
        ({"fsdp": True}, 4, True, []),
        ({"zero_stage": 1}, 4, True, []),
        ({}, 1, False, []),
    ],
)
def test_a_rank_holds_less_by_sharing_out_or_by_the_host(
    values: dict[str, Any], world_size: int, on_device: bool, expected: list[dict[str, Any]]
) -> None:
    assert list(smaller_shares(values, world_size, on_device=on_device)) == expected
