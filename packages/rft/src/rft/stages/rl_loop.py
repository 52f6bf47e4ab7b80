"""Composition of the RL loop: from settings, data and a started run to its collaborators.

The only module that imports all packages. It builds; it does not train, print or decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rft.build.algorithm import algorithm_record, value_head
from rft.build.algorithm_parts import (
    BuiltCritic,
    PolicyWithCritic,
    annotator,
    build_critic,
    credit_assigner,
    old_policy,
)
from rft.build.constraint import constraint_of, evaluation_engine, group_advantages, policy_within
from rft.build.engines import choose_engine, make_engine, router_agreement
from rft.build.environment import ChosenEnvironment
from rft.build.lora import adapt, weights_directory
from rft.build.models import refuse_unknown_parts
from rft.build.replicas import make_replicas, wants_replicas
from rft.build.rl_data import RlData, response_limits, step_rules
from rft.build.rollout_source import RolloutParts, build_rollouts, require_async_support
from rft.build.shared_parts import (
    balanced_forward,
    learning_rate_schedule,
    make_evaluator,
    make_ledger,
    make_saver,
    make_tracer,
    micro_batching,
    pretraining_term,
    sampling_options,
)
from rft.checkpoints.ema_weights import averaged_evaluator
from rft.checkpoints.initial_weights import engine_weights_directory, load_initial_weights
from rft.checkpoints.parts import CheckpointParts, FullWeights
from rft.checkpoints.writer import ResumePoint
from rft.parallel.frozen_policy import load_frozen, share_frozen
from rft.parallel.parallelize import ParallelModel, is_sharded, parallelize, trainable_policy
from rft.parallel.policy_weights import checkpoint_parts, engine_adapters, engine_weights, fused_policy
from rft.parallel.shardable import ShardablePolicy
from rft.parallel.step_guards import make_guards, make_weight_check
from rft.process.machine import Machine
from rft.run_lifecycle import RunStart
from rft.settings import RlSettings
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_models.lora.adapters import BaseModelView
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.async_rollouts.scoring_threads import ThreadSafeReward
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.loops.rl import RlLoop
from rft_trainer.protocols import Engine
from rft_trainer.records.rollouts import RolloutGroup
from rft_trainer.records.scores import Reward
from rft_trainer.rollout_files.token_recorder import RecordLimits, TokenRecorder
from rft_trainer.runs.checkpointing import Progress, Saver, Stateful
from rft_trainer.runs.step_report import Reporter, rollouts_due
from rft_trainer.scoring.advantages import ComputeAdvantages
from rft_trainer.scoring.logprobs import LogprobScorer
from rft_trainer.scoring.router_agreement import RouterAgreement
from rft_trainer.scoring.samples import shuffle_rewards
from rft_trainer.update.mismatch_monitor import MismatchMonitor
from rft_trainer.update.numeric_guard import NumericGuard
from rft_trainer.update.optimizer_step import Updater
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.policy_objective import PolicyObjective


def _reference(
    settings: RlSettings, machine: Machine, parallel: ParallelModel[CausalPolicy], trie: TokenTrie | None
) -> LogprobScorer:
    """Make the scorer under the reference model, which is the run's start: with adapters the policy without them."""
    if parallel.model.adapters is not None:
        # the adapters are turned off for its forward, so no second model is loaded
        started: Any = policy_within(BaseModelView(parallel.model), trie, settings)
        return annotator(settings, machine, started, parallel.data, collective_forward=parallel.collective_forward)
    policy = load_frozen(settings.model.pretrain, settings.model, settings.strategy, machine)
    # on a resume as well: the reference stays the start of the run, whatever the policy has become
    load_initial_weights(policy, settings.checkpoint, show=False)
    return _frozen_scorer(settings, machine, policy, trie)


def _teacher(settings: RlSettings, machine: Machine, trie: TokenTrie | None) -> LogprobScorer | None:
    """Make the scorer under the teacher; None without one."""
    directory = settings.teacher.teacher_pretrain
    if not directory:
        return None
    frozen = load_frozen(directory, settings.model, settings.strategy, machine)
    return _frozen_scorer(settings, machine, frozen, trie)


def _frozen_scorer(
    settings: RlSettings, machine: Machine, policy: CausalPolicy, trie: TokenTrie | None
) -> LogprobScorer:
    data = share_frozen(policy, settings.strategy, machine).data
    scored = policy_within(policy, trie, settings)
    return annotator(settings, machine, scored, data, collective_forward=is_sharded(settings.strategy))


def _updater(
    settings: RlSettings,
    started: RunStart,
    parallel: ParallelModel[CausalPolicy],
    objective: PolicyObjective,
    num_updates: int,
    guard: NumericGuard,
    trie: TokenTrie | None,
) -> Updater:
    """Make the optimizer steps of the algorithm's objective."""
    machine, peak = started.machine, settings.optimizer.actor_learning_rate
    policy = policy_within(parallel.model, trie, settings)
    return Updater(
        PolicyLoss(
            policy,
            objective,
            temperature=settings.sampling.temperature,
            balanced=balanced_forward(settings.model, policy, machine),
            # its slabs run over the whole vocabulary
            fused=fused_policy(parallel) if policy is parallel.model else None,
        ),
        parallel.optimizer,
        parallel.data,
        micro_batching=_cutting(settings),
        learning_rate=learning_rate_schedule(settings.optimizer, peak, num_updates),
        guard=guard,
        trace=make_tracer(parallel, machine),
        device=machine.device,
        pin_memory=settings.data.dataloader_pin_memory,
        collective_forward=parallel.collective_forward,
        meter=parallel.meter,
        sample=parallel.sample,
    )


def build_rl(
    settings: RlSettings,
    started: RunStart,
    tokenizer: HfTokenizer,
    data: RlData,
    reward: Reward,
    *,
    compute_advantages: ComputeAdvantages | None = None,
    environment: ChosenEnvironment | None = None,
) -> RlLoop:
    """Build the RL run, ready to begin; where it continues from a checkpoint, exactly in that state."""
    machine, restored = started.machine, started.restored
    record = algorithm_record(settings)
    # the scoring thread and the evaluations of the trainer's thread share it
    reward = ThreadSafeReward(reward) if settings.async_rollouts.max_staleness else reward
    require_async_support(settings, record)  # before any model is loaded
    trie = constraint_of(settings, tokenizer)
    policy, source = _policy(settings, machine, tokenizer, restored)
    parallel = parallelize(ShardablePolicy(policy), settings.strategy, settings.optimizer, machine, restored)
    longest_response, longest = response_limits(settings, data.longest_prompt)
    longest = environment.room(settings.model.pretrain, longest, longest_response) if environment else longest
    # after distribution: only full parameters can be shared with an engine
    engine, sleeps = _engine(settings, started, parallel, source, longest)
    compute_advantages = compute_advantages or group_advantages(settings)
    credit = credit_assigner(settings, record, longest_response, compute_advantages)
    critic_rate = learning_rate_schedule(settings.optimizer, settings.critic.critic_learning_rate, data.num_updates)
    progress = Progress()
    guards = make_guards(settings.run, started, progress, _trained(record), keeps_out=False)
    critic = build_critic(settings, machine, record, tokenizer, restored, _cutting(settings), critic_rate, guards)
    timer, ledger = machine.phase_timer(progress, parallel.meter), _ledger(settings, data)
    sampling = _sampling(settings, longest_response, tokenizer)
    parts = RolloutParts(engine, tokenizer, reward, ledger, data, sampling, timer, environment, longest, trie)
    rollouts = build_rollouts(settings, machine, record, policy, parts)
    kept: dict[str, Stateful] = {"progress": progress, "ledger": ledger, "credit": credit, **rollouts.checkpoint_parts}
    saver = _saver(settings, started, parallel, critic, kept, data.data_hash)
    if progress.best_reward is not None and settings.evaluation.keep_best:
        saver.keep(progress.best_step)
    source = rollouts.source
    if progress.step:  # a resumed run's engine serves the restored weights
        source.load_weights(progress.step)
    answering = evaluation_engine(source, engine, trie, settings)
    evaluator = make_evaluator(
        answering, tokenizer, reward, machine, data, longest_response, settings, rollouts.conversations
    )
    objective = PolicyObjective(record, credit.coefficients)
    trained = [parallel, critic.parallel] if critic else [parallel]
    return RlLoop(
        ledger=ledger,
        prompts=data.prompts,
        rollouts=source,
        assign_credit=credit,
        reference=_reference(settings, machine, parallel, trie) if record.needs_reference else None,
        teacher=_teacher(settings, machine, trie),
        old_policy=old_policy(settings, record, machine, policy_within(policy, trie, settings), parallel),
        critic=critic.part if critic else None,
        control=_control(settings),
        updater=_updater(settings, started, parallel, objective, data.num_updates, guards["policy"], trie),
        pretraining=pretraining_term(settings, data, parallel),
        evaluator=evaluator,
        keeps_best=settings.evaluation.keep_best,
        averaged=averaged_evaluator(evaluator, parallel.averages, rollouts.refresh, tells=machine.is_first),
        saver=saver,
        reporter=_reporter(settings, started, data, progress),
        collectives=machine.collectives,
        rules=step_rules(settings, data, record),
        weight_check=make_weight_check(settings.run, started, trained),
        progress=progress,
        timer=timer,
        resume_command=started.resume_command,
        sleep_engine=sleeps,
        check_engine=rollouts.check_engine,
        routes=_routes(settings, machine, parallel, engine),
        gaps=gap_watch(settings, machine, started.resume_command),
        tokens=_token_recorder(settings, started, parallel, trie),
    )


def _trained(record: PolicyAlgorithm) -> list[str]:
    """Return the models that the algorithm trains, as their metrics name them."""
    return ["policy", "critic"] if record.advantage.needs_values else ["policy"]


def _saver(
    settings: RlSettings,
    started: RunStart,
    parallel: ParallelModel[CausalPolicy],
    critic: BuiltCritic | None,
    parts: dict[str, Stateful],
    data_hash: str,
) -> Saver:
    """Make the saver of the run: weights, optimizers and `parts`, which a checkpoint restores here."""
    return make_saver(
        started,
        settings.checkpoint,
        started.metadata(data_hash),
        _saved_weights(settings, started.machine, parallel, critic),
        parallel.optimizer,
        parts,
        tensor_parts=critic.tensor_parts if critic else None,
    )


def _saved_weights(
    settings: RlSettings, machine: Machine, parallel: ParallelModel[CausalPolicy], critic: BuiltCritic | None
) -> CheckpointParts:
    """Return what the model directory of a checkpoint holds: the policy, and the critic beside it where asked."""
    if critic and settings.critic.save_value_network:
        return FullWeights(PolicyWithCritic(parallel.model, critic.critic))
    return checkpoint_parts(parallel, machine.collectives)


def _ledger(settings: RlSettings, data: RlData) -> Ledger:
    """Return the ledger of prompts, before its first reservation."""
    return make_ledger(data.mixture, data.data_hash, len(data.prompts), settings.batch.num_episodes, settings.run.seed)


def _policy(
    settings: RlSettings, machine: Machine, tokenizer: HfTokenizer, restored: ResumePoint | None
) -> tuple[CausalPolicy, str | Path]:
    """Return the policy, unsharded and with its adapters, and the directory from which an engine with a copy starts."""
    source = weights_directory(settings.adapter, settings.model.pretrain, restored)
    policy = trainable_policy(settings.model, settings.strategy, source, machine, tokenizer, settings.adapter)
    if restored is None:
        load_initial_weights(policy, settings.checkpoint, show=machine.is_first)
        # the directory alone; `_engine` asks again for the chosen engine, which may refuse
        source = engine_weights_directory(settings.checkpoint, source, shares_weights=True)
    adapt(policy, settings.adapter, restored, base=source, seed=settings.run.seed)
    refuse_unknown_parts(policy, settings.optimizer, value_head(settings))
    return policy, source


def _engine(
    settings: RlSettings,
    started: RunStart,
    parallel: ParallelModel[CausalPolicy],
    source: str | Path,
    longest: int,
) -> tuple[Engine, bool]:
    """Return the engine with the policy's weights, and True if it is put to sleep while they are trained."""
    machine, logs = started.machine, started.directory.logs_directory
    chosen = choose_engine(settings.engine, machine.device)
    sleeps = settings.engine.enable_engine_sleep and chosen.can_sleep
    if started.restored is None:
        source = engine_weights_directory(settings.checkpoint, source, shares_weights=chosen.shares_weights)
    if wants_replicas(settings):
        replicas = make_replicas(
            settings,
            machine,
            parallel.model,
            source,
            longest,
            logs,
            weights=engine_weights(parallel) or parallel.model.named_parameters,
            in_blocks=parallel.shards_weights,
            dtype=parallel.compute_dtype,
        )
        return replicas, sleeps and chosen.shares_weights and not settings.async_rollouts.max_staleness
    engine = make_engine(
        settings.engine,
        machine,
        parallel.model,
        source,
        longest,
        sleeps=sleeps,
        log_path=logs / f"engine-{machine.ranks.rank}.log",
        weights=engine_weights(parallel),
        adapters=engine_adapters(parallel),
        dtype=parallel.compute_dtype,
    )
    return engine, sleeps


def _routes(
    settings: RlSettings, machine: Machine, parallel: ParallelModel[CausalPolicy], engine: Engine
) -> RouterAgreement | None:
    # engines ahead of the trainer have other weights than it, and replicas are in processes of their own
    if settings.async_rollouts.max_staleness or wants_replicas(settings):
        return None
    return router_agreement(settings.engine, machine, parallel.model, engine)


def _reporter(settings: RlSettings, started: RunStart, data: RlData, progress: Progress) -> Reporter:
    return Reporter(
        started.directory,
        started.sinks,
        started.machine.collectives,
        num_steps=data.num_steps,
        rollout_every=settings.run.rollout_log_interval if settings.run.save_trajectories else 0,
        rollouts_kept=settings.run.num_trajectories_to_save,
        seconds_before=progress.seconds,
    )


def _token_recorder(
    settings: RlSettings, started: RunStart, parallel: ParallelModel[CausalPolicy], trie: TokenTrie | None
) -> TokenRecorder | None:
    """Make the recorder of tokens; None where none are recorded."""
    chosen, machine = settings.run, started.machine
    shown = chosen.token_records == "shown"
    if chosen.token_records == "off" or (shown and not chosen.save_trajectories):
        return None
    policy = policy_within(parallel.model, trie, settings)
    scorer = annotator(settings, machine, policy, parallel.data, collective_forward=parallel.collective_forward)
    limits = RecordLimits(
        is_due=partial(rollouts_due, every=chosen.rollout_log_interval if shown else 1),
        num_responses=chosen.num_trajectories_to_save if shown else None,
        max_bytes=int(chosen.token_records_mib * 2**20),
    )
    return TokenRecorder(started.directory, scorer, limits, writes=machine.is_first)


def gap_watch(settings: RlSettings, machine: Machine, resume_command: str) -> MismatchMonitor:
    """Make the monitor of the log-prob gap between engine and trainer, checked in every step."""
    algorithm = settings.algorithm

    def remedy(gap: float) -> str:
        corrected = "" if algorithm.off_policy_correction else " --off_policy_correction tis"
        return f"{resume_command} --max_logprob_gap {2 * gap:.2g}{corrected}, if `rft-train conformance` calls it close"

    return MismatchMonitor(
        collectives=machine.collectives,
        # a gap is expected ahead of the trainer: its weights are newer than those that sampled
        limit=None if settings.async_rollouts.max_staleness else algorithm.max_logprob_gap or None,
        # drawn at another temperature on purpose
        skips_first_token=settings.sampling.use_fire,
        remedy=remedy,
    )


def _cutting(settings: RlSettings) -> MicroBatching:
    batch = settings.batch
    return micro_batching(batch.micro_train_batch_size, batch.max_tokens_per_micro_batch, batch.packing_samples)


def _sampling(settings: RlSettings, longest_response: int, tokenizer: HfTokenizer) -> SamplingOptions:
    drawn = settings.sampling
    options = sampling_options(drawn, longest_response, tokenizer.eos_ids)
    return replace(options, first_token_temperature=drawn.first_token_temperature) if drawn.use_fire else options


def _control(settings: RlSettings) -> Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None:
    return partial(shuffle_rewards, seed=settings.run.seed) if settings.reward.shuffle_rewards else None
