"""Groups of kept answers: what is asked of a row, their order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rft_core.errors import RftError
from rft_trainer.rollout_files.selection import RowFilter, group_rows, read_groups


def row(prompt: str, sample: int, reward: float | None, text: str = "x", **more: Any) -> dict[str, Any]:
    status = "failed" if reward is None else "ok"
    return {
        "prompt_id": prompt,
        "sample": sample,
        "prompt": f"{prompt}?",
        "response": text,
        "reward": reward,
        "status": status,
        "finish_reason": "stop",
        "num_tokens": len(text),
        **more,
    }


ROWS = {
    1: [row("a", 0, 0.0, "long answer"), row("a", 1, 1.0, "yes"), row("b", 0, 0.5), row("b", 1, 0.5, "ok")],
    10: [row("a", 0, 1.0, finish_reason="length"), row("c", 0, None), row("c", 1, 0.25)],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    for step, rows in ROWS.items():
        lines = "".join(json.dumps(one) + "\n" for one in rows)
        (tmp_path / "rollouts" / f"step_{step:06d}.jsonl").write_text(lines)
    return tmp_path


def shown(run: Path, order: Any = "step", **asked: Any) -> list[tuple[int, str, int]]:
    return [(one.step, one.prompt_id, len(one.rows)) for one in read_groups(run, RowFilter(**asked), order)]


def test_groups_are_those_of_a_prompt_and_a_step(run: Path) -> None:
    assert shown(run) == [(1, "a", 2), (1, "b", 2), (10, "a", 1), (10, "c", 2)]
    first, *_, last = read_groups(run, RowFilter())
    assert [one["response"] for one in first.scored] == ["yes", "long answer"]
    assert (first.mean, first.reward_range) == (0.5, 1.0)
    assert (last.mean, last.reward_range, len(last.scored)) == (0.25, 0.0, 1)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"step": 10}, [(10, "a", 1), (10, "c", 2)]),
        ({"prompt_id": "a"}, [(1, "a", 2), (10, "a", 1)]),
        ({"status": "failed"}, [(10, "c", 1)]),
        ({"finish_reason": "length"}, [(10, "a", 1)]),
        ({"reward_min": 0.5}, [(1, "a", 1), (1, "b", 2), (10, "a", 1)]),
        ({"reward_max": 0.25}, [(1, "a", 1), (10, "c", 1)]),
        ({"contains": "answer"}, [(1, "a", 1)]),
        ({"contains": "nothing has this"}, []),
    ],
)
def test_a_row_is_taken_where_it_holds_all_that_is_asked(
    asked: dict[str, Any], found: list[tuple[int, str, int]], run: Path
) -> None:
    assert shown(run, **asked) == found


@pytest.mark.parametrize(
    ("order", "first"),
    [("step", (1, "a", 2)), ("reward", (10, "a", 1)), ("spread", (1, "a", 2)), ("length", (1, "a", 2))],
)
def test_groups_in_order(order: str, first: tuple[int, str, int], run: Path) -> None:
    assert shown(run, order)[0] == first


def test_of_equal_rewards_the_shorter_answer_is_the_better(run: Path) -> None:
    group = read_groups(run, RowFilter(prompt_id="b"))[0]
    assert [one["response"] for one in group.scored] == ["x", "ok"]


@pytest.mark.parametrize(
    ("asked", "code", "do"),
    [
        ({"step": 9}, "rollouts.no_such_step", "--step 10"),
        ({"prompt_id": "aa"}, "rollouts.no_such_prompt", "--prompt a"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(asked: dict[str, Any], code: str, do: str, run: Path) -> None:
    with pytest.raises(RftError) as caught:
        read_groups(run, RowFilter(**asked))
    assert caught.value.problem.code == code
    assert caught.value.problem.do == do


def test_a_run_without_rollouts_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(RftError, match="has no rollouts"):
        read_groups(tmp_path, RowFilter())


def test_answers_of_no_training_are_grouped_by_their_prompt_and_have_the_step_0() -> None:
    found = group_rows(ROWS[1], RowFilter(reward_min=0.5))
    assert [(one.step, one.prompt_id, len(one.rows)) for one in found] == [(0, "a", 1), (0, "b", 2)]
    assert [one.prompt_id for one in group_rows(ROWS[1], RowFilter(), "spread")] == ["a", "b"]
    assert [one.prompt_id for one in group_rows(ROWS[1], RowFilter(), "length")] == ["a", "b"]
    with pytest.raises(RftError, match="nobody"):
        group_rows(ROWS[1], RowFilter(prompt_id="nobody"))
