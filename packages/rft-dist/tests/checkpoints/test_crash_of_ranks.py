"""R3 and R6 with several ranks: one of them ends, or its disk refuses, at every instant of a save."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rft_core import fault_points
from rft_core.errors import PeerError, StorageError
from rft_dist.checkpoints.reader import newest_verified

SCENARIOS = ("first save", "save and prune", "same step again")
ALLOWED = {
    "first save": {None, (2, 0)},
    "save and prune": {(1, 0), (2, 0)},
    "same step again": {(2, 5), (2, 0)},
}
QUICK = [("save and prune", 2), ("same step again", 2)]
FULL = [(scenario, ranks) for scenario in SCENARIOS for ranks in (2, 4) if (scenario, ranks) not in QUICK]
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.night) for case in FULL)]
ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def prepared(make_run, folder: Path, scenario: str, num_ranks: int):
    run = make_run(folder / "checkpoints")
    if scenario == "save and prune":
        run.save_by_ranks(num_ranks, 1)
    if scenario == "same step again":
        run.save_by_ranks(num_ranks, 2, salt=5)
    return run


def rank_here() -> int:
    return int(threading.current_thread().name.removeprefix("rank "))


def events_by_rank(action: Callable[[], object]) -> Counter[int]:
    """How many fault points each rank passes."""
    passed: Counter[int] = Counter()
    fault_points.install(lambda _: passed.update([rank_here()]))
    action()
    fault_points.install(None)
    return passed


def fail_at(rank: int, number: int, fail: Callable[[], None]) -> None:
    """Call `fail` at the event of this rank with this number, from 0."""
    passed: Counter[int] = Counter()

    def hook(_: str) -> None:
        here = rank_here()
        passed[here] += 1
        if here == rank and passed[here] == number + 1:
            fail()

    fault_points.install(hook)


def newest_state(run) -> tuple[int, int] | None:
    checkpoint = newest_verified(run.directory).checkpoint
    return None if checkpoint is None else run.state_of(checkpoint)


@pytest.mark.parametrize(("scenario", "num_ranks"), CASES)
def test_a_rank_that_ends_at_any_instant_leaves_the_old_state_or_the_new(
    make_run, memory_path: Path, scenario: str, num_ranks: int
) -> None:
    untouched = prepared(make_run, memory_path / "count", scenario, num_ranks)
    events = events_by_rank(lambda: untouched.save_by_ranks(num_ranks, 2, keep_last=1))
    assert events[0] > events[1] > 10
    print(f"\nR3: {sum(events.values())} instants, {scenario}, {num_ranks} ranks")
    for rank, number in [(r, n) for r in range(num_ranks) for n in range(events[r])]:
        run = prepared(make_run, memory_path / f"{rank}_{number}", scenario, num_ranks)

        def end(run=run) -> None:
            raise run.Killed

        fail_at(rank, number, end)
        outcomes = run.save_by_ranks(num_ranks, 2, keep_last=1)
        fault_points.install(None)
        assert isinstance(outcomes[rank], run.Killed)
        assert newest_state(run) in ALLOWED[scenario], f"rank {rank}, event {number}"
        assert [info.step for info in run.save_by_ranks(num_ranks, 3, keep_last=1)] == [3] * num_ranks
        assert run.names() == ["step_000003"], f"rank {rank}, event {number}"
        assert newest_state(run) == (3, 0)
        shutil.rmtree(memory_path / f"{rank}_{number}")


def test_every_rank_learns_the_same_of_a_save(small_run) -> None:
    small_run.save_by_ranks(3, 1)
    infos = small_run.save_by_ranks(3, 2, keep_last=1)
    assert {(info.step, info.components, info.path) for info in infos} == {
        (2, ("ledger", "optimizer", "schedule"), small_run.directory / "step_000002")
    }
    assert [[removal.step for removal in info.removed] for info in infos] == [[1], [1], [1]]


@pytest.mark.parametrize(("scenario", "num_ranks"), CASES[1:])
def test_what_the_system_refuses_one_rank_is_an_error_of_all_and_loses_nothing(
    make_run, memory_path: Path, scenario: str, num_ranks: int
) -> None:
    untouched = prepared(make_run, memory_path / "count", scenario, num_ranks)
    events = events_by_rank(lambda: untouched.save_by_ranks(num_ranks, 2, keep_last=1))
    refused = 0
    for rank, number in [(r, n) for r in range(num_ranks) for n in range(events[r])]:
        run = prepared(make_run, memory_path / f"{rank}_{number}", scenario, num_ranks)
        code = ERRNOS[number % len(ERRNOS)]

        def refuse(code=code) -> None:
            raise OSError(code, os.strerror(code))

        fail_at(rank, number, refuse)
        outcomes = run.save_by_ranks(num_ranks, 2, keep_last=1)
        fault_points.install(None)
        errors = [outcome for outcome in outcomes if isinstance(outcome, StorageError)]
        assert len(errors) in (0, num_ranks), f"rank {rank}, event {number}: {outcomes}"
        for error in errors:
            assert errno.errorcode[code] in error.problem.what
        refused += bool(errors)
        assert newest_state(run) in ALLOWED[scenario], f"rank {rank}, event {number}"
        assert not [name for name in run.names() if name.startswith(".staging")]
        assert [info.step for info in run.save_by_ranks(num_ranks, 3, keep_last=1)] == [3] * num_ranks
        assert run.names() == ["step_000003"], f"rank {rank}, event {number}"
        shutil.rmtree(memory_path / f"{rank}_{number}")
    print(f"\nR6: {sum(events.values())} refusals, {refused} of them errors of the save, {scenario}, {num_ranks} ranks")
    assert refused > sum(events.values()) // 2


def test_any_other_failure_of_a_rank_reaches_all_with_its_name(small_run) -> None:
    small_run.save_by_ranks(2, 1)

    def burst() -> None:
        raise ZeroDivisionError("in this rank")

    fail_at(1, 3, burst)
    first, second = small_run.save_by_ranks(2, 2)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, PeerError)
    assert first.problem.code == "checkpoint.rank_failed"
    assert first.problem.what == "rank 1 failed while saving: ZeroDivisionError: in this rank"
    assert newest_state(small_run) == (1, 0)
    assert small_run.names() == ["step_000001"]


def test_bytes_that_change_on_the_way_are_noticed_by_the_rank_that_wrote_them(small_run) -> None:
    small_run.save_by_ranks(2, 1)

    def hook(name: str) -> None:
        if name == "checkpoint.verify.before" and rank_here() == 1:
            file = small_run.directory / "step_000002" / "state" / "optimizer" / "rank_00001-of-00002.safetensors"
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

    fault_points.install(hook)
    outcomes = small_run.save_by_ranks(2, 2)
    fault_points.install(None)
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)
    assert all("rank_00001-of-00002.safetensors" in outcome.problem.what for outcome in outcomes)
    assert newest_state(small_run) == (1, 0)
    assert small_run.names() == ["quarantine_step_000002", "step_000001"]


def test_a_save_whose_ranks_together_do_not_fit_is_refused_before_it_is_begun(small_run, monkeypatch) -> None:
    from rft_dist.checkpoints import writer

    small_run.save_by_ranks(2, 1)
    monkeypatch.setattr(writer, "free_bytes", lambda _: writer._SLACK_BYTES + 800)  # one rank's share would fit
    for outcome in small_run.save_by_ranks(2, 2):
        assert isinstance(outcome, StorageError)
        assert outcome.problem.code == "checkpoint.too_little_space"
    assert small_run.names() == ["step_000001"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_on_one_rank_takes_all_of_them_to_the_second_folder(small_run, tmp_path: Path, rank: int) -> None:
    second = tmp_path / "second"
    small_run.save_by_ranks(2, 1, fallback=second)

    def refuse() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fail_at(rank, 12, refuse)
    outcomes = small_run.save_by_ranks(2, 2, fallback=second)
    fault_points.install(None)
    assert [outcome.path for outcome in outcomes] == [second / "step_000002"] * 2
    assert all("ENOSPC" in outcome.refused.what for outcome in outcomes)
    assert newest_state(small_run) == (2, 0)
    assert small_run.names() == ["other_places.txt", "step_000001"]


def test_ranks_that_do_not_share_a_folder_are_told_so(make_run, memory_path: Path) -> None:
    from rft_dist.testing.checkpoint_ranks import run_ranks

    folders = [make_run(memory_path / name / "checkpoints") for name in ("here", "there")]

    def save(exchange):
        run = folders[exchange.rank]
        if exchange.rank:  # what another machine would make of the same path
            hook_target = run.directory
            hook_target.mkdir(parents=True)
            (hook_target / f".staging-step_000002-{os.getpid()}-{'0' * 8}").mkdir()
        return run.store(exchange=exchange).save(
            2,
            tensors={"optimizer": run.rows(exchange.rank, 2, 2)},
            records=run.records(2) if exchange.rank == 0 else {},
            model_writer=run.describe(2, 0),
            model_tensors={},
            metadata={},
        )

    outcomes = run_ranks(2, save)
    assert all(isinstance(outcome, StorageError) for outcome in outcomes)
    assert newest_state(folders[0]) is None
    assert folders[0].names() == []


def test_ranks_that_save_different_steps_are_told_so(small_run) -> None:
    from rft_core.errors import CheckpointError
    from rft_dist.testing.checkpoint_ranks import run_ranks

    def save(exchange):
        step = 3 + exchange.rank
        return small_run.store(exchange=exchange).save(
            step,
            tensors={"optimizer": small_run.rows(exchange.rank, 2, step)},
            records=small_run.records(step),
            model_writer=small_run.describe(step, 0),
            metadata={},
        )

    for outcome in run_ranks(2, save):
        assert isinstance(outcome, CheckpointError)
        assert outcome.problem.code == "checkpoint.other_step"
        assert outcome.problem.what.endswith("rank 0 3, rank 1 4")
    assert small_run.names() == []
