"""Evaluation and generation from Python: scores with their rows, and prompts as texts or rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import rft
from rft_core.errors import OptionsError

ROWS: list[dict[str, Any]] = [{"input": f"{n}+{n}=", "label": f"{2 * n:02d}"} for n in range(4)]
SHORT: dict[str, Any] = {"device": "cpu", "generate_max_len": 4, "prompt_max_len": 8}


def parity(responses: Sequence[str], labels: Sequence[str]) -> list[float | None]:
    return [None if label == "06" else float(int(label) % 4 == 0) for label in labels]


def test_scores_are_of_the_rows_that_have_one(small_model: Path) -> None:
    scores = rft.evaluate(small_model, ROWS, parity, **SHORT)
    assert scores.metrics["eval/n"] == 4
    assert scores.metrics["eval/unscored"] == 1
    assert scores.reward == pytest.approx(2 / 3)
    assert scores.accuracy == pytest.approx(2 / 3)
    assert scores.accuracy_interval[0] < 2 / 3 < scores.accuracy_interval[1]
    assert [row["reward"] for row in scores.rows] == [1.0, 0.0, 1.0, None]
    assert "rows" not in repr(scores)
    assert rft.evaluate(small_model, ROWS, "exact", **SHORT).accuracy == 0.0


def test_prompts_are_a_text_texts_or_rows(small_model: Path, tmp_path: Path) -> None:
    one = rft.generate(small_model, "1+1=", **SHORT)
    assert [row["prompt"] for row in one] == ["1+1="]
    several = rft.generate(small_model, ["1+1=", "2+2="], n_samples_per_prompt=2, temperature=1.0, **SHORT)
    assert [row["prompt"] for row in several] == ["1+1=", "1+1=", "2+2=", "2+2="]
    rows = rft.generate(small_model, [{"question": "1+1="}], input_key="question", **SHORT)
    assert [row["response"] for row in rows] == [row["response"] for row in one]
    assert rft.generate(small_model, ["1+1="], input_key="question", **SHORT)[0]["response"] == one[0]["response"]
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"input": "1+1="}\n')
    assert rft.generate(small_model, file, **SHORT)[0]["response"] == one[0]["response"]
    with pytest.raises(OptionsError, match="prompts is empty"):
        rft.generate(small_model, [], **SHORT)


def test_the_file_of_answers_is_written_and_refused_where_it_cannot_be(small_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    answered = rft.generate(small_model, ["1+1=", "2+2="], output=str(file), **SHORT)
    assert [json.loads(line) for line in file.read_text().splitlines()] == answered
    scores = rft.evaluate(small_model, ROWS, parity, output=str(file), **SHORT)
    assert [json.loads(line) for line in file.read_text().splitlines()] == scores.rows
    # before the model, which is not there
    for call in (rft.generate, rft.evaluate):
        with pytest.raises(OptionsError) as caught:
            call("no-model", ROWS, output=str(tmp_path))
        assert caught.value.problem.do == f"output='{tmp_path}/answers.jsonl'"


@pytest.mark.parametrize("name", ["nproc", "restarts"])
def test_processes_are_started_by_the_command_alone(small_model: Path, name: str) -> None:
    settings: dict[str, Any] = {name: 2, **SHORT}
    with pytest.raises(OptionsError, match=f"{name} = 2") as caught:
        rft.evaluate(small_model, ROWS, "exact", **settings)
    assert caught.value.problem.do == f"rft-train eval --{name} 2"


def test_the_name_of_a_file_is_no_prompt(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"input": "1+1="}\n')
    with pytest.raises(OptionsError) as caught:
        rft.generate("model", str(file))
    assert caught.value.problem.code == "library.prompt_is_file"
    assert f"pathlib.Path({str(file)!r})" in caught.value.problem.do


def test_the_turns_of_a_conversation_are_no_rows() -> None:
    with pytest.raises(OptionsError) as caught:
        rft.generate("model", [{"role": "user", "content": "1+1="}])
    assert caught.value.problem.code == "library.prompt_is_turns"
    assert "prompts=[{'input': [...]}]" in caught.value.problem.do
