"""What is said of a run from its rows, and what is not: both sides of every finding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.reader import read_run
from rft_trainer.runs.verdict import Evidence, evidence_of, present_findings, verdict


def rl_rows(rewards: list[float], *, top: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """Rows of steps with these mean rewards of 32 responses to 8 prompts, each reward 0 or `top`."""
    rows: list[dict[str, Any]] = []
    for step, mean in enumerate(rewards, start=1):
        signal = 0.0 if mean in (0.0, top) else 0.5
        row: dict[str, Any] = {
            "step": step,
            "reward/mean": mean,
            "reward/min": top if mean == top else 0.0,
            "reward/max": top if mean else 0.0,
            "reward/groups_with_signal": signal,
            "completion/distinct": 9,
            "completion/truncated_share": 0.1,
            "completion/length_max": 4,
            "policy/gradient_norm": 0.7 if signal else 0.0,
            "policy/updates": 1,
            "policy/updates_refused": 0,
            "policy/learning_rate": 1e-6,
            "policy/entropy": 1.0,
            "data/prompts": 8,
            "data/samples": 32,
        }
        rows.append(row | more)
    return rows


def sft_rows(losses: list[float | None], rate: float = 1e-5) -> list[dict[str, Any]]:
    return [
        {"step": step, "sft/loss": loss, "policy/learning_rate": rate, "policy/gradient_norm": 1.0}
        for step, loss in enumerate(losses, start=1)
    ]


def codes(rows: list[dict[str, Any]], **evidence: Any) -> list[str]:
    return [finding.code for finding in verdict(Evidence(rows=rows, **evidence))]


LEARNS = [0.1, 0.06, 0.16, 0.2, 0.1, 0.3, 0.25, 0.4, 0.3, 0.45, 0.5, 0.6]
SOLVED = [0.2, 0.6, *[1.0] * 38]
TRAINS: dict[str, list[dict[str, Any]]] = {
    "rewards that rise": rl_rows(LEARNS),
    "rewards that stay where they are": rl_rows([0.1, 0.2, 0.15, 0.09] * 10),
    "rare rewards": rl_rows([0.0, 0.0, 0.03, 0.0] * 10),
    "a solved task": rl_rows(SOLVED),
    "a solved task that has one answer": rl_rows(SOLVED, **{"completion/distinct": 1}),
    "rewards that fall by noise": rl_rows([0.2, 0.2, 0.2, 0.1, 0.1, 0.2, 0.1, 0.1, 0.05, 0.05]),
    "rewards that fall by half": rl_rows([0.9] * 10 + [0.45] * 10),
    "a baseline over the batch": [
        row | {"reward/groups_with_signal": 0.0, "policy/gradient_norm": 0.5} for row in rl_rows(LEARNS)
    ],
    "a critic that is trained first": [
        row | {"policy/gradient_norm": None, "policy/updates": 0} for row in rl_rows(LEARNS)
    ],
    "some updates that were refused": [
        row | {"policy/updates": 9, "policy/updates_refused": 1} for row in rl_rows(LEARNS)
    ],
    "large rewards": rl_rows([1e6 * reward for reward in LEARNS], top=1e6),
    "one prompt a step": rl_rows(LEARNS, **{"completion/distinct": 1, "data/prompts": 1}),
    "a few responses that are the same": [
        row | {"completion/distinct": 1 if row["step"] < 9 else 5} for row in rl_rows(LEARNS)
    ],
    "a loss that falls": sft_rows([2.0 - 0.02 * step + 0.3 * (step % 3) for step in range(40)]),
    "a loss that is lowest already": sft_rows([0.01 + 0.01 * (step % 5) for step in range(40)]),
    "a short run of unequal batches": sft_rows([1.0, 1.3, 0.9, 1.4, 1.1, 1.2, 1.0, 1.4, 1.5, 1.3, 0.95, 1.4]),
    "too few steps": sft_rows([1.0, 1.2, 1.3, 1.4]),
    "nothing": [],
}


@pytest.mark.parametrize("case", TRAINS)
def test_nothing_is_said_of_a_run_that_trains(case: str) -> None:
    assert verdict(Evidence(rows=TRAINS[case])) == []


REFUSED = {"policy/updates": 1, "policy/updates_refused": 1, "policy/gradient_norm": None}
WRONG: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "no reward": ("constant_reward", rl_rows([0.0] * 3)),
    "the highest reward from the start": ("constant_reward", rl_rows([1.0] * 12)),
    "one reward in twelve steps": ("no_signal", rl_rows([0.0] * 5 + [0.03] + [0.0] * 6)),
    "rewards that end": ("no_signal", rl_rows([0.1, *[0.0] * 19])),
    "equal rewards in groups, and no gradient": (
        "no_signal",
        [row | {"reward/groups_with_signal": 0.0, "policy/gradient_norm": 0.0} for row in rl_rows(LEARNS)],
    ),
    "absurd rewards": ("no_gradient", rl_rows([r * 1e160 for r in LEARNS], top=1e160, **{"policy/gradient_norm": 0})),
    "all gradients clipped away": ("no_gradient", rl_rows(LEARNS, **{"policy/gradient_norm": 0.0})),
    "rewards that collapse": ("collapsed", rl_rows([0.2, 0.5, 0.6, *[0.7] * 8, 0.3, 0.1, *[0.05, 0.0] * 4])),
    "one answer": ("one_answer", [r | {"completion/distinct": 1 if r["step"] > 6 else 20} for r in rl_rows(LEARNS)]),
    "half of the updates refused": ("updates_refused", [row | REFUSED for row in rl_rows(LEARNS)]),
    "a loss that rises at once": ("loss_rose", sft_rows([0.7, *[2.6] * 9])),
    "a loss that rises slowly": ("loss_rose", sft_rows([1.0 + 0.02 * step for step in range(60)])),
    "a loss that stays": ("loss_not_falling", sft_rows([1.0, 1.1, 0.9, 1.05] * 10)),
    "rows without figures": ("metrics_lost", [{"step": 1}, {"step": 3}]),
    "a loss that is no number": ("loss_not_finite", sft_rows([1.0, None, 0.9])),
    "a gap in the rows": ("metrics_lost", [row for row in rl_rows(LEARNS) if row["step"] not in (4, 5, 9)]),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_found_and_nothing_else(case: str) -> None:
    code, rows = WRONG[case]
    assert codes(rows) == [code]


@pytest.mark.parametrize("case", WRONG)
def test_a_finding_has_figures_and_a_remedy(case: str) -> None:
    (finding,) = verdict(Evidence(rows=WRONG[case][1]))
    assert any(letter.isdigit() for letter in finding.what)
    assert finding.do
    assert finding.as_record() == {"code": finding.code, "what": finding.what, "do": finding.do}


def test_the_remedy_follows_from_the_rows() -> None:
    (silent,) = verdict(Evidence(rows=rl_rows([0.0] * 12), rollouts="rollouts/step_000012.jsonl"))
    assert "rollouts/step_000012.jsonl" in silent.do
    (cut,) = verdict(Evidence(rows=rl_rows([0.0] * 12, **{"completion/truncated_share": 1.0})))
    assert cut.do.startswith("--generate_max_len 8:")
    (fast,) = verdict(Evidence(rows=rl_rows([0.1, *[0.0] * 19], **{"policy/learning_rate": 1e6})))
    assert fast.do.startswith("--actor_learning_rate 1e-5,")
    (fast,) = verdict(Evidence(rows=sft_rows([0.7, *[2.6] * 9], rate=1.0)))
    assert fast.do.startswith("--learning_rate 1e-5,")
    (slow,) = verdict(Evidence(rows=sft_rows([1.0, 1.1, 0.9, 1.05] * 10, rate=1e-7)))
    assert slow.do == "--learning_rate 1e-06"


def test_held_out_rows_decide_whether_a_loss_fell() -> None:
    rows = sft_rows([1.0, 1.1, 0.9, 1.05] * 10)
    assert codes(rows, evaluations=[{"eval/loss": 1.0}, {"eval/loss": 0.9}, {"eval/loss": 1.1}]) == []
    assert codes(rows, evaluations=[{"eval/loss": 1.0}, {"eval/loss": 1.1}]) == ["loss_not_falling"]
    best = {"eval/loss": 0.5, "eval/best_step": 3}
    assert codes(rows, evaluations=[{"eval/loss": 1.0}, {"eval/loss": 1.1}, best]) == ["loss_not_falling"]


def test_rows_that_are_gone_are_counted() -> None:
    rows = rl_rows(LEARNS)
    assert codes(rows[4:], steps=(1, 12)) == ["metrics_lost"]
    assert codes(rows[:9], steps=(1, 12)) == ["metrics_lost"]
    (none,) = verdict(Evidence(rows=[], steps=(1, 12)))
    assert "lacks 12 rows of steps that were done: 1 to 12" in none.what
    assert codes(rows[4:], steps=(5, 12)) == []


def run_of(path: Path, steps: list[int], config: str = "") -> RunDirectory:
    run = RunDirectory.create(path, config_text=config or "seed: 1\n", command=["rft-train"], environment={})
    for row in rl_rows(LEARNS):
        if row["step"] in steps:
            run.append_metrics(row)
    return run


def test_the_evidence_of_a_directory_has_its_steps_and_its_last_rollouts(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", [*range(1, 13)])
    run.write_rollouts(12, [{"reward": 1.0}])
    assert evidence_of(read_run(run.path)).rollouts == "rollouts/step_000012.jsonl"
    assert verdict(evidence_of(read_run(run.path))) == []
    run.metrics_file.unlink()
    assert [finding.code for finding in verdict(evidence_of(read_run(run.path)))] == ["metrics_lost"]


def test_a_run_from_the_checkpoint_of_another_begins_with_its_own_rows(tmp_path: Path) -> None:
    late = run_of(tmp_path / "late", [7, 8, 9], "ckpt_path: other  # command line\n")
    assert verdict(evidence_of(read_run(late.path))) == []
    lost = run_of(tmp_path / "lost", [7, 8, 9])
    assert [finding.code for finding in verdict(evidence_of(read_run(lost.path)))] == ["metrics_lost"]


def test_of_a_run_that_goes_on_only_its_last_steps_are_judged() -> None:
    assert [finding.code for finding in present_findings(rl_rows([0.0] * 20))] == ["constant_reward"]
    assert present_findings(rl_rows(LEARNS)[5:]) == []
    assert present_findings(sft_rows([0.7, *[2.6] * 19])) == []  # it may still fall


def test_numbers_that_are_none_are_passed_over() -> None:
    rows = rl_rows(LEARNS)
    for row in rows[::3]:
        row |= {"reward/mean": None, "reward/min": math.nan, "reward/max": None, "policy/entropy": None}
    assert codes(rows) == []


NAMES = [*rl_rows([0.5])[0], "sft/loss"]
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 40), st.floats(), st.sampled_from(["", "x"]), st.just([1]))


@given(rows=st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES), max_size=30))
@settings(max_examples=200, deadline=None)
def test_rows_of_any_content_give_a_verdict(rows: list[dict[str, Any]]) -> None:
    numbered = [{"step": number, **row} for number, row in enumerate(rows)]
    for finding in (*verdict(Evidence(rows=numbered, evaluations=rows)), *present_findings(numbered)):
        assert finding.what
