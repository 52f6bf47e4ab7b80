"""Choice of the inference engine, the engine itself, and the check of its weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rft.process.machine import Machine
from rft.process.placement import own_gpus
from rft_core.errors import OptionsError, PreflightError, install_command
from rft_engine.build_request import EngineBuildRequest, build_engine
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.copy_check import check_copy
from rft_engine.protocols import DecodableModel, WeightCopy, WholeGenerator
from rft_engine.registry import AUTO, ENGINES, REFERENCE_ENGINE, EngineCapabilities, EngineKind, EngineLimit, limits_of
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.settings import DecodingEngineSettings
from rft_engine.weight_sync.collective_provider import CollectiveLoadEngine, CollectiveWeightProvider
from rft_engine.weight_sync.fingerprints import WeightProvider
from rft_models.decode.fast_decoder import decoder_for
from rft_models.decode.hf_generate import HfGenerator
from rft_models.decode.weight_copy import GenerationCopy, needs_copy
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.lora.files import config_text
from rft_models.own_decoder.architecture import CLASS_NAME, MODEL_TYPE
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.evaluation.logprob_mismatch import scored_tokens
from rft_trainer.protocols import Engine
from rft_trainer.scoring.router_agreement import RouterAgreement

EngineCheck = Callable[[int], dict[str, tuple[float, float]]]
"""Given the version of the policy's weights: whether the engine serves them; metrics as (total, count), or an error."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine by name."""

    name: str
    why: str
    can_sleep: bool = True

    @property
    def kind(self) -> EngineKind:
        """The engine's row in the registry."""
        return ENGINES[self.name]

    @property
    def can(self) -> EngineCapabilities:
        """The capabilities of the engine."""
        return self.kind.can

    @property
    def shares_weights(self) -> bool:
        """True when the engine reads the parameters that are being trained, so that there is nothing to copy."""
        return self.can.shares_weights


def choose_engine(settings: DecodingEngineSettings, device: torch.device | str) -> EngineChoice:
    """The engine of the settings; `auto` takes the preferred one on a GPU where it is installed, else the reference.

    Raises:
        PreflightError: the engine that was asked for is not installed, or not for this device.
        OptionsError: the engine that `auto` becomes on this device does not carry out one of the settings.
    """
    on_gpu = torch.device(device).type == "cuda"
    if settings.engine_type == AUTO:
        choice = _automatic(on_gpu)
        for limit in limits_of(choice.name, vars(settings)):
            raise _beyond_automatic(limit, choice, settings, on_gpu)
        return choice
    kind = ENGINES[settings.engine_type]
    if kind.needs_gpu and not on_gpu:
        raise _needs_gpu(kind)
    if kind.package and not _is_installed(kind.package):
        raise _not_installed(kind, kind.package if on_gpu else kind.cpu_extra or kind.package)
    why = f"as asked; {kind.note}" if kind.note else "as asked"
    return EngineChoice(kind.name, why, can_sleep=on_gpu or kind.can.sleeps_on_cpu)


def refuse_own_decoder(choice: EngineChoice, policy: CausalPolicy) -> None:
    """Raise `OptionsError` for an engine of another program, which has no code for this project's own architecture."""
    if not choice.shares_weights and type(policy.model).__name__ == CLASS_NAME:
        raise OptionsError(
            code="engine.own_decoder",
            what=f"engine_type = {choice.name} with model_type {MODEL_TYPE!r} in {policy.where}",
            where="--engine_type",
            why=f"{choice.kind.title} has no code for this architecture, which is this project's own",
            do=f"--engine_type {REFERENCE_ENGINE}",
        )


def _automatic(on_gpu: bool) -> EngineChoice:
    preferred = [kind for kind in ENGINES.values() if kind.is_preferred_on_gpu]
    for kind in preferred if on_gpu else []:
        if _is_installed(kind.package):
            return EngineChoice(kind.name, f"auto: {kind.title} is installed and there is a GPU")
    absent = " or ".join(f"{kind.title} is not installed" for kind in preferred)
    why = absent if on_gpu else "on a CPU it is the fastest"
    return EngineChoice(REFERENCE_ENGINE, f"auto: {why}")


def _beyond_automatic(
    limit: EngineLimit, choice: EngineChoice, settings: DecodingEngineSettings, on_gpu: bool
) -> OptionsError:
    name = limit.settings[0]
    absent = [kind.package for kind in ENGINES.values() if kind.is_preferred_on_gpu]
    leave = f"leave {name} out"
    return OptionsError(
        code=limit.code,
        what=f"{name} = {getattr(settings, name)}, engine_type = {AUTO}, which becomes {choice.name} here "
        f"({choice.why.removeprefix(f'{AUTO}: ')})",
        where=f"{name}, engine_type",
        why=limit.why,
        do=f"{install_command(absent[0])}, or {leave}" if on_gpu else leave,
    )


def _is_installed(package: str) -> bool:
    """Return True when the package can be imported; a folder of that name cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _not_installed(kind: EngineKind, extra: str) -> PreflightError:
    return PreflightError(
        code="engine.not_installed",
        what=f"engine_type = {kind.name}, and {kind.package} is not installed in this environment",
        where="--engine_type",
        why="it is an optional extra: its pinned version of torch would bind every installation",
        do=f"{install_command(extra)}, or --engine_type {REFERENCE_ENGINE}",
    )


def _needs_gpu(kind: EngineKind) -> PreflightError:
    return PreflightError(
        code=f"engine.{kind.name}.cpu",
        what=f"engine_type = {kind.name} on a CPU",
        where="--engine_type",
        why=kind.needs_gpu,
        do="--engine_type native (or vllm, which has a CPU build)",
    )


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """The policy as an engine in this process uses it (`rft_engine.protocols.ServedModel`)."""

    policy: CausalPolicy
    dtype: torch.dtype | None
    """What the engine computes in; None = the type of the policy's weights."""
    is_sharded: bool
    """No rank has the parameters whole."""

    def decoder(self, *, graphs: bool) -> DecodableModel[Any]:
        """The decode forward on the parameters being trained."""
        return decoder_for(self.policy, graphs=graphs)

    def weight_copy(self, *, graphs: bool) -> WeightCopy[Any] | None:
        """A copy to generate with, where the parameters are sharded or of another type."""
        if not self.is_sharded and not needs_copy(self.policy, self.dtype):
            return None
        return GenerationCopy(self.policy, dtype=self.dtype, graphs=graphs)

    def generator(self) -> WholeGenerator:
        """Transformers' `generate` on the parameters being trained."""
        return HfGenerator(self.policy)


def make_engine(
    settings: DecodingEngineSettings,
    machine: Machine,
    policy: CausalPolicy,
    model_dir: str | Path,
    max_len: int,
    *,
    sleeps: bool = False,
    log_path: Path | None = None,
    weights: WeightProvider | None = None,
    adapters: WeightProvider | None = None,
    dtype: torch.dtype | None = None,
) -> Engine:
    """The chosen engine with the policy's weights.

    Args:
        settings: the engine's.
        machine: where.
        policy: what it generates with.
        model_dir: directory of these weights, for an engine that loads its own copy.
        max_len: tokens of the longest prompt with its response.
        sleeps: whether it will be put to sleep.
        log_path: where an engine with a process of its own writes.
        weights: yields whole tensors where the policy's parameters are in blocks; None = they are whole.
        adapters: the same of the adapters alone, for an engine that adds them itself.
        dtype: what the policy computes in; None = the type of its weights.
    """
    choice = choose_engine(settings, machine.device)
    refuse_own_decoder(choice, policy)
    request = EngineBuildRequest(
        settings=settings,
        model_dir=model_dir,
        max_len=max_len,
        device=machine.device,
        dtype=str(dtype or policy.dtype).removeprefix("torch."),
        weights=weights or policy.merged_parameters,
        model=PolicyModel(policy, dtype, is_sharded=weights is not None),
        enable_sleep=sleeps and choice.can_sleep,
        environment={} if choice.shares_weights else own_gpus(machine, settings.engine_tp_size),
        log_path=log_path,
    )
    # the engine reads the trained parameters: nothing is renamed, gathered or sent
    if choice.shares_weights:
        return build_engine(choice.kind, request)
    # where parameters are sharded, adapters can be sent by themselves only if they are gathered by themselves
    sends_lora_only = engine_applies_lora(policy, choice.can) and (weights is None or adapters is not None)
    gathered = adapters if sends_lora_only else weights
    # gathering is an exchange of all ranks; an engine that asks for weights on one rank alone must be refused
    agreed = CollectiveWeightProvider(gathered, rank=machine.ranks.rank) if gathered is not None else None
    payload = lora_payload(policy, agreed) if sends_lora_only else None
    provider = payload.tensors if payload else to_checkpoint_names(policy.model, agreed or policy.merged_parameters)
    request = replace(request, weights=provider, adapter_config=payload.config if payload else "")
    engine = build_engine(choice.kind, request)
    return cast(Engine, CollectiveLoadEngine(engine, agreed)) if agreed is not None else engine


def native_engine(
    policy: CausalPolicy,
    max_rows: int,
    max_len: int,
    device: torch.device | str,
    *,
    dtype: torch.dtype | None = None,
    weights: WeightProvider | None = None,
    graphs: bool = True,
) -> Engine:
    """Make the in-process engine on the trained parameters, or on a copy where they are sharded or of another `dtype`.

    `weights` yields whole tensors for the copy; None = the policy's parameters are whole. `graphs`: a step may be a
    CUDA graph.
    """
    settings = DecodingEngineSettings(engine_max_rows=max_rows, engine_enforce_eager=not graphs)
    request = EngineBuildRequest(
        settings=settings,
        model_dir=policy.where,
        max_len=max_len,
        device=device,
        dtype=str(dtype or policy.dtype).removeprefix("torch."),
        weights=weights or policy.merged_parameters,
        model=PolicyModel(policy, dtype, is_sharded=weights is not None),
    )
    return build_engine(ENGINES[REFERENCE_ENGINE], request)


def engine_check(
    settings: DecodingEngineSettings,
    machine: Machine,
    policy: CausalPolicy,
    engine: Any,
) -> EngineCheck | None:
    """A probe after every load, for an engine with a copy of the weights; None for one that shares them."""
    is_copy, are_replicas = isinstance(engine, NativeEngineOnCopy), isinstance(engine, ReplicaEngine)
    # a copy or a replica has weights of its own, also of an engine that would share them in this process
    if choose_engine(settings, machine.device).shares_weights and not (is_copy or are_replicas):
        return None
    from rft_engine.weight_sync.logprob_probe import check_logprob_parity

    def logprobs(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        pairs = [(list(prompt), list(new)) for prompt, new in zip(prompts, completions, strict=True)]
        return scored_tokens(policy, pairs, 1.0, machine.device)

    def check(version: int) -> dict[str, tuple[float, float]]:
        if is_copy:
            gap = check_copy(engine, logprobs, trainer_version=version, replica=machine.ranks.rank)
        else:
            gap = check_logprob_parity(engine, logprobs)
        counted: dict[str, float] = engine.counters() if are_replicas else {}
        return {"engine/probe_gap": (gap.maximum, 1.0)} | {name: (value, 1.0) for name, value in counted.items()}

    return check


def router_agreement(
    settings: DecodingEngineSettings, machine: Machine, policy: CausalPolicy, engine: Any
) -> RouterAgreement | None:
    """Return the measurement of the native engine of this process against a mixture of experts; None of any other two.

    None too where a rank has parts of rows, or where recording routers would break the graphs of compiled layers.
    """
    is_native = choose_engine(settings, machine.device).name == REFERENCE_ENGINE
    if not is_native or policy.backbone.split is not None or policy.is_compiled or not policy.has_known_routers:
        return None
    return RouterAgreement(policy, engine, machine.collectives, device=machine.device)


Provider = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class LoraPayload:
    """Adapters as an engine takes them that adds them itself."""

    config: str
    """adapter_config.json."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Under peft's names of files."""


def engine_applies_lora(policy: CausalPolicy, can: EngineCapabilities) -> bool:
    """Return True when an engine adds the policy's adapters itself; else it is sent merged tensors.

    LoRA and rsLoRA up to the engine's rank; no engine adds DoRA.
    """
    rules = None if policy.adapters is None else policy.adapters.rules
    return rules is not None and rules.kind != "dora" and rules.rank <= can.max_lora_rank


def lora_payload(policy: CausalPolicy, gather: Provider | None = None) -> LoraPayload:
    """The adapters to send after every update.

    `gather` gives their whole parameters where those are sharded, by a collective; None: this rank has them in full.
    """
    adapters = policy.adapters
    assert adapters is not None, "no adapters to send"
    provider = gather or adapters.named_parameters
    return LoraPayload(config_text(adapters), lambda: adapters.tensors(provider()).items())
