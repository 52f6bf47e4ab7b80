"""What DeepSpeed's wrapper is given when a model is distributed by the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rft_dist.collectives import SingleProcess
from rft_dist.optim.parameter_groups import ParameterGroups
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.protocols import StrategyContext
from rft_dist.strategies.zero import optimizer as zero
from rft_dist.strategies.zero.deepspeed_engine import verify_options
from rft_dist.strategies.zero.optimizer import ZeroModel, ZeroOptimizer, parallelize

CPU = torch.device("cpu")


class Given:
    """A model as strategies take it; how its forward is wrapped is noted."""

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)
        self.layers = [nn.Linear(2, 2)]
        self.wrapped: list[Callable[..., Any]] = []

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters()

    def release_trained_rows(self) -> dict[str, int]:
        return {"weight": 1}

    def cross_module_reads(self) -> list[Any]:
        return ["readers"]

    def wrap_forward(self, wrapper: Callable[..., Any]) -> None:
        self.wrapped.append(wrapper)


GROUPS = ParameterGroups(rates=(("bias", 0.5),))


@pytest.mark.parametrize("averages", [False, True])
def test_settings_of_a_run_reach_the_partitioned_model(monkeypatch: pytest.MonkeyPatch, averages: bool) -> None:
    asked: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    partitioned = SimpleNamespace(compute=object(), optimizer=object())
    monkeypatch.setattr(zero, "ZeroModel", lambda *given, **words: asked.append((given, words)) or partitioned)
    model, ranks = Given(), SingleProcess()
    context = StrategyContext(
        settings=StrategySettings(
            zero_stage=3, adam_offload=True, zpg=4, overlap_comm=True, enable_ema=averages, ema_decay=0.75
        ),
        collectives=ranks,
        device=CPU,
        adam=AdamSettings(adam_betas=(0.5, 0.75), adam_epsilon=0.25, l2=0.125, max_norm=3.0, lr_factors="bias=0.5"),
    )
    found: Any = parallelize(model, context)  # type: ignore[arg-type]
    assert asked == [
        (
            (model.module, model.layers, ranks),
            {
                **{
                    "device": CPU,
                    "stage": 3,
                    "betas": (0.5, 0.75),
                    "epsilon": 0.25,
                    "weight_decay": 0.125,
                    "groups": GROUPS,
                },
                **{"max_norm": 3.0, "cpu_offload": True, "hpz_size": 4, "overlap_comm": True},
                **{"ema_decay": 0.75 if averages else None, "readers": ["readers"], "first_rows": {"weight": 1}},
            },
        )
    ]
    assert model.wrapped == [partitioned.compute]
    assert (found.data, found.weights, found.optimizer) == (ranks, partitioned, partitioned.optimizer)


def test_weights_that_are_not_trained_are_not_partitioned() -> None:
    context = StrategyContext(
        settings=StrategySettings(zero_stage=1), collectives=SingleProcess(), device=CPU, adam=None
    )
    with pytest.raises(AssertionError):
        parallelize(Given(), context)  # type: ignore[arg-type]


def test_weights_and_state_are_those_of_the_engine_s_optimizer_and_frozen_ones_are_compared_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: dict[str, tuple[Any, ...]] = {}
    engine = SimpleNamespace(optimizer=object(), device=CPU, world_size=1)
    configured: list[Any] = []

    def note(name: str) -> Callable[..., Any]:
        return lambda *given, **words: noted.update({name: given}) or name

    monkeypatch.setattr(zero, "verify_options", lambda *given: noted.update(verified=given) or verify_options(*given))
    monkeypatch.setattr(zero, "load_deepspeed", lambda device: "deepspeed")
    monkeypatch.setattr(
        zero, "start_engine", lambda package, root, adamw, config, device: configured.append(config) or engine
    )
    monkeypatch.setattr(zero, "ZeroWeights", note("weights"))
    monkeypatch.setattr(zero, "ZeroState", note("state"))
    model, ranks = nn.Linear(2, 2), SingleProcess()
    model.bias.requires_grad_(False)
    made = ZeroModel(
        model, [], ranks, device=CPU, stage=1, betas=(0.5, 0.75), epsilon=1e-8, weight_decay=0.0, max_norm=0.0
    )
    assert made.model is model
    assert noted["weights"] == noted["state"] == (model, engine.optimizer, ranks)
    trained, options, world_size, frozen = noted["verified"]
    assert ([id(each) for each in trained], [id(each) for each in frozen]) == ([id(model.weight)], [id(model.bias)])
    assert world_size == 1
    assert (options.persistent_numel, options.initial_scale_power, options.hpz_size) == (100_000, 16, 1)
    assert (options.cpu_offload, options.overlap_comm) == (False, False)
    assert len(configured) == 1


def test_a_checkpoint_is_read_in_the_blocks_that_this_rank_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, Any]] = []
    monkeypatch.setattr(zero, "restore_shards", lambda state, stored: asked.append((state, stored)))
    optimizer = ZeroOptimizer(SimpleNamespace(optimizer=None), SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    stored: Any = object()
    optimizer.restore(stored)
    assert asked == [(optimizer, stored)]
