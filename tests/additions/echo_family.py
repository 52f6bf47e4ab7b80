"""A text architecture that transformers does not have: Llama's layers under a `model_type` of its own."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from rft_models.families.custom import register_family


class EchoConfig(LlamaConfig):
    """Configuration that a directory's config.json names by "echo"."""

    model_type = "echo"


class EchoModel(LlamaModel):
    """The decoder."""

    config_class = EchoConfig


class EchoForCausalLM(LlamaForCausalLM):
    """The decoder with its output matrix."""

    config_class = EchoConfig


def register() -> None:
    """Make the classes known to transformers; which paths are exact for them is said by a row of the table alone."""
    register_family(EchoForCausalLM, decoder=EchoModel, packed=False)
