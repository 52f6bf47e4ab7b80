"""Float16 under a loss scale: an overflow skips exactly its step, and all the rest is as in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft_core.errors import NumericsError
from rft_dist.collectives import SingleProcess
from rft_dist.optim.loss_scaler import KEY, LARGEST, LossScaler, NoLossScaler
from rft_dist.strategies.data_parallel import DataParallelOptimizer

ADAM = {"betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.1, "max_norm": 0.5}
BAD = -1


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 2)).to(dtype)


def losses(model: nn.Module, step: int) -> list[Tensor]:
    """Two micro-batches; the gradient of a bad step is infinite in the second."""
    dtype = next(model.parameters()).dtype
    rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(max(step, 0))).to(dtype)
    found = [model(part).float().square().sum() / 100 for part in rows.split(4)]
    return [found[0], found[1] * float("inf")] if step == BAD else found


def train(model: nn.Module, steps: list[int], scaler: LossScaler | None = None, **options) -> DataParallelOptimizer:
    half = next(model.parameters()).dtype == torch.float16
    optimizer = DataParallelOptimizer(
        model.named_parameters(), SingleProcess(), **{**ADAM, **options}, master=half, scaler=scaler
    )
    run(model, optimizer, steps)
    return optimizer


def run(model: nn.Module, optimizer: DataParallelOptimizer, steps: list[int]) -> list[bool]:
    applied = []
    for step in steps:
        for loss in losses(model, step):
            optimizer.backward(loss)
        applied.append(optimizer.step(1e-2).applied)
    return applied


def masters(optimizer: DataParallelOptimizer, model: nn.Module) -> Tensor:
    """What is stepped on, flat."""
    state, held = optimizer.state_tensors(), dict(model.named_parameters())
    return torch.cat([state.get(f"master/{name}", held[name].detach()).flatten() for name in sorted(held)])


def test_the_scale_halves_at_once_doubles_after_clean_steps_and_stays_a_power_of_two() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    scales = []
    for finite in (True, True, False, True, True, True, True, False, False):
        scaler.update(finite=finite)
        scales.append(scaler.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 4, 2]
    assert scaler.skipped == 3
    with pytest.raises(AssertionError):
        LossScaler(scale=3.0)


def test_the_scale_has_a_ceiling_and_below_its_floor_the_run_ends_with_the_reason() -> None:
    high = LossScaler(scale=LARGEST, growth_interval=1)
    high.update(finite=True)
    assert high.scale == LARGEST
    low = LossScaler(scale=2.0)
    low.update(finite=False)
    with pytest.raises(NumericsError) as caught:
        low.update(finite=False)
    assert "at a loss scale of 1; 2 steps were skipped" in str(caught.value)
    assert "--use_mp_opt" in str(caught.value)


def test_a_scaled_float32_step_has_the_bits_of_one_that_is_not() -> None:
    plain, scaled = make_model(torch.float32), make_model(torch.float32)
    train(plain, [0, 1, 2])
    train(scaled, [0, 1, 2], LossScaler(scale=1024.0, growth_interval=2))
    for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        assert torch.equal(one, other)


def test_float16_takes_the_steps_of_float32_within_its_own_precision() -> None:
    whole, half = make_model(torch.float32), make_model(torch.float16)
    start = torch.cat([p.detach().flatten() for _, p in sorted(make_model(torch.float32).named_parameters())])
    expected = masters(train(whole, [0, 1, 2, 3]), whole)
    found = masters(train(half, [0, 1, 2, 3], LossScaler()), half)
    assert all(parameter.dtype == torch.float16 for parameter in half.parameters())
    moved = (expected - start).norm()
    assert moved > 0.1
    assert (found - expected).norm() < 0.02 * moved


def test_an_overflow_skips_exactly_its_step_and_what_follows_is_as_if_it_had_not_been() -> None:
    disturbed, clean = make_model(torch.float16), make_model(torch.float16)
    scaler = LossScaler()
    optimizer = train(disturbed, [], scaler)
    assert run(disturbed, optimizer, [0, BAD, 1, 2]) == [True, False, True, True]
    assert (scaler.scale, scaler.skipped) == (2.0**15, 1)
    other = train(clean, [0], LossScaler())
    other._scaler.scale = 2.0**15  # that of the other one from here on
    run(clean, other, [1, 2])
    expected, found = other.state_tensors(), optimizer.state_tensors()
    for name in expected.keys() - {KEY}:
        assert torch.equal(expected[name], found[name]), name


def test_small_gradients_survive_only_under_a_scale() -> None:
    """A loss of 1e-9 a number: its gradient is below the smallest float16 unless the loss is scaled."""
    moved = []
    for scaler in (None, LossScaler()):
        model = make_model(torch.float16)
        optimizer = train(model, [], scaler, max_norm=0.0)
        rows = torch.ones(1, 6, dtype=torch.float16)
        optimizer.backward(1e-9 * model(rows).float().sum())
        moved.append(optimizer.step(1e-2).gradient_norm)
    assert moved[0] == 0.0
    assert moved[1] > 1e-9


def test_micro_batches_of_fewer_bits_are_added_up_in_float32() -> None:
    """4,096 micro-batches of gradient 1 are 4,096; in float16 the sum would stop at 2,048."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    optimizer = DataParallelOptimizer([("w", weight)], SingleProcess(), **{**ADAM, "max_norm": 0.0}, master=True)
    for _ in range(4096):
        optimizer.backward(weight.float().sum())
    assert optimizer.step(0.0).gradient_norm == 4096.0


def test_a_resumed_run_has_the_scale_and_the_bits_of_the_uninterrupted_one() -> None:
    whole = make_model(torch.float16)
    uninterrupted = train(whole, [0, BAD, 1, 2, 3], LossScaler(growth_interval=3))
    begun = make_model(torch.float16)
    first = train(begun, [0, BAD, 1], LossScaler(growth_interval=3))
    saved = {name: tensor.clone() for name, tensor in first.state_tensors().items()}
    del first
    second = train(begun, [], LossScaler(growth_interval=3))
    second.load_state_tensors(saved)
    run(begun, second, [2, 3])
    expected, found = uninterrupted.state_tensors(), second.state_tensors()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert expected[KEY].tolist() == [2.0**16, 0, 1]


def test_a_scale_is_neither_needed_nor_kept_where_there_is_none_in_the_checkpoint_or_in_the_run() -> None:
    model = make_model(torch.float16)
    with_scale = train(model, [0], LossScaler()).state_tensors()
    without = {name: tensor for name, tensor in with_scale.items() if name != KEY}
    train(make_model(torch.float16), []).load_state_tensors(with_scale)
    fresh = LossScaler()
    train(make_model(torch.float16), [], fresh).load_state_tensors(without)
    assert fresh.scale == 2.0**16
    assert NoLossScaler().state_tensors() == {}
