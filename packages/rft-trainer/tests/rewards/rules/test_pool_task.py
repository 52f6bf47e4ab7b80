"""Judgements of rules by their names, as a scoring process loads them."""

from __future__ import annotations

import pytest

from rft_trainer.rewards.rules import fuzzy, json_schema, pool_task, regex
from rft_trainer.rewards.rules.table import RULES


def test_the_judgement_of_a_rule_is_loaded_by_its_name() -> None:
    assert pool_task.load("", "regex") is regex.judge
    assert pool_task.load("", "fuzzy") is fuzzy.judge
    assert pool_task.load("", "json_schema") is json_schema.judge
    with pytest.raises(ImportError):
        pool_task.load("", "absent")


def test_every_rule_that_runs_in_processes_has_one() -> None:
    named = [rule.builder.rpartition(":")[0] for rule in RULES if rule.runs == "processes"]
    assert {"rft_trainer.rewards.rules.regex", "rft_trainer.rewards.rules.json_schema"} <= set(named)
