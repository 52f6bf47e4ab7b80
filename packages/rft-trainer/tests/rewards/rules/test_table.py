"""The table of rules: every row can be built, and its settings are there."""

from __future__ import annotations

from dataclasses import fields

import pytest

from rft_trainer.rewards.rules.table import RULES, RewardRule, RuleContext, find_rule, rule_names
from rft_trainer.settings.rewards import RewardSettings


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_settings_of_a_rule_are_those_of_rewards(rule: RewardRule) -> None:
    known = {field.name for field in fields(RewardSettings)}
    assert set(rule.settings) <= known
    assert {*rule.needed, *rule.columns} <= set(rule.settings)
    assert rule.parts


def test_a_rule_is_found_and_built_by_its_name() -> None:
    assert rule_names()[:3] == ("exact", "math", "gsm8k")
    assert len(set(rule_names())) == len(RULES)
    assert find_rule("own.py:f") is None
    rule = find_rule("format")
    assert rule is not None
    assert type(rule.build(RuleContext(options={"format_tags": "a"}))).__name__ == "FormatReward"
