"""Table of the rewards that have a name: builder, parts and settings of each. No torch is imported here.

A new rule is a module with a function that takes a `RuleContext`, its settings in `rft_trainer.settings.rewards`, and
a row in `RULES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft_trainer.records.scores import Reward
from rft_trainer.workers.limits import ProcessLimits

RuleRuns = Literal["here", "algebra in processes", "processes", "sandboxes"]


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Inputs of the builder of a rule."""

    num_workers: int = 1
    """Scoring processes, for rules that use any."""
    timeout: float = 10.0
    """Seconds that one response may take; beyond it the response has no reward."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The settings that the rule's row names, each with its value."""
    limits: ProcessLimits | None = None
    """Of processes that run code of a user or of a response."""
    log: Path | None = None
    """File for what such code prints."""


@dataclass(frozen=True, slots=True)
class RewardRule:
    """A reward that has a name.

    Example::

        RewardRule("regex", "rft_trainer.rewards.rules.regex:build", parts=("regex",), settings=("response_pattern",))
    """

    name: str
    builder: str
    """module:function of a `RuleContext`, which returns a `Reward`."""
    parts: tuple[str, ...]
    """Names of the entries in its breakdowns."""
    settings: tuple[str, ...] = ()
    """Names of the settings of `RewardSettings` that it reads; they are refused where no such rule is chosen."""
    needed: tuple[str, ...] = ()
    """Those of them without which it says nothing; an empty one is refused."""
    columns: tuple[str, ...] = ()
    """Those of them that name a column of the rows, where they are not empty."""
    runs: RuleRuns = "here"
    """Where it runs: in this process, because its cost is bounded by the length of the response; there but for hard
    comparisons; in processes that are killed after `reward_timeout`; or in sandboxes, with the program of a
    response."""
    reads_label: bool = True
    """Whether it compares with the label, so that rows without one cannot be scored."""
    reads_rows: bool = False
    """Whether it reads labels of any kind, and other columns that no setting names."""

    def build(self, context: RuleContext) -> Reward:
        """Return the reward, ready to score."""
        module, _, function = self.builder.partition(":")
        # imported only now: the table is read where nothing is scored
        make: Callable[[RuleContext], Reward] = getattr(importlib.import_module(module), function)
        return make(context)


RULES: tuple[RewardRule, ...] = (
    RewardRule("exact", "rft_trainer.rewards.exact:build", parts=("correctness",)),
    RewardRule("math", "rft_trainer.rewards.math:build_math", parts=("correctness",), runs="algebra in processes"),
    RewardRule(
        "gsm8k", "rft_trainer.rewards.math:build_gsm8k", parts=("correctness", "format"), runs="algebra in processes"
    ),
    RewardRule(
        "numeric",
        "rft_trainer.rewards.rules.numeric:build",
        parts=("correctness",),
        settings=("number_tolerance", "number_relative_tolerance"),
    ),
    RewardRule(
        "fuzzy",
        "rft_trainer.rewards.rules.fuzzy:build",
        parts=("f1", "ratio", "correctness"),
        settings=("fuzzy_measure",),
        runs="processes",
    ),
    RewardRule(
        "choice",
        "rft_trainer.rewards.rules.choice:build",
        parts=("correctness",),
        settings=("choice_options_key",),
        columns=("choice_options_key",),
    ),
    RewardRule(
        "format",
        "rft_trainer.rewards.rules.format:build",
        parts=("tags", "order"),
        settings=("format_tags",),
        reads_label=False,
    ),
    RewardRule(
        "regex",
        "rft_trainer.rewards.rules.regex:build",
        parts=("match",),
        settings=("response_pattern", "response_pattern_match"),
        needed=("response_pattern",),
        runs="processes",
        reads_label=False,
    ),
    RewardRule(
        "length",
        "rft_trainer.rewards.rules.length:build",
        parts=("length",),
        settings=("length_range", "length_slack", "length_unit"),
        needed=("length_range",),
        reads_label=False,
    ),
    RewardRule(
        "language",
        "rft_trainer.rewards.rules.language:build",
        parts=("script", "words"),
        settings=("response_language",),
        needed=("response_language",),
        reads_label=False,
    ),
    RewardRule(
        "json_schema",
        "rft_trainer.rewards.rules.json_schema:build",
        parts=("json", "schema"),
        settings=("json_schema",),
        runs="processes",
        reads_label=False,
    ),
    RewardRule(
        "code",
        "rft_trainer.rewards.unit_tests.code:build",
        parts=("correctness", "tests"),
        settings=("code_seconds", "code_memory"),
        runs="sandboxes",
        reads_rows=True,
    ),
)
"""Every reward that has a name, in the order in which messages list them."""

_BY_NAME = {rule.name: rule for rule in RULES}


def rule_names() -> tuple[str, ...]:
    """Return the names of all rules."""
    return tuple(_BY_NAME)


def find_rule(name: str) -> RewardRule | None:
    """Return the rule of this name; None where there is none."""
    return _BY_NAME.get(name)
