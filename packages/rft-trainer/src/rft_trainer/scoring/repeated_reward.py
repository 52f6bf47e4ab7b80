"""Reward whose first responses are scored again: the same response has one score, wherever and whenever it is scored.

A reward that answers otherwise the second time gives advantages that are noise; one that mixes up its responses gives
every response the score of another. Both train without an error, so both are looked for before the first update. One
that changes while a run goes on moves the goal of the training, so the first responses are scored now and then.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from rft_trainer.records.scores import Reward, RewardItem, Score

_LOG = logging.getLogger(__name__)
_PROMPTS = 2
"""Prompts of the first call whose responses are scored again."""
_MOST = 16
"""Responses that are scored again at most."""
_EVERY = 100
"""Calls after which the first responses are scored once more: at most a hundredth of the work of calls as large."""
_SHOWN = 60
EXACT = 1e-9
"""Of a function, whose arithmetic is the same each time."""
OF_A_SERVER = 1e-2
"""Of a model behind a URL, whose batches round otherwise each time."""
DECLARE = "--reward_random where it is meant to be random; else let it draw nothing and keep nothing from call to call"


class RepeatedReward:
    """Reward that scores the first responses of a run twice, then every `_EVERY` calls; it warns of a difference."""

    def __init__(self, name: str, reward: Reward, *, tolerance: float = EXACT) -> None:
        """Store the reward, the name by which a warning calls it, and the largest difference that is none."""
        self._name = name
        self._reward = reward
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._most_seen = 0
        """Responses to one prompt in the calls that were looked at."""
        self._calls = 0
        self._first: tuple[list[RewardItem], list[Score]] | None = None
        """Responses whose scores repeated themselves, with these scores."""

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the items; some of the first call a second time, and of the first one with several to a prompt."""
        scores = self._reward(items)
        chosen = _first_prompts(items)
        # an evaluation, which comes first, mostly has one response a prompt: their order is not seen there
        most = min(max(Counter(item.prompt_id for item in chosen).values(), default=0), 2)
        with self._lock:
            is_new, self._most_seen = most > self._most_seen, max(most, self._most_seen)
            self._calls += 1
            is_due = self._calls % _EVERY == 0
        if is_new:
            found = second_look(self._reward, chosen, scores, tolerance=self._tolerance)
            self._first = None if found else (chosen, scores[: len(chosen)])
            self._warn(found)
        elif is_due and self._first is not None:
            self._warn(self._drift(*self._first))
        return scores

    def _warn(self, found: str) -> None:
        """Warn of what was found, once: nothing is looked at after it."""
        if found:
            _LOG.warning("the reward %s %s\n        do  %s", self._name, found, DECLARE)
            self._most_seen, self._first = 2, None

    def _drift(self, items: list[RewardItem], first: list[Score]) -> str:
        """Return how the scores of the first responses differ from what they were, or ""."""
        now = self._reward(items)
        differing = [n for n in range(len(items)) if _differ(first[n], now[n], self._tolerance)]
        if not differing:
            return ""
        number = differing[0]
        return (
            f"has changed since the start: of {len(items)} responses {len(differing)} get another score than they had; "
            f"it gave {_two_values(items[number], first[number], now[number])}"
        )

    def close(self) -> None:
        """Close the reward that is looked at."""
        self._reward.close()


def second_look(
    score: Callable[[Sequence[RewardItem]], Sequence[Score]],
    items: Sequence[RewardItem],
    scores: Sequence[Score],
    *,
    tolerance: float = EXACT,
) -> str:
    """Score the items again in the reverse order; return what differs, with both values, or "".

    Args:
        score: the reward.
        items: responses, those of a prompt side by side.
        scores: what it gave for these items, and for more behind them.
        tolerance: largest difference that is none, as a share of a score above 1.
    """
    if all(scores[n].value is None for n in range(len(items))):
        return ""  # another call would only fail again, and may take as long as it is allowed to
    again = list(reversed(score(list(reversed(items)))))
    differing = [n for n in range(len(items)) if _differ(scores[n], again[n], tolerance)]
    if not differing:
        return ""
    number = differing[0]
    values = _two_values(items[number], scores[number], again[number])
    once_more = score(items)
    if any(_differ(scores[n], once_more[n], tolerance) for n in range(len(items))):
        return (
            f"does not repeat itself: of {len(items)} responses that it scored twice {len(differing)} got another "
            f"score; it gave {values}"
        )
    return (
        f"depends on the order of the responses: of {len(items)} that came in the reverse order {len(differing)} got "
        f"another score; it gave {values}; one score a response is wanted, in their order"
    )


def order_and_spread(items: Sequence[RewardItem], scores: Sequence[Score]) -> str:
    """Return what is remarkable in the scores of a label as a response and of a made-up one, or "".

    Args:
        items: the right response first, then the made-up one; fewer where there is no label.
        scores: of these.
    """
    if len(items) < 2 or scores[0].value is None or scores[1].value is None:
        return ""
    right, other = scores[0].value, scores[1].value
    if right == other:
        return f"the label as a response and a made-up response both get {right:g}"
    if right < other:
        return f"the label as a response gets {right:g}, less than the {other:g} of a made-up response"
    return ""


def _first_prompts(items: Sequence[RewardItem]) -> list[RewardItem]:
    """Return the responses to the first prompts, as they are called together."""
    groups = [list(group) for _, group in groupby(items, key=lambda item: item.prompt_id)]
    return [item for group in groups[:_PROMPTS] for item in group][:_MOST]


def _differ(one: Score, other: Score, tolerance: float) -> bool:
    """Return whether two scores are two numbers; a missing one is counted elsewhere."""
    if one.value is None or other.value is None:
        return False
    return abs(one.value - other.value) > tolerance * max(1.0, abs(one.value))


def _two_values(item: RewardItem, first: Score, then: Score) -> str:
    shown = item.response_text
    shown = repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}...")
    return f"{_value(first)} and then {_value(then)} to the response {shown} of {item.prompt_id}"


def _value(score: Score) -> str:
    return f"{score.value:.6g}"
