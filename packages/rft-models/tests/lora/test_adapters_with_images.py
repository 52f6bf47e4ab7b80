"""Adapters on vision-language models: the tower's layers too, folded in and decoded as computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import decoder_for
from rft_models.lora.adapters import AdapterRules, preview
from rft_models.policy.adaptation import add_adapters
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import build_vision_model
from rft_models.vision.processor import HfProcessor

ALPHABET = "abcdefghijklmnopqrstuvwxyz ?"


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "llava"])
def test_merged_weights_compute_what_the_adapters_compute_on_images(model_type: str, tmp_path: Path) -> None:
    path = build_vision_model(
        tmp_path / "model", build_character_tokenizer(ALPHABET), model_type=model_type, init_std=0.2
    )
    policy = load_policy(path)
    rules = AdapterRules(rank=2)
    adapters = add_adapters(policy, rules, seed=0)
    assert f"{adapters.num_parameters:,} weights are trained" in preview(str(path), rules)[0]
    assert any("visual" in name or "vision" in name for name in adapters.layers)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, parameter in adapters.named_parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    pixels = torch.randint(0, 256, (16, 24, 3), generator=generator, dtype=torch.uint8)
    prompt, media = tokenizer.encode_media("<image>what is it? ", [Image.fromarray(pixels.numpy())])
    ids = torch.tensor(prompt + tokenizer.encode("a cat"))
    places = torch.arange(len(ids))
    given = (ids, places, torch.zeros_like(ids), places >= len(prompt))
    found, _ = policy.token_logprobs(PackedTokens(*given, mm_inputs=(media,)))
    (found * torch.linspace(-1, 1, len(ids))).sum().backward()
    assert all(parameter.grad is not None for name, parameter in adapters.named_parameters() if "language" in name)
    policy.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        merged, _ = load_policy(tmp_path / "merged").eval().token_logprobs(PackedTokens(*given, mm_inputs=(media,)))
        base, _ = load_policy(path).eval().token_logprobs(PackedTokens(*given, mm_inputs=(media,)))
    torch.testing.assert_close(merged, found.detach(), atol=1e-5, rtol=1e-5)
    assert (base - merged).abs().max() > 1e-3
    decoder = decoder_for(policy.eval())
    cache = decoder.new_cache(1, len(ids))
    rows = [decoder.prefill(cache, ids[None, : len(prompt)], torch.tensor([len(prompt)]), [1], media=[media])[0]]
    rows += [decoder.step(cache, ids[place : place + 1])[0] for place in range(len(prompt), len(ids) - 1)]
    drawn = torch.stack(rows).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
    torch.testing.assert_close(drawn, merged[len(prompt) :], atol=1e-5, rtol=1e-5)
