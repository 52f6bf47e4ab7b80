r"""Multiple choice: the letter of an option, in brackets, behind "answer is", in a box or in answer tags.

Patterns here are fixed, and each looks at a bounded number of characters from a place on, so that no process is needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any, cast

from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.rules.final_answer import final_answer
from rft_trainer.rewards.rules.normalized_text import normalized
from rft_trainer.rewards.rules.table import RuleContext

_FIRST_LETTER = re.compile(r"\W{0,3}(?:\\text\{)?\(?([A-Za-z])(?:[).:}\s*]|$)")
_SAID = re.compile(r"(?i:answer|choice|option)\s{0,3}(?i:is|:)?\s{0,3}:?\s{0,3}\*{0,2}\(?([A-HJ-Z])(?![A-Za-z0-9'])")
"""Without I, which begins sentences: it is read in brackets and in marked answers."""
_BRACKETS = re.compile(r"\(([A-Z])\)")


class ChoiceReward:
    """Reward of 1 where the response chooses the label's option, else 0.

    The choice of a response is, the first of these that there is: what it marks (`<answer>B</answer>`, `\\boxed{B}`,
    `#### B`), the last "answer is (B)" or "Answer: B", the last letter in brackets, a letter at its beginning. With
    options their texts are read too. The label is a letter, the text of an option, or an index from 0.
    """

    def __init__(self, options_key: str = "") -> None:
        """`options_key`: column with the texts of the options; empty = letters alone."""
        self._options_key = options_key

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        return [self._score(item) for item in items]

    def close(self) -> None:
        """Do nothing: there are no processes to end."""

    def _score(self, item: RewardItem) -> Score:
        options = self._options(item)
        gold = None if options is None else letter_of_label(item.label, options)
        if options is None or gold is None:
            why = f"the column {self._options_key} holds no options" if options is None else "the label is no option"
            return Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id}: {why}")
        correctness = float(chosen_letter(item.response_text, options) == gold)
        return Score(correctness, breakdown={"correctness": correctness})

    def _options(self, item: RewardItem) -> list[str] | None:
        """Return the texts of the options; empty without a column of them, None where it holds none."""
        if not self._options_key:
            return []
        value = item.columns.get(self._options_key)
        # {"text": [...], "label": [...]} as in ARC, or {"A": ..., "B": ...}
        if isinstance(value, Mapping):
            entries = cast("Mapping[str, Any]", value)
            value = entries.get("text", list(entries.values()))
        texts = [str(text) for text in cast("list[Any]", value)] if isinstance(value, list) else []
        return texts if 0 < len(texts) <= len(ascii_uppercase) else None


def build(context: RuleContext) -> ChoiceReward:
    """Return the rule with the column of the settings."""
    return ChoiceReward(context.options["choice_options_key"])


def letter_of_label(label: Any, options: Sequence[str]) -> str | None:
    """Return the letter that a label stands for; None where it stands for no option."""
    text = str(label).strip() if isinstance(label, str | int) and not isinstance(label, bool) else ""
    text = final_answer(text) or text
    # the text of an option first: with options such as 1, 2, 3 a label of 2 is the second one
    found = None if isinstance(label, int) else _position(text, options)
    if found is None and text.isdecimal() and len(text) < 3:
        found = int(text)
    if found is None:
        letter = text.strip("()[]. ").upper()
        found = ascii_uppercase.find(letter) if len(letter) == 1 else -1
    return ascii_uppercase[found] if 0 <= found < (len(options) or len(ascii_uppercase)) else None


def chosen_letter(response: str, options: Sequence[str]) -> str | None:
    """Return the letter that a response chooses; None where it chooses none."""
    marked = final_answer(response)
    text = response if marked is None else marked
    position = _position(text, options)
    if position is not None:
        return ascii_uppercase[position]
    said = _SAID.findall(text) or _BRACKETS.findall(text)
    if said:
        return said[-1]
    first = _FIRST_LETTER.match(text.strip())
    # a response that begins with "a" or "I" begins a sentence, unless nothing else stands there
    is_word = first is not None and first[1] in "aAI" and first.end() < len(text.strip()) and first[0][-1:].isspace()
    return None if first is None or is_word else first[1].upper()


def _position(text: str, options: Sequence[str]) -> int | None:
    wanted = normalized(text)
    same = [number for number, option in enumerate(options) if normalized(option) == wanted]
    return same[0] if len(same) == 1 else None
