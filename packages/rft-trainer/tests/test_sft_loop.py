"""The supervised loop: the loss falls, early stopping waits as told, a continued run repeats the same steps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from rft_algos.errors import SavedAfterSignal
from rft_algos.keyed_random import derive_key, permutation
from rft_trainer.ledger import Ledger
from rft_trainer.loops.sft import EarlyStop, SupervisedRun, TokenLikelihood, mean_loss
from rft_trainer.records import TrainingSample
from rft_trainer.report import Reporter
from rft_trainer.run_directory import RunDirectory
from rft_trainer.saving import Progress, Saver, SaveSchedule
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.stopping import StopSignals
from rft_trainer.testing import BigramPolicy, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.throughput import PhaseTimer
from rft_trainer.update import MicroBatching, Updater

SAMPLES = [TrainingSample(f"s:{i}", (1 + i % 4, 2 + i % 4, 0), 1, 0.0) for i in range(14)]


class Made:
    def __init__(self, path: Path, *, max_steps: int = 0, patience: int = 0, rate: float = 3.0) -> None:
        self.policy, self.writer, one = BigramPolicy(6), MemoryWriter(), OneRank()
        self.directory = RunDirectory.create(path, config_text="{}\n", command=["rft-train"], environment={})
        progress, early_stop = Progress(), EarlyStop(patience)
        ledger = Ledger(
            len(SAMPLES),
            6,
            lambda epoch: permutation(derive_key(1, "order", epoch), len(SAMPLES)).tolist(),
            data_hash="d",
            seed=1,
        )
        optimizer = PlainOptimizer([self.policy.table])
        self.run = SupervisedRun(
            ledger=ledger,
            samples=SAMPLES,
            held_out=SAMPLES[:3],
            policy=self.policy,
            updater=Updater(
                self.policy,
                optimizer,
                TokenLikelihood(),
                one,
                micro_batching=MicroBatching(2, 0, False),
                learning_rate=lambda update: rate,
            ),
            evaluator=None,
            engine=None,
            saver=Saver(
                self.writer,
                self.policy,
                optimizer,
                {"progress": progress, "ledger": ledger, "early_stop": early_stop},
                one,
                schedule=SaveSchedule(0, 1, 0.0),
                before_save=self.directory.sync,
            ),
            reporter=Reporter(
                self.directory, [JsonlSink(self.directory)], one, num_steps=24, rollout_every=0, rollouts_kept=0
            ),
            collectives=one,
            progress=progress,
            timer=PhaseTimer(),
            early_stop=early_stop,
            train_batch_size=4,
            max_steps=max_steps,
            eval_every=0,
            max_refused_in_a_row=0,
            eval_max_sequences=2,
            eval_max_tokens=0,
            resume_command="rft-train resume here",
        )

    def rows(self) -> list[dict[str, object]]:
        self.directory.sync()
        rows = self.directory.read_metrics().rows
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))} for row in rows]


def test_the_loss_falls_to_the_entropy_of_the_data(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    made.run.run(StopSignals())
    evaluations = made.directory.read_evaluations().rows
    assert evaluations[0]["eval/loss"] == pytest.approx(math.log(6), rel=1e-6)
    assert evaluations[-1]["eval/loss"] < 0.35 * math.log(6)
    sizes = [row["data/samples"] for row in made.rows()]
    assert sizes == [4, 4, 4, 2] * 6, "a partial last batch is a step of its own"
    assert [step for step, _ in made.writer.saved] == [0, 4, 8, 12, 16, 20, 24]


def test_every_sample_is_learned_once_an_epoch(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", max_steps=4)
    made.run.run(StopSignals())
    assert made.run.ledger.epoch == 1
    assert made.run.ledger.counts()["trained"] == len(SAMPLES)


def test_the_mean_loss_does_not_depend_on_the_cut() -> None:
    policy = BigramPolicy(6)
    losses = [
        mean_loss(policy, SAMPLES, OneRank(), max_sequences=size, max_tokens=cap)
        for size, cap in ((1, 0), (5, 0), (9, 7))
    ]
    assert losses == pytest.approx([math.log(6)] * 3, rel=1e-6)


def test_early_stopping_waits_for_as_many_evaluations_as_told() -> None:
    early_stop = EarlyStop(2)
    seen = [early_stop.observe(loss, step) for step, loss in enumerate([3.0, 2.0, 2.1, 1.9, 1.95, 1.9])]
    assert seen == [False, False, False, False, False, True]
    assert (early_stop.best, early_stop.best_step) == (1.9, 3)
    restored = EarlyStop(2)
    restored.load_state(json.loads(json.dumps(early_stop.state())))
    assert restored == early_stop


def test_a_run_whose_loss_rises_ends_early(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", patience=1, rate=-3.0)
    made.run.run(StopSignals())
    assert len(made.rows()) == 4


def test_a_continued_run_repeats_the_same_steps(tmp_path: Path) -> None:
    whole, part, again = (Made(tmp_path / name, max_steps=steps) for name, steps in (("w", 0), ("p", 8), ("a", 0)))
    whole.run.run(StopSignals())
    part.run.run(StopSignals())
    with torch.no_grad():
        again.policy.table.copy_(part.policy.table)
    step, records = part.writer.saved[-1]
    again.run.saver.restore(step, json.loads(json.dumps(records)))
    again.run.run(StopSignals())
    assert torch.equal(again.policy.table, whole.policy.table)
    assert part.rows() + again.rows() == whole.rows()


def test_a_signal_saves_the_step_that_was_finished(tmp_path: Path) -> None:
    made, signals = Made(tmp_path / "run"), StopSignals()
    signals.received = "SIGTERM"
    with pytest.raises(SavedAfterSignal):
        made.run.run(signals)
    assert made.writer.saved[-1][0] == 1
