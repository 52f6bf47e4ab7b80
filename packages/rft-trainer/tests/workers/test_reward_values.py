"""Values that reward functions return: numbers, parts and steps, and why there is no number."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rft_trainer.workers.reward_values import WrongLength, WrongType, as_value, as_values


def test_lists_tuples_and_tensors_of_as_many_numbers_are_taken() -> None:
    assert as_values((True, 2), 2, "f") == [1.0, 2.0]
    assert as_values(torch.tensor([0.5, 1.5]), 2, "f") == [0.5, 1.5]
    assert as_values([torch.tensor(0.5), torch.tensor(1)], 2, "f") == [0.5, 1.0]


@pytest.mark.parametrize("value", [1.0, "10", {"a": 1.0, "b": 0.0}, None, map(float, [1, 2])])
def test_what_is_no_list_is_an_error_of_the_whole(value: Any) -> None:
    with pytest.raises(WrongType, match=type(value).__name__):
        as_values(value, 2, "f")


@pytest.mark.parametrize("number", [0, 1, 3])
def test_another_length_is_an_error_of_the_whole(number: int) -> None:
    with pytest.raises(WrongLength, match=f"f returned {number} values for 2"):
        as_values([0.0] * number, 2, "f")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "nan"),
        (math.inf, "nan"),
        (torch.tensor(math.nan), "nan"),
        (None, "none"),
        ("1", "not_a_number"),
        ([1.0], "not_a_number"),
        ({"parts": {}}, "not_a_number"),
        ({"reward": 1.0, "other": 2}, "not_a_number"),
        ({"reward": math.nan}, "nan"),
        ({"reward": None}, "none"),
        ({"reward": 1.0, "parts": {"a": math.inf}}, "nan"),
        ({"reward": 1.0, "steps": [(math.nan, 1.0)]}, "nan"),
        ({"reward": 1.0, "steps": [(1.0, "x")]}, "not_a_number"),
        ({"score": "high"}, "not_a_number"),
    ],
)
def test_what_is_no_finite_number_is_a_failure_of_its_kind(value: Any, kind: str) -> None:
    first, second = as_values([value, 1.0], 2, "score_it")
    assert isinstance(first, dict)
    assert first["failure"] == kind
    assert str(first["detail"]).startswith("score_it returned ")
    assert second == 1.0


def test_a_mapping_has_a_reward_its_parts_and_its_steps() -> None:
    whole = {"reward": 1, "parts": {"format": True, 3: 0.5}, "steps": [(4, 0.25), [9, 1]]}
    parts = {"format": 1.0, "3": 0.5}
    assert as_value(whole, "f") == {"reward": 1.0, "parts": parts, "steps": [(4.0, 0.25), (9.0, 1.0)]}
    assert as_value({"reward": 2.0}, "f") == {"reward": 2.0, "parts": {}, "steps": []}


def test_a_score_with_further_figures_is_a_reward_with_parts() -> None:
    found = as_value({"score": 0.5, "acc": True, "pred": "12"}, "f")
    assert found == {"reward": 0.5, "parts": {"acc": 1.0}, "steps": []}
