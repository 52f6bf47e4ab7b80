"""The widths of a model from its config.json alone, without weights, torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rft_core.errors import DataError
from rft_dist.planning.memory_estimate import DecoderSizes
from rft_models.families.registry import fast_decode_families
from rft_models.families.vision import VISION_FAMILIES, text_family
from rft_models.files.directories import existing_directory, read_config, read_json

_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
EXACT = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe")
"""Kinds whose number of parameters follows exactly; of others it is near."""
IMAGES_NOT_COUNTED = "config.json has a part for images, which is not counted"


def model_sizes(directory: str | Path) -> tuple[DecoderSizes, list[str]]:
    """Return the widths, and notes on the parts that they leave out.

    Raises:
        DataError: no directory, no config.json, or one without the widths.
    """
    path = existing_directory(directory)
    file, config = path / "config.json", read_config(path)
    text: Mapping[str, Any] = config.get("text_config") or config
    kind = str(text.get("model_type", config.get("model_type", "")))
    notes = [IMAGES_NOT_COUNTED] if text is not config else []
    if kind not in EXACT:
        notes.append(f"{kind or 'this model'} is counted as a decoder with gated feed-forward layers: nearly right")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", kind.startswith("gpt2"))))
    return _sizes(text, kind, tied, file), notes


def _sizes(config: Mapping[str, Any], kind: str, tied: bool, file: Path) -> DecoderSizes:
    width, layers, heads, vocab = (_required(config, name, file) for name in ("hidden", "layers", "heads", "vocab"))
    # `or` in place of a default, because config.json may hold null
    head_size = int(config.get("head_dim") or width // heads)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0)
    dense_ffn = int(config.get("intermediate_size") or config.get("n_inner") or 4 * width)
    # qwen2 has biases on queries, keys and values, which its config.json does not mention
    qwen_bias = kind.startswith("qwen2")
    bias = bool(config.get("attention_bias", qwen_bias)) or qwen_bias
    return DecoderSizes(
        vocab=vocab,
        hidden=width,
        layers=layers,
        query_width=heads * head_size,
        kv_width=int(config.get("num_key_value_heads") or heads) * head_size,
        # a mixture names the width of an expert beside that of a dense layer
        ffn=int(config.get("moe_intermediate_size") or dense_ffn) if experts else dense_ffn,
        tied=tied,
        num_experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
        shared_ffn=int(config.get("shared_expert_intermediate_size") or 0) if experts else 0,
        attention_bias=bias,
        output_bias=bias and not qwen_bias,
        ffn_bias=bool(config.get("mlp_bias", False)),
        head_norm=head_size if kind.startswith("qwen3") else 0,
        shared_gate=kind == "qwen2_moe",
    )


def decodes_joined(directory: str | Path) -> bool:
    """Return True for a family whose matrices the engine in this process joins before it decodes."""
    config = read_config(existing_directory(directory))
    text = config.get("text_config") or config
    kind = str(text.get("model_type", config.get("model_type", "")))
    # older files of vision-language models have no part of their own for the text
    seeing = VISION_FAMILIES.get(kind)
    families = seeing.text_types.values() if seeing is not None else [text_family(kind)]
    return not fast_decode_families().isdisjoint(families)


def max_positions(directory: str | Path) -> int | None:
    """Return the tokens that the model places; None where config.json does not say it."""
    config = read_json(existing_directory(directory) / "config.json")
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    return int(positions) if positions else None


def _required(config: Mapping[str, Any], name: str, file: Path) -> int:
    for key in _NAMES[name]:
        if config.get(key):
            return int(config[key])
    raise DataError(
        code="plan.unknown_sizes",
        what=f"{file.name} has none of {', '.join(_NAMES[name])}",
        where=str(file),
        why="memory is estimated from the widths of a decoder",
        do=f"add {_NAMES[name][0]} to {file}",
    )
