"""AdamW on what a rank holds: weights of few bits are stepped on in float32, and those copies survive a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rft_core.errors import CheckpointError, OptionsError
from rft_dist.optim.adamw import (
    LocalAdamW,
    clip,
    compare_states,
    fresh_state,
    is_optional,
    squared_norm,
    total_norm,
    trained_parameters,
)

RATE = 1e-4
"""Too small for a weight of 1 in bfloat16, whose next number is 1 / 128 away: only the copy moves."""


def weights() -> dict[str, Tensor]:
    return {"w": torch.ones(3, 2, dtype=torch.bfloat16), "b": torch.full((2,), -1.0, dtype=torch.bfloat16)}


def optimizer_of(held: dict[str, Tensor], *, master: bool = True) -> LocalAdamW:
    return LocalAdamW(held, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, master=master)


def step(adamw: LocalAdamW, number: int) -> None:
    gradients = {name: torch.full(tensor.shape, 1.0 + number) for name, tensor in adamw.local.items()}
    adamw.update(gradients, RATE)


def test_updates_below_the_last_bit_of_a_weight_add_up() -> None:
    held = weights()
    adamw = optimizer_of(held)
    for number in range(60):  # each moves the copy by about the rate
        step(adamw, number)
    assert adamw.state_tensors()["master/w"].dtype == torch.float32
    assert float(held["w"][0, 0]) < 1.0
    lost = weights()
    without = optimizer_of(lost, master=False)
    for number in range(60):
        step(without, number)
    assert float(lost["w"][0, 0]) == 1.0


def test_master_copies_are_restored_so_that_a_resumed_run_takes_the_uninterrupted_steps() -> None:
    held = weights()
    adamw = optimizer_of(held)
    for number in range(5):
        step(adamw, number)
    saved = {name: tensor.clone() for name, tensor in adamw.state_tensors().items()}
    assert not torch.equal(saved["master/w"], held["w"].float()), "the copy has moved, the weight has not"
    again = {name: tensor.clone() for name, tensor in held.items()}
    resumed = optimizer_of(again)
    resumed.load_state_tensors(saved)
    assert torch.equal(resumed.state_tensors()["master/w"], saved["master/w"])
    for number in range(5, 60):
        step(adamw, number)
        step(resumed, number)
    assert all(torch.equal(again[name], held[name]) for name in held)
    found, expected = resumed.state_tensors(), adamw.state_tensors()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_state_without_the_copies_is_refused() -> None:
    adamw = optimizer_of(weights())
    state = {name: tensor for name, tensor in adamw.state_tensors().items() if not name.startswith("master/")}
    with pytest.raises(CheckpointError) as caught:
        adamw.load_state_tensors(state)
    assert caught.value.problem.code == "optimizer.state_differs"


def test_without_a_word_about_copies_there_are_none_and_wide_weights_need_none() -> None:
    plain = LocalAdamW(weights(), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0)
    assert not [name for name in plain.state_tensors() if name.startswith("master/")]
    wide = {"w": torch.ones(2, dtype=torch.float64)}
    assert optimizer_of(wide).state_tensors()["exp_avg/w"].dtype == torch.float64


def by_the_book(weight: Tensor, gradients: list[Tensor], rate: float, decay: float) -> Tensor:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with betas 0.8 and 0.9 and epsilon 0.5, in float64."""
    weight, first, second = weight.double(), torch.zeros(()), torch.zeros(())
    for number, gradient in enumerate((each.double() for each in gradients), start=1):
        weight = weight * (1 - rate * decay)
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        weight = weight - rate * (first / (1 - 0.8**number)) / ((second / (1 - 0.9**number)).sqrt() + 0.5)
    return weight


def test_steps_are_those_of_the_book_and_decay_acts_on_matrices_alone() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = {"bias": (4,), "matrix": (2, 3), "scale": (), "tensor": (2, 2, 2)}
    held = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    begin = {name: tensor.clone() for name, tensor in held.items()}
    gradients = [{n: torch.randn(shape, generator=generator) for n, shape in shapes.items()} for _ in range(3)]
    adamw = LocalAdamW(held, betas=(0.8, 0.9), epsilon=0.5, weight_decay=0.7)
    for each in gradients:
        adamw.update(each, 0.25)
    for name, tensor in held.items():
        decay = 0.7 if name in ("matrix", "tensor") else 0.0
        expected = by_the_book(begin[name], [each[name] for each in gradients], 0.25, decay)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)
    one_group = {"w": torch.ones(2, 2)}
    LocalAdamW(one_group, betas=(0.8, 0.9), epsilon=0.5, weight_decay=0.7).update({"w": torch.ones(2, 2)}, 0.25)
    assert float(one_group["w"][0, 0]) == pytest.approx(1 - 0.25 * 0.7 - 0.25 / 1.5, abs=1e-6)


def test_weights_that_want_gradients_are_stepped_on_and_the_state_wants_none() -> None:
    held: dict[str, Any] = {name: Parameter(tensor) for name, tensor in weights().items()}
    adamw = LocalAdamW(held, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, master=True, ema_decay=0.5)
    step(adamw, 0)
    state = adamw.state_tensors()
    assert {name.partition("/")[0] for name in state} == {"exp_avg", "exp_avg_sq", "step", "master", "ema"}
    assert not any(tensor.requires_grad for tensor in state.values())
    assert all(held[name].is_leaf and held[name].grad is None for name in held)


def test_torch_is_asked_for_the_fused_step_where_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    real = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda groups, **words: asked.append(words) or real(groups, **words))
    for device in ("cpu", "meta"):
        optimizer_of({"w": torch.ones(2, 2, device=device)})
    same = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    assert asked == [same | {"fused": True, "foreach": None}, same | {"fused": False, "foreach": True}]
    assert fresh_state(torch.empty(2, 3, device="meta"))["step"].device.type == "cpu"


STATE = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (STATE, ""),
        ({"a": STATE["a"]}, "1 missing, 0 unexpected, 0 of another"),
        (STATE | {"c": torch.zeros(1), "d": torch.zeros(1)}, "0 missing, 2 unexpected, 0 of another"),
        (STATE | {"a": torch.zeros(3)}, "0 missing, 0 unexpected, 1 of another"),
        (STATE | {"b": torch.zeros(3)}, "0 missing, 0 unexpected, 1 of another"),
        ({"a": torch.zeros(3), "c": torch.zeros(1)}, "1 missing, 1 unexpected, 1 of another"),
    ],
)
def test_names_shapes_and_types_of_a_state_are_compared(saved: dict[str, Tensor], told: str) -> None:
    if not told:
        compare_states(STATE, saved)
        return
    with pytest.raises(CheckpointError) as caught:
        compare_states(STATE, saved)
    assert caught.value.problem.code == "optimizer.state_differs"
    assert told in caught.value.problem.what


def test_a_refused_state_changes_nothing() -> None:
    adamw = optimizer_of(weights())
    step(adamw, 0)
    before = {name: tensor.clone() for name, tensor in adamw.state_tensors().items()}
    with pytest.raises(CheckpointError) as caught:
        adamw.load_state_tensors({name: 2 * tensor for name, tensor in before.items() if name != "step/w"})
    assert "1 missing, 0 unexpected" in caught.value.problem.what
    assert all(torch.equal(tensor, before[name]) for name, tensor in adamw.state_tensors().items())


def test_trained_parameters_are_those_that_want_gradients_in_the_order_of_their_names() -> None:
    named = {"b": Parameter(torch.ones(1)), "c": Parameter(torch.ones(1), requires_grad=False)}
    named |= {"a": Parameter(torch.ones(1))}
    assert list(trained_parameters(named.items()).items()) == [("a", named["a"]), ("b", named["b"])]
    with pytest.raises(OptionsError) as caught:
        trained_parameters([("c", named["c"])])
    assert caught.value.problem.code == "optimizer.nothing_to_train"
    assert "0 of 1" in caught.value.problem.what


def test_averages_and_the_loss_scale_may_be_missing_from_a_checkpoint() -> None:
    names = ("ema/w", "loss_scale", "loss_scale/w", "exp_avg/ema", "step/w", "master/w")
    assert [is_optional(name) for name in names] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(4.0, 1.0, 0.25), (4.0, 0.5, 0.125), (1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (4.0, 0.0, 1.0), (4.0, -1.0, 1.0)],
)
def test_gradients_are_clipped_in_place_where_their_norm_is_above_the_bound(
    norm: float, max_norm: float, factor: float
) -> None:
    gradients = [torch.tensor([3.0, 5.0]), torch.tensor(7.0)]
    clip(gradients, norm, max_norm)
    assert torch.cat([gradients[0], gradients[1][None]]).tolist() == [3.0 * factor, 5.0 * factor, 7.0 * factor]


def test_norms_are_exact_in_blocks_and_do_not_overflow() -> None:
    assert squared_norm(torch.ones(2)).item() == 2.0
    assert squared_norm(torch.ones(3, 2**16, dtype=torch.bfloat16)).item() == 3 * 2**16
    tiny = torch.tensor([3e-30, 4e-30], dtype=torch.float64)
    assert squared_norm(tiny).item() == pytest.approx(2.5e-59, rel=1e-12, abs=0)
    assert total_norm([torch.tensor([3.0])]) == 3.0
    assert total_norm([torch.full((2, 2), 1.0), torch.tensor([2.0, 1.0])]) == 3.0
    assert total_norm([torch.tensor([3e30]), torch.tensor([4e30])]) == pytest.approx(5e30, rel=1e-6)
    assert total_norm([torch.tensor([float("inf")])]) == float("inf")


def test_averages_are_restored_begin_from_the_restored_copies_or_are_left() -> None:
    def averaging(decay: float | None = 0.5) -> LocalAdamW:
        return LocalAdamW(weights(), betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, master=True, ema_decay=decay)

    adamw = averaging()
    step(adamw, 0)
    step(adamw, 1)
    saved = {name: tensor.clone() for name, tensor in adamw.state_tensors().items()}
    without = {name: tensor for name, tensor in saved.items() if not name.startswith("ema/")}
    # two steps of about the rate each: the average is at a half of the first and then of both
    assert saved["ema/w"][0, 0].item() == pytest.approx(1 - 1.25 * RATE, abs=5e-6)
    assert not torch.equal(saved["ema/w"], saved["master/w"])
    restored, begun, left = averaging(), averaging(), averaging(None)
    restored.load_state_tensors(saved)
    begun.load_state_tensors(without)
    left.load_state_tensors(saved)
    for found, expected in (
        (restored, saved),
        (begun, without | {f"ema/{name}": saved[f"master/{name}"] for name in weights()}),
        (left, without),
    ):
        state = found.state_tensors()
        assert set(state) == set(expected)
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    with pytest.raises(CheckpointError):
        averaging().load_state_tensors({name: tensor for name, tensor in saved.items() if name != "ema/b"})


def test_weights_that_have_moved_to_other_memory_get_the_step() -> None:
    held = {"w": torch.ones(2)}
    adamw = optimizer_of(held)
    held["w"].data = torch.ones(2)
    step(adamw, 0)
    assert held["w"].tolist() == pytest.approx([1 - RATE] * 2)


def test_the_copy_of_what_was_written_follows_it_and_no_other_does() -> None:
    matrix = torch.ones(5, 2, dtype=torch.bfloat16)
    held = {**weights(), "rows": matrix[3:]}
    adamw = optimizer_of(held)
    step(adamw, 0)
    copies = {name: tensor.clone() for name, tensor in adamw.state_tensors().items()}
    assert copies["master/b"].tolist() != held["b"].tolist(), "of more bits than what it is rounded to"
    held["w"].fill_(2.0)
    adamw.follow(held["w"])
    matrix.fill_(3.0)
    adamw.follow(matrix)
    adamw.follow(matrix[:3])
    found = adamw.state_tensors()
    assert found["master/w"].tolist() == [[2.0] * 2] * 3
    assert found["master/rows"].tolist() == [[3.0] * 2] * 2
    changed = {name for name, tensor in copies.items() if not torch.equal(tensor, found[name])}
    assert changed == {"master/w", "master/rows"}
