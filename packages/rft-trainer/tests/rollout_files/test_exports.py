"""Data sets of rollouts: the best answers, pairs of a better and a worse one, and what is left out by reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import OptionsError
from rft_trainer.rollout_files.exports import demonstrations, preference_pairs, write_rows
from rft_trainer.rollout_files.selection import AnswerGroup


def group(prompt: str, step: int, *answers: tuple[str, float | None], **more: Any) -> AnswerGroup:
    rows = [
        {"prompt_id": prompt, "prompt": f"{prompt}?", "response": text, "reward": reward, "step": step, **more}
        for text, reward in answers
    ]
    return AnswerGroup(step, prompt, rows)


def test_the_best_answers_are_demonstrations() -> None:
    groups = [group("a", 1, ("no", 0.0), ("yes", 1.0), ("yes", 1.0), ("si", 0.5)), group("b", 1, ("z", None))]
    made = demonstrations(groups)
    assert made.rows == [{"input": "a?", "output": "yes", "prompt_id": "a", "step": 1, "reward": 1.0}]
    assert made.left_out == {"without a reward": 1}
    # the same text twice counts once
    assert [row["output"] for row in demonstrations(groups, per_prompt=2).rows] == ["yes", "si"]


def test_the_same_answer_of_two_steps_is_one_row() -> None:
    groups = [group("a", step, ("yes", 1.0)) for step in (1, 10)]
    assert [row["step"] for row in demonstrations(groups).rows] == [1]


def test_the_best_beside_the_worst_is_a_pair() -> None:
    groups = [group("a", 2, ("no", 0.0), ("maybe", 0.5), ("yes", 1.0)), group("b", 2, ("x", 0.5), ("y", 0.5))]
    made = preference_pairs(groups)
    assert made.rows == [
        {"prompt": "a?", "chosen": "yes", "rejected": "no", "margin": 1.0, "prompt_id": "a", "step": 2}
    ]
    assert made.left_out == {"equal rewards": 1}
    assert preference_pairs(groups, least_gap=1.0).left_out == {"too small a difference": 2}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"turns": [{"who": "policy"}]}, "conversations of several turns"),
        ({"images": [{"where": "x.png"}]}, "prompts with images"),
    ],
)
def test_what_a_row_of_text_cannot_hold_is_left_out_and_counted(more: dict[str, Any], reason: str) -> None:
    groups = [group("a", 1, ("no", 0.0), ("yes", 1.0), **more)]
    for made in (demonstrations(groups), preference_pairs(groups)):
        assert (made.rows, made.left_out) == ([], {reason: 1})


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, [{"a": 1}])
    with pytest.raises(OptionsError) as caught:
        write_rows(file, [{"a": 2}])
    assert caught.value.problem.do == f"--output {tmp_path / 'rows-2.jsonl'}"
    assert json.loads(file.read_text()) == {"a": 1}


def test_answers_without_text_are_in_no_data_set() -> None:
    groups = [group("a", 1, ("yes", 1.0), ("no", 0.5), ("", 0.0)), group("b", 1, ("", 1.0))]
    (pair,) = preference_pairs(groups).rows
    assert (pair["chosen"], pair["rejected"], pair["margin"]) == ("yes", "no", 0.5)
    assert [row["output"] for row in demonstrations(groups, per_prompt=3).rows] == ["yes", "no"]
    assert demonstrations(groups).left_out == {"without text in any answer": 1}
