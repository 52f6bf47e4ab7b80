"""The RL loop with a bigram policy: it learns, saves whole steps only, resumes to the bit, and refuses what it must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rft_algos.algorithms import Grpo
from rft_algos.errors import NumericsError, SavedAfterSignal, ServiceError
from rft_algos.keyed_random import derive_key, permutation
from rft_trainer.annotate import LogprobAnnotator
from rft_trainer.evaluation import Evaluator
from rft_trainer.ledger import Ledger
from rft_trainer.loops.rl import Reinforcement, StepRules
from rft_trainer.objective import GroupAdvantages, PenalisedRewards, PolicyObjective
from rft_trainer.records import Prompt, Sampling
from rft_trainer.report import Reporter
from rft_trainer.rewards.records import RewardItem, RewardStatus, Score
from rft_trainer.rollouts import RolloutCollector
from rft_trainer.run_directory import RunDirectory
from rft_trainer.samples import shuffle_rewards
from rft_trainer.saving import Progress, Saver, SaveSchedule
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.stopping import StopSignals
from rft_trainer.testing import BigramEngine, BigramPolicy, DigitDecoder, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.throughput import PhaseTimer
from rft_trainer.update import MicroBatching, Updater

VOCABULARY, STOP = 6, 0
PROMPTS = [Prompt(f"p:{i}", (1 + i % 5,), str(1 + i % 5), str(1 + i % 5), "p") for i in range(20)]
RULES = StepRules(
    prompts_per_rollout=5,
    rollouts_per_step=1,
    train_batch_size=20,
    epochs_per_step=1,
    skip_zero_advantage=True,
    filter_groups=False,
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

    def __init__(self, path: Path, rules: StepRules = RULES, episodes: int = 10, **changed: object) -> None:
        record = changed.pop("record", Grpo(kl_place="none", kl_coef=0.0))
        assert isinstance(record, Grpo)
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
        reference = LogprobAnnotator(BigramPolicy(VOCABULARY), one, max_sequences=4, max_tokens=0, temperature=1.0)
        sampling = Sampling(temperature=1.0, max_new_tokens=3, stop_token_ids=(STOP,))
        self.loop = Reinforcement(
            ledger=ledger,
            prompts=PROMPTS,
            engine=self.engine,
            collector=RolloutCollector(
                self.engine, DigitDecoder(), reward, one, sampling=sampling, group_size=4, seed=3
            ),
            advantages=GroupAdvantages(record),
            reference=reference if record.needs_reference else None,
            old_policy=None,
            shape_rewards=PenalisedRewards(record) if record.kl_place == "reward" else None,
            control=None,
            updater=Updater(
                self.policy,
                optimizer,
                PolicyObjective(record),
                one,
                micro_batching=MicroBatching(3, 0, False),
                learning_rate=lambda update: 8.0,
            ),
            evaluator=Evaluator(
                self.engine, DigitDecoder(), reward, one, PROMPTS[:5], max_new_tokens=3, stop_token_ids=(STOP,)
            ),
            saver=Saver(
                self.writer,
                self.policy,
                optimizer,
                {"progress": progress, "ledger": ledger},
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


def test_a_reward_that_fails_is_left_out_and_too_many_end_the_run(tmp_path: Path) -> None:
    def sometimes(share: float):
        def score(items: Sequence[RewardItem]) -> list[Score]:
            scores = repeats_its_prompt(items)
            failed = round(share * len(items))
            return [Score(None, RewardStatus.FAILED)] * failed + scores[failed:]

        return score

    few = Made(tmp_path / "few", replace(RULES, max_steps=1), reward=sometimes(0.05))
    few.loop.run(StopSignals())
    assert few.rows()[0]["drop/unscored"] == 1
    many = Made(tmp_path / "many", reward=sometimes(0.5))
    before = many.policy.table.clone()
    with pytest.raises(ServiceError, match="10 of 20 rollouts"):
        many.loop.run(StopSignals())
    assert torch.equal(many.policy.table, before)


def test_updates_that_are_not_finite_are_refused_and_end_the_run(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    made.policy.table.register_hook(lambda gradient: gradient * float("nan"))
    before = made.policy.table.clone()
    with pytest.raises(NumericsError, match="2 optimizer steps in a row"):
        made.loop.run(StopSignals())
    assert torch.equal(made.policy.table, before)


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
