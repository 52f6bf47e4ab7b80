"""Settings of decoding within a constraint that contradict one another. No torch is imported here."""

from __future__ import annotations

from collections.abc import Iterator

from rft.config.rules.sourced_values import MakeProblem, Values
from rft_core.errors import Problem

_CUTS = ("top_p", "top_k", "min_p")
"""Settings that leave out tokens."""


def constraint_problems(values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    """Yield beams without a set of sequences, and settings of draws where nothing is drawn or scored otherwise."""
    if "constraint" not in values:
        return
    searching = [name for name in ("num_beams", "group_source") if values.get(name, 0) not in (0, "samples")]
    evaluated = ["eval_beams"] if values.get("eval_beams") else []
    if not values["constraint"]:
        for name in (*searching, *evaluated):
            why = "a beam search ranks the sequences of a constraint"
            remedy = "--group_source samples" if name == "group_source" else f"--{name} 0"
            yield make_problem("constraint.beams_alone", [name, "constraint"], why, remedy)
        return
    if evaluated and values["eval_n"] != 1:
        why = "the responses to a held-out prompt are its beams"
        yield make_problem("constraint.beams_or_samples", ["eval_n", "eval_beams"], why, "--eval_n 1")
    if searching:
        yield from _searched(searching[0], values, make_problem)
    elif values.get("constraint_logprobs") == "allowed":
        for name in _cutting(values):
            yield make_problem(
                "constraint.cut",
                [name, "constraint_logprobs"],
                "samples would be drawn among fewer tokens than the loss takes probabilities of",
                f"{_neutral(name)}, or --constraint_logprobs vocabulary",
            )


def _searched(search: str, values: Values, make_problem: MakeProblem) -> Iterator[Problem]:
    for name in (*_cutting(values), *(["use_fire"] if values.get("use_fire") else [])):
        why = "beams are searched for and not drawn"
        yield make_problem("constraint.beams_not_drawn", [name, search], why, _neutral(name))
    for name in ("eval_n", "n_samples_per_prompt"):
        # in training the size of a group is the number of its beams
        if search == "num_beams" and values.get(name, 1) != 1 and values[name] != values["num_beams"]:
            why = "the responses to a prompt are its beams"
            yield make_problem("constraint.beams_or_samples", [name, search], why, f"--{name} 1")


def _cutting(values: Values) -> list[str]:
    given = {name: values[name] for name in _CUTS if name in values}
    # neutral are 1 for top-p, and 0 or below for the others
    return [name for name, value in given.items() if (value < 1.0 if name == "top_p" else value > 0)]


def _neutral(name: str) -> str:
    return {"top_p": "--top_p 1", "top_k": "--top_k 0", "min_p": "--min_p 0"}.get(name, f"--no-{name}")
