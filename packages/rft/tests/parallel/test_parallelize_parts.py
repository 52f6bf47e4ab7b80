"""Distribution of a model: what its strategy is given, when an optimizer continues, and the types of weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft.parallel import parallelize as module
from rft.parallel.parallelize import held_dtype, is_sharded, parallelize, trainable_policy, weights_dtype
from rft_dist.settings import AdamSettings, StrategySettings


def distributed(calls: Any, *, trains: bool = True, restored: Any = None, **settings: Any) -> tuple[Any, Any]:
    optimizer = calls.double("optimizer") if trains else None
    spread = SimpleNamespace(optimizer=optimizer, weights="weights", data="data")
    contexts: list[Any] = []
    chosen = calls.double(
        "chosen",
        parallelize=lambda model, context: (contexts.append((model, context)), spread)[1],
        collective_forward="collective",
        shards_weights=calls.double("shards", returns="sharded"),
    )
    calls.put(module, choose_strategy=chosen)
    calls.put(module, "ComputeMeter device_peak compile_layers")
    model = calls.double("model", dtype=torch.bfloat16)
    strategy, adam = StrategySettings(**settings), AdamSettings() if trains else None
    machine = calls.double("machine", device="meta")
    found: Any = parallelize(model, strategy, adam, machine, restored, component="critic_optimizer")
    [(given, context)] = contexts
    assert given is model
    assert (context.settings, context.collectives, context.adam) == (strategy, "machine.collectives", adam)
    assert context.device == torch.device("meta")
    return found, strategy


def test_a_model_is_distributed_by_the_strategy_of_its_settings(calls: Any) -> None:
    found, strategy = distributed(calls)
    assert calls.taken() == [
        f"choose_strategy({strategy!r})",
        "model.training_flops()",
        "device_peak(device(type='meta'))",
        "ComputeMeter(model.training_flops().of, num_devices=machine.collectives.world_size, peak=device_peak())",
        f"compile_layers(model.blocks, {strategy!r}, machine)",
        f"shards({strategy!r})",
    ]
    assert found.meter == "ComputeMeter()"
    assert (found.model, found.weights, found.data) == ("model.inner", "weights", "data")
    assert (found.collective_forward, found.shards_weights) == ("collective", "sharded")
    assert (found.optimizer, found.averages, found.compute_dtype) == ("optimizer", None, torch.bfloat16)


def test_an_optimizer_continues_from_its_component(calls: Any) -> None:
    distributed(calls, restored=calls.double("restored"))
    assert calls.taken()[5:7] == [
        "restored.checkpoint.component('critic_optimizer')",
        "optimizer.restore(restored.checkpoint.component())",
    ]
    found, _ = distributed(calls, trains=False, restored=calls.double("restored"), enable_ema=True)
    assert not [call for call in calls.taken() if "restore" in call]
    assert (found.trained_by, found.averages) == (None, None)
    with pytest.raises(AssertionError):
        _ = found.optimizer


def test_averages_and_the_type_of_the_forward_are_those_of_the_settings(calls: Any) -> None:
    found, _ = distributed(calls, enable_ema=True, fp16=True)
    assert (found.averages, found.compute_dtype) == ("optimizer.swap_in_ema", torch.float16)


@pytest.mark.parametrize(
    ("settings", "bf16", "dtype", "sharded"),
    [
        ({}, False, torch.float32, False),
        ({}, True, torch.bfloat16, False),
        ({"fp16": True}, True, torch.float16, False),
        ({"use_mp_opt": True}, False, torch.bfloat16, False),
        ({"fsdp": True}, True, torch.bfloat16, True),
        ({"fsdp": True, "fp16": True}, True, torch.float32, True),
        ({"zero_stage": 3}, False, torch.float32, True),
        ({"zero_stage": 2}, False, torch.float32, False),
    ],
)
def test_weights_are_held_as_their_strategy_steps_on_them(
    settings: dict[str, Any], bf16: bool, dtype: torch.dtype, sharded: bool
) -> None:
    strategy = StrategySettings(**settings)
    assert held_dtype(strategy, bf16=bf16) is dtype
    assert is_sharded(strategy) is sharded
    assert weights_dtype(bf16) is (torch.bfloat16 if bf16 else torch.float32)


def test_a_model_is_refused_before_its_weights_are_read(calls: Any) -> None:
    calls.put(module, "refuse_uneven_model refuse_uneven_experts_of refuse_uneven_group load_for_training")
    strategy = StrategySettings(tp_size=2, meta_init=True)
    given = [calls.double(name) for name in ("machine", "tokenizer", "adapter")]
    settings = calls.double("settings", bf16=True)
    assert trainable_policy(settings, strategy, "source", *given) == "load_for_training()"
    assert calls.taken() == [
        "refuse_uneven_model('source', 2)",
        "refuse_uneven_experts_of('source', 1)",
        "refuse_uneven_group(1, machine.collectives.world_size, code='expert.ep_size', flag='ep_size', what='experts')",
        "load_for_training('source', settings, adapter, device=machine.device, dtype=torch.bfloat16, on_meta=True, "
        "tokenizer=tokenizer)",
    ]
