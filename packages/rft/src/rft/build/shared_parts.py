"""Parts that several commands build alike: the ledger, the saver, the schedule, the evaluator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rft.build.rl_data import RlData
from rft.checkpoints.parts import CheckpointParts
from rft.checkpoints.writer import ResumePoint, make_writer, save_schedule
from rft.parallel.parallelize import ParallelModel
from rft.parallel.policy_weights import fused_policy
from rft.process.machine import Machine
from rft.reward_names import function_names
from rft.settings import RlSettings
from rft_algos.decoding.sampling_options import SamplingOptions as SamplingOptions
from rft_algos.schedules import learning_rate
from rft_core.keyed_random import derive_key
from rft_dist.settings import AdamSettings, CheckpointSettings
from rft_engine.settings import SamplingSettings
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.settings import ModelSettings, RouterSettings
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.batches.keyed_batches import KeyedBatches
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.batches.units import MicroBatching
from rft_trainer.data.mixture import Mixture
from rft_trainer.evaluation.evaluator import Evaluator
from rft_trainer.protocols import Engine, Optimizer
from rft_trainer.records.scores import Reward
from rft_trainer.rewards.voted_answers import answer_reader
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.runs.checkpointing import Saver, Stateful, StatefulTensors
from rft_trainer.runs.directory import RunDirectory
from rft_trainer.settings.evaluation import parse_ks
from rft_trainer.update.fault_trace import FaultTracer
from rft_trainer.update.moe_aux_loss import MoeAuxLoss, RouterWeights
from rft_trainer.update.policy_loss import PolicyLoss
from rft_trainer.update.pretraining_loss import PretrainingLikelihood, PretrainingTerm


def learning_rate_schedule(settings: AdamSettings, peak: float, num_updates: int) -> Callable[[int], float]:
    """Learning rate of each optimizer step, counted from 0."""
    warmup = round(settings.lr_warmup_ratio * num_updates)
    if settings.lr_warmup_steps is not None:
        # a loop without an end (0 updates) has a constant rate alone, whose warm-up nothing shortens
        warmup = min(settings.lr_warmup_steps, num_updates or settings.lr_warmup_steps)
    if settings.lr_schedule == "constant":
        return partial(learning_rate.constant, peak=peak, warmup_steps=warmup)
    shape = learning_rate.warmup_cosine if settings.lr_schedule == "cosine" else learning_rate.warmup_linear
    if settings.lr_schedule == "wsd":
        shape = partial(learning_rate.warmup_stable_decay, decay_steps=round(settings.lr_decay_ratio * num_updates))
    return partial(shape, num_steps=num_updates, warmup_steps=warmup, peak=peak, floor_ratio=settings.min_lr_ratio)


def make_ledger(mixture: Mixture, data_hash: str, num_rows: int, num_epochs: int, seed: int) -> Ledger:
    """Make the ledger that visits every row once an epoch, in the mixture's order."""
    return Ledger(
        num_rows,
        num_epochs,
        lambda epoch: mixture.sequence(seed, epoch),
        data_hash=data_hash,
        seed=seed,
    )


class SavedRun(Protocol):
    """The run that is saved."""

    @property
    def directory(self) -> RunDirectory: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def restored(self) -> ResumePoint | None: ...
    @property
    def resume_command(self) -> str: ...


def make_saver(
    started: SavedRun,
    settings: CheckpointSettings,
    metadata: dict[str, object],
    policy: CheckpointParts,
    optimizer: Optimizer,
    parts: dict[str, Stateful],
    tensor_parts: dict[str, StatefulTensors] | None = None,
) -> Saver:
    """Make the saver of every rank; with a checkpoint, restore the saved state of every part."""
    directory, collectives, restored = started.directory, started.machine.collectives, started.restored
    writer = make_writer(directory, settings, metadata, collectives, restored)
    saver = Saver(
        writer,
        policy,
        optimizer,
        parts,
        collectives,
        schedule=save_schedule(settings),
        # the rows of a step must be on disk before a checkpoint says that the step is done
        before_save=directory.sync,
        tensor_parts=tensor_parts,
        resume_command=started.resume_command,
        model_only=settings.save_model_only,
    )
    # restored here: what is built next reads the step from parts that already have their state
    if restored is not None:
        saver.restore(restored.step, restored.records())
    return saver


def balanced_forward(
    settings: ModelSettings,
    policy: CausalPolicy,
    machine: Machine,
    routers: RouterSettings | None = None,
    passed: Callable[[], float] = lambda: 0.0,
) -> MoeAuxLoss | None:
    """Return what routers add to the objective; without a weight those of a mixture of experts are watched.

    They are watched where each rank has rows of its own, and in a stage without settings of `routers` where layers are
    not compiled. `passed` is the share of the run's updates that are done.
    """
    chosen = routers or RouterSettings()
    rate, end = chosen.balance_bias_rate, chosen.balance_bias_rate_end if chosen.balance_bias_rate else 0.0
    weights = RouterWeights(settings.aux_loss_coef, chosen.router_z_loss_coef, rate, end)
    if weights == RouterWeights():
        # what records the logits of routers breaks the graphs of compiled layers
        fits = policy.backbone.split is None and (routers is not None or not policy.is_compiled)
        if not fits or not policy.has_known_routers:
            return None
    return MoeAuxLoss(policy, weights, collectives=machine.collectives, passed=passed)


def pretraining_term(
    settings: RlSettings, data: RlData, parallel: ParallelModel[CausalPolicy]
) -> PretrainingTerm | None:
    """Return the pre-training term of every update; None without rows or weight.

    Routers are balanced on the rollouts alone, and rows are scored at temperature 1, whatever samples are drawn at.
    """
    rows, coefficient = data.pretraining, settings.pretraining.ptx_coef
    if rows is None or not coefficient:
        return None
    # its own seed: the prompts of the run may be rows of the same file
    seed = derive_key(settings.run.seed, "pretraining")
    batches = KeyedBatches(
        rows.samples, lambda epoch: [int(index) for index in rows.mixture.order(seed, epoch)], rows.num_rows
    )
    loss = PolicyLoss(parallel.model, PretrainingLikelihood(coefficient), fused=fused_policy(parallel))
    return PretrainingTerm(batches, loss)


def make_tracer(parallel: ParallelModel[Any], machine: Machine) -> FaultTracer:
    """Make what looks for the rows at fault for a refused step of a distributed model."""
    return FaultTracer(parallel.module, device=machine.device, collective_forward=parallel.collective_forward)


def micro_batching(max_sequences: int, max_tokens: int, packing: bool) -> MicroBatching:
    """Return the splitting of a rank's samples into micro-batches; no splitting changes the step."""
    return MicroBatching(max_sequences=max_sequences, max_tokens=max_tokens, by_tokens=packing)


def make_evaluator(
    engine: Engine,
    tokenizer: HfTokenizer,
    reward: Reward,
    machine: Machine,
    data: RlData,
    longest_response: int,
    settings: RlSettings,
    conversations: Conversations | None = None,
) -> Evaluator | None:
    """Make the evaluator of the held-out prompts, where there are any; greedy unless settings say otherwise."""
    if not data.held_out:
        return None
    asked = settings.evaluation
    # fewer where the constraint has fewer
    width = min(asked.eval_beams, getattr(engine, "most_beams", asked.eval_beams))
    return Evaluator(
        engine,
        tokenizer,
        reward,
        machine.collectives,
        data.held_out,
        sampling=SamplingOptions(
            temperature=asked.eval_temperature, max_new_tokens=longest_response, stop_token_ids=tokenizer.eos_ids
        ),
        conversations=conversations,
        metrics=data.metrics,
        num_samples=width or asked.eval_n,
        ks=parse_ks(asked.eval_k, asked.eval_beams or asked.eval_n),
        answer_of=answer_reader(*function_names(settings)),
        pick=asked.eval_pick,
        ranked=asked.eval_beams > 0,
        first_answers=asked.eval_beams > 0,
    )


def sampling_options(drawn: SamplingSettings, max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingOptions:
    """Return the options under which completions are drawn, from the settings of a command."""
    return SamplingOptions(
        temperature=drawn.temperature,
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop_token_ids,
        top_p=drawn.top_p,
        top_k=max(drawn.top_k, 0),
        min_p=drawn.min_p,
    )
