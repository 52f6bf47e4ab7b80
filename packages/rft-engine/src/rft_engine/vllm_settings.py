"""What a person chooses about a vLLM engine, and how each choice reaches vLLM or is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rft_algos.errors import OptionsError

_PROCESSOR = "rft_engine.vllm_plugin:KeyedLogitsProcessor"
_EXTENSION = "rft_engine.vllm_extension.VllmWorkerExtension"

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core in this process: ours is the process boundary
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the logits-processor protocol that `vllm_draws` speaks is the first runner's
}
_ENVIRONMENT_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would pin the trainer's threads as well
}

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's CPU attention kernels; another fails at the first request."""

Transport = Literal["auto", "direct", "file", "ipc", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDeadlines:
    """Seconds after which a call is given up; the engine's own process is then ended."""

    start: float = 900.0
    generate: float = 3600.0
    load_weights: float = 600.0
    other: float = 120.0

    def __post_init__(self) -> None:
        for name in ("start", "generate", "load_weights", "other"):
            value = getattr(self, name)
            if not 0.0 < value < math.inf:
                raise _refusal("deadline", f"{name} = {value}", "a deadline is a number of seconds above 0", "600")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """A vLLM engine; every field is passed on to vLLM or refused, none is ignored.

    Example::

        VllmSettings(model_dir="/models/qwen", max_rows=256, max_len=2048, tensor_parallel_size=2)
    """

    model_dir: str | Path
    """Hugging Face directory: architecture, and the weights of version 0."""
    max_rows: int
    """Sequences decoded at once (vLLM's max_num_seqs)."""
    max_len: int
    """Tokens of the longest prompt with its completion (vLLM's max_model_len)."""
    dtype: str = "auto"
    """Of weights and activations: auto (the directory's), float32, bfloat16 or float16."""
    tensor_parallel_size: int = 1
    """GPUs that share the model."""
    memory_utilization: float | None = None
    """Share of the device's memory that vLLM may take; None = vLLM's own default, on a CPU what the cache needs."""
    quantization: str | None = None
    """None or "fp8": matrices are rounded to 8 bits as they are loaded (a GPU only)."""
    enable_sleep: bool = False
    """Allow `sleep`: vLLM then allocates in a pool that it can give back (a GPU only)."""
    enforce_eager: bool = False
    """No CUDA graphs and no compilation: starts sooner, decodes slower."""
    seed: int = 0
    """Of vLLM's own generators; no sample depends on it."""
    transport: Transport = "auto"
    """How weights come in: see `vllm_transport`."""
    deadlines: VllmDeadlines = field(default_factory=VllmDeadlines)

    def __post_init__(self) -> None:
        sizes = (("max_rows", self.max_rows, 1), ("max_len", self.max_len, 2))
        for name, value, least in (*sizes, ("tensor_parallel_size", self.tensor_parallel_size, 1)):
            if value < least:
                raise _refusal(name, f"{name} = {value}", f"allowed: {least} or above", f"{name}={least}")
        share = self.memory_utilization
        if share is not None and not 0.0 < share <= 1.0:
            why = "it is a share of the device's memory: above 0, at most 1"
            raise _refusal("memory_utilization", f"memory_utilization = {share}", why, "memory_utilization=0.5")
        if self.quantization not in (None, "fp8"):
            why = 'weights that change every step can be rounded as they come: "fp8", or not at all'
            remedy = 'quantization="fp8"'
            raise _refusal("quantization", f"quantization = {self.quantization!r}", why, remedy)


def set_environment() -> None:
    """What vLLM reads from the environment; to be called before it is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def llm_arguments(settings: VllmSettings, *, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Raises:
        OptionsError: a choice that vLLM's CPU build cannot carry out.
    """
    if is_cpu:
        _refuse_on_cpu(settings)
    arguments: dict[str, Any] = {
        "model": str(settings.model_dir),
        "dtype": resolved_dtype(settings),
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "quantization": settings.quantization,
        "enable_sleep_mode": settings.enable_sleep,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,  # it is given token ids and gives token ids
        "async_scheduling": False,  # a row's age is the length of its output, which must be there when it is drawn
        "generation_config": "vllm",  # not the directory's own sampling defaults
        "logits_processors": [_PROCESSOR],
        "worker_extension_cls": _EXTENSION,
    }
    if settings.memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.memory_utilization
    elif is_cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(settings)
    return arguments


def kv_cache_bytes(settings: VllmSettings) -> int:
    """Keys and values of `max_rows` sequences of `max_len` tokens, at most half of the memory that is free.

    bytes = 2 x layers x kv heads x head size x bytes of a number x max_len x max_rows
    """
    config = _config(settings)
    heads, head_size = config["num_attention_heads"], _head_size(config)
    bytes_each = 4 if resolved_dtype(settings) == "float32" else 2
    of_token = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_size * bytes_each
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    blocks_slack = 128 * of_token * settings.max_rows  # a sequence's last block is rarely full
    return max(min(of_token * settings.max_len * settings.max_rows + blocks_slack, free // 2), 2**24)


def resolved_dtype(settings: VllmSettings) -> str:
    """The directory's own for "auto": vLLM's "auto" would round float32 to bfloat16, out of step with the policy."""
    if settings.dtype != "auto":
        return settings.dtype
    config = _config(settings)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _config(settings: VllmSettings) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(settings.model_dir) / "config.json").read_text())
    return {**config, **config.get("text_config", {})}


def _refuse_on_cpu(settings: VllmSettings) -> None:
    if settings.enable_sleep:
        raise cannot_sleep_on_cpu("enable_sleep = True")
    if settings.quantization is not None:
        why = "vLLM's CPU build has no 8-bit matrix products"
        raise _refusal("quantization", f"quantization = {settings.quantization!r} on a CPU", why, "quantization=None")
    head_size = _head_size(_config(settings))
    if head_size not in _CPU_HEAD_SIZES:
        why = f"vLLM's attention on CPUs knows heads of {', '.join(map(str, _CPU_HEAD_SIZES))}"
        raise _refusal("head_size", f"heads of {head_size} in {settings.model_dir}", why, "--engine_type native")
    if settings.transport in ("ipc", "nccl"):
        why = "CUDA handles and NCCL pass weights between GPUs"
        raise _refusal("transport", f"transport = {settings.transport!r} on a CPU", why, 'transport="file"')


def cannot_sleep_on_cpu(what: str) -> OptionsError:
    """vLLM's CPU build answers `sleep` with a warning and keeps its memory."""
    why = "vLLM's CPU build cannot sleep: it warns and keeps its memory, so asking for it would have no effect"
    return _refusal("sleep", f"{what} with vLLM's CPU build", why, "--disable_engine_sleep")


def _refusal(name: str, what: str, why: str, remedy: str) -> OptionsError:
    return OptionsError(
        code=f"engine.vllm.{name}",
        what=what,
        where=f"vLLM engine ({name})",
        why=why,
        state="nothing was started",
        do=remedy,
    )
