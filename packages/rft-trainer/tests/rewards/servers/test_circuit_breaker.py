"""The circuit breaker of a server: when it opens, who may try, and the pauses between tries."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.servers.circuit_breaker import OPENS_AFTER, Backoff, CircuitBreaker

STILL = Backoff(lambda: 0.0)


def opened(now: float = 100.0) -> CircuitBreaker:
    breaker = CircuitBreaker(STILL)
    assert [breaker.failed(now, thread) for thread in range(OPENS_AFTER)] == [False] * (OPENS_AFTER - 1) + [True]
    return breaker


def test_all_may_try_until_it_opens() -> None:
    breaker = CircuitBreaker(STILL)
    for thread in range(OPENS_AFTER - 1):
        breaker.failed(0.0, thread)
    assert not breaker.is_open
    assert all(breaker.may_try(0.0, thread) for thread in range(9))
    breaker.failed(0.0, 0)
    assert breaker.is_open
    assert not any(breaker.may_try(0.0, thread) for thread in range(9))


def test_open_it_lets_one_through_after_a_pause_that_doubles() -> None:
    breaker, now = opened(), 100.0
    for pause in (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0):
        assert not breaker.may_try(now + pause - 0.01, 1)
        assert breaker.may_try(now + pause, 1)
        assert breaker.may_try(now + pause, 1), "whoever holds the try keeps it"
        assert not breaker.may_try(now + pause, 2)
        now += pause
        assert not breaker.failed(now, 1), "it opens once"


def test_a_thread_that_gives_up_lets_another_try() -> None:
    breaker = opened()
    assert breaker.may_try(101.0, 1)
    breaker.release(2)
    assert not breaker.may_try(101.0, 2)
    breaker.release(1)
    assert breaker.may_try(101.0, 2)


def test_an_answer_closes_it_and_the_pauses_begin_anew() -> None:
    breaker = opened()
    assert breaker.may_try(101.0, 1)
    breaker.failed(101.0, 1)
    breaker.answered()
    assert not breaker.is_open
    assert all(breaker.may_try(101.0, thread) for thread in range(9))
    for thread in range(OPENS_AFTER):
        breaker.failed(200.0, thread)
    assert breaker.may_try(201.0, 1)


@pytest.mark.parametrize(
    ("drawn", "number", "asked", "pause"),
    [
        (0.0, 0, None, 1.0),
        (1.0, 0, None, 0.5),
        (0.5, 3, None, 6.0),
        (0.0, 9, None, 30.0),
        (1.0, 5000, None, 15.0),
        (0.0, 3, 7.0, 7.0),
        (1.0, 3, 7.0, 7.7),
        (0.0, 0, 0.0, 0.05),
    ],
)
def test_pauses_are_drawn_from_their_upper_half_and_never_shorter_than_what_was_asked_for(
    drawn: float, number: int, asked: float | None, pause: float
) -> None:
    assert Backoff(lambda: drawn).pause(number, asked) == pytest.approx(pause)


def test_pauses_differ_from_client_to_client() -> None:
    assert len({Backoff().pause(3) for _ in range(20)}) > 10
