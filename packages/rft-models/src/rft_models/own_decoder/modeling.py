"""The family `rft_decoder` as classes of transformers.

    h = h + drop(attention(norm(h)))        Qwen3's: rotary positions, grouped keys, norms of queries and keys
    h = h + drop(mlp(norm(h)))              down(gelu(up(x))), or gated: down(silu(gate(x)) * up(x))

and `drop` on the embeddings (Srivastava et al. 2014, JMLR 15; where GPT-2 has it, without that on attention weights,
which a fused attention does not form). In transformers' own training the masks are torch's; a run here keys them, see
`dropout`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from rft_models.own_decoder.architecture import MODEL_TYPE
from rft_models.own_decoder.dropout import BlockDropout


@strict
class RftDecoderConfig(Qwen3Config):
    """Qwen3's configuration, and two fields more."""

    model_type = MODEL_TYPE

    use_glu: bool = True
    """Gate the feed-forward part."""
    dropout: float | int = 0.0
    """Probability that training zeroes an entry."""


class FeedForward(nn.Module):
    """down(act(up(x))): the feed-forward part without a gate."""

    def __init__(self, config: RftDecoderConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(self.act_fn(self.up_proj(hidden)))


class RftDecoderLayer(Qwen3DecoderLayer):
    """A pre-norm block with dropout on what it adds; the first one drops entries of the embeddings too."""

    def __init__(self, config: RftDecoderConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if not config.use_glu:
            self.mlp = FeedForward(config)
        self.drop_embedding = BlockDropout(config.dropout) if layer_idx == 0 else None
        self.drop_attention = BlockDropout(config.dropout)
        self.drop_mlp = BlockDropout(config.dropout)

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        """[B, T, D] -> [B, T, D]; the arguments are those of `Qwen3DecoderLayer`."""
        if self.drop_embedding is not None:
            hidden_states = self.drop_embedding(hidden_states)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **arguments)
        hidden_states = hidden_states + self.drop_attention(attended)
        return hidden_states + self.drop_mlp(self.mlp(self.post_attention_layernorm(hidden_states)))


class RftDecoderModel(Qwen3Model):
    """The decoder without its head."""

    config_class = RftDecoderConfig
    _no_split_modules: ClassVar[list[str]] = ["RftDecoderLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        **(Qwen3Model._can_record_outputs or {}),
        "hidden_states": RftDecoderLayer,
    }

    def __init__(self, config: RftDecoderConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([RftDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.post_init()


class RftDecoderForCausalLM(Qwen3ForCausalLM):
    """The decoder with its output matrix."""

    config_class = RftDecoderConfig
    _no_split_modules: ClassVar[list[str]] = ["RftDecoderLayer"]

    def __init__(self, config: RftDecoderConfig) -> None:
        super().__init__(config)
        self.model = RftDecoderModel(config)
        self.post_init()
