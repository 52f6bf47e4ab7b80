"""The number of parameters of a new decoder, and of those that act on a token; no weights are made."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from rft_models.new_decoders.configurations import configuration
from rft_models.new_decoders.sizes import NewDecoderSizes
from rft_models.own_decoder.registration import register_own_decoder

_NO_TOKENS = SimpleNamespace(bos_token_id=None, eos_token_id=None, pad_token_id=None)


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters of a decoder, those of tied matrices once."""

    total: int
    active: int
    """Those that a token goes through: of a mixture, its chosen and shared experts alone."""

    def describe(self, sizes: NewDecoderSizes) -> str:
        """Return the counts in words."""
        total = f"{sizes.family}: {self.total:,} parameters"
        if not sizes.num_experts:
            return total
        shared = f" and {sizes.shared_experts} shared" if sizes.shared_experts else ""
        chosen = f"{sizes.top_k} of {sizes.num_experts} experts{shared}, each {sizes.ffn_hidden_size:,} wide"
        return f"{total}, of which {self.active:,} act on a token ({chosen})"


def parameter_counts(sizes: NewDecoderSizes) -> ParameterCounts:
    """Count the parameters of a decoder of these sizes."""
    from transformers import AutoModelForCausalLM

    register_own_decoder()
    with torch.device("meta"):  # shapes without memory
        model: Any = AutoModelForCausalLM.from_config(configuration(sizes, _NO_TOKENS))
    total = sum(parameter.numel() for parameter in model.parameters())
    of_experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
    idle = of_experts * (sizes.num_experts - sizes.top_k) // sizes.num_experts if sizes.num_experts else 0
    return ParameterCounts(total, total - idle)
