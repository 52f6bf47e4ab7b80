"""Runs that train wrongly without an error are named by a detector within thirty steps; runs that train are not.

At night from real runs, with RFT_RECORD_ROWS=FOLDER kept as the rows that packages/rft-trainer/tests/health replays.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.pathologies import CLEAN, COPIES, PATHOLOGIES, STEPS, Pathology, start_that_copies, words
from support.runs import ForkServer
from support.setup import TinyTask

from rft_trainer.health.detectors import DETECTORS

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.night]
READ = {"step", "eval/reward", *(name for detector in DETECTORS for name in detector.metrics.split())}
_TIMES = ("time/data", "time/tokens_per_second", "memory/rss_mib")
"""What differs from one recording to the next; the time of a step matters where ranks are compared."""
SEEDS, SEEDS_OF_TWO_RANKS = 20, 3


def health(run: Path, name: str) -> list[dict[str, Any]]:
    """The alarms in the summary of a run; its rows are recorded where somebody asks for them."""
    folder = os.environ.get("RFT_RECORD_ROWS")
    if folder:
        tables = ((run / file).read_text().splitlines() for file in ("metrics.jsonl", "evals.jsonl"))
        metrics, evaluations = ([_kept(json.loads(line)) for line in lines] for lines in tables)
        record = {"metrics": metrics, "evaluations": evaluations}
        (Path(folder) / f"{name.replace(' ', '_')}.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    return json.loads((run / "summary.json").read_text())["health"]


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in row.items()
        if name in READ and name not in (_TIMES if "time/slowest_rank" in row else (*_TIMES, "time/step"))
    }


@pytest.mark.parametrize("name", PATHOLOGIES)
def test_a_planted_fault_is_named(server: ForkServer, task: TinyTask, runs: Path, name: str) -> None:
    fault: Pathology = PATHOLOGIES[name]
    if fault.prepare is not None:
        fault.prepare(server, task, runs)
    given = words(task, runs / "run", fault.words, runs)
    server.must_finish(*given, preludes=[(fault.prelude, [])] if fault.prelude else [])
    found = health(runs / "run", name)
    assert set(fault.expected) <= {alarm["name"] for alarm in found}, found
    assert all(alarm["step"] <= STEPS for alarm in found)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", CLEAN)
def test_a_run_that_trains_has_no_alarm(server: ForkServer, task: TinyTask, runs: Path, name: str, seed: int) -> None:
    server.must_finish(*words(task, runs / "run", CLEAN[name], runs, seed=seed))
    found = health(runs / "run", f"{name}_{seed}")
    assert [alarm for alarm in found if alarm["level"] == "alarm"] == []
    assert len(found) <= 1, found


@pytest.mark.parametrize("seed", range(SEEDS_OF_TWO_RANKS))
def test_a_run_of_two_ranks_has_no_slow_one(server: ForkServer, task: TinyTask, runs: Path, seed: int) -> None:
    server.must_finish(*words(task, runs / "run", "", runs, seed=seed), num_ranks=2)
    found = health(runs / "run", f"clean_of_two_ranks_{seed}")
    assert "straggler" not in [alarm["name"] for alarm in found]
    assert [alarm for alarm in found if alarm["level"] == "alarm"] == []


def test_answers_that_held_out_prompts_have_too_are_no_leak(server: ForkServer, task: TinyTask, runs: Path) -> None:
    start_that_copies(server, task, runs)
    flags = f"{COPIES} --eval_data {{folder}}/leaked_heldout.jsonl"
    server.must_finish(*words(task, runs / "run", flags, runs))
    found = health(runs / "run", "clean_with_the_answer_in_every_prompt")
    assert [alarm for alarm in found if alarm["level"] == "alarm"] == []
