"""Everything from which an engine is built, and the call of the builder that its row names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft_engine.protocols import ServedModel
from rft_engine.registry import EngineKind
from rft_engine.settings import DecodingEngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBuildRequest:
    """Inputs of an engine builder, each of which takes what it needs."""

    settings: DecodingEngineSettings
    model_dir: str | Path
    """Hugging Face directory of the weights, for an engine that loads its own copy."""
    max_len: int
    """Tokens of the longest prompt with its completion."""
    device: torch.device | str
    dtype: str
    """What the policy computes in: float32, bfloat16 or float16."""
    weights: Callable[[], Iterable[tuple[str, Tensor]]]
    """Yields whole tensors: under the policy's own names for an engine in this process, under their checkpoint names
    for one with a copy, and the adapters alone where `adapter_config` is given."""
    model: ServedModel | None = None
    """The policy in this process; None for an engine that is loaded from snapshots of its weights."""
    adapter_config: str = ""
    """The adapter_config.json of adapters that the engine adds itself, as text."""
    enable_sleep: bool = False
    """Whether it will be put to sleep."""
    from_snapshot: bool = False
    """Whether weights come from a snapshot in shared memory, not from this process's tensors."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of its process beside this one's."""
    log_path: Path | None = None
    """Where its process prints to; None = a file in the temporary directory."""


def build_engine(kind: EngineKind, request: EngineBuildRequest) -> Any:
    """Import the builder of `kind` and return the engine that it makes.

    Raises:
        OptionsError: a setting that this engine cannot carry out.
        PreflightError: its package is missing or of another release, or the memory holds not one sequence.
    """
    module, _, function = kind.builder.partition(":")
    # imported only now: the packages behind the other engines may be absent
    builder: Callable[[EngineBuildRequest], Any] = getattr(importlib.import_module(module), function)
    return builder(request)
