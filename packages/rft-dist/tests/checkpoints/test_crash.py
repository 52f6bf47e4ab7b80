"""The process ends, or the disk refuses, at every instant of a save: old or new, never neither, never mixed."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rft_core import fault_points
from rft_core.errors import StorageError
from rft_dist.checkpoint_format.layout import run_tag
from rft_dist.checkpoints.reader import newest_verified


def count_events(action: Callable[[], object]) -> list[str]:
    """Names of the fault points that `action` passes, in order."""
    passed: list[str] = []
    fault_points.install(passed.append)
    action()
    fault_points.install(None)
    return passed


def fail_at(number: int, fail: Callable[[], None]) -> None:
    """Call `fail` at the event with this number, from 0."""
    passed = [0]

    def hook(_: str) -> None:
        passed[0] += 1
        if passed[0] == number + 1:
            fail()

    fault_points.install(hook)


def raise_killed(kind: type[BaseException]) -> Callable[[], None]:
    def fail() -> None:
        raise kind

    return fail


def refuse(number: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(number, os.strerror(number))

    return fail


def prepare_first(run) -> None:
    """Nothing is there yet."""


def prepare_older(run) -> None:
    """One checkpoint, which the next save prunes."""
    run.save(run.store(), 1)


def prepare_same_step(run) -> None:
    """The step that is saved again."""
    run.save(run.store(), 2, salt=5)


def prepare_interrupted_replacement(run) -> None:
    """A process ended between moving the earlier step 2 aside and publishing the later one."""
    run.save(run.store(), 2, salt=5)
    store = run.store()

    def hook(name: str) -> None:
        if name == "checkpoint.publish.before":
            raise run.Killed

    fault_points.install(hook)
    with pytest.raises(run.Killed):
        run.save(store, 2, salt=6)
    fault_points.install(None)


def prepare_unverified_replacement(run) -> None:
    """A process ended after publishing the later step 2, which was then damaged: the earlier one is still there."""
    prepare_interrupted_replacement(run)
    shutil.copytree(next(run.directory.glob("dead_replaced_*")), run.directory / "step_000002")
    (run.directory / "step_000002" / "model" / "config.json").write_text("rotten")


SCENARIOS = {
    "first save": (prepare_first, {None, (2, 0)}),
    "save and prune": (prepare_older, {(1, 0), (2, 0)}),
    "same step again": (prepare_same_step, {(2, 5), (2, 0)}),
    "after an interrupted replacement": (prepare_interrupted_replacement, {(2, 5), (2, 0)}),
    "after a replacement that rotted": (prepare_unverified_replacement, {(2, 5), (2, 0)}),
}


def open_and_save(run) -> None:
    run.save(run.store(keep_last=1), 2)


def open_and_save_beside(run) -> None:
    run.save_beside(run.store(keep_last=1), 2)


def newest_state(run, directory: Path | None = None) -> tuple[int, int] | None:
    checkpoint = newest_verified(directory or run.directory).checkpoint
    return None if checkpoint is None else run.state_of(checkpoint)


def prepared(make_run, memory_path: Path, prepare: Callable, name: str):
    run = make_run(memory_path / name / "checkpoints")
    prepare(run)
    return run


@pytest.mark.parametrize("way", [open_and_save, open_and_save_beside], ids=["now", "beside"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_that_ends_at_any_instant_of_a_save_leaves_the_old_state_or_the_new(
    make_run, memory_path: Path, scenario: str, way: Callable
) -> None:
    """R3, one rank."""
    prepare, allowed = SCENARIOS[scenario]
    untouched = prepared(make_run, memory_path, prepare, "count")
    total = len(count_events(lambda: way(untouched)))
    assert total >= 40
    print(f"\nR3: {total} instants, {scenario}, {way.__name__}")
    for number in range(total):
        run = prepared(make_run, memory_path, prepare, f"crash_{number}")
        fail_at(number, raise_killed(run.Killed))
        with pytest.raises(run.Killed):
            way(run)
        fault_points.install(None)
        state = newest_state(run)
        assert state in allowed, f"event {number}: {state}"
        assert run.save(run.store(keep_last=1), 3).step == 3
        assert [name for name in run.names() if not name.startswith("quarantine_")] == ["step_000003"], (
            f"event {number}"
        )
        assert newest_state(run) == (3, 0)
        shutil.rmtree(run.directory.parent)


def test_every_declared_point_of_a_checkpoint_is_passed_by_these_scenarios(make_run, memory_path: Path) -> None:
    passed: set[str] = set()
    for index, (prepare, _) in enumerate(SCENARIOS.values()):
        run = prepared(make_run, memory_path, prepare, f"run_{index}")
        passed |= set(count_events(lambda run=run: open_and_save(run)))
    declared = {name for name in fault_points.declared() if name.startswith("checkpoint.")}
    assert declared == passed


def test_a_process_that_ends_while_it_moves_a_damaged_one_aside_loses_nothing(make_run, memory_path: Path) -> None:
    def prepare(run) -> None:
        store = run.store()
        run.save(store, 1)
        run.save(store, 2)
        (run.directory / "step_000002" / "state" / "ledger.json").write_text("{}")

    run = prepared(make_run, memory_path, prepare, "count")
    events = count_events(lambda: newest_verified(run.directory))
    assert events[:2] == ["checkpoint.quarantine.before", "checkpoint.quarantine.after"]
    for number in range(len(events)):
        run = prepared(make_run, memory_path, prepare, f"crash_{number}")
        fail_at(number, raise_killed(run.Killed))
        with pytest.raises(run.Killed):
            newest_verified(run.directory)
        fault_points.install(None)
        assert newest_state(run) == (1, 0)
        assert (run.directory / "quarantine_step_000002" / "state" / "ledger.json").read_text() == "{}"


@pytest.mark.parametrize(
    "point",
    [
        "checkpoint.file.write.after",
        "checkpoint.publish.before",
        "checkpoint.publish.after",
        "checkpoint.verify.before",
        "checkpoint.retire.after",
        "checkpoint.unlink.after",
    ],
)
def test_what_a_dead_process_left_is_cleaned_up_by_the_next_one(small_run, point: str) -> None:
    small_run.save(small_run.store(), 1)
    child = os.fork()
    if child == 0:
        fault_points.install(lambda name: os._exit(86) if name == point else None)
        open_and_save(small_run)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 86
    assert newest_state(small_run) in {(1, 0), (2, 0)}
    store = small_run.store(keep_last=1)
    assert all(name.startswith("step_") for name in small_run.names())
    small_run.save(store, 3)
    assert small_run.names() == ["step_000003"]


def test_what_a_living_process_is_writing_is_left_alone(small_run) -> None:
    store = small_run.store()
    living = small_run.directory / f".staging-step_000009-{os.getppid()}-{'0' * 8}"
    living.mkdir()
    same_run = small_run.directory / living.name.replace("0" * 8, run_tag(small_run.run_id))
    same_run.mkdir()
    small_run.save(store, 1)
    assert living.is_dir()
    assert same_run.is_dir()


REFUSALS = [
    errno.ENOSPC,
    errno.EIO,
    *(pytest.param(number, marks=pytest.mark.night) for number in (errno.EDQUOT, errno.EROFS, errno.EINTR)),
]


@pytest.mark.parametrize("number", REFUSALS)
@pytest.mark.parametrize("lasting", [False, True])
def test_an_operation_that_the_system_refuses_loses_no_checkpoint(
    make_run, memory_path: Path, number: int, lasting: bool
) -> None:
    run = prepared(make_run, memory_path, prepare_older, "count")
    store = run.store(keep_last=1)
    total = len(count_events(lambda: run.save(store, 2)))
    refusals: list[StorageError] = []
    for event in range(total):
        run = prepared(make_run, memory_path, prepare_older, f"refuse_{event}")
        store = run.store(keep_last=1)
        seen = [0]

        def hook(_: str, seen=seen, event=event) -> None:
            seen[0] += 1
            if seen[0] == event + 1 or (lasting and seen[0] > event):
                refuse(number)()

        fault_points.install(hook)
        try:
            run.save(store, 2)
        except StorageError as error:
            refusals.append(error)
        fault_points.install(None)
        assert newest_state(run) in {(1, 0), (2, 0)}, f"event {event}"
        if not lasting:
            assert all(name.startswith(("step_", "dead_")) for name in run.names()), f"event {event}"
        run.save(store, 3)
        assert run.names() == ["step_000003"], f"event {event}"
        shutil.rmtree(run.directory.parent)
    print(f"\nR6: {total} refusals ({errno.errorcode[number]}), {len(refusals)} of them errors of the save")
    assert len(refusals) > total // 2
    for refusal in refusals:
        assert refusal.problem.what.startswith("cannot save step 2: ")
        assert f"({errno.errorcode[number]}, no quota known)" in refusal.problem.what
        assert refusal.problem.where.startswith("/")
        assert "last good step 1 untouched" in refusal.problem.state


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(small_run, monkeypatch) -> None:
    taken = os.write
    monkeypatch.setattr(os, "write", lambda file, data: taken(file, bytes(data[:7])))
    store = small_run.store()
    small_run.save(store, 1)
    monkeypatch.undo()
    assert newest_state(small_run) == (1, 0)


def test_a_refused_removal_does_not_undo_the_save(small_run) -> None:
    small_run.save(small_run.store(), 1)
    store = small_run.store(keep_last=1)
    fault_points.install(lambda name: refuse(errno.EIO)() if name == "checkpoint.retire.before" else None)
    info = small_run.save(store, 2)
    fault_points.install(None)
    assert info.removed == ()
    assert "step_000001 was not removed" in info.problems[0]
    assert [removal.step for removal in small_run.save(store, 3).removed] == [1, 2]


def test_a_file_larger_than_the_process_may_write_is_refused_with_path_and_remedy(small_run) -> None:
    store = small_run.store()
    small_run.save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, hard))
    try:
        with pytest.raises(StorageError) as caught:
            small_run.save(store, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "EFBIG" in caught.value.problem.what
    assert caught.value.problem.where.endswith("state/optimizer.safetensors")
    assert caught.value.problem.do == "ulimit -f unlimited"
    assert small_run.names() == ["step_000001"]
    small_run.save(store, 2, size=100_000)


def test_a_model_writer_of_the_library_that_meets_a_full_disk_keeps_its_errno(small_run) -> None:
    def write(directory: Path) -> None:
        save_file({"w": torch.zeros(200_000)}, directory / "model.safetensors")

    store = small_run.store()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, hard))
    try:
        with pytest.raises(StorageError, match="EFBIG") as caught:
            store.save(1, tensors=small_run.tensors(1), records=small_run.records(1), model_writer=write, metadata={})
        assert caught.value.problem.code == "checkpoint.save_refused"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert small_run.names() == []


def test_a_save_that_cannot_fit_is_refused_before_it_is_begun(small_run) -> None:
    store = small_run.store()
    small_run.save(store, 1)
    written: list[Path] = []
    with pytest.raises(StorageError) as caught:
        store.save(
            2,
            tensors=small_run.tensors(2),
            records=small_run.records(2),
            model_writer=written.append,
            metadata={},
            model_bytes=2**60,
        )
    assert written == []
    assert "needs 1073741824.000 GiB, has" in caught.value.problem.what
    assert "last good step 1 untouched" in caught.value.problem.state
    assert small_run.names() == ["step_000001"]


def test_bytes_that_the_disk_changes_between_writing_and_reading_are_noticed(small_run) -> None:
    small_run.save(small_run.store(), 2, salt=1)
    store = small_run.store()

    def hook(name: str) -> None:
        if name == "checkpoint.verify.before":
            (small_run.directory / "step_000002" / "model" / "config.json").write_text("{}")

    fault_points.install(hook)
    with pytest.raises(StorageError) as caught:
        small_run.save(store, 2, salt=2)
    assert caught.value.problem.code == "checkpoint.reads_back_differently"
    fault_points.install(None)
    assert newest_state(small_run) == (2, 1)
    assert small_run.names() == ["quarantine_step_000002", "step_000002"]
