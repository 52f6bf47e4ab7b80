"""The rollout thread by itself: what it draws next, with which version, and when a draw ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from thread_doubles import Asking, ScriptedEngine, a_board, a_group, drawn, ended

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core import fault_points
from rft_trainer.async_rollouts.generation_thread import GenerationLoop
from rft_trainer.async_rollouts.partial_rollout import PartialGroup, PartialSample
from rft_trainer.async_rollouts.protocols import DrawnTokens
from rft_trainer.async_rollouts.shared_state import LOOK_SECONDS, SharedState, TrainerRequest

SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=5, stop_token_ids=(0,))


@pytest.fixture(autouse=True)
def no_hook() -> Iterator[None]:
    yield
    fault_points.install(None)


def put_on(board: SharedState, *groups: PartialGroup) -> None:
    board.groups.update({group.entry: group for group in groups})


def go(board: SharedState, engine: Any, *, deterministic: bool = False) -> None:
    GenerationLoop(board, engine, SAMPLING, deterministic=deterministic).run()


def ends(number: int) -> Callable[[Callable[[], bool]], Iterator[DrawnTokens]]:
    """A draw in which this many samples stop, the last one first."""
    return lambda stop: iter([drawn(index, (3, index)) for index in reversed(range(number))])


def test_a_draw_continues_every_open_sample_after_its_own_tokens() -> None:
    board, _ = a_board()
    begun = PartialSample(5, 4)
    begun.add(drawn(0, (8, 9), "interrupted"))
    first, second = a_group(1, ended(4), begun), a_group(2, PartialSample(6, 3), media="image 2")
    put_on(board, first, second)
    engine = ScriptedEngine([ends(2)])
    go(board, engine)
    assert engine.log == [("draw", [5, 6])]
    assert engine.asked == ([(11, 21, 8, 9), (12, 22)], [2, 0], [2, 3], SAMPLING, [None, "image 2"])
    assert begun.token_ids == [8, 9, 3, 0]
    assert list(board.to_score) == [second, first], "in the order in which they became whole"


def test_prompts_without_images_are_drawn_without_any() -> None:
    board, _ = a_board()
    put_on(board, a_group(1, PartialSample(5, 4)))
    engine = ScriptedEngine([ends(1)])
    go(board, engine)
    assert engine.asked[-1] is None


def test_only_a_whole_group_is_told_of_and_queued() -> None:
    board, _ = a_board()
    half, whole = a_group(1, PartialSample(1, 4), PartialSample(2, 4)), a_group(2, PartialSample(3, 4))
    put_on(board, half, whole)
    seen: list[tuple[str, int]] = []
    fault_points.install(lambda name: seen.append((name, len(board.to_score))))

    def script(stop: Callable[[], bool]) -> Iterator[DrawnTokens]:
        yield drawn(2, (1,))
        yield drawn(0, (1,))
        yield drawn(1, (1,), "interrupted")
        board.is_closing = True

    go(board, ScriptedEngine([script]))
    assert seen == [("async.group_drawn", 0)]
    assert list(board.to_score) == [whole]


def test_a_version_is_served_once_and_before_its_draw() -> None:
    board, _ = a_board()
    board.version = 3
    put_on(board, a_group(1, PartialSample(1, 4)))

    def interrupted(stop: Callable[[], bool]) -> Iterator[DrawnTokens]:
        yield drawn(0, (1,), "interrupted", 3)

    engine = ScriptedEngine([interrupted, ends(1)])
    go(board, engine)
    assert engine.log == [("serve", 3), ("draw", [1]), ("draw", [1])]


def test_a_request_of_the_trainer_comes_before_a_draw_and_gives_its_result_or_its_error() -> None:
    board, steps = a_board()
    put_on(board, a_group(1, PartialSample(1, 4)))
    engine = ScriptedEngine([ends(1)], weight_version=2)
    board.version = 2

    def fails() -> None:
        engine.log.append("second")
        raise ZeroDivisionError

    requests = [TrainerRequest(lambda: engine.log.append("first") or 17, 0), TrainerRequest(fails, 0)]
    assert not any(one.is_done for one in requests)
    board.requests.extend(requests)
    go(board, engine)
    assert engine.log == ["first", "second", ("draw", [1])]
    assert [(one.result, type(one.error), one.is_done) for one in requests] == [
        (17, type(None), True),
        (None, ZeroDivisionError, True),
    ]
    assert steps.notified >= 3, "the thread that asked is woken"


def test_without_work_the_thread_waits_until_there_is_some() -> None:
    board, steps = a_board(lambda: None, lambda: put_on(board, a_group(1, PartialSample(1, 4))))
    engine = ScriptedEngine([ends(1)])
    put_on(board, a_group(2, ended(2)), a_group(3, Asking()))
    go(board, engine)
    assert engine.log == [("draw", [1])]
    assert steps.waits == [LOOK_SECONDS] * 3


def test_closing_ends_the_thread_before_anything_is_drawn() -> None:
    board, steps = a_board()
    put_on(board, a_group(1, PartialSample(1, 4)))
    board.is_closing = True
    go(board, ScriptedEngine())
    assert steps.waits == []


def test_a_draw_ends_early_for_new_work_for_the_end_and_for_enough_answered_samples() -> None:
    board, _ = a_board()
    put_on(board, a_group(1, *(PartialSample(key, 4) for key in range(8))))
    board.answered, seen = 5, dict[str, bool]()

    def script(stop: Callable[[], bool]) -> Iterator[DrawnTokens]:
        seen["at first"] = stop() or board.answered > 0
        board.generation += 1
        seen["new work"] = stop()
        board.generation -= 1
        board.answered = 1
        seen["1 answered, 8 drawn"] = stop()
        board.answered = 2
        seen["2 answered, 8 drawn"] = stop()
        board.answered = 1
        for index in range(3):
            yield drawn(index, (1,))
        seen["1 answered, 5 drawn"] = stop()
        yield drawn(3, (1,))
        seen["1 answered, 4 drawn"] = stop()
        board.answered = 0
        for index in range(4, 8):
            yield drawn(index, (1,))
        seen["none answered, none drawn"] = stop()
        board.is_closing = True
        seen["at the end"] = stop()

    go(board, ScriptedEngine([script]))
    assert [name for name, stops in seen.items() if stops] == [
        "new work",
        "2 answered, 8 drawn",
        "1 answered, 4 drawn",
        "at the end",
    ]
    assert len(seen) == 8


def test_a_draw_of_a_deterministic_run_ends_early_at_the_end_alone() -> None:
    board, _ = a_board()
    put_on(board, a_group(1, PartialSample(1, 4)))
    seen: list[bool] = []

    def script(stop: Callable[[], bool]) -> Iterator[DrawnTokens]:
        board.generation += 1
        board.answered = 9
        seen.append(stop())
        board.is_closing = True
        seen.append(stop())
        yield drawn(0, (), "interrupted")

    go(board, ScriptedEngine([script]), deterministic=True)
    assert seen == [False, True]


def test_a_deterministic_run_draws_one_batch_after_another_each_with_its_own_version() -> None:
    board, _ = a_board()
    board.version = 9
    put_on(
        board,
        a_group(1, PartialSample(1, 4), batch=4, version=2),
        a_group(2, PartialSample(2, 4), batch=3, version=2),
        a_group(3, PartialSample(3, 4), batch=3, version=2),
        a_group(4, PartialSample(4, 4), batch=9, version=1),
        a_group(5, ended(5), batch=1, version=0),
    )
    board.requests.append(TrainerRequest(lambda: engine.log.append("evaluates"), 2))
    engine = ScriptedEngine([ends(1), ends(2), ends(1)])
    go(board, engine, deterministic=True)
    assert engine.log == [
        ("serve", 1),
        ("draw", [4]),
        ("serve", 2),
        "evaluates",
        ("draw", [2, 3]),
        ("draw", [1]),
    ]


def test_a_deterministic_run_evaluates_when_nothing_is_left_to_draw() -> None:
    board, _ = a_board()
    put_on(board, a_group(1, PartialSample(1, 4), version=0))
    board.requests.append(TrainerRequest(lambda: engine.log.append("evaluates"), 1))
    engine = ScriptedEngine([ends(1)])
    go(board, engine, deterministic=True)
    assert engine.log == [("draw", [1]), ("serve", 1), "evaluates"]


def test_a_deterministic_batch_goes_on_when_every_answer_is_there() -> None:
    asking = Asking()

    def answer() -> None:
        asking.stage = "draws"

    board, steps = a_board(lambda: None, answer)
    put_on(board, a_group(1, PartialSample(1, 4)), a_group(2, asking))
    engine = ScriptedEngine([ends(2)])
    go(board, engine, deterministic=True)
    assert engine.log == [("draw", [1, 7])]
    assert len(steps.waits) == 3, "two for the answer, one at the end"


def test_answering_threads_are_woken_for_a_sample_that_asks() -> None:
    board, steps = a_board()
    asking = Asking(stage="draws")
    put_on(board, a_group(1, asking), a_group(2, PartialSample(1, 4), PartialSample(2, 4)))
    woken: list[int] = []

    def script(stop: Callable[[], bool]) -> Iterator[DrawnTokens]:
        yield drawn(1, (1,))
        woken.append(steps.notified)
        yield drawn(0, (1,))
        woken.append(steps.notified)
        yield drawn(2, (1,), "interrupted")
        board.is_closing = True

    go(board, ScriptedEngine([script]))
    assert woken == [0, 1]


def test_every_sample_counts_as_movement(monkeypatch: pytest.MonkeyPatch) -> None:
    board, _ = a_board()
    touched: list[int] = []
    monkeypatch.setattr(board, "touch", lambda: touched.append(len(sample.token_ids)))
    sample = PartialSample(1, 4)
    put_on(board, a_group(1, sample))
    go(board, ScriptedEngine([ends(1)]))
    assert touched == [2]
