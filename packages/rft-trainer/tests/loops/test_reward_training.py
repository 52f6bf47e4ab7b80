"""The loop of a reward model: it learns which token is better, every pair once an epoch, and resumes to the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rft_core.keyed_random import derive_key, permutation
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching, units_of
from rft_trainer.evaluation.pair_evaluator import PairScoreEvaluator
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.reward_training import RewardModelLoop
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.pairs import PairLabel
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.testing.bigram import MemoryWriter, OneRank, PlainOptimizer, TokenScorer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.pair_loss import PairLoss, PairScoreObjective

LABEL = PairLabel((1.0,)).as_numbers()
# token 1 is good and token 5 is bad, whatever the prompt
SAMPLES = [
    TrainingSample(f"p:{n}/{k}", (2 + n % 3, token), 1, 0.0, unit=f"p:{n}", sequence_numbers=LABEL)
    for n in range(10)
    for k, token in enumerate((1, 5))
]


def made(
    path: Path, *, max_steps: int = 0, order: Callable[[int], list[int]] | None = None
) -> tuple[RewardModelLoop, RunDirectory]:
    model, one, progress = TokenScorer(6), OneRank(), Progress()
    directory = RunDirectory.create(path, config_text="{}\n", command=["rft-train"], environment={})
    order = order or (lambda epoch: permutation(derive_key(1, "order", epoch), 10).tolist())
    ledger = Ledger(10, 3, order, data_hash="d", seed=1)
    optimizer, early_stop = PlainOptimizer([model.table]), EarlyStop(0)
    objective = PairScoreObjective()
    loop = RewardModelLoop(
        ledger=ledger,
        units=units_of(SAMPLES),
        updater=Updater(
            PairLoss(model, objective),
            optimizer,
            one,
            micro_batching=MicroBatching(2, 0, False),
            learning_rate=lambda update: 3.0,
        ),
        evaluator=PairScoreEvaluator(model, objective, SAMPLES[:6], one, max_sequences=4, max_tokens=0),
        saver=Saver(
            MemoryWriter(),
            model,
            optimizer,
            {"progress": progress, "ledger": ledger, "early_stop": early_stop},
            one,
            schedule=SaveSchedule(0, 1, 0.0),
            before_save=directory.sync,
        ),
        reporter=Reporter(directory, [JsonlSink(directory)], one, num_steps=9, rollout_every=0, rollouts_kept=0),
        collectives=one,
        progress=progress,
        timer=PhaseTimer(),
        early_stop=early_stop,
        train_batch_size=4,
        max_steps=max_steps,
        eval_every=-1,
        max_refused_in_a_row=0,
        resume_command="rft-train resume here",
    )
    return loop, directory


def test_it_learns_which_response_is_better(tmp_path: Path) -> None:
    loop, directory = made(tmp_path / "run")
    loop.run(StopSignals())
    directory.sync()
    rows, evaluations = directory.read_metrics().rows, directory.read_evaluations().rows
    # a partial last batch is a step of its own, with its own denominator
    assert [row["data/pairs"] for row in rows] == [4, 4, 2] * 3
    assert [row["data/samples"] for row in rows[:3]] == [8, 8, 4]
    assert evaluations[0]["eval/accuracy"] == 0.0
    assert evaluations[-1]["eval/accuracy"] == 1.0
    assert evaluations[-1]["eval/loss"] < evaluations[0]["eval/loss"]
    assert sum(row["num"] for row in evaluations[-1]["calibration"]) == 3
    assert rows[-1]["rm/margin"] > 0 > rows[0]["rm/margin"]


def test_a_pair_that_a_mixture_draws_twice_in_a_step_is_two_units(tmp_path: Path) -> None:
    loop, directory = made(tmp_path / "run", max_steps=1, order=lambda epoch: [3, 3, 1, 3, 0, 2, 4, 5, 6, 7])
    loop.run(StopSignals())
    directory.sync()
    (row,) = directory.read_metrics().rows
    assert (row["data/pairs"], row["data/samples"], row["policy/micro_batches"]) == (4, 8, 2)


def test_it_ends_after_max_steps(tmp_path: Path) -> None:
    loop, directory = made(tmp_path / "run", max_steps=2)
    loop.run(StopSignals())
    directory.sync()
    assert len(directory.read_metrics().rows) == 2
