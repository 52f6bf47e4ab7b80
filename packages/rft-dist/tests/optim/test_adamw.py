"""AdamW on what a rank holds: weights of few bits are stepped on in float32, and those copies survive a resume."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rft_core.errors import CheckpointError
from rft_dist.optim.adamw import LocalAdamW

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


def test_copies_follow_weights_that_were_loaded() -> None:
    held = weights()
    adamw = optimizer_of(held)
    held["w"].fill_(2.0)
    adamw.round_weights()
    assert float(adamw.state_tensors()["master/w"][0, 0]) == 2.0
