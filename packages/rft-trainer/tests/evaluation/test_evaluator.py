"""An evaluation: what has no score is in no mean, and every prompt is sampled under a key of its own."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.statistics import wilson_interval
from rft_core.errors import NumericsError, OptionsError, OutageError
from rft_trainer.evaluation.evaluator import EvaluationResult, Evaluator
from rft_trainer.records.rollouts import Prompt, Rollout
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


class Metrics:
    """Notes what it is given."""

    def __call__(self, responses: Any, labels: Any, rewards: Any) -> dict[str, float]:
        self.given = responses, labels, rewards
        return {"characters": float(sum(map(len, responses)))}


def readable(prompt: Prompt, rollout: Rollout) -> dict[str, Any]:
    return {"prompt_id": prompt.prompt_id, "response": rollout.response_text}


def evaluator(engine: BigramEngine, ranks: OneRank | None = None, seed: int = 0, metrics: Any = None) -> Evaluator:
    return Evaluator(
        engine,
        DigitDecoder(),
        scores,
        ranks or OneRank(),
        PROMPTS,
        sampling=SamplingOptions(temperature=1.0, max_new_tokens=4, stop_token_ids=(0,)),
        seed=seed,
        metrics=metrics,
    )


def test_metrics_of_tasks_are_of_all_answers_in_the_order_of_the_prompts() -> None:
    metrics = Metrics()
    result, rows = evaluator(RecordingEngine(), metrics=metrics).with_rows(readable)
    texts = [row["response"] for (row,) in rows]
    assert metrics.given == (texts, [prompt.label for prompt in PROMPTS], list(result.rewards))
    assert result.as_record()["eval/characters"] == len("".join(texts)) > 0
    assert "eval/characters" not in evaluator(RecordingEngine())().as_record()


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


class UndefinedEngine(RecordingEngine):
    """Gives log-probabilities that are not finite, as a model with a NaN in its weights does."""

    def generate(self, *arguments: Any, **options: Any) -> Any:
        completions = super().generate(*arguments, **options)
        return [[replace(one, logprobs=(math.nan,) * len(one.logprobs)) for one in samples] for samples in completions]


class BesideBadSamples(RankOf):
    """A rank of two; the other one has samples that are not finite, and `theirs` is what it sends."""

    theirs = b""

    def max(self, tensor: Tensor) -> Tensor:
        return torch.ones_like(tensor)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.theirs]


class LastSent(RankOf):
    """A rank that keeps what it sends."""

    sent = b""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self.sent = data
        return super().gather_bytes(data)


def test_a_share_of_one_rank_that_is_not_finite_is_refused_on_all() -> None:
    other, here = LastSent(1, 2), BesideBadSamples(0, 2)
    with pytest.raises(NumericsError) as theirs:
        evaluator(UndefinedEngine(), other)()
    here.theirs = other.sent
    with pytest.raises(NumericsError) as ours:
        evaluator(RecordingEngine(), here)()
    assert ours.value.problem == theirs.value.problem
    assert ours.value.problem.code == "numerics.sampled_logprobs"
    assert "p:1#0" in ours.value.problem.what


def test_a_reward_server_that_is_away_on_one_rank_is_away_on_all() -> None:
    sent: list[bytes] = []

    class Ranks(RankOf):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            sent.append(data)
            return [sent[0], data]

    def away(items: Sequence[RewardItem]) -> list[Score]:
        raise OutageError(code="reward.outage", what="it is away", where="--remote_rm_url", why="", do="")

    found: list[str] = []
    for rank, reward in enumerate((away, scores)):
        asks = Evaluator(
            RecordingEngine(),
            DigitDecoder(),
            reward,
            Ranks(rank, 2),
            PROMPTS,
            sampling=SamplingOptions(temperature=1.0, max_new_tokens=1),
        )
        with pytest.raises(OutageError) as caught:
            asks()
        found.append(str(caught.value))
    assert found[0] == found[1]
    assert "it is away" in found[1]


def of_sample(items: Sequence[RewardItem]) -> list[Score]:
    """Of four samples the first prompt has one that is right, the second one without a score, the others none right."""
    seen: dict[str, int] = {}
    found: list[Score] = []
    for item in items:
        number = seen[item.prompt_id] = seen.get(item.prompt_id, -1) + 1
        if item.prompt_id == "p:1" and number == 3:
            found.append(Score(None, RewardStatus.FAILED, detail="broken"))
        else:
            found.append(Score(1.0 if (item.prompt_id, number) == ("p:0", 2) else 0.0))
    return found


def test_several_samples_give_the_mean_of_each_prompt_and_the_unbiased_best_of_k() -> None:
    engine, metrics = RecordingEngine(), Metrics()
    single = evaluator(engine)
    several = replace(single, num_samples=4, reward=of_sample, metrics=metrics)
    result, rows = several.with_rows(readable)
    assert [len(group) for group in rows] == [4] * 6
    assert [row["correct"] for row in rows[0]] == [False, False, True, False]
    single()
    drawn, alone = engine.keys
    assert len(set(drawn)) == 24
    assert drawn[::4] == alone, "the first sample is that of an evaluation with one"
    assert result.rewards == result.correct == (0.25, 0.0, 0.0, 0.0, 0.0, 0.0)
    record = result.as_record()
    assert (record["eval/n"], record["eval/samples"], record["eval/unscored"]) == (6, 4, 1)
    assert record["eval/accuracy"] == pytest.approx(0.25 / 6)
    # one of four right: two of them hold it in half of the draws; the prompt with three scores says nothing of four
    assert (record["eval/pass@2"], record["eval/pass@4"]) == pytest.approx((0.5 / 6, 1 / 5))
    assert record["eval/pass@1"] == record["eval/accuracy"]
    assert "eval/best@1" not in record, "the mean reward"
    assert (record["eval/best@2"], record["eval/best@4"]) == pytest.approx((0.5 / 6, 1 / 5))
    assert [len(given) for given in metrics.given] == [24] * 3
    assert "eval/samples" not in single().as_record()


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_samples_are_the_same_on_any_number_of_ranks(world_size: int) -> None:
    whole = replace(evaluator(RecordingEngine()), num_samples=3)()
    parts: list[bytes] = []
    for rank in range(world_size):
        sends = LastSent(rank, world_size)
        with contextlib.suppress(IndexError):  # a share of one rank is not that of another
            replace(evaluator(RecordingEngine(), sends), num_samples=3)()
        parts.append(sends.sent)

    class All(RankOf):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            return parts

    assert replace(evaluator(RecordingEngine(), All(0, world_size)), num_samples=3)() == whole


def test_several_samples_vote_by_their_answers_and_only_the_ks_that_are_asked_for_are_there() -> None:
    several = replace(evaluator(RecordingEngine()), num_samples=4, reward=of_sample, ks=(3,))
    assert {name for name in several().at_k} == {"pass@3", "maj@3", "best@3"}
    # all say the same: the answer is right as often as the samples that say it
    alike = replace(several, answer_of=lambda text: "one")()
    assert alike.by_prompt["maj@3"][0] == pytest.approx(0.25)
    # nobody says anything
    assert replace(several, answer_of=lambda text: None)().at_k["maj@3"] == 0.0


def test_a_part_of_the_reward_picks_one_of_several() -> None:
    def parts(items: Sequence[RewardItem]) -> list[Score]:
        first = {items[0].prompt_id: True}
        found: list[Score] = []
        for number, item in enumerate(items):
            right = float(first.get(item.prompt_id, False) and number == 0)
            found.append(Score(right, breakdown={"correctness": right, "model": -right, "judge": 7.0}))
        return found

    several = replace(evaluator(RecordingEngine()), num_samples=2, reward=parts)
    names = ("correctness", "model", "judge", "reward")
    picked = {pick: replace(several, pick=pick)().by_prompt["picked@2"][0] for pick in names}
    assert picked == {"correctness": 1.0, "model": 0.0, "judge": 0.5, "reward": 1.0}
    assert "picked@2" not in several().by_prompt
    with pytest.raises(
        OptionsError, match="eval_pick = other; the parts of the reward are correctness, judge, model, reward"
    ):
        replace(several, pick="other")()


def test_intervals_are_over_the_prompts() -> None:
    found = replace(evaluator(RecordingEngine()), num_samples=4, reward=of_sample)().intervals()
    assert {"accuracy", "reward", "pass@4", "maj@2", "best@2"} <= {*found}
    assert (found["accuracy"].num, found["pass@4"].num) == (6, 5), "one prompt has three scores"
    assert found["pass@4"] == wilson_interval(1, 5)
    single = evaluator(RecordingEngine())().intervals()
    assert single["accuracy"] == wilson_interval(1, 4)


class Kept:
    """A journal that keeps its rows here."""

    def __init__(self, prompts_at_once: int) -> None:
        self.prompts_at_once, self.rows = prompts_at_once, dict[int, Any]()
        self.turns: list[list[int]] = []

    def done(self) -> dict[int, Any]:
        return dict(self.rows)

    def keep(self, rows: Any) -> None:
        self.turns.append(list(rows))
        self.rows |= json.loads(json.dumps({str(index): group for index, group in rows.items()}))
        self.rows = {int(index): group for index, group in self.rows.items()}


def test_what_a_journal_has_is_not_answered_again_and_changes_nothing() -> None:
    whole = evaluator(RecordingEngine()).with_rows(readable)
    kept = Kept(2)
    assert evaluator(RecordingEngine()).with_rows(readable, kept) == whole
    assert kept.turns == [[0, 1], [2, 3], [4, 5]]
    # a kill after the first turn and a half
    kept.rows = {index: kept.rows[index] for index in (0, 1, 3)}
    engine = RecordingEngine()
    again = evaluator(engine)
    assert again.with_rows(readable, kept) == whole
    assert engine.keys == [[key for (key,) in (again.keys[2], again.keys[4])], [again.keys[5][0]]]


def test_several_sets_have_metrics_of_their_own_beside_those_of_all() -> None:
    sets = [replace(prompt, source="a" if number < 2 else "b") for number, prompt in enumerate(PROMPTS)]
    result = replace(evaluator(RecordingEngine()), prompts=sets)()
    assert list(result.by_source()) == ["a", "b"]
    record = result.as_record()
    assert (record["eval/a/accuracy"], record["eval/a/n"], record["eval/a/reward"]) == (1.0, 2, 1.0)
    assert (record["eval/b/accuracy"], record["eval/b/n"], record["eval/b/reward"]) == (0.0, 4, 0.25)
    assert record["eval/n"] == 6
    several = replace(evaluator(RecordingEngine()), prompts=sets, num_samples=4, reward=of_sample)().as_record()
    assert (several["eval/a/pass@4"], several["eval/b/pass@4"]) == (1.0, 0.0)
    single = evaluator(RecordingEngine())()
    assert single.by_source() == {}
    assert not [name for name in single.as_record() if name.count("/") > 1]
