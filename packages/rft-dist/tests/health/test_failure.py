"""Causes of failures, and the errors made of them."""

from __future__ import annotations

from rft_core.errors import DataError, PeerError
from rft_dist.health import failure as causes
from rft_dist.health.failure import Cause

PLACE = {"rank": 2, "host": "node-a", "pid": 7, "step": 4, "phase": "train"}


def raised(error: BaseException) -> Cause:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 - whatever was given
        return causes.failure(caught, **PLACE, scrub=lambda text: text.replace("secret", "***"))  # type: ignore[arg-type]


def test_an_error_becomes_a_cause_with_its_place_and_without_secrets() -> None:
    found = raised(ValueError("a secret\nsecond line"))
    assert (found.kind, found.rank, found.told_by) == ("failure", 2, 2)
    assert found.what.endswith("ValueError: a ***")
    assert "rank 2 (node-a, pid 7)" in found.what
    assert found.where.startswith(f"{__file__}:")
    assert found.where.endswith("(raised)")
    error = found.error
    assert {name: error[name] for name in PLACE} == PLACE
    assert (error["type"], error["code"], error["message"]) == (
        "ValueError",
        "program.unexpected",
        "a ***\nsecond line",
    )
    assert error["at"] == found.where
    assert "secret" not in "".join(error["traceback"])


def test_a_long_message_and_a_long_trace_are_cut() -> None:
    found = raised(ValueError("x" * 600))
    assert found.what.endswith(": " + "x" * 500)
    assert raised(ValueError()).what.endswith("ValueError: ")

    def deep(number: int) -> None:
        if number:
            other(number - 1)
        raise ValueError("deep")

    def other(number: int) -> None:
        deep(number)

    try:
        deep(60)
    except ValueError as error:
        lines = causes.failure(error, **PLACE, scrub=str).error["traceback"]  # type: ignore[arg-type]
    assert len(lines) == 60
    assert lines[-1] == "ValueError: deep"


def test_an_error_without_a_trace_has_no_place() -> None:
    assert causes.failure(ValueError("x"), **PLACE, scrub=str).where == "unknown"  # type: ignore[arg-type]


def test_an_error_of_the_project_keeps_its_code_and_its_words() -> None:
    found = raised(DataError(code="data.row", what="row 3 is empty", where="a.jsonl:3", why="y"))
    assert found.what.endswith("row 3 is empty")
    assert found.error["code"] == "data.row"
    assert found.kind == "failure"


def test_collectives_that_differ_are_a_cause_of_their_own() -> None:
    found = raised(PeerError(code="collective.mismatch", what="they differ", where="a.py:1", why="order"))
    assert (found.kind, found.what, found.why, found.where, found.told_by) == (
        "mismatch",
        "they differ",
        "order",
        "a.py:1",
        2,
    )
    assert found.error["code"] == "collective.mismatch"


def test_the_error_of_a_rank_that_ends_for_another_says_where_it_was() -> None:
    error = Cause("late", 1, "w", "y", "loop.py:5").as_error(own="rank 0 was in x", do="resume")
    assert (error.problem.code, error.problem.where, error.problem.do) == ("peer.late", "loop.py:5", "resume")
    assert "rank 0 was in x" in str(error.problem.state)
    placeless = Cause("late", 1, "w", "y").as_error(own="rank 0 was in x", do="resume")
    assert placeless.problem.where == "rank 0 was in x"
    assert "rank 0" not in str(placeless.problem.state)


def test_a_cause_comes_back_from_json_as_it_went_in() -> None:
    cause = Cause("failure", 2, "w\u00e4hrend", "why", "where", 2, {"step": 4})
    assert causes.decode(cause.encode()) == causes.decode(cause.encode().encode()) == cause
    assert "w\u00e4hrend" in cause.encode()
    assert (Cause("late", 1, "w", "y").told_by, Cause("late", 1, "w", "y").where) == (-1, "")
    assert Cause("late", 1, "w", "y").error == {}
