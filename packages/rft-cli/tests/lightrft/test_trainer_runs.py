"""The trainer's calls in order, with a double of the run: what begins, what a step gives, and how each run ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft import run_lifecycle
from rft.stages import rl
from rft_cli.lightrft import trainer as lightrft_trainer
from rft_cli.lightrft.trainer import FitResult, SPMDPPOTrainer
from rft_core.errors import OptionsError

MODEL: dict[str, Any] = {"pretrain": "m", "seed": 7}
STEPS = 2
BEFORE = {"eval/accuracy": 0.25, "n": 4}


class Run:
    """A run of two steps that records what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.options: dict[str, Any] = {}
        self.exits: list[Any] = []
        self.fails_at = -1
        self.is_first = True
        self.summary: Any = None
        self.progress = SimpleNamespace(step=0)
        self.updater = SimpleNamespace(model=object())
        self.results: dict[str, Any] = {}
        self.assign_credit = SimpleNamespace(own_advantages=lambda batch: ("own", batch))
        self.directory = SimpleNamespace(path=Path("run"), read_summary=self.read_summary)
        self.started = SimpleNamespace(directory=self.directory)

    @property
    def finished(self) -> bool:
        return self.progress.step >= STEPS

    def begin(self) -> None:
        self.calls.append("begin")
        if self.fails_at == 0:
            raise RuntimeError("the first evaluation fails")
        self.results["before"] = SimpleNamespace(as_record=lambda: BEFORE)

    def train_step(self, signals: Any) -> Any:
        self.calls.append(("step", signals, sorted(self.results)))
        self.progress.step += 1
        if self.progress.step == self.fails_at:
            raise RuntimeError("a step fails")
        return SimpleNamespace(metrics={"step": self.progress.step}, data=f"groups {self.progress.step}")

    def read_summary(self) -> Any:
        assert self.is_first, "another rank has no summary"
        return self.summary

    @contextmanager
    def prepared(self, resolved: Any, command: list[str], **options: Any) -> Iterator[Any]:
        self.calls.append("prepared")
        self.options = {"seed": resolved.values["seed"], "command": command, **options}
        machine = SimpleNamespace(is_first=self.is_first)
        yield SimpleNamespace(training=self, started=self.started, machine=machine)
        self.calls.append("parted")

    @contextmanager
    def running(self, training: Any, started: Any) -> Iterator[None]:
        assert (training, started) == (self, self.started)
        self.calls.append("running")
        try:
            yield
        except BaseException as error:
            self.exits.append(error)
            raise
        finally:
            self.calls.append("ended")


class Signals:
    """Says whether its handlers are installed."""

    made: list[Signals]

    def __init__(self) -> None:
        self.installed: list[bool] = []
        Signals.made.append(self)

    def __enter__(self) -> Signals:
        self.installed.append(True)
        return self

    def __exit__(self, *_: object) -> None:
        self.installed.append(False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    double = Run()
    Signals.made = []
    monkeypatch.setattr(rl, "prepared", double.prepared)
    monkeypatch.setattr(run_lifecycle, "running", double.running)
    monkeypatch.setattr(lightrft_trainer, "StopSignals", Signals)
    monkeypatch.setattr(lightrft_trainer, "terminal", lambda training: "front")
    monkeypatch.setattr(sys, "argv", ["train.py", "a b"])
    return double


def whole(steps: list[Any]) -> list[Any]:
    return ["prepared", "running", "begin", *steps, "ended"]


def test_fit_begins_steps_and_ends_once(run: Run) -> None:
    run.summary = {"eval": {"after": {"accuracy": 0.5}}}
    trainer = SPMDPPOTrainer(**MODEL)
    assert not trainer.finished
    assert trainer.fit() == FitResult(Path("run"), {"accuracy": 0.25, "n": 4}, {"accuracy": 0.5})
    (signals,) = Signals.made
    assert run.calls == [*whole([("step", signals, ["before"])] * STEPS), "parted"]
    assert signals.installed == [True, False]
    assert trainer.finished
    assert trainer.run_directory == Path("run")
    assert trainer.actor is run.updater.model


@pytest.mark.parametrize("is_first", [True, False])
def test_a_result_without_a_summary_is_what_this_rank_evaluated(is_first: bool, run: Run) -> None:
    run.is_first = is_first
    assert SPMDPPOTrainer(**MODEL).fit() == FitResult(Path("run"), {"accuracy": 0.25, "n": 4}, None)


def test_steps_by_hand_begin_and_end_the_run(run: Run) -> None:
    trainer = SPMDPPOTrainer(**MODEL)
    assert [trainer.ppo_train() for _ in range(STEPS)] == [{"step": 1}, {"step": 2}]
    assert run.calls == [*whole([("step", signals, ["before"]) for signals in Signals.made]), "parted"]
    assert [signals.installed for signals in Signals.made] == [[True, False]] * STEPS
    with pytest.raises(OptionsError) as caught:
        trainer.ppo_train()
    assert caught.value.problem.code == "lightrft.ended"


def test_a_run_that_was_closed_early_does_not_go_on(run: Run) -> None:
    with SPMDPPOTrainer(**MODEL) as trainer:
        trainer.ppo_train()
    assert run.calls[-2:] == ["ended", "parted"]
    for again in (trainer.ppo_train, trainer.fit):
        with pytest.raises(OptionsError) as caught:
            again()
        assert caught.value.problem.code == "lightrft.ended"
    assert run.progress.step == 1


def test_a_trainer_that_built_nothing_may_be_closed_and_used(run: Run) -> None:
    trainer = SPMDPPOTrainer(**MODEL)
    trainer.close()
    assert run.calls == []
    trainer.fit()
    assert run.progress.step == STEPS


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("name", ["fit", "ppo_train"])
def test_an_error_ends_the_run_with_it(at: int, name: str, run: Run) -> None:
    run.fails_at = at
    trainer = SPMDPPOTrainer(**MODEL)
    with pytest.raises(RuntimeError) as caught:
        getattr(trainer, name)()
    assert run.exits == [caught.value]
    assert run.calls[-1] == "ended"
    with pytest.raises(OptionsError):
        trainer.ppo_train()


class Idle(SPMDPPOTrainer):
    """Takes no step."""

    def ppo_train(self) -> dict[str, object]:
        """Nothing."""
        return {}


def test_an_override_without_a_step_does_not_repeat_for_ever(run: Run) -> None:
    with pytest.raises(OptionsError) as caught:
        Idle(**MODEL).fit()
    assert caught.value.problem.code == "lightrft.no_step"
    assert run.calls == whole([])
    assert run.exits == [caught.value]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_rank_saves_the_rollouts_of_every_step(is_first: bool, run: Run) -> None:
    saved: list[Any] = []
    saver: Any = SimpleNamespace(save=lambda groups, *, step: saved.append((groups, step)))
    run.is_first = is_first
    SPMDPPOTrainer(**MODEL, trajectory_saver=saver).fit()
    assert saved == ([("groups 1", 1), ("groups 2", 2)] if is_first else [])


def test_handlers_of_signals_are_installed_by_the_main_thread_alone(run: Run) -> None:
    thread = threading.Thread(target=SPMDPPOTrainer(**MODEL).fit)
    thread.start()
    thread.join()
    (signals,) = Signals.made
    assert signals.installed == []
    assert run.calls[3] == ("step", signals, ["before"])


def test_there_is_one_strategy(run: Run) -> None:
    trainer = SPMDPPOTrainer(**MODEL)
    assert trainer.strategy is trainer.strategy
    assert (trainer.strategy._ready.training, trainer.strategy._settings.run.seed) == (run, 7)


# --- code of the script


class Own(SPMDPPOTrainer):
    """Advantages of its own."""

    made: Any = None

    def compute_advantages(self, batch: Any) -> Any:
        """What the test asks for."""
        return self.made


class OwnStep(SPMDPPOTrainer):
    """A step of its own, around the other."""

    def ppo_train(self) -> Any:
        """One step."""
        return super().ppo_train()


def reward_fn(responses: list[str], labels: list[str]) -> list[float]:
    """Any."""
    return [1.0] * len(responses)


def test_a_run_of_settings_alone_can_be_resumed_by_its_command(run: Run) -> None:
    SPMDPPOTrainer(**MODEL).fit()
    command = ["rft-train", "rl", "--pretrain", "m", "--seed", "7"]
    nothing = {"reward": None, "compute_advantages": None, "script": ""}
    assert run.options == {"seed": 7, "command": command, "front": "front", **nothing}


@pytest.mark.parametrize("kind", ["reward", "advantages", "step", "patch"])
def test_a_run_with_code_is_continued_by_its_script(kind: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightrft_trainer, "has_manual_patches", lambda: kind == "patch")
    classes: dict[str, type[SPMDPPOTrainer]] = {"advantages": Own, "step": OwnStep}
    kind_of_trainer = classes.get(kind, SPMDPPOTrainer)
    kind_of_trainer(**MODEL, reward_fn=reward_fn if kind == "reward" else None).fit()
    assert run.options["command"] == ["python", "train.py", "a b"]
    assert run.options["script"] == "python train.py 'a b'"
    assert (run.options["reward"] is not None) is (kind == "reward")
    assert (run.options["compute_advantages"] is not None) is (kind == "advantages")


def test_advantages_are_the_algorithm_s_or_one_s_own(run: Run) -> None:
    batch: Any = "batch"
    assert SPMDPPOTrainer(**MODEL).compute_advantages(batch) == ("own", "batch")
    trainer = Own(**MODEL)
    trainer.fit()
    checked = run.options["compute_advantages"]
    trainer.made = [0.5, 1e-9]
    assert checked(batch).dtype == torch.float64
    assert checked(batch).tolist() == [0.5, 1e-9]
    trainer.made = torch.ones(3)
    assert checked(batch) is trainer.made
    trainer.made = None
    with pytest.raises(OptionsError) as caught:
        checked(batch)
    assert caught.value.problem.code == "lightrft.no_advantages"


def test_a_reward_function_is_named_in_the_settings(run: Run) -> None:
    trainer = SPMDPPOTrainer(**MODEL, reward_fn=reward_fn)
    assert trainer._resolved.values["reward"].endswith("reward_fn")
    assert SPMDPPOTrainer(**MODEL)._resolved.values["reward"] == ""
    with pytest.raises(OptionsError) as caught:
        SPMDPPOTrainer(object(), **MODEL)
    assert caught.value.problem.code == "lightrft.object"
