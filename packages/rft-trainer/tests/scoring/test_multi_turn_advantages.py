"""Conversations in the step: observations are in no loss, no denominator and no statistic, however the batch is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rft_algos.algorithms import components
from rft_algos.algorithms.published import PUBLISHED, Grpo, PolicyAlgorithm, Ppo, ReinforceAlgorithm
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_trainer.batches.packing import count, pack
from rft_trainer.batches.prompt_ledger import LedgerEntry
from rft_trainer.batches.units import MicroBatching
from rft_trainer.environments.episodes import BuiltinEpisodes
from rft_trainer.environments.protocol import Answer, AssistantTurn, EnvironmentPrompt
from rft_trainer.environments.tool_calls import ToolCallFormat
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Prompt, Rollout, RolloutGroup, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn, turn_rewards
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.multi_turn import ConversationLimits, Conversations
from rft_trainer.runs.step_report import rollout_metrics
from rft_trainer.scoring.advantages import AdvantageEstimator, PolicyScores, RewardShapingConfig
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import FilterResult, build_samples
from rft_trainer.testing.bigram import BigramEngine, BigramPolicy, DigitDecoder, OneRank, PlainOptimizer, PlainOutcome
from rft_trainer.update.critic import explained_variance
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

STOP = 9
RULES = RewardShapingConfig(longest_response=40)


def rollout(number: int, turns: Sequence[Turn], tokens: Sequence[int]) -> Rollout:
    marks = [turn.sampled for turn in turns for _ in range(turn.num_tokens)]
    return Rollout(
        prompt_id="p",
        sample_index=number,
        completion_ids=tuple(tokens),
        behaviour_logprobs=tuple(-0.5 - 0.1 * i if mark else 0.0 for i, mark in enumerate(marks)),
        log_kept_mass=(0.0,) * len(tokens),
        finish_reason="stop",
        weight_version=0,
        response_text="x",
        reward=sum(turn.reward for turn in turns if turn.sampled),
        status=RewardStatus.OK,
        steps=turn_rewards(turns),
        turns=tuple(turns),
    )


GROUPS = [
    RolloutGroup(
        Prompt("p", (1, 2), "p", None, "p"),
        0,
        0,
        (
            rollout(
                0,
                [Turn(False, 1, ""), Turn(True, 2, "a", 0.25), Turn(False, 3, "o"), Turn(True, 1, "b", 1.0)],
                [7, 3, 9, 5, 5, 7, 4],
            ),
            rollout(1, [Turn(False, 1, ""), Turn(True, 3, "a", 0.0)], [7, 3, 3, 9]),
            rollout(
                2,
                [Turn(False, 1, ""), Turn(True, 1, "a", 0.5), Turn(False, 2, "o"), Turn(True, 2, "b")],
                [7, 9, 5, 7, 8, 9],
            ),
        ),
    )
]


def behaviour(groups: Sequence[RolloutGroup] = GROUPS) -> list[tuple[float, ...]]:
    return [one.behaviour_logprobs for group in groups for one in group.rollouts]


def credited(record: PolicyAlgorithm, values: Sequence[tuple[float, ...]] = ()) -> list[TrainingSample]:
    told = PolicyScores(behaviour(), behaviour(), values=values)
    return AdvantageEstimator(record, RULES, seed=0)(GROUPS, told, step=0)[0]


def test_a_batch_masks_what_was_not_sampled() -> None:
    samples = build_samples(GROUPS, [1.0, 2.0, 3.0], behaviour(), [])
    batch = pack(samples)
    learned = batch.token_ids_T[batch.loss_mask_T].tolist()
    assert learned == [3, 9, 4, 3, 3, 9, 9, 8, 9]
    assert count(samples).num_loss_tokens == 9 == int(batch.loss_mask_T.sum())
    assert count(samples).num_sequences == 3


def test_a_sample_without_a_prompt_counts_what_is_learned() -> None:
    sample = TrainingSample("s", (1, 2, 3), 0, 0.0, loss_mask=(True, False, True))
    assert sample.num_loss_tokens == 1 == int(pack([sample]).loss_mask_T.sum())


def test_groups_are_compared_by_whole_conversations() -> None:
    samples = credited(Grpo())
    assert [sample.token_advantages for sample in samples] == [(), (), ()]  # one number for all sampled tokens
    assert samples[0].advantage > 0 > samples[1].advantage


def test_returns_credit_a_turn_with_later_turns() -> None:
    record = ReinforceAlgorithm(advantage=components.Returns(gamma=1.0), normalise_advantages=False)
    samples = credited(record)
    assert samples[0].token_advantages == pytest.approx((0, 1.25, 1.25, 0, 0, 0, 1.0))
    assert samples[2].token_advantages == pytest.approx((0, 0.5, 0, 0, 0, 0))


def test_a_critic_is_asked_and_judged_at_sampled_tokens_alone() -> None:
    values = [tuple(0.1 * i if mark else 99.0 for i, mark in enumerate(one.loss_mask)) for one in GROUPS[0].rollouts]
    record = Ppo(advantage=components.Gae(gamma=1.0, lambd=1.0), normalise_advantages=False, kl_coef=0.0)
    samples = credited(record, values)
    assert samples[0].returns == pytest.approx((0, 1.25, 1.25, 0, 0, 0, 1.0))
    total, number = explained_variance(samples)
    residuals = torch.tensor(
        [1.25 - 0.1, 1.25 - 0.2, 1.0 - 0.6, 0 - 0.1, 0 - 0.2, 0 - 0.3, 0.5 - 0.1, 0 - 0.4, 0 - 0.5]
    )
    returns = torch.tensor([1.25, 1.25, 1.0, 0, 0, 0, 0.5, 0, 0])
    assert float(total / number) == pytest.approx(float(1 - residuals.double().var() / returns.double().var()))


class KeepGradients(PlainOptimizer):
    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> PlainOutcome:
        return PlainOutcome(0.0, True)


def gradient(
    samples: Sequence[TrainingSample], record: PolicyAlgorithm, micro: MicroBatching
) -> tuple[torch.Tensor, dict[str, float]]:
    torch.manual_seed(0)
    policy = BigramPolicy(10, dtype=torch.float64)
    with torch.no_grad():
        policy.table.add_(torch.randn(10, 10, dtype=torch.float64))
    totals = MetricTotals()
    optimizer = KeepGradients(list(policy.parameters()))
    loss = PolicyLoss(policy, PolicyObjective(record))
    Updater(loss, optimizer, OneRank(), micro_batching=micro, learning_rate=lambda _: 0.1)(samples, 0, totals)
    assert policy.table.grad is not None
    return policy.table.grad, totals.merged(OneRank())


@pytest.mark.parametrize("kind", PUBLISHED, ids=lambda kind: kind.name)
def test_no_cut_changes_the_step_and_no_observation_is_in_it(kind: type[PolicyAlgorithm]) -> None:
    record = kind(max_tokens=40) if kind.__dataclass_fields__["aggregation"].default == "fixed_length" else kind()
    needs = record.advantage
    if needs.needs_values or needs.needs_greedy:
        groups = [replace(group, baseline_reward=0.3) for group in GROUPS]
    else:
        groups = GROUPS
    if kind.name == "pass_at_k":  # right or wrong, and fewer draws than the group has
        record = replace(record, advantage=components.PassAtK(k=2))
        judged = tuple(replace(one, reward=float(one.sample_index == 0)) for one in groups[0].rollouts)
        groups = [replace(groups[0], rollouts=judged)]
    values = [(0.3,) * len(one.completion_ids) for one in groups[0].rollouts] if needs.needs_values else ()
    extra = {"reference": behaviour(), "entropy": [(0.5,) * len(row) for row in behaviour()]}
    told = PolicyScores(behaviour(), behaviour(), extra["reference"], values, extra["entropy"])
    samples, _ = AdvantageEstimator(record, RULES, seed=0)(groups, told, step=0)
    whole, metrics = gradient(samples, record, MicroBatching(8, 0, by_tokens=False))
    parts, cut = gradient(samples, record, MicroBatching(1, 0, by_tokens=False))
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-12)
    assert cut["policy/entropy"] == pytest.approx(metrics["policy/entropy"])
    # rows 5 and 7 of the table predict what follows them: no loss token stands behind the first 5, one behind a 7
    assert not whole[5].abs().sum()
    shifted = [
        replace(s, old_logprobs=tuple(x if m else 55.0 for x, m in zip(s.old_logprobs, s.loss_mask, strict=True)))
        for s in samples
    ]
    again, _ = gradient(shifted, record, MicroBatching(8, 0, by_tokens=False))
    torch.testing.assert_close(again, whole, rtol=1e-12, atol=1e-14)


def test_an_annotator_scores_sampled_tokens_and_leaves_0_between() -> None:
    policy = BigramPolicy(10)
    annotate = LogprobScorer(policy, OneRank(), max_sequences=2, max_tokens=0, temperature=1.0)
    rows = annotate(GROUPS)
    flat = -torch.tensor(10.0).log()
    assert rows[0] == pytest.approx([0, flat, flat, 0, 0, 0, flat])


def test_lengths_are_those_of_what_was_sampled() -> None:
    metrics = rollout_metrics(GROUPS, FilterResult(tuple(GROUPS), {}))
    assert metrics["completion/length_mean"] == 3.0
    assert metrics["turn/observation_tokens_mean"] == pytest.approx((4 + 1 + 3) / 3)


class Tool:
    """A turn that says 6 calls it and is told 8; one that says 3 after that is right."""

    def reset(self, prompt: EnvironmentPrompt, key: int) -> None:
        self.called = False

    def step(self, turn: AssistantTurn) -> Answer:
        if turn.calls:
            self.called = True
            return Answer(["8"])
        right = self.called and "3" in turn.text.split()
        return Answer(reward=float(right), done=True)


class TokenText:
    def opening(self, messages: object) -> tuple[int, ...]:
        return (7,)

    def observation(self, messages: object) -> tuple[int, ...]:
        return (5, 8)


def collector(policy: BigramPolicy, collectives: object = None, greedy: bool = False) -> RolloutCollector:
    conversations = Conversations(
        BigramEngine(policy),
        DigitDecoder(),
        BuiltinEpisodes(Tool),
        TokenText(),
        ToolCallFormat("(?P<arguments>6)"),
        ConversationLimits(3, 3),
    )
    return RolloutCollector(
        BigramEngine(policy),
        DigitDecoder(),
        lambda items: pytest.fail("the environment says what a conversation earns"),
        collectives or OneRank(),  # type: ignore[arg-type]
        sampling=SamplingOptions(temperature=1.0, max_new_tokens=12, stop_token_ids=(STOP,)),
        group_size=16,
        seed=0,
        greedy_baseline=greedy,
        conversations=conversations,
    )


def entries(num: int, epoch: int) -> list[LedgerEntry]:
    return [LedgerEntry(epoch, place, place) for place in range(num)]


PROMPTS = [Prompt(f"p:{i}", (1, 1 + i), "p", None, "p") for i in range(4)]


def test_a_policy_learns_to_call_a_tool() -> None:
    policy, record = BigramPolicy(10), Grpo(kl_coef=0.0)
    optimizer = PlainOptimizer(list(policy.parameters()))
    assign = AdvantageEstimator(record, RULES, seed=0)
    update = Updater(
        PolicyLoss(policy, PolicyObjective(record)),
        optimizer,
        OneRank(),
        micro_batching=MicroBatching(64, 0, by_tokens=False),
        learning_rate=lambda _: 30.0,
    )
    collect, rewards, calls = collector(policy), [], []
    for step in range(24):
        groups = collect.collect(entries(4, step), PROMPTS, PhaseTimer())
        metrics = rollout_metrics(groups, FilterResult(tuple(groups), {}))
        rewards.append(metrics["reward/mean"])
        calls.append(metrics["turn/call_share"])
        told = [one.behaviour_logprobs for group in groups for one in group.rollouts]
        samples, _ = assign(groups, PolicyScores(told, told), step=step)
        update(samples, step, MetricTotals())
    assert rewards[0] < 0.1
    assert sum(rewards[-3:]) / 3 > 0.8
    assert sum(calls[-3:]) / 3 > 0.4 > 0.2 > calls[0]  # every other turn calls


def test_two_ranks_give_the_groups_of_one() -> None:
    policy = BigramPolicy(10)
    alone = collector(policy).collect(entries(4, 0), PROMPTS, PhaseTimer())
    parts: list[bytes] = []

    class SentError(Exception):
        pass

    class Rank(OneRank):
        world_size = 2

        def __init__(self, rank: int, received: list[bytes]) -> None:
            self.rank, self.received = rank, received

        def gather_bytes(self, data: bytes) -> list[bytes]:
            if self.received:
                return self.received
            parts.append(data)
            raise SentError

    for rank in range(2):
        with pytest.raises(SentError):
            collector(policy, Rank(rank, [])).collect(entries(4, 0), PROMPTS, PhaseTimer())
    gathered = collector(policy, Rank(0, parts)).collect(entries(4, 0), PROMPTS, PhaseTimer())

    def untimed(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return [
            replace(
                g, rollouts=tuple(replace(r, turns=tuple(replace(t, seconds=0.0) for t in r.turns)) for r in g.rollouts)
            )
            for g in groups
        ]

    assert untimed(gathered) == untimed(alone)


def test_a_greedy_baseline_is_a_conversation_too() -> None:
    policy = BigramPolicy(10)
    with torch.no_grad():
        policy.table[7, 6] = policy.table[6, STOP] = policy.table[8, 3] = policy.table[3, STOP] = 9.0
    groups = collector(policy, greedy=True).collect(entries(1, 0), PROMPTS[:1], PhaseTimer())
    assert groups[0].baseline_reward == 1.0
