"""Engines draw the same tokens after prompts with images, with the log-probabilities of the packed forward."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_core.packed_tokens import PackedTokens
from rft_engine.completions import Completion
from rft_engine.hf_engine import HfEngine
from rft_engine.native.copied_weights import NativeEngineOnCopy
from rft_engine.native.engine import NativeEngine
from rft_models.decode.fast_decoder import decoder_for
from rft_models.decode.hf_generate import HfGenerator
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.families.vision import VISION_FAMILIES
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor

SIZES = VisionSizes(hidden=32, ffn=48, vision_hidden=32, max_positions=256)
KEYS = [[10, 11], [20], [30, 31, 32], [40]]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0, "max_new_tokens": 7},
    {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 5, "stop_token_ids": tuple(range(2, 12))},
    {"temperature": 0.0, "max_new_tokens": 4},
]


def policy_of(path: Path, model_type: str) -> CausalPolicy:
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
    return load_policy(build_vision_model(path, tokenizer, model_type=model_type, sizes=SIZES, seed=4, init_std=0.2))


def prompts_of(policy: CausalPolicy) -> tuple[list[list[int]], list[Media | None]]:
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    generator = torch.Generator().manual_seed(7)
    images = [
        Image.fromarray(torch.randint(0, 256, (h, w, 3), generator=generator, dtype=torch.uint8).numpy())
        for h, w in ((16, 24), (32, 16))
    ]
    pairs = [
        tokenizer.encode_media("<image>what is it? ", images[:1]),
        (tokenizer.encode("no image "), None),
        tokenizer.encode_media("is <image> like <image>", images),
        tokenizer.encode_media("<image>what is it? ", images[1:]),
    ]
    return [ids for ids, _ in pairs], [media for _, media in pairs]


def packed_logprobs(
    policy: CausalPolicy, prompt: list[int], media: Media | None, completion: Completion, temperature: float
) -> list[float]:
    tokens = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logprobs, _ = policy.token_logprobs(
            PackedTokens(
                torch.tensor(tokens),
                torch.arange(len(tokens)),
                torch.zeros(len(tokens), dtype=torch.int64),
                torch.arange(len(tokens)) >= len(prompt),
                mm_inputs=(media,),
            ),
            temperature=temperature or 1.0,
        )
    return logprobs[len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", sorted(VISION_FAMILIES))
def test_engines_draw_the_same_and_score_as_the_packed_forward(tmp_path: Path, model_type: str) -> None:
    policy = policy_of(tmp_path / "model", model_type)
    prompts, media = prompts_of(policy)
    copied = NativeEngineOnCopy(GenerationCopy(policy), policy.named_parameters, max_rows=8, max_len=200)
    copied.refresh()
    engines = {
        "one by one": NativeEngine(decoder_for(policy), max_rows=2, max_len=200),
        "copy": copied,
        "hf": HfEngine(HfGenerator(policy), max_rows=5, max_len=200),
    }
    native = NativeEngine(decoder_for(policy), max_rows=8, max_len=200)
    for options in OPTIONS:
        drawn = native.generate(prompts, KEYS, SamplingOptions(**options), media=media)
        for name, engine in engines.items():
            others = engine.generate(prompts, KEYS, SamplingOptions(**options), media=media)
            for one, other in zip(chain(*drawn), chain(*others), strict=True):
                assert one.token_ids == other.token_ids, name
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4), name
        for prompt, images, completions in zip(prompts, media, drawn, strict=True):
            for completion in completions:
                expected = packed_logprobs(policy, prompt, images, completion, options["temperature"])
                assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_another_image_is_another_answer(tmp_path: Path) -> None:
    policy = policy_of(tmp_path / "model", "qwen2_5_vl")
    prompts, media = prompts_of(policy)
    engine = NativeEngine(decoder_for(policy), max_rows=8, max_len=200)
    [[seen]] = engine.generate(prompts[:1], [[1]], SamplingOptions(**OPTIONS[0]), media=media[:1])
    [[same]] = engine.generate(prompts[:1], [[1]], SamplingOptions(**OPTIONS[0]), media=media[:1])
    [[unseen]] = engine.generate(prompts[:1], [[1]], SamplingOptions(**OPTIONS[0]))  # the placeholders' own embeddings
    assert seen == same
    assert seen.logprobs != unseen.logprobs
