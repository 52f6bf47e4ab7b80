"""The steps of a profile as they are written."""

from __future__ import annotations

import pytest

from rft_trainer.settings.run import PROFILED_STEPS
from rft_trainer.sinks.profile.steps import ProfiledSteps, parse_steps


@pytest.mark.parametrize(
    ("text", "steps", "said"),
    [
        ("5", ProfiledSteps(5, 5), "step 5"),
        (" 3-5 ", ProfiledSteps(3, 5), "steps 3 to 5"),
        ("1-100", ProfiledSteps(1, 100), "steps 1 to 100"),
        (PROFILED_STEPS, ProfiledSteps(3, 5), "steps 3 to 5"),
    ],
)
def test_one_step_or_the_first_and_the_last_of_several(text: str, steps: ProfiledSteps, said: str) -> None:
    found = parse_steps(text)
    assert (found, str(found)) == (steps, said)
    assert found.number == steps.last - steps.first + 1


@pytest.mark.parametrize("text", ["0", "0-2", "5-3", "a", "1-", "-2", "1-2-3", "1-101", "1.5", "٣x"])
def test_anything_else_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="step"):
        parse_steps(text)
