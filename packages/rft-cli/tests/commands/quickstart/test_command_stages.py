"""The stages of a quickstart: which settings each begins with, in which order, and where a resume goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft.process import stage_ranks as ranks
from rft_cli.commands import eval as eval_command
from rft_cli.commands import training
from rft_cli.commands.quickstart import command as quickstart
from rft_cli.commands.quickstart.tasks import TASKS
from rft_cli.config.resolve import resolve
from rft_dist.launch import spawn
from rft_dist.launch.environment import LATER_PORTS

Stage = dict[str, Any]
SAVED = Path("checkpoints/step_000001")


def given(resolved: Any) -> dict[str, Any]:
    """The settings that flags gave."""
    return {name: resolved.values[name] for name, origin in resolved.origins.items() if origin.kind == "command line"}


class Stages:
    """Records what would be prepared, trained and evaluated; a training leaves one checkpoint."""

    def __init__(self) -> None:
        self.calls: list[Stage] = []

    def prepare(self, path: Path, seed: int) -> str:
        path.mkdir(parents=True, exist_ok=True)
        self.calls.append({"stage": "prepare", "path": path, "seed": seed})
        return "made"

    def train(self, stage: str, resolved: Any, command: Sequence[str], in_place: Path | None, show_end: bool) -> None:
        directory = Path(resolved.values["save_path"])
        fresh = not directory.exists()
        (directory / SAVED / "model").mkdir(parents=True, exist_ok=True)
        if not (directory / "metrics.jsonl").exists():
            (directory / "metrics.jsonl").write_text('{"time/step": 0.25}\n{"time/step": 0.75}\n')
        self.calls.append(
            {
                "stage": stage,
                "recipe": resolved.recipe_name,
                "given": given(resolved),
                "command": list(command),
                "in_place": in_place,
                "show_end": show_end,
                "fresh": fresh,
            }
        )

    def evaluate(self, argv: list[str]) -> int:
        self.calls.append({"stage": "eval", "given": given(resolve("eval", argv))})
        return 0

    def names(self) -> list[str]:
        return [call["stage"] for call in self.calls]


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    """Doubles in the place of every task's preparation, both kinds of training, and the evaluation."""
    recorded = Stages()

    def train(resolved: Any, command: Any, *, in_place: Path | None = None, show_end: bool = True) -> None:
        recorded.train(resolved.command, resolved, command, in_place, show_end)

    for name, task in list(TASKS.items()):
        monkeypatch.setitem(TASKS, name, replace(task, prepare=recorded.prepare))
    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(eval_command, "run", recorded.evaluate)
    return recorded


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of threads that torch was given."""
    asked: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    return asked


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int, Path]]:
    """What was started as several ranks: (words, number, folder of their logs); one core is usable."""
    asked: list[tuple[list[str], int, Path]] = []

    def start(program: Sequence[str], nproc: int, folder: Path, *, meetings: int) -> int:
        assert program[1:3] == ["-m", "rft_cli.main"]
        assert meetings == 4
        asked.append((list(program[3:]), nproc, folder))
        return 7

    monkeypatch.setattr(quickstart, "usable_cores", lambda: 1)
    monkeypatch.setattr(quickstart, "may_have_gpu", lambda: False)
    monkeypatch.setattr(ranks, "started_ranks", start)
    monkeypatch.setattr(ranks, "run_has_begun", lambda: None)
    return asked


def warm_up(path: Path, task: str = "additions", seed: int = 0, **changes: Any) -> Stage:
    """The warm-up as it has to begin."""
    data = path / "data" / f"{TASKS[task].demonstrations}.jsonl"
    words = {"pretrain": str(path / "untrained"), "prompt_data": str(data), "seed": seed}
    return {
        "stage": "sft",
        "recipe": TASKS[task].sft_recipe,
        "given": {**words, "save_path": str(path / "warm_start")},
        "command": ["rft-train", "quickstart"],
        "in_place": None,
        "show_end": False,
        "fresh": True,
        **changes,
    }


def second(path: Path, task: str = "additions", seed: int = 0, more: Stage | None = None, **changes: Any) -> Stage:
    """The second stage as it has to begin."""
    words = {
        "pretrain": str(path / "warm_start" / SAVED / "model"),
        "prompt_data": str(path / "data" / "train.jsonl"),
        "eval_data": str(path / "data" / "heldout.jsonl"),
        "seed": seed,
        "save_path": str(path),
    }
    return {
        "stage": "rl",
        "recipe": TASKS[task].rl_recipe,
        "given": {**words, **(more or {})},
        "command": ["rft-train", "quickstart"],
        "in_place": None,
        "show_end": True,
        "fresh": False,
        **changes,
    }


@pytest.mark.parametrize("task", TASKS)
def test_a_quickstart_prepares_warms_up_and_learns(task: str, stages: Stages, threads: list[int]) -> None:
    path, argv = Path("here"), ["--task", task, "--seed=7", "--save_path", "here"]
    assert quickstart.run(argv) == 0
    command = ["rft-train", "quickstart", *argv]
    assert stages.calls == [
        {"stage": "prepare", "path": path, "seed": 7},
        warm_up(path, task, 7, command=command),
        second(path, task, 7, command=command),
    ]
    stored = {"seed": 7, "control": "none", "seconds": 120.0, "steps": 0, "task": task, "nproc": 0}
    assert json.loads((path / "choices.json").read_text()) == stored
    assert threads == [1]


def test_threads_that_the_environment_gives_are_kept(
    stages: Stages, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert quickstart.run(["--save_path", "here"]) == 0
    assert threads == []


def test_a_quickstart_without_a_path_has_a_new_name_below_runs(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "run_name", lambda prefix, *, under: f"{prefix}-in-{under}")
    assert quickstart.run([]) == 0
    assert stages.calls[0]["path"] == Path("runs/quickstart-in-runs")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_prepares_nothing(word: str, stages: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    assert quickstart.run(["--seed", "1", word]) == 0
    assert capsys.readouterr().out.startswith("usage: rft-train quickstart")
    assert stages.calls == []


@pytest.mark.parametrize(
    ("words", "more"),
    [
        ("--control shuffled_rewards", {"shuffle_rewards": True}),
        ("--task images --control shuffled_images", {"shuffle_images": True}),
        ("--task calculator --control noisy_answers", {"environment": "calculator-noise"}),
        ("--steps 60", {"max_steps": 60, "lr_warmup_ratio": 0.3}),
        ("--steps 200", {"max_steps": 200, "lr_warmup_ratio": 0.18}),
    ],
)
def test_choices_change_the_second_stage_alone(words: str, more: Stage, stages: Stages) -> None:
    argv = [*words.split(), "--save_path", "here"]
    task = words.split()[1] if "--task" in words else "additions"
    assert quickstart.run(argv) == 0
    command = ["rft-train", "quickstart", *argv]
    _, first, last = stages.calls
    assert first == warm_up(Path("here"), task, command=command)
    assert last == second(Path("here"), task, more=more, command=command)


@pytest.mark.parametrize(("seconds", "steps"), [("30", 60), ("0", 1)])
@pytest.mark.parametrize("task", ["additions", "calculator"])
def test_the_supervised_control_goes_on_for_the_time_and_is_compared(
    seconds: str, steps: int, task: str, stages: Stages
) -> None:
    path = Path("here")
    argv = ["--task", task, "--control", "sft", "--seconds", seconds, "--save_path", "here"]
    assert quickstart.run(argv) == 0
    command = ["rft-train", "quickstart", *argv]
    data = path / "data" / f"{TASKS[task].demonstrations}.jsonl"
    start = str(path / "warm_start" / SAVED / "model")
    control = {
        **{"pretrain": start, "prompt_data": str(data), "seed": 0, "save_path": str(path / "control_sft")},
        **{"max_epochs": steps, "max_steps": steps, "target_loss": 0.0, "eval_steps": 500},
    }
    assert stages.names() == ["prepare", "sft", "sft", "eval", "eval"]
    assert stages.calls[2] == warm_up(path, task, given=control, command=command)
    asked = given(resolve("eval", ["--pretrain", "m", *TASKS[task].eval_words]))
    held_out = {**asked, "eval_data": str(path / "data" / "heldout.jsonl")}
    assert stages.calls[3]["given"] == {**held_out, "pretrain": start}
    assert stages.calls[4]["given"] == {**held_out, "pretrain": str(path / "control_sft" / SAVED / "model")}


# --- several ranks

Started = list[tuple[list[str], int, Path]]


@pytest.mark.parametrize(
    ("cores", "words", "nproc"),
    [(2, "", 2), (8, "", 2), (1, "", 1), (1, "--nproc 3", 3), (8, "--nproc 1", 1), (8, "--task calculator", 1)],
)
def test_the_ranks_are_as_many_as_are_quickest_or_as_asked(
    cores: int, words: str, nproc: int, stages: Stages, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "usable_cores", lambda: cores)
    argv = [*words.split(), "--save_path", "here"]
    code = quickstart.run(argv)
    if nproc == 1:
        assert (code, started, len(stages.calls)) == (0, [], 3)
    else:
        assert (code, started, stages.calls) == (7, [(["quickstart", *argv], nproc, Path("here/logs"))], [])


def test_where_a_gpu_may_be_one_process_runs(stages: Stages, started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "usable_cores", lambda: 8)
    monkeypatch.setattr(quickstart, "may_have_gpu", lambda: True)
    assert quickstart.run(["--save_path", "here"]) == 0
    assert started == []


def test_ranks_are_told_the_directory_that_was_chosen(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "run_name", lambda prefix, *, under: "fox")
    assert quickstart.run(["--nproc", "2"]) == 7
    assert started[0][0] == ["quickstart", "--nproc", "2", "--save_path", "runs/fox"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_alone_prepares_and_each_stage_meets_at_another_port(
    rank: int, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (spawn.rank_variables(rank, 2, 29_501) | {LATER_PORTS: "29502,29503,29504"}).items():
        monkeypatch.setenv(name, value)
    if rank == 1:
        Path("here").mkdir()
        Path("here/choices.json").write_text("{}")
    assert quickstart.run(["--save_path", "here"]) == 0
    assert stages.names() == [*(["prepare"] if rank == 0 else []), "sft", "rl"]
    assert (os.environ["MASTER_PORT"], os.environ[LATER_PORTS]) == ("29502", "29503,29504")


def test_a_resume_starts_ranks_behind_what_it_clears(
    stopped: Path, stages: Stages, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "usable_cores", lambda: 2)
    (stopped / "warm_start" / SAVED).mkdir(parents=True)
    assert quickstart.resume(stopped, ["--log_interval", "9"]) == 7
    assert started == [(["resume", str(stopped), "--log_interval", "9"], 2, stopped / "logs")]
    assert not (stopped / "warm_start").exists()
    assert stages.calls == []


# --- a resume


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A quickstart that was prepared, and nothing more."""
    path = tmp_path / "run"
    path.mkdir()
    stored = {"seed": 3, "control": "none", "seconds": 120.0, "steps": 0, "task": "additions"}
    (path / "choices.json").write_text(json.dumps(stored))
    return path


def test_what_was_prepared_alone_is_warmed_up(stopped: Path, stages: Stages, threads: list[int]) -> None:
    (stopped / "command.txt").write_text("rft-train quickstart --seed 3 --save_path 'my run'\n")
    assert quickstart.resume(stopped, []) == 0
    command = ["rft-train", "quickstart", "--seed", "3", "--save_path", "my run"]
    assert stages.calls == [warm_up(stopped, seed=3, command=command), second(stopped, seed=3, command=command)]
    assert threads == [1]


def test_a_warm_up_that_saved_nothing_starts_again(stopped: Path, stages: Stages) -> None:
    (stopped / "warm_start" / SAVED).mkdir(parents=True)
    (stopped / "warm_start" / "config.yaml").write_text("seed: 3\n")
    assert quickstart.resume(stopped, []) == 0
    assert stages.calls == [warm_up(stopped, seed=3), second(stopped, seed=3)]
    assert not (stopped / "warm_start" / "config.yaml").exists()


def test_a_warm_up_with_a_checkpoint_is_continued_in_place(stopped: Path, stages: Stages) -> None:
    (stopped / "warm_start" / SAVED).mkdir(parents=True)
    (stopped / "warm_start" / SAVED / "manifest.json").write_text("{}")
    assert quickstart.resume(stopped, []) == 0
    continued = warm_up(stopped, seed=3, in_place=stopped / "warm_start", fresh=False)
    assert stages.calls == [continued, second(stopped, seed=3)]


def test_a_finished_warm_up_is_not_repeated(stopped: Path, stages: Stages) -> None:
    (stopped / "warm_start" / SAVED / "model").mkdir(parents=True)
    (stopped / "warm_start" / "summary.json").write_text('{"outcome": "finished"}')
    assert quickstart.resume(stopped, []) == 0
    assert stages.calls == [second(stopped, seed=3)]


def test_a_second_stage_is_continued_with_what_it_wrote_and_what_is_given(stopped: Path, stages: Stages) -> None:
    written = resolve("rl", ["--pretrain", "model", "--seed", "5", "--log_interval", "7"])
    (stopped / "config.yaml").write_text(written.config_yaml)
    assert quickstart.resume(stopped, ["--log_interval", "9"]) == 0
    (call,) = stages.calls
    assert (call["stage"], call["in_place"], call["command"]) == ("rl", stopped, ["rft-train", "quickstart"])
    assert call["given"] == {"save_path": str(stopped), "log_interval": 9}


def test_a_quickstart_is_found_from_its_directory_and_from_its_warm_up_alone(stopped: Path, tmp_path: Path) -> None:
    (stopped / "warm_start").mkdir()
    assert quickstart.root_of(stopped) == stopped
    assert quickstart.root_of(stopped / "warm_start") == stopped
    assert quickstart.root_of(stopped / "checkpoints") is None
    assert quickstart.root_of(tmp_path) is None
