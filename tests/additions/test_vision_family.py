"""A vision family is added with one file and one row: images, packed forward, log-probs and decoding follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from additions import patchwise_family
from PIL import Image
from torch import Tensor

from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.decode.fast_decoder import FastDecoder, decoder_for
from rft_models.families.vision import VISION_FAMILIES, VisionFamily
from rft_models.files.vision_tower_sizes import tower_sizes
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.tiny_models.text import build_character_tokenizer
from rft_models.tiny_models.vision import VisionSizes, build_vision_model
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor

ROW = VisionFamily(
    name="Patchwise",
    marker=patchwise_family.MARKER,
    layout=patchwise_family.PatchwiseImages,
    tiny=patchwise_family.TinyPatchwise(),
    packed=False,
    default_text_type="llama",
)
SIZES = VisionSizes(hidden=32, ffn=48, vision_hidden=32, vision_ffn=32, vision_layers=1, image_size=8)
PATCHES = 4


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CausalPolicy:
    patchwise_family.register()
    monkeypatch.setitem(VISION_FAMILIES, "patchwise", ROW)
    tokenizer = build_character_tokenizer("abcdefghijklmnopqrstuvwxyz? ")
    build_vision_model(tmp_path, tokenizer, model_type="patchwise", sizes=SIZES, seed=5, init_std=0.2)
    return load_policy(tmp_path)


def prompts_of(policy: CausalPolicy) -> list[tuple[list[int], Media | None]]:
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    pixels = torch.randint(0, 256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    images = [Image.fromarray(one.numpy()) for one in pixels]
    return [
        tokenizer.encode_media("what is <image>? ", images[:1]),
        (tokenizer.encode("only text here "), None),
        tokenizer.encode_media("<image> or <image>", images),
    ]


def own_logits(policy: CausalPolicy, token_ids: Tensor, media: Media | None) -> Tensor:
    """[L, V] of one sequence by the forward of the class."""
    assert policy.tower is not None
    images = {} if media is None else policy.tower.own_inputs(token_ids, media)
    with torch.no_grad(), native_attention_mode(policy.model, packed=policy.packed):
        return policy.model(input_ids=token_ids[None], use_cache=False, **images).logits[0]


def test_one_row_and_one_file_are_a_vision_family(policy: CausalPolicy) -> None:
    assert policy.packed
    assert isinstance(policy.model, patchwise_family.PatchwiseForConditionalGeneration)
    sizes = tower_sizes(policy.where)
    assert sizes is not None
    assert (sizes.layers, sizes.hidden, sizes.patches_per_token) == (1, 32, 1)

    prompts = prompts_of(policy)
    assert [media.num_tokens if media else 0 for _, media in prompts] == [PATCHES + 1, 0, 2 * (PATCHES + 1)]
    segments = [torch.tensor(token_ids) for token_ids, _ in prompts]
    tokens = PackedTokens.of_segments(segments, mm_inputs=[media for _, media in prompts])
    logprobs_T, _ = policy.token_logprobs(tokens)
    alone = [own_logits(policy, s, media) for s, (_, media) in zip(segments, prompts, strict=True)]
    rows = [logits[:-1].log_softmax(-1).gather(1, s[1:, None])[:, 0] for logits, s in zip(alone, segments, strict=True)]
    torch.testing.assert_close(logprobs_T[tokens.targets_T], torch.cat(rows), atol=1e-5, rtol=0)
    logprobs_T.sum().backward()
    assert any("vision" in name and parameter.grad is not None for name, parameter in policy.named_parameters())

    decoder = decoder_for(policy)
    assert isinstance(decoder, FastDecoder)
    lengths = torch.tensor([len(segment) for segment in segments])
    padded = torch.nn.utils.rnn.pad_sequence(segments, batch_first=True)
    cache = decoder.new_cache(3, int(lengths.max()) + 2)
    first = decoder.prefill(cache, padded, lengths, [1, 1, 1], [media for _, media in prompts])
    torch.testing.assert_close(first, torch.stack([logits[-1] for logits in alone]), atol=1e-4, rtol=0)
    second = decoder.step(cache, torch.tensor([5, 6, 7]))
    longer = [torch.cat([s, torch.tensor([token])]) for s, token in zip(segments, (5, 6, 7), strict=True)]
    expected = [own_logits(policy, s, media)[-1] for s, (_, media) in zip(longer, prompts, strict=True)]
    torch.testing.assert_close(second, torch.stack(expected), atol=1e-4, rtol=0)
