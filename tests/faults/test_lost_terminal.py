"""Nobody reads what a run prints, its terminal hangs up, or signals come in a storm: it ends as it would have ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.compare import differences
from support.references import SAVED_AFTER_SIGNAL, References, Restarts
from support.runs import ForkServer
from support.setup import TinyTask

pytestmark = pytest.mark.xdist_group("faults")

SHORT = ("--max_steps", "3", "--save_steps", "2", "--eval_steps", "2")
LOST: dict[str, tuple[str, str, list[Any]]] = {
    "a closed pipe": ("rl", "close_output", ["pipe"]),
    "a full disk": ("rl", "close_output", ["full disk"]),
    "a full disk under stdout alone": ("rl", "close_output", ["full disk", [1]]),
    "a closed pipe behind stderr alone": ("rl", "close_output", ["pipe", [2]]),
    "no streams at all": ("rl", "close_output", ["nothing"]),
    "a reader that goes": ("rl", "lose_reader_at", ["rl.logged", 1]),
    "a terminal that hangs up": ("rl", "hang_up_at", ["rl.logged", 1]),
    "a terminal that hangs up again and again": ("rl", "storm_at", ["rl.logged", 1, 30.0, "SIGHUP"]),
    "a supervised run and a terminal that hangs up": ("sft", "hang_up_at", ["sft.logged", 1]),
    "a supervised run and a reader that goes": ("sft", "lose_reader_at", ["sft.logged", 1]),
}
"""What is lost -> the command, and the prelude that takes it away."""


@pytest.mark.parametrize("lost", LOST)
def test_a_run_whose_output_is_lost_trains_to_its_end(
    server: ForkServer, task: TinyTask, references: References, runs: Path, lost: str
) -> None:
    command, prelude, arguments = LOST[lost]
    ended = server.run(*task.words(command, runs / "run", *SHORT), preludes=[(prelude, arguments)])
    assert ended.code == 0, ended.output[-3000:]
    assert differences(references.run(command, *SHORT), runs / "run") == []


IMPORTING = """
import importlib.abc, os, signal, sys

class Signals(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.{name})
            os._exit({goes_on})

sys.meta_path.insert(0, Signals())
"""
"""Of a process that gets a signal when it begins to import torch."""
GOES_ON = 42


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 130), ("SIGUSR1", 130), ("SIGHUP", GOES_ON)])
def test_a_signal_during_the_imports_ends_what_has_not_begun_with_a_word_and_its_exit_code(
    task: TinyTask, runs: Path, name: str, code: int
) -> None:
    hook, run = runs / "hook", runs / "run"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(IMPORTING.format(name=name, goes_on=GOES_ON))
    ended = subprocess.run(
        [sys.executable, "-m", "rft_cli.main", *task.words("sft", run, *SHORT)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == code, ended.stderr
    line = f"stopped by {name} before the run began; the same command starts it again\n"
    assert ended.stderr == (line if code == 130 else "")
    assert not run.exists()


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_a_storm_of_signals_leaves_the_exit_code_of_the_save(
    server: ForkServer, task: TinyTask, references: References, runs: Path, command: str
) -> None:
    run = runs / "run"
    restarts = Restarts(server, task.words(command, run, *SHORT), run)
    ended = restarts.start([("storm_at", [f"{command}.logged", 1, 30.0])]).wait()
    assert ended.code == SAVED_AFTER_SIGNAL, ended.output[-3000:]
    restarts.finish()
    assert differences(references.run(command, *SHORT), run) == []
