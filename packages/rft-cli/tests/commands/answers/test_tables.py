"""Pages of sampled answers: a table of groups, and the best beside the worst."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.console import Console, RenderableType

from rft.library.token_numbers import GroupTokens, ShadedTokens
from rft_cli.commands.answers.tables import page_of_group, table_of_groups
from rft_trainer.rollout_files.selection import AnswerGroup


def group(*rewards: float | None, prompt: str = "p:1", **more: Any) -> AnswerGroup:
    rows: list[dict[str, Any]] = [
        {
            "prompt_id": prompt,
            "sample": number,
            "prompt": "1+1=",
            "label": "2",
            "response": f"answer {number}",
            "reward": reward,
            "status": "timeout" if reward is None else "ok",
            "finish_reason": "stop",
            "num_tokens": number + 2,
            **more,
        }
        for number, reward in enumerate(rewards)
    ]
    return AnswerGroup(4, prompt, rows)


def text_of(page: RenderableType, *, colors: bool = False) -> str:
    console = Console(width=120, force_terminal=colors, color_system="truecolor" if colors else None)
    with console.capture() as captured:
        console.print(page)
    return captured.get()


def test_a_line_a_group_and_how_to_see_the_rest() -> None:
    shown = text_of(table_of_groups([group(0.0, 1.0), group(None, prompt="p:2"), group(1.0)], 2))
    lines = shown.splitlines()
    assert lines[1].split() == ["4", "p:1", "2", "0.5", "1", "0", "2-3", "answer", "1"]
    assert lines[2].split() == ["4", "p:2", "1", "2", "timeout"]
    assert lines[3] == "1 further groups: --most 3 shows all"


def test_best_and_worst_stand_side_by_side_with_their_numbers() -> None:
    numbers = {0: ShadedTokens(["an", "swer"], [-1.0, -0.5]), 1: ShadedTokens(["ok"], [1.0])}
    shown = text_of(page_of_group(group(0.0, 1.0), GroupTokens(numbers), "advantage", colors=False))
    assert "best: reward 1, 3 tokens, stop, sample 1" in shown
    assert "worst: reward 0, 2 tokens, stop, sample 0" in shown
    row = next(line for line in shown.splitlines() if "ok[" in line)
    assert row.index("ok[+1]") < row.index("an[-1]swer[-0.5]")
    assert "behind each token: its advantage" in shown


def test_tokens_are_coloured_by_sign_and_strength() -> None:
    numbers = {0: ShadedTokens(["a", "b"], [-1.0, math.nan]), 1: ShadedTokens(["c", "d"], [1.0, 0.0])}
    page = page_of_group(group(0.0, 1.0), GroupTokens(numbers), "advantage")
    shown = text_of(page, colors=True)
    assert "48;2;215;95;80ma" in shown, "red below 0"
    assert "48;2;88;140;220mc" in shown, "blue above 0"
    assert "\x1b[4mb" in shown, "what is no number is underlined"


@pytest.mark.parametrize(
    ("rewards", "titles"), [((0.5,), ["answer: reward 0.5"]), ((None, None), ["best: timeout", "worst: timeout"])]
)
def test_groups_without_two_scored_answers(rewards: tuple[float | None, ...], titles: list[str]) -> None:
    shown = text_of(
        page_of_group(group(*rewards), GroupTokens(why_none="step 4 has no record of its tokens"), "advantage")
    )
    assert all(title in shown for title in titles)
    assert "step 4 has no record of its tokens" in shown
