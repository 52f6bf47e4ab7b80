"""Sections of a report that are tables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rft.report.sections import evaluations, findings, health, left_out, phases, sentence, settings, table
from rft_trainer.health.watch import Alarm
from rft_trainer.runs.reader import RunFiles
from rft_trainer.runs.verdict import RunFinding


def run_of(
    rows: list[dict[str, Any]],
    summary: Mapping[str, Any] | None = None,
    chosen: dict[str, tuple[str, str]] | None = None,
) -> RunFiles:
    return RunFiles(
        Path("runs/mine"), dict(summary or {}), rows, [], "", "rl", chosen or {}, [], [], touched=0.0, live=False
    )


@pytest.mark.parametrize(
    ("values", "less_is_better", "expected"),
    [
        ([1.0, 3.0], False, "improved, from 1 in its first step to 3 at the end"),
        ([1.0, 3.0], True, "got worse, from 1"),
        ([2.0, 2.0], False, "did not move, from 2"),
        ([float(n) for n in range(100)], False, "improved, from 4.5 in its first tenth to 94.5 at the end"),
    ],
)
def test_the_outcome_is_one_sentence(values: list[float], less_is_better: bool, expected: str) -> None:
    rows = [{"step": step, "x": value} for step, value in enumerate(values, start=1)]
    text = sentence(run_of(rows, {"outcome": "finished", "seconds": 75.0}), "x", less_is_better=less_is_better)
    assert text.startswith(f"The run finished after {len(values)} steps in 1 min 15 s; x ")
    assert expected in text


def test_a_run_that_was_cut_off_says_so() -> None:
    assert sentence(run_of([{"step": 1}]), "x", less_is_better=False) == "The run stopped without an end after 1 step."


def test_what_is_wrong_is_shown_with_what_to_look_at() -> None:
    assert "nothing wrong" in findings([])
    shown = findings([RunFinding("constant_reward", "every reward was <0>", "look at the reward")])
    assert "every reward was &lt;0&gt;" in shown
    assert "look at the reward" in shown


def test_what_detectors_found_has_its_step_and_its_setting() -> None:
    assert health([]) == ""
    alarm = Alarm("never_ends", "alarm", 5, 1.0, "all <cut>", "look", "generate_max_len")
    shown = health([alarm])
    assert all(part in shown for part in ("never_ends", "alarm", "5", "all &lt;cut&gt;", "look", "--generate_max_len"))


def test_the_time_is_divided_among_phases() -> None:
    shown = phases(run_of([{"step": 1, "time/train": 3.0, "time/rollout": 1.0}, {"step": 2, "time/train": 4.0}]))
    assert shown.index("train") < shown.rindex("rollout")
    assert "87.5%" in shown
    assert "12.5%" in shown
    assert phases(run_of([{"step": 1}])) == ""


def test_responses_that_were_left_out_are_counted_by_reason() -> None:
    shown = left_out(run_of([{"step": 1, "drop/no_signal": 8, "drop/unscored": 0}, {"step": 2, "drop/no_signal": 4}]))
    assert "no signal<td>12" in shown
    assert "unscored" not in shown
    assert left_out(run_of([{"step": 1, "drop/no_signal": 0}])) == ""


def test_settings_beside_those_of_the_recipe_come_first() -> None:
    chosen = {"beta": ("0.1", "recipe quickstart.yaml:3"), "seed": ("7", "command line")}
    shown = settings(run_of([], chosen=chosen))
    assert shown.index("seed") < shown.index("beta")
    assert "None beside the recipe" in settings(run_of([]))


def test_held_out_rows_before_and_after_are_shown() -> None:
    shown = evaluations(run_of([], {"eval": {"before": {"accuracy": 0.25}, "after": {"accuracy": 0.5, "kind": "x"}}}))
    assert "accuracy<td>0.25<td>0.5" in shown
    assert "kind" not in shown
    assert evaluations(run_of([])) == ""


def test_cells_are_escaped() -> None:
    assert "<td>&lt;script&gt;" in table(("a",), [("<script>",)])
