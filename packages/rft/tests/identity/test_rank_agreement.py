"""Ranks that have read different things are told apart before training, all with one error."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rft.identity.rank_agreement import require_equal_contents
from rft.identity.record import Content
from rft_core.errors import PreflightError
from rft_dist.collectives import SingleProcess
from rft_dist.testing.thread_ranks import run_in_threads

CONTENTS = {name: Content(f"{name} of all", "3 rows in use", f"{name}.jsonl", 3) for name in ("prompt_data", "reward")}


def told(changes: list[dict[str, Content]]) -> list[Any]:
    """What each rank is told, where rank r has read CONTENTS with `changes[r]`."""

    def one(collectives: Any) -> Any:
        try:
            require_equal_contents(collectives, CONTENTS | changes[collectives.rank])
        except PreflightError as error:
            return error.problem
        return None

    return run_in_threads(len(changes), one)


def test_ranks_that_have_read_the_same_go_on_wherever_it_lay() -> None:
    moved = {"reward": replace(CONTENTS["reward"], place="elsewhere.jsonl")}
    assert told([{}, moved, {}]) == [None, None, None]


@pytest.mark.parametrize("name", CONTENTS)
def test_all_ranks_are_told_which_one_has_read_what(name: str) -> None:
    other = replace(CONTENTS[name], digest="of this rank alone", place="own.jsonl")
    problems = told([{}, {}, {name: other}])
    assert problems[0] == problems[1] == problems[2]
    assert problems[0].code == "identity.ranks_differ"
    assert problems[0].what.endswith(name)
    assert f"rank 2: {name} | rank 0: {name} of all"[:30] in problems[0].where
    assert "own.jsonl" in problems[0].where
    assert "rank 1" not in problems[0].where


def test_what_only_one_rank_has_is_a_difference_and_many_are_counted() -> None:
    more = {f"extra {number}": CONTENTS["reward"] for number in range(12)}
    problem = told([{}, more])[0]
    assert "and 2 more" in problem.where
    assert "rank 0: nothing" in problem.where


def test_one_process_asks_nobody() -> None:
    exchanged: list[bytes] = []

    class Recording(SingleProcess):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            exchanged.append(data)
            return [data]

    require_equal_contents(Recording(), CONTENTS)
    assert exchanged == []
