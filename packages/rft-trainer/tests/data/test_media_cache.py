"""Images travel beside the tokens of their prompt: to the engine, to every forward, and to no other rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.packing import pack
from rft_trainer.batches.prompt_ledger import Ledger, LedgerEntry
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.sft import TokenLikelihood, mean_loss
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Prompt, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import build_samples
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss

PROMPTS = [Prompt(f"p:{n}", (1, 2, n), "x", "1", "p", media=f"image {n}" if n % 2 else None) for n in range(4)]


class SeeingPolicy(BigramPolicy):
    """Remembers the images of every forward."""

    def __init__(self) -> None:
        super().__init__(8)
        self.seen: list[Any] = []

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.seen.append(tokens.mm_inputs)
        return super().token_logprobs(tokens, **options)


class SeeingEngine(BigramEngine):
    """Remembers the images of every call."""

    seen: Any = "not called"

    def generate(self, prompts: Any, sample_keys: Any, options: Any, *, media: Any = None, **rest: Any) -> Any:
        self.seen = media
        return super().generate(prompts, sample_keys, options, **rest)


class Ranks(OneRank):
    """One of two ranks; what both have sent comes back to each."""

    world_size = 2

    def __init__(self, rank: int, sent: dict[int, bytes]) -> None:
        self.rank, self._sent = rank, sent

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._sent[self.rank] = data
        return [self._sent.get(0, data), self._sent.get(1, data)]


def right(items: Sequence[RewardItem]) -> list[Score]:
    """Everything is."""
    return [Score(1.0, RewardStatus.OK) for _ in items]


def entries() -> list[LedgerEntry]:
    """A place for each prompt."""
    return Ledger(4, 1, lambda _: [0, 1, 2, 3], data_hash="", seed=0).reserve(4)


def collect(engine: SeeingEngine, ranks: OneRank, timer: PhaseTimer, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
    """Two responses to each prompt."""
    sampling = SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(0,))
    collector = RolloutCollector(engine, DigitDecoder(), right, ranks, sampling=sampling, group_size=2, seed=0)
    return collector.collect(entries(), prompts, timer)


@pytest.fixture
def timer() -> PhaseTimer:
    return PhaseTimer()


@pytest.fixture
def groups(timer: PhaseTimer) -> list[RolloutGroup]:
    return collect(SeeingEngine(SeeingPolicy()), OneRank(), timer, PROMPTS)


def test_an_engine_is_told_of_images_only_where_there_are_some(timer: PhaseTimer) -> None:
    engine = SeeingEngine(SeeingPolicy())
    collect(engine, OneRank(), timer, PROMPTS)
    assert engine.seen == [None, "image 1", None, "image 3"]
    collect(engine, OneRank(), timer, [replace(prompt, media=None) for prompt in PROMPTS])
    assert engine.seen is None


def test_over_ranks_a_prompt_is_found_by_its_place_and_no_image_is_sent(
    groups: list[RolloutGroup], timer: PhaseTimer
) -> None:
    sent: dict[int, bytes] = {}
    for rank in (0, 1):
        with contextlib.suppress(KeyError):  # the first rank misses what the second has not sent yet
            collect(SeeingEngine(SeeingPolicy()), Ranks(rank, sent), timer, PROMPTS)
    assert not any(b"image" in part for part in sent.values())
    for rank in (0, 1):
        assert collect(SeeingEngine(SeeingPolicy()), Ranks(rank, sent), timer, PROMPTS) == groups


def test_samples_carry_the_images_of_their_prompts_into_packs(groups: list[RolloutGroup]) -> None:
    samples = build_samples(groups, [1.0] * 8, [r.behaviour_logprobs for g in groups for r in g.rollouts], [])
    images = [None, None, "image 1", "image 1", None, None, "image 3", "image 3"]
    assert [sample.media for sample in samples] == images
    assert pack(samples).mm_inputs == tuple(images)
    assert pack(samples).tokens.mm_inputs == tuple(images)
    assert pack(samples[:2]).mm_inputs is None
    assert pack(samples[:2]).tokens.mm_inputs is None


def test_every_forward_without_gradient_sees_the_images(groups: list[RolloutGroup]) -> None:
    policy = SeeingPolicy()
    annotate = LogprobScorer(policy, OneRank(), max_sequences=4, max_tokens=0, temperature=1.0)
    forwards: list[Callable[[Sequence[RolloutGroup]], Any]] = [annotate, annotate.entropies]
    for forward in forwards:
        policy.seen.clear()
        forward(groups)
        assert policy.seen == [(None, None, "image 1", "image 1"), (None, None, "image 3", "image 3")]


def demonstrations() -> list[TrainingSample]:
    """One with an image, one without."""
    return [
        TrainingSample("a", (1, 2, 3), 1, 0.0, media="image"),
        TrainingSample("b", (1, 4, 5), 1, 0.0),
    ]


def test_updates_and_held_out_losses_see_the_images() -> None:
    policy = SeeingPolicy()
    updater = Updater(
        PolicyLoss(policy, TokenLikelihood()),
        PlainOptimizer(list(policy.parameters())),
        OneRank(),
        micro_batching=MicroBatching(max_sequences=1, max_tokens=0, by_tokens=False),
        learning_rate=lambda _: 0.1,
    )
    updater(demonstrations(), 0, MetricTotals())
    assert policy.seen == [("image",), None]
    policy.seen.clear()
    loss = mean_loss(policy, demonstrations(), OneRank(), max_sequences=2, max_tokens=0)
    assert policy.seen == [("image", None)]
    assert torch.isfinite(torch.tensor(loss))
