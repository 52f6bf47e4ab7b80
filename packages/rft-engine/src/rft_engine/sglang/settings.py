"""Settings of an SGLang engine, and the arguments of SGLang 0.5.21 that each one becomes; others are refused.

Facts from its source (digests of these functions are in `pinned_api.json`):

- A request's `sampling_seed` counts under deterministic inference alone; the noise of a draw is then a hash of
  (seed, position in the sequence, token id), and batches do not change what kernels compute. So a sample's key is its
  seed: the same key, prompt and weights give the same tokens, in whatever company. They are not the native engine's.
- The log-prob it returns is that of the logits over the temperature, over the whole vocabulary, before top-k and
  top-p: what a `Completion` wants. `SGLANG_RETURN_ORIGINAL_LOGPROB` would make it that of temperature 1.
- What top-k and top-p leave is not returned. It follows from the `top_k` largest log-probs, which are.
- Where every request has top-k 1 it takes the likeliest token, with log-probs of temperature 1: greedy decoding.
- With `ignore_eos` it overlooks stop tokens too; without, it also stops at the end tokens of the model directory.
- A sequence has room for two tokens less than `context_length`.
- `mem_fraction_static` is a share of what is free before its weights are loaded, and the rest is left to activations:
  weights and cache never ask for more than there is, so that it needs no comparison as vLLM's share of the whole GPU.
- Its online rounding to 8 bits belongs to the start: weights that are loaded later are not rounded anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.errors import OptionsError
from rft_engine.process.settings import ExternalEngineSettings
from rft_engine.registry import Values, limits_of

LOADER = "rft_engine.sglang.weight_loader.exchange"
"""What SGLang's workers call with the model in hand (its `custom_weight_loader`)."""

START_REMEDY = "see SGLang's message and its log; --engine_type vllm or native run without it"
"""Of a start that failed for another reason than memory."""

LARGEST_TOP_K = 256
"""So many log-probs travel back with every token."""

_SPARE_CONTEXT = 2
_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangSettings(ExternalEngineSettings):
    """An SGLang engine: what SGLang lacks is refused.

    Example::

        SglangSettings(model_dir="/models/qwen", max_rows=256, max_len=2048, tensor_parallel_size=2)
    """

    library: ClassVar[str] = "sglang"
    library_name: ClassVar[str] = "SGLang"

    def __post_init__(self) -> None:
        ExternalEngineSettings.__post_init__(self)
        _refuse_limits({"engine_fp8": self.quantization is not None}, "nothing was started")
        if self.transport not in ("auto", "file"):
            why = "weights reach SGLang's workers through a file in shared memory"
            raise self.refusal("transport", f"transport = {self.transport!r}", why, 'transport="file"')


def set_environment() -> None:
    """Set the environment variables that SGLang reads; to be called before it is imported."""
    os.environ.update(_ENVIRONMENT)


def engine_arguments(settings: SglangSettings) -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`.

    Raises:
        OptionsError: `max_len` leaves no room in the model's positions.
    """
    positions = settings.config().get("max_position_embeddings")
    if positions is not None and settings.max_len + _SPARE_CONTEXT > positions:
        why = f"SGLang keeps {_SPARE_CONTEXT} of the model's {positions} positions free"
        raise refusal("max_len", f"max_len = {settings.max_len}", why, f"max_len={positions - _SPARE_CONTEXT}")
    dtype = settings.resolved_dtype()
    arguments: dict[str, Any] = {
        "model_path": str(settings.model_dir),
        "dtype": dtype,
        "context_length": settings.max_len + _SPARE_CONTEXT,
        "max_running_requests": settings.max_rows,
        "tp_size": settings.tensor_parallel_size,
        "disable_cuda_graph": settings.enforce_eager,
        "random_seed": settings.seed,
        "enable_deterministic_inference": True,
        "enable_memory_saver": settings.enable_sleep,
        "enable_weights_cpu_backup": settings.enable_sleep,  # else level 1 would wake with leftover memory
        "custom_weight_loader": [LOADER],
        "skip_tokenizer_init": True,  # it is given token ids and gives token ids
        "trust_remote_code": False,
        "log_level": "error",
    }
    if settings.memory_utilization is not None:
        arguments["mem_fraction_static"] = settings.memory_utilization
    if dtype == "float32":
        arguments["attention_backend"] = "triton"  # its default on Hopper GPUs takes 16-bit numbers only
    return arguments


def end_tokens(model_dir: str | Path) -> frozenset[int]:
    """End tokens of config.json and generation_config.json: SGLang stops at all of them."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_dir) / name
        configured: Any = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        tokens: list[int] = [configured] if isinstance(configured, int) else configured or []
        ends.update(tokens)
    return frozenset(ends)


def check_options(options: SamplingOptions, ends: frozenset[int]) -> None:
    """Raise `OptionsError` for what SGLang cannot draw, or cannot return the log-probs of."""
    draws = options.temperature > 0.0
    use_fire = options.first_token_temperature not in (None, options.temperature)
    _refuse_limits({**asdict(options), "use_fire": use_fire}, "nothing was generated")
    if options.min_new_tokens and options.stop_token_ids:
        why = "SGLang masks stop tokens before it computes log-probs, and does not report how much it masked"
        raise refusal("min_new_tokens", f"min_new_tokens = {options.min_new_tokens}", why, "min_new_tokens=0")
    if draws and options.top_k == 1:
        why = "SGLang then takes the likeliest token, and returns log-probs of temperature 1"
        raise refusal("top_k", f"top_k = 1 at temperature {options.temperature:g}", why, "--temperature 0")
    if draws and options.top_k > LARGEST_TOP_K:
        why = "what top-k keeps is summed from the largest log-probs, which are returned with every token"
        raise refusal("top_k", f"top_k = {options.top_k}", why, f"--top_k {LARGEST_TOP_K}")
    extra = sorted(ends - set(options.stop_token_ids))
    if options.stop_token_ids and extra:
        why = f"SGLang also stops at the model directory's end tokens: {extra}"
        remedy = f"stop_token_ids={sorted({*options.stop_token_ids, *ends})}"
        raise refusal("stop_token_ids", f"stop_token_ids = {list(options.stop_token_ids)}", why, remedy)


def _refuse_limits(values: Values, state: str) -> None:
    """Raise `OptionsError` for the first limit in SGLang's row of the registry that the values are beyond."""
    for limit in limits_of("sglang", values):
        raise OptionsError(
            code=limit.code,
            what=", ".join(f"{name} = {values[name]}" for name in limit.settings if name in values),
            where=f"SGLang engine ({limit.settings[0]})",
            why=limit.why,
            state=state,
            do=limit.remedy,
        )


def refusal(name: str, what: str, why: str, remedy: str) -> OptionsError:
    """Return the error that a setting or option cannot be carried out."""
    return OptionsError(
        code=f"engine.sglang.{name}",
        what=what,
        where=f"SGLang engine ({name})",
        why=why,
        state="nothing was generated",
        do=remedy,
    )
