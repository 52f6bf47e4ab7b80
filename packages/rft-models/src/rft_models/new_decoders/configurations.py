"""The transformers configuration of a new decoder, a function for each family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rft_models.new_decoders.sizes import NewDecoderSizes


def configuration(sizes: NewDecoderSizes, tokenizer: Any) -> Any:
    """Return the configuration of a decoder of these sizes for a transformers tokenizer."""
    common = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "intermediate_size": sizes.ffn_hidden_size,
        "max_position_embeddings": sizes.max_seq_len,
        "initializer_range": sizes.init_std,
        "tie_word_embeddings": sizes.tie_embeddings,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return _FAMILIES[sizes.family](sizes, common)


def _qwen3(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**common, head_dim=sizes.head_dim)


def _llama(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**common)


def _mixtral(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **common, sliding_window=None, num_local_experts=sizes.num_experts, num_experts_per_tok=sizes.top_k
    )


def _qwen3_moe(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **common,
        moe_intermediate_size=sizes.ffn_hidden_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        # the chosen experts' weights add up to 1, as in every published model of the family
        norm_topk_prob=True,
    )


def _qwen2_moe(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import Qwen2MoeConfig

    return Qwen2MoeConfig(
        **common,
        moe_intermediate_size=sizes.ffn_hidden_size,
        shared_expert_intermediate_size=sizes.shared_experts * sizes.ffn_hidden_size,
        num_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
    )


def _dots1(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from transformers import Dots1Config

    return Dots1Config(
        **common,
        moe_intermediate_size=sizes.ffn_hidden_size,
        n_shared_experts=sizes.shared_experts,
        n_routed_experts=sizes.num_experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        sliding_window=None,
    )


def _own(sizes: NewDecoderSizes, common: dict[str, Any]) -> Any:
    from rft_models.own_decoder.modeling import RftDecoderConfig

    return RftDecoderConfig(
        **common,
        head_dim=sizes.head_dim,
        use_glu=sizes.use_glu,
        hidden_act="silu" if sizes.use_glu else "gelu",
        dropout=sizes.dropout,
    )


_FAMILIES: dict[str, Callable[[NewDecoderSizes, dict[str, Any]], Any]] = {
    "qwen3": _qwen3,
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "dots1": _dots1,
    "own": _own,
}
