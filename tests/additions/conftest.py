"""A task of a second, for the commands that use what a test has added."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trainer_task import TrainerTask, make_trainer_task


@pytest.fixture(scope="module")
def trainer_task(tmp_path_factory: pytest.TempPathFactory) -> TrainerTask:
    """A model and rows of its own for each module."""
    folder: Path = tmp_path_factory.mktemp("trainer_task")
    return make_trainer_task(folder)
