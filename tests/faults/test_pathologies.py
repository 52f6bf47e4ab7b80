"""Runs that train wrongly without an error are named by a detector within thirty steps; runs that train are not.

At night from real runs, with RFT_RECORD_ROWS=FOLDER kept as the rows that packages/rft-trainer/tests/health replays.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.pathologies import CLEAN, PATHOLOGIES, STEPS, Pathology, words
from support.runs import ForkServer
from support.setup import TinyTask

from rft_trainer.health.detectors import DETECTORS

pytestmark = [pytest.mark.xdist_group("faults"), pytest.mark.night]
READ = {"step", "eval/reward", *(name for detector in DETECTORS for name in detector.metrics.split())}
SEEDS = 20


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
        if name in READ and name not in ("time/step", "time/data", "time/tokens_per_second", "memory/rss_mib")
    }


@pytest.mark.parametrize("name", PATHOLOGIES)
def test_a_planted_fault_is_named(server: ForkServer, task: TinyTask, runs: Path, name: str) -> None:
    fault: Pathology = PATHOLOGIES[name]
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
