"""Heads and columns that have to divide over ranks, from a configuration alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_models.files.divisibility import refuse_uneven, refuse_uneven_experts_of, refuse_uneven_model

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 40}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_model_that_divides_is_taken(num_ranks: int) -> None:
    refuse_uneven(HEADS, num_ranks, "here")
    for name in HEADS:
        if num_ranks > 1:
            with pytest.raises(OptionsError, match=name):
                refuse_uneven(HEADS | {name: HEADS[name] + 1}, num_ranks, "here")


@pytest.mark.parametrize(
    ("config", "num_ranks", "named", "allowed", "nearest"),
    [
        (HEADS, 3, ["num_key_value_heads 4", "intermediate_size 40"], "1, 2, 4", 2),
        (HEADS, 5, ["num_attention_heads 12", "num_key_value_heads 4"], "1, 2, 4", 4),
        (HEADS, 8, ["num_attention_heads 12", "num_key_value_heads 4"], "1, 2, 4", 4),
        ({"num_attention_heads": 6, "intermediate_size": 9}, 2, ["intermediate_size 9"], "1, 3", 1),
        (
            {"num_attention_heads": 6, "num_key_value_heads": None, "intermediate_size": 8},
            3,
            ["intermediate_size 8"],
            "1, 2",
            2,
        ),
    ],
)
def test_what_does_not_divide_is_named_with_the_numbers_that_do(
    config: dict[str, Any], num_ranks: int, named: list[str], allowed: str, nearest: int
) -> None:
    with pytest.raises(OptionsError) as caught:
        refuse_uneven(config, num_ranks, "here")
    problem = caught.value.problem
    assert (problem.code, problem.where) == ("tensor.uneven", "here")
    assert problem.what.endswith(f"has {', '.join(named)}")
    assert f"allowed: {allowed};" in problem.why
    assert problem.do == f"--tp_size {nearest}, or --sp_size {num_ranks} instead"


@pytest.mark.parametrize("nested", [True, False])
def test_a_directory_is_refused_by_the_configuration_of_its_decoder(nested: bool, tmp_path: Path) -> None:
    refuse_uneven_model(tmp_path, 3)
    outer = {"text_config": HEADS, "num_attention_heads": 3, "intermediate_size": 3} if nested else HEADS
    file = tmp_path / "config.json"
    file.write_text(json.dumps(outer))
    for num_ranks in (1, 2):
        refuse_uneven_model(str(tmp_path), num_ranks)
    with pytest.raises(OptionsError) as caught:
        refuse_uneven_model(tmp_path, 3)
    assert caught.value.problem.where == str(file)
    file.write_text("{")
    refuse_uneven_model(tmp_path, 1)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_that_do_not_divide_are_named_with_the_numbers_that_do(name: str, tmp_path: Path) -> None:
    refuse_uneven_experts_of(tmp_path, 3)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({name: 6}))
    for num_ranks in (1, 2, 3, 6):
        refuse_uneven_experts_of(tmp_path, num_ranks)
    with pytest.raises(OptionsError) as caught:
        refuse_uneven_experts_of(tmp_path, 4)
    problem = caught.value.problem
    assert (problem.code, problem.what) == ("expert.uneven", "ep_size = 4, but the model has 6 experts")
    assert problem.why.endswith("allowed: 1, 2, 3, 6")
    assert problem.do == "--ep_size 3"


def test_a_dense_model_has_no_experts_to_divide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEADS))
    refuse_uneven_experts_of(tmp_path, 1)
    with pytest.raises(OptionsError) as caught:
        refuse_uneven_experts_of(tmp_path, 2)
    assert caught.value.problem.what == "ep_size = 2, but the model has no experts"
    assert caught.value.problem.do == "--ep_size 1"
