"""What the plan of a run says of its engine and of its weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rft.build.engines import EngineChoice
from rft.parallel.parallelize import held_dtype
from rft.process.machine import Machine
from rft.settings import RlSettings, SftSettings
from rft_algos.algorithms import components
from rft_cli.pages import run_plan, run_plan_layout
from rft_cli.pages.run_plan import early_end
from rft_cli.pages.run_plan_algorithm import component_text
from rft_cli.pages.run_plan_layout import async_rollouts_words, strategy_line
from rft_cli.pages.run_plan_model import _weights
from rft_dist.settings import StrategySettings
from rft_engine.settings import EngineSettings, ReplicaSettings
from rft_models.settings import ModelSettings
from rft_trainer.settings.data import SftDataSettings
from rft_trainer.settings.rollouts import AsyncSettings


def engine_line(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **engine: Any) -> str:
    """On a GPU of this capability, with vLLM installed."""
    monkeypatch.setattr(run_plan_layout, "choose_device", lambda *_: "cuda:0")
    monkeypatch.setattr(run_plan_layout, "choose_engine", lambda *_: EngineChoice("vllm", "as asked"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    chosen = EngineSettings(engine_type="vllm", **engine)
    settings: Any = SimpleNamespace(
        engine=chosen,
        model=SimpleNamespace(device="auto"),
        strategy=StrategySettings(),
        async_rollouts=AsyncSettings(),
        replicas=ReplicaSettings(),
    )
    return run_plan_layout.engine_line(settings)


def test_the_plan_says_when_eight_bits_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--engine_fp8 --off_policy_correction tis would decode faster" in engine_line(monkeypatch, (9, 0))
    assert "would decode faster" not in engine_line(monkeypatch, (8, 0))
    assert "would decode faster" not in engine_line(monkeypatch, (9, 0), engine_fp8=True)


@pytest.mark.parametrize(
    ("strategy", "is_copy"),
    [
        (StrategySettings(), False),
        (StrategySettings(zero_stage=1), False),
        (StrategySettings(zero_stage=3), True),
        (StrategySettings(fsdp=True), True),
        (StrategySettings(tp_size=2), True),
    ],
)
def test_the_plan_says_whether_the_engine_has_a_copy_of_the_weights(strategy: StrategySettings, is_copy: bool) -> None:
    settings = RlSettings(model=ModelSettings(pretrain="model", device="cpu"), strategy=strategy)
    assert ("its whole copy of the weights" in run_plan_layout.engine_line(settings)) == is_copy


def test_updates_are_said_to_be_lost_in_weights_of_16_bits_that_are_trained_alone() -> None:
    settings, cpu = ModelSettings(pretrain="model", bf16=True), cast(Machine, SimpleNamespace(device="cpu"))
    assert "at 1e-6 most are" in _weights(settings, cpu, adapted=False)[0]
    assert "what is trained is float32" in _weights(settings, cpu, adapted=True)[0]
    assert _weights(replace(settings, bf16=False), cpu, adapted=False) == []


def test_the_plan_says_how_weights_lie() -> None:
    assert strategy_line(StrategySettings(), bf16=False) == "every rank holds all; gradients are summed once a step"
    low_memory = StrategySettings(fsdp=True, fsdp_cpu_offload=True, adam_offload=True, use_mp_opt=True)
    line = strategy_line(low_memory, bf16=False)
    assert line.startswith("FSDP2: weights, gradients and moments in blocks over all ranks")
    assert "in host memory; computed in bfloat16, stepped on in float32" in line
    zero = strategy_line(StrategySettings(zero_stage=3, zpg=2, overlap_comm=True, sp_size=2), bf16=True)
    assert "ZeRO 3: moments, gradients and weights" in zero
    assert "bfloat16 throughout; 2 ranks share each sequence, by heads where" in zero


@pytest.mark.parametrize(
    ("strategy", "bf16", "dtype"),
    [
        (StrategySettings(), False, torch.float32),
        (StrategySettings(), True, torch.bfloat16),
        (StrategySettings(use_mp_opt=True), False, torch.bfloat16),
        (StrategySettings(use_mp_opt=True, zero_stage=2), False, torch.bfloat16),
        (StrategySettings(use_mp_opt=True, fsdp=True), True, torch.float32),
    ],
)
def test_weights_are_held_in_the_type_that_the_strategy_steps_on(
    strategy: StrategySettings, bf16: bool, dtype: torch.dtype
) -> None:
    assert held_dtype(strategy, bf16=bf16) is dtype


def test_the_plan_says_where_samples_are_drawn_and_how_far_ahead() -> None:
    plain = RlSettings(model=ModelSettings(pretrain="model", device="cpu"))
    two = replace(plain, replicas=ReplicaSettings(engine_replicas=2))
    ahead = replace(plain, async_rollouts=AsyncSettings(max_staleness=1))
    exact = replace(plain, async_rollouts=AsyncSettings(max_staleness=1, async_deterministic=True))
    assert async_rollouts_words(plain) == ""
    assert async_rollouts_words(two) == "2 replicas in processes of their own"
    assert "up to 1 version older" in async_rollouts_words(ahead)
    assert "depends on the clock" in async_rollouts_words(ahead)
    assert "repeats to the bit" in async_rollouts_words(exact)


def test_a_correction_that_is_made_of_others_is_written_with_their_numbers() -> None:
    both = components.Product(parts=(components.TokenTis(cap=3.0), components.Veto(low=0.5)))
    assert component_text(components.SelfNormalised(part=both)) == (
        "SelfNormalised(part Product(parts TokenTis(cap 3.0, floor 0.0) and Veto(low 0.5, high inf)))"
    )
    assert component_text(components.Reinforce()) == "Reinforce"


@pytest.mark.parametrize(
    ("max_steps", "num_steps", "epochs", "setting", "said"),
    [
        (
            60,
            39,
            3,
            "max_epochs",
            ["note: 3 epochs end the run before --max_steps 60; --max_epochs 5 lets it get there"],
        ),
        (
            60,
            1,
            1,
            "num_episodes",
            ["note: 1 episode ends the run before --max_steps 60; --num_episodes 60 lets it get there"],
        ),
        (39, 39, 3, "max_epochs", []),
        (0, 39, 3, "max_epochs", []),
        (5, 0, 1, "max_epochs", []),
    ],
)
def test_the_plan_says_that_a_run_ends_before_its_steps(
    max_steps: int, num_steps: int, epochs: int, setting: str, said: list[str]
) -> None:
    resolved: Any = SimpleNamespace(recipe_name="")
    assert early_end(resolved, max_steps, num_steps, epochs, setting=setting) == said
    resolved.recipe_name = "mine"
    assert early_end(resolved, max_steps, num_steps, epochs, setting=setting) == []


def test_threads_that_a_data_store_leaves_idle_are_told() -> None:
    model = ModelSettings(pretrain="model")
    settings = SftSettings(model=model, data=SftDataSettings(num_workers=3))
    assert run_plan._preparation(settings, False) == "rows are rendered by 3 threads, 6 batches ahead"
    said = run_plan._preparation(settings, True)
    assert said.startswith("rows are rendered once, into the data store; num_workers = 3 has no effect on them")
    assert run_plan._preparation(SftSettings(model=model), True) == "rows are rendered once, into the data store"
