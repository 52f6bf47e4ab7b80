"""Single responses as samples of a queue: begun, restored, decoded and scored."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from thread_doubles import a_prompt, drawn

from rft_trainer.async_rollouts.partial_rollout import PartialSample
from rft_trainer.async_rollouts.single_turn import SingleResponses
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.testing.bigram import DigitDecoder


class OnceDecoder(DigitDecoder):
    """Counts its calls."""

    calls = 0

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        self.calls += 1
        return super().decode_batch(batch)


def test_samples_begin_with_the_whole_budget_and_need_no_answers() -> None:
    kind = SingleResponses(DigitDecoder(), lambda items: [], 7)
    assert kind.begin(a_prompt(1), [4, 5]) == [PartialSample(4, 7), PartialSample(5, 7)]
    assert kind.answers == 0
    with pytest.raises(AssertionError):
        kind.answer([PartialSample(4, 7)])


def test_samples_are_restored_with_the_keys_of_their_states() -> None:
    kind = SingleResponses(DigitDecoder(), lambda items: [], 7)
    sample = PartialSample(4, 9)
    sample.add(drawn(0, (1, 2), "interrupted", 3))
    assert kind.restore(a_prompt(1), [100], [sample.state()]) == [sample]


def test_whole_samples_are_decoded_at_once_and_scored_in_order() -> None:
    decoder, seen = OnceDecoder(), list[RewardItem]()

    def reward(items: Sequence[RewardItem]) -> list[Score]:
        seen.extend(items)
        return [Score(float(number), steps=((1, 0.5),)) for number, _ in enumerate(items)]

    kind = SingleResponses(decoder, reward, 7)
    groups = []
    for number, tokens in enumerate(([(1, 2), (3,)], [(4, 5, 6)])):
        drafts = kind.begin(a_prompt(number), range(len(tokens)))
        for draft, ids in zip(drafts, tokens, strict=True):
            draft.add(drawn(0, ids, version=2))
        groups.append((a_prompt(number), drafts))
    first, second = kind.rollouts(groups)
    texts = DigitDecoder().decode_batch([(1, 2), (3,), (4, 5, 6)])
    assert [one.response_text for one in (*first, *second)] == texts == [item.response_text for item in seen]
    assert [(one.prompt_id, one.sample_index, one.reward) for one in (*first, *second)] == [
        ("p:0", 0, 0.0),
        ("p:0", 1, 1.0),
        ("p:1", 0, 2.0),
    ]
    assert {(one.weight_version, one.status) for one in (*first, *second)} == {(2, RewardStatus.OK)}
    assert all(one.steps for one in (*first, *second)), "rewards of steps are placed at tokens"
    assert decoder.calls == 1 + len((*first, *second)), "all texts at once, and the prefixes of each"
