"""Tiny random models of several architectures, built in memory, and one written model directory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rft_models.own_decoder.registration import register_own_decoder
from rft_models.tiny_models.text import build_character_model

sys.path.insert(0, str(Path(__file__).parent / "logprobs"))  # modules that its tests share
torch.set_num_threads(1)

VOCAB = 61

_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=96,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
)

_SPECIFIC: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 1.5},
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3},
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 5, "head_dim": 8},
    "mixtral": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "rft_decoder": {"head_dim": 16, "use_glu": False, "hidden_act": "gelu"},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 96},
}


def build_tiny_model(model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A transformers model with spread-out random weights: every path that is dropped changes the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_own_decoder()
    config = AutoConfig.for_model(model_type, **{**_SIZES, **_SPECIFIC.get(model_type, {}), **changes})
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(dtype)
            parameter.copy_(noise * 0.25 if parameter.dim() > 1 else parameter + 0.1 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """The builder itself: `tiny_model("qwen2", dtype=torch.float64)`."""
    return build_tiny_model


@pytest.fixture(scope="session")
def character_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_character_model(
        tmp_path_factory.mktemp("models") / "characters",
        alphabet="0123456789+= ",
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn=48,
        seed=3,
        max_positions=64,
        init_std=0.2,
    )


ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789?: \n"


@pytest.fixture(scope="session")
def vision_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Complete directories of tiny vision-language models, by `model_type`: each is made once."""
    from rft_models.tiny_models.text import build_character_tokenizer
    from rft_models.tiny_models.vision import VisionSizes, build_vision_model

    made: dict[str, Path] = {}
    sizes = VisionSizes(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, max_positions=256, vision_hidden=32)

    def directory(model_type: str) -> Path:
        if model_type not in made:
            path = tmp_path_factory.mktemp("vision") / model_type
            tokenizer = build_character_tokenizer(ALPHABET)
            made[model_type] = build_vision_model(
                path, tokenizer, model_type=model_type, sizes=sizes, seed=5, init_std=0.2
            )
        return made[model_type]

    return directory
