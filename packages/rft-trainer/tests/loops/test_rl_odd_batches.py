"""N2: batches that are odd in one way or in all, for every published algorithm: no NaN, no crash, and each is counted.

Every batch is the first of two steps of the whole loop, so that a step behind it shows what it left in the weights, the
running scale and the moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from rft_algos.algorithms.components import PassAtK
from rft_algos.algorithms.published import PUBLISHED, PolicyAlgorithm
from rft_core.errors import OptionsError
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.batches.prompt_ledger import Ledger, LedgerEntry
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.rl import CriticTrainer, OldPolicyScorer, RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.metrics.totals import MetricTotals
from rft_trainer.records.rollouts import Counts, Prompt, Rollout, RolloutGroup, TokenBatch, TrainingSample
from rft_trainer.records.scores import RewardStatus
from rft_trainer.records.turns import Turn
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, RewardShapingConfig
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.testing.bigram import BigramPolicy, MemoryWriter, OneRank, PlainOptimizer, TokenCritic
from rft_trainer.update.critic import ValueAnnotator, ValueLoss, ValueObjective
from rft_trainer.update.fault_trace import FaultTracer
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchOutput, Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

VOCABULARY, LONGEST, PROMPTS, SAMPLES = 6, 48, 3, 4
RATE = 0.05
MARKER = 5
"""A token of the row whose loss or gradient jumps, and of no other."""


@dataclass(frozen=True)
class Odd:
    """One response: its tokens, what it earned, and the conversation that it is."""

    tokens: tuple[int, ...]
    reward: float
    turns: tuple[Turn, ...] = ()


Batch = list[list[Odd]]


def usual(group: int, sample: int) -> Odd:
    tokens = tuple(1 + (group + sample + place) % 4 for place in range(2 + (group + sample) % 3))
    return Odd(tokens, float((group + sample) % 2))


def plain() -> Batch:
    return [[usual(group, sample) for sample in range(SAMPLES)] for group in range(PROMPTS)]


def changed(place: tuple[int, int], odd: Odd) -> Batch:
    batch = plain()
    batch[place[0]][place[1]] = odd
    return batch


def everywhere(change: Callable[[Odd], Odd]) -> Batch:
    return [[change(one) for one in group] for group in plain()]


def longest_and_shortest() -> Batch:
    batch = changed((0, 0), Odd(tuple(1 + place % 4 for place in range(LONGEST)), 1.0))
    batch[0][1] = batch[1][2] = Odd((2,), 0.0)
    return batch


def observed(one: Odd) -> Odd:
    """Its tokens are all an environment's."""
    return replace(one, turns=(Turn(False, len(one.tokens), "seen"),))


def all_at_once() -> Batch:
    batch = longest_and_shortest()
    batch[1] = [Odd((), 0.0), Odd((3,), 1e3), observed(usual(1, 0)), Odd((), 1.0)]
    batch[2] = [usual(2, 0)]
    return batch


@dataclass(frozen=True)
class Kind:
    """An odd batch, and what the row of its step says of it."""

    batch: Callable[[], Batch]
    counted: Mapping[str, object]
    smallest_group: int = 2


KINDS = {
    "the longest response beside ones of a token": Kind(
        longest_and_shortest, {"completion/length_max": LONGEST, "completion/truncated_share": 1 / 12}
    ),
    "every response of one token": Kind(
        lambda: everywhere(lambda one: replace(one, tokens=one.tokens[:1])),
        {"completion/length_max": 1, "completion/length_mean": 1.0},
    ),
    "rewards all equal": Kind(
        lambda: everywhere(lambda one: replace(one, reward=1.0)), {"reward/groups_with_signal": 0.0, "reward/min": 1.0}
    ),
    "rewards all zero": Kind(
        lambda: everywhere(lambda one: replace(one, reward=0.0)), {"reward/groups_with_signal": 0.0, "reward/max": 0.0}
    ),
    "groups of one, left out": Kind(lambda: [group[:1] for group in plain()], {"drop/alone_in_group": PROMPTS}),
    "groups of one, trained on": Kind(
        lambda: [group[:1] for group in plain()], {"data/samples": PROMPTS, "reward/groups_with_signal": 0.0}, 1
    ),
    "an empty response": Kind(lambda: changed((1, 1), Odd((), 0.0)), {"completion/empty_share": 1 / 12}),
    "empty responses alone": Kind(
        lambda: everywhere(lambda one: replace(one, tokens=())),
        {"completion/empty_share": 1.0, "completion/length_max": 0},
    ),
    "a batch that is masked whole": Kind(
        lambda: everywhere(observed), {"completion/empty_share": 1.0, "completion/length_max": 0}
    ),
    "a reward a thousand times as large": Kind(
        lambda: changed((0, 1), replace(usual(0, 1), reward=1e3)), {"reward/max": 1e3}
    ),
    "all of these at once": Kind(
        all_at_once,
        {
            "completion/empty_share": 3 / 9,
            "completion/length_max": LONGEST,
            "reward/max": 1e3,
            "drop/alone_in_group": 1,
        },
    ),
}


@dataclass
class Planned:
    """A source of rollouts that gives one planned batch after another."""

    policy: BigramPolicy
    ledger: Ledger
    batches: list[Batch]
    version: int = 0

    def reserve(self, num: int) -> list[LedgerEntry]:
        return self.ledger.reserve(num)

    def collect(
        self, entries: Sequence[LedgerEntry], prompts: Sequence[Prompt], timer: PhaseTimer
    ) -> list[RolloutGroup]:
        rows = zip(entries, prompts, self.batches[self.version], strict=True)
        return [self._group(entry, prompt, responses) for entry, prompt, responses in rows]

    def _group(self, entry: LedgerEntry, prompt: Prompt, responses: list[Odd]) -> RolloutGroup:
        rollouts = tuple(self._rollout(prompt, number, one) for number, one in enumerate(responses))
        return RolloutGroup(prompt, entry.epoch, entry.position, rollouts, baseline_reward=0.5)

    @torch.no_grad()
    def _rollout(self, prompt: Prompt, number: int, one: Odd) -> Rollout:
        table = self.policy.table.log_softmax(-1)
        before = (prompt.token_ids[-1], *one.tokens)[: len(one.tokens)]
        logprobs = tuple(float(table[last, token]) for last, token in zip(before, one.tokens, strict=True))
        learned = tuple(0.0 for _ in one.tokens) if one.turns else logprobs
        return Rollout(
            prompt_id=prompt.prompt_id,
            sample_index=number,
            completion_ids=one.tokens,
            behaviour_logprobs=learned,
            log_kept_mass=(0.0,) * len(one.tokens),
            finish_reason="length" if len(one.tokens) == LONGEST else "stop",
            weight_version=self.version,
            response_text="" if one.turns else " ".join(map(str, one.tokens)),
            reward=one.reward,
            status=RewardStatus.OK,
            breakdown={"format": one.reward / 2, "right": one.reward / 2},
            turns=one.turns,
        )

    def load_weights(self, version: int) -> None:
        self.version = version

    def metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, object]:
        return {}

    def wake(self) -> None: ...

    def sleep(self, level: int = 1) -> None: ...


@dataclass
class Jumping:
    """The policy's loss, in which the row with the marker has a loss or a gradient a thousand times as large."""

    inner: Any
    stage: str

    @property
    def model(self) -> object:
        return self.inner.model

    @property
    def prepass(self) -> bool:
        return self.inner.prepass

    def begin(self, batches: Sequence[TokenBatch], idle: Sequence[TokenBatch]) -> None:
        self.inner.begin(batches, idle)

    def __call__(self, batch: TokenBatch, counts: Counts, totals: MetricTotals) -> MicroBatchOutput:
        output = self.inner(batch, counts, totals)
        if MARKER not in batch.token_ids_T.tolist():
            return output
        if self.stage == "loss":
            return replace(output, loss=output.loss * 1e3)
        output.loss.register_hook(lambda gradient: gradient * 1e3)
        return output

    def filler(self, batch: TokenBatch) -> Any:
        return self.inner.filler(batch)

    def whole_step(self, samples: Sequence[TrainingSample], counts: Counts, totals: MetricTotals) -> None:
        self.inner.whole_step(samples, counts, totals)


@dataclass
class Rows:
    """A reporter that keeps the rows."""

    rows: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def step(self, metrics: Mapping[str, object], *_: Any, **__: Any) -> None:
        self.rows.append(dict(metrics))

    def rollouts(self, *_: Any) -> None: ...


def setting(kind: type[PolicyAlgorithm]) -> PolicyAlgorithm:
    """An algorithm as published, with what it has no default for."""
    return kind(max_tokens=LONGEST) if kind.__dataclass_fields__["aggregation"].default == "fixed_length" else kind()


class Loop:
    """The loop of one algorithm over planned batches."""

    def __init__(self, record: PolicyAlgorithm, batches: list[Batch], smallest_group: int, jump: str = "") -> None:
        torch.manual_seed(3)
        one, self.progress, self.rows = OneRank(), Progress(), Rows()
        self.policy, critic = BigramPolicy(VOCABULARY), TokenCritic(VOCABULARY)
        with torch.no_grad():
            self.policy.table.normal_()
        prompts = [Prompt(f"p:{number}", (1 + number % 4,), "?", "x", "p") for number in range(2 * PROMPTS)]
        ledger = Ledger(
            len(prompts),
            1,
            lambda epoch: permutation(derive_key(3, "order", epoch), len(prompts)).tolist(),
            data_hash="d",
            seed=3,
        )
        # the running scale is kept over both steps, where it would spread what is not a number
        shaping = RewardShapingConfig(longest_response=LONGEST, running_norm=True)
        credit = AdvantageEstimator(record, shaping, seed=3)
        reference = LogprobScorer(BigramPolicy(VOCABULARY), one, max_sequences=4, max_tokens=0, temperature=1.0)
        own = LogprobScorer(self.policy, one, max_sequences=4, max_tokens=0, temperature=1.0)
        needs_old = record.needs_old_logprobs or record.needs_old_entropy
        guard = NumericGuard(max_rows=2, spike_factor=10.0 if jump else 0.0)
        loss: Any = PolicyLoss(self.policy, PolicyObjective(record, credit.coefficients))
        self.guard = self.progress.guards["policy"] = guard
        optimizer = PlainOptimizer([self.policy.table])
        self.updater = Updater(
            Jumping(loss, jump) if jump else loss,
            optimizer,
            one,
            micro_batching=MicroBatching(3, 0, False),
            learning_rate=lambda update: RATE,
            guard=guard,
            trace=FaultTracer(self.policy),
        )
        critic_update = Updater(
            ValueLoss(critic, ValueObjective(clip=None)),
            PlainOptimizer([critic.table]),
            one,
            micro_batching=MicroBatching(3, 0, False),
            learning_rate=lambda update: RATE,
        )
        values = ValueAnnotator(critic, one, max_sequences=4, max_tokens=0)
        self.loop = RlLoop(
            ledger=ledger,
            prompts=prompts,
            rollouts=Planned(self.policy, ledger, batches),  # type: ignore[arg-type]
            assign_credit=credit,
            reference=reference if record.needs_reference else None,
            old_policy=OldPolicyScorer(own, record.needs_old_logprobs, record.needs_old_entropy) if needs_old else None,
            critic=CriticTrainer(values, critic_update) if record.advantage.needs_values else None,
            control=None,
            updater=self.updater,
            evaluator=None,
            saver=Saver(
                MemoryWriter(),
                self.policy,
                optimizer,
                {},
                one,
                schedule=SaveSchedule(0, 0, 0.0),
                before_save=lambda: None,
            ),
            reporter=self.rows,  # type: ignore[arg-type]
            collectives=one,
            rules=StepConfig(
                prompts_per_rollout=PROMPTS,
                rollouts_per_step=1,
                train_batch_size=PROMPTS * SAMPLES,
                epochs_per_step=1,
                skip_zero_advantage=not record.has_other_terms,
                filter_groups=False,
                refill_rounds=0,
                smallest_group=smallest_group,
                needs_baseline=record.advantage.needs_greedy,
                frozen_steps=0,
                max_steps=0,
                eval_every=0,
                max_refused_in_a_row=1,
                max_unscored_share=0.0,
            ),
            progress=self.progress,
            timer=PhaseTimer(),
            resume_command="rft-train resume here",
            sleep_engine=False,
        )

    def run(self) -> list[dict[str, object]]:
        self.loop.run(StopSignals())
        return self.rows.rows


def not_finite(row: Mapping[str, object]) -> list[str]:
    """What of a row is no finite number; a step without an update has neither the norm nor the rate of one."""
    bad = {name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    absent = [part for part in ("policy", "critic") if row.get(f"{part}/updates") == 0]
    return sorted(bad - {f"{part}/{name}" for part in absent for name in ("gradient_norm", "learning_rate")})


@pytest.mark.parametrize("algorithm", PUBLISHED, ids=lambda kind: kind.name)
def test_n2_odd_batches_give_numbers_and_are_counted(algorithm: type[PolicyAlgorithm]) -> None:
    record = setting(algorithm)
    for name, kind in KINDS.items():
        run = Loop(record, [kind.batch(), plain()], kind.smallest_group)
        if isinstance(record.advantage, PassAtK) and kind.counted.get("reward/max") == 1e3:
            # of such a reward it has no meaning: an error that says so, before a weight changes
            with pytest.raises(OptionsError, match="a reward of 1000"):
                run.run()
            continue
        odd, after = run.run()
        assert {key: odd.get(key) for key in kind.counted} == pytest.approx(kind.counted), name
        assert (not_finite(odd), not_finite(after)) == ([], []), name
        assert bool(run.policy.table.isfinite().all()), name
        assert (odd["policy/updates_refused"], after["policy/updates_refused"]) == (0, 0), name


@pytest.mark.parametrize("stage", ["loss", "gradient"])
@pytest.mark.parametrize("algorithm", PUBLISHED, ids=lambda kind: kind.name)
def test_n2_a_row_that_jumps_is_counted_and_left_out(algorithm: type[PolicyAlgorithm], stage: str) -> None:
    record = setting(algorithm)
    quiet = Loop(record, [plain(), plain()], 2)
    norm = quiet.run()[0]["policy/gradient_norm"]
    assert isinstance(norm, float)
    batch = changed((0, 1), Odd((1, MARKER, 2), 1.0))
    run = Loop(record, [batch, plain()], 2, stage)
    for _ in range(16):
        run.guard.applied(norm)
    before = run.policy.table.detach().clone()
    odd, after = run.run()
    assert (not_finite(odd), not_finite(after)) == ([], [])
    assert odd.get("policy/spikes") == 1
    left_out = odd.get("policy/rows_set_aside", 0.0)
    assert left_out == 1 or odd["policy/updates_refused"] == 1
    moved = float((run.policy.table.detach() - before).norm())
    assert moved < 2 * RATE * 10 * norm, "no step was larger than the limit"
