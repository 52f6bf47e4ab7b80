"""A pattern that the response has to match. It is the user's, and may never end: it runs in a process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rft_core.errors import OptionsError
from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.rules.pooled import PooledReward
from rft_trainer.rewards.rules.table import RuleContext


def build(context: RuleContext) -> PooledReward:
    """Return the rule: 1 where the pattern is found in the response (or is all of it), else 0.

    Raises:
        OptionsError: the pattern cannot be read.
    """
    pattern = context.options["response_pattern"]
    try:
        re.compile(pattern)
    except (re.error, OverflowError) as error:
        position = error.pos if isinstance(error, re.error) else None
        raise OptionsError(
            code="reward.pattern",
            what=f"response_pattern = {pattern!r}: {error}",
            where="--response_pattern",
            why="it is a regular expression of Python's module re",
            state="nothing was started",
            do="write smaller numbers between the braces of the pattern"
            if position is None
            else f"correct the pattern at character {position}",
        ) from error
    fixed = {"pattern": pattern, "whole": context.options["response_pattern_match"] == "full"}

    def payload(item: RewardItem) -> Mapping[str, object]:
        return {"response": item.response_text, **fixed}

    return PooledReward("regex", payload, context)


def judge(payload: Mapping[str, Any]) -> dict[str, float]:
    """Return the value for {"response": str, "pattern": str, "whole": bool}."""
    find = re.fullmatch if payload["whole"] else re.search
    match = float(find(payload["pattern"], payload["response"]) is not None)
    return {"reward": match, "match": match}
