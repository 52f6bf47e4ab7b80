"""States that differ from the decoder's own, or that see what stands behind them, are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_core.errors import PreflightError
from rft_core.packed_tokens import PackedTokens
from rft_models.backbone.causality_check import check_states


class Model:
    """A model of 61 tokens in training mode."""

    training = True

    def get_input_embeddings(self) -> Any:
        """A table of that many rows."""
        return SimpleNamespace(weight=torch.zeros(61, 4))

    def eval(self) -> None:
        """Note the mode."""
        self.training = False

    def train(self, mode: bool) -> None:
        """Note the mode."""
        self.training = mode


class Backbone:
    """States are running sums of the ids, unless a test says otherwise."""

    def __init__(self, model: Model, *, packed_error: float = 0.0, sight: int = 0) -> None:
        self.model, self.packed_error, self.sight = model, packed_error, sight
        self.asked: list[list[int]] = []

    def own_states(self, tokens_L: Tensor) -> Tensor:
        """[L, 1]: each sum includes `sight` tokens behind its own."""
        assert not self.model.training
        assert not torch.is_grad_enabled()
        self.asked.append(tokens_L.tolist())
        sums = tokens_L.double().cumsum(0)
        behind = (torch.arange(len(sums)) + self.sight).clamp(max=len(sums) - 1)
        return sums[behind][:, None]

    def hidden_states(self, tokens: PackedTokens) -> Tensor:
        """[T, 1] of all segments."""
        parts = [tokens.token_ids_T[tokens.segment_ids_T == number] for number in (0, 1)]
        return torch.cat([self.own_states(part) for part in parts]) + self.packed_error


def check(backbone: Backbone) -> None:
    check_states(backbone.model, backbone, device=torch.device("cpu"), dtype=torch.float32, where="here")  # type: ignore[arg-type]


def test_equal_causal_states_pass_and_the_last_segment_is_tried_without_its_last_token() -> None:
    backbone = Backbone(Model())
    check(backbone)
    assert backbone.model.training
    whole = [[3, 10, 17], [4, 11, 18, 25, 32]]
    assert backbone.asked == [*whole, *whole, whole[1][:-1]]


def test_packed_states_that_differ_are_refused() -> None:
    with pytest.raises(PreflightError) as caught:
        check(Backbone(Model(), packed_error=0.5))
    assert caught.value.problem.code == "models.forward_differs"


@pytest.mark.parametrize("sight", [1, 4])
def test_states_that_see_later_tokens_are_refused(sight: int) -> None:
    backbone = Backbone(Model(), sight=sight)
    with pytest.raises(PreflightError) as caught:
        check(backbone)
    assert caught.value.problem.code == "models.looks_ahead"
    assert backbone.model.training
