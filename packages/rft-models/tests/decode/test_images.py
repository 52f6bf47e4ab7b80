"""The decode forward with images gives the log-probabilities of the packed forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rft_core.packed_tokens import PackedTokens
from rft_models.decode.fast_decoder import DecodableModel, FastDecoder, decoder_for
from rft_models.decode.hf_decoder import HfDecoder
from rft_models.decode.weight_copy import GenerationCopy
from rft_models.families.vision import VISION_FAMILIES
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor

FAMILIES = sorted(VISION_FAMILIES)
NUM_NEW = 6
COPIES = [2, 1, 2]


def prompts_of(policy: CausalPolicy) -> list[tuple[list[int], Media | None]]:
    tokenizer = policy.tokenizer
    assert isinstance(tokenizer, HfProcessor)
    generator = torch.Generator().manual_seed(2)
    images = [
        Image.fromarray(torch.randint(0, 256, (h, w, 3), generator=generator, dtype=torch.uint8).numpy())
        for h, w in ((16, 24), (32, 16))
    ]
    return [
        tokenizer.encode_media("what is <image>? ", images[:1]),
        (tokenizer.encode("only text here "), None),
        tokenizer.encode_media("<image><image>", images),  # nothing stands behind the last one
    ]


def decoded_logits(
    decoder: DecodableModel, prompts: list[tuple[list[int], Media | None]], continuations: list[list[int]]
) -> torch.Tensor:
    """[rows, NUM_NEW, V]: prefill, then the given tokens; a row leaves in the middle and comes again."""
    longest = max(len(tokens) for tokens, _ in prompts)
    ids = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in prompts])
    lengths = torch.tensor([len(tokens) for tokens, _ in prompts])
    cache = decoder.new_cache(8, 200)
    # the last two enter while the first are being decoded
    first = decoder.prefill(cache, ids[:1], lengths[:1], COPIES[:1], [prompts[0][1]])
    rest = decoder.prefill(cache, ids[1:], lengths[1:], COPIES[1:], [media for _, media in prompts[1:]])
    steps = [torch.cat([first, rest]).repeat_interleave(torch.tensor(COPIES), 0)]
    for step in range(NUM_NEW - 1):
        tokens = torch.tensor([row[step] for row in continuations])
        steps.append(decoder.step(cache, tokens))
    whole = torch.stack(steps, 1)
    cache.keep(torch.tensor([1, 2, 4]))
    later = decoder.step(cache, torch.tensor([continuations[row][NUM_NEW - 1] for row in (1, 2, 4)]))
    return torch.cat([whole[[1, 2, 4]], later[:, None]], 1)


def packed_logprobs(
    policy: CausalPolicy, prompts: list[tuple[list[int], Media | None]], continuations: list[list[int]]
) -> torch.Tensor:
    """[3, NUM_NEW + 1] of the rows that stay, by the training forward."""
    owners = [prompts[p] for p, copies in enumerate(COPIES) for _ in range(copies)]
    found = []
    for row in (1, 2, 4):
        tokens, media = owners[row]
        whole = tokens + continuations[row]
        logprobs, _ = policy.token_logprobs(
            PackedTokens(
                torch.tensor(whole),
                torch.arange(len(whole)),
                torch.zeros(len(whole), dtype=torch.int64),
                torch.arange(len(whole)) >= len(tokens),
                mm_inputs=(media,),
            ),
        )
        found.append(logprobs[len(tokens) :])
    return torch.stack(found)


def check(decoder: Any, policy: CausalPolicy) -> None:
    prompts = prompts_of(policy)
    generator = torch.Generator().manual_seed(3)
    text_ids = policy.tokenizer.encode("abcdefgh123")  # type: ignore[union-attr]
    picks = torch.randint(0, len(text_ids), (sum(COPIES), NUM_NEW + 1), generator=generator)
    continuations = [[text_ids[at] for at in row] for row in picks.tolist()]
    continuations[4][2] = policy.tower.image_token_id  # type: ignore[union-attr]  # sampled, it is a word as any other
    logits = decoded_logits(decoder, prompts, continuations)
    wanted = torch.tensor([continuations[row] for row in (1, 2, 4)])
    found = logits.log_softmax(-1).gather(2, wanted[:, :, None])[:, :, 0]
    with torch.no_grad():
        expected = packed_logprobs(policy, prompts, continuations)
    assert float((found - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("model_type", FAMILIES)
def test_both_decoders_agree_with_the_packed_forward(vision_directory: Callable[[str], Path], model_type: str) -> None:
    policy = load_policy(vision_directory(model_type))
    assert isinstance(decoder_for(policy), FastDecoder)
    check(decoder_for(policy), policy)
    check(HfDecoder(policy), policy)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "llava"])
def test_a_copy_of_the_weights_sees_too(vision_directory: Callable[[str], Path], model_type: str) -> None:
    policy = load_policy(vision_directory(model_type))
    twin = GenerationCopy(policy)
    twin.begin()
    for name, tensor in policy.named_parameters():
        twin.write(name, tensor)
    twin.finish()
    check(twin, policy)
