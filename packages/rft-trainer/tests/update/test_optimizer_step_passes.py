"""Passes of one optimizer step: how samples are cut, fillers where passes are collective, what is handed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rft_algos.algorithms.published import Grpo
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches import packing
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, TokenBatch, TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer, PlainOutcome, TokenCritic
from rft_trainer.update.critic import ValueLoss, ValueObjective
from rft_trainer.update.optimizer_step import UpdateOutcome, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

ONE_EACH = MicroBatching(1, 0, False)
RECORD = Grpo(kl_place="none", kl_coef=0.0)


class RankOf:
    """Collectives of one rank of several, where only the share matters."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    sum = OneRank.sum
    max = OneRank.max
    gather_bytes = OneRank.gather_bytes


class NotingOptimizer(PlainOptimizer):
    """Notes every backward pass; does not step."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters)
        self.lasts: list[bool] = []
        self.changed: list[bool] = []
        self.parameter = parameters[0]

    def backward(self, loss: Tensor, *, last: bool = False) -> None:
        before = torch.zeros_like(self.parameter) if self.parameter.grad is None else self.parameter.grad.clone()
        super().backward(loss, last=last)
        assert self.parameter.grad is not None
        self.lasts.append(last)
        self.changed.append(not torch.equal(self.parameter.grad, before))

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> PlainOutcome:
        return PlainOutcome(gradient_norm=2.5, applied=False, loss_scale=64.0)


class NotingPolicy(BigramPolicy):
    """Notes the temperature and the number of tokens of every forward pass."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size, dtype=torch.float64)
        self.temperatures: list[float] = []
        self.num_tokens: list[int] = []
        self.wanted: list[tuple[bool, bool]] = []

    def token_logprobs(
        self,
        tokens: PackedTokens,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self.temperatures.append(temperature)
        self.num_tokens.append(len(tokens.token_ids_T))
        self.wanted.append((with_entropy, entropy_gradient))
        return super().token_logprobs(
            tokens, temperature=temperature, with_entropy=with_entropy, entropy_gradient=entropy_gradient
        )


def sample(name: str, num_response: int, advantage: float = 1.0) -> TrainingSample:
    old = (-1.0,) * num_response
    return TrainingSample(
        name,
        (1, *(2 + place % 3 for place in range(num_response))),
        1,
        advantage,
        behaviour_logprobs=old,
        old_logprobs=old,
        old_values=(0.5,) * num_response,
        returns=(1.0,) * num_response,
    )


OF_LOSS = {"temperature", "balanced", "fused"}
UNEVEN = [sample("long", 8), sample("x", 2), sample("y", 2), sample("z", 2)]
"""Of two ranks the first has the long one, the second the other three."""


def updater(policy: BigramPolicy, rank: Any = None, cut: MicroBatching = ONE_EACH, **options: Any) -> Updater:
    return Updater(
        PolicyLoss(policy, PolicyObjective(RECORD), **{name: options.pop(name) for name in OF_LOSS & options.keys()}),
        NotingOptimizer([policy.table]),
        rank or OneRank(),
        micro_batching=cut,
        learning_rate=lambda update: 0.25 * (1 + update),
        **options,
    )


def passes(update: Updater) -> NotingOptimizer:
    noting = update._optimizer  # pyright: ignore[reportPrivateUsage]
    assert isinstance(noting, NotingOptimizer)
    return noting


def test_micro_batches_by_tokens_are_filled_to_the_cap() -> None:
    lengths = [5, 3, 2, 4, 1]
    assert MicroBatching(2, 6, True).cut(lengths) == [[0, 4], [2, 3], [1]]
    # without a cap: the tokens of as many of the longest as may be in one
    assert MicroBatching(2, 0, True).cut(lengths) == [[0, 3, 4], [1, 2]]
    assert MicroBatching(2, 6, True).cut([]) == []
    assert MicroBatching(2, 0, True).cut([]) == []


def test_micro_batches_in_order_keep_both_limits() -> None:
    assert MicroBatching(2, 0, False).cut([5, 3, 2, 4, 1]) == [[0, 1], [2, 3], [4]]
    assert MicroBatching(3, 7, False).cut([5, 3, 2, 2, 1]) == [[0], [1, 2, 3], [4]]
    assert MicroBatching(3, 7, False).cut([]) == []


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_fillers_make_the_passes_of_all_ranks_equally_many(rank: int, collective: bool) -> None:
    policy = NotingPolicy(6)
    update = updater(policy, RankOf(rank, 2), collective_forward=collective, temperature=0.7)
    outcome = update(UNEVEN, 0, MetricTotals())
    num_own = [1, 3][rank]
    assert outcome.num_micro_batches == num_own
    num_passes = 3 if collective else num_own
    noted = passes(update)
    assert noted.lasts == [False] * (num_passes - 1) + [True], "the optimizer is told the last pass, once"
    assert noted.changed == [True] * num_own + [False] * (num_passes - num_own), "a filler has no gradient"
    assert policy.temperatures == [0.7] * num_passes
    assert policy.num_tokens == ([9] + [3] * (num_passes - 1) if rank == 0 else [3, 3, 3])


@pytest.mark.parametrize("collective", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_critic_has_as_many_passes_on_all_ranks(rank: int, collective: bool) -> None:
    critic = TokenCritic(6, dtype=torch.float64)
    update = Updater(
        ValueLoss(critic, ValueObjective(None)),
        NotingOptimizer([critic.table]),
        RankOf(rank, 2),
        micro_batching=ONE_EACH,
        learning_rate=lambda update: 0.5,
        collective_forward=collective,
    )
    outcome = update(UNEVEN, 0, MetricTotals())
    num_own = [1, 3][rank]
    num_passes = 3 if collective else num_own
    assert passes(update).lasts == [False] * (num_passes - 1) + [True]
    assert passes(update).changed == [True] * num_own + [False] * (num_passes - num_own)
    assert outcome == UpdateOutcome(2.5, False, 0.5, num_own, 64.0)


def test_passes_are_not_collective_unless_said() -> None:
    policy, critic = NotingPolicy(6), TokenCritic(6, dtype=torch.float64)
    update = updater(policy, RankOf(0, 2))
    update(UNEVEN, 0, MetricTotals())
    assert passes(update).lasts == [True]
    of_values = Updater(
        ValueLoss(critic, ValueObjective(None)),
        NotingOptimizer([critic.table]),
        RankOf(0, 2),
        micro_batching=ONE_EACH,
        learning_rate=lambda update: 0.5,
    )
    of_values(UNEVEN, 0, MetricTotals())
    assert passes(of_values).lasts == [True]


def test_a_step_says_what_the_optimizer_did() -> None:
    update = updater(NotingPolicy(6))
    assert update(UNEVEN, 2, MetricTotals()) == UpdateOutcome(2.5, False, 0.75, 4, 64.0)


def test_the_temperature_is_1_unless_said() -> None:
    policy = NotingPolicy(6)
    update = updater(policy, cut=MicroBatching(8, 0, False))
    update(UNEVEN, 0, MetricTotals())
    assert policy.temperatures == [1.0]
    assert policy.wanted == [(True, False)], "an entropy that is only logged has no gradient"


@pytest.mark.parametrize("pins", [False, True])
def test_pages_are_locked_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, pins: bool) -> None:
    asked: list[bool] = []

    def noting_pack(samples: Sequence[TrainingSample], device: str = "cpu", *, pin_memory: bool = False) -> TokenBatch:
        asked.append(pin_memory)
        return packing.pack(samples, device)

    monkeypatch.setattr("rft_trainer.update.optimizer_step.pack", noting_pack)
    monkeypatch.setattr("rft_trainer.update.critic.pack", noting_pack)
    options: dict[str, Any] = {"pin_memory": True} if pins else {}
    updater(NotingPolicy(6), **options)(UNEVEN, 0, MetricTotals())
    assert asked == [pins] * 4
    critic = TokenCritic(6, dtype=torch.float64)
    Updater(
        ValueLoss(critic, ValueObjective(None)),
        NotingOptimizer([critic.table]),
        OneRank(),
        micro_batching=ONE_EACH,
        learning_rate=lambda update: 0.5,
        **options,
    )(UNEVEN, 0, MetricTotals())
    assert asked == [pins] * 8


class NotingBalance:
    """A routers' loss that notes what it is told."""

    counts_first = has_loss = True

    def __init__(self, policy: BigramPolicy) -> None:
        self.policy = policy
        self.told: list[tuple[list[int], list[int]]] = []
        self.passes = 0

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch] = ()) -> None:
        assert self.passes == 0, "experts are counted before the first backward pass"
        self.told.append(([len(one.token_ids_T) for one in batches], [len(one.token_ids_T) for one in idle]))

    def token_logprobs(self, tokens: PackedTokens, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.passes += 1
        return self.policy.token_logprobs(tokens, **options)

    def term(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> Tensor:
        return self.policy.table[5, 5]


class FusedPolicy(BigramPolicy):
    """Counts how often it is asked and how often it computes a loss."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.asked: list[int] = []

    def prefers_fused_loss(self, num_rows: int) -> bool:
        self.asked.append(num_rows)
        return False


def test_the_routers_loss_is_begun_with_own_batches_and_fillers_and_has_a_gradient() -> None:
    policy = FusedPolicy(6)
    balance: Any = NotingBalance(policy)
    update = updater(policy, RankOf(0, 2), balanced=balance, fused=policy, collective_forward=True)
    update(UNEVEN, 0, MetricTotals())
    assert balance.told == [([9], [3, 3])]
    assert balance.passes == 1
    assert policy.table.grad is not None
    assert policy.table.grad[5, 5] == 1.0
    assert policy.asked == [], "a fused loss has no share of the routers' loss"


def test_a_micro_batch_without_loss_tokens_is_not_fused() -> None:
    policy = FusedPolicy(6)
    prompts = TrainingSample("p", (1, 2), 2, 1.0)
    updater(policy, fused=policy)([prompts, sample("x", 1), sample("y", 3)], 0, MetricTotals())
    assert policy.asked == [3, 1] or policy.asked == [1, 3]


@dataclass
class Gaps:
    """A monitor that notes the order of its calls."""

    noted: list[str]

    def restart(self) -> None:
        self.noted.append("begun")

    def add(self, samples: Sequence[TrainingSample], batch: TokenBatch, outputs_T: Tensor) -> None:
        assert [one.num_tokens for one in samples] == [len(batch.token_ids_T)] == [len(outputs_T)]
        self.noted.append(samples[0].sample_id)

    def judge(self) -> None:
        self.noted.append("judged")


def test_every_micro_batch_is_in_the_gap_before_it_is_judged() -> None:
    gaps: Any = Gaps([])
    updater(NotingPolicy(6))(UNEVEN, 0, MetricTotals(), monitor=gaps)
    assert gaps.noted == ["begun", "long", "x", "y", "z", "judged"]


def test_samples_without_log_probs_of_an_engine_have_no_gap() -> None:
    totals = MetricTotals()
    update = updater(NotingPolicy(6))
    update([TrainingSample("s", (1, 2, 3), 1, 1.0, old_logprobs=(-1.0, -1.0))], 0, totals)
    merged = totals.merged(OneRank())
    assert "policy/loss" in merged
    assert not [name for name in merged if "gap" in name]


def test_the_gap_is_of_loss_tokens_alone() -> None:
    totals = MetricTotals()
    uniform = -torch.tensor(6.0).log().item()
    odd = TrainingSample(
        "s",
        (1, 2, 3),
        1,
        1.0,
        behaviour_logprobs=(uniform - 0.25, 7.0),
        old_logprobs=(uniform, 0.0),
        loss_mask=(True, False),
    )
    updater(NotingPolicy(6))([odd], 0, totals)
    merged = totals.merged(OneRank())
    assert merged["policy/logprob_gap"] == pytest.approx(0.25, abs=1e-6)
    assert merged["policy/logprob_gap_max"] == pytest.approx(0.25, abs=1e-6)


def test_samples_left_out_are_in_the_counts_of_the_logged_loss() -> None:
    totals = MetricTotals()
    updater(NotingPolicy(6), cut=MicroBatching(8, 0, False))(UNEVEN[1:2], 0, totals, Counts(8, 4))
    merged = totals.merged(OneRank())
    assert merged["policy/surrogate"] == pytest.approx(merged["policy/loss"])
    alone = MetricTotals()
    updater(NotingPolicy(6), cut=MicroBatching(8, 0, False))(UNEVEN[1:2], 0, alone, Counts(2, 4))
    assert merged["policy/loss"] == pytest.approx(alone.merged(OneRank())["policy/loss"], rel=1e-9)


def outcome(applied: bool, loss_scale: float | None) -> UpdateOutcome:
    return UpdateOutcome(1.0, applied, 0.1, 1, loss_scale)


def test_a_step_is_sound_where_it_was_applied_or_the_loss_scale_shrank() -> None:
    sound = [outcome(*kind).sound for kind in ((True, None), (True, 8.0), (False, 8.0), (False, None))]
    assert sound == [True, True, True, False]
