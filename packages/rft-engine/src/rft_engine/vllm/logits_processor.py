"""The one class that must derive from vLLM's own; vLLM imports it by name in its workers."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportUnknownVariableType=false
# (vLLM is an optional extra; where it is missing nothing imports this module)

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from rft_engine.vllm.keyed_sampler import KeyedSampler


class KeyedLogitsProcessor(KeyedSampler, LogitsProcessor):
    """`KeyedSampler` as vLLM builds it."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__()
