"""What the threads of a queue share: waits that end, errors that reach the trainer, threads that are joined."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from thread_doubles import Steps, a_board, a_group, ended

from rft_core.errors import ServiceError
from rft_trainer.async_rollouts import shared_state
from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the shared state."""
    seconds = [100.0]
    monkeypatch.setattr(shared_state, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def later(now: list[float], seconds: float) -> Any:
    def pass_by() -> None:
        now[0] += seconds

    return pass_by


def patient(now: list[float], seconds: float, *, each: float) -> tuple[SharedState, Steps]:
    """Shared state that gives up after so many seconds; each wait takes `each`."""
    board = SharedState(seconds)
    board.changed = steps = Steps(last=later(now, each))
    return board, steps


def test_new_work_interrupts_draws_and_wakes_all_while_progress_only_wakes() -> None:
    board, steps = a_board()
    with board.changed:
        board.tell()
        assert (board.generation, steps.notified) == (1, 1)
        board.moved()
        assert (board.generation, steps.notified) == (1, 2)
        board.touch()
    assert (board.generation, steps.notified) == (1, 2)


@pytest.mark.parametrize("moves", ["tell", "moved", "touch"])
def test_a_wait_is_given_up_when_nothing_has_moved_for_longer_than_its_patience(now: list[float], moves: str) -> None:
    board, steps = patient(now, 10.0, each=4.0)
    with pytest.raises(ServiceError) as caught:
        board.wait(lambda: False, "a step")
    assert caught.value.problem.code == "rollouts.late"
    assert steps.waits == [LOOK_SECONDS] * 3, "at 4 and 8 seconds it goes on, at 12 it does not"
    with board.changed:
        getattr(board, moves)()
    steps.waits.clear()
    with pytest.raises(ServiceError):
        board.wait(lambda: False, "a step")
    assert len(steps.waits) == 3, "counted from the last movement"


def test_patience_is_not_over_before_its_last_second(now: list[float]) -> None:
    board, steps = patient(now, 8.0, each=4.0)
    with pytest.raises(ServiceError):
        board.wait(lambda: False, "a step")
    assert len(steps.waits) == 3


def test_a_wait_ends_when_its_condition_holds_or_a_thread_has_failed(now: list[float]) -> None:
    board, steps = patient(now, 10.0, each=1.0)
    answers = iter([False, False, True])
    board.wait(lambda: next(answers), "a step")
    assert len(steps.waits) == 2
    board.error = OSError("broken")
    board.wait(lambda: True, "a step")
    with pytest.raises(OSError, match="broken"):
        board.wait(lambda: False, "a step")
    assert len(steps.waits) == 2


def test_a_group_waits_for_its_rewards_once_it_is_whole() -> None:
    board, steps = a_board()
    open_group, whole = a_group(1, ended(1), PartialSample(2, 4)), a_group(2, ended(3))
    with board.changed:
        board.queue_if_complete(open_group)
    assert (list(board.to_score), steps.notified) == ([], 0)
    with board.changed:
        board.queue_if_complete(whole)
    assert (list(board.to_score), steps.notified) == ([whole], 1)
    board.to_score.clear()
    scored: Any = object()
    whole.group = scored
    with board.changed:
        board.queue_if_complete(whole)
    assert (list(board.to_score), steps.notified) == ([], 1)


class RecordedThread:
    """A thread that runs when the test says so."""

    made: list[RecordedThread]

    def __init__(self, **options: Any) -> None:
        self.options, self.started, self.joined = options, False, list[float | None]()
        self.made.append(self)

    def start(self) -> None:
        self.started = True

    def join(self, timeout: float | None = None) -> None:
        self.joined.append(timeout)

    def run(self) -> None:
        self.options["target"](*self.options["args"])


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[RecordedThread]:
    made: list[RecordedThread] = []
    RecordedThread.made = made
    current = SimpleNamespace(name="scoring")
    doubles = SimpleNamespace(Thread=RecordedThread, Condition=threading.Condition, current_thread=lambda: current)
    monkeypatch.setattr(shared_state, "threading", doubles)
    return made


def test_a_thread_is_started_once_for_each_loop_and_does_not_keep_the_process(threads: list[RecordedThread]) -> None:
    board, _ = a_board()
    ran: list[str] = []
    loops = {name: lambda name=name: ran.append(name) for name in ("rollouts", "scoring")}
    board.start(loops)
    board.start(loops)
    assert [(one.options["name"], one.options["daemon"], one.started) for one in threads] == [
        ("rollouts", True, True),
        ("scoring", True, True),
    ]
    for one in threads:
        one.run()
    assert ran == ["rollouts", "scoring"]
    assert board.error is None


def test_closing_wakes_the_threads_joins_them_for_a_while_and_lets_none_start(threads: list[RecordedThread]) -> None:
    board, steps = a_board()
    board.start({"rollouts": lambda: None})
    board.close()
    board.close()
    assert (board.is_closing, board.generation) == (True, 2)
    assert steps.notified == 2
    [thread] = threads
    assert len(thread.joined) == 1
    assert thread.joined[0] is not None
    board.start({"rollouts": lambda: None})
    assert len(threads) == 1


def test_a_thread_that_closes_does_not_join_itself() -> None:
    board, ended_by_itself = SharedState(20.0), threading.Event()

    def closes() -> None:
        board.close()
        ended_by_itself.set()

    board.start({"rollouts": closes})
    assert ended_by_itself.wait(10.0)
    assert board.error is None


def test_the_first_error_of_a_thread_is_kept_and_wakes_who_waits(threads: list[RecordedThread]) -> None:
    board, steps = a_board()

    def fails(error: BaseException) -> None:
        raise error

    first, second = KeyboardInterrupt(), OSError("later")
    board.start({"rollouts": lambda: fails(first), "scoring": lambda: fails(second)})
    for number, thread in enumerate(threads, start=1):
        thread.run()
        assert (board.error, steps.notified) == (first, number)
    assert len(first.__notes__) == 1


def test_what_the_rollout_thread_does_is_kept_after_a_failure_alone() -> None:
    board, _ = a_board()
    before = board.doing
    with board.noted("draws"):
        assert board.doing == "draws"
    assert board.doing not in (before, "draws")
    with pytest.raises(OSError, match="x"), board.noted("draws again"):
        raise OSError("x")
    assert board.doing == "draws again"
