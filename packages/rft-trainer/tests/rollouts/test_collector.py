"""What a collector asks of its engine: keys by place, and for a greedy baseline a greedy response throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, Score
from rft_trainer.rollouts.collector import RolloutCollector
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
        self.calls.append({"sample_keys": [list(keys) for keys in sample_keys], **asdict(options)})
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
