"""Choice of the inference engine, the engine itself, and the check of its weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from rft.process.machine import Machine
from rft_core.errors import PreflightError
from rft_engine.hf_engine import HfEngine
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.copy_check import check_copy
from rft_engine.native.engine import NativeEngine
from rft_engine.replicas.engine import ReplicaEngine
from rft_engine.settings import DecodingEngineSettings
from rft_engine.weight_sync.collective_provider import CollectiveLoadEngine, CollectiveWeightProvider
from rft_engine.weight_sync.fingerprints import WeightProvider
from rft_models.decode.fast_decoder import decoder_for
from rft_models.decode.hf_generate import HfGenerator
from rft_models.decode.weight_copy import GenerationCopy, needs_copy
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.lora.files import config_text
from rft_models.policy.causal_policy import CausalPolicy
from rft_trainer.evaluation.logprob_mismatch import scored_tokens
from rft_trainer.protocols import Engine

EngineCheck = Callable[[int], dict[str, tuple[float, float]]]
"""Given the version of the policy's weights: whether the engine serves them; metrics as (total, count), or an error."""


_EXTRAS = ("vllm", "sglang")
"""Engines that are optional packages, and hold a copy of the weights in processes of their own."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine by name."""

    name: str
    why: str
    can_sleep: bool = True

    @property
    def shares_weights(self) -> bool:
        """True when the engine reads the parameters that are being trained, so that there is nothing to copy."""
        return self.name not in _EXTRAS


def choose_engine(settings: DecodingEngineSettings, device: torch.device | str) -> EngineChoice:
    """The engine of the settings; `auto` takes vLLM on a GPU where it is installed, else the native one.

    Raises:
        PreflightError: the engine that was asked for is not installed, or not for this device.
    """
    on_gpu = torch.device(device).type == "cuda"
    asked = settings.engine_type
    if asked == "auto":
        if on_gpu and _is_installed("vllm"):
            return EngineChoice("vllm", "auto: vLLM is installed and there is a GPU")
        why = "vLLM is not installed" if on_gpu else "on a CPU it is the fastest, and shares the weights being trained"
        return EngineChoice("native", f"auto: {why}")
    if asked == "sglang" and not on_gpu:
        raise _needs_gpu()
    if asked in _EXTRAS and not _is_installed(asked):
        raise _not_installed(asked, f"{asked}-cpu" if asked == "vllm" and not on_gpu else asked)
    why = "as asked; written after SGLang's source and not yet run on a GPU" if asked == "sglang" else "as asked"
    return EngineChoice(asked, why, can_sleep=asked != "vllm" or on_gpu)


def _is_installed(package: str) -> bool:
    """Return True when the package can be imported; a folder of that name cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _not_installed(engine: str, extra: str) -> PreflightError:
    return PreflightError(
        code="engine.not_installed",
        what=f"engine_type = {engine}, and {engine} is not installed in this environment",
        where="--engine_type",
        why="it is an optional extra: its own torch pins would bind everybody",
        do=f"uv sync --all-packages --extra {extra}, or --engine_type native",
    )


def _needs_gpu() -> PreflightError:
    return PreflightError(
        code="engine.sglang.cpu",
        what="engine_type = sglang on a CPU",
        where="--engine_type",
        why="SGLang's CPU kernels are no part of its published package, and its keyed draws and sleep want a GPU",
        do="--engine_type native (or vllm, which has a CPU build)",
    )


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
    choice, rows = choose_engine(settings, machine.device), settings.engine_max_rows
    if choice.name == "hf":
        return HfEngine(HfGenerator(policy), max_rows=rows, max_len=max_len, device=machine.device)
    if choice.name == "native":
        graphs = not settings.engine_enforce_eager
        return native_engine(policy, rows, max_len, machine.device, dtype=dtype, weights=weights, graphs=graphs)
    # imported here: optional engines only when one is chosen
    from rft_engine.sglang.engine import SglangEngine
    from rft_engine.sglang.settings import SglangSettings
    from rft_engine.vllm.process import VllmProcessEngine
    from rft_engine.vllm.settings import VllmSettings

    sends_alone = engine_applies_lora(policy, choice.name) and (weights is None or adapters is not None)
    gathered = adapters if sends_alone else weights
    agreed = CollectiveWeightProvider(gathered, rank=machine.ranks.rank) if gathered is not None else None
    alone = lora_payload(policy, agreed) if sends_alone else None
    kind = SglangSettings if choice.name == "sglang" else VllmSettings
    chosen = kind(
        model_dir=model_dir,
        max_rows=rows,
        max_len=max_len,
        dtype=str(dtype or policy.dtype).removeprefix("torch."),
        tensor_parallel_size=settings.engine_tp_size,
        memory_utilization=settings.engine_mem_util,
        quantization="fp8" if settings.engine_fp8 else None,
        enable_sleep=sleeps and choice.can_sleep,
        enforce_eager=settings.engine_enforce_eager or torch.device(machine.device).type == "cpu",
        adapter_config=alone.config if alone else "",
    )
    provider = alone.tensors if alone else to_checkpoint_names(policy.model, agreed or policy.merged_parameters)
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(chosen, SglangSettings):
        engine = SglangEngine(chosen, provider, log_path=log_path)
    else:
        engine = VllmProcessEngine(chosen, provider, log_path=log_path)
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
    if weights is None and not needs_copy(policy, dtype):
        return NativeEngine(decoder_for(policy, graphs=graphs), max_rows=max_rows, max_len=max_len, device=device)
    twin = GenerationCopy(policy, dtype=dtype, graphs=graphs)
    provider = weights or policy.merged_parameters
    engine = NativeEngineOnCopy(twin, provider, max_rows=max_rows, max_len=max_len, device=device)
    engine.refresh()
    return engine


def engine_check(
    settings: DecodingEngineSettings,
    machine: Machine,
    policy: CausalPolicy,
    engine: Any,
) -> EngineCheck | None:
    """A probe after every load, for an engine with a copy of the weights; None for one that shares them."""
    is_copy, are_replicas = isinstance(engine, NativeEngineOnCopy), isinstance(engine, ReplicaEngine)
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


Provider = Callable[[], Iterable[tuple[str, Tensor]]]
MOST_ALONE = 512
"""Highest rank that vLLM makes room for."""


@dataclass(frozen=True, slots=True)
class LoraPayload:
    """Adapters as vLLM takes them."""

    config: str
    """adapter_config.json."""
    tensors: Callable[[], Iterable[tuple[str, Tensor]]]
    """Under peft's names of files."""


def engine_applies_lora(policy: CausalPolicy, engine: str) -> bool:
    """Return True when an engine adds the policy's adapters itself; else it is sent merged tensors.

    vLLM adds LoRA and rsLoRA. It has no DoRA, and SGLang's loads of adapters are not taken in place.
    """
    rules = None if policy.adapters is None else policy.adapters.rules
    return engine == "vllm" and rules is not None and rules.kind != "dora" and rules.rank <= MOST_ALONE


def lora_payload(policy: CausalPolicy, gather: Provider | None = None) -> LoraPayload:
    """The adapters to send after every update.

    `gather` gives their whole parameters where those are sharded, by a collective; None: this rank has them in full.
    """
    adapters = policy.adapters
    assert adapters is not None, "no adapters to send"
    provider = gather or adapters.named_parameters
    return LoraPayload(config_text(adapters), lambda: adapters.tensors(provider()).items())
