"""A parallel strategy is one file and one row: what the registry, the plan and `parallelize` know of it is its row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from additions import parameter_server, strategy_ranks
from additions.parameter_server import ROW, ServedSettings
from safetensors.torch import load_file
from torch.testing import assert_close

from rft.parallel.parallelize import held_dtype, is_sharded
from rft_dist.settings import StrategySettings
from rft_dist.strategies import registry
from rft_dist.strategies.optimizer import StrategyOptimizer
from rft_dist.testing.ranks import run_ranks


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry with the new row."""
    monkeypatch.setattr(registry, "STRATEGIES", (ROW, *registry.STRATEGIES))


@pytest.mark.usefixtures("added")
def test_the_new_row_is_chosen_by_its_setting_alone() -> None:
    assert registry.choose_strategy(ServedSettings(parameter_server=True)) is ROW
    assert registry.choose_strategy(ServedSettings(fsdp=True)) is registry.FSDP
    assert not is_sharded(ServedSettings(parameter_server=True))
    assert str(held_dtype(ServedSettings(parameter_server=True, use_mp_opt=True), bf16=False)) == "torch.bfloat16"


@pytest.mark.usefixtures("added")
def test_two_steps_of_the_new_strategy_are_those_of_full_copies() -> None:
    norms, weights = strategy_ranks.trained("parameter_server")
    expected_norms, expected = strategy_ranks.trained("data_parallel")
    assert norms == expected_norms
    assert all(bool((weights[name] == tensor).all()) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["parameter_server", "fsdp"])
def test_two_ranks_take_the_same_steps_as_one(name: str, tmp_path: Path) -> None:
    """Weights go by the names that the model gives them, and not by those of its module."""
    program = Path(strategy_ranks.__file__)
    run_ranks(program, 2, tmp_path, name, environment={"PYTHONPATH": str(program.parents[1])})
    norms, expected = strategy_ranks.trained("data_parallel")
    for rank in range(2):
        assert json.loads((tmp_path / f"norms_{rank}.json").read_text()) == pytest.approx(norms, rel=1e-5)
        assert_close(load_file(tmp_path / f"weights_{rank}.safetensors"), expected, rtol=1e-5, atol=1e-6)


def test_the_optimizer_of_the_new_file_has_the_common_interface() -> None:
    members = [name for name in vars(StrategyOptimizer) if not name.startswith("_")]
    assert all(callable(getattr(parameter_server.ServerOptimizer, name)) for name in members)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "data_parallel"),
        ({"sp_size": 2}, "data_parallel"),
        ({"fsdp": True}, "fsdp"),
        ({"zero_stage": 1}, "zero"),
        ({"tp_size": 2}, "tensor_parallel"),
        ({"tp_size": 2, "fsdp": True}, "tensor_parallel_fsdp"),
    ],
)
def test_settings_choose_one_strategy(settings: dict[str, int], name: str) -> None:
    assert registry.choose_strategy(StrategySettings(**settings)).name == name


@pytest.mark.parametrize(
    ("settings", "reference", "critic"),
    [
        ({}, "data_parallel", "data_parallel"),
        ({"fsdp": True, "sp_size": 2}, "fsdp", "fsdp"),
        ({"zero_stage": 2}, "data_parallel", "data_parallel"),
        ({"zero_stage": 3}, "fsdp", "data_parallel"),
        ({"tp_size": 2}, "tensor_parallel", "data_parallel"),
        ({"tp_size": 2, "fsdp": True}, "tensor_parallel_fsdp", "fsdp"),
    ],
)
def test_reference_and_critic_follow_the_policy(settings: dict[str, int], reference: str, critic: str) -> None:
    chosen = StrategySettings(**settings, use_mp_opt=True, enable_ema=True, adam_offload=True)
    strategy = registry.choose_strategy(chosen)
    other, own = strategy.reference(chosen), strategy.critic(chosen)
    assert (registry.choose_strategy(other).name, registry.choose_strategy(own).name) == (reference, critic)
    assert not own.use_mp_opt, "a critic is stepped on in the type it is loaded in"
    assert not own.enable_ema
    assert own.adam_offload == chosen.fsdp
    assert other.sp_size == own.sp_size == 1, "every rank computes its own sequences of both"
