"""`--on_alarm`: a run with an alarm of its health is saved and ends as it was told, and a resume goes on past it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")
ALARM, PAUSED = 10, 75
NEVER_ENDS = [("wrong_eos", [])]


@pytest.mark.parametrize(
    ("on_alarm", "code", "num_ranks"), [("stop", ALARM, 1), ("pause", PAUSED, 1), ("stop", ALARM, 2)]
)
def test_a_run_with_an_alarm_is_saved_and_goes_on_when_it_is_resumed(
    server: ForkServer, task: TinyTask, runs: Path, on_alarm: str, code: int, num_ranks: int
) -> None:
    run = runs / "run"
    words = task.words("rl", run, "--on_alarm", on_alarm, "--max_steps", "7", "--eval_steps", "0")
    ended = server.run(*words, preludes=NEVER_ENDS, num_ranks=num_ranks)
    assert (ended.code, *ended.other_codes) == (code,) * num_ranks, ended.output[-3000:]
    assert re.search(r"alarm after step 5: never_ends: \d+% of the responses were cut", ended.output)
    assert "nothing is lost: checkpoint of step 5" in ended.output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["outcome"] == "interrupted"
    assert [(alarm["name"], alarm["step"]) for alarm in summary["health"]] == [("never_ends", 5)]
    page = " ".join(server.must_finish("runs", "show", str(run)).output.split())
    assert re.search(r"step 5, never_ends: \d+% of the responses were cut", page)
    server.must_finish("report", str(run))
    assert "never_ends" in (run / "report.html").read_text()
    # the rows still show it, and it ends the run no second time
    resumed = server.must_finish("resume", str(run), preludes=NEVER_ENDS, num_ranks=num_ranks)
    assert "never_ends:" not in resumed.output.partition("alarm ")[0]
    assert json.loads((run / "summary.json").read_text())["outcome"] == "finished"


def test_without_the_setting_an_alarm_is_a_line(server: ForkServer, task: TinyTask, runs: Path) -> None:
    words = task.words("rl", runs / "run", "--max_steps", "6", "--eval_steps", "0")
    ended = server.must_finish(*words, preludes=NEVER_ENDS)
    assert re.search(r"step 5: never_ends: \d+% of the responses were cut", ended.output)
    assert "alarm   step 5, never_ends" in ended.output


def test_supervised_training_stops_for_a_loss_that_rises(server: ForkServer, task: TinyTask, runs: Path) -> None:
    fast = ["--l2", "0", "--learning_rate", "1e3", "--max_epochs", "9"]
    ended = server.run(*task.words("sft", runs / "run", "--on_alarm", "stop", *fast))
    assert ended.code == ALARM, ended.output[-3000:]
    assert "loss_rose: the loss rose" in ended.output
