"""The loop of preferences: pairs come into order, the reference is asked once, a continued run repeats its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rft_algos.algorithms.preference import PreferenceLoss
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.evaluation.preferences import PairEvaluator
from rft_trainer.loops.preference_loop import PreferenceLoop
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.preference_rows import PreferenceRows
from rft_trainer.scoring.reference_logprobs import ReferenceLogprobs
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.testing.bigram import BigramPolicy, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.preference_objective import LabelledObjective, PairObjective

NUM_ROWS = 10


def pairs() -> list[TrainingSample]:
    return [
        TrainingSample(f"p:{row}/{name}", (row % 4, row % 4 + last, 0), 1, 1.0, unit=f"p:{row}")
        for row in range(NUM_ROWS)
        for name, last in (("chosen", 1), ("rejected", 2))
    ]


def labels() -> list[TrainingSample]:
    return [
        TrainingSample(f"l:{row}", (row % 4, row % 4 + 1 + row % 2, 0), 1, 1.0 - 2 * (row % 2)) for row in range(10)
    ]


class Made:
    def __init__(self, path: Path, config: PreferenceLoss, *, max_steps: int = 0) -> None:
        self.policy, one = BigramPolicy(6), OneRank()
        self.asked = 0
        self.directory = RunDirectory.create(path, config_text="{}\n", command=["rft-train"], environment={})
        self.scorer = LogprobScorer(self.policy, one, max_sequences=4, max_tokens=0, temperature=1.0).of_samples
        labelled = config.is_labelled
        samples = labels() if labelled else pairs()
        reference = ReferenceLogprobs(path / "reference.safetensors", self.reference, one, {})
        rows = PreferenceRows(
            samples=samples,
            held_out=[] if labelled else samples[:6],
            samples_a_row=1 if labelled else 2,
            mismatched=labels()[::-1] if labelled else [],
            reference=reference if config.needs_reference else None,
        )
        objective: Any = LabelledObjective(config) if labelled else PairObjective(config)
        optimizer, progress = PlainOptimizer([self.policy.table]), Progress()
        ledger = Ledger(
            NUM_ROWS,
            4,
            lambda epoch: permutation(derive_key(1, "order", epoch), NUM_ROWS).tolist(),
            data_hash="d",
            seed=1,
        )
        self.run = PreferenceLoop(
            ledger=ledger,
            rows=rows,
            updater=Updater(
                PolicyLoss(self.policy, objective),
                optimizer,
                one,
                micro_batching=MicroBatching(2, 0, False),
                learning_rate=lambda update: 5.0,
            ),
            evaluator=None if labelled else PairEvaluator(config, rows.held_out, self.scorer, rows.held_out_table),
            prepare=(lambda chosen: objective.measure_from(rows.reference_point(self.scorer, chosen)))
            if labelled
            else None,
            saver=Saver(
                MemoryWriter(),
                self.policy,
                optimizer,
                {"progress": progress, "ledger": ledger},
                one,
                schedule=SaveSchedule(0, 1, 0.0),
                before_save=self.directory.sync,
            ),
            reporter=Reporter(
                self.directory, [JsonlSink(self.directory)], one, num_steps=12, rollout_every=0, rollouts_kept=0
            ),
            collectives=one,
            progress=progress,
            timer=PhaseTimer(),
            train_batch_size=4,
            max_steps=max_steps,
            eval_every=-1,
            max_refused_in_a_row=0,
            resume_command="rft-train resume here",
        )

    def reference(self, samples: Sequence[TrainingSample]) -> Sequence[Sequence[float]]:
        self.asked += 1
        return self.scorer(samples)

    def rows(self) -> list[dict[str, Any]]:
        self.directory.sync()
        return self.directory.read_metrics().rows


def test_pairs_come_into_order_and_the_reference_is_asked_once(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", PreferenceLoss())
    made.run.run(StopSignals())
    rows = made.rows()
    assert made.asked == 1
    assert [row["data/samples"] for row in rows] == [4, 4, 2] * 4, "pairs, and a smaller last step"
    assert rows[0]["dpo/loss"] == pytest.approx(0.693147, rel=1e-4)
    assert rows[-1]["dpo/loss"] < rows[0]["dpo/loss"]
    before, after = (made.directory.read_evaluations().rows[i] for i in (0, -1))
    assert (before["eval/accuracy"], after["eval/accuracy"]) == (0.5, 1.0)
    assert after["correct"] == [1.0, 1.0, 1.0]


def test_losses_without_a_reference_ask_none(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", PreferenceLoss(loss_type="simpo"), max_steps=2)
    made.run.run(StopSignals())
    assert made.asked == 0
    assert not (tmp_path / "run" / "reference.safetensors").exists()
    assert "dpo/log_ratio" not in made.rows()[0]


def test_labelled_responses_have_a_reference_point_of_the_step(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", PreferenceLoss(loss_type="kto"))
    made.run.run(StopSignals())
    rows = made.rows()
    assert rows[0]["dpo/reference_point"] == pytest.approx(0.0, abs=1e-6)
    assert rows[0]["dpo/loss"] == pytest.approx(0.5, rel=1e-6)
    assert rows[-1]["dpo/loss"] < 0.5
    assert rows[-1]["dpo/chosen_reward"] > rows[-1]["dpo/rejected_reward"]
