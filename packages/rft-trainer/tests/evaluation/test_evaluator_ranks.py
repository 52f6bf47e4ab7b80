"""An evaluation on several ranks, of sampled and of whole conversations: order, counts, and who says what."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import NumericsError
from rft_core.keyed_random import derive_key
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.records.turns import Turn, TurnCounts
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, FakeCompletion, OneRank

PROMPTS = [Prompt(f"p:{number}", (1,), "1", str(number), "p") for number in range(5)]
SAMPLING = SamplingOptions(temperature=0.0, max_new_tokens=4)


class NumberedEngine(BigramEngine):
    """Each prompt gets one more token than the one before it; the last is cut off."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__(BigramPolicy(6))
        self.broken = broken

    def generate(self, prompts: Any, sample_keys: Any, options: SamplingOptions, **_: Any) -> Any:
        assert options == SAMPLING
        numbers = {derive_key(0, "evaluation", index): index for index in range(len(PROMPTS))}
        return [[self._of(numbers[key]) for key in keys] for keys in sample_keys]

    def _of(self, number: int) -> FakeCompletion:
        row = (math.nan if self.broken else -1.0,) * (1 + number)
        reason = "length" if number == 4 else "stop"
        return FakeCompletion((number,) * (1 + number), row, (0.0,) * (1 + number), reason, 0)


def by_number(items: Sequence[RewardItem]) -> list[Score]:
    """The reward is the number of the prompt, in quarters; the third has none."""
    return [
        Score(None, RewardStatus.FAILED, detail="broken") if item.label == "2" else Score(int(item.label or 0) / 4)
        for item in items
    ]


class RankOf(OneRank):
    """One rank of several, which gets what all have sent."""

    def __init__(self, rank: int, world_size: int, sent: list[bytes]) -> None:
        self.rank, self.world_size, self.sent = rank, world_size, sent

    def gather_bytes(self, data: bytes) -> list[bytes]:
        assert data == self.sent[self.rank]
        return self.sent


def evaluator(ranks: OneRank, engine: BigramEngine | None = None, **more: Any) -> Evaluator:
    return Evaluator(
        engine or NumberedEngine(),
        DigitDecoder(),
        by_number,
        ranks,
        more.pop("prompts", PROMPTS),
        sampling=SAMPLING,
        **more,
    )


EXPECTED = EvaluationResult(
    rewards=(0.0, 0.25, None, 0.75, 1.0),
    correct=(False, False, None, False, True),
    num_truncated=1,
    mean_tokens=3.0,
    why_unscored="p:2 (failed): broken",
    num_unscored=1,
)


class SentError(Exception):
    """Ends an evaluation where it sends its rows."""


class Sender(RankOf):
    """A rank whose evaluation ends where it sends its rows."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent.append(data)
        raise SentError


def name_of(prompt: Prompt, rollout: Rollout) -> dict[str, str]:
    return {"prompt_id": rollout.prompt_id}


def rows_of_all(world_size: int) -> list[bytes]:
    """What every rank of several sends: the rows of its share."""
    sent: list[bytes] = []
    for rank in range(world_size if world_size > 1 else 0):
        with pytest.raises(SentError):
            evaluator(Sender(rank, world_size, sent)).with_rows(name_of)
    return sent


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_are_in_the_order_of_the_prompts_on_any_number_of_ranks(
    world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    sent = rows_of_all(world_size)
    for rank in range(world_size):
        result, rows = evaluator(RankOf(rank, world_size, sent)).with_rows(name_of)
        assert result == EXPECTED
        assert [row["prompt_id"] for (row,) in rows] == [f"p:{number}" for number in range(5)]
        assert [row["correct"] for (row,) in rows] == list(EXPECTED.correct)
    assert len(caplog.records) == 1, "the first rank says so, for all"


def test_an_evaluation_in_which_all_are_scored_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    result = evaluator(OneRank(), prompts=PROMPTS[:2])()
    assert result.why_unscored == ""
    assert result.as_record() == {
        "eval/accuracy": 0.0,
        "eval/reward": 0.125,
        "eval/n": 2,
        "eval/unscored": 0,
        "eval/truncated": 0,
        "eval/mean_tokens": 1.5,
    }
    assert not [record for record in caplog.records if record.name.startswith("rft_trainer")]
    assert evaluator(OneRank()).prompts is PROMPTS


def test_without_prompts_there_is_no_mean() -> None:
    result = evaluator(OneRank(), prompts=[])()
    assert (result.rewards, result.num_truncated) == ((), 0)
    assert math.isnan(result.mean_tokens)


def test_samples_that_are_not_finite_say_what_they_were_for() -> None:
    with pytest.raises(NumericsError) as caught:
        evaluator(OneRank(), NumberedEngine(broken=True))()
    assert "evaluation" in caught.value.problem.where
    assert caught.value.problem.do == "go back to an earlier checkpoint of the run"


class Talks:
    """Conversations that an environment has scored."""

    def sample(
        self, prompts: Sequence[Prompt], keys: Sequence[Sequence[int]], sampling: SamplingOptions
    ) -> list[list[Rollout]]:
        assert sampling == SAMPLING
        assert list(keys) == [[derive_key(0, "evaluation", index)] for index in range(len(prompts))]
        turns = (Turn(True, 1, "call", num_calls=1), Turn(False, 2, "o"), Turn(True, 1, "a", 1.0, num_malformed=1))
        made = Rollout("", 0, (1, 2, 2, 3), (-1.0,) * 4, (0.0,) * 4, "stop", 0, "", 1.0, RewardStatus.OK, turns=turns)
        return [[replace(made, prompt_id=prompt.prompt_id)] for prompt in prompts]


def test_conversations_are_scored_by_their_environment_and_their_turns_are_counted() -> None:
    talks: Any = Talks()
    result, rows = evaluator(OneRank(), conversations=talks).with_rows(name_of)
    assert result.rewards == (1.0,) * 5
    assert result.turns == TurnCounts(conversations=5, turns=10, calling=5, calls=5, malformed=5)
    assert result.mean_tokens == 2.0, "of what was sampled"
    record = result.as_record()
    assert (record["eval/turns_mean"], record["eval/call_share"], record["eval/well_formed_share"]) == (2.0, 0.5, 0.5)
    assert [row["prompt_id"] for (row,) in rows] == [prompt.prompt_id for prompt in PROMPTS]
