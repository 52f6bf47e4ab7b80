"""A run that is profiled, and one whose stacks are asked for, is the run that is not, to the bit."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from support.compare import differences
from support.references import References
from support.runs import ForkServer
from support.setup import TinyTask

from rft_cli.commands import runs as runs_command
from rft_core.errors import DataError

pytestmark = pytest.mark.xdist_group("invariants")

SHORT = {
    "rl": ("--max_steps", "4", "--save_steps", "2", "--rollout_log_interval", "1"),
    "sft": ("--max_steps", "4", "--save_steps", "2"),
    "dpo": ("--max_steps", "4", "--save_steps", "2"),
    "rm": ("--max_steps", "4", "--save_steps", "2"),
    "pretrain": ("--max_steps", "4", "--save_steps", "2"),
}


def summary(run: Path, steps: str) -> dict[str, object]:
    return json.loads((run / "profile" / f"steps_{steps}" / "summary.json").read_text())


@pytest.mark.parametrize("variant", SHORT)
def test_a_profiled_run_is_the_run_without_a_profile(
    server: ForkServer, task: TinyTask, references: References, runs: Path, variant: str
) -> None:
    server.must_finish(*task.words(variant, runs / "run", *SHORT[variant], "--profile", "2-3"))
    assert differences(references.run(variant, *SHORT[variant]), runs / "run") == []
    found = summary(runs / "run", "2-3")
    phases = {row["name"]: row for row in found["phases"]}  # type: ignore[index, attr-defined]
    assert phases["train"]["seconds"] > 0
    assert ("rollout" in phases) == (variant == "rl")
    assert any(row["phase"] == "train" and row["calls"] > 0 for row in found["operations"])  # type: ignore[index, attr-defined]
    assert found["host_reads"]["a_step"] > 0  # type: ignore[index, call-overload]


def test_the_first_of_two_ranks_is_recorded(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    server.must_finish(*task.words("sft", runs / "run", *SHORT["sft"], "--profile", "2"), num_ranks=2)
    assert differences(references.run("sft", *SHORT["sft"], num_ranks=2), runs / "run") == []
    assert summary(runs / "run", "2-2")["world_size"] == 2
    assert [path.name for path in (runs / "run" / "profile").rglob("*.gz")] == ["rank_0.trace.json.gz"]


def test_a_profile_is_asked_for_while_two_ranks_train(
    server: ForkServer, task: TinyTask, references: References, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--max_steps", "40", "--save_steps", "0")
    expected = references.run("rl", *words, num_ranks=2)
    run = runs / "run"
    child = server.start(*task.words("rl", run, *words), num_ranks=2)
    metrics = run / "metrics.jsonl"
    while not metrics.is_file() or not metrics.read_text():
        time.sleep(0.005)
    assert runs_command.run(["profile", str(run), "--steps", "2"]) == 0
    assert "records 2 steps when this one has ended" in capsys.readouterr().out
    assert child.wait().code == 0
    assert differences(expected, run) == []
    (folder,) = (run / "profile").iterdir()
    found = json.loads((folder / "summary.json").read_text())
    assert (found["num_steps"], found["world_size"]) == (2, 2)
    assert {"rollout", "train"} <= {row["name"] for row in found["phases"]}
    with pytest.raises(DataError, match="can be profiled") as refused:
        runs_command.run(["profile", str(run)])
    assert refused.value.problem.code == "run.no_profile"


def test_stacks_of_two_ranks_are_asked_for_while_they_train(
    server: ForkServer, task: TinyTask, references: References, runs: Path
) -> None:
    words = ("--max_steps", "12", "--save_steps", "0")
    expected = references.run("rl", *words, num_ranks=2)
    child = server.start(*task.words("rl", runs / "run", *words), num_ranks=2)
    logs = runs / "run" / "logs"
    files = [logs / f"stacks_rank_{rank}.txt" for rank in range(2)]
    while not all(file.is_file() and "process {" in file.read_text() for file in files):
        time.sleep(0.01)
    child.send(signal.SIGUSR2)
    asked = 1
    while not any("process ended" in file.read_text() for file in files):
        # each rank has answered before it is asked again: two signals at once are one
        if all(file.read_text().count("Current thread 0x") == asked for file in files) and asked < 20:
            child.send(signal.SIGUSR2)
            asked += 1
        time.sleep(0.005)
    assert child.wait().code == 0
    assert asked > 2
    for file in files:
        assert file.read_text().count("Current thread 0x") in (asked - 1, asked), "the last may meet the end"
    assert differences(expected, runs / "run") == []
