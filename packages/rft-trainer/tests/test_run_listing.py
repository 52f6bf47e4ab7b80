"""A listing of runs in every state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rft_trainer.run_listing import list_runs
from rft_trainer.runs.directory import RunDirectory


def create(path: Path) -> RunDirectory:
    return RunDirectory.create(path, config_text="", command=["x"], environment={})


def test_runs_are_listed_with_outcome_steps_minutes_and_the_evaluation_before_and_after(tmp_path: Path) -> None:
    done = create(tmp_path / "b")
    evaluations = {"before": {"n": 500, "length": 3.0, "accuracy": 0.1}, "after": {"n": 500, "accuracy": 0.9}}
    done.write_summary({"outcome": "finished", "steps": 40, "seconds": 90, "eval": evaluations})
    live = create(tmp_path / "a")
    live.append_metrics({"step": 7})
    with live.metrics_file.open("a") as stream:
        stream.write('{"step": 8')
    create(tmp_path / "c")
    (tmp_path / "no run").mkdir()
    (tmp_path / "file.txt").write_text("")
    first, second, third = list_runs(tmp_path)
    assert (first.name, first.outcome, first.steps, first.minutes) == ("a", "unfinished", 7, None)
    assert (second.name, second.outcome, second.steps, second.minutes) == ("b", "finished", 40, 1.5)
    assert (second.metric, second.before, second.after) == ("accuracy", 0.1, 0.9)
    assert (third.outcome, third.steps, third.metric) == ("unfinished", None, None)
    assert list_runs(tmp_path / "b") == [second]
    assert list_runs(tmp_path / "none") == []


def test_a_broken_run_is_listed_as_such_and_hides_no_other(tmp_path: Path) -> None:
    create(tmp_path / "good").write_summary({"outcome": "finished"})
    for name, content in {
        "cut": '{"outcome": "fin',
        "list": "[1]",
        "odd": '{"outcome": 3, "steps": "many", "seconds": true, "eval": {"before": 5, "after": [1]}}',
        "null": '{"eval": {"before": {"accuracy": null, "reward": 0.5}}}',
    }.items():
        create(tmp_path / name).summary_file.write_text(content)
    (tmp_path / "directory" / "summary.json").mkdir(parents=True)
    (tmp_path / "directory" / "config.yaml").write_text("")
    found = {run.name: run for run in list_runs(tmp_path)}
    assert {name: run.outcome for name, run in found.items()} == {
        "good": "finished",
        "cut": "unreadable",
        "list": "unreadable",
        "odd": "3",
        "null": "unfinished",
        "directory": "unreadable",
    }
    assert "summary.json" in found["cut"].problem
    assert (found["odd"].steps, found["odd"].minutes, found["odd"].metric) == (None, None, None)
    assert (found["null"].metric, found["null"].before, found["null"].after) == ("reward", 0.5, None)


def test_listing_planning_and_naming_sources_import_neither_torch_nor_pyarrow() -> None:
    modules = ("run_listing", "run_names", "batch_plan", "ledger", "throughput", "data.sources", "sinks.wandb")
    code = "import sys\n" + "".join(f"import rft_trainer.{module}\n" for module in modules)
    code += "print(sorted({'torch', 'pyarrow', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
