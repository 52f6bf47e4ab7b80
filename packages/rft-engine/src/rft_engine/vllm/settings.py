"""Settings of a vLLM engine, and the arguments of vLLM that each one becomes; unsupported ones are refused."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from rft_core.errors import OptionsError
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.vllm.lora import adapter_arguments

_PROCESSOR = "rft_engine.vllm.logits_processor:KeyedLogitsProcessor"
_EXTENSION = "rft_engine.vllm.worker_extension.VllmWorkerExtension"

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core in this process: ours is the process boundary
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `keyed_sampler` implements the logits-processor protocol of the first runner
}
_ENVIRONMENT_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it would pin the trainer's threads as well
}

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Those of vLLM's CPU attention kernels; another fails at the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(ExternalEngineSettings):
    """A vLLM engine; every field is passed on to vLLM or refused, none is ignored.

    Example::

        VllmSettings(model_dir="/models/qwen", max_rows=256, max_len=2048, tensor_parallel_size=2)
    """


def set_environment() -> None:
    """Set the environment variables that vLLM reads; to be called before it is imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)


def llm_arguments(settings: ExternalEngineSettings, *, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`.

    Raises:
        OptionsError: a choice that vLLM's CPU build cannot carry out.
    """
    if is_cpu:
        _refuse_on_cpu(settings)
    arguments: dict[str, Any] = {
        "model": str(settings.model_dir),
        "dtype": settings.resolved_dtype(),
        "max_model_len": settings.max_len,
        "max_num_seqs": settings.max_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "seed": settings.seed,
        "quantization": settings.quantization,
        "enable_sleep_mode": settings.enable_sleep,
        "enable_prefix_caching": True,
        # it is given token ids and gives token ids; its image processors ask for the tokenizer
        "skip_tokenizer_init": "vision_config" not in settings.config(),
        "async_scheduling": False,  # a row's age is the length of its output, which must be there when it is drawn
        "generation_config": "vllm",  # not the directory's own sampling defaults
        "logits_processors": [_PROCESSOR],
        "worker_extension_cls": _EXTENSION,
        **adapter_arguments(settings),
    }
    if settings.memory_utilization is not None:
        arguments["gpu_memory_utilization"] = settings.memory_utilization
    elif is_cpu and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes(settings)
    return arguments


def kv_cache_bytes(settings: ExternalEngineSettings) -> int:
    """Return the bytes of keys and values of `max_rows` sequences of `max_len` tokens, at most half of the free memory.

    bytes = bytes of a token x max_len x max_rows
    """
    bytes_per_token = token_bytes(settings)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    blocks_slack = 128 * bytes_per_token * settings.max_rows  # a sequence's last block is rarely full
    return max(min(bytes_per_token * settings.max_len * settings.max_rows + blocks_slack, free // 2), 2**24)


def token_bytes(settings: ExternalEngineSettings, num_gpus: int = 1) -> int:
    """Return the bytes of keys and values of a token on one of the GPUs that share the model.

    bytes = 2 x layers x kv heads of a GPU x head size x bytes of a number
    """
    config = settings.config()
    # a GPU holds one head at least, also where there are more GPUs than heads
    heads = math.ceil(config.get("num_key_value_heads", config["num_attention_heads"]) / num_gpus)
    bytes_each = 4 if settings.resolved_dtype() == "float32" else 2
    return 2 * config["num_hidden_layers"] * heads * _head_size(config) * bytes_each


def _head_size(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _refuse_on_cpu(settings: ExternalEngineSettings) -> None:
    if settings.enable_sleep:
        raise cannot_sleep_on_cpu(settings, "enable_sleep = True")
    if settings.quantization is not None:
        why = "vLLM's CPU build has no 8-bit matrix products"
        raise settings.refusal(
            "quantization", f"quantization = {settings.quantization!r} on a CPU", why, "quantization=None"
        )
    config = settings.config()
    if experts := config.get("num_experts") or config.get("num_local_experts"):
        # Seen with vLLM 0.32: after an update in place, even with the same weights, its log-probs are others.
        why = "vLLM's CPU build gives other results for experts once they were updated in place"
        raise settings.refusal("experts", f"{experts} experts in {settings.model_dir}", why, "--engine_type native")
    head_size = _head_size(config)
    if head_size not in _CPU_HEAD_SIZES:
        why = f"vLLM's attention on CPUs supports heads of {', '.join(map(str, _CPU_HEAD_SIZES))}"
        raise settings.refusal(
            "head_size", f"heads of {head_size} in {settings.model_dir}", why, "--engine_type native"
        )
    if settings.transport in ("ipc", "nccl"):
        why = "CUDA handles and NCCL pass weights between GPUs"
        raise settings.refusal("transport", f"transport = {settings.transport!r} on a CPU", why, 'transport="file"')


def cannot_sleep_on_cpu(settings: ExternalEngineSettings, what: str) -> OptionsError:
    """Return the error for `sleep` on vLLM's CPU build, which only warns and keeps its memory."""
    why = "vLLM's CPU build cannot sleep: it warns and keeps its memory, so asking for it would have no effect"
    return settings.refusal("sleep", f"{what} with vLLM's CPU build", why, "--disable_engine_sleep")
