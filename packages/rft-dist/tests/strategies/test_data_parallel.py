"""The update of one process: equal to AdamW by the book, resumable to the bit, unmoved by bad numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from rft_core.errors import CheckpointError, OptionsError
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.strategies.data_parallel import DataParallelOptimizer, weights_hash


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 2)).to(dtype)


def make_optimizer(model: nn.Module, **changes) -> DataParallelOptimizer:
    settings = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1, "max_norm": 1.0, **changes}
    return DataParallelOptimizer(model.named_parameters(), SingleProcess(), **settings)


def loss_of(model: nn.Module, step: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 6, generator=generator).to(next(model.parameters()).dtype)
    return scale * model(inputs).square().sum()


def train(model: nn.Module, optimizer: DataParallelOptimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        optimizer.backward(loss_of(model, step))
        norms.append(optimizer.step(1e-2 / (1 + step)).gradient_norm)
    return norms


def test_a_step_is_adamw_by_the_book() -> None:
    model = make_model(dtype=torch.float64)
    optimizer = make_optimizer(model, weight_decay=0.3, max_norm=0.5)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    for step in range(1, 4):
        gradients = dict(zip(weights, torch.autograd.grad(loss_of(model, step), model.parameters()), strict=True))
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        assert norm > 0.5
        for name, gradient in gradients.items():
            clipped = gradient * (0.5 / norm)
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.95 * second[name] + 0.05 * clipped**2
            direction = (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8)
            decay = 0.3 if weights[name].ndim >= 2 else 0.0
            weights[name] = weights[name] - 0.01 * decay * weights[name] - 0.01 * direction
        optimizer.backward(loss_of(model, step))
        outcome = optimizer.step(0.01)
        assert outcome.applied
        assert outcome.gradient_norm == pytest.approx(norm, rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), weights[name], rtol=1e-10, atol=1e-12)


def test_three_steps_saved_and_two_more_equal_five_to_the_bit(tmp_path: Path) -> None:
    whole = make_model()
    whole_optimizer = make_optimizer(whole)
    norms = train(whole, whole_optimizer, range(5))

    begun = make_model()
    begun_optimizer = make_optimizer(begun)
    train(begun, begun_optimizer, range(3))
    tensors = {"optimizer": begun_optimizer.state_tensors(), "weights": begun.state_dict()}
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1, keep_bytes=None, run_id="run-a")
    store.save(3, tensors=tensors, records={}, model_writer=lambda _: None, metadata={})

    checkpoint = store.open(3)
    resumed = make_model(seed=1)
    resumed.load_state_dict(checkpoint.tensors("weights"))
    resumed_optimizer = make_optimizer(resumed)
    resumed_optimizer.load_state_tensors(checkpoint.tensors("optimizer"))
    assert train(resumed, resumed_optimizer, range(3, 5)) == norms[3:]
    assert resumed_optimizer.weights_hash() == whole_optimizer.weights_hash()
    assert weights_hash(resumed_optimizer.state_tensors().items()) == weights_hash(
        whole_optimizer.state_tensors().items()
    )


def test_state_before_the_first_step_round_trips() -> None:
    fresh, loaded = make_model(), make_model()
    fresh_optimizer, loaded_optimizer = make_optimizer(fresh), make_optimizer(loaded)
    loaded_optimizer.load_state_tensors(fresh_optimizer.state_tensors())
    train(fresh, fresh_optimizer, range(2))
    train(loaded, loaded_optimizer, range(2))
    assert fresh_optimizer.weights_hash() == loaded_optimizer.weights_hash()


def test_state_has_three_tensors_for_each_trained_parameter() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    want = {f"{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in trained}
    assert set(optimizer.state_tensors()) == want
    train(model, optimizer, range(1))
    assert set(optimizer.state_tensors()) == want
    assert optimizer.state_tensors()["step/3.weight"].item() == 1.0


def test_the_result_does_not_depend_on_how_the_batch_was_cut() -> None:
    whole, cut = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
    whole_optimizer, cut_optimizer = make_optimizer(whole), make_optimizer(cut)
    for step in range(3):
        inputs = torch.randn(8, 6, dtype=torch.float64)
        whole_optimizer.backward(whole(inputs).square().sum() / 8)
        for piece in inputs.split([1, 5, 2]):
            cut_optimizer.backward(cut(piece).square().sum() / 8)
        assert whole_optimizer.step(0.01).gradient_norm == pytest.approx(cut_optimizer.step(0.01).gradient_norm)
        for left, right in zip(whole.parameters(), cut.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-11, msg=f"step {step}")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_the_run_goes_on_as_without_it(value: float) -> None:
    clean, hit = make_model(), make_model()
    clean_optimizer, hit_optimizer = make_optimizer(clean), make_optimizer(hit)
    train(clean, clean_optimizer, range(2))
    train(hit, hit_optimizer, range(2))
    hit_optimizer.backward(loss_of(hit, 99))
    hit[3].weight.grad[1, 4] = value
    before = weights_hash([*hit.named_parameters(), *hit_optimizer.state_tensors().items()])
    outcome = hit_optimizer.step(0.01)
    assert not outcome.applied
    assert not math.isfinite(outcome.gradient_norm)
    assert weights_hash([*hit.named_parameters(), *hit_optimizer.state_tensors().items()]) == before
    assert all(parameter.grad is None for parameter in hit.parameters())
    train(clean, clean_optimizer, range(2, 4))
    train(hit, hit_optimizer, range(2, 4))
    assert clean_optimizer.weights_hash() == hit_optimizer.weights_hash()


class OtherRankRefuses(SingleProcess):
    """The collectives of a rank whose own numbers are sound, beside one whose numbers are not."""

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(tensor)


def test_a_norm_that_is_not_finite_on_another_rank_refuses_the_step_here_too() -> None:
    model = make_model()
    settings = {"betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
    optimizer = DataParallelOptimizer(model.named_parameters(), OtherRankRefuses(), **settings)
    before = optimizer.weights_hash()
    optimizer.backward(loss_of(model, 0))
    outcome = optimizer.step(1e-2)
    assert math.isfinite(outcome.gradient_norm)
    assert not outcome.applied
    assert optimizer.weights_hash() == before


def test_large_finite_gradients_are_clipped_and_not_refused() -> None:
    model = make_model()
    optimizer = make_optimizer(model, max_norm=1.0)
    optimizer.backward(loss_of(model, 0))
    for parameter in model.parameters():
        parameter.grad.fill_(1e25)
    outcome = optimizer.step(0.01)
    num = sum(parameter.numel() for parameter in model.parameters())
    assert outcome.applied
    assert outcome.gradient_norm == pytest.approx(1e25 * math.sqrt(num), rel=1e-6)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_limit_of_zero_never_clips() -> None:
    model = make_model()
    optimizer = make_optimizer(model, max_norm=0.0, betas=(0.0, 0.0))
    optimizer.backward(loss_of(model, 0, scale=1e3))
    gradient = model[0].weight.grad.clone()
    optimizer.step(0.0)
    assert torch.equal(optimizer.state_tensors()["exp_avg/0.weight"], gradient)


def test_a_norm_below_the_limit_leaves_the_gradient_as_it_is() -> None:
    model = make_model()
    optimizer = make_optimizer(model, max_norm=1e9, betas=(0.0, 0.0))
    optimizer.backward(loss_of(model, 0))
    gradient = model[0].weight.grad.clone()
    optimizer.step(0.0)
    assert torch.equal(optimizer.state_tensors()["exp_avg/0.weight"], gradient)


def test_a_parameter_that_no_micro_batch_touched_counts_as_gradient_zero() -> None:
    model = make_model()
    optimizer = make_optimizer(model, weight_decay=0.0)
    train(model, optimizer, range(1))
    before = optimizer.state_tensors()["exp_avg/0.weight"].clone()
    outcome = optimizer.step(0.01)
    assert outcome.gradient_norm == 0.0
    assert outcome.applied
    torch.testing.assert_close(optimizer.state_tensors()["exp_avg/0.weight"], 0.9 * before)


def test_the_norm_of_many_entries_is_exact() -> None:
    model = nn.Linear(1, 3_000_000, bias=False)
    optimizer = DataParallelOptimizer(
        model.named_parameters(), SingleProcess(), betas=(0.9, 0.9), epsilon=1e-8, weight_decay=0.0, max_norm=0.0
    )
    model.weight.grad = torch.randn(3_000_000, 1)
    want = model.weight.grad.double().square().sum().sqrt().item()
    assert optimizer.step(0.0).gradient_norm == pytest.approx(want, rel=1e-6)


def test_nothing_to_train_is_an_error() -> None:
    model = make_model().requires_grad_(False)
    with pytest.raises(OptionsError, match="train: 0 of 6") as caught:
        make_optimizer(model)
    assert caught.value.problem.code == "optimizer.nothing_to_train"


def test_state_of_another_model_is_refused_and_changes_nothing() -> None:
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    before = weights_hash(optimizer.state_tensors().items())
    state = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    state["exp_avg/0.weight"] = torch.zeros(9, 7)
    state["exp_avg_sq/0.weight"] = state["exp_avg_sq/0.weight"].double()
    del state["step/3.bias"]
    state["step/4.bias"] = torch.zeros(())
    with pytest.raises(CheckpointError, match=r"1 missing, 1 unexpected, 2.*step/3") as caught:
        optimizer.load_state_tensors(state)
    assert caught.value.problem.code == "optimizer.state_differs"
    assert weights_hash(optimizer.state_tensors().items()) == before


def test_the_hash_depends_on_name_value_dtype_and_shape_and_not_on_order() -> None:
    a, b = torch.arange(6.0), torch.ones(2)
    base = weights_hash([("a", a), ("b", b)])
    assert weights_hash([("b", b), ("a", a)]) == base
    changed = a.clone()
    changed[5] = torch.nextafter(a[5], torch.tensor(9.0))
    assert (
        len({base, *(weights_hash([("a", other), ("b", b)]) for other in (changed, a.double(), a.reshape(2, 3)))}) == 4
    )
    assert weights_hash([("c", a), ("b", b)]) != base
