"""Engine replicas in processes of their own: the start of each, its GPUs, its environment."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.build.engines import EngineChoice, choose_engine, refuse_own_decoder
from rft.parallel.policy_weights import full_sizes
from rft.process.cores import usable_cores
from rft.process.machine import Machine
from rft.process.placement import GpuPlacement, only_these, ranks_on_this_machine
from rft.settings import RlSettings
from rft_core.errors import RftError, ServiceError
from rft_engine.build_request import EngineBuildRequest, build_engine
from rft_engine.replicas.dispatch import Replica
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.replicas.external_engine import ExternalEngineReplica
from rft_engine.replicas.process import ProcessReplica
from rft_engine.weight_sync.collective_provider import CollectiveWeightProvider
from rft_engine.weight_sync.fingerprints import WeightProvider
from rft_engine.weight_sync.shared_memory import SharedWeightStore
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.policy.causal_policy import CausalPolicy

WORKER = (sys.executable, "-m", "rft.replica_main")
_LOG = logging.getLogger(__name__)


def wants_replicas(settings: RlSettings) -> bool:
    """Return True when engines get processes of their own: several of them, or one that runs ahead of the trainer."""
    return settings.replicas.engine_replicas > 1 or settings.async_rollouts.max_staleness > 0


def make_replicas(
    settings: RlSettings,
    machine: Machine,
    policy: CausalPolicy,
    source: str | Path,
    longest: int,
    logs: Path,
    *,
    weights: WeightProvider,
    in_blocks: bool = False,
    dtype: torch.dtype,
) -> ReplicaEngine:
    """The replicas of this rank with the policy's weights.

    Args:
        settings, machine: of the run.
        policy: what they generate with; its architecture is that of `settings.model.pretrain`.
        source: directory of these weights, for engines that read one when they start.
        longest: tokens of the longest prompt with its response.
        logs: folder of their logs.
        weights: yields whole tensors under the policy's names.
        in_blocks: whether that is an exchange of all ranks, made whenever weights are published.
        dtype: what they compute in.

    Raises:
        PreflightError: there are fewer GPUs than they need.
        ServiceError: none of them started, or one does not hold the weights that it was sent.
    """
    choice = choose_engine(settings.engine, machine.device)
    refuse_own_decoder(choice, policy)
    agreed = CollectiveWeightProvider(weights, rank=machine.ranks.rank) if in_blocks else None
    merged: WeightProvider = partial(_merged, policy, agreed or weights)
    provider = merged if choice.shares_weights else to_checkpoint_names(policy.model, merged)
    architecture = source if policy.adapters is not None else settings.model.pretrain
    together = agreed.together if agreed else None
    weight_store = SharedWeightStore(provider, dtype, num_bytes=_full_bytes(policy, dtype), together=together)

    external = EngineBuildRequest(
        settings=settings.engine,
        model_dir=source,
        max_len=longest,
        device=machine.device,
        dtype=str(dtype).removeprefix("torch."),
        weights=provider,
        from_snapshot=True,
    )

    def make(number: int) -> ProcessReplica | ExternalEngineReplica:
        log = logs / f"replica-{machine.ranks.rank}-{number}.log"
        environment = _environment(settings, machine, number)
        if choice.shares_weights:
            return _native(settings, machine, number, architecture, longest, log, environment, dtype)
        return _external(number, choice, replace(external, environment=environment, log_path=log))

    return _started_engine(make, settings.replicas.engine_replicas, weight_store, longest)


def _started_engine(
    make: Callable[[int], ProcessReplica | ExternalEngineReplica],
    count: int,
    weight_store: SharedWeightStore,
    longest: int,
) -> ReplicaEngine:
    """Start the replicas, and give them the policy's weights; where that fails nothing is left running."""
    replicas: list[Replica] = []
    lost: dict[int, RftError] = {}

    def start(number: int) -> Replica:
        replica = make(number)
        # this thread waits until it is ready, so that slow starts overlap
        try:
            replica.ready()
        except ServiceError as error:
            # another one may have started: this one is then started again beside it
            replica.close()
            lost[number] = error
        except BaseException:
            replica.close()
            raise
        return replica

    try:
        _start_together(start, count, replicas)
        if len(lost) == len(replicas):
            raise _none_started(lost)
        engine = ReplicaEngine(replicas, weight_store, max_len=longest, lost=lost, notify=_LOG.warning)
        # no replica is asked for a sample before it has the policy's own weights
        engine.refresh()
    except BaseException:
        for replica in replicas:
            replica.close()
        weight_store.close()
        raise
    return engine


def _start_together(start: Callable[[int], Replica], count: int, started: list[Replica]) -> None:
    """Start all at once, as a start takes minutes; those that succeed are put into `started` also where another fails.

    The threads are daemons: an interrupted program does not wait for them. A replica that becomes ready after an
    interrupt is closed by the thread that started it, so that none outlives the call.
    """
    made: dict[int, Replica | BaseException] = {}
    interrupted = False
    handover = threading.Lock()

    def one(number: int) -> None:
        try:
            replica = start(number)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            made[number] = error
            return
        # flag and entry change together: either the waiting thread closes this replica, or this one does
        with handover:
            if not interrupted:
                made[number] = replica
                return
        replica.close()

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        with handover:
            interrupted = True
            started += [outcome for outcome in made.values() if not isinstance(outcome, BaseException)]
        raise
    # by number: the order of the replicas does not depend on which was ready first
    outcomes = [made[number] for number in range(count)]
    started += [replica for replica in outcomes if not isinstance(replica, BaseException)]
    for error in outcomes:
        if isinstance(error, BaseException):
            raise error


def _none_started(lost: Mapping[int, RftError]) -> RftError:
    """Return the error of a start that no replica survived: its own where there is one, else that of each by number."""
    first, *others = (lost[number] for number in sorted(lost))
    if not others:
        return first
    named = "; ".join(f"replica {number}: {lost[number].problem.what}" for number in sorted(lost))
    return ServiceError(
        code="engine.replicas.start",
        what=f"none of {len(lost)} engine replicas started; {named}",
        where="; ".join(f"replica {number}: {lost[number].problem.where}" for number in sorted(lost)),
        why="a run goes on as long as one replica can draw",
        do=first.problem.do,
    )


def _native(
    settings: RlSettings,
    machine: Machine,
    number: int,
    source: str | Path,
    longest: int,
    log: Path,
    environment: dict[str, str],
    dtype: torch.dtype,
) -> ProcessReplica:
    cores = usable_cores() // (ranks_on_this_machine(machine) * settings.replicas.engine_replicas)
    code = settings.model.model_code
    model: dict[str, Any] = {
        "model_dir": str(Path(source).expanduser().resolve()),
        "dtype": str(dtype).removeprefix("torch."),
        "device": "cuda:0" if environment else torch.device(machine.device).type,
        "flash_attn": settings.model.flash_attn,
        "model_code": code,
        "graphs": not settings.engine.engine_enforce_eager,
        "num_threads": max(1, cores),
        # on a CPU it shares the cores with the trainer; on GPUs of its own it does not compete
        "gives_way": not environment and settings.async_rollouts.max_staleness > 0,
    }
    return ProcessReplica(
        number,
        WORKER,
        model,
        max_rows=settings.engine.engine_max_rows,
        max_len=longest,
        log_path=log,
        environment=environment,
    )


def _external(number: int, choice: EngineChoice, request: EngineBuildRequest) -> ExternalEngineReplica:
    """Make a replica around an engine with a process of its own."""
    return ExternalEngineReplica(number, lambda provider: build_engine(choice.kind, replace(request, weights=provider)))


def _full_bytes(policy: CausalPolicy, dtype: torch.dtype) -> int:
    """Bytes of the full tensors with adapters merged, also where this rank keeps parts of them."""
    return dtype.itemsize * sum(full_sizes(policy.base_parameters()).values())


def _merged(policy: CausalPolicy, weights: WeightProvider) -> Iterable[tuple[str, Tensor]]:
    """Yield full tensors with adapters merged, as a model without adapters has them."""
    return policy.merged_parameters(weights())


def require_gpus(settings: RlSettings, machine: Machine) -> None:
    """Raise `PreflightError` where this machine has too few GPUs for its ranks and their replicas; loads nothing."""
    placement = _placement(settings, machine)
    if placement is not None and wants_replicas(settings):
        placement.require()


def _placement(settings: RlSettings, machine: Machine) -> GpuPlacement | None:
    """Return who has which GPU of this machine; None on a CPU."""
    if torch.device(machine.device).type != "cuda":
        return None
    return GpuPlacement(
        ranks=ranks_on_this_machine(machine),
        replicas=settings.replicas.engine_replicas,
        size=settings.engine.engine_tp_size,
        visible=torch.cuda.device_count(),
    )


def _environment(settings: RlSettings, machine: Machine, number: int) -> dict[str, str]:
    """The GPUs of a replica, beyond those of the ranks on this machine; nothing on a CPU.

    Raises:
        PreflightError: there are not so many.
    """
    placement = _placement(settings, machine)
    if placement is None:
        return {}
    placement.require()
    return only_these(placement.of_replica(machine.ranks.local_rank, number), placement.visible)
