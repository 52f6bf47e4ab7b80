"""Nobody reads what a run prints, its terminal hangs up, or signals come in a storm: it ends as it would have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.compare import differences
from support.references import SAVED_AFTER_SIGNAL, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

SHORT = ("--max_steps", "3", "--save_steps", "2", "--eval_steps", "2")
LOST: dict[str, tuple[str, list[Any]]] = {
    "a closed pipe": ("close_output", ["pipe"]),
    "a full disk": ("close_output", ["full disk"]),
    "a terminal that hangs up": ("hang_up_at", ["rl.logged", 1]),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_run_whose_output_is_lost_trains_to_its_end(
    server: ForkServer, task: TinyTask, references: References, runs: Path, lost: str
) -> None:
    ended = server.run(*task.words("rl", runs / "run", *SHORT), preludes=[LOST[lost]])
    assert ended.code == 0, ended.output[-3000:]
    assert differences(references.run("rl", *SHORT), runs / "run") == []


def test_a_supervised_run_does_too(server: ForkServer, task: TinyTask, references: References, runs: Path) -> None:
    preludes = [("hang_up_at", ["sft.logged", 1])]
    ended = server.run(*task.words("sft", runs / "run", *SHORT), preludes=preludes)
    assert ended.code == 0, ended.output[-3000:]
    assert differences(references.run("sft", *SHORT), runs / "run") == []


def test_a_storm_of_signals_leaves_the_exit_code_of_the_save(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    run = runs / "run"
    restarts = Restarts(server, task.words("rl", run, *SHORT), run)
    ended = restarts.start([("storm_at", ["rl.logged", 1, 30.0])]).wait()
    assert ended.code == SAVED_AFTER_SIGNAL, ended.output[-3000:]
    restarts.finish()
    assert differences(references.run("rl", *SHORT), run) == []
