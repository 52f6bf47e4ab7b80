"""What the main thread writes down of itself, and which line a collective comes from."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rft_dist.health import activity as activities
from rft_dist.health.activity import OTHER, START, Activity, Call, InCall, call_site

SUM = Call(5, "sum", (3,), "float32", "a.py:10 (step)")


def counting() -> Activity:
    """An activity whose clock reads 0, 1, 2, and so on."""
    clock = iter(float(second) for second in range(100))
    return Activity(clock=lambda: next(clock))


def test_an_activity_numbers_its_collectives_and_knows_where_they_come_from() -> None:
    activity = counting()
    first = activity.enter("sum", (2, 3), "float32")
    assert activity.last == InCall(first, True, 2.0)
    activity.leave(first)
    assert activity.last == InCall(first, False, 3.0)
    assert activity.moved == 3.0
    assert activity.waited == 1.0
    second = activity.enter("max", (), "int64")
    assert (first.number, first.name, first.shape, first.dtype) == (1, "sum", (2, 3), "float32")
    assert (second.number, second.name, second.shape, second.dtype) == (2, "max", (), "int64")
    assert first.site.startswith("health/test_activity.py:")
    assert first.site.endswith("(test_an_activity_numbers_its_collectives_and_knows_where_they_come_from)")
    assert second.site != first.site, "another line"
    assert activity.moved == 4.0  # two readings at the start, one at each entry and exit


def test_phases_and_steps_are_progress() -> None:
    activity = counting()
    assert (activity.phase, activity.moved, activity.steps_done, activity.step) == ((START, 0.0), 1.0, 0, 0)
    assert activity.last is None
    activity.enter_phase("train")
    assert (activity.phase, activity.moved) == (("train", 2.0), 2.0)
    activity.enter_phase(None)
    assert (activity.phase, activity.moved) == ((OTHER, 3.0), 3.0)
    for done in (1, 2):
        activity.end_step()
        assert (activity.steps_done, activity.moved) == (done, 3.0 + done)
    activity.follow(lambda: 7)
    assert activity.step == 7


def test_calls_match_where_their_kind_and_their_line_are_equal() -> None:
    assert SUM.matches(replace(SUM, number=6)), "numbers are compared elsewhere"
    for field in ({"name": "max"}, {"shape": (4,)}, {"dtype": "float64"}, {"site": "a.py:11 (step)"}):
        assert not SUM.matches(replace(SUM, **field))
    sent = replace(SUM, name="broadcast")
    assert sent.matches(replace(sent, site="a.py:14 (step)"))
    for field in ({"shape": (4,)}, {"dtype": "int8"}, {"site": "a.py:10 (other)"}, {"site": "b.py:10 (step)"}):
        assert not sent.matches(replace(sent, **field))


def test_the_site_of_a_call_is_outside_of_this_package_and_of_context_managers() -> None:
    activity = Activity()
    with ExitStack() as stack:
        stack.callback(activity.enter, "sum", (), "float32")
    assert activity.last is not None
    assert activity.last.call.site.startswith("health/test_activity.py:")
    sites = [call_site() for _ in range(2)]
    assert sites[0] == sites[1], "one line is one site"
    assert call_site().endswith("(test_the_site_of_a_call_is_outside_of_this_package_and_of_context_managers)")


def test_a_call_from_this_package_alone_has_an_unknown_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activities, "_OWN_FOLDER", "/")
    assert call_site() == "unknown"


def test_the_stack_of_the_main_thread_begins_where_it_is() -> None:
    def deep(number: int) -> list[str]:
        return deep(number - 1) if number else Activity().stack()

    assert Activity().stack()[0].endswith("(test_the_stack_of_the_main_thread_begins_where_it_is)")
    lines = deep(20)
    assert len(lines) == 12
    assert all(line.startswith("health/test_activity.py:") and line.endswith("(deep)") for line in lines)


def frame(file: str, line: int, name: str, back: object = None) -> SimpleNamespace:
    return SimpleNamespace(f_code=SimpleNamespace(co_filename=file, co_name=name), f_lineno=line, f_back=back)


def test_waiting_inside_of_threading_and_the_watch_itself_are_left_out_of_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outermost = frame("/lib/threading.py", 5, "run")
    watching = frame(f"{activities._WATCH_FOLDER}monitor.py", 4, "close", outermost)
    reading = frame("C:\\app\\data\\loop.py", 3, "read", watching)
    frames = {threading.main_thread().ident: frame("/lib/threading.py", 1, "wait", reading), 1: outermost}
    monkeypatch.setattr(activities, "sys", SimpleNamespace(_current_frames=lambda: frames))
    assert Activity().stack() == ["data/loop.py:3 (read)", "lib/threading.py:5 (run)"]
    frames.clear()
    assert Activity().stack() == []
