"""Asynchronous rollouts: the settings that they exclude, and the queue between replicas and trainer."""

from __future__ import annotations

from collections.abc import Iterator

from rft.build.engines import choose_engine
from rft.build.environment import ChosenEnvironment
from rft.build.rl_data import RlData
from rft.process.machine import choose_device
from rft.settings import RlSettings
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError
from rft_engine.replicas.engine import ReplicaEngine
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.async_rollouts.queue import AsyncConfig, RolloutQueue
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.loops.rl import RlLoop
from rft_trainer.protocols import Collectives, Engine
from rft_trainer.records.scores import Reward

_ONE_AT_A_TIME = "--max_staleness 0"


def refuse_what_cannot_run_ahead(settings: RlSettings, record: PolicyAlgorithm) -> None:
    """Raise for what engines in processes of their own, or rollouts that run ahead, do not do.

    Raises:
        OptionsError: by the name of the flag, before a model is loaded.
    """
    ahead, replicas = settings.ahead.max_staleness, settings.replicas.engine_replicas
    if ahead == 0 and replicas == 1:
        return
    for code, asked, why, do in _refusals(settings, record):
        chosen = f"max_staleness = {ahead}" if ahead else f"engine_replicas = {replicas}"
        raise OptionsError(
            code=code,
            what=f"{chosen} with {asked}",
            where="--max_staleness" if ahead else "--engine_replicas",
            why=why,
            state="nothing was started",
            do=do,
        )


def _refusals(settings: RlSettings, record: PolicyAlgorithm) -> Iterator[tuple[str, str, str, str]]:
    """(code, what it does not go with, why, what to do), the first that applies first."""
    ahead = settings.ahead.max_staleness
    back = _ONE_AT_A_TIME if ahead else "--engine_replicas 1"
    chosen = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    if not chosen.can.supports_replicas:
        why = f"{chosen.kind.title} runs in the trainer's process, with its weights"
        yield "async.engine", f"engine_type {chosen.name}", why, "--engine_type native"
    if settings.engine.enable_engine_sleep and not chosen.shares_weights and chosen.can_sleep and ahead:
        why = "an engine that draws while the trainer trains cannot give its memory back meanwhile"
        yield "async.sleep", "enable_engine_sleep", why, "--disable_engine_sleep"
    if not ahead:
        return
    if record.advantage.needs_greedy:
        why = "its baseline is a greedy response of the very weights that are trained"
        yield "async.baseline", f"advantage_estimator {record.name}", why, back
    if settings.ahead.async_deterministic:
        return
    if not chosen.can.supports_partial_rollouts:
        why = f"{chosen.name} draws a sample from its first token to its last: none goes on under other weights"
        yield "async.partial", f"engine_type {chosen.name}", why, "--async_deterministic"
    if settings.sampling.use_fire:
        why = "the first token's temperature counts from the first token of a whole sample"
        yield "async.fire", "use_fire", why, "--async_deterministic"


def rollout_queue(
    settings: RlSettings,
    engine: Engine,
    codec: HfTokenizer,
    reward: Reward,
    ledger: Ledger,
    data: RlData,
    sampling: SamplingOptions,
    collectives: Collectives,
    environment: ChosenEnvironment | None = None,
) -> RolloutQueue | None:
    """The queue between the replicas and the trainer; None where every step waits for its own rollouts."""
    if not settings.ahead.max_staleness:
        return None
    assert isinstance(engine, ReplicaEngine)
    batch = settings.batch
    rules = AsyncConfig(
        max_staleness=settings.ahead.max_staleness,
        deterministic=settings.ahead.async_deterministic,
        prompts_per_step=batch.rollout_batch_size * data.plan.rollouts_per_update,
        max_steps=batch.max_steps,
        group_size=batch.n_samples_per_prompt,
        seed=settings.run.seed,
    )
    return RolloutQueue(
        engine,
        codec,
        reward,
        ledger,
        data.prompts,
        sampling=sampling,
        rules=rules,
        collectives=collectives,
        kind=environment and environment.samples_ahead(sampling.max_new_tokens),
    )


def close_engines(training: RlLoop) -> None:
    """End the processes of replicas and the threads that feed on them, where there are any."""
    if training.ahead is not None:
        training.ahead.close()
    elif isinstance(training.engine, ReplicaEngine):
        training.engine.close()
