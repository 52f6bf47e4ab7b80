"""The RL loop with a bigram policy: it learns, saves whole steps only, resumes to the bit, and refuses what it must."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_algos.algorithms import components
from rft_algos.algorithms.published import Grpo, PolicyAlgorithm, Ppo, ReinforceAlgorithm, ReMaxAlgorithm
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.schedules.controllers import AdaptiveKl, EntropyTarget
from rft_core.durable_files import read_records
from rft_core.errors import AlarmError, NumericsError, RftError, SavedAfterSignal, ServiceError
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.evaluation.ema_evaluator import EmaEvaluator
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.loops.rl import CriticTrainer, OldPolicyScorer, RlLoop, StepConfig
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import Prompt
from rft_trainer.records.scores import RewardItem, RewardStatus, Score
from rft_trainer.rollouts.collector import RolloutCollector, place_steps
from rft_trainer.rollouts.source import SyncRollouts
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import AlarmStop, StopSignals
from rft_trainer.scoring.advantages import AdvantageEstimator, RewardShapingConfig
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.samples import shuffle_rewards
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.testing.bigram import (
    BigramEngine,
    BigramPolicy,
    DigitDecoder,
    MemoryWriter,
    OneRank,
    PlainOptimizer,
    PlainOutcome,
    TokenCritic,
)
from rft_trainer.update.critic import ValueAnnotator, ValueLoss, ValueObjective
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective

VOCABULARY, STOP = 6, 0
PROMPTS = [Prompt(f"p:{i}", (1 + i % 5,), str(1 + i % 5), str(1 + i % 5), "p") for i in range(20)]
RULES = StepConfig(
    prompts_per_rollout=5,
    rollouts_per_step=1,
    train_batch_size=20,
    epochs_per_step=1,
    skip_zero_advantage=True,
    filter_groups=False,
    refill_rounds=0,
    smallest_group=2,
    needs_baseline=False,
    frozen_steps=0,
    max_steps=0,
    eval_every=4,
    max_refused_in_a_row=1,
    max_unscored_share=0.1,
)


def repeats_its_prompt(items: Sequence[RewardItem]) -> list[Score]:
    """1 when the first token of the response is the prompt's."""
    return [Score(float(item.response_text.split()[0] == item.label)) for item in items]


class Made:
    """A run with its parts in reach."""

    def __init__(self, path: Path, rules: StepConfig = RULES, episodes: int = 10, **changed: object) -> None:
        record = changed.pop("record", Grpo(kl_place="none", kl_coef=0.0))
        assert isinstance(record, PolicyAlgorithm)
        score_rules = changed.pop("score_rules", RewardShapingConfig(longest_response=3))
        assert isinstance(score_rules, RewardShapingConfig)
        controllers = {name: changed.pop(name) for name in ("kl_controller", "entropy_controller") if name in changed}
        reward = changed.pop("reward", repeats_its_prompt)
        self.policy = BigramPolicy(VOCABULARY)
        self.engine = BigramEngine(self.policy)
        self.writer = MemoryWriter()
        self.directory = RunDirectory.create(
            path, config_text="recipe: {command: rl}\n", command=["rft-train"], environment={}
        )
        ledger = Ledger(
            len(PROMPTS),
            episodes,
            lambda epoch: permutation(derive_key(3, "order", epoch), len(PROMPTS)).tolist(),
            data_hash="d",
            seed=3,
        )
        progress, one = Progress(), OneRank()
        optimizer = PlainOptimizer([self.policy.table])
        reference = LogprobScorer(BigramPolicy(VOCABULARY), one, max_sequences=4, max_tokens=0, temperature=1.0)
        sampling = SamplingOptions(temperature=1.0, max_new_tokens=3, stop_token_ids=(STOP,))
        self.credit = AdvantageEstimator(record, score_rules, seed=3, **controllers)  # type: ignore[arg-type]
        self.critic = TokenCritic(VOCABULARY)
        self.collector = RolloutCollector(
            self.engine,
            DigitDecoder(),
            reward,
            one,
            sampling=sampling,
            group_size=4,
            seed=3,
            greedy_baseline=record.advantage.needs_greedy,
        )
        self.loop = RlLoop(
            ledger=ledger,
            prompts=PROMPTS,
            rollouts=SyncRollouts(self.engine, self.collector, ledger),
            assign_credit=self.credit,
            reference=reference if record.needs_reference else None,
            old_policy=self._old_policy(record, one),
            critic=self._critic_part(one) if record.advantage.needs_values else None,
            control=None,
            updater=Updater(
                PolicyLoss(self.policy, PolicyObjective(record, self.credit.coefficients)),
                optimizer,
                one,
                micro_batching=MicroBatching(3, 0, False),
                learning_rate=lambda update: 8.0,
            ),
            evaluator=Evaluator(
                self.engine,
                DigitDecoder(),
                reward,
                one,
                PROMPTS[:5],
                sampling=SamplingOptions(temperature=0.0, max_new_tokens=3, stop_token_ids=(STOP,)),
            ),
            saver=Saver(
                self.writer,
                self.policy,
                optimizer,
                {"progress": progress, "ledger": ledger, "credit": self.credit},
                one,
                schedule=SaveSchedule(3, 0, 0.0),
                before_save=self.directory.sync,
            ),
            reporter=Reporter(
                self.directory, [JsonlSink(self.directory)], one, num_steps=40, rollout_every=5, rollouts_kept=6
            ),
            collectives=one,
            rules=rules,
            progress=progress,
            timer=PhaseTimer(),
            resume_command="rft-train resume here",
            sleep_engine=True,
        )
        for name, value in changed.items():
            setattr(self.loop, name, value)

    def _old_policy(self, record: PolicyAlgorithm, one: OneRank) -> OldPolicyScorer | None:
        if not (record.needs_old_logprobs or record.needs_old_entropy):
            return None
        annotate = LogprobScorer(self.policy, one, max_sequences=4, max_tokens=0, temperature=1.0)
        return OldPolicyScorer(annotate, record.needs_old_logprobs, record.needs_old_entropy)

    def _critic_part(self, one: OneRank) -> CriticTrainer:
        return CriticTrainer(
            ValueAnnotator(self.critic, one, max_sequences=4, max_tokens=0),
            Updater(
                ValueLoss(self.critic, ValueObjective(clip=None)),
                PlainOptimizer([parameter for _, parameter in self.critic.named_parameters()]),
                one,
                micro_batching=MicroBatching(3, 0, False),
                learning_rate=lambda update: 1.0,
            ),
        )

    def resume_from(self, other: Made) -> None:
        """Continue from the last checkpoint of another run."""
        step, records = other.writer.saved[-1]
        with torch.no_grad():
            self.policy.table.copy_(other.policy.table)
        self.loop.saver.restore(step, json.loads(json.dumps(records)))
        self.loop.rollouts.load_weights(step)

    def evaluations(self) -> list[dict[str, object]]:
        self.directory.sync()
        file = self.directory.path / "evals.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def rows(self) -> list[dict[str, object]]:
        self.directory.sync()
        return self.directory.read_metrics().rows


def without_times(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def test_the_policy_learns_to_repeat_its_prompt(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    results = made.loop.run(StopSignals())
    rows = made.rows()
    first, last = ([float(str(r["reward/mean"])) for r in part] for part in (rows[:5], rows[-5:]))
    assert sum(last) / 5 > sum(first) / 5 + 0.4
    assert results["after"].accuracy == 1.0
    assert len(rows) == 40
    assert [step for step, _ in made.writer.saved] == [*range(0, 40, 3), 40]


def test_rewards_shuffled_within_groups_teach_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", control=lambda groups: shuffle_rewards(groups, 3))
    made.loop.run(StopSignals())
    rewards = [float(str(row["reward/mean"])) for row in made.rows()]
    assert sum(rewards[-10:]) / 10 < sum(rewards[:10]) / 10 + 0.15


def test_a_run_continued_from_a_checkpoint_repeats_the_same_steps(tmp_path: Path) -> None:
    whole = Made(tmp_path / "whole")
    whole.loop.run(StopSignals())
    part = Made(tmp_path / "part", replace(RULES, max_steps=12))
    part.loop.run(StopSignals())
    step, records = part.writer.saved[-1]
    assert step == 12
    again = Made(tmp_path / "again")
    with torch.no_grad():
        again.policy.table.copy_(part.policy.table)
    again.loop.saver.restore(12, json.loads(json.dumps(records)))
    again.engine.load_weights(12)
    again.loop.run(StopSignals())
    assert torch.equal(again.policy.table, whole.policy.table)
    assert without_times(part.rows() + again.rows()) == [
        row | {"step": row["step"]} for row in without_times(whole.rows())
    ]


def test_a_stop_before_any_update_saves_the_last_whole_step(tmp_path: Path) -> None:
    signals = StopSignals()
    calls = 0

    def stop_in_the_eighth(items: Sequence[RewardItem]) -> list[Score]:
        nonlocal calls
        calls += len(items) == 20
        if calls == 8:
            signals.received = "SIGTERM"
        return repeats_its_prompt(items)

    made = Made(tmp_path / "run", reward=stop_in_the_eighth)
    with pytest.raises(SavedAfterSignal) as caught:
        made.loop.run(signals)
    assert made.writer.saved[-1][0] == 7
    assert "step 7" in caught.value.problem.state
    ledger = made.writer.saved[-1][1]["ledger"]
    assert isinstance(ledger, dict)
    assert len(ledger["in_flight"]) == 5, "prompts of the unfinished step go back"


@pytest.mark.parametrize(("pauses", "error", "code"), [(True, SavedAfterSignal, 75), (False, AlarmError, 10)])
def test_an_alarm_ends_the_run_behind_its_step_as_it_was_told(
    tmp_path: Path, pauses: bool, error: type[RftError], code: int
) -> None:
    signals = StopSignals()
    calls = 0

    def alarm_in_the_third(items: Sequence[RewardItem]) -> list[Score]:
        nonlocal calls
        calls += len(items) == 20
        if calls == 3:
            signals.alarm = AlarmStop("never_ends: all cut", "--generate_max_len 8", pauses=pauses)
        return repeats_its_prompt(items)

    made = Made(tmp_path / "run", reward=alarm_in_the_third)
    with pytest.raises(error) as caught:
        made.loop.run(signals)
    assert caught.value.exit_code == code
    assert caught.value.problem.what == "alarm after step 3: never_ends: all cut"
    assert caught.value.problem.do.startswith("--generate_max_len 8; ")
    assert made.writer.saved[-1][0] == 3


def test_a_stop_while_a_run_was_prepared_saves_its_start_and_owes_the_first_evaluation(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SavedAfterSignal) as caught:
            made.loop.run(signals)
    assert caught.value.problem.what == "SIGUSR1 received; saved at step 0"
    assert made.evaluations() == []
    [(step, records, *_)] = made.writer.saved
    assert (step, records["progress"]["owed_evaluation"]) == (0, "before")
    again = Made(tmp_path / "again")
    again.loop.saver.restore(0, json.loads(json.dumps(records)))
    again.loop.run(StopSignals())
    assert [row["name"] for row in again.evaluations()][:1] == ["before"]
    assert "owed_evaluation" not in again.writer.saved[-1][1]["progress"]
    whole = Made(tmp_path / "whole")
    whole.loop.run(StopSignals())
    assert torch.equal(again.policy.table, whole.policy.table)


def test_a_reward_that_fails_is_left_out_and_too_many_end_the_run(tmp_path: Path) -> None:
    def sometimes(share: float):
        def score(items: Sequence[RewardItem]) -> list[Score]:
            scores = repeats_its_prompt(items)
            failed = round(share * len(items))
            return [Score(None, RewardStatus.FAILED, detail="it returned 'no'")] * failed + scores[failed:]

        return score

    few = Made(tmp_path / "few", replace(RULES, max_steps=1), reward=sometimes(0.05))
    few.loop.run(StopSignals())
    assert few.rows()[0]["drop/unscored"] == 1
    many = Made(tmp_path / "many", reward=sometimes(0.5))
    before = many.policy.table.clone()
    with pytest.raises(ServiceError, match="10 of 20") as caught:
        many.loop.run(StopSignals())
    assert caught.value.problem.code == "reward.too_many_failed"
    assert "(failed): it returned 'no'; response '" in caught.value.problem.where
    assert torch.equal(many.policy.table, before)


def test_updates_that_are_not_finite_are_refused_and_end_the_run(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    made.policy.table.register_hook(lambda gradient: gradient * float("nan"))
    before = made.policy.table.clone()
    with pytest.raises(NumericsError, match="2 optimizer") as caught:
        made.loop.run(StopSignals())
    assert caught.value.problem.code == "numerics.non_finite"
    assert torch.equal(made.policy.table, before)


def test_a_critic_whose_updates_are_refused_ends_the_run_though_the_policy_learns(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", record=Ppo(kl_place="none", kl_coef=0.0))
    made.critic.table.register_hook(lambda gradient: gradient * float("nan"))
    with pytest.raises(NumericsError, match="2 optimizer") as caught:
        made.loop.run(StopSignals())
    assert caught.value.problem.code == "numerics.non_finite"
    assert "--critic_learning_rate" in caught.value.problem.do
    assert made.policy.table.detach().abs().max() > 0, "the policy was trained between them"
    counts = made.loop.progress
    assert counts.refused == {"policy": 0, "critic": 2}


class SkippingOptimizer(PlainOptimizer):
    """Overflows in its first steps, which a loss scale passes over and halves itself at."""

    scale, left = 1024.0, 3

    def step(self, learning_rate: float, *, largest_norm: float = float("inf")) -> PlainOutcome:
        self.left -= 1
        if self.left < 0:
            return replace(super().step(learning_rate), loss_scale=self.scale)
        super().step(0.0)
        self.scale /= 2
        return PlainOutcome(float("inf"), False, loss_scale=self.scale)


def test_a_step_that_a_loss_scale_skips_is_no_refused_step(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", replace(RULES, max_steps=4))
    made.loop.updater._optimizer = SkippingOptimizer([made.policy.table])  # pyright: ignore[reportPrivateUsage]
    made.loop.run(StopSignals())
    assert made.loop.progress.refused == {"policy": 0}
    rows = made.rows()
    assert [row["policy/updates_skipped"] for row in rows] == [1, 1, 1, 0]
    assert [row["policy/loss_scale"] for row in rows] == [512.0, 256.0, 128.0, 128.0]


def divergence_from_uniform(policy: BigramPolicy) -> float:
    """Mean over the prompts' rows of KL(policy || uniform), where the reference is uniform."""
    rows = policy.table.detach()[1:].log_softmax(-1)
    return float((rows.exp() * (rows + torch.tensor(float(VOCABULARY)).log())).sum(-1).mean())


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_strong_divergence_penalty_keeps_the_policy_near_the_reference(tmp_path: Path, place: str) -> None:
    free = Made(tmp_path / "free", replace(RULES, max_steps=40))
    held = Made(
        tmp_path / "held",
        replace(RULES, max_steps=40, skip_zero_advantage=False),
        record=Grpo(kl_place=place, kl_coef=1.0 if place == "loss" else 2.0),
    )
    for made in (free, held):
        made.loop.run(StopSignals())
    assert divergence_from_uniform(held.policy) < 0.6 * divergence_from_uniform(free.policy)
    assert "kl/reference" in held.rows()[-1]


def test_groups_without_signal_leave_the_denominators_when_asked(tmp_path: Path) -> None:
    plain = Made(tmp_path / "plain", replace(RULES, max_steps=1))
    filtered = Made(tmp_path / "filtered", replace(RULES, max_steps=1, filter_groups=True))
    for made in (plain, filtered):
        made.loop.run(StopSignals())
    share = float(str(plain.rows()[0]["reward/groups_with_signal"]))
    assert 0 < share < 1
    assert float(str(filtered.rows()[0]["policy/gradient_norm"])) > float(str(plain.rows()[0]["policy/gradient_norm"]))


def test_a_train_batch_of_two_rollouts_collects_both_before_one_update(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", replace(RULES, rollouts_per_step=2, train_batch_size=40, max_steps=2))
    made.loop.run(StopSignals())
    assert [(row["data/samples"], row["policy/updates"]) for row in made.rows()] == [(40, 1), (40, 1)]


def test_several_updates_a_step_make_the_later_ones_off_policy(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", replace(RULES, train_batch_size=10, epochs_per_step=2, max_steps=1))
    made.loop.run(StopSignals())
    row = made.rows()[0]
    assert (row["policy/updates"], row["policy/total_updates"]) == (4, 4)
    assert float(str(row["policy/logprob_gap"])) > 1e-3


def test_the_gap_to_the_engine_is_that_of_the_first_update_and_too_large_a_one_stops_the_run(tmp_path: Path) -> None:
    rules = replace(RULES, train_batch_size=10, epochs_per_step=2, max_steps=3)
    made = Made(tmp_path / "run", rules, gaps=MismatchMonitor(collectives=OneRank(), limit=1e-4))
    made.loop.run(StopSignals())
    assert all(float(str(row["engine/logprob_gap_max"])) < 1e-5 for row in made.rows())

    stale = Made(tmp_path / "stale", rules, gaps=MismatchMonitor(collectives=OneRank(), limit=1e-4))
    served = stale.engine.generate

    def from_first_weights(*args: Any, **options: Any) -> Any:
        present = stale.policy.table.detach().clone()
        with torch.no_grad():
            stale.policy.table.zero_()
        found = served(*args, **options)
        with torch.no_grad():
            stale.policy.table.copy_(present)
        return found

    stale.engine.generate = from_first_weights  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="nats a token apart") as caught:
        stale.loop.run(StopSignals())
    assert caught.value.problem.code == "engine.logprob_gap"
    assert caught.value.problem.where.startswith("step 2; worst: sample")
    assert stale.loop.progress.step == 1
    assert "this step changed no weight of the policy; last checkpoint: step 0" in caught.value.problem.state


def test_samples_of_another_version_are_refused_in_the_step_that_drew_them(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", replace(RULES, max_steps=9))
    loaded = made.engine.load_weights

    def skipped_once(version: int) -> None:
        if version != 3:
            loaded(version)

    made.engine.load_weights = skipped_once  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="serves weights v2, the trainer is at v3") as caught:
        made.loop.run(StopSignals())
    assert (caught.value.problem.code, made.loop.progress.step) == ("engine.stale", 3)
    assert "last checkpoint: step 3" in caught.value.problem.state


# what algorithms ask for


def test_groups_without_signal_are_replaced_until_the_batch_is_full(tmp_path: Path) -> None:
    def hard(items: Sequence[RewardItem]) -> list[Score]:
        """Prompts 1 and 2 have no signal: every response is right."""
        scores = repeats_its_prompt(items)
        return [Score(1.0) if item.label in "12" else score for item, score in zip(items, scores, strict=True)]

    rules = replace(RULES, max_steps=1, filter_groups=True)
    plain = Made(tmp_path / "plain", rules, reward=hard)
    plain.loop.run(StopSignals())
    made = Made(tmp_path / "refilled", replace(rules, refill_rounds=10), reward=hard)
    made.loop.run(StopSignals())
    before, after = plain.rows()[0], made.rows()[0]
    assert before["data/samples"] == 20
    assert before["drop/no_signal"] > 0
    sampled, dropped = int(after["data/samples"]), int(after["drop/no_signal"])  # type: ignore[call-overload]
    assert sampled - dropped == 20, "the batch is full, and all that was sampled is accounted for"
    assert after["data/prompts"] == sampled // 4 == made.loop.ledger.counts()["trained"]
    capped = Made(tmp_path / "capped", replace(rules, refill_rounds=1), reward=hard)
    capped.loop.run(StopSignals())
    assert 20 < int(capped.rows()[0]["data/samples"]) <= sampled  # type: ignore[call-overload]


def test_refilling_never_leaves_the_epoch_and_a_resume_continues_to_the_bit(tmp_path: Path) -> None:
    rules = replace(RULES, filter_groups=True, refill_rounds=10)
    whole = Made(tmp_path / "whole", rules, episodes=2)
    whole.loop.run(StopSignals())
    assert whole.loop.ledger.counts()["trained"] == 40
    assert {row["data/epoch"] for row in whole.rows()} == {0, 1}
    stopped = Made(tmp_path / "stopped", replace(rules, max_steps=3), episodes=2)
    stopped.loop.run(StopSignals())
    resumed = Made(tmp_path / "resumed", rules, episodes=2)
    resumed.resume_from(stopped)
    resumed.loop.run(StopSignals())
    assert torch.equal(resumed.policy.table, whole.policy.table)


@pytest.mark.parametrize("record", [ReinforceAlgorithm(), ReMaxAlgorithm(), Ppo(kl_place="none", kl_coef=0.0)])
def test_estimators_without_groups_learn_from_one_response_a_prompt(tmp_path: Path, record: PolicyAlgorithm) -> None:
    rules = replace(RULES, max_steps=40, smallest_group=1, needs_baseline=record.advantage.needs_greedy)
    made = Made(tmp_path / "run", rules, record=record)
    made.collector._group_size = 1  # pyright: ignore[reportPrivateUsage]
    results = made.loop.run(StopSignals())
    assert results["after"].mean_reward > results["before"].mean_reward + 0.3


def test_a_group_without_its_greedy_baseline_is_left_out_and_counted(tmp_path: Path) -> None:
    def fails_for_one(items: Sequence[RewardItem]) -> list[Score]:
        scores = repeats_its_prompt(items)
        is_greedy = len({item.prompt_id for item in items}) == len(items)
        return [Score(None, RewardStatus.FAILED), *scores[1:]] if is_greedy else scores

    rules = replace(RULES, max_steps=1, needs_baseline=True, max_unscored_share=0.0, eval_every=0)
    made = Made(tmp_path / "run", rules, record=ReMaxAlgorithm(), reward=fails_for_one)
    made.loop.run(StopSignals())
    assert made.rows()[0]["drop/no_baseline"] == 4


def test_the_critic_learns_before_the_policy_may(tmp_path: Path) -> None:
    rules = replace(RULES, max_steps=20, frozen_steps=20, skip_zero_advantage=False, eval_every=0)
    made = Made(tmp_path / "run", rules, record=Ppo(kl_place="none", kl_coef=0.0))
    before = made.policy.table.clone()
    made.loop.run(StopSignals())
    assert torch.equal(made.policy.table, before)
    assert float(made.critic.table.detach().abs().max()) > 0
    rows = made.rows()
    assert {row["policy/updates"] for row in rows} == {0}
    assert {row["critic/updates"] for row in rows} == {1}
    values = [float(row["critic/value_mean"]) for row in rows]  # type: ignore[arg-type]
    returns = [float(row["critic/return_mean"]) for row in rows]  # type: ignore[arg-type]
    assert values[0] == 0.0
    assert 0.5 < sum(values[5:]) / sum(returns[5:]) < 2.0, "values come near the returns"


def test_a_correction_scores_rollouts_again_and_reports_the_mismatch(tmp_path: Path) -> None:
    record = Grpo(kl_place="none", correction=components.TokenTis(cap=2.0), high_entropy_fraction=0.5)
    made = Made(tmp_path / "run", replace(RULES, max_steps=2), record=record)
    made.loop.run(StopSignals())
    row = made.rows()[-1]
    for name in ("correction", "effective_token_share", "effective_sequence_share", "ratio_max"):
        assert float(row[f"mismatch/{name}"]) == pytest.approx(1.0, abs=1e-4), name  # type: ignore[arg-type]
    assert 0.4 < float(row["policy/high_entropy"]) < 0.6  # type: ignore[arg-type]


def test_controllers_move_their_coefficients_and_survive_a_resume(tmp_path: Path) -> None:
    def made(name: str, steps: int) -> Made:
        return Made(
            tmp_path / name,
            replace(RULES, max_steps=steps, skip_zero_advantage=False, eval_every=0),
            record=Grpo(kl_coef=0.1, entropy_coef=0.01),
            kl_controller=AdaptiveKl(coefficient=0.1, target=1e-4, horizon=100),
            entropy_controller=EntropyTarget(coefficient=0.01, target=5.0),
            score_rules=RewardShapingConfig(longest_response=3, running_norm=True, minus_mean=True, clip=2.0),
        )

    whole = made("whole", 6)
    whole.loop.run(StopSignals())
    rows = whole.rows()
    weights = [float(row["kl/coefficient"]) for row in rows]  # type: ignore[arg-type]
    assert weights[0] < 0.1, "the policy starts at the reference, below the target"
    assert weights[-1] > min(weights), "and moves away from it"
    bonuses = [float(row["policy/entropy_coefficient"]) for row in rows]  # type: ignore[arg-type]
    assert bonuses == sorted(bonuses)
    assert bonuses[-1] > 0.01
    first = made("first", 3)
    first.loop.run(StopSignals())
    second = made("second", 6)
    second.resume_from(first)
    second.loop.run(StopSignals())
    assert torch.equal(second.policy.table, whole.policy.table)
    assert without_times(second.rows()) == without_times(rows)[3:]


def test_lengths_are_judged_where_asked_for(tmp_path: Path) -> None:
    rules = RewardShapingConfig(
        longest_response=3, overlong_buffer=2, overlong_factor=0.5, length_penalty=True, mask_truncated=True
    )
    made = Made(tmp_path / "run", replace(RULES, max_steps=1), score_rules=rules)
    made.loop.run(StopSignals())
    row = made.rows()[0]
    assert -0.5 <= float(row["reward/overlong_penalty"]) < 0  # type: ignore[arg-type]
    assert "reward/length_term" in row
    plain = Made(tmp_path / "plain", replace(RULES, max_steps=1))
    plain.loop.run(StopSignals())
    assert not torch.equal(plain.policy.table, made.policy.table)


def test_weights_of_parts_replace_the_reward_s_own_sum(tmp_path: Path) -> None:
    def parts(items: Sequence[RewardItem]) -> list[Score]:
        return [
            Score(0.0, breakdown={"right": score.value or 0.0, "short": -float(item.num_tokens)})
            for item, score in zip(items, repeats_its_prompt(items), strict=True)
        ]

    tables = []
    for name, weights in (("right", {"right": 1.0}), ("short", {"short": 1.0}), ("plain", None)):
        score_rules = RewardShapingConfig(longest_response=3, component_weights=weights)
        made = Made(tmp_path / name, replace(RULES, max_steps=1, eval_every=0), reward=parts, score_rules=score_rules)
        made.loop.run(StopSignals())
        tables.append(made.policy.table.detach().clone())
    assert not torch.equal(tables[0], tables[1])
    assert torch.equal(tables[2], BigramPolicy(VOCABULARY).table.detach()), "all rewards are 0"


def test_rewards_of_steps_are_placed_at_the_tokens_that_end_them(tmp_path: Path) -> None:
    # DigitDecoder writes "3 1 0": characters 1, 3 and 5 end the tokens
    assert place_steps((3, 1, 0), [(1, 0.5), (3, 1.0), (2, 0.25)], DigitDecoder()) == ((0, 0.5), (1, 1.25))
    assert place_steps((3, 1), [(99, 1.0)], DigitDecoder()) == ((1, 1.0),)

    def judged(items: Sequence[RewardItem]) -> list[Score]:
        return [Score(score.value, steps=((1, score.value or 0.0),)) for score in repeats_its_prompt(items)]

    record = Grpo(advantage=components.ProcessGroupNorm(), kl_place="none")
    made = Made(tmp_path / "run", replace(RULES, max_steps=40), record=record, reward=judged)
    results = made.loop.run(StopSignals())
    assert results["after"].mean_reward > results["before"].mean_reward + 0.3


def test_the_averages_are_evaluated_beside_the_weights_and_leave_the_run_as_it_is(tmp_path: Path) -> None:
    made, plain = Made(tmp_path / "both", episodes=2), Made(tmp_path / "plain", episodes=2)
    stops = torch.zeros_like(made.policy.table)
    stops[:, STOP] = 9.0  # at once, which repeats no prompt
    served: list[str] = []

    @contextmanager
    def in_place() -> Generator[None]:
        kept = made.policy.table.detach().clone()
        made.policy.table.data.copy_(stops)
        yield
        made.policy.table.data.copy_(kept)

    def refresh() -> None:
        served.append("averages" if torch.equal(made.policy.table.detach(), stops) else "weights")

    assert made.loop.evaluator is not None
    made.loop.averaged = EmaEvaluator(made.loop.evaluator, in_place, refresh)
    for each in (made, plain):
        each.loop.run(StopSignals())
    assert torch.equal(made.policy.table, plain.policy.table)
    rows, others = (each.directory.read_evaluations().rows for each in (made, plain))
    assert [row["name"] for row in rows] == ["before", "step 4", "after"]
    assert not any(name.startswith("eval_ema") for name in rows[0]), "they begin as the weights"
    for row, other in zip(rows[1:], others[1:], strict=True):
        assert (row["eval_ema/accuracy"], row["eval_ema/n"], row["eval_ema/mean_tokens"]) == (0.0, 5, 1.0)
        assert row["ema_correct"] == [False] * 5
        assert row["eval/accuracy"] == other["eval/accuracy"] > 0
    assert served == ["averages", "weights"] * 2


def test_the_kept_rows_have_the_advantages_that_were_trained_on(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", replace(RULES, max_steps=1, filter_groups=True))
    made.loop.run(StopSignals())
    rows = read_records(made.directory.rollouts_directory / "step_000001.jsonl").rows
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row["prompt_id"], []).append(row)
    whole = [group for group in groups.values() if len(group) == 4]
    assert whole
    for group in whole:
        rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
        if len({row["reward"] for row in group}) == 1:
            assert [row["advantage"] for row in group] == [None] * 4, "the filter left it out"
        else:
            expected = (rewards - rewards.mean()) / rewards.std()
            assert [row["advantage"] for row in group] == pytest.approx(expected.tolist(), abs=1e-4)
