"""Rollouts that are sampled while the trainer waits: those of the collector, with the engine's present weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.source import SyncRollouts
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, OneRank

PROMPTS = [Prompt(f"p:{i}", (2 + i,), str(2 + i), str(2 + i), "p") for i in range(4)]
SAMPLING = SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(1,))


def right(items: Sequence[RewardItem]) -> list[Score]:
    return [Score(1.0) for _ in items]


@dataclass
class Made:
    """A source on a bigram policy, and how often its processes were ended."""

    closed: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        self.ledger = Ledger(4, 1, lambda epoch: [3, 2, 1, 0], data_hash="d", seed=0)
        self.engine = BigramEngine(BigramPolicy(8))
        collector = RolloutCollector(
            self.engine, DigitDecoder(), right, OneRank(), sampling=SAMPLING, group_size=2, seed=0
        )
        self.source = SyncRollouts(self.engine, collector, self.ledger, close=lambda: self.closed.append(True))


@pytest.fixture
def made() -> Made:
    return Made()


def test_entries_are_those_of_the_ledger_and_groups_follow_them(made: Made) -> None:
    entries = made.source.reserve(3)
    assert [entry.prompt_index for entry in entries] == [3, 2, 1]
    prompts = [PROMPTS[entry.prompt_index] for entry in entries]
    groups = made.source.collect(entries, prompts, PhaseTimer())
    assert [group.prompt for group in groups] == prompts
    assert [len(group.rollouts) for group in groups] == [2, 2, 2]
    assert made.source.metrics(groups) == {}
    assert [entry.prompt_index for entry in made.source.reserve(3)] == [0]  # the epoch ends


def test_samples_carry_the_version_that_was_loaded(made: Made) -> None:
    made.source.load_weights(5)
    entries = made.source.reserve(2)
    groups = made.source.collect(entries, PROMPTS[:2], PhaseTimer())
    assert {rollout.weight_version for group in groups for rollout in group.rollouts} == {5}


def test_a_diagnosis_of_the_engine_is_among_the_metrics(made: Made) -> None:
    row = {"time/engine_limit": "forward"}
    source = SyncRollouts(made.engine, made.source.collector, made.ledger, diagnose=lambda: row)
    assert source.metrics([]) == row


def test_closing_ends_what_the_engine_has_started(made: Made) -> None:
    made.source.close()
    assert made.closed == [True]
    without = SyncRollouts(made.engine, made.source.collector, made.ledger)
    without.close()
    assert made.closed == [True]
