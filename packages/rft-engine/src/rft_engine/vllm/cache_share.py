"""The share of a GPU that vLLM takes where none is given: weights, workspace, and the blocks of all rows at once.

    blocks = rows x ceil(length / tokens of a block)
    share  = (weights + blocks x bytes of a block + workspace) / memory of the GPU

vLLM gives to its cache what its share leaves, so that a larger one holds blocks that no row can fill, while the trainer
lacks the memory. What the workspace takes is known to vLLM alone once it has started: where it is more than was
reckoned, some rows wait for blocks, and where not one row has room, vLLM is started again with its own share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rft_core.errors import ServiceError
from rft_engine.process.gpu_processes import Device
from rft_engine.process.memory_share import USUAL_SHARE, started, within_free
from rft_engine.vllm.settings import VllmSettings, token_bytes

_LOG = logging.getLogger(__name__)
EngineT = TypeVar("EngineT")

BLOCK_TOKENS = 16
_FIXED_MIB = 3072
"""Contexts, captured graphs and buffers of libraries."""
_BATCH_TOKENS = 16384
"""Most prompt tokens that vLLM computes at once on a large GPU."""
_LOGIT_COPIES = 3
"""Float32 logits of all rows while they are drawn from."""
_TOO_LITTLE = ("engine.vllm.memory.length", "engine.vllm.memory.share_too_low")
_MIB = 2**20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def started_for_rows(make: Callable[[VllmSettings], EngineT], settings: VllmSettings, device: Device | None) -> EngineT:
    """Start an engine with a share that is free: the one that was asked for, else the one that its rows need.

    Raises:
        ServiceError: it did not start, with another share neither where memory is the cause.
    """
    if device is None:
        return started(make, settings)
    solved = with_share_for_rows(settings, device.total_mib)
    if solved is not settings:
        try:
            return started(make, within_free(solved, device.free_mib, device.total_mib))
        except ServiceError as error:
            if error.problem.code not in _TOO_LITTLE:
                raise
            _LOG.warning("%s; it is started once more with vLLM's own share", error.problem.what)
    # outside the handler: the error holds what the first start left
    return started(make, within_free(settings, device.free_mib, device.total_mib))


def with_share_for_rows(settings: VllmSettings, total_mib: int) -> VllmSettings:
    """Return the settings with the share that all rows need at their greatest length.

    They stay as they are where a share is given, where the model's sizes are not known, where it reads images (their
    encoder takes a workspace of its own), and where vLLM's own share is no larger.
    """
    needed = None if settings.memory_utilization is not None else needed_mib(settings)
    if needed is None or total_mib <= 0:
        return settings
    share = math.ceil(100 * needed / total_mib) / 100
    if share >= USUAL_SHARE:
        return settings
    _LOG.info(
        "vLLM is started with --engine_mem_util %g: weights, workspace, and %s blocks for %s rows of %s tokens",
        share,
        f"{num_blocks(settings):,}",
        f"{settings.max_rows:,}",
        f"{settings.max_len:,}",
    )
    return replace(settings, memory_utilization=share)


def num_blocks(settings: VllmSettings) -> int:
    """Return the blocks that all rows fill at their greatest length."""
    return settings.max_rows * math.ceil(settings.max_len / BLOCK_TOKENS)


def needed_mib(settings: VllmSettings) -> int | None:
    """Return the MiB that vLLM needs on a GPU for all rows; None where the directory does not tell."""
    files = list(Path(settings.model_dir).glob("*.safetensors"))
    try:
        config = settings.config()
        if "vision_config" in config:
            return None
        weights = sum(file.stat().st_size for file in files) * _narrowing(settings, config)
        block = BLOCK_TOKENS * token_bytes(settings, settings.tensor_parallel_size)
        cache = num_blocks(settings) * block
        workspace = _workspace_bytes(settings, config)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not weights:
        return None
    return math.ceil((weights / settings.tensor_parallel_size + cache + workspace) / _MIB) + _FIXED_MIB


def _narrowing(settings: VllmSettings, config: Mapping[str, Any]) -> float:
    """Return the bytes of a loaded weight over those of a stored one."""
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return _BYTES[settings.resolved_dtype()] / _BYTES[stored]


def _workspace_bytes(settings: VllmSettings, config: Mapping[str, Any]) -> int:
    """Return the bytes of activations of the largest batch of prompts, and of the logits of all rows."""
    hidden = config["hidden_size"]
    width = 4 * hidden + 2 * (config.get("intermediate_size") or 4 * hidden)
    activations = _BATCH_TOKENS * width * _BYTES[settings.resolved_dtype()]
    return activations + _LOGIT_COPIES * 4 * settings.max_rows * config["vocab_size"]
