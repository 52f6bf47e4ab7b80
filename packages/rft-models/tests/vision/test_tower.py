"""The packed forward with images against transformers' own forward, one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from rft_core.errors import PreflightError, RftError
from rft_core.packed_tokens import PackedTokens
from rft_models.attention.hf_interface import native_attention_mode
from rft_models.families.vision import VISION_FAMILIES
from rft_models.layers.gradient_checkpointing import Checkpointing
from rft_models.policy.causal_policy import CausalPolicy
from rft_models.policy.load import load_policy
from rft_models.vision.media import Media
from rft_models.vision.processor import HfProcessor

FAMILIES = sorted(VISION_FAMILIES)
Segment = tuple[list[int], int, Media | None]
"""Token ids, tokens of the prompt, images."""


@contextmanager
def refused(code: str, words: str = "") -> Iterator[pytest.ExceptionInfo[RftError]]:
    """An error of this code, whose text has these words."""
    with pytest.raises(RftError, match=words) as caught:
        yield caught
    assert caught.value.problem.code == code


def noise_image(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def loaded(directory: Path, **options: Any) -> CausalPolicy:
    """With norms and biases that count, and no two layers alike."""
    policy = load_policy(directory, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return policy


def tokenizer_of(policy: CausalPolicy) -> HfProcessor:
    assert isinstance(policy.tokenizer, HfProcessor)
    return policy.tokenizer


def batch_of(policy: CausalPolicy) -> list[Segment]:
    """Two samples of one image prompt, a text row, the same words about another image, and a prompt of two images."""
    tokenizer = tokenizer_of(policy)
    first, other = noise_image(0), noise_image(1)
    shared, shared_media = tokenizer.encode_media("<image>what is it? ", [first])
    same_words, other_media = tokenizer.encode_media("<image>what is it? ", [other])
    double, double_media = tokenizer.encode_media("one <image> and <image> differ? ", [noise_image(2, 16, 24), first])
    text = tokenizer.encode("no image here: ")
    told = [tokenizer.encode(answer) for answer in ("a cat", "two dogs", "yes it is", "nine", "not at all")]
    return [
        (shared + told[0], len(shared), shared_media),
        (shared + told[1], len(shared), shared_media),
        (text + told[2], len(text), None),
        (same_words + told[3], len(same_words), other_media),
        (double + told[4], len(double), double_media),
    ]


def packed(segments: list[Segment]) -> PackedTokens:
    lengths = [len(tokens) for tokens, _, _ in segments]
    wanted = [torch.arange(length) >= prompt for length, (_, prompt, _) in zip(lengths, segments, strict=True)]
    return PackedTokens(
        torch.tensor([token for tokens, _, _ in segments for token in tokens]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        torch.cat(wanted),
        mm_inputs=tuple(media for _, _, media in segments),
    )


def own_logprobs(policy: CausalPolicy, segment: Segment) -> Tensor:
    """[L] of one sequence by transformers' own forward; 0 in the prompt."""
    tokens, prompt, media = segment
    ids = torch.tensor(tokens)
    tower = policy.tower
    assert tower is not None
    given = {} if media is None else tower.own_inputs(ids, media)
    with native_attention_mode(policy.model, packed=policy.packed):
        logits = policy.model(input_ids=ids[None], use_cache=False, **given).logits[0]
    logprobs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([logits.new_zeros(prompt), logprobs[prompt - 1 :]])


def gradients(policy: CausalPolicy, logprobs_T: Tensor) -> dict[str, Tensor]:
    weights = torch.linspace(0.5, 1.5, logprobs_T.shape[0], dtype=logprobs_T.dtype)
    policy.model.zero_grad(set_to_none=True)
    (logprobs_T * weights).sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    for name, value in expected.items():
        error = float((found[name] - value).norm()) / max(float(value.norm()), 1e-3 * largest)
        assert error < relative, f"{name}: {error:.2e}"


@pytest.mark.parametrize("attention", ["packed", "native"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_models_own_forward(
    vision_directory: Callable[[str], Path], model_type: str, attention: Any
) -> None:
    policy = loaded(vision_directory(model_type), attention=attention)
    segments = batch_of(policy)
    found, _ = policy.token_logprobs(packed(segments))
    expected = torch.cat([own_logprobs(policy, segment) for segment in segments])
    assert float((found - expected).abs().max()) < 1e-5
    of_packed = gradients(policy, found)
    assert any("vis" in name and float(value.abs().sum()) > 0 for name, value in of_packed.items())
    assert_close(of_packed, gradients(policy, expected), 1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_text_rows_do_not_change_beside_image_rows(vision_directory: Callable[[str], Path], model_type: str) -> None:
    policy = loaded(vision_directory(model_type))
    segments = batch_of(policy)
    mixed, _ = policy.token_logprobs(packed(segments))
    alone, _ = policy.token_logprobs(packed([segments[2]]))
    begin = sum(len(tokens) for tokens, _, _ in segments[:2])
    assert float((mixed[begin : begin + len(alone)] - alone).abs().max()) < 1e-5


def test_the_tower_runs_once_an_image_and_not_for_text(
    vision_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = loaded(vision_directory("qwen2_5_vl"))
    segments, calls = batch_of(policy), list[int]()
    own = policy.model.model.get_image_features

    def counted(pixel_values: Tensor, image_grid_thw: Tensor, **options: Any) -> Any:
        calls.append(len(image_grid_thw))
        return own(pixel_values, image_grid_thw, **options)

    monkeypatch.setattr(policy.model.model, "get_image_features", counted)
    policy.token_logprobs(packed(segments))
    assert calls == [3]  # five images in four segments, three of them distinct
    policy.token_logprobs(packed([segments[2]]))
    policy.token_logprobs(replace(packed([segments[2]]), mm_inputs=None))
    assert calls == [3]


def test_samples_of_one_image_prompt_share_it_and_other_images_do_not(
    vision_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = loaded(vision_directory("qwen3_vl"))
    segments = batch_of(policy)
    seen: list[int] = []
    own = policy.model.get_decoder().forward

    def counted(**given: Any) -> Any:
        seen.append(given["inputs_embeds"].shape[1])
        return own(**given)

    monkeypatch.setattr(policy.model.get_decoder(), "forward", counted)
    policy.token_logprobs(packed(segments[:2]))
    policy.token_logprobs(packed([segments[0], segments[3]]))
    lengths = [len(tokens) for tokens, _, _ in segments]
    assert seen == [lengths[0] + lengths[1] - segments[0][1], lengths[0] + lengths[3]]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fused_loss_and_recomputed_layers_give_the_same_gradients(
    vision_directory: Callable[[str], Path], model_type: str
) -> None:
    policy = loaded(vision_directory(model_type))
    row = packed(batch_of(policy))
    expected = gradients(policy, policy.token_logprobs(row)[0])
    weights = torch.linspace(0.5, 1.5, row.num_tokens)
    policy.model.zero_grad(set_to_none=True)
    policy.fused_loss(row, lambda logprobs, _, tokens: logprobs * weights[tokens]).loss.backward()
    assert_close({n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}, expected, 1e-5)
    again = loaded(vision_directory(model_type), gradient_checkpointing=Checkpointing())
    again.train()
    assert_close(gradients(again, again.token_logprobs(row)[0]), expected, 1e-5)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_ranks_that_gather_weights_use_the_tower_on_text_too(
    vision_directory: Callable[[str], Path], model_type: str
) -> None:
    policy = loaded(vision_directory(model_type))
    text = packed([batch_of(policy)[2]])
    expected, _ = policy.token_logprobs(text)
    policy.wrap_forward(lambda function, *arguments: function(*arguments))
    found, _ = policy.token_logprobs(text)
    assert float((found - expected).abs().max()) < 1e-5
    policy.model.zero_grad(set_to_none=True)
    found.sum().backward()
    used = {n for n, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad(set_to_none=True)
    policy.token_logprobs(packed(batch_of(policy)))[0].sum().backward()
    assert used == {n for n, p in policy.model.named_parameters() if p.grad is not None}


def test_media_that_do_not_fit_their_tokens_are_refused(vision_directory: Callable[[str], Path]) -> None:
    policy = loaded(vision_directory("qwen2_5_vl"))
    segments = batch_of(policy)
    tokens, prompt, media = segments[0]
    assert media is not None
    with refused("vision.cut_media") as cut:
        policy.token_logprobs(packed([(tokens[: media.end - 1], 2, media)]))
    assert f"{media.end - 1} tokens are kept, but the 1 images end at token {media.end}" in str(cut.value)
    with refused("vision.placeholders"):
        policy.token_logprobs(packed([(tokens[1:], prompt - 1, media)]))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_processor_that_counts_otherwise_is_refused(vision_directory: Callable[[str], Path], model_type: str) -> None:
    policy = loaded(vision_directory(model_type))
    tokens, prompt, media = batch_of(policy)[0]
    assert media is not None
    [(first, number)] = media.spans
    short = replace(media, images=(replace(media.images[0], num_tokens=number - 1),), spans=((first, number - 1),))
    with refused("vision.other_features", f"{number - 1} placeholders and {number} features"):
        policy.token_logprobs(packed([(tokens, prompt, short)]))


def test_a_text_model_refuses_images(vision_directory: Callable[[str], Path], character_directory: Path) -> None:
    media = batch_of(loaded(vision_directory("llava")))[0][2]
    policy = load_policy(character_directory)
    with refused("vision.no_tower"):
        policy.token_logprobs(packed([([3] * 20, 4, media)]))


def test_a_changed_tower_does_not_load(
    vision_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rft_models.vision import tower

    policy = load_policy(vision_directory("qwen2_vl"))
    policy.verify()
    own = tower.VisionTower.features

    def shifted(self: Any, images: Any) -> Any:
        found = own(self, images)
        return found._replace(main_FD=found.main_FD.roll(1, 0))

    monkeypatch.setattr(tower.VisionTower, "features", shifted)
    with pytest.raises(PreflightError) as caught:
        policy.verify()
    assert caught.value.problem.code == "models.forward_differs"
