"""One optimizer step is the same step however it is cut, and on one rank or several."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from rft_algos.algorithms.components import Gspo, PpoClip, Surrogate
from rft_algos.algorithms.published import Aggregation, Grpo
from rft_core.keyed_random import integers, uniforms
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.packing import count
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.testing.bigram import BigramPolicy, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

AGGREGATIONS = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "fixed_length")


class RankOf:
    """Collectives of one rank of several, where only the share matters."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    sum = OneRank.sum
    max = OneRank.max
    gather_bytes = OneRank.gather_bytes


class KeepGradients(PlainOptimizer):
    """Does not step, so that gradients of several ranks can be added."""

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")):
        return type("Outcome", (), {"gradient_norm": 0.0, "applied": True, "loss_scale": None})()


def samples() -> list[TrainingSample]:
    made = []
    for index in range(13):
        prompt, response = (integers(index, 2, 1, 6).tolist() for index in (3 * index, 3 * index + 1))
        response = integers(3 * index + 2, 9, 1, 6).tolist()[: 1 + index % 9]
        old = (-3.0 * uniforms([index], len(response))[0]).tolist()
        made.append(
            TrainingSample(
                f"s{index}",
                (*prompt, *response),
                len(prompt),
                float(index % 5) - 2.0,
                behaviour_logprobs=tuple(old),
                old_logprobs=tuple(old),
                reference_logprobs=tuple(x - 0.1 for x in old),
            )
        )
    return made


def gradient(cut: MicroBatching, record: Grpo, world_size: int = 1) -> tuple[torch.Tensor, dict[str, float]]:
    total = torch.zeros(6, 6, dtype=torch.float64)
    metrics: dict[str, float] = {}
    for rank in range(world_size):
        policy = BigramPolicy(6, dtype=torch.float64)
        with torch.no_grad():
            policy.table.copy_(uniforms([7], 36).reshape(6, 6))
        updater = Updater(
            PolicyLoss(policy, PolicyObjective(record)),
            KeepGradients([policy.table]),
            RankOf(rank, world_size),
            micro_batching=cut,
            learning_rate=lambda update: 0.1,
        )
        totals = MetricTotals()
        updater(samples(), 0, totals)
        total += policy.table.grad if policy.table.grad is not None else 0.0
        metrics = totals.merged(OneRank())
    return total, metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradient_does_not_depend_on_the_cut_or_the_number_of_ranks(aggregation: str) -> None:
    fixed = 9 if aggregation == "fixed_length" else None
    record = Grpo(aggregation=aggregation, max_tokens=fixed, entropy_coef=0.01)
    whole, metrics = gradient(MicroBatching(100, 0, False), record)
    for cut in (
        MicroBatching(1, 0, False),
        MicroBatching(4, 0, False),
        MicroBatching(100, 23, False),
        MicroBatching(2, 25, True),
    ):
        other, other_metrics = gradient(cut, record)
        torch.testing.assert_close(other, whole, rtol=1e-10, atol=1e-14)
        assert other_metrics == pytest.approx(metrics, rel=1e-10)
    for world_size in (2, 3, 20):
        other, _ = gradient(MicroBatching(4, 0, False), record, world_size)
        torch.testing.assert_close(other, whole, rtol=1e-10, atol=1e-14)


def test_samples_of_zero_advantage_may_be_left_out_while_they_stay_in_the_denominators() -> None:
    record = Grpo(kl_place="none", kl_coef=0.0)
    policy_all, policy_some = BigramPolicy(6, dtype=torch.float64), BigramPolicy(6, dtype=torch.float64)
    for policy, chosen in ((policy_all, samples()), (policy_some, [s for s in samples() if s.advantage])):
        updater = Updater(
            PolicyLoss(policy, PolicyObjective(record)),
            KeepGradients([policy.table]),
            OneRank(),
            micro_batching=MicroBatching(4, 0, False),
            learning_rate=lambda update: 0.1,
        )
        updater(chosen, 0, MetricTotals(), count(samples()))
    assert policy_all.table.grad is not None
    assert policy_some.table.grad is not None
    torch.testing.assert_close(policy_some.table.grad, policy_all.table.grad, rtol=1e-12, atol=1e-15)


def test_the_gap_to_the_engine_is_measured_in_nats_a_token() -> None:
    policy = BigramPolicy(6)
    schedule: Callable[[int], float] = lambda update: 0.0  # noqa: E731
    updater = Updater(
        PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))),
        PlainOptimizer([policy.table]),
        OneRank(),
        micro_batching=MicroBatching(4, 0, False),
        learning_rate=schedule,
    )
    uniform = -torch.tensor(6.0).log().item()
    exact = TrainingSample("s", (1, 2, 3), 1, 1.0, behaviour_logprobs=(uniform,) * 2, old_logprobs=(uniform,) * 2)
    off = TrainingSample("t", (1, 2, 3), 1, 1.0, behaviour_logprobs=(uniform + 0.5,) * 2, old_logprobs=(uniform,) * 2)
    totals = MetricTotals()
    updater([exact, off], 0, totals)
    merged = totals.merged(OneRank())
    assert merged["policy/logprob_gap"] == pytest.approx(0.25, abs=1e-6)
    assert merged["policy/logprob_gap_max"] == pytest.approx(0.5, abs=1e-6)


def test_the_logged_loss_is_the_loss_of_all_samples_when_some_are_left_out() -> None:
    losses = []
    for chosen in (samples(), [s for s in samples() if s.advantage]):
        policy, totals = BigramPolicy(6, dtype=torch.float64), MetricTotals()
        updater = Updater(
            PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))),
            KeepGradients([policy.table]),
            OneRank(),
            micro_batching=MicroBatching(4, 0, False),
            learning_rate=lambda update: 0.1,
        )
        updater(chosen, 0, totals, count(samples()))
        losses.append(totals.merged(OneRank())["policy/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_samples_left_out_count_once_in_the_logged_loss_whatever_the_number_of_ranks() -> None:
    losses: list[float] = []
    for world_size in (1, 3):
        totals = MetricTotals()
        for rank in range(world_size):
            policy = BigramPolicy(6, dtype=torch.float64)
            updater = Updater(
                PolicyLoss(policy, PolicyObjective(Grpo(kl_place="none", kl_coef=0.0))),
                KeepGradients([policy.table]),
                RankOf(rank, world_size),
                micro_batching=MicroBatching(4, 0, False),
                learning_rate=lambda update: 0.1,
            )
            updater([s for s in samples() if s.advantage], 0, totals, count(samples()))
        losses.append(totals.merged(OneRank())["policy/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_an_entropy_bonus_reaches_the_gradient() -> None:
    cut = MicroBatching(max_sequences=100, max_tokens=0, by_tokens=False)
    without, _ = gradient(cut, Grpo(kl_place="none"))
    with_bonus, _ = gradient(cut, Grpo(kl_place="none", entropy_coef=0.5))
    assert (with_bonus - without).norm() > 0.01 * without.norm()


def test_the_entropy_is_logged_without_a_bonus_too() -> None:
    _, metrics = gradient(MicroBatching(max_sequences=4, max_tokens=0, by_tokens=False), Grpo(kl_place="none"))
    assert 0.0 < metrics["policy/entropy"] <= torch.tensor(6.0).log().item()


class FusedBigramPolicy(BigramPolicy):
    """Takes the objective in, a few tokens at a time, last ones first."""

    num_fused = 0

    def prefers_fused_loss(self, num_rows: int) -> bool:
        return num_rows > 5

    def fused_loss(
        self,
        tokens: PackedTokens,
        objective: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        *,
        temperature: float = 1.0,
    ) -> SimpleNamespace:
        self.num_fused += 1
        logprobs_T, entropy_T = self.token_logprobs(
            tokens,
            temperature=temperature,
            with_entropy=True,
            entropy_gradient=True,
        )
        assert entropy_T is not None
        assert tokens.target_mask_T is not None
        places = tokens.target_mask_T.nonzero()[:, 0].flip(0).split(3)
        loss = torch.stack([objective(logprobs_T[at], entropy_T[at], at).sum() for at in places]).sum()
        return SimpleNamespace(loss=loss, logprobs=logprobs_T.detach(), entropy=entropy_T.detach())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("surrogate", [PpoClip(), Gspo()])
def test_an_objective_of_tokens_in_the_head_is_the_same_step(aggregation: Aggregation, surrogate: Surrogate):
    record = Grpo(
        surrogate=surrogate,
        aggregation=aggregation,
        max_tokens=8 if aggregation == "fixed_length" else None,
        entropy_coef=0.1,
        kl_coef=0.2,
    )
    found: list[tuple[torch.Tensor, dict[str, float], int]] = []
    for fuses in (False, True):
        policy = FusedBigramPolicy(6, dtype=torch.float64)
        with torch.no_grad():
            policy.table.copy_(uniforms([7], 36).reshape(6, 6))
        updater = Updater(
            PolicyLoss(policy, PolicyObjective(record), temperature=0.8, fused=policy if fuses else None),
            KeepGradients([policy.table]),
            OneRank(),
            micro_batching=MicroBatching(3, 0, by_tokens=False),
            learning_rate=lambda update: 0.1,
        )
        totals = MetricTotals()
        updater(samples(), 0, totals)
        assert policy.table.grad is not None
        found.append((policy.table.grad, totals.merged(OneRank()), policy.num_fused))
    (one, metrics, _), (other, fused_metrics, num_fused) = found
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
    assert fused_metrics == pytest.approx(metrics, rel=1e-6)
    assert (num_fused > 0) == isinstance(surrogate, PpoClip)
