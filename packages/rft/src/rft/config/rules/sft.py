"""Settings of `sft` that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import MakeProblem, SourcedValues, Values
from rft.config.rules.training import idle_evaluation, training_problems
from rft_core.errors import Problem


def problems(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of supervised training."""
    yield from _nothing_to_wait_for(given.values, given.make_problem)
    yield from training_problems(given)


def _nothing_to_wait_for(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in ("patience", "target_loss"):
        if values[name] and not values["eval_data"] and not values["held_out_rows"]:
            why = f"{name} depends on the held-out loss, and no rows are held out"
            yield make_problem("sft.no_held_out", [name, "held_out_rows"], why, "--held_out_rows 200")


def idle_settings(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    return idle_evaluation(given)
