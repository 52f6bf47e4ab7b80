"""A trainer's run: the command's where it has no code of its own, else continued by its script; step by step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.compare import read_rows
from support.trainer_task import TrainerTask, custom_reward_fn, same_model

from rft_cli.lightrft.trainer import SPMDPPOTrainer
from rft_cli.main import main
from rft_core.errors import CheckpointError, DataError, OptionsError, SavedAfterSignal
from rft_trainer.runs.directory import RunDirectory

pytestmark = [pytest.mark.xdist_group("lightrft_api"), pytest.mark.usefixtures("script")]


# the run: the command's, begun, continued and ended


def test_without_code_of_its_own_a_trainer_is_the_command(
    trainer_task: TrainerTask, fit: Callable[..., Path], plain: Path
) -> None:
    reward = trainer_task.words()[-1]
    run = fit(reward=reward)
    assert same_model(plain, run)
    command = (run / "command.txt").read_text()
    assert command.startswith("rft-train rl --pretrain ")
    again = run.with_name("again")
    assert main([*command.split()[1:-1], str(again)]) == 0
    assert same_model(run, again)
    assert main(["resume", str(run), "--max_steps", "4"]) == 0


def test_a_run_with_code_is_continued_by_its_script_to_the_bit(
    trainer_task: TrainerTask, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, own = tmp_path / "run", {"save_path": tmp_path / "run", "reward_fn": custom_reward_fn}
    SPMDPPOTrainer(**trainer_task.settings | {"max_steps": 2}, **own).fit()
    assert (run / "command.txt").read_text() == "python my_training.py\n"
    capsys.readouterr()
    assert main(["resume", str(run), "--json_errors"]) == 2
    problem = json.loads(capsys.readouterr().err)["problem"]
    assert problem["code"] == "resume.from_code"
    assert problem["do"] == f"python my_training.py, with load_checkpoint=True and save_path={str(run)!r}"

    def edited(responses: list[str], labels: list[str]) -> list[float]:
        return [0.5 for _ in responses]

    edited.__qualname__ = custom_reward_fn.__qualname__
    with pytest.raises(DataError) as refused:
        SPMDPPOTrainer(**trainer_task.settings, **own | {"reward_fn": edited}, load_checkpoint=True).fit()
    assert refused.value.problem.code == "identity.files_changed"
    assert refused.value.problem.do.endswith("the script, with accept_changes='reward'")
    result = SPMDPPOTrainer(**trainer_task.settings, **own, load_checkpoint=True).fit()
    assert same_model(plain, run)
    assert result.before is not None
    assert result.before["step"] == 0, "read from the part that came before"
    planned = [{"num_steps": 3}] * 3  # the first part planned two
    assert [a | b for a, b in zip(read_rows(run / "metrics.jsonl"), planned, strict=True)] == read_rows(
        plain / "metrics.jsonl"
    )
    with pytest.raises(CheckpointError) as caught:
        SPMDPPOTrainer(**trainer_task.settings, **own, load_checkpoint=True).fit()
    assert caught.value.problem.code == "run.finished"


def test_an_evaluation_by_the_command_asks_for_a_reward_that_it_can_call(
    plain: Path, trainer_task: TrainerTask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "reward: in-process:custom_reward_fn " in (plain / "config.yaml").read_text()
    assert main(["eval", str(plain), "--json_errors"]) == 2
    assert json.loads(capsys.readouterr().err)["problem"]["code"] == "reward.in_process"
    assert main(["eval", str(plain), "--reward", trainer_task.words()[-1]]) == 0


def test_an_existing_run_is_never_written_over(plain: Path, trainer_task: TrainerTask) -> None:
    trainer = SPMDPPOTrainer(**trainer_task.settings, save_path=plain, reward_fn=custom_reward_fn)
    with pytest.raises(OptionsError) as caught:
        trainer.fit()
    assert caught.value.problem.code == "run.exists"


def test_a_signal_saves_and_ends_the_run(trainer_task: TrainerTask, plain: Path, tmp_path: Path) -> None:
    class Stopped(SPMDPPOTrainer):
        def ppo_train(self) -> Any:
            told = super().ppo_train()
            os.kill(os.getpid(), signal.SIGTERM)
            return told

    own = {"save_path": tmp_path / "run", "reward_fn": custom_reward_fn}
    with pytest.raises(SavedAfterSignal, match="SIGTERM received; saved at step 1"):
        Stopped(**trainer_task.settings, **own).fit()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    SPMDPPOTrainer(**trainer_task.settings, **own, load_checkpoint=True).fit()
    assert same_model(plain, tmp_path / "run")


# step by step


def test_steps_by_hand_are_those_of_fit(trainer_task: TrainerTask, plain: Path, tmp_path: Path) -> None:
    with SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn) as trainer:
        told = []
        while not trainer.finished:
            told.append(trainer.ppo_train())
    assert [row["reward/mean"] for row in told] == [row["reward/mean"] for row in read_rows(plain / "metrics.jsonl")]
    assert same_model(plain, tmp_path / "run")
    assert read_rows(plain / "evals.jsonl") == read_rows(tmp_path / "run" / "evals.jsonl")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"
    with pytest.raises(OptionsError) as caught:
        trainer.ppo_train()
    assert caught.value.problem.code == "lightrft.ended"


def test_a_step_by_hand_and_then_the_rest(trainer_task: TrainerTask, plain: Path, tmp_path: Path) -> None:
    trainer = SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn)
    trainer.ppo_train()
    trainer.fit()
    assert same_model(plain, tmp_path / "run")


def test_a_trainer_that_is_closed_early_leaves_an_interrupted_run(trainer_task: TrainerTask, tmp_path: Path) -> None:
    with SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn) as trainer:
        trainer.ppo_train()
    summary = RunDirectory(tmp_path / "run").read_summary()
    assert summary is not None
    assert (summary["outcome"], summary["steps"]) == ("interrupted", 1)
    with pytest.raises(OptionsError) as caught:
        trainer.fit()
    assert caught.value.problem.code == "lightrft.ended"


def test_a_trainer_that_was_looked_at_and_closed_does_not_begin(trainer_task: TrainerTask, tmp_path: Path) -> None:
    with SPMDPPOTrainer(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn) as trainer:
        assert trainer.actor.num_parameters > 0
        assert trainer.run_directory == tmp_path / "run"
    assert not (tmp_path / "run").exists()
    with pytest.raises(OptionsError) as caught:
        trainer.fit()
    assert caught.value.problem.code == "lightrft.ended"


class Idle(SPMDPPOTrainer):
    """A `ppo_train` that forgets the step."""

    def ppo_train(self) -> Any:
        return {}


def test_a_ppo_train_without_a_step_ends_instead_of_turning_forever(trainer_task: TrainerTask, tmp_path: Path) -> None:
    trainer = Idle(**trainer_task.settings, save_path=tmp_path / "run", reward_fn=custom_reward_fn)
    with pytest.raises(OptionsError) as caught:
        trainer.fit()
    assert caught.value.problem.code == "lightrft.no_step"


# several ranks

SCRIPT = """
from support.trainer_task import custom_reward_fn
from rft_cli.lightrft.trainer import SPMDPPOTrainer, TrajectorySaver

class Custom(SPMDPPOTrainer):
    def compute_advantages(self, batch):
        return super().compute_advantages(batch)

result = Custom(**{settings!r}, reward_fn=custom_reward_fn, trajectory_saver=TrajectorySaver()).fit()
print("after", result.after["reward"])
"""


@pytest.mark.xdist_group("launch")
def test_two_ranks_repeat_the_run_of_one(trainer_task: TrainerTask, plain: Path, tmp_path: Path) -> None:
    settings = {name: str(value) for name, value in trainer_task.settings.items()}
    (tmp_path / "train_me.py").write_text(SCRIPT.format(settings=settings | {"save_path": str(tmp_path / "run")}))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(tmp_path / "train_me.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [[row["reward/mean"] for row in read_rows(run / "metrics.jsonl")] for run in (plain, tmp_path / "run")]
    assert rows[1] == pytest.approx(rows[0], abs=1e-12)
    told = [line for line in done.stdout.splitlines() if line.startswith("after ")]
    assert len(told) == 2
    assert told[0] == told[1], "every rank has the result"
    assert len((tmp_path / "trajectories" / "step_000003.jsonl").read_text().splitlines()) == 8
