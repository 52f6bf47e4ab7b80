"""Language model as a judge: it is asked about every response, and the score is parsed from its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rft_core.keyed_random import derive_key
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rewards.images import Images, as_text, digests_of, files_of, with_places, without_markers
from rft_trainer.rewards.judge_template import JudgeTemplate, Verdict

NAME = "judge"


class Judge(Protocol):
    """Judge model that answers questions; greedy, so that the same question has the same answer."""

    def ask(
        self, questions: Sequence[str], keys: Sequence[int], images: Sequence[Images] | None = None
    ) -> Sequence[str | Score]:
        """Answer each question, or return a score without a value whose detail is the reason.

        `keys` seed whatever is drawn after all, one a question. `images` are the encoded images of each question,
        which has a marker (`rft_trainer.data.images.MARKER`) in the place of each; None: no question has any, and
        what looks like a marker is text.
        """
        ...

    def close(self) -> None:
        """Release the model or the connection."""
        ...


class JudgeReward:
    """Reward that asks `judge` about every response; its breakdown entry is "judge".

    The images of a prompt stand where the question shows the prompt, in front where it does not. A response and a
    label take none, whatever they spell. An answer without a score has the status no_verdict: the judge's failure is
    not the response's.
    """

    def __init__(self, judge: Judge, template: JudgeTemplate, verdict: Verdict, *, seed: int) -> None:
        self._judge = judge
        self._template = template
        self._verdict = verdict
        self._seed = seed

    def __call__(self, items: Sequence[RewardItem]) -> list[Score]:
        # without a label there is nothing to show where the template needs it: the judge would guess
        asked = [index for index, item in enumerate(items) if item.label is not None or not self._template.needs_label]
        answers = dict(zip(asked, self._answers([items[index] for index in asked]), strict=True)) if asked else {}
        return [
            self._score(answers[index])
            if index in answers
            else Score(None, RewardStatus.UNPARSABLE, detail=f"{item.prompt_id} has no label for the judge")
            for index, item in enumerate(items)
        ]

    def close(self) -> None:
        """Close the judge behind the reward."""
        self._judge.close()

    def _answers(self, items: Sequence[RewardItem]) -> Sequence[str | Score]:
        if all(item.media is None for item in items):
            questions = [self._question(item) for item in items]
            return self._judge.ask(questions, [self._key(question) for question in questions])
        images = files_of(items)
        questions = [self._question_of(item, len(seen)) for item, seen in zip(items, images, strict=True)]
        keys = [self._key(question, seen) for question, seen in zip(questions, images, strict=True)]
        return self._judge.ask(questions, keys, images)

    def _key(self, question: str, images: Images = ()) -> int:
        # by the question itself: the same question has the same answer in every step and on every rank
        return derive_key(self._seed, f"judge:{question}" + (f":{digests_of(images)}" if images else ""))

    def _question(self, item: RewardItem) -> str:
        return self._template.fill(prompt=asked_text(item), response=item.response_text, label=item.label_text)

    def _question_of(self, item: RewardItem, num_images: int) -> str:
        """Build the question beside images: as many markers as the prompt has images, all of them its own."""
        # only the prompt has images: a marker that a response spells would take one of them away
        label = None if item.label_text is None else without_markers(item.label_text)
        text = self._template.fill(prompt=asked_text(item), response=without_markers(item.response_text), label=label)
        return with_places(text, num_images)

    def _score(self, answer: str | Score) -> Score:
        if isinstance(answer, Score):
            return answer
        score = self._verdict.read(answer)
        if isinstance(score, str):
            return Score(None, RewardStatus.NO_VERDICT, detail=score)
        return Score(score, breakdown={NAME: score})


def asked_text(item: RewardItem) -> str:
    """Return the prompt for another model: the turns of a conversation as text, else the prompt as it is.

    In a conversation an image is a marker in its place.
    """
    turns: list[tuple[str, Any]] = [(str(message["role"]), message["content"]) for message in item.messages]
    if not turns:
        return item.prompt_text
    if len(turns) == 1:
        return as_text(turns[0][1])
    return "\n".join(f"{role}: {as_text(content)}" for role, content in turns)
