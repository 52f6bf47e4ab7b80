"""Source of a run's rollouts: sampled while the trainer waits, or ahead of it, and the settings that this excludes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rft.build.constraint import is_renormalised, rollout_engine, within
from rft.build.engines import EngineCheck, choose_engine, engine_check
from rft.build.environment import ChosenEnvironment
from rft.build.replicas import wants_replicas
from rft.build.rl_data import RlData
from rft.process.machine import Machine, choose_device
from rft.settings import RlSettings
from rft_algos.algorithms.published import PolicyAlgorithm
from rft_algos.decoding.sampling_options import SamplingOptions
from rft_algos.decoding.token_trie import TokenTrie
from rft_core.errors import OptionsError
from rft_engine.completions import EngineStats
from rft_engine.slowness import NO_LOSS, slowest_reason
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.tokenization.tokenizer import HfTokenizer
from rft_trainer.async_rollouts.constrained import ConstrainedAsyncEngine
from rft_trainer.async_rollouts.queue import AsyncConfig, AsyncRollouts
from rft_trainer.batches.prompt_ledger import Ledger
from rft_trainer.metrics.phase_timer import PhaseTimer
from rft_trainer.protocols import Engine
from rft_trainer.records.scores import Reward
from rft_trainer.rollouts.collector import RolloutCollector
from rft_trainer.rollouts.multi_turn import Conversations
from rft_trainer.rollouts.source import RolloutSource, SyncRollouts
from rft_trainer.runs.checkpointing import Stateful

_LOG = logging.getLogger(__name__)
_ONE_AT_A_TIME = "--max_staleness 0"

_PATIENCE_SECONDS = 1800.0


def require_async_support(settings: RlSettings, record: PolicyAlgorithm) -> None:
    """Raise for what engines in processes of their own, or rollouts that run ahead, do not do.

    Raises:
        OptionsError: by the name of the flag, before a model is loaded.
    """
    staleness, replicas = settings.async_rollouts.max_staleness, settings.replicas.engine_replicas
    if staleness == 0 and replicas == 1:
        return
    for code, asked, why, do in _refusals(settings, record):
        chosen = f"max_staleness = {staleness}" if staleness else f"engine_replicas = {replicas}"
        raise OptionsError(
            code=code,
            what=f"{chosen} with {asked}",
            where="--max_staleness" if staleness else "--engine_replicas",
            why=why,
            state="nothing was started",
            do=do,
        )


def _refusals(settings: RlSettings, record: PolicyAlgorithm) -> Iterator[tuple[str, str, str, str]]:
    """(code, what it does not go with, why, what to do), the first that applies first."""
    staleness = settings.async_rollouts.max_staleness
    back = _ONE_AT_A_TIME if staleness else "--engine_replicas 1"
    chosen = choose_engine(settings.engine, choose_device(settings.model.device, 0))
    if not chosen.can.supports_replicas:
        why = f"{chosen.kind.title} runs in the trainer's process, with its weights"
        yield "async.engine", f"engine_type {chosen.name}", why, "--engine_type native"
    if settings.engine.enable_engine_sleep and not chosen.shares_weights and chosen.can_sleep and staleness:
        why = "an engine that generates while the trainer trains cannot release its memory meanwhile"
        yield "async.sleep", "enable_engine_sleep", why, "--disable_engine_sleep"
    if not staleness:
        return
    if record.advantage.needs_greedy:
        why = "its baseline is a greedy response under exactly the weights that are trained"
        yield "async.baseline", f"advantage_estimator {record.name}", why, back
    # a deterministic run samples a step with one version throughout, so nothing goes on under other weights
    if settings.async_rollouts.async_deterministic:
        return
    if not chosen.can.supports_partial_rollouts:
        why = f"{chosen.name} generates each sample from start to end: none can continue under newer weights"
        yield "async.partial", f"engine_type {chosen.name}", why, "--async_deterministic"
    if settings.sampling.use_fire:
        why = "the first token's temperature applies at the start of a sample, not where one is continued"
        yield "async.fire", "use_fire", why, "--async_deterministic"


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """Collaborators of rollouts, whichever way they are sampled."""

    engine: Engine
    tokenizer: HfTokenizer
    reward: Reward
    ledger: Ledger
    data: RlData
    sampling: SamplingOptions
    timer: PhaseTimer
    environment: ChosenEnvironment | None
    room: int
    """Tokens that the engine holds for a context and a turn of a conversation."""
    constraint: TokenTrie | None = None
    """Sequences that every response is one of; None where responses are free."""

    def conversations(self, engine: Engine) -> Conversations | None:
        """Return the sampler of conversations on `engine`; None where samples are single responses."""
        return self.environment.conversations(engine, self.room, self.timer) if self.environment else None


@dataclass(frozen=True, slots=True)
class BuiltRollouts:
    """The source of a run's rollouts, and what differs with the way they are sampled."""

    source: RolloutSource
    conversations: Conversations | None
    """For evaluations; they are sampled by the source."""
    checkpoint_parts: Mapping[str, Stateful]
    """Samples in flight, which a checkpoint holds."""
    check_engine: EngineCheck | None
    """Probe after every load of weights; None where the engine shares them or verifies them itself."""
    refresh: Callable[[], None] | None
    """Loads the policy's weights again under the same version; None where samples are drawn with them all the time."""


class EngineDiagnosis:
    """Diagnosis of an engine's last call, as a metric; each cause that costs much is logged the first time."""

    def __init__(self, stats: Callable[[], EngineStats], *, notify: bool) -> None:
        """Store the source of the figures; `notify` logs the notices, on one rank alone."""
        self._stats, self._notify = stats, notify
        self._logged: set[str] = set()

    def __call__(self) -> dict[str, object]:
        """Return what limited the speed of the last call, as `time/engine_limit`, and its tokens a second."""
        stats = self._stats()
        reason = slowest_reason(stats)
        if self._notify and reason.cause not in (*NO_LOSS, *self._logged):
            self._logged.add(reason.cause)
            _LOG.info("the engine loses time: %s", reason.text)
        speed = {"time/engine_tokens_per_second": stats.tokens_per_second} if stats.seconds else {}
        return {"time/engine_limit": reason.cause, **speed}


def build_rollouts(
    settings: RlSettings, machine: Machine, record: PolicyAlgorithm, policy: CausalPolicy, parts: RolloutParts
) -> BuiltRollouts:
    """Build the rollouts of the settings: ahead of the trainer with `max_staleness`, else while it waits."""
    build = _asynchronous if settings.async_rollouts.max_staleness else _synchronous
    return build(settings, machine, record, policy, parts)


def _synchronous(
    settings: RlSettings, machine: Machine, record: PolicyAlgorithm, policy: CausalPolicy, parts: RolloutParts
) -> BuiltRollouts:
    engine: Any = parts.engine
    conversations = parts.conversations(engine)
    # rollouts and evaluations alone: what probes the engine draws freely
    drawing = within(engine, parts.constraint)
    collector = RolloutCollector(
        rollout_engine(engine, parts.constraint, settings),
        parts.tokenizer,
        parts.reward,
        machine.collectives,
        sampling=parts.sampling,
        group_size=settings.batch.n_samples_per_prompt,
        seed=settings.run.seed,
        greedy_baseline=record.advantage.needs_greedy,
        conversations=conversations,
    )
    # only replicas have processes to end here: another engine's end with the run's own
    close = engine.close if wants_replicas(settings) else None
    diagnose = EngineDiagnosis(engine.stats, notify=machine.is_first)
    source = SyncRollouts(drawing, collector, parts.ledger, diagnose=diagnose, close=close)
    check = engine_check(settings.engine, machine, policy, engine)
    return BuiltRollouts(source, conversations, {}, check, source.refresh)


def _asynchronous(
    settings: RlSettings, machine: Machine, record: PolicyAlgorithm, policy: CausalPolicy, parts: RolloutParts
) -> BuiltRollouts:
    del record, policy
    engine: Any = parts.engine
    if parts.constraint is not None:
        engine = ConstrainedAsyncEngine(engine, parts.constraint, renormalised=is_renormalised(settings))
    batch = settings.batch
    rules = AsyncConfig(
        max_staleness=settings.async_rollouts.max_staleness,
        deterministic=settings.async_rollouts.async_deterministic,
        prompts_per_step=batch.rollout_batch_size * parts.data.plan.rollouts_per_update,
        max_steps=batch.max_steps,
        group_size=batch.n_samples_per_prompt,
        seed=settings.run.seed,
        # nothing moves while a reward server is waited for
        patience=_PATIENCE_SECONDS + settings.reward_models.reward_wait,
    )
    queue = AsyncRollouts(
        engine,
        parts.tokenizer,
        parts.reward,
        parts.ledger,
        parts.data.prompts,
        sampling=parts.sampling,
        rules=rules,
        collectives=machine.collectives,
        kind=parts.environment and parts.environment.async_conversations(parts.sampling.max_new_tokens),
    )
    return BuiltRollouts(queue, parts.conversations(queue), {"rollouts_ahead": queue}, None, None)
