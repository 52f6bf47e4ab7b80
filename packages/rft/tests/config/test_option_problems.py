"""Problems of single options: a code each, and the place that the option was written at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rft.config import option_problems
from rft_core.errors import Problem


@pytest.mark.parametrize(
    ("make", "code", "what"),
    [
        (option_problems.unknown_option, "option.unknown", "unknown option a"),
        (option_problems.needs_value, "option.no_value", "a"),
        (option_problems.not_a_value, "option.value", "a"),
    ],
)
def test_a_problem_of_an_option_says_where_it_was_written(make: Callable[..., Problem], code: str, what: str) -> None:
    assert make("a", "b", "c") == Problem(code=code, what=what, where="command line", why="b", do="c")
    assert make("a", "b", "c", "d.yaml:3").where == "d.yaml:3"


def test_a_stray_word_stands_on_the_command_line() -> None:
    told = option_problems.stray_word("a", "b", "c")
    assert told == Problem(code="option.stray", what="a", where="command line", why="b", do="c")
