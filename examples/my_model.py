"""A model family of your own, and a patch of a known one, in one file.

    rft-train rl --pretrain MODEL --model_code examples/my_model.py --prompt_data train.jsonl

docs/custom-models.md walks through it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rft_models.families.custom import register_family
from rft_models.families.patches import register_patch


class ToyConfig(LlamaConfig):
    """Llama's sizes under a name of its own: what "model_type" in config.json says."""

    model_type = "toy"


class ToyLayer(LlamaDecoderLayer):
    """Attention and MLP side by side on one norm, in place of one after the other."""

    def __init__(self, config: ToyConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        del self.post_attention_layernorm

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """h + attention(norm(h)) + mlp(norm(h))."""
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        return hidden_states + attended + self.mlp(normed)


class ToyModel(LlamaModel):
    """The decoder."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        for number in range(config.num_hidden_layers):
            self.layers[number] = ToyLayer(config, number)
        self.post_init()


class ToyForCausalLM(LlamaForCausalLM):
    """The decoder with an output matrix."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.model = ToyModel(config)
        self.post_init()


def patch_your_model(model: Any) -> None:
    """A model of a known family, changed after its weights are loaded: here a wider epsilon in its last norm."""
    model.model.norm.variance_epsilon = 1e-3


register_family(ToyForCausalLM, decoder=ToyModel, packed=True)
register_patch("qwen2", patch_your_model)
