"""A language model as a reward: it is asked about every response, and its answer is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rft_algos.keyed_random import derive_key
from rft_trainer.rewards.judge_template import JudgeTemplate, Verdict
from rft_trainer.rewards.records import RewardItem, RewardStatus, Score

NAME = "judge"


class Judge(Protocol):
    """Answers questions; greedy, so that the same question has the same answer."""

    def ask(self, questions: Sequence[str], keys: Sequence[int]) -> Sequence[str | Score]:
        """The answer to each question, or a score without a value that says why there is none.

        `keys` seed whatever is drawn after all, one a question.
        """
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


class JudgeReward:
    """Asks `judge` about every response; its part is called "judge".

    An answer without a score has the status no_verdict: the judge's failure is not the response's.
    """

    def __init__(self, judge: Judge, template: JudgeTemplate, verdict: Verdict, *, seed: int) -> None:
        self._judge = judge
        self._template = template
        self._verdict = verdict
        self._seed = seed

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        asked = [place for place, item in enumerate(items) if item.label is not None or not self._template.needs_label]
        questions = [self._question(items[place]) for place in asked]
        keys = [derive_key(self._seed, f"judge:{question}") for question in questions]
        answers = dict(zip(asked, self._judge.ask(questions, keys), strict=True)) if asked else {}
        return [
            self._score(answers[place])
            if place in answers
            else Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id} has no label for the judge")
            for place, item in enumerate(items)
        ]

    def close(self) -> None:
        """Of the judge."""
        self._judge.close()

    def _question(self, item: RewardItem) -> str:
        return self._template.fill(prompt=asked_text(item), response=item.response_text, label=item.label)

    def _score(self, answer: str | Score) -> Score:
        if isinstance(answer, Score):
            return answer
        found = self._verdict.read(answer)
        if isinstance(found, str):
            return Score(None, RewardStatus.NO_VERDICT, detail=found)
        return Score(found, breakdown={NAME: found})


def asked_text(item: RewardItem) -> str:
    """The prompt for another model: of a conversation its turns as text, else the prompt as it is."""
    turns = [(str(message["role"]), message["content"]) for message in item.messages]
    if not turns:
        return item.prompt_text
    if len(turns) == 1:
        return str(turns[0][1])
    return "\n".join(f"{role}: {content}" for role, content in turns)
