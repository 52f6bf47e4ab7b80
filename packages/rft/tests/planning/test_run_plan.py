"""Plan of a run: its grid from flags and variables, a rank's share of a batch, and the memory that settings ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rft.build import reward_parts
from rft.decoder_sizes import IMAGES_NOT_COUNTED
from rft.planning import run_plan, vision_memory
from rft.planning.run_plan import PlanRequest, RunPlan, plan_run
from rft.planning.workload import RL, SFT, RolloutShare
from rft.resolved import Origin
from rft.settings import RlSettings, SftSettings
from rft_core.errors import DataError, OptionsError, PreflightError
from rft_dist.planning.memory_estimate import MemoryTerm, TrainingMemoryConfig
from rft_dist.planning.parallel_dims import ParallelDims, resolve_grid
from rft_dist.strategies.registry import SHARDINGS, run_layout, strategy_settings
from rft_models.settings import ModelSettings
from rft_trainer.batches import batch_plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
BASE = {
    "prompt_max_len": 30,
    "generate_max_len": 20,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "micro_train_batch_size": 2,
    "micro_rollout_batch_size": 3,
    "init_kl_coef": 0.0,
    "engine_type": "native",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


class Planned:
    """Plans with these settings; `training` is the memory configuration of the last one."""

    def __init__(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.training = TrainingMemoryConfig()
        monkeypatch.setattr(run_plan, "estimate", self._estimate)
        for name in ("NUM_NODES", "GPUS_PER_NODE"):
            monkeypatch.delenv(name, raising=False)

    def _estimate(self, sizes: Any, training: TrainingMemoryConfig) -> list[MemoryTerm]:
        assert sizes.hidden == 16
        self.training = training
        return [MemoryTerm("a", 100, ""), MemoryTerm("b", 10, "", in_rollout=False)]

    def __call__(self, command: str = "rl", sharding: str = "", numbers: Any = None, **flat: Any) -> RunPlan:
        weights = ModelSettings(pretrain=str(self.model), device="cpu")
        settings: Any = RlSettings(model=weights) if command == "rl" else SftSettings(model=weights)
        wanted = {name: value for name, value in (BASE | flat).items()}
        for group in fields(settings):
            own = {field.name for field in fields(getattr(settings, group.name))}
            mine = {name: value for name, value in wanted.items() if name in own}
            settings = replace(settings, **{group.name: replace(getattr(settings, group.name), **mine)})
        values = {
            field.name: getattr(getattr(settings, group.name), field.name)
            for group in fields(settings)
            for field in fields(getattr(settings, group.name))
        }
        resolved: Any = SimpleNamespace(
            settings=settings,
            values=values,
            origins=dict.fromkeys(values, Origin("command line")),
            notes=("given",),
        )
        return plan_run(PlanRequest(numbers or {}, sharding), resolved, {"rl": RL, "sft": SFT}[command])


@pytest.fixture
def planned(model: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(model, monkeypatch)


def expected(**changes: Any) -> TrainingMemoryConfig:
    """The memory configuration of the settings above on one rank, with these changes."""
    one = run_layout(SHARDINGS["replicated"], ParallelDims(1, 1))
    usual: dict[str, Any] = {"micro_tokens": 100, "cache_rows": 8, "cache_tokens": 50}
    chosen = usual | changes
    return TrainingMemoryConfig(layout=one, **{"unit_tokens": chosen["cache_tokens"]} | chosen)


TABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"bf16": True}, {"weight_bytes": 2}),
    ({"use_mp_opt": True}, {"weight_bytes": 2, "master_copy": True}),
    ({"fp16": True}, {"weight_bytes": 2, "master_copy": True}),
    ({"enable_ema": True}, {"average": True}),
    ({"micro_train_batch_size": 1}, {"micro_tokens": 50}),
    ({"micro_train_batch_size": 99}, {"micro_tokens": 400}),
    ({"max_tokens_per_micro_batch": 70}, {"micro_tokens": 70}),
    ({"max_tokens_per_micro_batch": 7}, {"micro_tokens": 50}),
    ({"max_tokens_per_micro_batch": 700}, {}),
    ({"max_len": 40}, {"micro_tokens": 80, "cache_tokens": 40}),
    ({"max_len": 60}, {}),
    ({"generate_max_len": 90}, {"micro_tokens": 128, "cache_tokens": 64}),
    ({"fused_linear_logprob": True, "chunk_size": 11}, {"head_rows": 11}),
    ({"chunk_size": 11}, {}),
    ({"gradient_checkpointing": True, "gradient_checkpointing_every": 3}, {"recomputes": True, "recompute_every": 3}),
    ({"gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"}, {}),
    ({"engine_max_rows": 5}, {"cache_rows": 5}),
    ({"engine_type": "vllm"}, {"cache_rows": 0}),
    ({"enable_engine_sleep": False}, {"cache_stays": True}),
    ({"max_staleness": 1}, {"cache_stays": True}),
    ({"init_kl_coef": 0.1}, {"reference": True}),
    ({"init_kl_coef": 0.1, "lora_rank": 2, "target_modules": "q_proj"}, {"adapter_weights": 2 * 2 * (16 + 16)}),
    ({"advantage_estimator": "gae"}, {"critic": True}),
]


@pytest.mark.parametrize(("flat", "changes"), TABLE, ids=str)
def test_settings_ask_for_memory(planned: Planned, flat: dict[str, Any], changes: dict[str, Any]) -> None:
    planned(**flat)
    assert planned.training == expected(**changes)


@pytest.mark.parametrize(
    ("flat", "changes"),
    [
        ({"fsdp": True}, {}),
        ({"fsdp": True, "fsdp_cpu_offload": True}, {"host_moments": True, "host_weights": True}),
        ({"fsdp": True, "use_mp_opt": True}, {"weight_bytes": 4, "narrow_compute": True}),
        ({"zero_stage": 2, "adam_offload": True}, {"host_moments": True}),
    ],
    ids=str,
)
def test_parts_of_the_state_are_where_the_strategy_puts_them(
    planned: Planned, flat: dict[str, Any], changes: dict[str, Any]
) -> None:
    plan = planned(numbers={"world_size": 2}, **flat)
    names = {field.name for field in fields(strategy_settings({}))}
    settings = strategy_settings({name: value for name, value in flat.items() if name in names})
    assert planned.training.layout == run_layout(settings, plan.grid)
    found = replace(planned.training, layout=expected().layout)
    assert found == expected(**{"cache_rows": 4} | changes)


def test_a_supervised_run_has_neither_reference_nor_engine(planned: Planned) -> None:
    plan = planned("sft", generate_max_len=1, micro_train_batch_size=3)
    assert plan.rollout is None
    assert planned.training == expected(micro_tokens=3 * 64, cache_rows=0, cache_tokens=64)
    planned("sft", max_len=9)
    assert planned.training == expected(micro_tokens=18, cache_rows=0, cache_tokens=9)
    planned("sft", max_len=99)
    assert planned.training.cache_tokens == 64
    (planned.model / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 0}))
    planned("sft")
    assert planned.training.cache_tokens == 0
    planned("sft", max_len=99)
    assert planned.training.cache_tokens == 99


def test_notes_say_what_settings_leave_open(planned: Planned) -> None:
    assert planned().notes == ["given"]
    chosen: tuple[dict[str, Any], ...] = (
        {"generate_max_len": 35},
        {"engine_type": "vllm"},
        {"init_kl_coef": 0.1, "lora_rank": 2},
        {"lora_rank": 2, "target_modules": "unknown,q_proj"},
        {"sharding": "zero2"},
        {"judge_pretrain": str(planned.model)},
    )
    for flat in chosen:
        notes = planned(**flat).notes
        assert (notes[0], len(notes)) == ("given", 2), flat
    assert planned(generate_max_len=34).notes == ["given"]
    assert planned(lora_rank=2).notes == ["given"]
    assert planned(sharding="replicated").notes == ["given"]
    (planned.model / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gemma"}))
    assert len(planned().notes) == 2


def test_a_sharding_is_planned_in_place_of_the_settings_own(planned: Planned) -> None:
    plan = planned(sharding="zero3", numbers={"world_size": 4}, rollout_batch_size=4, train_batch_size=8)
    assert planned.training.layout == run_layout(SHARDINGS["replicated"], plan.grid, SHARDINGS["zero3"])


def test_the_plan_holds_grid_shares_and_memory(planned: Planned) -> None:
    plan = planned(numbers={"world_size": 2, "gpu_memory": 80})
    assert (plan.grid.num_nodes, plan.grid.ranks_per_node, plan.gpu_memory) == (1, 2, 80)
    assert (plan.share.name, plan.share.size, plan.share.micro) == ("train_batch_size", 8, 2)
    assert plan.parameters == 32 * 16 * 2 + 16 + 2 * (16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16)
    joined = 4 * 2 * (16 * (16 + 2 * 8) + 2 * 16 * 24)
    assert (plan.training_bytes, plan.rollout_bytes, plan.host_bytes) == (110 + joined, 100 + joined, 0)
    # no term that is saved is among these two
    assert [term.name for term in plan.terms if term.on_host] == ["checkpoint copy"]
    assert (plan.images, planned().gpu_memory) == (None, None)


@pytest.mark.parametrize(
    ("numbers", "flat", "share"),
    [
        (1, {}, RolloutShare(4, 4, 2, 8, 3, 3)),
        (2, {}, RolloutShare(4, 2, 2, 4, 2, 3)),
        (2, {"micro_rollout_batch_size": 2}, RolloutShare(4, 2, 2, 4, 2, 2)),
        (4, {"sp_size": 2}, RolloutShare(4, 1, 2, 2, 2, 3)),
        (4, {"rollout_batch_size": 6, "train_batch_size": 12, "sp_size": 2}, RolloutShare(6, 2, 2, 4, 2, 3)),
    ],
    ids=str,
)
def test_every_rank_generates_and_those_that_share_samples_score_them_once(
    planned: Planned, numbers: int, flat: dict[str, Any], share: RolloutShare
) -> None:
    assert planned(numbers={"world_size": numbers}, **flat).rollout == share


def test_what_the_start_refuses_is_refused(planned: Planned) -> None:
    with pytest.raises(OptionsError):
        planned(rollout_batch_size=0)
    # two key-value heads are not divided among four ranks
    with pytest.raises((OptionsError, PreflightError, DataError)):
        planned(numbers={"world_size": 4}, tp_size=4)
    (planned.model / "config.json").unlink()
    with pytest.raises(DataError):
        planned()


def test_batches_are_planned_for_the_ranks_that_take_different_samples(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(batch_plan, "plan_batches", lambda *given: asked.append(given))
    planned(numbers={"world_size": 4}, sp_size=2, max_epochs=3, num_episodes=5)
    sizes = batch_plan.BatchSizes(
        rollout_batch_size=4,
        n_samples_per_prompt=2,
        train_batch_size=8,
        micro_train_batch_size=2,
        micro_rollout_batch_size=3,
        max_epochs=3,
        num_episodes=5,
        world_size=2,
        group_estimator=True,
    )
    assert asked == [(4, sizes)]


@pytest.mark.parametrize(
    ("variables", "numbers", "nproc", "grid"),
    [
        ({}, {}, 0, (1, 1)),
        ({}, {}, 2, (1, 2)),
        ({"NUM_NODES": "2", "GPUS_PER_NODE": "2"}, {}, 0, (2, 2)),
        ({"NUM_NODES": "2", "GPUS_PER_NODE": "2"}, {}, 1, (2, 1)),
        ({"NUM_NODES": "2", "GPUS_PER_NODE": "2"}, {"nodes": 1}, 0, (1, 2)),
        ({"NUM_NODES": "2", "GPUS_PER_NODE": "8"}, {"gpus_per_node": 2}, 0, (2, 2)),
        ({"NUM_NODES": "many", "GPUS_PER_NODE": ""}, {}, 0, (1, 1)),
        ({}, {"world_size": 4, "nodes": 2}, 0, (2, 2)),
        ({}, {"world_size": 4, "gpus_per_node": 2}, 0, (2, 2)),
    ],
)
def test_the_grid_is_that_of_flags_then_nproc_then_variables(
    planned: Planned,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    numbers: dict[str, int],
    nproc: int,
    grid: tuple[int, int],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = planned(numbers=numbers, nproc=nproc).grid
    assert (found.num_nodes, found.ranks_per_node) == grid


def test_numbers_are_said_to_come_from_where_they_are_written(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUM_NODES", "2")
    seen: list[Any] = []
    resolve: Callable[..., ParallelDims] = resolve_grid
    monkeypatch.setattr(run_plan, "resolve_grid", lambda asked: (seen.append(asked), resolve(asked))[1])
    planned(numbers={"gpus_per_node": 2}, tp_size=2, nproc=2)
    [asked] = seen
    assert str(asked.nodes) == "2 (NUM_NODES of the environment)"
    assert str(asked.devices) == "2 (--gpus_per_node)"
    assert str(asked.per_node) == "2 (nproc: command line)"
    assert (asked.ranks, asked.tp_size.value, asked.sp_size.value, asked.launcher) == (None, 2, 1, "plan")
    assert asked.share.size == 8
    with pytest.raises(PreflightError):
        planned(numbers={"gpus_per_node": 1}, nproc=2)


@pytest.mark.parametrize("parameters", [0, 7])
def test_images_add_their_tower_and_take_back_the_note_that_it_is_not_counted(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, parameters: int
) -> None:
    asked: list[Any] = []
    term = MemoryTerm("tower", 5, "")
    parts = SimpleNamespace(parameters=parameters, terms=[term], notes=["of images"], images="counted")
    monkeypatch.setattr(vision_memory, "image_parts", lambda *given, reads_rows: (asked.append(given), parts)[1])
    monkeypatch.setattr(reward_parts, "require_image_rewards", asked.append)
    before = planned()
    assert asked == []
    plan = planned(images_key="image")
    settings, [workload, same, values, training, positions] = asked
    assert same is settings
    assert (workload, values["images_key"], training, positions) == (RL, "image", planned.training, 64)
    assert plan.terms == [*before.terms, term]
    assert (plan.parameters, plan.images) == (before.parameters + parameters, "counted")
    assert plan.notes == ["given", "of images"]
    (planned.model / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": CONFIG}))
    notes = planned().notes
    assert (notes[0], notes[-1]) == ("given", "of images")
    assert (IMAGES_NOT_COUNTED in notes) is (parameters == 0)
    asked.clear()
    planned("sft", images_key="image")
    assert len(asked) == 1
