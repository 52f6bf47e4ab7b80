"""Where everything meets: from resolved settings to the collaborators of a run.

The only module that knows all packages. It builds; it does not train, print or decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rft_algos.algorithms import PolicyAlgorithm
from rft_cli.algorithm_choice import algorithm_record
from rft_cli.checkpoint_weights import engine_source, take_weights
from rft_cli.checkpointing import Restored
from rft_cli.compose_algorithm import PolicyWithCritic, annotator, build_critic, credit_assigner, old_policy
from rft_cli.compose_data import RlData, response_limits, step_rules
from rft_cli.compose_parts import (
    balanced_forward,
    learning_rate_schedule,
    make_evaluator,
    make_ledger,
    make_saver,
    micro_batching,
    trainable_policy,
)
from rft_cli.engines import choose_engine, engine_check, make_engine
from rft_cli.machine import Machine
from rft_cli.model_choice import head_chunk_size, weights_dtype
from rft_cli.settings import RlSettings
from rft_cli.strategies import Spread, spread_policy, spread_reference, spreads_weights
from rft_models.load import load_reference
from rft_models.text import HfTextCodec
from rft_trainer.annotate import LogprobAnnotator
from rft_trainer.credit import ComputeAdvantages, CreditAssigner
from rft_trainer.gap_watch import GapWatch
from rft_trainer.loops.rl import Reinforcement
from rft_trainer.objective import PolicyObjective
from rft_trainer.protocols import Engine
from rft_trainer.records import RolloutGroup, Sampling
from rft_trainer.report import Reporter
from rft_trainer.rewards.records import Reward
from rft_trainer.rollouts import RolloutCollector
from rft_trainer.run_directory import RunDirectory
from rft_trainer.samples import shuffle_rewards
from rft_trainer.saving import Progress
from rft_trainer.sinks.protocol import Sink
from rft_trainer.update import MicroBatching, Updater


def _reference(settings: RlSettings, machine: Machine) -> LogprobAnnotator:
    """Log-probabilities under the model that the run started from."""
    policy = load_reference(
        settings.model.pretrain,
        dtype=weights_dtype(settings.model.bf16),
        device=machine.device,
        flash_attn=settings.model.flash_attn,
        head_chunk_size=head_chunk_size(settings.model),
    )
    take_weights(policy, settings.checkpoint, show=False)
    policy = spread_reference(policy, settings.strategy, machine)
    return annotator(settings, machine, policy, in_step=spreads_weights(settings.strategy))


def _updater(
    settings: RlSettings,
    machine: Machine,
    spread: Spread,
    record: PolicyAlgorithm,
    credit: CreditAssigner,
    num_updates: int,
) -> Updater:
    """Optimizer steps of the record's objective."""
    peak = settings.optimizer.actor_learning_rate
    return Updater(
        spread.policy,
        spread.optimizer,
        PolicyObjective(record, credit.coefficients),
        spread.data,
        micro_batching=_cutting(settings),
        learning_rate=learning_rate_schedule(settings.optimizer, peak, num_updates),
        temperature=settings.sampling.temperature,
        device=machine.device,
        pin_memory=settings.data.dataloader_pin_memory,
        balanced=balanced_forward(settings.model, spread.policy, machine),
        fused=spread.policy,
        in_step=spread.in_step,
    )


def build_rl(
    settings: RlSettings,
    machine: Machine,
    directory: RunDirectory,
    codec: HfTextCodec,
    data: RlData,
    reward: Reward,
    sinks: Sequence[Sink],
    *,
    metadata: dict[str, object],
    resume_command: str,
    restored: Restored | None,
    compute_advantages: ComputeAdvantages | None = None,
) -> Reinforcement:
    """The whole RL run, ready to go; with `restored`, exactly where that checkpoint was."""
    record = algorithm_record(settings)
    source = restored.model_directory if restored else settings.model.pretrain
    policy = trainable_policy(settings.model, settings.strategy, source, machine, codec)
    if restored is None:
        take_weights(policy, settings.checkpoint, show=machine.is_first)
    spread = spread_policy(policy, settings.strategy, settings.optimizer, machine, restored)
    longest_response, longest = response_limits(settings, data.longest_prompt)
    engine, sleeps = _engine(settings, machine, directory, spread, source, longest, restored)
    credit = credit_assigner(settings, record, longest_response, compute_advantages)
    critic_rate = learning_rate_schedule(settings.optimizer, settings.critic.critic_learning_rate, data.num_updates)
    critic = build_critic(settings, machine, record, codec, restored, _cutting(settings), critic_rate)
    progress = Progress()
    training, episodes = data.training, settings.batch.num_episodes
    ledger = make_ledger(training.mixture, training.data_hash, len(data.prompts), episodes, settings.run.seed)
    saver = make_saver(
        directory,
        settings.checkpoint,
        metadata,
        PolicyWithCritic(policy, critic.critic) if critic and settings.critic.save_value_network else spread.savable,
        spread.optimizer,
        {"progress": progress, "ledger": ledger, "credit": credit},
        machine,
        restored,
        tensor_parts=critic.tensor_parts if critic else None,
    )
    if progress.step:
        engine.load_weights(progress.step)
    return Reinforcement(
        ledger=ledger,
        prompts=data.prompts,
        engine=engine,
        collector=_collector(settings, machine, record, engine, codec, reward, longest_response),
        assign_credit=credit,
        reference=_reference(settings, machine) if record.needs_reference else None,
        old_policy=old_policy(settings, record, machine, policy, spread.data, in_step=spread.in_step),
        critic=critic.part if critic else None,
        control=_control(settings),
        updater=_updater(settings, machine, spread, record, credit, data.num_updates),
        evaluator=make_evaluator(engine, codec, reward, machine, data.held_out, longest_response),
        saver=saver,
        reporter=_reporter(settings, machine, directory, sinks, data, progress),
        collectives=machine.collectives,
        rules=step_rules(settings, data, record),
        progress=progress,
        timer=machine.phase_timer(progress),
        resume_command=resume_command,
        sleep_engine=sleeps,
        check_engine=engine_check(settings.engine, machine, policy, engine),
        gaps=gap_watch(settings, machine, resume_command),
    )


def _engine(
    settings: RlSettings,
    machine: Machine,
    directory: RunDirectory,
    spread: Spread,
    source: str | Path,
    longest: int,
    restored: Restored | None,
) -> tuple[Engine, bool]:
    """The engine with the policy's weights, and whether it is put to sleep while they are trained."""
    chosen = choose_engine(settings.engine, machine.device)
    sleeps = settings.engine.enable_engine_sleep and chosen.can_sleep
    if restored is None:
        source = engine_source(settings.checkpoint, source, shares_weights=chosen.shares_weights)
    engine = make_engine(
        settings.engine,
        machine,
        spread.policy,
        source,
        longest,
        sleeps=sleeps,
        log_path=directory.path / "logs" / f"engine-{machine.ranks.rank}.log",
        weights=spread.whole_weights,
        dtype=spread.compute_dtype,
    )
    return engine, sleeps


def _reporter(
    settings: RlSettings,
    machine: Machine,
    directory: RunDirectory,
    sinks: Sequence[Sink],
    data: RlData,
    progress: Progress,
) -> Reporter:
    return Reporter(
        directory,
        sinks,
        machine.collectives,
        num_steps=data.num_steps,
        rollout_every=settings.run.rollout_log_interval if settings.run.save_trajectories else 0,
        rollouts_kept=settings.run.num_trajectories_to_save,
        seconds_before=progress.seconds,
    )


def gap_watch(settings: RlSettings, machine: Machine, resume_command: str) -> GapWatch:
    """What looks at the distance of engine and trainer in every step."""
    given = settings.algorithm

    def remedy(gap: float) -> str:
        corrected = "" if given.off_policy_correction else " --off_policy_correction tis"
        return f"{resume_command} --max_logprob_gap {2 * gap:.2g}{corrected}, if `rft-train conformance` calls it close"

    return GapWatch(
        collectives=machine.collectives,
        limit=given.max_logprob_gap or None,
        skips_first_token=settings.sampling.use_fire,
        remedy=remedy,
    )


def _collector(
    settings: RlSettings,
    machine: Machine,
    record: PolicyAlgorithm,
    engine: Engine,
    codec: HfTextCodec,
    reward: Reward,
    longest_response: int,
) -> RolloutCollector:
    return RolloutCollector(
        engine,
        codec,
        reward,
        machine.collectives,
        sampling=_sampling(settings, longest_response, codec),
        group_size=settings.batch.n_samples_per_prompt,
        seed=settings.run.seed,
        greedy_baseline=record.advantage.needs_greedy,
    )


def _cutting(settings: RlSettings) -> MicroBatching:
    batch = settings.batch
    return micro_batching(batch.micro_train_batch_size, batch.max_tokens_per_micro_batch, batch.packing_samples)


def _sampling(settings: RlSettings, longest_response: int, codec: HfTextCodec) -> Sampling:
    drawn = settings.sampling
    return Sampling(
        temperature=drawn.temperature,
        max_new_tokens=longest_response,
        stop_token_ids=codec.eos_ids,
        top_p=drawn.top_p,
        top_k=max(drawn.top_k, 0),
        min_p=drawn.min_p,
        first_token_temperature=drawn.first_token_temperature if drawn.use_fire else None,
    )


def _control(settings: RlSettings) -> Callable[[Sequence[RolloutGroup]], list[RolloutGroup]] | None:
    return partial(shuffle_rewards, seed=settings.run.seed) if settings.reward.shuffle_rewards else None
