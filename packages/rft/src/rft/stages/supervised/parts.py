"""The parts of a loop that trains on rows: the model on its ranks, what a checkpoint holds, and the optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypedDict

from rft.build.lora import adapt, weights_directory
from rft.build.models import refuse_unknown_parts
from rft.build.shared_parts import learning_rate_schedule, make_ledger, make_saver, make_tracer, micro_batching
from rft.checkpoints.initial_weights import engine_weights_directory, load_initial_weights
from rft.checkpoints.parts import CheckpointParts
from rft.parallel.parallelize import ModelT, ParallelModel, parallelize, trainable_policy
from rft.parallel.policy_weights import checkpoint_parts
from rft.parallel.shardable import ShardablePolicy
from rft.parallel.step_guards import make_guards, make_weight_check
from rft.run_lifecycle import RunStart
from rft.settings import DpoSettings, PretrainSettings, RmSettings, SftSettings
from rft_dist.strategies.weights_snapshot import WeightsSnapshot
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.data.mixture import Mixture
from rft_trainer.evaluation.ema_evaluator import SwapInEma
from rft_trainer.loops.early_stop import EarlyStop
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Collectives
from rft_trainer.runs.checkpointing import Progress, Saver
from rft_trainer.runs.step_report import Reporter
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import MicroBatchLoss, Updater
from rft_trainer.update.weight_check import WeightCheck

SupervisedSettings = SftSettings | PretrainSettings | DpoSettings | RmSettings


class LoopParts(TypedDict):
    """The fields of a `SupervisedLoop` that every stage fills alike."""

    ledger: Ledger
    updater: Updater
    saver: Saver
    reporter: Reporter
    collectives: Collectives
    progress: Progress
    timer: PhaseTimer
    early_stop: EarlyStop
    max_steps: int
    eval_every: int
    max_refused_in_a_row: int
    weight_check: WeightCheck
    train_batch_size: int
    resume_command: str
    best: WeightsSnapshot | None
    averages: SwapInEma | None


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The rows of a run as its ledger counts them."""

    mixture: Mixture
    data_hash: str
    num_rows: int
    num_steps: int
    """Optimizer steps of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState(Generic[ModelT]):
    """The model of a run and all that a checkpoint of it holds, in the state of the one that it continues from."""

    settings: SupervisedSettings
    started: RunStart
    parallel: ParallelModel[ModelT]
    num_steps: int
    progress: Progress
    early_stop: EarlyStop
    best: WeightsSnapshot | None
    guard: NumericGuard
    ledger: Ledger
    saver: Saver

    def learning_rates(self) -> Callable[[int], float]:
        """Return the learning rate of each optimizer step."""
        chosen = self.settings.training
        return learning_rate_schedule(self.settings.optimizer, chosen.learning_rate, self.num_steps)

    def loop_parts(self, loss: MicroBatchLoss, learning_rates: Callable[[int], float]) -> LoopParts:
        """Return the fields of the loop that steps on `loss` with these learning rates."""
        settings, started, machine = self.settings, self.started, self.started.machine
        return LoopParts(
            ledger=self.ledger,
            updater=self._updater(loss, learning_rates),
            saver=self.saver,
            reporter=Reporter(
                started.directory,
                started.sinks,
                machine.collectives,
                num_steps=self.num_steps,
                rollout_every=0,
                rollouts_kept=0,
                seconds_before=self.progress.seconds,
            ),
            collectives=machine.collectives,
            progress=self.progress,
            timer=machine.phase_timer(self.progress, self.parallel.meter),
            early_stop=self.early_stop,
            max_steps=settings.training.max_steps,
            eval_every=settings.evaluation.eval_steps,
            max_refused_in_a_row=settings.run.max_refused_steps,
            weight_check=make_weight_check(settings.run, started, [self.parallel]),
            train_batch_size=settings.training.train_batch_size,
            resume_command=started.resume_command,
            best=self.best,
            averages=self.parallel.averages,
        )

    def _updater(self, loss: MicroBatchLoss, learning_rates: Callable[[int], float]) -> Updater:
        chosen, machine, parallel = self.settings.training, self.started.machine, self.parallel
        return Updater(
            loss,
            parallel.optimizer,
            parallel.data,
            micro_batching=micro_batching(
                chosen.micro_train_batch_size, chosen.max_tokens_per_micro_batch, chosen.packing_samples
            ),
            learning_rate=learning_rates,
            guard=self.guard,
            trace=make_tracer(parallel, machine),
            device=machine.device,
            pin_memory=self.settings.data.dataloader_pin_memory,
            collective_forward=parallel.collective_forward,
            meter=parallel.meter,
            sample=parallel.sample,
        )


def run_state(
    settings: SupervisedSettings,
    started: RunStart,
    parallel: ParallelModel[ModelT],
    rows: RowOrder,
    *,
    saved: CheckpointParts,
    early_stop: EarlyStop,
    trained: Iterable[str],
) -> RunState[ModelT]:
    """Make what a checkpoint holds beside the model, and restore it where the run continues from one.

    Args:
        settings: of the stage.
        started: the run.
        parallel: the model on its ranks.
        rows: what the ledger counts.
        saved: the model's part of a checkpoint.
        early_stop: ends the run on the loss of its evaluations.
        trained: names of the weights that change, whose best values are kept.
    """
    restored, chosen = started.restored, settings.training
    progress = Progress()
    best = None
    if chosen.patience:  # the best evaluation is then not the last
        best = WeightsSnapshot(parallel.weights, list(trained))
        if restored is not None:
            best.restore(restored.checkpoint.component("best_weights"))
    # before the saver, which restores what it remembers
    guard = make_guards(settings.run, started, progress, ["policy"], keeps_out=True)["policy"]
    ledger = make_ledger(rows.mixture, rows.data_hash, rows.num_rows, chosen.max_epochs, settings.run.seed)
    saver = make_saver(
        started,
        settings.checkpoint,
        started.metadata(rows.data_hash),
        saved,
        parallel.optimizer,
        {"progress": progress, "ledger": ledger, "early_stop": early_stop},
        {"best_weights": best} if best else None,
    )
    return RunState(
        settings=settings,
        started=started,
        parallel=parallel,
        num_steps=rows.num_steps,
        progress=progress,
        early_stop=early_stop,
        best=best,
        guard=guard,
        ledger=ledger,
        saver=saver,
    )


def policy_state(
    settings: SftSettings | PretrainSettings | DpoSettings, started: RunStart, tokenizer: HfTokenizer, rows: RowOrder
) -> RunState[CausalPolicy]:
    """Load the policy, with adapters where they are asked for, put it on the ranks, and make the state of its run."""
    machine, restored, chosen = started.machine, started.restored, settings.training
    source = weights_directory(settings.adapter, settings.model.pretrain, restored)
    policy = trainable_policy(settings.model, settings.strategy, source, machine, tokenizer, settings.adapter)
    if restored is None:
        load_initial_weights(policy, settings.checkpoint, show=machine.is_first)
        source = engine_weights_directory(settings.checkpoint, source, shares_weights=True)
    # before distribution, so that adapters are parameters like any others
    adapt(policy, settings.adapter, restored, base=source, seed=settings.run.seed)
    refuse_unknown_parts(policy, settings.optimizer)
    parallel = parallelize(ShardablePolicy(policy), settings.strategy, settings.optimizer, machine, restored)
    trained: Iterable[tuple[str, Any]] = (
        parallel.model.trainable_parameters() if parallel.model.adapters else parallel.model.named_parameters()
    )
    state = run_state(
        settings,
        started,
        parallel,
        rows,
        saved=checkpoint_parts(parallel, machine.collectives),
        early_stop=EarlyStop(chosen.patience, chosen.min_improvement, chosen.target_loss),
        trained=(name for name, _ in trained),
    )
    # the dropout masks of a resumed run go on with its next update
    parallel.model.begin_update(state.progress.updates)
    return state
