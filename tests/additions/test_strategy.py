"""A parallel strategy is one file, one row and its setting: batches, plan, memory and rules follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from additions import parameter_server, strategy_ranks
from additions.overlay import Overlay
from safetensors.torch import load_file
from support.trainer_task import TrainerTask, same_model
from torch.testing import assert_close

from rft_dist.settings import StrategySettings
from rft_dist.strategies import registry
from rft_dist.strategies.optimizer import StrategyOptimizer
from rft_dist.testing.ranks import run_ranks

ROWS = """    ParallelStrategy(
        name="parameter_server",
        module="rft_dist.strategies.parameter_server",
        setting="parameter_server",
        chosen=lambda settings: settings.parameter_server,
        sharding=lambda settings: Sharding(),
        summary=lambda settings: ["rank 0 steps, and sends the weights"],
    ),
    ParallelStrategy(
        name="columns",
        module="rft_dist.strategies.columns",
        setting="column_ranks",
        chosen=lambda settings: settings.column_ranks > 1,
        sharding=lambda settings: Sharding(optimizer=True),
        summary=lambda settings: ["every rank has some columns"],
        matrix_setting="column_ranks",
    ),"""
SETTINGS = '''
    parameter_server: bool = False
    """Keep the moments on rank 0 alone, which steps and sends the weights to the others."""

    column_ranks: int = 1
    """Ranks that each have some columns of every matrix."""
'''


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Overlay:
    """rft-dist with the file, its row and its setting; of a second strategy there is only what a plan needs."""
    overlay = Overlay.of(tmp_path_factory.mktemp("overlay"), ["rft_dist"])
    overlay.add_file("rft_dist/strategies/parameter_server.py", Path(parameter_server.__file__).read_text())
    overlay.add_row("rft_dist/strategies/registry.py", "STRATEGIES: tuple[ParallelStrategy, ...] = (", ROWS)
    docstring = (StrategySettings.__doc__ or "").strip()
    overlay.add_row("rft_dist/settings.py", f'"""{docstring}"""', SETTINGS)
    return overlay


def planned(added: Overlay, task: TrainerTask, *words: object) -> dict[str, Any]:
    """The plan for four ranks, with the memory by name and its formula."""
    ended = added.run(["plan", "rl", *task.words(), "--world_size", 4, *words, "--json"])
    assert ended.returncode == 0, ended.stderr
    plan = json.loads(ended.stdout)
    plan["memory"] = {term["name"]: term["num_bytes"] for term in plan["memory"]}
    return plan


def test_its_page_and_its_memory_follow_from_the_row(added: Overlay, trainer_task: TrainerTask) -> None:
    copies = planned(added, trainer_task)
    served = planned(added, trainer_task, "--parameter_server")
    assert served["dp_size"] == copies["dp_size"] == 4
    assert copies["memory"].pop("gradient exchange") > 0, "full copies are summed in buckets, and a server has none"
    assert served["memory"] == copies["memory"], "rank 0 has as much as a rank with full copies"
    page = added.run(["check", "rl", *trainer_task.words(), "--parameter_server"])
    assert page.returncode == 0, page.stderr
    assert "rank 0 steps, and sends the weights\n" in page.stdout


def test_ranks_that_share_a_sample_and_parts_of_the_state_follow_from_the_row(
    added: Overlay, trainer_task: TrainerTask
) -> None:
    copies = planned(added, trainer_task)
    columns = planned(added, trainer_task, "--column_ranks", 2)
    assert (columns["dp_size"], columns["tp_size"]) == (2, 2)
    assert columns["batches"][0].partition(" = ")[0] == copies["batches"][0].partition(" = ")[0].replace("/ 4", "/ 2")
    count = columns["parameters"]
    assert columns["memory"]["parameters"] == columns["memory"]["gradients"] == 4 * count / 2
    assert columns["memory"]["Adam moments"] == 8 * count / 4
    uneven = added.run(["plan", "rl", *trainer_task.words(), "--world_size", 4, "--column_ranks", 3])
    assert uneven.returncode != 0
    assert "(column_ranks: command line)" in uneven.stdout + uneven.stderr


def test_what_needs_full_weights_is_refused_beside_a_strategy_that_has_none(
    added: Overlay, trainer_task: TrainerTask
) -> None:
    refused = added.run(["plan", "rl", *trainer_task.words(), "--engine_type", "hf", "--column_ranks", 2])
    assert refused.returncode != 0
    assert "engine_type = hf, column_ranks = 2" in refused.stdout + refused.stderr
    planned(added, trainer_task, "--engine_type", "hf", "--parameter_server")


def test_a_run_with_it_gives_the_weights_of_a_run_without(
    added: Overlay, trainer_task: TrainerTask, tmp_path: Path
) -> None:
    words, ends = [*trainer_task.words(), "--max_steps", 1], (tmp_path / "served", tmp_path / "copies")
    for run, more in zip(ends, (["--parameter_server"], []), strict=True):
        ended = added.run(["rl", *words, *more, "--save_path", run])
        assert ended.returncode == 0, ended.stderr
    assert same_model(*ends)


@pytest.mark.parametrize(("setting", "world_size"), [("parameter_server", 1), ("parameter_server", 2), ("fsdp", 2)])
def test_its_steps_are_those_of_one_rank_with_full_copies(
    added: Overlay, setting: str, world_size: int, tmp_path: Path
) -> None:
    """Weights go by the names that the model gives them, and not by those of its module."""
    program = Path(strategy_ranks.__file__)
    paths = f"{added.folder}:{program.parents[1]}"
    run_ranks(program, world_size, tmp_path, setting, environment={"PYTHONPATH": paths})
    norms, expected = strategy_ranks.trained()
    for rank in range(world_size):
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
