"""Settings of `genrec rl` that contradict one another; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

from rft.config.rules.rl import problems as rl_problems
from rft.config.rules.sourced_values import SourcedValues, Values
from rft.config.rules.training import idle_store
from rft_core.errors import Problem
from rft_genrec.settings.rl import GenrecRlSettings
from rft_genrec.settings.rules import rows_of_catalogue

_FROM_CATALOGUE = (
    "prompt_data",
    "eval_data",
    "prompt_split",
    "eval_split",
    "input_key",
    "label_key",
    "input_template",
    "eval_input_key",
    "eval_label_key",
    "apply_chat_template",
    "system_prompt",
    "eval_metrics",
    "reward",
    "reward_pretrain",
    "remote_rm_url",
    "judge_pretrain",
    "judge_url",
    "environment",
    "constraint",
    "generate_max_len",
    "max_len",
    "images_key",
)
"""Settings of rows, rewards and responses, which follow from the catalogue."""
TERMS = ("rule", "ranking", "prefix", "semantic", "collaborative")


def rl_rules(given: SourcedValues) -> Iterator[Problem]:
    """Yield the contradictions of `genrec rl`."""
    yield from _catalogue(given)
    yield from _reward(given)
    yield from rl_problems(given)


def rl_notes(given: SourcedValues, defaults: Values) -> list[str]:
    """Return a note for each given setting of a part that the run does not have."""
    return idle_store(given)


def reward_terms(text: str) -> Mapping[str, float]:
    """Return the weights of the terms that a value of `--genrec_reward` names.

    Raises:
        ValueError: a name that is no term or stands twice, or a weight that is no number.
    """
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        if name not in TERMS or name in weights:
            raise ValueError(f"{name!r} is {'named twice' if name in weights else 'no term'}")
        weights[name] = float(weight or 1)
    if not weights:
        raise ValueError("no term is named")
    return weights


def _catalogue(given: SourcedValues) -> Iterator[Problem]:
    defaults = {item.name: item.default for group in _groups() for item in fields(group)}
    named = [name for name in _FROM_CATALOGUE if name in given.values and given.values[name] != defaults.get(name)]
    if named:
        why = "histories, targets, reward and the items that may be written follow from the catalogue"
        yield rows_of_catalogue(given, named, why)


def _groups() -> list[type]:
    from typing import get_type_hints

    return list(get_type_hints(GenrecRlSettings).values())


def _reward(given: SourcedValues) -> Iterator[Problem]:
    values = given.values
    try:
        terms = reward_terms(values["genrec_reward"])
    except ValueError as error:
        why = f"{error}; terms are {', '.join(TERMS)}, each with =WEIGHT where it is not 1"
        yield given.make_problem("genrec.reward_names", ["genrec_reward"], why, "--genrec_reward rule,prefix")
        return
    for term, name in (("semantic", "item_embeddings"), ("collaborative", "item_scorer")):
        if term in terms and not values[name]:
            why = f"the term {term} is computed from {name}"
            yield given.make_problem("genrec.reward_input", ["genrec_reward", name], why, f"--{name} {name.upper()}")
        if term not in terms and values[name]:
            why = f"only the term {term} reads it"
            yield given.make_problem("genrec.reward_input", ["genrec_reward", name], why, f"leave {name} out")
    if values["item_scorer_path"] and not values["item_scorer"]:
        why = "it is what item_scorer is called with"
        names = ["item_scorer_path", "item_scorer"]
        yield given.make_problem("genrec.reward_input", names, why, "leave item_scorer_path out")
