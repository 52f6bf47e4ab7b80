"""Where everything meets: from resolved settings to the collaborators of a run.

The only module that knows all packages. It builds; it does not train, print or decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rft_algos import schedules
from rft_algos.algorithms import PolicyAlgorithm
from rft_algos.errors import OptionsError
from rft_cli.algorithm_choice import algorithm_record
from rft_cli.checkpoint_weights import engine_source, take_weights
from rft_cli.checkpointing import Restored, make_writer, save_schedule
from rft_cli.compose_algorithm import PolicyWithCritic, annotator, build_critic, credit_assigner, old_policy
from rft_cli.engines import choose_engine, engine_check, make_engine
from rft_cli.machine import Machine
from rft_cli.model_choice import checkpointing_of, freezing_of, head_chunk_size, weights_dtype
from rft_cli.prompt_files import Prepared, read_held_out, read_training
from rft_cli.settings import EvalSettings, RlSettings
from rft_cli.strategies import Spread, held_dtype, spread_policy, spread_reference, spreads_weights
from rft_dist.settings import AdamSettings, CheckpointSettings, StrategySettings
from rft_models.load import load_policy, load_reference
from rft_models.model_facts import model_facts
from rft_models.policy import CausalPolicy
from rft_models.settings import ModelSettings
from rft_models.text import HfTextCodec
from rft_trainer.annotate import LogprobAnnotator
from rft_trainer.batch_plan import BatchPlan, plan_batches
from rft_trainer.credit import ComputeAdvantages, CreditAssigner
from rft_trainer.data.mixture import Mixture
from rft_trainer.evaluation import Evaluator
from rft_trainer.gap_watch import GapWatch
from rft_trainer.ledger import Ledger
from rft_trainer.loops.rl import Reinforcement, StepRules
from rft_trainer.objective import PolicyObjective
from rft_trainer.protocols import Engine, Optimizer, SavablePolicy
from rft_trainer.records import Prompt, RolloutGroup, Sampling
from rft_trainer.report import Reporter
from rft_trainer.rewards.records import Reward
from rft_trainer.rewards.registry import reward_by_name
from rft_trainer.rollouts import RolloutCollector
from rft_trainer.router_balance import BalancedForward
from rft_trainer.run_directory import RunDirectory
from rft_trainer.samples import shuffle_rewards
from rft_trainer.saving import Progress, Saver, Stateful, StatefulTensors
from rft_trainer.settings import RewardSettings
from rft_trainer.sinks.protocol import Sink
from rft_trainer.update import MicroBatching, Updater


def learning_rate_schedule(settings: AdamSettings, peak: float, num_updates: int) -> Callable[[int], float]:
    """Learning rate of each optimizer step, counted from 0."""
    warmup = round(settings.lr_warmup_ratio * num_updates)
    if settings.lr_schedule == "constant":
        return partial(schedules.constant, peak=peak, warmup_steps=warmup)
    shape = schedules.warmup_cosine if settings.lr_schedule == "cosine" else schedules.warmup_linear
    return partial(shape, num_steps=num_updates, warmup_steps=warmup, peak=peak, floor_ratio=settings.min_lr_ratio)


def response_limits(settings: RlSettings | EvalSettings, longest_prompt: int) -> tuple[int, int]:
    """(tokens of the longest response, tokens of prompt plus response): `max_len` lowers the first where given.

    It leaves room for the longest prompt that is allowed, not for the longest that is there, so that a
    run and a later evaluation on other rows give responses the same room.

    Raises:
        OptionsError: the model has fewer positions.
    """
    limit = settings.sampling.generate_max_len
    if settings.sampling.max_len is not None:
        limit = min(limit, settings.sampling.max_len - settings.sampling.prompt_max_len)
    positions = model_facts(settings.model.pretrain).max_positions
    if longest_prompt + limit > positions:
        raise OptionsError(
            code="length.beyond_model",
            what=f"longest prompt {longest_prompt} + longest response {limit:,} = {longest_prompt + limit:,} tokens, "
            f"the model places {positions:,}",
            where="--generate_max_len",
            why="a prompt and its response share the positions of the model",
            do=f"--generate_max_len {positions - longest_prompt}"
            if longest_prompt < positions
            else f"--prompt_max_len {positions // 2}",
        )
    return limit, longest_prompt + limit


@dataclass(frozen=True, slots=True)
class RlData:
    """What an RL run trains and is evaluated on, and its arithmetic."""

    training: Prepared
    prompts: list[Prompt]
    held_out: list[Prompt]
    plan: BatchPlan
    num_steps: int
    num_updates: int
    longest_prompt: int


def rl_data(settings: RlSettings, codec: HfTextCodec, world_size: int) -> RlData:
    """Read, render and count; needs a tokenizer and no weights."""
    data, batch = settings.data, settings.batch
    training = read_training(
        data, data, codec, label_key=data.label_key, output_key=None, prompt_max_len=settings.sampling.prompt_max_len
    )
    held_out: list[Prompt] = []
    if data.eval_data:
        rendered = read_held_out(
            data.eval_data,
            data.eval_split,
            data.max_eval_samples,
            data,
            codec,
            label_key=data.label_key,
            output_key=None,
            prompt_max_len=settings.sampling.prompt_max_len,
        )
        held_out = [Prompt(r.prompt_id, r.token_ids, r.text, r.label, r.source) for r in rendered]
    prompts = training.prompts()
    plan = plan_batches(
        len(prompts),
        rollout_batch_size=batch.rollout_batch_size,
        n_samples_per_prompt=batch.n_samples_per_prompt,
        train_batch_size=batch.train_batch_size,
        micro_train_batch_size=batch.micro_train_batch_size,
        micro_rollout_batch_size=batch.micro_rollout_batch_size,
        max_epochs=batch.max_epochs,
        num_episodes=batch.num_episodes,
        world_size=world_size,
        group_estimator=algorithm_record(settings).advantage.compares_groups,
    )
    steps_an_episode = -(-plan.rollouts_per_episode // plan.rollouts_per_update)
    num_steps, num_updates = steps_an_episode * batch.num_episodes, plan.total_steps
    if batch.max_steps and batch.max_steps < num_steps:
        num_steps = batch.max_steps
        num_updates = min(num_updates, num_steps * len(plan.cut(plan.collection_size)) * batch.max_epochs)
    longest = max(len(prompt.token_ids) for prompt in (*prompts, *held_out))
    return RlData(training, prompts, held_out, plan, num_steps, num_updates, longest)


def step_rules(settings: RlSettings, data: RlData, record: PolicyAlgorithm) -> StepRules:
    """The numbers of one training step."""
    return StepRules(
        prompts_per_rollout=settings.batch.rollout_batch_size,
        rollouts_per_step=data.plan.rollouts_per_update,
        train_batch_size=settings.batch.train_batch_size,
        epochs_per_step=settings.batch.max_epochs,
        skip_zero_advantage=not (record.has_other_terms or settings.model.aux_loss_coef),
        filter_groups=settings.algorithm.filter_groups or record.dynamic_sampling,
        refill_rounds=settings.algorithm.dynamic_sampling_rounds if record.dynamic_sampling else 0,
        smallest_group=2 if record.advantage.compares_groups else 1,
        needs_baseline=record.advantage.needs_greedy,
        frozen_steps=max(settings.critic.freezing_actor_steps, 0) if record.advantage.needs_values else 0,
        max_steps=settings.batch.max_steps,
        eval_every=_eval_every(settings.evaluation.eval_steps, data),
        max_refused_in_a_row=settings.run.max_refused_steps,
        max_unscored_share=settings.run.max_unscored_share,
    )


def _eval_every(eval_steps: int, data: RlData) -> int:
    steps_an_episode = -(-data.plan.rollouts_per_episode // data.plan.rollouts_per_update)
    return steps_an_episode if eval_steps < 0 else eval_steps


def make_reward(settings: RewardSettings) -> Reward:
    """The named reward, or the person's own function."""
    return reward_by_name(settings.reward, num_workers=settings.reward_workers, timeout=settings.reward_timeout)


def make_ledger(mixture: Mixture, data_hash: str, num_rows: int, num_epochs: int, seed: int) -> Ledger:
    """Every row once an epoch, in the mixture's order."""
    return Ledger(
        num_rows,
        num_epochs,
        lambda epoch: [int(index) for index in mixture.order(seed, epoch)],
        data_hash=data_hash,
        seed=seed,
    )


def make_saver(
    directory: RunDirectory,
    settings: CheckpointSettings,
    metadata: dict[str, object],
    policy: SavablePolicy,
    optimizer: Optimizer,
    parts: dict[str, Stateful],
    machine: Machine,
    restored: Restored | None,
    tensor_parts: dict[str, StatefulTensors] | None = None,
) -> Saver:
    """Saves on every rank; hands every part its saved state where a checkpoint is given."""
    writer = make_writer(directory, settings, metadata, machine.collectives, restored)
    saver = Saver(
        writer,
        policy,
        optimizer,
        parts,
        machine.collectives,
        schedule=save_schedule(settings),
        before_save=directory.sync,
        tensor_parts=tensor_parts,
        resume_command=f"rft-train resume {directory.path}",
    )
    if restored is not None:
        saver.restore(restored.step, restored.records())
    return saver


def trainable_policy(
    settings: ModelSettings,
    strategy: StrategySettings,
    source: str | Path,
    machine: Machine,
    codec: HfTextCodec,
) -> CausalPolicy:
    """The weights in `source`, whole, ready to be laid out and trained."""
    policy = load_policy(
        source,
        dtype=held_dtype(strategy, bf16=settings.bf16),
        device=machine.device,
        gradient_checkpointing=checkpointing_of(settings),
        flash_attn=settings.flash_attn,
        freeze=freezing_of(settings),
        head_chunk_size=head_chunk_size(settings),
        codec=codec,
    )
    return policy.train()


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


def balanced_forward(settings: ModelSettings, policy: CausalPolicy, machine: Machine) -> BalancedForward | None:
    """The routers' loss beside the objective, where it has a weight."""
    if not settings.aux_loss_coef:
        return None
    return BalancedForward(policy, coefficient=settings.aux_loss_coef, collectives=machine.collectives)


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


def micro_batching(max_sequences: int, max_tokens: int, packing: bool) -> MicroBatching:
    """How a rank cuts its samples; no cut changes the step."""
    return MicroBatching(max_sequences=max_sequences, max_tokens=max_tokens, by_tokens=packing)


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


def make_evaluator(
    engine: Engine,
    codec: HfTextCodec,
    reward: Reward,
    machine: Machine,
    prompts: Sequence[Prompt],
    longest_response: int,
) -> Evaluator | None:
    """Greedy evaluation of the held-out prompts, where there are any."""
    if not prompts:
        return None
    return Evaluator(
        engine,
        codec,
        reward,
        machine.collectives,
        prompts,
        max_new_tokens=longest_response,
        stop_token_ids=codec.eos_ids,
    )
