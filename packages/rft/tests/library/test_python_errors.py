"""Errors of runs that a program starts: its rows and keywords in place of files and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rft
from rft.library.given_rows import rows_file
from rft.library.python_errors import python_words
from rft_core.errors import DataError, Problem, RftError

ROW = {"input": "1+1=", "label": "2"}


def rewards(responses: list[str]) -> list[float]:
    return [0.0] * len(responses)


@pytest.mark.parametrize(
    ("arguments", "where", "do"),
    [
        ({"data": [ROW, {"inptu": "1"}]}, "data[1]['input']", "give data[1] the field input, or remove it"),
        (
            {"data": [ROW], "eval_data": [{"input": "1"}]},
            "eval_data[0]['label']",
            "eval_label_key with the field that holds it, or give the rows the field label",
        ),
        ({"data": [{"input": "1" * 99, "label": "1"}]}, "keyword argument prompt_max_len", "prompt_max_len=99"),
    ],
)
def test_an_error_names_the_row_of_the_argument_and_the_keyword(
    small_model: Path, arguments: dict[str, Any], where: str, do: str
) -> None:
    with pytest.raises(DataError) as caught:
        rft.grpo(str(small_model), reward=rewards, device="cpu", prompt_max_len=9, max_steps=1, **arguments)
    problem = caught.value.problem
    assert (problem.where, problem.do) == (where, do)
    assert "--" not in str(caught.value)
    assert ".jsonl" not in str(caught.value)


def test_an_evaluation_names_the_row_too(small_model: Path) -> None:
    with pytest.raises(DataError) as caught:
        rft.evaluate(str(small_model), [ROW, {"input": "1"}], rewards, device="cpu")
    assert caught.value.problem.where == "data[1]['label']"


def _raised(**fields: str) -> Problem:
    with pytest.raises(RftError) as caught, python_words():
        raise DataError(**{"code": "a.b", "what": "w", "where": "x", "why": "y", **fields})
    return caught.value.problem


def test_a_command_keeps_its_flags_and_files_that_were_given_their_paths() -> None:
    assert _raised(do="rft-train eval RUN --eval_data F").do == "rft-train eval RUN --eval_data F"
    assert _raised(where="/data/train.jsonl:3:input").where == "/data/train.jsonl:3:input"


def test_several_flags_of_a_remedy_become_keywords() -> None:
    assert _raised(do="--train_batch_size 8 --reward math").do == "train_batch_size=8, reward='math'"
    assert _raised(do="--apply_chat_template").do == "apply_chat_template=True"


def test_a_flag_whose_value_is_described_becomes_the_name_of_its_keyword() -> None:
    assert _raised(do="--reward with one of these names").do == "reward with one of these names"
    assert _raised(do="--save_path with a directory of its own, --seed 3").do == (
        "save_path with a directory of its own, seed=3"
    )
    assert _raised(do="--bf16 --max_len 9").do == "bf16=True, max_len=9"
    assert _raised(do="--reward_weights a=1,b=0.5").do == "reward_weights='a=1,b=0.5'"
    assert _raised(do="--max_len 9, or --bf16").do == "max_len=9, or bf16=True"
    assert _raised(do="free some memory").do == "free some memory"
    again = "repair it, then python a.py (where it changed, --accept_changes reward)"
    assert _raised(do=again).do == again.replace("--accept_changes reward", "accept_changes='reward'")


def test_rows_in_the_middle_of_a_sentence_are_named(own_cache: Path) -> None:
    file = rows_file([ROW], "data")
    assert _raised(what=f"2 rows of {file} and {file}:7").what == "2 rows of data and data[6]"
    assert _raised(what=f"first: {Path(file).stem}:0#3 (failed)").what == "first: data[0]#3 (failed)"
