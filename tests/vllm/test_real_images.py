"""vLLM's CPU build with images: tokens and log-probs beside the native engine's, before and after an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from rft_algos.decoding.sampling_options import SamplingOptions
from rft_engine.completions import Completion
from rft_engine.native.engine import NativeEngine
from rft_engine.vllm.engine import VllmEngine
from rft_engine.vllm.settings import VllmSettings
from rft_models.decode.fast_decoder import decoder_for
from rft_models.files.checkpoint_names import to_checkpoint_names
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.processor import HfProcessor

KEYS = [[1, 2], [3], [4, 5], [6]]


def drawn_images(generator: torch.Generator) -> list[Image.Image]:
    shapes = ((56, 84, 3), (112, 56, 3))
    return [Image.fromarray(torch.randint(0, 256, s, generator=generator, dtype=torch.uint8).numpy()) for s in shapes]


def flat(answers: Sequence[Sequence[Completion]]) -> list[Completion]:
    return [completion for row in answers for completion in row]


def test_prompts_with_images_are_continued_as_by_the_native_engine(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    sizes = VisionSizes(hidden=128, vision_hidden=128, patch_size=14, image_size=112, window_size=56)
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz ?")
    path = build_vision_model(tmp_path / "model", tokenizer, sizes=sizes, seed=4, init_std=0.1)
    policy = load_policy(path)
    assert isinstance(policy.tokenizer, HfProcessor)
    images = drawn_images(generator)
    pairs = [
        policy.tokenizer.encode_media("<image>what is it? ", images[:1]),
        (policy.tokenizer.encode("no image "), None),
        policy.tokenizer.encode_media("is <image> like <image>", images),
        policy.tokenizer.encode_media("<image>what is it? ", images[1:]),
    ]
    prompts, media = [ids for ids, _ in pairs], [one for _, one in pairs]
    native = NativeEngine(decoder_for(policy), max_rows=8, max_len=200)
    settings = VllmSettings(model_dir=path, max_rows=8, max_len=200, enforce_eager=True)
    engine = VllmEngine(settings, to_checkpoint_names(policy.model, policy.named_parameters))
    for version in (1, 2):
        engine.load_weights(version)
        native.load_weights(version)
        ours = flat(engine.generate(prompts, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=12), media=media))
        theirs = flat(native.generate(prompts, KEYS, SamplingOptions(temperature=1.0, max_new_tokens=12), media=media))
        assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        with torch.no_grad():
            for _, parameter in policy.named_parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    engine.close()
