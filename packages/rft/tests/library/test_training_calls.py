"""Runs from Python: rows, model and reward as objects to a run, its end by a callback or a signal, and its resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import rft
from rft_core.errors import CheckpointError, OptionsError, RftError, SavedAfterSignal
from rft_trainer.runs.directory import RunDirectory

ROWS: list[dict[str, Any]] = [{"input": f"{n}+{n}=", "label": f"{2 * n:02d}", "half": n} for n in range(6)]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 4,
    "train_batch_size": 8,
    "generate_max_len": 6,
    "prompt_max_len": 8,
    "num_episodes": 2,
    "max_steps": 3,
    "actor_learning_rate": 0.01,
}


def digits(responses: Sequence[str], labels: Sequence[str], half: Sequence[int]) -> list[float]:
    assert all(int(label) == 2 * number for label, number in zip(labels, half, strict=True))
    return [sum(letter.isdigit() for letter in response) / (1 + len(response)) for response in responses]


async def first(completions: Sequence[str]) -> list[float]:
    return [float(text[:1].isdigit()) for text in completions]


class StopAt(rft.Callback):
    """Stops a run after a step, by the answer of a callback or by a signal."""

    def __init__(self, step: int, by: str) -> None:
        self.step, self.by = step, by

    def on_step(self, run: rft.Run, step: int, metrics: Mapping[str, Any]) -> Any:
        if step == self.step and self.by == "signal":
            os.kill(os.getpid(), signal.SIGINT)
        return rft.STOP if step == self.step and self.by == "answer" else None


def weights(run: rft.Run) -> dict[str, torch.Tensor]:
    return run.model().state_dict()


def same_weights(a: rft.Run, b: rft.Run) -> bool:
    left, right = weights(a), weights(b)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_objects_become_a_run(small_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = rft.grpo(small_model, ROWS, digits, eval_data=ROWS[:3], save_path=str(tmp_path / "run"), **SMALL)
    assert capfd.readouterr().out == "", "the library prints nothing"
    assert (run.outcome, run.step, len(run.metrics["reward/mean"])) == ("finished", 3, 3)
    assert run.evaluations["step"] == [0, 3]
    assert run.settings["advantage_estimator"] == "grpo"
    assert run.settings["reward"] == "in-process:digits"
    assert all(row["label"] is not None for row in run.samples)
    assert run.command.startswith("python ")


def test_a_named_reward_makes_a_run_that_the_command_line_continues(small_model: Path, tmp_path: Path) -> None:
    run = rft.rl(str(small_model), ROWS, "exact", callbacks=[StopAt(1, "answer")], save_path=str(tmp_path), **SMALL)
    assert (run.outcome, run.step) == ("interrupted", 1)
    words = run.command.split()
    assert words[:2] == ["rft-train", "rl"]
    assert words[words.index("--save_path") + 1] == str(tmp_path)
    assert run.resume().outcome == "finished"


def test_several_functions_have_weights_by_their_names(small_model: Path, tmp_path: Path) -> None:
    run = rft.rl(
        small_model, ROWS, [digits, first], reward_weights="digits=1,first=10", save_path=str(tmp_path), **SMALL
    )
    row = run.samples[0]
    assert row["reward"] == pytest.approx(row["breakdown"]["digits"] + 10 * row["breakdown"]["first"])


@pytest.mark.parametrize("by", ["answer", "signal"])
def test_a_stopped_run_is_continued_to_the_same_bits(small_model: Path, tmp_path: Path, by: str) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    threads = {thread.name for thread in threading.enumerate()}
    whole = rft.rl(small_model, ROWS, digits, save_path=str(tmp_path / "whole"), **SMALL)
    path = tmp_path / "cut"
    if by == "signal":
        with pytest.raises(SavedAfterSignal, match="SIGINT received; saved at step 2"):
            rft.rl(small_model, ROWS, digits, callbacks=[StopAt(2, by)], save_path=str(path), **SMALL)
    else:
        stopped = rft.rl(small_model, ROWS, digits, callbacks=[StopAt(2, by)], save_path=str(path), **SMALL)
        assert (stopped.outcome, stopped.step) == ("interrupted", 2)
    cut = rft.Run(path)
    with pytest.raises(OptionsError, match=r"resume\(reward=digits\)"):
        cut.resume()
    assert cut.resume(reward=digits).outcome == "finished"
    assert same_weights(cut, whole)
    with pytest.raises(CheckpointError, match="nothing is left to do"):
        cut.resume(reward=digits)
    assert cut.resume(reward=digits, max_steps=4).step == 4
    # nothing stays behind: handlers, threads, the lock of the directory
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    assert {thread.name for thread in threading.enumerate()} == threads
    RunDirectory(path).refuse_live()


def test_a_run_in_another_thread_has_no_handlers(small_model: Path, tmp_path: Path) -> None:
    found: list[rft.Run] = []
    worker = threading.Thread(
        target=lambda: found.append(rft.rl(small_model, ROWS, digits, save_path=str(tmp_path), **SMALL))
    )
    worker.start()
    worker.join()
    assert [run.outcome for run in found] == ["finished"]


def test_demonstrations(small_model: Path, tmp_path: Path) -> None:
    rows = [{"input": row["input"], "output": row["label"]} for row in ROWS]
    settings: dict[str, Any] = {"max_steps": 4, "train_batch_size": 2, "learning_rate": 0.01, "device": "cpu"}
    whole = rft.sft(small_model, rows, eval_data=rows[:2], save_path=str(tmp_path / "whole"), **settings)
    assert whole.metrics["sft/loss"][-1] < whole.metrics["sft/loss"][0]
    cut = rft.sft(
        small_model,
        rows,
        eval_data=rows[:2],
        callbacks=[StopAt(2, "answer")],
        save_path=str(tmp_path / "cut"),
        **settings,
    )
    assert cut.step == 2
    assert same_weights(cut.resume(), whole)


def test_what_a_function_raises_is_the_callers(small_model: Path, tmp_path: Path) -> None:
    def bug(responses: Sequence[str]) -> list[float]:
        raise KeyError("my bug")

    class Bad(rft.Callback):
        def on_step(self, run: rft.Run, step: int, metrics: Mapping[str, Any]) -> Any:
            return metrics["no such metric"]

    with pytest.raises(KeyError, match="my bug"):
        rft.rl(small_model, ROWS, bug, save_path=str(tmp_path / "a"), **SMALL)
    with pytest.raises(KeyError, match="no such metric"):
        rft.rl(small_model, ROWS, digits, callbacks=[Bad()], save_path=str(tmp_path / "b"), **SMALL)
    # the directories are whole: both can be continued
    assert rft.Run(tmp_path / "b").resume(reward=digits).outcome == "finished"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"callbacks": [print]}, "is no rft.Callback"),
        ({"callbacks": [StopAt]}, "callbacks=[StopAt()]"),
        ({"callbacks": StopAt(1, "answer")}, "callbacks=[CALLBACK]"),
        ({"reward_funcs": [digits]}, "reward=[digits]"),
        ({"reward_fn": digits}, "reward=digits"),
        ({"nproc": 2}, "torchrun --nproc_per_node=2"),
        ({"restarts": 2}, "rft-train rl --restarts 2"),
        ({"advantage_estimator": "rloo"}, "rft.rl(..., advantage_estimator='rloo')"),
        ({"reward": "rigth"}, "no reward is named 'rigth'"),
        ({"data": [{"input": "1+1="}]}, "no field 'label'"),
        ({"reward": lambda nowhere: [1.0]}, "nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_cost_nothing(arguments: dict[str, Any], told: str, small_model: Path, tmp_path: Path) -> None:
    given = {"data": ROWS, "reward": digits, "save_path": str(tmp_path / "run"), **SMALL, **arguments}
    with pytest.raises(RftError) as caught:
        rft.grpo(small_model, **given)
    assert told in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_import_loads_neither_torch_nor_drawing() -> None:
    code = (
        "import sys, rft; names = dir(rft); assert {'grpo', 'rl', 'sft', 'Run'} <= {*names};"
        "print([name for name in ('torch', 'matplotlib', 'IPython', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'ppo'"):
        rft.__getattr__("ppo")


def test_a_reward_model_is_trained_on_pairs_given_as_rows(small_model: Path, tmp_path: Path) -> None:
    rows = [{"input": f"{n}+{n}=", "chosen": f"{2 * n:02d}", "rejected": f"{n:02d}"} for n in range(1, 7)]
    path = str(tmp_path / "rm")
    run = rft.reward_model(
        str(small_model), rows, eval_data=rows[:2], device="cpu", max_steps=2, train_batch_size=3, save_path=path
    )
    assert list(run.metrics["data/pairs"]) == [3, 3]
    with pytest.raises(RftError, match="hps has no margin"):
        rft.reward_model(str(small_model), rows, loss_type="hps", margin=0.5)
