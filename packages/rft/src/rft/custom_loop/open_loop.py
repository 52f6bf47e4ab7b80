"""Composition of a loop of one's own: from settings to its policy and its trainer, on one process or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

from rft.build.engines import choose_engine, engine_check, make_engine
from rft.build.lora import adapt, counting, weights_directory
from rft.build.models import refuse_unknown_parts, tokenizer_of
from rft.build.prompt_data import renderer_for
from rft.build.shared_parts import (
    balanced_forward,
    learning_rate_schedule,
    make_tracer,
    micro_batching,
    sampling_options,
)
from rft.checkpoints.writer import ResumePoint
from rft.custom_loop.counters import LoopCounters
from rft.custom_loop.reference import reference_scorer
from rft.custom_loop.saving import LoopCheckpoints, find_checkpoint
from rft.custom_loop.settings import LoopKeywords, LoopSettings, loop_settings
from rft.hub.run_settings import with_model_directories
from rft.library.named_arguments import loop_arguments
from rft.parallel.parallelize import ParallelModel, parallelize, trainable_policy
from rft.parallel.policy_weights import checkpoint_parts, engine_adapters, engine_weights, fused_policy
from rft.parallel.shardable import ShardablePolicy
from rft.process.machine import Machine, open_machine
from rft_core.errors import OptionsError
from rft_dist.launch.process_group import ranks_from_environment
from rft_dist.settings import WatchSettings
from rft_models.loading.context_length import model_facts
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.loops.sft import TokenLikelihood
from rft_trainer.loops.trainer import Trainer
from rft_trainer.protocols import Engine
from rft_trainer.rollouts.trained_policy import SamplingSource, TrainedPolicy
from rft_trainer.runs.checkpointing import Progress
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss

_PATIENT = WatchSettings(watchdog_seconds=0.0, watchdog_first_seconds=0.0)
"""Between two calls stands code of a person, who may look at a result for an hour."""

_OPEN: list[bool] = []
"""The loops of this process that are open, each with whether it has several ranks."""


@dataclass(frozen=True, slots=True)
class CustomLoop:
    """An open loop: its policy, its trainer, and the ranks that it runs on. Close it, or use it as a context.

    Example::

        with rft.open_loop("model", actor_learning_rate=1e-5, lr_schedule="constant") as loop:
            sampled = loop.policy.sample(["1+1="], n=4)
    """

    policy: TrainedPolicy
    trainer: Trainer
    rank: int
    """Of this process, from 0."""
    world_size: int
    device: str
    _opened: ExitStack

    @property
    def is_first(self) -> bool:
        """Return whether this process is rank 0, the one that prints and writes."""
        return self.rank == 0

    def close(self) -> None:
        """End the engine and leave the ranks; does nothing the second time."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the loop; an error of this rank is first reported to the others."""
        self._opened.__exit__(kind, error, trace)


@loop_arguments
def open_loop(
    pretrain: str | Path,
    *,
    reference: bool = False,
    checkpoint: str | Path | None = None,
    **settings: Unpack[LoopKeywords],
) -> CustomLoop:
    """Load a model and make its policy and its trainer, on the ranks that the environment names.

    Under torchrun or SLURM every rank opens the loop with the same arguments.

    Args:
        pretrain: Hugging Face directory, or ORG/NAME[@REVISION] of the Hub.
        reference: also load the weights that the training began with, for `policy.reference_logprobs`.
        checkpoint: what `trainer.save` returned or was given: the loop goes on from there.
        settings: the flags of `rft-train rl` by their names, with its defaults (`LoopKeywords`).

    Raises:
        OptionsError: a setting that there is not, out of its range, or that excludes another one.
        PreflightError: this machine lacks a device or a package.
        CheckpointError: there is no checkpoint that verifies.
    """
    return open_with_settings(loop_settings(pretrain, settings), reference=reference, checkpoint=checkpoint)


def open_with_settings(
    settings: LoopSettings, *, reference: bool = False, checkpoint: str | Path | None = None
) -> CustomLoop:
    """Open a loop with settings that are resolved already, as `open_loop`."""
    with ExitStack() as opening:
        opening.enter_context(_only_loop())
        machine = opening.enter_context(open_machine(settings.model.device, None, _PATIENT, debug=settings.run.debug))
        local: LoopSettings = with_model_directories(settings)
        _require_schedule(local)
        built = _Building(local, machine, find_checkpoint(checkpoint, machine), wants_reference=reference)
        opening.callback(built.close_engine)
        ranks = machine.ranks
        # kept open from here on, and closed by the loop
        return CustomLoop(built.policy, built.trainer, ranks.rank, ranks.world_size, machine.device, opening.pop_all())


class _Building:
    """The parts of one loop, each made once."""

    def __init__(
        self, settings: LoopSettings, machine: Machine, restored: ResumePoint | None, *, wants_reference: bool
    ) -> None:
        self._settings, self._machine, self._restored = settings, machine, restored
        self._engine: Any = None
        self._progress = Progress()
        self._timer = machine.phase_timer(self._progress)
        self._tokenizer: HfTokenizer = tokenizer_of(settings.model)
        self._source = weights_directory(settings.adapter, settings.model.pretrain, restored)
        self._parallel = self._parallelized()
        self._guard = NumericGuard(
            max_rows=settings.run.max_rows_set_aside,
            spike_factor=settings.run.max_norm_spike,
            resume_command="rft.open_loop(..., checkpoint=DIRECTORY)",
        )
        self._progress.guards = {"policy": self._guard}
        self._counters = LoopCounters()
        checkpoints = LoopCheckpoints(
            checkpoint_parts(self._parallel, machine.collectives),
            self._parallel.optimizer,
            {"progress": self._progress, "counters": self._counters},
            machine,
            settings.checkpoint,
        )
        if restored is not None:
            checkpoints.restore(restored)
        self._scorer_of_reference = reference_scorer(settings, machine, self._parallel) if wants_reference else None
        policy_loss = self._policy_loss()
        self.trainer = Trainer(
            self._updater(policy_loss),
            self._progress,
            machine.collectives,
            policy_loss=policy_loss,
            load_weights=self._load_weights,
            save=checkpoints.save,
            end_step=partial(self._counters.end_step, self._progress, self._guard, self._timer, settings.run),
        )
        self.policy = self._policy()
        self._counters.policy = self.policy

    def _parallelized(self) -> ParallelModel[CausalPolicy]:
        settings, machine, restored = self._settings, self._machine, self._restored
        policy = trainable_policy(
            settings.model, settings.strategy, self._source, machine, self._tokenizer, settings.adapter
        )
        # before distribution, so that adapters are parameters like any others
        adapt(policy, settings.adapter, restored, base=self._source, seed=settings.run.seed)
        refuse_unknown_parts(policy, settings.optimizer)
        return parallelize(ShardablePolicy(policy), settings.strategy, settings.optimizer, machine, restored)

    def _policy_loss(self) -> PolicyLoss:
        settings, parallel = self._settings, self._parallel
        return PolicyLoss(
            parallel.model,
            TokenLikelihood(),
            temperature=settings.sampling.temperature,
            balanced=balanced_forward(settings.model, parallel.model, self._machine),
            fused=fused_policy(parallel),
        )

    def _updater(self, policy_loss: PolicyLoss) -> Updater:
        settings, machine, parallel = self._settings, self._machine, self._parallel
        batch, peak = settings.batch, settings.optimizer.actor_learning_rate
        return Updater(
            policy_loss,
            parallel.optimizer,
            parallel.data,
            micro_batching=micro_batching(
                batch.micro_train_batch_size, batch.max_tokens_per_micro_batch, batch.packing_samples
            ),
            learning_rate=counting(parallel.model, learning_rate_schedule(settings.optimizer, peak, batch.max_steps)),
            guard=self._guard,
            trace=make_tracer(parallel, machine),
            device=machine.device,
            collective_forward=parallel.collective_forward,
            sample=parallel.sample,
        )

    def _policy(self) -> TrainedPolicy:
        settings, machine, parallel = self._settings, self._machine, self._parallel
        chosen = choose_engine(settings.engine, machine.device)
        return TrainedPolicy(
            parallel.model.model,
            renderer_for(settings.prompt, self._tokenizer),
            self._tokenizer,
            machine.collectives,
            source=SamplingSource(
                engine=lambda: self._opened_engine,
                options=sampling_options(
                    settings.sampling, settings.sampling.generate_max_len, self._tokenizer.eos_ids
                ),
                room=self._room,
                seed=settings.run.seed,
                sleeps=settings.engine.enable_engine_sleep and chosen.can_sleep,
                stale=lambda: self.trainer.stale,
            ),
            scorer=self._scorer,
            reference=self._scorer_of_reference,
            timer=self._timer,
        )

    def _scorer(self, temperature: float) -> LogprobScorer:
        batch, parallel = self._settings.batch, self._parallel
        return LogprobScorer(
            parallel.model,
            parallel.data,
            max_sequences=batch.micro_rollout_batch_size,
            max_tokens=batch.max_tokens_per_micro_batch,
            temperature=temperature,
            device=self._machine.device,
            collective_forward=parallel.collective_forward,
        )

    @cached_property
    def _room(self) -> int:
        """Tokens of a prompt with its completion: as the settings say, and no more than the model can place."""
        sampling = self._settings.sampling
        asked = sampling.max_len or sampling.prompt_max_len + sampling.generate_max_len
        return min(asked, model_facts(self._settings.model.pretrain).max_positions)

    @cached_property
    def _opened_engine(self) -> Engine:
        """The engine, made when it is first sampled from, with the weights as they were published."""
        settings, parallel = self._settings, self._parallel
        chosen = choose_engine(settings.engine, self._machine.device)
        self._engine = make_engine(
            settings.engine,
            self._machine,
            parallel.model,
            self._source,
            self._room,
            sleeps=settings.engine.enable_engine_sleep and chosen.can_sleep,
            weights=engine_weights(parallel),
            adapters=engine_adapters(parallel),
            dtype=parallel.compute_dtype,
        )
        if self._progress.updates:
            # it began with the weights on disk, which have been trained since
            self._engine.load_weights(self._progress.updates)
        return self._engine

    def _load_weights(self, version: int) -> None:
        """Give the engine the present weights, and check that it serves them; before it is made there is no need."""
        if self._engine is None:
            return
        self._engine.load_weights(version)
        check = engine_check(self._settings.engine, self._machine, self._parallel.model, self._engine)
        if check is not None:
            # the check draws samples, for which the engine has to be awake
            self._engine.wake()
            check(version)

    def close_engine(self) -> None:
        """End an engine that has a process of its own."""
        close: Callable[[], None] | None = getattr(self._engine, "close", None)
        if close is not None:
            close()


@contextmanager
def _only_loop() -> Generator[None]:
    """Refuse a second loop of several ranks while one is open: they exchange in one group."""
    several = ranks_from_environment().world_size > 1
    if several and _OPEN:
        raise OptionsError(
            code="loop.second_on_ranks",
            what="a second loop while another one is open",
            where="rft.open_loop",
            why="the ranks of a program exchange in one group, which a loop holds until it is closed",
            state="the first loop goes on as it was",
            do="the first loop's close(), or the end of its with block, before the second",
        )
    _OPEN.append(several)
    try:
        yield
    finally:
        _OPEN.pop()


def _require_schedule(settings: LoopSettings) -> None:
    """Refuse a learning rate that falls towards an end which nobody has named."""
    chosen = settings.optimizer
    counted = chosen.lr_warmup_steps is not None or not chosen.lr_warmup_ratio
    if settings.batch.max_steps or (chosen.lr_schedule == "constant" and counted):
        return
    warmup = "" if chosen.lr_schedule == "constant" else ', lr_schedule="constant"'
    raise OptionsError(
        code="loop.schedule_without_end",
        what=f"lr_schedule = {chosen.lr_schedule}, lr_warmup_ratio = {chosen.lr_warmup_ratio:g}, max_steps = 0",
        where="rft.open_loop",
        why="warm-up and decay are shares of all optimizer steps, and their number is not given",
        do=f"max_steps=1000 (the optimizer steps of the loop), or lr_warmup_ratio=0.0{warmup}",
    )
