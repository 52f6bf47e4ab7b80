"""Runs of LightRFT's trainer that several files of tests compare with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.trainer_task import TrainerTask, custom_reward_fn, make_trainer_task

from rft_cli.diagnostics import bundle
from rft_cli.lightrft.trainer import SPMDPPOTrainer


@pytest.fixture(scope="session")
def trainer_task(tmp_path_factory: pytest.TempPathFactory) -> TrainerTask:
    """A model of hidden size 16 and three steps to train it."""
    return make_trainer_task(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="session")
def fit(trainer_task: TrainerTask, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A whole run of a trainer; its directory."""
    folder = tmp_path_factory.mktemp("trainer_runs")

    def start(kind: type[SPMDPPOTrainer] = SPMDPPOTrainer, **more: Any) -> Path:
        path = folder / f"run{len(list(folder.iterdir()))}"
        if "reward" not in more:
            more.setdefault("reward_fn", custom_reward_fn)
        return kind(**trainer_task.settings, **more, save_path=path).fit().run_directory

    return start


@pytest.fixture(scope="session")
def plain(fit: Callable[..., Path]) -> Path:
    """Three steps with a reward function and the algorithm's own advantages."""
    return fit()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process is that of a script in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["my_training.py"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield
    bundle.remember_run_directory(None)
