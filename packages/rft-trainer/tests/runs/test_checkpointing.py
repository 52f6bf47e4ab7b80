"""The loop's view of saves that are written while training goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rft_core.errors import PeerError, StorageError
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.testing.bigram import BigramPolicy, OneRank

if TYPE_CHECKING:
    from support.durable_disk import DurableDisk


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
    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(2)}


class Shared:
    def checkpoint_tensors(self) -> list[str]:
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


def test_a_first_save_that_failed_is_raised_at_the_next_step() -> None:
    writer = SlowWriter()
    saver = make(writer)
    saver.save(0, episode=0)
    assert not saver.due(1, ended_episode=None)
    writer.error = refused()
    with pytest.raises(StorageError) as caught:
        saver.due(2, ended_episode=None)
    assert caught.value.problem.code == "x"


class FullDisk(SlowWriter):
    """Refuses the saves of some steps: at once, or when they are waited for."""

    def __init__(self, steps: set[int], *, in_background: bool) -> None:
        super().__init__()
        self.steps, self.in_background = steps, in_background

    def save(self, step: int, *, tensors: dict[str, Any], **rest: Any) -> None:
        if step not in self.steps:
            super().save(step, tensors=tensors, **rest)
        elif self.in_background:
            self.error = refused()
        else:
            raise refused()


@pytest.mark.parametrize("in_background", [True, False])
def test_a_refused_save_is_tried_again_by_the_next_one(in_background: bool, caplog: pytest.LogCaptureFixture) -> None:
    writer = FullDisk({2, 4, 8, 10}, in_background=in_background)
    saver = make(writer)
    found: list[int | None] = []
    for step in range(13):
        if step == 0 or saver.due(step, ended_episode=None):
            saver.save(step, episode=0)
        saver.due(step + 1, ended_episode=None)
        found.append(saver.saved_step)
    saver.wait()
    assert [step for step, _ in writer.taken] == [0, 6, 12]
    # two refusals, a save, two refusals: never three in a row
    assert found == [0, 0, 0, 0, 0, 0, 6, 6, 6, 6, 6, 6, 12]
    assert [f"({n} of 3 refusals" in caplog.messages[i] for i, n in enumerate([1, 2, 1, 2])] == [True] * 4


@pytest.mark.parametrize("in_background", [True, False])
def test_the_third_refusal_in_a_row_ends_the_run(in_background: bool) -> None:
    saver = make(FullDisk({2, 4, 6}, in_background=in_background))
    for step in (0, 2, 4):
        saver.save(step, episode=0)
        assert not saver.due(step + 1, ended_episode=None)

    def third() -> None:
        saver.save(6, episode=0)
        saver.due(7, ended_episode=None)

    with pytest.raises(StorageError):
        third()


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(("step", "must"), [(0, False), (4, True)])
def test_a_first_or_last_save_is_left_to_no_other(in_background: bool, step: int, must: bool) -> None:
    saver = make(FullDisk({step}, in_background=in_background))
    if step:
        saver.save(0, episode=0)

    def save() -> None:
        saver.save(step, episode=0, must=must)
        saver.wait()

    with pytest.raises(StorageError):
        save()


def test_the_last_save_answers_a_refusal_that_was_not_noticed_before() -> None:
    writer = FullDisk({1, 2, 3}, in_background=True)
    saver = make(writer)
    for step in range(4):
        saver.save(step, episode=0)
    saver.save(4, episode=0, must=True)
    saver.wait()
    assert (saver.saved_step, [step for step, _ in writer.taken]) == (4, [0, 4])


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
    assert ("the last save failed as well: no room" in caplog.text) == bool(waits)


def test_a_save_before_records_are_cut_back_is_waited_for() -> None:
    writer = SlowWriter()
    saver = make(writer)
    saver.save(3, episode=1)
    assert writer.waits == 0
    saver.save_again(episode=1)
    assert [step for step, _ in writer.taken] == [3, 3]
    assert writer.waits == 1


def test_rows_logged_so_far_are_on_the_disk_before_a_checkpoint_is_written(
    tmp_path: Path, durable_disk: DurableDisk
) -> None:
    directory = RunDirectory.create(
        tmp_path / "run", config_text="a: 1\n", command=["train"], environment={}, sync_every=100
    )
    on_disk: list[bytes] = []

    class LookingWriter(SlowWriter):
        def save(self, step: int, *, tensors: dict[str, Any], **rest: Any) -> None:
            files = (directory.metrics_file, directory.evaluations_file)
            on_disk.append(b"".join(durable_disk.contents(file) for file in files))

    saver = Saver(
        LookingWriter(),
        BigramPolicy(4),
        Whole(),  # type: ignore[arg-type]
        {"progress": Progress()},
        OneRank(),
        schedule=SaveSchedule(every_steps=2, every_episodes=0, every_seconds=0.0),
        before_save=directory.sync,
    )
    directory.append_metrics({"step": 1, "loss": 0.5})
    directory.append_evaluation({"step": 1, "name": "before"})
    saver.save(1, episode=0)
    assert on_disk == [b'{"step": 1, "loss": 0.5}\n{"step": 1, "name": "before"}\n']


def test_saves_are_due_after_steps_episodes_and_seconds() -> None:
    now = [100.0]
    saver = Saver(
        SlowWriter(),
        BigramPolicy(4),
        Whole(),  # type: ignore[arg-type]
        {"progress": Progress()},
        OneRank(),
        schedule=SaveSchedule(every_steps=3, every_episodes=2, every_seconds=60.0),
        before_save=lambda: None,
        clock=lambda: now[0],
    )
    assert [step for step in range(1, 8) if saver.due(step, ended_episode=None)] == [3, 6]
    assert [episode for episode in range(1, 6) if saver.due(1, ended_episode=episode)] == [2, 4]
    now[0] += 59.9
    assert not saver.due(1, ended_episode=None)
    now[0] += 0.1
    assert saver.due(1, ended_episode=None)
    saver.save(1, episode=0)
    assert not saver.due(2, ended_episode=None), "counted from the last save"


def test_progress_is_restored_also_from_a_checkpoint_without_a_count_of_the_critic() -> None:
    saved = Progress(step=3, updates=6, refused={"policy": 1, "critic": 2}, tokens=70, seconds=1.5)
    again = Progress()
    assert not any(again.state().values()), "a run begins with nothing done"
    again.load_state(json.loads(json.dumps(saved.state())))
    assert again == saved
    older = {name: value for name, value in saved.state().items() if name not in ("refused", "guards")}
    again.load_state({**older, "refused_in_a_row": 1})
    assert again == replace(saved, refused={"policy": 1, "critic": 0})


def test_the_steps_that_made_a_run_go_back_are_saved_where_there_are_any() -> None:
    again = Progress()
    again.load_state(Progress(step=3, rollbacks=[5, 9]).state())
    assert again.rollbacks == [5, 9]
    assert "rollbacks" not in Progress().state()
    again.load_state(Progress().state())
    assert again.rollbacks == []


@pytest.mark.parametrize("model_only", [False, True])
def test_the_model_alone_is_saved_without_tensors_of_training_and_said_to_be(model_only: bool) -> None:
    given: dict[str, Any] = {}

    class NotingWriter(SlowWriter):
        def save(self, step: int, *, tensors: dict[str, Any], **rest: Any) -> None:
            given.update(rest, tensors=tensors)

    saver = Saver(
        NotingWriter(),
        BigramPolicy(4),
        Whole(),
        {"progress": Progress()},
        OneRank(),
        schedule=SaveSchedule(every_steps=2, every_episodes=0, every_seconds=0.0),
        before_save=lambda: None,
        tensor_parts={"other": Shared()},
        model_only=model_only,
    )
    saver.save(3, episode=1)
    assert given["metadata"] == {"episode": 1, **({"model_only": True} if model_only else {})}
    assert list(given["tensors"]) == ([] if model_only else ["optimizer", "other"])
    assert ("nothing is lost" in saver.words(3)) is not model_only


def test_the_highest_reward_is_remembered_over_a_save() -> None:
    progress = Progress()
    assert "best" not in progress.state()
    seen: list[bool] = []
    for progress.step, reward in enumerate((0.25, 0.5, 0.5, 0.125)):
        seen.append(progress.observe(reward))
    assert seen == [True, True, False, False]
    again = Progress()
    again.load_state(progress.state())
    assert (again.best_reward, again.best_step) == (0.5, 1)
    assert not again.observe(0.5)


def test_the_share_of_the_updates_that_is_done_goes_from_none_to_all() -> None:
    progress = Progress()
    passed, of_one = progress.passed(5), progress.passed(1)
    found: list[float] = []
    for progress.updates in range(7):
        found.append(passed())
    assert found == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert of_one() == 1.0
