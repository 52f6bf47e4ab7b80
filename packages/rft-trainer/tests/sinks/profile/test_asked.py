"""A request for a profile: who takes it and when, and what a damaged one does."""

from __future__ import annotations

from pathlib import Path

import pytest

from rft_trainer.sinks.profile.asked import ask, asked_steps, forget_request
from rft_trainer.sinks.profile.steps import ProfiledSteps


def test_a_request_is_of_the_next_steps_and_is_taken_once(tmp_path: Path) -> None:
    assert asked_steps(tmp_path, 4, None) is None
    ask(tmp_path, 3)
    assert asked_steps(tmp_path, 4, ProfiledSteps(8, 9)) == ProfiledSteps(5, 7)
    assert asked_steps(tmp_path, 5, None) is None


def test_a_request_waits_for_the_planned_steps_that_it_would_meet(tmp_path: Path) -> None:
    ask(tmp_path, 3)
    assert asked_steps(tmp_path, 4, ProfiledSteps(7, 9)) is None
    assert asked_steps(tmp_path, 9, None) == ProfiledSteps(10, 12)


def test_a_forgotten_request_is_not_taken(tmp_path: Path) -> None:
    assert not forget_request(tmp_path)
    ask(tmp_path, 1)
    assert forget_request(tmp_path)
    assert asked_steps(tmp_path, 1, None) is None


@pytest.mark.parametrize("text", ["", "[]", '{"steps": 0}', '{"steps": "many"}'])
def test_a_damaged_request_is_taken_and_records_nothing(tmp_path: Path, text: str) -> None:
    ask(tmp_path, 1).write_text(text)
    assert asked_steps(tmp_path, 4, None) is None
    assert not (tmp_path / "profile" / "request.json").exists()
    with pytest.raises(ValueError, match="1 to 100"):
        ask(tmp_path, 101)
