"""R8: saving beside training. What is written is what was copied, and a death at any instant loses nothing."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rft_core import fault_points
from rft_core.errors import CheckpointError, StorageError
from rft_dist.checkpoints import async_writer
from rft_dist.checkpoints.async_writer import BackgroundSaves
from rft_dist.checkpoints.host_copies import HostCopies
from rft_dist.checkpoints.reader import newest_verified, open_verified

POINTS = (
    ("background_save.copied", 1),
    ("checkpoint.space.before", 1),
    ("checkpoint.mkdir.after", 2),
    ("checkpoint.file.write.before", 3),
    ("checkpoint.file.sync.after", 4),
    ("checkpoint.model.write.before", 1),
    ("checkpoint.publish.before", 1),
    ("checkpoint.publish.after", 1),
    ("checkpoint.verify.before", 1),
    ("checkpoint.retire.before", 1),
    ("checkpoint.unlink.after", 2),
    ("background_save.written", 1),
)
ENDS = ("kill", "kill with the next save waiting", "exit while it is pending")
EXITED = 86
CASES = [(point, nth, end) for end in ENDS for point, nth in POINTS]


def begin(run, saves: BackgroundSaves, step: int, salt: int = 0) -> dict[str, dict[str, Tensor]]:
    """Begin a save of the state (step, salt), and give its live tensors."""
    tensors = run.tensors(step, salt)
    writer = run.model_writer(step, salt)
    saves.begin(step, tensors=tensors, records=run.records(step, salt), snapshot=lambda _: writer, metadata={})
    return tensors


def at(point: str, nth: int, action: Callable[[], None]) -> None:
    passed = [0]

    def hook(name: str) -> None:
        passed[0] += name == point
        if name == point and passed[0] == nth:
            action()

    fault_points.install(hook)


def newest_state(run) -> tuple[int, int] | None:
    checkpoint = newest_verified(run.directory).checkpoint
    return None if checkpoint is None else run.state_of(checkpoint)


@pytest.mark.parametrize(("point", "nth", "end"), CASES[:: len(CASES) // 12])
def test_a_death_during_a_save_beside_training_loses_nothing(
    make_run, memory_path: Path, point: str, nth: int, end: str
) -> None:
    die_in_a_save(make_run(memory_path / "checkpoints"), point, nth, end)


@pytest.mark.night
def test_every_death_during_a_save_beside_training_loses_nothing(make_run, memory_path: Path) -> None:
    for number, (point, nth, end) in enumerate(CASES):
        die_in_a_save(make_run(memory_path / f"{number}" / "checkpoints"), point, nth, end)
    print(f"\nR8: {len(CASES)} deaths in a save beside training, nothing lost")


def passes_of_a_save(run) -> list[tuple[str, int]]:
    """Every pass of a point in a save beside training, as (point, how often it was passed), in order."""
    run.save(run.store(), 1)
    passed = Counter[str]()
    found: list[tuple[str, int]] = []

    def hook(name: str) -> None:
        passed[name] += 1
        found.append((name, passed[name]))

    saves = BackgroundSaves(run.store(keep_last=1))
    fault_points.install(hook)
    begin(run, saves, 2)
    saves.wait()
    fault_points.install(None)
    return found


@pytest.mark.parametrize("end", ["kill", pytest.param("exit while it is pending", marks=pytest.mark.night)])
def test_a_death_at_every_pass_of_every_point_of_a_save_beside_training_loses_nothing(
    make_run, memory_path: Path, end: str
) -> None:
    passes = passes_of_a_save(make_run(memory_path / "counted" / "checkpoints"))
    assert len(passes) >= 90
    assert {point for point, _ in POINTS} <= {point for point, _ in passes}
    for number, (point, nth) in enumerate(passes):
        die_in_a_save(make_run(memory_path / f"{number}" / "checkpoints"), point, nth, end)
    print(f"\nR8: {len(passes)} deaths in a save beside training ({end}), nothing lost")


def die_in_a_save(run, point: str, nth: int, end: str) -> None:
    run.save(run.store(), 1)
    child = os.fork()
    if child == 0:
        saves = BackgroundSaves(run.store(keep_last=1))
        kill = (lambda: os._exit(EXITED)) if end.startswith("exit") else (lambda: os.kill(os.getpid(), signal.SIGKILL))
        at(point, nth, kill)
        begin(run, saves, 2)
        if end.endswith("waiting"):
            begin(run, saves, 3)
        saves.wait()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == (EXITED if end.startswith("exit") else -signal.SIGKILL), f"{point} was not passed: {code}"
    assert newest_state(run) in {(1, 0), (2, 0), (3, 0)}
    run.save(run.store(keep_last=1), 4)
    assert run.names() == ["step_000004"]
    assert newest_state(run) == (4, 0)


def test_what_is_saved_is_the_state_at_the_call_whatever_training_does_meanwhile(small_run) -> None:
    saves = BackgroundSaves(small_run.store())
    gate = threading.Event()
    at("checkpoint.space.before", 1, lambda: gate.wait(30) and None)
    tensors = begin(small_run, saves, 5)
    records = small_run.records(5)
    for tensor in tensors["optimizer"].values():
        tensor.zero_()
    records["ledger"].clear()
    gate.set()
    info = saves.wait()
    assert info is not None
    assert small_run.state_of(open_verified(info.path)) == (5, 0)


STEPS_AN_OPERATION = 100
"""Of training, that a slow disk takes for what a fast one does within one."""


def test_training_waits_for_no_operation_of_a_disk_that_is_a_hundred_times_slower(small_run) -> None:
    """Time is counted in training steps: the disk does one operation in a hundred, and training takes all of them."""
    saves = BackgroundSaves(small_run.store())
    trains = threading.get_ident()
    lets_on, is_asked = threading.Semaphore(0), threading.Semaphore(0)
    done: list[str] = []
    in_training: list[str] = []

    written = threading.Event()

    def slow(name: str) -> None:
        if not name.startswith("checkpoint."):
            if name == "background_save.written":
                written.set()
            return
        if threading.get_ident() == trains:
            in_training.append(name)
            return
        is_asked.release()
        assert lets_on.acquire(timeout=60), "training has ended"
        done.append(name)

    fault_points.install(slow)
    tensors = begin(small_run, saves, 5)
    assert done == [], "the call has returned before the first operation was let on"
    steps = 0
    while not written.is_set() and not saves.failed:
        for _ in range(STEPS_AN_OPERATION):
            steps += 1
            for tensor in tensors["optimizer"].values():
                tensor.fill_(steps % 2)
        if is_asked.acquire(timeout=0.02):
            lets_on.release()
    info = saves.wait()
    assert info is not None
    assert in_training == [], "what is written is written by the other thread"
    assert len(done) > 50
    assert steps >= STEPS_AN_OPERATION * len(done)
    assert small_run.state_of(open_verified(info.path)) == (5, 0), "the state at the call, whatever came after it"


def test_a_save_beside_training_writes_the_bytes_of_one_at_once(small_run, make_run, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other" / "checkpoints")
    small_run.save(small_run.store(), 3)
    saves = BackgroundSaves(other.store())
    begin(other, saves, 3)
    saves.wait()
    files = [open_verified(run.directory / "step_000003").manifest.files for run in (small_run, other)]
    assert files[0] == files[1]


def test_the_next_save_waits_for_the_one_before(small_run) -> None:
    saves = BackgroundSaves(small_run.store())
    order: list[str] = []
    at("checkpoint.publish.before", 1, lambda: (time.sleep(0.3), order.append("first is published"))[1])
    begin(small_run, saves, 1)
    assert order == []
    begin(small_run, saves, 2)
    assert order == ["first is published"]
    saves.wait()
    assert newest_state(small_run) == (2, 0)


@pytest.mark.parametrize("found_by", ["the next save", "the end"])
def test_an_error_is_raised_at_the_next_call_and_the_checkpoints_before_it_stay(small_run, found_by: str) -> None:
    small_run.save(small_run.store(), 1)
    saves = BackgroundSaves(small_run.store())

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at("checkpoint.file.sync.before", 2, refuse)
    begin(small_run, saves, 2)
    while not saves.failed:
        time.sleep(0.005)
    with pytest.raises(StorageError, match="step 2") as caught:
        begin(small_run, saves, 3) if found_by == "the next save" else saves.wait()
    assert caught.value.problem.code == "checkpoint.save_refused"
    fault_points.install(None)
    assert newest_state(small_run) == (1, 0)
    assert not saves.failed
    begin(small_run, saves, 3)
    saves.wait()
    assert newest_state(small_run) == (3, 0)


def test_a_record_that_json_cannot_hold_is_refused_by_the_call(small_run) -> None:
    saves = BackgroundSaves(small_run.store())
    with pytest.raises(CheckpointError, match="'ledger'") as caught:
        saves.begin(1, tensors={}, records={"ledger": {"x": {1, 2}}}, snapshot=lambda _: print, metadata={})
    assert caught.value.problem.code == "checkpoint.bad_component"
    assert small_run.names() == []


def test_without_memory_for_a_copy_the_save_is_done_at_once_and_it_is_said_once(small_run, monkeypatch, caplog) -> None:
    monkeypatch.setattr(async_writer, "free_host_memory", lambda: 0)
    saves = BackgroundSaves(small_run.store())
    for step in (1, 2):
        begin(small_run, saves, step)
        assert newest_state(small_run) == (step, 0)
    assert caplog.text.count("saves wait for the disk") == 1


def test_copies_use_their_buffers_again_and_keep_what_is_shared_shared() -> None:
    copies = HostCopies()
    embedding = torch.randn(4, 3)
    model = {"embedding": embedding, "head": embedding, "transposed": embedding.T, "other": torch.ones(2)}
    copies.begin()
    first = {name: copies.copy(name, tensor) for name, tensor in model.items()}
    assert first["embedding"] is first["head"]
    assert all(torch.equal(first[name], model[name]) for name in model)
    assert all(tensor.is_contiguous() for tensor in first.values())
    places = {name: tensor.data_ptr() for name, tensor in first.items()}
    embedding.mul_(2)
    copies.begin()
    second = {name: copies.copy(name, tensor) for name, tensor in model.items()}
    assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
    assert torch.equal(second["head"], embedding)
    assert copies.num_bytes == 4 * (12 + 12 + 2)
