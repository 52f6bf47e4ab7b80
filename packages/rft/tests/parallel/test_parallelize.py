"""What a strategy's flags do to the policy and its optimizer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.parallel.parallelize import ParallelModel, held_dtype, parallelize
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine
from rft_dist.collectives import SingleProcess
from rft_dist.launch.environment import ranks_from_environment
from rft_dist.settings import AdamSettings, StrategySettings
from rft_dist.strategies.zero import optimizer as zero
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_model

ADAM = AdamSettings(lr_schedule="constant")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(
        tmp_path_factory.mktemp("model") / "m", hidden=16, layers=1, heads=2, kv_heads=1, ffn=24, seed=0
    )


def parallel(directory: Path, *, bf16: bool = False, **strategy: Any) -> ParallelModel[CausalPolicy]:
    return trained(directory, StrategySettings(**strategy), ADAM, bf16=bf16)


def trained(
    directory: Path, settings: StrategySettings, adam: AdamSettings, *, bf16: bool = False
) -> ParallelModel[CausalPolicy]:
    policy = load_policy(directory, dtype=held_dtype(settings, bf16=bf16)).train()
    machine = Machine("cpu", ranks_from_environment({}), SingleProcess())
    return parallelize(ShardablePolicy(policy), settings, adam, machine, None)


def step(model: ParallelModel[CausalPolicy], learning_rate: float) -> None:
    """One step by a gradient of 1 at every weight."""
    loss = torch.stack([parameter.float().sum() for _, parameter in model.model.trainable_parameters()]).sum()
    model.optimizer.backward(loss, last=True)
    model.optimizer.step(learning_rate)


@pytest.mark.parametrize(("flag", "dtype"), [("use_mp_opt", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_of_fewer_bits_are_stepped_on_in_float32_copies(directory: Path, flag: str, dtype: torch.dtype) -> None:
    model = parallel(directory, **{flag: True})
    assert model.compute_dtype == model.model.dtype == dtype
    before = {name: parameter.detach().clone() for name, parameter in model.model.trainable_parameters()}
    for _ in range(3):
        step(model, 1e-6)  # far below the last bit of a norm's gain, which is 1
    state = model.optimizer.state_tensors()
    for name, weight in model.model.trainable_parameters():
        copy = state[f"master/{name}"]
        assert copy.dtype == torch.float32
        assert torch.equal(copy.to(dtype), weight.detach()), "the weight is the copy, rounded"
        assert state[f"exp_avg/{name}"].dtype == torch.float32
    gain = next(name for name in before if "norm" in name)
    assert torch.equal(dict(model.model.trainable_parameters())[gain].detach(), before[gain])
    assert float((state[f"master/{gain}"] - before[gain].float()).abs().min()) > 1e-6, "no step was lost"


def test_an_update_is_measured_on_weights_that_have_a_learning_rate_and_on_the_copies_that_are_stepped_on(
    directory: Path,
) -> None:
    factors = AdamSettings(lr_schedule="constant", lr_factors="model.layers=0")
    model = trained(directory, StrategySettings(use_mp_opt=True), factors)
    sample = model.sample
    assert sample is not None
    sample.begin()
    names = sample._names  # pyright: ignore[reportPrivateUsage]
    assert names
    assert not any("layers" in name for name in names)
    # steps that every weight loses, a gain of 1 first of all
    with torch.no_grad():
        for _, parameter in model.model.trainable_parameters():
            parameter.fill_(1.0)
            model.optimizer.follow(parameter)  # pyright: ignore[reportAttributeAccessIssue]
    sample.see(0.0)
    sample.begin()
    step(model, 1e-6)
    change = sample.change()
    assert change is not None
    assert 0 < float(change[0]) < 1e-15


def test_bfloat16_throughout_keeps_no_copies(directory: Path) -> None:
    model = parallel(directory, bf16=True)
    step(model, 1e-6)
    assert not any(name.startswith("master/") for name in model.optimizer.state_tensors())


def test_averages_and_a_loss_scale_are_kept_where_they_are_asked_for(directory: Path) -> None:
    plain, both = parallel(directory), parallel(directory, enable_ema=True, ema_decay=0.5, fp16=True)
    names = [{key.partition("/")[0] for key in model.optimizer.state_tensors()} for model in (plain, both)]
    assert names[0] == {"exp_avg", "exp_avg_sq", "step"}
    assert names[1] == names[0] | {"master", "ema", "loss_scale"}
    assert plain.averages is None
    assert both.averages is not None


def test_deepspeed_is_given_what_its_flags_say(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these options do to its tensors is measured on four ranks in rft-dist."""
    asked: dict[str, Any] = {}

    class Asked(Exception):
        pass

    def model_of(*arguments: Any, **options: Any) -> Any:
        asked.update(options)
        raise Asked

    monkeypatch.setattr(zero, "ZeroModel", model_of)
    with pytest.raises(Asked):
        parallel(directory, zero_stage=3, zpg=2, overlap_comm=True, adam_offload=True)
    wanted = {"stage": 3, "hpz_size": 2, "overlap_comm": True, "cpu_offload": True, "max_norm": ADAM.max_norm}
    assert wanted.items() <= asked.items()
