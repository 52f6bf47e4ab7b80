"""Input and output of a reward function: `RewardItem` and `Score`.

A score is a number, or the reason why there is none. What went wrong while scoring is never a
0: that would teach the model that the response was bad.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class RewardStatus(StrEnum):
    """Status of a response's reward: scored, or the reason why not."""

    OK = "ok"
    UNSCORED = "unscored"
    """No reward function has looked at it yet."""
    UNPARSABLE = "unparsable"
    """The label cannot be read, so there is nothing to compare with."""
    FAILED = "failed"
    """The reward function raised, or did not return a finite number."""
    TIMEOUT = "timeout"
    """Scoring took longer than allowed and was killed."""
    CRASHED = "crashed"
    """The scoring process died."""
    OUTAGE = "outage"
    """The server was away for longer than the run waits."""
    NO_VERDICT = "no_verdict"
    """A judge answered, and its answer holds no score."""


def remedy_of(statuses: Iterable[str], command: str, *, is_resumed: bool) -> str:
    """Return what mends most of the responses that have no reward, by their statuses, and the command that goes on.

    Args:
        statuses: of these responses, at least one.
        command: what a person types after the repair.
        is_resumed: whether it continues a run, which compares the reward with the one that it began with.
    """
    [(most, _)] = Counter(statuses).most_common(1)
    if most == RewardStatus.NO_VERDICT:
        accepted = " (of a changed file with --accept_changes judge_template)" if is_resumed else ""
        return (
            f"{command} with a question and a pattern whose score the judge's answers hold: --judge_template, "
            f"--judge_pattern, --judge_range, --judge_max_new_tokens{accepted}; or a judge that was trained on such "
            "responses: --judge_pretrain"
        )
    accepted = " (where its file changed, --accept_changes reward)" if is_resumed else ""
    return f"repair the reward, then {command}{accepted}"


class FailureKind(StrEnum):
    """Kind of a failure of a reward function, finer than the status of the response."""

    EXCEPTION = "exception"
    """It raised."""
    WRONG_LENGTH = "wrong_length"
    """It returned a list with another number of values than responses."""
    NONE = "none"
    """It returned None."""
    NOT_FINITE = "nan"
    """It returned NaN or an infinity."""
    NOT_A_NUMBER = "not_a_number"
    """It returned something that is no number, such as a text."""
    EXIT = "exit"
    """It called sys.exit."""


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to be scored.

    Example::

        RewardItem(prompt_id="train.jsonl:17", prompt_text="47+25=", response_text="72", label="72",
                   finish_reason="stop", num_tokens=3)
    """

    prompt_id: str
    prompt_text: str
    response_text: str
    label: Any
    """The right answer, or None where the data has none. A text; any JSON value where code of the user scores."""
    finish_reason: str
    """"stop" or "length"."""
    num_tokens: int
    """Tokens of the response."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The prompt as a conversation (role and content each), for models with a chat template of their own; empty where
    the prompt is plain text."""
    media: Any = None
    """The images of the prompt, opaque here (`rft_trainer.rewards.images` reads them); None without any."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """All columns of the data row, where code of the user scores."""

    @property
    def label_text(self) -> str | None:
        """The label as a text, for rewards that compare or show texts; what is neither text nor number is JSON."""
        if self.label is None or isinstance(self.label, str):
            return self.label
        return json.dumps(self.label, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Score:
    """A reward with its parts, or the reason why there is none.

    Example::

        Score(0.9, breakdown={"correctness": 1.0, "format": 0.0})
        Score(None, RewardStatus.TIMEOUT, detail="no answer within 10 s")
    """

    value: float | None
    """None unless `status` is ok."""
    status: RewardStatus = RewardStatus.OK
    breakdown: Mapping[str, float] = field(default_factory=dict[str, float])
    """Parts of the value, each before its weight."""
    steps: tuple[tuple[int, float], ...] = ()
    """(characters of the response up to the end of a step, its reward), for a reward that judges steps."""
    detail: str = ""
    """Readable reason of a missing score; empty where the status is ok."""
    failure: str = ""
    """Kind of the failure, where it is finer than the status: one of `FailureKind`."""

    def __post_init__(self) -> None:
        if (self.value is not None) != (self.status is RewardStatus.OK):
            raise ValueError(f"score: value {self.value} with status {self.status}; a value goes with ok alone")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"score: value {self.value} is not finite")


class Reward(Protocol):
    """A reward function; the same items give the same scores (deadlines aside)."""

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score the items, in order. The samples of a prompt are adjacent."""
        ...

    def close(self) -> None:
        """End the reward's worker processes, if it has any."""
        ...
