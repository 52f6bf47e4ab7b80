"""A collector: what it asks of its engine, keys by place, rewards and steps of responses, shares of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.keyed_random import derive_key
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt, Rollout
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.collector import (
    RolloutCollector,
    place_steps,
    sample_keys,
    sample_responses,
    score_rollouts,
)
from rft_trainer.rollouts.group_exchange import encode_groups
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, OneRank

PROMPTS = [Prompt(f"p:{number}", (1 + number,), "x", None, "p") for number in range(3)]
ENTRIES = [LedgerEntry(0, number, number) for number in range(3)]


class RecordingEngine(BigramEngine):
    """Keeps how each call is to be sampled, by name."""

    def __init__(self) -> None:
        super().__init__(BigramPolicy(6))
        self.calls: list[dict[str, Any]] = []

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sample_keys: Sequence[Sequence[int]],
        options: SamplingOptions,
        **rest: Any,
    ):
        asked = {"prompts": [tuple(prompt) for prompt in prompts], "sample_keys": [list(keys) for keys in sample_keys]}
        self.calls.append({**asked, **rest, **asdict(options)})
        return super().generate(prompts, sample_keys, options, **rest)


def scores(items: Sequence[RewardItem]) -> list[Score]:
    return [Score(1.0) for _ in items]


def test_the_greedy_baseline_is_greedy_from_its_first_token_on() -> None:
    engine = RecordingEngine()
    collector = RolloutCollector(
        engine,
        DigitDecoder(),
        scores,
        OneRank(),
        sampling=SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(0,), first_token_temperature=8.0),
        group_size=4,
        seed=3,
        greedy_baseline=True,
    )
    groups = collector.collect(ENTRIES, PROMPTS, PhaseTimer())
    sampled, greedy = engine.calls
    assert (sampled["temperature"], sampled["first_token_temperature"]) == (1.0, 8.0)
    assert (greedy["temperature"], greedy["first_token_temperature"]) == (0.0, None)
    assert [len(keys) for keys in greedy["sample_keys"]] == [1, 1, 1]
    assert [group.baseline_reward for group in groups] == [1.0] * 3
    assert [len(group.rollouts) for group in groups] == [4] * 3


SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(0,))


class Phases:
    """Keeps the phases that a timer tells of."""

    def __init__(self) -> None:
        self.entered: list[str | None] = []

    def enter_phase(self, name: str | None) -> None:
        self.entered.append(name)

    def end_step(self) -> None: ...


class TwoRanks(OneRank):
    """One of two ranks; `other` is what the other one sends."""

    world_size = 2

    def __init__(self, rank: int, other: bytes = b"") -> None:
        self.rank, self.other = rank, other

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, self.other] if self.rank == 0 else [self.other, data]


def collector(engine: BigramEngine, ranks: OneRank, reward: Any = scores, **options: Any) -> RolloutCollector:
    return RolloutCollector(
        engine, DigitDecoder(), reward, ranks, **{"sampling": SAMPLING, "group_size": 2, "seed": 3, **options}
    )


def test_groups_are_sampled_in_the_phases_of_their_work_under_keys_of_their_place() -> None:
    engine, phases = RecordingEngine(), Phases()
    entries = [LedgerEntry(4, 7, 1), LedgerEntry(4, 8, 0)]
    groups = collector(engine, OneRank()).collect(entries, PROMPTS[:2], PhaseTimer(listener=phases))
    assert phases.entered == ["rollout", None, "reward", None]
    assert [(group.prompt, group.epoch, group.position) for group in groups] == [(PROMPTS[0], 4, 7), (PROMPTS[1], 4, 8)]
    [call] = engine.calls
    keys = [[derive_key(3, "sample", 4, position, index) for index in range(2)] for position in (7, 8)]
    assert call["sample_keys"] == keys == [sample_keys(3, entry, 2) for entry in entries]
    assert call["prompts"] == [(1,), (2,)]
    assert [group.baseline_reward for group in groups] == [None, None]


def test_each_rank_samples_its_share_and_all_get_what_one_rank_would_sample() -> None:
    whole = collector(RecordingEngine(), OneRank()).collect(ENTRIES, PROMPTS, PhaseTimer())
    engines = [RecordingEngine(), RecordingEngine()]
    for rank, (engine, others) in enumerate(zip(engines, ([whole[1]], whole[::2]), strict=True)):
        phases = Phases()
        ranks = TwoRanks(rank, encode_groups(others))
        groups = collector(engine, ranks).collect(ENTRIES, PROMPTS, PhaseTimer(listener=phases))
        assert groups == whole
        assert phases.entered == ["rollout", None, "reward", None, "sync", None]
    assert [engine.calls[0]["prompts"] for engine in engines] == [[(1,), (3,)], [(2,)]]


def test_a_rank_without_a_share_asks_the_engine_for_nothing() -> None:
    engine = RecordingEngine()
    whole = collector(engine, OneRank(), greedy_baseline=True).collect(ENTRIES[:1], PROMPTS[:1], PhaseTimer())
    idle = RecordingEngine()
    ranks = TwoRanks(1, encode_groups(whole))
    groups = collector(idle, ranks, greedy_baseline=True).collect(ENTRIES[:1], PROMPTS[:1], PhaseTimer())
    assert groups == whole
    assert idle.calls == []


def test_the_baseline_of_a_prompt_is_the_reward_of_its_greedy_response() -> None:
    def by_size(items: Sequence[RewardItem]) -> list[Score]:
        greedy = len(items) == len(PROMPTS)
        return [Score(float(index + 10 * greedy), steps=((1, 0.5),)) for index, _ in enumerate(items)]

    groups = collector(RecordingEngine(), OneRank(), by_size, greedy_baseline=True).collect(
        ENTRIES, PROMPTS, PhaseTimer()
    )
    assert [group.baseline_reward for group in groups] == [10.0, 11.0, 12.0]
    assert [[rollout.reward for rollout in group.rollouts] for group in groups] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert all(rollout.steps == ((0, 0.5),) for group in groups for rollout in group.rollouts)


def test_the_rewards_of_conversations_are_those_of_their_environment() -> None:
    asked: list[tuple[Sequence[Prompt], Sequence[Sequence[int]], SamplingOptions]] = []
    made = sample_responses(RecordingEngine(), DigitDecoder(), PROMPTS, [[1, 2]] * 3, SAMPLING)

    class Held:
        def sample(self, prompts: Any, keys: Any, sampling: Any) -> list[list[Rollout]]:
            asked.append((prompts, keys, sampling))
            return [[replace(one, reward=0.25, status=RewardStatus.OK) for one in rollouts] for rollouts in made]

    unused: Callable[[Sequence[RewardItem]], list[Score]] = lambda items: pytest.fail("not asked")  # noqa: E731
    engine = RecordingEngine()
    groups = collector(engine, OneRank(), unused, conversations=Held()).collect(ENTRIES, PROMPTS, PhaseTimer())
    assert {rollout.reward for group in groups for rollout in group.rollouts} == {0.25}
    assert asked == [(PROMPTS, [sample_keys(3, entry, 2) for entry in ENTRIES], SAMPLING)]
    assert engine.calls == []


def test_a_response_is_kept_as_the_engine_gave_it() -> None:
    engine = RecordingEngine()
    engine.load_weights(7)
    prompts = [replace(PROMPTS[0], media="images"), PROMPTS[1]]
    first, second = sample_responses(engine, DigitDecoder(), prompts, [[1, 2], [3]], SAMPLING)
    assert [(one.prompt_id, one.sample_index) for one in (*first, *second)] == [("p:0", 0), ("p:0", 1), ("p:1", 0)]
    expected = [one for group in engine.generate([(1,), (2,)], [[1, 2], [3]], SAMPLING) for one in group]
    for one, completion in zip((*first, *second), expected, strict=True):
        assert one.completion_ids == completion.token_ids
        assert one.behaviour_logprobs == completion.logprobs
        assert one.log_kept_mass == completion.log_kept_mass
        assert (one.finish_reason, one.weight_version) == (completion.finish_reason, 7)
        assert one.response_text == " ".join(map(str, completion.token_ids))
        assert (one.reward, one.status) == (None, RewardStatus.UNSCORED)
    assert engine.calls[0]["media"] == ["images", None]
    assert sample_responses(engine, DigitDecoder(), [], [], SAMPLING) == []


def test_a_reward_is_asked_once_about_all_responses_with_all_that_is_known_of_them() -> None:
    messages = ({"role": "user", "content": "hello"},)
    prompts = [replace(PROMPTS[0], text="first", label="y", media="images", messages=messages), PROMPTS[1]]
    sampled = sample_responses(RecordingEngine(), DigitDecoder(), prompts, [[1, 2], [3]], SAMPLING)
    asked: list[list[RewardItem]] = []

    def reward(items: Sequence[RewardItem]) -> list[Score]:
        asked.append(list(items))
        late = Score(None, RewardStatus.TIMEOUT, detail="no answer")
        return [Score(1.5, breakdown={"right": 1.0}), late, Score(0.5)]

    sampled[1][0] = replace(sampled[1][0], detail="cut")
    [[one, two], [three]] = score_rollouts(reward, prompts, sampled)
    [items] = asked
    assert [item.prompt_id for item in items] == ["p:0", "p:0", "p:1"]
    rollout = sampled[0][0]
    assert items[0] == RewardItem(
        "p:0",
        "first",
        rollout.response_text,
        "y",
        rollout.finish_reason,
        len(rollout.completion_ids),
        messages,
        "images",
    )
    assert (items[2].messages, items[2].media) == ((), None)
    assert (one.reward, one.status, one.breakdown, one.detail) == (1.5, RewardStatus.OK, {"right": 1.0}, "")
    assert (two.reward, two.status, two.detail) == (None, RewardStatus.TIMEOUT, "no answer")
    assert (three.reward, three.detail) == (0.5, "cut")
    assert one.completion_ids == rollout.completion_ids


@pytest.mark.parametrize(
    ("steps", "placed"),
    [
        (((1, 0.5), (4, 1.0)), ((0, 0.5), (1, 1.0))),
        (((2, 0.5), (4, 1.0)), ((1, 1.5),)),  # the second token ends with the fourth character
        (((6, 0.25), (7, 0.5), (99, 1.0), (0, 2.0)), ((0, 2.0), (2, 1.75))),
        ((), ()),
    ],
)
def test_a_step_ends_with_the_token_that_writes_its_last_character(
    steps: tuple[tuple[int, float], ...], placed: tuple[tuple[int, float], ...]
) -> None:
    assert place_steps((1, 23, 4), steps, DigitDecoder()) == placed  # "1 23 4"


def test_steps_are_placed_only_where_a_decoder_is_given() -> None:
    sampled = sample_responses(RecordingEngine(), DigitDecoder(), PROMPTS[:1], [[1]], SAMPLING)
    judged: Callable[[Sequence[RewardItem]], list[Score]] = lambda items: [Score(1.0, steps=((1, 0.5),))]  # noqa: E731
    [[with_steps]] = score_rollouts(judged, PROMPTS[:1], sampled, DigitDecoder())
    [[without]] = score_rollouts(judged, PROMPTS[:1], sampled)
    assert (with_steps.steps, without.steps) == (((0, 0.5),), ())
