"""The value loss of a step is the same however it is cut, and values of all rollouts reach every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from rft_algos.algorithms.published import Aggregation
from rft_core.keyed_random import integers, uniforms
from rft_core.packed_tokens import PackedTokens
from rft_trainer.batches.packing import pack
from rft_trainer.batches.units import MicroBatching
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.protocols import Critic
from rft_trainer.records.rollouts import Counts, Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.testing.bigram import OneRank, PlainOptimizer, PlainOutcome, TokenCritic
from rft_trainer.update.critic import ValueAnnotator, ValueLoss, ValueObjective, explained_variance
from rft_trainer.update.optimizer_step import UpdateOutcome, Updater

VOCAB = 6
ALL_IN_ONE = MicroBatching(100, 0, False)


class RankOf:
    """Collectives of one rank of several, where only the share matters."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    sum = OneRank.sum
    max = OneRank.max
    gather_bytes = OneRank.gather_bytes


class KeepGradients(PlainOptimizer):
    """Does not step, so that gradients of several ranks can be added."""

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> PlainOutcome:
        return PlainOutcome(gradient_norm=0.0, applied=True)


@cache
def samples() -> list[TrainingSample]:
    """Ragged: 1 to 9 response tokens, one sample without any, one without a prompt."""
    made: list[TrainingSample] = []
    for index in range(13):
        prompt = integers(3 * index, 0 if index == 5 else 2, 1, VOCAB).tolist()
        response = integers(3 * index + 2, 9, 1, VOCAB).tolist()[: 0 if index == 4 else 1 + index % 9]
        old = (uniforms([index], len(response))[0] - 0.5).tolist()
        returns = (2 * uniforms([100 + index], len(response))[0] - 1).tolist()
        made.append(
            TrainingSample(
                f"s{index}",
                (*prompt, *response),
                len(prompt),
                float(index % 2),
                old_values=tuple(old),
                returns=tuple(returns),
            )
        )
    return made


def a_critic() -> TokenCritic:
    critic = TokenCritic(VOCAB, dtype=torch.float64)
    with torch.no_grad():
        critic.table.copy_(uniforms([7], VOCAB)[0] - 0.5)
    return critic


def step_of(
    cut: MicroBatching, objective: ValueObjective, world_size: int = 1, chosen: list[TrainingSample] | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient added up over ranks, and metrics as (total, count) added up over ranks."""
    gradient = torch.zeros(VOCAB, dtype=torch.float64)
    totals = MetricTotals()
    for rank in range(world_size):
        critic = a_critic()
        updater = Updater(
            ValueLoss(critic, objective),
            KeepGradients([critic.table]),
            RankOf(rank, world_size),
            micro_batching=cut,
            learning_rate=lambda update: 0.1,
        )
        outcome = updater(samples() if chosen is None else chosen, 0, totals)
        assert outcome.learning_rate == 0.1
        if critic.table.grad is not None:
            gradient += critic.table.grad
    return gradient, totals.merged(OneRank())


def by_hand(objective: ValueObjective) -> tuple[torch.Tensor, dict[str, float]]:
    """The same in plain Python; the gradient of token t goes to the table's entry of token t - 1."""
    table = a_critic().table.tolist()
    clip = math.inf if objective.clip is None else objective.clip
    rows = [s for s in samples() if s.num_loss_tokens > 0]
    num_tokens = sum(s.num_loss_tokens for s in rows)
    gradient, loss, clipped, value_total, return_total = [0.0] * VOCAB, 0.0, 0, 0.0, 0.0
    for sample in rows:
        weight = 1 / num_tokens
        if objective.aggregation == "sequence_mean_token_mean":
            weight = 1 / (len(rows) * sample.num_loss_tokens)
        for t in range(max(sample.prompt_length, 1), sample.num_tokens):
            old, goal = (
                float(torch.tensor(values[t - sample.prompt_length]))  # packed as float32
                for values in (sample.old_values, sample.returns)
            )
            before = sample.token_ids[t - 1]
            value = table[before]
            near = min(max(value, old - clip), old + clip)
            plain, kept_near = (value - goal) ** 2 / 2, (near - goal) ** 2 / 2
            loss += weight * max(plain, kept_near)
            clipped += kept_near > plain
            gradient[before] += 0.0 if kept_near > plain else weight * (value - goal)
            value_total += value
            return_total += goal
    metrics = {
        "critic/loss": loss,
        "critic/clip_fraction": clipped / num_tokens,
        "critic/value_mean": value_total / num_tokens,
        "critic/return_mean": return_total / num_tokens,
    }
    return torch.tensor(gradient, dtype=torch.float64), metrics


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_one_step_is_the_formula_written_out(clip: float | None, aggregation: Aggregation) -> None:
    objective = ValueObjective(clip, aggregation)
    gradient, metrics = step_of(ALL_IN_ONE, objective)
    expected, expected_metrics = by_hand(objective)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)
    variance = metrics.pop("critic/explained_variance")
    assert metrics.pop("policy/weight_change") == 0.0, "the gradients are kept and not applied"
    assert metrics == pytest.approx(expected_metrics, rel=1e-10)
    assert variance < 1.0
    assert (clip is None) == (metrics["critic/clip_fraction"] == 0.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_and_metrics_do_not_depend_on_the_cut_or_the_number_of_ranks(
    clip: float | None, aggregation: Aggregation
) -> None:
    objective = ValueObjective(clip, aggregation)
    whole, metrics = step_of(ALL_IN_ONE, objective)
    assert whole.norm() > 0.01
    cuts = (
        MicroBatching(1, 0, False),
        MicroBatching(4, 0, False),
        MicroBatching(100, 23, False),
        MicroBatching(2, 25, True),
    )
    for cut, world_size in [(cut, 1) for cut in cuts] + [(cuts[1], ranks) for ranks in (2, 3, 20)]:
        other, other_metrics = step_of(cut, objective, world_size)
        torch.testing.assert_close(other, whole, rtol=1e-10, atol=1e-14)
        assert other_metrics == pytest.approx(metrics, rel=1e-10)


def test_a_constant_length_may_be_the_denominator() -> None:
    fixed, _ = step_of(ALL_IN_ONE, ValueObjective(None, "fixed_length", max_tokens=8))
    mean, _ = step_of(ALL_IN_ONE, ValueObjective(None, "token_mean"))
    rows = [s for s in samples() if s.num_loss_tokens > 0]
    num_tokens = sum(s.num_loss_tokens for s in rows)
    torch.testing.assert_close(fixed * len(rows) * 8, mean * num_tokens, rtol=1e-10, atol=1e-14)


def test_what_stands_at_the_prompt_reaches_nothing() -> None:
    batch = pack([replace(samples()[3], reference_logprobs=())])
    mask_T = batch.loss_mask_T
    assert batch.old_values_T is not None
    assert batch.returns_T is not None
    values_T = torch.full((len(mask_T),), 0.25, dtype=torch.float64).where(mask_T, math.nan).requires_grad_()
    poisoned = replace(
        batch,
        old_values_T=batch.old_values_T.where(mask_T, math.nan),
        returns_T=batch.returns_T.where(mask_T, math.inf),
    )
    output = ValueObjective(0.2)(poisoned, values_T, Counts(int(mask_T.sum()), 1))
    output.loss.backward()
    assert values_T.grad is not None
    assert values_T.grad.isfinite().all()
    assert (values_T.grad[~mask_T] == 0).all()
    for total, number in output.metrics.values():
        assert math.isfinite(total)
        assert math.isfinite(number)


def test_a_micro_batch_of_prompts_alone_adds_nothing() -> None:
    prompts = [TrainingSample("p", (1, 2, 3), 3, 0.0)]
    critic = a_critic()
    batch = pack(prompts)
    values_T = critic.values(batch.tokens)
    output = ValueObjective(0.2)(batch, values_T, Counts(10, 2))
    output.loss.backward()
    assert output.loss == 0.0
    assert output.metrics["critic/loss"][1] == 0.0
    whole, metrics = step_of(ALL_IN_ONE, ValueObjective(0.2))
    with_prompts, its_metrics = step_of(MicroBatching(1, 0, False), ValueObjective(0.2), chosen=prompts + samples())
    torch.testing.assert_close(with_prompts, whole, rtol=1e-10, atol=1e-14)
    assert its_metrics == pytest.approx(metrics, rel=1e-10)


@pytest.mark.parametrize("name", ["old_values", "returns"])
def test_a_sample_without_values_or_returns_is_a_mistake_of_the_caller(name: str) -> None:
    with pytest.raises(AssertionError, match=f"s12 has no {name}"):
        step_of(ALL_IN_ONE, ValueObjective(0.2), chosen=[*samples()[:-1], replace(samples()[-1], **{name: ()})])


def sample_of(old_values: tuple[float, ...], returns: tuple[float, ...], prompt_length: int = 1) -> TrainingSample:
    num_tokens = prompt_length + len(returns)
    return TrainingSample("s", (1,) * num_tokens, prompt_length, 0.0, old_values=old_values, returns=returns)


def test_explained_variance_is_of_all_loss_tokens_by_the_old_values() -> None:
    # returns 1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14
    # residuals G - V = 0, 1, 1, 2: mean 1, squared deviations 1 + 0 + 0 + 1 = 2; (14 - 2) / 14
    total, number = explained_variance([sample_of((1.0, 1.0), (1.0, 2.0)), sample_of((2.0, 4.0), (3.0, 6.0))])
    assert (float(total), float(number)) == (12.0, 14.0)


def test_the_first_token_of_a_sequence_without_prompt_is_not_in_the_explained_variance() -> None:
    with_first = explained_variance([sample_of((9.0, 1.0, 2.0), (-9.0, 1.5, 3.0), prompt_length=0)])
    without = explained_variance([sample_of((1.0, 2.0), (1.5, 3.0))])
    assert [float(part) for part in with_first] == [float(part) for part in without]


def test_equal_returns_leave_the_explained_variance_out() -> None:
    chosen = [sample_of((0.3, 0.5), (0.1, 0.1)), sample_of((0.2,), (0.1,))]
    _, metrics = step_of(ALL_IN_ONE, ValueObjective(None), chosen=chosen)
    assert "critic/explained_variance" not in metrics
    assert metrics["critic/return_mean"] == pytest.approx(0.1)


def test_explained_variance_is_added_by_one_rank_alone() -> None:
    chosen = [sample_of((1.0, 1.0), (1.0, 2.0)), sample_of((2.0, 4.0), (3.0, 6.0))]
    totals = MetricTotals()
    for rank in range(2):
        critic = a_critic()
        Updater(
            ValueLoss(critic, ValueObjective(None)),
            KeepGradients([critic.table]),
            RankOf(rank, 2),
            micro_batching=ALL_IN_ONE,
            learning_rate=lambda update: 0.1,
        )(chosen, 0, totals)
    totals.add({"critic/explained_variance": (torch.tensor(2.0), torch.tensor(14.0))})  # (12 + 2) / (14 + 14)
    assert totals.merged(OneRank())["critic/explained_variance"] == pytest.approx(0.5)


def trained(num_updates: int, schedule: Callable[[int], float], clip: float | None) -> tuple[list[float], TokenCritic]:
    """Losses of updates towards returns that are a function of the token before; old values are refreshed."""
    goals = [0.0, 0.4, -0.3, 0.8, 0.1, -0.6]
    critic = TokenCritic(VOCAB, dtype=torch.float64)
    updater = Updater(
        ValueLoss(critic, ValueObjective(clip)),
        PlainOptimizer([critic.table]),
        OneRank(),
        micro_batching=MicroBatching(3, 0, False),
        learning_rate=schedule,
    )
    losses: list[float] = []
    for update in range(num_updates):
        table = critic.table.tolist()
        before = [s.token_ids[s.prompt_length - 1 : -1] if s.prompt_length else () for s in samples()]
        chosen = [
            replace(s, old_values=tuple(table[b] for b in row), returns=tuple(goals[b] for b in row))
            for s, row in zip(samples(), before, strict=True)
            if s.prompt_length and s.num_loss_tokens
        ]
        totals = MetricTotals()
        outcome: UpdateOutcome = updater(chosen, update, totals)
        assert outcome.applied
        assert outcome.num_micro_batches == math.ceil(len(chosen) / 3)
        losses.append(totals.merged(OneRank())["critic/loss"])
    return losses, critic


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_critic_learns_the_returns(clip: float | None) -> None:
    losses, critic = trained(60, lambda update: 2.0, clip)
    assert losses[0] > 0.05
    assert losses[-1] < 1e-3 * losses[0]
    assert all(later <= earlier for earlier, later in pairwise(losses))
    torch.testing.assert_close(
        critic.table[1:].detach(), torch.tensor([0.4, -0.3, 0.8, 0.1, -0.6]).double(), atol=0.05, rtol=0
    )


def test_the_learning_rate_is_the_schedules_at_the_update() -> None:
    asked: list[int] = []

    def schedule(update: int) -> float:
        asked.append(update)
        return 0.0

    _, critic = trained(3, schedule, None)
    assert asked == [0, 1, 2]
    assert (critic.table == 0).all()


def groups() -> list[RolloutGroup]:
    """Three prompts with rollouts of several lengths."""
    made: list[RolloutGroup] = []
    for number in range(3):
        prompt = Prompt(f"p{number}", tuple(integers(number, 2 + number, 1, VOCAB).tolist()), "", None, "test")
        rollouts = [
            Rollout(
                prompt.prompt_id,
                index,
                completion_ids=tuple(integers(50 + 10 * number + index, 1 + 2 * index, 1, VOCAB).tolist()),
                behaviour_logprobs=(-1.0,) * (1 + 2 * index),
                log_kept_mass=(0.0,) * (1 + 2 * index),
                finish_reason="stop",
                weight_version=0,
                response_text="",
                reward=1.0,
                status=RewardStatus.OK,
            )
            for index in range(4)
        ]
        made.append(RolloutGroup(prompt, 0, number, tuple(rollouts)))
    return made


def test_every_response_token_gets_the_value_before_it() -> None:
    critic: Critic = TokenCritic(VOCAB)
    assert isinstance(critic, TokenCritic)
    with torch.no_grad():
        critic.table.copy_(uniforms([7], VOCAB)[0])
    found = ValueAnnotator(critic, OneRank(), max_sequences=5, max_tokens=0)(groups())
    table = critic.table.tolist()
    expected = [
        tuple(table[b] for b in (group.prompt.token_ids + rollout.completion_ids)[len(group.prompt.token_ids) - 1 : -1])
        for group in groups()
        for rollout in group.rollouts
    ]
    assert found == expected


def test_explained_variance_is_computed_in_float64() -> None:
    # in float32 the returns would be equal, and nothing left to explain
    total, number = explained_variance([sample_of((1e9, 1e9), (1e9, 1e9 + 2))])
    assert (float(total), float(number)) == (0.0, 2.0)


def test_a_loss_of_one_token_has_a_count_of_one() -> None:
    _, metrics = step_of(ALL_IN_ONE, ValueObjective(None), chosen=[sample_of((0.0,), (1.0,))])
    value = float(a_critic().table.detach()[1])
    assert metrics["critic/loss"] == pytest.approx((value - 1.0) ** 2 / 2)


def test_values_of_bfloat16_have_a_loss_in_float32() -> None:
    batch = pack([sample_of((0.0, 0.0), (1.0, 1.0))])
    values_T = torch.tensor([0.0, 1 / 3, 1 / 3], dtype=torch.bfloat16).requires_grad_()
    output = ValueObjective(None)(batch, values_T, Counts(3, 1))
    assert output.loss.dtype == torch.float32
    near = float(values_T[1].detach())
    assert float(output.loss.detach()) == pytest.approx(2 * (near - 1) ** 2 / 2 / 3, rel=1e-6)
    prompts = pack([TrainingSample("p", (1, 2, 3), 3, 0.0)])
    assert ValueObjective(0.2)(prompts, values_T, Counts(3, 1)).loss.dtype == torch.float32


def test_values_before_a_sequence_without_prompt_are_0_in_the_loss_and_the_metrics() -> None:
    batch = pack([sample_of((5.0, 0.5), (7.0, 1.0), prompt_length=0)])
    output = ValueObjective(0.2)(batch, torch.tensor([3.0, 0.5], dtype=torch.float64), Counts(1, 1))
    assert float(output.loss) == pytest.approx(0.125)
    assert [float(part) for part in output.metrics["critic/return_mean"]] == [1.0, 1.0]
    assert [float(part) for part in output.metrics["critic/value_mean"]] == [0.5, 1.0]


class NotingCritic(TokenCritic):
    """Notes the number of sequences and of tokens of every forward pass."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.noted: list[tuple[int, int]] = []

    def values(self, tokens: PackedTokens) -> torch.Tensor:
        self.noted.append((int(tokens.segment_ids_T.max()) + 1, len(tokens.token_ids_T)))
        return super().values(tokens)


def test_values_are_computed_within_both_limits() -> None:
    critic = NotingCritic()
    ValueAnnotator(critic, OneRank(), max_sequences=2, max_tokens=0)(groups())
    assert [number for number, _ in critic.noted] == [2] * 6
    critic.noted.clear()
    ValueAnnotator(critic, OneRank(), max_sequences=5, max_tokens=14)(groups())
    assert max(number for number, _ in critic.noted) > 1
    assert max(length for _, length in critic.noted) <= 14
    assert sum(length for _, length in critic.noted) == sum(
        len(g.prompt.token_ids) + len(r.completion_ids) for g in groups() for r in g.rollouts
    )


@pytest.mark.parametrize("collective", [False, True])
def test_ranks_compute_equally_many_values_where_passes_are_collective(collective: bool) -> None:
    long = groups()[0].rollouts[0]
    prompt = groups()[0].prompt
    uneven = [
        RolloutGroup(
            prompt,
            0,
            0,
            tuple(
                replace(
                    long,
                    sample_index=index,
                    completion_ids=(1,) * length,
                    behaviour_logprobs=(0.0,) * length,
                    log_kept_mass=(0.0,) * length,
                )
                for index, length in enumerate((9, 1, 1, 1))
            ),
        )
    ]

    class First(RankOf):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            return [data, b"\0" * 12]

    critic = NotingCritic()
    options: dict[str, Any] = {"collective_forward": True} if collective else {}
    ValueAnnotator(critic, First(0, 2), max_sequences=1, max_tokens=0, **options)(uneven)
    # the others have three short ones; its fillers are the shortest
    assert [length for _, length in critic.noted] == [11] + [3, 3] * collective


def test_metrics_keep_no_graph() -> None:
    batch = pack([sample_of((0.0, 0.5), (1.0, 1.0))])
    output = ValueObjective(0.2)(batch, a_critic().values(batch.tokens), Counts(2, 1))
    assert output.loss.requires_grad
    assert not any(part.requires_grad for pair in output.metrics.values() for part in pair)
