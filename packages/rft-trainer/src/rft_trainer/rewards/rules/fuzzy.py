"""Similarity of the answer to the label: F1 of words, or matching characters.

Matching characters take time that grows with the square of the length at least, so that `judge` runs in a process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, cast

from rft_trainer.records.scores import RewardItem
from rft_trainer.rewards.rules.final_answer import final_answer
from rft_trainer.rewards.rules.normalized_text import normalized
from rft_trainer.rewards.rules.pooled import PooledReward
from rft_trainer.rewards.rules.table import RuleContext


def build(context: RuleContext) -> PooledReward:
    """Return the rule: the similarity, in [0, 1], of a response's answer to the label that is nearest to it.

    The answer is what the response marks, or all of it; both texts are compared as SQuAD does (`normalized`). A label
    that is a list holds several right answers. Parts: `f1`, `ratio`, and `correctness`, 1 where the texts are the same.
    """
    measure = context.options["fuzzy_measure"]

    def payload(item: RewardItem) -> Mapping[str, object] | None:
        labels = _labels(item)
        return {"response": item.response_text, "labels": labels, "measure": measure} if labels else None

    return PooledReward("fuzzy", payload, context)


def judge(payload: Mapping[str, Any]) -> dict[str, float]:
    """Return value and parts for {"response": str, "labels": [str, ...], "measure": "f1" or "ratio"}."""
    response = payload["response"]
    answer = normalized(final_answer(response) or response)
    found = [_parts(answer, normalized(label)) for label in payload["labels"]]
    best = max(found, key=lambda parts: parts[payload["measure"]])
    return {"reward": best[payload["measure"]], **best}


def token_f1(answer: Sequence[str], label: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of words, 2 s / (|a| + |l|) with s shared words.

    1 where neither has a word. Source: SQuAD 1.1 (arXiv 1606.05250).
    """
    if not answer and not label:
        return 1.0
    shared = sum((Counter(answer) & Counter(label)).values())
    return 2.0 * shared / (len(answer) + len(label))


def _parts(answer: str, label: str) -> dict[str, float]:
    # without junk, which would make the ratio depend on the length: 2 m / (|a| + |l|) with m matching characters
    ratio = SequenceMatcher(None, answer, label, autojunk=False).ratio()
    return {"f1": token_f1(answer.split(), label.split()), "ratio": ratio, "correctness": float(answer == label)}


def _labels(item: RewardItem) -> list[str]:
    if isinstance(item.label, list):
        return [str(label) for label in cast("list[Any]", item.label)]
    return [] if item.label_text is None else [final_answer(item.label_text) or item.label_text]
