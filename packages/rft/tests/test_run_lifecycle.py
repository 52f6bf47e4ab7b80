"""A run that continues saves its checkpoint again only where later ones stand beside it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rft import run_lifecycle
from rft.identity.changes import Facts
from rft.identity.continuation import Continuation
from rft.run_lifecycle import RunStart
from rft_core.errors import DataError, OptionsError
from rft_dist.checkpoints.store import CheckpointStore
from rft_dist.collectives import SingleProcess
from rft_dist.settings import CheckpointSettings
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.settings.run import RunSettings

NOTHING = Facts({}, {}, {})
"""A start that names no files, in the tests of everything else."""


class FirstRank:
    """The one process of a run."""

    is_first = True
    collectives = SingleProcess()
    device = "cpu"
    ranks = SimpleNamespace(world_size=1)

    def attach(self, run: Path, resume_command: str) -> None:
        """Nothing watches it."""

    def forget_last_failure(self) -> None:
        """None is on file."""


class FakeTraining:
    """A loop at its beginning, whose saver keeps what it is asked for."""

    finished = False

    def __init__(self) -> None:
        self.ledger = SimpleNamespace(epoch=1)
        self.again: list[int] = []
        self.saver: Any = nullcontext()
        self.saver.save_again = lambda *, episode: self.again.append(episode)
        self.progress = SimpleNamespace(step=3)


def resolved(**checkpoint: Any) -> Any:
    """The settings that a start reads."""
    settings = SimpleNamespace(checkpoint=CheckpointSettings(**checkpoint), run=RunSettings())
    return SimpleNamespace(
        settings=settings,
        origins={"load_checkpoint": "the command line", "ckpt_path": "the command line"},
        sources=(),
        config_yaml="recipe: {command: sft}\n",
        command="sft",
        recipe_name="",
        values={},
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with rows and checkpoints of the steps 1 to 3."""
    directory = RunDirectory.create(
        tmp_path / "run", config_text="recipe: {command: sft}\n", command=["rft-train"], environment={}
    )
    store = CheckpointStore(directory.checkpoints_directory, keep_last=None, keep_bytes=None, run_id="run")
    for step in (1, 2, 3):
        directory.append_metrics({"step": step})
        store.save(
            step,
            tensors={"optimizer": {"a": torch.zeros(1)}},
            records={},
            model_writer=lambda path: (path / "config.json").write_text("{}") and None,
            metadata={},
        )
    directory.close()
    return directory


def continued(started: RunStart) -> list[int]:
    """The saves that a run makes again before it goes on."""
    training = FakeTraining()
    with run_lifecycle.running(training, started):  # pyright: ignore[reportArgumentType]
        pass
    return training.again


def test_a_resume_from_the_newest_checkpoint_writes_none_again(run: RunDirectory) -> None:
    settings = resolved()
    started = run_lifecycle.start(Continuation(settings), ["rft-train"], FirstRank(), 3, NOTHING, in_place=run.path)  # pyright: ignore[reportArgumentType]
    assert started.restored is not None
    assert (started.restored.step, started.goes_back) == (3, False)
    assert continued(started) == []


def test_a_run_that_goes_back_saves_the_step_again_so_that_it_is_the_newest(run: RunDirectory) -> None:
    earlier = str(run.checkpoints_directory / "step_000002")
    settings = resolved(load_checkpoint=True, ckpt_path=earlier, save_path=str(run.path))
    started = run_lifecycle.start(Continuation(settings), ["rft-train"], FirstRank(), 3, NOTHING)  # pyright: ignore[reportArgumentType]
    assert started.restored is not None
    assert (started.restored.step, started.goes_back) == (2, True)
    assert continued(started) == [1]
    assert [row["step"] for row in run.read_metrics().rows] == [1, 2]


def test_a_new_run_from_the_checkpoint_of_another_goes_nowhere_back(run: RunDirectory, tmp_path: Path) -> None:
    earlier = str(run.checkpoints_directory / "step_000002")
    settings = resolved(load_checkpoint=True, ckpt_path=earlier, save_path=str(tmp_path / "other"))
    started = run_lifecycle.start(Continuation(settings), ["rft-train"], FirstRank(), 3, NOTHING)  # pyright: ignore[reportArgumentType]
    assert not started.goes_back


@pytest.mark.parametrize("is_saving", [False, True], ids=["in a step", "in the last save"])
@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("", "the run in {path} stopped {at}; its checkpoints stay"),
        ("step 2 is untouched", "step 2 is untouched"),
    ],
)
def test_an_error_of_a_run_says_what_is_kept(run: RunDirectory, is_saving: bool, told: str, state: str) -> None:
    error = DataError(code="a.b", what="w", where="h", why="y", do="d", **({"state": told} if told else {}))

    @contextmanager
    def saver() -> Generator[None]:
        yield
        raise error

    training = FakeTraining()
    if is_saving:
        training.saver, training.finished = saver(), True
    settings = resolved()
    started = run_lifecycle.start(Continuation(settings), ["rft-train"], FirstRank(), 3, NOTHING, in_place=run.path)  # pyright: ignore[reportArgumentType]

    def trained() -> None:
        with run_lifecycle.running(training, started):  # pyright: ignore[reportArgumentType]
            if not is_saving:
                raise error

    with pytest.raises(DataError):
        trained()
    at = "after its last step" if is_saving else "in step 4"
    assert error.problem.state == state.format(path=run.path, at=at)


def test_a_start_where_no_directory_can_be_made_is_refused() -> None:
    Path("notes.txt").write_text("mine")
    with pytest.raises(OptionsError) as caught:
        run_lifecycle.refuse_existing(Path("notes.txt"))
    assert caught.value.problem.code == "run.not_a_directory"
