"""The supervised loop: the loss falls, early stopping waits as told, a continued run repeats the same steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rft_core.errors import SavedAfterSignal
from rft_core.keyed_random import derive_key, permutation
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.loops.sft import SftLoop, TokenLikelihood, mean_loss
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.records.rollouts import TrainingSample
from rft_trainer.runs.checkpointing import Progress, Saver, SaveSchedule
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.runs.step_report import Reporter
from rft_trainer.runs.stop_signals import StopSignals
from rft_trainer.sinks.jsonl import JsonlSink
from rft_trainer.testing.bigram import BigramPolicy, CopiedParameters, MemoryWriter, OneRank, PlainOptimizer
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss

SAMPLES = [TrainingSample(f"s:{i}", (1 + i % 4, 2 + i % 4, 0), 1, 0.0) for i in range(14)]


class Made:
    def __init__(
        self,
        path: Path,
        *,
        max_steps: int = 0,
        patience: int = 0,
        rate: float | Callable[[int], float] = 3.0,
        keep_best: bool = False,
        sets: Sequence[str] = (),
    ) -> None:
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
        self.best = CopiedParameters(self.policy.named_parameters()) if keep_best else None
        self.run = SftLoop(
            ledger=ledger,
            samples=SAMPLES,
            held_out=SAMPLES[:3],
            held_out_sets=sets,
            policy=self.policy,
            updater=Updater(
                PolicyLoss(self.policy, TokenLikelihood()),
                optimizer,
                one,
                micro_batching=MicroBatching(2, 0, False),
                learning_rate=rate if callable(rate) else lambda update: rate,
            ),
            saver=Saver(
                self.writer,
                self.policy,
                optimizer,
                {"progress": progress, "ledger": ledger, "early_stop": early_stop},
                one,
                schedule=SaveSchedule(0, 1, 0.0),
                before_save=self.directory.sync,
                tensor_parts={"best_weights": self.best} if self.best else None,
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
            eval_every=-1,
            max_refused_in_a_row=0,
            eval_max_sequences=2,
            eval_max_tokens=0,
            resume_command="rft-train resume here",
            best=self.best,
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


def test_each_held_out_set_has_its_loss_and_that_of_all_is_the_mean_over_tokens(tmp_path: Path) -> None:
    # every sample has two learned tokens, so the second set counts twice
    made = Made(tmp_path / "run", max_steps=3, sets=["one", "two", "two"], patience=1)
    plain = Made(tmp_path / "plain", max_steps=3)
    for each in (made, plain):
        each.run.run(StopSignals())
    last, whole = (each.directory.read_evaluations().rows[-1] for each in (made, plain))
    assert last["eval/one/loss"] != pytest.approx(last["eval/two/loss"], rel=1e-3)
    own = mean_loss(made.policy, SAMPLES[1:3], OneRank(), max_sequences=9, max_tokens=0)
    assert last["eval/two/loss"] == pytest.approx(own, rel=1e-9)
    assert last["eval/loss"] == pytest.approx((last["eval/one/loss"] + 2 * last["eval/two/loss"]) / 3, rel=1e-9)
    assert last["eval/loss"] == pytest.approx(whole["eval/loss"], rel=1e-6)
    assert made.run.early_stop is not None
    assert made.run.early_stop.best == min(row["eval/loss"] for row in made.directory.read_evaluations().rows)


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


def falls_then_rises(update: int) -> float:
    """Two epochs of descent, then ascent."""
    return 3.0 if update < 8 else -6.0


def test_an_improvement_that_is_too_small_does_not_count_for_patience() -> None:
    early_stop = EarlyStop(2, min_improvement=0.1)
    seen = [early_stop.observe(loss, step) for step, loss in enumerate([3.0, 2.0, 1.95, 1.89, 1.85, 1.8])]
    assert seen == [False, False, False, False, False, True], "1.89 is 0.11 below 2.0, the two after it are not enough"
    assert (early_stop.best, early_stop.best_step) == (1.8, 5), "the lowest loss is kept whatever counts"


def test_a_run_with_patience_ends_with_the_weights_of_the_lowest_loss(tmp_path: Path) -> None:
    made = Made(tmp_path / "run", patience=2, rate=falls_then_rises, keep_best=True)
    made.run.run(StopSignals())
    evaluations = made.directory.read_evaluations().rows
    assert [row["name"] for row in evaluations] == ["before", "step 4", "step 8", "step 12", "step 16", "after"]
    losses = {row["name"]: row["eval/loss"] for row in evaluations}
    assert losses["step 8"] < losses["step 4"] < losses["before"]
    assert losses["step 16"] > losses["step 12"] > losses["step 8"]
    assert losses["after"] == losses["step 8"]
    assert evaluations[-1]["eval/best_step"] == 8
    measured = mean_loss(made.policy, SAMPLES[:3], OneRank(), max_sequences=2, max_tokens=0)
    assert measured == losses["step 8"], "the policy itself has the weights, so that they are what is saved"
    assert made.run.finished
    assert made.writer.saved[-1][0] == 16


def test_a_run_that_is_still_getting_better_at_its_end_keeps_its_last_weights(tmp_path: Path) -> None:
    kept, plain = (
        Made(tmp_path / name, patience=int(keep), keep_best=keep) for name, keep in (("k", True), ("p", False))
    )
    kept.run.run(StopSignals())
    plain.run.run(StopSignals())
    assert torch.equal(kept.policy.table, plain.policy.table)
    rows = kept.directory.read_evaluations().rows
    assert [row["name"] for row in rows[-2:]] == ["step 24", "after"]
    assert rows[-1]["eval/best_step"] == 24


@pytest.mark.parametrize("steps", [4, 8, 12])
def test_a_continued_run_ends_with_the_same_best_weights(tmp_path: Path, steps: int) -> None:
    whole = Made(tmp_path / "w", patience=2, rate=falls_then_rises, keep_best=True)
    whole.run.run(StopSignals())
    part, again = (Made(tmp_path / n, patience=2, rate=falls_then_rises, keep_best=True) for n in ("p", "a"))
    assert part.best is not None
    assert again.best is not None
    stop_after(part, steps)
    with torch.no_grad():
        again.policy.table.copy_(part.policy.table)
    again.best.load_state_tensors(part.best.checkpoint_tensors())
    step, records = part.writer.saved[-1]
    assert step == steps
    again.run.saver.restore(step, json.loads(json.dumps(records)))
    again.run.run(StopSignals())
    assert torch.equal(again.policy.table, whole.policy.table)
    assert part.rows() + again.rows() == whole.rows()


def stop_after(made: Made, steps: int) -> None:
    """Run until a signal that arrives while step `steps` is logged."""
    signals = StopSignals()
    report = made.run.reporter.step

    def reported(metrics: object, progress: Progress, *args: object, **kwargs: object) -> None:
        report(metrics, progress, *args, **kwargs)  # type: ignore[arg-type]
        if progress.step == steps:
            signals.received = "SIGTERM"

    made.run.reporter.step = reported  # type: ignore[method-assign, assignment]
    with pytest.raises(SavedAfterSignal):
        made.run.run(signals)


def test_the_averages_have_a_loss_of_their_own_and_leave_the_run_as_it_is(tmp_path: Path) -> None:
    made, plain = Made(tmp_path / "run", max_steps=4), Made(tmp_path / "plain", max_steps=4)

    @contextmanager
    def in_place() -> Generator[None]:
        kept = made.policy.table.detach().clone()
        made.policy.table.data.zero_()
        yield
        made.policy.table.data.copy_(kept)

    made.run.averages = in_place
    for each in (made, plain):
        each.run.run(StopSignals())
    first, last = (made.directory.read_evaluations().rows[place] for place in (0, -1))
    assert "eval_ema/loss" not in first, "they begin as the weights"
    assert last["eval_ema/loss"] == pytest.approx(math.log(6), rel=1e-6)
    assert last["eval/loss"] == plain.directory.read_evaluations().rows[-1]["eval/loss"] < math.log(6)
    assert torch.equal(made.policy.table, plain.policy.table)
