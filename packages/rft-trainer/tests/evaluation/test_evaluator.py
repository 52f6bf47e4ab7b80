"""An evaluation: what has no score is in no mean, and every prompt is sampled under a key of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, OneRank

PROMPTS = [Prompt(f"p:{number}", (1,), "1", "1", "p") for number in range(6)]


class RecordingEngine(BigramEngine):
    """Keeps the keys that it is given."""

    def __init__(self) -> None:
        super().__init__(BigramPolicy(6))
        self.keys: list[list[int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sample_keys: Sequence[Sequence[int]], *rest: Any, **more: Any):
        self.keys.append([key for keys in sample_keys for key in keys])
        return super().generate(prompts, sample_keys, *rest, **more)


class RankOf(OneRank):
    """One rank of several, whose rows are all that is gathered."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world_size


def scores(items: Sequence[RewardItem]) -> list[Score]:
    """The second and fourth prompt have no score; of the others the first is right."""
    found = {
        "p:0": Score(1.0),
        "p:1": Score(None, RewardStatus.FAILED, detail="it returned 'no'"),
        "p:3": Score(None, RewardStatus.TIMEOUT),
    }
    return [found.get(item.prompt_id, Score(0.25)) for item in items]


def evaluator(engine: BigramEngine, ranks: OneRank | None = None, seed: int = 0) -> Evaluator:
    return Evaluator(
        engine,
        DigitDecoder(),
        scores,
        ranks or OneRank(),
        PROMPTS,
        sampling=SamplingOptions(temperature=1.0, max_new_tokens=4, stop_token_ids=(0,)),
        seed=seed,
    )


def test_answers_without_a_score_are_neither_right_nor_wrong(caplog: pytest.LogCaptureFixture) -> None:
    result = evaluator(RecordingEngine())()
    [notice] = [record.getMessage() for record in caplog.records]
    assert notice == "2 of 6 held-out answers have no reward; first: p:1 (failed): it returned 'no'"
    assert result.correct == (True, None, False, None, False, False)
    assert (result.num_scored, result.accuracy, result.mean_reward) == (4, 0.25, (1.0 + 3 * 0.25) / 4)
    row = result.as_record()
    assert (row["eval/accuracy"], row["eval/n"], row["eval/unscored"]) == (0.25, 6, 2)


def test_an_evaluation_without_any_score_has_no_accuracy() -> None:
    result = EvaluationResult((None, None), (None, None), 0, 1.0)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.mean_reward)


def test_sampled_answers_have_a_key_a_prompt_which_follows_from_the_seed() -> None:
    engine = RecordingEngine()
    for seed in (0, 0, 1):
        evaluator(engine, seed=seed)()
    first, again, other = engine.keys
    assert len(set(first)) == len(PROMPTS), "one key for all prompts would sample them all alike"
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_prompt_keeps_its_key_on_any_number_of_ranks(rank: int) -> None:
    engine = RecordingEngine()
    evaluator(engine)()
    evaluator(engine, RankOf(rank, 2))()
    assert engine.keys[1] == engine.keys[0][rank::2]
