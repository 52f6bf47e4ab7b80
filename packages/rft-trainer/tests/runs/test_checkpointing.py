"""The loop's view of saves that are written while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rft_core.errors import PeerError, StorageError
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.testing.bigram import BigramPolicy, OneRank


def refused() -> StorageError:
    return StorageError(code="x", what="no room", where="disk", why="full")


class SlowWriter:
    """Takes states; what it could not write it raises when it is waited for."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, dict[str, Any]]] = []
        self.waits = 0
        self.error: Exception | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None

    def save(self, step: int, *, tensors: dict[str, Any], **rest: Any) -> None:
        self.taken.append((step, tensors))

    def wait(self) -> None:
        self.waits += 1
        error, self.error = self.error, None
        if error is not None:
            raise error


class Whole:
    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2)}


class Shared(Whole):
    def shards(self) -> list[str]:
        return ["this rank's block"]


def make(writer: SlowWriter, optimizer: Any = None) -> Saver:
    return Saver(
        writer,
        BigramPolicy(4),
        optimizer or Whole(),
        {"progress": Progress()},
        OneRank(),
        schedule=SaveSchedule(every_steps=2, every_episodes=0, every_seconds=0.0),
        before_save=lambda: None,
        tensor_parts={"other": Shared()},
    )


def test_a_part_that_is_shared_out_gives_its_blocks_and_another_all_its_tensors() -> None:
    writer = SlowWriter()
    make(writer).save(0, episode=0)
    ((step, tensors),) = writer.taken
    assert step == 0
    assert tensors["other"] == ["this rank's block"]
    assert torch.equal(tensors["optimizer"]["w"], torch.ones(2))


def test_a_save_that_failed_is_raised_at_the_next_step() -> None:
    writer = SlowWriter()
    saver = make(writer)
    saver.save(0, episode=0)
    assert not saver.due(1, ended_episode=None)
    writer.error = refused()
    with pytest.raises(StorageError, match="no room"):
        saver.due(2, ended_episode=None)


def test_the_end_of_a_run_waits_and_raises_what_failed() -> None:
    writer = SlowWriter()
    with make(writer):
        pass
    assert writer.waits == 1
    writer.error = refused()
    with pytest.raises(StorageError), make(writer):
        pass


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ValueError("in training"), 1),
        (KeyboardInterrupt(), 0),
        (PeerError(code="p", what="rank 1 died", where="rank 0", why="x"), 0),
    ],
)
def test_an_error_of_training_is_what_is_raised_and_a_stop_at_once_does_not_wait(
    error: BaseException, waits: int, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SlowWriter()
    writer.error = refused()
    with pytest.raises(type(error)), make(writer):
        raise error
    assert writer.waits == waits
    assert ("besides, the last save failed: no room" in caplog.text) == bool(waits)


def test_a_save_before_records_are_cut_back_is_waited_for() -> None:
    writer = SlowWriter()
    saver = make(writer)
    saver.save(3, episode=1)
    assert writer.waits == 0
    saver.save_again(episode=1)
    assert [step for step, _ in writer.taken] == [3, 3]
    assert writer.waits == 1
