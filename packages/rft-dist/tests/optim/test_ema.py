"""The moving average of the weights: by the book, of what is stepped on, resumed to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rft_dist.collectives import SingleProcess
from rft_dist.optim.ema import MovingAverage
from rft_dist.optim.loss_scaler import LossScaler
from rft_dist.strategies.data_parallel import DataParallelOptimizer

ADAM = {"betas": (0.9, 0.95), "epsilon": 1e-6, "weight_decay": 0.0, "max_norm": 0.0}


def optimizer_of(weight: nn.Parameter, decay: float | None = 0.75, **options) -> DataParallelOptimizer:
    return DataParallelOptimizer([("w", weight)], SingleProcess(), **ADAM, ema_decay=decay, **options)


def step(weight: nn.Parameter, optimizer: DataParallelOptimizer, factor: float = 1.0) -> Tensor:
    optimizer.backward((weight.float() * torch.tensor([1.0, -2.0])).sum() * factor)
    optimizer.step(0.1)
    return optimizer.state_tensors()["ema/w"]


def test_the_average_by_hand() -> None:
    average = MovingAverage({"w": torch.tensor([8.0, 0.0])}, 0.75)
    average.update({"w": torch.tensor([4.0, 4.0])})  # 0.75 * 8 + 0.25 * 4, 0.75 * 0 + 0.25 * 4
    assert average.tensors()["w"].tolist() == [7.0, 1.0]
    average.update({"w": torch.tensor([-1.0, 1.0])})
    assert average.tensors()["w"].tolist() == [5.0, 1.0]


def test_averages_of_weights_that_want_gradients_want_none() -> None:
    weight = nn.Parameter(torch.tensor([8.0, 0.0]))
    average = MovingAverage({"w": weight}, 0.0)
    weight.data.fill_(4.0)
    average.update({"w": weight})
    assert average.tensors()["w"].tolist() == [4.0, 4.0]
    weight.data.fill_(2.0)
    average.restart({"w": weight})
    weight.data.fill_(1.0)
    assert average.tensors()["w"].tolist() == [2.0, 2.0], "a copy"
    assert not average.tensors()["w"].requires_grad
    assert not MovingAverage({"w": weight}, 0.5).tensors()["w"].requires_grad


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_an_average_that_never_moves_or_runs_away_is_refused(decay: float) -> None:
    with pytest.raises(AssertionError):
        MovingAverage({}, decay)


def test_it_begins_at_the_weights_and_moves_after_every_step_that_is_applied() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer, expected = optimizer_of(weight), torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert optimizer.state_tensors()["ema/w"].tolist() == [1.0, 2.0]
    for number in range(5):
        found = step(weight, optimizer, float("nan") if number == 2 else 1.0)
        if number != 2:  # a refused step changes no average
            expected = 0.75 * expected + 0.25 * weight.detach().double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(found, weight.detach())


def test_of_weights_of_fewer_bits_the_float32_copies_are_averaged() -> None:
    weight = nn.Parameter(torch.tensor([1000.0, -1000.0], dtype=torch.float16))
    optimizer = optimizer_of(weight, decay=0.5, master=True, scaler=LossScaler(scale=1024.0))
    found = step(weight, optimizer)
    assert weight.tolist() == [1000.0, -1000.0], "float16 has no number so near"
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([1000.0 - 0.05, -1000.0 + 0.05], abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_weights_of_fewer_bits_is_kept_in_float32(dtype: torch.dtype) -> None:
    weight = torch.ones(2, dtype=dtype)
    average = MovingAverage({"w": weight}, 0.999)
    weight.fill_(2.0)
    for _ in range(3):  # each adds about 0.001, less than the last bit of 1.0 in bfloat16
        average.update({"w": weight})
    found = average.tensors()["w"]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx([2.0 - 0.999**3] * 2, abs=1e-6)
    assert MovingAverage({"w": weight.double()}, 0.5).tensors()["w"].dtype == torch.float64


def test_a_resumed_average_has_the_bits_of_the_uninterrupted_one() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = optimizer_of(weight)
    step(weight, optimizer)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    again = nn.Parameter(weight.detach().clone())
    resumed = optimizer_of(again)
    resumed.load_state_tensors(saved)
    assert torch.equal(step(weight, optimizer), step(again, resumed))


def test_a_run_may_begin_to_average_in_the_middle_and_may_cease() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    without = optimizer_of(weight, decay=None)
    without.backward(weight.sum())
    without.step(0.1)
    begins = optimizer_of(nn.Parameter(weight.detach().clone()))
    begins.load_state_tensors(without.state_tensors())
    assert torch.equal(begins.state_tensors()["ema/w"], weight.detach())
    ceases = optimizer_of(nn.Parameter(weight.detach().clone()), decay=None)
    ceases.load_state_tensors(begins.state_tensors())
    assert "ema/w" not in ceases.state_tensors()
